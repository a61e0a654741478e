"""When memory runs out, a reader raises a typed error or MemoryError and can be used again. The process survives.

`make soak` tests many more runs.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import exhausted
import wire

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits address space")

RUNS = int(os.environ.get("FASTPIPE_OOM_RUNS", "2"))
# The index of a run selects its kind of data and codec in turn, so a few runs cover many kinds.
NUMBERS = range(RUNS) if RUNS >= 16 else range(0, 5 * RUNS, 5)
# Errors that report exhausted memory. Errors that Python itself raises are MemoryError.
TYPED = {"OutOfMemoryError", "MemoryError"}
PATIENCE = 60  # Seconds after which a run counts as hung.


class Runs:
    """The client of the server that forks a process for each run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, exhausted.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _ask(self, line: str) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def run(self, number: int) -> dict[str, Any]:
        """Returns the result of a run. Fails if the run crashed or hung."""
        child = self._ask(f"{number} {self._folder}")
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write("\n")
        self._server.stdin.flush()
        hangs = not select.select([self._server.stdout], [], [], PATIENCE)[0]
        if hangs:
            os.kill(child, signal.SIGABRT)  # Dumps the stacks of the run's threads.
        status = int(self._server.stdout.readline())
        log = (self._folder / f"{number}.log").read_text(errors="replace")
        ended = "the run hung" if hangs else f"the run ended with status {status}"
        assert status == 0, f"{ended}: {vars(exhausted.Run(number, self._folder))}\n{log}"
        found: dict[str, Any] = json.loads((self._folder / f"{number}.json").read_text())
        return found

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("exhausted")
    for kind in exhausted.SCHEMAS:
        for codec in wire.CODECS:
            exhausted.write(folder, kind, codec)
    server = Runs(folder)
    yield server
    server.close()


@pytest.mark.parametrize("number", NUMBERS)
def test_batches_are_kept_until_memory_runs_out(runs: Runs, number: int) -> None:
    found = runs.run(number)
    assert found["error"] in TYPED, found
    assert found["again"] == "the same", found
