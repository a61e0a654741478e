"""Agreement among the workers of a loader on the pass that they are in and on the epoch of that pass.

A `DataLoader` tells its dataset nothing. The process that owns the loader (the *main* process) forks or pickles the
dataset once for each worker while `iter(loader)` runs. Persistent workers (`persistent_workers=True`) begin further
passes with the copy that they already have. Workers may begin a pass seconds apart. Until then, the main process
continues: it may set the epoch, read the dataset itself, or begin another pass. The protocol is therefore:

1. The main process numbers its announcements about the next pass. Each `set_epoch`, loaded state, or pass of the main
   process creates a `Version`. The version is stored in the dataset, so a worker receives a copy of the one that was
   current when `iter(loader)` ran. It is also recorded in the epoch log, where persistent workers find the newest one.
2. The workers of one pass share their loader's random seed and the count of passes that they have begun. Both make up
   the *key* of a pass. If a program seeds the generator the same way before each pass, keys repeat. But a worker begins
   a pass only once, so a recorded pass with the same key that this worker has already joined is an earlier one.
3. The first worker that begins a pass records its epoch in the log, and the other workers use that epoch. It is the
   epoch that the worker's version begins with or, if passes of that version already count, the one after them.
4. A pass counts as soon as it is known that the consumer received a batch or won't request more. There are three cases:
   a worker is asked for more batches than a loader requests in advance; a worker drops its iterator, because the
   consumer left the loader and its workers end; all workers have reached the end of their shards. Beginning a pass is
   not enough, although its workers create batches at once: `tqdm.auto.tqdm(loader)` calls `iter` twice. (A worker
   doesn't know how many batches its loader requests in advance. `prefetch_factor` is 2 by default, so the third request
   decides.) Until it is known whether the last pass counts, persistent workers wait for each other before they begin
   the next pass: another worker may still be asked for a batch. Spawned workers take seconds to start. If an iterator
   is dropped before its workers begin, they may begin the pass after the next one has counted. An epoch is then left
   out.
5. A state that was loaded in the main process applies to the first pass of its version.

The log is a file because the system releases a file lock when the process that holds it ends, however it ends. A worker
that is killed blocks no other worker. The file is created when a worker first begins a pass, and removed with the
dataset. Every record belongs to one main process, so that several main processes (ranks that were forked with the
dataset) don't interfere.
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
"""Batches that a loader requests from each worker before its consumer receives one, by default."""

# Maximum number of old records in the log, kept for late workers.
_KEPT = 64


class Version(NamedTuple):
    """The latest announcement of a main process about the next pass.

    Attributes:
        number: Index of the announcement, counted from 0.
        epoch: Epoch at which the next pass begins.
        loaded: Whether that pass resumes from a loaded state.
    """

    number: int
    epoch: int
    loaded: bool


class Participant(NamedTuple):
    """A worker that begins a pass.

    Attributes:
        main: Process id of its main process.
        version: Version that was current when the worker was started.
        kept: Whether the worker has begun passes before.
        key: Key of the pass.
        worker: Index of the worker.
        workers: Number of workers.
        epoch: Epoch of a state that was loaded in the worker itself; otherwise None.
        last: Serial number of the worker's previous pass, if the worker is persistent.
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
        serial: Serial number of the pass in the log.
        epoch: Epoch at which the pass begins.
        loaded: Whether the pass resumes from a loaded state.
    """

    serial: int
    epoch: int
    loaded: bool


@dataclass
class _Line:
    """A version and the passes that were read from it.

    Attributes:
        main: Process id of its main process.
        number: Number of the version.
        epoch: Epoch of the next pass.
        loaded: Whether the first pass resumes from a loaded state.
        begun: Epoch of the last started pass.
        ended: Epoch after the last pass that all workers have read to the end.
    """

    main: int
    number: int
    epoch: int
    loaded: bool
    begun: int | None = None
    ended: int = 0


@dataclass
class _Pass:
    """A pass that workers have begun. It records the workers that joined, ended and left it, and whether it counts."""

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
    """The recorded versions and passes. The caller must hold the lock of the log during each call."""

    def __init__(self, lines: list[_Line] | None = None, passes: list[_Pass] | None = None) -> None:
        self._lines = lines or []
        self._passes = passes or []

    @classmethod
    def parse(cls, text: str) -> EpochLog:
        """Returns the log that was written as `text`. Empty text is an empty log."""
        noted: dict[str, Any] = json.loads(text) if text else {"lines": [], "passes": []}
        return cls([_Line(**line) for line in noted["lines"]], [_Pass(**each) for each in noted["passes"]])

    def text(self) -> str:
        return json.dumps({"lines": [asdict(x) for x in self._lines], "passes": [asdict(x) for x in self._passes]})

    def announce(self, main: int, version: Version) -> None:
        """Records a version."""
        self._line(main, version)

    def next(self, main: int, version: Version) -> tuple[int, bool]:
        """Returns the epoch of a version's next pass, and whether workers began a pass that hasn't ended."""
        line = self._line(main, version)
        return line.epoch, line.begun is not None and line.begun >= line.ended

    def join(self, participant: Participant, *, wait: bool = True) -> Joined | None:
        """Registers a worker that begins a pass.

        Args:
            participant: The worker.
            wait: Whether the worker must wait until it is known whether its last pass counts.

        Returns:
            The pass, or None if the worker must wait and call again.

        Raises:
            StateError: If the pass resumes from a state that this worker didn't receive.
        """
        found = self._under_way(participant)
        if found is None:
            if self._leave(participant) and wait:
                return None
            found = self._begin(participant)
        found.joined.append(participant.worker)
        return Joined(found.serial, found.epoch if participant.epoch is None else participant.epoch, found.loaded)

    def count(self, serial: int, epoch: int) -> None:
        """Records that a pass counts, and the epoch at which the next pass begins."""
        for each in self._passes:
            each.counts |= each.serial == serial
        for line in self._lines_of(serial):
            line.epoch = max(line.epoch, epoch)

    def end(self, serial: int, worker: int, epoch: int) -> None:
        """Records that a worker reached the end of its shard, and the epoch at which the next pass begins."""
        for each in self._passes:
            if each.serial == serial and worker not in each.ended:
                each.ended.append(worker)
                if len(each.ended) == each.workers:
                    self.count(serial, epoch)
                    for line in self._lines_of(serial):
                        line.ended = max(line.ended, epoch)

    def _lines_of(self, serial: int) -> list[_Line]:
        """Returns the version of a pass in a list, which is empty if the version was dropped."""
        versions = [(each.main, each.number) for each in self._passes if each.serial == serial]
        return [line for line in self._lines if (line.main, line.number) in versions]

    def _leave(self, participant: Participant) -> bool:
        """Records that a worker left its last pass.

        Returns whether other workers may still be asked for a batch of that pass.
        """
        for each in self._passes:
            if each.serial == participant.last:
                each.left = sorted({*each.left, participant.worker})
                return not each.counts and len(each.left) < each.workers
        return False

    def _under_way(self, participant: Participant) -> _Pass | None:
        for each in reversed(self._passes):
            same = (each.main, each.key, each.workers) == (participant.main, participant.key, participant.workers)
            current = participant.kept or each.number == participant.version.number
            if same and current and participant.worker not in each.joined:
                return each
        return None

    def _begin(self, participant: Participant) -> _Pass:
        version = participant.version
        line = self._line(participant.main, version)
        if participant.kept:
            line = max((x for x in self._lines if x.main == participant.main), key=lambda x: x.number)
        loaded = line.loaded and line.begun is None
        if loaded and line.number != version.number:
            raise StateError(
                "a state was loaded after this loader's workers were started, and persistent workers don't receive it:"
                " load the state before the first pass, or create a new DataLoader"
            )
        epoch = line.epoch if participant.epoch is None else participant.epoch
        line.begun = epoch if line.begun is None else max(line.begun, epoch)
        serial = 1 + max((each.serial for each in self._passes), default=0)
        begun = _Pass(serial, participant.main, line.number, participant.key, participant.workers, epoch, loaded)
        self._passes = [*self._passes[1 - _KEPT :], begun]
        return begun

    def _line(self, main: int, version: Version) -> _Line:
        """Returns the record of a version after adding it if needed."""
        for line in self._lines:
            if (line.main, line.number) == (main, version.number):
                return line
        newest = {line.main: line.number for line in sorted(self._lines, key=lambda x: x.number)}
        if len(self._lines) >= _KEPT:
            # Persistent workers look for the newest version of their main process, so keep it.
            old = [i for i, line in enumerate(self._lines) if line.number < newest[line.main]]
            del self._lines[old[0] if old else 0]
        self._lines.append(_Line(main, *version))
        return self._lines[-1]


class EpochLogFile:
    """The epoch log of a dataset in a file that all processes with a copy of the dataset share."""

    def __init__(self) -> None:
        try:
            folder = tempfile.gettempdir()
        except FileNotFoundError:
            # A process without workers needs no log.
            folder = ""
        self._path = os.path.join(folder, f"fastpipe-passes-{secrets.token_hex(8)}.json")
        weakref.finalize(self, _remove, self._path, os.getpid())

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        # Only the process that created the file removes it.
        self._path = path

    @contextlib.contextmanager
    def open(self, *, make: bool = True) -> Iterator[EpochLog]:
        """Locks the log, yields it, and writes the changes back.

        Raises:
            FileNotFoundError: If the file doesn't exist and `make` is False.
        """
        with _locked(self._path, make) as descriptor:
            # A writer that was killed may have left old bytes after the line.
            line, _, _ = os.read(descriptor, os.fstat(descriptor).st_size).partition(b"\n")
            ledger = EpochLog.parse(line.decode())
            yield ledger
            text = ledger.text().encode() + b"\n"
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, text)
            os.ftruncate(descriptor, len(text))

    def join(self, participant: Participant) -> Joined:
        """Registers a worker with `EpochLog.join`, and waits until it may begin."""
        parent = multiprocessing.parent_process()
        while True:
            with self.open() as ledger:
                # If the main process is gone, workers that haven't joined never will, so don't wait for them.
                joined = ledger.join(participant, wait=parent is not None and parent.is_alive())
            if joined is not None:
                return joined
            time.sleep(0.001)

    def count(self, serial: int, epoch: int) -> None:
        """Records with `EpochLog.count` that a pass counts, unless the dataset is gone."""
        with contextlib.suppress(FileNotFoundError), self.open(make=False) as ledger:
            ledger.count(serial, epoch)

    def end(self, serial: int, worker: int, epoch: int) -> None:
        """Records with `EpochLog.end` that a worker reached the end of its shard."""
        with self.open() as ledger:
            ledger.end(serial, worker, epoch)

    def announce(self, version: Version) -> None:
        """Records a version of this main process, if any worker could need it."""
        if os.path.exists(self._path) or multiprocessing.active_children():
            with self.open() as ledger:
                ledger.announce(os.getpid(), version)

    def next(self, version: Version) -> tuple[int, bool]:
        """Returns the result of `EpochLog.next` for this process."""
        if not os.path.exists(self._path):
            return version.epoch, False
        with self.open() as ledger:
            return ledger.next(os.getpid(), version)


@contextlib.contextmanager
def _locked(path: str, make: bool) -> Iterator[int]:
    """Opens a file, locks it against other processes and threads, and yields its descriptor.

    `make` creates a missing file.
    """
    flags = os.O_RDWR | getattr(os, "O_BINARY", 0) | (os.O_CREAT if make else 0)
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            _lock(descriptor)
            # Another process may have removed and recreated the file before the lock was acquired.
            if _is(descriptor, path):
                yield descriptor
                return
        finally:
            # Closing isn't enough if another thread has forked in the meantime: the child has a copy of the descriptor.
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
        # Lock a byte far after the written text, because other processes can't read locked bytes.
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
        """Does nothing: closing the file releases the lock, since Windows doesn't fork."""

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
