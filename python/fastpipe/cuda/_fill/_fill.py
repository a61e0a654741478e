"""Filling devices with random rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import column_names, flag, memory_size, shown, within
from fastpipe._files._in_memory_files import File, Source, opened
from fastpipe._files._index_cache import IndexCache
from fastpipe._files._remote_files import BlockCache, StorageOptions, expander
from fastpipe._private_constructor import private_constructor
from fastpipe._progress import progress_bar
from fastpipe._reader.options import Options
from fastpipe._reader.ordering import seed_of
from fastpipe._reader.reader import Reader
from fastpipe._reader.sampling import LARGEST_SAMPLE, counts_of
from fastpipe.csv._drawing import Asked, BlockVariance, RowEstimate
from fastpipe.csv._line_buffer import LEAST_SHARE, LineBuffer, share_of
from fastpipe.csv._reading import SUFFIXES, DialectOptions, LosslessDialect
from fastpipe.cuda._fill._device_table import Columns, Filled
from fastpipe.cuda._fill._devices import Device, HostDevice, Layout
from fastpipe.cuda._fill._rows import BlockRows, ExactRows, Selection
from fastpipe.cuda._fill._sources import LEAST_BATCH, MOST_BATCH, BufferedRows, Part, RowSource, SelectedRows
from fastpipe.cuda._fill._transfer_queue import BUFFERS, HostRows, RowQueue, TransferQueue
from fastpipe.errors import UnsupportedError, memory_errors
from fastpipe.specs import Spec

_MOST_DEVICES = 1024

# Rows of a table between batches and devices, which should stay in the processor's cache.
_TABLE_ROWS = 8192

# Fraction of the allowed memory for buffers on their way to devices.
_PARTS = 8
_LARGEST_BUFFER = 32 << 20
# The minimum with which units and batches fit into memory.
_LEAST_MEMORY = 16 << 20


class Fill(Sequence[Filled]):
    """Devices that were filled with rows and can be refilled. Created by `fastpipe.cuda.fill`.

    `fill[0]` contains the rows of the first device.

    Attributes:
        num_rows: Number of rows on each device, in the order of devices.
        columns: Names of the columns.
        seed: Seed with which the rows are drawn.
    """

    @private_constructor("fastpipe.cuda.fill(...)")
    def _of(
        self,
        source: RowSource,
        columns: list[str],
        num_rows: list[int],
        seed: int,
        queues: Sequence[RowQueue],
        *,
        clustered: bool,
        progress: bool,
    ) -> None:
        self.num_rows = num_rows
        self.columns = columns
        self.seed = seed
        self._source, self._queues = source, queues
        self._clustered, self._progress = clustered, progress
        self._refill = -1
        # Only one thread at a time fills a device's buffers.
        self._filling = threading.Lock()
        self._seconds = 0.0
        self._design_effect: npt.NDArray[np.float64] | None = None
        self._filled = [
            Filled._of(queue.device, queue.matrix(), columns, self._numbers(place))
            for place, queue in enumerate(queues)
        ]

    @property
    def refills(self) -> int:
        """Number of times that devices were refilled."""
        return self._refill

    @property
    def design_effect(self) -> npt.NDArray[np.float64] | None:
        """Factor by which drawing blocks, not single rows, increases the variance of a column's mean over all devices.

        float64 `[columns]` with `method="block"` and "buffered", estimated from the rows of all devices like
        `CsvSample.design_effect`. None with `method="exact"`, for which it is 1.
        """
        return self._design_effect

    @property
    def estimate(self) -> RowEstimate | None:
        """Estimated number of rows in all files, with `method="buffered"`. Other methods count rows: None."""
        return self._source.estimate()

    @memory_errors("fill devices")
    def refill(self) -> None:
        """Replaces the rows of all devices with the next rows. Arrays stay in place, and index sets stay valid.

        Waits until devices have finished all work that was started on them. If several threads call this, one fills at
        a time.

        Raises:
            ValueError: If too few rows are left with `replace=False`. Devices keep their rows.
            OutOfMemoryError: If the system has too little memory.
            FastpipeError: If reading fails. Devices then contain a mixture of old and new rows, as after Ctrl-C. Refill
                them again.
        """
        with self._filling:
            self._source.check(self._refill + 1)
            self._run(self._refill + 1)

    def __getitem__(self, place: Any) -> Any:
        return self._filled[place]

    def __len__(self) -> int:
        return len(self._filled)

    def explain(self) -> str:
        """Returns a text that explains how long the last filling took and what it waited for."""
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
            f"  {hidden:.0%} of copying overlapped with reading; reading waited {waited:.2f} s for it\n{limit}"
        )

    def __repr__(self) -> str:
        devices = ", ".join(filled.device for filled in self._filled)
        return f"<fastpipe.cuda.Fill of {devices}: {sum(self.num_rows)} rows of {len(self.columns)} columns>"

    def _numbers(self, place: int) -> Callable[[], npt.NDArray[np.int64]]:
        return lambda: self._source.of(self._refill, place)

    def _run(self, refill: int) -> None:
        """Fills all devices."""
        started = time.perf_counter()
        variance = BlockVariance(len(self.columns)) if self._clustered else None
        for queue in self._queues:
            queue.device.settle()
        # From here on, devices contain a mixture of old and new rows.
        self._refill = refill
        bar = progress_bar(sum(self.num_rows), desc="filling") if self._progress else None
        try:
            for queue in self._queues:
                queue.begin()
            for part in self._source.parts(refill):
                self._put(part, variance)
                if bar is not None:
                    bar.update(len(part.devices))
            for queue in self._queues:
                queue.end()
        finally:
            for queue in self._queues:
                queue.close()
            if bar is not None:
                bar.close()
        self._design_effect = None if variance is None else variance.design_effect()
        self._seconds = time.perf_counter() - started

    def _put(self, part: Part, variance: BlockVariance | None) -> None:
        """Puts each row into the queue of its device."""
        if len(self._queues) == 1:
            self._queues[0].put(part.columns, None)
        elif by_rows := [queue for queue in self._queues if isinstance(queue, TransferQueue) and queue.order == "C"]:
            self._put_rows(part, by_rows)
        else:
            for place, queue in enumerate(self._queues):
                queue.put(part.columns, np.flatnonzero(part.devices == place))
        if variance is not None and part.units is not None:
            variance.add(part.columns, part.units)

    @staticmethod
    def _put_rows(part: Part, queues: Sequence[TransferQueue]) -> None:
        """Puts rows into row-major buffers by way of small tables, so that each column is read once for all devices."""
        for start in range(0, len(part.devices), _TABLE_ROWS):
            piece = slice(start, start + _TABLE_ROWS)
            devices = part.devices[piece]
            table = np.empty((len(devices), len(part.columns)), queues[0].dtype)
            for number, column in enumerate(part.columns):
                table[:, number] = column[piece]
            for place, queue in enumerate(queues):
                queue.put_rows(table, np.flatnonzero(devices == place))


@memory_errors("fill devices")
def fill(
    source: Reader | Source,
    devices: Sequence[Any],
    *,
    rows: int | Sequence[int] | None = None,
    occupancy: float | Sequence[float] = 0.8,
    device_memory: int | str | None = None,
    seed: int | None = None,
    replace: bool = False,
    method: Literal["exact", "block", "buffered"] = "exact",
    share: float | None = None,
    columns: str | Sequence[str] | None = None,
    dtype: npt.DTypeLike = "float32",
    overrides: Mapping[str, Spec] | None = None,
    order: Layout = "C",
    memory_limit: int | str = "2GB",
    framework: Literal["torch", "cupy"] | None = None,
    index_cache: IndexCache = None,
    storage_options: StorageOptions = None,
    block_cache: BlockCache = None,
    num_threads: int | Literal["auto"] | None = "auto",
    progress: bool = False,
    **dialect: Unpack[DialectOptions],
) -> Fill:
    """Fills the memory of devices with random rows. Each device gets different rows, until its memory is full.

    The rows are a pure function of the seed. They are read once for all devices, and each row is parsed once, directly
    into a buffer of its device. While one buffer is being filled, a thread and a stream of the device copy the other
    one. Host memory stays within `memory_limit`.

    Args:
        source: CSV files (a path, a glob, a directory, a URL of an object store or web server, or a list of these), or
            a reader of any source without ranks. A reader's features, threads and index are used, but its order isn't.
        devices: GPUs such as `"cuda:0"`, each at most once, or `"cpu"`, any number of times, for memory of this
            process.
        rows: Number of rows on each device, or a list with the number of each. Defaults to None, which fills the memory
            or uses up the dataset.
        occupancy: Fraction of a GPU's free memory, or of `device_memory`, to fill, above 0 and up to 1, or a list with
            the fraction of each device. A device holds `floor(occupancy * free / row)` rows. If the dataset has fewer
            rows, all devices hold fewer in proportion. Defaults to 0.8.
        device_memory: Bytes of each device, as a number or with a unit, such as `"4GB"`. Defaults to None, which uses
            the free memory of a GPU. `"cpu"` requires this argument or `rows`.
        seed: Seed of the draw, 0 to 2^64 - 1. Defaults to a random seed, which `Fill.seed` returns.
        replace: Whether `Fill.refill` may return rows that were on a device before, by drawing each refill from all
            rows. Within a refill, no two devices have a row in common in either case. Defaults to False.
        method: "exact" draws single rows: with equal counts, device `i` gets `reader.sample(rows, seed=seed, part=i)`.
            "block" draws units (CSV chunks of 64 KiB, Avro blocks, row groups) and takes a fraction of the rows of
            each, so only the drawn units are read. Use it if storage is slow compared with the amount of data.
            "buffered" does the same with cells of CSV files of up to 256 KiB, and needs no scan and no index: the first
            rows arrive at once, and a refill reads only what it draws. Files may grow, and rows that are appended after
            the files were opened are left out. Neighboring rows are often alike, and `Fill.design_effect` measures the
            loss of precision. Defaults to "exact".
        share: With "block" and "buffered", the fraction of the rows of a unit or cell to take, up to 1, and above 0
            ("block") or from 0.001 ("buffered"). A smaller fraction reads more data for the same number of rows, but
            the sample is more precise. Defaults to 1 for "block". For "buffered", the default is 0.25 for many rows,
            and less for few rows, so that they come from at least 64 cells.
        columns: Features to read, in this order: a list, or one name as a string. Defaults to None for all features,
            which must be numeric, or text that `overrides` reads as numbers.
        dtype: Numeric dtype of the arrays. NaN marks missing values. Defaults to float32. "string" reads columns of
            text into `"cpu"` devices: their arrays contain str objects, and `rows` must be given.
        overrides: Specs of some columns of CSV files, by name: `VocabularySpec` or `HashSpec` to read text as indices.
            Defaults to None. Not supported for readers, which have such specs in their features.
        order: "C" stores row after row in memory, "F" column after column, which suits XGBoost and cuML. Defaults to
            "C".
        memory_limit: Maximum host memory to use, as a number of bytes or with a unit, at least 16 MiB. The memory of
            `"cpu"` devices isn't included. Defaults to "2GB".
        framework: Framework of the arrays on GPUs, `"torch"` or `"cupy"`. Defaults to None, which chooses PyTorch, or
            CuPy if PyTorch isn't installed. With `"torch"`, `"cpu"` devices contain tensors as well.
        index_cache: Directory in which the indexes of files are kept, or True for the user's cache
            directory. Defaults to None, which keeps none. Not supported for readers.
        storage_options: How to reach the object store of a URL, such as `{"region": "eu-west-1"}`, in the words of
            fsspec or polars. Not supported for readers. Defaults to None: the environment's credentials and settings.
        block_cache: Folder on a local disk and its size, such as `("/nvme/fastpipe", "500GB")`, which keeps bytes of
            URLs for later refills and other processes. Paths of local files ignore it. Not supported for readers.
            Defaults to None: no cache.
        num_threads: Number of threads that read files, 1 to 4096, or `"auto"`. Not supported for readers. Defaults to
            "auto".
        progress: Whether to show a progress bar. Defaults to False.
        **dialect: `delimiter`, `quote`, `header`, `comment`, `decimal`, `null_values` and `on_ragged` of CSV files, as
            in `read_csv`. Not supported for readers. With "buffered", `on_ragged` must be "error".

    Returns:
        The filled devices, in the order of `devices`.

    Raises:
        DeviceError: If a GPU isn't available.
        ImportError: If `devices` contains a GPU, and neither PyTorch nor CuPy is installed.
        OutOfMemoryError: If a device or the system has too little memory.
        SchemaError: If a column doesn't exist or isn't numeric.
        TypeError: If an argument has the wrong type.
        UnsupportedError: If a GPU is to hold text.
        ValueError: If there are too few rows, or an argument is out of range.
        FastpipeError: If reading fails.

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
    text = isinstance(dtype, str) and dtype == "string"
    kind = np.dtype(object if text else dtype)
    if not text and kind.kind not in "biuf":
        raise ValueError(f'dtype must be numeric or "string"; got {kind}')
    if order not in ("C", "F"):
        raise ValueError(f'order must be "C" or "F"; got {shown(order)}')
    if method not in ("exact", "block", "buffered"):
        raise ValueError(f'method must be "exact", "block" or "buffered"; got {shown(method)}')
    if share is not None and method == "exact":
        raise ValueError('share is for method="block" and "buffered": method="exact" draws single rows')
    part = share_of(share, least=LEAST_SHARE if method == "buffered" else 0.0)
    again = flag("replace", replace)
    allowed = memory_size("memory_limit", memory_limit)
    if allowed < _LEAST_MEMORY:
        raise ValueError(f"memory_limit must be at least {_LEAST_MEMORY} bytes; got {allowed}")
    chosen = seed_of(seed)
    targets = _devices(devices, framework)
    if text:
        _check_text(targets, framework, rows)
    wanted = _wanted_rows(rows, occupancy, device_memory, len(targets))
    found = _found(source, storage_options, block_cache)
    drawn: RowSource
    if method == "buffered":
        memory = allowed // 2
        buffer = _line_buffer(found, columns, kind, overrides, chosen, part, memory, index_cache, num_threads, dialect)
        read = Columns(buffer.features, None, kind)
        counts = wanted(targets, len(read.names) * kind.itemsize, None)
        buffer.plan(sum(counts))
        drawn = BufferedRows(buffer, read, counts, chosen, replace=again)
    else:
        reader, read = _opened(found, columns, kind, overrides, index_cache, num_threads, dialect)
        part = 1.0 if part is None else part
        units = counts_of(reader)
        total = int(units.sum(dtype=np.int64))
        most = BlockRows.most(units, part) if method == "block" else total
        counts = wanted(targets, len(read.names) * kind.itemsize, most)
        selection: Selection = ExactRows(total, counts, chosen, replace=again)
        if method == "block":
            selection = BlockRows(units, counts, chosen, part, replace=again)
        # A batch keeps all of its units open at the same time.
        close = part if method == "block" else sum(counts) / max(total, 1)
        batch_size = min(max(int(MOST_BATCH * close), LEAST_BATCH), MOST_BATCH)
        drawn = SelectedRows(reader, read, selection, batch_size, allowed)
    drawn.check(0)
    queues = _queues(targets, counts, len(read.names), kind, order, allowed)
    clustered = method != "exact" and not text
    filled = Fill._of(
        drawn, read.names, counts, chosen, queues, clustered=clustered, progress=flag("progress", progress)
    )
    filled.refill()
    return filled


def _check_text(devices: list[Device], framework: str | None, rows: int | Sequence[int] | None) -> None:
    """Raises an error if a device can't hold text."""
    others = [device.name for device in devices if not isinstance(device, HostDevice)]
    if others or framework is not None:
        what = others[0] if others else "a tensor or array of a GPU framework"
        raise UnsupportedError(
            f"{what} can't hold text: read it as indices with a VocabularySpec or HashSpec in overrides=, or fill "
            '"cpu" without framework='
        )
    if rows is None:
        raise ValueError('the size of text is unknown: with dtype="string", pass rows=')


def _found(source: Reader | Source, storage_options: StorageOptions, block_cache: BlockCache) -> Reader | list[File]:
    """Returns the files of the source, or the source itself if it is a reader."""
    if not isinstance(source, Reader):
        return opened(source, SUFFIXES, expander(storage_options, block_cache))
    if storage_options is not None or block_cache is not None:
        raise ValueError("storage_options and block_cache are for files only: set them when you create the reader")
    return source


def _opened(
    source: Reader | list[File],
    columns: str | Sequence[str] | None,
    dtype: np.dtype[Any],
    overrides: Mapping[str, Spec] | None,
    index_cache: IndexCache,
    num_threads: int | Literal["auto"] | None,
    dialect: DialectOptions,
) -> tuple[Reader, Columns]:
    """Returns a reader of the source, and the columns that its features contain."""
    if isinstance(source, Reader):
        if index_cache is not None or num_threads != "auto" or overrides or dialect:
            raise ValueError(
                "index_cache, num_threads, overrides and the dialect are for files only: set them when you create the "
                "reader"
            )
        return source, Columns(source.features, column_names(columns), dtype)
    # Files of other formats need a reader.
    options: Options = {"num_threads": num_threads}
    asked = Asked.of(1, 0, LosslessDialect.given(dialect), columns, _spec_dtype(dtype), "C", options, overrides)
    asked, data, wanted = asked.opened(source, index_cache)
    reader = asked.reader(data)
    return reader, Columns(reader.features, wanted, dtype)


def _spec_dtype(dtype: np.dtype[Any]) -> npt.DTypeLike:
    return "string" if dtype.kind == "O" else dtype


def _line_buffer(
    source: Reader | list[File],
    columns: str | Sequence[str] | None,
    dtype: np.dtype[Any],
    overrides: Mapping[str, Spec] | None,
    seed: int,
    share: float | None,
    memory: int,
    index_cache: IndexCache,
    num_threads: int | Literal["auto"] | None,
    dialect: DialectOptions,
) -> LineBuffer:
    """Returns the buffer that draws rows of CSV files."""
    if isinstance(source, Reader):
        raise TypeError('method="buffered" reads CSV files: pass their paths, or use method="block" for a reader')
    if index_cache is not None:
        raise ValueError('method="buffered" needs no index: leave out index_cache')
    lines = LosslessDialect.given(dialect)
    if lines.on_ragged != "error":
        raise ValueError('on_ragged must be "error" with method="buffered": use method="exact" to skip rows')
    options: Options = {"num_threads": num_threads, "memory_limit": memory}
    asked = Asked.of(1, seed, lines, columns, _spec_dtype(dtype), "C", options, overrides)
    return LineBuffer(source, asked, share)


def _devices(devices: Sequence[Any], framework: str | None) -> list[Device]:
    if framework not in (None, "torch", "cupy"):
        raise ValueError(f'framework must be "torch" or "cupy"; got {shown(framework)}')
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise TypeError(f"devices must be a list; did you mean [{shown(devices)}]?")
    if not 0 < len(devices) <= _MOST_DEVICES:
        raise ValueError(f"devices must list 1 to {_MOST_DEVICES} devices; got {len(devices)}")
    made = [HostDevice(framework) if str(device) == "cpu" else _gpu_device(device, framework) for device in devices]
    twice = [device.name for device in made if not isinstance(device, HostDevice)]
    if len(set(twice)) < len(twice):
        raise ValueError(f"devices must list each GPU once; got {', '.join(twice)}")
    return made


def _gpu_device(device: Any, framework: str | None) -> Device:
    """Returns a GPU that uses the framework, or the first framework that is installed."""
    from importlib.util import find_spec

    chosen = framework or next((name for name in ("torch", "cupy") if find_spec(name) is not None), None)
    if chosen is None:
        raise ImportError(
            f"{device} requires PyTorch built with CUDA, or CuPy: pip install 'fastpipe-data[torch]', or cupy-cuda13x"
            ' for CUDA 13. devices=["cpu"] needs neither'
        )
    try:
        if chosen == "torch":
            from fastpipe.cuda._torch import TorchDevice

            return TorchDevice(device)
        from fastpipe.cuda._cupy import CupyDevice

        return CupyDevice(device)
    except ImportError as error:
        install = "pip install 'fastpipe-data[torch]'" if chosen == "torch" else "pip install cupy-cuda13x, for CUDA 13"
        raise ImportError(f"{device} requires {chosen}, which is not installed: {install}") from error


def _wanted_rows(
    rows: int | Sequence[int] | None,
    occupancy: float | Sequence[float],
    device_memory: int | str | None,
    devices: int,
) -> Callable[[list[Device], int, int | None], list[int]]:
    """Checks the arguments, and returns a function that returns the number of rows of each device.

    The function takes the devices, the bytes of a row and the number of rows in the dataset, if it is known.
    """
    parts = _each("occupancy", occupancy, devices)
    for part in parts:
        if not isinstance(part, int | float) or not 0 < part <= 1:
            raise ValueError(f"occupancy must be above 0 and at most 1; got {shown(part)}")
    if rows is not None:
        if device_memory is not None:
            raise ValueError("pass either rows or device_memory, not both")
        given = [within("rows", count, 1, LARGEST_SAMPLE) for count in _each("rows", rows, devices)]
        return lambda *_: given
    room = None if device_memory is None else memory_size("device_memory", device_memory)
    return lambda targets, row_bytes, most: _fitting(targets, parts, room, row_bytes, most)


def _each(name: str, value: Any, devices: int) -> list[Any]:
    """Returns the value of each device."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * devices
    if len(value) != devices:
        raise ValueError(f"{name} must have an entry for each of {devices} devices; got {len(value)}")
    return list(value)


def _fitting(
    devices: list[Device], occupancy: list[float], device_memory: int | None, row_bytes: int, most: int | None
) -> list[int]:
    """Returns the number of rows that fit on each device, or fewer if the dataset has fewer."""
    counts = []
    for device, part in zip(devices, occupancy, strict=True):
        room = device.free() if device_memory is None else device_memory
        if room is None:
            raise ValueError(f'the free memory of "{device.name}" is unknown: pass rows=..., or device_memory="4GB"')
        fit = min(int(part * room / row_bytes), LARGEST_SAMPLE)
        if fit < 1:
            raise ValueError(
                f"no row of {row_bytes} bytes fits into {part:g} of the {room} bytes that {device.name} has"
            )
        counts.append(fit)
    if most is not None and sum(counts) > most:
        counts = [max(count * most // sum(counts), 1) for count in counts]
    return counts


def _queues(
    devices: list[Device], rows: list[int], columns: int, dtype: np.dtype[Any], order: Layout, memory: int
) -> Sequence[RowQueue]:
    """Allocates the memory of all devices, and returns the queue that fills each device."""
    if dtype.kind == "O":
        return [HostRows(device, count, columns, order) for device, count in zip(devices, rows, strict=True)]
    row_bytes = columns * dtype.itemsize
    most = min(memory // _PARTS // BUFFERS // len(devices), _LARGEST_BUFFER)
    buffer_rows = max(most // row_bytes, 1)
    for device, count in zip(devices, rows, strict=True):
        device.hold(count * row_bytes)
    return [
        TransferQueue(device, count, columns, dtype, order, buffer_rows)
        for device, count in zip(devices, rows, strict=True)
    ]
