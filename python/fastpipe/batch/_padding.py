"""Rows of one length: padding and truncating ragged rows, and replacing nulls.

This module does no work per row, except for rows that the caller passes as lists. All results are copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown, within
from fastpipe.batch import Masked, Padded, Ragged, Strings
from fastpipe.batch._dense import allocatable
from fastpipe.batch._form import ranges, slice_rows, take_rows
from fastpipe.specs import _fit, _fit_time

_LARGEST = 2**63 - 1

# A length or a multiple: one number, or one for each ragged level.
_Sizes = int | Sequence[int | None] | None


class _Width(NamedTuple):
    """The width of a ragged level, as the caller passed it."""

    length: int | None
    multiple_of: int | None

    def of(self, longest: int) -> int:
        width = longest if self.length is None else self.length
        return width if self.multiple_of is None else -(-width // self.multiple_of) * self.multiple_of


class Padding(NamedTuple):
    """Arguments of `to_padded` that apply to all levels."""

    pad: Any
    side: str
    truncate: str | None


def to_padded(rows: Ragged, length: _Sizes, multiple_of: _Sizes, padding: Padding) -> Padded:
    """Returns the result of `Ragged.to_padded`."""
    _check_side("side", padding.side)
    if padding.truncate is not None:
        _check_side("truncate", padding.truncate)
    levels = _levels(rows)
    lengths = _per_level("length", length, 0, levels)
    multiples = _per_level("multiple_of", multiple_of, 1, levels)
    return _padded(rows, list(map(_Width, lengths, multiples)), padding)


def truncated(rows: Ragged, length: int, side: str) -> Ragged:
    """Returns the result of `Ragged.truncated`."""
    _check_side("side", side)
    length = within("length", length, 0, _LARGEST)
    lengths = rows.lengths
    kept = np.minimum(lengths, min(length, _longest(lengths)))
    starts = rows.offsets[:-1] if side == "right" else rows.offsets[1:] - kept
    items, offsets = ranges(starts, kept)
    return Ragged(take_rows(rows.values, items), offsets)


def filled(masked: Masked, value: Any) -> Any:
    """Returns the result of `Masked.fill`."""
    values = filled(masked.values, value) if isinstance(masked.values, Masked) else masked.values
    if not isinstance(values, (np.ndarray, Strings, Ragged)):
        kind = type(values).__name__
        raise TypeError(f"null rows of {kind} have no entries, so there is nothing to fill: use .values")
    null = ~_valid(masked)
    if isinstance(values, np.ndarray):
        found = values.copy()
        found[null] = fitting("value", value, values.dtype)
        return found
    if isinstance(values, Strings):
        # Each entry is a row, because a mask may mark single entries.
        null = np.broadcast_to(_extended(null, len(values.shape)), values.shape)
        entries = Strings(values.values, values.offsets, (math.prod(values.shape),), values.binary)
        return _of_shape(_replaced(entries, null.reshape(-1), value), values.shape)
    return _replaced(values, null, value)


def fitting(what: str, value: Any, dtype: np.dtype[Any]) -> Any:
    """Returns a value as a scalar of a dtype. An integer isn't rounded or wrapped around, and a float doesn't overflow.

    Raises:
        TypeError: If the value doesn't have the dtype's type.
        ValueError: If the value doesn't fit the dtype.
    """
    if np.ndim(value):
        raise TypeError(f"{what} must be a single value; got {shown(value)}")
    if dtype.kind in "biuf":
        return dtype.type(_fit(what, value, dtype.name))
    unfit = ValueError(f"{what}={shown(value)} doesn't fit dtype {dtype}")
    if dtype.kind in "mM":
        found = np.int64(_fit_time(what, value, str(dtype.newbyteorder("=")))).view(dtype.newbyteorder("="))
        if isinstance(value, (np.datetime64, np.timedelta64)) and not np.isnat(value) and found != value:
            raise unfit
        return found
    try:
        found = np.asarray(value).astype(dtype)[()]
    except (TypeError, ValueError, OverflowError):
        raise TypeError(str(unfit)) from None
    if dtype.kind in "SUT" and found != value:
        raise unfit
    return found


def _padded(rows: Ragged, widths: list[_Width], padding: Padding) -> Padded:
    width, *below = widths
    lengths = rows.lengths
    longest = _longest(lengths)
    if width.length is not None and longest > width.length:
        if padding.truncate is None:
            raise ValueError(
                f"row {int(lengths.argmax())} has {longest} items, and length is {width.length}: pass"
                ' truncate="right" to cut off the ends of long rows, or truncate="left" to cut off their beginnings'
            )
        rows = truncated(rows, width.length, padding.truncate)
        lengths = rows.lengths
    items = slice_rows(rows.values, int(rows.offsets[0]), int(rows.offsets[-1]))
    if len(items) != lengths.sum():
        # NumPy would repeat a single item.
        raise ValueError(f"the rows have {lengths.sum()} items by their offsets, but there are values of {len(items)}")
    present = _present(lengths, width.of(longest), padding.side)
    items, valid = _without_masks(items)
    if isinstance(items, Ragged):
        inner = _padded(items, below, padding)
        items, valid = inner.values, inner.mask
    if not isinstance(items, (np.ndarray, Strings)):
        raise TypeError(f"only numbers and text can be padded, and the items are {type(items).__name__}: use to_list()")
    mask = present
    if valid is not None:
        mask = np.zeros(allocatable((*present.shape, *valid.shape[1:])), np.bool_)
        mask[present] = valid
    if isinstance(items, Strings):
        return Padded(_padded_text(items, present, mask, padding.pad), mask, lengths.astype(np.int64))
    pad = fitting("pad", padding.pad, items.dtype)
    values = np.full(allocatable((*present.shape, *items.shape[1:]), items.itemsize), pad, items.dtype)
    values[present] = items
    if valid is not None:
        values[~mask] = pad
    return Padded(values, mask, lengths.astype(np.int64))


def _present(lengths: npt.NDArray[Any], width: int, side: str) -> npt.NDArray[np.bool_]:
    """Returns which of the places `[rows, width]` have an item. Their C order is the order of the items."""
    shape = allocatable((len(lengths), width))
    if not lengths.any():
        return np.zeros(shape, np.bool_)
    # Comparisons of narrow integers are several times faster.
    dtype = np.min_scalar_type(width)
    columns = np.arange(allocatable((width,), dtype.itemsize)[0], dtype=dtype)
    ends = lengths.astype(dtype)[:, np.newaxis]
    found: npt.NDArray[np.bool_] = columns >= width - ends if side == "left" else columns < ends
    return found


def _without_masks(items: Any) -> tuple[Any, npt.NDArray[np.bool_] | None]:
    """Returns items without their masks, and the combined mask. Null rows are empty."""
    if not isinstance(items, Masked):
        return items, None
    inner, below = _without_masks(items.values)
    valid = _valid(items)
    if isinstance(inner, Ragged):
        empty = not inner.lengths[~valid].any()
        return (inner if empty else _replaced(inner, ~valid, [])), None
    if below is None:
        return inner, valid
    most = max(valid.ndim, below.ndim)
    return inner, _extended(valid, most) & _extended(below, most)


def _valid(masked: Masked) -> npt.NDArray[np.bool_]:
    """Returns the mask as bools. Its shape is a prefix of the shape of the values."""
    values: Any = masked.values
    while isinstance(values, Masked):
        values = values.values
    valid = np.asarray(masked.valid, np.bool_)
    shape = values.shape if isinstance(values, (np.ndarray, Strings)) else (len(values),)
    if valid.shape != shape[: valid.ndim]:
        raise ValueError(f"valid has the shape {valid.shape}, and its values have the shape {shape}")
    return valid


def _extended(valid: npt.NDArray[np.bool_], ndim: int) -> npt.NDArray[np.bool_]:
    return valid.reshape(valid.shape + (1,) * (ndim - valid.ndim))


def _padded_text(items: Strings, present: npt.NDArray[np.bool_], mask: npt.NDArray[np.bool_], pad: Any) -> Strings:
    """Returns text as `Strings` `[rows, width, ...]`, with `pad` where the mask is False."""
    if not isinstance(pad, (str, bytes, bytearray)):
        raise TypeError(f'the items are {"bytes" if items.binary else "text"}: pass pad={"b" * items.binary}""')
    inner = items.shape[1:]
    each = math.prod(inner)
    shape = (*present.shape, *inner)
    places = np.full(allocatable((present.size, each), 8), math.prod(items.shape))
    places[present.reshape(-1)] = np.arange(math.prod(items.shape)).reshape(-1, each)
    places[~np.broadcast_to(_extended(mask, len(shape)), shape).reshape(places.shape)] = math.prod(items.shape)
    entries = Strings(items.values, items.offsets, (math.prod(items.shape),), items.binary)
    return _of_shape(take_rows(_joined(entries, _made("pad", entries, [pad])), places.reshape(-1)), shape)


def _of_shape(entries: Strings, shape: tuple[int, ...]) -> Strings:
    return Strings(entries.values, entries.offsets, shape, entries.binary)


def _replaced(rows: Any, null: npt.NDArray[np.bool_], value: Any) -> Any:
    """Returns rows, with a row of Python values in place of nulls."""
    places = np.where(null, len(rows), np.arange(len(rows)))
    return take_rows(_joined(rows, _made("value", rows, [value])), places)


def _joined(form: Any, other: Any) -> Any:
    """Returns the rows of two forms of the same structure."""
    if isinstance(form, np.ndarray):
        return np.concatenate([form, other], dtype=form.dtype, casting="unsafe")
    if isinstance(form, Masked):
        return Masked(_joined(form.values, other.values), np.concatenate([form.valid, other.valid]))
    first, last = int(form.offsets[0]), int(form.offsets[-1])
    values = _joined(slice_rows(form.values, first, last), other.values)
    offsets = np.concatenate([form.offsets - first, other.offsets[1:] + (last - first)], dtype=np.int64)
    if isinstance(form, Strings):
        return Strings(values, offsets, (len(form) + len(other), *form.shape[1:]), form.binary)
    return Ragged(values, offsets)


def _made(what: str, form: Any, rows: list[Any]) -> Any:
    """Returns Python values in the form of other rows."""
    if isinstance(form, Masked):
        return Masked(_made(what, form.values, rows), np.ones((len(rows), *form.valid.shape[1:]), np.bool_))
    if isinstance(form, Ragged):
        offsets = np.cumsum([0, *(len(_sequence(what, row)) for row in rows)], dtype=np.int64)
        return Ragged(_made(what, form.values, [item for row in rows for item in row]), offsets)
    if not isinstance(form, (np.ndarray, Strings)):
        raise TypeError(f"rows of {type(form).__name__} can't be made of {shown(rows)}")
    shape = (len(rows), *form.shape[1:])
    for size in form.shape[1:]:
        rows = [item for row in rows for item in _sequence(what, row, size)]
    if isinstance(form, np.ndarray):
        return np.array([fitting(what, item, form.dtype) for item in rows], form.dtype).reshape(shape)
    kind = "bytes" if form.binary else "string"
    texts: list[Any] = [_fit(what, item, kind) for item in rows]
    encoded = texts if form.binary else [text.encode() for text in texts]
    values = np.frombuffer(b"".join(encoded), np.uint8)
    return Strings(values, np.cumsum([0, *map(len, encoded)], dtype=np.int64), shape, form.binary)


def _sequence(what: str, row: Any, size: int | None = None) -> Any:
    if not (isinstance(row, (list, tuple)) or (isinstance(row, np.ndarray) and row.ndim)):
        raise TypeError(f"{what} must be a list of the items of a row; got {shown(row)}")
    if size is not None and len(row) != size:
        raise ValueError(f"{what} must have items of length {size}; got length {len(row)}")
    return row


def _levels(form: Any) -> int:
    """Returns the number of ragged levels."""
    levels = 0
    while isinstance(form, (Ragged, Masked)):
        levels += isinstance(form, Ragged)
        form = form.values
    return levels


def _per_level(name: str, sizes: Any, least: int, levels: int) -> list[int | None]:
    """Returns a size for each level.

    Raises:
        TypeError: If a size isn't an integer.
        ValueError: If a size is out of range, or if their number isn't the number of levels.
    """
    if sizes is None:
        return [None] * levels
    several = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    found = [None if size is None else within(name, size, least, _LARGEST) for size in several]
    if len(found) != levels:
        ragged = "one ragged level" if levels == 1 else f"{levels} ragged levels"
        example = shown((*[None] * (levels - 1), 8)) if levels > 1 else "8"
        raise ValueError(f"the rows have {ragged}, so {name} must be None or like {example}; got {shown(sizes)}")
    return found


def _longest(lengths: npt.NDArray[Any]) -> int:
    return int(lengths.max(initial=0))


def _check_side(name: str, side: Any) -> None:
    if not isinstance(side, str) or side not in ("left", "right"):
        choices = '"left", "right" or None' if name == "truncate" else '"left" or "right"'
        raise ValueError(f"{name} must be {choices}; got {shown(side)}")
