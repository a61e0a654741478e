"""Filters, splits, strata, weights and lengths of rows in the index cache: the same as without it, and read once."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import fastpipe
import tfrecords
from fastpipe import DenseSpec, col
from fastpipe._files._index_entries import IndexEntries

pa = pytest.importorskip("pyarrow")

LONG_AGO = 1_600_000_000_123_456_789
ROWS, PAD = 2_000, "x" * 200
KINDS = ["avro", "csv", "tfrecord"]
READ: dict[str, Callable[..., fastpipe.Reader]] = {
    "avro": fastpipe.read_avro,
    "csv": fastpipe.read_csv,
    "tfrecord": fastpipe.read_tfrecord,
}
CONDITION = (col("b") == 3) | (col("a") < 50)
PASSING = [a for a in range(ROWS) if a % 7 == 3 or a < 50]

Select = Callable[[fastpipe.Reader], fastpipe.Reader]
# For each method: selections, the first of which another one has the entry of, and selections with other entries.
METHODS: dict[str, tuple[list[Select], list[Select]]] = {
    "filter": (
        [lambda rows: rows.filter(CONDITION)],
        [
            lambda rows: rows.filter(CONDITION & (col("a") < 1000)),
            lambda rows: rows.filter(col("b") == 4),
            lambda rows: rows.filter(~CONDITION),
        ],
    ),
    "split": (
        [
            lambda rows: rows.split(0.25, 0.75, by="a", seed=1)[0],
            lambda rows: rows.split(0.25, 0.75, by="a", seed=1)[1],
        ],
        [
            lambda rows: rows.split(0.25, 0.75, by="a", seed=2)[0],
            lambda rows: rows.split(0.25, 0.75, by="b", seed=1)[0],
            lambda rows: rows.split(0.75, 0.25, by="a", seed=1)[0],
            lambda rows: rows.folds(4, by="a", seed=1)[0][0],
        ],
    ),
    "folds": (
        [
            lambda rows: rows.folds(3, stratify="b", seed=1)[0][1],
            lambda rows: rows.folds(3, stratify="b", seed=1)[2][0],
        ],
        [
            lambda rows: rows.folds(3, stratify="b", seed=2)[0][1],
            lambda rows: rows.folds(4, stratify="b", seed=1)[0][1],
            lambda rows: rows.folds(3, stratify="a", seed=1)[0][1],
            lambda rows: rows.folds(3, by="b", seed=1)[0][1],
        ],
    ),
    "weights": (
        [
            lambda rows: rows.sample(150, weights=col("a") + 1, seed=1),
            lambda rows: rows.sample(20, weights=col("a") + 1, seed=2, replace=True),
        ],
        [
            lambda rows: rows.sample(150, weights=col("a") + 2, seed=1),
            lambda rows: rows.sample(150, weights="a", seed=1),
            lambda rows: rows.sample(150, balance=col("a") + 1, seed=1),
        ],
    ),
    "strata": (
        [lambda rows: rows.sample(140, balance="b", seed=1), lambda rows: rows.sample(99, stratify="b", seed=2)],
        [lambda rows: rows.sample(140, balance=col("b"), seed=1), lambda rows: rows.sample(99, weights="b", seed=1)],
    ),
}


def aged(path: Path, modified: int = LONG_AGO) -> Path:
    """Sets an old timestamp, because recently modified files have no entry."""
    os.utime(path, ns=(modified, modified))
    return path


def write(path: Path, kind: str, first: int = 0) -> Path:
    """Writes rows whose middle isn't part of the fingerprint of the file."""
    rows = [{"a": first + i, "b": i % 7, "pad": PAD, "items": [i] * (i % 5)} for i in range(ROWS)]
    if kind == "csv":
        path.write_text("a,b,pad\n" + "".join(f"{row['a']},{row['b']},{PAD}\n" for row in rows))
    elif kind == "tfrecord":
        path.write_bytes(tfrecords.file(rows))
    else:
        items = pa.list_(pa.field("item", pa.int64(), nullable=False))
        kinds = {"a": pa.int64(), "b": pa.int64(), "pad": pa.string(), "items": items}
        schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds.items()])
        fastpipe.write_avro(path, pa.Table.from_pylist(rows, schema), codec="null")
    return aged(path)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def select(method: str) -> Select:
    return METHODS[method][0][0]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def path(kind: str, tmp_path: Path) -> Path:
    return write(tmp_path / f"rows.{kind}", kind)


def reader_of(path: Path, cache: Any, **options: Any) -> fastpipe.Reader:
    kind = path.suffix[1:]
    given: dict[str, Any] = {"columns": ["a", "b"], "batch_size": 64, "seed": 1, "index_cache": cache, **options}
    return READ[kind](path, **given)


def rows_of(reader: fastpipe.Reader) -> list[int]:
    return [int(a) for batch in reader for a in batch["a"]]


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.rows1"))


def known(reader: Any) -> bool:
    return "known from the index cache" in str(reader.plan())


def damage(path: Path) -> None:
    """Overwrites the middle of a file. Its size, its timestamp and its fingerprint don't reveal the change."""
    data, before = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    middle = len(data) // 2
    assert middle > 100_000
    data[middle : middle + 20_000] = b"\xff" * 20_000
    path.write_bytes(data)
    aged(path, before)


def test_a_second_selection_reads_no_data(path: Path, cache: Path, method: str) -> None:
    same, others = METHODS[method]
    plain = [select(reader_of(path, None)) for select in same]
    first = same[0](reader_of(path, cache))
    states = [reader.state_dict() for reader in plain]
    assert rows_of(first) == rows_of(plain[0])
    assert rows_of(first) == PASSING or method != "filter"
    assert not known(first)
    assert len(entries(cache)) == 1
    damage(path)
    for make in (lambda: reader_of(path, cache), lambda: pickle.loads(pickle.dumps(reader_of(path, cache)))):
        for select, expected in zip(same, states, strict=True):
            second = select(make())
            assert known(second)
            assert second.state_dict() == expected
    for select in others:
        with pytest.raises(fastpipe.errors.FastpipeError):
            select(reader_of(path, cache))
    # A selection that fails stores nothing.
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("order", [{}, {"shuffle": True, "seed": 3}, {"shuffle": "buffer", "seed": 3}])
def test_orders_and_states_are_the_same(path: Path, cache: Path, select: Select, order: dict[str, Any]) -> None:
    plain = select(reader_of(path, None, **order))
    whole = rows_of(plain)
    for _ in range(2):
        reader = select(reader_of(path, cache, **order))
        assert rows_of(reader) == whole
    assert known(reader)
    plain.set_epoch(0)
    batches, before = iter(plain), 0
    for batch in batches:
        before += len(batch["a"])
        reader.load_state_dict(plain.state_dict())
        assert reader.state_dict() == plain.state_dict()
        assert rows_of(reader) == whole[before:]


def test_selections_of_selections_and_partitions(path: Path, cache: Path, select: Select) -> None:
    taken = np.random.default_rng(1).integers(0, ROWS, 1_500)

    def readers(cache: Path | None) -> list[fastpipe.Reader]:
        reader = reader_of(path, cache)
        half = reader.split(0.5, 0.5)[0]
        after = reader.filter(col("a") > 100)
        part = reader.read_partition(reader.partition(2)[1])
        return [select(each) for each in (reader, half, after, part, reader.take(taken))]

    plain = [(rows_of(reader), reader.state_dict()) for reader in readers(None)]
    for times in range(2):
        found = readers(cache)
        assert [(rows_of(reader), reader.state_dict()) for reader in found] == plain
        assert [known(each) for each in found] == [times == 1] * 5
        # The filter by `a` has an entry too.
        assert len(entries(cache)) == 6


def test_links_are_other_places_of_rows(tmp_path: Path, cache: Path) -> None:
    for folder in ("day=1", "day=2"):
        (tmp_path / folder).mkdir()
    path = write(tmp_path / "day=1" / "rows.csv", "csv")
    link = tmp_path / "day=2" / "rows.csv"
    link.symlink_to(path)
    found = []
    for each in (path, link):
        plain, cached = (rows_of(reader_of(each, kept).folds(3, stratify="b")[0][1]) for kept in (None, cache))
        assert plain == cached
        found.append(plain)
    assert found[0] != found[1]


def test_errors_of_samples_do_not_need_the_values(path: Path, cache: Path) -> None:
    def fail(given: Any, kept: Path | None) -> str:
        with pytest.raises(ValueError, match="rows have the value") as error:
            reader_of(path, kept, rank=1, world_size=2).filter(CONDITION).sample(300, seed=1, balance=given)
        return str(error.value)

    for values in ("b", col("b") * 2):
        assert fail(values, None) == fail(values, cache) == fail(values, cache)
    # The filter has an entry too.
    assert len(entries(cache)) == 3
    for wrong in (["b"], "c", col("c") + 1):
        with pytest.raises((ValueError, fastpipe.errors.SchemaError)):
            reader_of(path, cache).sample(10, seed=1, balance=wrong)
    for arguments in ({"by": "c"}, {"stratify": "c"}, {"by": 3}):
        with pytest.raises((TypeError, fastpipe.errors.SchemaError)):
            reader_of(path, cache).folds(2, **arguments)
    assert len(entries(cache)) == 3


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
def test_conditions_and_what_they_mean_are_part_of_the_key(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n" + "".join(f"{i},{'' if i % 3 else i}\n" for i in range(600)))
    aged(path)

    def count(condition: Any, fill: int = 0, **options: Any) -> int:
        features = {"a": DenseSpec((), "int64"), "b": DenseSpec((), "int64", on_null="fill", fill=fill)}
        reader = fastpipe.read_csv(path, features=features, batch_size=50, index_cache=cache, **options)
        return reader.filter(condition).num_rows

    counted: list[tuple[int, Callable[[], int]]] = [
        (400, lambda: count(col("b") == -1, fill=-1)),
        (0, lambda: count(col("b") == -1)),
        (200, lambda: count(col("b") >= 0, fill=-1)),
        (199, lambda: count(col("b") >= 0, fill=-1, null_values=["", "0"])),
        (2, lambda: count(col("a") <= 1)),
        (1, lambda: count(col("a") < 1)),
        (2, lambda: count(col("a") <= 1.0)),
        (2, lambda: count(col("a").is_in([0, 1]))),
    ]
    for _ in range(2):
        assert [call() for _, call in counted] == [number for number, _ in counted]
    assert len(entries(cache)) == len(counted)


def test_entries_belong_to_one_file(path: Path, kind: str, cache: Path, tmp_path: Path, select: Select) -> None:
    other = tmp_path / "other" / path.name
    other.parent.mkdir()
    write(other, kind)
    select(reader_of(path, cache))
    assert not known(select(reader_of(other, cache)))
    # An entry under the name of another one is damaged.
    (first, second) = entries(cache)
    for one, two in ((first, second), (second, first)):
        whole = two.read_bytes()
        two.write_bytes(one.read_bytes())
        assert sum(known(select(reader_of(each, cache))) for each in (path, other)) == 1
        assert two.read_bytes() == whole


def test_a_changed_file_is_read_again(path: Path, kind: str, cache: Path, select: Select) -> None:
    select(reader_of(path, cache))
    content, stamp = path.read_bytes(), path.stat().st_mtime_ns
    write(path, kind, first=1000)
    for modified in (stamp + 1, stamp - 1):
        aged(path, modified)
        reader = select(reader_of(path, cache))
        assert rows_of(reader) == rows_of(select(reader_of(path, None)))
        assert not known(reader)
    opened = reader_of(path, cache)
    path.write_bytes(content)
    # It has changed after it was opened.
    with pytest.raises(fastpipe.errors.StorageError):
        opened.filter(col("a") < 3)
    assert len(entries(cache)) == 3


def test_recently_modified_files_have_no_entry(
    path: Path, cache: Path, select: Select, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastpipe")
    aged(path, time.time_ns() + 60_000_000_000)
    expected = rows_of(select(reader_of(path, None)))
    for _ in range(2):
        assert rows_of(select(reader_of(path, cache))) == expected
    assert not entries(cache)
    assert "was not saved: a file was modified a moment ago" in caplog.text


def test_readers_without_files_or_cache_have_no_entry(
    tmp_path: Path, select: Select, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "rows.csv", "csv")
    monkeypatch.setattr(IndexEntries, "get", lambda *_: 1 / 0)
    for reader in (
        reader_of(path, None),
        reader_of(path, False),
        fastpipe.read_csv(path.read_bytes(), columns=["a", "b"], batch_size=64, index_cache=tmp_path),
        fastpipe.read_csv([path, path.read_bytes()], columns=["a", "b"], batch_size=64, index_cache=tmp_path),
        fastpipe.from_arrays({"a": np.arange(ROWS), "b": np.arange(ROWS) % 7}, batch_size=64),
    ):
        assert rows_of(select(reader))


@pytest.mark.parametrize("method", ["pack", "bucket"])
def test_lengths_are_read_once(tmp_path: Path, cache: Path, method: str) -> None:
    path = write(tmp_path / "rows.avro", "avro")

    def grouped() -> Any:
        reader = fastpipe.read_avro(path, columns=["items"], batch_size=16, index_cache=cache)
        return reader.pack("items", length=16) if method == "pack" else reader.bucket("items")

    plan = str(grouped().plan())
    batches = [batch["items"] for batch in grouped()]
    assert sum(np.asarray(getattr(rows, "values", rows)).size for rows in batches) >= sum(i % 5 for i in range(ROWS))
    assert len(entries(cache)) == 1
    damage(path)
    assert str(grouped().plan()) == plan
    reader = fastpipe.read_avro(path, columns=["items"], batch_size=16, index_cache=cache)
    with pytest.raises(fastpipe.errors.FastpipeError):
        # Packs check the items, and buckets don't. So neither uses the lengths of the other.
        reader.bucket("items") if method == "pack" else reader.pack("items", length=16)


# --- Entries ---


@pytest.fixture(scope="module")
def example() -> Iterator[tuple[Path, Path, list[int]]]:
    """Returns a file, a cache with one entry of rows, and the rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        path.write_text("a,b\n" + "".join(f"{i},{i % 7}\n" for i in range(300)))
        cache = Path(folder) / "cache"
        yield aged(path), cache, rows_of(reader_of(path, cache).filter(CONDITION))


def rebuilt(example: tuple[Path, Path, list[int]], change: Callable[[Path], object]) -> list[str]:
    """Changes the entry, and checks that the rows are the same and that the entry is written again.

    Returns the log.
    """
    path, cache, rows = example
    (entry,) = entries(cache)
    whole, log = entry.read_bytes(), logging.getLogger("fastpipe")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    change(entry)
    changed = not entry.is_file() or entry.read_bytes() != whole
    log.addHandler(handler)
    try:
        reader = reader_of(path, cache).filter(CONDITION)
    finally:
        log.removeHandler(handler)
    assert rows_of(reader) == rows
    assert known(reader) != changed
    assert entry.read_bytes() == whole
    assert len([text for text in records if "is damaged" in text]) == changed
    return records


@given(st.data())
def test_damaged_entries_are_written_again(example: tuple[Path, Path, list[int]], data: st.DataObject) -> None:
    (entry,) = entries(example[1])
    whole = bytearray(entry.read_bytes())
    how = data.draw(st.sampled_from(["cut", "flip", "extend", "any"]))
    if how == "cut":
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    elif how == "flip":
        for place in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3)):
            whole[place] ^= data.draw(st.integers(0, 255))
    else:
        whole = whole * (how == "extend") + data.draw(st.binary(max_size=200))
    rebuilt(example, lambda entry: entry.write_bytes(bytes(whole)))


def test_every_byte_and_every_length_of_an_entry_matters(example: tuple[Path, Path, list[int]]) -> None:
    (entry,) = entries(example[1])
    path, whole = str(entry), entry.read_bytes()
    values = IndexEntries(str(entry.parent), [str(example[0])], [(example[0].stat().st_size, LONG_AGO)])
    get = values.get

    def found(content: bytes) -> bool:
        # Another text has another name: the entry of one text isn't valid for another one.
        copy = made(b"computed!")
        copy.write_bytes(content)
        return get("text", 9, lambda: b"computed!")[1]

    def made(value: bytes) -> Path:
        assert get("text", 9, lambda: value)[0] == value
        (own,) = [each for each in entries(entry.parent) if str(each) != path]
        return own

    own = made(b"computed!")
    good = own.read_bytes()
    assert found(good)
    assert not found(whole)
    for place in range(len(good)):
        assert not found(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert not found(good[:place])
    assert not found(good + b"\0")
    # The entry is valid, but has another size.
    assert found(good)
    assert get("text", 8, lambda: b"computed") == (b"computed", False)
    own.unlink()


def test_what_is_not_an_entry_is_damage_that_is_not_replaced(
    example: tuple[Path, Path, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    path, cache, rows = example
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    target = cache / "target"
    target.write_bytes(b"mine")

    def fifo() -> None:
        os.mkfifo(entry)

    kinds: list[Callable[[], object]] = [entry.mkdir]
    if sys.platform != "win32":
        kinds += [lambda: entry.symlink_to(target), lambda: entry.symlink_to(cache / "missing"), fifo]
    for make in kinds:
        entry.unlink()
        make()
        for _ in range(2):
            caplog.clear()
            assert rows_of(reader_of(path, cache).filter(CONDITION)) == rows
            assert "can't be written, so the next reader reads the data again" in caplog.text
        entry.rmdir() if entry.is_dir() else entry.unlink()
        entry.write_bytes(whole)
    assert target.read_bytes() == b"mine"
    target.unlink()
    assert sorted(cache.iterdir()) == [entry]


def test_directories_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "rows.csv", "csv")
    for index, make in enumerate((lambda each: each.rmdir(), lambda each: (each.rmdir(), each.write_text("")))):
        cache = tmp_path / str(index)
        reader = reader_of(path, cache)
        for each in cache.iterdir():
            each.unlink()
        make(cache)
        caplog.clear()
        assert rows_of(reader.filter(CONDITION)) == PASSING
        assert "can't be written" in caplog.text


def test_a_file_that_changes_while_it_is_read_has_no_entry(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    aged(path)
    stamps = [(7, LONG_AGO)]
    get = IndexEntries(str(tmp_path), [str(path)], stamps).get
    for change in (lambda: aged(path, LONG_AGO + 1), path.unlink):
        assert get("text", 1, lambda: (change(), b"x")[1]) == (b"x", False)  # noqa: B023
    path.write_bytes(b"longer content")
    aged(path)
    assert get("text", 1, lambda: b"x") == (b"x", False)
    path.write_bytes(b"content")
    aged(path)
    with pytest.raises(KeyboardInterrupt):
        get("text", 1, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert sorted(tmp_path.iterdir()) == [path]
    assert [get("text", 1, lambda: b"x") for _ in range(2)] == [(b"x", False), (b"x", True)]
    assert [get("empty", 0, lambda: b"") for _ in range(2)] == [(b"", False), (b"", True)]


def test_threads_and_processes_share_a_cache(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "rows.csv", "csv")
    program = textwrap.dedent(f"""
        import glob, os
        import fastpipe
        from fastpipe import col
        for _ in range(10):
            reader = fastpipe.read_csv({str(path)!r}, columns=["a", "b"], batch_size=99, index_cache={str(cache)!r})
            assert reader.filter((col("b") == 3) | (col("a") < 50)).num_rows == {len(PASSING)}
            for entry in glob.glob({str(cache / "*.rows1")!r}):
                try:
                    os.unlink(entry)  # Forces it to be written again.
                except OSError:
                    pass
    """)
    command = [sys.executable, "-W", "error", "-c", program]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    reader, found = reader_of(path, cache), []
    threads = [threading.Thread(target=lambda: found.append(rows_of(reader.filter(CONDITION)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [PASSING] * 4
    for process in running:
        _, err = process.communicate(timeout=500)
        # An entry may vanish between its creation and its sync.
        assert process.returncode == 0, err
    assert known([reader_of(path, cache).filter(CONDITION) for _ in range(2)][1])
    assert not list(cache.glob(".*"))
