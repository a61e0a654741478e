"""Tests in processes of their own, each forked off a program that has no threads.

A loader forks its workers, and the process of pytest has other frameworks' threads, which a fork would cut off. So a
test that is marked `@apart` runs in a child of a small server, which has imported what loaders need once and does
nothing else. Behind each test the child looks what is left of it: a process, a thread, an open file, or anything in
/dev/shm fails the test.

A test that takes too long fails with the stacks of its process and of all that it has started.
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

# Seconds that a test may take, on a machine that is busy with others, too. pytest's timeout is longer.
MOST = 500.0


class Server:
    """The program that forks a child for each test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=HERE,
            # Whether there is an answer is asked of the pipe: nothing may be read ahead.
            bufsize=0,
            start_new_session=True,
        )
        atexit.register(self.end)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def run(self, module: str, name: str, arguments: dict[str, Any], most: float, looks: bool) -> str | None:
        """Runs a test. Returns what is to be said of it if it has failed."""
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
        """Ends a test that hangs. Its processes say first where they are."""
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
    """Runs a test in a process of its own.

    Args:
        function: the test. Its arguments are pickled.
        most: seconds that it may take.
        looks: whether the child looks what is left of the test.
    """
    if function is None:
        return functools.partial(apart, most=most, looks=looks)

    @functools.wraps(function)
    def test(**arguments: Any) -> None:
        said = _server().run(function.__module__, function.__name__, arguments, most, looks)
        if said is not None:
            pytest.fail(said, pytrace=False)

    # pytest would take its examples for its own.
    test.__dict__.pop("is_hypothesis_test", None)
    test.__dict__.pop("hypothesis", None)
    return test


# What semaphores of multiprocessing are called here: other programs have theirs in /dev/shm, too.
_SEMAPHORES = "fastpipe-test"


def in_shm() -> set[str]:
    """What there is in /dev/shm that programs like this one, or those that it starts, may have made."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {
        name
        for name in names
        if name.startswith("fastpipe") or f"sem.{_SEMAPHORES}-{os.getpid()}-" in name or _is_torchs(name)
    }


def _is_torchs(name: str) -> bool:
    """Whether it is a file of torch's, and not that of a process elsewhere: it has that one's number."""
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
    """The processes that this one has started, and theirs, those that nobody has waited for too.

    Without the one that multiprocessing starts to keep account of semaphores.
    """
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return [child for child in psutil.Process().children(recursive=True) if child.pid != tracker]


def end_multiprocessing() -> None:
    """Ends the programs that multiprocessing keeps for the next time."""
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
    """What is there as a test begins. At its end there must be no more."""

    def __init__(self) -> None:
        self._files = open_files()
        self._shm = in_shm()
        self._threads = set(threading.enumerate())

    def look(self) -> None:
        # What exceptions have kept by their tracebacks.
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
    """Lets warnings be errors, as everywhere here, but for some that a test can't help."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    # Readers in workers are slower than without, which a warning says.
    warnings.filterwarnings("ignore", message="num_workers=")
    # Python 3.12 and newer warn of threads; the tests start some of their own.
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
    # As users do where workers are forked off a server: it imports torch once, not each worker.
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
    # Once for all.
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
