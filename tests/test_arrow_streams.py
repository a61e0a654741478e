"""Readers as Arrow streams: what pyarrow, polars and DuckDB read from them, and which resources streams hold."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastpipe
import oracle
import processes
import samples
from fastpipe._arrow import features_of
from samples import SHUFFLES

# On platforms without wheels of these libraries, the other tests still run.
duckdb = pytest.importorskip("duckdb")
pl = pytest.importorskip("polars")

ROWS = 200

Make = Callable[..., fastpipe.Reader]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> samples.Data:
    return samples.write(tmp_path_factory.mktemp("streams"), [[20] * 5, [20] * 5], codec="deflate")


@pytest.fixture(scope="module", params=["avro", "interactions"])
def make(request: pytest.FixtureRequest, data: samples.Data) -> Make:
    """Returns a function that makes readers of 200 rows."""
    if request.param == "avro":
        return data.read
    ids = np.arange(100)
    positives = fastpipe.recsys.Interactions.from_arrays(ids % 20, ids % 20 + ids // 20)
    return lambda **options: fastpipe.recsys.read_interactions(
        positives, num_negatives=1, **{"shuffle": False, **options}
    )


def ids(table: pa.Table) -> list[Any]:
    return table[0].to_pylist()


def no_thread_is_left() -> bool:
    """Returns whether no thread of the pass is left, as far as the operating system reports threads."""
    return not sys.platform.startswith("linux") or samples.threads_are(0)


def damaged(folder: Path) -> fastpipe.Reader:
    """Returns a reader of 25 batches. Roughly the fifteenth can't be read."""
    data = samples.write(folder, [[20] * 5, [20] * 20])
    path = Path(data.paths[1])
    content = path.read_bytes()
    assert content.count(b"note 301") == 1
    path.write_bytes(content.replace(b"note 301", b"note \xff01"))
    return data.read(batch_size=20)


# --- Values ---


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize(
    "options", [{}, {"rank": 2, "world_size": 3, "on_uneven": "pad", "shard_by": "batch"}, {"epochs": 2}]
)
def test_a_stream_is_a_pass(make: Make, shuffle: Any, options: dict[str, Any]) -> None:
    options = {"batch_size": 16, "shuffle": shuffle} | ({"seed": 3} if shuffle else {}) | options
    reader, twin = make(**options), make(**options)
    for _ in range(2):
        record_batches, batches = list(reader.to_arrow_reader()), list(twin)
        assert reader.epoch == twin.epoch > 0
        assert len(record_batches) == len(batches) == len(reader)
        for record_batch, batch in zip(record_batches, batches, strict=True):
            assert record_batch.schema.names == list(batch)
            for name in ("id", "user", "label", "valid"):
                if name in batch:
                    assert record_batch[name].to_pylist() == batch[name].tolist()
        assert features_of(record_batches[0].schema) == reader.features


def test_states_count_what_the_stream_has_yielded(make: Make) -> None:
    reader = make(batch_size=16, shuffle=True, seed=3)
    stream = reader.to_arrow_reader()
    first = [stream.read_next_batch() for _ in range(4)]
    state = samples.through_json(reader.state_dict())
    again = make(batch_size=16, shuffle=True, seed=3)
    again.load_state_dict(state)
    rest = list(again.to_arrow_reader())
    whole = make(batch_size=16, shuffle=True, seed=3)
    assert pa.Table.from_batches(first + rest).equals(pa.table(whole))


def test_other_libraries_read_every_column(data: samples.Data) -> None:
    reader = data.read(batch_size=16)
    wanted = [samples.row(i) for i in range(ROWS)]
    table = pa.table(reader)
    assert pa.schema(reader).equals(table.schema, check_metadata=True)
    frames = {
        "pyarrow": table.to_pylist(),
        "polars": pl.DataFrame(reader).to_dicts(),
        "polars's from_arrow": pl.from_arrow(reader).to_list(),
        "polars scan": pl.scan_arrow_c_stream(reader).collect().to_dicts(),
        "duckdb": duckdb.sql("select * from reader").to_arrow_table().to_pylist(),
    }
    for library, rows in frames.items():
        for name in samples.FEATURES:
            values = [row[name] for row in rows]
            if name == "terms":
                pairs = [zip(value["indices0"], value["values"], strict=True) for value in values]
                values = [[((index,), value) for index, value in row] for row in pairs]
            problem = oracle.difference([row[name] for row in wanted], [plain(value) for value in values], name)
            assert problem is None, f"{library}: {problem}"


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, (pl.Series, tuple)) else value


def test_queries(make: Make) -> None:
    reader = make(batch_size=16)
    name = next(iter(reader.features))
    values = ids(pa.table(reader))
    assert duckdb.sql(f'select count(*), avg("{name}") from reader').fetchall() == [(ROWS, sum(values) / ROWS)]
    scan = pl.scan_arrow_c_stream(reader)
    assert scan.select(pl.col(name).mean()).collect(engine="streaming").item() == sum(values) / ROWS
    assert reader.epoch == 3


def test_an_empty_dataset_has_a_schema(tmp_path: Path) -> None:
    reader = samples.write(tmp_path, [[], [0]]).read(batch_size=4)
    table = pa.table(reader)
    assert table.num_rows == 0
    assert features_of(table.schema) == samples.FEATURES
    assert pl.DataFrame(reader).shape == (0, len(samples.FEATURES))
    assert duckdb.sql("select count(*) from reader").fetchall() == [(0,)]


@pytest.mark.parametrize(
    "kind",
    [
        pa.int64(),
        pa.bool_(),
        pa.timestamp("us"),
        pa.date32(),
        pa.string(),
        pa.list_(pa.int64()),
        pa.list_(pa.float16()),
        pa.list_(pa.bool_()),
        pa.list_(pa.timestamp("s")),
        pa.list_(pa.date32()),
        pa.list_(pa.string()),
        pa.list_(pa.list_(pa.int32())),
        pa.list_(pa.int64(), 2),
        pa.list_(pa.list_(pa.int64(), 2)),
        pa.map_(pa.string(), pa.int64()),
        pa.struct([("indices", pa.list_(pa.int64())), ("values", pa.list_(pa.float32()))]),
        pa.struct([(f"indices{i}", pa.list_(pa.int64())) for i in (0, 1)] + [("values", pa.list_(pa.string()))]),
    ],
    ids=str,
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_without_values(kind: Any, shuffle: bool) -> None:
    """All rows are null or empty, so most buffers have no bytes."""
    empty = pa.array([None, None], kind)
    nothing: Any = [{field.name: [] for field in kind}] if pa.types.is_struct(kind) else [[]]
    columns = [empty, pa.nulls(2)]
    if pa.types.is_nested(kind) and not pa.types.is_fixed_size_list(kind):
        columns.append(pa.array(nothing * 2, kind))
    for column in columns:
        reader = fastpipe.from_arrow(pa.table({"a": column}), batch_size=2, shuffle=shuffle, seed=1)
        (batch,) = reader
        reader.set_epoch(0)
        table = pa.table(reader)
        table.validate(full=True)
        assert table == reader.to_arrow_reader().read_all()
        for name, form in batch.items():
            stored = table[name].to_pylist()
            if not isinstance(form.values if isinstance(form, fastpipe.Masked) else form, fastpipe.Sparse):
                assert stored == fastpipe.to_arrow(batch, reader.features)[name].to_pylist()
            assert len(stored) == 2


def test_batches_are_cast_to_a_requested_schema(data: samples.Data) -> None:
    reader = data.read(batch_size=16, columns=["id"])
    narrow = pa.RecordBatchReader.from_stream(reader, schema=pa.schema([("id", pa.int32())]))
    assert narrow.read_all().schema.types == [pa.int32()]
    with pytest.raises(ValueError, match="names are not matching"):
        pa.RecordBatchReader.from_stream(reader, schema=pa.schema([("other", pa.int32())]))
    assert no_thread_is_left()


def sparse_table() -> pa.Table:
    """Returns a table with sparse columns of one and two dimensions, in which some rows are null."""
    rng = np.random.default_rng(3)
    rows: list[Any] = []
    for _ in range(ROWS):
        n = int(rng.integers(0, 4))
        terms = {"indices0": rng.integers(0, 9, n), "indices1": rng.integers(0, 5, n), "values": rng.random(n)}
        rows.append({"one": {name: terms[name] for name in ("indices0", "values")}, "two": None if n == 3 else terms})
    lists = {"indices0": pa.list_(pa.int64()), "indices1": pa.list_(pa.int64()), "values": pa.list_(pa.float64())}
    one = pa.struct([(name, lists[name]) for name in ("indices0", "values")])
    return pa.Table.from_pylist(rows, pa.schema([("one", one), ("two", pa.struct(list(lists.items())))]))


@pytest.mark.parametrize("nulls", ["mask", "fill"])
def test_every_dtype_matches_to_arrow(nulls: Any) -> None:
    columns: dict[str, pa.Array] = {}
    for kind, values in {
        pa.bool_(): [False, True, True],
        pa.float16(): np.arange(3, dtype=np.float16),
        pa.large_string(): ["", "ä", "b"],
        pa.large_binary(): [b"", b"\xff", b"b"],
        pa.uint64(): [0, 1, 2**64 - 1],
        pa.date32(): [0, 1, -(2**31)],
        pa.timestamp("s"): [0, 1, -1],
        pa.timestamp("ns"): [0, 1, -1],
        pa.duration("us"): [0, 1, -1],
    }.items():
        items = pa.array(values, kind).take(pa.array([None if i % 7 == 3 else i % 3 for i in range(120)]))
        columns[f"{kind}"] = items[:40]
        columns[f"{kind} pairs"] = pa.FixedSizeListArray.from_arrays(items[:80], 2)
        columns[f"{kind} lists"] = pa.ListArray.from_arrays(pa.array([*range(0, 120, 3), 120], pa.int32()), items)
    table = pa.table(columns)
    features = {
        name: replace(spec, on_null=nulls) for name, spec in fastpipe.from_arrow(table, batch_size=16).features.items()
    }
    for shuffle in (False, True):
        reader, twin = (
            fastpipe.from_arrow(table, features=features, batch_size=16, shuffle=shuffle, seed=3) for _ in range(2)
        )
        for streamed, batch in zip(reader.to_arrow_reader(), twin, strict=True):
            streamed.validate(full=True)
            assert streamed.equals(fastpipe.to_arrow(batch, twin.features), check_metadata=True)


@pytest.mark.parametrize("source", ["avro", "table", "units"])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_sparse_columns_of_any_layout_are_the_same_stream(tmp_path: Path, source: str, shuffle: Any) -> None:
    options = {"batch_size": 16, "shuffle": shuffle} | ({"seed": 3} if shuffle else {})
    table = sparse_table()
    path = tmp_path / "terms.parquet"
    pq.write_table(table, path, row_group_size=40)
    avro = samples.write(tmp_path, [[20] * 5, [20] * 5], codec="deflate")
    read: Make = {
        "avro": lambda **given: fastpipe.read_avro(avro.paths, **given),
        "table": lambda **given: fastpipe.from_arrow(table, **given),
        "units": lambda **given: fastpipe.read_parquet(path, **given),
    }[source]
    specs = (
        avro.read(batch_size=16).features
        if source == "avro"
        else {
            "one": fastpipe.SparseSpec((9,), "float64"),
            "two": fastpipe.SparseSpec((None, 5), "float64", on_null="mask"),
        }
    )
    tables = {}
    for layout in ("coo", "csr"):
        features = {
            name: replace(spec, layout=layout) if isinstance(spec, fastpipe.SparseSpec) else spec
            for name, spec in specs.items()
        }
        reader, twin = (read(features=features, **options) for _ in range(2))
        # Both passes alternate over the same memory, and their layouts must not mix.
        for _ in range(2):
            batches = [fastpipe.to_arrow(batch, twin.features) for batch in twin]
            assert [batch.equals(other) for batch, other in zip(reader.to_arrow_reader(), batches, strict=True)] == [
                True
            ] * 13
            form = type(next(iter(reader))["terms" if source == "avro" else "one"])
            assert form is (fastpipe.Sparse if layout == "coo" else fastpipe.batch.SparseCSR)
            reader.set_epoch(1)
        reader.set_epoch(0)
        assert features_of(pa.schema(reader)) == features
        stream = pa.table(reader)
        tables[layout] = stream
        again = fastpipe.from_arrow(stream, batch_size=16)
        assert again.features == features
        for batch, other in zip(again, read(features=features, **options), strict=True):
            assert fastpipe.to_arrow(batch, again.features).equals(fastpipe.to_arrow(other, again.features))
    assert tables["coo"].equals(tables["csr"])


# --- Resources ---


def fresh(reader: fastpipe.Reader) -> int:
    """Returns the number of slabs that were newly allocated. It grows with the number of batches held."""
    found: int = reader.stats()["memory"]["slabs_fresh"]
    return found


@pytest.mark.parametrize("library", ["pyarrow", "polars frame", "polars scan", "duckdb"])
def test_few_batches_are_held(library: str, tmp_path: Path) -> None:
    rows = 80_000
    data = samples.write(tmp_path, [[1_000] * 80])
    reader = data.read(batch_size=500, columns=["id", "items"])
    mean: Any
    if library == "pyarrow":
        mean = sum(sum(batch["id"].to_pylist()) for batch in reader.to_arrow_reader()) / rows
    elif library == "polars frame":
        mean = sum(pl.DataFrame(batch)["id"].sum() for batch in reader.to_arrow_reader()) / rows
    elif library == "polars scan":
        scan = pl.scan_arrow_c_stream(reader).select(pl.col("id").mean())
        mean = scan.collect(engine="streaming").item()
    else:
        ((mean, count),) = duckdb.sql("select avg(id), sum(len(items)) from reader where len(items) < 9").fetchall()
        assert count == 2 * rows
    assert mean == (rows - 1) / 2
    # Each batch uses two slabs.
    assert fresh(reader) <= 40
    keeping = data.read(batch_size=500, columns=["id", "items"])
    kept = list(keeping.to_arrow_reader())
    assert len(kept) == 160
    assert fresh(keeping) >= 2 * 160


def test_batches_outlive_the_reader(data: samples.Data) -> None:
    reader = data.read(batch_size=16)
    stream = reader.to_arrow_reader()
    first = stream.read_next_batch()
    wanted = first.to_pylist()
    del stream, reader
    gc.collect()
    assert no_thread_is_left()
    # Memory that was returned too early would be overwritten by now.
    for _ in range(5):
        list(data.read(batch_size=16, shuffle=True))
    assert first.to_pylist() == wanted


def test_arrays_share_the_memory_of_the_pass(data: samples.Data) -> None:
    """Columns of fixed size are stored one after another, at multiples of 64 bytes."""
    found = data.read(batch_size=16).to_arrow_reader().read_next_batch()
    buffers = [found["id"].buffers()[1], found["vector"].buffers()[-1], found["items"].buffers()[1]]
    (first, size), *others = [(buffer.address, buffer.size) for buffer in buffers]
    for address, following in others:
        assert address == (first + size + 63) // 64 * 64
        first, size = address, following
    # All lists of a sparse column have the same offsets.
    indices, values = (found["terms"].field(name).buffers()[1].address for name in ("indices0", "values"))
    assert indices == values


# --- The end of a stream ---


def test_dropping_a_stream_ends_the_pass(make: Make) -> None:
    reader = make(batch_size=4, num_threads=2, prefetch=2)
    stream = reader.to_arrow_reader()
    del stream
    assert no_thread_is_left(), "before the first batch"
    stream = reader.to_arrow_reader()
    stream.read_next_batch()
    del stream
    assert no_thread_is_left()
    assert len(duckdb.sql("select * from reader limit 2").fetchall()) == 2
    gc.collect()
    assert no_thread_is_left()


def test_endless_passes(make: Make) -> None:
    reader = make(batch_size=16, epochs=None)
    stream = reader.to_arrow_reader()
    rows = sum(stream.read_next_batch().num_rows for _ in range(40))
    assert rows > 2 * ROWS
    assert reader.epoch >= 2
    assert len(duckdb.sql("select * from reader limit 500").fetchall()) == 500


def test_two_streams_of_one_reader_are_two_passes(make: Make) -> None:
    reader = make(batch_size=16)
    first = reader.to_arrow_reader()
    first.read_next_batch()
    second = reader.to_arrow_reader()
    with pytest.raises(fastpipe.errors.PassClosedError, match="use two readers for two passes"):
        first.read_next_batch()
    assert second.read_all().num_rows == ROWS
    closed = pa.RecordBatchReader.from_stream(reader)
    reader.close()
    with pytest.raises(pa.ArrowException, match=r"PassClosedError.*close\(\) was called"):
        closed.read_all()


def test_errors_of_a_pass_are_raised(tmp_path: Path) -> None:
    reader = damaged(tmp_path)
    stream = reader.to_arrow_reader()
    with pytest.raises(fastpipe.errors.MalformedFileError, match="expected UTF-8 text") as error:
        stream.read_all()
    assert (error.value.path, error.value.block) == (reader.files[1], 10)
    said = str(error.value)
    for read, kind in [
        (lambda: pa.table(reader), pa.ArrowInvalid),
        (lambda: pl.DataFrame(reader), pl.exceptions.ComputeError),
        (lambda: pl.from_arrow(reader), pl.exceptions.ComputeError),
        (lambda: pl.scan_arrow_c_stream(reader).collect(), pl.exceptions.ComputeError),
        (lambda reader=reader: duckdb.sql("select avg(id) from reader").fetchall(), duckdb.InvalidInputException),
    ]:
        with pytest.raises(kind) as other:
            read()
        assert said in str(other.value)
        assert "fastpipe.errors.MalformedFileError: " in str(other.value)
        assert "Traceback" not in str(other.value)
    assert no_thread_is_left()
    # Rows before the damage can be read.
    assert duckdb.sql("select sum(id) from (select id from reader limit 100)").fetchall() == [(4950,)]


def test_dropping_an_unread_capsule_ends_the_pass(make: Make) -> None:
    reader = make(batch_size=4, num_threads=2, prefetch=2)
    capsule = reader.__arrow_c_stream__()
    del capsule
    assert no_thread_is_left(), "before the first batch"
    stream = pa.RecordBatchReader.from_stream(reader)
    stream.read_next_batch()
    del stream
    assert no_thread_is_left()


def test_a_failed_stream_repeats_its_error(tmp_path: Path) -> None:
    stream = pa.RecordBatchReader.from_stream(damaged(tmp_path))
    said = set()
    for _ in range(40):
        with contextlib.suppress(pa.ArrowInvalid):
            stream.read_next_batch()
            continue
        with pytest.raises(pa.ArrowInvalid, match="expected UTF-8 text") as error:
            stream.read_next_batch()
        said.add(str(error.value))
    assert len(said) == 1


def test_another_thread_may_read_a_stream(make: Make) -> None:
    wanted = pa.table(make(batch_size=16, seed=3))
    streams = [pa.RecordBatchReader.from_stream(make(batch_size=16, seed=3)) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for table in threads.map(lambda stream: stream.read_all(), streams):
            assert table.equals(wanted)


def test_ctrl_c_is_not_lost(data: samples.Data) -> None:
    script = """
        import signal, threading, time
        import fastpipe, polars, pyarrow
        signal.signal(signal.SIGINT, signal.default_int_handler)
        class Slow:
            schema, rows = pyarrow.schema({"x": pyarrow.int64()}), [1] * 100
            def fingerprint(self): return {}
            def read(self, unit):
                if unit == 3:
                    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
                    time.sleep(100)
                return pyarrow.table({"x": [unit]})
        reader = fastpipe.read_units(Slow(), batch_size=1)
        try:
            try:
                polars.DataFrame(reader)
            except polars.exceptions.ComputeError as error:
                print("KeyboardInterrupt" in str(error))
                time.sleep(100)
        except KeyboardInterrupt:
            print("interrupted")
            os._exit(0)
    """
    (out,) = processes.outputs(processes.run(script))
    assert out.splitlines()[-1] == "interrupted"


def test_a_progress_bar_counts_what_a_stream_yields(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    for read in (pa.table, lambda reader: reader.to_arrow_reader().read_all()):
        assert read(make(batch_size=16, progress=True)).num_rows == ROWS
        shown = capfd.readouterr().err
        assert f"{ROWS}/{ROWS}" in shown.replace(f"{ROWS}.0", f"{ROWS}")


# --- Other processes ---


def test_pickled_readers_are_streams(make: Make) -> None:
    reader = make(batch_size=16)
    again = pickle.loads(pickle.dumps(reader))
    assert pa.table(again).equals(pa.table(reader))
    stream = reader.to_arrow_reader()
    with pytest.raises(TypeError, match="can't be pickled while a pass is active"):
        pickle.dumps(reader)
    del stream


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_reads_its_own_stream(data: samples.Data) -> None:
    script = """
        import os, warnings
        import fastpipe, pyarrow
        reader = fastpipe.read_avro(sys.argv[1:], columns=["id"], batch_size=16)
        stream = reader.to_arrow_reader()
        stream.read_next_batch()
        warnings.simplefilter("ignore")
        child = os.fork()
        if not child:
            os._exit(0 if sum(b.num_rows for b in reader.to_arrow_reader()) == 200 else 1)
        assert os.waitpid(child, 0)[1] == 0
        print(sum(batch.num_rows for batch in stream))
    """
    assert processes.outputs(processes.run(script, *data.paths)) == ["184\n"]


def test_only_pyarrow_objects_need_pyarrow(data: samples.Data) -> None:
    script = """
        sys.modules["pyarrow"] = None
        import fastpipe
        reader = fastpipe.read_avro(sys.argv[1], columns=["id"], batch_size=16)
        try:
            reader.to_arrow_reader()
        except ImportError as error:
            print(error)
        import polars
        print(polars.DataFrame(reader)["id"].sum())
        reader.__arrow_c_schema__()
    """
    (out,) = processes.outputs(processes.run(script, data.paths[0]))
    assert out.splitlines() == ["Arrow data requires pyarrow: pip install 'fastpipe-data[arrow]'", str(sum(range(100)))]
