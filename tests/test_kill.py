"""A run that is killed at any time and resumes from its last checkpoint.

It reads the same batches as an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import killed
import samples
from samples import SHUFFLES, Data

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL, fork and named pipes")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Returns 600 rows in two files."""
    files = [samples.blocks_of(350), samples.blocks_of(250, (20, 3))]
    return samples.write(tmp_path_factory.mktemp("kill"), files, "deflate")


class Server:
    """Client of the server in `killed`, which forks a process for each run."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def live(self, folder: Path, request: dict[str, Any], events: int | None = None, delay: float = 0) -> int:
        """Runs one process until it ends or is killed shortly after this many events. Returns its exit code."""
        pipe = folder / "events"
        child = self._ask(json.dumps({"folder": str(folder), "events": str(pipe), **request}))
        with pipe.open("rb", buffering=0) as happened:
            left = sys.maxsize if events is None else events
            while left > 0 and (seen := len(happened.read(min(left, 4096)))) > 0:
                left -= seen
            if left == 0:
                time.sleep(delay)
                os.kill(child, signal.SIGKILL)
        return self._ask("")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with subprocess.Popen(
        [sys.executable, killed.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Server(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("shape", "shuffle", "kills"),
    [*(("reader", shuffle, 25) for shuffle in SHUFFLES), ("mixture", True, 12), ("mixed packs", True, 12)],
)
def test_nothing_is_lost_or_seen_twice(
    server: Server, data: Data, tmp_path: Path, shape: str, shuffle: Any, kills: int
) -> None:
    rng = random.Random(f"{shuffle}" if shape == "reader" else shape)
    order = {"shuffle": shuffle, "batch_size": 5, "seed": 9}
    if shuffle:
        order["shuffle_buffer"] = 40
    fixed = {"shape": shape, "paths": data.paths, "order": order}
    expected = samples.digests(killed.shaped(**fixed, running={}))
    assert len(expected) == {"reader": 240, "mixture": 300, "mixed packs": 50}[shape]
    killed_runs = 0
    for run in range(kills):
        folder = tmp_path / str(run)
        folder.mkdir()
        os.mkfifo(folder / "events")
        ended = False
        while not ended:
            faster = {"num_threads": rng.choice([1, 2, 3]), "prefetch": rng.choice([1, 2, 8])}
            request = {"reader": fixed | {"running": faster}}
            # A checkpoint comes every 8 events. The delay after an event is as long as one or two more events.
            events = rng.randrange(30) if killed_runs < kills else None
            status = server.live(folder, request, events, rng.uniform(0, 0.003))
            killed_runs += status == -signal.SIGKILL
            ended = status == 0
            assert status in (0, -signal.SIGKILL)
            log = folder / "log"
            seen = log.read_text().splitlines() if log.exists() else []
            # A line is written with one call, so no line is truncated.
            assert seen == expected[: len(seen)]
        assert seen == expected
        if killed_runs == kills:
            break
    assert killed_runs == kills
