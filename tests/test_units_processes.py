"""Sources in Python in processes that end, are interrupted, fork, or are killed, while reads hang or run."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("pyarrow")

import unit_programs
from processes import PROMPTLY, interrupt, printed, start

PROGRAM = unit_programs.__file__


@pytest.mark.parametrize("what", ["hang", "run", "spin", "export"])
def test_programs_end_whatever_reads_do(what: str) -> None:
    printed(PROGRAM, "end_while", what)


def test_passes_that_go_on_while_the_interpreter_ends() -> None:
    assert printed(PROGRAM, "read_at_exit") == "refused\n"


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_ctrl_c_while_a_read_hangs() -> None:
    with start(PROGRAM, "interrupted") as process:
        interrupt(process, PROMPTLY)


fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@fork
@pytest.mark.parametrize("act", ["slow", "hang"])
def test_forked_children_have_threads_of_their_own(act: str) -> None:
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
