"""Random schemas and data, written by others and read back equal under every projection."""

from __future__ import annotations

import io
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fastpipe

CHECKS = settings(suppress_health_check=list(HealthCheck))

SCALARS = {
    "null": st.none(),
    "boolean": st.booleans(),
    "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32),
    "double": st.floats(),
    "bytes": st.binary(max_size=12),
    "string": st.text(max_size=12),
}


@st.composite
def types(draw: st.DrawFn, depth: int = 3, union: bool = True) -> tuple[Any, st.SearchStrategy[Any]]:
    """An Avro type, and its values. Named types get their names in `named`."""
    kinds = [*SCALARS, "fixed", "enum"]
    if depth:
        kinds += ["array", "map", "record", "array"]
    if depth and union:
        kinds += ["nullable", "nullable", "single"]
    kind = draw(st.sampled_from(kinds))
    if kind in SCALARS:
        return kind, SCALARS[kind]
    if kind == "fixed":
        size = draw(st.integers(1, 5))
        return {"type": "fixed", "size": size}, st.binary(min_size=size, max_size=size)
    if kind == "enum":
        symbols = draw(st.lists(st.sampled_from("ABCDEFG"), min_size=1, unique=True))
        return {"type": "enum", "symbols": symbols}, st.sampled_from(symbols)
    if kind == "array":
        item, values = draw(types(depth - 1))
        return {"type": "array", "items": item}, st.lists(values, max_size=4)
    if kind == "map":
        value, values = draw(types(depth - 1))
        return {"type": "map", "values": value}, st.dictionaries(st.text(max_size=3), values, max_size=3)
    if kind == "record":
        fields = draw(st.lists(types(depth - 1), min_size=1, max_size=3))
        schema = {"type": "record", "fields": [{"name": f"f{i}", "type": t} for i, (t, _) in enumerate(fields)]}
        return schema, st.fixed_dictionaries({f"f{i}": v for i, (_, v) in enumerate(fields)})
    inner, values = draw(types(depth - 1, union=False))
    if kind == "single":
        return [inner], values
    assume(inner != "null")
    branches = ["null", inner] if draw(st.booleans()) else [inner, "null"]
    return branches, st.none() | values


def named(schema: Any, count: list[int]) -> Any:
    """The same schema with a name for each named type."""
    if isinstance(schema, list):
        return [named(s, count) for s in schema]
    if not isinstance(schema, dict):
        return schema
    schema = dict(schema)
    if schema.get("type") in ("record", "enum", "fixed"):
        count[0] += 1
        schema = {"name": f"T{count[0]}", **schema}
    for key in ("items", "values"):
        if key in schema:
            schema[key] = named(schema[key], count)
    if "fields" in schema:
        schema["fields"] = [{**f, "type": named(f["type"], count)} for f in schema["fields"]]
    return schema


@st.composite
def datasets(draw: st.DrawFn) -> tuple[Any, list[Any]]:
    fields = draw(st.lists(types(), min_size=1, max_size=5))
    if draw(st.booleans()) or len(fields) > 1:
        schema: Any = {"type": "record", "fields": [{"name": f"c{i}", "type": t} for i, (t, _) in enumerate(fields)]}
        values: Any = st.fixed_dictionaries({f"c{i}": v for i, (_, v) in enumerate(fields)})
    else:
        schema, values = fields[0]
    return named(schema, [0]), draw(st.lists(values, max_size=25))


def column(value: Any, symbols: list[str] | None = None) -> list[Any]:
    """The rows of a batch's feature as Python values: None for null, symbols for codes of enums."""
    rows = value.tolist() if isinstance(value, np.ndarray) else value.to_list()
    return rows if symbols is None else _named(rows, symbols)


def _named(value: Any, symbols: list[str]) -> Any:
    if isinstance(value, list):
        return [_named(v, symbols) for v in value]
    return None if value is None else symbols[value]


def expected_column(records: list[Any], name: str, root_is_record: bool) -> list[Any]:
    """What a feature should hold, from the records that fastavro reads."""
    path = name.split(".")
    rows = [_follow(record, path if root_is_record else path[1:]) for record in records]
    if any(_is_sparse(row) for row in rows):
        return [_entries(row) for row in rows]
    return rows


def _follow(value: Any, path: list[str]) -> Any:
    """Follows a path through records and maps; lists on the way stay lists, nulls stay null."""
    if isinstance(value, list):
        return [_follow(item, path) for item in value]
    if not isinstance(value, dict) or not path:
        return value
    if path[0] in value:
        return _follow(value[path[0]], path[1:])
    if path[0] == "keys":
        return list(value)
    return [_follow(item, path[1:]) for item in value.values()]


def _is_sparse(value: Any) -> bool:
    return isinstance(value, dict) and "indices0" in value


def _entries(value: dict[str, Any] | None) -> list[Any] | None:
    if value is None:
        return None
    dims = len(value) - 1
    indices = zip(*(value[f"indices{d}"] for d in range(dims)), strict=True)
    return [(index, item) for index, item in zip(indices, value["values"], strict=True)]


def same(a: Any, b: Any) -> bool:
    """Equality of values and types, in which NaN equals NaN."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and a == b


def is_record(schema: Any) -> bool:
    return isinstance(schema, dict) and schema["type"] == "record"


def check(path: str, schema: Any, records: list[Any], data: st.DataObject) -> None:
    features = fastpipe.infer_features(path)
    names = data.draw(st.lists(st.sampled_from(list(features)), min_size=1, unique=True)) if features else []
    assume(names)
    for chosen in (names, list(features)):
        reader = fastpipe.read_avro(
            path,
            features={name: features[name] for name in chosen},
            batch_size=data.draw(st.sampled_from([1, 2, 7, 1000])),
            num_threads=data.draw(st.integers(1, 3)),
        )
        batches = list(reader)
        for name in chosen:
            found = [value for batch in batches for value in column(batch[name], reader.symbols.get(name))]
            assert same(found, expected_column(records, name, is_record(schema))), name


@CHECKS
@given(
    datasets(), st.sampled_from(["null", "deflate", "snappy", "zstandard"]), st.sampled_from([1, 60, 16000]), st.data()
)
def test_written_by_fastavro(dataset: tuple[Any, list[Any]], codec: str, interval: int, data: st.DataObject) -> None:
    schema, records = dataset
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "x.avro")
        with open(path, "wb") as file:
            fastavro.writer(file, schema, records, codec=codec, sync_interval=interval)
        check(path, schema, records, data)


@pytest.fixture(scope="module")
def rewrite() -> Iterator[Any]:
    """Copies a file with the apache-avro crate."""
    program = os.environ.get("FASTPIPE_REWRITE")
    if not program:
        pytest.skip("FASTPIPE_REWRITE names no program; `make test` builds one")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:

        def copy(*fields: Any) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\t".join(map(str, fields)) + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield copy


@CHECKS
@given(
    datasets(), st.sampled_from(["null", "deflate", "snappy", "zstandard"]), st.sampled_from([1, 60, 16000]), st.data()
)
def test_written_by_apache_avro(
    rewrite: Any, dataset: tuple[Any, list[Any]], codec: str, interval: int, data: st.DataObject
) -> None:
    schema, records = dataset
    with tempfile.TemporaryDirectory() as folder:
        source, path = str(Path(folder) / "source.avro"), str(Path(folder) / "x.avro")
        buffer = io.BytesIO()
        fastavro.writer(buffer, schema, records)
        Path(source).write_bytes(buffer.getvalue())
        answer = rewrite(source, path, codec, interval)
        assert answer == "ok", answer
        with open(path, "rb") as file:  # Maps may have come out in another order.
            copied = list(fastavro.reader(file))
        assert len(copied) == len(records)
        check(path, schema, copied, data)


PADDED = {"type": "array", "items": {"type": "array", "items": ["null", "int"]}}
NUMBERS = st.none() | st.integers(-100, 100)


@CHECKS
@given(
    st.lists(st.lists(st.lists(NUMBERS, max_size=5), max_size=5), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(-9, 9),
    st.booleans(),
)
def test_padding_and_fills(records: list[Any], height: int, width: int, pad: int, mask: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "x.avro")
        with open(path, "wb") as file:
            fastavro.writer(file, PADDED, records, sync_interval=20)
        options: dict[str, Any] = {"nulls": "mask"} if mask else {"fill": -7}
        spec = fastpipe.DenseSpec((height, width), "int16", pad=pad, **options)
        (batch,) = fastpipe.read_avro(path, features={"value": spec}, batch_size=100)
    expected = np.full((len(records), height, width), pad, np.int16)
    valid = np.zeros(expected.shape, bool)
    for r, record in enumerate(records):
        for y, row in enumerate(record[:height]):
            for x, value in enumerate(row[:width]):
                expected[r, y, x] = (0 if mask else -7) if value is None else value
                valid[r, y, x] = value is not None
    found = batch["value"].values if mask else batch["value"]
    assert found.dtype == np.int16
    assert np.array_equal(found, expected)
    if mask:
        assert np.array_equal(batch["value"].valid, valid)


@CHECKS
@given(st.integers(1, 3), st.booleans(), st.booleans(), st.data())
def test_sparse_layouts(rank: int, ints: bool, text: bool, data: st.DataObject) -> None:
    index = "int" if ints else "long"
    names = data.draw(st.permutations([*(f"indices{d}" for d in range(rank)), "values"]))
    types_of = {name: {"type": "array", "items": index} for name in names}
    types_of["values"] = {"type": "array", "items": "string" if text else "double"}
    inner = {"type": "record", "name": "S", "fields": [{"name": n, "type": types_of[n]} for n in names]}
    schema = {"type": "record", "name": "R", "fields": [{"name": "s", "type": ["null", inner]}]}
    value = st.text(max_size=3) if text else st.floats(allow_nan=False)
    entry = st.tuples(*[st.integers(0, 40)] * rank, value)
    rows = data.draw(st.lists(st.none() | st.lists(entry, max_size=4), max_size=9))

    def record(entries: list[Any] | None) -> dict[str, Any]:
        if entries is None:
            return {"s": None}
        return {
            "s": {**{f"indices{d}": [e[d] for e in entries] for d in range(rank)}, "values": [e[-1] for e in entries]}
        }

    dtype = "string" if text else "float64"
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "x.avro")
        with open(path, "wb") as file:
            fastavro.writer(file, schema, [record(row) for row in rows], sync_interval=30)

        def read(layout: Any) -> list[Any]:
            spec = fastpipe.SparseSpec((None,) * rank, dtype, layout=layout, nulls="mask")
            return [b["s"] for b in fastpipe.read_avro(path, features={"s": spec}, batch_size=4)]

        coo, csr = read("coo"), read("csr")
    for start, a, b in zip(range(0, len(rows), 4), coo, csr, strict=True):
        chunk = rows[start : start + 4]
        flat = [(r, *e) for r, entries in enumerate(chunk) for e in entries or []]
        assert a.valid.tolist() == b.valid.tolist() == [entries is not None for entries in chunk]
        a, b = a.values, b.values
        shape = [len(chunk), *(max((e[d + 1] + 1 for e in flat), default=0) for d in range(rank))]
        assert a.dense_shape.tolist() == b.dense_shape.tolist() == shape
        assert a.indices.dtype == np.int64
        assert a.indices.shape == (len(flat), rank + 1)
        assert a.indices.tolist() == [list(e[:-1]) for e in flat]
        assert b.indices.reshape(-1, rank).tolist() == [list(e[1:-1]) for e in flat]
        assert b.offsets.tolist() == [0, *np.cumsum([len(entries or []) for entries in chunk]).tolist()]
        for found in (a, b):
            values = found.values.to_list() if text else found.values.tolist()
            assert values == [e[-1] for e in flat]
