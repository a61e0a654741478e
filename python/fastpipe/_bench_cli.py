"""`fastpipe bench`: finds the batch size and the threads that read files fastest."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastpipe import _bench_plot, _formats, infer_features
from fastpipe._bench import ROUNDS, Cell, Data, Measured, Threads, grid, measure
from fastpipe._formats import FileFormat
from fastpipe._progress import progress_bar
from fastpipe._running import memory_size
from fastpipe._terminal_text import clean, plural, size_text, table
from fastpipe.avro import _inspect
from fastpipe.avro._inspect import Readable
from fastpipe.errors import SchemaError

_SHUFFLES = ("off", "window", "block", "buffer")
_BATCH_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_PROBE = Cell(64, "auto", "off")


def add_options(bench: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Adds the options to the command `bench`."""
    bench.add_argument("--columns", type=_names, metavar="A,B", help="names to read, and what is nested in them (all)")
    bench.add_argument(
        "--batch-size", type=_list(positive, "1024 or 64,1024"), metavar="N,N", help="rows of a batch (64 to 8192)"
    )
    bench.add_argument(
        "--threads",
        type=_list(lambda item: item if item == "auto" else positive(item), "auto or 1,2,auto"),
        metavar="N,N",
        help="numbers of threads, and auto (1, 2, 4, ... as many as there are processors, auto)",
    )
    bench.add_argument(
        "--shuffle",
        type=_list(_shuffle, "window or off,window"),
        default=("off", "window"),
        metavar="KIND,KIND",
        help=f"{', '.join(_SHUFFLES)} (off,window)",
    )
    bench.add_argument("--shuffle-buffer", type=positive, metavar="N", help="rows of a window, pool or buffer")
    bench.add_argument("--memory-limit", type=_size, metavar="SIZE", help="such as 512MB or 1.5GiB (no limit)")
    bench.add_argument(
        "--seconds",
        type=_seconds,
        default=1.0,
        metavar="S",
        help=f"for each cell, in {ROUNDS} rounds; more for whole windows (1)",
    )
    bench.add_argument("--out", metavar="PNG", help="the picture (beside the first file)")
    bench.add_argument("--json", metavar="PATH", help="write all numbers there")


def _list(item: Callable[[str], Any], example: str) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(dict.fromkeys(item(part.strip()) for part in text.split(",")))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}; say {example}") from None

    return parse


def _shuffle(text: str) -> str:
    if text not in _SHUFFLES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_SHUFFLES)}")
    return text


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"there is an empty name in {text!r}")
    return names


def _size(text: str) -> int:
    try:
        return memory_size("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number of seconds above 0")
    return seconds


def run(arguments: argparse.Namespace, complain: Callable[[BaseException], None], width: int) -> int:
    """Measures, and prints a table, what limits the best cell, and code to paste.

    Args:
        arguments: of the command line.
        complain: is given what is wrong with them.
        width: columns of the terminal.

    Returns:
        The exit code: 0; 1 if a picture that was asked for can't be written; 2 for wrong usage.

    Raises:
        FastpipeError: if a file can't be read, or the memory limit is too low for all cells.
        ImportError: if a picture was asked for and matplotlib isn't installed.
        OSError: if the numbers can't be written.
    """
    if arguments.shuffle_buffer is not None and set(arguments.shuffle) == {"off"}:
        print("fastpipe bench: --shuffle-buffer goes with a --shuffle other than off", file=sys.stderr)
        return 2
    format_, files = _formats.found(arguments.files)
    # Known before minutes are spent on what can't be kept.
    for path in filter(None, (arguments.out, arguments.json)):
        _must_be_writable(path)
    if arguments.out is not None:
        _bench_plot.figure_class()
    found = _readable(files, arguments.columns, format_)
    with tempfile.TemporaryDirectory(prefix="fastpipe-bench-") as index_cache:
        data = Data(files, found.features, arguments.shuffle_buffer, arguments.memory_limit, index_cache, format_)
        try:
            for cell in grid(arguments.batch_size or _BATCH_SIZES, arguments.threads or ("auto",), arguments.shuffle):
                data.check(cell)
        except ValueError as error:
            complain(error)
            return 2
        bench = _Bench(arguments, data, found)
        if not bench.rows:
            complain(ValueError(f"there are no {format_.rows} to read"))
            return 1
        return bench.run(width)


def _must_be_writable(path: str) -> None:
    """Raises an OSError if a file can't be written; leaves it as it is if it can."""
    there = os.path.exists(path)
    with open(path, "ab"):
        pass
    if not there:
        os.unlink(path)


def _readable(files: Sequence[str], columns: Sequence[str] | None, format_: FileFormat) -> Readable:
    if columns is not None and format_ is _formats.AVRO:
        return Readable(infer_features(list(files), columns=columns))
    if columns is not None:
        with format_.read(list(files), columns=columns, batch_size=1) as reader:
            return Readable(reader.features)
    found = _inspect.infer_readable(files, format_)
    if not found.features:
        raise found.error or SchemaError("the schema has no fields to read")
    for name, reason in found.skipped.items():
        print(f"{clean(name)}: left out: {clean(reason)}", file=sys.stderr)
    return found


class _Bench:
    """A run of the command over files that can be read."""

    def __init__(self, arguments: argparse.Namespace, data: Data, found: Readable) -> None:
        self._arguments = arguments
        self._data = data
        self._found = found
        # The limit is for the cells; this is only a look at what there is.
        probe = Data(data.files, data.features, None, None, data.index_cache, data.format)
        with probe.reader(_PROBE) as reader:
            self.rows = reader.num_rows
            if self.rows:
                batches = iter(reader)
                next(batches)
                self._processors = reader.stats()["threads"]["available"]
                del batches
            else:
                self._processors = 1

    def run(self, width: int) -> int:
        cells = grid(self._batch_sizes(), self._threads(), self._arguments.shuffle)
        seconds: float = self._arguments.seconds
        print(
            f"{self._title()}; {plural(len(self._data.features), 'feature')}, "
            f"{plural(self._processors, 'processor')}; {plural(len(cells), 'cell')}, "
            f"at least {len(cells) * seconds:,.0f} s",
            flush=True,
        )
        measured = self._measured(cells, seconds)
        read = [m for m in measured if m.refused is None]
        best = max(read, key=lambda m: m.records_per_second)
        by_order = {shuffle: [m for m in read if m.cell.shuffle == shuffle] for shuffle in self._arguments.shuffle}
        bests = {s: max(ms, key=lambda m: m.records_per_second) for s, ms in by_order.items() if ms}
        _, reader = self._data.round(best.cell, seconds / ROUNDS)
        verdict = _clean_lines(reader.explain())
        codes = {shuffle: self._code(m.cell) for shuffle, m in bests.items()}
        print(f"\n{_table(measured, best, list(bests.values()), width)}")
        for reason in dict.fromkeys(m.refused for m in measured if m.refused is not None):
            print(f"-: {reason}")
        print(f"\nThe best: {_cell_text(best.cell)}. Of that, explain() says:")
        print("\n".join(f"  {line}" for line in verdict.splitlines()))
        for shuffle, code in codes.items():
            print(
                f"\n# fastest with {_order_text(shuffle)}: {bests[shuffle].records_per_second:,.0f} records/s\n{code}"
            )
        if self._arguments.json is not None:
            numbers = self._as_json(measured, best, verdict, codes)
            Path(self._arguments.json).write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
            print(f"\nNumbers: {clean(self._arguments.json)}")
        return self._picture(measured, best)

    def _title(self) -> str:
        files = self._data.files
        name = clean(os.path.basename(files[0])) if len(files) == 1 else plural(len(files), "file")
        return f"{name}: {plural(self.rows, self._data.format.rows.removesuffix('s'))}"

    def _batch_sizes(self) -> tuple[int, ...]:
        # Beyond the rows that there are, sizes are all the same.
        own = tuple(size for size in _BATCH_SIZES if size <= self.rows) or _BATCH_SIZES[:1]
        return self._arguments.batch_size or own

    def _threads(self) -> tuple[Threads, ...]:
        powers = [1 << n for n in range(self._processors.bit_length()) if 1 << n < self._processors]
        return self._arguments.threads or (*powers, self._processors, "auto")

    def _measured(self, cells: list[Cell], seconds: float) -> list[Measured]:
        try:  # A bar on a terminal alone; what is piped stays as it is.
            bar = progress_bar(len(cells) * ROUNDS, unit="round", disable=None, leave=False)
        except ImportError as error:
            if sys.stderr.isatty():
                print(error, file=sys.stderr)
            return measure(self._data, cells, seconds, lambda cell: None)
        with bar:
            return measure(self._data, cells, seconds, lambda cell: bar.update())

    def _code(self, cell: Cell) -> str:
        given: list[str] = self._arguments.files
        source = repr(given[0]) if len(given) == 1 else repr(given)
        options = {"batch_size": f"{cell.batch_size}", "num_threads": json.dumps(cell.num_threads)}
        if cell.shuffle != "off":
            options["shuffle"] = "True" if cell.shuffle == "window" else f'"{cell.shuffle}"'
            if self._data.shuffle_buffer is not None:
                options["shuffle_buffer"] = f"{self._data.shuffle_buffer:_}"
        if self._data.memory_limit is not None:
            options["memory_limit"] = f"{self._data.memory_limit:_}"
        if self._arguments.columns is not None:
            options["columns"] = repr(list(self._arguments.columns))
        elif self._found.skipped:
            options["columns"] = repr(list(self._data.features))
        options |= {name: repr(value) for name, value in self._data.format.options.items()}
        lines = [source, *(f"{name}={value}" for name, value in options.items())]
        return f"fastpipe.{self._data.format.function}(\n" + "".join(f"    {line},\n" for line in lines) + ")"

    def _as_json(self, measured: list[Measured], best: Measured, verdict: str, codes: dict[str, str]) -> dict[str, Any]:
        return {
            "files": list(self._data.files),
            "rows": self.rows,
            "features": list(self._data.features),
            "processors": self._processors,
            "seconds": self._arguments.seconds,
            "memory_limit": self._data.memory_limit,
            "shuffle_buffer": self._data.shuffle_buffer,
            "cells": [m.as_json() for m in measured],
            "best": measured.index(best),
            "explain": verdict,
            "code": codes,
        }

    def _picture(self, measured: list[Measured], best: Measured) -> int:
        first = Path(self._data.files[0])
        path = self._arguments.out or str(first.with_name(f"{first.stem}-bench.png"))
        try:
            _bench_plot.draw(measured, best, self._title(), path)
        except (ImportError, OSError, ValueError) as error:  # ValueError: an ending that matplotlib doesn't know.
            print(f"no picture: {clean(str(error))}", file=sys.stderr)
            return 0 if self._arguments.out is None else 1
        print(f"\nPicture: {clean(path)}")
        return 0


def _clean_lines(text: str) -> str:
    """Several lines with control characters escaped."""
    return "\n".join(map(clean, text.splitlines()))


def _order_text(shuffle: str) -> str:
    return {"off": "shuffle=False", "window": "shuffle=True"}.get(shuffle, f'shuffle="{shuffle}"')


def _cell_text(cell: Cell) -> str:
    threads = json.dumps(cell.num_threads)
    return f"{_order_text(cell.shuffle)}, num_threads={threads}, batch_size={cell.batch_size}"


def _table(measured: list[Measured], best: Measured, bests: list[Measured], width: int) -> str:
    header = ["shuffle", "threads", "batch", "records/s", "±", "MB/s", "ms/batch", "CPU s/M", "memory", ""]
    rows = []
    for m in measured:
        threads = f"{m.cell.num_threads}"
        if m.refused is not None:
            rows.append([m.cell.shuffle, threads, f"{m.cell.batch_size:,}", *["-"] * 6, ""])
            continue
        if m.cell.num_threads == "auto":
            threads = f"auto ({m.threads})"
        mark = "best" if m is best else f"best of {m.cell.shuffle}" if any(m is other for other in bests) else ""
        rate = f"{'' if m.whole else '> '}{m.records_per_second:,.0f}"
        memory = "-" if m.peak_memory is None else size_text(m.peak_memory)
        rows.append(
            [
                *(m.cell.shuffle, threads, f"{m.cell.batch_size:,}", rate),
                *(f"{m.spread:.0%}", f"{m.megabytes_per_second:,.1f}", f"{m.milliseconds_per_batch:.3g}"),
                *(f"{m.cpu_seconds_per_million:.3g}", memory, mark),
            ]
        )
    notes = (
        "MB/s: of the arrays yielded; CPU s/M: seconds of all threads for a million records; memory: growth of RssAnon"
    )
    return f"{table(header, rows, width, right=range(2, 9))}\n{notes}"
