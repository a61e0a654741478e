"""Scripts in separate processes with any number of JAX devices, Ctrl-C for them, and threads."""

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
"""In seconds: importing pyarrow and starting processes takes long on a busy machine."""


def run(script: str, *arguments: str, devices: int = 1) -> subprocess.Popen[str]:
    """Starts a script in a separate process with `devices` devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    start = f"import os, sys; os.environ['XLA_FLAGS'] = {flags!r}; sys.path.insert(0, {str(HERE)!r})\n"
    return subprocess.Popen(
        # A reader is slower in workers than without them, and a warning says so.
        [sys.executable, "-W", "error", "-W", "ignore:num_workers=", "-c", start + textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a program of the tests with warnings as errors."""
    # A reader is slower in workers than without them, and a warning says so.
    ignored = ("ignore::DeprecationWarning", "ignore:num_workers=")
    return subprocess.Popen(
        [sys.executable, "-W", "error", *(part for each in ignored for part in ("-W", each)), program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(program: str, *arguments: str, status: int = 0) -> str:
    """Returns the output of a program that must exit with `status`, without errors, within `PROMPTLY` seconds."""
    with start(program, *arguments) as process:
        try:
            out, errors = process.communicate(timeout=PROMPTLY)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert (process.returncode, errors) == (status, "")
    return out


def together(threads: Iterable[threading.Thread]) -> None:
    """Starts threads and waits for all of them."""
    threads = list(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def outputs(*processes: subprocess.Popen[str]) -> list[str]:
    """Returns the output of processes that must all succeed. No process outlives the test."""
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
    """Sends Ctrl-C as a user would, repeatedly if the program continues. Returns its stderr.

    TensorFlow loses some interrupts: if it looks up an attribute of an object, it clears any exception. In a loop over
    `tf.data.Dataset.range` without fastpipe, 4 of 15 were lost.
    """
    for _ in range(5):
        child.send_signal(signal.SIGINT)
        try:
            return child.communicate(timeout=50)[1]
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("the program ignored Ctrl-C five times")


def interrupt(process: subprocess.Popen[str], timeout: float) -> None:
    """Sends Ctrl-C to a program that prints "waits" before it waits, and "interrupted" when it is interrupted.

    A program that continues is killed. Its wait must take much longer than `timeout` seconds.
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


# The text that Python prints between the traceback of an exception and that of another one raised while handling it.
CHAINED = "\nDuring handling of the above exception, another exception occurred:\n\n"


def ends_by_one_interrupt(errors: str) -> bool:
    """Returns whether a program printed the traceback of one Ctrl-C and nothing else.

    The interrupt may arrive while an exception is handled that Python's own libraries raise and catch. Python then
    prints that exception first.
    """
    *handled, last = errors.split(CHAINED)
    return all(map(_is_traceback, [*handled, last])) and last.endswith("\nKeyboardInterrupt\n")


def _is_traceback(text: str) -> bool:
    """Returns whether a text is the traceback of one exception. Python 3.11 prints an empty line after some frames."""
    lines = text.splitlines()
    indented = all(not line.strip() or line.startswith("  ") for line in lines[1:-1])
    return lines[:1] == ["Traceback (most recent call last):"] and indented and not lines[-1].startswith(" ")
