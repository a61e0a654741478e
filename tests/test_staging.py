"""The staging ring over a simulated device: under any schedule, no memory is reused too early."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

import fastpipe
from fastpipe.cuda import _staging as staging
from fastpipe.cuda._staging import StagingRing
from processes import together
from staging import Arriving, Batches, Device, HostMemory, content, values


class World:
    """A ring, and the simulated device, memory and source that it works with."""

    def __init__(
        self,
        count: int = 10,
        depth: int = 2,
        *,
        done: list[bool] | None = None,
        error_at: int | None = None,
        fails_at: int | None = None,
        breaks_at: int | None = None,
    ) -> None:
        self.memory = HostMemory()
        self.device = Device(done, fails_at, breaks_at)
        self.batches = Batches(count, self.memory, self.device, depth, error_at)
        self.ring = StagingRing(self.batches, self.device, depth, stop=self.batches.stop, name="copies")
        self.thread = self.ring._belt._thread
        assert self.thread is not None

    def check_end(self, depth: int) -> None:
        """Checks the state after a ring has ended for any reason."""
        self.thread.join()
        assert self.device.completed == self.device.begun
        # The batch whose copy failed is kept alive by the error.
        assert self.memory.returned == list(range(self.device.begun))
        assert self.batches.most_in_flight <= depth
        assert self.memory.made <= depth


SCHEDULES = {
    "count": st.integers(0, 12),
    "depth": st.integers(1, 4),
    "done": st.lists(st.booleans(), min_size=1, max_size=8),
    # After how many further batches each batch is checked.
    "patience": st.lists(st.integers(0, 12), min_size=1, max_size=6),
    "leave_at": st.none() | st.integers(0, 12),
    "error_at": st.none() | st.integers(0, 12),
    "fails_at": st.none() | st.integers(0, 12),
}
LATE: dict[str, Any] = {
    "count": 8,
    "depth": 3,
    "done": [False],
    "patience": [12],
    "leave_at": None,
    "error_at": None,
    "fails_at": None,
}


def follow(
    count: int,
    depth: int,
    done: list[bool],
    patience: list[int],
    leave_at: int | None,
    error_at: int | None,
    fails_at: int | None,
) -> None:
    """Draws from a ring according to a schedule, and compares the results with the expected ones."""
    world = World(count, depth, done=done, error_at=error_at, fails_at=fails_at)
    end = min(n for n in (count, error_at, fails_at, leave_at) if n is not None)
    held: list[tuple[int, int, Any]] = []
    for number in range(end):
        batch, note = next(world.ring)
        assert note == number
        assert isinstance(batch, Arriving)
        held.append((number + patience[number % len(patience)], number, batch))
        for due, seen, kept in held:
            if due == number:
                assert content(kept) == values(seen)
        held = [entry for entry in held if entry[0] > number]
    if end == leave_at:
        world.ring.close()
        with pytest.raises(fastpipe.FastpipeError, match="closed"):
            next(world.ring)
    else:
        expected = ValueError if end == error_at else StopIteration if end == count else RuntimeError
        for _ in range(2):
            with pytest.raises(expected):
                next(world.ring)
    for _, seen, kept in held:
        assert content(kept) == values(seen)
    world.check_end(depth)


@given(**SCHEDULES)
@example(**LATE)
@example(**LATE | {"leave_at": 5})
def test_any_schedule(**schedule: Any) -> None:
    follow(**schedule)


class EarlyReuse(staging._Belt):
    """Releases host memory without waiting for the copy."""

    def _settle(self, slot: staging._Slot) -> None:
        slot.host = None


class EarlyReuseAtTheEnd(staging._Belt):
    """Waits for copies, except for copies in flight when it ends."""

    def _drain(self) -> None:
        self._in_flight.clear()
        super()._drain()


class NoArrival(staging._Belt):
    """Yields device batches without waiting for their arrival."""

    def _hand_out(self, slot: staging._Slot) -> Any:
        return slot.device


class TooDeep(staging._Belt):
    """Keeps more batches in flight than allowed."""

    def _make_room(self) -> bool:
        self._depth += 1
        return super()._make_room()


class OutOfOrder(staging._Belt):
    """Drains batches in the wrong order."""

    def _drain(self) -> None:
        self._in_flight.reverse()
        super()._drain()


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (EarlyReuse, r"assert \[.*\] == \[0, 1, 2, 3\]"),
        (EarlyReuseAtTheEnd, r"assert \[-1, -1, -1, -1\] == \["),
        (NoArrival, "Arriving"),
        (TooDeep, "most_in_flight"),
        (OutOfOrder, "At index 6 diff: 7 != 6"),
    ],
)
def test_broken_rings_are_detected(broken: type[Any], found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_Belt", broken)
    with pytest.raises(AssertionError, match=found):
        follow(**LATE)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_ring_waits_for_copies_only_when_it_is_full(depth: int) -> None:
    world = World(10, depth)
    batches = [next(world.ring) for _ in range(10)]
    # The ring waits for each of these copies before it begins a later one.
    assert world.device.completed >= 10 - depth
    assert [note for _, note in batches] == list(range(10))


def test_a_failing_device() -> None:
    before = len(staging._abandoned)
    world = World(10, 2, breaks_at=3)
    for number in range(3):
        assert content(next(world.ring)[0]) == values(number)
    with pytest.raises(RuntimeError, match="the device is lost"):
        list(world.ring)
    world.thread.join()
    # The device may still be reading the remaining batches, so they are not returned.
    assert world.memory.returned == [0, 1, 2]
    assert len(staging._abandoned) > before
    del staging._abandoned[before:]


class Blocked:
    """A source whose next batch never arrives."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.stopped = threading.Event()

    def __iter__(self) -> Blocked:
        return self

    def __next__(self) -> Any:
        self.asked.set()
        self.stopped.wait()
        raise RuntimeError("interrupted")


def test_closing_interrupts_a_wait_for_the_source() -> None:
    source = Blocked()
    ring = StagingRing(source, Device(), 2, stop=source.stopped.set, name="copies")
    errors: list[BaseException] = []

    def draw() -> None:
        try:
            next(ring)
        except BaseException as error:
            errors.append(error)

    consumer = threading.Thread(target=draw)
    consumer.start()
    source.asked.wait()
    ring.close()
    consumer.join()
    ring.close()
    assert "closed" in str(errors[0])
    assert not ring._belt._thread.is_alive()


def test_a_dropped_ring_ends_its_thread() -> None:
    world = World(100, 3)
    kept, _ = next(world.ring)
    del world.ring
    world.check_end(3)
    assert content(kept) == values(0)


class Collecting(Batches):
    """Collects garbage before the third batch, if an event is set."""

    go = threading.Event()

    def __next__(self) -> Any:
        if self.drawn == 2:
            self.go.wait()
            gc.collect()
        return super().__next__()


def test_a_ring_collected_by_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks for a deadlock: any thread may collect garbage, and the ring's thread must not wait for itself."""
    monkeypatch.setitem(globals(), "Batches", Collecting)
    gc.disable()
    try:
        world = World(100, 2)
        cycle: list[Any] = [world.ring]
        cycle.append(cycle)
        del world.ring
        next(cycle[0])
        del cycle
        Collecting.go.set()
        world.thread.join()
    finally:
        gc.enable()
    world.check_end(2)
    assert world.batches.stopped


def test_several_threads_share_a_ring() -> None:
    world = World(200, 3, done=[True, False, False])
    seen: list[int] = []

    def draw() -> None:
        for batch, note in world.ring:
            assert content(batch) == values(note)
            seen.append(note)

    together([threading.Thread(target=draw) for _ in range(4)])
    assert sorted(seen) == list(range(200))
    world.check_end(3)


EXIT = """
import sys
sys.path.insert(0, {folder!r})
from test_staging import World
world = World(100, 3)
next(world.ring)
print("leaving", flush=True)
{how}
"""


@pytest.mark.parametrize(
    "how",
    [
        "",
        "raise SystemExit(0)",
        "import threading; t = threading.Thread(target=list, args=(world.ring,)); t.start(); t.join()",
    ],
)
def test_the_interpreter_exits(how: str) -> None:
    code = EXIT.format(folder=os.path.dirname(__file__), how=how)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows can't send SIGINT to its own process")
def test_ctrl_c_ends_a_wait() -> None:
    source = Blocked()
    ring = StagingRing(source, Device(), 2, stop=source.stopped.set, name="copies")

    def interrupt() -> None:
        source.asked.wait()
        os.kill(os.getpid(), signal.SIGINT)

    def draw() -> None:
        threading.Thread(target=interrupt).start()
        next(ring)

    with pytest.raises(KeyboardInterrupt):
        draw()
    ring.close()


def test_ctrl_c_after_any_call_leaves_the_ring_unlocked() -> None:
    """Python calls the handlers of signals after calls of C functions, so a profiler can raise the error there."""
    for number in itertools.count(1):
        world = World(4, 2)
        left = number

        def interrupt(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal left
            left -= event == "c_return"
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            sys.setprofile(interrupt)
            next(world.ring)
        sys.setprofile(None)
        closed = threading.Thread(target=world.ring.close, daemon=True)
        closed.start()
        closed.join(100)
        assert not closed.is_alive(), f"call {number}"
        if left > 0:
            break


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_use_the_ring() -> None:
    world = World(100, 2)
    next(world.ring)
    child = os.fork()
    if child == 0:
        try:
            next(world.ring)
        except fastpipe.FastpipeError as error:
            world.ring.close()
            os._exit("another process" in str(error))
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert next(world.ring)[1] == 1
