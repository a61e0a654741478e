"""Shares of a reader's data: parts that others deal out, and leases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from fastpipe._reader.parts import Partition, divided, part_of

if TYPE_CHECKING:
    from fastpipe._reader.data import Data
    from fastpipe._reader.ordering import Ordering
    from fastpipe.leases import LeaseWorker

__all__ = ["Shares"]


class Shares(ABC):
    """How a reader's data are shared by those who come and go."""

    _data: Data
    _ordering: Ordering

    @abstractmethod
    def __init__(self, data: Data, **options: Any) -> None: ...

    @abstractmethod
    def _options(self) -> dict[str, Any]: ...

    def partition(self, partitions: SupportsIndex) -> list[Partition]:
        """Divides the data into parts that take about as long to read, for whoever deals them out.

        Each row is in one part. The source's units (blocks, row groups, stretches of lines) stay whole, in their order.
        The division is a pure function of the data set; this reader's order and rank have no part in it.

        Args:
            partitions: how many, at most: no part is empty, so there are fewer where there are few units.

        Returns:
            The parts, in their order: a few numbers each.

        Raises:
            TypeError: if the number is no integer.
            ValueError: if it is out of range, or the reader is of a sample.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256)
            >>> parts = reader.partition(4)
            >>> sum(part.rows for part in parts) == reader.num_rows
            True
            >>> sum(len(batch["distance"]) for part in parts for batch in reader.read_partition(part))
            2000
        """
        return divided(self._data, self._ordering, partitions)

    def read_partition(self, partition: Partition) -> Self:
        """Reads one part of the data.

        Args:
            partition: as `partition` returned it, of this reader or of one of the same data set in another process.

        Returns:
            A reader of the part, with states, `batch_at` and adapters as any other. It has this one's features, order,
            seed, ranks, threads, limits and epochs: shuffling stays within the part, which ranks share. Its states fit
            this part alone.

        Raises:
            StateError: if the partition is of another data set, or of one that has changed.
            TypeError: if it is no partition.
            ValueError: if the reader is of a sample.
        """
        return type(self)(part_of(self._data, self._ordering, partition), **self._options())

    def lease(
        self,
        url: str,
        *,
        worker: str | None = None,
        job: str = "default",
        stretch: SupportsIndex | None = None,
        ttl: float = 30.0,
        ahead: SupportsIndex = 1,
        barrier: bool = True,
        copies: bool = True,
        patience: float = 600.0,
    ) -> LeaseWorker:
        """Joins a job whose workers share this reader's batches by leases, however many come and go.

        A ledger, some tables in a database, holds which stretches of the order are free, leased or done. This reader's
        order says what a stretch is: which batch is which never depends on who reads it. Stretches of a worker that is
        killed or hangs pass to others when its leases expire, from the last batch that it has committed.

        Args:
            url: of the ledger's database: `postgresql://user@host/database`, or `sqlite:///ledger.db`, a file, for
                workers of one machine. Its tables are made by the first worker.
            worker: a name of its own. One that comes back under its name takes over what it held. By default the host's
                name and the process's number.
            job: a name for what is read: all its workers have readers of the same data, order and seed.
            stretch: batches of a stretch; by default up to 32, and fewer for few batches. All workers give the same.
            ttl: seconds after which a lease expires that isn't renewed, by the database's clock.
            ahead: stretches that are leased before they are needed.
            barrier: whether an epoch begins when the one before it is done. Without, workers that find no stretch go on
                with the next one.
            copies: whether this worker, when it finds no stretch, takes a second copy of one that another worker is
                slow with: the first to commit wins.
            patience: seconds for which the database may be away.

        Returns:
            The worker: iterate over it, and call its `commit()`.

        Raises:
            ImportError: if the database's driver isn't installed; it says what to install.
            LedgerError: if the database can't be reached, or written.
            StateError: if the ledger has a job of that name that reads other data, or in another order.
            TypeError: if an argument is of the wrong type.
            ValueError: if a number is out of range, the reader is one of several ranks or has drawn its seed, or there
                is no batch.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256, shuffle=True, seed=7)
            >>> rows = 0
            >>> with reader.lease("sqlite:///ledger.db", worker="pod-17") as worker:
            ...     for batch in worker:
            ...         rows += len(batch["distance"])
            ...         worker.commit()
            >>> rows
            2000
        """
        from fastpipe.leases import lease

        return lease(
            self,
            url,
            worker=worker,
            job=job,
            stretch=stretch,
            ttl=ttl,
            ahead=ahead,
            barrier=barrier,
            copies=copies,
            patience=patience,
        )
