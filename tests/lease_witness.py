"""An independent check of leases: triggers record changes of lease ranges, and the workers' logs must match them.

The triggers know nothing about fencing. They record each granted lease and each advance of a lease range, in the same
transaction. The guarantees are then checked with only these rows. Each batch was committed once and in order, under a
valid lease. Its worker used exactly the right rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

Batch = tuple[int, int]
"""An epoch and a step."""

_AUDIT = """
    CREATE TABLE audit (
        id {serial}, at DOUBLE PRECISION, kind TEXT, epoch BIGINT, number BIGINT, start BIGINT, stop BIGINT,
        token BIGINT, worker TEXT, old BIGINT, new BIGINT, held BIGINT, held_copy BIGINT
    )
"""
_COLUMNS = "at, kind, epoch, number, start, stop, token, worker, old, new, held, held_copy"
# A lease or a copy took a new token, or a commit advanced `committed`.
_GRANTED = """
    INSERT INTO audit ({columns}) SELECT {now},
        CASE WHEN NEW.copy_token = NEW.tokens THEN 'copy' ELSE 'lease' END,
        NEW.epoch, NEW.number, NEW.start, NEW.stop, NEW.tokens,
        CASE WHEN NEW.copy_token = NEW.tokens THEN NEW.copy_worker ELSE NEW.worker END,
        NULL, NULL, OLD.token, OLD.copy_token
    WHERE NEW.tokens <> OLD.tokens;
"""
_ADVANCED = """
    INSERT INTO audit ({columns}) SELECT {now}, 'advance', NEW.epoch, NEW.number, NEW.start, NEW.stop, NEW.token,
        NEW.worker, OLD.committed, NEW.committed, OLD.token, OLD.copy_token
    WHERE NEW.committed <> OLD.committed;
"""


class Noted(NamedTuple):
    """A row of the audit.

    Attributes:
        at: Seconds since 1970.
        kind: "lease", "copy" or "advance".
        epoch: Epoch of the lease range.
        number: Index of the lease range.
        start: First batch of the lease range.
        stop: One past its last batch.
        token: Token that was granted, or that advanced the range.
        worker: Name of the worker that holds the token.
        old: `committed` before an advance.
        new: `committed` after it.
        held: The lease's token before.
        held_copy: The copy's token before.
    """

    at: float
    kind: str
    epoch: int
    number: int
    start: int
    stop: int
    token: int
    worker: str
    old: int | None
    new: int | None
    held: int
    held_copy: int


class Violated(AssertionError):
    """A guarantee of leases was violated."""


def install(url: str) -> None:
    """Creates the audit table and its triggers in a ledger that already has its tables."""
    statements = _GRANTED + _ADVANCED
    if url.startswith("sqlite"):
        # SQLite's clock has millisecond resolution.
        now = "(julianday('now') - 2440587.5) * 86400"
        audit = _AUDIT.format(serial="INTEGER PRIMARY KEY AUTOINCREMENT")
        body = statements.format(columns=_COLUMNS, now=now)
        _run_sqlite(url, audit, f"CREATE TRIGGER witness AFTER UPDATE ON fastpipe_stretches BEGIN {body} END")
        return
    body = statements.format(columns=_COLUMNS, now="extract(epoch FROM clock_timestamp())")
    _run_postgres(
        url,
        _AUDIT.format(serial="BIGSERIAL PRIMARY KEY"),
        f"CREATE FUNCTION witness() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NULL; END $$",
        "CREATE TRIGGER witness AFTER UPDATE ON fastpipe_stretches FOR EACH ROW EXECUTE FUNCTION witness()",
    )


def noted(url: str) -> list[Noted]:
    """Returns the audit rows in insertion order, which for one lease range is the order of its changes."""
    query = f"SELECT {_COLUMNS} FROM audit ORDER BY id"
    rows = _run_sqlite(url, query) if url.startswith("sqlite") else _run_postgres(url, query)
    return [Noted(*row) for row in rows]


def _run_sqlite(url: str, *statements: str) -> list[Any]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30, isolation_level=None)
    try:
        return [row for statement in statements for row in connection.execute(statement).fetchall()]
    finally:
        connection.close()


def _run_postgres(url: str, *statements: str) -> list[Any]:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        return [
            row
            for statement in statements
            for cursor in [connection.execute(statement)]  # type: ignore[arg-type]
            if cursor.description
            for row in cursor.fetchall()
        ]


class Lines(NamedTuple):
    """The logs of all processes that used one worker name.

    Attributes:
        used: The row ids of each batch that the worker used.
        kept: Batches whose commit was confirmed to the worker.
        stale: Ranges (epoch, start, stop) whose commit was refused.
    """

    used: dict[Batch, list[int]]
    kept: list[Batch]
    stale: list[tuple[int, int, int]]


def lines(folder: Path) -> dict[str, Lines]:
    """Reads the logs of a folder, named `worker~life.log`. Returns them by worker."""
    found: defaultdict[str, Lines] = defaultdict(lambda: Lines({}, [], []))
    for path in sorted(folder.glob("*.log")):
        worker = path.stem.partition("~")[0]
        log = found[worker]
        # A line without a newline was cut off by a kill.
        for line in path.read_text().split("\n")[:-1]:
            kind, *values = json.loads(line)
            if kind == "used":
                epoch, step, ids = values
                if log.used.setdefault((epoch, step), ids) != ids:
                    raise Violated(f"{worker} got different rows for batch {step} of epoch {epoch} than before")
            elif kind == "kept":
                log.kept.append((values[0], values[1]))
            elif kind == "stale":
                log.stale.append((values[0], values[1], values[2]))
    return dict(found)


def committed(audit: Iterable[Noted]) -> dict[Batch, str]:
    """Returns the worker that committed each batch.

    Raises:
        Violated: If a batch was committed twice, out of order, or under an invalid lease.
    """
    stretches: defaultdict[tuple[int, int], list[Noted]] = defaultdict(list)
    for row in audit:
        stretches[row.epoch, row.number].append(row)
    done: dict[Batch, str] = {}
    for (epoch, number), rows in stretches.items():
        where = f"stretch {number} of epoch {epoch}"
        _check_leases(rows, where)
        advances = [row for row in rows if row.kind == "advance"]
        ends = [rows[0].start, *(row.new for row in advances)]
        if ends != [row.old for row in advances] + [rows[0].stop] or any(a >= b for a, b in pairwise(ends)):
            raise Violated(f"{where} advanced by {[(row.old, row.new) for row in advances]} from {rows[0].start}")
        for row in advances:
            done |= {(epoch, step): row.worker for step in range(row.old, row.new)}
    return done


def _check_leases(rows: list[Noted], where: str) -> None:
    """Checks that every advance of a lease range used a token that was valid at the time."""
    owner: dict[int, str] = {}
    leased = advanced = 0
    for row in rows:
        if row.kind != "advance":
            if row.token <= max(owner, default=0):
                raise Violated(f"{where}: token {row.token} was granted after {max(owner)}")
            owner[row.token] = row.worker
            # A new lease invalidates all earlier ones; a copy invalidates none.
            leased = row.token if row.kind == "lease" else leased
            continue
        if row.token not in (row.held, row.held_copy) or owner.get(row.token) != row.worker:
            raise Violated(f"{where}: {row.worker} advanced it by token {row.token}, which it didn't hold")
        if row.token < max(leased, advanced):
            raise Violated(f"{where}: the stale token {row.token} advanced it after {max(leased, advanced)}")
        advanced = row.token


def check(audit: list[Noted], logs: Mapping[str, Lines], expected: Mapping[Batch, list[int]], rows: int) -> None:
    """Checks that each batch was committed once, by a worker that had used its rows.

    Args:
        audit: Rows that the triggers recorded.
        logs: Logs of the workers.
        expected: The row ids of each batch of all epochs.
        rows: Number of rows in the dataset. Their ids are 0, 1, ...

    Raises:
        Violated: If a guarantee was violated.
    """
    done = committed(audit)
    if missing := expected.keys() - done.keys():
        raise Violated(f"not committed: {sorted(missing)[:10]}")
    if others := done.keys() - expected.keys():
        raise Violated(f"committed, but not part of any epoch: {sorted(others)[:10]}")
    seen: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for batch, worker in done.items():
        ids = logs[worker].used.get(batch) if worker in logs else None
        if ids != expected[batch]:
            raise Violated(f"{worker} committed batch {batch} but used the rows {ids} instead of {expected[batch]}")
        seen[batch[0]].update(ids)
    for epoch, counts in seen.items():
        if counts != dict.fromkeys(range(rows), 1):
            raise Violated(f"epoch {epoch} doesn't contain each row exactly once")
    _check_told(audit, logs, done)


def _check_told(audit: list[Noted], logs: Mapping[str, Lines], done: Mapping[Batch, str]) -> None:
    """Checks the answers that workers got: reported commits are in the ledger, and refusals had a reason."""
    holders: defaultdict[Batch, Counter[str]] = defaultdict(Counter)
    for row in audit:
        if row.kind != "advance":
            for step in range(row.start, row.stop):
                holders[row.epoch, step][row.worker] += 1
    for worker, log in logs.items():
        for batch in log.kept:
            if done[batch] != worker:
                raise Violated(f"{worker} was told that it committed {batch}, but {done[batch]} did")
        if len(set(log.kept)) != len(log.kept):
            raise Violated(f"{worker} was told twice that it committed a batch")
        for epoch, start, stop in log.stale:
            for step in range(start, stop):
                if holders[epoch, step].total() < 2:
                    raise Violated(f"{worker} was refused {(epoch, step)}, but no other worker ever held it")
