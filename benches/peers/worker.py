"""A reader's process: answers requests, lines of JSON over stdin and stdout, until stdin ends.

It lives as long as a cell is measured, so nothing but the read is timed: neither the interpreter's start nor imports.
A request is `{"op": ...}` and a `Job`'s fields:

* `read` -> `{"seconds", "cpu", "rows", "passes"}`: reads the file, keeping nothing. `seconds` runs from opening the
  file to having the last batch (or the frame); freeing a frame isn't counted. It is the mean of the passes that fill
  `enough` seconds, so that a moment's disturbance weighs less. Before the clock starts the file is read through: some
  systems take back pages that weren't read for some seconds, such as while others had their turns.
* `check` -> `{"rows", "sums", "plain"}`: reads it again and sums up every value, untimed.

Anything that goes wrong comes back as `{"error"}`.
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
from peers import READERS
from peers.job import CannotError, Job


def _read(worker: Any, job: Job, enough: float) -> dict[str, Any]:
    if Path(job.path).exists():
        generate.read_through(Path(job.path))
    seconds = cpu = 0.0
    passes, rows, notes = 0, 0, {}
    while passes == 0 or seconds < enough:
        cpu_begun, begun = time.process_time(), time.perf_counter()
        done = worker.read(job)
        wall, spent = time.perf_counter() - begun, time.process_time() - cpu_begun
        seconds += wall if done.seconds is None else done.seconds
        cpu += spent if done.cpu is None else done.cpu
        rows, notes = done.rows, done.notes
        del done
        passes += 1
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
        cores: The cores to stay on, separated by commas; empty: any.
    """
    # Answers keep the real stdout for themselves: a library that prints must not get between them.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(compute: Callable[[], dict[str, Any]]) -> None:
        try:
            line = compute()
        except (KeyboardInterrupt, SystemExit):
            raise
        except CannotError as error:
            line = {"error": str(error)}
        except BaseException as error:  # A Rust panic isn't an Exception, and is a result too.
            line = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(line) + "\n")

    worker: Any = None

    def start() -> dict[str, Any]:
        nonlocal worker
        module, _, kind = READERS[name].worker.partition(":")
        # After the pin: thread pools are sized by the cores that may be used when their library is loaded.
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        worker = getattr(importlib.import_module(f"peers.{module}"), kind)()
        versions = {}
        for package in worker.packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # It may be imported where it was built.
                versions[package] = importlib.metadata.version(package)
        return {"versions": versions, "python": sys.version.split()[0]}

    answer(start)
    for line in sys.stdin:
        request = json.loads(line)
        answer(lambda: _answer(worker, READERS[name].shuffles, request))  # noqa: B023 - called at once


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
