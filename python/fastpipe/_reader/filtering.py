"""Expressions over all rows of a reader, and filters: the rows that pass a condition, as a selection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe import _omissions
from fastpipe._arguments import shown
from fastpipe._expressions import Expr, abridged, most_values
from fastpipe._reader.condition_bounds import may_pass
from fastpipe._reader.conditions import Condition, Evaluated
from fastpipe._reader.indexed_rows import indexed
from fastpipe._reader.selection import Selected, check, select
from fastpipe._reader.sequential_reads import columns_of
from fastpipe.errors import RowsLeftOutWarning, memory_errors

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader

_Mask: TypeAlias = npt.NDArray[np.bool_]


def filter_rows(reader: Reader, condition: Expr) -> Reader:
    """Returns a reader of the rows that pass a condition. See `Reader.filter`."""
    if not isinstance(condition, Expr):
        raise TypeError(f'filter() takes a condition, such as fastpipe.col("age") >= 18; got {shown(condition)}')
    check(reader, "filter")
    checked = Condition(condition, reader.features)
    rows = reader._data.handle.num_rows
    bits, skipped = _passing(reader, checked, most_values(condition))
    if rows and not bits.any():
        _report_no_row(rows, condition)
    method = "filter", f"{abridged(condition)}{skipped}"
    data = reader._data
    if isinstance(data, Selected) or data.handle.rows_in_sequence is not None:
        mask = np.unpackbits(bits, count=rows, bitorder="little").view(np.bool_)
        return select(reader, mask, condition, method)
    # A bool per row would take eight times the memory.
    return reader._like(Selected(data, bits, condition, method=method))


def _passing(reader: Reader, condition: Condition, most: int) -> tuple[npt.NDArray[np.uint8], str]:
    """Returns a bit for each row that passes a condition, and a phrase about what wasn't read to find them."""
    skipped = ""

    def read() -> npt.NDArray[np.uint8]:
        nonlocal skipped
        bits, skipped = _read(reader, condition, most)
        return bits

    what = "filter", repr(condition.expression)
    size = -(-reader._data.handle.num_rows // 8)
    bits, known = indexed(reader, condition.names, what, (size, np.uint8), read)
    return bits, known or skipped


def _read(reader: Reader, condition: Condition, most: int) -> tuple[npt.NDArray[np.uint8], str]:
    """Reads the rows, and returns a bit for each row that passes and a phrase about the units that weren't read."""
    data, skipped, rows = reader._data, "", reader._data.handle.num_rows
    spread: Callable[[Iterable[_Mask]], Iterable[_Mask]] = iter
    if (known := data.bounds(condition.names)) is not None:
        units = [number for number in known[0] if number > 0]
        kept = may_pass(condition, known[1], len(known[0]))[np.asarray(known[0]) > 0]
        if not kept.all():
            skipped = f" ({len(kept) - np.count_nonzero(kept):,} of {len(kept):,} units weren't read)"
            if not kept.any():
                return np.zeros(-(-rows // 8), np.uint8), skipped
            bits = packed((np.full(number, each) for number, each in zip(units, kept, strict=True)), rows)
            data, spread = Selected(data, bits), functools.partial(_spread, units=units, kept=kept)
    # The hash table of a long list of values is built once per batch.
    with columns_of(reader, condition.names, most, data) as columns, memory_errors("filter rows"):
        return packed(spread(map(condition.passes, columns.to_arrow_reader())), rows), skipped


def _spread(masks: Iterable[_Mask], units: Sequence[int], kept: _Mask) -> Iterator[_Mask]:
    """Yields masks of the rows of all units, given masks of the rows of the units that are kept."""
    masks, mask = iter(masks), np.empty(0, np.bool_)
    for number, each in zip(units, kept, strict=True):
        if not each:
            yield np.zeros(number, np.bool_)
            continue
        while number > 0:
            if not len(mask):
                mask = next(masks, mask)
                _check(len(mask) > 0)
            yield mask[:number]
            number, mask = number - len(mask[:number]), mask[number:]
    _check(len(mask) == 0 and next(masks, None) is None)


def evaluated(reader: Reader, what: str, checked: Evaluated) -> npt.NDArray[Any]:
    """Returns the value of an expression in each row of a reader without ranks, `[rows]`.

    Args:
        reader: The reader.
        what: Name of the argument, for errors.
        checked: The expression.

    Raises:
        ValueError: If the value is null in some row.
    """
    expression, found, rows = checked.expression, [np.empty(0)], 0
    with columns_of(reader, checked.names, most_values(expression)) as columns, memory_errors(f"evaluate {what}"):
        for values in map(checked.values, columns.to_arrow_reader()):
            if values.null_count:
                row = rows + int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
                raise ValueError(
                    f"{what}: {abridged(expression)} is null in row {row}: use a fill value when reading it"
                )
            # Keeping an array over the memory of a batch would keep all columns.
            found.append(np.array(values.to_numpy(zero_copy_only=False)))
            rows += len(values)
    return np.concatenate(found[1:] or found)


def _report_no_row(rows: int, condition: Expr) -> None:
    """Reports that no row passes, which is rarely intended."""
    text = f"{_omissions.share(rows, rows, 'rows')} are left out by filter(): none of them passes {abridged(condition)}"
    advice = "Null is not true: add | x.is_null() to keep nulls. head() shows some of the reader's values"
    _omissions.report(f"{text}. {advice}", RowsLeftOutWarning)


def packed(masks: Iterable[npt.NDArray[np.bool_]], rows: int) -> npt.NDArray[np.uint8]:
    """Packs masks into bits, the first one in the lowest bit of the first byte.

    Args:
        masks: Consecutive parts of a mask, each bool `[n]`.
        rows: Number of rows in all of them.

    Returns:
        The bits, uint8 `[ceil(rows / 8)]`. Bits after the last row are 0.

    Raises:
        RuntimeError: If the masks have another number of rows.
    """
    bits: npt.NDArray[np.uint8] = np.zeros(-(-rows // 8), np.uint8)
    at, rest = 0, np.empty(0, np.bool_)
    for mask in masks:
        # Only whole bytes are stored, because the number of rows of a part need not be a multiple of 8.
        joined: npt.NDArray[Any] = np.concatenate([rest, mask]) if len(rest) else mask
        whole = len(joined) // 8
        rest = joined[8 * whole :]
        _check(at + whole <= len(bits))
        bits[at : at + whole] = np.packbits(joined[: 8 * whole], bitorder="little")
        at += whole
    _check(8 * at + len(rest) == rows)
    bits[at:] = np.packbits(rest, bitorder="little")
    return bits


def _check(fits: bool) -> None:
    if not fits:
        raise RuntimeError("internal error: a pass has another number of rows than its dataset; please report this")
