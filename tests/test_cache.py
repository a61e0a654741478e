"""Cached readers: the batches, states, locations and splits of the reader that was cached, from each source."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import tfrecords
from every_source import ORDERS, ROWS, Make, digests, make
from fastpipe import col
from fastpipe.batch import Sparse, SparseCSR
from fastpipe.errors import LimitError, StorageError, UnsupportedError
from fastpipe.units._cache import _key as cache_key
from mapping import ids, reader_of

pa = pytest.importorskip("pyarrow")

__all__ = ["make"]


def csv_of(folder: Path, rows: Any = range(44), **options: Any) -> fastpipe.Reader:
    path = folder / "rows.csv"
    text = "x\n" + "".join(f"{i}\n" for i in rows)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return fastpipe.read_csv(path, **{"batch_size": 5, "shuffle": True, "seed": 3} | options)


def is_redrawn(make: Make) -> bool:
    return make(batch_size=30).features.keys() == {"user", "item", "label"}


def is_filed(make: Make) -> bool:
    """Whether the rows are from local files or custom units."""
    reader = make(batch_size=30)
    return bool(reader.files) or " of Slices" in repr(reader) or " of Units" in repr(reader)


CASES = [(ORDERS[0], False), (ORDERS[1], False), (ORDERS[1], True), (ORDERS[2], False), (ORDERS[3], True)]


@pytest.mark.parametrize(("order", "stored"), CASES)
def test_batches_and_states_are_those_of_the_reader(
    make: Make, order: dict[str, Any], stored: bool, tmp_path: Path
) -> None:
    if is_redrawn(make):
        with pytest.raises(UnsupportedError, match="cannot keep negatives, which are drawn again"):
            make(batch_size=30).cache()
        return
    if stored and not is_filed(make):
        with pytest.raises(UnsupportedError, match=r"cannot tell whether .* has changed, because"):
            make(batch_size=30).cache(tmp_path)
        return
    reader = make(batch_size=30, epochs=2, **order)
    cached = make(batch_size=30, epochs=2, **order).cache(tmp_path / "new" if stored else None)
    assert cached.features == reader.features
    assert cached.categories == reader.categories
    assert cached.shuffle_buffer == reader.shuffle_buffer
    whole = digests(reader)
    assert digests(cached) == whole
    assert digests(pickle.loads(pickle.dumps(cached))) == digests(pickle.loads(pickle.dumps(reader)))
    for first, second in ((reader, cached), (cached, reader)):
        first.set_epoch(0)
        batches = iter(first)
        for step in range(0, 12, 4):
            second.load_state_dict(first.state_dict())
            assert digests(second) == whole[step:]
            for _ in range(4):
                next(batches)
    for step in (0, 7):
        assert cached.locate(step, 3, 1) == reader.locate(step, 3, 1)
    assert [digests(part) for part in cached.split(0.6, 0.4)] == [digests(part) for part in reader.split(0.6, 0.4)]
    for rank in range(2):
        options = {"rank": rank, "world_size": 2, "shard_by": "batch"} | order
        if "seed" in options or not options.get("shuffle"):
            ranks = make(batch_size=30, **options)
            assert digests(make(batch_size=30, **options).cache()) == digests(ranks)


N = 40
TABLE = {
    "int": [1, None, 3, 4] * 10,
    "float": [1.5, None, float("nan"), 2.0] * 10,
    "text": ["a", None, "", "ccc"] * 10,
    "blob": [b"x", None, b"", b"\xff"] * 10,
    "lists": [[1, 2], [], [3], None] * 10,
    "deep": [[[1], [2, 3]], [], [[4]], [[]]] * 10,
    "texts": [["a", "b"], [], ["c"], None] * 10,
    "null": [None] * N,
    "time": pa.array([1, None, 3, 4] * 10, pa.timestamp("ns", "UTC")),
    "day": pa.array([1, None, 3, 4] * 10, pa.date32()),
    "price": pa.array(range(N)).cast(pa.decimal128(21, 2)),
    "wide": pa.array(range(N)).cast(pa.decimal128(30, 2)),
    "code": pa.array(["a", "b", "a", None] * 10).dictionary_encode(),
    "vectors": pa.array([[i, i + 1] for i in range(N)], pa.list_(pa.int16(), 2)),
}
Dense, Ragged, Vocabulary = fastpipe.DenseSpec, fastpipe.RaggedSpec, fastpipe.VocabularySpec
SPECS: dict[str, tuple[str, Any]] = {
    "scaled": ("price", Dense((), "int64", scale=3)),
    "pairs": ("wide", fastpipe.decimal_spec(values="pairs", scale=2)),
    "padded": ("lists", Dense((3,), "int64", pad=-1, on_null="fill")),
    "length": ("lists", Dense((), "int64", length=True, on_null="fill")),
    "codes": ("code", Dense((), "int8", on_null="mask")),
    "nan for null": ("float", Dense((), "float64", fill=float("nan"), on_null="fill")),
    "masked without nulls": ("price", Dense((), "float64", on_null="mask")),
    "filled": ("int", Dense((), "int64", on_null="fill", fill=7)),
    "masked lists": ("lists", Ragged((None,), "int32", on_null="mask")),
    "lengths": ("deep", Ragged((None,), "int64", length=True)),
    "masked texts": ("texts", Ragged((None,), "string", on_null="mask")),
    "vocabulary": ("texts", Vocabulary(["a", "b"], on_unknown="drop", on_null="mask")),
    "hash": ("texts", fastpipe.HashSpec(9, on_null="mask")),
    "buckets": ("int", fastpipe.BucketSpec([2, 3], on_null="mask")),
}


@pytest.mark.parametrize("name", [*TABLE, *SPECS])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_form_is_kept_exactly(name: str) -> None:
    table, features = pa.table(TABLE), None
    if name in SPECS:
        field, spec = SPECS[name]
        features = {name: replace(spec, field=field)}
    reader = fastpipe.from_arrow(table, features=features, columns=None if features else [name], batch_size=7)
    cached = reader.cache()
    assert (cached.features, digests(cached)) == (reader.features, digests(reader))


def test_sparse_columns_are_kept_exactly() -> None:
    draw = np.random.default_rng(1)
    offsets = np.r_[0, np.cumsum(draw.integers(0, 4, N))]
    indices = np.sort(draw.integers(0, 9, offsets[-1]))
    rows = np.repeat(np.arange(N), np.diff(offsets))
    sizes, numbers = np.array([N, 9]), draw.random(offsets[-1], "f4")
    coo = Sparse(np.stack([rows, indices], 1), numbers, sizes)
    for form in (coo, SparseCSR(offsets, indices, numbers, sizes)):
        reader = fastpipe.from_arrays({"x": form}, batch_size=7)
        assert digests(reader.cache()) == digests(reader)


def test_names_that_arrow_lacks_are_named() -> None:
    features = {"a\0b": Dense((), "int64", field="x")}
    reader = fastpipe.from_arrays({"x": np.arange(4)}, features=features, batch_size=2)
    with pytest.raises(UnsupportedError, match=r"'a\\x00b'.* Leave the feature out"):
        reader.cache()


def test_selections_and_partitions_are_cached(make: Make) -> None:
    if is_redrawn(make):
        return
    reader = make(batch_size=30, shuffle=True, seed=4)
    part = reader.split(0.5, 0.5)[0]
    assert digests(part.cache()) == digests(part)
    again = reader.cache().split(0.5, 0.5)[0]
    again.load_state_dict(part.state_dict())
    name = next(iter(reader.features))
    if reader.features[name].dtype == "int64" and not reader.features[name].shape:
        assert digests(reader.cache().filter(col(name) > 0)) == digests(reader.filter(col(name) > 0))
    of = reader.cache()
    for each in (*of.partition(3), *reader.partition(3)):
        assert digests(of.read_partition(each)) == digests(reader.read_partition(each))
        assert digests(reader.read_partition(each).cache()) == digests(reader.read_partition(each))
    assert dict(of.plan().stages)["cache"] == "cached rows"
    assert of.num_rows == ROWS


def test_a_cached_reader_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("x\n" + "".join(f"{i}\n" for i in range(100)))
    memory = fastpipe.read_csv(path, batch_size=9).cache()
    filed = fastpipe.read_csv(path, batch_size=9).cache(tmp_path / "cache")
    path.unlink()
    for cached in (memory, filed):
        assert [x for batch in cached for x in batch["x"]] == list(range(100))
        assert len(cached.batch_at(11, 0)["x"]) == 1


def test_files_of_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    def files() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    csv_of(tmp_path).cache(folder)
    name = files()[0]
    before = (folder / name).stat().st_mtime_ns
    assert digests(csv_of(tmp_path, seed=9).cache(str(folder))) == digests(csv_of(tmp_path, seed=9))
    assert (files(), (folder / name).stat().st_mtime_ns) == ([name], before)
    # Damaged files are replaced.
    good = (folder / name).read_bytes()
    for damaged in (b"", good[:7], good[: len(good) // 2], b"x" * 100):
        (folder / name).unlink()
        (folder / name).write_bytes(damaged)
        assert digests(csv_of(tmp_path).cache(folder)) == digests(csv_of(tmp_path))
        assert (folder / name).read_bytes() == good
    # Files of an interrupted writer are ignored, and other data has other files.
    (folder / ".fastpipe-0123.tmp").write_bytes(good[:100])
    csv_of(tmp_path).cache(folder)
    for options in (
        {"columns": ["x"], "overrides": {"x": fastpipe.DenseSpec((), "int32")}},
        {"features": {"y": fastpipe.DenseSpec((), "int64", field="x")}},
        {"features": {"x": fastpipe.BucketSpec([20])}},
        {"features": {"x": fastpipe.BucketSpec([21])}},
    ):
        other = csv_of(tmp_path, **options)
        assert digests(other.cache(folder)) == digests(other)
    part = csv_of(tmp_path).split(0.5, 0.5)[1]
    assert digests(part.cache(folder)) == digests(part)
    # Other values of the same size.
    changed = csv_of(tmp_path, range(10, 54), features={"x": fastpipe.DenseSpec((), "int64")})
    assert digests(changed.cache(folder)) == digests(changed)
    assert len(files()) == 8


@pytest.mark.parametrize("kind", ["csv", "avro", "tfrecord", "parquet", "arrow"])
def test_files_belong_to_the_contents_that_were_opened(kind: str, tmp_path: Path) -> None:
    path, cache = tmp_path / f"rows.{kind}", tmp_path / "cache"

    def write(first: int, modified: int) -> bytes:
        """Writes as many bytes as before."""
        path.unlink(missing_ok=True)
        table = pa.table({"x": range(first, first + 50)})
        if kind == "csv":
            path.write_text("x\n" + "".join(f"{i}\n" for i in table["x"].to_pylist()))
        elif kind == "avro":
            fastpipe.write_avro(path, table, codec="null")
        elif kind == "tfrecord":
            path.write_bytes(tfrecords.file(table.to_pylist()))
        elif kind == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(
                table, path, compression="none", use_dictionary=False, write_statistics=False
            )
        else:
            pytest.importorskip("pyarrow.feather").write_feather(table, str(path), compression="uncompressed")
        os.utime(path, ns=(modified, modified))
        return path.read_bytes()

    def opened() -> fastpipe.Reader:
        found: fastpipe.Reader = getattr(fastpipe, f"read_{kind}")(path, columns=["x"], batch_size=5)
        return found

    first = write(200, 10**18)
    late, before = opened(), digests(opened().cache(cache))
    key = cache_key(late._data)
    second = write(300, 10**18 + 1)
    assert len(first) == len(second)
    # The file of the new contents doesn't serve a reader that opened the earlier ones.
    assert digests(opened().cache(cache)) == digests(opened()) != before
    assert len(list(cache.iterdir())) == 2
    assert cache_key(late._data) == key != cache_key(opened()._data)
    with pytest.raises(StorageError, match="changed"):
        late.cache(cache)
    path.write_bytes(first)
    os.utime(path, ns=(10**18, 10**18))
    assert digests(late.cache(cache)) == before
    assert len(list(cache.iterdir())) == 2


def test_an_interruption_leaves_no_file(tmp_path: Path) -> None:
    class Failing:
        rows = (3, 3)
        schema = pa.schema([pa.field("a", pa.int64(), nullable=False)])

        def read(self, unit: int) -> Any:
            if unit == 1:
                raise KeyboardInterrupt
            return pa.table({"a": [1, 2, 3]}, schema=self.schema)

        def fingerprint(self) -> str:
            return "failing"

    with pytest.raises(KeyboardInterrupt):
        fastpipe.read_units(Failing(), batch_size=2).cache(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_replaced_or_refused(tmp_path: Path) -> None:
    reader = csv_of(tmp_path, shuffle=False, seed=None)
    wanted = digests(reader)
    reader.cache(tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    good = path.read_bytes()
    draw = np.random.default_rng(1)
    for at in draw.integers(len(good), size=60).tolist():
        path.unlink()
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << int(draw.integers(8))]) + good[at + 1 :])
        with contextlib.suppress(fastpipe.FastpipeError):
            # Values may differ: a file has no checksums.
            assert len(digests(csv_of(tmp_path, shuffle=False, seed=None).cache(tmp_path / "cache"))) == len(wanted)


def fill(folder: str) -> list[list[int]]:
    return [ids(batch) for batch in fastpipe.read_csv(f"{folder}/rows.csv", batch_size=5).cache(f"{folder}/cache")]


def test_processes_share_a_file(tmp_path: Path) -> None:
    csv_of(tmp_path)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(fill, [str(tmp_path)] * 2, chunksize=1)
    assert found == [[ids(batch) for batch in csv_of(tmp_path, shuffle=False, seed=None)]] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_limits_and_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(LimitError, match="more than max_bytes=100 bytes: raise max_bytes, read fewer"):
        reader_of().cache(max_bytes=100)
    with pytest.raises(LimitError):
        csv_of(tmp_path).cache(tmp_path / "cache", max_bytes=100)
    assert list((tmp_path / "cache").iterdir()) == []
    assert digests(reader_of().cache(max_bytes="1MB")) == digests(reader_of())
    empty = fastpipe.from_arrays({"x": np.arange(0)}, batch_size=2)
    assert list(empty.cache()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"the cache .*Failed to open"):
        csv_of(tmp_path).cache(tmp_path / "file")
    for wrong in (3, b"x"[0], ["a"]):
        with pytest.raises(TypeError):
            reader_of().cache(wrong)
    with pytest.raises(ValueError, match="max_bytes"):
        reader_of().cache(max_bytes=0)
    once = reader_of().cache()
    assert digests(once.cache()) == digests(reader_of())
    sample = fastpipe.from_arrays({"x": np.arange(50)}, batch_size=5).sample(20, seed=1)
    assert digests(sample.cache()) == digests(sample)
