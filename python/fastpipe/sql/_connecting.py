"""Finds the engine of a connection that a user names or passes.

A user's SQLAlchemy engine may connect to another database than its URL says, because of `connect_args`, `creator` and
event listeners. One of its connections is therefore asked where it is connected, and which tables it sees.
"""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Iterator
from typing import Any

from fastpipe._arguments import shown
from fastpipe.errors import FastpipeError, MissingFileError, StorageError, UnsupportedError, in_file
from fastpipe.sql._duckdb import Duckdb
from fastpipe.sql._engines import Engine
from fastpipe.sql._postgres import Postgres
from fastpipe.sql._query import require
from fastpipe.sql._sqlalchemy import Alchemy
from fastpipe.sql._sqlite import Sqlite

# Settings that decide which tables and rows a query reads. `_SETTINGS` are settings that a new connection can set.
_SETTINGS = ("search_path", "role")
_SEEN = (
    "SELECT current_setting('search_path'), current_setting('role'), current_database()::text, session_user::text, "
    "extract(epoch FROM pg_postmaster_start_time())::text"
)


def sqlite_of(engine: Any) -> Sqlite:
    """Returns the SQLite file that an engine's connections open.

    Raises:
        MissingFileError: If the file does not exist.
        StorageError: If the engine can't connect.
        UnsupportedError: If the database is in memory, or other databases are attached to it.
    """
    path = engine.url.database
    if path and path != ":memory:" and not path.startswith("file:") and not os.path.isfile(path):
        raise in_file(MissingFileError, path, "there is no such file")
    files = {name: file for _, name, file in _rows(engine, "PRAGMA database_list") if name != "temp"}
    if not files["main"]:
        reason = "a database in memory can't be opened by other connections: write it to a file"
        raise UnsupportedError(reason, reason=reason)
    if len(files) > 1:
        attached = ", ".join(sorted(set(files) - {"main"}))
        reason = (
            f"the engine's connections attach other databases ({attached}): pass a function that returns a connection "
            "of adbc_driver_sqlite that attaches them"
        )
        raise UnsupportedError(reason, reason=reason)
    return Sqlite(files["main"])


def postgres_of(engine: Any) -> Postgres:
    """Returns the PostgreSQL database that an engine's connections use, with their role and search path.

    Raises:
        StorageError: If the engine, or fastpipe's own connection, can't connect.
        UnsupportedError: If fastpipe's own connection sees other tables.
    """
    with _connection(engine) as connection:
        parameters = _parameters(engine, connection.driver_connection)
        wanted = _fetched(connection, _SEEN)[0]
    database = Postgres(parameters)
    if (seen := _seen(database)) == wanted:
        return database
    made = require("psycopg.conninfo", "postgresql")
    given = made.conninfo_to_dict(parameters)
    options = [f"-c {name}={_escaped(value)}" for name, value in zip(_SETTINGS, wanted, strict=False)]
    database = Postgres(made.make_conninfo(**{**given, "options": " ".join([given.get("options") or "", *options])}))
    if (seen := _seen(database)) == wanted:
        return database
    reason = (
        f"connections of the SQLAlchemy engine see {_shown(wanted)}, but connections that fastpipe opens with the same "
        f"parameters see {_shown(seen)}: pass a URL with the role and options of the engine's connections "
        "(postgresql://user@host/database?options=-csearch_path%3Dschema), or a function that returns a connection of "
        "adbc_driver_postgresql"
    )
    raise UnsupportedError(reason, reason=reason)


def _seen(database: Postgres) -> tuple[Any, ...]:
    sessions = database.sessions(1, snapshot=False)
    with database.errors("connecting as the SQLAlchemy engine does"), sessions.planner() as session:
        return database.fetch(session, _SEEN, None)[0]


def _parameters(engine: Any, driver: Any) -> str:
    """Returns the libpq parameters of an open connection, or else the engine's URL."""
    info: Any = getattr(driver, "info", None)
    for name in ("get_parameters", "dsn_parameters"):
        found = getattr(info, name, None)
        if found is not None:
            known = dict(found() if callable(found) else found)
            password = {"password": info.password} if info.password else {}
            text: str = require("psycopg.conninfo", "postgresql").make_conninfo(**known, **password)
            return text
    url: str = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    return url


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def _shown(seen: tuple[Any, ...]) -> str:
    path, role, name, user, _ = seen
    return f"database {name} as {user} (role {role}, search_path {path})"


def _rows(engine: Any, sql: str) -> list[tuple[Any, ...]]:
    with _connection(engine) as connection:
        return _fetched(connection, sql)


def _fetched(connection: Any, sql: str) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    try:
        cursor.execute(sql)
        return [tuple(row) for row in cursor.fetchall()]
    finally:
        cursor.close()


@contextlib.contextmanager
def _connection(engine: Any) -> Iterator[Any]:
    """Yields a driver connection from the engine's pool."""
    connection = None
    try:
        connection = engine.raw_connection()
        yield connection
    except (FastpipeError, ImportError):
        raise
    except Exception as error:
        password = str(engine.url.password or "")
        told = str(error).partition("\n[SQL:")[0]
        reason = f"the SQLAlchemy engine failed: {told.replace(password, '***') if password else told}"
        raise StorageError(f"{reason} (connecting)", reason=reason) from None
    finally:
        if connection is not None:
            connection.close()


def engine_of(connection: Any) -> Engine:
    """Returns the engine of a URL, a SQLAlchemy engine, a DuckDB connection, or a connection factory.

    Raises:
        ImportError: If the database's library isn't installed. The message names the package to install.
        MissingFileError: If the database is a file that does not exist.
        TypeError: If the connection has another type.
        UnsupportedError: If a URL doesn't name a supported database.
    """
    if isinstance(connection, str):
        return _of_url(connection)
    module = type(connection).__module__.partition(".")[0]
    if module == "sqlalchemy" and hasattr(connection, "dialect"):
        return _of_alchemy(connection)
    if module == "sqlalchemy" and hasattr(connection, "render_as_string"):
        return _of_url(connection.render_as_string(hide_password=False))
    if module in ("duckdb", "_duckdb") and hasattr(connection, "cursor"):
        return Duckdb(None, connection)
    if callable(connection):
        return _of_factory(connection)
    raise TypeError(
        "connection must be a URL (postgresql://, sqlite:///, duckdb:///, or one of SQLAlchemy), a SQLAlchemy Engine, "
        f"a duckdb connection, or a function that returns a connection; got {shown(connection)}"
    )


def _of_url(url: str) -> Engine:
    scheme, colon, rest = url.partition("://")
    database = scheme.lower().partition("+")[0]
    if not colon or not database:
        reason = (
            "the connection isn't a URL: use postgresql://user@host/database, sqlite:///path.db or duckdb:///path.db"
        )
        raise UnsupportedError(reason, reason=reason)
    if database in ("postgresql", "postgres"):
        require("adbc_driver_postgresql", "postgresql")
        return Postgres(f"postgresql://{rest}")
    if database in ("sqlite", "duckdb"):
        path = urllib.parse.unquote(rest.partition("?")[0])[1:]
        if not rest.startswith("/") or not path or path == ":memory:":
            reason = (
                f"{database}:// names a file: {database}:///relative/path.db or {database}:////absolute/path.db"
                + ("; pass a connection of duckdb for a database in memory" if database == "duckdb" else "")
            )
            raise UnsupportedError(reason, reason=reason)
        require("adbc_driver_sqlite" if database == "sqlite" else "duckdb", database)
        return Sqlite(path) if database == "sqlite" else Duckdb(path)
    return Alchemy(url)


def _of_alchemy(engine: Any, factory: Any = None) -> Engine:
    if not hasattr(engine, "url") or hasattr(engine, "sync_engine"):
        raise TypeError(f"connection must be a SQLAlchemy Engine (create_engine); got {shown(engine)}")
    name = engine.url.get_backend_name()
    if name == "sqlite":
        require("adbc_driver_sqlite", "sqlite")
        return sqlite_of(engine)
    if name == "postgresql":
        require("adbc_driver_postgresql", "postgresql")
        return postgres_of(engine)
    if name == "duckdb":
        reason = "a DuckDB Engine is not supported: pass the URL duckdb:///file.db, or a connection of duckdb"
        raise UnsupportedError(reason, reason=reason)
    return Alchemy(engine.url.render_as_string(hide_password=False), engine, factory)


def _of_factory(factory: Any) -> Engine:
    try:
        made = factory()
        adbc = hasattr(made, "adbc_get_info")
        vendor = str(made.adbc_get_info().get("vendor_name", "")).lower() if adbc else ""
    except Exception as error:
        reason = f"the connection factory failed: {type(error).__name__}: {error}"
        raise StorageError(f"{reason} ({shown(factory)})", reason=reason) from error
    module = type(made).__module__.partition(".")[0]
    if adbc:
        made.close()
        if vendor == "sqlite":
            return Sqlite("connection factory", factory)
        if vendor == "postgresql":
            return Postgres("connection factory", factory)
        reason = f"ADBC connections must be to SQLite or PostgreSQL, not to {vendor or 'an unknown database'}"
        raise UnsupportedError(reason, reason=reason)
    if module == "sqlalchemy" and hasattr(made, "dialect"):
        return _of_alchemy(made, factory)
    if module in ("duckdb", "_duckdb", "sqlalchemy"):
        return engine_of(made)
    close = getattr(made, "close", None)
    if close is not None:
        close()
    raise TypeError(
        "a connection factory must return an ADBC connection (adbc_driver_sqlite, adbc_driver_postgresql) or a "
        f"SQLAlchemy Engine; got {shown(made)}. Pass the database's URL"
    )
