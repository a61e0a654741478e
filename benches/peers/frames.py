"""Readers of frames: polars, polars-avro, jetliner, DuckDB, arrow-avro, and fastpipe where it makes frames.

Each is read as its documentation reads a file, the whole of it to one frame, and a batch at a time, each frame being
dropped before the next, so that no time goes to memory for a whole file. Neither gives NumPy arrays: that is in their
favour. The `Numpy` readers take that step too, the cheapest way that Arrow allows (see `arrow`).
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
"""The program around arrow-avro."""


class FrameWorker(BatchWorker):
    """A reader of one frame, by its `read_avro`, as its documentation reads a file."""

    def frames(self, job: Job) -> Iterator[Any]:
        """Yields what the file is read to: one frame, or frames of about a batch."""
        yield self.library.read_avro(job.path)

    def height(self, frame: Any) -> int:
        """Returns how many rows a frame has: of polars, or of pyarrow."""
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
    """Drops each frame before the next."""

    def read(self, job: Job) -> Pass:
        return Pass(sum(map(self.height, self.frames(job))))


class Numpy(FrameWorker):
    """Makes NumPy batches of the frames."""

    def read(self, job: Job) -> Pass:
        """Reads the file to NumPy batches and drops them."""
        rows = 0
        for n, frame in self.batches(job):
            rows += n
            _ = {column.name: self.column(column, frame) for column in job.columns}
        return Pass(rows)


class PolarsWorker(FrameWorker):
    """polars' own reader. It has no other way than the whole file."""

    packages = modules = ("polars",)


class PolarsAvroWorker(FrameWorker):
    """polars-avro."""

    packages = ("polars-avro", "polars")
    modules = ("polars_avro", "polars")


class PolarsAvroBatchesWorker(Batches, PolarsAvroWorker):
    """polars-avro, a batch at a time."""

    def frames(self, job: Job) -> Iterator[Any]:
        """Yields frames of `batch` rows.

        This is what `polars_avro.scan_avro` hands to polars. The public way, `scan_avro(...).collect_batches(...)`,
        goes through polars' streaming engine besides, which is slower here and takes from 1 to 3 times as long.
        """
        import polars
        from polars_avro._avro_rs import AvroSource

        for table in AvroSource([job.path], False, False).batch_iter(job.batch, None):
            yield polars.DataFrame(table)


class PolarsAvroNumpyWorker(Numpy, PolarsAvroBatchesWorker):
    """polars-avro, a batch at a time, to NumPy."""


class JetlinerWorker(FrameWorker):
    """jetliner."""

    packages = ("jetliner", "polars")
    modules = ("jetliner",)


class JetlinerBatchesWorker(Batches, JetlinerWorker):
    """jetliner, a batch at a time."""

    def frames(self, job: Job) -> Iterator[Any]:
        """Yields frames of at least `batch` rows: jetliner doesn't cut blocks."""
        with self.library.AvroReader(job.path, batch_size=job.batch) as reader:
            yield from reader


class JetlinerNumpyWorker(Numpy, JetlinerBatchesWorker):
    """jetliner, a batch at a time, to NumPy."""


class DuckdbWorker(FrameWorker):
    """DuckDB's avro extension, to an Arrow table, which takes it less time than its own conversion to NumPy."""

    packages = ("duckdb", "duckdb-extension-avro")
    modules = ("duckdb",)

    def __init__(self) -> None:
        import duckdb_extension_avro

        super().__init__()
        # DuckDB would fetch the extension; this package brings the file.
        home = Path(duckdb_extension_avro.__file__).parent
        self._connection = self.library.connect(config={"threads": "1"})
        self._connection.execute(f"LOAD '{next(home.rglob('avro.duckdb_extension'))}'")

    def _query(self, job: Job) -> Any:
        return self._connection.sql(f"SELECT * FROM read_avro('{job.path}')")

    def frames(self, job: Job) -> Iterator[Any]:
        """Reads the file to an Arrow table."""
        yield self._query(job).to_arrow_table()


class DuckdbBatchesWorker(Batches, DuckdbWorker):
    """DuckDB's avro extension, a record batch at a time."""

    def frames(self, job: Job) -> Iterator[Any]:
        """Yields record batches of about `batch` rows (DuckDB rounds to its vectors, of 2,048)."""
        yield from self._query(job).to_arrow_reader(job.batch)


class DuckdbNumpyWorker(Numpy, DuckdbBatchesWorker):
    """DuckDB's avro extension, a record batch at a time, to NumPy."""


class FastpipeTableWorker(FrameWorker):
    """fastpipe, to a table of pyarrow's, as its documentation makes one of a reader."""

    packages = ("fastpipe-data", "pyarrow")
    modules = ("fastpipe", "pyarrow")

    def _reader(self, job: Job) -> Any:
        return self.library.read_avro(job.path, batch_size=job.batch, num_threads=job.threads)

    def frames(self, job: Job) -> Iterator[Any]:
        import pyarrow

        with self._reader(job) as reader:
            yield pyarrow.table(reader)


class FastpipeRecordBatchesWorker(Batches, FastpipeTableWorker):
    """fastpipe, a record batch at a time."""

    def frames(self, job: Job) -> Iterator[Any]:
        import pyarrow

        with self._reader(job) as reader:
            yield from pyarrow.RecordBatchReader.from_stream(reader)


class FastpipePolarsWorker(FastpipeTableWorker):
    """fastpipe, to a frame of polars'."""

    packages = ("fastpipe-data", "polars")
    modules = ("fastpipe", "polars")

    def frames(self, job: Job) -> Iterator[Any]:
        import polars

        with self._reader(job) as reader:
            yield polars.DataFrame(reader)


class ArrowAvroWorker:
    """The crate arrow-avro, in a program that takes its time itself: see `benches/arrow_avro`."""

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
    """arrow-avro, each batch dropped before the next."""

    keeps = "drop"


class ArrowAvroViewsWorker(ArrowAvroBatchesWorker):
    """arrow-avro, strings as views, each batch dropped before the next."""

    strings = "views"
