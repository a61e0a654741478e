"""A `ShuffleReport` as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastpipe._text import plural, table

if TYPE_CHECKING:
    from fastpipe.statistics._shuffle_report import Measure, ShuffleReport

_WIDTH = 100
# A perfect permutation has the density 1.
_SHADES = ((0.05, " "), (0.5, "░"), (1.5, "▒"), (4.0, "▓"), (math.inf, "█"))
LEGEND = "▒ about as many rows as in a perfect permutation, ░ less than half, ▓ and █ over 1.5 and 4 times as many"
_NAMES = {"window": "True", "sequential": "False"}


def shaded(density: Sequence[Sequence[float]]) -> str:
    """A density map: a character per cell, a line per range of the epoch."""

    def shade(value: float) -> str:
        return " " if math.isnan(value) else next(char for above, char in _SHADES if value < above)

    return "\n".join("".join(map(shade, line)) for line in density)


def report(r: ShuffleReport) -> str:
    """The whole report."""
    buffer = "" if r.shuffle_buffer is None else f", shuffle_buffer={r.shuffle_buffer:_}"
    order = f"shuffle={name(r.shuffle)}{buffer}, batch_size={r.batch_size:_}, seed={r.seed}, epoch {r.epoch}"
    data = ", ".join([plural(r.num_rows, "row"), plural(r.num_blocks, "block"), plural(r.num_files, "file")])
    seen = f"looked at {r.batches_seen:,} of {r.num_batches:,} batch{'' if r.num_batches == 1 else 'es'}"
    shown = [_measures(r), "", *_map(r), ""] if r.num_rows else []
    wrapped = (textwrap.fill(line, _WIDTH, break_long_words=False) for line in r.advice.splitlines())
    return "\n".join([order, f"{data}; {seen}", "", *shown, *wrapped])


def name(shuffle: str) -> str:
    """The value of the argument `shuffle` for an order."""
    return _NAMES.get(shuffle, f'"{shuffle}"')


def _measures(r: ShuffleReport) -> str:
    low, median, high = r.displacement_quantiles
    rows = [
        _row("places that a row moves: mean", r.displacement),
        _row("  5 % quantile", low),
        _row("  median", median),
        _row("  95 % quantile", high),
        _row("blocks in a batch", r.blocks),
        _row("files in a batch", r.files),
        _row("pairs in a batch from one block", r.same_block_pairs, percent=True),
    ]
    return table(["", "this order", "perfect", "unshuffled", "score"], rows, _WIDTH, right=(1, 2, 3, 4))


def _row(title: str, measure: Measure, *, percent: bool = False) -> list[str]:
    values = (measure.found, measure.perfect, measure.unshuffled)
    return [title, *(share(v) if percent else number(v) for v in values), score(measure)]


def number(value: float) -> str:
    """A count that may be a mean."""
    return "-" if math.isnan(value) else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def share(value: float) -> str:
    """A share in per cent."""
    return "-" if math.isnan(value) else f"{100 * value:.3g} %"


def score(measure: Measure) -> str:
    """A score; a dash for nan."""
    return "-" if math.isnan(measure.score) else f"{measure.score:.2f}"


def _map(r: ShuffleReport) -> list[str]:
    width = len(r.density[0])
    edge = "─" * width
    lines = [f"epoch │{line}│" for line in r.map.splitlines()]
    lines[1:] = [f"      {line[6:]}" for line in lines[1:]]
    return [f"       {'dataset':<{width}}".rstrip(), f"      ┌{edge}┐", *lines, f"      └{edge}┘", LEGEND]


def advice(r: ShuffleReport) -> str:
    """Advice that follows from the numbers, a line per sentence."""
    if not r.num_rows:
        return "There are no rows to shuffle."
    lines = [_mixing(r)]
    if not math.isnan(r.same_block_pairs.score) and r.shuffle != "sequential":
        taken = share(r.same_block_pairs.score)
        lines.append(f"It removes {taken} of the noise that similar rows of a block add to a batch's mean.")
    if r.shuffle in ("block", "buffer") and r.displacement.score < 0.5:
        lines.append(
            f"Rows move {share(r.displacement.found / r.displacement.perfect)} as far as in a perfect permutation: "
            "if the files are sorted, use shuffle=True, which mixes rows of all files."
        )
    return "\n".join(lines)


def _mixing(r: ShuffleReport) -> str:
    now, without = r.blocks.found / r.blocks.perfect, r.blocks.unshuffled / r.blocks.perfect
    if without >= 0.9:
        return (
            f"Even without shuffling a batch has rows of {share(without)} of the blocks that a perfect permutation "
            "gives it, so blocks matter little here."
        )
    having = f"A batch has rows of {share(now)} of the blocks that a perfect permutation gives it"
    if now >= 0.9:
        return f"{having}."
    return f"{having}: {'shuffle=True' if r.shuffle == 'sequential' else 'a larger shuffle_buffer'} mixes more of them."
