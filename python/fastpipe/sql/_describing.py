"""Statistics of a query's result, of its first rows or of all rows, without partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from fastpipe._arguments import within
from fastpipe._arrow.schema import require_pyarrow
from fastpipe.specs import Spec
from fastpipe.specs._requests import FeatureRequest
from fastpipe.sql._connecting import engine_of
from fastpipe.sql._engines import selected
from fastpipe.sql._plan import columns_of
from fastpipe.sql._query import Parameters, checked
from fastpipe.sql._reading import interruptible
from fastpipe.sql._result import TableUnit, check_features, schema_of
from fastpipe.statistics import Description
from fastpipe.statistics._counts import require_datasketches
from fastpipe.statistics._description import described
from fastpipe.units._data import read_units

_BATCH = 1 << 16


def describe(
    query: str,
    connection: Any,
    *,
    rows: int | None = 10_000,
    parameters: Parameters = None,
    features: Mapping[str, Spec] | None = None,
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    exact_values: int = 100_000,
) -> Description:
    """Returns statistics of the first rows of a query's result, or of all rows (extra `describe`).

    One query, `SELECT … FROM (query) AS q LIMIT 10000`, reads the rows once. Nothing is planned, so the query may also
    contain `random()` or a LIMIT without ORDER BY, which `read_sql` refuses.

    The rows are the first ones that the database returns. They are neither random nor repeatable: tables are often
    stored in the order of time or of a key, so the first rows may differ from later rows, and another call may read
    other rows. A query with ORDER BY, aggregates or DISTINCT computes its whole result first. For a uniform sample,
    call `describe(rows=10_000)` of a reader, which reads all partitions. For exact statistics, pass `rows=None`.

    Args:
        query: A SELECT statement in the database's dialect.
        connection: What `read_sql` accepts: a URL, a SQLAlchemy Engine, a duckdb connection, or a function that returns
            an Engine or an ADBC connection.
        rows: The maximum number of rows to read, 1 to 2^32 - 1. Defaults to 10,000. None reads all rows.
        parameters: The values of the query's placeholders. Defaults to None: no placeholders.
        features: The spec of each feature, by name. By default, features are inferred from the column types.
        columns: The columns to describe: a list of at least one name, or one name as a string. Defaults to None: all
            columns.
        overrides: Specs that replace some of the inferred specs, by name. Not allowed with `features`. Defaults to
            None: all specs are inferred.
        exact_values: Maximum number of distinct values per feature that are counted exactly, 1 to 2^31. Defaults to
            100,000.

    Returns:
        The statistics by feature name, as `Reader.describe` returns them. Empty if the query returns no rows.

    Raises:
        ImportError: If a library isn't installed. The message names the package to install.
        SchemaError: If a column does not exist or a spec doesn't fit its column. Columns and specs are checked before
            the rows are read.
        StorageError: If the database fails.
        UnsupportedError: If a type is not supported, or has no statistics.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> import fastpipe, sqlite3
        >>> with sqlite3.connect("staff.db") as database:
        ...     _ = database.execute("CREATE TABLE employees (name TEXT, age INT)")
        ...     people = [(f"name {i % 40}", 20 + i % 45) for i in range(20_000)]
        ...     _ = database.executemany("INSERT INTO employees VALUES (?, ?)", people)
        >>> database.close()
        >>> found = fastpipe.sql.describe("SELECT name, age FROM employees", "sqlite:///staff.db")
        >>> found.num_rows, found["name"].n_unique, found["age"].max
        (10000, 40, 64)
        >>> fastpipe.sql.describe("SELECT age FROM employees", "sqlite:///staff.db", rows=None)["age"].mean
        41.9875
    """
    limit = None if rows is None else within("rows", rows, 1, 2**32 - 1)
    exact = within("exact_values", exact_values, 1, 2**31)
    request = FeatureRequest.of(features, columns, overrides)
    require_datasketches()
    pa = require_pyarrow()
    engine = engine_of(connection)
    wanted = engine.bind(checked(query, parameters, engine.dialect, once=True))._replace(limit=limit)

    def work() -> Description:
        sessions = engine.sessions(1, snapshot=False)
        try:
            with engine.errors("describing the query"), sessions.borrow() as session:
                known = columns_of(engine, session, wanted)
                check_features(known, request)
                schema = schema_of(known)

                def reader_of(table: Any) -> Any:
                    unit = TableUnit(pa.table(table.columns, schema=schema))
                    return read_units(
                        unit, features=features, columns=columns, overrides=overrides, batch_size=_BATCH, num_fetches=1
                    )

                def batches() -> Generator[dict[str, Any]]:
                    sql = f"SELECT {selected(engine, known)} FROM {wanted.derived}"
                    with contextlib.closing(engine.stream(session, sql, wanted.parameters, known)) as tables:
                        for table in tables:
                            yield from reader_of(table)

                empty = reader_of(schema.empty_table())
                # The statement is closed before its session, also after an error.
                with contextlib.closing(batches()) as found:
                    return described(found, empty.features, empty.categories, exact_values=exact)
        finally:
            sessions.close()

    return interruptible(work, engine.cancel)
