"""`fastpipe.sql.describe` reads a query once, and readers check features before they plan one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adbc_driver_postgresql.dbapi
import adbc_driver_sqlite.dbapi
import duckdb
import pytest
import sqlalchemy

import fastpipe
import sql_databases

ROWS = 300


@pytest.fixture(
    scope="module",
    params=["sqlite", "sqlite factory", "duckdb", "postgres", "postgres factory", "sqlalchemy", "mariadb"],
)
def connection(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yields the connections that `read_sql` takes, to databases with the same table `t`."""
    if request.param == "mariadb":
        engine = sqlalchemy.create_engine(request.getfixturevalue("mariadb").url)
        rows = [(row[0], row[1], row[3], row[6]) for row in sql_databases.rows_of_t(ROWS)]
        with engine.begin() as opened:
            opened.exec_driver_sql("CREATE OR REPLACE TABLE t (id INT PRIMARY KEY, k INT, g VARCHAR(40), d DATE)")
            opened.exec_driver_sql("INSERT INTO t VALUES (%s, %s, %s, %s)", rows)
        yield engine
        engine.dispose()
        return
    if request.param == "duckdb":
        found = sql_databases.duck(ROWS)
    elif request.param.startswith("postgres"):
        found = sql_databases.postgres(request.getfixturevalue("postgres").new_database(), ROWS)
    else:
        found = sql_databases.sqlite(Path(tmp_path_factory.mktemp("sqlite")) / "t.db", ROWS)
    url: Any = found.connection
    if request.param == "sqlalchemy":
        yield sqlalchemy.create_engine(url)
    elif request.param.endswith("factory"):
        adbc: Any = adbc_driver_sqlite.dbapi if found.name == "sqlite" else adbc_driver_postgresql.dbapi
        yield lambda: adbc.connect(url.removeprefix("sqlite:///"))
    else:
        yield url
    found.close()


def numbers(description: fastpipe.typing.Description) -> Any:
    """Returns the statistics that don't depend on the order of the rows."""
    names = ("dtype", "count", "null_count", "n_unique")
    return description.num_rows, {
        name: ([getattr(found, each) for each in names], sorted(found.value_counts().items()))
        for name, found in description.items()
    }


QUERY = "SELECT id, k, lower(g) AS g, d FROM t WHERE id >= 30"


def test_all_rows_have_the_statistics_of_a_reader(connection: Any) -> None:
    found = fastpipe.sql.describe(QUERY, connection, rows=None)
    assert found.num_rows == ROWS - 10
    assert numbers(found) == numbers(fastpipe.read_sql(QUERY, connection, batch_size=32).describe())
    assert found["id"].mean == (30 + 3 * (ROWS - 1)) / 2


@pytest.mark.parametrize("rows", [1, 17, ROWS - 10, 10_000])
def test_the_first_rows_are_described(connection: Any, rows: int) -> None:
    found = fastpipe.sql.describe(f"{QUERY} ORDER BY id -- first", connection, rows=rows)
    assert found.num_rows == min(rows, ROWS - 10)
    assert (found["id"].min, found["id"].max) == (30, 27 + 3 * found.num_rows)


def test_queries_that_cannot_be_repeated_are_described(connection: Any) -> None:
    query = "SELECT id, k FROM t LIMIT 50"
    with pytest.raises(fastpipe.errors.UnsupportedError, match=r"LIMIT without ORDER BY.*fastpipe\.sql\.describe\("):
        fastpipe.read_sql(query, connection, batch_size=8)
    assert fastpipe.sql.describe(query, connection).num_rows == 50


def test_a_query_without_rows(connection: Any) -> None:
    found = fastpipe.sql.describe("SELECT id FROM t WHERE 1 = 0", connection)
    assert (found.num_rows, list(found)) == (0, [])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"columns": ["id", "nope"]}, "no column 'nope'"),
    ({"features": {"g": fastpipe.RaggedSpec((None,), "string")}}, "the column has no lists"),
    ({"features": {"id": fastpipe.DenseSpec((), "string")}}, "don't fit string"),
    ({"overrides": {"idd": fastpipe.DenseSpec((), "int32")}}, "did you mean 'id'"),
    ({"columns": "id", "overrides": {"k": fastpipe.DenseSpec((), "int32")}}, "columns= doesn't select"),
]


@pytest.mark.parametrize(("arguments", "match"), WRONG)
def test_features_that_do_not_fit_are_errors(connection: Any, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(fastpipe.errors.SchemaError, match=match):
        fastpipe.sql.describe(QUERY, connection, **arguments)
    with pytest.raises(fastpipe.errors.SchemaError, match=match):
        fastpipe.read_sql(QUERY, connection, batch_size=8, **arguments)


def test_features_are_described_with_their_specs(connection: Any) -> None:
    words = fastpipe.VocabularySpec(["a", "missing"], on_unknown="bucket", fill=3)
    found = fastpipe.sql.describe(QUERY, connection, columns=["id", "g"], overrides={"g": words})
    assert list(found) == ["id", "g"]
    assert (found["g"].dtype, found["g"].null_count, set(found["g"].value_counts())) == ("int64", 0, {0, 2, 3})


class Counted:
    """A DuckDB table of a million rows, whose column `n` counts the values that the database computes."""

    def __init__(self) -> None:
        self.connection, self.values = duckdb.connect(), 0
        self.connection.create_function("counted", self._next, [duckdb.sqltype("BIGINT")], duckdb.sqltype("BIGINT"))
        self.connection.execute("CREATE TABLE t AS SELECT range AS i FROM range(1000000)")

    def _next(self, value: int) -> int:
        self.values += 1
        return value


def test_only_the_first_rows_are_computed() -> None:
    table = Counted()
    found = fastpipe.sql.describe("SELECT counted(i) AS n FROM t", table.connection, rows=100)
    assert found.num_rows == 100
    # DuckDB computes vectors of 2,048 values.
    assert table.values <= 4 * 2048


@pytest.mark.parametrize("materialized", [False, True])
@pytest.mark.parametrize(("arguments", "match"), [({"columns": "nope"}, "'nope'"), WRONG[1]])
def test_features_are_checked_before_the_query_is_run(
    arguments: dict[str, Any], match: str, materialized: bool, tmp_path: Path
) -> None:
    table = Counted()
    query = "SELECT counted(i) AS n, 'a' AS g FROM t"
    folder = {"materialize": tmp_path / "files"} if materialized else {}
    with pytest.raises(fastpipe.errors.SchemaError, match=match):
        fastpipe.read_sql(query, table.connection, batch_size=8, **folder, **arguments)
    assert table.values == 0
    assert not materialized or not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"rows": 0}, ValueError, "rows must be between 1 and"),
        ({"rows": "all"}, TypeError, "rows must be an integer"),
        ({"exact_values": 0}, ValueError, "exact_values must be between"),
        ({"columns": []}, ValueError, "columns"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fastpipe.sql.describe("SELECT 1 AS one", duckdb.connect(), **arguments)
