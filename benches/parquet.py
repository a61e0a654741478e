"""Compares `read_parquet` with other readers of Parquet files, on one core, and what ten fetches at once save.

    python benches/parquet.py [--parts sequence,shuffled,fetches] [--rounds 7] [--quick]

In sequence the peer is pyarrow's own `iter_batches`, which stops at record batches; shuffled, the streams of Hugging
Face's datasets and Ray Data. Each has a process and an environment of its own. See README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import parquet_files
from peers.job import Job
from turns import Side, in_thousands, say, take_turns

WANTED = {"pyarrow-parquet": 0.9, "datasets": 5.0, "ray-data": 3.0, "fetches": 8.0}
# At least one row group of the largest size.
ROWS = {"scalars": 2_000_000, "vectors": 1_000_000, "texts": 1_000_000}
ROW_GROUPS = (10_000, 100_000, 1_000_000)
SHUFFLE_BUFFER = 10_000
BATCH_SIZE = 1024
PARTS = {"datasets": 4, "ray-data": 1}
"""Of the rows, one in that many: datasets would take long, and Ray takes more than a second to begin."""
WAIT = 0.05
"""Seconds that a fetch takes."""


def _met(reached: float, wanted: float) -> str:
    return "yes" if reached >= wanted else "no"


def in_sequence(tables: list[str], rounds: int, core: int, quick: bool, versions: dict[str, str]) -> bool:
    """fastpipe and pyarrow, in the files' order."""
    print(
        "\n| table, rows of a row group, of a batch | fastpipe, 1,000 rows/s | pyarrow | times as fast | by CPU time "
        "| met |"
    )
    print("|---|--:|--:|--:|--:|---|", flush=True)
    reached = True
    for table in tables:
        for group in ROW_GROUPS[: 2 if quick else 3]:
            path, known = parquet_files.write(table, ROWS[table] // (8 if quick else 1), group)
            for batch in (BATCH_SIZE, 8 * BATCH_SIZE):
                job = Job(str(path), table, batch)
                ours, theirs = Side("fastpipe-parquet", job, known["sums"]), Side("pyarrow-parquet", job, known["sums"])
                take_turns([ours, theirs], rounds, core, versions)
                reached &= _row(f"{table}, {group:,}, {batch:,}", ours, theirs)
    return reached


def shuffled(
    tables: list[str], peers: list[str], rounds: int, core: int, quick: bool, versions: dict[str, str]
) -> bool:
    """fastpipe, datasets and Ray Data, shuffled."""
    print(
        "\n| table, rows of a row group | fastpipe's order | 1,000 rows/s | peer | times as fast | by CPU time | met |"
    )
    print("|---|---|--:|---|--:|--:|---|", flush=True)
    reached = True
    for peer in peers:
        for table in tables:
            for group in ROW_GROUPS[:2]:
                path, known = parquet_files.write(table, ROWS[table] // PARTS[peer] // (8 if quick else 1), group)
                window, buffer = (Job(str(path), table, BATCH_SIZE, size) for size in (-1, SHUFFLE_BUFFER))
                ours = [
                    Side("fastpipe-parquet", buffer, known["plain"], f'"buffer" of {SHUFFLE_BUFFER:,}'),
                    Side("fastpipe-parquet", window, known["plain"], "True"),
                ]
                theirs = Side(peer, buffer, known["plain"])
                take_turns([*ours, theirs], rounds, core, versions)
                for side in ours:
                    name = f"{table}, {group:,} | {side.name}"
                    reached &= _row(name, side, theirs, peer=True)
    return reached


def _row(name: str, ours: Side, theirs: Side, *, peer: bool = False) -> bool:
    wanted = WANTED[theirs.reader]
    if problem := ours.error or theirs.error:
        print(f"| {name} | can't: {problem[:120]} |", flush=True)
        return ours.error is None
    wall, cpu = ours.times_as_fast(theirs), ours.times_as_fast(theirs, by_cpu=True)
    other = f"{theirs.name} {in_thousands(theirs.rate)}" if peer else in_thousands(theirs.rate)
    # Other programs disturb CPU time less.
    met = _met(cpu, wanted)
    print(f"| {name} | {in_thousands(ours.rate)} | {other} | {wall:.2f} | {cpu:.2f} | {met} |", flush=True)
    return cpu >= wanted


class Slow:
    """Units that take a while to come, and no work."""

    def __init__(self, units: int) -> None:
        import pyarrow as pa

        self.schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
        self.rows: Sequence[int] = [1000] * units

    def read(self, unit: int) -> Any:
        """A unit, after a wait."""
        import pyarrow as pa

        time.sleep(WAIT)
        return pa.table({"x": range(1000 * unit, 1000 * unit + 1000)}, schema=self.schema)

    def fingerprint(self) -> str:
        """What it is."""
        return "slow"


def fetches(rounds: int) -> bool:
    """Ten fetches at once and one after another, of 50 units."""
    import fastpipe

    ratios = []
    for _ in range(rounds):
        seconds = []
        for at_once in (10, 1):
            reader = fastpipe.read_units(Slow(50), batch_size=BATCH_SIZE, num_threads=1, num_fetches=at_once)
            began = time.perf_counter()
            rows = sum(len(batch["x"]) for batch in reader)
            seconds.append(time.perf_counter() - began)
            assert rows == 50_000
        ratios.append(seconds[1] / seconds[0])
    ratio = statistics.median(ratios)
    print(
        f"\n50 units, each of which takes {WAIT * 1e3:.0f} ms to come: with ten fetches at once {ratio:.1f} times "
        f"as fast as with one ({min(ratios):.1f} to {max(ratios):.1f}); wanted {WANTED['fetches']:.0f}",
        flush=True,
    )
    return ratio >= WANTED["fetches"]


def main() -> int:
    """Runs the comparison. Peers that fail and targets that are missed are results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="sequence,shuffled,fetches")
    parser.add_argument("--tables", default=",".join(ROWS))
    parser.add_argument("--peers", default=",".join(PARTS), help="of those that shuffle")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="default: the last one")
    parser.add_argument("--quick", action="store_true", default=os.environ.get("QUICK", "") not in ("", "0"))
    arguments = parser.parse_args()
    versions: dict[str, str] = {}
    rounds, core, quick = arguments.rounds, arguments.core, arguments.quick
    parts, tables = arguments.parts.split(","), arguments.tables.split(",")
    reached = True
    if "sequence" in parts:
        reached &= in_sequence(tables, rounds, core, quick, versions)
    if "shuffled" in parts:
        reached &= shuffled(tables, arguments.peers.split(","), min(rounds, 5), core, quick, versions)
    if "fetches" in parts:
        reached &= fetches(min(rounds, 3))
    say(", ".join(f"{name} {version}" for name, version in sorted(versions.items())))
    say("all targets reached" if reached else "a target was missed")
    return 0


if __name__ == "__main__":
    main()
