"""Mutated files, read in every order, never cause an abort, a panic, a hang or an untyped error.

`FASTPIPE_MUTATIONS` is the number of mutated files. `make soak` reads 200,000.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

MUTATIONS = int(os.environ.get("FASTPIPE_MUTATIONS", "100"))
FIRST = int(os.environ.get("FASTPIPE_FIRST_MUTATION", "0"))
PATIENCE = 60.0
"""Seconds without output after which a child counts as hung. Allows for a busy machine."""
LONGEST = 10.0
"""Seconds of CPU time that reading one file in every order may take."""
SCRIPT = Path(__file__).parent / "mutations.py"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="bounds memory by RLIMIT_AS and reads /proc"),
    pytest.mark.timeout(0 if MUTATIONS > 10_000 else 600),
]


class Child:
    """A process that reads mutations from a given index on, and the parser of its output."""

    def __init__(self, first: int, count: int) -> None:
        self.number, self.heard = first, b""
        self.slow: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(first), str(count)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def listen(self) -> str | None:
        """Reads the output until the process ends. Returns the reason if it failed, or None."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(PATIENCE):
                    self.process.kill()
                    self.process.communicate()
                    return f"mutation {self.number}: no output for {PATIENCE} s"
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                *lines, self.heard = (self.heard + data).split(b"\n")
                for line in lines:
                    self._take(line.decode())
        _, errors = self.process.communicate()
        if self.process.returncode == 0:
            return None
        return f"mutation {self.number}: status {self.process.returncode}\n{errors.decode()[-3000:]}"

    def _take(self, line: str) -> None:
        word, *rest = line.split(" ")
        if word == "begin":
            self.number = int(rest[0])
            return
        if float(rest[0]) > LONGEST:
            self.slow.append(f"mutation {self.number}: {rest[0]} s")
        self.outcomes.update(rest[1].split(","))


def test_mutated_files_end_in_rows_or_typed_errors() -> None:
    failures: list[str] = []
    outcomes: Counter[str] = Counter()
    number, end = FIRST, FIRST + MUTATIONS
    while number < end and len(failures) < 20:
        # Each process reads 5,000 files. A fresh one makes leaks visible and keeps one file from affecting many others.
        child = Child(number, min(end - number, 5_000))
        failed = child.listen()
        failures += child.slow
        if failed is not None:
            failures.append(failed)
        outcomes += child.outcomes
        number = child.number + 1
    print(f"{number - FIRST} files: {dict(outcomes)}")
    assert not failures, "\n".join(failures)
    # Some of the files are still valid, and some are refused.
    assert {"", "MalformedFileError"} <= outcomes.keys()
