"""Checksums in block indexes: every changed bit of a block's stored data is found, and only its block is lost.

The tests write blocks byte by byte, so they know the bytes and the rows of each block.

FASTPIPE_FLIPPED_BITS sets the number of flipped bits. `make soak` flips more.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fastpipe
import fixtures
import tfrecords
import wire
from fastpipe import _fastpipe, col
from fastpipe._files._in_memory_files import lowered
from fastpipe.errors import MalformedFileError, StorageError
from fixtures import Run
from xxh3_oracle import xxh3

FLIPS = int(os.environ.get("FASTPIPE_FLIPPED_BITS", "400"))
CODECS = ("null", "deflate", "zstandard", "snappy")
ANY = fastpipe.Skip(max_units=10**6, max_fraction=1.0)
LONG_AGO = 1_600_000_000_123_456_789
SCHEMA = wire.record("Row", id="long", value="double", text="string")
FEATURES: dict[str, Any] = {
    "id": fastpipe.DenseSpec((), "int64"),
    "value": fastpipe.DenseSpec((), "float64"),
    "text": fastpipe.DenseSpec((), "string"),
}
ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"shuffle": True, "shuffle_buffer": 7, "seed": 1},
    {"shuffle": True, "seed": 2, "num_threads": 2},
    {"shuffle": "block", "shuffle_buffer": 5, "seed": 3},
)
WARNING = "Create it again with fastpipe index --checksums"


class Placed(NamedTuple):
    """A block of a file: the bytes of it and of its stored data, and its rows."""

    start: int
    end: int
    data: range
    rows: range


def aged(path: Path, modified: int = LONG_AGO) -> Path:
    """Sets an old timestamp, because recently modified files are not indexed."""
    os.utime(path, ns=(modified, modified))
    return path


def write(path: Path, codec: str, counts: list[int]) -> list[Placed]:
    """Writes a file with blocks of this many rows."""
    out, places, first = wire.header(SCHEMA, codec), [], 0
    for count in counts:
        rows = range(first, first + count)
        data = b"".join(wire.long(i) + wire.double(i / 7) + wire.text(f"text {i}" * (i % 5)) for i in rows)
        block, stored = wire.block(count, data, codec), len(wire.compress(codec, data))
        after_data = len(out) + len(block) - len(wire.SYNC)
        places.append(Placed(len(out), len(out) + len(block), range(after_data - stored, after_data), rows))
        out, first = out + block, first + count
    path.write_bytes(out)
    aged(path)
    return places


def flip(path: Path, at: int, bit: int) -> None:
    """Flips a bit, which neither the size nor the timestamp reveals."""
    with path.open("r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1 << bit]))
    aged(path)


def read(path: Path, cache: Path | None, **options: Any) -> list[list[tuple[Any, ...]]]:
    """Returns the rows of each batch."""
    with fastpipe.read_avro(path, **{"features": FEATURES, "batch_size": 4, "index_cache": cache, **options}) as reader:
        return [rows(batch) for batch in reader]


def rows(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    return list(zip(batch["id"].tolist(), batch["value"].tolist(), batch["text"].to_list(), strict=True))


def create(path: Path, cache: Path) -> str:
    """Creates an index with checksums, and returns the outcome."""
    return _fastpipe.index_file(lowered([str(path)], cache), lambda behind: None, "avro with checksums")[4]


def entry(cache: Path) -> Path:
    """Returns the only entry of a cache."""
    (path,) = cache.iterdir()
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.avro"


run = fixtures.command(200)


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_bit_is_found(codec: str, path: Path, cache: Path) -> None:
    draw = random.Random(codec)
    for file in range(4):
        cache.mkdir()
        places = write(path, codec, [draw.randrange(1, 12) for _ in range(draw.randrange(1, 9))])
        assert create(path, cache) == "now"
        whole = [read(path, cache, **order) for order in ORDERS]
        for number in range(FLIPS // len(CODECS) // 4):
            block = draw.randrange(len(places))
            at, bit, order = draw.choice(places[block].data), draw.randrange(8), number % len(ORDERS)
            flip(path, at, bit)
            options = ORDERS[order] | {"features": FEATURES, "batch_size": 4, "index_cache": cache, "on_error": ANY}
            with fastpipe.read_avro(path, **options) as reader:
                found = [rows(batch) for batch in reader]
            lost = places[block].rows
            assert found == [[row for row in batch if row[0] not in lost] for batch in whole[order]], (file, at, bit)
            (loss,) = reader.losses
            assert (loss.file, loss.block, loss.start, loss.end, loss.rows) == (
                *(str(path), block, places[block].start, places[block].end, len(lost)),
            )
            assert "checksum" in loss.reason
            flip(path, at, bit)
        assert read(path, cache) == whole[0]
        shutil.rmtree(cache)


def test_the_error_names_the_block_its_bytes_and_both_checksums(path: Path, cache: Path) -> None:
    # The oracle hashes up to 16 bytes.
    header = wire.header('"double"')
    blocks = [wire.block(1, wire.double(value)) for value in (1.5, 2.5, 3.5)]
    path.write_bytes(header + b"".join(blocks))
    aged(path)
    create(path, cache)
    start = len(header) + len(blocks[0]) + 2
    flip(path, start + 3, 5)
    changed = path.read_bytes()[start : start + 8]
    features = {"value": fastpipe.DenseSpec((), "float64")}
    with (
        fastpipe.read_avro(path, features=features, batch_size=1, index_cache=cache) as reader,
        pytest.raises(MalformedFileError) as raised,
    ):
        list(reader)
    error = raised.value
    assert (error.path, error.block, error.offset) == (str(path), 1, start - 2)
    assert f"expected checksum {xxh3(wire.double(2.5)):016x}" in str(error)
    assert f"(bytes {start} to {start + 8}), found {xxh3(changed):016x}" in str(error)
    # Without checksums, the wrong value can't be noticed.
    with fastpipe.read_avro(path, features=features, batch_size=3) as reader:
        (batch,) = reader
    assert batch["value"].tolist()[::2] == [1.5, 3.5]
    assert batch["value"].tolist()[1] != 2.5


def test_blocks_are_checked_in_every_way_of_reading(path: Path, cache: Path) -> None:
    places = write(path, "null", [5, 5, 5])
    create(path, cache)
    flip(path, places[1].data[1], 0)  # The first value of the block.
    with fastpipe.read_avro(path, features=FEATURES, batch_size=4, index_cache=cache) as reader:
        sources = [
            lambda: list(reader),
            lambda: list(pickle.loads(pickle.dumps(reader))),
            lambda: reader.batch_at(1),
            lambda: list(reader.filter(col("id") >= 0)),
            lambda: list(reader.take([7])),
            lambda: list(reader.map(lambda batch: batch)),
            lambda: reader.to_arrow_reader().read_all(),
            lambda: reader.describe(),
        ]
        for source in sources:
            with pytest.raises(MalformedFileError, match="expected checksum"):
                source()
    for options in ({"columns": ["id"]}, {"columns": ["text"]}):
        with (
            fastpipe.read_avro(path, batch_size=15, index_cache=cache, **options) as reader,
            pytest.raises(MalformedFileError, match="expected checksum"),
        ):
            list(reader)


def test_large_blocks_are_checked_up_to_their_ends(path: Path, cache: Path) -> None:
    # Their checksums are computed in pieces.
    text = b"x" * 2_500_000
    path.write_bytes(wire.container('"bytes"', [(1, wire.text(text)), (1, wire.text(text))]))
    aged(path)
    create(path, cache)
    features = {"value": fastpipe.DenseSpec((), "string")}
    with fastpipe.read_avro(path, features=features, batch_size=2, index_cache=cache) as reader:
        (batch,) = reader
        assert batch["value"].to_list() == [text.decode()] * 2
    flip(path, path.stat().st_size - len(wire.SYNC) - 1, 0)
    with fastpipe.read_avro(path, features=features, batch_size=1, index_cache=cache, on_error=ANY) as reader:
        assert [len(batch["value"]) for batch in reader] == [1, 0]


# --- The entries ---


def test_readers_never_replace_checksums(path: Path, cache: Path) -> None:
    places = write(path, "null", [5_000, 5_000])
    # Readers create indexes without checksums.
    expected = read(path, cache)
    plain = entry(cache)
    before = plain.read_bytes()
    assert create(path, cache) == "now"
    (summed,) = set(cache.iterdir()) - {plain}
    both = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in (plain, summed)}
    assert both[plain][0] == before
    assert create(path, cache) == "before"
    assert read(path, cache) == expected
    assert fastpipe.infer_features(path, index_cache=cache).keys() == FEATURES.keys()
    assert _fastpipe.index_file(lowered([str(path)], cache), lambda behind: None)[4] == "before"
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in cache.iterdir()} == both
    flip(path, places[1].data[8], 0)
    with pytest.raises(MalformedFileError, match="expected checksum"):
        read(path, cache)
    # An index without checksums is enough to read the file.
    summed.unlink()
    assert len(read(path, cache)) == len(expected)


def test_checksums_of_a_changed_file_are_not_used(path: Path, cache: Path) -> None:
    places = write(path, "null", [5, 5])
    create(path, cache)
    flip(path, places[1].data[1], 0)
    aged(path, LONG_AGO + 1)
    changed = read(path, cache)
    assert create(path, cache) == "now"
    assert read(path, cache) == changed
    flip(path, places[1].data[1], 0)
    aged(path, LONG_AGO + 1)
    with pytest.raises(MalformedFileError, match="expected checksum"):
        read(path, cache)


def test_every_cut_and_every_changed_byte_of_an_entry(
    path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = write(path, "deflate", [3, 4])
    expected = read(path, None)
    create(path, cache)
    whole = entry(cache).read_bytes()
    damaged = [whole[:n] for n in range(len(whole))]
    damaged += [whole[:n] + bytes([whole[n] ^ 255]) + whole[n + 1 :] for n in range(len(whole))]
    damaged += [whole + b"\0", bytes(1000)]
    flip(path, places[0].data[0], 0)
    flip(path, places[0].data[0], 0)
    for number, data in enumerate(damaged):
        caplog.clear()
        entry(cache).write_bytes(data)
        assert read(path, cache, num_threads=1) == expected
        # A reader can't know the checksums.
        assert entry(cache).read_bytes() == data
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("fastpipe", logging.WARNING)
        assert all(text in record.getMessage() for text in (str(path), str(entry(cache)), WARNING))
        if number % 10 == 0:
            assert create(path, cache) == "now"
            assert entry(cache).read_bytes() == whole


def test_forged_entries_are_damage_or_mismatches(path: Path, cache: Path) -> None:
    """An entry's checksum is not a signature. Counts that it declares must not cost memory or time."""
    write(path, "null", [3, 0, 4])
    expected = read(path, None)
    create(path, cache)
    whole, prefix = entry(cache).read_bytes(), 12
    draw = random.Random(3)
    # The path and its key come first.
    start = prefix + len(os.path.realpath(path))
    refused = 0
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 4])):
            data[draw.randrange(start, len(data))] = draw.choice([0, 1, 2, 127, 128, 255, draw.randrange(256)])
        data[prefix - 4 : prefix] = zlib.crc32(data[prefix:]).to_bytes(4, "little")
        entry(cache).write_bytes(data)
        try:
            assert read(path, cache, num_threads=1) == expected
        except (MalformedFileError, StorageError) as error:
            refused += 1
            assert error.path == str(path)  # noqa: PT017
    assert refused


# --- The command line ---


def test_index_creates_checksums_of_files_of_any_size(run: Run, path: Path, cache: Path) -> None:
    large = path.with_name("y.avro")
    small_places = write(path, "null", [5])
    write(large, "null", [5_000, 0])
    write(path.with_name("empty.avro"), "null", [])
    for state in ("written", "was there"):
        code, out, err = run("index", path.parent, "--checksums", "--cache", cache)
        assert (code, err, out.count(f" {state}\n")) == (0, "", 3)
    assert len(list(cache.iterdir())) == 3
    # Without the option, the same indexes are found.
    assert run("index", path.parent, "--cache", cache)[1].count(" was there\n") == 3
    flip(path, small_places[0].data[0], 1)
    with pytest.raises(MalformedFileError, match="expected checksum"):
        read(path, cache)
    assert len(read(large, cache)) == 1250


def test_index_waits_until_a_new_file_is_old_enough(run: Run, path: Path, cache: Path) -> None:
    write(path, "null", [5])
    path.touch()
    code, out, _ = run("index", path, "--checksums", "--cache", cache)
    assert (code, "written" in out) == (0, True)


def test_index_refuses_checksums_of_other_formats(run: Run, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(tfrecords.frame(tfrecords.example({"x": 1})))
    code, _, err = run("index", path, "--checksums", "--cache", cache)
    assert code == 1
    assert "--checksums is only for Avro files" in err
    code, _, err = run("check", path, "--cache", cache)
    assert code == 1
    assert "--cache is only for Avro files" in err


def test_progress_of_checksums_reaches_the_end_of_the_file(path: Path, cache: Path) -> None:
    write(path, "null", [1] * 100)
    behind: list[int] = []
    _fastpipe.index_file(lowered([str(path)], cache), behind.append, "avro with checksums")
    assert behind == sorted(behind)
    assert (behind[-1], len(behind)) == (path.stat().st_size, 8)
    with pytest.raises(ValueError, match="csv"):
        _fastpipe.index_file(lowered([str(path)], cache), behind.append, "csv")


def test_check_compares_with_checksums(run: Run, path: Path, cache: Path) -> None:
    places = write(path, "null", [5, 6])
    other = path.with_name("y.avro")
    write(other, "null", [7])
    create(path, cache)
    assert run("check", path, "--cache", cache) == (
        *(0, f"{path}: ok, 11 records can be read, compared with checksums\n", ""),
    )
    flip(path, places[1].data[1], 0)
    assert run("check", path)[0] == 0
    code, out, err = run("check", path, other, "--cache", cache)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == f"{path}: DAMAGED, 5 records can be read, compared with checksums"
    assert f"block 1, bytes {places[1].start} to {places[1].end}: 6 records lost: expected checksum" in lines[1]
    assert lines[2] == f"{other}: ok, 7 records can be read, but there are no checksums of this file"
    assert lines[3] == "2 files, 1 damaged, 1 without checksums"
    assert "fastpipe index --checksums" in err
    code, out, _ = run("check", other, "--json", "--cache", cache)
    (file,) = json.loads(out)["files"]
    assert (code, file["ok"], file["has_checksums"]) == (1, True, False)
