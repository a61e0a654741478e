"""Readers of frames: polars, polars-avro, jetliner, DuckDB, arrow-avro, and fastpipe when it builds frames.

Each library reads a whole file to one frame, as its documentation shows. It also reads a batch at a time and drops each
frame before the next, which avoids the cost of memory for a whole file. Neither returns NumPy arrays, which favors the
peers. The `Numpy` readers include the conversion, in the cheapest way that Arrow allows (see `arrow`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import generate
from peers import arrow
from peers.batches import BatchWorker
from peers.job import CannotError, Job, Pass

ARROW_AVRO = Path(__file__).resolve().parent.parent / "arrow_avro"
"""The directory of the program that reads with arrow-avro."""


class FrameWorker(BatchWorker):
    """Reads one frame with the library's `read_avro`, as its documentation shows."""

    def frames(self, job: Job) -> Iterator[Any]:
        """Yields one frame for the whole file, or frames of about a batch."""
        yield self.library.read_avro(job.path)

    def height(self, frame: Any) -> int:
        """Returns the number of rows of a frame of polars or pyarrow."""
        rows: int = frame.height if hasattr(frame, "height") else frame.num_rows
        return rows

    def column(self, column: generate.Column, batch: Any) -> Any:
        values = batch[column.name]
        return arrow.to_numpy(column, values.to_arrow() if hasattr(values, "to_arrow") else values)

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        return ((self.height(frame), frame) for frame in self.frames(job))

    def read(self, job: Job) -> Pass:
        """Reads the file to a frame, which is dropped after the clock is stopped."""
        held = list(self.batches(job))
        return Pass(sum(n for n, _ in held), held)


class Batches(FrameWorker):
    """Mix-in that drops each frame before it reads the next."""

    def read(self, job: Job) -> Pass:
        return Pass(sum(map(self.height, self.frames(job))))


class Numpy(FrameWorker):
    """Mix-in that converts frames to NumPy batches."""

    def read(self, job: Job) -> Pass:
        """Reads the file to NumPy batches and drops them."""
        rows = 0
        for n, frame in self.batches(job):
            rows += n
            _ = {column.name: self.column(column, frame) for column in job.columns}
        return Pass(rows)


class PolarsWorker(FrameWorker):
    """Reads with polars, which can only read the whole file at once."""

    packages = modules = ("polars",)


class PolarsAvroWorker(FrameWorker):
    """Reads with polars-avro."""

    packages = ("polars-avro", "polars")
    modules = ("polars_avro", "polars")


class PolarsAvroBatchesWorker(Batches, PolarsAvroWorker):
    """Reads with polars-avro, a batch at a time."""

    def frames(self, job: Job) -> Iterator[Any]:
        """Yields frames of `batch` rows.

        This is the iterator that `polars_avro.scan_avro` passes to polars. The public way,
        `scan_avro(...).collect_batches(...)`, also runs polars' streaming engine and takes 1 to 3 times as long here.
        """
        import polars
        from polars_avro._avro_rs import AvroSource

        for table in AvroSource([job.path], False, False).batch_iter(job.batch, None):
            yield polars.DataFrame(table)


class PolarsAvroNumpyWorker(Numpy, PolarsAvroBatchesWorker):
    """Reads with polars-avro, a batch at a time, to NumPy."""


class JetlinerWorker(FrameWorker):
    """Reads with jetliner."""

    packages = ("jetliner", "polars")
    modules = ("jetliner",)


class JetlinerBatchesWorker(Batches, JetlinerWorker):
    """Reads with jetliner, a batch at a time."""

    def frames(self, job: Job) -> Iterator[Any]:
        """Yields frames of at least `batch` rows: jetliner doesn't split blocks."""
        with self.library.AvroReader(job.path, batch_size=job.batch) as reader:
            yield from reader


class JetlinerNumpyWorker(Numpy, JetlinerBatchesWorker):
    """Reads with jetliner, a batch at a time, to NumPy."""


class DuckdbWorker(FrameWorker):
    """Reads an Arrow table with DuckDB's avro extension, which is faster than DuckDB's conversion to NumPy."""

    packages = ("duckdb", "duckdb-extension-avro")
    modules = ("duckdb",)

    def __init__(self) -> None:
        import duckdb_extension_avro

        super().__init__()
        # DuckDB would download the extension. This package contains the file.
        home = Path(duckdb_extension_avro.__file__).parent
        self._connection = self.library.connect(config={"threads": "1"})
        self._connection.execute(f"LOAD '{next(home.rglob('avro.duckdb_extension'))}'")

    def _query(self, job: Job) -> Any:
        return self._connection.sql(f"SELECT * FROM read_avro('{job.path}')")

    def frames(self, job: Job) -> Iterator[Any]:
        """Reads the file to an Arrow table."""
        yield self._query(job).to_arrow_table()


class DuckdbBatchesWorker(Batches, DuckdbWorker):
    """Reads with DuckDB's avro extension, a record batch at a time."""

    def frames(self, job: Job) -> Iterator[Any]:
        """Yields record batches of about `batch` rows (DuckDB rounds to its vectors of 2,048)."""
        yield from self._query(job).to_arrow_reader(job.batch)


class DuckdbNumpyWorker(Numpy, DuckdbBatchesWorker):
    """Reads with DuckDB's avro extension, a record batch at a time, to NumPy."""


class FastpipeTableWorker(FrameWorker):
    """Reads a pyarrow table with fastpipe, as its documentation shows."""

    packages = ("fastpipe-data", "pyarrow")
    modules = ("fastpipe", "pyarrow")

    def _reader(self, job: Job) -> Any:
        return self.library.read_avro(job.path, batch_size=job.batch, num_threads=job.threads)

    def frames(self, job: Job) -> Iterator[Any]:
        import pyarrow

        with self._reader(job) as reader:
            yield pyarrow.table(reader)


class FastpipeRecordBatchesWorker(Batches, FastpipeTableWorker):
    """Reads with fastpipe, a record batch at a time."""

    def frames(self, job: Job) -> Iterator[Any]:
        import pyarrow

        with self._reader(job) as reader:
            yield from pyarrow.RecordBatchReader.from_stream(reader)


class FastpipePolarsWorker(FastpipeTableWorker):
    """Reads a polars frame with fastpipe."""

    packages = ("fastpipe-data", "polars")
    modules = ("fastpipe", "polars")

    def frames(self, job: Job) -> Iterator[Any]:
        import polars

        with self._reader(job) as reader:
            yield polars.DataFrame(reader)


class ArrowAvroWorker:
    """Reads with the crate arrow-avro, in a program that measures its own time (`benches/arrow_avro`)."""

    packages: tuple[str, ...] = ()
    keeps = "keep"
    strings = "copies"

    def __init__(self) -> None:
        self._program = subprocess.Popen(
            [ARROW_AVRO / "target" / "release" / "arrow-avro-bench"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self, job: Job) -> Pass:
        """Reads the file to record batches, which are dropped after the clock is stopped."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        print(job.batch, self.keeps, self.strings, job.path, file=self._program.stdin, flush=True)
        answer = self._program.stdout.readline().split()
        if len(answer) != 3 or answer[0] == "error":
            raise CannotError(" ".join(answer[1:]) or "the process died")
        return Pass(int(answer[0]), seconds=float(answer[1]), cpu=float(answer[2]))

    def check(self, job: Job) -> tuple[int, generate.Sums | None]:
        return self.read(job).rows, None


class ArrowAvroBatchesWorker(ArrowAvroWorker):
    """Reads with arrow-avro and drops each batch before the next."""

    keeps = "drop"


class ArrowAvroViewsWorker(ArrowAvroBatchesWorker):
    """Reads with arrow-avro, with strings as views, and drops each batch before the next."""

    strings = "views"
