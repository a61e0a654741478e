"""The status of a job: its progress and its workers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from fastpipe._text import clean, table
from fastpipe.leases import _tables
from fastpipe.leases._checkpoints import known_job
from fastpipe.leases._database import Connection

# A worker is a straggler if it is this many times slower than the median worker,
_SLOWER = 3.0
# or if it holds leases and has committed nothing for this many of its batches and this many seconds.
_STALLED_BATCHES, _STALLED_SECONDS = 10, 5.0
# Live workers without leases contact the ledger more often than this.
_SILENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class EpochStatus:
    """The progress of an epoch.

    Attributes:
        epoch: Index of the epoch, from 0.
        batches: Number of batches in the epoch.
        committed: Number of batches that are done.
        leased: Number of uncommitted batches that workers hold.
        free: Number of batches that no worker holds.
    """

    epoch: int
    batches: int
    committed: int
    leased: int
    free: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The activity of a worker.

    Attributes:
        worker_name: Its name.
        state: `working` (it holds leases), `idle`, `silent` (idle, and silent for a minute) or `left`.
        seen: Seconds since it last contacted the ledger.
        moved: Seconds since its last commit.
        leases: Number of leases that it holds, second copies included.
        batches: Number of batches that it has committed, over all epochs.
        rows: Number of rows that it has committed, over all epochs.
        rate: Batches per second that its consumer uses, or 0.0 if unknown.
        straggles: Whether it is far slower than other workers, or holds leases and commits nothing.
    """

    worker_name: str
    state: str
    seen: float
    moved: float
    leases: int
    batches: int
    rows: int
    rate: float
    straggles: bool


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """The progress of a job. `print(status)` shows it as a table.

    Attributes:
        job: Its name.
        epochs: Status of the epochs in progress, or of the last epoch if all are done.
        end_epoch: End of the job's epochs (exclusive), or None if the job is endless.
        finished: Whether all epochs are done.
        workers: Status of each worker, sorted by name.
        rate: Batches per second of all working workers together.
        seconds_left: Estimated seconds until the epochs in progress are done, or None if unknown.
    """

    job: str
    epochs: list[EpochStatus]
    end_epoch: int | None
    finished: bool
    workers: list[WorkerStatus]
    rate: float
    seconds_left: float | None

    @property
    def stragglers(self) -> list[str]:
        """Names of the workers that are stragglers."""
        return [worker.worker_name for worker in self.workers if worker.straggles]

    def __str__(self) -> str:
        width = max(shutil.get_terminal_size((120, 24)).columns, 60)
        lines = []
        for epoch in self.epochs:
            share = epoch.committed / epoch.batches
            of = "" if self.end_epoch is None else f" of {self.end_epoch}"
            lines.append(
                f"job {clean(self.job)}, epoch {epoch.epoch}{of}: {epoch.committed:,} of {epoch.batches:,} batches "
                f"done ({share:.1%}), {epoch.leased:,} leased, {epoch.free:,} free"
            )
        if not self.epochs:
            lines.append(f"job {clean(self.job)}: no worker has joined yet")
        if self.finished:
            lines.append("finished")
        elif self.rate:
            left = "" if self.seconds_left is None else f", {self.seconds_left:,.0f} s left"
            lines.append(f"{self.rate:,.1f} batches/s{left}")
        if self.workers:
            header = ["worker", "state", "leases", "batches", "rows", "batches/s", "committed", "seen"]
            rows = [
                [
                    clean(worker.worker_name),
                    worker.state + (", straggles" if worker.straggles else ""),
                    str(worker.leases),
                    f"{worker.batches:,}",
                    f"{worker.rows:,}",
                    f"{worker.rate:,.1f}" if worker.rate else "-",
                    f"{worker.moved:,.1f} s ago",
                    f"{worker.seen:,.1f} s ago",
                ]
                for worker in self.workers
            ]
            lines.append(table(header, rows, width, right=range(2, 8)))
        return "\n".join(lines)


def status_of(connection: Connection, name: str) -> LedgerStatus:
    """Returns the status of a job.

    Raises:
        StateError: If the job doesn't exist.
    """
    job = known_job(connection, name)
    epochs, finished = [], False
    for epoch, _, left in connection.rows(_tables.OPEN_EPOCHS, job=name):
        undone, leased = connection.rows(_tables.PROGRESS, job=name, epoch=epoch)[0]
        epochs.append(EpochStatus(epoch, job.batches, job.batches - undone, leased, undone - leased))
        finished = not left and epoch + 1 == job.end_epoch
    if len(epochs) > 1:
        epochs = [epoch for epoch in epochs if epoch.committed < epoch.batches] or epochs[-1:]
    workers = _workers(connection, name)
    rate = sum(worker.rate for worker in workers if worker.state == "working")
    left = sum(epoch.batches - epoch.committed for epoch in epochs)
    return LedgerStatus(
        name, epochs, job.end_epoch, finished, workers, rate, left / rate if rate and not finished else None
    )


def _workers(connection: Connection, name: str) -> list[WorkerStatus]:
    found = connection.rows(_tables.WORKERS, job=name)
    rates = sorted(rate for *_, rate in found if rate > 0)
    median = rates[len(rates) // 2] if rates else 0.0
    workers = []
    for worker, departed, seen, moved, leases, batches, rows, rate in found:
        if departed:
            state = "left"
        elif leases:
            state = "working"
        else:
            state = "silent" if seen > _SILENT_SECONDS else "idle"
        stalled = leases > 0 and moved > max(_STALLED_SECONDS, _STALLED_BATCHES / rate if rate else 0.0)
        straggles = not departed and leases > 0 and (stalled or 0 < rate * _SLOWER < median)
        workers.append(WorkerStatus(worker, state, seen, moved, leases, batches, rows, rate, straggles))
    return workers
