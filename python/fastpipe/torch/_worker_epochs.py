"""Which pass of a data set a loader's worker is in, and which epoch that pass has: the same for all its workers.

A `DataLoader` tells its data set nothing. In the process that has the loader, the *main* one, it forks or pickles the
data set while `iter(loader)` runs, once for each worker; workers that are kept (`persistent_workers`) begin further
passes with the copy that they have. They begin when they come to it, which may be seconds apart, while the main process
goes on: it sets the epoch, reads the data set itself, or begins another pass. So:

1. The main process numbers what it says of the next pass: each `set_epoch`, loaded state, or pass of its own makes a
   `Version`. That is kept with the data set, and so is copied to a worker as it was when `iter(loader)` ran. It is also
   noted in the ledger, where kept workers find the newest.
2. Workers of one pass have their loader's random seed in common, and how many passes they have begun. That is the *key*
   of a pass. Where the generator is seeded alike before each pass keys repeat; but a worker begins a pass once, so
   one that has the key and the worker already is an earlier one.
3. The first worker that begins a pass notes its epoch in the ledger; the others take what is noted. It is the epoch
   that its version begins with or, if passes of that version count, the one after them.
4. A pass counts as soon as it is known that the consumer has taken a batch, or that no more are taken: when a worker is
   asked for more batches than a loader asks for ahead, when a worker drops its iterator (the loader was left, and ends
   its workers), or when all workers have seen the end of their shares. A pass that was begun doesn't count by itself,
   although its workers make batches at once: `tqdm.auto.tqdm(loader)` calls `iter` twice. (It is not known how many
   batches a loader asks for ahead. `prefetch_factor` is 2 by default, so the third one tells.) Workers that are kept
   wait for each other before they begin the next pass, unless that is settled: one of them may still be asked. Spawned
   workers take seconds to start. If an iterator is dropped before its workers begin, they may begin the pass after the
   next one has counted, and an epoch is left out.
5. A state that was loaded in the main process holds for the first pass of its version.

The ledger is a file, since locks on files end with the process that has them, however it ends: a worker that is killed
keeps nobody waiting. It is made when a worker first begins a pass, and removed with the data set. All that it says is
said of one main process, so that several (ranks that were forked with the data set) don't meddle with each other.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from fastpipe.errors import StateError

ASKED_AHEAD = 2
"""Batches that a loader asks each worker for before its consumer takes one, if `prefetch_factor` isn't given."""

# Old ones that the ledger keeps, for workers that are late.
_KEPT = 64


class Version(NamedTuple):
    """What a main process last said of the next pass.

    Attributes:
        number: how often it has said something.
        epoch: with which the next pass begins.
        loaded: whether that pass goes on where a loaded state stands.
    """

    number: int
    epoch: int
    loaded: bool


class Joiner(NamedTuple):
    """A worker that begins a pass.

    Attributes:
        main: process id of its main process.
        version: what that had said when the worker was started.
        kept: whether it has begun passes before.
        key: of the pass.
        worker: its number.
        workers: how many there are.
        epoch: where a state that was loaded in the worker itself says so; else None.
        last: serial number of the last pass that it has begun, if it is kept.
    """

    main: int
    version: Version
    kept: bool
    key: str
    worker: int
    workers: int
    epoch: int | None = None
    last: int | None = None


class Joined(NamedTuple):
    """The pass that a worker begins.

    Attributes:
        serial: its number in the ledger.
        epoch: with which it begins.
        loaded: whether it goes on where a loaded state stands.
    """

    serial: int
    epoch: int
    loaded: bool


@dataclass
class _Line:
    """A version, and what became of it.

    Attributes:
        main: process id of its main process.
        number: of the version.
        epoch: of the next pass.
        loaded: whether the first pass goes on where a loaded state stands.
        begun: the epoch of the last pass that was begun.
        ended: the epoch after the last pass whose workers have all seen the end.
    """

    main: int
    number: int
    epoch: int
    loaded: bool
    begun: int | None = None
    ended: int = 0


@dataclass
class _Pass:
    """A pass that workers have begun, which of them have begun, ended and left it, and whether it counts."""

    serial: int
    main: int
    number: int
    key: str
    workers: int
    epoch: int
    loaded: bool
    joined: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    counts: bool = False


class EpochLog:
    """What is noted of versions and passes. Each call is made while nobody else makes one."""

    def __init__(self, lines: list[_Line] | None = None, passes: list[_Pass] | None = None) -> None:
        self._lines = lines or []
        self._passes = passes or []

    @classmethod
    def parse(cls, text: str) -> EpochLog:
        """The ledger that `text` was made of; an empty one of no text."""
        noted: dict[str, Any] = json.loads(text) if text else {"lines": [], "passes": []}
        return cls([_Line(**line) for line in noted["lines"]], [_Pass(**each) for each in noted["passes"]])

    def text(self) -> str:
        return json.dumps({"lines": [asdict(x) for x in self._lines], "passes": [asdict(x) for x in self._passes]})

    def announce(self, main: int, version: Version) -> None:
        """Notes a version."""
        self._line(main, version)

    def next(self, main: int, version: Version) -> tuple[int, bool]:
        """The epoch of the next pass of a version, and whether one is under way in workers, or was left by them."""
        line = self._line(main, version)
        return line.epoch, line.begun is not None and line.begun >= line.ended

    def join(self, joiner: Joiner, *, wait: bool = True) -> Joined | None:
        """Lets a worker begin a pass.

        Args:
            joiner: the worker.
            wait: whether it is to wait if it isn't settled whether the last pass counts.

        Returns:
            The pass; None if the worker has to wait, and ask again.

        Raises:
            StateError: if it is to go on where a state stands that this worker can't have.
        """
        found = self._under_way(joiner)
        if found is None:
            if self._leave(joiner) and wait:
                return None
            found = self._begin(joiner)
        found.joined.append(joiner.worker)
        return Joined(found.serial, found.epoch if joiner.epoch is None else joiner.epoch, found.loaded)

    def count(self, serial: int, epoch: int) -> None:
        """Notes that a pass counts, and with which epoch the pass after it begins."""
        for each in self._passes:
            each.counts |= each.serial == serial
        for line in self._lines_of(serial):
            line.epoch = max(line.epoch, epoch)

    def end(self, serial: int, worker: int, epoch: int) -> None:
        """Notes that a worker has seen the end of its share, and with which epoch the pass after it begins."""
        for each in self._passes:
            if each.serial == serial and worker not in each.ended:
                each.ended.append(worker)
                if len(each.ended) == each.workers:
                    self.count(serial, epoch)
                    for line in self._lines_of(serial):
                        line.ended = max(line.ended, epoch)

    def _lines_of(self, serial: int) -> list[_Line]:
        """The version that a pass is of, unless it was forgotten."""
        versions = [(each.main, each.number) for each in self._passes if each.serial == serial]
        return [line for line in self._lines if (line.main, line.number) in versions]

    def _leave(self, joiner: Joiner) -> bool:
        """Notes that a worker has left its last pass; says whether others may still be asked for a batch of that."""
        for each in self._passes:
            if each.serial == joiner.last:
                each.left = sorted({*each.left, joiner.worker})
                return not each.counts and len(each.left) < each.workers
        return False

    def _under_way(self, joiner: Joiner) -> _Pass | None:
        for each in reversed(self._passes):
            same = (each.main, each.key, each.workers) == (joiner.main, joiner.key, joiner.workers)
            current = joiner.kept or each.number == joiner.version.number
            if same and current and joiner.worker not in each.joined:
                return each
        return None

    def _begin(self, joiner: Joiner) -> _Pass:
        version = joiner.version
        line = self._line(joiner.main, version)
        if joiner.kept:
            line = max((x for x in self._lines if x.main == joiner.main), key=lambda x: x.number)
        loaded = line.loaded and line.begun is None
        if loaded and line.number != version.number:
            raise StateError(
                "a state was loaded after this loader's workers were started, and workers that are kept don't get it:"
                " load it before the first pass, or make a new DataLoader for it"
            )
        epoch = line.epoch if joiner.epoch is None else joiner.epoch
        line.begun = epoch if line.begun is None else max(line.begun, epoch)
        serial = 1 + max((each.serial for each in self._passes), default=0)
        begun = _Pass(serial, joiner.main, line.number, joiner.key, joiner.workers, epoch, loaded)
        self._passes = [*self._passes[1 - _KEPT :], begun]
        return begun

    def _line(self, main: int, version: Version) -> _Line:
        """What is noted of a version; begun with it, if nothing is."""
        for line in self._lines:
            if (line.main, line.number) == (main, version.number):
                return line
        newest = {line.main: line.number for line in sorted(self._lines, key=lambda x: x.number)}
        if len(self._lines) >= _KEPT:
            # Kept workers look for the newest of their main process.
            old = [i for i, line in enumerate(self._lines) if line.number < newest[line.main]]
            del self._lines[old[0] if old else 0]
        self._lines.append(_Line(main, *version))
        return self._lines[-1]


class EpochLogFile:
    """The ledger of a data set, which all processes that have the data set share."""

    def __init__(self) -> None:
        try:
            folder = tempfile.gettempdir()
        except FileNotFoundError:
            # Who starts no workers needs none.
            folder = ""
        self._path = os.path.join(folder, f"fastpipe-passes-{secrets.token_hex(8)}.json")
        weakref.finalize(self, _remove, self._path, os.getpid())

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        # It is removed by the process that made it.
        self._path = path

    @contextlib.contextmanager
    def open(self, *, make: bool = True) -> Iterator[EpochLog]:
        """The ledger as long as nobody else has it; what is changed is kept.

        Raises:
            FileNotFoundError: without `make`, if there is none.
        """
        with _locked(self._path, make) as descriptor:
            # A writer that was killed may have left old bytes behind the line.
            line, _, _ = os.read(descriptor, os.fstat(descriptor).st_size).partition(b"\n")
            ledger = EpochLog.parse(line.decode())
            yield ledger
            text = ledger.text().encode() + b"\n"
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, text)
            os.ftruncate(descriptor, len(text))

    def join(self, joiner: Joiner) -> Joined:
        """The same as `EpochLog.join`, for a worker; waits if need be."""
        parent = multiprocessing.parent_process()
        while True:
            with self.open() as ledger:
                # Others that have lost their main process never come.
                joined = ledger.join(joiner, wait=parent is not None and parent.is_alive())
            if joined is not None:
                return joined
            time.sleep(0.001)

    def count(self, serial: int, epoch: int) -> None:
        """The same as `EpochLog.count`; unless the data set is gone."""
        with contextlib.suppress(FileNotFoundError), self.open(make=False) as ledger:
            ledger.count(serial, epoch)

    def end(self, serial: int, worker: int, epoch: int) -> None:
        """The same as `EpochLog.end`."""
        with self.open() as ledger:
            ledger.end(serial, worker, epoch)

    def announce(self, version: Version) -> None:
        """Notes what this process, a main one, says; unless there are no workers who could want to know."""
        if os.path.exists(self._path) or multiprocessing.active_children():
            with self.open() as ledger:
                ledger.announce(os.getpid(), version)

    def next(self, version: Version) -> tuple[int, bool]:
        """The same as `EpochLog.next`, for this process."""
        if not os.path.exists(self._path):
            return version.epoch, False
        with self.open() as ledger:
            return ledger.next(os.getpid(), version)


@contextlib.contextmanager
def _locked(path: str, make: bool) -> Iterator[int]:
    """A file that is made where it is missing, if so wanted, and locked against other processes and threads."""
    flags = os.O_RDWR | getattr(os, "O_BINARY", 0) | (os.O_CREAT if make else 0)
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            _lock(descriptor)
            # It may have been removed, and made again, before it was locked.
            if _is(descriptor, path):
                yield descriptor
                return
        finally:
            # Closing isn't enough where another thread has forked meanwhile: the child has the descriptor, too.
            _unlock(descriptor)
            os.close(descriptor)


def _is(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        # Of a byte far behind what is written, since others can't read what is locked.
        while True:
            os.lseek(descriptor, 1 << 30, os.SEEK_SET)
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            except OSError:
                time.sleep(0.001)
            else:
                os.lseek(descriptor, 0, os.SEEK_SET)
                return

    def _unlock(descriptor: int) -> None:
        """Closing does it: nothing is forked there."""

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            os.unlink(path)
