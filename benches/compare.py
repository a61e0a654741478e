"""Compares fastpipe with other Avro readers, one thread each, on one core.

For every cell (a data set, a codec, a block size, an order) all readers read the same generated file, in turn, A B C A
B C, so that whatever else the machine does meets all of them alike. Each first sums up every value that it read; the
sums must be those of the generator, or the readers didn't do the same work. That pass is the warm-up as well. See
`peers` for what exactly each of them does, and `README.md` for how to read the tables.

The exit status is 1 where fastpipe fails or its values differ. A peer that can't read a data set, or whose values are
others, is a result: the table says so, and it doesn't count.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from typing import Any

import kept
import plan
import tables
from cell import Cell, Result
from peers import READERS, Peer, Sample
from peers.job import Job
from progress import Clock

BUDGET = 6.0
"""Seconds that a reader may take in one cell before it gets fewer rounds than the others (3 at least)."""


def _differences(got: dict[str, Any] | None, known: dict[str, Any]) -> list[str]:
    """The columns whose sums aren't the known ones; none, where nothing was summed up."""
    return [] if got is None else [leaf for leaf, total in known.items() if got.get(leaf) != total]


def _missing(answer: dict[str, Any], rows: int) -> list[str]:
    return [] if answer["rows"] == rows else [f"{answer['rows']:,} of {rows:,} rows"]


class _Table:
    """The readers of one cell, at work."""

    def __init__(self, cell: Cell, names: list[str], core: int, quick: bool, clock: Clock) -> None:
        self.cell, self.clock, self.quick = cell, clock, quick
        self.enough = 0.1 if quick else 0.25
        self.peers: dict[str, Peer] = {}
        self.jobs: dict[str, Job] = {}
        self.checks: dict[str, tuple[Job, dict[str, Any]]] = {}
        for name in names:
            result = cell.results[name] = Result()
            reader = READERS[name]
            if cell.spec.shuffled and not reader.shuffles:
                result.error = "doesn't shuffle"
                continue
            shuffle = plan.SHUFFLE_BUFFER if cell.spec.shuffled else 0
            path, info = cell.spec.file(cell.rows // reader.part, clock.say)
            self.jobs[name] = Job(str(path), cell.spec.dataset, cell.batch, shuffle)
            result.rows, result.batches = info["rows"], -(-info["rows"] // cell.batch)
            # Summing up would take some readers longer than their rounds: the first records must do, but for fastpipe.
            path, info = cell.spec.file(
                cell.rows // (1 if name == "fastpipe" else max(reader.part, plan.PART)), clock.say
            )
            self.checks[name] = Job(str(path), cell.spec.dataset, cell.batch, shuffle), info
            # All at once: importing is the longest part of a cell of the quick run.
            self.peers[name] = Peer(name, reader.env, [core], clock.say)

    def check(self) -> None:
        """Has every reader read the file for its memory, in a fresh process, and then for its values."""
        plain = self._plain() if self.cell.spec.shuffled else {}
        for name, peer in self.peers.items():
            result, sample = self.cell.results[name], Sample()
            answer = peer.ask("read", self.jobs[name], 0.0, sample)
            result.idle, result.peak = sample.idle, sample.peak
            if "error" not in answer:
                result.differs += _missing(answer, result.rows)
                job, info = self.checks[name]
                answer = peer.ask("check", job)
            result.error = answer.get("error")
            if result.error is None:
                job, info = self.checks[name]
                result.differs += _missing(answer, info["rows"])
                if self.cell.spec.shuffled:
                    result.differs += _differences(answer.get("plain"), plain[job.path])
                else:
                    result.differs += _differences(answer.get("sums"), info["sums"])
            for problem in filter(None, [result.error, ", ".join(result.differs)]):
                self.clock.say(f"{self.cell.spec}: {name}: {problem[:200]}")
            self.clock.step(f"{self.cell.spec}: checked {name}")

    def _plain(self) -> dict[str, dict[str, object]]:
        """Path -> sums that don't depend on the order, of a pass in the file's order whose weighted sums are right."""
        found: dict[str, dict[str, object]] = {}
        ours = Peer("fastpipe", None, log=self.clock.say)
        try:
            for job, info in self.checks.values():
                if job.path not in found:
                    answer = ours.ask("check", dataclasses.replace(job, shuffle=0))
                    if answer.get("sums") != info["sums"]:
                        raise RuntimeError(f"{self.cell.spec}: fastpipe's values differ: {answer.get('error', '')}")
                    found[job.path] = answer["plain"]
        finally:
            ours.close()
        return found

    def measure(self, rounds: int) -> None:
        """Lets the readers take turns."""
        turns = {name: rounds for name in self.peers if self.cell.results[name].error is None}
        done = 0
        while any(turn > done for turn in turns.values()):
            for name in turns:
                result = self.cell.results[name]
                if turns[name] <= done or result.error is not None:
                    continue
                begun = time.perf_counter()
                answer = self.peers[name].ask("read", self.jobs[name], self.enough)
                result.error = answer.get("error")
                if result.error is not None:
                    self.clock.say(f"{self.cell.spec}: {name}: {result.error[:200]}")
                    continue
                result.differs += _missing(answer, result.rows)
                result.seconds[done] = answer["seconds"]
                result.cpu.append(answer["cpu"])
                # All of it, what isn't counted as well: a dataset may wait for two seconds after its last batch.
                turns[name] = min(rounds, max(3, int(BUDGET / (time.perf_counter() - begun))))
            done += 1
            self.clock.step(f"{self.cell.spec}: round {done} of {rounds}")

    def close(self, versions: dict[str, str]) -> None:
        """Ends the readers."""
        for peer in self.peers.values():
            versions |= peer.versions
            peer.close()


def run(
    cells: list[str],
    readers: list[str],
    rounds: int,
    batch: int,
    core: int,
    quick: bool,
    clock: Clock,
) -> list[str]:
    """Measures the cells, prints their tables and keeps what was measured.

    Args:
        cells: As `plan.Spec.parse` takes them.
        readers: Keys of `READERS`.
        rounds: How many turns each takes, but for slow ones.
        batch: Rows a batch.
        core: The core that all stay on.
        quick: An eighth of the data, shorter turns.
        clock: Told of progress.

    Returns:
        What failed.
    """
    failed: list[str] = []
    versions: dict[str, str] = {}
    cells_done: list[Cell] = []
    for number, text in enumerate(cells, 1):
        spec = plan.Spec.parse(text)
        names = [name for name in readers if not READERS[name].only or text in READERS[name].only]
        total = plan.RECORDS[spec.dataset] // (plan.PART if quick else 1)
        _, info = spec.file(total, clock.say)
        cell = Cell(spec, batch, total, info["raw_bytes"], info["bytes"])
        clock.stage(f"cell {number} of {len(cells)}", len(names) + rounds)
        table = _Table(cell, names, core, quick, clock)
        try:
            table.check()
            # Where nothing is promised, three rounds tell enough.
            table.measure(rounds if text in plan.GOALS else min(rounds, 3))
        finally:
            table.close(versions)
        cells_done.append(cell)
        if (ours := cell.results.get("fastpipe")) is not None and (ours.error or ours.differs):
            failed.append(f"{spec}: fastpipe: {ours.error or f'values differ: {ours.differs}'}")
        kept.save("compare", {str(spec): cell.to_json()}, versions, quick)
        clock.clear()
        print("\n".join(["", f"### {tables.title(cell)}", "", *tables.cell_table(cell), ""]), flush=True)
    print("\n".join(["", "### Beside what is meant to be", "", *tables.goals_table(cells_done), ""]), flush=True)
    if (idle := tables.busy(cells_done)) > 0.05:
        clock.say(f"the readers went without the core for {idle:.0%} of the time: the machine is busy")
    return failed


def main() -> int:
    """Runs the comparison."""
    quick = os.environ.get("QUICK", "") not in ("", "0")
    parser = argparse.ArgumentParser(description="Compare fastpipe with other Avro readers on one core.")
    parser.add_argument("--quick", action="store_true", default=quick, help="an eighth of the data, 3 rounds (QUICK=1)")
    parser.add_argument("--cells", default="", help=f"data set/codec[/block][/shuffled], ... (default: {plan.CELLS})")
    parser.add_argument("--readers", default="", help=f"default: {', '.join(READERS)}")
    parser.add_argument("--rounds", type=int, default=0, help="default: 7, or 3")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="default: the last one")
    args = parser.parse_args()
    clock = Clock()
    failed = run(
        args.cells.split(",") if args.cells else plan.QUICK_CELLS if args.quick else plan.CELLS,
        args.readers.split(",") if args.readers else plan.QUICK_READERS if args.quick else list(READERS),
        args.rounds or (3 if args.quick else 7),
        args.batch_size,
        args.core,
        args.quick,
        clock,
    )
    for problem in failed:
        clock.say(f"FAILED {problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
