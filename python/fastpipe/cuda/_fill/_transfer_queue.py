"""Queues that copy rows to devices, with two buffers each: one is filled while the other is copied."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastpipe.cuda._fill._devices import Device, Layout, Piece

# Timeout in seconds. A wait without a timeout would block Ctrl-C on Windows.
_PATIENCE = 0.1

BUFFERS = 2


class RowQueue(Protocol):
    """Puts rows at their places on one device, in order.

    Attributes:
        device: The device.
        waited: Seconds that `put` and `end` waited for copies in the last filling.
        copying: Seconds of copying in the last filling.
    """

    device: Device
    waited: float
    copying: float

    def begin(self) -> None:
        """Starts again at the first row."""

    def put(self, columns: Sequence[npt.NDArray[Any]], which: npt.NDArray[np.intp] | None) -> None:
        """Appends rows: all of them, or those at the indices in `which`."""

    def end(self) -> None:
        """Waits until all rows are in place."""

    def close(self) -> None:
        """Ends the filling, whether all rows are in place or not."""

    def matrix(self) -> Any:
        """Returns the rows as an array `[rows, columns]` on the device."""


class HostRows:
    """Puts Python objects into an array of this process, without a copy in between.

    Args:
        device: Device of this process.
        rows: Total number of rows.
        columns: Number of columns.
        order: Layout of the array, "C" or "F".
    """

    def __init__(self, device: Device, rows: int, columns: int, order: Layout) -> None:
        self.device = device
        self.waited = self.copying = 0.0
        self._values = np.empty((rows, columns), object, order=order)
        self._at = 0

    def begin(self) -> None:
        """Starts again at the first row."""
        self._at = 0

    def put(self, columns: Sequence[npt.NDArray[Any]], which: npt.NDArray[np.intp] | None) -> None:
        """Appends rows: all of them, or those at the indices in `which`."""
        end = self._at + (len(columns[0]) if which is None else len(which))
        for number, column in enumerate(columns):
            self._values[self._at : end, number] = column if which is None else column[which]
        self._at = end

    def end(self) -> None:
        """Checks that no row is missing."""
        if self._at != len(self._values):
            raise RuntimeError(f"internal error: {self._at} of {len(self._values)} rows arrived")

    def close(self) -> None:
        """Does nothing, since no thread copies."""

    def matrix(self) -> Any:
        """Returns the array."""
        return self._values


class TransferQueue:
    """Copies the rows of one device to their places on the device, in order.

    A separate thread copies. `put` waits while both buffers are being copied.

    Args:
        device: Device that has memory for all rows.
        rows: Total number of rows.
        columns: Number of columns.
        dtype: Dtype of the array.
        order: Layout of the array, "C" or "F".
        buffer_rows: Number of rows in one buffer.

    Attributes:
        dtype: Dtype of the array.
        order: Layout of the array.
    """

    def __init__(
        self, device: Device, rows: int, columns: int, dtype: np.dtype[Any], order: Layout, buffer_rows: int
    ) -> None:
        self.device = device
        self._shape, self.dtype, self.order = (rows, columns), dtype, order
        self._buffer_rows = min(buffer_rows, rows)
        self._buffers = [self._buffer() for _ in range(BUFFERS)]
        self._current: int | None = None
        # Rows in the current buffer, and rows that were sent.
        self._inside = self._sent = 0
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.waited = self.copying = 0.0

    def _buffer(self) -> npt.NDArray[Any]:
        """Returns a buffer `[rows, columns]`, or `[columns, rows]` for column-major layout on the device."""
        shape = (self._buffer_rows, self._shape[1])
        if self.order == "F":
            shape = shape[::-1]
        nbytes = math.prod(shape) * self.dtype.itemsize
        return self.device.allocate(nbytes)[:nbytes].view(self.dtype).reshape(shape)

    def begin(self) -> None:
        """Starts again at the first row."""
        self._current, self._inside, self._sent, self._error = None, 0, 0, None
        self.waited = self.copying = 0.0
        self._free, self._jobs = queue.SimpleQueue(), queue.SimpleQueue()
        for number in range(BUFFERS):
            self._free.put(number)
        self._thread = threading.Thread(target=self._run, name=f"fastpipe-fill-{self.device.name}", daemon=True)
        self._thread.start()

    def put(self, columns: Sequence[npt.NDArray[Any]], which: npt.NDArray[np.intp] | None) -> None:
        """Appends rows: all of them, or those at the indices in `which`."""
        for buffer, places, part in self._places(len(columns[0]) if which is None else len(which)):
            taken = part if which is None else which[part]
            for number, column in enumerate(columns):
                if self.order == "F":
                    buffer[number, places] = column[taken]
                else:
                    buffer[places, number] = column[taken]

    def put_rows(self, table: npt.NDArray[Any], which: npt.NDArray[np.intp]) -> None:
        """Appends the rows at the indices in `which` of an array `[rows, columns]`. For row-major layout only."""
        for buffer, places, part in self._places(len(which)):
            # With another mode, NumPy would copy the rows twice.
            np.take(table, which[part], axis=0, out=buffer[places], mode="clip")

    def _places(self, rows: int) -> Iterator[tuple[npt.NDArray[Any], slice, slice]]:
        """Yields where the next rows belong: a buffer, the rows of the buffer, and which of the rows they are."""
        at = 0
        while at < rows:
            buffer = self._buffers[self._ready()]
            size = min(rows - at, self._buffer_rows - self._inside)
            yield buffer, slice(self._inside, self._inside + size), slice(at, at + size)
            at += size
            self._inside += size
            if self._inside == self._buffer_rows:
                self._send()

    def matrix(self) -> Any:
        """Returns the rows as an array `[rows, columns]` on the device."""
        return self.device.matrix(*self._shape, self.dtype, self.order)

    def end(self) -> None:
        """Sends the remaining rows, and waits for all rows to arrive.

        Raises:
            RuntimeError: If rows are missing.
            BaseException: The error that the device raised.
        """
        if self._inside:
            self._send()
        self._stop()
        if self._error is not None:
            raise self._error
        if self._sent != self._shape[0]:
            raise RuntimeError(f"{self._sent} of {self._shape[0]} rows were copied to {self.device.name}")

    def close(self) -> None:
        """Ends the thread, whether all rows were sent or not."""
        if self._thread is not None:
            self._error = self._error or RuntimeError("filling was canceled")
            self._stop()

    def _stop(self) -> None:
        thread = self._thread
        if thread is None:
            return
        self._jobs.put(None)
        started = time.perf_counter()
        while thread.is_alive():
            thread.join(_PATIENCE)
        self.waited += time.perf_counter() - started
        self._thread = None

    def _ready(self) -> int:
        """Returns the buffer that is being filled, and waits for a free one if needed."""
        if self._current is None:
            started = time.perf_counter()
            while self._current is None:
                if self._error is not None:
                    raise self._error
                try:
                    self._current = self._free.get(timeout=_PATIENCE)
                except queue.Empty:
                    continue
            self.waited += time.perf_counter() - started
        return self._current

    def _send(self) -> None:
        assert self._current is not None
        self._jobs.put((self._current, self._sent, self._inside))
        self._sent += self._inside
        self._current, self._inside = None, 0

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            number, first, count = job
            # After an error or `close`, nothing more is copied.
            if self._error is None:
                started = time.perf_counter()
                try:
                    self.device.copy(self._pieces(self._buffers[number], first, count))
                except BaseException as error:
                    self._error = error
                self.copying += time.perf_counter() - started
            self._free.put(number)

    def _pieces(self, buffer: npt.NDArray[Any], first: int, count: int) -> list[Piece]:
        rows, columns = self._shape
        size = self.dtype.itemsize
        if self.order == "C":
            return [Piece(buffer[:count].reshape(-1).view(np.uint8), first * columns * size)]
        return [
            Piece(buffer[number, :count].view(np.uint8), (number * rows + first) * size) for number in range(columns)
        ]
