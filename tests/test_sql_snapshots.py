"""While other clients write, the union of all partitions is one state of the database."""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import duckdb
import numpy as np
import psycopg
import pytest

import fastpipe

ROWS = 400
NUMBERS = f"WITH RECURSIVE g(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM g WHERE i < {ROWS - 1}) "
# Each transaction moves an amount between two accounts, opens an account, closes an account, and increments a version.
TRANSACTION = [
    "UPDATE t SET amount = amount - 5 WHERE id = {a}",
    "UPDATE t SET amount = amount + 5 WHERE id = {b}",
    "INSERT INTO t VALUES ({new}, 0)",
    "DELETE FROM t WHERE id = {old} AND amount = 0",
    "UPDATE v SET version = version + 1",
]


class Writer:
    """Runs transactions in a thread until it is stopped."""

    def __init__(self, run: Callable[[list[str]], None]) -> None:
        self._run, self._stop = run, threading.Event()
        self.written = 0
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._write, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self.errors

    def wait(self, more: int) -> None:
        """Waits until `more` further transactions are written."""
        until, deadline = self.written + more, time.monotonic() + 60
        while self.written < until and not self.errors and time.monotonic() < deadline:
            time.sleep(0.002)
        assert self.written >= until, self.errors

    def _write(self) -> None:
        try:
            while not self._stop.is_set():
                n = self.written
                names = {"a": n * 7 % ROWS, "b": n * 11 % ROWS, "new": ROWS + n, "old": ROWS + n - 3}
                self._run([statement.format(**names) for statement in TRANSACTION])
                self.written += 1
        except BaseException as error:
            self.errors.append(error)


CREATE = [
    "CREATE TABLE t (id BIGINT PRIMARY KEY, amount BIGINT NOT NULL)",
    NUMBERS + "INSERT INTO t SELECT i, 100 FROM g",
    "CREATE TABLE v (version BIGINT NOT NULL)",
    "INSERT INTO v VALUES (0)",
]


SQLITE_WRITER = """
import json, sqlite3, sys
for line in sys.stdin:
    connection = sqlite3.connect(sys.argv[1], timeout=30, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    for statement in json.loads(line):
        connection.execute(statement)
    connection.execute("COMMIT")
    connection.close()
    print("done", flush=True)
"""


@pytest.fixture(params=["sqlite", "duckdb", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Callable[[list[str]], None]]]:
    """Returns a connection to read from, and a function that runs a transaction."""
    if request.param == "sqlite":
        with sqlite3.connect(tmp_path / "t.db") as first:
            first.execute("PRAGMA journal_mode = wal")
            for statement in CREATE:
                first.execute(statement)
        first.close()

        # A separate process: two SQLite libraries in one process don't see each other's locks.
        command = [sys.executable, "-c", SQLITE_WRITER, str(tmp_path / "t.db")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            requests, answers = child.stdin, child.stdout

            def run(statements: list[str]) -> None:
                requests.write(json.dumps(statements) + "\n")
                requests.flush()
                assert answers.readline() == "done\n"

            yield f"sqlite:///{tmp_path}/t.db", run
            requests.close()
    elif request.param == "duckdb":
        duck = duckdb.connect()
        for statement in CREATE:
            duck.execute(statement)
        cursor = duck.cursor()

        def run(statements: list[str]) -> None:
            for statement in ["BEGIN", *statements, "COMMIT"]:
                cursor.execute(statement)

        yield duck, run
        cursor.close()
        duck.close()
    else:
        url = request.getfixturevalue("postgres_url")
        with psycopg.connect(url) as connection:
            for statement in CREATE:
                connection.execute(statement)
        writer = psycopg.connect(url, autocommit=True)

        def run(statements: list[str]) -> None:
            with writer.transaction():
                for statement in statements:
                    writer.execute(statement)

        yield url, run
        writer.close()


@pytest.mark.parametrize("shuffle", [False, True])
def test_all_partitions_read_one_snapshot(database: Any, shuffle: bool) -> None:
    connection, run = database
    # The version next to each row identifies the state that the row was read from.
    query = "SELECT t.id, t.amount, v.version FROM t CROSS JOIN v"
    with Writer(run) as writer:
        for _ in range(3):
            writer.wait(3)
            reader = fastpipe.read_sql(
                query, connection, by="id", num_partitions=20, batch_size=16, shuffle=shuffle, seed=1, num_fetches=3
            )
            passes = []
            for _ in range(2):
                found: dict[str, list[Any]] = {"id": [], "amount": [], "version": []}
                for batch in reader:
                    writer.wait(1)
                    for name, values in found.items():
                        column = batch[name]
                        values.extend(np.asarray(getattr(column, "values", column)).tolist())
                assert len(set(found["version"])) == 1
                assert len(set(found["id"])) == len(found["id"]) == reader.num_rows
                assert sum(found["amount"]) == 100 * ROWS
                passes.append(sorted(zip(*found.values(), strict=True)))
            # Later passes read the same snapshot.
            assert passes[0] == passes[1]
    assert writer.written > 30


def test_without_a_snapshot_changes_are_errors(database: Any) -> None:
    connection, run = database
    if not isinstance(connection, str):
        pytest.skip("DuckDB always reads a snapshot in a transaction")
    reader = fastpipe.read_sql("SELECT id FROM t", connection, num_partitions=4, batch_size=16, snapshot=False)
    assert len(list(reader)) == ROWS // 16
    run(["DELETE FROM t WHERE id < 7"])
    with pytest.raises(fastpipe.errors.StorageError, match=r"the partition had \d+ rows when .* has \d+ now"):
        list(reader)


def test_a_snapshot_ends_with_its_reader(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        for statement in CREATE:
            connection.execute(statement)
    readers = [fastpipe.read_sql("SELECT id FROM t", postgres_url, num_partitions=4, batch_size=16) for _ in range(3)]
    for reader in readers:
        assert len(list(reader)) == ROWS // 16
    idle = (
        "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND datname = current_database()"
    )
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        counts = [connection.execute(idle).fetchone()]
        del readers, reader
        deadline = time.monotonic() + 60
        while counts[-1] != (0,) and time.monotonic() < deadline:
            time.sleep(0.05)
            counts.append(connection.execute(idle).fetchone())
    assert counts[0] is not None
    assert counts[0][0] >= 3
    assert counts[-1] == (0,)


def test_a_forked_process_leaves_the_snapshot(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        for statement in CREATE:
            connection.execute(statement)
    readers = [fastpipe.read_sql("SELECT id FROM t", postgres_url, num_partitions=4, batch_size=16)]
    child = multiprocessing.get_context("fork").Process(target=readers.clear)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    # Sessions that are opened only now need the snapshot that another connection holds.
    assert len(list(readers[0])) == ROWS // 16
