"""Filling devices with random rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag, names, shown
from fastpipe._progress import progress_bar
from fastpipe._reader.ordering import seed_of, within
from fastpipe._reader.pass_options import memory_size
from fastpipe._reader.reader import Reader
from fastpipe._reader.sampling import LARGEST_SAMPLE, counts_of, gathered
from fastpipe.cuda._fill._device_table import Columns, Filled
from fastpipe.cuda._fill._devices import Device, HostDevice, Layout, memory_errors
from fastpipe.cuda._fill._rows import BlockRows, Dealt, ExactRows, FilledRows
from fastpipe.cuda._fill._transfer_queue import BUFFERS, TransferQueue
from fastpipe.errors import LimitError
from fastpipe.sources.csv._sampling import BlockVariance
from fastpipe.sources.files._in_memory_files import Source
from fastpipe.sources.files._index_cache import IndexCache

_MOST_DEVICES = 1024

# Of the memory that is allowed, buffers on their way to devices have at most an eighth, and lists of rows likewise.
_PARTS = 8
_LARGEST_BUFFER = 32 << 20
# With less, neither units nor batches have room.
_LEAST_MEMORY = 16 << 20
_LEAST_BATCH, _MOST_BATCH = 64, 1 << 16


class Fill(Sequence[Filled]):
    """Devices that were filled, and can be filled again. `fastpipe.cuda.fill` makes it.

    `fill[0]` is what the first device has.

    Attributes:
        num_rows: rows of each device.
        columns: the names of the columns.
        seed: with which rows are drawn.
    """

    def __init__(
        self,
        reader: Reader,
        columns: Columns,
        rows: FilledRows,
        num_rows: int,
        seed: int,
        queues: list[TransferQueue],
        matrices: Callable[[TransferQueue], Any],
        *,
        batch_size: int,
        memory: int,
        progress: bool,
    ) -> None:
        self.num_rows = num_rows
        self.columns = columns.names
        self.seed = seed
        self._reader, self._columns, self._rows, self._queues = reader, columns, rows, queues
        self._batch_size, self._memory, self._progress = batch_size, memory, progress
        self._refill = -1
        # A device's buffers are filled by one thread at a time.
        self._filling = threading.Lock()
        self._seconds = 0.0
        self._design_effect: npt.NDArray[np.float64] | None = None
        self._filled = [
            Filled(queue.device, matrices(queue), columns.names, self._numbers(place))
            for place, queue in enumerate(queues)
        ]

    @property
    def refills(self) -> int:
        """How often devices were filled again."""
        return self._refill

    @property
    def design_effect(self) -> npt.NDArray[np.float64] | None:
        """By how much the variance of a column's mean over all devices is larger than of as many rows drawn one by one.

        float64 `[columns]`, with `method="block"`, as the rows tell it: as `CsvSample.design_effect`. None with
        `method="exact"`, for which it is 1.
        """
        return self._design_effect

    @memory_errors()
    def refill(self) -> None:
        """Replaces the rows of all devices by the next ones: arrays stay where they are, and index sets stay valid.

        Waits until devices have finished what was started on them. Of several threads that call this, one fills at a
        time.

        Raises:
            ValueError: if there are no more rows, with `replace=False`. Devices keep their rows.
            OutOfMemoryError: if the system has no memory for it.
            FastpipeError: as reading does. Devices hold a mixture of rows then, as after Ctrl-C: refill them again.
        """
        with self._filling:
            self._rows.check(self._refill + 1)
            self._run(self._refill + 1)

    def __getitem__(self, place: Any) -> Any:
        return self._filled[place]

    def __len__(self) -> int:
        return len(self._filled)

    def explain(self) -> str:
        """Says how long the last filling took, and what it waited for."""
        copying = max(queue.copying for queue in self._queues)
        waited = sum(queue.waited for queue in self._queues)
        nbytes = sum(filled.values.nbytes for filled in self._filled)
        hidden = 1 - min(waited / copying, 1) if copying else 1.0
        limit = (
            "Copying to devices is the bottleneck: fewer columns or a smaller dtype reduce it."
            if waited > self._seconds / 2
            else "Reading rows is the bottleneck: Reader.explain() of the same files shows which part of it."
        )
        each = "\n".join(f"  {queue.device.name}: {queue.copying:.2f} s of copying" for queue in self._queues)
        return (
            f"{nbytes / 1e6:,.1f} MB in {self._seconds:.2f} s, {nbytes / self._seconds / 1e6:,.0f} MB/s\n{each}\n"
            f"  {hidden:.0%} of copying was hidden behind reading; reading waited {waited:.2f} s for it\n{limit}"
        )

    def __repr__(self) -> str:
        devices = ", ".join(filled.device for filled in self._filled)
        return f"<fastpipe.cuda.Fill of {devices}: {self.num_rows} rows of {len(self.columns)} columns each>"

    def _numbers(self, place: int) -> Callable[[], npt.NDArray[np.int64]]:
        return lambda: self._rows.of(self._refill, place)

    def _run(self, refill: int) -> None:
        """Fills all devices."""
        started = time.perf_counter()
        variance = BlockVariance(len(self.columns)) if isinstance(self._rows, BlockRows) else None
        for queue in self._queues:
            queue.device.settle()
        # From here on devices have neither the old rows nor the new ones.
        self._refill = refill
        bar = progress_bar(self.num_rows * len(self._queues), desc="filling") if self._progress else None
        try:
            for queue in self._queues:
                queue.begin()
            for dealt in _ahead(self._rows.chunks(refill, self._memory // _PARTS)):
                self._put(dealt, variance, bar)
            for queue in self._queues:
                queue.end()
        finally:
            for queue in self._queues:
                queue.close()
            if bar is not None:
                bar.close()
        self._design_effect = None if variance is None else variance.design_effect()
        self._seconds = time.perf_counter() - started

    def _begun(self, numbers: npt.NDArray[np.int64]) -> tuple[Reader, Iterator[dict[str, Any]]]:
        """A pass over rows, in batches that are as large as there is memory for."""
        memory = self._memory - self._memory * 2 // _PARTS
        while True:
            rows = gathered(self._reader, numbers, self._batch_size, memory)
            try:
                return rows, iter(rows)
            except LimitError:
                if self._batch_size <= _LEAST_BATCH:
                    raise
                self._batch_size = max(self._batch_size // 2, _LEAST_BATCH)

    def _put(self, dealt: Dealt, variance: BlockVariance | None, bar: Any) -> None:
        """Reads rows, and puts each into its queue."""
        if not len(dealt.rows):
            return
        at = 0
        rows, batches = self._begun(dealt.rows)
        with rows:
            for batch in batches:
                columns = self._columns.of(batch)
                end = at + len(columns[0])
                devices = dealt.devices[at:end]
                if len(self._queues) == 1:
                    self._queues[0].put(columns, None)
                else:
                    for place, queue in enumerate(self._queues):
                        queue.put(columns, np.flatnonzero(devices == place))
                if variance is not None and isinstance(self._rows, BlockRows):
                    variance.add(columns, self._rows.unit_of(dealt.rows[at:end]))
                if bar is not None:
                    bar.update(end - at)
                at = end


def _ahead(chunks: Iterator[Dealt]) -> Iterator[Dealt]:
    """The same, of which the next is made by another thread while one is read."""
    with ThreadPoolExecutor(1, "fastpipe-draw") as other:
        coming = other.submit(next, chunks, None)
        while (dealt := coming.result()) is not None:
            coming = other.submit(next, chunks, None)
            yield dealt


@memory_errors()
def fill(
    source: Reader | Source,
    devices: Sequence[Any],
    *,
    rows: SupportsIndex | None = None,
    occupancy: float = 0.8,
    device_memory: SupportsIndex | str | None = None,
    seed: SupportsIndex | None = None,
    replace: bool = False,
    method: Literal["exact", "block"] = "exact",
    share: float = 1.0,
    columns: Sequence[str] | None = None,
    dtype: npt.DTypeLike = "float32",
    order: Layout = "C",
    memory: SupportsIndex | str = "2GB",
    framework: Literal["torch", "cupy"] | None = None,
    index_cache: IndexCache = None,
    num_threads: SupportsIndex | Literal["auto"] | None = "auto",
    progress: bool = False,
) -> Fill:
    """Fills the memory of devices with random rows: each has other rows, as many as fit.

    All rows are drawn before any is read: they are a pure function of the seed. So files are gone through once for all
    devices, in their order, and each row is parsed once, into a buffer of its device; a full buffer is copied by a
    thread, and on a stream, of its device's own while the next one is filled. No more host memory is needed than
    `memory` allows.

    Args:
        source: CSV files, as in `read_csv`; or a reader of any source and of one rank, for everything that files may
            need to be said of: its features, its threads and its index are used, its order isn't.
        devices: GPUs, `"cuda:0"`, each once; or `"cpu"`, any number of times, for memory of this process.
        rows: of each device; None for as many as fit, or all there are.
        occupancy: the part of the free memory of a GPU that may be filled, or of `device_memory`. A device gets
            `floor(occupancy * free / row)` rows, and all get as many as the one with the fewest.
        device_memory: bytes of each device, as a number or with a unit: `"4GB"`. None for what is free on a GPU; for
            `"cpu"` it must be given, or `rows`.
        seed: 0 to 2^64 - 1; one is drawn by default, and shown by `Fill.seed`.
        replace: whether `Fill.refill` may put rows into devices that were there before: each refill is drawn of all
            rows then. Within a refill no two devices have a row in common, either way.
        method: "exact" draws row by row: what device `i` has is `fastpipe.sample(reader, rows, seed=seed, part=i)`.
            "block" draws units (stretches of 64 KiB of CSV files, blocks, row groups) and takes a share of the rows of
            each, so that only these units are read: for storage that is slow beside what is asked for. Neighbours are
            often alike: `Fill.design_effect` tells how much less such rows say.
        share: with `method="block"`, the part of the rows of a unit that are taken, above 0 up to 1. With a smaller one
            more is read for the same number of rows, and they say more.
        columns: features, in this order; None for all, which must be numbers then.
        dtype: of the arrays: float32, or any other number. NaN stands where there is no value.
        order: "C" for row after row in memory, "F" for column after column, which XGBoost and cuML like.
        memory: host memory that may be used, as a number of bytes or with a unit; `"cpu"` devices come on top.
        framework: whose arrays GPUs get: `"torch"` or `"cupy"`; None for PyTorch, or CuPy where that isn't installed.
            `"torch"` gives tensors for `"cpu"`, too.
        index_cache: as in `read_csv`, for files.
        num_threads: as in `read_csv`, for files.
        progress: whether to show a progress bar.

    Returns:
        What each device has, in the order of `devices`.

    Raises:
        DeviceError: if there is no such GPU.
        ImportError: if a GPU is named, and neither PyTorch nor CuPy is installed.
        OutOfMemoryError: if a device, or the system, has too little memory.
        SchemaError: if a column isn't there, or isn't of numbers.
        TypeError: if an argument is of the wrong type.
        ValueError: if there are too few rows, or an argument is out of range.
        FastpipeError: as reading does.

    Example:
        >>> import fastpipe.cuda
        >>> filled = fastpipe.cuda.fill("rides.csv", devices=["cpu", "cpu"], columns=["distance"], rows=300, seed=7)
        >>> filled[0].values.shape, len(set(filled[0].rows) & set(filled[1].rows))
        ((300, 1), 0)
        >>> for train, test in filled[0].folds(5, seed=1):
        ...     print(filled[0].values[train].shape, filled[0].values[test].shape)
        (240, 1) (60, 1)
        (240, 1) (60, 1)
        (240, 1) (60, 1)
        (240, 1) (60, 1)
        (240, 1) (60, 1)
    """
    kind = np.dtype(dtype)
    if kind.kind not in "biuf":
        raise ValueError(f"dtype is that of numbers, not {kind}")
    if order not in ("C", "F"):
        raise ValueError(f'order is "C" or "F", not {shown(order)}')
    if method not in ("exact", "block"):
        raise ValueError(f'method is "exact" or "block", not {shown(method)}')
    if not 0 < occupancy <= 1:
        raise ValueError(f"occupancy is above 0 and at most 1, not {occupancy}")
    if not 0 < share <= 1 or (share != 1 and method == "exact"):
        raise ValueError(f'share is above 0 and at most 1, and for method="block", not {share}')
    again = flag("replace", replace)
    allowed = memory_size("memory", memory)
    if allowed < _LEAST_MEMORY:
        raise ValueError(f"memory is at least {_LEAST_MEMORY} bytes, not {allowed}")
    chosen = seed_of(seed)
    targets = _devices(devices, framework)
    reader, read = _opened(source, columns, kind, index_cache, num_threads)
    units = counts_of(reader)
    total = int(units.sum(dtype=np.int64))
    count = _count(rows, targets, occupancy, device_memory, len(read.names) * kind.itemsize)
    drawn: FilledRows
    if method == "block":
        if rows is None:
            count = min(count, max(BlockRows.most(units, share) // len(targets), 1))
        drawn = BlockRows(units, count, len(targets), chosen, share, replace=again)
    else:
        if rows is None:
            count = min(count, total // len(targets))
        drawn = ExactRows(total, max(count, 1), len(targets), chosen, replace=again)
    drawn.check(0)
    # The units of a batch are open at the same time.
    part = share if method == "block" else count * len(targets) / max(total, 1)
    batch_size = min(max(int(_MOST_BATCH * part), _LEAST_BATCH), _MOST_BATCH)
    queues = _queues(targets, count, len(read.names), kind, order, allowed)
    filled = Fill(
        reader,
        read,
        drawn,
        count,
        chosen,
        queues,
        lambda queue: queue.device.matrix(count, len(read.names), kind, order),
        batch_size=batch_size,
        memory=allowed,
        progress=flag("progress", progress),
    )
    filled.refill()
    return filled


def _opened(
    source: Reader | Source,
    columns: Sequence[str] | None,
    dtype: np.dtype[Any],
    index_cache: IndexCache,
    num_threads: SupportsIndex | Literal["auto"] | None,
) -> tuple[Reader, Columns]:
    """A reader of what is given, and which columns its features become."""
    if isinstance(source, Reader):
        if index_cache is not None or num_threads != "auto":
            raise ValueError("index_cache and num_threads are for files: the reader has its own")
        wanted = None if columns is None else names("columns", columns)
        return source, Columns(source.features, wanted, dtype)
    # Files of other kinds come by their readers.
    from fastpipe.sources.csv._sampling import of_numbers

    reader, wanted = of_numbers(source, columns, dtype, index_cache, {"num_threads": num_threads})
    return reader, Columns(reader.features, wanted, dtype)


def _devices(devices: Sequence[Any], framework: str | None) -> list[Device]:
    if framework not in (None, "torch", "cupy"):
        raise ValueError(f'framework must be "torch" or "cupy", not {shown(framework)}')
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices is a list of devices; did you mean [{shown(devices)}]?")
    if not 0 < len(devices) <= _MOST_DEVICES:
        raise ValueError(f"devices are 1 to {_MOST_DEVICES}, not {len(devices)}")
    made = [HostDevice(framework) if str(device) == "cpu" else _gpu_device(device, framework) for device in devices]
    twice = [device.name for device in made if not isinstance(device, HostDevice)]
    if len(set(twice)) < len(twice):
        raise ValueError(f"each GPU is filled once, not {', '.join(twice)}")
    return made


def _gpu_device(device: Any, framework: str | None) -> Device:
    """A GPU by way of a framework, or of the one that is there."""
    from importlib.util import find_spec

    chosen = framework or next((name for name in ("torch", "cupy") if find_spec(name) is not None), None)
    if chosen is None:
        raise ImportError(
            f"{device} needs PyTorch built with CUDA, or CuPy: pip install 'fastpipe-data[torch]', or cupy-cuda13x for"
            ' CUDA 13. devices=["cpu"] needs neither'
        )
    try:
        if chosen == "torch":
            from fastpipe.cuda._torch import TorchDevice

            return TorchDevice(device)
        from fastpipe.cuda._cupy import CupyDevice

        return CupyDevice(device)
    except ImportError as error:
        install = "pip install 'fastpipe-data[torch]'" if chosen == "torch" else "pip install cupy-cuda13x, for CUDA 13"
        raise ImportError(f"{device} by way of {chosen} needs it: {install}") from error


def _count(
    rows: SupportsIndex | None,
    devices: list[Device],
    occupancy: float,
    device_memory: SupportsIndex | str | None,
    row_bytes: int,
) -> int:
    """Rows of each device, of as many as one could wish for."""
    if rows is not None:
        if device_memory is not None:
            raise ValueError("give rows or device_memory, not both")
        return within("rows", rows, 1, LARGEST_SAMPLE)
    given = None if device_memory is None else memory_size("device_memory", device_memory)
    fewest = LARGEST_SAMPLE
    for device in devices:
        room = device.free() if given is None else given
        if room is None:
            raise ValueError(f'how much memory "{device.name}" has is for you to say: rows=..., or device_memory="4GB"')
        fit = int(occupancy * room / row_bytes)
        if fit < 1:
            raise ValueError(
                f"no row of {row_bytes} bytes fits into {occupancy:g} of the {room} bytes that {device.name} has"
            )
        fewest = min(fewest, fit)
    return fewest


def _queues(
    devices: list[Device], rows: int, columns: int, dtype: np.dtype[Any], order: Layout, memory: int
) -> list[TransferQueue]:
    """What fills each device; takes the memory of all."""
    row_bytes = columns * dtype.itemsize
    most = min(memory // _PARTS // BUFFERS // len(devices), _LARGEST_BUFFER)
    buffer_rows = max(most // row_bytes, 1)
    for device in devices:
        device.hold(rows * row_bytes)
    return [TransferQueue(device, rows, columns, dtype, order, buffer_rows) for device in devices]
