"""Checkpoints of a job: recording which batches are committed, and restoring a ledger to such a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastpipe._arguments import shown
from fastpipe.errors import StateError
from fastpipe.leases import _tables
from fastpipe.leases._database import Connection
from fastpipe.leases._job import Job, found_job

_VERSION = 1
# Maximum number of workers to name in an error message.
_SHOWN = 10


def known_job(connection: Connection, name: str, *, lock: bool = False) -> Job:
    """Returns a job of the ledger.

    Raises:
        StateError: If the ledger has no job of that name.
    """
    found = found_job(connection, name, lock=lock)
    if found is None:
        raise StateError(f"the ledger has no job {name!r}")
    return found


def checkpoint_of(connection: Connection, name: str) -> dict[str, Any]:
    """Returns the committed batches of a job. Call it within a transaction.

    For each unfinished epoch, the checkpoint contains the first uncommitted batch of each lease range.

    Raises:
        StateError: If the job doesn't exist, or if workers may have used batches that they haven't committed.
    """
    # Locks are taken in the same sequence as in exchanges: first the workers, then their job.
    connection.rows(_tables.LOCK_WORKERS, job=name)
    unsettled = [worker for (worker,) in connection.rows(_tables.UNSETTLED, job=name)]
    if unsettled:
        shown_ones = ", ".join(map(repr, unsettled[:_SHOWN])) + ", ..." * (len(unsettled) > _SHOWN)
        raise StateError(
            f"no checkpoint was made: the workers {shown_ones} of the job {name!r} may have used batches that aren't"
            " committed yet. Call worker.flush() in each process, wait for all of them (for example with"
            " torch.distributed.barrier()), then make the checkpoint, and draw the next batch after that"
        )
    job = known_job(connection, name, lock=True)
    epochs: dict[str, list[int]] = {}
    for epoch, _, left in connection.rows(_tables.OPEN_EPOCHS, job=name):
        rows = connection.rows(
            "SELECT committed FROM fastpipe_stretches WHERE job = :job AND epoch = :epoch ORDER BY number",
            job=name,
            epoch=epoch,
        )
        if left:
            epochs[str(epoch)] = [committed for (committed,) in rows]
    opened = connection.rows("SELECT max(epoch) FROM fastpipe_epochs WHERE job = :job", job=name)[0][0]
    return {
        "version": _VERSION,
        "job": name,
        "identity": job.identity,
        "batches": job.batches,
        "stretch": job.stretch,
        "next_epoch": job.first_epoch if opened is None else opened + 1,
        "epochs": epochs,
    }


def restore(connection: Connection, name: str, checkpoint: Mapping[str, Any]) -> None:
    """Restores a job to a checkpoint. Call it within a transaction. Invalidates all leases granted before.

    Raises:
        StateError: If the checkpoint belongs to another job or is damaged. The ledger isn't changed then.
        TypeError: If the checkpoint isn't a mapping.
    """
    job = known_job(connection, name, lock=True)
    next_epoch, epochs = _checked(job, checkpoint)
    connection.rows("UPDATE fastpipe_jobs SET generation = generation + 1 WHERE job = :job", job=name)
    base = (job.generation + 1) << 32
    connection.rows("DELETE FROM fastpipe_stretches WHERE job = :job", job=name)
    oldest = min([*epochs, next_epoch])
    connection.rows("DELETE FROM fastpipe_epochs WHERE job = :job AND epoch >= :epoch", job=name, epoch=oldest)
    for epoch in range(oldest, next_epoch):
        connection.rows(_tables.OPEN_EPOCH, job=name, epoch=epoch)
        if epoch not in epochs:
            continue
        connection.rows(
            _tables.INSERT_STRETCHES, job=name, epoch=epoch, stretch=job.stretch, batches=job.batches, tokens=base
        )
        for number, committed in enumerate(epochs[epoch]):
            if committed > number * job.stretch:
                connection.rows(
                    "UPDATE fastpipe_stretches SET committed = :committed, done = CASE WHEN stop = :committed THEN 1 "
                    "ELSE 0 END WHERE job = :job AND epoch = :epoch AND number = :number",
                    job=name,
                    epoch=epoch,
                    number=number,
                    committed=committed,
                )


def _checked(job: Job, checkpoint: Mapping[str, Any]) -> tuple[int, dict[int, list[int]]]:
    """Returns the next epoch to open, and the first uncommitted batch of each range of the unfinished epochs.

    Raises:
        StateError: If the checkpoint belongs to another job or is damaged.
        TypeError: If the checkpoint isn't a mapping.
    """
    if not isinstance(checkpoint, Mapping):
        raise TypeError(f"checkpoint must be a dict returned by checkpoint(); got {shown(checkpoint)}")
    if checkpoint.get("version") != _VERSION:
        raise StateError(
            f"the checkpoint has version {shown(checkpoint.get('version'))}; the supported version is {_VERSION}"
        )
    for part in ("job", "identity", "batches", "stretch"):
        own = job.name if part == "job" else getattr(job, part)
        if checkpoint.get(part) != own:
            raise StateError(
                f"the checkpoint doesn't belong to the job {job.name!r}: its {part} is {shown(checkpoint.get(part))}, "
                f"but {shown(own)} in the ledger"
            )
    try:
        next_epoch = int(checkpoint["next_epoch"])
        epochs = {int(epoch): [int(step) for step in steps] for epoch, steps in checkpoint["epochs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"the checkpoint is damaged: {error!r}") from None
    starts = range(0, job.batches, job.stretch)
    for epoch, steps in epochs.items():
        whole = len(steps) == len(starts) and all(
            start <= step <= min(start + job.stretch, job.batches) for start, step in zip(starts, steps, strict=True)
        )
        if not whole or not job.first_epoch <= epoch < next_epoch:
            raise StateError(f"the checkpoint is damaged: the batches of epoch {epoch} don't match its lease ranges")
    return next_epoch, epochs
