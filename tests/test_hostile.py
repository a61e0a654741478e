"""Files that are damaged, cut short, or made to harm: never a crash, a hang or memory without bound, but an error that
says where and why.

What might crash or hang runs in child processes, many cases in each, so that such a case is named and ends no other
test.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from wire import (
    CODECS,
    SYNC,
    ZSTD_MAGIC,
    array,
    block,
    container,
    double,
    float_,
    header,
    items,
    list_of,
    long,
    longs,
    record,
    schema_bytes,
    stored,
    text,
    varint,
)

pytestmark = pytest.mark.timeout(60)

TYPED = {
    "MalformedFileError",
    "LimitError",
    "SchemaError",
    "UnsupportedError",
    "ShapeError",
    "ValueRangeError",
    "NullValueError",
    "MissingFileError",
    "StorageError",
}
GIB = 1 << 30
I64_MIN, I64_MAX = -(1 << 63), (1 << 63) - 1


@dataclasses.dataclass(frozen=True)
class Case:
    """A file, and how it is read."""

    name: str
    data: bytes
    columns: tuple[str, ...] | None = None
    features: dict[str, Any] | None = None
    batch_size: int = 2
    threads: int = 1
    # Done to the file when the reader stands: ("truncate", size), ("write", bytes) or ("remove", None).
    then: tuple[str, Any] | None = None
    # Values aren't brought back, only how many rows there were.
    count: bool = False


@dataclasses.dataclass(frozen=True)
class Seen:
    """What became of a case."""

    # Values of each batch, as repr, so that NaNs are equal; None where they are only counted.
    batches: list[str] | None
    rows: int
    # Class name and attributes of the error.
    error: str | None
    where: dict[str, Any]
    message: str
    # Whether the next `next` raised the same.
    again: bool
    # Whether it came from opening, not from iterating.
    opening: bool
    seconds: float


# Reads cases from stdin as a pickle, one file after the other, and writes what became of them. A case that hangs ends
# the process with every thread's stack; the last number on the progress file is the case that ended it.
CHILD = textwrap.dedent(
    """
    import faulthandler, itertools, os, pickle, resource, sys, time
    import fastpipe

    folder, patience = sys.argv[1], float(sys.argv[2])
    path = os.path.join(folder, "case.avro")
    progress = os.open(os.path.join(folder, "progress"), os.O_WRONLY | os.O_CREAT)
    keys = ("path", "block", "offset", "record", "feature", "reason")

    def plain(value):
        return value.to_list() if hasattr(value, "to_list") else value.tolist()

    def write(data):
        with open(path, "wb") as file:
            file.write(data)

    def seen(case):
        values, rows, error, again, opening = [], 0, None, True, True
        start = time.monotonic()
        try:
            reader = fastpipe.read_avro(
                path,
                features=case["features"],
                columns=case["columns"] and list(case["columns"]),
                batch_size=case["batch_size"],
                num_threads=case["threads"],
            )
            opening = False
            match case["then"]:
                case ("truncate", size):
                    os.truncate(path, size)
                case ("write", data):
                    with open(path, "r+b") as file:
                        file.write(data)
                        file.truncate()
                case ("remove", _):
                    os.remove(path)
            batches = iter(reader)
            for batch in batches:
                rows += len(next(iter(batch.values()))) if batch else 0
                if not case["count"]:
                    values.append(repr({k: plain(v) for k, v in batch.items()}))
        except fastpipe.FastpipeError as caught:
            error = caught
            if not opening:
                try:
                    next(batches)
                    again = False
                except fastpipe.FastpipeError as second:
                    again = (type(second), str(second), vars(second)) == (type(error), str(error), vars(error))
                except StopIteration:
                    again = False
        seconds = time.monotonic() - start
        return {
            "batches": None if case["count"] else values,
            "rows": rows,
            "error": error and type(error).__name__,
            "where": {key: getattr(error, key, None) for key in keys},
            "message": str(error),
            "again": again,
            "opening": opening,
            "seconds": seconds,
        }

    out = []
    cases = pickle.load(sys.stdin.buffer)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, case in enumerate(cases):
        os.pwrite(progress, b"%-12d" % number, 0)
        faulthandler.dump_traceback_later(patience, exit=True)
        write(case["data"])
        out.append(seen(case))
    faulthandler.cancel_dump_traceback_later()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pickle.dump((out, peak), sys.stdout.buffer)
    """
)


def run(folder: Path, cases: Sequence[Case], *, patience: float = 20, memory: int = 8 * GIB) -> list[Seen]:
    return measured(folder, cases, patience=patience, memory=memory)[0]


def measured(
    folder: Path, cases: Sequence[Case], *, patience: float = 20, memory: int = 8 * GIB
) -> tuple[list[Seen], int]:
    """What became of each case, and the peak of memory in bytes (on Linux). More memory than that can't be had at all:
    an attempt to take it fails, rather than the machine.
    """

    def bounded() -> None:
        if sys.platform.startswith("linux"):
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    plain = [{f.name: getattr(c, f.name) for f in dataclasses.fields(c)} for c in cases]
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(patience)],
        input=pickle.dumps(plain),
        capture_output=True,
        timeout=55,
        check=False,
        preexec_fn=bounded if sys.platform.startswith("linux") else None,
    )
    errors = ran.stderr.decode(errors="replace")
    if ran.returncode != 0:
        last = int((folder / "progress").read_text())
        pytest.fail(f"the process ended with {ran.returncode} in case {cases[last].name!r}:\n{errors[-4000:]}")
    assert "panicked" not in errors, errors[-4000:]
    found, peak = pickle.loads(ran.stdout)
    return [Seen(**one) for one in found], peak * 1024


def check(case: Case, seen: Seen, folder: Path) -> None:
    """What holds of every case: an error is one of the documented ones and says where it is, and is raised again."""
    if seen.error is None:
        return
    about = f"{case.name}: {seen.error}: {seen.message}"
    assert seen.error in TYPED, about
    assert seen.where["path"] == str(folder / "case.avro"), about
    assert seen.where["path"] in seen.message, about
    assert seen.where["reason"], about
    assert seen.where["reason"] in seen.message, about
    assert seen.again, f"{about}: the next call didn't raise the same"


def outcomes(folder: Path, cases: Sequence[Case], **options: Any) -> Iterable[tuple[Case, Seen]]:
    found = run(folder, cases, **options)
    for case, seen in zip(cases, found, strict=True):
        check(case, seen, folder)
        yield case, seen


def one(folder: Path, case: Case, **options: Any) -> Seen:
    ((_, seen),) = outcomes(folder, [case], **options)
    return seen


# A record of most kinds of fields, with data that every codec really compresses.
SMALL = record(
    "R",
    i="int",
    l="long",
    b="boolean",
    f=list_of("float"),
    s="string",
    e={"type": "enum", "name": "E", "symbols": ["A", "B"]},
    n=["null", "double"],
    m={"type": "map", "values": "int"},
)
SMALL_FEATURES = {
    "i": fastpipe.DenseSpec((), "int32"),
    "l": fastpipe.DenseSpec((), "int64"),
    "b": fastpipe.DenseSpec((), "bool"),
    "f": fastpipe.RaggedSpec((None,), "float32"),
    "s": fastpipe.DenseSpec((), "string"),
    "e": fastpipe.DenseSpec((), "int32"),
    "n": fastpipe.DenseSpec((), "float64", nulls="mask"),
    "m.keys": fastpipe.RaggedSpec((None,), "string"),
    "m.values": fastpipe.RaggedSpec((None,), "int32"),
}


def small_row(i: int) -> bytes:
    floats = items(-2, float_(i) + float_(-i)) + items(1, float_(0.5)) + long(0)
    number = long(1) + double(i) if i % 2 else long(0)
    return b"".join(
        (
            long(i),
            long(i << 40),
            bytes([i % 2]),
            floats,
            text("aäaäaäaä" * 3),
            long(i % 2),
            number,
            array(text("k") + long(-i), text("kk") + long(i)),
        )
    )


def small(codec: str) -> bytes:
    """Five rows in blocks of 2, 1 and 2."""
    rows = [small_row(i) for i in range(5)]
    return container(SMALL, [(2, b"".join(rows[:2])), (1, rows[2]), (2, b"".join(rows[3:]))], codec)


@pytest.mark.parametrize("codec", CODECS)
def test_files_cut_at_every_byte(codec: str, tmp_path: Path) -> None:
    whole = small(codec)
    (tmp_path / "whole.avro").write_bytes(whole)
    blocks = fastpipe.AvroFile(tmp_path / "whole.avro").blocks
    first = int(blocks["offset"][0])
    # Where a cut leaves whole blocks: behind how many rows.
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
        for new in sorted({0x00, 0xFF, 0x80, byte ^ 0x01, byte ^ 0x02, byte ^ 0x40} - {byte}):
            data = whole[:at] + bytes([new]) + whole[at + 1 :]
            # What the header says is inferred from; blocks meet features that don't depend on it.
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
        assert silent == 0, "the checksum was not looked at"


def test_garbage(tmp_path: Path) -> None:
    chance = random.Random(7)
    cases = [Case(f"garbage {i}", chance.randbytes(chance.randrange(300))) for i in range(200)]
    cases += [Case(f"magic and garbage {i}", b"Obj\x01" + chance.randbytes(chance.randrange(300))) for i in range(300)]
    for codec in CODECS:
        head = header(SMALL, codec)
        for i in range(300):
            noise = chance.randbytes(chance.randrange(1, 120))
            cases.append(Case(f"{codec}: garbage {i} as a block", head + stored(chance.randrange(5), noise)))
            cases.append(Case(f"{codec}: garbage {i} for blocks", head + noise))
    for case, seen in outcomes(tmp_path, cases):
        if not case.data.startswith(b"Obj\x01"):
            assert seen.error == "MalformedFileError", case.name
            assert seen.where["offset"] == 0


def test_records_of_chance_bytes(tmp_path: Path) -> None:
    """Bytes that are no compressed data, so that the decoder itself meets them."""
    chance = random.Random(11)
    cases = []
    for i in range(1500):
        # Small numbers are what makes sense most often: counts, lengths, branches.
        data = bytes(
            chance.choice((chance.randrange(8), chance.randrange(256))) for _ in range(chance.randrange(1, 60))
        )
        columns = chance.choice((None, ("s",), ("m", "i"), ("n",)))
        cases.append(Case(f"chance {i}", header(SMALL) + block(chance.randrange(1, 3), data), columns=columns))
    for case, seen in outcomes(tmp_path, cases):
        if seen.error is not None:
            assert seen.where["block"] == 0, case.name


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
    """Headers whose metadata is missing, damaged, or of unknown content."""
    body = block(1, long(7))
    schema = '"int"'

    def file(*args: Any, **kwargs: Any) -> bytes:
        return header(*args, **kwargs) + body

    expected: list[tuple[Case, str | None, str]] = [
        (Case("no codec", file(schema, None)), None, ""),
        (Case("other metadata", file(schema, metadata={"user.x": b"\xff\xfe", "": b""})), None, ""),
        (Case("unknown codec", file(schema, "lz77")), "UnsupportedError", "lz77"),
        (Case("known codec that isn't read", file(schema, "xz")), "UnsupportedError", "deflate"),
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
    """With and without sizes ("Maps"): all valid."""
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


def test_headers_that_lie(tmp_path: Path) -> None:
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
    """Valid, and larger than what is read of a file at first."""
    metadata: dict[str | bytes, bytes] = {f"k{i}": b"v" for i in range(40_000)}
    data = header('"int"', metadata=metadata) + block(1, long(7))
    entries = [text("avro.schema") + text('"int"'), *(text(key) + text(value) for key, value in metadata.items())]
    sized = b"Obj\x01" + items(-len(entries), b"".join(entries)) + long(0) + SYNC + block(1, long(7))
    for case, seen in outcomes(tmp_path, [Case("many", data), Case("with a size", sized)]):
        assert seen.batches == [repr({"value": [7]})], (case.name, seen)


def test_a_header_beyond_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "huge.avro"
    path.write_bytes(b"Obj\x01" + long(1) + text("x") + long(200 << 20))
    os.truncate(path, 201 << 20)  # A hole, which takes no room.
    with pytest.raises(fastpipe.LimitError, match="header is larger than") as caught:
        fastpipe.AvroFile(path)
    assert (caught.value.path, caught.value.offset) == (str(path), 0)
    with pytest.raises(fastpipe.LimitError):
        fastpipe.read_avro(path, batch_size=1)


# Fields of hostile data: schema, bytes of the value, a reason of the error, and its class.
MALFORMED = "MalformedFileError"
FLOATS, STRINGS, LONGS = list_of("float"), list_of("string"), list_of("long")
MAP = {"type": "map", "values": "long"}
ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}
BAD_VALUES: dict[str, tuple[Any, bytes, str, str]] = {
    "2^62 floats": (FLOATS, items(1 << 62, bytes(8)), "found 4611686018427387904 declared", MALFORMED),
    "2^62 longs": (LONGS, items(1 << 62, bytes(8)), "items", MALFORMED),
    "2^62 strings": (STRINGS, items(1 << 62, bytes(8)), "items", MALFORMED),
    "2^62 map entries": (MAP, items(1 << 62, bytes(8)), "items", MALFORMED),
    "i64::MAX floats": (FLOATS, items(I64_MAX, bytes(8)), "items", MALFORMED),
    "i64::MIN floats": (FLOATS, items(I64_MIN, bytes(8), 8), "items", MALFORMED),
    "i64::MIN strings": (STRINGS, items(I64_MIN, bytes(8), 8), "items", MALFORMED),
    "-2^62 floats": (FLOATS, items(-(1 << 62), bytes(8), 8), "items", MALFORMED),
    "one float too many": (FLOATS, items(4, bytes(12)), "expected", MALFORMED),
    "floats without an end": (FLOATS, items(1, bytes(4)), "expected", MALFORMED),
    "size of floats too small": (FLOATS, items(-2, bytes(8), 7) + long(0), "declares 7 bytes", MALFORMED),
    "size of floats too large": (FLOATS, items(-2, bytes(8), 9) + bytes(9), "declares 9 bytes", MALFORMED),
    "size of longs too small": (LONGS, items(-2, longs(1, 2), 1) + long(0), "declares 1 bytes", MALFORMED),
    "size of strings too small": (STRINGS, items(-1, text("abc"), 3) + long(0), "declares 3 bytes", MALFORMED),
    "size of strings too large": (STRINGS, items(-1, text("abc"), 5) + bytes(9), "declares 5 bytes", MALFORMED),
    "size of a map too small": (MAP, items(-1, text("k") + long(1), 1) + bytes(9), "declares 1 bytes", MALFORMED),
    "size of 2^62": (FLOATS, items(-2, bytes(8), 1 << 62) + long(0), "expected 4611686018427387904", MALFORMED),
    "size of -1": (FLOATS, items(-2, bytes(8), -1) + long(0), "expected a length, found -1", MALFORMED),
    "size of i64::MIN": (STRINGS, items(-2, bytes(8), I64_MIN) + long(0), "expected a length", MALFORMED),
    "a string of 2^62": ("string", long(1 << 62) + b"abc", "expected 4611686018427387904 more bytes", MALFORMED),
    "a string of i64::MAX": ("string", long(I64_MAX) + b"abc", "more bytes", MALFORMED),
    "a string of -1": ("string", long(-1) + b"abc", "expected a length, found -1", MALFORMED),
    "a string of i64::MIN": ("string", long(I64_MIN) + b"abc", "expected a length", MALFORMED),
    "bytes of 2^62": ("bytes", long(1 << 62) + b"abc", "more bytes", MALFORMED),
    "bytes of -1": ("bytes", long(-1), "expected a length, found -1", MALFORMED),
    "not UTF-8": ("string", text(b"ab\xff"), "expected UTF-8", MALFORMED),
    "half a character": ("string", text("ä".encode()[:1]), "expected UTF-8", MALFORMED),
    "a surrogate": ("string", text(b"\xed\xa0\x80"), "expected UTF-8", MALFORMED),
    "overlong UTF-8": ("string", text(b"\xc0\x80"), "expected UTF-8", MALFORMED),
    "an item not UTF-8": (STRINGS, array(text("a"), text(b"\xff")), "expected UTF-8", MALFORMED),
    "a key not UTF-8": (MAP, array(text(b"\xff") + long(1)), "expected UTF-8", MALFORMED),
    "a varint of 11 bytes": ("long", b"\x80" * 10 + b"\x00", "varint", MALFORMED),
    "a varint beyond 64 bits": ("long", b"\xff" * 9 + b"\x02", "varint", MALFORMED),
    "a varint without end": ("long", b"\xff" * 30, "varint", MALFORMED),
    "a varint of 11 bytes among longs": (
        LONGS,
        items(2, long(1) + b"\x80" * 10 + b"\x00") + bytes(9),
        "varint",
        MALFORMED,
    ),
    "a varint cut short": ("long", b"\x80\x80", "expected", MALFORMED),
    "an int of 33 bits": ("int", long(1 << 31), "expected an int of 32 bits, found 2147483648", MALFORMED),
    "an int of -33 bits": ("int", long(-(1 << 31) - 1), "expected an int of 32 bits", MALFORMED),
    "an int of 64 bits": ("int", long(I64_MIN), "expected an int of 32 bits", MALFORMED),
    "an int among ints": (list_of("int"), items(9, longs(*range(8), 1 << 31)) + long(0), "32 bits", MALFORMED),
    "a boolean of 2": ("boolean", b"\x02", "expected a boolean, 0 or 1, found byte 2", MALFORMED),
    "a boolean of 255": (list_of("boolean"), items(3, b"\x00\x01\xff") + long(0), "boolean", MALFORMED),
    "branch 2 of 2": (["null", "long"], long(2), "expected the index of one of 2 union branches, found 2", MALFORMED),
    "branch -1": (["null", "long"], long(-1), "found -1", MALFORMED),
    "branch i64::MIN": (["long", "null"], long(I64_MIN), "union branches", MALFORMED),
    "branch 2^32": (["long", "null"], long(1 << 32), "union branches", MALFORMED),
    "branch 1 of 1": (["long"], long(1) + long(7), "union branches", MALFORMED),
    "symbol 3 of 3": (ENUM, long(3), "expected the index of one of 3 enum symbols, found 3", MALFORMED),
    "symbol -1": (ENUM, long(-1), "enum symbols, found -1", MALFORMED),
    "symbol 2^32": (ENUM, long(1 << 32), "enum symbols", MALFORMED),
    "2^62 nulls": (list_of("null"), items(1 << 62, b"") + long(0), "zero bytes", "LimitError"),
    "-2^62 nulls": (list_of("null"), items(-(1 << 62), b"", 0) + long(0), "zero bytes", "LimitError"),
    "i64::MIN nulls": (list_of("null"), items(I64_MIN, b"", 0) + long(0), "zero bytes", "LimitError"),
    "2^40 fixed of size 0": (
        list_of({"type": "fixed", "name": "F", "size": 0}),
        items(1 << 40, b"") + long(0),
        "zero bytes",
        "LimitError",
    ),
}
# What is found only by decoding: skipping moves over it.
UNSEEN_BY_SKIPPING = ("size of", "UTF-8", "surrogate", "character", "boolean", "symbol", "an int")


def bad_case(name: str, **options: Any) -> Case:
    """A good record in a good block, then a good one in a bad block, and then the bad value."""
    schema, data, _, _ = BAD_VALUES[name]
    fields = record("R", id="long", x=schema)
    good = good_value(schema)
    blocks = [(1, long(1) + good), (2, long(2) + good + long(3) + data)]
    return Case(name, container(fields, blocks), batch_size=1, **options)


def good_value(schema: Any) -> bytes:
    match schema:
        case "long" | "int":
            return long(7)
        case "boolean":
            return b"\x01"
        case "float":
            return bytes(4)
        case "double":
            return bytes(8)
        case "string" | "bytes":
            return text("x")
        case ["null", *_]:
            return long(0)
        case ["long", "null"]:
            return long(1)
        case ["long"]:
            return longs(0, 7)
        case {"type": "enum"}:
            return long(1)
        case {"type": "fixed", "size": n}:
            return bytes(n)
    return long(0)


def x_features(schema: Any) -> dict[str, Any]:
    """What reads `x`, without a look at the data."""
    ragged = fastpipe.RaggedSpec
    match schema:
        case {"type": "map"}:
            return {"x.keys": ragged((None,), "string"), "x.values": ragged((None,), "int64")}
        case {"type": "array", "items": "null"}:
            return {"x": ragged((None,), "bool", nulls="mask")}
        case {"type": "array", "items": {"type": "fixed"}}:
            return {"x": ragged((None,), "bytes")}
        case {"type": "array", "items": item}:
            dtype = {"float": "float32", "long": "int64", "int": "int32", "boolean": "bool"}.get(item, item)
            return {"x": ragged((None,), dtype)}
        case {"type": "enum"}:
            return {"x": fastpipe.DenseSpec((), "int32")}
        case {"type": "fixed"}:
            return {"x": fastpipe.DenseSpec((), "bytes")}
        case list():
            nulls = "mask" if "null" in schema else "error"
            return {"x": fastpipe.DenseSpec((), "int64", nulls=nulls)}
    dtypes = {"float": "float32", "double": "float64", "long": "int64", "int": "int32", "boolean": "bool"}
    return {"x": fastpipe.DenseSpec((), dtypes.get(schema, schema))}


def bad_cases(**options: Any) -> list[Case]:
    return [bad_case(n, features=x_features(BAD_VALUES[n][0]), **options) for n in BAD_VALUES]


def test_hostile_values(tmp_path: Path) -> None:
    for case, seen in outcomes(tmp_path, bad_cases(), memory=2 * GIB):
        _, _, words, error = BAD_VALUES[case.name]
        assert (seen.error, seen.opening) == (error, False), (case.name, seen)
        assert words in seen.where["reason"], (case.name, seen.message)
        # The bad record is the second of the second block; those before it are whole.
        assert (seen.where["block"], seen.where["record"]) == (1, 1), (case.name, seen)
        assert seen.where["offset"] == len(header(record("R", id="long", x=BAD_VALUES[case.name][0]))) + len(
            block(1, long(1) + good_value(BAD_VALUES[case.name][0]))
        )
        assert seen.where["feature"] is not None, case.name
        assert seen.where["feature"].split(".")[0] == "x", (case.name, seen)
        assert seen.rows == 2, (case.name, seen)
        assert seen.seconds < 2, case.name


def test_hostile_values_that_are_inferred_from(tmp_path: Path) -> None:
    cases = [bad_case(name) for name in BAD_VALUES]
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.error == BAD_VALUES[case.name][3], (case.name, seen)
        assert seen.where["block"] == 1


def test_hostile_values_that_are_skipped(tmp_path: Path) -> None:
    """Skipping checks less, but never runs beyond the block, and never for long."""
    features = {"id": fastpipe.DenseSpec((), "int64")}
    cases = [bad_case(name, features=features) for name in BAD_VALUES]
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.seconds < 2, case.name
        if seen.error is None:
            assert any(words in case.name for words in UNSEEN_BY_SKIPPING), case.name
            assert seen.batches == [repr({"id": [i]}) for i in (1, 2, 3)]
        else:
            assert seen.where["block"] == 1, (case.name, seen)


def test_errors_are_the_same_whatever_the_threads(tmp_path: Path) -> None:
    by_threads = []
    for threads in (1, 2, 4):
        cases = bad_cases(threads=threads)
        cases += [
            Case(f"{codec} {at}", damaged, features=SMALL_FEATURES, batch_size=2, threads=threads)
            for codec in CODECS
            for at, damaged in later_damage(codec)
        ]
        found = [dataclasses.replace(seen, seconds=0) for _, seen in outcomes(tmp_path, cases)]
        by_threads.append(found)
    for name, first, second, third in zip([c.name for c in cases], *by_threads, strict=True):
        assert first == second == third, name


def later_damage(codec: str) -> list[tuple[int, bytes]]:
    """Blocks of one row; several of them damaged, so that threads meet them in any order."""
    rows = [small_row(i) for i in range(40)]
    pieces = [header(SMALL, codec)]
    for i, row in enumerate(rows):
        pieces.append(block(1, row[:-3] if i >= 15 and i % 3 == 0 else row, codec))
    return [(15, b"".join(pieces))]


@pytest.mark.parametrize("codec", CODECS)
def test_batches_before_damage_come_first(codec: str, tmp_path: Path) -> None:
    ((hit, data),) = later_damage(codec)
    cases = [
        Case(f"batches of {n}", data, features=SMALL_FEATURES, batch_size=n, threads=threads)
        for n in (1, 2, 4, 16, 100)
        for threads in (1, 2, 4)
    ]
    for case, seen in outcomes(tmp_path, cases):
        assert seen.error == "MalformedFileError"
        assert not seen.opening
        assert seen.where["block"] == hit
        assert seen.where["record"] == 0
        assert seen.rows == hit // case.batch_size * case.batch_size, case.name


def test_an_error_says_all_it_knows(tmp_path: Path) -> None:
    user = record("User", age="int", name="string")
    schema = record("R", user=user, x="long")
    row = long(30) + text("n") + long(1)
    path = tmp_path / "x.avro"
    head = header(schema)
    first = block(2, row * 2)
    path.write_bytes(head + first + block(3, row * 2 + long(1 << 40) + text("n") + long(1)))
    reader = fastpipe.read_avro(path, features={"user.age": fastpipe.DenseSpec((), "int32")}, batch_size=1)
    batches = iter(reader)
    assert [next(batches)["user.age"].tolist() for _ in range(4)] == [[30]] * 4
    with pytest.raises(fastpipe.MalformedFileError) as caught:
        next(batches)
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.path == str(path)
    assert (error.block, error.offset) == (1, len(head) + len(first))
    assert (error.record, error.feature) == (2, "user.age")
    assert error.reason == f"expected an int of 32 bits, found {1 << 40}"
    for words in (str(path), "block 1", str(error.offset), "record 2", "user.age", "expected an int", str(1 << 40)):
        assert words in str(error)
    for _ in range(3):
        with pytest.raises(fastpipe.MalformedFileError) as again:
            next(batches)
        assert (str(again.value), vars(again.value)) == (str(error), vars(error))
    assert pickle.loads(pickle.dumps(error)).__dict__ == error.__dict__
    # A new pass delivers what comes before it, and meets it again.
    batches = iter(reader)
    assert [next(batches)["user.age"].tolist() for _ in range(4)] == [[30]] * 4
    with pytest.raises(fastpipe.MalformedFileError):
        next(batches)


@pytest.mark.parametrize("codec", CODECS)
def test_block_headers_that_lie(codec: str, tmp_path: Path) -> None:
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
    # Behind it comes another block; a size that is too large may reach into it.
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


EMPTY = record("Nothing")
NULLS = fastpipe.RaggedSpec((None,), "bool", nulls="mask")


def test_records_of_zero_bytes(tmp_path: Path) -> None:
    """Nothing in the file bounds their number, so a limit does."""
    value = {"value": fastpipe.DenseSpec((), "bool", nulls="mask")}
    cases = [
        Case("2^40 nulls", container('"null"', [(1 << 40, b"")]), features=value),
        Case("2^30 nulls", container('"null"', [(1 << 30, b"")]), features=value),
        Case("2^24 + 1 nulls", container('"null"', [((1 << 24) + 1, b"")]), features=value),
        Case("2^40 empty records", container(EMPTY, [(1 << 40, b"")])),
        Case("2^30 records of nulls", container(record("R", a="null", b=EMPTY), [(1 << 30, b"")])),
        Case("2^30 packed nulls", container('"null"', [(1 << 30, b"")], "deflate"), features=value),
    ]
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.error == "LimitError", (case.name, seen)
        assert seen.where["block"] == 0
        assert seen.seconds < 1
    # As many as the limit are read.
    most = Case(
        "2^24 nulls", container('"null"', [(1 << 24, b"")]), features=value, batch_size=1 << 20, count=True, threads=2
    )
    assert one(tmp_path, most).rows == 1 << 24


def test_items_of_zero_bytes_add_up(tmp_path: Path) -> None:
    """Arrays below the limit, together above it: the limit is one of the block, however it is read."""
    row = items(1 << 20, b"") + long(0) + long(3)
    whole = container(record("R", a=list_of("null"), x="int"), [(40, row * 40)])
    several = items(1 << 20, b"") * 40 + long(0) + long(3)
    cases = [
        Case("decoded", whole, features={"a": NULLS}, batch_size=40, count=True),
        Case("skipped", whole, features={"x": fastpipe.DenseSpec((), "int32")}, batch_size=40, count=True),
        Case("inferred", whole, batch_size=40, count=True),
        Case(
            "blocks of one array",
            container(record("R", a=list_of("null"), x="int"), [(1, several)]),
            features={"a": NULLS},
            count=True,
        ),
    ]
    for case, seen in outcomes(tmp_path, cases, memory=4 * GIB):
        assert seen.error == "LimitError", (case.name, seen)
        assert seen.where["block"] == 0
        assert seen.seconds < 5


@pytest.mark.parametrize("inner", ["nulls", "empty records", "nested"])
def test_items_that_hold_many_nulls(inner: str, tmp_path: Path) -> None:
    """An array of records of many fields that take no bytes: few bytes must not become all memory."""
    match inner:
        case "nulls":
            item: Any = record("Item", **{f"n{i}": "null" for i in range(500)})
        case "empty records":
            item = record("Item", n="null", **{f"e{i}": record(f"E{i}", n="null") for i in range(500)})
        case _:
            # Two to the tenth nulls in each.
            item = "null"
            for i in range(10):
                item = record(f"N{i}", a=item, b=f"N{i - 1}" if i else "null")
    data = container(record("R", a=list_of(item), x="int"), [(1, items(1 << 24, b"") + long(0) + long(3))])
    (seen, *_), peak = measured(tmp_path, [Case(inner, data, batch_size=1, count=True)], memory=6 * GIB)
    assert seen.error in TYPED, seen
    if sys.platform.startswith("linux"):
        assert peak < 2.5 * GIB


def inflated_bomb() -> bytes:
    """1.1 GiB of zeros. After a full flush the deflate stream starts anew, so that a piece can be repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(8 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return piece * 140 + packer.flush()


def zstd_bomb() -> bytes:
    """A frame (RFC 8878, 3.1.1) of blocks of 128 KiB of one repeated byte, each of which takes four bytes: 1.1 GiB."""
    # A frame header without a size and a window of 128 KiB.
    head = ZSTD_MAGIC + b"\x00\x38"

    def repeated(last: int) -> bytes:
        return (last | 1 << 1 | 128 << 10 << 3).to_bytes(3, "little") + b"\x00"

    return head + repeated(0) * 9000 + repeated(1)


def zstd_frames() -> bytes:
    """Many frames, each of which says how large it is: 1.1 GiB together."""
    head = ZSTD_MAGIC + b"\xa0" + (1 << 20).to_bytes(4, "little")
    repeated = [(int(i == 7) | 1 << 1 | 128 << 10 << 3).to_bytes(3, "little") + b"\x00" for i in range(8)]
    return (head + b"".join(repeated)) * 1100


BOMBS = {
    "deflate": ("deflate", inflated_bomb),
    "zstandard": ("zstandard", zstd_bomb),
    "frames": ("zstandard", zstd_frames),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_compression_bombs(bomb: str, tmp_path: Path) -> None:
    """The limit is 1 GiB; growing up to it takes a buffer and a smaller one before it."""
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
    """Nothing is allocated because a size is declared."""
    snappy = {f"snappy of {n} bytes": varint(n) + b"\x00" * 9 for n in (1 << 30, (1 << 32) - 1, 1 << 29, 100_000)}
    snappy["snappy of 2^40 bytes"] = varint(1 << 40) + bytes(9)
    snappy["snappy without a checksum"] = b"\x00"
    snappy["snappy of a byte less"] = varint(7) + bytes([7 << 2]) + b"abcdefgh" + bytes(4)
    # A frame of one segment with its size in eight bytes, and an empty last block.
    frames = {
        f"zstandard of {n} bytes": ZSTD_MAGIC + b"\xe0" + n.to_bytes(8, "little") + b"\x01\x00\x00"
        for n in (1 << 30, 1 << 40, (1 << 64) - 1)
    }
    # A window of up to 2^41 + bytes, which is asked for before any data is there.
    frames |= {f"zstandard window {w:#x}": ZSTD_MAGIC + bytes([0, w]) + b"\x01\x00\x00" for w in (0x90, 0xB0, 0xFF)}
    cases = [Case(name, header('"long"', "snappy") + stored(1, data)) for name, data in snappy.items()]
    cases += [Case(name, header('"long"', "zstandard") + stored(1, data)) for name, data in frames.items()]
    found, peak = measured(tmp_path, cases, memory=2 * GIB)
    for case, seen in zip(cases, found, strict=True):
        check(case, seen, tmp_path)
        assert seen.error in {"MalformedFileError", "LimitError"}, (case.name, seen)
        assert seen.where["block"] == 0
        assert seen.seconds < 1
    if sys.platform.startswith("linux"):
        assert peak < GIB // 2


NODE = record("Node", value="long", next=["null", "Node"])


@pytest.mark.parametrize("threads", [1, 4])
def test_deep_recursive_data(threads: int, tmp_path: Path) -> None:
    """A recursive type is skipped at most; however deep data is, the stack doesn't overflow."""
    features = {"x": fastpipe.DenseSpec((), "int32")}

    def linked(n: int) -> bytes:
        return container(record("R", list=NODE, x="int"), [(1, longs(*[7, 1] * (n - 1), 7, 0, 3))])

    tree = record("Tree", children=list_of("Tree"), keys={"type": "map", "values": "Tree"})

    def nested(n: int, piece: bytes) -> bytes:
        """Trees of one child each, by arrays or maps, and then every end."""
        closing = long(0) + long(0)
        end = closing if piece == long(1) else long(0)
        return container(record("R", tree=tree, x="int"), [(1, piece * (n - 1) + closing + end * (n - 1) + long(3))])

    by_map = long(0) + long(1) + text("k")
    shallow = [Case(f"{n} nodes", linked(n), features=features, threads=threads) for n in (1, 2, 100)]
    shallow += [Case("trees", nested(50, long(1)), features=features, threads=threads)]
    shallow += [Case("maps", nested(50, by_map), features=features, threads=threads)]
    deep = [Case(f"{n} nodes", linked(n), features=features, threads=threads) for n in (200, 10_000, 100_000)]
    deep += [Case("deep trees", nested(100_000, long(1)), features=features, threads=threads)]
    deep += [Case("deep maps", nested(100_000, by_map), features=features, threads=threads)]
    for case, seen in outcomes(tmp_path, shallow + deep):
        assert seen.seconds < 1
        if case in shallow:
            assert seen.batches == [repr({"x": [3]})], (case.name, seen)
        else:
            assert seen.error == "LimitError", (case.name, seen)
            assert "nested deeper than" in seen.where["reason"]
            assert (seen.where["block"], seen.where["record"]) == (0, 0)


def test_types_that_hold_themselves(tmp_path: Path) -> None:
    """No value of such a type can be finite; reading one must end all the same."""
    endless = record("Endless", self="Endless")
    twice = record("Twice", a="Twice", b="Twice")
    loop = record("A", b=record("B", a="A"))
    cases = []
    for schema in (endless, twice, loop, ["null", endless], list_of(endless), list_of(twice)):
        for data in (b"", long(0), long(1), long(2), bytes(100), long(1 << 20) + bytes(9)):
            for rows in (1, 1 << 20):
                outer = container(record("R", t=schema, x="int"), [(rows, data)])
                features = {"x": fastpipe.DenseSpec((), "int32")}
                name = f"{json.dumps(schema)} {data!r} {rows}"
                cases.append(Case(name, outer, features=features, count=True))
                cases.append(Case(name, outer, columns=("x",), count=True))
                cases.append(Case(f"root {name}", container(schema, [(rows, data)]), count=True))
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.seconds < 2, case.name


def doubling(levels: int, leaf: Any) -> Any:
    """A record of two of a record of two ...: 2^levels leaves, though the schema is short."""
    inner = record("L0", a=leaf, b=leaf)
    for i in range(1, levels):
        inner = record(f"L{i}", a=inner, b=f"L{i - 1}")
    return inner


LEAVES = {
    "int": "int",
    "string": "string",
    "null": "null",
    "fixed": {"type": "fixed", "name": "F", "size": 0},
    "empty": EMPTY,
    "array": list_of("int"),
    "nullable": ["null", "int"],
}


@pytest.mark.parametrize("leaf", LEAVES)
def test_schemas_that_blow_up(leaf: str, tmp_path: Path) -> None:
    """Forty levels deep: 2^40 leaves if references were followed one by one."""
    inner = LEAVES[leaf]
    if isinstance(inner, dict) and "name" in inner:
        schema = record("R", first=inner, x="int", big=doubling(36, inner["name"]))
    else:
        schema = record("R", x="int", big=doubling(36, inner))
    data = header(schema) + block(1, bytes(100))
    x = {"x": fastpipe.DenseSpec((), "int32")}
    deep = {"big" + ".a" * 36: fastpipe.DenseSpec((), "int32")}
    cases = [
        Case("inferred", data),
        Case("inferred, no blocks", header(schema)),
        Case("columns", data, columns=("x",)),
        Case("x", data, features=x),
        Case("x, no blocks", header(schema), features=x),
        Case("deep", data, features=deep),
    ]
    found, peak = measured(tmp_path, cases, memory=2 * GIB, patience=5)
    for case, seen in zip(cases, found, strict=True):
        check(case, seen, tmp_path)
        assert seen.seconds < 2, case.name
    if sys.platform.startswith("linux"):
        assert peak < GIB // 2


def test_schemas_nested_through_names(tmp_path: Path) -> None:
    """JSON is nested little, but each type refers to the one before."""
    n = 3000
    for leaf in ("int", "string"):
        fields = {"t0": record("T0", a=leaf)}
        fields |= {f"t{i}": record(f"T{i}", a=f"T{i - 1}") for i in range(1, n)}
        schema = record("R", x="int", **fields)
        data = header(schema) + block(1, bytes(2 * n))
        cases = [
            Case("inferred", data, count=True),
            Case("x", data, features={"x": fastpipe.DenseSpec((), "int32")}, count=True),
            Case("columns", data, columns=("x",), count=True),
            Case("no blocks", header(schema), count=True),
        ]
        for case, seen in outcomes(tmp_path, cases, memory=3 * GIB, patience=10):
            assert seen.seconds < 5, (case.name, leaf)


def test_deeply_nested_json(tmp_path: Path) -> None:
    deep = {
        "[": "[" * 10_000,
        "[]": "[" * 10_000 + "]" * 10_000,
        '{"type":': '{"type":' * 10_000 + '"int"' + "}" * 10_000,
        "arrays": '{"type":"array","items":' * 10_000 + '"int"' + "}" * 10_000,
        "maps": '{"type":"map","values":' * 200 + '"int"' + "}" * 200,
        "in a default": '{"type":"record","name":"R","fields":[{"name":"x","type":"int","default":' + "[" * 10_000,
        "in an attribute": '{"type":"int","doc":' + "[" * 5000 + "]" * 5000 + "}",
    }
    for case, seen in outcomes(tmp_path, [Case(name, header(schema)) for name, schema in deep.items()]):
        assert seen.error == "SchemaError", (case.name, seen)
        assert seen.opening
        assert len(seen.message) < 2000, case.name
    levels = 50
    schema = '{"type":"array","items":' * levels + '"int"' + "}" * levels
    data = container(schema, [(1, long(1) * levels + long(7) + long(0) * levels)])
    seen = one(tmp_path, Case("50 levels", data))
    assert seen.error is None or seen.error in TYPED


def test_wide_schemas(tmp_path: Path) -> None:
    wide = container(record("R", **{f"f{i}": "int" for i in range(20_000)}), [(1, long(1) * 20_000)])
    union = [record(f"U{i}", a="int") for i in range(3000)]
    enums = {n: {"type": "enum", "name": "E", "symbols": [f"S{i}" for i in range(n)]} for n in (10_000, 50_000)}
    cases = [
        Case("fields", wide, count=True),
        Case("one of many fields", wide, features={"f19999": fastpipe.DenseSpec((), "int32")}),
        Case("union", container(record("R", u=union, x="int"), [(1, long(2999) + longs(1, 3))]), columns=("x",)),
        Case("symbols", container(enums[10_000], [(1, long(9999))])),
        Case("more symbols", container(enums[50_000], [(1, long(9999))])),
        Case("fields of 5 MB", header(record("R", **{f"f{i}": "int" for i in range(160_000)}))),
        Case("documentation of 5 MB", header({"type": "int", "doc": "x" * 5_000_000})),
    ]
    found = {case.name: seen for case, seen in outcomes(tmp_path, cases, memory=2 * GIB)}
    assert all(seen.seconds < 3 for seen in found.values())
    assert found["one of many fields"].batches == [repr({"f19999": [1]})]
    assert found["union"].batches == [repr({"x": [3]})]
    assert found["symbols"].batches == [repr({"value": [9999]})]
    for name in ("fields", "more symbols", "fields of 5 MB", "documentation of 5 MB"):
        assert found[name].error == "LimitError", (name, found[name])


def opened(folder: Path, schemas: dict[str, Any]) -> None:
    """Schemas of which only the field `x` is wanted: read or refused, but quickly, and in little memory."""
    features = {"x": fastpipe.DenseSpec((), "int32")}
    cases = [Case(name, header(schema), features=features) for name, schema in schemas.items()]
    cases += [Case(f"{name}, inferred", header(schema), columns=("x",)) for name, schema in schemas.items()]
    found, peak = measured(folder, cases, memory=4 * GIB, patience=8)
    for case, seen in zip(cases, found, strict=True):
        check(case, seen, folder)
        assert seen.seconds < 2, case.name
    if sys.platform.startswith("linux"):
        assert peak < GIB


def test_schemas_of_many_aliases(tmp_path: Path) -> None:
    aliases = [f"A{i}" for i in range(8000)]
    wide = record("R", x="int", **{f"f{i}": "int" for i in range(8000)})
    enum = {"type": "enum", "name": "E", "symbols": [f"S{i}" for i in range(8000)]}
    opened(
        tmp_path,
        {
            "of a record": record("R", x="int") | {"aliases": aliases},
            "of a wide record": wide | {"aliases": aliases[:500]},
            "of an enum": record("R", x="int", e=enum | {"aliases": aliases[:500]}),
            "of a field": {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int", "aliases": aliases}]},
        },
    )


def test_schemas_of_long_names(tmp_path: Path) -> None:
    """Names are inherited by what lies within."""
    fixed = {f"f{i}": {"type": "fixed", "name": f"F{i}", "size": 1} for i in range(200)}
    ints = record("S", **{f"f{i}": "int" for i in range(400)})
    name = "n" * 1_000_000
    opened(
        tmp_path,
        {
            "a namespace": record("R", x="int", **fixed) | {"namespace": name},
            "a full name": record(f"{name}.R", x="int", **fixed),
            "a field": record("R", **{"x": "int", name: ints}),
        },
    )


def test_messages_are_short(tmp_path: Path) -> None:
    """However much of a file they might quote."""
    big = record("S", **{f"f{i}": "int" for i in range(3000)})
    wrong = record("R", a=big, b="S")
    wrong["fields"][1]["default"] = {}  # type: ignore[index]
    cases = [
        Case("a default", header(wrong)),
        Case("a codec", header('"int"', "x" * 100_000)),
        Case("a type", header(json.dumps("x" * 100_000))),
        Case("a name", header(record("?" * 100_000))),
        Case("a symbol", header({"type": "enum", "name": "E", "symbols": ["?" * 100_000]})),
        Case("names", header(record("R", **{f"f{i}": "int" for i in range(9000)})), columns=("missing",)),
        Case("text", header('"int"') + block(1, b"\xff" * 100_000)),
    ]
    for case, seen in outcomes(tmp_path, cases):
        assert seen.error in {"SchemaError", "UnsupportedError", "LimitError", "MalformedFileError"}, (case.name, seen)
        assert len(seen.message) < 5000, (case.name, len(seen.message))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "record", "name": "R"},
        {"type": "record", "fields": []},
        {"type": "record", "name": "R", "fields": [{"name": "x"}]},
        {"type": "record", "name": "R", "fields": [{"type": "int"}]},
        {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}, {"name": "x", "type": "int"}]},
        {"type": "record", "name": "R", "fields": {"x": "int"}},
        {"type": "record", "name": "R", "fields": [{"name": "x", "type": "Missing"}]},
        {"type": "enum", "name": "E", "symbols": [1, 2]},
        {"type": "enum", "name": "E", "symbols": ["A", "A"]},
        {"type": "fixed", "name": "F"},
        {"type": "fixed", "name": "F", "size": -1},
        {"type": "fixed", "name": "F", "size": "8"},
        {"type": "array"},
        {"type": "map"},
        {"type": 3},
        {"type": None},
        ["int", "int"],
        ["int", ["null", "long"]],
        [{"type": "array", "items": "int"}, {"type": "array", "items": "long"}],
        {
            "type": "record",
            "name": "R",
            "fields": [{"name": "R", "type": {"type": "record", "name": "R", "fields": []}}],
        },
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_schemas_that_are_none(schema: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.avro"
    path.write_bytes(header(schema))
    with pytest.raises(fastpipe.SchemaError) as caught:
        fastpipe.read_avro(path, batch_size=1)
    assert caught.value.path == str(path)
    assert caught.value.reason


def test_odd_schemas(tmp_path: Path) -> None:
    """Whatever is said of them, it isn't a crash, and takes no memory for what they declare."""
    schemas: list[Any] = [
        [],
        ["null"],
        "null",
        {"type": "enum", "name": "E", "symbols": []},
        {"type": "fixed", "name": "F", "size": 0},
        *({"type": "fixed", "name": "F", "size": n} for n in (1 << 31, 1 << 40, I64_MAX, (1 << 64) - 1, 1 << 70, 1e30)),
        list_of({"type": "fixed", "name": "F", "size": I64_MAX}),
        record("R", a={"type": "fixed", "name": "F", "size": I64_MAX}, b="F", c="F"),
        record("R", a=["null", {"type": "fixed", "name": "F", "size": I64_MAX}]),
        {"type": "bytes", "logicalType": "decimal", "precision": -1},
        {"type": "bytes", "logicalType": "decimal", "precision": 1 << 62, "scale": 1 << 63},
        {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 40},
        {"type": "fixed", "name": "F", "size": 3, "logicalType": "duration"},
        {"type": "fixed", "name": "F", "size": 3, "logicalType": "uuid"},
        {"type": "int", "logicalType": "unheard-of"},
        {"type": "int", "logicalType": 7},
        {"type": "string", "logicalType": "timestamp-millis"},
        {"type": {"type": {"type": "int"}}},
        {"type": "error", "name": "R", "fields": []},
        record("ns.with..dots", x="int"),
        record("", x="int"),
        record("R", **{"": "int"}),
        record("R", **{"a.b": "int", "a": record("S", b="int")}),
        record("R", **{"ü": "int", "x y": "int", "\0": "int"}),
        {"type": "record", "name": "R", "aliases": ["R", "R"], "fields": []},
        {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int", "default": "no number"}]},
        {"type": "record", "name": "R", "fields": [{"name": "x", "type": ["null", "int"], "default": 3}]},
        {"type": "record", "name": "int", "fields": []},
        {"type": "record", "name": "R" * 100_000, "fields": []},
    ]
    cases = [
        Case(schema_bytes(schema).decode()[:80], header(schema) + body)
        for schema in schemas
        for body in (b"", block(1, bytes(40)), block(1, b""), block(3, bytes(3)))
    ]
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.seconds < 1, case.name


def test_chance_schemas(tmp_path: Path) -> None:
    """Pieces of schemas in any order."""
    chance = random.Random(3)
    words = ["type", "name", "fields", "items", "values", "symbols", "size", "record", "array", "map", "enum", "fixed"]
    words += ["null", "int", "R", "default", "namespace", "aliases", "logicalType", "decimal", "precision", "uuid"]

    def piece(depth: int) -> Any:
        kind = chance.randrange(6 if depth < 4 else 3)
        if kind == 0:
            return chance.choice((None, True, -1, 0, 3, 1.5, 1 << 62))
        if kind <= 2:
            return chance.choice(words)
        if kind == 3:
            return [piece(depth + 1) for _ in range(chance.randrange(4))]
        whole = {"type": chance.choice(words), "name": chance.choice(("R", "S", "T"))} if kind == 4 else {}
        if whole.get("type") == "record":
            names = iter("abcd")
            whole["fields"] = [{"name": next(names), "type": piece(depth + 1)} for _ in range(chance.randrange(4))]
        return whole | {chance.choice(words): piece(depth + 1) for _ in range(chance.randrange(4))}

    cases = []
    for i in range(1500):
        schema = json.dumps(piece(0))
        cases.append(Case(f"{i}: {schema}", header(schema) + block(1, bytes(30)), count=True))
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.seconds < 1, case.name


def test_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    for codec in CODECS:
        whole = small(codec)
        head = len(header(SMALL, codec))
        rows = [small_row(i) for i in range(5)]
        other = container(SMALL, [(1, rows[0]), (2, b"".join(rows[1:3])), (2, b"".join(rows[3:]))], codec)
        cases = [
            Case("emptied", whole, then=("truncate", 0), features=SMALL_FEATURES),
            Case("cut in its last block", whole, then=("truncate", len(whole) - 20), features=SMALL_FEATURES),
            Case("cut in its last marker", whole, then=("truncate", len(whole) - 1), features=SMALL_FEATURES),
            Case("cut in its header", whole, then=("truncate", 10), features=SMALL_FEATURES),
            Case("zeros", whole, then=("write", bytes(len(whole))), features=SMALL_FEATURES),
            Case("other blocks", whole, then=("write", other), features=SMALL_FEATURES),
            Case("another marker", whole, then=("write", whole.replace(SYNC, b"y" * 16)), features=SMALL_FEATURES),
            Case(
                "garbage behind its header",
                whole,
                then=("write", whole[:head] + b"\xff" * 999),
                features=SMALL_FEATURES,
            ),
        ]
        for case, seen in outcomes(tmp_path, cases):
            assert seen.error == "MalformedFileError", (codec, case.name, seen)
            assert not seen.opening
            assert seen.where["block"] is not None
            assert seen.where["offset"] is not None
            if "last" in case.name:
                assert (seen.where["block"], seen.rows) == (2, 2), (codec, case.name, seen)
        grown = one(tmp_path, Case("grown", whole, then=("write", whole + b"more"), features=SMALL_FEATURES))
        assert grown.rows == 5, grown
        gone = one(tmp_path, Case("removed", whole, then=("remove", None), features=SMALL_FEATURES))
        assert gone.rows == 5 or gone.error in {"MissingFileError", "StorageError"}, gone


def test_a_file_that_changes_all_the_time(tmp_path: Path) -> None:
    """Values may be of before or after; nothing else may happen than errors and values."""
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


def test_what_is_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder.avro"
    folder.mkdir()
    with pytest.raises(fastpipe.MissingFileError) as missing:
        fastpipe.read_avro(folder, batch_size=1)
    assert missing.value.path == str(folder)
    for look in (fastpipe.AvroFile, lambda path: fastpipe.AvroFile(path).blocks):
        with pytest.raises(fastpipe.FastpipeError) as caught:
            look(folder)
        assert type(caught.value).__name__ in TYPED
        assert caught.value.path == str(folder)
    empty = tmp_path / "empty.avro"
    empty.touch()
    for look in (fastpipe.AvroFile, fastpipe.infer_features, lambda path: fastpipe.read_avro(path, batch_size=1)):
        with pytest.raises(fastpipe.MalformedFileError, match="Obj") as malformed:
            look(empty)
        assert (malformed.value.path, malformed.value.offset) == (str(empty), 0)
    gone = tmp_path / "gone.avro"
    with pytest.raises(fastpipe.MissingFileError) as missing:
        fastpipe.AvroFile(gone)
    assert (missing.value.path, missing.value.errno) == (str(gone), 2)
    if hasattr(os, "symlink"):
        loop = tmp_path / "loop.avro"
        loop.symlink_to(loop)
        with pytest.raises((fastpipe.StorageError, fastpipe.MissingFileError)):
            fastpipe.AvroFile(loop)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_an_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "x.avro"
    path.write_bytes(small("null"))
    path.chmod(0)
    for look in (fastpipe.AvroFile, lambda path: fastpipe.read_avro(path, batch_size=1)):
        with pytest.raises(fastpipe.StorageError) as caught:
            look(path)
        assert isinstance(caught.value, OSError)
        assert caught.value.path == str(path)
        assert caught.value.errno == 13


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    """Opening one waits for a writer, so it must not be opened to be read."""
    path = tmp_path / "pipe.avro"
    os.mkfifo(path)
    program = (
        f"import fastpipe\ntry:\n    fastpipe.AvroFile({str(path)!r})\n"
        "except fastpipe.FastpipeError as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert str(path) in ran.stdout


def test_looking_at_damaged_files(tmp_path: Path) -> None:
    """AvroFile and infer_features meet the same as read_avro."""
    path = tmp_path / "x.avro"
    whole = small("deflate")
    for n in range(0, len(whole), 3):
        path.write_bytes(whole[:n])
        for look in (lambda p: fastpipe.AvroFile(p).blocks, fastpipe.infer_features):
            try:
                look(path)
            except fastpipe.FastpipeError as error:
                assert type(error) is fastpipe.MalformedFileError
                assert error.path == str(path)
                assert error.offset is not None
