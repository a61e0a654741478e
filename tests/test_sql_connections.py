"""The kinds of connections that users pass: which database they read, and how they fail."""

from __future__ import annotations

import contextlib
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adbc_driver_postgresql.dbapi
import adbc_driver_sqlite.dbapi
import duckdb
import psycopg
import pymysql
import pytest
import sqlalchemy

import fastpipe
import servers
from sql_databases import rows_of

QUERY = "SELECT v FROM t"


def numbers(connection: Any, query: str = QUERY, **options: Any) -> list[Any]:
    reader = fastpipe.read_sql(query, connection, batch_size=64, **options)
    return [row[0] for batch in reader for row in rows_of(batch)]


def sqlite_file(path: Path, value: int) -> str:
    path.parent.mkdir(exist_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (v INT)")
        connection.execute("INSERT INTO t VALUES (?)", (value,))
    return f"sqlite:///{path}"


def in_memory(value: int) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute(f"CREATE TABLE t AS SELECT {value} AS v")
    return connection


def duckdb_file(path: Path, value: int) -> duckdb.DuckDBPyConnection:
    path.parent.mkdir(exist_ok=True)
    connection = duckdb.connect(str(path))
    connection.execute(f"CREATE TABLE t AS SELECT {value} AS v")
    return connection


def schemas(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for value, schema in enumerate(("one", "two", "public")):
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
            connection.execute(f"CREATE TABLE {schema}.t AS SELECT {value + 1} AS v")


def of_schema(url: str, schema: str) -> Callable[[], Any]:
    return lambda: adbc_driver_postgresql.dbapi.connect(f"{url}?options=-csearch_path%3D{schema}")


def pairs(kind: str, folder: Path, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Returns connections to two databases with the same name. The second one contains other rows."""
    if kind == "folders":
        return sqlite_file(folder / "a" / "t.db", 1), sqlite_file(folder / "b" / "t.db", 2)
    if kind == "factories":
        paths = [sqlite_file(folder / name / "t.db", ord(name)).removeprefix("sqlite:///") for name in "ab"]
        return tuple(lambda path=path: adbc_driver_sqlite.dbapi.connect(path) for path in paths)  # type: ignore[return-value]
    if kind == "memory":
        return in_memory(1), in_memory(2)
    if kind == "folders of DuckDB":
        return duckdb_file(folder / "a" / "t.db", 1), duckdb_file(folder / "b" / "t.db", 2)
    if kind == "engines":
        url = request.getfixturevalue("mariadb").url
        engine = sqlalchemy.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE OR REPLACE TABLE t AS SELECT 1 AS v")
        engine.dispose()
        mode = {"init_command": "SET SESSION sql_mode = 'PIPES_AS_CONCAT'"}
        return sqlalchemy.create_engine(url), sqlalchemy.create_engine(url, connect_args=mode)
    url = request.getfixturevalue("postgres_url")
    schemas(url)
    if kind == "options":
        return f"{url}?options=-csearch_path%3Done", f"{url}?options=-csearch_path%3Dtwo"
    return of_schema(url, "one"), of_schema(url, "two")


@pytest.mark.parametrize(
    "kind", ["folders", "factories", "memory", "folders of DuckDB", "engines", "options", "factories of PostgreSQL"]
)
def test_materialized_results_match_their_database(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    connections = pairs(kind, tmp_path, request)
    query = "SELECT v || 5 AS v FROM t" if kind == "engines" else QUERY
    files = tmp_path / "files"
    first, second = (numbers(connection, query, materialize=files) for connection in connections)
    assert first != second
    assert len(list(files.iterdir())) == 2
    # The same connections reuse the files.
    assert [numbers(connection, query, materialize=files) for connection in connections] == [first, second]
    assert len(list(files.iterdir())) == 2


def test_materialized_results_follow_the_environment(
    postgres: servers.Postgres, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for value in range(2):
        url = postgres.new_database()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE t AS SELECT {value} AS v")
        monkeypatch.setenv("PGDATABASE", url.rpartition("/")[2])
        short = f"postgresql://postgres@127.0.0.1:{postgres.port}"
        for _ in range(2):
            assert numbers(short, materialize=tmp_path) == [value]


def test_engines_keep_their_connection_arguments(mariadb: servers.Mariadb, postgres: servers.Postgres) -> None:
    url = postgres.new_database()
    schemas(url)
    alchemy = url.replace("postgresql:", "postgresql+psycopg:")
    with_options = sqlalchemy.create_engine(alchemy, connect_args={"options": "-csearch_path=two"})
    elsewhere = sqlalchemy.create_engine(
        "postgresql+psycopg://nobody@127.0.0.1:1/nosuch",
        creator=lambda: psycopg.connect(f"{url}?options=-csearch_path%3Done"),
    )
    listened = sqlalchemy.create_engine(alchemy)

    @sqlalchemy.event.listens_for(listened, "connect")
    def listen(connection: Any, _: object) -> None:
        connection.autocommit = True
        connection.execute("SET search_path TO 'two', 'a b'")
        connection.autocommit = False

    assert [numbers(engine) for engine in (with_options, elsewhere, listened)] == [[2], [1], [2]]
    plain = sqlalchemy.create_engine(alchemy)
    assert numbers(plain) == [3]
    reader = fastpipe.read_sql(QUERY, listened, batch_size=1)
    assert [rows_of(batch) for batch in pickle.loads(pickle.dumps(reader))] == [[(2,)]]
    for engine in (with_options, elsewhere, listened, plain):
        engine.dispose()

    ansi = {"init_command": "SET SESSION sql_mode = 'ANSI_QUOTES'"}
    for engine in (
        sqlalchemy.create_engine(mariadb.url, connect_args=ansi),
        sqlalchemy.create_engine(
            "mariadb+pymysql://nobody@127.0.0.1:1/nosuch",
            creator=lambda: pymysql.connect(host="127.0.0.1", port=mariadb.port, user="test", database="test", **ansi),
        ),
    ):
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT @@time_zone").scalar() == "SYSTEM"
        assert numbers(engine, 'SELECT 5 AS "v"') == [5]
        # Connections in the user's pool don't have settings of readers.
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT @@time_zone").scalar() == "SYSTEM"
        reader = fastpipe.read_sql('SELECT 5 AS "v"', engine, batch_size=1)
        with pytest.raises(TypeError, match="can't be pickled: pass the database's URL"):
            pickle.dumps(reader)
        engine.dispose()


def test_roles_of_engines_are_kept(postgres: servers.Postgres) -> None:
    url = postgres.new_database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS v")
        connection.execute("DROP ROLE IF EXISTS reader")
        connection.execute("CREATE ROLE reader")
        connection.execute("GRANT SELECT ON t TO reader")
        connection.execute("ALTER TABLE t ENABLE ROW LEVEL SECURITY")
    engine = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))

    @sqlalchemy.event.listens_for(engine, "connect")
    def listen(connection: Any, _: object) -> None:
        connection.autocommit = True
        connection.execute("SET ROLE reader")
        connection.autocommit = False

    assert numbers(url) == [1]
    assert numbers(engine) == []
    engine.dispose()


def test_engines_of_sqlite_read_the_file_that_they_open(tmp_path: Path) -> None:
    first, second = (sqlite_file(tmp_path / name, value) for value, name in enumerate(("a.db", "b.db")))
    for url in (first, "sqlite://"):
        engine = sqlalchemy.create_engine(url, creator=lambda: sqlite3.connect(tmp_path / "b.db"))
        assert numbers(engine) == numbers(second) == [1]
        engine.dispose()
    engine = sqlalchemy.create_engine(first)

    @sqlalchemy.event.listens_for(engine, "connect")
    def listen(connection: Any, _: object) -> None:
        connection.execute("ATTACH ? AS other", (str(tmp_path / "b.db"),))

    with pytest.raises(fastpipe.errors.UnsupportedError, match=r"attach other databases \(other\): pass a function"):
        numbers(engine)
    engine.dispose()
    with pytest.raises(
        fastpipe.errors.UnsupportedError, match="a database in memory can't be opened by other connections"
    ):
        numbers(sqlalchemy.create_engine("sqlite://"))
    with pytest.raises(fastpipe.errors.MissingFileError, match="there is no such file"):
        numbers(sqlalchemy.create_engine(f"sqlite:///{tmp_path}/nosuch.db"))
    assert not (tmp_path / "nosuch.db").exists()


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_factories_with_and_without_autocommit(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, autocommit: bool, snapshot: bool
) -> None:
    if kind == "sqlite":
        path = sqlite_file(tmp_path / "t.db", 5).removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = wal")

        def connect() -> Any:
            return adbc_driver_sqlite.dbapi.connect(path, autocommit=autocommit)
    else:
        url = request.getfixturevalue("postgres_url")
        schemas(url)

        def connect() -> Any:
            return adbc_driver_postgresql.dbapi.connect(f"{url}?options=-csearch_path%3Done", autocommit=autocommit)

    assert numbers(connect, snapshot=snapshot) == [5 if kind == "sqlite" else 1]
    assert numbers(connect, materialize=tmp_path / "files") == [5 if kind == "sqlite" else 1]


def failing() -> Any:
    raise KeyError("no password")


FAILURES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "factory": (failing, {}, "the connection factory failed: KeyError: 'no password'"),
    "url": ("postgresql://u:pw@h:x y/z", {}, r"PostgreSQL failed: .*\(connecting\)"),
    "url of materialize": ("postgresql://u:pw@h:x y/z", {"materialize": "files"}, "PostgreSQL failed: .*"),
    "no database": ("postgres nosuch", {"snapshot": False}, r"PostgreSQL failed: .*nosuch.*\(connecting\)"),
    "placeholders": ("postgres", {"parameters": {"b": 1}}, r"PostgreSQL failed: .*\(binding parameters\)"),
    "named placeholders": ("sqlite nosuch", {"parameters": {"b": 1}}, r"nosuch.*\(binding parameters\)"),
    "options": ("mariadb?nosuch=1", {}, r"MariaDB failed: TypeError: .*'nosuch' \(connecting\)"),
    "engine": (
        sqlalchemy.create_engine("postgresql+psycopg://u:secret@127.0.0.1:1/db"),
        {},
        r"the SQLAlchemy engine failed: (?!.*secret).*\(connecting\)",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_errors_of_drivers_are_typed(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    connection, options, match = FAILURES[name]
    query = "SELECT 1 AS v"
    if isinstance(connection, str):
        if connection.startswith("sqlite"):
            query, connection = "SELECT nosuch AS v WHERE :b", sqlite_file(tmp_path / "t.db", 1)
        elif connection.startswith("postgres") and "://" not in connection:
            query += " WHERE %s" if "parameters" in options else ""
            connection = request.getfixturevalue("postgres_url") + connection.partition(" ")[2]
        elif connection.startswith("mariadb"):
            connection = request.getfixturevalue("mariadb").url + connection.removeprefix("mariadb")
    options = {key: tmp_path / "files" if key == "materialize" else value for key, value in options.items()}
    with pytest.raises(fastpipe.errors.StorageError, match=f"(?s){match}"):
        numbers(connection, query, **options)


@pytest.mark.parametrize("url", ["mysql+pymysql://u@h:x/db", "mysql+nosuch://u@h/db"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(fastpipe.errors.UnsupportedError, match=r"se mysql\+pymysql://user@host/database"):
        numbers(url)


def test_deeply_nested_queries_are_refused(tmp_path: Path) -> None:
    query = f"SELECT {'(' * 3000}1{')' * 3000} AS v"
    with pytest.raises(fastpipe.errors.UnsupportedError, match="nested too deeply for sqlglot: create a view"):
        numbers(sqlite_file(tmp_path / "t.db", 1), query)
