"""A job: one order of batches, divided into lease ranges, that workers share through a ledger.

The code calls a lease range a *stretch*: consecutive batches of one epoch that are leased together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from fastpipe._reader.ordering import digest
from fastpipe._reader.passes import Passes
from fastpipe.errors import StateError, UnsupportedError
from fastpipe.leases._database import Connection
from fastpipe.leases._tables import SCHEMA_VERSION

# Maximum number of lease ranges in an epoch. They are inserted within a moment, and a hundred workers still get a
# hundred ranges each.
_MOST_STRETCHES = 10_000
# Preferred batches in a range if the epoch is long enough. This amortizes the cost of starting to read at a new place.
_FULL_STRETCH = 32
# Minimum number of ranges in an epoch if it is long enough. A dozen workers then finish an epoch at about the same
# time.
_ENOUGH_STRETCHES = 128


@dataclass(frozen=True)
class Job:
    """Settings that all workers of a job agree on.

    Attributes:
        name: Name of the job, unique in the ledger.
        identity: Dataset and order, as in the states of readers.
        batches: Number of batches in an epoch.
        stretch: Number of batches in a lease range. The last range of an epoch may be shorter.
        first_epoch: Epoch that the job began with.
        epochs: Number of epochs, or None if the job is endless.
        barrier: Whether an epoch begins only after the previous one is done.
        generation: Number of times the job was restored to a checkpoint.
    """

    name: str
    identity: dict[str, Any]
    batches: int
    stretch: int
    first_epoch: int
    epochs: int | None
    barrier: bool
    generation: int = 0

    @property
    def end_epoch(self) -> int | None:
        """End of the job's epochs (exclusive), or None if the job is endless."""
        return None if self.epochs is None else self.first_epoch + self.epochs

    @property
    def base_token(self) -> int:
        """Lower bound of the tokens of ranges that are inserted now. Exceeds every token that was granted before."""
        return self.generation << 32


def job_of(passes: Passes, *, name: str, stretch: int | None, barrier: bool) -> Job:
    """Creates the job description for these passes.

    Raises:
        ValueError: If the passes belong to one of several ranks, use a random seed or a loaded state, or have no
            batches.
    """
    if passes.world_size != 1:
        raise ValueError(
            f"the reader is rank {passes.rank} of {passes.world_size}, but leases replace ranks: each worker leases "
            "from a reader of the whole order (rank=0, world_size=1)"
        )
    if passes.drawn:
        raise ValueError("set a seed: all workers must use the same seed, and random seeds differ")
    if passes.loaded:
        raise ValueError(
            "a state was loaded into the reader, but the ledger keeps a job's position: use Ledger.restore() instead"
        )
    batches = passes.steps
    if batches == 0:
        raise ValueError(f"there are no batches to lease: {passes!r} is empty")
    if stretch is not None and stretch < 1:
        raise ValueError(f"stretch must be a number of batches, at least 1; got {stretch}")
    state = passes.state_dict()
    identity = {"data": state["data"], "order": dict(state["order"])}
    if identity["order"].get("shuffle") == "sequential":
        # The seed was drawn at random, and a sequential order doesn't depend on it.
        identity["order"].pop("seed", None)
    if passes.without_steps:
        # States don't depend on them, but the ledger numbers only the batches that remain.
        identity["order"]["without_steps"] = digest(json.dumps(passes.without_steps).encode())
    window = int(identity["order"].get("shuffle_buffer") or 0) // passes.batch_size
    length = default_stretch(batches, window if identity["order"].get("shuffle") == "window" else 0)
    return Job(name, identity, batches, min(stretch or length, batches), passes.next_epoch, passes.epochs, barrier)


def default_stretch(batches: int, window: int) -> int:
    """Returns the number of batches in a lease range if the user didn't choose one.

    Args:
        batches: Number of batches in an epoch.
        window: Number of batches in a shuffle window, or 0 without one. Reading part of a window opens all of its data,
            so a range covers whole windows if there are enough of them.
    """
    least = -(-batches // _MOST_STRETCHES)
    length = max(least, min(_FULL_STRETCH, batches // _ENOUGH_STRETCHES), 1)
    if 0 < window <= batches // _ENOUGH_STRETCHES:
        length = -(-length // window) * window
    return length


def check_schema(connection: Connection) -> bool:
    """Returns whether the database contains a ledger.

    Raises:
        UnsupportedError: If the ledger has another schema version.
    """
    if not connection.has_tables():
        return False
    versions = [int(version) for (version,) in connection.rows("SELECT version FROM fastpipe_schema")]
    if versions not in ([], [SCHEMA_VERSION]):
        raise UnsupportedError(
            f"the ledger has version {max(versions)}, and this fastpipe uses version {SCHEMA_VERSION}: use the same"
            " version of fastpipe in all workers, or another database for the ledger"
        )
    return bool(versions)


def found_job(connection: Connection, name: str, *, lock: bool = False) -> Job | None:
    """Returns a job of the ledger, or None if no job has that name."""
    found = connection.rows(
        "SELECT identity, batches, stretch, first_epoch, epochs, barrier, generation FROM fastpipe_jobs"
        " WHERE job = :job" + (" {for_update}" if lock else ""),
        job=name,
    )
    if not found:
        return None
    identity, batches, stretch, first, epochs, barrier, generation = found[0]
    return Job(name, json.loads(identity), batches, stretch, first, epochs, bool(barrier), generation)


def job_names(connection: Connection) -> list[str]:
    """Returns the names of the ledger's jobs, oldest first."""
    return [name for (name,) in connection.rows("SELECT job FROM fastpipe_jobs ORDER BY created, job")]


def store_job(connection: Connection, job: Job) -> bool:
    """Adds a job to the ledger. Call it within a transaction.

    Returns:
        False if a job of that name exists already. It isn't changed.
    """
    inserted = connection.rows(
        "INSERT INTO fastpipe_jobs (job, identity, batches, stretch, first_epoch, epochs, barrier, generation, created)"
        " VALUES (:job, :identity, :batches, :stretch, :first, :epochs, :barrier, :generation, {now})"
        " ON CONFLICT DO NOTHING RETURNING job",
        job=job.name,
        identity=json.dumps(job.identity, sort_keys=True),
        batches=job.batches,
        stretch=job.stretch,
        first=job.first_epoch,
        epochs=job.epochs,
        barrier=int(job.barrier),
        generation=job.generation,
    )
    return bool(inserted)


def join_job(connection: Connection, wanted: Job, *, stretch_given: bool) -> Job:
    """Returns the ledger's job, and creates it if it doesn't exist. Call it within a transaction.

    Args:
        connection: Connection to a ledger that has its tables.
        wanted: The job as this worker would create it.
        stretch_given: Whether the user chose the length of lease ranges.

    Raises:
        StateError: If the ledger's job of that name has another dataset or order. The message lists the differences.
    """
    store_job(connection, wanted)
    found = found_job(connection, wanted.name)
    assert found is not None
    differing = []
    for part, what in (("data", "the dataset's "), ("order", "")):
        old, new = found.identity.get(part, {}), wanted.identity[part]
        # Partition columns are selected per reader. Like other columns, they aren't part of the order.
        names = [name for name in {**old, **new} if name != "partitions" and old.get(name) != new.get(name)]
        # Omit digests, which mean nothing to users, unless only a digest differs.
        names = [name for name in names if name != "digest"] or names
        differing += [f"{what}{name} was {old.get(name)!r} and is {new.get(name)!r}" for name in names]
    same = replace(found, identity=wanted.identity, generation=0, first_epoch=wanted.first_epoch)
    expected = wanted if stretch_given else replace(wanted, stretch=found.stretch)
    differing += [
        f"{name} was {getattr(same, name)!r} and is {getattr(expected, name)!r}"
        for name in ("batches", "stretch", "epochs", "barrier")
        if getattr(same, name) != getattr(expected, name)
    ]
    if differing:
        raise StateError(
            f"the job {wanted.name!r} in the ledger differs from this reader's: {'; '.join(differing)}. Choose a "
            "different name with job=..."
        )
    return found
