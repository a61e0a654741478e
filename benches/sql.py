"""Reading a table of two million rows of ten columns from PostgreSQL and SQLite, beside what others offer.

    python benches/sql.py [--databases postgres,sqlite] [--rounds 5] [--quick]

fastpipe makes NumPy batches of 4,096 rows, planning included; ConnectorX makes an Arrow table, cut into as many
partitions by the primary key; Ray Data's `read_sql` makes blocks, and pandas' `read_sql` frames of 65,536 rows. Each
has a process of its own, started before anything is timed, and takes turns with the others. All may use both cores.
What each has read is checked by the number of rows and the sum of a column.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = 2_000_000
PARTITIONS = 8
BATCH = 4096
WANTED = {"connectorx": 1.0, "ray": 3.0, "pandas": 5.0}
SQL = "SELECT * FROM t"
_SELECTED = """i AS id, (i * 7919) % 1000003 AS a, i % 100 AS b, i / 3.0 AS x, i / 7.0 AS y, i / 11.0 AS z,
    CASE WHEN i % 5 = 0 THEN NULL ELSE i END AS n, 'item ' || (i % 5000) AS s, 'user ' || i AS u"""


def fill_sqlite(path: Path, rows: int) -> str:
    """Makes the table; its URL."""
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE t (id INTEGER PRIMARY KEY, a INT NOT NULL, b INT NOT NULL, x REAL NOT NULL, y REAL NOT NULL, "
            "z REAL NOT NULL, n INT, s TEXT NOT NULL, u TEXT NOT NULL, d TEXT NOT NULL)"
        )
        numbers = f"WITH RECURSIVE g(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM g WHERE i < {rows})"
        connection.execute(f"{numbers} INSERT INTO t SELECT {_SELECTED}, '2026-01-01' FROM g")
    connection.close()
    return f"sqlite:///{path}"


def fill_postgres(url: str, rows: int) -> str:
    """Makes the table; its URL."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE t (id bigint PRIMARY KEY, a bigint NOT NULL, b bigint NOT NULL, x float8 NOT NULL, "
            "y float8 NOT NULL, z float8 NOT NULL, n bigint, s text NOT NULL, u text NOT NULL, d timestamp NOT NULL)"
        )
        moment = "timestamp '2026-01-01' + i * interval '1 second'"
        numbers = f"generate_series(1::bigint, {rows}) AS g(i)"
        connection.execute(f"INSERT INTO t SELECT {_SELECTED}, {moment} FROM {numbers}")
        connection.execute("VACUUM ANALYZE t")
    return url


# Each returns the rows and the sum of b; `plan` how long planning took.


def fastpipe_(url: str) -> dict[str, Any]:
    import fastpipe

    begun = time.perf_counter()
    reader = fastpipe.read_sql(SQL, url, partitions=PARTITIONS, batch_size=BATCH)
    planned = time.perf_counter() - begun
    rows = total = 0
    for batch in reader:
        rows += len(batch["b"])
        total += int(batch["b"].sum())
    return {"rows": rows, "sum": total, "plan": planned}


def connectorx_(url: str) -> dict[str, Any]:
    import connectorx
    import pyarrow.compute

    url = url.replace("sqlite:///", "sqlite://")
    how = {"partition_on": "id", "partition_num": PARTITIONS, "return_type": "arrow"}
    table = connectorx.read_sql(url, SQL, **how)
    return {"rows": table.num_rows, "sum": pyarrow.compute.sum(table["b"]).as_py()}


def ray_(url: str) -> dict[str, Any]:
    import ray

    path = url.removeprefix("sqlite:///")

    def connect() -> Any:
        if url.startswith("sqlite"):
            return sqlite3.connect(path)
        import psycopg

        return psycopg.connect(url)

    found = ray.data.read_sql(SQL, connect)
    rows = total = 0
    for batch in found.iter_batches(batch_size=BATCH, batch_format="numpy"):
        rows += len(batch["b"])
        total += int(batch["b"].sum())
    return {"rows": rows, "sum": total}


def pandas_(url: str) -> dict[str, Any]:
    import pandas
    import sqlalchemy

    engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    rows = total = 0
    with engine.connect().execution_options(stream_results=True) as connection:
        for frame in pandas.read_sql(SQL, connection, chunksize=65_536):
            rows += len(frame)
            total += int(frame["b"].sum())
    return {"rows": rows, "sum": total}


READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "fastpipe": fastpipe_,
    "connectorx": connectorx_,
    "ray": ray_,
    "pandas": pandas_,
}


def serve(name: str) -> None:
    """Answers requests, URLs, until there are no more."""
    if name == "ray":
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        ray.data.DataContext.get_current().enable_progress_bars = False
    READERS[name]
    for line in sys.stdin:
        begun = time.perf_counter()
        found = READERS[name](line.strip())
        print(json.dumps(found | {"seconds": time.perf_counter() - begun}), flush=True)


class Peer:
    """A reader's process."""

    def __init__(self, name: str, python: str) -> None:
        command = [python, __file__, "--serve", name]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def read(self, url: str) -> dict[str, Any]:
        """Reads the table once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(url + "\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("{"):
            if not line:
                raise RuntimeError("a reader's process ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()


def compare(database: str, url: str, rows: int, rounds: int, interpreter: Callable[[str], str]) -> None:
    """Prints a table of one database."""
    peers = {name: Peer(name, interpreter(name)) for name in READERS}
    taken: dict[str, list[float]] = {name: [] for name in READERS}
    plans = []
    expected = sum(i % 100 for i in range(1, rows + 1))
    try:
        for turn in range(rounds + 1):
            for name, peer in list(peers.items())[:: -1 if turn % 2 else 1]:
                found = peer.read(url)
                if (found["rows"], found["sum"]) != (rows, expected):
                    raise RuntimeError(f"{name} read {found}, not {rows} rows that sum up to {expected}")
                if turn:
                    taken[name].append(found["seconds"])
                    plans += [found["plan"]] if "plan" in found else []
    finally:
        for peer in peers.values():
            peer.close()
    ours = taken["fastpipe"]
    share = statistics.median(plans) / statistics.median(ours)
    for name, seconds in taken.items():
        ratio = statistics.median(b / a for a, b in zip(ours, seconds, strict=True))
        wanted = WANTED.get(name)
        mark = "" if wanted is None else "yes" if ratio >= wanted else "no"
        note = f"{share:.0%} of it planning" if name == "fastpipe" else f"wanted {wanted}"
        print(f"| {database} | {name} | {statistics.median(seconds):.2f} | {ratio:.2f} | {note} | {mark} |", flush=True)


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--databases", default="postgres,sqlite")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, two rounds")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    sys.path.insert(0, str(ROOT / "tests"))
    import servers  # type: ignore[import-not-found]
    from peers.environments import interpreter

    def python(name: str) -> str:
        return interpreter(None if name == "fastpipe" else "sql", lambda text: print(text, file=sys.stderr))

    rows, rounds = (ROWS // 10, 2) if arguments.quick else (ROWS, arguments.rounds)
    print(f"{rows:,} rows of 10 columns, {PARTITIONS} partitions, {rounds} rounds\n")
    print("| database | reader | seconds | times fastpipe's | | met |\n|---|---|--:|--:|---|---|")
    for database in arguments.databases.split(","):
        if database == "sqlite":
            with tempfile.TemporaryDirectory() as folder:
                compare(database, fill_sqlite(Path(folder) / "t.db", rows), rows, rounds, python)
            continue
        programs = servers.postgres_programs()
        if programs is None:
            print("PostgreSQL's server isn't installed")
            continue
        server = servers.Postgres(programs)
        try:
            compare(database, fill_postgres(server.new_database(), rows), rows, rounds, python)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
