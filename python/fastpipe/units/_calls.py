"""Threads that call what a user wrote."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fastpipe._arguments import shown
from fastpipe._fastpipe import UnitCalls
from fastpipe.units._slices import Slices

__all__ = ["start"]


def start(read: Callable[[int], Any], slices: Slices, calls: UnitCalls, threads: int) -> int:
    """Starts threads that answer calls, and returns how many could be started.

    They are daemons: a program that ends doesn't wait for them. They end by themselves when no pass is left.
    """
    for started in range(threads):
        thread = threading.Thread(target=_serve, args=(calls, read, slices), name="fastpipe-read", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # There is no memory for it, or the interpreter is ending.
            return started
    return threads


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
