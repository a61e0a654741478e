"""SQL readers: behavior that users see, error messages, and edge cases."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adbc_driver_postgresql.dbapi
import adbc_driver_sqlite.dbapi
import duckdb
import numpy as np
import psycopg
import pytest
import sqlalchemy

import fastpipe
import servers
import sql_databases
from sql_databases import Database, multiset, rows_of, same


@pytest.fixture(scope="module", params=["sqlite", "duckdb", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if request.param == "sqlite":
        found = sql_databases.sqlite(Path(tmp_path_factory.mktemp("sqlite")) / "t.db", 300)
    elif request.param == "duckdb":
        found = sql_databases.duck(300)
    else:
        found = sql_databases.postgres(request.getfixturevalue("postgres").new_database(), 300)
    yield found
    found.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Database]:
    found = sql_databases.sqlite(tmp_path / "t.db", 300)
    yield found
    found.close()


def values(reader: fastpipe.Reader, name: str = "id") -> list[Any]:
    columns = (batch[name] for batch in reader)
    return [value for column in columns for value in np.asarray(getattr(column, "values", column)).tolist()]


@pytest.mark.parametrize("shuffle", [False, True, "block"])
def test_states_resume_at_every_step(database: Database, shuffle: Any) -> None:
    def read() -> fastpipe.Reader:
        query = "SELECT id, g, x FROM t"
        return fastpipe.read_sql(
            query, database.connection, num_partitions=7, batch_size=32, shuffle=shuffle, seed=3, epochs=2
        )

    reader = read()
    batches, states = [], [reader.state_dict()]
    for batch in reader:
        batches.append(batch)
        states.append(reader.state_dict())
    assert len(batches) == 20
    for step, state in enumerate(states[:-1]):
        resumed = read()
        resumed.load_state_dict(state)
        assert same([next(iter(resumed))], [batches[step]])
        assert same([read().batch_at(step % 10, epoch=step // 10)], [batches[step]])


def test_partitions_are_read_separately(database: Database) -> None:
    reader = fastpipe.read_sql("SELECT id, k FROM t", database.connection, num_partitions=8, batch_size=16)
    parts = reader.partition(3)
    found = [values(reader.read_partition(part)) for part in parts]
    assert sorted([row for each in found for row in each]) == [3 * i for i in range(300)]
    assert [len(each) for each in found] == [part.rows for part in parts]


def test_rows_are_located(database: Database) -> None:
    reader = fastpipe.read_sql("SELECT id FROM t", database.connection, num_partitions=3, batch_size=16)
    place = reader.locate(10, 5)
    assert place.name.startswith("partition 1 of 3 of the query, where ")
    assert reader.batch_at(10)["id"][5] == 3 * 165


def test_columns_that_cannot_be_null_are_plain_arrays(database: Database) -> None:
    batch = fastpipe.read_sql("SELECT * FROM t WHERE k > 0", database.connection, batch_size=9).batch_at(0)
    assert isinstance(batch["id"], np.ndarray)
    assert isinstance(batch["k"], fastpipe.Masked)


@pytest.mark.parametrize("columns", [["g"], ["x", "id"], ["b"]])
def test_only_requested_columns_are_read(database: Database, columns: list[str]) -> None:
    reader = fastpipe.read_sql("SELECT * FROM t", database.connection, num_partitions=4, batch_size=50, columns=columns)
    whole = database.run(f"SELECT {', '.join(columns)} FROM t")
    assert multiset(row for batch in reader for row in rows_of(batch)) == multiset(whole)


@pytest.mark.parametrize(
    "query",
    ["SELECT id FROM t WHERE 1 = 0", "SELECT g, x FROM t WHERE id < 0 -- nothing", "SELECT 1 AS one WHERE 1 = 0"],
)
def test_empty_results(database: Database, query: str) -> None:
    reader = fastpipe.read_sql(query, database.connection, num_partitions=7, batch_size=4)
    assert (reader.num_rows, list(reader)) == (0, [])
    assert fastpipe.sql.partition_sql(query, database.connection).partitions == []


def test_one_row(database: Database) -> None:
    reader = fastpipe.read_sql("SELECT 5 AS five", database.connection, num_partitions=100, batch_size=4)
    assert [np.asarray(batch["five"].values).tolist() for batch in reader] == [[5]]


NOT_THE_SAME = {
    "random": "SELECT id, random() AS r FROM t",
    "limit": "SELECT id FROM t LIMIT 5",
    "inner limit": "SELECT id FROM (SELECT id FROM t LIMIT 5) AS s ORDER BY id",
    "time": "SELECT id, CURRENT_TIMESTAMP AS now FROM t",
    "row numbers": "SELECT id, row_number() OVER () AS n FROM t",
    "rows before": "SELECT id, sum(id) OVER (ROWS 3 PRECEDING) AS n FROM t",
    "a window's name": "SELECT id, lag(id) OVER w AS n FROM t WINDOW w AS (PARTITION BY g)",
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_volatile_queries_are_refused_or_materialized(database: Database, name: str, tmp_path: Path) -> None:
    query = NOT_THE_SAME[name]
    with pytest.raises(
        fastpipe.errors.UnsupportedError, match=r"may return other rows each time.*materialize='directory'"
    ):
        fastpipe.read_sql(query, database.connection, batch_size=8)
    readers = [
        fastpipe.read_sql(query, database.connection, batch_size=8, materialize=tmp_path / "new" / "folder")
        for _ in range(2)
    ]
    assert [len(list((tmp_path / "new" / "folder").iterdir()))] == [1]
    for first, second in zip(*readers, strict=True):
        assert same([first], [second])


COLLECTING = {"sqlite": "group_concat(id)", "duckdb": "list(id)", "postgres": "string_agg(CAST(id AS text), ',')"}


def test_aggregates_without_order_are_refused(database: Database) -> None:
    collect = COLLECTING[database.name]
    with pytest.raises(fastpipe.errors.UnsupportedError, match="without ORDER BY reads rows in any order"):
        fastpipe.read_sql(f"SELECT g, {collect} AS c FROM t GROUP BY g", database.connection, batch_size=8)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT id, row_number() OVER (ORDER BY id) AS n FROM t",
        "SELECT id, lag(id) OVER w AS n FROM t WINDOW w AS (PARTITION BY g ORDER BY id)",
        "SELECT id, sum(id) OVER (PARTITION BY g) AS n FROM t",
        "SELECT id, count(*) OVER w AS n FROM t WINDOW w AS (PARTITION BY g)",
        "SELECT id FROM t ; -- a comment; SELECT 1",
        "SELECT id FROM t;;",
    ],
)
def test_deterministic_queries_are_read(database: Database, query: str) -> None:
    reader = fastpipe.read_sql(query, database.connection, num_partitions=4, batch_size=32)
    assert sorted(values(reader)) == [3 * i for i in range(300)]


def test_array_aggregates_with_order_are_read(postgres_url: str) -> None:
    query = "SELECT g % 3 AS k, array_agg(g ORDER BY g) AS a FROM generate_series(1, 30) AS s (g) GROUP BY g % 3"
    (batch,) = fastpipe.read_sql(query, postgres_url, by="k", num_partitions=2, batch_size=3)
    assert batch["a"].values.offsets.tolist() == [0, 10, 20, 30]
    with pytest.raises(fastpipe.errors.StorageError, match=r"one-dimensional array"):
        fastpipe.read_sql("SELECT ARRAY[[1, 2], [3, 4]] AS a", postgres_url, batch_size=3).batch_at(0)


@pytest.mark.parametrize(
    "time", ["timestamp 'infinity'", "timestamptz '-infinity'", "date 'infinity'", "date '-infinity'"]
)
@pytest.mark.parametrize("kind", ["duckdb", "postgres"])
def test_infinite_times_are_refused(request: pytest.FixtureRequest, kind: str, time: str) -> None:
    connection = duckdb.connect() if kind == "duckdb" else request.getfixturevalue("postgres_url")
    before_christ = "(BC)" if kind == "duckdb" else "BC"
    finite = f"CAST('0044-03-15 {before_christ}' AS {time.split()[0]})"
    query = f"SELECT 1 AS id, {time} AS moment UNION ALL SELECT 2, {finite}"
    with pytest.raises(
        fastpipe.errors.SchemaError, match=r"column 'moment' has infinite times.*NULLIF\(moment, 'infinity'\)"
    ):
        fastpipe.read_sql(query, connection, batch_size=3).batch_at(0)
    query = f"SELECT id, NULLIF(NULLIF(moment, 'infinity'), '-infinity') AS moment FROM ({query}) AS s"
    (batch,) = fastpipe.read_sql(query, connection, by="id", batch_size=3)
    assert batch["moment"].valid.tolist() == [False, True]
    assert batch["moment"].values[1] == np.datetime64("-0043-03-15")


def test_a_file_that_is_not_a_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.db").write_bytes(b"\xff" * 5000)
    with pytest.raises(fastpipe.errors.StorageError, match=r"SQLite failed in file .*t\.db: .*file is not a database"):
        fastpipe.read_sql("SELECT 1 AS one", f"sqlite:///{tmp_path / 't.db'}", batch_size=3)


@pytest.mark.parametrize(
    ("query", "match"),
    [
        ("", "the query is empty"),
        ("DELETE FROM t", "DELETE is not a query"),
        ("SELECT 1; DROP TABLE t", "there are 2 statements"),
        ("SELEKT 1 FROM WHERE", "can't parse|is not a query"),
    ],
)
def test_other_statements_are_refused(database: Database, query: str, match: str) -> None:
    with pytest.raises(fastpipe.errors.UnsupportedError, match=match):
        fastpipe.read_sql(query, database.connection, batch_size=8)
    assert database.run("SELECT count(*) FROM t")[0][0] == 300


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"by": "nosuch"}, fastpipe.errors.SchemaError, "'nosuch', which isn't a column of the result: id, g"),
        ({"by": 3}, TypeError, "by must be a column's name, a list of names or None; got 3"),
        ({"by": []}, ValueError, "by must name at least one column"),
        ({"num_partitions": 0}, ValueError, "num_partitions must be from 1 to 65536, or 'auto'; got 0"),
        ({"num_partitions": "many"}, TypeError, "num_partitions must be an integer or 'auto'; got 'many'"),
        ({"parameters": "abc"}, TypeError, "parameters must be a sequence, a mapping or None; got 'abc'"),
        ({"columns": ["nosuch"]}, fastpipe.errors.SchemaError, "nosuch"),
    ],
)
def test_wrong_arguments(database: Database, arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fastpipe.read_sql("SELECT id, g FROM t", database.connection, batch_size=8, **arguments)


def test_unknown_columns_are_reported_by_the_database(database: Database) -> None:
    with pytest.raises(fastpipe.errors.StorageError, match=r"failed.*: .*nosuch"):
        fastpipe.read_sql("SELECT nosuch FROM t", database.connection, batch_size=8)


@pytest.mark.parametrize(
    ("connection", "error", "match"),
    [
        (3, TypeError, "connection must be a URL"),
        ("t.db", fastpipe.errors.UnsupportedError, "the connection isn't a URL"),
        ("sqlite:///nosuch.db", fastpipe.errors.MissingFileError, r"there is no such file \(file nosuch.db\)"),
        ("duckdb:///nosuch.db", fastpipe.errors.MissingFileError, "there is no such file"),
        ("sqlite://", fastpipe.errors.UnsupportedError, "sqlite:///relative/path.db or sqlite:////absolute"),
        ("sqlite:///:memory:", fastpipe.errors.UnsupportedError, "names a file"),
        (
            "duckdb:///:memory:",
            fastpipe.errors.UnsupportedError,
            "pass a connection of duckdb for a database in memory",
        ),
        ("nosuch://host/db", fastpipe.errors.UnsupportedError, "nosuch is not supported"),
        ("oracle+cx_oracle://host/db", fastpipe.errors.UnsupportedError, "oracle is not supported: .* read_parquet"),
        (lambda: 5, TypeError, "a connection factory must return an ADBC connection"),
        (lambda: sqlite3.connect(":memory:"), TypeError, "Pass the database's URL"),
    ],
)
def test_wrong_connections(connection: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        fastpipe.read_sql("SELECT 1 AS one", connection, batch_size=8)


def test_connection_refused() -> None:
    url = f"postgresql://user:secret@127.0.0.1:{servers.free_port()}/none"
    with pytest.raises(fastpipe.errors.StorageError, match="PostgreSQL failed") as caught:
        fastpipe.read_sql("SELECT 1 AS one", url, batch_size=8)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", sql_databases.TEXTS)
def test_parameters_are_data(database: Database, text: str) -> None:
    mark = "%s" if database.name == "postgres" else "?"
    query = f"SELECT id, g FROM t WHERE g = {mark}"
    reader = fastpipe.read_sql(query, database.connection, parameters=[text], num_partitions=4, batch_size=16)
    quoted = text.replace("'", "''")
    assert sorted(values(reader)) == sorted(row[0] for row in database.run(f"SELECT id FROM t WHERE g = '{quoted}'"))
    assert database.run("SELECT count(*) FROM t")[0][0] == 300


def test_parameters_by_name(database: Database) -> None:
    mark = {"sqlite": ":least", "duckdb": "$least", "postgres": "%(least)s"}[database.name]
    query = f"SELECT id FROM t WHERE id >= {mark} AND id <> {mark} + 3"
    reader = fastpipe.read_sql(query, database.connection, parameters={"least": 600}, num_partitions=4, batch_size=16)
    assert sorted(values(reader)) == [600, *range(606, 900, 3)]


def test_missing_parameters_are_reported(database: Database) -> None:
    mark = "%s" if database.name == "postgres" else "?"
    with pytest.raises((fastpipe.errors.StorageError, ValueError)):
        fastpipe.read_sql(f"SELECT id FROM t WHERE id > {mark}", database.connection, parameters=[], batch_size=8)


@pytest.mark.parametrize("name", ["a:1", 'say "hi"', "ü ß", "50%", "what?", "select", "q", "a`b", "p", "k0"])
def test_any_name_of_a_column(database: Database, name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    query = f"SELECT id AS {quoted}, g AS other FROM t WHERE id < 90"
    if database.name == "postgres" and "%" in name:
        query = query.replace("%", "%")
    for by in (None, name):
        reader = fastpipe.read_sql(query, database.connection, by=by, num_partitions=3, batch_size=16)
        assert sorted(values(reader, name)) == list(range(0, 90, 3))


def test_keys_whose_ties_cannot_be_split(database: Database) -> None:
    plan = fastpipe.sql.partition_sql("SELECT z FROM t", database.connection, num_partitions=20, by="z")
    most = max(count for _, count in database.run("SELECT z, count(*) FROM t GROUP BY z"))
    assert plan.heaviest == most
    assert max(part.rows for part in plan.partitions) == most
    assert plan.skew == pytest.approx(plan.skew_bound)
    assert f"not below {plan.skew_bound:.2f}: {most} rows have one value" in str(plan)


def test_a_second_column_splits_ties(database: Database) -> None:
    plan = fastpipe.sql.partition_sql(
        "SELECT z, id FROM t WHERE id >= 0 GROUP BY z, id", database.connection, num_partitions=20
    )
    assert plan.skew <= 1.25
    both = fastpipe.sql.partition_sql("SELECT z, id FROM t", database.connection, num_partitions=20, by=["z", "id"])
    assert both.skew <= 1.25
    assert both.by == ("z", "id")


@pytest.mark.parametrize("query", ["SELECT id FROM t", "SELECT g, x FROM t", "SELECT z FROM t GROUP BY z"])
def test_planning_runs_two_queries_and_a_sample(database: Database, query: str) -> None:
    plan = fastpipe.sql.partition_sql(query, database.connection, num_partitions=10)
    ends = [text for text in plan.queries if "LIMIT 1)" in text]
    bounded = [text for text in plan.queries if "LIMIT" in text and text not in ends]
    assert len(ends) <= 1
    assert len(bounded) <= 1
    assert len(plan.queries) - len(ends) - len(bounded) <= 2


def test_plans_depend_only_on_the_data(database: Database) -> None:
    plans = [fastpipe.sql.partition_sql("SELECT * FROM t", database.connection, num_partitions=9) for _ in range(2)]
    assert plans[0].partitions == plans[1].partitions
    assert fastpipe.sql.partition_sql("SELECT * FROM t", database.connection, preferred_rows=30).partitions[9].rows > 20


def _read_in_child(reader: fastpipe.Reader, results: Any) -> None:
    try:
        results.put(sorted(values(reader)))
    except Exception as error:
        results.put(repr(error))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_other_processes(database: Database, method: str) -> None:
    reader = fastpipe.read_sql("SELECT id FROM t", database.connection, num_partitions=5, batch_size=16)
    if database.name == "duckdb":
        with pytest.raises(TypeError, match="can't be pickled: open the database by its URL"):
            pickle.dumps(reader)
        return
    next(iter(reader))
    reader.close()
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_read_in_child, args=(reader, results), daemon=True)
    child.start()
    found = results.get(timeout=500)
    child.join(60)
    if method == "spawn":
        assert found == [3 * i for i in range(300)]
    else:
        assert "can't be used in a forked process" in found
    # The child must not have closed the parent's connections.
    assert sorted(values(reader)) == [3 * i for i in range(300)]


def test_types_of_postgresql(postgres_url: str) -> None:
    query = """SELECT 1::int2 AS i2, 1.5::float4 AS f4, 'x'::varchar(3) AS v, 'y'::char(2) AS c,
        '2026-02-28'::date AS d, '12:00:01'::time AS t, '2026-01-01 12:00+02'::timestamptz AS z,
        12.5::numeric(5, 2) AS n, 1e3::numeric AS big,
        gen AS u, '{"a": 1}'::jsonb AS j, ARRAY[1, 2]::int4[] AS a, true AS b, '\\x00ff'::bytea AS y, 'ok'::mood AS m
        FROM (SELECT '9b0d0a9e-6b0b-4a1e-8d2c-6f7b4ac0a8a1'::uuid AS gen) AS s"""
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TYPE mood AS ENUM ('sad', 'ok')")
    batch = fastpipe.read_sql(query, postgres_url, batch_size=1).batch_at(0)
    row = dict(zip(batch, rows_of(batch)[0], strict=True))
    assert row["z"] == datetime.datetime(2026, 1, 1, 10)
    assert (row["n"], row["big"], row["u"][:4], row["a"], row["m"]) == (12.5, 1000.0, "9b0d", [1, 2], "ok")
    assert (row["c"], row["v"], row["b"], row["y"], row["j"]) == ("y ", "x", True, b"\0\xff", '{"a": 1}')


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ("interval '1 day' AS i", r"column 'i' is an interval: use EXTRACT\(EPOCH FROM \"i\"\)"),
        ("int4range(1, 2) AS r", r"column 'r' is int4range, which is not supported: use CAST\(\"r\" AS text\)"),
        ("1 AS a, 2 AS a", "two columns named 'a': name one of them with AS"),
    ],
)
def test_unsupported_types_are_refused(postgres_url: str, column: str, match: str) -> None:
    with pytest.raises((fastpipe.errors.UnsupportedError, fastpipe.errors.SchemaError), match=match):
        fastpipe.read_sql(f"SELECT {column}", postgres_url, batch_size=1)


def test_volatile_functions_of_users_are_refused(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE FUNCTION dice() RETURNS int AS 'SELECT 4' LANGUAGE sql VOLATILE")
        connection.execute("CREATE FUNCTION four() RETURNS int AS 'SELECT 4' LANGUAGE sql IMMUTABLE")
    assert values(fastpipe.read_sql("SELECT four() AS id", postgres_url, batch_size=1), "id") == [4]
    with pytest.raises(fastpipe.errors.UnsupportedError, match="dice"):
        fastpipe.read_sql("SELECT dice() AS id", postgres_url, batch_size=1)


@pytest.mark.parametrize(
    ("stored", "match"),
    [
        ([1, "x"], "column 'v' has values of several types"),
        ([*[1] * 2000, "x"], "column 'v' is int64 in the first rows, and string in others: use CAST"),
    ],
)
def test_sqlites_mixed_types_are_errors(tmp_path: Path, stored: list[Any], match: str) -> None:
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v)")
        connection.executemany("INSERT INTO t (v) VALUES (?)", [(value,) for value in stored])
    connection.close()
    with pytest.raises(fastpipe.errors.SchemaError, match=match):
        list(fastpipe.read_sql("SELECT * FROM t", f"sqlite:///{tmp_path}/t.db", batch_size=100))
    query = "SELECT id, CAST(v AS TEXT) AS v FROM t"
    assert len(values(fastpipe.read_sql(query, f"sqlite:///{tmp_path}/t.db", batch_size=100))) == len(stored)


def test_sqlites_columns_without_values_have_their_declared_type(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, i INT, s VARCHAR(9), r DOUBLE, n DECIMAL(3, 1))")
        connection.executemany("INSERT INTO t (n) VALUES (?)", [(1,), (2.5,), (None,)])
    connection.close()
    reader = fastpipe.read_sql("SELECT * FROM t", f"sqlite:///{tmp_path}/t.db", batch_size=9)
    assert [getattr(reader.features[name], "dtype", None) for name in ("i", "r", "n")] == [
        "int64",
        "float64",
        "float64",
    ]
    assert isinstance(reader.batch_at(0)["s"].values, fastpipe.Strings)


@pytest.mark.parametrize("keys", ["sequence", "steps", "random", "negative"])
def test_keys_of_any_pattern_are_cut_evenly(tmp_path: Path, keys: str) -> None:
    draw = np.random.default_rng(5)
    found = {
        "sequence": np.arange(20_000),
        "steps": np.arange(20_000) * 1000,
        "random": draw.integers(-(2**63), 2**63 - 1, 20_000),
        "negative": -np.arange(20_000) * 7,
    }[keys]
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        connection.executemany("INSERT INTO t VALUES (?)", [(key,) for key in np.unique(found).tolist()])
    connection.close()
    plan = fastpipe.sql.partition_sql("SELECT id FROM t", f"sqlite:///{tmp_path}/t.db", num_partitions=10)
    assert (len(plan.partitions), plan.by, plan.skew_bound) == (10, ("id",), 1.0)
    assert plan.skew <= 1.25
    reader = fastpipe.read_sql("SELECT id FROM t", f"sqlite:///{tmp_path}/t.db", num_partitions=10, batch_size=999)
    assert sorted(values(reader)) == np.unique(found).tolist()


@pytest.mark.parametrize("wal", [True, False])
def test_sqlite_reads_one_snapshot(tmp_path: Path, wal: bool) -> None:
    database = sql_databases.sqlite(tmp_path / "t.db", 300, wal=wal)
    reader = fastpipe.read_sql("SELECT id, k FROM t", database.connection, num_partitions=10, batch_size=16)
    before = values(reader)
    other = sqlite3.connect(tmp_path / "t.db", timeout=30)
    other.execute("DELETE FROM t WHERE id % 2 = 0")
    other.execute("UPDATE t SET k = 99")
    other.commit()
    other.close()
    if wal:
        assert values(reader) == before
        # A pickled reader opens the file in its state at that time.
        theirs = pickle.loads(pickle.dumps(reader))
        with pytest.raises(
            fastpipe.errors.StorageError, match="the partition had 30 rows when the reader was made, and has 15"
        ):
            list(theirs)
    else:
        with pytest.raises(fastpipe.errors.StorageError, match=r"the file was changed since the reader was made.*WAL"):
            list(reader)
    database.close()


def test_files_that_cannot_be_written_are_read(file: Database, tmp_path: Path) -> None:
    path = tmp_path / "copy.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        connection.executemany("INSERT INTO t VALUES (?)", [(i,) for i in range(100)])
    connection.close()
    path.chmod(0o444)
    assert values(fastpipe.read_sql("SELECT id FROM t", f"sqlite:///{path}", num_partitions=3, batch_size=8)) == [
        *range(100)
    ]


def test_readers_resume_after_a_server_restart() -> None:
    programs = servers.postgres_programs()
    if programs is None:
        pytest.skip("the PostgreSQL server is not installed")
    server = servers.Postgres(programs)
    try:
        database = sql_databases.postgres(server.new_database(), 300)
        reader = fastpipe.read_sql("SELECT id FROM t", database.connection, num_partitions=10, batch_size=16)
        state = reader.state_dict()
        batches = iter(reader)
        next(batches)
        database.close()
        server.kill()
        with pytest.raises(fastpipe.errors.StorageError, match=r"partition .* of 10 of the query"):
            values(reader)
        server.start()
        with pytest.raises(fastpipe.errors.StorageError, match="the reader's snapshot no longer exists"):
            values(reader)
        # The data and its order are unchanged, so a new reader accepts the state.
        again = fastpipe.read_sql("SELECT id FROM t", database.connection, num_partitions=10, batch_size=16)
        again.load_state_dict(state)
        assert sorted(values(again)) == [3 * i for i in range(300)]
    finally:
        server.stop()


def test_engines_of_sqlalchemy(file: Database, postgres_url: str) -> None:
    path = file.connection.removeprefix("sqlite:///")
    for connection in (sqlalchemy.create_engine(f"sqlite:///{path}"), sqlalchemy.make_url(file.connection)):
        assert len(values(fastpipe.read_sql("SELECT id FROM t", connection, batch_size=99))) == 300
    engine = sqlalchemy.create_engine(postgres_url.replace("postgresql", "postgresql+psycopg"))
    assert values(fastpipe.read_sql("SELECT 7 AS id", engine, batch_size=99)) == [7]
    engine.dispose()


def test_connection_factories(file: Database) -> None:
    path = file.connection.removeprefix("sqlite:///")

    def connect() -> Any:
        return adbc_driver_sqlite.dbapi.connect(path, autocommit=True)

    reader = fastpipe.read_sql("SELECT id FROM t", connect, num_partitions=3, batch_size=99)
    assert sorted(values(reader)) == [3 * i for i in range(300)]


def test_connection_factories_of_postgresql(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE t AS SELECT i AS id, i % 7 AS g, 'x' || i AS s, i / 2::numeric AS n, now() AS ts, "
            "gen_random_uuid() AS u FROM generate_series(0, 299) AS g(i)"
        )
        connection.execute("ALTER TABLE t ADD PRIMARY KEY (id)")

        def connect() -> Any:
            return adbc_driver_postgresql.dbapi.connect(postgres_url, autocommit=True)

        query = "SELECT id, g, s, n, ts, u FROM t"
        for by in ("id", "g", "s", "n", "ts", "u"):
            readers = [
                fastpipe.read_sql(query, how, by=by, num_partitions=3, batch_size=99) for how in (connect, postgres_url)
            ]
            assert readers[0].features == readers[1].features
            assert values(readers[0]) == values(readers[1])
        connection.execute("DELETE FROM t")
        assert sorted(values(readers[0])) == list(range(300))
        with pytest.raises(fastpipe.errors.UnsupportedError, match="pass the database's URL"):
            fastpipe.read_sql("SELECT id FROM t WHERE g > %s", connect, parameters=[1], batch_size=99)


def test_files_of_duckdb(tmp_path: Path) -> None:
    with duckdb.connect(str(tmp_path / "t.db")) as connection:
        connection.execute("CREATE TABLE t AS SELECT range AS id FROM range(1000)")
    reader = fastpipe.read_sql("SELECT id FROM t", f"duckdb:///{tmp_path}/t.db", num_partitions=4, batch_size=99)
    assert sorted(values(pickle.loads(pickle.dumps(reader)))) == [*range(1000)]
    assert len(values(reader)) == 1000


def test_mariadb(mariadb: servers.Mariadb) -> None:
    engine = sqlalchemy.create_engine(mariadb.url)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TABLE t (id INT PRIMARY KEY, k INT, g VARCHAR(40) COLLATE utf8mb4_general_ci, x DOUBLE, "
            "n DECIMAL(12, 2), d DATE, ts DATETIME(6), b BLOB)"
        )
        rows = [
            (row[0], row[1], row[3], None if row[4] == float("inf") else row[4], *row[5:8], row[9])
            for row in sql_databases.rows_of_t(300)
        ]
        rows = [(*row[:6], None if row[6] is None else row[6].replace(tzinfo=None), row[7]) for row in rows]
        connection.exec_driver_sql("INSERT INTO t VALUES (%s, %s, %s, %s, %s, %s, %s, %s)", rows)
    for query in (
        "SELECT * FROM t",
        "SELECT g, k FROM t",
        "SELECT k, count(*) AS c FROM t GROUP BY k",
        "SELECT ts, d FROM t",
    ):
        with engine.begin() as connection:
            whole = [tuple(row) for row in connection.exec_driver_sql(query)]
        for parts in (1, 7, 100):
            reader = fastpipe.read_sql(query, mariadb.url, num_partitions=parts, batch_size=16)
            found = [row for batch in reader for row in rows_of(batch)]
            assert multiset(found) == multiset(whole), (query, parts)
    reader = fastpipe.read_sql("SELECT id FROM t", engine, num_partitions=7, batch_size=16)
    with engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM t WHERE id > 100")
    assert sorted(values(reader)) == [3 * i for i in range(300)]
    found = fastpipe.read_sql("SELECT id FROM t WHERE id < %s", mariadb.url, parameters=[30], batch_size=16)
    assert sorted(values(found)) == [*range(0, 30, 3)]
    engine.dispose()


def test_ctrl_c_takes_effect_at_once(tmp_path: Path) -> None:
    script = """
import signal, sqlite3, sys, threading, os, time
import fastpipe
signal.signal(signal.SIGINT, signal.default_int_handler)
with sqlite3.connect("t.db") as connection:
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    connection.executemany("INSERT INTO t VALUES (?)", [(i,) for i in range(3000)])
connection.close()
query = "SELECT a.id AS id FROM t AS a CROSS JOIN t AS b CROSS JOIN t AS c WHERE a.id + b.id + c.id = -1"
threading.Thread(target=lambda: (time.sleep(80), os._exit(3)), daemon=True).start()
try:
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    fastpipe.read_sql(query, "sqlite:///t.db", batch_size=8)
except KeyboardInterrupt:
    os._exit(0)
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=os.environ, timeout=500, check=False)
    assert done.returncode == 0


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("adbc_driver_sqlite", "adbc_driver_postgresql", "duckdb", "sqlalchemy"):
        monkeypatch.setitem(sys.modules, module, None)
    for url, extra in (("sqlite:///x", "sqlite"), ("postgresql://x/y", "postgresql"), ("duckdb:///x", "duckdb")):
        with pytest.raises(ImportError, match=rf"pip install 'fastpipe-data\[{extra}\]'"):
            fastpipe.read_sql("SELECT 1 AS one", url, batch_size=1)
