"""Lease workers that test_leases_chaos.py kills and stops. They log the batches they use and their commits.

Run as a program, it is a server that forks workers, because importing fastpipe for each worker would dominate the test.
Requests and answers are lines of JSON. `{"start": ...}` answers with the process id. `{"poll": id}` answers with its
exit code, or null while it runs. Only a poll reaps a process, so its id can't be reused before. Workers exit with the
server, and the server exits with its client.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import samples
from fastpipe.errors import StaleLeaseError, StateError

PACE = struct.Struct("d")
_DIE_WITH_PARENT = 1


class Log:
    """A log of a worker's actions, one line each. Written lines survive a kill."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, kind: str, *values: Any) -> None:
        """Appends a line and flushes it to disk."""
        os.write(self._file, (json.dumps([kind, *values], separators=(",", ":")) + "\n").encode())
        os.fsync(self._file)


class Pace:
    """The speed of workers, as doubles in a shared file that the test changes while they run.

    The first double is the number of epochs that may be used. The other doubles are the seconds that each worker spends
    on a batch.
    """

    def __init__(self, path: Path, slots: int) -> None:
        size = PACE.size * (slots + 1)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)

    @property
    def epochs(self) -> float:
        epochs: float = PACE.unpack_from(self._memory)[0]
        return epochs

    @epochs.setter
    def epochs(self, epochs: float) -> None:
        PACE.pack_into(self._memory, 0, epochs)

    def __getitem__(self, slot: int) -> float:
        seconds: float = PACE.unpack_from(self._memory, (slot + 1) * PACE.size)[0]
        return seconds

    def __setitem__(self, slot: int, seconds: float) -> None:
        PACE.pack_into(self._memory, (slot + 1) * PACE.size, seconds)


def work(request: dict[str, Any]) -> None:
    """Uses batches until the job is done or another process takes over the worker's name."""
    log = Log(Path(request["folder"]) / f"{request['worker']}~{request['life']}.log")
    try:
        _use(request, log)
    except StateError as error:
        if "has taken the name" not in str(error):
            raise
        log.note("replaced")


def _use(request: dict[str, Any], log: Log) -> None:
    """Uses batches.

    With `wait` the worker waits for each commit and logs it. Without `wait` it only requests commits, and the test
    reads their outcome from the ledger's audit.
    """
    pace = Pace(Path(request["folder"]) / "pace", request["slots"])
    reader = samples.Data(request["paths"], {}).read(**request["options"])

    def refusing(act: Callable[[], Any]) -> Any:
        """Calls `act` and logs a refused commit. The worker then continues with its next lease."""
        try:
            return act()
        except StaleLeaseError as error:
            log.note("stale", error.epoch, error.start, error.stop)
            return None

    ended = object()
    worker = reader.lease(request["url"], worker_name=request["worker"], **request["lease"])
    try:
        batches = iter(worker)
        while (batch := refusing(lambda: next(batches, ended))) is not ended:
            if batch is None:
                continue
            epoch, step = worker.position
            while epoch >= pace.epochs:
                time.sleep(0.01)
            log.note("used", epoch, step, batch["id"].tolist())
            time.sleep(pace[request["slot"]])
            wait = request["wait"]
            if refusing(lambda wait=wait: [worker.commit(wait=wait)]) and wait:
                log.note("kept", epoch, step)
        log.note("end")
    finally:
        refusing(worker.close)


def _live(request: dict[str, Any]) -> None:
    """Runs a worker in this process and exits."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        # Each worker has a separate output file, because several workers would mix their lines.
        output = os.open(Path(request["folder"]) / f"{request['life']}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 2)
        os.dup2(output, 1)
        # The test requests the stacks if it times out.
        faulthandler.register(signal.SIGUSR1)
        work(request)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _polled(process: int) -> int | None:
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def serve() -> None:
    """Answers requests until stdin ends."""
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "start" in request:
            answer = os.fork()
            if answer == 0:
                _live(request["start"])
        else:
            answer = _polled(request["poll"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    # Imported once, so that forks don't have to load the modules that readers and ledgers need.
    for name in ("sqlite3", "psycopg", "fastpipe.leases"):
        try:
            __import__(name)
        except ImportError:
            assert name == "psycopg", name
    serve()
