"""Calls of a database that Ctrl-C leaves: its libraries don't notice signals while they wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["interruptible"]

_T = TypeVar("_T")


def interruptible(work: Callable[[], _T], cancel: Callable[[], None]) -> _T:
    """Calls a function in a thread. On Ctrl-C it is left to that, which ends with all that it holds when it can.

    Args:
        work: waits for a database.
        cancel: may shorten that; called on Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[_T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="fastpipe-sql", daemon=True).start()
    try:
        while not done.wait(0.1):
            pass
    except BaseException:
        cancel()
        raise
    if errors:
        # A cycle of the error, its traceback and this frame would keep connections open.
        error = errors.pop()
        try:
            raise error
        finally:
            del error
    return results.pop()
