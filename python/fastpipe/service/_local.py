"""A server in a process of this machine, whose batches lie in memory in common."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Literal, SupportsIndex

from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.reader import Reader
from fastpipe.errors import ServiceError, UnsupportedError
from fastpipe.service._connect import Asked, check_timeout

if TYPE_CHECKING:
    from fastpipe.service._local_process import LocalProcess

__all__ = ["LocalService"]


class LocalService:
    """Makes the batches of a reader in another process of this machine, and hands them over without a copy.

    Linux alone has what it needs; the extra `arrow` is needed, too.

    What decoding costs, its threads and its Python (sources and functions of yours) are out of the way of the process
    that trains. Batches lie in memory that both processes have mapped; it is used again when the last array over them
    dies. Nothing is left behind when either process ends, however that happens: the memory has no name.

    The reader is pickled and made anew in the other process; a script whose own functions or classes it needs has to
    guard what it runs by `if __name__ == "__main__":`, as for `multiprocessing`.

    Args:
        reader: what is read there.
        rank: of the reader here; with `world_size`. By default as `reader` has it, and so for what follows.
        world_size: number of ranks.
        seed: another one than the reader's.
        epochs: epochs a pass; None for passes without end; `"served"` for as many as the reader has.
        prefetch: batches to have ahead here; None for as many as have 8 MiB, 2 to 256.
        memory_limit: bytes that these may take, or a size such as `"512MB"`; None for no limit. What the server has
            ahead is limited by the reader's own arguments.
        progress: whether passes show a progress bar (extra `progress`).
        timeout: seconds within which the server must start, and send something when it was asked for batches.
        fallback: whether this process makes the batches when the server has ended, instead of a `ServiceError`.

    Raises:
        ImportError: if pyarrow isn't installed.
        UnsupportedError: if the reader can't be served, or the system isn't Linux.
        ValueError: if an argument is out of range.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
        >>> with fastpipe.LocalService(reader) as remote:
        ...     sum(len(batch["label"]) for batch in remote)
        6144
    """

    def __init__(
        self,
        reader: Reader,
        *,
        rank: SupportsIndex | None = None,
        world_size: SupportsIndex | None = None,
        seed: SupportsIndex | None = None,
        epochs: SupportsIndex | Literal["served"] | None = "served",
        prefetch: SupportsIndex | None = None,
        memory_limit: SupportsIndex | str | None = None,
        progress: bool = False,
        timeout: float = 30.0,
        fallback: bool = False,
    ) -> None:
        if sys.platform != "linux":
            raise UnsupportedError("LocalService shares memory by means of Linux; use reader.serve() on other systems")
        # In which the features are told.
        require_pyarrow()
        from fastpipe.service._served import Served

        self._asked = Asked(rank, world_size, seed, epochs, progress)
        self._running = PassOptions.checked(num_threads=None, prefetch=prefetch, memory_limit=memory_limit)
        self._timeout = check_timeout(timeout)
        # Says what can't be served before a process starts.
        Served("default", reader)
        self._reader, self._fallback = reader, fallback
        self._process: LocalProcess | None = None
        self._closed = False

    def start(self) -> Reader:
        """Starts the server's process.

        Returns:
            The reader of its batches.

        Raises:
            ServiceError: if it has been started already, or doesn't start.
            FastpipeError: what goes wrong there.
            TypeError: if the reader can't be pickled.
        """
        from fastpipe.service._local_process import LocalProcess

        if self._process is not None or self._closed:
            raise ServiceError("the local service has been started; make another one")
        process = self._process = LocalProcess(self._reader, self._timeout)
        try:
            return process.reader(self._asked, self._running, self._timeout, self._reader if self._fallback else None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the server's process. Batches that were handed over stay as they are. Twice does no harm."""
        self._closed = True
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> Reader:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # What failed to be made has no process.
        if getattr(self, "_process", None) is not None:
            self.close()

    def __repr__(self) -> str:
        process = self._process
        state = "closed" if self._closed else "not started" if process is None else f"pid {process.pid}"
        return f"<fastpipe.LocalService of {self._reader!r}: {state}>"
