"""Programs with a loader, which are killed and stopped at random, as are their workers.

A run forks a program that reads a loader. The test's own process has no loader. It signals the program's workers at a
random time and measures how long the program takes to notice. It then checks the program's report and that no process
is left.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle
import random
import re
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from apart import Left, in_shm, wait_until
from fastpipe.errors import WorkerError
from loader_plans import Plan, plan

# Seconds within which a program must notice the loss of a worker, and workers must exit after their program. The soak
# has the machine to itself. Where other tests run as well, each step may take many times longer.
SOON = 5.0 if "FASTPIPE_LOADER_RUNS" in os.environ else 60.0
# The limit for spawned workers, which react to nothing before they have imported the program and torch.
IMPORTS = max(60.0, 2 * SOON)
# Seconds after which a run counts as hanging. A pass takes about a second, and spawned workers first import torch.
LONGEST = 4 * SOON + 25


class Seen(Exception):
    """A batch has unexpected values."""


def indices_of(batch: Any, width: int) -> list[int]:
    """Returns the indices of a batch after checking that all its values belong to them."""
    indices: list[int] = batch["index"].tolist()
    if batch["name"] != [f"item {index}" for index in indices]:
        raise Seen(f"names {batch['name']} of {indices}")
    rows = batch["row"]
    if rows.shape != (len(indices), width) or not bool((rows == batch["index"][:, None]).all()):
        raise Seen(f"rows of {indices}")
    return indices


@dataclasses.dataclass
class Report:
    """The report of a program.

    Attributes:
        batches: The indices of each batch, in order of delivery.
        error: Class and text of the first error, or None.
        at: Monotonic time of the error.
        behind: Number of batches before the error.
        again: Batches of another pass after the error.
        failed: Any other failure; empty if there was none.
        ended: Time at which the pass was over and its workers had exited, unless they persist.
    """

    batches: list[list[int]] = dataclasses.field(default_factory=list)
    error: tuple[str, str] | None = None
    at: float = 0.0
    behind: int = 0
    again: list[list[int]] | None = None
    failed: str = ""
    ended: float = 0.0


def _read(plan: Plan, note: Path, report: Report, told: Callable[[Any], None]) -> None:
    loader = plan.loader(note)
    batches = iter(loader)
    if plan.method != "thread":
        workers = batches._workers_of_pass
        told([worker.pid for worker in workers.all])
    else:
        told([])
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        except Exception as error:
            if report.error is not None:
                raise
            names = [kind.__name__ for kind in type(error).__mro__]
            report.error = " ".join(names), str(error)
            report.at, report.behind = time.monotonic(), len(report.batches)
            if not isinstance(error, WorkerError):
                continue
            break
        report.batches.append(indices_of(batch, plan.width))
        time.sleep(plan.away)
    del batches
    gc.collect()
    report.ended = time.monotonic()
    if report.error is not None and plan.index is None:
        report.again = _read_again(plan, loader)


def _read_again(plan: Plan, loader: Any) -> list[list[int]]:
    """Reads another pass of a loader after an error."""
    # Persistent workers may still be stopped. The loader counts the time that they have already been stopped.
    tries = 5 if plan.action == "stop with a timeout" else 1
    for left in reversed(range(tries)):
        try:
            return [indices_of(batch, plan.width) for batch in loader]
        except WorkerError:
            if not left:
                raise
    raise AssertionError


def _program(plan: Plan, note: Path, pipe: int) -> None:
    """Reads a loader. Sends the workers' ids and a report."""

    def told(message: Any) -> None:
        data = pickle.dumps(message)
        os.write(pipe, len(data).to_bytes(4, "little") + data)

    report = Report()
    try:
        left = Left()
        _read(plan, note, report, told)
        left.look()
        maps = Path("/proc/self/maps").read_text()
        assert "memfd:fastpipe" not in maps, "shared memory is still mapped"
    except BaseException:
        report.failed = traceback.format_exc()
    told(report)


class Program:
    """A forked program that reads a loader."""

    def __init__(self, run: Callable[[int], None]) -> None:
        self._pipe, there = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                os.close(self._pipe)
                run(there)
                sys.stderr.flush()
            finally:
                os._exit(0)
        os.close(there)

    def told(self, deadline: float) -> Any:
        """Returns the next message, or None if the program ends without one.

        Raises:
            TimeoutError: If no message arrives before the deadline.
        """
        length = self._bytes(4, deadline)
        return None if not length else pickle.loads(self._bytes(int.from_bytes(length, "little"), deadline))

    def _bytes(self, count: int, deadline: float) -> bytes:
        found = b""
        while len(found) < count:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            more = os.read(self._pipe, count - len(found))
            if not more:
                return b""
            found += more
        return found

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process, number)

    def end(self) -> None:
        """Waits for the program to end."""
        os.close(self._pipe)
        os.waitpid(self.process, 0)


def others() -> list[psutil.Process]:
    """Returns the other running processes of this session."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and os.getsid(process.pid) == os.getsid(0):
                # A zombie has exited and waits to be reaped by its parent.
                found += [process] * (process.status() != psutil.STATUS_ZOMBIE)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def play(number: int) -> tuple[str, float]:
    """Executes a run. Returns its outcome, and the seconds from the action until the program noticed it."""
    with tempfile.TemporaryDirectory() as folder:
        return _play(number, Path(folder) / "note")


def _play(number: int, note: Path) -> tuple[str, float]:
    run = plan(number)
    shm = in_shm()
    program = Program(lambda pipe: _program(run, note, pipe))
    deadline = time.monotonic() + LONGEST
    chance = random.Random(number)
    try:
        workers = program.told(deadline)
        acted, struck = _strike(run, workers, chance)
        report = program.told(deadline)
    except TimeoutError:
        for process in others():
            # Each process prints its stacks.
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        raise AssertionError(f"run {number} hangs: {run}") from None
    finally:
        program.end()
    assert isinstance(report, Report), f"run {number}: the program ended. {run}"
    assert not report.failed, f"run {number}: {report.failed}\n{run}\n{report}"
    if note.exists():
        # The event came from the program itself: an item or `collate_fn` exited or raised.
        acted = float(note.read_text())
    _judge(run, report, acted, struck, f"run {number}: {run}\n{report.error}")
    assert wait_until(lambda: not others(), SOON), f"run {number} left {others()}: {run}"
    assert wait_until(lambda: not in_shm() - shm), f"run {number} left {in_shm() - shm} in /dev/shm: {run}"
    if report.error is None:
        return f"{run.action}: unharmed", 0.0
    return f"{run.action}: error", report.at - acted


def _strike(run: Plan, workers: list[int], chance: random.Random) -> tuple[float, int | None]:
    """Applies the run's action to a worker. Returns when, and to which worker."""
    if run.action not in ("kill", "stop", "stop with a timeout", "pause") or not workers:
        return time.monotonic(), None
    time.sleep(run.at)
    worker = chance.choice(workers)
    acted = time.monotonic()
    try:
        os.kill(worker, signal.SIGKILL if run.action == "kill" else signal.SIGSTOP)
        if run.action == "pause":
            time.sleep(run.pause)
            os.kill(worker, signal.SIGCONT)
            if time.monotonic() - acted > 1.4:
                # On a busy machine the pause may be so long that the worker is considered lost.
                run.action = "stop"
    except ProcessLookupError:
        # The pass had already ended.
        return acted, None
    return acted, worker


EXPECTED = {
    "kill": r"DataLoader worker \(pid {pid}\) is killed by signal: Killed: .* was killed by SIGKILL while",
    "stop": r"DataLoader worker \(pid\(s\) {pid}\) is stopped by a signal, which blocks its items: .* while",
    # If other workers deliver batches, no wait reaches the timeout, and the stopped worker is detected first.
    "stop with a timeout": r"DataLoader timed out after [\d.]+ seconds \(.* is stopped by a signal while"
    r"|DataLoader worker \(pid\(s\) {pid}\) is stopped by a signal, which blocks its items: .* while",
    "die": r"DataLoader worker \((pid\(s\) \d+\) exited unexpectedly: .* ended with exit code 7|"
    r"pid \d+\) is killed by signal: Segmentation fault: .* was killed by SIGSEGV)"
    r" while making row \d+ of batch \d+, index {index}",
    "raise": r"(?s)Caught LookupError in DataLoader worker (process|thread) \d+\..*Traceback.*no item {index}",
}


def _judge(run: Plan, report: Report, acted: float, struck: int | None, said: str) -> None:
    """Checks that a program's report matches the plan."""
    expected = run.batches()
    bad = [number for number, batch in enumerate(expected) if run.index in batch]
    if report.error is None:
        assert run.action in ("kill", "stop", "stop with a timeout", "pause", "none"), said
        assert _come(report.batches, expected, run), f"{said}: {report.batches}"
    else:
        kinds, text = report.error
        assert re.search(EXPECTED[run.action].format(pid=struck, index=run.index), text), said
        assert "LookupError" in kinds if run.action == "raise" else "WorkerError RuntimeError" in _short(kinds), said
        if run.action == "raise":
            assert _come(report.batches, [batch for batch in expected if run.index not in batch], run), said
            assert not run.options["in_order"] or report.behind == bad[0], said
        elif run.options["in_order"]:
            assert report.batches == expected[: len(report.batches)], said
        else:
            assert all(batch in expected for batch in report.batches), said
            assert len({batch[0] for batch in report.batches}) == len(report.batches), said
        # Batches before the one that raises may wait for workers that still import torch.
        most = IMPORTS if run.method == "spawn" and run.action == "raise" else SOON
        assert 0.0 <= report.at - acted < most, f"{report.at - acted:.1f} s: {said}"
        assert report.again is None or _come(report.again, expected, run), said
    # Stopped workers delay the end only briefly; workers that import torch first may delay it longer.
    soon = IMPORTS if run.method in ("spawn", "forkserver") else 2 * SOON
    assert report.ended - max(acted, report.at) < soon + len(expected) * run.away, said


def _short(kinds: str) -> str:
    return kinds.replace("FastpipeError ", "")


def _come(batches: list[list[int]], expected: list[list[int]], run: Plan) -> bool:
    """Returns whether the batches are complete, and in order if the plan requires it."""
    return batches == expected if run.options["in_order"] else sorted(batches) == sorted(expected)


def _reads_on(run: Plan, pipe: int, *, by_thread: bool) -> None:
    """Reads a loader again and again, optionally in a thread other than the main thread."""

    def read() -> None:
        # No item raises or exits here, so there is nothing to record.
        loader = run.loader(Path(os.devnull))
        while True:
            batches = iter(loader)
            workers = [] if run.method == "thread" else batches._workers_of_pass.all
            os.write(pipe, b"".join(worker.pid.to_bytes(4, "little") for worker in workers) or bytes(4))
            for number, _ in enumerate(batches):
                if number == 0:
                    os.write(pipe, b"read")

    if by_thread:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    else:
        read()


def play_death(number: int) -> float:
    """Kills a program while its workers run. Returns the seconds until the workers were gone."""
    run = plan(10_000 + number, ("none",), (1,))
    chance = random.Random(number)
    run.method = ("fork", "spawn", "forkserver", "thread")[number] if number < 4 else run.method
    if run.method == "fork" and number % 5 == 4:
        run.method = "forkserver"
    if run.method == "forkserver":
        run.makers = min(run.makers, 2)
    shm = in_shm()
    by_thread = chance.random() < 0.2 and run.method == "fork"
    imports = run.method in ("spawn", "forkserver")
    soon = IMPORTS if imports else SOON
    program = Program(lambda pipe: _reads_on(run, pipe, by_thread=by_thread))
    stopped = None
    if number < 4 or chance.random() < 0.8:
        ready, _, _ = select.select([program._pipe], [], [], LONGEST)
        assert ready, f"death {number}: no worker starts: {run}"
        started = os.read(program._pipe, 4 * (run.makers + (run.joiners or 0)))
        if imports and (number < 4 or chance.random() < 0.5):
            assert select.select([program._pipe], [], [], LONGEST)[0], f"death {number}: no batch arrives: {run}"
            # One worker may produce a whole batch while another one still imports torch.
            soon = SOON if run.makers == 1 and (run.joiners or 0) <= 1 else IMPORTS
        time.sleep(run.at)
        if chance.random() < 0.25 and run.method != "thread" and soon == SOON and not by_thread:
            # A stopped worker can't react. (Within Python's own startup code a process would stay stopped forever.)
            stopped = int.from_bytes(started[:4], "little")
            try:
                os.kill(stopped, signal.SIGSTOP)
            except ProcessLookupError:
                stopped = None
    else:
        # Kills the program while it starts its workers.
        time.sleep(chance.uniform(0.0, 0.03))
    program.send(signal.SIGKILL)
    killed = time.monotonic()
    program.end()
    said = f"death {number}, with one stopped: {stopped is not None}, by a thread: {by_thread}: {run}"
    assert wait_until(lambda: not others(), soon), f"{said} left {others()}"
    gone = time.monotonic() - killed
    assert wait_until(lambda: not in_shm() - shm), f"{said} left {in_shm() - shm} in /dev/shm"
    return gone
