"""The driver's end of a reader's process."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.memory import rss_anon
from peers.environments import NoEnvironmentError, interpreter
from peers.job import Job

BENCHES = Path(__file__).resolve().parent.parent
# Everything in these environments that would start threads, where one is wanted. The core is pinned besides.
ONE_THREAD: tuple[str, ...] = ("POLARS_MAX_THREADS", "RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS", "OMP_NUM_THREADS")
ONE_THREAD += ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_NUM_THREADS")
PATIENCE = 120.0
"""Seconds after which a request has failed: a reader that hangs must not hang the comparison."""
INTERVAL = 0.002
"""Seconds between two samples of a process's memory."""


@dataclass
class Sample:
    """A process's anonymous memory while a request ran, in bytes: neither the file's own pages nor libraries.

    Attributes:
        idle: Before it.
        peak: The most that was seen.
    """

    idle: int = 0
    peak: int = 0


class Peer:
    """A reader's process. It starts at once, and is waited for by the first request.

    Attributes:
        name: A key of `peers.READERS`.
        versions: Package -> version, empty where it couldn't start.
        error: Why it couldn't start, or None.
    """

    def __init__(
        self, name: str, env: str | None, cores: Iterable[int] = (), log: Callable[[str], None] = print
    ) -> None:
        """Starts the process.

        Args:
            name: A key of `peers.READERS`.
            env: Its environment.
            cores: The cores it stays on, with one thread for each library; none: any, with any number of threads.
            log: Called before slow steps.
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
        # Its warnings would tear the tables apart; errors come back as an answer.
        quiet = None if os.environ.get("PEERS_STDERR") else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [self._python, "-m", "peers.worker", self.name, self._cores],
            cwd=BENCHES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=quiet,
            env=env,
        )
        self._unread, self._greeted = b"", False

    def _greet(self) -> None:
        """Waits until the worker has started."""
        if self._process is None and self.error is None:  # It died over the request before: this one may do better.
            self._start()
        if self.error is None and not self._greeted:
            hello = self._receive()
            self.error = hello.get("error")
            self.versions = hello.get("versions", {})
            self._greeted = True

    def _receive(self, sample: Sample | None = None) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        until = time.monotonic() + PATIENCE
        descriptor = process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([descriptor], [], [], 1.0 if sample is None else INTERVAL)
            if sample is not None:
                with contextlib.suppress(RuntimeError):  # It may have died.
                    sample.peak = max(sample.peak, rss_anon(process.pid))
            if ready:
                data = os.read(descriptor, 1 << 16)
                if not data:
                    code = process.wait()
                    self._process = None
                    return {"error": f"the process died: {_status(code)}"}
                self._unread += data
            elif time.monotonic() > until:
                process.kill()
                process.wait()
                self._process = None
                return {"error": f"took more than {PATIENCE:.0f} s"}
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send(self, op: str, job: Job, enough: float) -> None:
        """Sends a request. `receive` must follow.

        Args:
            op: read or check.
            job: What to read.
            enough: Seconds that `read` lasts at least.
        """
        self._greet()
        if self._process is None or self._process.stdin is None:
            return
        request = {"op": op, "enough": enough} | dataclasses.asdict(job)
        with contextlib.suppress(BrokenPipeError):  # The answer says why.
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()

    def receive(self, sample: Sample | None = None) -> dict[str, Any]:
        """Waits for the answer to `send`, and samples the process's memory if asked to."""
        return {"error": self.error or "the process died"} if self._process is None else self._receive(sample)

    def ask(self, op: str, job: Job, enough: float = 0.25, sample: Sample | None = None) -> dict[str, Any]:
        """Sends a request and waits for the answer.

        Args:
            op: read or check.
            job: What to read.
            enough: Seconds that `read` lasts at least; shorter passes are repeated.
            sample: Filled in with the process's memory.
        """
        self._greet()
        if self.error is not None:
            return {"error": self.error}
        if sample is not None and self._process is not None:
            sample.idle = sample.peak = rss_anon(self._process.pid)
        self.send(op, job, enough)
        return self.receive(sample)

    def close(self) -> None:
        """Ends the process."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):  # A dataset's own thread may keep it from ending.
            self._process.kill()
            self._process.wait()
        self._process = None


def _status(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
