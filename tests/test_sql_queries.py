"""Partitions of generated queries are disjoint, and their union is the query's result.

`FASTPIPE_SQL_QUERIES` is the approximate number of queries for each database. Defaults to 30.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastpipe
import sql_databases
from fastpipe.sql._connecting import engine_of
from fastpipe.sql._plan import columns_of, planned
from fastpipe.sql._query import checked
from sql_databases import rows_of, same
from sql_generator import query

QUERIES = int(os.environ.get("FASTPIPE_SQL_QUERIES", "30"))
CHUNK = 20
PLANS: list[tuple[int, Any]] = [(1, "auto"), (7, "auto"), (100, "auto"), (7, "hash")]


@pytest.fixture(scope="module", params=["sqlite", "duckdb", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if request.param == "sqlite":
        found = sql_databases.sqlite(Path(tmp_path_factory.mktemp("sqlite")) / "t.db")
    elif request.param == "duckdb":
        found = sql_databases.duck()
    else:
        server = request.getfixturevalue("postgres")
        found = sql_databases.postgres(server.new_database())
    yield found
    found.close()


@pytest.mark.parametrize("first", range(0, QUERIES, CHUNK))
def test_the_union_of_partitions_is_the_result(database: sql_databases.Database, first: int) -> None:
    engine = engine_of(database.connection)
    sessions = engine.sessions(1, snapshot=True)
    with sessions.planner() as session:
        for seed in range(first, first + CHUNK):
            text = query(seed)
            whole = sql_databases.multiset(database.run(f"SELECT * FROM (\n{text.rstrip(';')}\n) AS q"))
            wanted = checked(text, None, engine.dialect)
            known = columns_of(engine, session, wanted)
            for parts, method in PLANS:
                try:
                    plan, asked, *_ = planned(engine, session, wanted, known, None, parts, None, method)
                except fastpipe.errors.UnsupportedError:
                    # A key of a table that the query doesn't return can be hashed, too.
                    assert method == "hash", text
                    assert not any(map(engine.hashed, known)), text
                    continue
                assert len(plan.partitions) <= parts
                assert plan.rows == whole.total(), text
                found: Counter[tuple[Any, ...]] = Counter()
                # The key may be a different column of the query.
                columns = ", ".join(engine.quote(column.name) for column in asked)
                for part in plan.partitions:
                    rows = database.run(f"SELECT {columns} FROM" + part.query.partition(" FROM")[2])
                    assert len(rows) == part.rows > 0, (text, part)
                    found += sql_databases.multiset(rows)
                # A missing or duplicate row would make a difference.
                assert found == whole, (text, parts, method)
    sessions.close()


@pytest.mark.parametrize("seed", range(0, QUERIES, 7))
def test_readers_yield_the_result(database: sql_databases.Database, seed: int) -> None:
    text = query(seed)
    whole = database.run(f"SELECT * FROM (\n{text.rstrip(';')}\n) AS q")
    reader = fastpipe.read_sql(text, database.connection, num_partitions=7, batch_size=16, shuffle=True, seed=seed)
    assert reader.num_rows == len(whole)
    found = [row for batch in reader for row in rows_of(batch)]
    assert sql_databases.multiset(found) == sql_databases.multiset(whole), text
    assert same(list(reader), [reader.batch_at(step, epoch=1) for step in range(len(reader))])
