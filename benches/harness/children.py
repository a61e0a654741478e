"""Child processes of a bench: programs that print JSON, and readers that take turns."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.bench import HERE, Bench
from harness.memory import Peak
from harness.turns import CannotError, Turn, Turns, take_turns
from peers import READERS, Peer
from peers.job import Job


@contextmanager
def peers(bench: Bench, readers: dict[str, tuple[str, list[int]]]) -> Iterator[dict[str, Peer]]:
    """Starts readers, each on its cores, and stops them at the end of the block.

    The readers start concurrently because imports take most of the time of a small race. The versions of their packages
    are saved with the figures.
    """
    started = {name: Peer(reader, READERS[reader].env, cores, bench.say) for name, (reader, cores) in readers.items()}
    try:
        yield started
    finally:
        for peer in started.values():
            for package, version in peer.versions.items():
                same = bench.versions.get(package, version) == version
                bench.versions[package if same else f"{package} ({peer.name})"] = version
            peer.close()


def call(script: str, **request: Any) -> Any:
    """Runs a script with `--child REQUEST` and returns the JSON that it prints."""
    command = [sys.executable, script, "--child", json.dumps(request)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


@contextmanager
def program(command: list[str], **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a program and kills it at the end of the block. Yields its process and its first line of output."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.wait()


@contextmanager
def postgres(*options: str) -> Iterator[Any]:
    """Yields a running PostgreSQL server with a method `new_database`, or None if PostgreSQL isn't installed."""
    # The tests have a module that starts one.
    sys.path.append(str(HERE.parent / "tests"))
    servers: Any = importlib.import_module("servers")
    programs = servers.postgres_programs()
    server = servers.Postgres(programs, *options) if programs else None
    try:
        yield server
    finally:
        if server is not None:
            server.stop()


class Side:
    """A reader in a separate process, and the job that it reads.

    Args:
        reader: Key of `READERS`.
        job: Job that the reader runs.
        known: Expected sums of all values, from `generate.Sums`. None skips the check of values.
        label: Name of the side in tables. Defaults to the reader's name.
        checked: Job that is read for the check of values. Defaults to `job`.
        rows: Expected number of rows per pass. None accepts any number.
    """

    def __init__(
        self,
        reader: str,
        job: Job,
        known: dict[str, Any] | None = None,
        label: str = "",
        *,
        checked: Job | None = None,
        rows: int | None = None,
    ) -> None:
        self.reader, self.job, self.known, self.name = READERS[reader], job, known, label or reader
        self._checked, self._rows = checked or job, rows
        self.peak: Peak | None = None
        self.peer: Peer | None = None
        self.enough = 0.25

    def _ask(self, op: str, job: Job, enough: float = 0.0, memory: bool = False) -> dict[str, Any]:
        assert self.peer is not None
        answer = self.peer.ask(op, job, enough, memory)
        if "error" in answer:
            raise CannotError(answer["error"])
        if self._rows is not None and job == self.job and answer["rows"] != self._rows:
            raise CannotError(f"{answer['rows']:,} of {self._rows:,} rows")
        return answer

    def check(self, memory: bool) -> None:
        """Reads the file once to sample memory, if requested, and once to compare the sums of all values.

        Raises:
            CannotError: If the reader can't read the file or returns different values.
        """
        if memory:
            self.peak = self._ask("read", self.job, memory=True)["peak"]
        answer = self._ask("check", self._checked)
        got = answer.get("plain" if self._checked.shuffle else "sums")
        if self.known is not None and got is not None:
            differing = [name for name, total in self.known.items() if got.get(name) != total]
            if differing:
                raise CannotError(f"other values: {', '.join(differing)}")

    def __call__(self) -> Turn:
        """Takes a turn. Returns the wall and CPU seconds per row."""
        answer = self._ask("read", self.job, self.enough)
        return Turn(answer["seconds"] / answer["rows"], answer["cpu"] / answer["rows"], answer)


def race(
    bench: Bench,
    sides: list[Side],
    cores: list[int],
    *,
    enough: float = 0.3,
    budget: float = 8.0,
    memory: bool = False,
    warm: int = 0,
    rounds: int = 0,
) -> Turns:
    """Checks the values that the sides read, then runs the sides in turn.

    Args:
        bench: Bench that receives the versions of packages.
        sides: Sides that take turns. Their names must differ.
        cores: Cores that all sides are pinned to.
        enough: Minimum duration of a turn in seconds. Shorter passes are repeated.
        budget: Total seconds after which a side gets fewer rounds.
        memory: Whether to sample the memory of each side's first pass.
        warm: Number of warm-up turns per side, in addition to the check.
        rounds: Number of rounds. 0 uses the number of the bench.
    """
    with peers(bench, {side.name: (side.reader.name, cores) for side in sides}) as started:
        errors: dict[Any, str] = {}
        for side in sides:
            side.peer, side.enough = started[side.name], enough
            try:
                side.check(memory)
            except CannotError as error:
                errors[side.name] = str(error)
                bench.say(f"{side.name}: {str(error)[:300]}")
        able: dict[Any, Side] = {side.name: side for side in sides if side.name not in errors}
        found = take_turns(able, rounds or bench.rounds, warm=warm, budget=budget)
    found.errors = errors | found.errors
    return found


def rate(turns: Turns, name: str) -> float:
    """Returns the rows per second of a side."""
    return 1 / turns.median(name)


def can(turns: Turns, name: Any) -> bool:
    """Returns whether a side has been measured."""
    return name not in turns.errors and bool(turns.turns.get(name))
