"""Leases: workers that come and go share the batches of a job through a table in a database.

An epoch is divided into ranges of consecutive batches. A worker leases one range at a time or several in advance.
"""

from __future__ import annotations

from fastpipe.leases._ledger import Ledger
from fastpipe.leases._status import EpochStatus, LedgerStatus, WorkerStatus
from fastpipe.leases._worker import LeaseWorker, StepOfEpoch

__all__ = ["EpochStatus", "LeaseWorker", "Ledger", "LedgerStatus", "StepOfEpoch", "WorkerStatus"]
