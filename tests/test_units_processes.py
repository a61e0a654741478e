"""Sources written in Python, in processes that exit, are interrupted, fork or are killed while reads hang or run."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("pyarrow")

import unit_programs
from processes import PROMPTLY, interrupt, printed, start

PROGRAM = unit_programs.__file__


@pytest.mark.parametrize("what", ["hang", "run", "spin", "export"])
def test_programs_exit_during_reads(what: str) -> None:
    printed(PROGRAM, "end_while", what)


def test_passes_used_during_interpreter_exit_are_refused() -> None:
    assert printed(PROGRAM, "read_at_exit") == "refused\n"


@pytest.mark.skipif(os.name != "posix", reason="requires POSIX signals")
def test_ctrl_c_while_a_read_hangs() -> None:
    with start(PROGRAM, "interrupted") as process:
        interrupt(process, PROMPTLY)


fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")


@fork
@pytest.mark.parametrize("act", ["slow", "hang"])
def test_forked_children_start_their_own_threads(act: str) -> None:
    printed(PROGRAM, "forked", act)


@pytest.mark.parametrize("method", [pytest.param("fork", marks=fork), "spawn"])
def test_readers_are_sent_to_processes(method: str) -> None:
    printed(PROGRAM, "in_pool", method)


@fork
def test_workers_of_torch() -> None:
    pytest.importorskip("torch")
    with start(PROGRAM, "workers") as process:
        out, errors = process.communicate(timeout=500)
    assert (process.returncode, out) == (0, "killed\n"), errors
