"""The same batches made with fastavro: what the demo measures the reader against."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastpipe._demo_batches import Batch
from fastpipe.avro._schema_fields import Names
from fastpipe.batch import Masked, Ragged, Sparse, Strings
from fastpipe.specs import SparseSpec, Spec


class Column:
    """Makes of fastavro's records what fastpipe makes of the file, for an inferred feature.

    It walks the schema once, so that a record costs no more than getting at the value; arrays of plain values are taken
    as they are.
    """

    def __init__(self, schema: Any, name: str, spec: Spec) -> None:
        self._names = Names(schema)
        self._shape = spec.shape
        self._dtype = spec.dtype
        self._codes: dict[str, int] | None = None
        self._nullable = [False] * (len(spec.shape) + 1)
        self._sparse = isinstance(spec, SparseSpec)
        path = name.split(".")
        if "fields" not in self._names.resolve(schema):
            path = path[1:]  # The name "value" stands for the root.
        self._get = self._getter(schema, path, 0) or (lambda record: record)

    def _getter(self, schema: Any, path: list[str], level: int) -> Callable[[Any], Any] | None:
        """How to get from a value of the schema to the nested lists of the feature; None if it is them already."""
        schema, nullable = self._names.value(schema)
        self._nullable[level] |= nullable
        get: Callable[[Any], Any] | None = None
        if self._sparse and not path:
            pass
        elif "fields" in schema:
            of_field = next(f["type"] for f in schema["fields"] if f["name"] == path[0])
            get = _then(operator.itemgetter(path[0]), self._getter(of_field, path[1:], level))
        elif schema["type"] == "array":
            get = _each(self._getter(schema["items"], path, level + 1))
        elif schema["type"] == "map" and path[0] == "keys":
            get = list
        elif schema["type"] == "map":
            get = _then(dict.values, _each(self._getter(schema["values"], path[1:], level + 1)) or list)
        elif schema["type"] == "enum" and self._dtype != "string":
            self._codes = {symbol: code for code, symbol in enumerate(schema["symbols"])}
        return _unless_null(get) if nullable else get

    def convert(self, records: list[Any]) -> Any:
        """The feature of these records."""
        get = self._get
        rows = [get(record) for record in records]
        return self._coordinates(rows) if self._sparse else self._node(rows, 0)

    def _coordinates(self, rows: list[Any]) -> Any:
        there = [row for row in rows if row is not None]
        names = [f"indices{i}" for i in range(len(self._shape))]
        lengths = [0 if row is None else len(row["values"] or ()) for row in rows]
        columns = [np.repeat(np.arange(len(rows)), lengths)]
        columns += [np.fromiter(_chain(row[name] or () for row in there), np.int64) for name in names]
        indices = np.column_stack(columns)
        sizes = [
            int(column.max(initial=-1)) + 1 if n is None else n
            for column, n in zip(columns[1:], self._shape, strict=True)
        ]
        values = self._leaf(list(_chain(row["values"] or () for row in there)), (len(indices),))
        node = Sparse(indices, values, np.array([len(rows), *sizes]))
        if not self._nullable[0]:
            return node
        return Masked(node, np.fromiter((row is not None for row in rows), bool, len(rows)))

    def _node(self, rows: list[Any], level: int) -> Any:
        if None not in self._shape[level:]:
            return self._fixed(rows, level)
        valid = None
        if self._nullable[level]:
            valid = np.fromiter((row is not None for row in rows), bool, len(rows))
            rows = [() if row is None else row for row in rows]
        items = list(_chain(rows))
        node = Ragged(self._node(items, level + 1), _offsets(rows))
        return node if valid is None else Masked(node, valid)

    def _fixed(self, rows: list[Any], level: int) -> Any:
        shape = self._shape[level:]
        nullable = self._nullable[level:]
        # Fixed dimensions have one mask in all, at the innermost level that may be null.
        mask_level = max((i for i, null in enumerate(nullable) if null), default=None)
        valid = None
        values: Any = rows
        for i in range(len(shape) + 1):
            if i == mask_level:
                valid = np.fromiter((value is not None for value in values), bool, len(values)).reshape(
                    len(rows), *shape[:i]
                )
            if i < len(shape):
                if mask_level is not None:
                    blank = [None] * int(shape[i] or 0)
                    values = [blank if value is None else value for value in values]
                values = _chain(values)
                if mask_level is not None or i + 1 < len(shape):
                    values = list(values)
        if mask_level is not None:
            empty: Any = {"string": "", "bytes": b""}.get(self._dtype, next(iter(self._codes)) if self._codes else 0)
            values = [empty if value is None else value for value in values]
        node = self._leaf(values, (len(rows), *shape))
        return node if valid is None else Masked(node, valid)

    def _leaf(self, values: Iterable[Any], shape: tuple[Any, ...]) -> Any:
        if self._dtype in ("string", "bytes"):
            parts = [value.encode() for value in values] if self._dtype == "string" else list(values)
            return Strings(np.frombuffer(b"".join(parts), np.uint8), _offsets(parts), shape, self._dtype == "bytes")
        if self._codes is not None:
            values = map(self._codes.__getitem__, values)
        return np.fromiter(values, self._dtype).reshape(shape)


_chain = itertools.chain.from_iterable


def _then(get: Callable[[Any], Any], inner: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return get if inner is None else lambda value: inner(get(value))


def _each(get: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return get and (lambda values: [get(value) for value in values])


def _unless_null(get: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return get and (lambda value: None if value is None else get(value))


def _offsets(rows: Sequence[Any]) -> np.ndarray:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=offsets[1:])
    return offsets


def fastavro_batches(paths: Sequence[str], columns: Mapping[str, Column], batch_size: int) -> Generator[Batch]:
    """The batches of fastpipe, made with fastavro."""
    import fastavro

    def records() -> Iterator[Any]:
        for path in paths:
            with open(path, "rb") as file:
                yield from fastavro.reader(file)

    source = records()
    while rows := list(itertools.islice(source, batch_size)):
        yield {name: column.convert(rows) for name, column in columns.items()}


def same(a: Any, b: Any) -> bool:
    """Whether two features are equal: form, dtype, shape and every value that isn't null."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, Masked) and isinstance(a.values, np.ndarray) and isinstance(b.values, np.ndarray):
        shapes = a.values.shape == b.values.shape
        return shapes and same(a.valid, b.valid) and same(a.values[a.valid], b.values[b.valid])
    if isinstance(a, Strings) and (a.shape, a.binary) != (b.shape, b.binary):
        return False
    return all(same(x, y) for x, y in zip(a, b, strict=True))
