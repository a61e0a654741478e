"""Compares fastpipe with other Avro readers, one thread each, on one core.

For every cell (a data set and a codec) all readers read the same generated file, in turn: A B C A B C, so that whatever
else the machine does meets all of them alike. Each first sums up every value that it read; the sums must be those of
the generator, or the readers didn't do the same work. That pass is the warm-up as well. See `peers.py` for what exactly
each of them does, and `README.md` for how to read the table.

The exit status is 1 where fastpipe fails or anyone's values differ; a peer that can't read a data set is a result.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import generate
import peers

HERE = Path(__file__).resolve().parent
SLOW_BUDGET = 20.0
"""Seconds a reader may take in one cell before it gets fewer rounds than the others (3 at least)."""
# Records for about a tenth of a second to half a second with the fastest readers.
RECORDS = {"a": 65_536, "b": 262_144, "c": 262_144, "d": 524_288, "e": 262_144, "f": 131_072}
CELLS = ["a/null", "a/deflate", "b/null", "c/null", "d/null"]
GIVES = {
    "fastpipe": "NumPy batches",
    "fastavro": "NumPy batches",
    "fastavro-records": "Python records, no arrays",
    "polars-avro": "one frame",
    "polars-avro-batches": "frames of a batch",
    "jetliner": "one frame",
    "jetliner-batches": "frames of a batch or block",
}
CONTENTS = {
    "a": "6 scalars, 8 dense vectors (float32, float64, long), 5 sparse features of 10 to 50 entries",
    "b": "float32[128] and a label",
    "c": "ragged longs of 0 to 64 bits, 0 to 64 a record",
    "d": "20 scalars",
    "e": "20 nullable scalars, one in five null",
    "f": "three strings, a ragged array of strings, a label",
}


@dataclass
class Result:
    """What one reader did in one cell."""

    rows: int = 0
    seconds: dict[int, float] = field(default_factory=dict)
    """Round -> wall time."""
    cpu: list[float] = field(default_factory=list)
    error: str | None = None
    differs: list[str] = field(default_factory=list)
    """Columns whose sums aren't the generator's."""

    def rate(self) -> float:
        """Records a second, the median of the rounds."""
        return self.rows / statistics.median(self.seconds.values())


@dataclass
class Cell:
    """One data set with one codec."""

    dataset: str
    codec: str
    path: Path
    info: dict[str, Any]
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What stands above the table."""
        info = self.info
        squeezed = "" if self.codec == "null" else f", {info['bytes'] / info['raw_bytes']:.0%} of it on disk"
        return (
            f"({self.dataset}) {CONTENTS[self.dataset]}; codec {self.codec}: {info['rows']:,} records of "
            f"{info['raw_bytes'] / info['rows']:,.0f} bytes, {info['raw_bytes'] / 1e6:,.0f} MB{squeezed}"
        )


class Clock:
    """Says on stderr what is done, and about how long the rest takes."""

    def __init__(self, cells: int) -> None:
        self._begun, self._cells, self._done = time.perf_counter(), cells, 0
        self._cell_begun, self._costs = self._begun, list[float]()

    def next_cell(self) -> None:
        """A cell is done."""
        now = time.perf_counter()
        self._costs.append(now - self._cell_begun)
        self._cell_begun, self._done = now, self._done + 1

    def say(self, text: str, left: float | None = None) -> None:
        """Prints a line.

        Args:
            text: What to say.
            left: How many seconds the rest of this cell takes. None: guessed from the cells before.
        """
        now = time.perf_counter()
        spent = now - self._cell_begun
        if left is None and self._costs:
            left = max(0.0, statistics.mean(self._costs) - spent)
        eta = "ETA ?"
        if left is not None:
            after = self._cells - self._done - 1
            rest = left + after * statistics.mean([*self._costs, spent + left]) if after >= 0 else 0.0
            eta = f"ETA {int(rest) // 60}:{int(rest) % 60:02d}"
        print(f"[{now - self._begun:6.1f} s, {eta}] {text}", file=sys.stderr, flush=True)


def measure(cell: Cell, readers: dict[str, peers.Peer], rounds: int, batch: int, clock: Clock) -> None:
    """Fills in a cell's results.

    Args:
        cell: Whose file is read.
        readers: Name -> started worker, in the order in which they take turns.
        rounds: How many times each reads the file, but for slow ones.
        batch: Rows a batch.
        clock: Told of progress.
    """
    where = f"({cell.dataset}) {cell.codec}"
    costs: dict[str, float] = {}
    for name, peer in readers.items():
        result = cell.results[name] = Result()
        clock.say(f"{where}: checks {name}")
        begun = time.perf_counter()
        answer = peer.ask("read" if name == "fastavro-records" else "check", cell.path, cell.dataset, batch)
        costs[name] = time.perf_counter() - begun
        result.error, result.rows = answer.get("error"), answer.get("rows", 0)
        if result.error is None and result.rows != cell.info["rows"]:
            result.differs.append(f"{result.rows:,} rows")
        if "sums" in answer:
            result.differs += [leaf for leaf, known in cell.info["sums"].items() if answer["sums"].get(leaf) != known]
        for problem in filter(None, [result.error, ", ".join(result.differs)]):
            clock.say(f"{where}: {name}: {problem}")

    # Summing up is slow with some, so the cost of a check is only where the guess starts.
    turns = {name: rounds for name, result in cell.results.items() if result.error is None}
    done = 0
    while any(turn > done for turn in turns.values()):
        for name in turns:
            result = cell.results[name]
            if turns[name] <= done or result.error is not None:
                continue
            answer = readers[name].ask("read", cell.path, cell.dataset, batch)
            result.error = answer.get("error")
            if result.error is not None:
                clock.say(f"{where}: {name}: {result.error}")
                continue
            result.seconds[done] = costs[name] = answer["seconds"]
            result.cpu.append(answer["cpu"])
            turns[name] = min(rounds, max(3, int(SLOW_BUDGET / answer["seconds"])))
        done += 1
        left = sum(max(0, turn - done) * costs[name] for name, turn in turns.items())
        clock.say(f"{where}: round {done} of {rounds}", left)
    clock.next_cell()


def _times(ours: Result | None, theirs: Result) -> float | None:
    """By what factor we are faster: the median over the rounds that both took part in."""
    if ours is None or ours.error is not None or ours is theirs:
        return None
    pairs = [theirs.seconds[r] / ours.seconds[r] for r in ours.seconds if r in theirs.seconds]
    return statistics.median(pairs) if pairs else None


def table(cell: Cell) -> list[str]:
    """A cell as a Markdown table."""
    lines = [
        "| reader | gives | records/s | MB/s | slowest to fastest round, records/s | rounds | fastpipe is faster |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    ours = cell.results.get("fastpipe")
    for name, result in cell.results.items():
        head = f"| {name} | {GIVES[name]} "
        if result.error is not None:
            text = " ".join(result.error.split()).replace("|", "\\|")
            lines.append(f"{head}| can't: {text[:160]} | | | | |")
            continue
        rate, times = result.rate(), _times(ours, result)
        low, high = result.rows / max(result.seconds.values()), result.rows / min(result.seconds.values())
        factor = "" if times is None else f"{times:.2f} x"
        if result.differs:
            factor += f" VALUES DIFFER: {', '.join(result.differs[:3])}"
        bandwidth = rate * cell.info["raw_bytes"] / cell.info["rows"] / 1e6
        spread = f"{low:,.0f} to {high:,.0f}"
        lines.append(f"{head}| {rate:,.0f} | {bandwidth:,.0f} | {spread} | {len(result.seconds)} | {factor} |")
    return lines


def busy(cells: list[Cell]) -> float:
    """The share of the time that the readers didn't get the core, over all rounds."""
    results = [result for cell in cells for result in cell.results.values()]
    wall = sum(sum(result.seconds.values()) for result in results)
    return 1 - sum(sum(result.cpu) for result in results) / wall if wall else 0.0


def _machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}"


def _revision() -> str:
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def report(cells: list[Cell], readers: dict[str, peers.Peer], batch: int) -> str:
    """The text of RESULTS.md."""
    versions: dict[str, str] = {}
    for peer in readers.values():
        versions |= peer.versions
    lines = [
        "# Results",
        "",
        "Written by `benches/compare.py --write`; what the columns mean, and what each reader does, stands in",
        "[README.md](README.md).",
        "",
        f"- Date: {time.strftime('%Y-%m-%d', time.gmtime())}, revision {_revision()}",
        f"- Machine: {_machine()}",
        f"- Python {platform.python_version()}, {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- One core, one thread a reader, batches of {batch:,} rows, blocks of {generate.BLOCK_BYTES:,} bytes, cached",
        f"- While a reader was timed, it went without the core for {busy(cells):.0%} of the time",
        "- Every reader's values were checked against the generator's",
    ]
    for cell in cells:
        lines += ["", f"## {cell.title}", "", *table(cell)]
    lines += ["", "## Again", "", "```sh", "make bench                                      # prints the tables"]
    lines += [".venv/bin/python benches/compare.py --write     # and writes this file", "```", ""]
    return "\n".join(lines)


def main() -> int:
    """Runs the comparison."""
    quick = os.environ.get("QUICK", "") not in ("", "0")
    parser = argparse.ArgumentParser(description="Compare fastpipe with other Avro readers on one core.")
    parser.add_argument("--quick", action="store_true", default=quick, help="an eighth of the data, 3 rounds (QUICK=1)")
    parser.add_argument("--write", action="store_true", help="write RESULTS.md")
    parser.add_argument("--cells", default=",".join(CELLS), help="data set/codec, ... (default: %(default)s)")
    parser.add_argument("--readers", default=",".join(peers.WORKERS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=0, help="default: 9, or 3")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="default: the last one")
    args = parser.parse_args()
    rounds = args.rounds or (3 if args.quick else 9)
    plan = [tuple(cell.split("/")) for cell in args.cells.split(",")]
    clock = Clock(len(plan))

    readers = {name: peers.Peer(name, args.core, clock.say) for name in args.readers.split(",")}
    cells = []
    try:
        for dataset, codec in plan:
            records = RECORDS[dataset] // (8 if args.quick else 1)
            cell = Cell(dataset, codec, *generate.generate(dataset, records, codec=codec, log=clock.say))
            cell.path.read_bytes()  # Into the page cache.
            measure(cell, readers, rounds, args.batch_size, clock)
            cells.append(cell)
            print("\n".join(["", cell.title, "", *table(cell), ""]), flush=True)
    finally:
        for peer in readers.values():
            peer.close()

    if (idle := busy(cells)) > 0.05:
        clock.say(f"the readers went without the core for {idle:.0%} of the time: the machine is busy")
    if args.write:
        (HERE / "RESULTS.md").write_text(report(cells, readers, args.batch_size))
        clock.say("wrote benches/RESULTS.md")
    failed = [
        f"({cell.dataset}) {cell.codec}: values differ"
        for cell in cells
        if any(result.differs for result in cell.results.values())
    ]
    ours = [(cell, cell.results["fastpipe"].error) for cell in cells if "fastpipe" in cell.results]
    failed += [f"({cell.dataset}) {cell.codec}: fastpipe: {error}" for cell, error in ours if error]
    for problem in failed:
        clock.say(f"FAILED {problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
