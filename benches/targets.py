"""Prints the speed of fastpipe beside its fastest peers, and the target of each kind of work.

    python benches/targets.py [--recent]

Reads the figures that other benches saved with `--keep`, or with `--recent` the last ones that they saved without it.
A ratio is the peer's time divided by fastpipe's, so fastpipe is faster above 1. Without a figure, the row shows the
command that measures it.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from harness import RESULTS, Table
from harness.bench import CACHE

TEXTS = "words, 100,000, 8,192"
SEQUENCE = "In the order of the file, beside pyarrow's iter_batches"


class Target(NamedTuple):
    """A kind of work, and where its figure is saved.

    Attributes:
        work: The dataset and the order of its rows.
        beside: The peer.
        wanted: The target of the ratio.
        command: The bench and the options that measure the work.
        table: Title of the saved table.
        row: The first cells of the row.
        column: The column of the ratio. A pair divides the first column by the second; an empty name is 1.
    """

    work: str
    beside: str
    wanted: float
    command: str
    table: str
    row: tuple[str, ...]
    column: str | tuple[str, str]


def avro(dataset: str, codec: str, wanted: float) -> Target:
    """Returns the target of an Avro dataset beside arrow-avro."""
    cell = dataset if codec == "null" else f"{dataset}/{codec}"
    command = f"frames.py --cells {cell}"
    return Target(f"Avro ({cell})", "arrow-avro", wanted, command, "Batch by batch", (cell,), "times as fast")


TARGETS = [
    *(avro(dataset, "null", wanted) for dataset, wanted in (("d", 2.0), ("f", 2.0), ("c", 4.0))),
    *(avro(dataset, "deflate", 2.5) for dataset in "abcdef"),
    Target("Avro: small files", "tensorflow-io", 0.67, "atds_small.py", "Summary", ("time",), ("", "largest")),
    *(
        Target(f"Avro: {rows}", peer, 0.67, "starts.py", "The first batch", (rows,), (peer, "fastpipe, ms"))
        for rows in ("1 record", "1,024 records", "blocks of 16K")
        for peer in ("tensorflow-io", "polars")
    ),
    *(
        Target(
            f"two threads over one ({dataset})", "itself", 1.9, "threads.py", "", (f"{dataset}/null",), "threads / one"
        )
        for dataset in "bc"
    ),
    *(
        Target(
            f"shuffled over sequential ({dataset})",
            "itself",
            0.9,
            f"sweep.py --datasets {dataset}",
            "One setting changed from the usual ones",
            (f"({dataset})",),
            ("shuffled", "batches of 1,024"),
        )
        for dataset in "abcd"
    ),
    *(
        Target(
            f"CSV: {work}", peer, wanted, f"csv_files.py --parts {part}", title, (peer,), "fastpipe is times as fast"
        )
        for work, peer, wanted, part, title in (
            ("20 floats", "polars", 1.6, "floats", "Parsing all, the scan for rows included"),
            ("integer, text, timestamp, float", "pyarrow", 1.4, "mixed", "An integer, a text, a time and a float"),
            ("50,000 columns", "polars", 1.0, "wide", "50,000 columns"),
        )
    ),
    *(
        Target(
            f"Parquet in order: {work}",
            "pyarrow",
            wanted,
            f"parquet.py --parts sequence --tables {table}",
            SEQUENCE,
            (row,),
            "times as fast",
        )
        for work, wanted, table, row in (
            ("strings that repeat", 1.2, "words", TEXTS),
            ("20 scalars", 1.2, "scalars", "scalars, 100,000, 8,192"),
            ("float32[128]", 1.1, "vectors", "vectors, 100,000, 8,192"),
        )
    ),
    Target(
        "Parquet in order: strings that repeat",
        "polars",
        0.5,
        "parquet.py --parts frame --tables words",
        "To one frame, beside polars",
        ("words, 100,000",),
        "times as fast",
    ),
    *(
        Target(
            f"Parquet shuffled: {table}",
            "pyarrow's take",
            1.1,
            f"parquet.py --parts shuffled --peers pyarrow-take --tables {table}",
            "Shuffled, batches of 1,024 rows",
            (f"{table}, 100,000", "True", "pyarrow-take"),
            "times as fast",
        )
        for table in ("scalars", "words")
    ),
    Target(
        "DataLoader: a custom collate_fn, tensors of 4 KB",
        "torch",
        2.5,
        "dataloader.py --parts grid",
        "Times as fast, by the number of forked workers",
        ("stack, tensor, 4 KB",),
        "2",
    ),
    Target(
        "DataLoader: the first batch with a custom collate_fn",
        "torch",
        1.5,
        "dataloader.py --parts first",
        "The first batch",
        ("new, fork, stack",),
        "times as soon",
    ),
    Target("describe of text", "Arrow", 0.8, "describe.py", "", ("text, 1,000 different",), ("Arrow", "fastpipe, ms")),
]


def number(cell: str) -> float:
    """Returns the number at the start of a cell, such as 1,234 or 1.64x (1.60 to 1.70), or NaN."""
    found = re.match(r"[\d,]*\.?\d+", cell)
    return float(found[0].replace(",", "")) if found else float("nan")


def find(target: Target, folder: Path) -> tuple[float, str] | None:
    """Returns the saved ratio of a target and when it was measured, or None."""
    path = folder / f"{target.command.partition('.py')[0]}.json"
    if not path.exists():
        return None
    for table in json.loads(path.read_text("utf-8"))["tables"]:
        if table["title"] != target.table:
            continue
        for row in table["rows"]:
            cells: dict[str, Any] = dict(zip(table["columns"], row, strict=False)) | {"": "1"}
            names = target.column if isinstance(target.column, tuple) else (target.column, "")
            if tuple(row[: len(target.row)]) == target.row and set(names) <= set(cells):
                above, below = (number(cells[name]) for name in names)
                return above / below, table["measured"][-1].partition(", ")[0]
    return None


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recent", action="store_true", help="read the figures of runs without --keep")
    recent = parser.parse_args().recent
    folder, keep = (CACHE / "results", "") if recent else (RESULTS, " --keep")
    row = Table("", ("work", "beside", "ratio|,.2f", "wanted|,.2f", "met", "measured"))
    for target in TARGETS:
        found = find(target, folder)
        if found is None:
            row(target.work, target.beside, None, target.wanted, "", f"`python benches/{target.command}{keep}`")
        else:
            row(
                target.work,
                target.beside,
                found[0],
                target.wanted,
                "yes" if found[0] >= target.wanted else "no",
                found[1],
            )


if __name__ == "__main__":
    main()
