"""Controls a reader's process from the driver."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness.memory import Peak
from peers.environments import NoEnvironmentError, interpreter
from peers.job import Job

BENCHES = Path(__file__).resolve().parent.parent
# Limits every library of these environments to one thread. The process is pinned to one core as well.
ONE_THREAD: tuple[str, ...] = ("POLARS_MAX_THREADS", "RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS", "OMP_NUM_THREADS")
ONE_THREAD += ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_NUM_THREADS")
PATIENCE = 120.0
"""Timeout of a request in seconds, so that a reader that hangs doesn't block the comparison."""
INTERVAL = 0.002
"""Seconds between two samples of a process's memory."""


class Peer:
    """A reader's process. It starts at once; the first request waits until it is ready.

    Attributes:
        name: A key of `peers.READERS`.
        versions: Maps packages to versions. Empty if the process couldn't start.
        error: The reason why it couldn't start, or None.
    """

    def __init__(
        self, name: str, env: str | None, cores: Iterable[int] = (), log: Callable[[str], None] = print
    ) -> None:
        """Starts the process.

        Args:
            name: A key of `peers.READERS`.
            env: A key of `environments.PINS`, or None for the driver's environment.
            cores: The cores to pin it to, with one thread for each library. Empty for no limits.
            log: Called with a message before slow steps.
        """
        self.name = name
        self.versions: dict[str, str] = {}
        self.error: str | None = None
        self._cores, self._python, self._unread = ",".join(map(str, cores)), "", b""
        self._process: subprocess.Popen[bytes] | None = None
        self._greeted = False
        try:
            self._python = interpreter(env, log)
        except NoEnvironmentError as error:
            self.error = f"no environment: {error}"
            return
        self._start()

    def _start(self) -> None:
        env = os.environ | dict.fromkeys(ONE_THREAD if self._cores else (), "1") | {"PYTHONDONTWRITEBYTECODE": "1"}
        # Its warnings would break up the tables. Errors are returned as answers.
        quiet = None if os.environ.get("PEERS_STDERR") else subprocess.DEVNULL
        command = [self._python, "-m", "peers.worker", self.name, self._cores]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=BENCHES, env=env, stdin=pipe, stdout=pipe, stderr=quiet)
        self._unread, self._greeted = b"", False

    def _greet(self) -> None:
        """Waits until the worker has started."""
        if self._process is None and self.error is None:  # It exited in the request before: retry.
            self._start()
        if self.error is None and not self._greeted:
            hello = self.receive()
            self.error, self.versions = hello.get("error"), hello.get("versions", {})
            self._greeted = True

    def send(self, op: str, job: Job, enough: float) -> None:
        """Sends `op`, "read" or "check"; `receive` must follow. "read" repeats passes for at least `enough` seconds."""
        self._greet()
        if self._process is None or self._process.stdin is None:
            return
        request = {"op": op, "enough": enough} | dataclasses.asdict(job)
        with contextlib.suppress(BrokenPipeError):  # `receive` reports the reason.
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()

    def receive(self, peak: Peak | None = None) -> dict[str, Any]:
        """Waits for the answer to `send`, and samples the process's memory if `peak` is given."""
        process = self._process
        if process is None:
            return {"error": self.error or "the process died"}
        assert process.stdout is not None
        until = time.monotonic() + PATIENCE
        while b"\n" not in self._unread:
            ready, _, _ = select.select([process.stdout], [], [], 1.0 if peak is None else INTERVAL)
            if peak is not None:
                with contextlib.suppress(RuntimeError):  # It may have exited.
                    peak.sample()
            data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if ready and not data:
                code = process.wait()
                status = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                return self._ended(f"the process died: {status}")
            if not ready and time.monotonic() > until:
                return self._ended(f"took more than {PATIENCE:.0f} s")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, op: str, job: Job, enough: float = 0.25, memory: bool = False) -> dict[str, Any]:
        """Sends a request and waits for the answer. With `memory`, its `peak` has the memory sampled until then."""
        self._greet()
        if self.error is not None or self._process is None:
            return {"error": self.error or "the process died"}
        peak = Peak(self._process.pid) if memory else None
        self.send(op, job, enough)
        return self.receive(peak) | {"peak": peak}

    def _ended(self, error: str) -> dict[str, Any]:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        return {"error": error}

    def close(self) -> None:
        """Ends the process."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        # A thread of a dataset may keep the process from exiting.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(timeout=5)
        self._ended("closed")
