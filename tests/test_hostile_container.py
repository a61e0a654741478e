"""Container files that are damaged, truncated or malicious outside of their values.

Tests cover headers, blocks, compression and storage. Such files never cause a crash, a hang or unlimited memory use,
but an error with its location and cause.
"""

from __future__ import annotations

import bz2
import functools
import lzma
import os
import random
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from hostile import (
    GIB,
    I64_MAX,
    I64_MIN,
    MALFORMED,
    SMALL,
    SMALL_FEATURES,
    TYPED,
    Case,
    check,
    measured,
    one,
    outcomes,
    small,
    small_row,
)
from wire import CODECS, SYNC, ZSTD_MAGIC, block, container, header, items, long, record, stored, text, varint

# `make soak` changes each byte to every other value, and reads more garbage.
MANY = "FASTPIPE_HOSTILE" in os.environ


@pytest.mark.parametrize("codec", CODECS)
def test_files_cut_at_every_byte(codec: str, tmp_path: Path) -> None:
    whole = small(codec)
    (tmp_path / "whole.avro").write_bytes(whole)
    blocks = fastpipe.avro.AvroFile(tmp_path / "whole.avro").blocks
    first = int(blocks["offset"][0])
    # For each truncation between blocks, the number of rows before it.
    ends = {first: 0, int(blocks["offset"][1]): 2, int(blocks["offset"][2]): 3, len(whole): 5}
    cases = [Case(f"cut at {n}", whole[:n], features=SMALL_FEATURES, batch_size=1) for n in range(len(whole) + 1)]
    complete: list[str] | None = None
    for (case, seen), n in zip(reversed(list(outcomes(tmp_path, cases))), range(len(whole), -1, -1), strict=True):
        if complete is None:
            assert seen.error is None, seen.message
            complete = seen.batches
            assert complete is not None
            assert len(complete) == 5
        if n in ends:
            assert seen.error is None, (case.name, seen.message)
            assert seen.batches == complete[: ends[n]]
            continue
        assert seen.error == "MalformedFileError", (case.name, seen)
        assert seen.where["offset"] is not None
        if n < first:
            assert seen.where["block"] is None
            assert seen.where["offset"] <= n
        else:
            number = max(k for k, offset in enumerate(blocks["offset"]) if offset <= n)
            assert (seen.where["block"], seen.where["offset"]) == (number, blocks["offset"][number]), case.name


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_changed_at_every_position(codec: str, tmp_path: Path) -> None:
    whole = small(codec)
    first = len(header(SMALL, codec))
    cases = []
    for at, byte in enumerate(whole):
        changes = sorted({0xFF, byte ^ 0x01, byte ^ 0x40} - {byte})
        for new in changes if MANY else [changes[at % len(changes)]]:
            data = whole[:at] + bytes([new]) + whole[at + 1 :]
            # Features are inferred from the header. Blocks are read with features that don't depend on it.
            features = SMALL_FEATURES if at >= first else None
            cases.append(Case(f"byte {at}: {byte:#04x} -> {new:#04x}", data, features=features, batch_size=3))
    intact = one(tmp_path, Case("intact", whole, features=SMALL_FEATURES, batch_size=3))
    assert intact.error is None
    silent = 0
    for case, seen in outcomes(tmp_path, cases):
        if case.features is None:
            continue
        if seen.error is not None:
            assert seen.where["block"] is not None, (case.name, seen)
            assert seen.where["offset"] is not None, (case.name, seen)
            assert seen.error == "MalformedFileError" or seen.error == "LimitError", (case.name, seen)
        else:
            silent += seen.batches != intact.batches
    if codec == "snappy":
        assert silent == 0, "the checksum was not verified"


def test_garbage(tmp_path: Path) -> None:
    chance, count = random.Random(7), 100 if MANY else 30
    cases = [Case(f"garbage {i}", chance.randbytes(chance.randrange(300))) for i in range(count)]
    cases += [
        Case(f"magic and garbage {i}", b"Obj\x01" + chance.randbytes(chance.randrange(300))) for i in range(count)
    ]
    for codec in CODECS:
        head = header(SMALL, codec)
        for i in range(count):
            noise = chance.randbytes(chance.randrange(1, 120))
            cases.append(Case(f"{codec}: garbage {i} as a block", head + stored(chance.randrange(5), noise)))
            cases.append(Case(f"{codec}: garbage {i} for blocks", head + noise))
    for case, seen in outcomes(tmp_path, cases):
        if not case.data.startswith(b"Obj\x01"):
            assert seen.error == "MalformedFileError", case.name
            assert seen.where["offset"] == 0


def test_other_magic(tmp_path: Path) -> None:
    whole = small("null")
    cases = [
        Case(str(magic), magic + whole[4:])
        for magic in (b"Obj\x00", b"Obj\x02", b"PAR1", b"\x00\x00\x00\x00", b"obj\x01")
    ]
    cases += [Case("empty", b""), Case("one byte", b"O"), Case("just magic", b"Obj\x01")]
    for case, seen in outcomes(tmp_path, cases):
        assert seen.error == "MalformedFileError", (case.name, seen)
        assert seen.opening
        assert "expected" in seen.where["reason"]


def test_metadata(tmp_path: Path) -> None:
    """Headers whose metadata is missing, damaged or unknown."""
    body = block(1, long(7))
    schema = '"int"'

    def file(*args: Any, **kwargs: Any) -> bytes:
        return header(*args, **kwargs) + body

    expected: list[tuple[Case, str | None, str]] = [
        (Case("no codec", file(schema, None)), None, ""),
        (Case("other metadata", file(schema, metadata={"user.x": b"\xff\xfe", "": b""})), None, ""),
        (Case("unknown codec", file(schema, "lz77")), "UnsupportedError", "lz77"),
        (Case("known codec that isn't read", file(schema, "lzma")), "UnsupportedError", "bzip2 or xz"),
        (Case("empty codec", file(schema, "")), "UnsupportedError", "codec"),
        (Case("codec in capitals", file(schema, "NULL")), "UnsupportedError", "NULL"),
        (Case("codec not UTF-8", file(schema, b"\xff\xff")), "UnsupportedError", "codec"),
        (Case("a very long codec", file(schema, "x" * 100_000)), "UnsupportedError", "codec"),
        (Case("no schema", file(None)), "MalformedFileError", "avro.schema"),
        (Case("no metadata", b"Obj\x01\x00" + SYNC + body), "MalformedFileError", "avro.schema"),
        (Case("schema not UTF-8", file(b'"int"\xff')), "MalformedFileError", "UTF-8"),
        (Case("schema empty", file("")), "SchemaError", "schema"),
        (Case("schema cut short", file('{"type": "rec')), "SchemaError", "schema"),
        (Case("schema a number", file("3")), "SchemaError", "schema"),
        (Case("schema not JSON", file("int")), "SchemaError", "schema"),
        (Case("two schemas", file('"int" "int"')), "SchemaError", "schema"),
        (Case("schema of unknown type", file('"Unknown"')), "SchemaError", "Unknown"),
        (Case("schema with zeros", file(b'"int"\0')), "SchemaError", "schema"),
        (Case("key not UTF-8", file(schema, metadata={b"\xff": b""})), "MalformedFileError", "UTF-8"),
        (
            Case("unknown codec, no blocks", header(schema, "lz77")),
            "UnsupportedError",
            "write the file again",
        ),
    ]
    for (case, error, words), (_, seen) in zip(
        expected, outcomes(tmp_path, [case for case, _, _ in expected]), strict=True
    ):
        assert seen.error == error, (case.name, seen)
        assert error is None or seen.opening
        assert error is None or words in seen.where["reason"], (case.name, seen.message)
        if error is None:
            assert seen.batches == [repr({"value": [7]})]


def test_headers_of_several_map_blocks(tmp_path: Path) -> None:
    """Map blocks with and without sizes are valid (specification, "Maps")."""
    schema = text("avro.schema") + text('"int"')
    codec = text("avro.codec") + text("null")
    other = text("a") + text("b") + text("c") + text("d")
    body = block(1, long(7))
    maps = {
        "one block": items(2, schema + codec),
        "a size": items(-2, schema + codec),
        "two blocks": items(1, schema) + items(1, codec),
        "two sizes": items(-1, codec) + items(-1, schema),
        "mixed": items(-2, other) + items(1, schema) + items(-1, codec) + items(1, other[:4]),
    }
    cases = [Case(name, b"Obj\x01" + data + long(0) + SYNC + body) for name, data in maps.items()]
    for case, seen in outcomes(tmp_path, cases):
        assert seen.batches == [repr({"value": [7]})], (case.name, seen)


def test_headers_with_wrong_sizes(tmp_path: Path) -> None:
    schema = text("avro.schema") + text('"int"')
    body = long(0) + SYNC + block(1, long(7))
    maps = {
        "2^62 entries": items(1 << 62, schema),
        "-2^62 entries": items(-(1 << 62), schema),
        "i64::MIN entries": items(I64_MIN, schema),
        "i64::MAX entries": items(I64_MAX, schema),
        "-2^62 entries, 2^62 bytes": items(-(1 << 62), schema, 1 << 62),
        "a size too small": items(-1, schema, len(schema) - 1),
        "a size too large": items(-1, schema, len(schema) + 1),
        "a size of 0": items(-1, schema, 0),
        "a negative size": items(-1, schema, -5),
        "a size of i64::MIN": items(-1, schema, I64_MIN),
        "a key of 2^62 bytes": long(1) + long(1 << 62) + b"avro",
        "a key of -1 bytes": long(1) + long(-1) + b"avro",
        "a value of 2^62 bytes": long(1) + text("avro.schema") + long(1 << 62),
        "a value of i64::MIN bytes": long(1) + text("avro.schema") + long(I64_MIN),
        "an overlong count": b"\x80" * 10 + b"\x01" + schema,
        "a count beyond 64 bits": b"\xff" * 9 + b"\x02" + schema,
    }
    cases = [Case(name, b"Obj\x01" + data + body) for name, data in maps.items()]
    for case, seen in outcomes(tmp_path, cases):
        assert seen.error == "MalformedFileError", (case.name, seen)
        assert seen.where["block"] is None
        assert seen.where["offset"] is not None
        assert "header" in seen.where["reason"]
        assert seen.seconds < 1


def test_headers_of_many_entries(tmp_path: Path) -> None:
    """Valid headers that are larger than the first read of a file."""
    metadata: dict[str | bytes, bytes] = {f"k{i}": b"v" for i in range(40_000)}
    data = header('"int"', metadata=metadata) + block(1, long(7))
    entries = [text("avro.schema") + text('"int"'), *(text(key) + text(value) for key, value in metadata.items())]
    sized = b"Obj\x01" + items(-len(entries), b"".join(entries)) + long(0) + SYNC + block(1, long(7))
    for case, seen in outcomes(tmp_path, [Case("many", data), Case("with a size", sized)]):
        assert seen.batches == [repr({"value": [7]})], (case.name, seen)


def test_a_header_beyond_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "huge.avro"
    path.write_bytes(b"Obj\x01" + long(1) + text("x") + long(200 << 20))
    os.truncate(path, 201 << 20)  # A hole, which uses no disk space.
    with pytest.raises(fastpipe.errors.LimitError, match="header is larger than") as caught:
        fastpipe.avro.AvroFile(path)
    assert (caught.value.path, caught.value.offset) == (str(path), 0)
    with pytest.raises(fastpipe.errors.LimitError):
        fastpipe.read_avro(path, batch_size=1)


@pytest.mark.parametrize("codec", CODECS)
def test_block_headers_with_wrong_counts(codec: str, tmp_path: Path) -> None:
    schema = record("R", x="long", y="string")
    row = long(7) + text("abc")
    good = block(2, row * 2, codec)
    bad: dict[str, tuple[bytes, str, str]] = {
        "2^62 rows": (block(1 << 62, row, codec), "LimitError", "records"),
        "2^31 rows": (block(1 << 31, row, codec), "LimitError", "records"),
        "2^31 - 1 rows": (block((1 << 31) - 1, row, codec), MALFORMED, "can't hold"),
        "-1 rows": (block(-1, row, codec), MALFORMED, "found -1"),
        "i64::MIN rows": (block(I64_MIN, row, codec), MALFORMED, "found"),
        "-1 bytes": (block(1, row, codec, size=-1), MALFORMED, "found -1"),
        "i64::MIN bytes": (block(1, row, codec, size=I64_MIN), MALFORMED, "found"),
        "2^62 bytes": (block(1, row, codec, size=1 << 62), "LimitError", "size in bytes"),
        "2^31 bytes": (block(1, row, codec, size=1 << 31), "LimitError", "size in bytes"),
        "beyond the file": (block(1, row, codec, size=1 << 30), MALFORMED, "cut short"),
        "a byte too many": (block(1, row, codec, size=len(row) + 40), MALFORMED, ""),
        "one more row": (block(2, row, codec), MALFORMED, ""),
        "one row less": (block(1, row * 2, codec), MALFORMED, "expected the end of the block"),
        "left-over byte": (block(1, row + b"\x00", codec), MALFORMED, "found 1 more bytes"),
        "no rows but bytes": (block(0, row, codec), MALFORMED, ""),
        "rows but no bytes": (stored(1, b""), MALFORMED, ""),
        "rows but empty data": (block(1, b"", codec), MALFORMED, ""),
        "another marker": (block(1, row, codec, sync=b"x" * 16), MALFORMED, "sync marker"),
        "an overlong count": (b"\x80" * 10 + b"\x00" + SYNC, MALFORMED, "varint"),
        "a count beyond 64 bits": (b"\xff" * 9 + b"\x02" + long(0) + SYNC, MALFORMED, "varint"),
        "just a byte": (b"\x02", MALFORMED, ""),
    }
    head = header(schema, codec)
    features = {"x": fastpipe.DenseSpec((), "int64"), "y": fastpipe.DenseSpec((), "string")}
    cases = [Case(name, head + good + data, features=features) for name, (data, _, _) in bad.items()]
    # Another block follows. A size that is too large may extend into it.
    cases += [Case(name, head + good + data + good, features=features) for name, (data, _, _) in bad.items()]
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        _, error, words = bad[case.name]
        assert seen.error == error, (case.name, seen)
        assert words in seen.where["reason"], (case.name, seen)
        assert (seen.where["block"], seen.where["offset"]) == (1, len(head) + len(good)), (case.name, seen)
        assert seen.opening or seen.batches == [repr({"x": [7, 7], "y": ["abc", "abc"]})], (case.name, seen)
        assert seen.seconds < 1


def test_empty_blocks_are_fine(tmp_path: Path) -> None:
    cases = [
        Case(codec, container('"long"', [(0, b""), (1, long(7)), (0, b""), (0, b""), (1, long(8))], codec))
        for codec in CODECS
    ]
    for case, seen in outcomes(tmp_path, cases):
        assert seen.batches == [repr({"value": [7, 8]})], (case.name, seen)


def inflated_bomb() -> bytes:
    """Returns 1.1 GiB of zeros. A full flush resets the deflate stream, so one piece can be repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(8 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return piece * 140 + packer.flush()


def zstd_bomb() -> bytes:
    """Returns a frame (RFC 8878, 3.1.1) of 1.1 GiB.

    Each of its blocks repeats one byte for 128 KiB and is encoded in four bytes.
    """
    # A frame header without a size and with a window of 128 KiB.
    head = ZSTD_MAGIC + b"\x00\x38"

    def repeated(last: int) -> bytes:
        return (last | 1 << 1 | 128 << 10 << 3).to_bytes(3, "little") + b"\x00"

    return head + repeated(0) * 9000 + repeated(1)


def zstd_frames() -> bytes:
    """Returns many frames, each with its size in the header, of 1.1 GiB together."""
    head = ZSTD_MAGIC + b"\xa0" + (1 << 20).to_bytes(4, "little")
    repeated = [(int(i == 7) | 1 << 1 | 128 << 10 << 3).to_bytes(3, "little") + b"\x00" for i in range(8)]
    return (head + b"".join(repeated)) * 1100


def members(compress: Callable[[bytes], bytes]) -> Callable[[], bytes]:
    """Returns a function that makes a sequence of members with 64 MiB of zeros each, of 1.1 GiB together."""
    return lambda: compress(bytes(64 << 20)) * 18


BOMBS = {
    "deflate": ("deflate", inflated_bomb),
    "zstandard": ("zstandard", zstd_bomb),
    "frames": ("zstandard", zstd_frames),
    "bzip2": ("bzip2", members(bz2.compress)),
    "xz": ("xz", members(functools.partial(lzma.compress, preset=0))),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_compression_bombs(bomb: str, tmp_path: Path) -> None:
    """The limit is 1 GiB. Growing to the limit needs a second, smaller buffer at the same time."""
    codec, make = BOMBS[bomb]
    packed = make()
    assert len(packed) < 2 << 20
    data = header('"long"', codec) + block(1, long(7), codec) + stored(1 << 20, packed)
    case = Case(bomb, data, features={"value": fastpipe.DenseSpec((), "int64")}, batch_size=1, count=True)
    (seen,), peak = measured(tmp_path, [case], memory=5 * GIB, patience=40)
    check(case, seen, tmp_path)
    assert seen.error == "LimitError", seen
    assert "1073741824 bytes" in seen.where["reason"]
    assert (seen.where["block"], seen.rows) == (1, 1)
    if sys.platform.startswith("linux"):
        assert peak < 2.5 * GIB


def test_sizes_that_compressed_data_declares(tmp_path: Path) -> None:
    """A declared size doesn't cause an allocation."""
    snappy = {f"snappy of {n} bytes": varint(n) + b"\x00" * 9 for n in (1 << 30, (1 << 32) - 1, 1 << 29, 100_000)}
    snappy["snappy of 2^40 bytes"] = varint(1 << 40) + bytes(9)
    snappy["snappy without a checksum"] = b"\x00"
    snappy["snappy of a byte less"] = varint(7) + bytes([7 << 2]) + b"abcdefgh" + bytes(4)
    # A single-segment frame with its size in eight bytes, and an empty last block.
    frames = {
        f"zstandard of {n} bytes": ZSTD_MAGIC + b"\xe0" + n.to_bytes(8, "little") + b"\x01\x00\x00"
        for n in (1 << 30, 1 << 40, (1 << 64) - 1)
    }
    # A window of 2^41 bytes or more, which is allocated before any data is decoded.
    windows = {w: ZSTD_MAGIC + bytes([0, w]) + b"\x01\x00\x00" for w in (0x89, 0x90, 0xB0, 0xFF)}
    frames |= {f"zstandard window {w:#x}": frame for w, frame in windows.items()}
    cases = [Case(name, header('"long"', "snappy") + stored(1, data)) for name, data in snappy.items()]
    cases += [Case(name, header('"long"', "zstandard") + stored(1, data)) for name, data in frames.items()]
    found, peak = measured(tmp_path, cases, memory=2 * GIB)
    for case, seen in zip(cases, found, strict=True):
        check(case, seen, tmp_path)
        assert seen.error in {"MalformedFileError", "LimitError"}, (case.name, seen)
        if "window" in case.name:
            assert seen.error == "LimitError", (case.name, seen)
            assert "a window of at most 134217728 bytes" in seen.where["reason"]
        assert seen.where["block"] == 0
        assert seen.seconds < 1
    if sys.platform.startswith("linux"):
        assert peak < GIB // 2


def test_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    cases = []
    for codec in CODECS:
        whole = small(codec)
        rows = [small_row(i) for i in range(5)]
        other = container(SMALL, [(1, rows[0]), (2, b"".join(rows[1:3])), (2, b"".join(rows[3:]))], codec)
        changes: dict[str, tuple[str, Any]] = {
            "emptied": ("truncate", 0),
            "cut in its last block": ("truncate", len(whole) - 20),
            "cut in its last marker": ("truncate", len(whole) - 1),
            "cut in its header": ("truncate", 10),
            "zeros": ("write", bytes(len(whole))),
            "other blocks": ("write", other),
            "another marker": ("write", whole.replace(SYNC, b"y" * 16)),
            "garbage after its header": ("write", header(SMALL, codec) + b"\xff" * 999),
            "grown": ("write", whole + b"more"),
            "removed": ("remove", None),
        }
        cases += [Case(f"{codec}: {name}", whole, then=then, features=SMALL_FEATURES) for name, then in changes.items()]
    for case, seen in outcomes(tmp_path, cases):
        codec, _, change = case.name.partition(": ")
        if change == "removed":
            assert seen.rows == 5 or seen.error in {"MissingFileError", "StorageError"}, (case.name, seen)
            continue
        # The change is detected when the file is reopened, before any of it is read.
        assert (seen.error, seen.rows) == ("StorageError", 0), (case.name, seen)
        assert not seen.opening
        assert (seen.where["block"], seen.where["offset"]) == (0, len(header(SMALL, codec)))


def test_a_file_that_changes_all_the_time(tmp_path: Path) -> None:
    """Values may come from before or after a change. The only other outcome is a documented error."""
    path = tmp_path / "x.avro"
    whole, other = small("null"), small("null").replace(text("k"), text("j"))
    path.write_bytes(whole)
    done = threading.Event()

    def change() -> None:
        with path.open("r+b", buffering=0) as file:
            while not done.is_set():
                for data in (other, whole[:300], whole[:350] + bytes(50) + whole[400:], whole):
                    file.seek(0)
                    file.write(data)
                    file.truncate(len(data))

    changer = threading.Thread(target=change)
    changer.start()
    try:
        stop = time.monotonic() + 1.5
        while time.monotonic() < stop:
            try:
                for batch in fastpipe.read_avro(path, batch_size=1, num_threads=2):
                    assert len(batch) == len(SMALL_FEATURES)
            except fastpipe.FastpipeError as error:
                assert type(error).__name__ in TYPED, error
                assert error.path == str(path)
    finally:
        done.set()
        changer.join()


def test_invalid_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder.avro"
    folder.mkdir()
    with pytest.raises(fastpipe.errors.MissingFileError) as missing:
        fastpipe.read_avro(folder, batch_size=1)
    assert missing.value.path == str(folder)
    for look in (fastpipe.avro.AvroFile, lambda path: fastpipe.avro.AvroFile(path).blocks):
        with pytest.raises(fastpipe.FastpipeError) as caught:
            look(folder)
        assert type(caught.value).__name__ in TYPED
        assert caught.value.path == str(folder)
    empty = tmp_path / "empty.avro"
    empty.touch()
    for look in (fastpipe.avro.AvroFile, fastpipe.infer_features, lambda path: fastpipe.read_avro(path, batch_size=1)):
        with pytest.raises(fastpipe.errors.MalformedFileError, match="Obj") as malformed:
            look(empty)
        assert (malformed.value.path, malformed.value.offset) == (str(empty), 0)
    gone = tmp_path / "gone.avro"
    with pytest.raises(fastpipe.errors.MissingFileError) as missing:
        fastpipe.avro.AvroFile(gone)
    assert (missing.value.path, missing.value.errno) == (str(gone), 2)
    if hasattr(os, "symlink"):
        loop = tmp_path / "loop.avro"
        loop.symlink_to(loop)
        with pytest.raises((fastpipe.errors.StorageError, fastpipe.errors.MissingFileError)):
            fastpipe.avro.AvroFile(loop)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a user without root privileges")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "x.avro"
    path.write_bytes(small("null"))
    path.chmod(0)
    for look in (fastpipe.avro.AvroFile, lambda path: fastpipe.read_avro(path, batch_size=1)):
        with pytest.raises(fastpipe.errors.StorageError) as caught:
            look(path)
        assert isinstance(caught.value, OSError)
        assert caught.value.path == str(path)
        assert caught.value.errno == 13


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    """Opening a pipe waits for a writer, so it must not be opened for reading."""
    path = tmp_path / "pipe.avro"
    os.mkfifo(path)
    program = (
        f"import fastpipe\ntry:\n    fastpipe.avro.AvroFile({str(path)!r})\n"
        "except fastpipe.FastpipeError as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True)
    assert str(path) in ran.stdout


def test_inspecting_damaged_files(tmp_path: Path) -> None:
    """AvroFile and infer_features raise the same errors as read_avro."""
    path = tmp_path / "x.avro"
    whole = small("deflate")
    for n in range(0, len(whole), 3):
        path.write_bytes(whole[:n])
        for look in (lambda p: fastpipe.avro.AvroFile(p).blocks, fastpipe.infer_features):
            try:
                look(path)
            except fastpipe.FastpipeError as error:
                assert type(error) is fastpipe.errors.MalformedFileError
                assert error.path == str(path)
                assert error.offset is not None
