"""How results are divided into partitions: keys of any distribution, with or without an index."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import psycopg
import pyarrow as pa
import pytest

import fastpipe
from sql_databases import multiset, rows_of

LEAST, MOST = -(2**63), 2**63 - 1

Filled = Callable[[str, Sequence[str], Sequence[Sequence[Any]]], Any]


@pytest.fixture(params=["sqlite", "duckdb", "postgres"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Filled:
    """Returns a function that creates a table `t` of the given columns, and returns the connection for `read_sql`."""

    def fill(definition: str, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> Any:
        create = f"CREATE TABLE t ({definition})"
        if request.param == "sqlite":
            with sqlite3.connect(tmp_path / "t.db") as connection:
                connection.execute(create.replace("bigint PRIMARY", "INTEGER PRIMARY"))
                marks = ", ".join("?" * len(names))
                connection.executemany(f"INSERT INTO t VALUES ({marks})", zip(*columns, strict=True))
            connection.close()
            return f"sqlite:///{tmp_path / 't.db'}"
        if request.param == "duckdb":
            memory = duckdb.connect()
            memory.execute(create)
            given = pa.table([pa.array(column, pa.int64()) for column in columns], names=list(names))
            memory.register("given", given)
            memory.execute("INSERT INTO t SELECT * FROM given")
            memory.unregister("given")
            return memory.cursor
        url = request.getfixturevalue("postgres").new_database()
        with psycopg.connect(url) as connected:
            connected.execute(create)
            with connected.cursor().copy("COPY t FROM STDIN") as copy:
                for row in zip(*columns, strict=True):
                    copy.write_row(row)
        return url

    return fill


def zipf(rows: int) -> list[int | None]:
    """Returns keys with a Zipf distribution of exponent 1.2, and 20 % NULLs."""
    draw = np.random.default_rng(7)
    keys = np.minimum(draw.zipf(1.2, rows), MOST // 2)
    return [None if null else int(key) for key, null in zip(keys, draw.random(rows) < 0.2, strict=True)]


@pytest.mark.parametrize("partitions", [4, 20, 100])
def test_skewed_keys(filled: Filled, partitions: int) -> None:
    rows = 50_000
    keys = zipf(rows)
    connection = filled("k bigint, v bigint", ["k", "v"], [keys, range(rows)])
    alone = fastpipe.sql.partition_sql("SELECT k, v FROM t", connection, num_partitions=partitions, by="k")
    assert alone.heaviest == keys.count(None)
    assert max(part.rows for part in alone.partitions) <= max(1.01 * alone.heaviest, 1.05 * rows / partitions)
    assert alone.skew <= max(1.25, alone.skew_bound)
    # A second column can separate rows with equal keys.
    for by in (None, ["k", "v"]):
        plan = fastpipe.sql.partition_sql("SELECT k, v FROM t", connection, num_partitions=partitions, by=by)
        assert plan.rows == rows
        assert 0.9 * partitions <= len(plan.partitions) <= partitions
        assert plan.skew <= 1.25
        assert plan.skew_bound == 1.0


KEYS = {
    "dense": range(-500, 1500),
    "steps": range(0, 20_000, 10),
    "gap": [*range(1000), *range(10**15, 10**15 + 1000)],
    "on_uneven": [*range(1500), *range(10**6, 10**7, 18_000)],
    "squares": [i * i * i for i in range(2000)],
    "extremes": [LEAST, *range(-3, 3), MOST],
    "most": [MOST - i for i in range(300)],
    "least": [LEAST + i for i in range(300)],
    "one": [MOST],
    "two": [LEAST, MOST],
    "none": [],
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_primary_keys(filled: Filled, keys: Sequence[int]) -> None:
    connection = filled("k bigint PRIMARY KEY, v bigint", ["k", "v"], [keys, range(len(keys))])
    for partitions in (1, 8, 50):
        plan = fastpipe.sql.partition_sql("SELECT v, k FROM t", connection, num_partitions=partitions)
        assert plan.rows == len(keys)
        assert len(plan.partitions) <= partitions
        if len(keys) >= 1000 and partitions > 1:
            assert len(plan.partitions) >= 0.9 * partitions
            assert plan.skew <= 1.25
        if not keys:
            continue
        reader = fastpipe.read_sql("SELECT v, k FROM t", connection, num_partitions=partitions, batch_size=64)
        assert sorted(key for batch in reader for key in batch["k"].tolist()) == sorted(keys)


@pytest.mark.parametrize("gap", [0, 1, 30_000])
def test_many_numbers_without_gaps(filled: Filled, gap: int) -> None:
    """Checks that counting rows shows whether all keys of a range exist, and detects a gap."""
    rows, begin = 70_000 + gap, -20_000
    keys = [begin + i for i in range(rows) if not 35_000 <= i < 35_000 + gap]
    connection = filled("k bigint PRIMARY KEY, v bigint", ["k", "v"], [keys, range(len(keys))])
    for partitions in (1, 8, 50):
        plan = fastpipe.sql.partition_sql("SELECT k FROM t", connection, num_partitions=partitions)
        assert plan.rows == len(keys)
        assert len(plan.partitions) == partitions
        assert plan.skew <= 1.25
        # The queries find the ends, gaps near the ends, and a count. A gap adds a sample and a count per partition.
        assert len(plan.queries) <= (5 if gap else 3)
    reader = fastpipe.read_sql("SELECT k FROM t", connection, num_partitions=8, batch_size=1024)
    assert np.concatenate([batch["k"] for batch in reader]).tolist() == keys


@pytest.mark.parametrize("rows", [50_000, 50_001])
@pytest.mark.parametrize("partitions", [100, 90, 7])
def test_keys_without_gaps_fill_all_partitions(filled: Filled, rows: int, partitions: int) -> None:
    connection = filled("k bigint PRIMARY KEY", ["k"], [range(5, 5 + rows)])
    plan = fastpipe.sql.partition_sql("SELECT k FROM t", connection, num_partitions=partitions)
    assert (plan.rows, len(plan.partitions)) == (rows, partitions)
    assert plan.skew <= 1.15


def test_a_query_of_many_rows_without_a_key_is_counted_once(filled: Filled) -> None:
    """Checks that rows are counted by a hash, unless it is uneven: then the rows of each value are counted."""
    rows = 30_000
    columns = [[i * 7919 % 100_003 for i in range(rows)], [i % 3 for i in range(rows)]]
    connection = filled("a bigint, b bigint", ["a", "b"], columns)
    # A derived table hides the row IDs of SQLite.
    table = "(SELECT * FROM t) AS derived"
    for query in (f"SELECT a, b FROM {table}", "SELECT DISTINCT a, b FROM t"):
        plan = fastpipe.sql.partition_sql(query, connection, num_partitions=8)
        assert (plan.method, plan.rows, len(plan.partitions)) == ("hash", rows, 8)
        assert plan.skew <= 1.15
        assert len([text for text in plan.queries if "LIMIT 2000" not in text]) == 1
    # Hashing three values can't make eight partitions of one size, but adding another column to the key can.
    plan = fastpipe.sql.partition_sql(f"SELECT b, 1.5 AS x FROM {table}", connection, num_partitions=8)
    assert (plan.rows, len(plan.partitions)) == (rows, 3)
    plan = fastpipe.sql.partition_sql(
        f"SELECT a / 1000 AS few, 'u' || a AS s FROM {table}", connection, num_partitions=8
    )
    assert (plan.rows, len(plan.partitions)) == (rows, 8)
    assert plan.skew <= 1.15


def test_primary_keys_with_parameters(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v INT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(i, i % 7) for i in range(1000)])
    connection.close()
    url = f"sqlite:///{tmp_path / 't.db'}"
    reader = fastpipe.read_sql("SELECT k FROM t WHERE v = ? AND k > ?", url, parameters=[3, 99], batch_size=5)
    assert [key for batch in reader for key in batch["k"].tolist()] == [i for i in range(100, 1000) if i % 7 == 3]


# Queries of t, whose primary key is k, and whether partitions are divided by the key.
FOUND = {
    "SELECT k, v FROM {schema}.t": True,
    'SELECT v FROM {schema}."t" AS s': True,
    "SELECT k, abs(v) AS a, coalesce(w, 'it''s (FROM') AS c FROM t": True,
    "SELECT v FROM t": True,
    "SELECT v, w -- no key, FROM the table\nFROM t AS s WHERE v > 5 -- to the end": True,
    "SELECT w AS k FROM t": True,
    "SELECT w AS k, v AS k_ FROM {schema}.t ORDER BY v, k": True,
    "SELECT K AS key, V FROM T": True,
    "SELECT s.* FROM t AS s": True,
    "SELECT v IS DISTINCT FROM 5 AS d, CAST(v AS VARCHAR(9)) AS c FROM t WHERE v IN (SELECT v FROM u)": True,
    "SELECT v FROM t ORDER BY v LIMIT 90": True,
    "SELECT max(k) AS k FROM t WHERE v < 0": False,
    "SELECT count(*) AS n FROM t": False,
    "SELECT k, min(v) OVER () AS n FROM t": False,
    "SELECT v FROM t GROUP BY v": False,
    "SELECT DISTINCT v FROM t": False,
    "SELECT t.k, u.v FROM t JOIN u ON t.v = u.v": "joined",
    "SELECT u.v, count_.n FROM t LEFT JOIN u ON t.v = u.v CROSS JOIN (SELECT count(*) AS n FROM u) AS count_": "joined",
    "SELECT abs(s.v) AS k FROM {schema}.t AS s, u WHERE s.k > 20 AND u.v = 3": "joined",
    "SELECT s.* FROM t AS s JOIN u ON s.v = u.v": "joined",
    "SELECT t.k, u.v FROM u LEFT JOIN t ON t.v = u.v": False,
    "SELECT count(u.v) AS n FROM t JOIN u ON t.v = u.v": False,
    "SELECT t.k, min(u.v) AS m FROM t JOIN u ON t.v = u.v GROUP BY t.k": False,
    "SELECT v FROM u": False,
    "SELECT k, v FROM twice": False,
}
# Tables of SQLite without a primary key have row IDs.
FOUND_BY_ROW_ID = {
    "SELECT v FROM u": True,
    "SELECT t.k, u.v FROM u LEFT JOIN t ON t.v = u.v": "joined",
}
FOUND_BY_POSTGRESQL = {
    "SELECT v FROM postgres.public.t": None,
    "SELECT extract(year FROM d) AS y FROM (VALUES (date '2026-01-01')) AS s (d)": False,
    "SELECT v FROM ONLY t": True,
    "SELECT t.k, u.v FROM t RIGHT JOIN u ON t.v = u.v": False,
    "SELECT t.k, u.v FROM t JOIN u ON t.v = u.v FULL JOIN u AS u2 ON u2.v = t.k": False,
    "SELECT t.v, two FROM t JOIN LATERAL generate_series(1, t.v) AS two ON true": "joined",
    "SELECT k, generate_series(1, 2) AS g FROM t": False,
    'SELECT k, "Two Rows"(v) AS g FROM t': False,
    "SELECT k, public.two_rows(v) AS g FROM t": False,
    "SELECT (regexp_matches(w, '.', 'g'))[1] AS r, v FROM t": False,
    "SELECT k FROM t AS s (v, w, k)": False,
    'SELECT "K" AS k FROM capitals': True,
    'SELECT "K" FROM capitals': True,
    'SELECT "V" FROM capitals': True,
    "SELECT v FROM pieces": True,
    "SELECT v FROM parent": False,
    "SELECT (c).* FROM composite": False,
    "SELECT our_sum(v) AS s FROM t": False,
}
PREPARE = {
    "sqlite": [
        "CREATE TABLE t (k INTEGER PRIMARY KEY, v INT, w TEXT)",
        "CREATE VIEW twice AS SELECT k, v FROM t UNION ALL SELECT NULL, v FROM t",
    ],
    "postgres": [
        "CREATE TABLE t (k int PRIMARY KEY, v int, w text)",
        "CREATE VIEW twice AS SELECT k, v FROM t UNION ALL SELECT NULL, v FROM t",
        "CREATE FUNCTION \"Two Rows\"(int) RETURNS SETOF int LANGUAGE sql AS 'SELECT $1 UNION ALL SELECT $1' STABLE",
        "CREATE FUNCTION two_rows(int) RETURNS SETOF int LANGUAGE sql AS 'SELECT $1 UNION ALL SELECT $1' STABLE",
        "CREATE AGGREGATE our_sum(int) (SFUNC = int4pl, STYPE = int, INITCOND = '0')",
        'CREATE TABLE capitals (k int, "K" int PRIMARY KEY, "V" int)',
        "INSERT INTO capitals SELECT NULLIF(i % 5, 0), i, i FROM generate_series(1, 200) AS g (i)",
        "CREATE TABLE pieces (k int PRIMARY KEY, v int) PARTITION BY RANGE (k)",
        "CREATE TABLE pieces_1 PARTITION OF pieces FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE pieces_2 PARTITION OF pieces FOR VALUES FROM (100) TO (1000)",
        "INSERT INTO pieces SELECT i, i FROM generate_series(1, 200) AS g (i)",
        "CREATE TABLE parent (k int PRIMARY KEY, v int)",
        "CREATE TABLE child () INHERITS (parent)",
        "INSERT INTO parent SELECT i, i FROM generate_series(1, 100) AS g (i)",
        "INSERT INTO child SELECT i, i FROM generate_series(1, 100) AS g (i)",
        "CREATE TYPE pair AS (k int, b int)",
        "CREATE TABLE composite (k int PRIMARY KEY, c pair)",
        "INSERT INTO composite SELECT i, ROW(NULLIF(i % 5, 0), i)::pair FROM generate_series(1, 200) AS g (i)",
    ],
}


@pytest.fixture(scope="module", params=["sqlite", "duckdb", "postgres"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Returns the connection for `read_sql`, and a connection of the driver to the same database."""
    if request.param == "sqlite":
        path = Path(tmp_path_factory.mktemp("sqlite")) / "t.db"
        own: Any = sqlite3.connect(path)
        url: Any = f"sqlite:///{path}"
        mark = "?"
    elif request.param == "duckdb":
        url = own = duckdb.connect()
        mark = "?"
    else:
        url, mark = request.getfixturevalue("postgres").new_database(), "%s"
        own = psycopg.connect(url, autocommit=True)
    for statement in [*PREPARE.get(request.param, PREPARE["sqlite"]), "CREATE TABLE u (v INT)"]:
        own.execute(statement)
    cursor = own.cursor()
    rows = [(k, k % 7 if k % 3 else None, f"w{k % 11}") for k in range(1, 201)]
    cursor.executemany(f"INSERT INTO t VALUES ({mark}, {mark}, {mark})", rows)
    cursor.executemany(f"INSERT INTO u VALUES ({mark})", [(None,), (3,), (3,), (5,)])
    if request.param == "sqlite":
        own.commit()
    yield request.param, url, own
    own.close()


@pytest.mark.parametrize("query", [*FOUND, *FOUND_BY_POSTGRESQL])
def test_keys_are_found(prepared: Any, query: str) -> None:
    kind, url, own = prepared
    if kind != "postgres" and query in FOUND_BY_POSTGRESQL:
        pytest.skip("the query is for PostgreSQL only")
    found = (FOUND | FOUND_BY_POSTGRESQL)[query]
    if kind == "duckdb" and ("{schema}" in query or "(" in query.rpartition(" FROM t")[0]):
        found = False
    key = "k"
    if kind == "sqlite" and query in FOUND_BY_ROW_ID:
        found, key = FOUND_BY_ROW_ID[query], "rowid"
    query = query.replace("{schema}", "public" if kind == "postgres" else "main")
    if kind == "postgres":
        query = query.replace("postgres.public", f"{url.rpartition('/')[2]}.public")
    whole = multiset(own.execute(query).fetchall())
    for partitions in (1, 6):
        plan = fastpipe.sql.partition_sql(query, url, num_partitions=partitions)
        reader = fastpipe.read_sql(query, url, num_partitions=partitions, batch_size=16)
        rows = [row for batch in reader for row in rows_of(batch)]
        assert multiset(rows) == whole, plan.partitions[0].query
        assert plan.rows == len(rows)
        # Keys other than the primary key need a query that counts the rows of each value, or of each hash.
        grouped = any("GROUP BY k0" in text or "GROUP BY h" in text for text in plan.queries)
        if found == "joined":
            # If one key has many rows, the plan may count the rows of each key.
            assert [name.rstrip("_") for name in plan.by] == [key], plan.queries
            continue
        assert grouped == (partitions > 1 and found is False), plan.queries


@pytest.mark.parametrize("definition", ["INTEGER PRIMARY KEY DESC", "INT PRIMARY KEY", "INTEGER UNIQUE"])
def test_sqlite_keys_with_nulls(tmp_path: Path, definition: str) -> None:
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute(f"CREATE TABLE t (k {definition}, v INT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(None if i % 4 else i, i) for i in range(400)])
    connection.close()
    url = f"sqlite:///{tmp_path / 't.db'}"
    for query in ("SELECT k, v FROM t", "SELECT v FROM t"):
        reader = fastpipe.read_sql(query, url, num_partitions=6, batch_size=400)
        (batch,) = reader
        assert sorted(row[-1] for row in rows_of(batch)) == list(range(400))
        if "k" in batch:
            assert batch["k"].valid.sum() == 100


def test_keys_of_sqlite_tables_without_rowid_may_be_text(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v INT) WITHOUT ROWID")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [*((i, i) for i in range(100)), ("x", 100)])
    connection.close()
    reader = fastpipe.read_sql("SELECT v FROM t", f"sqlite:///{tmp_path / 't.db'}", num_partitions=6, batch_size=101)
    assert sorted(row[0] for row in rows_of(reader.batch_at(0))) == list(range(101))


ROW_IDS = {
    "SELECT a, b FROM t": "rowid",
    "SELECT * FROM t": "rowid",
    "SELECT b, rowid FROM t": "rowid",
    "SELECT b, OID AS place FROM t AS s": "rowid",
    "SELECT a AS rowid, b FROM t": "rowid_",
    "SELECT t.*, u.x AS rowid FROM t JOIN u ON u.x = t.a": "rowid_",
    "SELECT a, b FROM main.t ORDER BY b LIMIT 300": "rowid",
    "SELECT rowid, b FROM hidden": "_rowid_",
    "SELECT rowid, _rowid_, oid FROM no_name_left": None,
    "SELECT v FROM without_ids": None,
    "SELECT b FROM view_of_t": None,
    "SELECT DISTINCT b FROM t": None,
}


@pytest.mark.parametrize("query", ROW_IDS)
def test_row_ids_of_sqlite_split_tables_without_a_key(tmp_path: Path, query: str) -> None:
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.executescript("""
            CREATE TABLE t (a TEXT, b REAL);
            CREATE TABLE u (x TEXT);
            CREATE TABLE hidden (RowId TEXT, b REAL);
            CREATE TABLE no_name_left (rowid TEXT, _rowid_ REAL, oid REAL);
            CREATE TABLE without_ids (k TEXT PRIMARY KEY, v REAL) WITHOUT ROWID;
            CREATE VIEW view_of_t AS SELECT b FROM t;
        """)
        rows = [(f"w{i % 90}", i / 4) for i in range(1200)]
        connection.executemany("INSERT INTO t VALUES (?, ?)", rows)
        connection.execute("DELETE FROM t WHERE b % 7 = 3 OR b < 20")
        connection.executemany("INSERT INTO u VALUES (?)", [("w3",), ("w5",), ("w5",)])
        connection.execute("INSERT INTO hidden SELECT * FROM t")
        connection.execute("INSERT INTO no_name_left SELECT a, b, b FROM t")
        connection.execute("INSERT INTO without_ids SELECT a || b, b FROM t")
    cursor = connection.execute(query)
    whole, names = multiset(cursor.fetchall()), [name.lower() for name, *_ in cursor.description]
    connection.close()
    url = f"sqlite:///{tmp_path / 't.db'}"
    plan = fastpipe.sql.partition_sql(query, url, num_partitions=5)
    assert ROW_IDS[query] is None or plan.by == (ROW_IDS[query],)
    if ROW_IDS[query] is not None and "JOIN" not in query:
        assert not any("GROUP BY" in text for text in plan.queries)
    reader = fastpipe.read_sql(query, url, num_partitions=5, batch_size=50, shuffle=True, seed=3)
    assert [name.lower() for name in reader.features] == names
    assert multiset([row for batch in reader for row in rows_of(batch)]) == whole


def test_vacuum_keeps_the_order_of_rows_without_a_key(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "t.db")
    connection.execute("CREATE TABLE t (a REAL)")
    connection.executemany("INSERT INTO t VALUES (?)", [(i / 2,) for i in range(900)])
    connection.execute("DELETE FROM t WHERE a < 100")
    connection.commit()
    url = f"sqlite:///{tmp_path / 't.db'}"
    before = fastpipe.read_sql("SELECT a FROM t", url, num_partitions=4, batch_size=700).batch_at(0)
    connection.execute("VACUUM")
    connection.close()
    after = fastpipe.read_sql("SELECT a FROM t", url, num_partitions=4, batch_size=700).batch_at(0)
    np.testing.assert_array_equal(after["a"].values, before["a"].values)
