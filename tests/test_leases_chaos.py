"""Leases keep their guarantees when workers are killed and databases fail.

Each batch is committed exactly once per epoch. `make soak` executes 200 runs (FASTPIPE_LEASE_RUNS) instead of two, and
prints what happened in them.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lease_chaos
import lease_witness
import samples
import servers
from lease_chaos import Forks, Outage, Run
from lease_witness import Lines, Noted, Violated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs SIGSTOP, fork and prctl")

RUNS = int(os.environ.get("FASTPIPE_LEASE_RUNS", "2"))
ROWS, BATCH, EPOCHS = 1_200, 5, 3
# Every tenth run on a database interrupts it, starting with the first.
OUTAGES = 10


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()


@pytest.fixture(scope="module")
def killable() -> Iterator[servers.Postgres]:
    """Yields a PostgreSQL server that no other tests use, because this test kills it."""
    programs = servers.postgres_programs()
    if programs is None:
        pytest.skip("the PostgreSQL server is not installed (Debian package: postgresql)")
    server = servers.Postgres(programs)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> samples.Data:
    return samples.write(tmp_path_factory.mktemp("leases"), [samples.blocks_of(700), samples.blocks_of(500)])


def expected(data: samples.Data, options: dict[str, Any]) -> dict[lease_witness.Batch, list[int]]:
    """Returns the row ids of each batch of a reader without leases."""
    found = {}
    for epoch in range(EPOCHS):
        reader = data.read(**options)
        reader.set_epoch(epoch)
        for step in range(ROWS // BATCH):
            found[epoch, step] = reader.batch_at(step)["id"].tolist()
    return found


class Figures:
    """Counts of what happened in all runs on a database."""

    def __init__(self) -> None:
        self.did: Counter[str] = Counter()
        self.resumed: list[float] = []

    def add(self, run: Run, audit: list[Noted], logs: dict[str, Lines]) -> None:
        self.did.update(run.did)
        self.did["stale commit"] += sum(len(log.stale) for log in logs.values())
        self.did.update(row.kind for row in audit)
        if run.away is not None:
            went, back = run.away
            later = [row.at for row in audit if row.kind == "advance" and row.at > went]
            assert later, "nothing was committed after the database was available again"
            self.resumed.append(max(0.0, min(later) - back))

    def told(self) -> str:
        text = ", ".join(f"{count} x {what}" for what, count in sorted(self.did.items()))
        if self.resumed:
            middle, most = statistics.median(self.resumed), max(self.resumed)
            text += f"; first commit after the database's return: median {middle:.2f} s, at most {most:.2f} s"
        return text


def play(forks: Forks, data: samples.Data, folder: Path, url: str, number: int, outage: Outage | None) -> Figures:
    """Executes a run and compares the audit with the workers' logs."""
    chance = random.Random(f"{url.partition(':')[0]} {number}")
    folder.mkdir()
    options = {"columns": ["id"], "batch_size": BATCH, "seed": number, "epochs": EPOCHS, "num_threads": 1}
    options |= {"shuffle": True, "shuffle_buffer": 200} if chance.random() < 0.7 else {}
    lease = {
        "ttl": lease_chaos.TTL,
        "stretch": chance.choice((1, 3, 4, 8)),
        "barrier": chance.random() < 0.5,
        "copies": chance.random() < 0.7,
    }
    # The first worker creates the tables. This one closes again and releases its lease.
    with data.read(**options).lease(url, worker_name="opener", **lease):
        pass
    lease_witness.install(url)
    request = {"paths": data.paths, "options": options, "url": url, "lease": lease}
    run = Run(forks, folder, request, chance, outage).play()
    audit, logs = lease_witness.noted(url), lease_witness.lines(folder)
    lease_witness.check(audit, logs, expected(data, options), ROWS)
    figures = Figures()
    figures.add(run, audit, logs)
    return figures


def played(figures: list[Figures], capsys: pytest.CaptureFixture[str], database: str) -> None:
    """Checks that enough happened for the runs to be meaningful, and prints the counts in a soak."""
    total = Figures()
    for each in figures:
        total.did.update(each.did)
        total.resumed += each.resumed
    assert all(total.did[what] for what in ("kill", "stop", "slow", "outlasted", "lease", "advance"))
    assert len(total.resumed) == -(-len(figures) // OUTAGES)
    with capsys.disabled():
        if "FASTPIPE_LEASE_RUNS" in os.environ:
            print(f"\n{len(figures)} runs on {database}: {total.told()}")


@pytest.mark.timeout(60 * max(RUNS, 6))
def test_each_batch_is_committed_once_on_sqlite(
    forks: Forks, data: samples.Data, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = []
    for number in range(RUNS // 2):
        url = f"sqlite:///{tmp_path}/{number}.db"
        outage = lease_chaos.lock(url) if number % OUTAGES == 0 else None
        figures.append(play(forks, data, tmp_path / str(number), url, number, outage))
    played(figures, capsys, "SQLite")


@pytest.mark.timeout(60 * max(RUNS, 6))
def test_each_batch_is_committed_once_on_postgresql(
    forks: Forks, data: samples.Data, killable: servers.Postgres, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = []
    for number in range(RUNS // 2):
        url = killable.new_database()
        outage = lease_chaos.crash(killable) if number % OUTAGES == 0 else None
        figures.append(play(forks, data, tmp_path / str(number), url, number, outage))
        killable.drop_database(url)
    played(figures, capsys, "PostgreSQL")


def advance(old: int, new: int, token: int, worker: str, held: int, copy: int = 0) -> Noted:
    return Noted(0.0, "advance", 0, 0, 0, 4, token, worker, old, new, held, copy)


def lease(token: int, worker: str, kind: str = "lease") -> Noted:
    return Noted(0.0, kind, 0, 0, 0, 4, token, worker, None, None, 0, 0)


A, B = lease(1, "a"), lease(2, "b")
VIOLATIONS = {
    "twice": [A, advance(0, 4, 1, "a", 1), advance(0, 4, 1, "a", 1)],
    "a gap": [A, advance(0, 2, 1, "a", 1), advance(3, 4, 1, "a", 1)],
    "backwards": [A, advance(0, 4, 1, "a", 1), advance(4, 2, 1, "a", 1), advance(2, 4, 1, "a", 1)],
    "unfinished": [A, advance(0, 3, 1, "a", 1)],
    "stale by a lease": [A, B, advance(0, 4, 1, "a", 1)],
    "stale by a copy": [A, lease(2, "b", "copy"), advance(0, 2, 2, "b", 1, 2), advance(2, 4, 1, "a", 1, 2)],
    "not held": [A, advance(0, 4, 1, "a", 2)],
    "another's token": [A, B, advance(0, 4, 2, "a", 2)],
    "a token again": [A, lease(1, "b"), advance(0, 4, 1, "b", 1)],
}
GOOD = [A, lease(2, "b", "copy"), advance(0, 2, 1, "a", 1, 2), advance(2, 4, 2, "b", 1, 2)]
USED = {(0, step): [step] for step in range(4)}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_the_witness_detects_violations(case: str) -> None:
    with pytest.raises(Violated):
        lease_witness.committed(VIOLATIONS[case])


def test_the_witness_detects_wrong_logs() -> None:
    logs = {"a": Lines(USED, [(0, 0), (0, 1)], []), "b": Lines(USED, [(0, 2)], [(0, 0, 2)])}
    lease_witness.check(GOOD, logs, USED, 4)
    for wrong in (
        logs | {"a": Lines(USED, [(0, 0), (0, 2)], [])},  # the commit was another worker's
        logs | {"a": Lines(USED, [(0, 0), (0, 0)], [])},  # the commit was confirmed twice
        logs | {"b": Lines({(0, 2): [2], (0, 3): [7]}, [], [])},  # the worker used wrong rows
        logs | {"b": Lines({(0, 2): [2]}, [], [])},  # the worker never used the batch
        {"b": logs["b"]},
    ):
        with pytest.raises(Violated):
            lease_witness.check(GOOD, wrong, USED, 4)
    with pytest.raises(Violated):
        lease_witness.check([A, advance(0, 4, 1, "a", 1)], {"a": Lines(USED, [], [(0, 1, 2)])}, USED, 4)
    with pytest.raises(Violated):
        lease_witness.check(GOOD, logs, USED | {(1, 0): [0]}, 4)
    with pytest.raises(Violated):
        lease_witness.check(GOOD, logs, USED, 5)
