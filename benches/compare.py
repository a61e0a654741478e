"""Compares fastpipe with other Avro readers, one thread each, on one core.

A cell of the comparison is a dataset, a codec, a block size, and an order. In each cell, all readers take turns on the
same generated file. Before it is timed, each reader sums up all values. The sums must equal the generator's sums;
otherwise, the readers did different work. `peers` describes what each reader does, and `notes/peers.md` explains the
tables.

The exit status is nonzero if fastpipe fails or its values differ. If a peer can't read a dataset or its values differ,
the table shows the reason.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import plan
from harness import Bench, Table, Turns
from harness.children import Side, can, race, rate
from harness.data import cores
from peers import READERS
from peers.job import Job

MAIN = {
    "a/null": "Mixed features: scalars, vectors, sparse",
    "b/null": "Embeddings: float32[128] and a label",
    "a/null/shuffled": "Mixed features, shuffled",
}
"""The most important cells and their titles."""
PEERS = ("AvroTensorDataset", "frames")


def sides_of(bench: Bench, cell: plan.Spec, names: list[str], total: int) -> list[Side]:
    """Returns the readers that support the cell, with the number of records that each one reads."""
    shuffle = plan.SHUFFLE_BUFFER if cell.shuffled else 0
    jobs, checks, rows = {}, {}, {}
    for name in names:
        reader = READERS[name]
        if cell.shuffled and not reader.shuffles:
            continue
        path, info = cell.file(total // reader.part, bench.say)
        jobs[name], rows[name] = Job(str(path), cell.dataset, bench.args.batch_size, shuffle), info["rows"]
        # Slow readers would take longer to sum up a whole file than to run their rounds, so peers sum only a part.
        path, info = cell.file(total // (1 if name == "fastpipe" else max(reader.part, plan.PART)), bench.say)
        checks[name] = dataclasses.replace(jobs[name], path=str(path)), info
    known = "plain" if cell.shuffled else "sums"
    return [Side(name, jobs[name], info[known], checked=job, rows=rows[name]) for name, (job, info) in checks.items()]


def reader_row(table: Table, name: str, side: Side | None, turns: Turns, bytes_a_row: float) -> None:
    """Adds a reader to the table."""
    if side is None or not can(turns, name):
        table(name, READERS[name].gives, f"can't: {turns.errors.get(name, 'does not shuffle')[:160]}")
        return
    mine, cpu, batch = rate(turns, name), turns.median(name, "cpu"), side.job.batch
    assert side.peak is not None
    memory = f"{side.peak.bytes / 1e6:,.0f} (+{(side.peak.bytes - side.peak.idle) / 1e6:,.0f})"
    cells: list[Any] = [mine, mine * bytes_a_row / 1e6, 1e3 * batch / mine, cpu * 1e6, memory, len(turns.turns[name])]
    if name != "fastpipe" and can(turns, "fastpipe"):
        cells += [turns.ratio(name, "fastpipe"), cpu / turns.median("fastpipe", "cpu")]
    table(name, READERS[name].gives, *cells)


def fastest(turns: Turns, peer: str) -> tuple[str, float] | None:
    """Returns the fastest reader of a peer, and the speedup of fastpipe over it."""
    able = [name for name in turns.turns if READERS[name].peer == peer and can(turns, name)]
    if not able or not can(turns, "fastpipe"):
        return None
    return min(((name, turns.ratio(name, "fastpipe").median) for name in able), key=lambda pair: pair[1])


def against(turns: Turns, peer: str, goal: float | None) -> list[str]:
    """Returns the table cells of a peer: the speedup, the target, and whether it is met."""
    found, aim = fastest(turns, peer), "" if goal is None else f"{goal:g}x"
    if found is None:
        errors = [error for name, error in turns.errors.items() if READERS[name].peer == peer]
        return [f"can't: {errors[0][:160]}" if errors else "", aim, ""]
    met = "" if goal is None else "yes" if found[1] >= goal else "no"
    return [f"{found[1]:.2f}x ({found[0]})", aim, met]


def measure(bench: Bench, cell: plan.Spec, names: list[str]) -> tuple[Turns, float]:
    """Measures a cell and prints its table. Returns the turns and the bytes per record."""
    total = plan.RECORDS[cell.dataset] // (plan.PART if bench.quick else 1)
    _, info = cell.file(total, bench.say)
    bytes_a_row = info["raw_bytes"] / total
    sides = {side.name: side for side in sides_of(bench, cell, names, total)}
    # Cells without a target need only three rounds.
    rounds = bench.rounds if str(cell) in plan.GOALS else min(bench.rounds, 3)
    options: dict[str, Any] = {"enough": 0.1 if bench.quick else 0.25, "budget": 6.0, "memory": True, "rounds": rounds}
    turns = race(bench, [*sides.values()], cores()[-1:], **options)
    turns.errors |= {name: "doesn't shuffle" for name in names if name not in sides}
    if not can(turns, "fastpipe") and "fastpipe" in names:
        bench.fail(f"{cell}: fastpipe: {turns.errors.get('fastpipe')}")
    squeezed = "" if cell.codec == "null" else f", {info['bytes'] / info['raw_bytes']:.0%} of it on disk"
    buffered = f", shuffled with a buffer of {plan.SHUFFLE_BUFFER:,}" if cell.shuffled else ""
    title = (
        f"({cell.dataset}) {plan.CONTENTS[cell.dataset]}; codec {cell.codec}, blocks of {cell.block}{buffered}: "
        f"{total:,} records of {bytes_a_row:,.0f} bytes, {info['raw_bytes'] / 1e6:,.0f} MB{squeezed}"
    )
    columns = ["records/s|,.0f", "MB/s|,.0f", "ms a batch|,.3f", "CPU s/M records|,.2f", "peak MB (over idle)|"]
    columns += ["rounds|", "fastpipe is times as fast (rounds)|", "by CPU time|,.2f"]
    table = bench.table("reader", "gives", *columns, title=title)
    for name in names:
        reader_row(table, name, sides.get(name), turns, bytes_a_row)
    return turns, bytes_a_row


def main(bench: Bench) -> None:
    """Measures all cells and prints the summary tables."""
    measured: dict[str, tuple[Turns, float]] = {}
    for number, text in enumerate(bench.args.cells, 1):
        bench.say(f"{text}: cell {number} of {len(bench.args.cells)}")
        names = [name for name in bench.args.readers if not READERS[name].only or text in READERS[name].only]
        measured[text] = measure(bench, plan.Spec.parse(text), names)
    columns = ("than AvroTensorDataset|", "meant|", "met", "than the fastest frame reader|", "meant|", "met")
    table = bench.table("cell", *columns, title="fastpipe beside AvroTensorDataset and the fastest frame reader")
    for text, (turns, _) in measured.items():
        goals = plan.GOALS.get(text, (None, None))
        table(text, *against(turns, PEERS[0], goals[0]), *against(turns, PEERS[1], goals[1]))
    heads = ("fastpipe, records/s|,.0f", "MB/s|,.0f", "AvroTensorDataset|", "the fastest frame reader|")
    table = bench.table("", *heads, title="The three cells that matter most")
    for text, (turns, bytes_a_row) in measured.items():
        if text in MAIN and can(turns, "fastpipe"):
            ours, found = rate(turns, "fastpipe"), [fastest(turns, peer) for peer in PEERS]
            told = [
                "can't" if not best else f"{rate(turns, best[0]):,.0f} ({best[1]:.1f}x, {best[0]})" for best in found
            ]
            table(MAIN[text], ours, ours * bytes_a_row / 1e6, *told)
    wall, cpu = (
        sum(sum(turns.values(name, figure)) for turns, _ in measured.values() for name in turns.turns)
        for figure in ("seconds", "cpu")
    )
    if wall and cpu / wall < 0.95:
        bench.say(f"the readers went without the core for {1 - cpu / wall:.0%} of the time: the machine is busy")


if __name__ == "__main__":
    everyone = [name for name, reader in READERS.items() if "none" not in reader.only]
    readers, cells = (everyone, plan.QUICK_READERS), (plan.CELLS, list(plan.GOALS))
    Bench("compare", __doc__, readers=readers, cells=cells, batch_size=1024).run(main)
