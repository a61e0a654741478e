"""Results written once, and read as Parquet files."""

from __future__ import annotations

import contextlib
import os
import tempfile

from fastpipe.errors import FastpipeError, StorageError
from fastpipe.sources.sql._engines import Engine
from fastpipe.sources.sql._query import Query

__all__ = ["written"]

_GROUP_ROWS = 1 << 17


def written(engine: Engine, query: Query, directory: str, digest: str) -> str:
    """Writes a result as a Parquet file, unless it is there already.

    Several processes may do so at once: each writes a file of its own, and the first that is finished stays.

    Args:
        engine: the database.
        query: run once.
        directory: is made if it isn't there.
        digest: names the file.

    Returns:
        The file's path.

    Raises:
        StorageError: if the database or the disk fails.
    """
    path = os.path.join(directory, f"{digest}.parquet")
    if os.path.exists(path):
        return path
    try:
        os.makedirs(directory, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(prefix=f".{digest}-", suffix=".unfinished", dir=directory)
    except OSError as error:
        reason = f"the directory of materialize can't be written: {error.strerror}"
        raise StorageError(f"{reason} (file {directory})", path=directory, reason=reason) from error
    os.close(handle)
    try:
        _write(engine, query, unfinished)
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    except OSError as error:
        if isinstance(error, FastpipeError):
            raise
        reason = f"the result can't be written into the directory of materialize: {error.strerror or error}"
        raise StorageError(f"{reason} (file {path})", path=path, reason=reason) from error
    finally:
        os.unlink(unfinished)
    return path


def _write(engine: Engine, query: Query, path: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    sessions = engine.sessions(1, snapshot=True)
    try:
        with engine.errors("materializing the query"), sessions.borrow() as session:
            columns = engine.columns(session, query)
            schema = pa.schema([(column.name, column.type) for column in columns])
            selected = ", ".join(column.read.format(engine.quote(column.name)) for column in columns)
            sql = f"SELECT {selected} FROM {query.derived}"
            with pyarrow.parquet.ParquetWriter(path, schema) as writer:
                for table in engine.stream(session, sql, query.parameters, columns):
                    writer.write_table(table, row_group_size=_GROUP_ROWS)
    finally:
        sessions.close()
