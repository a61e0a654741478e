"""Processes that call the function of a map, for functions that hold the GIL."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

from fastpipe.errors import FastpipeError

if TYPE_CHECKING:
    from fastpipe._reader.mapped_batches import MapFunction
    from fastpipe._reader.passes import BatchPlace


class MapProcesses:
    """Processes that call the function of a map. They start with the first call, and end when this object is closed.

    Args:
        function: Function of the map. It is sent to the processes with each batch.
        number: Number of processes.

    Raises:
        TypeError: If the function can't be pickled.
    """

    def __init__(self, function: MapFunction, number: int) -> None:
        try:
            pickle.dumps(function)
        except Exception as error:  # Pickling runs code of the function's object.
            raise TypeError(
                f"num_processes needs a function that can be pickled: define it at the top level of a module ({error})"
            ) from error
        self._function, self.number = function, number
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None
        self._owner = 0

    def __call__(self, batch: Any, place: BatchPlace, rank: int) -> Any:
        """Returns the function's result for a batch. Several threads may call this at once.

        Raises:
            FastpipeError: If a process ended.
        """
        pool = self._started()
        try:
            return pool.submit(_called, self._function, batch, place, rank).result()
        except BrokenProcessPool as error:
            self.close()
            raise FastpipeError(
                "a process of map() ended: it was killed, perhaps because memory ran out, or its main module can't be"
                ' imported. Guard the program with if __name__ == "__main__":'
            ) from error

    def _started(self) -> ProcessPoolExecutor:
        with self._lock:
            # A forked child has none of its parent's processes.
            if self._pool is None or self._owner != os.getpid():
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.number, context, _prepare)
                self._owner = os.getpid()
                weakref.finalize(self, _end, self._pool, self._owner).atexit = False
            return self._pool

    def close(self) -> None:
        """Ends the processes after their current calls. The next call starts others."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            _end(pool, self._owner)


def _prepare() -> None:
    """Prepares a process of a pool, which ends with the program even if the program is killed."""
    # The program handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_program, name="fastpipe-parent", daemon=True).start()


def _end_with_program() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _called(function: MapFunction, batch: Any, place: BatchPlace, rank: int) -> Any:
    """Returns the function's result, in a process of a pool."""
    try:
        return function(batch, place, rank)
    except BaseException as error:
        try:
            pickle.dumps(error)
            # Calls its class again, as unpickling does.
            copy.deepcopy(error)
        except Exception:
            # The pool would end, and the program wouldn't see the error.
            raise RuntimeError(f"the function of map() raised {type(error).__name__}: {error}") from error
        raise


def _end(pool: ProcessPoolExecutor, owner: int) -> None:
    if os.getpid() == owner:
        pool.shutdown(wait=False, cancel_futures=True)
