"""Programs with a loader, whose workers, or which themselves, are killed and stopped by chance.

A run forks a program that reads a loader. The test's own process has none: it strikes the program's workers at a random
time, takes the time, and looks at what the program saw, and at what is left of it.
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
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset

from apart import Left, in_shm, wait_until
from fastpipe.errors import WorkerError
from fastpipe.torch import DataLoader

# Seconds within which a program must know of what befell its workers, and workers must be gone with their program.
SOON = 5.0
# And workers that Python prepares first: they hear of nothing until they have imported the program, and torch.
IMPORTS = 12 * SOON
# Seconds after which a run hangs: a pass takes one, and spawned workers import torch.
LONGEST = 45.0

WORKER_ACTIONS = ("kill", "stop", "stop with a timeout", "pause", "die", "raise")
WEIGHTS = (6, 2, 2, 3, 2, 2)


@dataclasses.dataclass
class Plan:
    """What a run does.

    Attributes:
        action: what happens to a worker; "none" for nothing.
        method: how workers are started.
        makers: item workers.
        joiners: batch workers; None where batches are collated by default.
        batch: items of a batch.
        count: items.
        seconds: of an item, on average.
        width: numbers of an item.
        away: seconds that the consumer is away behind each batch.
        options: further arguments of the loader.
        at: seconds from the start of the pass to the action.
        pause: seconds for which a worker is stopped.
        index: of the item that dies or raises; None for none.
        by_collation: whether `collate_fn` raises instead.
    """

    action: str
    method: str
    makers: int
    joiners: int | None
    batch: int
    count: int
    seconds: float
    width: int
    away: float
    options: dict[str, Any]
    at: float
    pause: float
    index: int | None
    by_collation: bool

    def loader(self) -> Any:
        """The loader of this run."""
        index = self.index if not self.by_collation else None
        dataset = Chancy(self.count, self.seconds, self.width, index, dies=self.action == "die")
        more: dict[str, Any] = {}
        if self.method == "thread":
            more["worker_method"] = "thread"
        else:
            more |= {"worker_method": "multiprocessing", "multiprocessing_context": self.method}
        if self.joiners is not None:
            bad = self.index if self.by_collation else None
            more |= {"collate_fn": Stack(bad), "num_batch_workers": self.joiners}
        return DataLoader(dataset, self.batch, num_workers=self.makers, **more, **self.options)

    def batches(self) -> list[list[int]]:
        """The indices of each batch."""
        return [[*range(first, min(first + self.batch, self.count))] for first in range(0, self.count, self.batch)]


def plan(number: int, actions: tuple[str, ...] = WORKER_ACTIONS, weights: tuple[int, ...] = WEIGHTS) -> Plan:
    """The plan of the run of this number: always the same."""
    chance = random.Random(f"loader {number}")
    # Each action comes early, for a few runs to have all of them.
    action = actions[number] if number < len(actions) else chance.choices(actions, weights)[0]
    method = chance.choices(("fork", "spawn", "thread"), (12, 1, 2))[0]
    if method == "thread" and action != "none":
        action = "raise"
    if method == "spawn" and action == "stop with a timeout":
        # To start takes longer than the timeout.
        method = "fork"
    makers = chance.choice((1, 2, 3, 4)) if method != "spawn" else chance.choice((1, 2))
    joiners = chance.choice((None, None, 0, 1, 2))
    seconds = chance.choice((0.0001, 0.0005, 0.002, 0.01, 0.03))
    count = max(12, min(600, int(makers * 0.8 / seconds)))
    options = {
        "prefetch_factor": chance.choice((1, 2, 2, 4)),
        "persistent_workers": chance.random() < 0.4,
        "in_order": chance.random() < 0.8,
        "timeout": 0.7 if action == "stop with a timeout" else 0,
    }
    index = chance.randrange(count) if action in ("die", "raise") else None
    batch = chance.choice((1, 2, 5, 8))
    away = chance.choice((0.0, 0.0, 0.002))
    # About as long as the pass takes.
    length = 4.0 if method == "spawn" else max(count * (seconds + 0.0001) / makers, count / batch * away)
    return Plan(
        action=action,
        method=method,
        makers=makers,
        joiners=joiners,
        batch=batch,
        count=count,
        seconds=seconds,
        width=chance.choice((3, 3, 500, 50_000)),
        away=away,
        options=options,
        at=chance.choice((0.0, 0.1, 0.9, 0.9)) * chance.random() * length,
        pause=chance.uniform(0.02, 0.7),
        index=index,
        by_collation=action == "raise" and joiners is not None and chance.random() < 0.5,
    )


class Chancy(Dataset[Any]):
    """Items that take time, one of which may raise, or end its process."""

    def __init__(self, count: int, seconds: float, width: int, index: int | None, *, dies: bool) -> None:
        self.count = count
        self.seconds = seconds
        self.width = width
        self.index = index
        self.dies = dies

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        time.sleep(random.expovariate(1 / self.seconds))
        if index == self.index:
            if self.dies and index % 2:
                os._exit(7)
            if self.dies:
                os.kill(os.getpid(), signal.SIGSEGV)
            raise LookupError(f"no item {index}")
        return {"row": np.full(self.width, index, np.float32), "index": index, "name": f"item {index}"}


class Stack:
    """A `collate_fn`, which may raise for an index."""

    def __init__(self, index: int | None) -> None:
        self.index = index

    def __call__(self, items: list[Any]) -> Any:
        if any(item["index"] == self.index for item in items):
            raise LookupError(f"no item {self.index}")
        return torch.utils.data.default_collate(items)


class Seen(Exception):
    """A batch isn't what it should be."""


def indices_of(batch: Any, width: int) -> list[int]:
    """The indices of a batch, whose parts must all be of these."""
    indices: list[int] = batch["index"].tolist()
    if batch["name"] != [f"item {index}" for index in indices]:
        raise Seen(f"names {batch['name']} of {indices}")
    rows = batch["row"]
    if rows.shape != (len(indices), width) or not bool((rows == batch["index"][:, None]).all()):
        raise Seen(f"rows of {indices}")
    return indices


@dataclasses.dataclass
class Report:
    """What a program saw.

    Attributes:
        batches: the indices of each batch that came, in this order.
        error: class and text of the first error; None if there was none.
        at: when it came, by the monotonic clock.
        behind: batches that came in front of it.
        again: batches of another pass behind the error.
        failed: what else went wrong; empty if nothing did.
        ended: when the pass was over, and its workers gone if they aren't kept.
    """

    batches: list[list[int]] = dataclasses.field(default_factory=list)
    error: tuple[str, str] | None = None
    at: float = 0.0
    behind: int = 0
    again: list[list[int]] | None = None
    failed: str = ""
    ended: float = 0.0


def _read(plan: Plan, report: Report, told: Callable[[Any], None]) -> None:
    loader = plan.loader()
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
    """Reads a pass of a loader that is as good as new."""
    # Workers that are kept may still be stopped, which they count as if that has been seen for long enough.
    tries = 5 if plan.action == "stop with a timeout" else 1
    for left in reversed(range(tries)):
        try:
            return [indices_of(batch, plan.width) for batch in loader]
        except WorkerError:
            if not left:
                raise
    raise AssertionError


def _program(plan: Plan, pipe: int) -> None:
    """Reads a loader, and tells of it: the workers' ids, and a report."""

    def told(message: Any) -> None:
        data = pickle.dumps(message)
        os.write(pipe, len(data).to_bytes(4, "little") + data)

    report = Report()
    try:
        left = Left()
        _read(plan, report, told)
        left.look()
        maps = Path("/proc/self/maps").read_text()
        assert "memfd:fastpipe" not in maps, "memory in common is still mapped"
    except BaseException:
        report.failed = traceback.format_exc()
    told(report)


class Program:
    """A program that reads a loader, forked off this one."""

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
        """The next message; None if the program ends without one.

        Raises:
            TimeoutError: if there is none by then.
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
        """Waits for its end."""
        os.close(self._pipe)
        os.waitpid(self.process, 0)


def others() -> list[psutil.Process]:
    """The processes of this session that live, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and os.getsid(process.pid) == os.getsid(0):
                # A zombie has ended, and waits for whoever started it, or took it over.
                found += [process] * (process.status() != psutil.STATUS_ZOMBIE)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def play(number: int) -> tuple[str, float]:
    """Plays a run. Returns what came of it, and how many seconds after the action the program knew of it."""
    run = plan(number)
    shm = in_shm()
    program = Program(lambda pipe: _program(run, pipe))
    deadline = time.monotonic() + LONGEST
    chance = random.Random(number)
    try:
        workers = program.told(deadline)
        acted, struck = _strike(run, workers, chance)
        report = program.told(deadline)
    except TimeoutError:
        for process in others():
            # Each says where it is.
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
        raise AssertionError(f"run {number} hangs: {run}") from None
    finally:
        program.end()
    assert isinstance(report, Report), f"run {number}: the program ended. {run}"
    assert not report.failed, f"run {number}: {report.failed}\n{run}\n{report}"
    _judge(run, report, acted, struck, f"run {number}: {run}\n{report.error}")
    assert wait_until(lambda: not others(), SOON), f"run {number} left {others()}: {run}"
    assert wait_until(lambda: not in_shm() - shm, 2.0), f"run {number} left {in_shm() - shm} in /dev/shm: {run}"
    if report.error is None:
        return f"{run.action}: unharmed", 0.0
    return f"{run.action}: error", report.at - acted if struck else 0.0


def _strike(run: Plan, workers: list[int], chance: random.Random) -> tuple[float, int | None]:
    """Does what is to be done to a worker. Returns when, and to which one."""
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
    except ProcessLookupError:
        # The pass was quicker.
        return acted, None
    return acted, worker


EXPECTED = {
    "kill": r"DataLoader worker \(pid\(s\) {pid}\) exited unexpectedly: .* was killed by SIGKILL while",
    "stop": r"DataLoader worker \(pid\(s\) {pid}\) is stopped by a signal, and its items with it: .* while",
    # While others bring batches nobody waits so long, and the worker is missed first.
    "stop with a timeout": r"DataLoader timed out after 0\.7 seconds \(.* is stopped by a signal while"
    r"|DataLoader worker \(pid\(s\) {pid}\) is stopped by a signal, and its items with it: .* while",
    "die": r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly: .* (ended with exit code 7|was killed by SIGSEGV)"
    r" while making row \d+ of batch \d+, index {index}",
    "raise": r"(?s)Caught LookupError in DataLoader worker (process|thread) \d+\..*Traceback.*no item {index}",
}


def _judge(run: Plan, report: Report, acted: float, struck: int | None, said: str) -> None:
    """Sees to it that a program saw what it should have seen."""
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
        if struck is not None:
            assert report.at - acted < SOON, f"{report.at - acted:.1f} s: {said}"
        assert report.again is None or _come(report.again, expected, run), said
    # Workers that are stopped keep nobody waiting for long; those that import torch first do.
    soon = IMPORTS if run.method in ("spawn", "forkserver") else 2 * SOON
    assert report.ended - max(acted, report.at) < soon + len(expected) * run.away, said


def _short(kinds: str) -> str:
    return kinds.replace("FastpipeError ", "")


def _come(batches: list[list[int]], expected: list[list[int]], run: Plan) -> bool:
    """Whether these batches are all that there are, in order where that matters."""
    return batches == expected if run.options["in_order"] else sorted(batches) == sorted(expected)


def _reads_on(run: Plan, pipe: int, *, by_thread: bool) -> None:
    """Reads a loader again and again, by another thread than the main one if need be."""

    def read() -> None:
        loader = run.loader()
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
    """Kills a program while its workers work. Returns seconds until they were gone."""
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
        assert ready, f"death {number}: nothing begins: {run}"
        started = os.read(program._pipe, 4 * (run.makers + (run.joiners or 0)))
        if imports and (number < 4 or chance.random() < 0.5):
            assert select.select([program._pipe], [], [], LONGEST)[0], f"death {number}: no batch comes: {run}"
            # One worker may make all of a batch while another one imports torch still.
            soon = SOON if run.makers == 1 and (run.joiners or 0) <= 1 else IMPORTS
        time.sleep(run.at)
        if chance.random() < 0.25 and run.method != "thread" and soon == SOON and not by_thread:
            # One that can't hear of anything. (In Python's own start of a process it would stay so for good.)
            stopped = int.from_bytes(started[:4], "little")
            try:
                os.kill(stopped, signal.SIGSTOP)
            except ProcessLookupError:
                stopped = None
    else:
        # While it starts its workers.
        time.sleep(chance.uniform(0.0, 0.03))
    program.send(signal.SIGKILL)
    killed = time.monotonic()
    program.end()
    said = f"death {number}, with one stopped: {stopped is not None}, by a thread: {by_thread}: {run}"
    assert wait_until(lambda: not others(), soon), f"{said} left {others()}"
    gone = time.monotonic() - killed
    assert wait_until(lambda: not in_shm() - shm, 2.0), f"{said} left {in_shm() - shm} in /dev/shm"
    return gone
