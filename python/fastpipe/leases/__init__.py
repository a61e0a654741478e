"""Leases: stretches of the order that are dealt to workers that come and go, by a table in a database."""

from __future__ import annotations

from fastpipe.leases._ledger import Ledger, lease
from fastpipe.leases._status import EpochStatus, LedgerStatus, WorkerStatus
from fastpipe.leases._worker import LeaseWorker, StepOfEpoch

__all__ = ["EpochStatus", "LeaseWorker", "Ledger", "LedgerStatus", "StepOfEpoch", "WorkerStatus", "lease"]
