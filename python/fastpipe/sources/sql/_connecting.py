"""The engine of what a user names as a connection."""

from __future__ import annotations

import urllib.parse
from typing import Any

from fastpipe._arguments import shown
from fastpipe.errors import StorageError, UnsupportedError
from fastpipe.sources.sql._duckdb import Duckdb
from fastpipe.sources.sql._engines import Engine
from fastpipe.sources.sql._postgres import Postgres
from fastpipe.sources.sql._query import require
from fastpipe.sources.sql._sqlalchemy import Alchemy
from fastpipe.sources.sql._sqlite import Sqlite
from fastpipe.sources.sql._user_engines import postgres_of, sqlite_of

__all__ = ["engine_of"]


def engine_of(connection: Any) -> Engine:
    """The engine of a URL, a SQLAlchemy engine, a connection of DuckDB, or a function that returns a connection.

    Raises:
        ImportError: if the database's library isn't installed; it says what to install.
        MissingFileError: if the database is a file, and isn't there.
        TypeError: if it is anything else.
        UnsupportedError: for a URL of no database.
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
        "connection is a URL (postgresql://, sqlite:///, duckdb:///, or one of SQLAlchemy), an Engine of SQLAlchemy, a "
        f"connection of duckdb, or a function that returns a connection, not {shown(connection)}"
    )


def _of_url(url: str) -> Engine:
    scheme, colon, rest = url.partition("://")
    database = scheme.lower().partition("+")[0]
    if not colon or not database:
        reason = (
            "the connection isn't a URL: write postgresql://user@host/database, sqlite:///path.db or duckdb:///path.db"
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
                + ("; give a connection of duckdb for one in memory" if database == "duckdb" else "")
            )
            raise UnsupportedError(reason, reason=reason)
        require("adbc_driver_sqlite" if database == "sqlite" else "duckdb", database)
        return Sqlite(path) if database == "sqlite" else Duckdb(path)
    return Alchemy(url)


def _of_alchemy(engine: Any, factory: Any = None) -> Engine:
    if not hasattr(engine, "url") or hasattr(engine, "sync_engine"):
        raise TypeError(f"connection is an Engine of SQLAlchemy (create_engine), not {shown(engine)}")
    name = engine.url.get_backend_name()
    if name == "sqlite":
        require("adbc_driver_sqlite", "sqlite")
        return sqlite_of(engine)
    if name == "postgresql":
        require("adbc_driver_postgresql", "postgresql")
        return postgres_of(engine)
    if name == "duckdb":
        reason = "an Engine of DuckDB isn't read: give the URL duckdb:///file.db, or a connection of duckdb"
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
        reason = f"connections of ADBC are of SQLite or PostgreSQL, not of {vendor or 'an unknown database'}"
        raise UnsupportedError(reason, reason=reason)
    if module == "sqlalchemy" and hasattr(made, "dialect"):
        return _of_alchemy(made, factory)
    if module in ("duckdb", "_duckdb", "sqlalchemy"):
        return engine_of(made)
    close = getattr(made, "close", None)
    if close is not None:
        close()
    raise TypeError(
        "a connection factory returns a connection of ADBC (adbc_driver_sqlite, adbc_driver_postgresql) or an Engine "
        f"of SQLAlchemy, not {shown(made)}: give the database's URL"
    )
