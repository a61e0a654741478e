"""Reading numbers as the indices of their buckets, compared with numpy.searchsorted and with plain Python."""

from __future__ import annotations

import copy
import io
import json
import pickle
import sqlite3
import tempfile
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import oracle
import wire
from fastpipe import BucketSpec, DenseSpec, HashSpec, RaggedSpec, VocabularySpec
from fastpipe.specs._vocabularies import described

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def index(value: Any, edges: Any) -> int:
    """Returns the number of edges at or below a value, computed with exact arithmetic."""
    if not isinstance(value, int) and not np.isfinite(value):
        return len(edges) if value > 0 else 0
    return sum(Fraction(edge) <= Fraction(value) for edge in edges)


# --- Readers of the same numbers from each source ---


def avro(folder: Path, kind: str, values: list[Any], lists: list[Any]) -> fastpipe.Reader:
    number = {"integer": "long", "float": "double"}[kind]
    fields = {"x": ["null", number], "many": ["null", wire.list_of([number, "null"])]}
    rows = [{"x": value, "many": many} for value, many in zip(values, lists, strict=True)]
    with (folder / "a.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(wire.record("R", **fields)), rows, sync_interval=60)
    return lambda **options: fastpipe.read_avro(folder / "a.avro", **options)


def table(kind: str, values: list[Any], lists: list[Any]) -> Any:
    number = {"integer": pa.int64(), "float": pa.float64()}[kind]
    whole = pa.table({"x": pa.array(values, number), "many": pa.array(lists, pa.list_(number))})
    return pa.concat_tables([whole.slice(0, 2), whole.slice(2)])


def dictionary(kind: str, values: list[Any], lists: list[Any]) -> Any:
    whole = table(kind, values, lists).combine_chunks()
    return whole.set_column(0, "x", whole["x"].dictionary_encode())


def read_parquet(folder: Path, kind: str, values: list[Any], lists: list[Any]) -> fastpipe.Reader:
    parquet.write_table(table(kind, values, lists), folder / "a.parquet", row_group_size=3)
    return lambda **options: fastpipe.read_parquet(folder / "a.parquet", **options)


def read_csv(folder: Path, kind: str, values: list[Any], lists: list[Any]) -> fastpipe.Reader:
    text = "x,id\n" + "".join(f"{'' if value is None else repr(value)},7\n" for value in values)
    return lambda **options: fastpipe.read_csv(text.encode(), **options)


def read_sql(folder: Path, kind: str, values: list[Any], lists: list[Any]) -> fastpipe.Reader:
    pytest.importorskip("adbc_driver_sqlite")
    with sqlite3.connect(folder / "t.db") as connection:
        connection.execute(f"CREATE TABLE t (i INTEGER PRIMARY KEY, x {'INTEGER' if kind == 'integer' else 'REAL'})")
        connection.executemany("INSERT INTO t VALUES (?, ?)", enumerate(values))
    connection.close()
    return lambda **options: fastpipe.read_sql("SELECT x FROM t", f"sqlite:///{folder / 't.db'}", **options)


def messages(folder: Path, kind: str, values: list[Any], lists: list[Any]) -> fastpipe.Reader:
    number = {"integer": "long", "float": "double"}[kind]
    schema = wire.record("R", x=["null", number], many=["null", wire.list_of([number, "null"])])
    found = []
    for value, many in zip(values, lists, strict=True):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(copy.deepcopy(schema)), {"x": value, "many": many})
        found.append(out.getvalue())
    return lambda features, batch_size: [fastpipe.avro.decode_messages(found, schema, features=features)]


SOURCES: dict[str, Any] = {
    "avro": avro,
    "messages": messages,
    "arrow": lambda _, *data: lambda **options: fastpipe.from_arrow(table(*data), **options),
    "dictionary": lambda _, *data: lambda **options: fastpipe.from_arrow(dictionary(*data), **options),
    "parquet": read_parquet,
    "csv": read_csv,
    "sql": read_sql,
}
FLAT = ("csv", "sql")

near = [base + more for base in (0, 2**24, 2**53, -(2**53), 2**63 - 9, -(2**63) + 9) for more in range(-3, 4)]
integers = st.one_of(st.sampled_from(near), st.integers(-(2**63), 2**63 - 1))
floats = st.one_of(
    st.floats(allow_nan=False), st.integers(-9, 9).map(lambda n: n / 4), st.sampled_from([float(n) for n in near])
)


@st.composite
def cases(draw: Any) -> tuple[str, list[Any], list[Any], list[Any]]:
    """Draws the kind of the numbers, one number per row, one list per row, and the edges."""
    kind = draw(st.sampled_from(["integer", "float"]))
    numbers = integers if kind == "integer" else floats
    values = draw(st.lists(st.one_of(st.none(), numbers), min_size=1, max_size=9))
    many = st.lists(st.one_of(st.none(), numbers), max_size=5)
    lists = draw(st.lists(st.one_of(st.none(), many), min_size=len(values), max_size=len(values)))
    every = [value for value in values if value is not None]
    among = st.one_of(integers, floats.filter(np.isfinite), *([st.sampled_from(every)] if every else []))
    edges = draw(st.lists(among.filter(np.isfinite), min_size=1, max_size=9))
    return kind, values, lists, sorted({Fraction(edge): edge for edge in edges}.values())


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=10, deadline=None)
@given(case=cases(), dtype=st.sampled_from(["int64", "uint8", "int16"]), batch_size=st.integers(1, 10))
def test_buckets_match_exact_arithmetic(source: str, case: Any, dtype: str, batch_size: int) -> None:
    kind, values, lists, edges = case
    if source in ("csv", "sql"):
        values = [None if value is None or not np.isfinite(value) else value for value in values]
    features: Any = {
        "masked": BucketSpec(edges, field="x", on_null="mask", dtype=dtype),
        "filled": BucketSpec(edges, field="x", fill=99, dtype=dtype),
        "x": DenseSpec((), "int64" if kind == "integer" else "float64", on_null="mask"),
    }
    if source not in FLAT:
        features["many"] = BucketSpec(edges, on_null="mask", dtype=dtype)
    found: dict[str, list[Any]] = {name: [] for name in features}
    with tempfile.TemporaryDirectory() as folder:
        read = SOURCES[source](Path(folder), kind, values, lists)
        for batch in read(features=features, batch_size=batch_size):
            for name, form in batch.items():
                found[name] += oracle.rows(form)
            leaf = batch["filled"]
            assert leaf.dtype == dtype
    assert found["x"] == values
    assert found["masked"] == [None if value is None else index(value, edges) for value in values]
    assert found["filled"] == [99 if value is None else index(value, edges) for value in values]
    if "many" in found:
        row = lambda many: [None if value is None else index(value, edges) for value in many]  # noqa: E731
        assert found["many"] == [None if many is None else row(many) for many in lists]
    # NumPy rounds integers beyond 2**53, so it is compared only below that.
    every = np.array([value for value in values if value is not None], object)
    if all(abs(number) <= 2**53 for number in (*every, *edges)):
        expected = np.searchsorted(np.array(edges, float), every.astype(float), side="right").tolist()
        assert [place for place in found["masked"] if place is not None] == expected


# --- Types of numbers ---


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
def test_every_dtype_of_arrays(dtype: str) -> None:
    values = np.array([0, 1, 2, 3, 100], dtype)
    edges = [0.5, 2, 99]
    arrays: Any = {"x": values, "pair": np.stack([values, values[::-1]], 1)}
    features = {"x": BucketSpec(edges), "pair": BucketSpec(edges)}
    (batch,) = fastpipe.from_arrays(arrays, features=features, batch_size=9)
    assert batch["x"].tolist() == np.digitize(values, edges).tolist() == [0, 1, 2, 2, 3]
    assert oracle.rows(batch["pair"]) == np.digitize(arrays["pair"], edges).tolist()


def test_short_floats_are_compared_with_their_own_values() -> None:
    # The nearest float32 is above 0.1 by 1.5e-9, and the nearest float16 is below it by 2.4e-5.
    for dtype, edges in (("float32", [0.1 + 1e-9, 0.1 + 2e-9]), ("float16", [0.1 - 3e-5, 0.1 - 2e-5])):
        arrays = {"x": np.array([0.1], dtype)}
        (batch,) = fastpipe.from_arrays(arrays, features={"x": BucketSpec(edges)}, batch_size=1)
        assert batch["x"].tolist() == [1]


def test_large_unsigned_integers_are_exact() -> None:
    top = 2**64 - 1
    arrays = {"x": np.array([0, 2**63 - 1, 2**63, top - 1, top], "uint64")}
    (batch,) = fastpipe.from_arrays(arrays, features={"x": BucketSpec([2**63, top])}, batch_size=9)
    assert batch["x"].tolist() == [0, 0, 1, 1, 2]
    text = f"x\n{2**63 - 1}\n{2**63}\n{top}\n-1\n1e300\n".encode()
    (batch,) = fastpipe.read_csv(text, features={"x": BucketSpec([2**63, top])}, batch_size=9)
    assert batch["x"].tolist() == [0, 1, 2, 0, 2]


AVRO: list[tuple[Any, list[Any]]] = [
    ("int", [0, 1, 2, -3]),
    ("long", [0, 1, 2, -3]),
    ("float", [0.0, 1.0, 2.0, -3.0]),
    ("double", [0.0, 1.0, 2.0, -3.0]),
    (["int", "double"], [0, 1.0, 2, -3.0]),
    ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, [Decimal(n) for n in (0, 1, 2, -3)]),
    (
        {"type": "fixed", "name": "F", "size": 5, "logicalType": "decimal", "precision": 9, "scale": 1},
        [Decimal(n) for n in (0, 1, 2, -3)],
    ),
]


@pytest.mark.parametrize(("ty", "values"), AVRO, ids=str)
def test_every_type_of_avro(ty: Any, values: list[Any], tmp_path: Path) -> None:
    fields = {"x": ty, "again": wire.list_of(wire.list_of(copy.deepcopy(ty))), "map": {"type": "map", "values": "int"}}
    if isinstance(ty, dict) and "name" in ty:
        fields["again"] = wire.list_of(wire.list_of("F"))
    rows = [{"x": value, "again": [[], [value, value]], "map": {"a": 1, "b": 9}} for value in values]
    with (tmp_path / "a.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(wire.record("R", **fields)), rows)
    edges = [-1, 1, 1.5]
    features = {
        "x": BucketSpec(edges, dtype="int8"),
        "again": BucketSpec(edges),
        "items": BucketSpec([1], field="map.values"),
        "number": BucketSpec(edges, field="x", dtype="uint8"),
    }
    reader = fastpipe.read_avro(tmp_path, features=features, batch_size=9)
    (batch,) = reader
    expected = [1, 2, 3, 0]
    assert batch["x"].tolist() == batch["number"].tolist() == expected
    assert oracle.rows(batch["again"]) == [[[], [place, place]] for place in expected]
    assert sorted(oracle.rows(batch["items"])[0]) == [1, 1]
    assert reader.features["again"] == RaggedSpec((None, None), "int64")


def test_files_whose_number_types_differ(tmp_path: Path) -> None:
    for name, ty, value in (("1", "int", 2), ("2", "double", 1.5), ("3", "long", 2**53 + 1)):
        with (tmp_path / f"{name}.avro").open("wb") as file:
            fastavro.writer(file, fastavro.parse_schema(wire.record("R", x=ty)), [{"x": value}])
    reader = fastpipe.read_avro(tmp_path, features={"x": BucketSpec([1.75, 2**53 + 1])}, batch_size=9)
    assert next(iter(reader))["x"].tolist() == [1, 0, 2]


def test_defaults_of_a_readers_schema(tmp_path: Path) -> None:
    with (tmp_path / "a.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(wire.record("R", id="int")), [{"id": 1}])
    fields = [("whole", "long", 5), ("tenth", "float", 0.1), ("exact", "double", 0.1), ("items", None, [0, 5])]
    schema = wire.record("R", id="int")
    for name, ty, default in fields:
        schema["fields"].append({"name": name, "type": ty or wire.list_of("long"), "default": default})
    edges = [0.1, 3]
    features: Any = {name: BucketSpec(edges, on_null="mask") for name, *_ in fields}
    options: Any = {"reader_schema": json.dumps(schema), "batch_size": 1}
    (batch,) = fastpipe.read_avro(tmp_path, features=features, **options)
    # The nearest float32 is above 0.1.
    assert {name: oracle.rows(form)[0] for name, form in batch.items()} == {
        "whole": 2,
        "tenth": 1,
        "exact": 1,
        "items": [0, 2],
    }
    (batch,) = fastpipe.read_avro(tmp_path, features={"tenth": BucketSpec([0.1 + 1e-9])}, **options)
    assert batch["tenth"].tolist() == [1]


def test_integers_are_rounded_where_a_readers_schema_has_doubles(tmp_path: Path) -> None:
    with (tmp_path / "a.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(wire.record("R", x="long")), [{"x": 2**53 + 1}, {"x": 2**53 + 2}])
    options: Any = {"features": {"x": BucketSpec([2**53 + 1])}, "batch_size": 9}
    for schema, expected in ((None, [1, 1]), (json.dumps(wire.record("R", x="double")), [0, 1])):
        (batch,) = fastpipe.read_avro(tmp_path, reader_schema=schema, **options)
        assert batch["x"].tolist() == expected


def test_stored_values_of_nulls_have_no_effect() -> None:
    bits, numbers = pa.py_buffer(b"\x02"), pa.py_buffer(np.array([np.nan, 1.0]))
    column = pa.Array.from_buffers(pa.float64(), 2, [bits, numbers])
    (batch,) = fastpipe.from_arrow(pa.table({"x": column}), features={"x": BucketSpec([1], fill=7)}, batch_size=9)
    assert batch["x"].tolist() == [7, 1]


def test_decimals_of_arrow() -> None:
    prices = pa.array([Decimal("0.09"), Decimal("0.10"), None, Decimal("99.99")], pa.decimal128(9, 2))
    (batch,) = fastpipe.from_arrow(
        pa.table({"x": prices}), features={"x": BucketSpec([0.1, 99.99], fill=7)}, batch_size=9
    )
    assert batch["x"].tolist() == [0, 1, 7, 2]


def test_folders(tmp_path: Path) -> None:
    for year in (2023, 2024, 2026):
        folder = tmp_path / f"year={year}" / "city=Graz"
        folder.mkdir(parents=True)
        with (folder / "a.avro").open("wb") as file:
            fastavro.writer(file, fastavro.parse_schema(wire.record("R", id="int")), [{"id": 1}, {"id": 2}])
        parquet.write_table(pa.table({"id": [1, 2]}), folder / "a.parquet")
    features = {"year": BucketSpec([2024, 2025], dtype="int8")}
    for read in (fastpipe.read_avro, fastpipe.read_parquet):
        options: Any = {"partitioning": "hive", "batch_size": 9}
        (batch,) = read(tmp_path, features=features, **options)
        assert batch["year"].tolist() == [0, 0, 1, 1, 2, 2]
        with pytest.raises(fastpipe.errors.SchemaError, match="VocabularySpec and HashSpec read text"):
            read(tmp_path, features={"city": BucketSpec([1])}, **options)


@pytest.mark.parametrize("read", [fastpipe.read_avro, fastpipe.read_parquet])
def test_keys_of_integer_folders(read: Any, tmp_path: Path) -> None:
    for year in ("2023", "2024", "__HIVE_DEFAULT_PARTITION__"):
        folder = tmp_path / f"year={year}"
        folder.mkdir()
        with (folder / "a.avro").open("wb") as file:
            fastavro.writer(file, fastavro.parse_schema(wire.record("R", id="int")), [{"id": 1}])
        parquet.write_table(pa.table({"id": [1]}), folder / "a.parquet")
    features: Any = {
        "word": VocabularySpec(["2024", "2022"], field="year", on_unknown="bucket", fill=9),
        "hash": HashSpec(1000, field="year", on_null="mask"),
    }
    options: Any = {"partitioning": "hive", "batch_size": 9}
    reader = read(tmp_path, features=features, **options)
    for again in (reader, pickle.loads(pickle.dumps(reader))):
        (batch,) = again
        assert batch["word"].tolist() == [2, 0, 9]
        (hashed,) = fastpipe.read_csv(b"y\n2023\n2024\n", features={"y": HashSpec(1000)}, batch_size=9)
        assert oracle.rows(batch["hash"]) == [*hashed["y"].tolist(), None]
    with pytest.raises(fastpipe.errors.ValueRangeError, match="2023"):
        list(read(tmp_path, features={"year": VocabularySpec(["2024"], on_null="mask")}, **options))
    # The inferred feature is still an integer.
    (batch,) = read(tmp_path, columns=["year"], **options)
    assert oracle.rows(batch["year"]) == [2023, 2024, None]


# --- NaN, nulls and other errors ---


@pytest.mark.parametrize("source", ["avro", "messages", "arrow", "dictionary", "parquet"])
def test_nan_has_a_bucket_only_on_request(source: str, tmp_path: Path) -> None:
    values, lists = [1.0, float("nan"), None, float("inf")], [[float("nan")], [], None, [0.0]]
    read = SOURCES[source](tmp_path, "float", values, lists)
    spec = BucketSpec([1, 2], on_nan="bucket", fill=9)
    (batch,) = read(features={"x": spec, "many": spec}, batch_size=9)
    assert batch["x"].tolist() == [1, 3, 9, 2]
    assert oracle.rows(batch["many"]) == [[3], [], [], [0]]
    assert spec.size == 4
    for name in ("x", "many"):
        with pytest.raises(fastpipe.errors.ValueRangeError, match=r'NaN.*; on_nan="bucket" gives NaN') as caught:
            list(read(features={name: replace(spec, on_nan="error")}, batch_size=9))
        assert caught.value.feature == name


def test_nan_and_nulls_of_csv() -> None:
    text = b"x,y\n1,0\nNaN,0\n,0\n-inf,0\n"

    def read(spec: Any, **options: Any) -> Any:
        (batch,) = fastpipe.read_csv(text, features={"x": spec}, batch_size=9, **options)
        return oracle.rows(batch["x"])

    spec = BucketSpec([0], on_nan="bucket", on_null="mask")
    options: Any = {"null_values": [""]}
    assert read(spec, **options) == [1, 2, None, 0]
    with pytest.raises(fastpipe.errors.ValueRangeError, match='on_nan="bucket"'):
        read(replace(spec, on_nan="error"), **options)
    with pytest.raises(fastpipe.errors.NullValueError, match='is empty: on_null="mask" in its spec') as caught:
        read(replace(spec, on_null="error"), **options)
    assert caught.value.feature == "x"
    with pytest.raises(fastpipe.errors.ValueRangeError, match='cannot parse "a" as a number'):
        list(fastpipe.read_csv(b"x\na\n", features={"x": BucketSpec([0])}, batch_size=9))


@pytest.mark.parametrize("source", [name for name in SOURCES if name not in ("csv", "messages")])
def test_nulls_must_be_requested(source: str, tmp_path: Path) -> None:
    read = SOURCES[source](tmp_path, "integer", [1, None], [[], []])
    with pytest.raises(fastpipe.errors.NullValueError):
        list(read(features={"x": BucketSpec([1])}, batch_size=9))
    with pytest.raises(fastpipe.errors.SchemaError, match="the index that stands for a null"):
        read(features={"x": BucketSpec([1], on_null="fill")}, batch_size=9)


@pytest.mark.parametrize(
    ("ty", "match"),
    [
        ("string", "VocabularySpec and HashSpec read text"),
        ("boolean", "are of type boolean: read it with another spec"),
        ({"type": "long", "logicalType": "timestamp-micros"}, 'DenseSpec\\(\\(\\), "int64"\\)'),
        ({"type": "enum", "name": "E", "symbols": ["a"]}, "VocabularySpec"),
        (wire.list_of(wire.record("N", name="string", value="float")), "field=.*value"),
    ],
)
def test_avro_fields_without_buckets(ty: Any, match: str, tmp_path: Path) -> None:
    with (tmp_path / "a.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(wire.record("R", x=ty)), [])
    with pytest.raises(fastpipe.errors.SchemaError, match=match) as caught:
        fastpipe.read_avro(tmp_path, features={"x": BucketSpec([1])}, batch_size=1)
    assert caught.value.feature == "x"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (["a"], "VocabularySpec and HashSpec read text"),
        ([True], "are of type Boolean: read them with another spec"),
        ([np.datetime64(1, "s")], 'DenseSpec\\(\\(\\), "int64"\\)'),
    ],
)
def test_columns_without_buckets(values: Any, match: str) -> None:
    with pytest.raises(fastpipe.errors.SchemaError, match=match) as caught:
        fastpipe.from_arrow(pa.table({"x": values}), features={"x": BucketSpec([1])}, batch_size=1)
    assert caught.value.feature == "x"


# --- Specs ---


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: BucketSpec([]), ValueError, "1 to 65,536 numbers; got 0"),
        (lambda: BucketSpec(range(65_537)), ValueError, "got 65,537"),
        (lambda: BucketSpec([1, 1.0]), ValueError, "strictly ascending; got 1 before 1.0"),
        (lambda: BucketSpec([2, 1]), ValueError, "strictly ascending"),
        (lambda: BucketSpec([0.0, -0.0]), ValueError, "strictly ascending"),
        (lambda: BucketSpec([1, float("nan")]), ValueError, "edge 1 is nan"),
        (lambda: BucketSpec([1, float("inf")]), ValueError, "finite"),
        (lambda: BucketSpec([2**64]), ValueError, "64 bits"),
        (lambda: BucketSpec([True]), TypeError, "edge 0 is True"),
        (lambda: BucketSpec(["1"]), TypeError, "edge 0 is '1'"),
        (lambda: BucketSpec([Decimal(1)]), TypeError, "edge 0"),
        (lambda: BucketSpec(np.array([[1, 2]])), TypeError, "edge 0"),
        (lambda: BucketSpec(np.array([0], "M8[s]")), TypeError, "edge 0"),
        (lambda: BucketSpec({1, 2}), TypeError, "a set has no order"),
        (lambda: BucketSpec(7), TypeError, "a list or an array"),
        (lambda: BucketSpec("12"), TypeError, "a list or an array"),
        (lambda: BucketSpec([1], on_nan="drop"), ValueError, "on_nan must be"),
        (lambda: BucketSpec(range(128), dtype="int8"), ValueError, "must hold indices up to 128"),
        (lambda: BucketSpec([1], dtype="float32"), ValueError, "indices are integers"),
        (lambda: BucketSpec([1], fill="a"), TypeError, "fill"),
    ],
)
def test_arguments_are_checked(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_specs_are_values() -> None:
    specs = [
        BucketSpec([1, 2.5]),
        BucketSpec(np.array([1, 2], "float32"), field="a.b", dtype="int8", on_nan="bucket", fill=-1),
        BucketSpec(pa.array([1, 2]), on_null="mask"),
        BucketSpec([2**63, 2**64 - 1]),
    ]
    for spec in specs:
        for same in (eval(repr(spec), {"fastpipe": fastpipe}), pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
            assert same == spec
            assert hash(same) == hash(spec)
    assert len(set(specs)) == len(specs)
    assert repr(BucketSpec(range(1000), fill=0)) == "fastpipe.BucketSpec(<1,000 edges>, fill=0)"
    assert BucketSpec(range(65_536), dtype="int32").size == 65_537


def test_descriptions_of_specs_depend_on_the_edges() -> None:
    """Servers and caches compare these descriptions."""

    def text(*edges: float, **options: Any) -> str:
        return json.dumps(described(fastpipe.typing.Features({"x": BucketSpec(edges, **options)})))

    assert text(5, 10) == text(5.0, np.float64(10))
    assert len({text(5, 10), text(5, 11), text(5), text(5, 10, on_nan="bucket"), text(5, 10, fill=0)}) == 5


def test_readers_resume_at_every_step() -> None:
    arrays = {"x": np.arange(20)}

    def reader(*edges: float) -> fastpipe.Reader:
        options: Any = {"batch_size": 3, "shuffle": True, "seed": 1}
        return fastpipe.from_arrays(arrays, features={"x": BucketSpec(edges)}, **options)

    expected = [batch["x"].tolist() for batch in reader(5, 10)]
    for step in range(len(expected)):
        before = reader(5, 10)
        batches = iter(before)
        for _ in range(step):
            next(batches)
        after = reader(5.0, 10)
        after.load_state_dict(before.state_dict())
        assert [batch["x"].tolist() for batch in after] == expected[step:]
    assert [batch["x"].tolist() for batch in pickle.loads(pickle.dumps(reader(5, 10)))] == expected
