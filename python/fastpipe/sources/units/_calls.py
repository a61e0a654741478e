"""Threads that call what a user wrote."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from fastpipe._arguments import shown
from fastpipe._fastpipe import UnitCalls
from fastpipe.sources.units._slices import Slices

__all__ = ["start"]

# How long a program that ends waits for reads, in seconds. CPython before 3.14 ends a daemon wherever it next wants the
# GIL, by unwinding its stack: within pyarrow's C++ that aborts the program.
PATIENCE = 1.0

_serving: weakref.WeakKeyDictionary[threading.Thread, UnitCalls] = weakref.WeakKeyDictionary()


def start(read: Callable[[int], Any], slices: Slices, calls: UnitCalls, threads: int) -> int:
    """Starts threads that answer calls, and returns how many could be started.

    They are daemons: a program that ends waits a second for them, and no longer. They end by themselves when no pass is
    left.
    """
    for started in range(threads):
        thread = threading.Thread(target=_serve, args=(calls, read, slices), name="fastpipe-read", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # There is no memory for it, or the interpreter is ending.
            return started
        _serving[thread] = calls
    return threads


@atexit.register
def _end() -> None:
    threads = list(_serving.items())
    for _, calls in threads:
        calls.end()
    end = time.monotonic() + PATIENCE
    for thread, _ in threads:
        if thread.is_alive():
            thread.join(max(end - time.monotonic(), 0))


def _serve(calls: UnitCalls, read: Callable[[int], Any], slices: Slices) -> None:
    while (call := calls.next()) is not None:
        try:
            unit, rows = call.unit, call.rows
            call.answer(_checked(read(unit) if rows is None else slices.read(unit, *rows), unit, rows))
        # Whatever it is belongs to the batch.
        except BaseException as error:
            call.fail(error)
        # While the thread waits it keeps nothing.
        del call
    slices.clear()


def _checked(table: Any, unit: int, rows: tuple[int, int] | None) -> Any:
    if hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__"):
        return table
    called, returned = ("read", "return") if rows is None else ("read_slices", "yield")
    raise TypeError(
        f"{called}({unit}) must {returned} Arrow data (something with __arrow_c_stream__ or __arrow_c_array__), and "
        f"{returned}ed {shown(table)}"
    )
