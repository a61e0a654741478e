"""Databases with the same tables for SQL tests. The oracle is each database's own driver."""

from __future__ import annotations

import datetime
import decimal
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import psycopg

import fastpipe

TEXTS = ["", "a", "A", "ä", "b ", "'; DROP TABLE t; --", '" OR 1=1', "\\", "%s", "?", ":x", "$1", "zß", "NULL"]

# Column types in PostgreSQL and DuckDB, and in SQLite.
COLUMNS = {
    "id": ("bigint PRIMARY KEY", "INTEGER PRIMARY KEY"),
    "k": ("bigint", "INT"),
    "z": ("int", "INT"),
    "g": ("text", "TEXT COLLATE NOCASE"),
    "x": ("double precision", "REAL"),
    "n": ("decimal(12, 2)", "REAL"),
    "d": ("date", "TEXT"),
    "ts": ("timestamp with time zone", "TEXT"),
    "f": ("boolean", "BOOLEAN"),
    "b": ("bytes", "BLOB"),
}


class Database(NamedTuple):
    """A database with tables t and u.

    Attributes:
        name: Name of the engine.
        connection: Connection in the form that `read_sql` accepts.
        run: Runs a query with the database's own driver.
        close: Closes the driver's connection.
    """

    name: str
    connection: Any
    run: Callable[[str], list[tuple[Any, ...]]]
    close: Callable[[], None]


def rows_of_t(rows: int) -> list[tuple[Any, ...]]:
    """Returns rows with many NULLs, ties, duplicates except for the key, and values that look like SQL."""
    draw = random.Random(7)
    zone = datetime.UTC
    found = []
    for i in range(rows):
        values = (
            draw.choice([None, 1, 2, 3, -5, 2**31 - 1]),
            min(int(draw.paretovariate(0.4)), 1000) if draw.random() > 0.2 else None,
            draw.choice([None, *TEXTS]),
            draw.choice([None, 0.0, -0.0, 1.5, 1e300, -2.25, float("inf")]),
            draw.choice([None, decimal.Decimal("0.00"), decimal.Decimal("-3.25"), decimal.Decimal("9999999999.99")]),
            draw.choice([None, datetime.date(1970, 1, 1), datetime.date(2026, 2, 28)]),
            draw.choice([None, datetime.datetime(2026, 3, 29, 1, i % 60, tzinfo=zone)]),
            draw.choice([None, True, False]),
            draw.choice([None, b"", b"\0a", b"\xff'"]),
        )
        found.append((i * 3, *values))
    return found


def rows_of_u() -> list[tuple[Any, ...]]:
    """Returns rows to join with, some of them twice."""
    return [(i, [1, 2, 2, 3, None][i % 5], TEXTS[i % len(TEXTS)]) for i in range(20)]


def _create(kind: int, of_bytes: str) -> list[str]:
    columns = ", ".join(f"{name} {types[kind].replace('bytes', of_bytes)}" for name, types in COLUMNS.items())
    text = "TEXT COLLATE NOCASE" if kind else "text"
    return [f"CREATE TABLE t ({columns})", f"CREATE TABLE u (id int, k int, name {text})"]


def sqlite(path: Path, rows: int = 60, *, wal: bool = True) -> Database:
    """Creates an SQLite database."""

    def stored(values: Iterable[Any]) -> list[Any]:
        texts = (datetime.date, datetime.datetime)
        return [str(v) if isinstance(v, texts) else float(v) if isinstance(v, decimal.Decimal) else v for v in values]

    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute(f"PRAGMA journal_mode = {'wal' if wal else 'delete'}")
    for statement in _create(1, "BLOB"):
        connection.execute(statement)
    marks = ", ".join("?" * len(COLUMNS))
    connection.executemany(f"INSERT INTO t VALUES ({marks})", [stored(row) for row in rows_of_t(rows)])
    connection.executemany("INSERT INTO u VALUES (?, ?, ?)", rows_of_u())
    connection.commit()
    return Database("sqlite", f"sqlite:///{path}", lambda query: connection.execute(query).fetchall(), connection.close)


def postgres(url: str, rows: int = 60) -> Database:
    """Creates a PostgreSQL database."""
    connection = psycopg.connect(url, autocommit=True)
    for statement in _create(0, "bytea"):
        connection.execute(statement)
    cursor = connection.cursor()
    marks = ", ".join(["%s"] * len(COLUMNS))
    cursor.executemany(f"INSERT INTO t VALUES ({marks})", rows_of_t(rows))
    cursor.executemany("INSERT INTO u VALUES (%s, %s, %s)", rows_of_u())
    connection.execute("UPDATE t SET x = 'NaN' WHERE id % 9 = 0")
    connection.execute("SET TimeZone = UTC")
    return Database("postgres", url, lambda query: connection.execute(query).fetchall(), connection.close)


def duck(rows: int = 60) -> Database:
    """Creates a DuckDB database in memory."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for statement in _create(0, "blob"):
        connection.execute(statement)
    marks = ", ".join("?" * len(COLUMNS))
    connection.executemany(f"INSERT INTO t VALUES ({marks})", [list(row) for row in rows_of_t(rows)])
    connection.executemany("INSERT INTO u VALUES (?, ?, ?)", [list(row) for row in rows_of_u()])
    connection.execute("UPDATE t SET x = 'NaN' WHERE id % 9 = 0")

    def run(query: str) -> list[tuple[Any, ...]]:
        table = connection.sql(query).to_arrow_table()
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    return Database("duckdb", connection, run, connection.close)


def plain(value: Any) -> Any:
    """Returns a hashable form of a value from a driver or a batch. NaN equals itself, and 0.0 differs from -0.0."""
    if isinstance(value, (float, bool)):
        return repr(value)
    if isinstance(value, decimal.Decimal):
        # In batches, decimals are floats.
        return repr(float(value))
    if isinstance(value, datetime.datetime):
        # In batches, times are datetime64 in UTC.
        return (value.astimezone(datetime.UTC) if value.tzinfo else value).replace(tzinfo=None).isoformat()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return value


def multiset(rows: Iterable[Sequence[Any]]) -> Counter[tuple[Any, ...]]:
    """Returns rows without their order."""
    return Counter(tuple(plain(value) for value in row) for row in rows)


def rows_of(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Returns the rows of a batch as Python objects."""
    table = fastpipe.to_arrow(batch)
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Returns whether two lists contain the same batches."""
    rows = [[tuple(map(plain, row)) for row in rows_of(batch)] for batch in some]
    return rows == [[tuple(map(plain, row)) for row in rows_of(batch)] for batch in others]
