"""`fastpipe bench`: measures how fast files are read for several batch sizes, thread counts and orders.

Each combination is a cell of a grid. Each cell is measured for a short time in each of three rounds, and the results
are medians of the rounds. A round visits the cells in random order, so that a temporary slowdown of the machine affects
all cells alike.

Each visit creates a new reader with an endless pass, so small files are read repeatedly. The beginning of a visit is a
warm-up and isn't counted. A shuffled pass opens all blocks of a window at once and then yields its batches quickly.
Only whole windows are therefore counted, even if that takes longer.

The consumer only discards batches, so this is an upper limit for training.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from fastpipe._reader.ordering import Ordering
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.reader import Reader
from fastpipe._text import clean, plural, table
from fastpipe.avro import read_avro
from fastpipe.cli import _formats, _inspect
from fastpipe.csv import read_csv
from fastpipe.errors import LimitError, SchemaError
from fastpipe.tfrecord import read_tfrecord

_SHUFFLES = ("off", "window", "block", "buffer")
_BATCH_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ROUNDS = 3
_WARM_UP = 0.25  # The fraction of a visit that isn't counted.


@dataclass
class Cell:
    """One combination of arguments and its results. They stay unset if the memory limit is too low."""

    shuffle: str
    num_threads: int | str
    batch_size: int
    rounds: list[float] = field(default_factory=list)  # Rows per second.
    records_per_second: float | None = None
    spread: float | None = None  # Half the range of the rounds, as a fraction of the median.
    megabytes_per_second: float | None = None
    milliseconds_per_batch: float | None = None
    threads: int | None = None
    refused: str | None = None

    def visit(self, make: Callable[..., Reader], seconds: float) -> None:
        """Reads for `seconds` seconds and updates the results.

        Raises:
            LimitError: If the memory limit is too low for the arguments.
            FastpipeError: If the files can't be read.
        """
        with make(self.batch_size, self.num_threads, self.shuffle) as reader:
            batches = iter(reader)
            _draw(batches, seconds * _WARM_UP, 1)
            rows, elapsed = _draw(batches, seconds * (1 - _WARM_UP), self._period(reader))
            stats = reader.stats()
        self.rounds.append(rows / elapsed)
        rate = self.records_per_second = statistics.median(self.rounds)
        self.spread = (max(self.rounds) - min(self.rounds)) / 2 / rate
        self.megabytes_per_second = rate * stats["bytes_delivered"] / stats["rows"] / 1e6
        self.milliseconds_per_batch = 1e3 * self.batch_size / rate
        self.threads = stats["threads"]["chosen"]

    def _period(self, reader: Reader) -> int:
        """Returns the number of rows after which the work of a pass repeats."""
        buffer = min(reader.shuffle_buffer or 1, reader.num_rows)
        if self.shuffle in ("off", "window"):
            return buffer
        # A pool or buffer is filled once per epoch. After that, it takes in one row for each row that it yields.
        return reader.num_rows if buffer * 4 >= reader.num_rows else 1


def _draw(batches: Iterator[dict[str, Any]], seconds: float, period: int) -> tuple[int, float]:
    """Draws batches for `seconds`, and then to the end of a period. Returns the row count and the elapsed time."""
    start = time.perf_counter()
    rows = periods = 0
    while True:
        batch = next(batches)  # Like a `for` loop, keep a batch while waiting for the next one.
        rows += len(next(iter(batch.values())))
        ended, periods = rows // period > periods, rows // period
        elapsed = time.perf_counter() - start
        if elapsed >= seconds and ended:
            return rows, elapsed


def add_options(bench: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Adds the options of the command `bench`."""

    def threads(text: str) -> int | str:
        return text if text == "auto" else positive(text)

    def shuffle(text: str) -> str:
        if text not in _SHUFFLES:
            raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(_SHUFFLES)}")
        return text

    def add(name: str, item: Callable[[str], Any], metavar: str, text: str) -> None:
        def items(value: str) -> list[Any]:
            return list(dict.fromkeys(item(part.strip()) for part in value.split(",")))

        bench.add_argument(name, type=items, metavar=f"{metavar},{metavar}", help=text)

    add("--columns", str, "NAME", "columns to read, including nested fields (default: all)")
    add("--batch-size", positive, "N", "rows per batch (default: 64, 128, ... 8192)")
    add("--threads", threads, "N", "thread counts or auto (default: 1, 2, 4, ... all processors, auto)")
    add("--shuffle", shuffle, "KIND", f"{', '.join(_SHUFFLES)} (default: off,window)")
    bench.add_argument("--shuffle-buffer", type=positive, metavar="N", help="rows in a window, pool or buffer")
    bench.add_argument("--memory-limit", metavar="SIZE", help="such as 512MB or 1.5GiB (default: no limit)")
    bench.add_argument(
        "--seconds", type=float, default=1.0, metavar="S", help="seconds per line of the table (default: 1)"
    )
    bench.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, complain: Callable[[BaseException], None], width: int) -> int:
    """Measures, and prints a table or JSON.

    Args:
        arguments: Arguments of the command line.
        complain: Function that reports an error.
        width: Width of the terminal in columns.

    Returns:
        The exit code: 0, or 1 if the files have no rows, or 2 for wrong usage.

    Raises:
        FastpipeError: If a file can't be read, or the memory limit is too low for all cells.
    """
    shuffles = arguments.shuffle or ["off", "window"]
    try:
        _check(arguments, shuffles)
    except ValueError as error:
        complain(error)
        return 2
    format_, files = _formats.found(arguments.files)
    if arguments.columns is None:
        found = _inspect.infer_readable(files, format_)
        if not found.features:
            raise found.error or SchemaError("the schema has no fields to read")
        for name, reason in found.skipped.items():
            print(f"{clean(name)}: left out: {clean(reason)}", file=sys.stderr)
        what: dict[str, Any] = {"features": found.features}
    else:
        what = {"columns": arguments.columns}
    with tempfile.TemporaryDirectory(prefix="fastpipe-bench-") as cache:
        if format_.function in (read_avro, read_csv, read_tfrecord):
            what["index_cache"] = cache  # Without it, each reader would search for blocks or rows again.

        def make(size: int, threads: Any, shuffle: str, memory_limit: str | None = arguments.memory_limit) -> Reader:
            order = {} if shuffle == "off" else {"shuffle": shuffle, "shuffle_buffer": arguments.shuffle_buffer}
            options = {"batch_size": size, "num_threads": threads, "seed": 0, "epochs": None, **order, **what}
            return format_.read(files, memory_limit=memory_limit, **options)

        with make(64, "auto", "off", None) as reader:
            rows, names = reader.num_rows, list(reader.features)
            if not rows:
                complain(ValueError(f"the files have no {format_.rows}"))
                return 1
            next(iter(reader))
            processors = reader.stats()["threads"]["available"]
        # All batch sizes above the number of rows give the same result.
        sizes = arguments.batch_size or [size for size in _BATCH_SIZES if size <= rows] or _BATCH_SIZES[:1]
        powers = [1 << n for n in range(processors.bit_length()) if 1 << n < processors]
        counts = arguments.threads or [*powers, processors, "auto"]
        cells = [Cell(shuffle, count, size) for shuffle in shuffles for count in counts for size in sizes]
        if not arguments.json:
            rows_text = plural(rows, format_.rows.removesuffix("s"))
            print(
                f"{plural(len(files), 'file')}, {rows_text}, {plural(len(names), 'feature')}; "
                f"{plural(processors, 'processor')}; at least {len(cells) * arguments.seconds:,.0f} s",
                flush=True,
            )
        _measure(cells, make, arguments.seconds / _ROUNDS, limited=arguments.memory_limit is not None)
    if arguments.json:
        about = {"files": files, "rows": rows, "features": names, "processors": processors}
        print(json.dumps({**about, "cells": [asdict(cell) for cell in cells]}, indent=2))
    else:
        print(f"\n{_table(cells, width)}")
    return 0


def _check(arguments: argparse.Namespace, shuffles: list[str]) -> None:
    """Checks the options before any file is opened."""
    if arguments.shuffle_buffer is not None and shuffles == ["off"]:
        raise ValueError("--shuffle-buffer requires a --shuffle other than off")
    if not 0 < arguments.seconds < math.inf:
        raise ValueError(f"--seconds must be a positive number; got {arguments.seconds}")
    for size in arguments.batch_size or [1]:
        Ordering.checked(batch_size=size, shuffle=True, shuffle_buffer=arguments.shuffle_buffer, seed=0)
    count: Any
    for count in arguments.threads or ["auto"]:
        PassOptions.checked(num_threads=count, prefetch=None, memory_limit=arguments.memory_limit)


def _measure(cells: list[Cell], make: Callable[..., Reader], seconds: float, *, limited: bool) -> None:
    """Visits each cell in each round.

    Raises:
        LimitError: If the memory limit is too low for all cells.
        FastpipeError: If the files can't be read.
    """
    mixed = random.Random(0)
    for _, cell in ((i, cell) for i in range(_ROUNDS) for cell in mixed.sample(cells, len(cells))):
        if cell.refused is None:
            try:
                cell.visit(make, seconds)
            except LimitError as error:
                cell.refused = error.reason
                # Without a memory limit, the error is about a limit of the format, which applies to all cells.
                if not limited or all(other.refused is not None for other in cells):
                    raise


def _table(cells: list[Cell], width: int) -> str:
    fastest: dict[str, Cell] = {}
    for cell in cells:
        fastest[cell.shuffle] = max(fastest.get(cell.shuffle, cell), cell, key=lambda c: c.records_per_second or 0)
    lines = []
    for cell in cells:
        threads = f"auto ({cell.threads})" if cell.num_threads == "auto" and cell.threads else f"{cell.num_threads}"
        figures = ["-"] * 4
        if cell.refused is None:
            figures = [
                f"{cell.records_per_second:,.0f}",
                f"{cell.spread:.0%}",
                f"{cell.megabytes_per_second:,.1f}",
                f"{cell.milliseconds_per_batch:.3g}",
            ]
        mark = "fastest" if cell.refused is None and cell is fastest[cell.shuffle] else ""
        lines.append([cell.shuffle, threads, f"{cell.batch_size:,}", *figures, mark])
    header = ["shuffle", "threads", "batch_size", "records/s", "±", "MB/s", "ms/batch", ""]
    reasons = dict.fromkeys(f"-: {cell.refused}" for cell in cells if cell.refused is not None)
    return "\n".join([table(header, lines, width, right=range(2, 7)), *reasons])
