"""NaN is null in Arrow data if the spec has `fill=nan`. Any other NaN is a value."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import fastpipe
import wire
from every_source import Slices
from fastpipe import DenseSpec, RaggedSpec, SparseSpec
from fastpipe.specs import Spec

NAN = math.nan
ROWS = 60


class Source(NamedTuple):
    """Creates readers of the columns `id` and `x`, where `x` contains the given values."""

    read: Callable[..., fastpipe.Reader]
    values: list[float | None]


@pytest.fixture(
    scope="module", params=["csv", "avro", "table", "units", "parquet", "arrow file", "sql", "local service"]
)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    path = tmp_path_factory.mktemp("nan") / "rows"
    # SQLite has no NaN. In each batch the nulls and NaNs are in different rows.
    nan = None if request.param == "sql" else NAN
    values = [None if i % 5 == 0 else nan if i % 7 == 0 else i / 4 for i in range(ROWS)]
    table = pa.table({"id": range(ROWS), "x": pa.array(values, pa.float64(), from_pandas=False)})
    rows: list[dict[str, Any]] = table.to_pylist()
    readers: dict[str, Callable[..., fastpipe.Reader]] = {
        "csv": lambda **options: fastpipe.read_csv(path, null_values=["-"], **options),
        "avro": lambda **options: fastpipe.read_avro(path, **options),
        "table": lambda **options: fastpipe.from_arrow(table, **options),
        "units": lambda **options: fastpipe.read_units(Slices(table, 17, table.schema), **options),
        "parquet": lambda **options: fastpipe.read_parquet(path, **options),
        "arrow file": lambda **options: fastpipe.read_arrow(path, **options),
        "sql": lambda **options: fastpipe.read_sql("SELECT * FROM t", f"sqlite:///{path}", num_partitions=3, **options),
        "local service": lambda **options: (
            services.enter_context(fastpipe.service.LocalService(fastpipe.from_arrow(table, **options))).reader
        ),
    }
    if request.param == "csv":
        lines = [f"{row['id']},{'-' if row['x'] is None else row['x']}\n" for row in rows]
        path.write_text("id,x\n" + "".join(lines))
    elif request.param == "avro":
        with path.open("wb") as file:
            schema = fastavro.parse_schema(wire.record("R", id="long", x=["null", "double"]))
            fastavro.writer(file, schema, rows, sync_interval=100)
    elif request.param == "parquet":
        pq.write_table(table, path, row_group_size=17)
    elif request.param == "arrow file":
        feather.write_feather(table, path, chunksize=17)
    elif request.param == "sql":
        pytest.importorskip("adbc_driver_sqlite")
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x REAL)")
            connection.executemany("INSERT INTO t VALUES (?, ?)", [tuple(row.values()) for row in rows])
            connection.commit()
    elif request.param == "local service" and sys.platform != "linux":
        pytest.skip("processes share memory only on Linux")
    with contextlib.ExitStack() as services:
        yield Source(readers[request.param], values)


def features_of(spec: Spec) -> dict[str, Spec]:
    return {"id": DenseSpec((), "int64"), "x": spec}


def without_nan(values: list[Any]) -> list[Any]:
    return [None if value is None or math.isnan(value) else value for value in values]


def is_same(found: Any, expected: Any) -> bool:
    """Returns whether two values are the same. NaN equals NaN and nothing else."""
    return repr(found) == repr(expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_as_the_fill_value_is_null(source: Source, dtype: str) -> None:
    features = features_of(DenseSpec((), dtype, fill=NAN))
    reader, twin = (source.read(features=features, batch_size=16) for _ in range(2))
    table = pa.table(reader)
    assert table["x"].to_pylist() == without_nan(source.values)
    # The metadata of the table contains the specs.
    again = fastpipe.from_arrow(table, batch_size=16)
    assert again.features == features
    for record_batch, batch, other in zip(reader.to_arrow_reader(), twin, again, strict=True):
        missing = np.isnan(batch["x"])
        assert missing.any()
        assert np.array_equal(batch["x"], other["x"], equal_nan=True)
        assert record_batch["x"].null_count == missing.sum()
        assert fastpipe.to_arrow(batch, features).equals(record_batch)
        # Without specs, fastpipe can't know which NaNs represent nulls.
        assert fastpipe.to_arrow(batch)["x"].null_count == 0


@pytest.mark.parametrize(
    ("spec", "null"),
    [
        (DenseSpec((), "float64", on_null="mask"), None),
        (DenseSpec((), "float64", on_null="fill"), 0.0),
        (DenseSpec((), "float64", fill=-1), -1.0),
    ],
    ids=["mask", "zero", "fill"],
)
def test_nan_is_a_value_without_that_fill(source: Source, spec: Spec, null: float | None) -> None:
    reader = source.read(features=features_of(spec), batch_size=16)
    assert is_same(pa.table(reader)["x"].to_pylist(), [null if value is None else value for value in source.values])


@pytest.mark.parametrize("library", ["polars", "pandas", "duckdb"])
def test_data_frames_have_nulls(source: Source, library: str) -> None:
    module = pytest.importorskip(library)
    reader = source.read(features=features_of(DenseSpec((), "float64", fill=NAN)), batch_size=16)
    expected = without_nan(source.values)
    if library == "polars":
        assert module.DataFrame(reader)["x"].to_list() == expected
    elif library == "pandas":
        frame = pa.table(reader).to_pandas(types_mapper={pa.float64(): module.Float64Dtype()}.get)
        assert frame["x"].isna().tolist() == [value is None for value in expected]
    else:
        assert [x for (x,) in module.sql("SELECT x FROM reader").fetchall()] == expected


def test_ranks_have_the_nulls_of_their_rows(source: Source) -> None:
    features = features_of(DenseSpec((), "float64", fill=NAN))
    options: dict[str, Any] = {"features": features, "batch_size": 8, "shuffle": True, "seed": 3}
    ranks = [source.read(**options, rank=rank, world_size=2, on_uneven="allow") for rank in range(2)]
    rows = {row["id"]: row["x"] for reader in ranks for row in pa.table(reader).to_pylist()}
    assert [rows[i] for i in range(ROWS)] == without_nan(source.values)


def test_written_records_have_nulls(source: Source, tmp_path: Path) -> None:
    features = features_of(DenseSpec((), "float64", fill=NAN))
    path = tmp_path / "written.avro"
    fastpipe.write_avro(path, source.read(features=features, batch_size=16))
    schema: Any = fastpipe.avro.AvroFile(path).schema
    assert {field["name"]: field["type"] for field in schema["fields"]} == {"id": "long", "x": ["null", "double"]}
    with path.open("rb") as file:
        assert [row["x"] for row in fastavro.reader(file)] == without_nan(source.values)
    again = fastpipe.read_avro(path, features=features, batch_size=16)
    for batch, other in zip(again, source.read(features=features, batch_size=16), strict=True):
        assert np.array_equal(batch["x"], other["x"], equal_nan=True)


def test_inferred_floats_of_csv_have_nulls() -> None:
    reader = fastpipe.read_csv(b"a,b,c\n1.5,x,1\n,,2\nNA,NA,\n-2,y,3\n", batch_size=2)
    table = pa.table(reader)
    assert [table[name].to_pylist() for name in "ac"] == [[1.5, None, None, -2.0], [1, 2, None, 3]]
    assert table["b"].null_count == 0
    assert fastpipe.from_arrow(table, batch_size=2).features == reader.features


def lists(*levels: int | None) -> pa.DataType:
    """Returns a type of nested lists of doubles. Levels with a size are fixed-size lists."""
    kind = pa.float64()
    for size in reversed(levels):
        kind = pa.list_(kind, -1 if size is None else size)
    return kind


def sparse(dimensions: int) -> pa.DataType:
    indices = [(f"indices{i}", pa.list_(pa.int64())) for i in range(dimensions)]
    return pa.struct([*indices, ("values", lists(None))])


NESTED: dict[str, tuple[Any, Spec, list[Any]]] = {
    "list": (lists(None), RaggedSpec((None,), "float64", fill=NAN), [[1.0, None], [], [NAN, 2.0], [None]]),
    "list of pairs": (
        lists(None, 2),
        RaggedSpec((None, 2), "float32", fill=NAN),
        [[[1.0, None]], [], [[NAN, 2.0], [3.0, 4.0]], []],
    ),
    "list of lists": (
        lists(None, None),
        RaggedSpec((None, None), "float16", fill=NAN),
        [[[1.0], [None]], [], [[], [NAN, 2.0]], [[]]],
    ),
    "pair": (lists(2), DenseSpec((2,), "float16", fill=NAN), [[1.0, None], [2.0, 3.0], [NAN, 4.0], [5.0, 6.0]]),
    "padded": (
        lists(None),
        DenseSpec((2,), "float64", fill=NAN, pad=NAN),
        [[1.0, None], [2.0, 3.0], [NAN, 4.0], [5.0, NAN]],
    ),
    "coo": (
        sparse(1),
        SparseSpec((9,), "float32", fill=NAN),
        [{"indices0": [7, 3], "values": values} for values in ([1.0, None], [2.0, NAN], [3.0, 4.0], [5.0, 6.0])],
    ),
    "csr": (
        sparse(2),
        SparseSpec((9, 5), "float64", fill=NAN, layout="csr"),
        [{"indices0": [7, 3], "indices1": [1, 2], "values": values} for values in ([1.0, None], [2.0, NAN])],
    ),
}


def nulls_for_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: nulls_for_nan(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [nulls_for_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value


@pytest.mark.parametrize("origin", ["table", "units"])
@pytest.mark.parametrize(("kind", "spec", "rows"), NESTED.values(), ids=NESTED)
def test_values_in_lists_are_null(kind: Any, spec: Spec, rows: list[Any], origin: str, tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(rows, kind, from_pandas=False)})
    assert is_same(table["x"].to_pylist(), rows)

    def read() -> fastpipe.Reader:
        given: dict[str, Any] = {"features": {"x": spec}, "batch_size": 2}
        if origin == "table":
            return fastpipe.from_arrow(table, **given)
        return fastpipe.read_units(Slices(table, 3, table.schema), **given)

    reader, twin = read(), read()
    for record_batch, batch in zip(reader.to_arrow_reader(), twin, strict=True):
        record_batch.validate(full=True)
        assert fastpipe.to_arrow(batch, reader.features).equals(record_batch)
    streamed = pa.table(reader)
    assert streamed["x"].to_pylist() == nulls_for_nan(rows)
    again = fastpipe.from_arrow(streamed, batch_size=2)
    for batch, other in zip(again, twin, strict=True):
        assert is_same(fastpipe.to_arrow(batch).to_pylist(), fastpipe.to_arrow(other).to_pylist())
    path = tmp_path / "written.avro"
    fastpipe.write_avro(path, reader)
    if spec.dtype != "float16":  # Avro has no float16.
        written = pa.table(fastpipe.read_avro(path, features=again.features, batch_size=4))
        assert written["x"].to_pylist() == nulls_for_nan(rows)


def test_masks_of_batches_are_kept() -> None:
    spec = DenseSpec((), "float64", fill=NAN)
    masked = fastpipe.Masked(np.array([1.0, NAN, 3.0]), np.array([True, True, False]))
    assert fastpipe.to_arrow({"x": masked}, {"x": spec})["x"].to_pylist() == [1.0, None, None]
    assert is_same(fastpipe.to_arrow({"x": masked})["x"].to_pylist(), [1.0, NAN, None])
