"""Compares `read_parquet` with other readers of Parquet files on one core, and measures ten concurrent fetches.

In sequential order, the peers are pyarrow's `iter_batches`, which yields record batches and no arrays, and polars,
which reads one frame. In shuffled order, the peers are the streaming datasets of Hugging Face's datasets library, Ray
Data, and pyarrow, which reads the whole table and takes its rows in a random order. Each peer has a separate process
and environment. Targets apply to CPU time, which depends less on the load of the machine. Failing peers and missed
targets don't fail the bench.
"""

from __future__ import annotations

import itertools

import parquet_files
from harness import Bench, Table, Turns, take_turns
from harness.children import Side, can, race, rate
from harness.data import Waiting, cores
from peers.job import Job

WANTED = {"pyarrow-parquet": 0.9, "polars-parquet": 0.5, "datasets": 5.0, "ray-data": 3.0, "pyarrow-take": 1.1}
FETCHES = 8.0
"""Target of ten concurrent fetches."""
# Each table fills at least one row group of the largest size.
ROWS = {"scalars": 2_000_000, "vectors": 1_000_000, "texts": 1_000_000, "words": 1_000_000}
ROW_GROUPS = (10_000, 100_000, 1_000_000)
SHUFFLE_BUFFER = 10_000
BATCH_SIZE = 1024
PARTS = {"datasets": 4, "ray-data": 1, "pyarrow-take": 1}
"""Divisor of the number of rows for each peer. datasets is slow, and Ray needs more than a second to start."""
WAIT = 0.05
"""Duration of a fetch in seconds."""


def add(bench: Bench, row: Table, turns: Turns, ours: str, theirs: str, cells: list[str]) -> None:
    """Adds a row that compares two sides."""
    able = [name for name in (ours, theirs) if can(turns, name)]
    if len(able) < 2:
        row(*cells, f"can't: {' '.join(turns.errors.values())[:120]}")
        if ours not in able:
            bench.fail(f"{cells}: {turns.errors.get(ours)}")
        return
    mine, other = rate(turns, ours) / 1e3, rate(turns, theirs) / 1e3
    wall, cpu = (turns.ratio(theirs, ours, figure).median for figure in ("seconds", "cpu"))
    met = bench.target(f"{', '.join(cells)}, beside {theirs}", cpu, least=WANTED[theirs])
    row(*cells, mine, other, wall, cpu, met)


def in_sequence(bench: Bench) -> None:
    """Compares fastpipe with pyarrow in the order of the file."""
    columns = ("fastpipe, 1,000 rows/s|,.0f", "pyarrow|,.0f", "times as fast|,.2f", "by CPU time|,.2f", "met")
    name = "table, rows of a row group, of a batch"
    row = bench.table(name, *columns, title="In the order of the file, beside pyarrow's iter_batches")
    groups, batches = ROW_GROUPS[: 2 if bench.quick else 3], (BATCH_SIZE, 8 * BATCH_SIZE)
    for table, group, batch in itertools.product(bench.args.tables, groups, batches):
        path, known = parquet_files.write(table, ROWS[table] // (8 if bench.quick else 1), group)
        readers = ("fastpipe-parquet", "pyarrow-parquet")
        sides = [Side(reader, Job(str(path), table, batch), known["sums"]) for reader in readers]
        turns = race(bench, sides, cores()[-1:])
        add(bench, row, turns, *readers, [f"{table}, {group:,}, {batch:,}"])


def frame(bench: Bench) -> None:
    """Compares fastpipe's batches with one frame of polars."""
    columns = ("fastpipe, 1,000 rows/s|,.0f", "polars|,.0f", "times as fast|,.2f", "by CPU time|,.2f", "met")
    row = bench.table("table, rows of a row group", *columns, title="To one frame, beside polars")
    for table in bench.args.tables:
        path, known = parquet_files.write(table, ROWS[table] // (8 if bench.quick else 1), ROW_GROUPS[1])
        readers = ("fastpipe-parquet", "polars-parquet")
        sides = [Side(reader, Job(str(path), table, 8 * BATCH_SIZE), known["sums"]) for reader in readers]
        add(bench, row, race(bench, sides, cores()[-1:]), *readers, [f"{table}, {ROW_GROUPS[1]:,}"])


def shuffled(bench: Bench) -> None:
    """Compares fastpipe with datasets, Ray Data and pyarrow in shuffled order."""
    columns = ["fastpipe's order", "peer", "1,000 rows/s|,.0f", "the peer's|,.0f", "times as fast|,.2f"]
    columns += ["by CPU time|,.2f", "met"]
    row = bench.table("table, rows of a row group", *columns, title="Shuffled, batches of 1,024 rows")
    for peer, table, group in itertools.product(bench.args.peers, bench.args.tables, ROW_GROUPS[:2]):
        path, known = parquet_files.write(table, ROWS[table] // PARTS[peer] // (8 if bench.quick else 1), group)
        window, buffer = (Job(str(path), table, BATCH_SIZE, size) for size in (-1, SHUFFLE_BUFFER))
        ours = {f'"buffer" of {SHUFFLE_BUFFER:,}': buffer, "True": window}
        sides = [Side("fastpipe-parquet", job, known["plain"], order) for order, job in ours.items()]
        turns = race(bench, [*sides, Side(peer, buffer, known["plain"])], cores()[-1:], rounds=min(bench.rounds, 5))
        for order in ours:
            add(bench, row, turns, order, peer, [f"{table}, {group:,}", order, peer])


def fetches(bench: Bench) -> None:
    """Compares ten concurrent fetches with one fetch at a time, for 50 units."""
    import fastpipe

    def read(at_once: int) -> None:
        reader = fastpipe.read_units(Waiting(50, 1000, WAIT), batch_size=BATCH_SIZE, num_threads=1, num_fetches=at_once)
        assert sum(len(batch["x"]) for batch in reader) == 50_000

    turns = take_turns({"ten": lambda: read(10), "one": lambda: read(1)}, min(bench.rounds, 3), warm=0)
    ratio = turns.ratio("one", "ten")
    row = bench.table("times as fast as one fetch|,.1f", "rounds|", "wanted|g", "met", title="Ten fetches at once")
    met = bench.target("ten fetches at once", ratio.median, least=FETCHES)
    row(ratio.median, f"{ratio.low:.1f} to {ratio.high:.1f}", FETCHES, met)


if __name__ == "__main__":
    parts = {"sequence": in_sequence, "frame": frame, "shuffled": shuffled, "fetches": fetches}
    Bench("parquet", __doc__, parts=list(parts), tables=list(ROWS), peers=list(PARTS)).run(parts)
