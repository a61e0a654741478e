"""Damaged blocks that are left out: which rows are lost, where all other rows are, and how losses are counted.

The tests write blocks byte by byte, so they know the rows of each block and which of them are damaged. Batches of the
undamaged file, without these rows, are the expected batches.

FASTPIPE_DAMAGED_FILES sets the number of files with random flips of bits. `make soak` reads more.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
import tfrecords
import wire
from fastpipe.errors import (
    DamageError,
    FastpipeError,
    LimitError,
    MalformedFileError,
    NullValueError,
    ShapeError,
    StateError,
    StorageError,
    UnsupportedError,
    ValueRangeError,
)

FILES = int(os.environ.get("FASTPIPE_DAMAGED_FILES", "60"))
ANY = fastpipe.Skip(max_units=10**6, max_fraction=1.0)
ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"shuffle": True, "shuffle_buffer": 7, "seed": 1},
    {"shuffle": True, "seed": 2},
    {"shuffle": "block", "shuffle_buffer": 5, "seed": 3},
    {"shuffle": "buffer", "seed": 4},
)
SCHEMA = wire.record(
    "Row",
    id="long",
    vector=wire.list_of("float"),
    items=wire.list_of("int"),
    maybe=["null", "double"],
    words=wire.list_of("string"),
    sparse=wire.record("Sparse", indices0=wire.list_of("long"), values=wire.list_of("float")),
    text="string",
)
FEATURES: dict[str, Any] = {
    "id": fastpipe.DenseSpec((), "int64"),
    "vector": fastpipe.DenseSpec((2,), "float32"),
    "items": fastpipe.RaggedSpec((None,), "int32"),
    "maybe": fastpipe.DenseSpec((), "float64", on_null="mask"),
    "words": fastpipe.RaggedSpec((None,), "string"),
    "sparse": fastpipe.SparseSpec((100,), "float32"),
    "text": fastpipe.DenseSpec((), "string"),
}


def row(index: int) -> dict[str, Any]:
    return {
        "id": index,
        "vector": [index, -index],
        "items": list(range(index % 4)),
        "maybe": None if index % 3 == 0 else index / 2,
        "words": ["w" * (index % 5)] * (index % 3),
        "sparse": {"indices0": list(range(0, 30 * (index % 4), 30)), "values": [index] * (index % 4)},
        "text": f"text {index}",
    }


def encoded(index: int, *, damaged: bool = False) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(SCHEMA), row(index))
    # The text is the last field.
    return out.getvalue()[:-1] + b"\xff" if damaged else out.getvalue()


class Block(NamedTuple):
    """A block of a file: its number of rows, and the rows of it that are damaged. None if its bytes are destroyed."""

    rows: int
    damaged: frozenset[int] | None = frozenset()


class Files(NamedTuple):
    clean: Path
    damaged: Path
    lost: frozenset[int]
    """The ids of the lost rows."""
    blocks: list[tuple[int, int, int, int]]
    """Index, start, end, and number of lost rows of each damaged block."""

    def reader(self, path: Path | None = None, **options: Any) -> fastpipe.Reader:
        options = {"features": FEATURES, "batch_size": 4, "on_error": ANY} | options
        return fastpipe.read_avro(self.damaged if path is None else path, **options)

    def expected(self, **options: Any) -> list[list[dict[str, Any]]]:
        with self.reader(self.clean, **options) as reader:
            return [[found for found in rows(batch) if found["id"] not in self.lost] for batch in reader]


def write(folder: Path, blocks: list[Block], codec: str) -> Files:
    (folder / "clean").mkdir(parents=True, exist_ok=True)
    (folder / "damaged").mkdir(exist_ok=True)
    head = wire.header(SCHEMA, codec)
    clean, damaged, lost, places, first = [head], [head], set(), [], 0
    for number, (count, bad) in enumerate(blocks):
        ids = range(first, first + count)
        first += count
        data = b"".join(encoded(index) for index in ids)
        clean.append(wire.block(count, data, codec))
        start = sum(map(len, damaged))
        if bad is None:
            size = len(wire.compress(codec, data))
            damaged.append(wire.stored(count, b"\xff" * size))
            missing = set(ids)
        else:
            data = b"".join(encoded(index, damaged=index - ids.start in bad) for index in ids)
            damaged.append(wire.block(count, data, codec))
            missing = {ids.start + index for index in bad if index < count}
        lost |= missing
        if missing:
            places.append((number, start, start + len(damaged[-1]), len(missing)))
    (folder / "clean/x.avro").write_bytes(b"".join(clean))
    (folder / "damaged/x.avro").write_bytes(b"".join(damaged))
    return Files(folder / "clean/x.avro", folder / "damaged/x.avro", frozenset(lost), places)


def rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a batch, and checks that all its arrays have as many."""
    found: list[dict[str, Any]] = fastpipe.to_arrow(batch, features=FEATURES).to_pylist()
    assert all(len(values) == len(found) for values in batch.values())
    marks = batch.get("valid", np.ones(len(found), bool)).tolist()
    return [values | {"valid": mark} for values, mark in zip(found, marks, strict=True)]


def summary(reader: fastpipe.Reader) -> list[tuple[int, int, int, int]]:
    return [(loss.block, loss.start, loss.end, loss.rows) for loss in reader.losses]


@pytest.fixture
def some(tmp_path: Path) -> Files:
    blocks = [Block(5), Block(7, None), Block(6, frozenset({0, 4})), Block(1, None), Block(8), Block(3, frozenset({2}))]
    return write(tmp_path, blocks, "deflate")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("codec", wire.CODECS)
def test_all_other_rows_keep_their_places(tmp_path: Path, codec: str, order: dict[str, Any], threads: int) -> None:
    blocks = [Block(5), Block(7, None), Block(6, frozenset({0, 4})), Block(1, None), Block(8), Block(3, frozenset({2}))]
    files = write(tmp_path, blocks, codec)
    options = order | {"num_threads": threads, "epochs": 2}
    with files.reader(**options) as reader:
        assert list(map(rows, reader)) == files.expected(**options)
        assert summary(reader) == files.blocks
        assert {loss.file for loss in reader.losses} == {str(files.damaged)}


_BLOCKS = st.builds(
    lambda count, bad: Block(count, bad and frozenset(index for index in bad if index < count)),
    st.integers(1, 12),
    st.one_of(st.just(frozenset()), st.none(), st.frozensets(st.integers(0, 11), max_size=3)),
)


@given(
    blocks=st.lists(_BLOCKS, min_size=1, max_size=12),
    codec=st.sampled_from(["null", "snappy"]),
    order=st.sampled_from(ORDERS),
    batch_size=st.integers(1, 9),
    ranks=st.sampled_from([1, 2, 4]),
    threads=st.sampled_from([1, 2]),
    uneven=st.sampled_from(["pad", "allow"]),
    stop=st.integers(0, 20),
)
def test_resuming_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    blocks: list[Block],
    codec: str,
    order: dict[str, Any],
    batch_size: int,
    ranks: int,
    threads: int,
    uneven: str,
    stop: int,
) -> None:
    files = write(tmp_path_factory.mktemp("files"), blocks, codec)
    options = order | {"batch_size": batch_size, "num_threads": threads, "epochs": 2, "world_size": ranks}
    # Ranks may get no block with orders that divide blocks.
    options["on_uneven"] = "allow" if order.get("shuffle") in ("block", "buffer") else uneven
    found = set()
    for rank in range(ranks):
        expected = files.expected(**options, rank=rank)
        with files.reader(**options, rank=rank) as reader:
            batches = iter(reader)
            first = [rows(next(batches)) for _ in range(min(stop, len(reader)))]
            state = reader.state_dict()
            assert len(state.get("losses", [])) == len(reader.losses)
            assert state == reader.state_dict()
            whole = first + list(map(rows, batches))
            assert whole == expected
            found |= set(summary(reader))
        with files.reader(**options, rank=rank) as again:
            again.load_state_dict(state)
            assert first + list(map(rows, again)) == expected
            assert summary(again) == summary(reader)
    assert found == set(files.blocks)


@pytest.mark.parametrize("uneven", ["pad", "drop"])
@pytest.mark.parametrize("order", ORDERS[:3], ids=str)
def test_filled_rows_keep_their_places(some: Files, order: dict[str, Any], uneven: str) -> None:
    skip = fastpipe.Skip(max_fraction=1.0, fill=True)
    options = order | {"on_uneven": uneven, "world_size": 2, "batch_size": 4}
    for rank in range(2):
        with (
            some.reader(some.clean, on_error="raise", rank=rank, **options) as clean,
            some.reader(on_error=skip, rank=rank, **options) as reader,
        ):
            assert reader._passes.one_size == (uneven == "pad")
            tables = [fastpipe.to_arrow(batch).to_pylist() for batch in reader]
            for expected, found in zip(map(rows, clean), tables, strict=True):
                for values, row in zip(expected, found, strict=True):
                    if values["id"] in some.lost:
                        assert not row["valid"]
                        assert [row[name] for name in ("id", "vector", "items", "maybe", "words", "text")] == [
                            *(0, [0, 0], [], None, [], ""),
                        ]
                        assert row["sparse"]["values"] == []
                    else:
                        assert {name: row[name] for name in values if name != "sparse"} == {
                            name: value for name, value in values.items() if name != "sparse"
                        }
        with some.reader(on_error=skip, rank=rank, **options) as stream:
            for table, streamed in zip(tables, stream.to_arrow_reader(), strict=True):
                assert streamed.schema == stream._passes.arrow_schema()
                for name in ("id", "valid", "items"):
                    assert streamed[name].to_pylist() == [row[name] for row in table]
        assert stream.losses == reader.losses


def test_filled_rows_are_not_described(some: Files) -> None:
    with some.reader(on_error=fastpipe.Skip(max_fraction=1, fill=True)) as reader:
        assert reader.describe().num_rows == 30 - len(some.lost)


def test_a_feature_named_like_the_marks_is_refused(some: Files) -> None:
    features = {"valid": fastpipe.DenseSpec((), "int64", field="id")}
    with pytest.raises(ValueError, match="valid"):
        some.reader(features=features, on_error=fastpipe.Skip(fill=True))


def test_states_without_losses_are_unchanged(some: Files) -> None:
    states = []
    for on_error in ("raise", ANY):
        with some.reader(some.clean, on_error=on_error, seed=3) as reader:
            next(iter(reader))
            states.append(reader.state_dict())
    assert states[0] == states[1]
    assert "losses" not in states[0]


def test_damage_is_an_error_by_default(some: Files) -> None:
    with some.reader(on_error="raise") as reader, pytest.raises(MalformedFileError):
        list(reader)
    assert reader.losses == []


@pytest.mark.parametrize("limits", [{"max_units": 3, "max_fraction": 1.0}, {"max_fraction": 10 / 30}])
def test_more_losses_than_allowed(some: Files, limits: dict[str, Any]) -> None:
    with some.reader(on_error=fastpipe.Skip(**limits), batch_size=1) as reader:
        batches = iter(reader)
        with pytest.raises(DamageError, match=r"30 rows .*block 1, bytes .*allow more") as raised:
            list(batches)
        assert raised.value.losses == reader.losses
        assert isinstance(pickle.loads(pickle.dumps(raised.value)), DamageError)
        with pytest.raises(FastpipeError, match="DamageError"):
            next(batches)
        # The state is before the batch that exceeds the limits.
        state = reader.state_dict()
        reader.load_state_dict(state)
        with pytest.raises(DamageError):
            iter(reader)
    with some.reader(batch_size=1) as allowed:
        allowed.load_state_dict(state)
        list(allowed)
        assert summary(allowed) == some.blocks


def test_exactly_as_many_losses_as_allowed(some: Files) -> None:
    lost = sum(block[-1] for block in some.blocks)
    with some.reader(on_error=fastpipe.Skip(max_units=4, max_fraction=lost / 30), epochs=3) as reader:
        assert sum(len(batch["id"]) for batch in reader) == 3 * (30 - lost)
    with some.reader(some.clean, on_error=fastpipe.Skip(max_units=0, max_fraction=0)) as reader:
        assert sum(len(batch["id"]) for batch in reader) == 30


def test_each_loss_is_logged_once(some: Files, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fastpipe"), some.reader(epochs=2) as reader:
        list(reader)
        list(reader)
        reader.batch_at(2)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == len(some.blocks)
    assert all(f"{lost} rows are lost, of block {number}, " in "\n".join(texts) for number, _, _, lost in some.blocks)


def test_a_lost_unit_is_not_judged_again(tmp_path: Path) -> None:
    files = write(tmp_path, [Block(5), Block(7, None), Block(6, frozenset({0, 4}))], "null")
    with files.reader(batch_size=18) as reader:
        list(reader)
        state = reader.state_dict()
    with files.reader(files.clean, batch_size=18) as repaired:
        repaired.load_state_dict(state)
        assert list(next(iter(repaired))["id"]) == [*range(5), *range(12, 18)]
        assert summary(repaired) == files.blocks


def test_states_with_losses_need_a_reader_that_allows_them(some: Files) -> None:
    with some.reader() as reader:
        list(reader)
        state = reader.state_dict()
    with pytest.raises(StateError, match=r"on_error=fastpipe\.Skip"):
        some.reader(on_error="raise").load_state_dict(state)
    copy = pickle.loads(pickle.dumps(reader))
    assert copy.losses == reader.losses


def test_every_way_to_read_leaves_out_the_same_rows(some: Files) -> None:
    kept = [index for index in range(30) if index not in some.lost]
    with some.reader() as reader:
        table = reader.to_arrow_reader().read_all()
        assert table["id"].to_pylist() == kept
        assert [list(reader.batch_at(step)["id"]) for step in range(len(reader))] == [
            [found["id"] for found in batch] for batch in some.expected()
        ]
        half = reader.take(range(0, 30, 2))
        assert [index for batch in half for index in batch["id"]] == [index for index in kept if index % 2 == 0]
        assert reader.describe().num_rows == len(kept)
        parts = reader.split(0.5, 0.5, seed=3)
        assert sorted(index for part in parts for batch in part for index in batch["id"]) == kept
        doubled = reader.map(lambda batch: {"twice": 2 * batch["id"]})
        assert [value for batch in doubled for value in batch["twice"]] == [2 * index for index in kept]


def test_a_destroyed_dataset_has_empty_batches(tmp_path: Path) -> None:
    files = write(tmp_path, [Block(3, None), Block(2, None)], "null")
    for order in ORDERS:
        with files.reader(batch_size=2, **order) as reader:
            assert [rows(batch) for batch in reader] == [[], [], []]


@pytest.mark.parametrize(
    ("action", "advice"),
    [
        (lambda reader: reader.cache(), "on_error"),
        (lambda reader: reader.bucket("items"), "on_error"),
        (lambda reader: fastpipe.mix([reader, reader]), "filter|on_error"),
        (lambda reader: reader.serve(), "on_error"),
        (lambda reader: reader.lease("sqlite:///ledger.db", worker_name="a"), "on_error"),
        (lambda reader: reader._passes.worker(2, 0), "num_workers=0"),
    ],
)
def test_what_is_not_supported_is_refused(some: Files, action: Callable[[Any], Any], advice: str) -> None:
    with some.reader(batch_size=4) as reader, pytest.raises(UnsupportedError, match=advice):
        action(reader)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_units": -1}, ValueError),
        ({"max_units": 1.5}, TypeError),
        ({"max_fraction": 1.5}, ValueError),
        ({"max_fraction": float("nan")}, ValueError),
        ({"max_fraction": "all"}, TypeError),
    ],
)
def test_limits_are_checked(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        fastpipe.Skip(**arguments)


@pytest.mark.parametrize(("on_error", "error"), [("skip", ValueError), (None, TypeError), (fastpipe.Skip, TypeError)])
def test_on_error_is_checked(some: Files, on_error: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"fastpipe\.Skip"):
        some.reader(on_error=on_error)


def test_data_that_does_not_fit_still_raises(some: Files) -> None:
    features = FEATURES | {"vector": fastpipe.DenseSpec((3,), "float32")}
    with some.reader(features=features) as reader, pytest.raises(ShapeError):
        list(reader)


@pytest.mark.parametrize("features", [None, FEATURES])
def test_damage_between_blocks_raises_an_error_with_advice(some: Files, features: Any) -> None:
    data = bytearray(some.clean.read_bytes())
    data[-1] ^= 1
    some.damaged.write_bytes(data)
    with pytest.raises(MalformedFileError, match="sync marker") as raised:
        some.reader(features=features)
    assert "Restore the file" in raised.value.__notes__[0]


def test_a_changed_file_still_raises(some: Files) -> None:
    with some.reader() as reader:
        data = bytearray(some.damaged.read_bytes())
        os.utime(some.damaged, ns=(1, 1))
        some.damaged.write_bytes(data)
        with pytest.raises(StorageError):
            list(reader)


def _flipped(folder: Path, seed: int) -> tuple[Files, set[int]]:
    """Writes a file, some bits of whose blocks are flipped. Returns the rows of the blocks without flips, too."""
    draw = random.Random(seed)
    codec = draw.choice(wire.CODECS)
    files = write(folder, [Block(draw.randrange(1, 12)) for _ in range(draw.randrange(1, 8))], codec)
    data = bytearray(files.clean.read_bytes())
    sound = set()
    with files.clean.open("rb") as file:
        first = 0
        for block in fastavro.block_reader(file):
            ids = set(range(first, first + block.num_records))
            first += block.num_records
            if draw.random() < 0.5:
                sound |= ids
                continue
            # The header of the block has at least two bytes, the first varint and the second.
            start, end = block.offset, block.offset + block.size - 16
            at = start + len(wire.long(block.num_records)) + len(wire.long(_stored(data, start)))
            for _ in range(draw.choice([1, 1, 2, 5])):
                data[draw.randrange(at, end)] ^= 1 << draw.randrange(8)
    files.damaged.write_bytes(data)
    return files, sound


def _stored(data: bytearray, start: int) -> int:
    """Returns the number of stored bytes in the header of a block."""
    values = []
    for _ in range(2):
        value = shift = 0
        while True:
            byte = data[start]
            start += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        values.append(value >> 1)
    return values[1]


def _reads(files: Files, sound: set[int]) -> Iterator[Any]:
    """Yields what reading in each order finds: the losses and the rows. None for an error."""
    for order in ORDERS:
        for threads in (1, 2):
            with files.reader(batch_size=5, num_threads=threads, **order) as reader:
                try:
                    found = [found for batch in reader for found in rows(batch)]
                except (ShapeError, ValueRangeError, NullValueError, LimitError, MalformedFileError):
                    yield None
                    continue
                assert reader.num_rows - len(found) == sum(loss.rows for loss in reader.losses)
                assert sound <= {values["id"] for values in found}
                yield summary(reader), sorted(map(repr, found))


@pytest.mark.parametrize("part", range(10))
def test_flipped_bits_lose_the_same_rows_in_every_order(tmp_path: Path, part: int) -> None:
    for seed in range(part * FILES // 10, (part + 1) * FILES // 10):
        files, sound = _flipped(tmp_path / str(seed), seed)
        first, *others = _reads(files, sound)
        assert all(found == first for found in others), seed


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_damaged_records_of_tfrecord_files(tmp_path: Path, order: dict[str, Any], threads: int) -> None:
    framed = [bytearray(tfrecords.frame(tfrecords.example({"id": index, "pad": "x" * 900}))) for index in range(300)]
    (tmp_path / "clean.tfrecord").write_bytes(b"".join(framed))
    lost = {0, 17, 18, 150, 299}
    for index in lost:
        # Data, or its checksum.
        framed[index][-1 if index % 2 else 100] ^= 4
    (tmp_path / "damaged.tfrecord").write_bytes(b"".join(framed))
    options: dict[str, Any] = order | {"batch_size": 32, "features": {"id": fastpipe.DenseSpec((), "int64")}}
    with fastpipe.read_tfrecord(tmp_path / "clean.tfrecord", **options) as clean:
        expected = [[index for index in batch["id"].tolist() if index not in lost] for batch in clean]
    with fastpipe.read_tfrecord(
        tmp_path / "damaged.tfrecord", on_error=ANY, num_threads=threads, epochs=2, **options
    ) as reader:
        found = [batch["id"].tolist() for batch in reader]
        assert found[: len(expected)] == expected
        assert sum(loss.rows for loss in reader.losses) == len(lost)
        assert "checksum" in reader.losses[0].reason
        state = reader.state_dict()
    with fastpipe.read_tfrecord(tmp_path / "damaged.tfrecord", on_error=ANY, epochs=2, **options) as again:
        again.load_state_dict(state)
        assert again.losses == reader.losses
