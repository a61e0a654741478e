"""Readers of a database table: fastpipe, ConnectorX, Ray Data and pandas. All may use every core.

A job's `path` is the URL of the database. The table has a column `b`, which is `id % 100` for ids from 1. Each reader
computes its sum while it is timed; a wrong sum is an error.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Any

import generate
from peers.batches import BatchWorker
from peers.job import CannotError, Job, Pass

PARTITIONS = 8
SQL = "SELECT * FROM t"


class SqlWorker(BatchWorker):
    """The base class of readers of the table."""

    def table(self, job: Job) -> tuple[int, int, dict[str, float]]:
        """Reads the table. Returns the number of rows, the sum of `b`, and notes."""
        raise NotImplementedError

    def read(self, job: Job) -> Pass:
        """Reads the table, and checks the sum."""
        rows, total, notes = self.table(job)
        hundreds, rest = divmod(rows, 100)
        if total != hundreds * 4950 + rest * (rest + 1) // 2:
            raise CannotError(f"{rows:,} rows that sum up to {total:,}")
        return Pass(rows, notes=notes)

    def check(self, job: Job) -> tuple[int, generate.Sums | None]:
        return self.read(job).rows, None


class FastpipeWorker(SqlWorker):
    """Reads NumPy batches with fastpipe. Planning is timed, too."""

    packages = ("fastpipe-data", "pyarrow")
    modules = ("fastpipe",)

    def table(self, job: Job) -> tuple[int, int, dict[str, float]]:
        begun = time.perf_counter()
        reader = self.library.read_sql(SQL, job.path, num_partitions=PARTITIONS, batch_size=job.batch)
        planned = time.perf_counter() - begun
        rows = total = 0
        for batch in reader:
            rows += len(batch["b"])
            total += int(batch["b"].sum())
        return rows, total, {"plan": planned}


class ConnectorxWorker(SqlWorker):
    """Reads an Arrow table with ConnectorX, partitioned by the primary key."""

    packages = ("connectorx", "pyarrow")
    modules = ("connectorx",)

    def table(self, job: Job) -> tuple[int, int, dict[str, float]]:
        import pyarrow.compute

        how = {"partition_on": "id", "partition_num": PARTITIONS, "return_type": "arrow"}
        table = self.library.read_sql(job.path.replace("sqlite:///", "sqlite://"), SQL, **how)
        return table.num_rows, pyarrow.compute.sum(table["b"]).as_py(), {}


class RayWorker(SqlWorker):
    """Reads NumPy batches with Ray Data."""

    packages = modules = ("ray",)

    def __init__(self) -> None:
        super().__init__()
        self.library.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        self.library.data.DataContext.get_current().enable_progress_bars = False

    def table(self, job: Job) -> tuple[int, int, dict[str, float]]:
        url = job.path

        def connect() -> Any:
            if url.startswith("sqlite"):
                return sqlite3.connect(url.removeprefix("sqlite:///"))
            import psycopg

            return psycopg.connect(url)

        rows = total = 0
        for batch in self.library.data.read_sql(SQL, connect).iter_batches(batch_size=job.batch, batch_format="numpy"):
            rows += len(batch["b"])
            total += int(batch["b"].sum())
        return rows, total, {}


class PandasWorker(SqlWorker):
    """Reads frames of 65,536 rows with pandas."""

    packages = ("pandas", "sqlalchemy")
    modules = ("pandas",)

    def table(self, job: Job) -> tuple[int, int, dict[str, float]]:
        import sqlalchemy

        engine = sqlalchemy.create_engine(job.path.replace("postgresql://", "postgresql+psycopg://"))
        rows = total = 0
        with engine.connect().execution_options(stream_results=True) as connection:
            for frame in self.library.read_sql(SQL, connection, chunksize=65_536):
                rows += len(frame)
                total += int(frame["b"].sum())
        return rows, total, {}
