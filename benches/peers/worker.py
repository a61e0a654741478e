"""Runs a reader in its process. Requests and answers are lines of JSON on stdin and stdout, until stdin ends.

The process exists as long as a cell is measured, so starting the interpreter and importing aren't timed. A request has
`op`, `enough`, and the fields of a `Job`:

* `read` -> `{"seconds", "cpu", "rows", "passes"}`: reads the file and keeps nothing. `seconds` is the time from opening
  the file to the last batch (or the frame), without freeing a frame. Passes are repeated until they have taken `enough`
  seconds; their mean is less sensitive to disturbances. The whole file is read before the clock starts, because some
  systems reclaim pages that weren't read for a few seconds, for example during the turns of other readers.
* `check` -> `{"rows", "sums", "plain"}`: reads the file again and sums all values, untimed.

The answer to a request that fails is `{"error"}`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generate
from harness import storage
from peers import READERS
from peers.job import CannotError, Job


def _read(worker: Any, job: Job, enough: float) -> dict[str, Any]:
    file = Path(job.path)
    if file.exists() and not job.cold:
        generate.read_through(file)
    seconds = cpu = 0.0
    passes, rows, notes = 0, 0, {}
    stored = storage.read_bytes()
    while passes == 0 or seconds < enough:
        if job.cold:
            storage.empty_cache(file)
        cpu_begun, begun = time.process_time(), time.perf_counter()
        done = worker.read(job)
        wall, spent = time.perf_counter() - begun, time.process_time() - cpu_begun
        seconds += wall if done.seconds is None else done.seconds
        cpu += spent if done.cpu is None else done.cpu
        rows, notes = done.rows, done.notes
        del done
        passes += 1
    if job.cold:
        notes = notes | {"stored": (storage.read_bytes() - stored) / passes}
    return {"seconds": seconds / passes, "cpu": cpu / passes, "rows": rows, "passes": passes} | notes


def _answer(worker: Any, shuffles: bool, request: dict[str, Any]) -> dict[str, Any]:
    op, enough = request.pop("op"), request.pop("enough")
    job = Job(**request)
    if job.shuffle and not shuffles:
        raise CannotError("doesn't shuffle")
    if op == "read":
        return _read(worker, job, enough)
    rows, sums = worker.check(job)
    return {"rows": rows} if sums is None else {"rows": rows, "sums": sums.result(), "plain": sums.plain()}


def serve(name: str, cores: str) -> None:
    """Answers requests until stdin ends.

    Args:
        name: A key of `READERS`.
        cores: The cores to pin the process to, separated by commas. Empty for no limit.
    """
    # Only answers use the real stdout, so that output of libraries can't mix with them.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(compute: Callable[[], dict[str, Any]]) -> None:
        try:
            line = compute()
        except (KeyboardInterrupt, SystemExit):
            raise
        except CannotError as error:
            line = {"error": str(error)}
        except BaseException as error:  # A Rust panic isn't an Exception, but is reported, too.
            line = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(line) + "\n")

    worker: Any = None

    def start() -> dict[str, Any]:
        nonlocal worker
        module, _, kind = READERS[name].worker.partition(":")
        # Import after pinning: libraries size their thread pools by the available cores when they are loaded.
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        worker = getattr(importlib.import_module(f"peers.{module}"), kind)()
        versions = {}
        for package in worker.packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # The library may not be installed.
                versions[package] = importlib.metadata.version(package)
        return {"versions": versions, "python": sys.version.split()[0]}

    answer(start)
    for line in sys.stdin:
        request = json.loads(line)
        answer(lambda: _answer(worker, READERS[name].shuffles, request))  # noqa: B023 - called at once


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
