"""A job: one order of batches, divided into stretches, that workers share through a ledger."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from fastpipe._reader.passes import Passes
from fastpipe.errors import StateError, UnsupportedError
from fastpipe.leases._database import Connection
from fastpipe.leases._tables import SCHEMA_VERSION

# So many stretches are few enough to be inserted in a moment, and a hundred for each of a hundred workers.
_MOST_STRETCHES = 10_000
# Where there are batches enough, a stretch has as many as make up for beginning to read it,
_FULL_STRETCH = 32
# and there are as many stretches as let a dozen workers end an epoch together.
_ENOUGH_STRETCHES = 128


@dataclass(frozen=True)
class Job:
    """What all workers of a job agree on.

    Attributes:
        name: by which workers know it.
        identity: the data set and the order, as the states of readers have them.
        batches: of an epoch.
        stretch: batches of a stretch; the last one of an epoch may have fewer.
        first_epoch: with which it began.
        epochs: how many; None if it has no end.
        barrier: whether an epoch begins when the one before it is done.
        generation: how often it was put back to a checkpoint.
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
        """Behind the last epoch; None if there is none."""
        return None if self.epochs is None else self.first_epoch + self.epochs

    @property
    def base_token(self) -> int:
        """Tokens of stretches that are inserted now are larger than this: larger than any that was handed out."""
        return self.generation << 32


def job_of(passes: Passes, *, name: str, stretch: int | None, barrier: bool) -> Job:
    """The job of reading these passes.

    Raises:
        ValueError: if they are of one rank of several, of an order that other processes don't know, or empty.
    """
    if passes.world_size != 1:
        raise ValueError(
            f"the reader is rank {passes.rank} of {passes.world_size}, and leases replace ranks: each worker leases "
            "from a reader of the whole order (rank=0, world_size=1)"
        )
    if passes.drawn:
        raise ValueError(
            "give the reader a seed: all workers must shuffle alike, and one that is drawn differs among them"
        )
    if passes.loaded:
        raise ValueError(
            "a state was loaded into the reader, and the ledger says where leases stand: Ledger.restore() puts it back"
        )
    batches = passes.steps
    if batches == 0:
        raise ValueError(f"there is no batch to lease: {passes!r} has none")
    if stretch is not None and stretch < 1:
        raise ValueError(f"stretch is a number of batches, at least 1, not {stretch}")
    state = passes.state_dict()
    identity = {"data": state["data"], "order": dict(state["order"])}
    if identity["order"].get("shuffle") == "sequential":
        # It was drawn, and nothing depends on it.
        identity["order"].pop("seed", None)
    window = int(identity["order"].get("shuffle_buffer") or 0) // passes.batch_size
    length = default_stretch(batches, window if identity["order"].get("shuffle") == "window" else 0)
    return Job(name, identity, batches, min(stretch or length, batches), passes.next_epoch, passes.epochs, barrier)


def default_stretch(batches: int, window: int) -> int:
    """Batches of a stretch, if none are asked for.

    Args:
        batches: of an epoch.
        window: batches of a window of the shuffle; 0 if there is none. Who reads part of a window opens all of it, so
            stretches are windows if there are enough of those.
    """
    least = -(-batches // _MOST_STRETCHES)
    length = max(least, min(_FULL_STRETCH, batches // _ENOUGH_STRETCHES), 1)
    if 0 < window <= batches // _ENOUGH_STRETCHES:
        length = -(-length // window) * window
    return length


def check_schema(connection: Connection) -> bool:
    """Whether the database has a ledger.

    Raises:
        UnsupportedError: if it has one of another version.
    """
    if not connection.has_tables():
        return False
    versions = [int(version) for (version,) in connection.rows("SELECT version FROM fastpipe_schema")]
    if versions not in ([], [SCHEMA_VERSION]):
        raise UnsupportedError(
            f"the ledger is of version {max(versions)}, and this fastpipe has version {SCHEMA_VERSION}: let all workers"
            " have one version of fastpipe, or take another database for the ledger"
        )
    return bool(versions)


def found_job(connection: Connection, name: str, *, lock: bool = False) -> Job | None:
    """A job of the ledger; None if there is none of that name."""
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
    """The names of the jobs of the ledger, oldest first."""
    return [name for (name,) in connection.rows("SELECT job FROM fastpipe_jobs ORDER BY created, job")]


def store_job(connection: Connection, job: Job) -> bool:
    """Makes a job known, within a transaction. Returns False if there is one of that name, which stays as it is."""
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
    """The job of the ledger, which is made if there is none; within a transaction.

    Args:
        connection: to the ledger, which has its tables.
        wanted: the job as this worker would make it.
        stretch_given: whether the user chose how long a stretch is.

    Raises:
        StateError: if the ledger's job of that name is of other data, or another order; it says what differs.
    """
    store_job(connection, wanted)
    found = found_job(connection, wanted.name)
    assert found is not None
    differing = []
    for part, what in (("data", "the data set's "), ("order", "")):
        old, new = found.identity.get(part, {}), wanted.identity[part]
        # Columns of folders are read by those who want them; like other columns, they are no part of the order.
        names = [name for name in {**old, **new} if name != "partitions" and old.get(name) != new.get(name)]
        # A digest says nothing to people, unless it is all that differs.
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
            f"the job {wanted.name!r} of the ledger is another one: {'; '.join(differing)}. Give this reader's a name "
            "of its own: job=..."
        )
    return found
