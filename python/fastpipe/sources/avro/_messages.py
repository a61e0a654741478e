"""Avro messages: records without a file around them, as queues carry them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np

from fastpipe._arguments import shown
from fastpipe._arrow.schema import asked_for
from fastpipe._fastpipe import MessageDecoder as _NativeMessageDecoder
from fastpipe._fastpipe import Messages
from fastpipe.batch import Strings
from fastpipe.sources.avro._schemas import tell_left_out
from fastpipe.specs import Features, Spec, inferred

Framing: TypeAlias = Literal["single-object", "registry"] | None
_FRAMINGS = (None, "single-object", "registry")
_LARGEST_ID = 2**32 - 1


class MessageDecoder:
    r"""Decodes messages of Avro to batches, with schemas that are compiled once.

    The first schema decides about the columns; messages of others are read to the same columns, as files with other
    schemas are by `read_avro`. Calls from several threads are fine.

    Args:
        schema: the writer's schema, as JSON text, the name of a primitive type, or parsed JSON. With
            `framing="single-object"` also a list of schemas, or a mapping to schemas whatever its keys are; a union is
            given as JSON text there. With `framing="registry"` a mapping from number to schema, or a function that
            returns the schema of a number; it is called once a number.
        features: as in `read_avro`.
        columns: as in `read_avro`. With neither, all of the first schema is read. Lengths of arrays aren't in a schema,
            so arrays are inferred as ragged: `features` can say that they are of one shape.
        framing: what stands in front of each datum. None for nothing; `"single-object"` for C3 01 and the fingerprint
            of the schema (Avro 1.12, "Single-object encoding"); `"registry"` for a byte 0 and the number of the schema
            in a registry, four bytes, big-endian.
        num_threads: threads for many messages; as many as the process may use processors by default.

    Raises:
        SchemaError: if a schema doesn't parse or lacks a feature.
        UnsupportedError: for what isn't read, as in `read_avro`.
        LimitError: if a schema exceeds a limit.
        TypeError: if an argument is of the wrong type.
        ValueError: if arguments exclude each other or are out of range.

    Example:
        >>> import fastpipe
        >>> decoder = fastpipe.MessageDecoder({"type": "array", "items": "long"})
        >>> decoder([b"\x04\x02\x04\x00", b"\x00"])["value"].to_list()
        [[1, 2], []]
    """

    def __init__(
        self,
        schema: Any,
        *,
        features: Mapping[str, Spec] | None = None,
        columns: Sequence[str] | None = None,
        framing: Framing = None,
        num_threads: SupportsIndex | None = None,
    ) -> None:
        if framing not in _FRAMINGS:
            raise ValueError(f'framing is None, "single-object" or "registry", not {shown(framing)}')
        wanted, chosen = asked_for(features, columns)
        self._arguments = {"features": wanted, "columns": chosen, "framing": framing, "num_threads": num_threads}
        self._given = schema
        self._num_threads = None if num_threads is None else _positive(num_threads)
        self._handle = _NativeMessageDecoder(framing, chosen if wanted is None else wanted._lower())
        self._find: Callable[[int], Any] | None = None
        self._lock = threading.Lock()
        for key, text in self._texts(schema, framing):
            tell_left_out(dict(self._handle.add(text, key)), "warn")

    def _texts(self, schema: Any, framing: Framing) -> list[tuple[int | None, str]]:
        """Schemas as JSON, with the numbers by which messages name them."""
        if framing == "registry":
            if isinstance(schema, Mapping):
                return _nonempty([(_number(key), json_of(value)) for key, value in schema.items()])
            if callable(schema):
                self._find = schema
                return []
            raise TypeError(
                'with framing="registry", schema is a mapping from numbers to schemas, or a function from a number to '
                f"a schema, not {shown(schema)}"
            )
        if framing == "single-object":
            if isinstance(schema, Mapping) and "type" not in schema:
                return _nonempty([(None, json_of(value)) for value in schema.values()])
            if isinstance(schema, list | tuple):
                return _nonempty([(None, json_of(value)) for value in schema])
        return [(None, json_of(schema))]

    @property
    def features(self) -> Features:
        """The spec of each feature.

        Raises:
            ValueError: if the schemas are found by a function, and no message has named one yet.
        """
        self._check_ready()
        return inferred(self._handle.features())

    @property
    def symbols(self) -> dict[str, list[str]]:
        """For each enum that is read as codes its symbols."""
        return dict(self._handle.symbols())

    def __call__(self, messages: Iterable[Any] | Strings) -> dict[str, Any]:
        """Decodes messages to one batch.

        Args:
            messages: `bytes` or other contiguous buffers of bytes, one for each message: a list, an array of objects,
                or another iterable; or `Strings` of a batch, of bytes.

        Returns:
            What a reader of these features yields: a dict from feature name to array or batch form. Rows have the order
            of the messages; without messages there are no rows.

        Raises:
            MalformedFileError: if a message is cut short or damaged, has bytes behind its datum, or begins with another
                header than `framing` says.
            SchemaError: if a message names a schema that wasn't given, or one that lacks a feature.
            LimitError: if messages hold more items of no bytes than are read.
            ShapeError, ValueRangeError, NullValueError: if a value doesn't fit its spec.
            TypeError: if a message is no buffer of bytes.

        Errors of a message have its number as `record` and the byte in it as `offset`. What a function that finds
        schemas raises is passed on.
        """
        packed = _packed(messages)
        if self._find is not None:
            self._find_schemas(packed)
        return self._handle.decode(packed, self._num_threads)

    def _find_schemas(self, packed: Messages) -> None:
        find = self._find
        if find is None or not self._handle.unknown(packed):
            return self._check_ready()
        # A number is asked for once, whatever threads call.
        with self._lock:
            for key, _ in self._handle.unknown(packed):
                tell_left_out(dict(self._handle.add(json_of(find(key)), key)), "warn")
        return None

    def _check_ready(self) -> None:
        if not self._handle.is_ready:
            raise ValueError(
                "the columns aren't known yet, since the first schema decides about them: decode a message first, or "
                "give a mapping from numbers to schemas"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._given, self._arguments)

    def __repr__(self) -> str:
        return f"MessageDecoder(framing={self._arguments['framing']!r})"


def decode_messages(
    messages: Iterable[Any] | Strings,
    schema: Any,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: Sequence[str] | None = None,
    framing: Framing = None,
) -> dict[str, Any]:
    r"""Decodes messages of Avro to one batch: one call of a `MessageDecoder`, which is faster for several.

    Args:
        messages: as a `MessageDecoder` is called with.
        schema: as in `MessageDecoder`.
        features: as in `read_avro`.
        columns: as in `read_avro`.
        framing: as in `MessageDecoder`.

    Returns:
        A dict from feature name to array or batch form, with a row for each message.

    Raises:
        FastpipeError: as `MessageDecoder` and a call of it.
        TypeError: as these.
        ValueError: as these.

    Example:
        >>> import fastpipe
        >>> fastpipe.decode_messages([b"\x02", b"\x7f"], "long")
        {'value': array([ 1, -64])}
    """
    return MessageDecoder(schema, features=features, columns=columns, framing=framing)(messages)


def _again(schema: Any, arguments: dict[str, Any]) -> MessageDecoder:
    return MessageDecoder(schema, **arguments)


def _positive(number: SupportsIndex) -> int:
    try:
        threads = number.__index__()
    except AttributeError:
        raise TypeError(f"num_threads is a whole number, not {shown(number)}") from None
    if threads < 1:
        raise ValueError(f"num_threads must be at least 1, not {threads}")
    return threads


def _number(key: Any) -> int:
    if isinstance(key, bool) or not isinstance(key, int | np.integer):
        raise TypeError(f"a schema's number in a registry is an int, not {shown(key)}")
    if not 0 <= key <= _LARGEST_ID:
        raise ValueError(f"a schema's number in a registry is from 0 to {_LARGEST_ID}, not {key}")
    return int(key)


def _nonempty(found: list[tuple[int | None, str]]) -> list[tuple[int | None, str]]:
    if not found:
        raise ValueError("schema is empty: give at least one schema")
    return found


def json_of(schema: Any) -> str:
    """A schema as JSON."""
    if isinstance(schema, str):
        # What isn't JSON is the name of a primitive type.
        return schema if schema.lstrip()[:1] in ("{", "[", '"') else json.dumps(schema)
    if isinstance(schema, Mapping | list | tuple):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"schema can't be written as JSON: {error}") from error
    raise TypeError(f"a schema is JSON as text or parsed, not {shown(schema)}")


def _packed(messages: Iterable[Any] | Strings) -> Messages:
    if isinstance(messages, Strings):
        if not messages.binary or len(messages.shape) != 1:
            raise TypeError('messages as Strings are one a row, of dtype "bytes"')
        offsets = messages.offsets
        return Messages.joined(messages.values.tobytes(), offsets.tolist())
    if isinstance(messages, str | bytes | bytearray | memoryview):
        raise TypeError(f"messages is a sequence of bytes, not {type(messages).__name__}: a single one is [message]")
    if isinstance(messages, np.ndarray) and messages.ndim != 1:
        raise TypeError(f"messages as an array have one dimension, not {messages.ndim}")
    if isinstance(messages, np.ndarray) and messages.dtype.kind == "S":
        raise TypeError("NumPy cuts zero bytes off the end of what its dtype S has: give a list or an array of objects")
    try:
        listed = list(messages)
    except TypeError:
        raise TypeError(f"messages is a sequence of bytes, not {type(messages).__name__}") from None
    if set(map(type, listed)) - {bytes}:
        listed = [item if type(item) is bytes else _bytes(item, number) for number, item in enumerate(listed)]
    return Messages(listed)


def _bytes(item: Any, number: int) -> bytes:
    try:
        view = memoryview(item)
    except TypeError:
        raise TypeError(f"message {number} is {type(item).__name__}, not bytes") from None
    if view.format not in ("B", "b", "c"):
        raise TypeError(f"message {number} is a buffer of format {view.format!r}, not of bytes")
    return view.tobytes()
