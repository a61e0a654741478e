"""Small files that require much work or memory: the cost is limited by their actual bytes, or they are rejected."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from hostile import GIB, Case, check, measured, outcomes
from wire import CODECS, SYNC, block, container, header, items, list_of, long, record, stored, text

MIB = 1 << 20
# CPU seconds per file, in an unoptimized build on a slow machine.
SECONDS = 20

X = {"x": fastpipe.DenseSpec((), "int32")}
NULLS = {"a": fastpipe.RaggedSpec((None,), "bool", on_null="mask")}
# The number of items without bytes that a block of any size may contain.
LEAST = 1 << 14


def enums(n: int) -> Any:
    symbols = [f"S{i}" for i in range(32_768)]
    return record("R", **{f"f{i}": {"type": "enum", "name": f"E{i}", "symbols": symbols} for i in range(n)})


def nested(levels: int, inner: Any) -> Any:
    for i in range(levels):
        inner = record(f"N{i}", f=inner)
    return inner


def nulls(of: int, blocks: int, **options: Any) -> Case:
    """Returns blocks of one row, which is an array of `of` nulls and an int."""
    row = stored(1, items(of, b"") + long(0) + long(3))
    schema = record("R", a=list_of("null"), x="int")
    return Case(f"{of} nulls", header(schema) + row * blocks, batch_size=20, count=True, **options)


def metadata(blocks: int) -> Case:
    """Returns eleven million metadata entries in `blocks` blocks of the map."""
    entries = (text("k") + text("")) * (11_000_000 // blocks)
    end = items(1, text("avro.schema") + text('"int"')) + long(0) + SYNC
    return Case("metadata", b"Obj\x01" + items(11_000_000 // blocks, entries) * blocks + end)


def hole(blocks: bytes) -> Case:
    """Returns some blocks followed by zeros, which are empty blocks with the sync marker of this file."""
    return Case("a hole", header('"int"', sync=bytes(16)) + blocks, hole=77 << 30)


def objects(schema: str) -> Case:
    """Returns a schema that contains many JSON objects."""
    return Case("objects", header(schema.replace("OBJECTS", ",".join(['{"":0}'] * 500_000))))


def copies() -> Case:
    """Returns a wide record nested within many others. A parser might copy it for each of them."""
    wide = record("Wide", **{f"f{i}": "int" for i in range(20_000)})
    return Case("copies", header(nested(100, wide)), columns=("f",))


FILES: dict[str, tuple[Callable[[], Case], str | None]] = {
    "arrays of nulls": (lambda: nulls(1 << 24, 2000, features=NULLS), "LimitError"),
    "arrays of nulls, skipped": (lambda: nulls(1 << 24, 2000, features=X), "LimitError"),
    "the most nulls that are read": (lambda: nulls(LEAST, 200, features=NULLS), None),
    "metadata": (lambda: metadata(1), "LimitError"),
    "metadata, one by one": (lambda: metadata(5_500_000), "LimitError"),
    "a hole": (lambda: hole(b""), "LimitError"),
    "a hole after a block": (lambda: hole(block(1, long(7), sync=bytes(16))), "LimitError"),
    "enums": (lambda: Case("enums", header(enums(8))), None),
    "objects in a default": (
        lambda: objects('{"type":"record","name":"R","fields":[{"name":"x","type":"int","default":[OBJECTS]}]}'),
        None,
    ),
    "objects in a union": (lambda: objects("[OBJECTS]"), "LimitError"),
    "records in many records": (copies, "LimitError"),
}


@pytest.mark.parametrize("name", FILES)
def test_work_is_bounded(name: str, tmp_path: Path) -> None:
    make, error = FILES[name]
    case = make()
    # Memory that the process uses before, including the bytes of the case.
    plain = Case("nothing", container('"int"', [(1, long(7))]))
    _, before = measured(tmp_path, [plain, dataclasses.replace(plain, data=b"x" * len(case.data))])
    (seen,), peak = measured(tmp_path, [case], memory=3 * GIB, patience=50, cpu=SECONDS)
    check(case, seen, tmp_path)
    assert seen.error == error, seen
    if sys.platform.startswith("linux"):
        assert peak - before < 300 * MIB


def test_many_empty_blocks_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "x.avro"
    path.write_bytes(header('"long"') + block(0, b"") * 70_000 + block(1, long(7)))
    (batch,) = fastpipe.read_avro(path, batch_size=2)
    assert batch["value"].tolist() == [7]


@pytest.mark.parametrize("codec", CODECS)
def test_arrays_of_nulls_in_proportion(codec: str, tmp_path: Path) -> None:
    """Arrays of nulls as writers make them are read and skipped.

    More nulls than the bytes justify are neither read nor skipped.
    """
    schema = record("R", a=list_of("null"), x="int")

    def row(nulls: int) -> bytes:
        return items(nulls, b"") + long(0) + long(3)

    good = {"one array": row(LEAST), "many arrays": row(20) * 1000}
    bad = {"one array": row(LEAST + 1), "many arrays": row(8000) * 1000}
    for rows, error in ((good, None), (bad, "LimitError")):
        cases = [
            Case(
                f"{name}: {what}",
                container(schema, [(1 if name == "one array" else 1000, data)], codec),
                features=features,
                batch_size=2000,
                count=True,
            )
            for name, data in rows.items()
            for what, features in (("decoded", NULLS), ("skipped", X))
        ]
        for case, seen in outcomes(tmp_path, cases):
            assert seen.error == error, (case.name, seen)
            assert error is None or "items of zero bytes" in seen.where["reason"]


WALK = """
    import os, signal, sys, threading
    import fastpipe
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        fastpipe.read_avro(sys.argv[1], batch_size=1)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
def test_ctrl_c_ends_a_walk_over_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "hole.avro"
    with path.open("wb") as file:
        file.write(header('"int"', sync=bytes(16)))
        file.truncate(1 << 36)
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WALK), str(path)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (ran.stdout, ran.returncode) == ("interrupted\n", 0), ran.stderr
