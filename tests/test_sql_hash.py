"""Partitions by a hash: each row is in exactly one of them, and stays there when rows are added."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import duckdb
import numpy as np
import psycopg
import pytest
import sqlalchemy
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from sql_databases import rows_of

PRIME = 2**31 - 1
COLUMNS = ["a", "b", "s", "x", "n", "d", "f"]
TYPES = {
    "sqlite": ["INT", "INT", "TEXT", "REAL", "TEXT", "TEXT", "BOOLEAN"],
    "duckdb": ["BIGINT", "SMALLINT", "VARCHAR", "DOUBLE", "DECIMAL(12, 2)", "DATE", "BOOLEAN"],
    "postgres": ["bigint", "smallint", "text", "float8", "decimal(12, 2)", "date", "boolean"],
    "mariadb": ["BIGINT", "SMALLINT", "VARCHAR(40) COLLATE utf8mb4_bin", "DOUBLE", "DECIMAL(12, 2)", "DATE", "BOOLEAN"],
}
# Text that is harmless in every database: PostgreSQL stores no NUL characters.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
ROWS = st.lists(
    st.tuples(
        st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3),
        st.none() | st.integers(-(2**15), 2**15 - 1),
        st.none() | TEXTS | st.sampled_from(["", "a", "A", "'", "%s", "?", "\\", "NULL"]),
        st.none() | st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False, width=32),
        st.none() | st.decimals("-9999999", "9999999", places=2),
        st.none() | st.dates(datetime.date(1970, 1, 1), datetime.date(2100, 1, 1)),
        st.none() | st.booleans(),
    ),
    max_size=40,
)


class Server:
    """A database with an empty table `t`, which also has a column `i` that numbers its rows."""

    def __init__(self, kind: str, connection: Any, own: Any, mark: str) -> None:
        self.kind, self.connection, self._own, self._mark = kind, connection, own, mark
        columns = ", ".join(f"{name} {type_}" for name, type_ in zip(COLUMNS, TYPES[kind], strict=True))
        self.run(f"CREATE TABLE t (i INT NOT NULL, {columns})")

    def run(self, sql: str, values: Sequence[Any] = ()) -> Any:
        if self.kind == "mariadb":
            return self._own.exec_driver_sql(sql, tuple(values) or None)
        return self._own.execute(sql, list(values)) if values else self._own.execute(sql)

    def fill(self, rows: Sequence[Sequence[Any]], first: int = 0) -> None:
        """Adds rows to the table. SQLite gets text instead of decimals and dates."""
        if not first:
            self.run("DELETE FROM t")
        for i, row in enumerate(rows, first):
            texts = (decimal.Decimal, datetime.date) if self.kind == "sqlite" else ()
            values = [str(value) if isinstance(value, texts) else value for value in row]
            self.run(f"INSERT INTO t VALUES ({', '.join([self._mark] * (len(values) + 1))})", [i, *values])
        if self.kind in ("sqlite", "mariadb"):
            self._own.commit()

    def parts(self, by: Any, number: int) -> list[tuple[str, list[int]]]:
        """Returns the predicate of each partition, and the numbers of its rows according to the database's driver."""
        plan = self.plan(by=by, num_partitions=number)
        assert len(plan.queries) <= 1 + (by is None)
        assert not any("ORDER BY" in query for query in plan.queries)
        found = []
        for part in plan.partitions:
            where = part.predicate or "1 = 1"
            rows = self.run(f"SELECT i FROM (SELECT * FROM t) AS q WHERE {where}").fetchall()
            assert len(rows) == part.rows > 0
            found.append((where, sorted(row[0] for row in rows)))
        return found

    def plan(self, query: str = "SELECT * FROM t", **options: Any) -> fastpipe.sql.SqlPlan:
        return fastpipe.sql.partition_sql(query, self.connection, method="hash", **options)


@pytest.fixture(scope="module", params=["sqlite", "duckdb", "postgres", "mariadb"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with contextlib.ExitStack() as stack:
        kind, mark = request.param, "?"
        if kind == "sqlite":
            path = tmp_path_factory.mktemp("sqlite") / "t.db"
            own: Any = stack.enter_context(contextlib.closing(sqlite3.connect(path)))
            url: Any = f"sqlite:///{path}"
        elif kind == "duckdb":
            url = own = stack.enter_context(duckdb.connect())
        elif kind == "postgres":
            url, mark = request.getfixturevalue("postgres").new_database(), "%s"
            own = stack.enter_context(psycopg.connect(url, autocommit=True))
        else:
            engine = sqlalchemy.create_engine(request.getfixturevalue("mariadb").url)
            stack.callback(engine.dispose)
            own, url, mark = stack.enter_context(engine.connect()), engine, "%s"
        yield Server(kind, url, own, mark)


def keys_of(server: Server) -> list[Any]:
    """Returns the keys that the server hashes. SQLite hashes only integers."""
    return ["a", ["a", "b"], ["b", "a"]] if server.kind == "sqlite" else ["a", ["b", "s"], "s", "x", "n", "d", COLUMNS]


@given(rows=ROWS, added=ROWS, number=st.integers(2, 70), which=st.integers(0, 5))
def test_each_row_is_in_one_partition_and_stays_there(
    server: Server, rows: list[Any], added: list[Any], number: int, which: int
) -> None:
    keys = keys_of(server)
    by = keys[which % len(keys)]
    server.fill(rows)
    before = server.parts(by, number)
    assert len(before) <= number
    assert sorted(i for _, part in before for i in part) == list(range(len(rows)))
    # Rows with equal keys are together. The hash distinguishes 0.0 and -0.0 in some databases.
    names = [by] if isinstance(by, str) else by
    if "x" not in names:
        values = [tuple(row[COLUMNS.index(name)] for name in names) for row in rows]
        places = {i: place for place, (_, part) in enumerate(before) for i in part}
        assert len({(value, places[i]) for i, value in enumerate(values)}) == len(set(values))
    server.fill(added, first=len(rows) or 10**6)
    after = dict(server.parts(by, number))
    if len(before) > 1:
        assert all(set(part) <= set(after[predicate]) for predicate, part in before)


def lehmer(value: int | None) -> int:
    """Returns the hash of an integer with the sign of the remainder that SQL has."""
    return 0 if value is None else abs(value) % PRIME * 1583458089 % PRIME


@given(rows=ROWS, number=st.integers(2, 9))
def test_integers_have_the_same_hash_in_all_databases(server: Server, rows: list[Any], number: int) -> None:
    server.fill(rows)
    expected: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        expected.setdefault((lehmer(row[0]) * 48271 + lehmer(row[1])) % PRIME % number, []).append(i)
    assert [part for _, part in server.parts(["a", "b"], number)] == [expected[part] for part in sorted(expected)]


def test_hashes_spread_values_evenly(server: Server) -> None:
    """Checks that the largest of 16 partitions isn't much larger than the mean, for many patterns of values."""
    count = 4000
    texts = [f"user {i}" for i in range(count)]
    patterns: dict[str, list[Any]] = {
        "a": [i * 1024 - 10**6 for i in range(count)],
        "b": [i - 2000 for i in range(count)],
        "s": [uuid.UUID(int=i).hex for i in range(count)],
    }
    server.fill([(a, b, s, None, None, None, None) for a, b, s in zip(*patterns.values(), strict=True)][:count])
    for by in ["a", "b", ["a", "b"], *([] if server.kind == "sqlite" else ["s", ["b", "s"]])]:
        assert server.plan(by=by, num_partitions=16).skew < 1.35, (by, texts[0])


@pytest.mark.parametrize("number", [5, "auto"])
def test_readers_read_partitions_by_hash(server: Server, number: Any) -> None:
    rows = [(i % 700 - 50 if i % 9 else None, i % 40, f"s{i}", i / 4, None, None, None) for i in range(1000)]
    server.fill(rows)
    options: dict[str, Any] = {"by": "a", "method": "hash", "num_partitions": number, "preferred_rows": 300}
    plan = fastpipe.sql.partition_sql("SELECT * FROM t", server.connection, **options)
    # With "auto", the number is the power of two from which partitions have at most the preferred number of rows.
    assert (plan.method, plan.by, plan.heaviest, len(plan.partitions)) == (
        "hash",
        ("a",),
        None,
        5 if number == 5 else 4,
    )
    assert "by a hash of a" in str(plan)
    reader = fastpipe.read_sql("SELECT i, a FROM t", server.connection, batch_size=64, shuffle=True, seed=1, **options)
    found = [row for batch in reader for row in rows_of(batch)]
    assert Counter(found) == Counter((i, row[0]) for i, row in enumerate(rows))
    assert [part.rows for part in reader.partition(len(plan.partitions))] == [part.rows for part in plan.partitions]


def test_preferred_rows_set_the_number_of_partitions(server: Server) -> None:
    server.fill([(i, 0, f"s{i}", 0.5, None, None, None) for i in range(500)])
    for method in ("range", "hash"):
        reader = fastpipe.read_sql(
            "SELECT i, a FROM t", server.connection, by="a", method=method, preferred_rows=125, batch_size=64
        )
        assert reader.locate(0, 0).name.startswith("partition 0 of 4 of the query")


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"by": ["a", "s"]}, fastpipe.errors.UnsupportedError, "SQLite has no hash of string, so 's' .* method='range'"),
    ({"by": "nope"}, fastpipe.errors.SchemaError, "by contains 'nope'"),
    ({"query": "SELECT DISTINCT s, x FROM t"}, fastpipe.errors.UnsupportedError, "no column that SQLite can hash"),
]


@pytest.mark.parametrize(("options", "error", "match"), REFUSED)
def test_keys_without_a_hash_are_refused(
    tmp_path: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "t.db")) as own:
        server = Server("sqlite", f"sqlite:///{tmp_path / 't.db'}", own, "?")
        server.fill([(1, 2, "s", 0.5, "n", "d", True)])
        with pytest.raises(error, match=match):
            server.plan(**options, num_partitions=4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "modulo"}, "method must be 'auto', 'range' or 'hash'; got 'modulo'"),
        ({"preferred_rows": 0}, "preferred_rows must be between 1 and"),
    ],
)
@pytest.mark.parametrize("function", [fastpipe.read_sql, fastpipe.sql.partition_sql])
def test_wrong_arguments(function: Callable[..., Any], options: dict[str, Any], match: str) -> None:
    more = {"batch_size": 4} if function is fastpipe.read_sql else {}
    with pytest.raises(ValueError, match=match):
        function("SELECT 1 AS one", duckdb.connect(), **more, **options)


def test_the_predicate_of_the_design_document_leaves_out_rows(server: Server) -> None:
    """Checks what the manual says of `hash(a) + hash(b) % 100 = k`: it is another sum, and NULL for NULLs."""
    keys = np.random.default_rng(3).integers(-9, 9, 90)
    server.fill([(int(key) if key % 3 else None, 0, "", 0.0, None, None, None) for key in keys])
    selected = 0
    # MariaDB's driver formats `%`, and SQLite may lack `MOD`.
    remainder = "i * 104729 % 100" if server.kind == "sqlite" else "MOD(i * 104729, 100)"
    for part in range(100):
        selected += len(server.run(f"SELECT i FROM t WHERE a * 7919 + {remainder} = {part}").fetchall())
    assert selected < 90 / 2
