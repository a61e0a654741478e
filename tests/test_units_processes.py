"""Sources in Python in processes that end, are interrupted, fork, or are killed, while reads hang or run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("pyarrow")

import unit_programs
from processes import interrupt

# Importing pyarrow and starting processes takes a while where others work.
PROMPTLY = 100


# Readers in workers are slower than without, which a warning says.
WARNINGS = ("-W", "error", "-W", "ignore::DeprecationWarning", "-W", "ignore:num_workers=")


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *WARNINGS, unit_programs.__file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str) -> str:
    """What a program prints, if it goes well and in silence."""
    with start(*arguments) as process:
        try:
            out, errors = process.communicate(timeout=PROMPTLY)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert (process.returncode, errors) == (0, "")
    return out


@pytest.mark.parametrize("what", ["hang", "run", "spin", "export"])
def test_programs_end_whatever_reads_do(what: str) -> None:
    run("end_while", what)


def test_passes_that_go_on_while_the_interpreter_ends() -> None:
    assert run("read_at_exit") == "refused\n"


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_ctrl_c_while_a_read_hangs() -> None:
    with start("interrupted") as process:
        interrupt(process, PROMPTLY)


fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@fork
@pytest.mark.parametrize("act", ["slow", "hang"])
def test_forked_children_have_threads_of_their_own(act: str) -> None:
    run("forked", act)


@pytest.mark.parametrize("method", [pytest.param("fork", marks=fork), "spawn"])
def test_readers_are_sent_to_processes(method: str) -> None:
    run("in_pool", method)


@fork
def test_workers_of_torch() -> None:
    pytest.importorskip("torch")
    with start("workers") as process:
        out, errors = process.communicate(timeout=500)
    assert (process.returncode, out) == (0, "killed\n"), errors
