"""Compares reading Avro files as data frames and Arrow record batches with fastpipe and with other readers.

* Whole files: `pa.table(reader)` and `pl.DataFrame(reader)`, compared with `read_avro` of polars and of polars-avro,
  and with all record batches of arrow-avro in memory.
* Batch by batch: Record batches, each dropped before the next one is read.

All readers use one thread on one core. The bench builds a small Rust program around arrow-avro with cargo.
"""

from __future__ import annotations

import subprocess

import generate
import plan
from harness import Bench
from harness.children import Side, can, race, rate
from harness.data import cores
from peers.frames import ARROW_AVRO
from peers.job import Job

WANTED = 1.5
BATCHES = (1024, 8192)
GROUPS = {
    "A frame of a whole file": (("fastpipe-table", "fastpipe-polars"), ("polars", "polars-avro", "arrow-avro")),
    "Batch by batch": (("fastpipe-batches",), ("polars-avro-batches", "arrow-avro-batches", "arrow-avro-views")),
}


def build() -> str:
    """Builds the program around arrow-avro. Returns the version of arrow-avro."""
    subprocess.run(["cargo", "build", "--release", "--locked", "--quiet"], cwd=ARROW_AVRO, check=True)
    lines = (ARROW_AVRO / "Cargo.lock").read_text().splitlines()
    return lines[lines.index('name = "arrow-avro"') + 1].partition('"')[2].rstrip('"')


def sides_of(bench: Bench, names: tuple[str, ...], dataset: str) -> list[Side]:
    """Returns a side for each reader and each batch size that it supports. `dataset` may have a codec: `a/deflate`."""
    spec = plan.Spec.parse(dataset if "/" in dataset else f"{dataset}/null")
    rows = plan.RECORDS[spec.dataset] // (plan.PART if bench.quick else 1)
    path, known = spec.file(rows, bench.say)
    found = []
    kinds = {column.kind for column in generate.DATASETS[spec.dataset]}
    for name in names:
        if name.endswith("-views") and kinds.isdisjoint(("string", "strings")):
            continue
        # polars and polars-avro return a single frame, so the batch size is irrelevant.
        whole = name in ("polars", "polars-avro")
        for batch in BATCHES[:1] if whole else BATCHES:
            label = name if whole else f"{name}, {batch:,}"
            found.append(Side(name, Job(str(path), spec.dataset, batch), known["sums"], label))
    return found


def main(bench: Bench) -> None:
    """Runs the comparison. Failing peers and missed targets don't fail the bench."""
    try:
        bench.versions["arrow-avro"] = build()
    except (OSError, subprocess.CalledProcessError) as error:
        bench.say(f"arrow-avro can't be built: {error}")
    for title, (mine, others) in GROUPS.items():
        columns = ("1,000 records/s|,.0f", "fastest peer", "times as fast|,.2f", "by CPU time|,.2f", "met")
        row = bench.table("dataset", "fastpipe", *columns, title=title)
        for dataset in bench.args.cells:
            ours, peers = (sides_of(bench, names, dataset) for names in (mine, others))
            turns = race(bench, [*ours, *peers], cores()[-1:])
            able = [side.name for side in peers if can(turns, side.name)]
            for name in mine:
                # Each side uses its fastest batch size.
                own = [side.name for side in ours if side.reader.name == name and can(turns, side.name)]
                if not own or not able:
                    continue
                best, fastest = (max(names, key=lambda one: rate(turns, one)) for names in (own, able))
                wall, cpu = (turns.ratio(fastest, best, figure).median for figure in ("seconds", "cpu"))
                met = bench.target(f"{dataset}: {best}, by CPU time", cpu, least=WANTED)
                told = f"{fastest}: {rate(turns, fastest) / 1e3:,.0f}"
                row(dataset, best, rate(turns, best) / 1e3, told, wall, cpu, met)


if __name__ == "__main__":
    everything = [*"abcdef", *(f"{dataset}/deflate" for dataset in "abcdef")]
    Bench("frames", __doc__, cells=(everything, list("af"))).run(main)
