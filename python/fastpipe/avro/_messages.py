"""Avro messages: records without a container file, as message queues carry them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from fastpipe._arguments import shown
from fastpipe._fastpipe import MessageDecoder as _NativeMessageDecoder
from fastpipe._fastpipe import Messages
from fastpipe.avro._schemas import tell_left_out
from fastpipe.batch import Strings
from fastpipe.specs import Features, Spec, inferred
from fastpipe.specs._requests import FeatureRequest

Framing: TypeAlias = Literal["single-object", "registry"] | None
_FRAMINGS = (None, "single-object", "registry")
_LARGEST_ID = 2**32 - 1


class MessageDecoder:
    r"""Decodes Avro messages to batches, with schemas that are compiled once.

    The first schema determines the columns. Messages with other schemas are decoded to the same columns, just as
    `read_avro` reads files with different schemas. A decoder may be called from several threads.

    Args:
        schema: The writer's schema: JSON text, the name of a primitive type, or parsed JSON. With
            `framing="single-object"`, it can also be a list of schemas or a mapping whose values are schemas; pass a
            union as JSON text then. With `framing="registry"`, it is a mapping from ID to schema, or a function that
            returns the schema of an ID and is called once per ID.
        features: The spec of each feature to decode, by name. Dots name the fields of nested records (`user.age`), and
            the `keys` and `values` of maps. If the schema is not a record, its only feature is `value`.
        columns: The names of inferred features to decode, instead of `features`: a list, or one name as a string. By
            default, the whole first schema is decoded. A schema doesn't contain the lengths of arrays, so arrays are
            inferred as ragged; use `overrides` to give them a fixed shape.
        overrides: Specs that replace the inferred specs of some of these features, by name. Not allowed with
            `features`. Defaults to None: all specs are inferred.
        framing: The header of each message. None (the default) for no header; `"single-object"` for the bytes C3 01 and
            the fingerprint of the schema (Avro 1.12, "Single-object encoding"); `"registry"` for a zero byte and the
            four-byte, big-endian ID of the schema in a registry.
        num_threads: The number of threads for large numbers of messages, at least 1. Defaults to the number of
            processors that the process may use.

    Raises:
        SchemaError: If a schema can't be parsed or lacks a feature, or if `overrides` names a column that isn't
            inferred.
        UnsupportedError: If the type of a requested column is not supported.
        LimitError: If a schema exceeds a limit.
        TypeError: If an argument has the wrong type.
        ValueError: If arguments exclude each other or are out of range.

    Example:
        >>> import fastpipe
        >>> decoder = fastpipe.avro.MessageDecoder({"type": "array", "items": "long"})
        >>> decoder([b"\x04\x02\x04\x00", b"\x00"])["value"].to_list()
        [[1, 2], []]
    """

    def __init__(
        self,
        schema: Any,
        *,
        features: Mapping[str, Spec] | None = None,
        columns: str | Sequence[str] | None = None,
        overrides: Mapping[str, Spec] | None = None,
        framing: Framing = None,
        num_threads: int | None = None,
    ) -> None:
        if framing not in _FRAMINGS:
            raise ValueError(f'framing must be None, "single-object" or "registry"; got {shown(framing)}')
        self._request = FeatureRequest.of(features, columns, overrides)
        self._arguments: dict[str, Any] = {
            "features": self._request.features,
            "columns": self._request.columns,
            "overrides": self._request.overrides or None,
            "framing": framing,
            "num_threads": num_threads,
        }
        self._given = schema
        self._num_threads = None if num_threads is None else _positive(num_threads)
        wanted = self._request.features
        self._handle = _NativeMessageDecoder(framing, self._request.columns if wanted is None else wanted._lower())
        self._find: Callable[[int], Any] | None = None
        self._lock = threading.Lock()
        for key, text in self._texts(schema, framing):
            self._add(text, key)

    def _add(self, text: str, key: int | None) -> None:
        """Compiles a schema. The first one determines the columns."""
        if self._handle.is_ready or not self._request.overrides:
            tell_left_out(dict(self._handle.add(text, key)), "warn")
            return
        framing = self._arguments["framing"]
        first = _NativeMessageDecoder(framing, self._request.columns)
        left_out = dict(first.add(text, key))
        tell_left_out(left_out, "warn")
        features = self._request.changed(inferred(first.features()), left_out)
        handle = _NativeMessageDecoder(framing, features._lower())
        handle.add(text, key)
        self._handle = handle

    def _texts(self, schema: Any, framing: Framing) -> list[tuple[int | None, str]]:
        """Returns schemas as JSON, with the IDs that messages use for them."""
        if framing == "registry":
            if isinstance(schema, Mapping):
                return _nonempty([(_number(key), json_of(value)) for key, value in schema.items()])
            if callable(schema):
                self._find = schema
                return []
            raise TypeError(
                'with framing="registry", schema must be a mapping from IDs to schemas, or a function from an ID to '
                f"a schema; got {shown(schema)}"
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
            ValueError: If a function supplies the schemas and no message has named one yet.
        """
        self._check_ready()
        return inferred(self._handle.features())

    @property
    def categories(self) -> dict[str, list[str]]:
        """The categories of each feature that is read as codes. See `Reader.categories`."""
        return dict(self._handle.categories())

    def __call__(self, messages: Iterable[Any] | Strings) -> dict[str, Any]:
        """Decodes messages to one batch.

        Errors that concern one message have its index as `record` and the position in the message as `offset`. An
        exception from a function that supplies schemas propagates to the caller.

        Args:
            messages: One contiguous buffer of bytes, such as `bytes`, for each message: a list, an array of objects, or
                another iterable. `Strings` of bytes from a batch are also accepted.

        Returns:
            A dict from feature name to array or batch form, as a reader of these features yields it. Rows have the
            order of the messages. Without messages, the batch has no rows.

        Raises:
            MalformedFileError: If a message is truncated or damaged, has bytes after its datum, or has another header
                than `framing` requires.
            SchemaError: If a message names an unknown schema, or one that lacks a feature.
            LimitError: If messages contain too many zero-byte items.
            ShapeError, ValueRangeError, NullValueError: If a value doesn't fit its spec.
            TypeError: If a message is not a buffer of bytes.
        """
        packed = _packed(messages)
        if self._find is not None:
            self._find_schemas(packed)
        return self._handle.decode(packed, self._num_threads)

    def _find_schemas(self, packed: Messages) -> None:
        find = self._find
        if find is None or not self._handle.unknown(packed):
            return self._check_ready()
        # Several threads may call this, but each ID is looked up once.
        with self._lock:
            for key, _ in self._handle.unknown(packed):
                self._add(json_of(find(key)), key)
        return None

    def _check_ready(self) -> None:
        if not self._handle.is_ready:
            raise ValueError(
                "the columns aren't known yet because the first schema determines them: decode a message first, or "
                "pass a mapping from IDs to schemas"
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
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    framing: Framing = None,
) -> dict[str, Any]:
    r"""Decodes Avro messages to one batch. A `MessageDecoder` is faster for several calls.

    Args:
        messages: One contiguous buffer of bytes for each message, or `Strings` of bytes from a batch.
        schema: The writer's schema: JSON text, the name of a primitive type, or parsed JSON. With
            `framing="single-object"`, it can also be several schemas. With `framing="registry"`, it is a mapping from
            ID to schema, or a function that returns the schema of an ID.
        features: The spec of each feature to decode, by name. Dots name the fields of nested records (`user.age`), and
            the `keys` and `values` of maps. If the schema is not a record, its only feature is `value`.
        columns: The names of inferred features to decode, instead of `features`: a list, or one name as a string.
            Defaults to None: the whole first schema.
        overrides: Specs that replace the inferred specs of some of these features, by name. Not allowed with
            `features`. Defaults to None: all specs are inferred.
        framing: The header of each message: None (the default), `"single-object"` or `"registry"`.

    Returns:
        A dict from feature name to array or batch form, with a row for each message.

    Raises:
        FastpipeError: If a schema or a message can't be decoded; `MessageDecoder` lists the errors.
        TypeError: If an argument has the wrong type.
        ValueError: If arguments exclude each other or are out of range.

    Example:
        >>> import fastpipe
        >>> fastpipe.avro.decode_messages([b"\x02", b"\x7f"], "long")
        {'value': array([ 1, -64])}
    """
    decoder = MessageDecoder(schema, features=features, columns=columns, overrides=overrides, framing=framing)
    return decoder(messages)


def _again(schema: Any, arguments: dict[str, Any]) -> MessageDecoder:
    return MessageDecoder(schema, **arguments)


def _positive(number: int) -> int:
    try:
        threads = number.__index__()
    except AttributeError:
        raise TypeError(f"num_threads must be an integer; got {shown(number)}") from None
    if threads < 1:
        raise ValueError(f"num_threads must be at least 1; got {threads}")
    return threads


def _number(key: Any) -> int:
    if isinstance(key, bool) or not isinstance(key, int | np.integer):
        raise TypeError(f"the ID of a schema in a registry must be an int; got {shown(key)}")
    if not 0 <= key <= _LARGEST_ID:
        raise ValueError(f"the ID of a schema in a registry must be from 0 to {_LARGEST_ID}; got {key}")
    return int(key)


def _nonempty(found: list[tuple[int | None, str]]) -> list[tuple[int | None, str]]:
    if not found:
        raise ValueError("schema is empty: pass at least one schema")
    return found


def json_of(schema: Any) -> str:
    """Returns a schema as JSON."""
    if isinstance(schema, str):
        # Text that isn't JSON is the name of a primitive type.
        return schema if schema.lstrip()[:1] in ("{", "[", '"') else json.dumps(schema)
    if isinstance(schema, Mapping | list | tuple):
        try:
            return json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"schema can't be written as JSON: {error}") from error
    raise TypeError(f"a schema must be JSON text or parsed JSON; got {shown(schema)}")


def _packed(messages: Iterable[Any] | Strings) -> Messages:
    if isinstance(messages, Strings):
        if not messages.binary or len(messages.shape) != 1:
            raise TypeError('messages as Strings must have one message per row and dtype "bytes"')
        offsets = messages.offsets
        return Messages.joined(messages.values.tobytes(), offsets.tolist())
    if isinstance(messages, str | bytes | bytearray | memoryview):
        raise TypeError(f"messages must be a sequence of bytes; got {type(messages).__name__}. Pass [message] for one")
    if isinstance(messages, np.ndarray) and messages.ndim != 1:
        raise TypeError(f"an array of messages must have one dimension; got {messages.ndim}")
    if isinstance(messages, np.ndarray) and messages.dtype.kind == "S":
        raise TypeError("NumPy strips trailing zero bytes from arrays of dtype S: pass a list or an array of objects")
    try:
        listed = list(messages)
    except TypeError:
        raise TypeError(f"messages must be a sequence of bytes; got {type(messages).__name__}") from None
    if set(map(type, listed)) - {bytes}:
        listed = [item if type(item) is bytes else _bytes(item, number) for number, item in enumerate(listed)]
    return Messages(listed)


def _bytes(item: Any, number: int) -> bytes:
    try:
        view = memoryview(item)
    except TypeError:
        raise TypeError(f"message {number} must be bytes; got {type(item).__name__}") from None
    if view.format not in ("B", "b", "c"):
        raise TypeError(f"message {number} must be a buffer of bytes; got format {view.format!r}")
    return view.tobytes()
