"""From the forms of batches to statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.errors import UnsupportedError
from fastpipe.statistics._feature import FeatureStatistics, Kind

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["added"]

_KINDS: dict[str, Kind] = {"i": "integer", "u": "integer", "f": "real", "b": "bool", "M": "time", "m": "time"}


def added(
    found: FeatureStatistics | None,
    form: Any,
    *,
    exact_values: int,
    symbols: Sequence[str] | None = None,
    nan_is_null: bool = False,
) -> FeatureStatistics:
    """Adds the values of a form to statistics, which are made where there are none.

    Args:
        found: of the batches before.
        form: of this batch.
        exact_values: different values that are counted exactly.
        symbols: what codes stand for.
        nan_is_null: whether NaN stands for a null.

    Raises:
        UnsupportedError: if it holds what has no statistics.
    """
    lengths: np.ndarray | None = None
    nulls = 0
    while not isinstance(form, (np.ndarray, Strings)):
        if isinstance(form, Masked):
            form, missing = _valid(form)
            nulls += missing
        elif isinstance(form, Ragged):
            inner = np.asarray(form.lengths)
            lengths = inner if lengths is None else lengths
            form = _inner(form.values, int(form.offsets[0]), int(form.offsets[-1]))
        elif isinstance(form, SparseCSR):
            lengths = np.diff(form.offsets)
            form = _inner(form.values, int(form.offsets[0]), int(form.offsets[-1]))
        elif isinstance(form, Sparse):
            rows = np.asarray(form.indices)[:, 0]
            lengths = np.bincount(rows, minlength=len(form))
            form = form.values
        else:
            raise _without(type(form).__name__)
    if isinstance(form, Strings):
        if found is None:
            kind: Kind = "bytes" if form.binary else "text"
            found = FeatureStatistics(kind, "bytes" if form.binary else "string", exact_values)
        found.add_texts(_bytes(form))
    else:
        found = _numbers(found, form, exact_values, symbols, nan_is_null=nan_is_null)
    found.nulls += nulls
    if lengths is not None:
        if found.lengths is None:
            found.lengths = FeatureStatistics("integer", "int64", exact_values)
        found.lengths.add_numbers(lengths.astype(np.int64))
    return found


def _numbers(
    found: FeatureStatistics | None,
    array: np.ndarray,
    exact_values: int,
    symbols: Sequence[str] | None,
    *,
    nan_is_null: bool,
) -> FeatureStatistics:
    flat = array.reshape(-1)
    kind = _KINDS.get(flat.dtype.kind)
    if kind is None and flat.dtype.name == "bfloat16":
        flat, kind = flat.astype(np.float32), "real"
    if kind is None:
        raise _without(str(array.dtype))
    if found is None:
        found = FeatureStatistics(kind, str(array.dtype), exact_values, symbols)
    if kind == "time":
        missing = np.isnat(flat)
        found.nulls += int(missing.sum())
        flat = flat[~missing].view(np.int64)
    elif kind == "real" and nan_is_null:
        missing = np.isnan(flat)
        found.nulls += int(missing.sum())
        flat = flat[~missing]
    elif kind == "bool":
        flat = flat.view(np.uint8)
    found.add_numbers(flat)
    return found


def _without(what: str) -> UnsupportedError:
    reason = f"there are no statistics of {what}"
    return UnsupportedError(reason, reason=reason)


def _inner(form: Any, start: int, stop: int) -> Any:
    """The rows of a form that a list's offsets name."""
    return form if start == 0 and stop == len(form) else form[start:stop]


def _valid(form: Masked) -> tuple[Any, int]:
    """The values that aren't null, in a form whose rows they are, and how many are."""
    valid, values = np.asarray(form.valid), form.values
    if isinstance(values, Strings):
        inner = int(np.prod(values.shape[valid.ndim :], dtype=np.int64))
        flat = Strings(values.values, values.offsets, (len(values.offsets) - 1,), values.binary)
        keep = np.repeat(valid.reshape(-1), inner)
        return flat[np.flatnonzero(keep)], int(len(keep) - keep.sum())
    if isinstance(values, np.ndarray):
        inner = int(np.prod(values.shape[valid.ndim :], dtype=np.int64))
        return values[valid], int((~valid).sum()) * inner
    if valid.ndim > 1:
        raise _without(f"rows of {type(values).__name__} with nulls at several levels")
    return values[np.flatnonzero(valid)], int((~valid).sum())


def _bytes(form: Strings) -> pa.Array:
    """The texts as Arrow has bytes, in the same memory."""
    import pyarrow as pa

    offsets = np.ascontiguousarray(form.offsets, np.int64)
    values = np.ascontiguousarray(form.values, np.uint8)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)
