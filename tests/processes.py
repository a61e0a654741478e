"""Scripts in processes of their own, with as many of JAX's devices as they want, Ctrl-C for them, and threads."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent

PROMPTLY = 100
"""Seconds: importing pyarrow and starting processes takes a while where others work."""


def run(script: str, *arguments: str, devices: int = 1) -> subprocess.Popen[str]:
    """Starts a script in a process of its own, with this many devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    start = f"import os, sys; os.environ['XLA_FLAGS'] = {flags!r}; sys.path.insert(0, {str(HERE)!r})\n"
    return subprocess.Popen(
        # Readers in workers are slower than without, which a warning says.
        [sys.executable, "-W", "error", "-W", "ignore:num_workers=", "-c", start + textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a program of the tests, to which warnings are errors."""
    # Readers in workers are slower than without, which a warning says.
    ignored = ("ignore::DeprecationWarning", "ignore:num_workers=")
    return subprocess.Popen(
        [sys.executable, "-W", "error", *(part for each in ignored for part in ("-W", each)), program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(program: str, *arguments: str, status: int = 0) -> str:
    """What a program of the tests prints, if it ends so, in silence and within `PROMPTLY`."""
    with start(program, *arguments) as process:
        try:
            out, errors = process.communicate(timeout=PROMPTLY)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert (process.returncode, errors) == (status, "")
    return out


def together(threads: Iterable[threading.Thread]) -> None:
    """Starts threads, and waits for all of them."""
    threads = list(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def outputs(*processes: subprocess.Popen[str]) -> list[str]:
    """What processes print, if all go well. None outlives the test."""
    try:
        done = [(*process.communicate(timeout=500), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for _, errors, status in done:
        assert status == 0, errors
    return [out for out, _, _ in done]


def press_until_ended(child: subprocess.Popen[str]) -> str:
    """Presses Ctrl-C as users do, again where nothing comes of it; returns what was told on stderr.

    TensorFlow loses some: where it asks an object for an attribute, it clears whatever exception comes of that. In a
    loop over `tf.data.Dataset.range` alone 4 of 15 were lost.
    """
    for _ in range(5):
        child.send_signal(signal.SIGINT)
        try:
            return child.communicate(timeout=50)[1]
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("five times Ctrl-C, and the program goes on")


def interrupt(process: subprocess.Popen[str], timeout: float) -> None:
    """Presses Ctrl-C in a program that prints "waits" before it waits, and "interrupted" when it is interrupted.

    A program that continues is killed. Its wait would take far longer than `timeout` seconds.
    """
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert out == "interrupted\n"
    assert errors.endswith("KeyboardInterrupt\n")
    assert process.returncode == -signal.SIGINT


# What Python prints between the traceback of an exception and of one that comes while that is handled.
CHAINED = "\nDuring handling of the above exception, another exception occurred:\n\n"


def ends_by_one_interrupt(errors: str) -> bool:
    """Whether a program printed the traceback of one Ctrl-C, and nothing else.

    It may come while an exception is handled, such as Python's own libraries raise and catch themselves; then that one
    is told of first.
    """
    *handled, last = errors.split(CHAINED)
    return all(map(_is_traceback, [*handled, last])) and last.endswith("\nKeyboardInterrupt\n")


def _is_traceback(text: str) -> bool:
    """Whether this is the traceback of one exception. Python 3.11 puts an empty line behind some of its frames."""
    lines = text.splitlines()
    indented = all(not line.strip() or line.startswith("  ") for line in lines[1:-1])
    return lines[:1] == ["Traceback (most recent call last):"] and indented and not lines[-1].startswith(" ")
