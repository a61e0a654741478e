"""Values keep their meaning as bounds of partitions, in literals of the query, and in columns of the result."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import psycopg
import pytest
import sqlalchemy

import fastpipe
import servers
from sql_databases import rows_of

# For about fifty types, an SQL expression for the value with index i.
POSTGRES = {
    "char(5)": "left('abcdefgh', i % 5 + 1)",
    "bit(6)": "CAST(i AS bit(6))",
    "varbit(9)": "CAST(i AS bit(6))::varbit",
    "varchar(4)": "'v' || i",
    "text": "'it''s \\' || i",
    "name": "'n' || i",
    "numeric": "i / 7.0",
    "numeric(9, 3)": "i / 7.0",
    "real": "i / 10.0",
    "double precision": "i / 7.0",
    "smallint": "i",
    "date": "date '0044-03-15 BC' + i",
    "timestamp(3)": "timestamp '2026-01-01 00:00:00.123456' + i * interval '1 millisecond'",
    "timestamptz": "timestamptz '2026-01-01 00:00:00.123456+05' + i * interval '1 microsecond'",
    "time": "time '01:02:03.000004' + i * interval '1 second'",
    "uuid": "md5(i::text)::uuid",
    "inet": "inet '10.0.0.1' + i",
    "macaddr": "CAST('08:00:2b:01:02:' || to_char(i, 'FM00') AS macaddr)",
    "money": "i * 1.01",
    "bytea": "decode(to_char(i, 'FM0000'), 'hex')",
    "boolean": "i % 2 = 0",
    "mood": "CAST((ARRAY['sad', 'ok', 'it''s'])[i % 3 + 1] AS mood)",
    "short": "'s' || i",
}
DUCKDB = {
    "VARCHAR": "'a' || chr(0) || '''' || i",
    "FLOAT": "i / 10",
    "DOUBLE": "i / 7",
    "DECIMAL(9, 3)": "i / 7",
    "UBIGINT": "18446744073709551615 - i",
    "HUGEINT": "i * 100000000000000000000",
    "DATE": "DATE '0044-03-15 (BC)' + CAST(i AS INT)",
    "TIMESTAMP": "TIMESTAMP '2026-01-01 00:00:00.123456' + to_microseconds(i)",
    "TIMESTAMP_NS": "make_timestamp_ns(1700000000000000000 + i)",
    "TIMESTAMP_S": "TIMESTAMP '2026-01-01' + to_seconds(i)",
    "TIMESTAMPTZ": "TIMESTAMPTZ '2026-01-01 00:00:00.123456+05' + to_microseconds(i)",
    "TIME": "TIME '01:02:03' + to_seconds(i)",
    "UUID": "CAST(md5(CAST(i AS VARCHAR)) AS UUID)",
    "BLOB": "encode(chr(0) || chr(39) || i)",
    "BIT": "CAST(CAST(i AS INT) AS BIT)",
    "ENUM('z', 'it''s', 'm')": "['z', 'it''s', 'm'][i % 3 + 1]",
    "BOOLEAN": "i % 2 = 0",
}
SQLITE = {
    "TEXT": "'a' || char(0) || '''T' || i",
    "TEXT COLLATE NOCASE": "CASE i % 2 WHEN 0 THEN 'A' ELSE 'a' END || i",
    "REAL": "i / 7.0",
    "INT": "i * 1000000007",
    "BLOB": "CAST('b' || char(0) || i AS BLOB)",
    "": "'T' || i",
}
MARIADB = {
    "FLOAT": "i / 10",
    "DOUBLE": "i / 7",
    "DECIMAL(9, 3)": "i / 7",
    "ENUM('z', 'a', 'it''s', 'm')": "MOD(i, 4) + 1",
    "SET('z', 'a', 'm')": "MOD(i, 8)",
    "CHAR(9)": "CONCAT('c', i)",
    "VARCHAR(40)": "CONCAT(x'275c2225', i, x'5c')",
    "VARCHAR(40) CHARACTER SET latin1 COLLATE latin1_german1_ci": "CONCAT(_latin1 x'e4', i)",
    "TEXT": "CONCAT('t', CHAR(0), i)",
    "BIGINT UNSIGNED": "18446744073709551615 - i",
    "INT(6) ZEROFILL": "i",
    "YEAR": "2000 + i",
    "DATE": "DATE '2026-01-01' + INTERVAL i DAY",
    "DATETIME(6)": "TIMESTAMP '2026-01-01 00:00:00.123456' + INTERVAL i MICROSECOND",
    "TIME(3)": "SEC_TO_TIME(i * 1.5)",
    "UUID": "INSERT(UUID(), 1, 2, LPAD(HEX(i * 5), 2, '0'))",
    "JSON": "JSON_OBJECT('k', i)",
}
ROWS = 50
# Indices of tables in MariaDB, whose tests share a database.
TABLES = itertools.count()


def assert_cut_by_value(connection: Any, least: int, table: str = "t") -> None:
    """Asserts that partitions by v contain each row once."""
    query = f"SELECT id, v FROM {table}"
    for partitions in (2, 40):
        plan = fastpipe.sql.partition_sql(query, connection, by="v", num_partitions=partitions)
        assert len(plan.partitions) >= min(partitions, least), plan
        assert plan.rows == ROWS + 2
        reader = fastpipe.read_sql(query, connection, by="v", num_partitions=partitions, batch_size=7)
        ids = [id_ for batch in reader for id_ in np.asarray(getattr(batch["id"], "values", batch["id"])).tolist()]
        assert sorted(ids) == list(range(ROWS + 2))


def fill(run: Callable[[str], Any], kind: str, value: str, numbers: str, table: str = "t") -> None:
    run(f"CREATE TABLE {table} (id int NOT NULL, v {kind})")
    run(f"INSERT INTO {table} SELECT i, {value} FROM {numbers}")
    run(f"INSERT INTO {table} VALUES ({ROWS}, NULL), ({ROWS + 1}, NULL)")


@pytest.mark.parametrize("kind", POSTGRES)
def test_partition_bounds_of_postgresql(postgres_url: str, kind: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TYPE mood AS ENUM ('sad', 'ok', 'it''s')")
        connection.execute("CREATE DOMAIN short AS varchar(3)")
        fill(connection.execute, kind, POSTGRES[kind], f"generate_series(0, {ROWS - 1}) AS g (i)")
    assert_cut_by_value(postgres_url, {"boolean": 2, "mood": 3, "char(5)": 5}.get(kind, 20))


@pytest.mark.parametrize("kind", DUCKDB)
def test_partition_bounds_of_duckdb(kind: str) -> None:
    connection = duckdb.connect()
    fill(connection.execute, kind, DUCKDB[kind], f"range({ROWS}) AS g (i)")
    assert_cut_by_value(connection, {"BOOLEAN": 2}.get(kind, 3 if "ENUM" in kind else 20))


@pytest.mark.parametrize("kind", SQLITE)
def test_partition_bounds_of_sqlite(tmp_path: Path, kind: str) -> None:
    numbers = f"(WITH RECURSIVE g(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM g WHERE i < {ROWS - 1}) SELECT i FROM g)"
    with sqlite3.connect(tmp_path / "t.db") as connection:
        fill(connection.execute, kind, SQLITE[kind], numbers)
    connection.close()
    assert_cut_by_value(f"sqlite:///{tmp_path}/t.db", 20)


@pytest.mark.parametrize(("kind", "mode"), [*((kind, "") for kind in MARIADB), ("VARCHAR(40)", "NO_BACKSLASH_ESCAPES")])
def test_partition_bounds_of_mariadb(mariadb: servers.Mariadb, kind: str, mode: str) -> None:
    engine = sqlalchemy.create_engine(mariadb.url)
    table = f"v{next(TABLES)}"
    with engine.begin() as connection:
        numbers = f"(SELECT seq AS i FROM seq_0_to_{ROWS - 1}) AS g"
        fill(connection.exec_driver_sql, kind, MARIADB[kind], numbers, table)
    engine.dispose()
    least = 4 if "ENUM" in kind else 8 if "SET(" in kind else 20
    assert_cut_by_value(f"{mariadb.url}?init_command=SET SESSION sql_mode = '{mode}'", least, table)


LITERALS = {r"'it\'s'": "it's", r"'a\\b'": r"a\b", r"'%\%'": r"%\%", r"'\n'": "\n", "'50%'": "50%", "'%%s'": "%%s"}


@pytest.mark.parametrize("literal", LITERALS)
def test_literals_of_mysql_keep_their_meaning(mariadb: servers.Mariadb, literal: str) -> None:
    query = f"SELECT {literal} AS v, 7 %% 4 AS n"
    batch = fastpipe.read_sql(query.replace("%%", "%"), mariadb.url, batch_size=1).batch_at(0)
    literal_with = query.replace("'50%'", "'50%%'").replace(r"'%\%'", r"'%%\%%'").replace("'%%s'", "'%%%%s'")
    bound = fastpipe.read_sql(f"{literal_with}, %s AS p", mariadb.url, parameters=["'\\%s"], batch_size=1).batch_at(0)
    expected = LITERALS[literal].replace("%%s", "%s")
    assert rows_of(batch) == [(expected, 3)]
    assert rows_of(bound) == [(LITERALS[literal], 3, "'\\%s")]
    with_escapes = f"{mariadb.url}?init_command=SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'"
    assert rows_of(fastpipe.read_sql(r"SELECT '\n' AS v", with_escapes, batch_size=1).batch_at(0)) == [("\\n",)]


@pytest.mark.parametrize("late", ["integer", "unsigned", "float", "text", "date", "decimal"])
def test_columns_of_mariadb_that_begin_with_nulls(mariadb: servers.Mariadb, late: str) -> None:
    kind, value, read = {
        "integer": ("INT", "7", 7),
        "unsigned": ("BIGINT UNSIGNED", "18446744073709551615", 2**64 - 1),
        "float": ("DOUBLE", "0.5e0", 0.5),
        "text": ("TEXT", "'x'", "x"),
        "date": ("DATE", "DATE '2026-01-01'", None),
        "decimal": ("DECIMAL(9, 2)", "1.25", 1.25),
    }[late]
    table = f"v{next(TABLES)}"
    engine = sqlalchemy.create_engine(mariadb.url)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, v {kind})")
        connection.exec_driver_sql(f"INSERT INTO {table} SELECT seq, IF(seq = 1500, {value}, NULL) FROM seq_0_to_1500")
    engine.dispose()
    reader = fastpipe.read_sql(f"SELECT * FROM {table}", mariadb.url, batch_size=999)
    rows = [row for batch in reader for row in rows_of(batch)]
    assert len(rows) == 1501
    assert [value for _, value in rows[:-1]] == [None] * 1500
    assert read is None or rows[-1] == (1500, read)


def stored(path: Path, definition: str, values: Sequence[Any]) -> str:
    """Returns the URL of a SQLite file with a table of the values and their row ids."""
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE TABLE t (id INTEGER PRIMARY KEY, v {definition})")
        connection.executemany("INSERT INTO t (v) VALUES (?)", [(value,) for value in values])
    connection.close()
    return f"sqlite:///{path}"


MIXED = {
    "numbers after texts": (["x"] * 1500 + [7], "column 'v' is text in the first rows, and has numbers or blobs"),
    "reals after texts": (["x"] * 1500 + [0.5], "column 'v' is text in the first rows, and has numbers or blobs"),
    "numbers after blobs": ([b"x"] * 1500 + [7], "column 'v' is blob in the first rows, and has numbers or texts"),
    "texts after blobs": ([b"x"] * 1500 + ["7"], "column 'v' is blob in the first rows, and has numbers or texts"),
    "large integers after reals": ([0.5] * 1500 + [2**53 + 1], "column 'v' is double .* integers that a double can't"),
    "large integers among reals": ([0.5, -(2**63)], "column 'v' is double .* integers that a double can't hold"),
}


@pytest.mark.parametrize("partitions", [1, 9])
@pytest.mark.parametrize("name", MIXED)
def test_sqlite_converts_no_values(tmp_path: Path, name: str, partitions: int) -> None:
    values, match = MIXED[name]
    url = stored(tmp_path / "t.db", "", values)
    for query in ("SELECT * FROM t", "SELECT id, v FROM t AS s", "SELECT id, coalesce(v, NULL) AS v FROM t"):
        with pytest.raises(fastpipe.errors.SchemaError, match=f"(?s){match}"):
            list(fastpipe.read_sql(query, url, num_partitions=partitions, batch_size=100))
    with pytest.raises(fastpipe.errors.SchemaError, match=f"(?s){match}"):
        fastpipe.read_sql("SELECT * FROM t", url, materialize=tmp_path / "files", batch_size=100)
    assert list((tmp_path / "files").iterdir()) == []
    # Values are also read if the declared type converts them when they are stored, and if a float holds the integers
    # exactly.
    exact = [value if isinstance(value, str) or value != 2**53 + 1 else 2**53 for value in values]
    if name.endswith("texts"):
        url = stored(tmp_path / "u.db", "TEXT", values)
        assert len(list(fastpipe.read_sql("SELECT * FROM t", url, batch_size=1501))) == 1
    elif name == "large integers after reals":
        url = stored(tmp_path / "u.db", "", exact)
        assert fastpipe.read_sql("SELECT v FROM t", url, batch_size=1501).batch_at(0)["v"].values[-1] == 2.0**53


@pytest.mark.parametrize("value", [7, 0.5, "x", b"x"])
def test_columns_of_sqlite_that_begin_with_nulls(tmp_path: Path, value: Any) -> None:
    url = stored(tmp_path / "t.db", "", [None] * 70_000 + [value])
    for options in ({}, {"materialize": tmp_path / "files"}):
        reader = fastpipe.read_sql("SELECT v FROM t", url, batch_size=70_001, **options)
        assert rows_of(reader.batch_at(0))[-1] == (value,)


@pytest.mark.parametrize("second", ["a", "A"])
@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_duplicate_columns_are_named(tmp_path: Path, kind: str, second: str) -> None:
    connection = duckdb.connect() if kind == "duckdb" else stored(tmp_path / "t.db", "", [1])
    mark = "CAST(? AS INT)"
    with pytest.raises(
        fastpipe.errors.SchemaError, match="the query returns two columns named 'a': name one of them with AS"
    ):
        fastpipe.read_sql(f"SELECT {mark} AS a, 2 AS {second}", connection, parameters=[1], batch_size=1)
    batch = fastpipe.read_sql('SELECT 1 AS a, 2 AS "a:1", 3 AS a_1', connection, batch_size=1).batch_at(0)
    assert rows_of(batch) == [(1, 2, 3)]
