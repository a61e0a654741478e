"""`fastpipe inspect --shuffle`: reports how well an order shuffles, and compares buffer sizes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from fastpipe._formats import AVRO, FileFormat
from fastpipe._reader.ordering import Ordering
from fastpipe._text import size_text, table
from fastpipe.avro import AvroFile
from fastpipe.cli._formats import found
from fastpipe.errors import FastpipeError
from fastpipe.statistics._shuffle_report import Measure, ShuffleReport, number, score, share, shuffle_report

_KINDS = ("window", "block", "buffer")
_BATCH_SIZE = 1024
_LARGEST_BUFFER = 2**31
_SAMPLED_FILES = 8
# Sampling a block searches a whole file for blocks. With this many blocks, that takes one or two seconds.
_FEW_BLOCKS = 1_000_000
_PATIENCE = 1.0


def add_options(inspect: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Adds the options of the command `inspect`."""
    options = inspect.add_argument_group("shuffle report (replaces the usual output)")
    options.add_argument(
        "--shuffle",
        nargs="?",
        const="window",
        choices=_KINDS,
        metavar="KIND",
        help=f"{', '.join(_KINDS)} (default: window)",
    )
    options.add_argument("--shuffle-buffer", type=positive, metavar="N", help="rows in a window, pool or buffer")
    options.add_argument("--batch-size", type=positive, metavar="B", help=f"rows per batch (default: {_BATCH_SIZE})")


def completed(arguments: Sequence[str]) -> list[str]:
    """Inserts the default kind after a bare `--shuffle`. Otherwise, argparse would take the next file for the kind."""
    done = list(arguments)
    if done[:1] == ["inspect"] and "--shuffle" in done and "--" not in done[: done.index("--shuffle")]:
        at = done.index("--shuffle")
        if done[at + 1 : at + 2] not in ([kind] for kind in _KINDS):
            done[at] = "--shuffle=window"
    return done


def given(arguments: argparse.Namespace) -> bool:
    """Returns whether the user passed an option that requires `--shuffle`."""
    return arguments.shuffle_buffer is not None or arguments.batch_size is not None


def run(arguments: argparse.Namespace, complain: Callable[[BaseException], None], width: int) -> int:
    """Prints the report, and a table that compares the buffer with a quarter of its size and four times its size.

    Args:
        arguments: Arguments of the command line.
        complain: Function that reports an error.
        width: Width of the terminal in columns.

    Returns:
        The exit code: 0, or 2 for wrong usage.

    Raises:
        FastpipeError: If a file cannot be read.
    """
    if arguments.shuffle is None:
        print("fastpipe inspect: --shuffle-buffer and --batch-size require --shuffle", file=sys.stderr)
        return 2
    size = arguments.batch_size or _BATCH_SIZE
    order: dict[str, Any] = {
        "batch_size": size,
        "shuffle": arguments.shuffle,
        "shuffle_buffer": arguments.shuffle_buffer,
        "seed": 0,
    }
    try:
        Ordering.checked(**order)
    except ValueError as error:
        complain(error)
        return 2
    format_, files = found(arguments.files)
    with format_.read(files, **order) as reader, _Progress() as progress:
        report = shuffle_report(reader, tick=progress.show)
        reports = {report.shuffle_buffer or 0: report}
        for buffer in _others(report):
            other = shuffle_report(reader, shuffle_buffer=buffer, tick=progress.show)
            reports.setdefault(other.shuffle_buffer or 0, other)
        ratio = _ratio(format_, files, report)
    compared = [reports[buffer] for buffer in sorted(reports)]
    if arguments.json:
        print(json.dumps([_as_json(r, ratio) for r in compared], indent=2))
        return 0
    print(report)
    if report.num_rows:
        print(f"\n{_comparison(compared, ratio, width)}")
    return 0


def _others(report: ShuffleReport) -> list[int]:
    """Returns sizes to compare with: a quarter and four times the buffer, or only smaller if it holds all rows."""
    own, rows = report.shuffle_buffer or 0, report.num_rows
    if own >= rows:
        return [rows // 16, rows // 4] if rows >= 16 else []
    return [max(own // 4, 1), min(own * 4, rows, _LARGEST_BUFFER)]


def _ratio(format_: FileFormat, files: list[str], report: ShuffleReport) -> float | None:
    """Returns uncompressed bytes per stored byte, from a sample of Avro blocks. None if that is slow or fails."""
    if format_ is not AVRO or not report.num_rows or report.num_units > _FEW_BLOCKS:
        return None
    step = -(-len(files) // _SAMPLED_FILES)
    try:
        samples = [AvroFile(path).sample_uncompressed(1) for path in files[::step]]
    except FastpipeError:  # The report doesn't depend on the data.
        return None
    stored = sum(sample[0] for sample in samples)
    return sum(sample[1] for sample in samples) / stored if stored else None


def _comparison(reports: list[ShuffleReport], ratio: float | None, width: int) -> str:
    header = ["shuffle_buffer", "memory", f"{reports[0].unit_name}s in a batch"]
    header += ["of perfect", "pairs: score", "moved: score"]
    rows = []
    for r in reports:
        cells = [number(r.units.found), share(r.units.found / r.units.perfect)]
        scores = [score(r.same_unit_pairs), score(r.displacement)]
        rows.append([f"{r.shuffle_buffer:_}", size_text(_memory(r, ratio)), *cells, *scores])
    what = "as stored, which may be compressed" if ratio is None else "uncompressed (sampled)"
    return f"{table(header, rows, width, right=range(6))}\nmemory: bytes of the rows in the buffer, {what}"


def _memory(r: ShuffleReport, ratio: float | None) -> float:
    rows = min(r.shuffle_buffer or 0, r.num_rows)
    return rows * r.bytes_per_row * (1.0 if ratio is None else ratio) if rows else 0.0


def _as_json(r: ShuffleReport, ratio: float | None) -> dict[str, Any]:
    fields = {field.name: getattr(r, field.name) for field in dataclasses.fields(r)}
    return {
        **{name: _plain(value) for name, value in fields.items()},
        "memory": _memory(r, ratio),
        "memory_is_uncompressed": ratio is not None,
    }


def _plain(value: Any) -> Any:
    """Converts a value for JSON. Measures include their scores, and NaN is null."""
    if isinstance(value, Measure):
        return {name: _plain(getattr(value, name)) for name in ("found", "perfect", "unshuffled", "score")}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


class _Progress:
    """Shows progress on one line of the terminal after a second. Prints nothing if standard error isn't a terminal."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._shown = False
        self._terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, done: int, total: int) -> None:
        """Prints how many batches have been examined."""
        if self._terminal and time.monotonic() - self._start > _PATIENCE:
            self._shown = True
            print(f"\rbatches examined: {done:,} of {total:,} ", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
