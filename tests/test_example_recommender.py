"""The recommender example: killed and resumed, on any number of ranks, it trains as if it had not been interrupted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked_programs import RUN, Run, forked
from servers import free_port

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "recommender.py"

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL"),
]


ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# The imports of the example and of its optimizer.
IMPORTS = """
import matplotlib.pyplot
import torch._dynamo
import fastpipe.torch
"""


def run(folder: Path, *options: str, ranks: int = 1) -> str:
    """Runs the example as users do."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(EXAMPLE), str(folder), *options]
    done = subprocess.run(command, env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run_forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with forked(IMPORTS, tmp_path_factory.mktemp("outputs"), **ONE_THREAD) as run:
        yield run


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, run_forked: Run) -> Path:
    folder = tmp_path_factory.mktemp("recommender") / "undisturbed"
    status, _, errors = run_forked(RUN, str(EXAMPLE), str(folder), "--epochs", "2")
    assert status == 0, errors
    return folder


def beside(undisturbed: Path, name: str) -> Path:
    """Creates a folder with the same data."""
    folder = undisturbed.parent / name
    folder.mkdir()
    shutil.copy(undisturbed / "impressions.avro", folder)
    return folder


def test_it_learns_and_draws(undisturbed: Path) -> None:
    found = losses(undisturbed)
    assert len(found) == 2 * 79  # 40,000 rows in batches of 512.
    assert sum(found[-20:]) < 0.9 * sum(found[:20])
    assert (undisturbed / "loss.png").read_bytes().startswith(b"\x89PNG")


# Kills the example shortly after its first checkpoint, and at the third one at the latest.
KILLED = """
import os, runpy, signal, sys, threading
from pathlib import Path
kill, renamed, times = lambda: os.kill(os.getpid(), signal.SIGKILL), Path.rename, []
def rename(path, target):
    renamed(path, target)
    times.append(path)
    threading.Timer(0.02, kill).start() if len(times) < 3 else kill()
Path.rename = rename
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_losses_are_the_same_after_a_kill(undisturbed: Path) -> None:
    folder = beside(undisturbed, "killed")
    command = [sys.executable, "-c", KILLED, str(EXAMPLE), str(folder), "--epochs", "2", "--checkpoint-every", "7"]
    killed = subprocess.run(
        command, env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=500, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (folder / "checkpoint.pt").exists()
    assert not (folder / "losses.json").exists()
    # The batches may come from another process.
    said = run(folder, "--epochs", "2", "--service")
    assert re.search(r"batches come from <fastpipe.service.LocalService of .*: pid \d+>", said)
    assert losses(folder) == losses(undisturbed)


def test_a_finished_run_does_not_train_further(undisturbed: Path, run_forked: Run) -> None:
    before = losses(undisturbed)
    checkpoint = (undisturbed / "checkpoint.pt").read_bytes()
    status, said, errors = run_forked(RUN, str(EXAMPLE), str(undisturbed), "--epochs", "2")
    assert status == 0, errors
    assert "finished" in said
    assert (losses(undisturbed), (undisturbed / "checkpoint.pt").read_bytes()) == (before, checkpoint)


# Forks ranks. Each gets the environment that a launcher would set.
RANKS = """
port, world, *sys.argv = sys.argv[1:]
children = []
for rank in range(int(world)):
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        runpy.run_path(sys.argv[0], run_name="__main__")
        break
    children.append(child)
else:
    assert not any([os.waitpid(child, 0)[1] for child in children])
"""


def test_two_ranks_in_an_empty_folder_and_then_three(undisturbed: Path, run_forked: Run) -> None:
    folder = undisturbed.parent / "ranks"
    run(folder, "--epochs", "1", "--checkpoint-every", "5", "--stop-after", "10", ranks=2)
    assert not (folder / "losses.json").exists()
    status, _, errors = run_forked(RANKS, str(free_port()), "3", str(EXAMPLE), str(folder), "--epochs", "1")
    assert status == 0, errors
    # Of 79 batches, two ranks read 20 and three ranks read the others, except for two that can't be divided equally.
    assert len(losses(folder)) == 10 + 59 // 3
