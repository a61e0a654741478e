"""`fastpipe ledger status`: shows the progress of the jobs of a ledger."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable

from fastpipe.errors import FastpipeError, LedgerError
from fastpipe.leases import Ledger, LedgerStatus


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `ledger`."""
    ledger = commands.add_parser("ledger", help="show the progress of jobs that use leases")
    actions = ledger.add_subparsers(metavar="ACTION", required=True)
    status = actions.add_parser("status", help="progress, workers, stragglers")
    status.add_argument("url", metavar="URL", help="URL of the ledger: postgresql://host/database or sqlite:///file.db")
    status.add_argument("--job", metavar="NAME", help="show only this job (default: all)")
    status.add_argument("--json", action="store_true", help="print JSON, one line per job")
    status.add_argument(
        "--watch", type=_seconds, metavar="SECONDS", help="refresh every SECONDS until all jobs are done"
    )
    status.set_defaults(run=_status)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"must be between 0.05 and 86400 seconds; got {text}")
    return seconds


def _status(arguments: argparse.Namespace) -> int:
    try:
        ledger = Ledger(arguments.url)
    except ValueError as error:
        print(f"fastpipe: {error}", file=sys.stderr)
        return 2
    show: Callable[[LedgerStatus], str] = _as_json if arguments.json else str
    while True:
        try:
            jobs = ledger.jobs() if arguments.job is None else [arguments.job]
            found = [Ledger(arguments.url, job).status() for job in jobs]
        except LedgerError as error:
            # The database may be restarting. With --watch, keep trying.
            if arguments.watch is None:
                raise
            print(f"fastpipe: {error}", file=sys.stderr)
            found = []
        else:
            if not found:
                raise FastpipeError(f"{ledger!r} has no jobs: no worker has joined yet")
            print(("\n" if arguments.json else "\n\n").join(map(show, found)), flush=True)
        if arguments.watch is None or (found and all(status.finished for status in found)):
            return 0
        time.sleep(arguments.watch)
        if not arguments.json:
            print()


def _as_json(status: LedgerStatus) -> str:
    return json.dumps(dataclasses.asdict(status))
