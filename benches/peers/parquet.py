"""Readers of Parquet files: fastpipe, pyarrow, polars, Hugging Face's datasets and Ray Data.

A job's `shuffle` is the number of rows in the shuffle buffer, -1 for fastpipe's `shuffle=True`, or 0 for file order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import generate
from peers.batches import BatchWorker
from peers.job import Job, Pass

SEED = 1


def cpu_seconds() -> float:
    """Returns the CPU time of this process and its descendants: Ray decodes in other processes."""
    parents, spent = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The second field is a name in parentheses that may contain spaces.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # The process has exited.
                continue
            parents[int(folder.name)] = int(fields[1])
            spent[int(folder.name)] = sum(map(int, fields[11:15]))
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    others = sum(spent.get(pid, 0) for pid in own - {os.getpid()}) / os.sysconf("SC_CLK_TCK")
    return time.process_time() + others


def _leaf(array: Any) -> tuple[Any, int]:
    """Returns the numbers of an Arrow array, or the bytes of its strings, and its length."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type) or pa.types.is_string_view(array.type):
        array = array.cast(pa.large_string())
        ends = np.frombuffer(array.buffers()[1], "i8")[array.offset : array.offset + len(array) + 1]
        return np.frombuffer(array.buffers()[2], "u1")[ends[0] : ends[-1]], len(array)
    if pa.types.is_list(array.type) or pa.types.is_fixed_size_list(array.type) or pa.types.is_large_list(array.type):
        return array.flatten().to_numpy(zero_copy_only=False), len(array)
    return array.to_numpy(zero_copy_only=False), len(array)


def flat(value: Any) -> Any:
    """Returns the numbers of a column, or the bytes of its strings, for any reader."""
    if type(value).__module__.partition(".")[0] == "pyarrow":
        return _leaf(value)[0]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value.reshape(-1)
    # The files' statistics count empty lists as nulls, so lists and items may be masked.
    value = value.values if hasattr(value, "valid") else value
    if hasattr(value, "offsets"):  # fastpipe's Ragged and Strings
        items = value.values.values if hasattr(value.values, "valid") else value.values
        return items[value.offsets[0] : value.offsets[-1]]
    items = list(value)
    if items and isinstance(items[0], str):
        return np.frombuffer("".join(items).encode(), "u1")
    return np.concatenate([np.asarray(item) for item in items])


class ParquetWorker(BatchWorker):
    """The base class of readers of batches. A batch maps names to columns."""

    cpu = staticmethod(time.process_time)

    def read(self, job: Job) -> Pass:
        before = self.cpu()
        rows = sum(n for n, _ in self.batches(job))
        return Pass(rows, cpu=self.cpu() - before)

    def check(self, job: Job) -> tuple[int, generate.Sums | None]:
        import parquet_files

        sums, rows = generate.Sums(), 0
        for n, batch in self.batches(job):
            rows += n
            for name, dtype in parquet_files.LEAVES[job.dataset].items():
                sums.add(name, flat(batch[name]), dtype)
        return rows, sums


class FastpipeWorker(ParquetWorker):
    """Reads with fastpipe: one thread gathers rows and one reads row groups, on the same core."""

    packages = ("fastpipe-data", "pyarrow")
    modules = ("fastpipe", "pyarrow.parquet")

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        order: dict[str, Any] = {}
        if job.shuffle > 0:
            order = {"shuffle": "buffer", "shuffle_buffer": job.shuffle, "seed": SEED}
        elif job.shuffle:
            order = {"shuffle": True, "seed": SEED}
        options = {"batch_size": job.batch, "num_threads": job.threads, "num_fetches": job.threads} | order
        with self.library.read_parquet(job.path, **options) as reader:
            for batch in reader:
                yield len(next(iter(batch.values()))), batch


class PyarrowWorker(ParquetWorker):
    """Reads record batches with pyarrow, without conversion to NumPy."""

    packages = ("pyarrow",)
    modules = ("pyarrow.parquet",)

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        with self.library.ParquetFile(job.path) as file:
            for batch in file.iter_batches(job.batch, use_threads=False):
                yield batch.num_rows, batch


class TakeWorker(ParquetWorker):
    """Reads the whole table with pyarrow, and takes its rows in a random order, a batch at a time."""

    packages = ("pyarrow",)
    modules = ("pyarrow.parquet",)

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        table = self.library.read_table(job.path, use_threads=False).combine_chunks()
        order = np.random.default_rng(SEED).permutation(table.num_rows)
        for start in range(0, len(order), job.batch):
            batch = table.take(order[start : start + job.batch])
            yield batch.num_rows, batch


class PolarsWorker(ParquetWorker):
    """Reads one frame with polars. The frame is dropped after the clock is stopped."""

    packages = ("polars", "pyarrow")
    modules = ("polars",)

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        frame = self.library.read_parquet(job.path)
        yield frame.height, {name: frame[name].to_arrow() for name in frame.columns}

    def read(self, job: Job) -> Pass:
        before = self.cpu()
        frame = self.library.read_parquet(job.path)
        return Pass(frame.height, frame, cpu=self.cpu() - before)


class DatasetsWorker(ParquetWorker):
    """Streams with datasets, in the fastest way that its documentation shows."""

    packages = ("datasets", "pyarrow")
    modules = ("datasets",)

    def __init__(self) -> None:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(generate.CACHE / "huggingface")}
        super().__init__()
        # Otherwise it sleeps for 5 seconds after each pass over Parquet files, to avoid a crash of Arrow's threads.
        self.library.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        data = self.library.load_dataset("parquet", data_files=job.path, split="train", streaming=True)
        data = data.with_format("numpy")
        if job.shuffle:
            data = data.shuffle(seed=SEED, buffer_size=job.shuffle)
        for batch in data.batch(job.batch):
            yield len(next(iter(batch.values()))), batch


class RayWorker(ParquetWorker):
    """Reads with Ray Data on one CPU. Starting Ray isn't timed; starting its tasks is."""

    packages = ("ray", "pyarrow")
    modules = ("ray",)

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        super().__init__()
        self.library.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self.library.data.DataContext.get_current().enable_progress_bars = False

    cpu = staticmethod(cpu_seconds)

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        order = {"local_shuffle_buffer_size": job.shuffle, "local_shuffle_seed": SEED} if job.shuffle else {}
        data = self.library.data.read_parquet(job.path)
        for batch in data.iter_batches(batch_size=job.batch, batch_format="numpy", **order):
            yield len(next(iter(batch.values()))), batch
