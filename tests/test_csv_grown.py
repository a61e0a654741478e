"""CSV files that grow: the extended index equals the index from a scan of the whole file."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastpipe
import oracle
from fastpipe import DenseSpec

LONG_AGO = 1_600_000_000
FEATURES = {name: DenseSpec((), "string") for name in "ab"}


def rows(seed: int, size: int, quoted: float = 0.3) -> bytes:
    """Returns rows of two fields, drawn from several thousand rows. Some have newlines within quotes."""
    draw = random.Random(seed)

    def row() -> bytes:
        text = "".join(draw.choices("abc 0123é", k=draw.randint(1, 30)))
        field = f'"{text}\n""{text}"' if draw.random() < quoted else text
        return f"{draw.randint(0, 999)},{field}\n".encode()

    made = [row() for _ in range(5000)]
    out: list[bytes] = []
    total = 0
    while total < size:
        out.append(draw.choice(made))
        total += len(out[-1])
    return b"".join(out)


class Place:
    """A file and its index, which is extended from one version of the file to the next."""

    def __init__(self, folder: Path) -> None:
        self.path, self.cache = folder / "x.csv", folder / "cache"
        self.fresh = folder / "fresh"
        self.time = LONG_AGO

    def write(self, data: bytes) -> None:
        """Writes the file with an old timestamp that is later than the previous one."""
        self.path.write_bytes(data)
        self.time += 10
        os.utime(self.path, (self.time, self.time))

    def open(self, cache: Path | None = None, **options: Any) -> fastpipe.Reader:
        named = {"index_cache": cache or self.cache, "batch_size": 500, "features": FEATURES}
        return fastpipe.read_csv(self.path, **named | options)

    def entry(self, cache: Path | None = None) -> Path:
        (entry,) = (cache or self.cache).iterdir()
        return entry

    def is_as_scanned(self, *, parsed: bool = True, **options: Any) -> None:
        """Opens the file with its index and checks that index and rows match a full scan, byte for byte."""
        with self.open(shuffle=True, seed=3, epochs=1, **options) as reader:
            state = reader.state_dict()
            found = [oracle.rows(batch["b"]) for batch in reader] if parsed else None
        for entry in self.fresh.glob("*"):
            entry.unlink()
        with self.open(self.fresh, shuffle=True, seed=3, epochs=1, **options) as reader:
            assert reader.state_dict() == state
            assert found is None or [oracle.rows(batch["b"]) for batch in reader] == found
        entries = [sorted(entry.read_bytes() for entry in cache.iterdir()) for cache in (self.cache, self.fresh)]
        assert entries[0] == entries[1]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def extended(caplog: pytest.LogCaptureFixture) -> int:
    """Returns how often the log reported an extended index since the last call. Fails if the log reported damage."""
    texts = [record.getMessage() for record in caplog.records if record.name == "fastpipe"]
    caplog.clear()
    assert not [text for text in texts if "damaged" in text]
    return sum("is extended: the file grew from" in text for text in texts)


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastpipe")


FRONT = b"a,b\n" + rows(1, 400_000)
# The text after FRONT at first, and the text that is appended later.
GROWTHS: dict[str, tuple[bytes, bytes]] = {
    "rows": (b"", rows(2, 300_000)),
    "one row": (b"", b"1,2\n"),
    "a byte": (b"", b"\n"),
    "within a row": (b"17,begun", b" and ended\n3,4\n"),
    "a field more": (b"17", b",x\n3,4\n"),
    "within a line break": (b"17,x\r", b"\n3,4\n"),
    "after a quote": (b'17,"x"', b'"y"\n3,4\n'),
    "a long part of a row": (b"17,begun", b"x" * 300_000 + b"\n3,4\n"),
    "lines without rows": (b"\n" * 200_000, b"\n" * 3_000_000 + b"3,4\n"),
    "a long row": (b'1,"' + b"x\n" * 500_000 + b'"\n', b'2,"' + b"y\n" * 500_000 + b'"\n'),
    "several regions": (b"", rows(3, 20 << 20, 0.01)),
}


@pytest.mark.parametrize("what", GROWTHS)
def test_an_extended_index_equals_that_of_a_scan(place: Place, caplog: pytest.LogCaptureFixture, what: str) -> None:
    behind, more = GROWTHS[what]
    place.write(FRONT + behind)
    # A carriage return without a newline is an error when its row is parsed, but not when its row is located.
    with place.open() as reader:
        before = reader.num_rows
    assert extended(caplog) == 0
    place.write(FRONT + behind + more)
    with place.open() as reader:
        assert reader.num_rows >= before
    assert extended(caplog) == 1
    place.is_as_scanned()
    assert extended(caplog) == 0


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
def test_a_row_that_becomes_ragged(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The row ends at the end of a chunk, so that no other row begins in the chunk."""
    filler = b"1,2345\n" * 100_000
    for size in range(57_344 - 9, 57_344 + 9):
        front = b"a,b\n" + filler[: 5 * 57_344]
        front = front[: front.rindex(b"\n") + 1]
        front += b"1," + b"x" * (4 * 57_344 + size + 57_344 - len(front) - 3) + b"\n"
        place.write(front + b"3,4")
        place.open(on_ragged="skip").close()
        place.write(front + b"3,4,5" + b"\n" * 1000 + b"6\n" * 100_000 + b"7,8\n")
        place.is_as_scanned(on_ragged="skip")
    assert extended(caplog) == 18


def test_a_file_that_grows_again_and_again(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    data = b"a,b\n" + rows(5, 3 << 20)
    draw = random.Random(1)
    at = 200_000
    place.write(data[: data.index(b"\n", at) + 1])
    opened = 0
    while at < len(data):
        at += draw.randint(1, 400_000)
        place.write(data[:at])
        try:
            place.open().close()
            opened += 1
        except fastpipe.errors.MalformedFileError as error:
            assert "ends within quotes" in str(error)  # noqa: PT017
            continue
        # The last row may lack a field at this point.
        place.is_as_scanned(parsed=False)
    place.write(data)
    place.is_as_scanned()
    assert extended(caplog) >= opened - 1 > 3


def test_appending_within_an_open_quote(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.write(FRONT)
    place.open().close()
    kept = place.entry().read_bytes()
    place.write(FRONT + b'1,"open\n2,3\n')
    with pytest.raises(fastpipe.errors.MalformedFileError, match=rf"ends within quotes.*byte offset {len(FRONT)}"):
        place.open()
    assert place.entry().read_bytes() == kept
    place.write(FRONT + b'1,"open\n2,3\n"\n4,5\n')
    extended(caplog)
    with place.open() as reader:
        assert sum(1 for _ in reader) > 0
    assert extended(caplog) == 1
    place.is_as_scanned()


def replaced_head(data: bytes) -> bytes:
    return data.replace(b"\n", b"\n9", 1) + b"1,2\n"


OTHERS: dict[str, Callable[[bytes], bytes]] = {
    "other rows, and more": lambda data: b"a,b\n" + rows(9, len(data) + 100_000),
    "more at the start": replaced_head,
    "more within the old end": lambda data: data[:-5] + b"12345" + b"6\n" * 50_000,
    "other names": lambda data: b"a,b,c" + data[3:] + b"1,2\n",
    "the same names, quoted": lambda data: b'"a",b' + data[3:],
    "fewer bytes": lambda data: data[: data.index(b"\n", 200_000) + 1],
    "hardly any": lambda data: b"a,b\n1,2\n" + b"3,4\n" * 20_000,
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_replaced_file_is_scanned(place: Place, caplog: pytest.LogCaptureFixture, other: str) -> None:
    place.write(FRONT)
    place.open().close()
    place.write(OTHERS[other](FRONT))
    place.is_as_scanned(parsed="names" not in other and "end" not in other)
    assert extended(caplog) == 0


def test_a_damaged_index_is_not_extended(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    more = FRONT + rows(4, 100_000)
    for at in (0, 9, 20, -1):
        place.write(FRONT)
        place.open().close()
        kept = bytearray(place.entry().read_bytes())
        kept[at] ^= 1
        place.entry().write_bytes(bytes(kept))
        place.write(more)
        caplog.clear()
        place.open().close()
        assert "is damaged" in caplog.text
        assert "is extended" not in caplog.text
        place.is_as_scanned()
        caplog.clear()


def test_the_dialect_decides_which_index_is_extended(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.write(FRONT)
    place.open().close()
    place.write(FRONT + rows(4, 100_000))
    place.open(comment="#").close()
    assert extended(caplog) == 0
    place.open().close()
    assert extended(caplog) == 1


def test_recently_modified_files_are_extended_but_not_stored(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.write(FRONT)
    place.open().close()
    kept = place.entry().read_bytes()
    place.path.write_bytes(FRONT + b"1,2\n")
    for _ in range(2):
        place.open().close()
        assert "was not saved" in caplog.text
        assert extended(caplog) == 1
        assert place.entry().read_bytes() == kept


OPEN = """
    import sys, fastpipe
    with fastpipe.read_csv(sys.argv[1], index_cache=sys.argv[2], batch_size=500) as reader:
        print(reader.num_rows, flush=True)
"""


def test_several_processes_extend_one_index(place: Place) -> None:
    for step in range(3):
        place.write(FRONT + rows(4, step * 500_000))
        command = [sys.executable, "-c", textwrap.dedent(OPEN), str(place.path), str(place.cache)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        told = {process.communicate(timeout=500)[0] for process in running}
        assert [process.returncode for process in running] == [0, 0, 0]
        with fastpipe.read_csv(place.path, batch_size=500) as reader:
            assert told == {f"{reader.num_rows}\n"}
        place.is_as_scanned(features=None)
    assert [path.suffix for path in place.cache.iterdir()] == [".index1"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_the_order_is_the_same_on_any_number_of_processors(tmp_path: Path) -> None:
    """Threads scan regions of 8 MiB. States must not depend on where the regions begin."""
    path = tmp_path / "x.csv"
    path.write_bytes(b"a,b\n" + rows(8, 30 << 20, 0.01))
    script = """
        import json, os, sys, fastpipe
        processors = sorted(os.sched_getaffinity(0))[: int(sys.argv[2])]
        os.sched_setaffinity(0, processors)
        with fastpipe.read_csv(sys.argv[1], batch_size=500, shuffle=True, seed=1) as reader:
            print(json.dumps(reader.state_dict()))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(path)]
    one, all_ = (subprocess.run([*command, n], capture_output=True, check=True).stdout for n in ("1", "64"))
    assert one == all_
