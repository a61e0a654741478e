"""Many random CSV files compared with Python's `csv` module, and large ones read with a memory limit.

FASTPIPE_CSV_FILES sets the number of files. `make soak` uses 10,000 and a file of 1 GB.
"""

from __future__ import annotations

import csv
import io
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import fastpipe
import oracle
from fastpipe import DenseSpec

FILES = int(os.environ.get("FASTPIPE_CSV_FILES", "30"))
AT_ONCE = 100
MEGABYTES = int(os.environ.get("FASTPIPE_CSV_MEGABYTES", "100"))
csv.field_size_limit(1 << 20)


class File:
    """A file in a random dialect: its content, how to read it, and the fields of its rows."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.delimiter = draw.choice([",", ",", ";", "\t", "|", ":", " ", "^"])
        self.quote = draw.choice(['"', '"', '"', "'", "~", None])
        self.comment = draw.choice([None, "#", "%"])
        self.latin = draw.random() < 0.3
        self.end = draw.choice(["\n", "\r\n"])
        self.columns = draw.randint(1, 5)
        self.letters = "".join({*"ab01 .,;'\"|~é", "ÿ" if self.latin else "😀"} - {self.delimiter})
        self.quoted = draw.choice([0, 0.05, 0.5, 1]) if self.quote else 0
        self.long = draw.choice([0, 0, 0.01, 0.1])
        lines = [self.row() for _ in range(draw.choice([1, 3, 50, 400]))]
        text = "".join(lines)
        if draw.random() < 0.3 and not lines[-1].isspace():
            text = text.removesuffix(self.end)
        self.text = text
        # Lines between rows that are not rows themselves.
        others = ["", "", self.end, f"{self.comment}{self.delimiter}{self.quote}a{self.end}" if self.comment else ""]
        self.data = "".join(draw.choice(others) + line for line in lines)
        self.data = self.data.removesuffix("" if text.endswith(self.end) else self.end)

    def row(self) -> str:
        fields = [self.field(i) for i in range(self.columns)]
        if fields == [""]:
            fields = ["x"]
        return self.delimiter.join(fields) + self.end

    def field(self, number: int) -> str:
        draw = self.draw
        size = draw.randint(0, 100_000 // self.columns) if draw.random() < self.long else draw.randint(0, 12)
        if size > 100:
            part = "".join(draw.choices(self.letters, k=100))
            text = part * (size // 100)
        else:
            text = "".join(draw.choices(self.letters, k=size))
        if self.quote and draw.random() < self.quoted:
            for more in draw.choices(["\n", "\r\n", "\r", self.delimiter, self.quote, self.comment or ""], k=2):
                at = draw.randint(0, len(text))
                text = text[:at] + more + text[at:]
            behind = draw.choice(["", "", "", "ab"])
            return self.quote + text.replace(self.quote, 2 * self.quote) + self.quote + behind
        # A quote that doesn't begin a field is literal.
        return text.lstrip(self.quote) if self.quote else text

    def write(self, path: Path) -> None:
        mark = b"" if self.latin or self.draw.random() < 0.5 else b"\xef\xbb\xbf"
        path.write_bytes(mark + self.data.encode("latin-1" if self.latin else "utf-8"))

    def rows(self) -> list[list[str]]:
        options: dict[str, Any] = {"quotechar": self.quote} if self.quote else {"quoting": csv.QUOTE_NONE}
        found = csv.reader(io.StringIO(self.text, newline=""), delimiter=self.delimiter, **options)
        return [row for row in found if row]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, FILES, AT_ONCE))
def test_any_file_is_read_like_the_csv_module(tmp_path: Path, first: int) -> None:
    path = tmp_path / "x.csv"
    for seed in range(first, min(FILES, first + AT_ONCE)):
        file = File(seed)
        file.write(path)
        names = [f"f{i}" for i in range(file.columns)]
        kind = "bytes" if file.latin else "string"
        options: dict[str, Any] = {
            "features": {name: DenseSpec((), kind) for name in names},
            "header": names,
            "delimiter": file.delimiter,
            "quote": file.quote,
            "comment": file.comment,
            # Any ASCII character without another meaning, because no number is parsed.
            "decimal": next(mark for mark in ".,;" if mark != file.delimiter),
            "null_values": [],
        }
        want = file.rows()
        if file.latin:
            want = [[field.encode("latin-1") for field in row] for row in want]  # type: ignore[misc]
        columns: list[list[Any]] = [[] for _ in names]
        with fastpipe.read_csv(path, batch_size=37, **options) as reader:
            assert reader.num_rows == len(want), seed
            for batch in reader:
                for column, name in zip(columns, names, strict=True):
                    column.extend(oracle.rows(batch[name]))
        assert list(map(list, zip(*columns, strict=True))) == want, seed
        shuffled = []
        with fastpipe.read_csv(path, batch_size=31, shuffle=True, seed=seed, epochs=1, **options) as reader:
            for batch in reader:
                shuffled += zip(*(oracle.rows(batch[name]) for name in names), strict=True)
        assert sorted(shuffled) == sorted(map(tuple, want)), seed


READ = """
    import pathlib, sys, threading, time, fastpipe

    def private():
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) << 10

    path, limit, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    fastpipe.csv.sample_csv(b"a,b\\n1,2\\n", rows=1, columns=["a"], seed=1)  # Imports modules that are loaded late.
    most, ended = 0, threading.Event()

    def watch():
        global most
        while not ended.wait(0.002):
            most = max(most, private())

    before = private()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    if what == "sample":
        drawn = fastpipe.csv.sample_csv(path, rows=100_000, columns=["a", "b"], seed=1, memory_limit=limit)
        assert drawn.values.shape == (100_000, 2)
    else:
        options = {"shuffle": what == "shuffle", "seed": 1, "epochs": 1, "memory_limit": limit}
        with fastpipe.read_csv(path, batch_size=4096, **options) as reader:
            rows = sum(len(batch["a"]) for batch in reader)
            assert rows == reader.num_rows
    ended.set()
    thread.join()
    print(max(most, private()) - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "x.csv"
    rows = "".join(f"{i},{i / 7},some text of row {i}\n" for i in range(100_000)).encode()
    with path.open("wb") as file:
        file.write(b"a,b,text\n")
        while file.tell() < MEGABYTES * 1_000_000:
            file.write(rows)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("what", ["sequential", "shuffle", "sample"])
def test_private_memory_stays_within_the_limit(large: Path, what: str) -> None:
    """Allows 64 MiB more for code, stacks and memory that the C library retains."""
    # A sample needs the chunks of many rows at once. In a small file these are all chunks.
    limit = (128 if MEGABYTES >= 1000 or what == "sample" else 32) << 20
    command = [sys.executable, "-c", textwrap.dedent(READ), str(large), str(limit), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    print(f"{what}: {int(done.stdout) >> 20} MiB with a limit of {limit >> 20} MiB")
    assert int(done.stdout) <= limit + (64 << 20)
