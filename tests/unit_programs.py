"""Programs that test_units_processes.py runs: sources in Python, and processes that exit, fork or are interrupted.

Each program runs in a separate process: python unit_programs.py name arguments...
"""

from __future__ import annotations

import atexit
import collections
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

import pyarrow as pa
import pytest

import fastpipe
from fastpipe.units import _data
from toy_units import Numbers, flat, until

ROWS = [4] * 12


def hang(unit: int) -> None:
    if unit >= 2:
        time.sleep(1000)


def slowly(unit: int) -> None:
    time.sleep(0.02)


def end_while(what: str) -> None:
    """Exits while reads hang or run. The pass is referenced from a global variable, or is garbage."""
    units = Numbers([4] * 1000, {"hang": hang, "run": slowly, "spin": spin, "export": export}[what])
    reader = fastpipe.read_units(units, batch_size=4, num_fetches=5)
    batches = iter(reader)
    next(batches)
    until(lambda: units.under_way >= 3)
    if what == "hang":
        globals()["kept"] = batches


def spin(unit: int) -> None:
    """Needs the GIL all the time."""
    end = time.monotonic() + (0.01 if unit < 2 else 0.3)
    while time.monotonic() < end:
        sum(range(100))


def export(unit: int) -> None:
    """Enters and leaves C++ code repeatedly. Its stack must not be unwound at exit."""
    table = pa.table({"x": [1]})
    end = time.monotonic() + (0.01 if unit < 2 else 0.3)
    while time.monotonic() < end:
        table.__arrow_c_stream__()


def read_at_exit() -> None:
    """Uses a pass after the interpreter has begun to exit."""
    batches = iter(fastpipe.read_units(Numbers([4] * 1000, slowly), batch_size=4, num_fetches=2))
    next(batches)

    def go_on() -> None:
        with pytest.raises(fastpipe.errors.PassClosedError, match="the interpreter is ending"):
            collections.deque(batches, maxlen=0)
        print("refused")

    # Handlers run in reverse order, so this one runs after the handler of fastpipe.
    atexit.unregister(_data._end)
    atexit.register(go_on)
    atexit.register(_data._end)


def interrupted() -> None:
    """Waits for a read that hangs, until it is interrupted."""
    reader = fastpipe.read_units(Numbers([4] * 12, hang), batch_size=4)
    batches = iter(reader)
    next(batches)
    next(batches)
    try:
        print("waits", flush=True)
        next(batches)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise


def in_child(work: Any) -> None:
    """Runs a function in a forked child, which must exit successfully."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + 60
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, status
            return
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            raise AssertionError("the child hangs")
        time.sleep(0.01)


def forked(act: str) -> None:
    """Forks during a pass. Parent and child continue to read independently."""
    units = Numbers(ROWS, {"slow": slowly, "hang": hang_in_parent}[act])
    reader = fastpipe.read_units(units, batch_size=5, num_fetches=3)
    batches = iter(reader)
    first = next(batches)["x"].tolist() if act == "slow" else []
    if act == "hang":
        until(lambda: units.under_way == 3)

    def work() -> None:
        try:
            next(batches)
        except fastpipe.errors.PassClosedError:
            pass
        else:
            raise AssertionError("the child used a pass of its parent")
        assert flat(fastpipe.read_units(Numbers(ROWS, slowly), batch_size=5)) == list(range(48))
        reader.set_epoch(0)
        for _ in range(2):
            assert flat(reader) == list(range(48))
            reader.set_epoch(0)
        until(lambda: not [t for t in threading.enumerate() if t.name == "fastpipe-read" and t.is_alive()])

    for _ in range(3):
        in_child(work)
    if act == "slow":
        assert first + flat(batches) == list(range(48))


PARENT = os.getpid()


def hang_in_parent(unit: int) -> None:
    if os.getpid() == PARENT:
        time.sleep(1000)


def in_pool(method: str) -> None:
    """Sends a reader to a process of multiprocessing after using it here."""
    reader = fastpipe.read_units(Numbers(ROWS, slowly), batch_size=5)
    next(iter(reader))
    reader.close()
    reader = fastpipe.read_units(Numbers(ROWS, slowly), batch_size=5)
    with multiprocessing.get_context(method).Pool(2) as pool:
        for found in pool.map(flat, [reader, reader]):
            assert found == list(range(48))


def workers() -> None:
    """Reads with workers of torch's DataLoader, one of which is killed during a read."""
    from torch.utils.data import DataLoader

    import fastpipe.torch as fptorch
    from killed_worker import EndsInMap, kill_self

    def read(act: Any, method: str, **more: Any) -> Any:
        data = fptorch.dataset(fastpipe.read_units(Numbers(ROWS, act), batch_size=5), **more)
        return iter(DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=method))

    assert flat(read(slowly, "spawn")) == list(range(48))
    told = threading.Event()

    def kill(unit: int) -> None:
        # The rows of the first two batches are in earlier units.
        if unit == 3:
            told.wait()
            kill_self()

    ends = EndsInMap(worker=0, batch=1, kill=told.set)
    batches = read(kill, "fork", map=ends)
    next(batches)
    ends.go()
    # Torch has two variants of this message.
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
        flat(batches)
    print("killed")


def main() -> None:
    name, *arguments = sys.argv[1:]
    globals()[name](*arguments)


if __name__ == "__main__":
    main()
