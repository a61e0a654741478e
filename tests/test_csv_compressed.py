"""Compressed CSV files, compared with Python's `gzip` and with the decompressed files."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import os
import pickle
import random
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest

import fastpipe
import oracle
from fastpipe import DenseSpec
from strategies import SOME, orders

pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")

FEATURES = {"n": DenseSpec((), "int64"), "s": DenseSpec((), "string")}
# Exceeds the maximum distance between two restart points of a file that is read at random.
LARGE = 17 << 20


def gz(part: bytes) -> bytes:
    return gzip.compress(part, 1, mtime=0)


def zst(part: bytes) -> bytes:
    return bytes(pa.Codec("zstd", 1).compress(part, asbytes=True))


def bgzip(part: bytes) -> bytes:
    """Returns a gzip member as `bgzip` writes it, with its size in a header field."""
    body = zlib.compress(part, 1, wbits=-15)
    head = b"\x1f\x8b\x08\x04" + bytes(4) + b"\x00\xff\x06\x00BC\x02\x00" + struct.pack("<H", len(body) + 25)
    return head + body + struct.pack("<II", zlib.crc32(part), len(part))


def seekable(parts: list[bytes]) -> bytes:
    """Returns the seekable format of zstandard: frames, and a skippable frame with a table of them."""
    frames = [zst(part) for part in parts]
    entries = b"".join(struct.pack("<II", len(frame), len(part)) for frame, part in zip(frames, parts, strict=True))
    table = entries + struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)
    return b"".join(frames) + struct.pack("<II", 0x184D2A5E, len(table)) + table


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def framed(data: bytes, kind: str, size: int = 100_000) -> bytes:
    """Compresses data in parts, which may begin anywhere within a row."""
    parts = cut(data, size)
    if kind == "seekable":
        return seekable(parts)
    return b"".join(map({"gz": gz, "zst": zst, "bgzip": bgzip}[kind], parts))


def rows(count: int, seed: int = 1) -> bytes:
    """Returns rows of about 40 bytes, some with a newline within quotes."""
    draw = random.Random(seed)
    lines = ["n,s"]
    for i in range(count):
        text = f"{draw.getrandbits(100):x}"
        lines.append(f'{i},"{text}\n{i}"' if i % 50 == 0 else f"{i},{text}")
    return ("\n".join(lines) + "\n").encode()


def batches(source: Any, **options: Any) -> list[dict[str, list[Any]]]:
    with fastpipe.read_csv(source, **{"features": FEATURES, "batch_size": 700} | options) as reader:
        return [shown(batch) for batch in reader]


def shown(batch: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: oracle.rows(node, counted=True) for name, node in batch.items()}


@pytest.fixture(scope="module")
def large() -> bytes:
    """Returns text that is too large to be read at random in one piece."""
    return rows(600_000)


@pytest.fixture(scope="module")
def in_one_piece(large: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    assert len(large) > LARGE
    folder = tmp_path_factory.mktemp("large")
    for name, pack in {"gz": gz, "zst": zst}.items():
        (folder / f"x.csv.{name}").write_bytes(pack(large))
        os.utime(folder / f"x.csv.{name}", (1e9, 1e9))
    (folder / "x.csv").write_bytes(large)
    return {name: folder / f"x.csv.{name}" for name in ("gz", "zst")} | {"csv": folder / "x.csv"}


# --- The text ---


@hypothesis.settings(max_examples=SOME)
@hypothesis.given(
    st.lists(st.lists(st.text(st.sampled_from("ab\",;\n 'é😀|"), max_size=8), min_size=2, max_size=2), max_size=30),
    st.lists(st.integers(0, 40), max_size=20),
    st.sampled_from(["gz", "zst", "bgzip", "seekable"]),
    orders(),
)
def test_parts_may_begin_anywhere(table: list[list[str]], sizes: list[int], kind: str, order: dict[str, Any]) -> None:
    """The decompressed text is read correctly, wherever members and frames begin."""
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows([["n", "s"], *table])
    text = out.getvalue().encode()
    parts, at = [], 0
    for size in sizes:
        parts.append(text[at : at + size])
        at += size
    parts.append(text[at:])
    packed = (
        seekable(parts) if kind == "seekable" else b"".join(map({"gz": gz, "zst": zst, "bgzip": bgzip}[kind], parts))
    )
    if kind in ("gz", "bgzip"):
        assert gzip.decompress(packed) == text
    features = {name: DenseSpec((), "string") for name in "ns"}
    options: dict[str, Any] = {"features": features, "batch_size": 3}
    assert batches(packed, **options) == batches(text, **options)
    # The units differ, and therefore the random orders.
    every: Callable[[Any], list[Any]] = lambda source: sorted(  # noqa: E731
        row
        for batch in batches(source, **options | order | {"drop_last": False})
        for row in zip(*batch.values(), strict=True)
    )
    assert every(packed) == every(text)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["gz", "zst"])
def test_a_file_in_one_piece(in_one_piece: dict[str, Path], name: str, threads: int) -> None:
    path, plain = in_one_piece[name], in_one_piece["csv"]
    options: dict[str, Any] = {"batch_size": 5000, "num_threads": threads, "features": {"n": FEATURES["n"]}}
    assert batches(path, **options) == batches(plain, **options)
    buffered = options | {"shuffle": "buffer", "shuffle_buffer": 20_000, "seed": 3}
    assert batches(path, **buffered) == batches(plain, **buffered)
    ranks = [batches(path, **options, rank=rank, world_size=2) for rank in range(2)]
    assert ranks == [batches(plain, **options, rank=rank, world_size=2) for rank in range(2)]
    two = batches(path, **options, epochs=2)
    assert two == batches(path, **options) * 2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["gz", "zst", "bgzip", "seekable"])
@pytest.mark.parametrize("shuffle", [False, True, "block", "buffer"])
def test_a_file_of_several_parts_is_read_in_every_order(kind: str, shuffle: Any, threads: int) -> None:
    data = rows(60_000)
    packed = framed(data, kind)
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 5 if shuffle else None, "num_threads": threads}
    found, plain = batches(packed, **options), batches(data, **options)
    assert sorted(n for batch in found for n in batch["n"]) == list(range(60_000))
    if shuffle in (False, "buffer"):
        assert found == plain
    text = {n: s for batch in plain for n, s in zip(batch["n"], batch["s"], strict=True)}
    assert all(text[n] == s for batch in found for n, s in zip(batch["n"], batch["s"], strict=True))
    assert found == batches(packed, **options | {"num_threads": 3 - threads})


def test_small_files_in_one_piece_are_read_in_every_order(tmp_path: Path) -> None:
    data = rows(20_000)
    for i in range(3):
        (tmp_path / f"{i}.csv.gz").write_bytes(gz(data))
    found = batches(tmp_path, shuffle=True, seed=1)
    assert sorted(n for batch in found for n in batch["n"]) == sorted(list(range(20_000)) * 3)


def test_few_units_lie_between_restart_points() -> None:
    """Reading a unit decompresses the text between the restart point and the unit."""
    data = rows(240_000)
    units: Callable[[bytes], int] = lambda source: len(  # noqa: E731
        fastpipe.read_csv(source, features=FEATURES, batch_size=9)._data.handle.unit_rows()
    )
    assert units(data) > 100
    assert 10 < units(gz(data)) <= 17
    assert units(framed(data, "bgzip", 65_280)) > 100


def test_output_of_common_tools(tmp_path: Path) -> None:
    """`pzstd` writes frames preceded by skippable ones, `zstd` writes one frame, and `gzip` one member."""
    data = rows(50_000)
    plain = tmp_path / "x.csv"
    plain.write_bytes(data)
    made = 0
    for tool, suffix in [
        (["gzip", "-k"], "gz"),
        (["zstd", "-q"], "zst"),
        (["pzstd", "-q", "-p", "4"], "zst"),
        (["zstd", "-q", "--long=27", "-19"], "zst"),
        (["bgzip", "-k"], "gz"),
    ]:
        if shutil.which(tool[0]) is None:
            continue
        packed = tmp_path / f"x.csv.{suffix}"
        packed.unlink(missing_ok=True)
        subprocess.run([*tool, str(plain)], check=True, capture_output=True)
        assert batches(packed) == batches(plain)
        made += 1
    assert made or shutil.which("gzip") is None


# --- Names and contents ---


def test_formats_are_detected_by_content(tmp_path: Path) -> None:
    data = rows(100)
    (tmp_path / "a").write_bytes(zst(data))
    (tmp_path / "b.gz").write_bytes(data)
    assert batches([tmp_path / "a", tmp_path / "b.gz"], batch_size=100) == batches(data, batch_size=100) * 2


def test_directories_hold_compressed_files(tmp_path: Path) -> None:
    data = rows(10)
    for name, content in {"a.csv": data, "b.csv.gz": gz(data), "c.csv.zst": zst(data), "d.tsv": b"x\n"}.items():
        (tmp_path / name).write_bytes(content)
    reader = fastpipe.read_csv(tmp_path, features=FEATURES, batch_size=10)
    assert [os.path.basename(file) for file in reader.files] == ["a.csv", "b.csv.gz", "c.csv.zst"]
    assert reader.num_rows == 30
    tabs = tmp_path / "tabs"
    tabs.mkdir()
    (tabs / "a.tsv.gz").write_bytes(gz(data.replace(b",", b"\t")))
    assert batches(tabs, delimiter="\t") == batches(data)
    (tabs / "a.tsv.gz").unlink()
    with pytest.raises(fastpipe.errors.MissingFileError, match=r"\.csv or \.csv\.gz or \.csv\.zst or \.tsv"):
        fastpipe.read_csv(tabs, batch_size=1)


def test_contents_in_memory() -> None:
    data = rows(30_000)
    packed = framed(data, "gz")
    assert batches(packed) == batches(io.BytesIO(packed)) == batches(memoryview(b"x" + packed)[1:]) == batches(data)
    reader = fastpipe.read_csv([packed, data, zst(data)], features=FEATURES, batch_size=999, shuffle=True, seed=1)
    assert sum(len(batch["n"]) for batch in reader) == 90_000


def test_no_rows() -> None:
    for pack in (gz, zst):
        assert batches(pack(b"n,s\n")) == []
        assert batches(pack(b"n,s")) == []
        with pytest.raises(fastpipe.errors.MalformedFileError, match="found no rows"):
            batches(pack(b""))
        assert batches(pack(b"") + pack(b"n,s\n1,") + pack(b"") + pack(b"x")) == [{"n": [1], "s": ["x"]}]


@pytest.mark.parametrize("pack", [gz, zst])
def test_long_text_without_rows(pack: Callable[[bytes], bytes]) -> None:
    """Chunks without rows in text that expands a thousandfold, and rows longer than one read."""
    filler = b"\n" * (5 << 20)
    long = b'7,"' + b"x\n" * (1 << 20) + b'"\n'
    data = b"n,s\n" + filler + long + b"8,y\n" + long + filler
    assert batches(pack(data)) == batches(data)


# --- Inference, samples, locations, states ---


def test_types_are_inferred_from_the_first_rows(in_one_piece: dict[str, Path]) -> None:
    plain = fastpipe.read_csv(in_one_piece["csv"], batch_size=100)
    for name in ("gz", "zst"):
        reader = fastpipe.read_csv(in_one_piece[name], batch_size=100)
        assert repr(reader.features) == repr(plain.features)
    packed = framed(rows(1000), "bgzip", 1000)
    assert repr(fastpipe.read_csv(packed, batch_size=100).features) == repr(plain.features)


def test_samples() -> None:
    data = rows(60_000)
    packed = framed(data, "bgzip", 65_280)
    drawn = fastpipe.csv.sample_csv(packed, 500, columns=["n"], seed=7, dtype="int64")
    plain = fastpipe.csv.sample_csv(data, 500, columns=["n"], seed=7, dtype="int64")
    assert np.array_equal(drawn.values, plain.values)
    assert drawn.values[:, 0].tolist() == drawn.rows.tolist()
    assert len(fastpipe.csv.sample_csv(packed, 500, columns=["n"], seed=7, method="block").rows)
    reader = fastpipe.read_csv(packed, features=FEATURES, batch_size=10)
    assert [shown(batch)["n"] for batch in reader.take([9, 50_000])] == [[9, 50_000]]


def test_locations_and_fingerprints(tmp_path: Path) -> None:
    data = rows(20_000)
    for name in "ab":
        (tmp_path / f"{name}.csv.gz").write_bytes(framed(data, "gz"))
    reader = fastpipe.read_csv(tmp_path, features=FEATURES, batch_size=1500)
    wanted = fastpipe.csv.CsvLocation(file=str(tmp_path / "b.csv.gz"), row=14 * 1500 + 3 - 20_000)
    assert reader.locate(14, 3, epoch=0) == wanted
    (tmp_path / "b.csv.gz").write_bytes(framed(data, "gz", 90_000))
    with pytest.raises(fastpipe.errors.StateError, match="cannot resume from this state"):
        fastpipe.read_csv(tmp_path, features=FEATURES, batch_size=1500).load_state_dict(reader.state_dict())


def sources(in_one_piece: dict[str, Path]) -> Iterator[tuple[Any, dict[str, Any]]]:
    packed = framed(rows(60_000), "zst", 30_000)
    for shuffle in (False, "buffer"):
        seed = {"seed": 3} if shuffle else {}
        # With a buffer of all rows, most of the text would be decompressed again.
        few = {"shuffle_buffer": 10_000} if shuffle else {}
        for name in ("gz", "zst"):
            yield in_one_piece[name], {"batch_size": 100_000, "shuffle": shuffle, "drop_last": True, **seed, **few}
        yield packed, {"batch_size": 7000, "shuffle": shuffle, **seed}
    yield packed, {"batch_size": 7000, "shuffle": True, "seed": 9}


def test_states_resume_at_every_step(in_one_piece: dict[str, Path]) -> None:
    for source, options in sources(in_one_piece):
        reader = fastpipe.read_csv(source, features={"n": FEATURES["n"]}, **options)
        states, expected = [reader.state_dict()], []
        for batch in reader:
            expected.append(shown(batch))
            states.append(reader.state_dict())
        assert len(expected) > 5
        again = pickle.loads(pickle.dumps(reader))
        for step, state in enumerate(states):
            again.load_state_dict(state)
            # Two batches are enough to check where a pass resumes. One pass is read to its end.
            count = len(expected) if step == 3 else 2
            assert [shown(batch) for batch in itertools.islice(again, count)] == expected[step : step + count]
        for step in (len(expected) - 1, 0, 3, 4):
            assert shown(reader.batch_at(step, epoch=0)) == expected[step]


# --- The stored index ---


@pytest.mark.parametrize("name", ["gz", "zst"])
def test_the_second_opening_decompresses_nothing(
    in_one_piece: dict[str, Path], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The damage is outside of the regions that the header and the digest cover.

    So an error while opening would show that the file was decompressed.
    """
    cache, path = tmp_path / "cache", tmp_path / "x"
    large = in_one_piece[name].read_bytes()
    for source, order in ((large, {}), (framed(rows(60_000), name, 50_000), {"shuffle": True, "seed": 1})):
        path.write_bytes(source)
        os.utime(path, (1e9, 1e9))
        options: dict[str, Any] = {"features": FEATURES, "batch_size": 9000, "index_cache": cache, **order}
        first = batches(path, **options)
        assert first == batches(path, **options)
        (entry,) = cache.iterdir()
        assert entry.stat().st_size < len(source) / 50
        damaged = bytearray(source)
        middle = len(damaged) // 2
        # Larger than a block of zstandard.
        damaged[middle : middle + 200_000] = b"\xff" * 200_000
        path.write_bytes(damaged)
        os.utime(path, (1e9, 1e9))
        reader = fastpipe.read_csv(path, **options)
        assert reader.num_rows == sum(len(batch["n"]) for batch in first)
        # Rows parsed before the damage is detected may be wrong.
        with pytest.raises(fastpipe.FastpipeError) as caught:
            list(reader)
        assert caught.value.path == str(path)
        with pytest.raises(fastpipe.FastpipeError):
            fastpipe.read_csv(path, **options | {"index_cache": None})
        path.write_bytes(source)
        os.utime(path, (1e9, 1e9))
        # A damaged index entry is logged and replaced.
        entry.write_bytes(entry.read_bytes()[:-9])
        caplog.clear()
        assert batches(path, **options) == first
        assert "is damaged" in caplog.text
        caplog.clear()
        assert batches(path, **options) == first
        assert not caplog.text
        entry.unlink()


# --- Errors ---


@pytest.mark.parametrize("name", ["gz", "zst"])
def test_random_orders_need_parts(in_one_piece: dict[str, Path], name: str) -> None:
    path = in_one_piece[name]
    match = r"in one piece: shuffle=\"buffer\".*bgzip.*pzstd.*x\.csv"
    for shuffle in (True, "block"):
        with pytest.raises(fastpipe.errors.UnsupportedError, match=match) as caught:
            fastpipe.read_csv(path, features=FEATURES, batch_size=100, shuffle=shuffle, seed=1)
        assert caught.value.path == str(path)


@pytest.mark.parametrize("name", ["gz", "zst"])
def test_samples_of_a_file_in_one_piece_are_read_in_sequence(in_one_piece: dict[str, Path], name: str) -> None:
    path, plain = in_one_piece[name], in_one_piece["csv"]
    for rows in (1, 50, 20_000):
        drawn = fastpipe.csv.sample_csv(path, rows, columns=["n"], seed=3, dtype="int64")
        expected = fastpipe.csv.sample_csv(plain, rows, columns=["n"], seed=3, dtype="int64")
        assert drawn.rows is not None
        assert (drawn.values == expected.values).all()
        assert drawn.rows.tolist() == fastpipe.csv.sample_csv(plain, rows, columns=["n"], seed=3).rows.tolist()
    reader = fastpipe.read_csv(path, features=FEATURES, batch_size=100)
    assert reader.take([3, 70, 200_000]).num_rows == 3
    last = reader.num_rows - 1
    found = [batch["n"].tolist() for batch in reader.take([3, last], batch_size=1)]
    rows = fastpipe.read_csv(plain, features=FEATURES, batch_size=1).take([3, last])
    assert found == [batch["n"].tolist() for batch in rows]
    assert [batch["n"].tolist() for batch in reader.take([3, 3, last, last], batch_size=3)] == [
        [found[0][0]] * 2 + found[1],
        found[1],
    ]
    with pytest.raises(fastpipe.errors.UnsupportedError, match="cannot read rows at random"):
        reader.take([last, 3])


def with_dictionary(text: bytes) -> bytes:
    """Returns a frame that requires dictionary 77, with uncompressed text."""
    return b"\x28\xb5\x2f\xfd\x21" + bytes([77, len(text)]) + (len(text) << 3 | 1).to_bytes(3, "little") + text


SMALL = b"n,s\n" + b"".join(b"%d,x\n" % i for i in range(100))


@pytest.mark.parametrize(
    ("data", "error", "match", "offset"),
    [
        (gz(SMALL)[:-3], fastpipe.errors.MalformedFileError, "cut short: it ends within the checksum", None),
        (
            gz(SMALL)[:-20],
            fastpipe.errors.MalformedFileError,
            "cut short: it ends within a gzip member",
            len(gz(SMALL)) - 20,
        ),
        (
            zst(SMALL)[:-3],
            fastpipe.errors.MalformedFileError,
            "cut short: it ends within a zstandard",
            len(zst(SMALL)) - 3,
        ),
        (
            gz(SMALL) + b"more",
            fastpipe.errors.MalformedFileError,
            "another gzip member, found something",
            len(gz(SMALL)),
        ),
        (zst(SMALL) + b"more", fastpipe.errors.MalformedFileError, "another zstandard frame, found", len(zst(SMALL))),
        (
            gz(SMALL)[:-8] + bytes(8),
            fastpipe.errors.MalformedFileError,
            "expected checksum 00000000",
            len(gz(SMALL)) - 8,
        ),
        (b"\x1f\x8b\x07" + bytes(20), fastpipe.errors.MalformedFileError, "method 8, found method 7", 0),
        (with_dictionary(SMALL[:200]), fastpipe.errors.UnsupportedError, "dictionary 77", 0),
        (b"\x28\xb5\x2f\xfd\x00\x90" + bytes(20), fastpipe.errors.LimitError, "window of more than 134217728", None),
        (gz(gz(SMALL)), fastpipe.errors.UnsupportedError, "more than once.*gzip", None),
        (zst(gz(b"\xff\xfea\x00")), fastpipe.errors.UnsupportedError, "more than once", None),
        (zst(b"\xff\xfea\x00"), fastpipe.errors.UnsupportedError, "UTF-16", None),
        (b"\xfd7zXZ\x00\x00", fastpipe.errors.UnsupportedError, "with xz", None),
        (b"BZh91AY&SY", fastpipe.errors.UnsupportedError, "with bzip2", None),
        (b"PK\x03\x04....", fastpipe.errors.UnsupportedError, "zip archive", None),
    ],
    ids=itertools.count(),
)
def test_errors_name_the_file_and_its_byte(tmp_path: Path, data: bytes, error: type, match: str, offset: int) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_bytes(data)
    with pytest.raises(error, match=match) as caught:
        batches(path)
    assert caught.value.path == str(path)
    assert offset is None or caught.value.offset == offset


@pytest.mark.parametrize(
    ("text", "options", "error", "match"),
    [
        (
            b"n,s\n1,x\ny,z\n",
            {},
            fastpipe.errors.ValueRangeError,
            r'cannot parse "y" as int64: .*record 1, byte of the decompressed text 8',
        ),
        (
            b"n,s\n1,x\n2\n",
            {},
            fastpipe.errors.MalformedFileError,
            r"1 fields.*record 1, byte of the decompressed text 8",
        ),
        (b'n,s\n1,"x\n', {}, fastpipe.errors.MalformedFileError, r"within quotes.*byte of the decompressed text 4"),
        (b"n,\xff\n", {}, fastpipe.errors.MalformedFileError, r"name isn't UTF-8.*byte of the decompressed text 2"),
        (
            b"n,s\n1,\xff\n",
            {},
            fastpipe.errors.MalformedFileError,
            r"isn't UTF-8.*record 0, byte of the decompressed text 6",
        ),
        (b"n,t\n", {}, fastpipe.errors.SchemaError, 'no column "s"'),
    ],
)
def test_errors_name_the_decompressed_offset(text: bytes, options: dict[str, Any], error: type, match: str) -> None:
    for pack in (gz, zst, lambda text: framed(text, "gz", 3)):
        with pytest.raises(error, match=match) as caught:
            batches(pack(text), **options)
        assert caught.value.offset is None


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
@hypothesis.settings(max_examples=SOME)
@hypothesis.given(st.data())
def test_damage_is_a_typed_error(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["gz", "zst", "bgzip", "seekable"]))
    packed = bytearray(framed(SMALL, kind, 150))
    at = data.draw(st.integers(0, len(packed) - 1))
    if data.draw(st.booleans()):
        del packed[at:]
    else:
        packed[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(
        fastpipe.errors.MalformedFileError,
        fastpipe.errors.UnsupportedError,
        fastpipe.errors.LimitError,
        fastpipe.errors.SchemaError,
        fastpipe.errors.ValueRangeError,
        fastpipe.errors.NullValueError,
    ):
        batches(bytes(packed), on_ragged="skip")


@pytest.mark.parametrize("name", ["gz", "zst"])
def test_a_file_that_changes(in_one_piece: dict[str, Path], name: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    shutil.copy(in_one_piece[name], path)
    reader = fastpipe.read_csv(path, features=FEATURES, batch_size=1000, num_threads=1, prefetch=1)
    found = iter(reader)
    next(found)
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(bytes(1000))
    os.utime(path, (2e9, 2e9))
    with pytest.raises(fastpipe.errors.StorageError, match="the file changed"):
        list(found)


def test_bombs_take_little_memory() -> None:
    """The text is a thousand times larger than the file and contains no end of a row."""
    packed = b"".join([gz(b'n,s\n1,"'), *[gz(bytes(1 << 24))] * 20])
    with pytest.raises(fastpipe.errors.LimitError, match=r"more than 268435456 bytes.*byte of the decompressed text 4"):
        batches(packed)
    many = gz(b"n,s\n1,x\n") + gz(b"") * 50_000
    assert batches(many) == [{"n": [1], "s": ["x"]}]


def test_simultaneous_passes(in_one_piece: dict[str, Path]) -> None:
    """Each pass has a separate position in the text."""
    paths = [in_one_piece["gz"], in_one_piece["gz"]]
    iterators = [iter(fastpipe.read_csv(path, features=FEATURES, batch_size=60_000)) for path in paths]
    steps = [[shown(batch)["n"] for batch in pair] for pair in zip(*iterators, strict=True)]
    assert all(one == other for one, other in steps)
    assert all(before[0][-1] + 1 == behind[0][0] for before, behind in pairwise(steps))
