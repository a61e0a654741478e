"""If a loader's workers or its program are killed or stopped, the right error is raised soon, and no process is left.

`make soak` executes 500 runs (FASTPIPE_LOADER_RUNS) and kills 50 programs, instead of six and two, and prints what
happened. In a soak, "soon" means within five seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import loader_chaos
from apart import apart, wait_until
from fastpipe.errors import WorkerError
from fastpipe.torch import DataLoader
from loader_data import FORKED, Slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

RUNS = int(os.environ.get("FASTPIPE_LOADER_RUNS", "6"))
DEATHS = max(2, RUNS // 10)
# Number of runs in a test.
PIECE = 50


def pieces(count: int) -> list[range]:
    return [range(first, min(first + PIECE, count)) for first in range(0, count, PIECE)]


@apart(most=PIECE * loader_chaos.LONGEST)
def plays(first: int, end: int, to: str) -> None:
    """Executes runs and writes their outcomes to a file."""
    came: Counter[str] = Counter()
    longest: dict[str, float] = {}
    for number in range(first, end):
        what, seconds = loader_chaos.play(number)
        came[what] += 1
        longest[what] = max(longest.get(what, 0.0), seconds)
    Path(to).write_text(json.dumps([came, longest]))


@apart(most=PIECE * loader_chaos.LONGEST)
def plays_deaths(first: int, end: int, to: str) -> None:
    Path(to).write_text(json.dumps([loader_chaos.play_death(number) for number in range(first, end)]))


def say(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints a text in a soak."""
    if "FASTPIPE_LOADER_RUNS" in os.environ:
        with capsys.disabled():
            print(f"\n{text}")


@pytest.mark.timeout(PIECE * loader_chaos.LONGEST + 60)
@pytest.mark.parametrize("runs", pieces(RUNS), ids=lambda runs: f"from-{runs.start}")
def test_programs_notice_soon_what_happens_to_workers(
    runs: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plays(first=runs.start, end=runs.stop, to=str(tmp_path / "came"))
    came, longest = json.loads((tmp_path / "came").read_text())
    told = [f"{count} x {what} (at most {longest[what]:.2f} s)" for what, count in sorted(came.items())]
    assert sum(came.values()) == len(runs)
    say(", ".join(told), capsys)


@pytest.mark.timeout(PIECE * loader_chaos.LONGEST + 60)
@pytest.mark.parametrize("deaths", pieces(DEATHS), ids=lambda runs: f"from-{runs.start}")
def test_workers_end_with_their_program(deaths: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plays_deaths(first=deaths.start, end=deaths.stop, to=str(tmp_path / "gone"))
    gone = json.loads((tmp_path / "gone").read_text())
    say(f"{len(gone)} deaths, workers gone within {max(gone):.2f} s", capsys)


@apart
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_losing_a_worker_after_an_abandoned_pass(number: signal.Signals) -> None:
    """The next pass waits for unfinished work of the lost worker, which never arrives."""
    loader = DataLoader(Slow(120, {}, 0.02), 4, persistent_workers=True, **FORKED)
    for _ in range(2):
        batches: Any = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        os.kill(batches._workers[0].pid, number)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="DataLoader worker"):
            list(loader)
        assert time.monotonic() - begin < loader_chaos.SOON
        assert [batch[0].item() for batch in loader] == list(range(0, 120, 4))


@apart
@pytest.mark.parametrize("stopped", [False, True])
def test_a_program_exits_in_any_state_of_its_workers(stopped: bool) -> None:
    """When Python exits, it waits for processes that multiprocessing has started."""
    code = (
        "import os, signal, sys\n"
        "from fastpipe.torch import DataLoader\n"
        "from loader_data import FORKED, Slow\n"
        "loaders = [DataLoader(Slow(500, {}, 0.01), 4, persistent_workers=kept, **FORKED) for kept in (False, True)]\n"
        "passes = [iter(loader) for loader in loaders]\n"
        "for batches in passes:\n"
        "    next(batches)\n"
        f"    if {stopped}: os.kill(batches._workers[1].pid, signal.SIGSTOP)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=500, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert wait_until(lambda: not loader_chaos.others(), loader_chaos.SOON)
