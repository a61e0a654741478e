"""Databases that a user's SQLAlchemy engine connects to.

An engine may connect elsewhere than its URL says: by `connect_args`, `creator` and listeners of events. So one of its
connections is asked where it is connected, and which tables it sees.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from fastpipe.errors import FastpipeError, MissingFileError, StorageError, UnsupportedError
from fastpipe.sources.sql._postgres import Postgres
from fastpipe.sources.sql._query import require
from fastpipe.sources.sql._sqlite import Sqlite

__all__ = ["postgres_of", "sqlite_of"]

# What decides which tables and rows a query reads: names of settings that a connection may be opened with, and others.
_SETTINGS = ("search_path", "role")
_SEEN = (
    "SELECT current_setting('search_path'), current_setting('role'), current_database()::text, session_user::text, "
    "extract(epoch FROM pg_postmaster_start_time())::text"
)


def sqlite_of(engine: Any) -> Sqlite:
    """The file that an engine's connections open.

    Raises:
        MissingFileError: if the file isn't there.
        StorageError: if the engine can't connect.
        UnsupportedError: if the database is in memory, or has attached others.
    """
    path = engine.url.database
    if path and path != ":memory:" and not path.startswith("file:") and not os.path.isfile(path):
        raise MissingFileError(f"there is no such file (file {path})", path=path, reason="there is no such file")
    files = {name: file for _, name, file in _rows(engine, "PRAGMA database_list") if name != "temp"}
    if not files["main"]:
        reason = "a database in memory can't be opened again: write it to a file"
        raise UnsupportedError(reason, reason=reason)
    if len(files) > 1:
        attached = ", ".join(sorted(set(files) - {"main"}))
        reason = (
            f"the engine's connections attach other databases ({attached}): give a function that returns a connection "
            "of adbc_driver_sqlite that attaches them"
        )
        raise UnsupportedError(reason, reason=reason)
    return Sqlite(files["main"])


def postgres_of(engine: Any) -> Postgres:
    """The database that an engine's connections use, with their role and search path.

    Raises:
        StorageError: if the engine can't connect, or its database can't be connected to.
        UnsupportedError: if another connection to it sees other tables.
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
        f"connections of the SQLAlchemy engine see {_shown(wanted)}, and those that fastpipe opens with the same "
        f"parameters see {_shown(seen)}: give a URL with the role and options of the engine's connections "
        "(postgresql://user@host/database?options=-csearch_path%3Dschema), or a function that returns a connection of "
        "adbc_driver_postgresql"
    )
    raise UnsupportedError(reason, reason=reason)


def _seen(database: Postgres) -> tuple[Any, ...]:
    sessions = database.sessions(1, snapshot=False)
    with database.errors("connecting as the SQLAlchemy engine does"), sessions.planner() as session:
        return database.fetch(session, _SEEN, None)[0]


def _parameters(engine: Any, driver: Any) -> str:
    """The parameters of libpq that a connection was opened with, or else the engine's URL."""
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
    """A connection of the engine's pool, as the driver has it."""
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
