"""Runs tests in separate processes, each forked from a program that has no threads.

A loader forks its workers. The pytest process has threads of other frameworks, which a fork would not copy. So a test
marked `@apart` runs in a child of a small server that has only imported the modules that loaders need. After each test
the child checks for leaks. A test fails if it leaves a process, a thread, an open file or a file in /dev/shm.

A test that takes too long fails with the stacks of its process and of all processes that it started.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent

# Time limit of a test in seconds, long enough for a busy machine. pytest's own timeout is longer.
MOST = 500.0


class Server:
    """A program that forks a child for each test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=HERE,
            # The pipe is polled for an answer, so nothing may be buffered.
            bufsize=0,
            start_new_session=True,
        )
        atexit.register(self.end)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, module: str, name: str, arguments: dict[str, Any], most: float, looks: bool) -> str | None:
        """Runs a test. Returns a report if it failed, else None."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            request = pickle.dumps((module, name, arguments, folder, looks))
            self._process.stdin.write(base64.b64encode(request) + b"\n")
            child = int(self._process.stdout.readline())
            ended, _, _ = select.select([self._process.stdout], [], [], most)
            if not ended:
                self._stop(child)
            status = int(self._process.stdout.readline())
            _kill_session(child)
            failure, log = Path(folder, "failure"), Path(folder, "log")
            if status == 0:
                return None
            said = failure.read_text() if failure.exists() else f"the test's process ended with {status}\n"
            return f"{said}\n{log.read_text(errors='replace')[-20_000:]}"

    def _stop(self, child: int) -> None:
        """Kills a test that hangs, after its processes have printed their stacks."""
        told = [child, *_of_session(child)]
        for process in dict.fromkeys(told):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
                os.kill(process, signal.SIGUSR1)
                time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _of_session(child: int) -> list[int]:
    found = []
    for process in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process) == child:
                found.append(process)
    return found


def _kill_session(child: int) -> None:
    for process in _of_session(child):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@functools.cache
def _server() -> Server:
    return Server()


def apart(function: Callable[..., None] | None = None, *, most: float = MOST, looks: bool = True) -> Any:
    """Runs a test in a separate process.

    Args:
        function: The test. Its arguments are pickled.
        most: Time limit in seconds.
        looks: Whether the child checks for leaks after the test.
    """
    if function is None:
        return functools.partial(apart, most=most, looks=looks)

    @functools.wraps(function)
    def test(**arguments: Any) -> None:
        said = _server().run(function.__module__, function.__name__, arguments, most, looks)
        if said is not None:
            pytest.fail(said, pytrace=False)

    # Otherwise pytest would treat the wrapper as a Hypothesis test.
    test.__dict__.pop("is_hypothesis_test", None)
    test.__dict__.pop("hypothesis", None)
    return test


# The name of multiprocessing's semaphores in this process. Other programs have semaphores in /dev/shm as well.
_SEMAPHORES = "fastpipe-test"


def in_shm() -> set[str]:
    """Returns the names in /dev/shm that this program, or a program that it started, may have created."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {
        name
        for name in names
        if name.startswith("fastpipe") or f"sem.{_SEMAPHORES}-{os.getpid()}-" in name or _is_torchs(name)
    }


def _is_torchs(name: str) -> bool:
    """Returns whether `name` is a file of torch that a process of this session created.

    The name contains the process id.
    """
    kind, _, rest = name.partition("_")
    if kind != "torch":
        return False
    try:
        return os.getsid(int(rest.partition("_")[0])) == os.getsid(0)
    except (ProcessLookupError, ValueError):
        return True


def open_files() -> dict[str, str]:
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = str(path.readlink())
    return {number: to for number, to in found.items() if not to.startswith("/proc/")}


def children() -> list[psutil.Process]:
    """Returns the descendants of this process, including zombies.

    The process that multiprocessing starts to track semaphores is excluded.
    """
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return [child for child in psutil.Process().children(recursive=True) if child.pid != tracker]


def end_multiprocessing() -> None:
    """Ends the helper processes that multiprocessing keeps for reuse."""
    if hasattr(forkserver._forkserver, "_stop"):
        forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


def wait_until(true: Callable[[], Any], most: float = 60.0) -> bool:
    """Waits until a condition holds. Returns whether it does. The limit only ends a wait that would never end."""
    deadline = time.monotonic() + most
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Left:
    """Records the open resources when a test begins. At its end there must be no more."""

    def __init__(self) -> None:
        self._files = open_files()
        self._shm = in_shm()
        self._threads = set(threading.enumerate())

    def look(self) -> None:
        # Frees objects that tracebacks of exceptions keep alive.
        gc.collect()
        end_multiprocessing()
        assert wait_until(lambda: not children()), f"processes are left: {children()}"
        threads = [thread for thread in threading.enumerate() if thread not in self._threads]
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), f"threads are left: {threads}"
        more = {number: to for number, to in open_files().items() if self._files.get(number) != to}
        assert not more, f"files are left open: {more}"
        # Other programs may have files there for a moment.
        assert wait_until(lambda: not in_shm() - self._shm), f"left in /dev/shm: {in_shm() - self._shm}"


def silence() -> None:
    """Turns warnings into errors, as in all tests, except for a few that a test can't avoid."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    # A reader is slower in workers than without them, and a warning says so.
    warnings.filterwarnings("ignore", message="num_workers=")
    # Python 3.12 and newer warn about forking with threads; some tests start threads.
    warnings.filterwarnings("ignore", message=".*use of fork\\(\\) may lead to deadlocks", category=DeprecationWarning)


def _child(module: str, name: str, arguments: dict[str, Any], folder: str, looks: bool) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(Path(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number, to in enumerate((null, log, log)):
        os.dup2(to, number)
    os.close(null)
    os.close(log)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    silence()
    multiprocessing.current_process()._config["semprefix"] = f"/{_SEMAPHORES}-{os.getpid()}"  # type: ignore[attr-defined]
    # Recommended to users of the fork server: the server imports torch once, instead of each worker.
    multiprocessing.set_forkserver_preload(["fastpipe.torch", "loader_data"])
    status = 1
    try:
        function = getattr(importlib.import_module(module), name).__wrapped__
        left = Left()
        function(**arguments)
        del function
        if looks:
            left.look()
        status = 0
    except BaseException:
        Path(folder, "failure").write_text(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve() -> None:
    # Imported once for all tests.
    importlib.import_module("conftest")
    importlib.import_module("fastpipe.torch")
    importlib.import_module("loader_data")
    importlib.import_module("loading")
    gc.collect()
    gc.freeze()
    answers = os.dup(1)
    while line := sys.stdin.readline():
        request = pickle.loads(base64.b64decode(line))
        child = os.fork()
        if child == 0:
            os.close(answers)
            _child(*request)
        os.write(answers, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    _serve()
