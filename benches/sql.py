"""Compares reading a table of two million rows and ten columns from PostgreSQL and SQLite with other libraries.

fastpipe returns NumPy batches of 4,096 rows; its time includes planning. ConnectorX returns an Arrow table, split into
the same number of partitions by primary key. Ray Data's `read_sql` returns blocks, and pandas' `read_sql` frames of
65,536 rows. Each library runs in a separate process (`peers/sql.py`), which starts before anything is timed, and takes
turns with the others. All libraries may use every core. Each pass checks the number of rows and the sum of a column.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from harness import Bench
from harness.children import Side, can, postgres, race
from peers.job import Job

WANTED = {"connectorx": 1.0, "ray-sql": 3.0, "pandas-sql": 5.0}
BATCH = 4096
_SELECTED = """i AS id, (i * 7919) % 1000003 AS a, i % 100 AS b, i / 3.0 AS x, i / 7.0 AS y, i / 11.0 AS z,
    CASE WHEN i % 5 = 0 THEN NULL ELSE i END AS n, 'item ' || (i % 5000) AS s, 'user ' || i AS u"""


@contextmanager
def sqlite(rows: int) -> Iterator[str]:
    """Yields the URL of an SQLite file that contains the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.db"
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(
                "CREATE TABLE t (id INTEGER PRIMARY KEY, a INT NOT NULL, b INT NOT NULL, x REAL NOT NULL, "
                "y REAL NOT NULL, z REAL NOT NULL, n INT, s TEXT NOT NULL, u TEXT NOT NULL, d TEXT NOT NULL)"
            )
            numbers = f"WITH RECURSIVE g(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM g WHERE i < {rows})"
            connection.execute(f"{numbers} INSERT INTO t SELECT {_SELECTED}, '2026-01-01' FROM g")
        yield f"sqlite:///{path}"


@contextmanager
def postgresql(rows: int) -> Iterator[str | None]:
    """Yields the URL of a PostgreSQL database that contains the table, or None if PostgreSQL isn't installed."""
    with postgres() as server:
        if server is None:
            yield None
            return
        import psycopg

        url: str = server.new_database()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "CREATE TABLE t (id bigint PRIMARY KEY, a bigint NOT NULL, b bigint NOT NULL, "
                "x float8 NOT NULL, y float8 NOT NULL, z float8 NOT NULL, n bigint, s text NOT NULL, u text NOT NULL, "
                "d timestamp NOT NULL)"
            )
            moment = "timestamp '2026-01-01' + i * interval '1 second'"
            numbers = f"generate_series(1::bigint, {rows}) AS g(i)"
            connection.execute(f"INSERT INTO t SELECT {_SELECTED}, {moment} FROM {numbers}")
            connection.execute("VACUUM ANALYZE t")
        yield url


DATABASES: dict[str, Callable[[int], Any]] = {"postgres": postgresql, "sqlite": sqlite}


def main(bench: Bench) -> None:
    """Measures both databases."""
    rows = bench.args.rows
    columns = ("seconds|,.2f", "times fastpipe's|,.2f", "planning|", "wanted|g", "met")
    row = bench.table("database", "reader", *columns)
    for database in bench.args.databases:
        with DATABASES[database](rows) as url:
            if url is None:
                bench.say("the PostgreSQL server isn't installed")
                continue
            job = Job(url, "t", BATCH)
            readers = ("fastpipe-sql", *WANTED)
            turns = race(bench, [Side(reader, job, rows=rows) for reader in readers], [], enough=0.0, budget=1e9)
            for name in readers:
                if not can(turns, name) or not can(turns, readers[0]):
                    row(database, name, f"can't: {turns.errors.get(name)}")
                    continue
                seconds, times = turns.median(name) * rows, turns.ratio(name, readers[0]).median
                if name == readers[0]:
                    share = turns.median(name, lambda turn: turn.result["plan"]) / seconds
                    row(database, name, seconds, 1.0, f"{share:.0%}")
                else:
                    met = bench.target(f"{database}: {name}", times, least=WANTED[name])
                    row(database, name, seconds, times, None, WANTED[name], met)


if __name__ == "__main__":
    databases = ["postgres", "sqlite"]
    Bench("sql", __doc__, rounds=(5, 2), rows=(2_000_000, 20_000), databases=databases).run(main)
