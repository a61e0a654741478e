"""How results are cut: keys of any distribution, found by an index or not."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import psycopg
import pyarrow as pa
import pytest

import fastpipe

LEAST, MOST = -(2**63), 2**63 - 1

Filled = Callable[[str, Sequence[str], Sequence[Sequence[Any]]], Any]


@pytest.fixture(params=["sqlite", "duckdb", "postgres"])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Filled:
    """Makes a table t of columns, and returns what `read_sql` takes."""

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
    """Zipf of 1.2, and 20 % NULLs."""
    draw = np.random.default_rng(7)
    keys = np.minimum(draw.zipf(1.2, rows), MOST // 2)
    return [None if null else int(key) for key, null in zip(keys, draw.random(rows) < 0.2, strict=True)]


@pytest.mark.parametrize("partitions", [4, 20, 100])
def test_skewed_keys(filled: Filled, partitions: int) -> None:
    rows = 50_000
    keys = zipf(rows)
    connection = filled("k bigint, v bigint", ["k", "v"], [keys, range(rows)])
    alone = fastpipe.partition_sql("SELECT k, v FROM t", connection, partitions=partitions, by="k")
    assert alone.heaviest == keys.count(None)
    assert max(part.rows for part in alone.partitions) <= max(1.01 * alone.heaviest, 1.05 * rows / partitions)
    assert alone.skew <= max(1.25, alone.skew_bound)
    # With a second column ties can be parted.
    for by in (None, ["k", "v"]):
        plan = fastpipe.partition_sql("SELECT k, v FROM t", connection, partitions=partitions, by=by)
        assert (len(plan.partitions), plan.rows) == (partitions, rows)
        assert plan.skew <= 1.25
        assert plan.skew_bound == 1.0


KEYS = {
    "dense": range(-500, 1500),
    "steps": range(0, 20_000, 10),
    "gap": [*range(1000), *range(10**15, 10**15 + 1000)],
    "uneven": [*range(1500), *range(10**6, 10**7, 18_000)],
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
        plan = fastpipe.partition_sql("SELECT v, k FROM t", connection, partitions=partitions)
        assert plan.rows == len(keys)
        assert len(plan.partitions) <= partitions
        if len(keys) >= 1000 and partitions > 1:
            assert len(plan.partitions) >= 0.9 * partitions
            assert plan.skew <= 1.25
        if not keys:
            continue
        reader = fastpipe.read_sql("SELECT v, k FROM t", connection, partitions=partitions, batch_size=64)
        assert sorted(key for batch in reader for key in batch["k"].tolist()) == sorted(keys)


@pytest.mark.parametrize("gap", [0, 1, 30_000])
def test_many_numbers_without_gaps(filled: Filled, gap: int) -> None:
    """A count tells that no number is missing, and whether that only looks so."""
    rows, begin = 70_000 + gap, -20_000
    keys = [begin + i for i in range(rows) if not 35_000 <= i < 35_000 + gap]
    connection = filled("k bigint PRIMARY KEY, v bigint", ["k", "v"], [keys, range(len(keys))])
    for partitions in (1, 8, 50):
        plan = fastpipe.partition_sql("SELECT k FROM t", connection, partitions=partitions)
        assert plan.rows == len(keys)
        assert len(plan.partitions) == partitions
        assert plan.skew <= 1.25
        # The ends, gaps near them, and a count; else also a sample, and a count of each partition.
        assert len(plan.queries) <= (5 if gap else 3)
    reader = fastpipe.read_sql("SELECT k FROM t", connection, partitions=8, batch_size=1024)
    assert np.concatenate([batch["k"] for batch in reader]).tolist() == keys


def test_primary_keys_with_parameters(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE t (k INTEGER PRIMARY KEY, v INT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", [(i, i % 7) for i in range(1000)])
    connection.close()
    url = f"sqlite:///{tmp_path / 't.db'}"
    reader = fastpipe.read_sql("SELECT k FROM t WHERE v = ? AND k > ?", url, parameters=[3, 99], batch_size=5)
    assert [key for batch in reader for key in batch["k"].tolist()] == [i for i in range(100, 1000) if i % 7 == 3]
