"""Compares frames and record batches that fastpipe makes of Avro files with those of other readers.

    python benches/frames.py [--rounds 7] [--cells a,b,c,d,e,f]

Whole files: `pa.table(reader)` and `pl.DataFrame(reader)` beside `read_avro` of polars and of polars-avro, and all
record batches of arrow-avro, kept. Batch by batch: record batches, each dropped before the next. One core, one thread.
The program around arrow-avro is built here, by cargo.
"""

from __future__ import annotations

import argparse
import os
import subprocess

import generate
import plan
from peers.frames import ARROW_AVRO
from peers.job import Job
from turns import Side, in_thousands, say, take_turns

WANTED = 1.5
BATCHES = (1024, 8192)
WHOLE = ("fastpipe-table", "fastpipe-polars"), ("polars", "polars-avro", "arrow-avro")
PIECES = ("fastpipe-batches",), ("polars-avro-batches", "arrow-avro-batches", "arrow-avro-views")


def build() -> str:
    """Builds the program around arrow-avro, and says which version that has."""
    subprocess.run(["cargo", "build", "--release", "--locked", "--quiet"], cwd=ARROW_AVRO, check=True)
    lines = (ARROW_AVRO / "Cargo.lock").read_text().splitlines()
    return lines[lines.index('name = "arrow-avro"') + 1].partition('"')[2].rstrip('"')


def _sides(names: tuple[str, ...], dataset: str, rows: int, batches: tuple[int, ...]) -> list[Side]:
    path, known = plan.Spec(dataset).file(rows, say)
    found = []
    kinds = {column.kind for column in generate.DATASETS[dataset]}
    for name in names:
        if name.endswith("-views") and kinds.isdisjoint(("string", "strings")):
            continue
        # polars and polars-avro have no rows of a batch where they make one frame.
        for batch in batches if name not in ("polars", "polars-avro") else batches[:1]:
            label = f"{name}, {batch:,}" if name not in ("polars", "polars-avro") else name
            found.append(Side(name, Job(str(path), dataset, batch), known["sums"], label))
    return found


def _compare(title: str, groups: tuple[tuple[str, ...], tuple[str, ...]], cells: list[str], rounds: int, core: int,
             versions: dict[str, str], part: int) -> bool:  # fmt: skip
    print(f"\n| {title} | fastpipe | 1,000 records/s | fastest peer | times as fast | by CPU time | met |")
    print("|---|---|--:|---|--:|--:|---|", flush=True)
    reached = True
    for dataset in cells:
        ours, peers = (_sides(names, dataset, plan.RECORDS[dataset] // part, BATCHES) for names in groups)
        take_turns([*ours, *peers], rounds, core, versions)
        for side in [*ours, *peers]:
            say(f"{dataset}: {side.name}: {side.error or in_thousands(side.rate)}")
        able = [side for side in peers if side.error is None]
        fastest = max(able, key=lambda side: side.rate)
        for name in groups[0]:
            # Each side with the batch size that suits it.
            mine = [side for side in ours if side.reader == name and side.error is None]
            if not mine:
                continue
            best = max(mine, key=lambda side: side.rate)
            wall, cpu = best.times_as_fast(fastest), best.times_as_fast(fastest, by_cpu=True)
            reached &= cpu >= WANTED
            print(
                f"| {dataset} | {best.name} | {in_thousands(best.rate)} | {fastest.name}: "
                f"{in_thousands(fastest.rate)} | "
                f"{wall:.2f} | {cpu:.2f} | {'yes' if cpu >= WANTED else 'no'} |",
                flush=True,
            )
    return reached


def main() -> int:
    """Runs the comparison. Peers that fail and targets that are missed are results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cells", default="a,b,c,d,e,f")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="default: the last one")
    parser.add_argument("--quick", action="store_true", default=os.environ.get("QUICK", "") not in ("", "0"))
    arguments = parser.parse_args()
    versions = {"arrow-avro": build()}
    cells, part = arguments.cells.split(","), plan.PART if arguments.quick else 1
    reached = True
    for title, groups in (("a frame of a whole file", WHOLE), ("batch by batch", PIECES)):
        reached &= _compare(title, groups, cells, arguments.rounds, arguments.core, versions, part)
    say(", ".join(f"{name} {version}" for name, version in sorted(versions.items())))
    say("all targets reached" if reached else "a target was missed")
    return 0


if __name__ == "__main__":
    main()
