"""Describing a reader: from its batches to statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from fastpipe._arguments import flag, shown
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.ordering import Ordering, within
from fastpipe._reader.reader import Reader
from fastpipe._reader.reader_passes import ReaderPasses
from fastpipe._reader.sampling import in_file_order, sample
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.errors import UnsupportedError
from fastpipe.statistics._counts import require_datasketches
from fastpipe.statistics._description import Description
from fastpipe.statistics._feature import FeatureStatistics, Kind

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["describe"]

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


_LEAST_BATCH = 4096


def describe(
    reader: Reader,
    *,
    rows: SupportsIndex | None = None,
    seed: SupportsIndex = 0,
    exact_values: SupportsIndex = 100_000,
    progress: bool = False,
) -> Description:
    """Reads a reader's rows once, and returns statistics of each feature (extra `describe`).

    Counts of text, integers and bools are exact while there are up to `exact_values` different values, and so are
    quantiles of integers. Beyond that, and for quantiles of floats, sketches of Apache DataSketches take over, of
    bounded size: `counts_error` and `quantile_error` say how far off they may be. Moments are always exact, to the last
    bits of float64.

    Where a spec fills nulls with NaN, as those of the floats of CSV files do, NaN counts as null. Elsewhere it is a
    value, which `nans` counts.

    Args:
        reader: whatever its source. Of one of several ranks its rows are described. Its pass and its epoch stay as they
            are.
        rows: describes a uniform sample of so many rows; None for all.
        seed: of the sample.
        exact_values: different values of a feature that are counted exactly, at least 1.
        progress: whether to show a progress bar (extra `progress`).

    Returns:
        The statistics, by name. Those of ranks or partitions can be merged.

    Raises:
        ImportError: if datasketches or pyarrow isn't installed; it says what to install.
        TypeError: if an argument is of the wrong type.
        UnsupportedError: if a feature has values without statistics.
        ValueError: if a number is out of range.

        And what reading raises.

    Example:
        >>> import fastpipe
        >>> found = fastpipe.describe(fastpipe.read_csv("rides.csv", batch_size=256))
        >>> found.rows, found["distance"].null_share
        (2000, 0.0)
    """
    if not isinstance(reader, Reader):
        raise TypeError(f"reader is a Reader, as fastpipe.read_avro makes one, not {shown(reader)}")
    require_datasketches()
    require_pyarrow()
    limit = within("exact_values", exact_values, 1, 2**31)
    chosen = reader if rows is None else sample(in_file_order(reader), rows, seed=seed)
    features: dict[str, FeatureStatistics | None] = dict.fromkeys(reader.features)
    symbols, seen = reader.symbols, 0
    for batch in _rows_once(chosen, progress=flag("progress", progress)):
        seen += _rows(batch)
        for name, form in batch.items():
            if name in features:
                features[name] = added(
                    features[name],
                    form,
                    exact_values=limit,
                    symbols=symbols.get(name),
                    nan_is_null=reader.features[name]._nan_is_null,
                )
    return Description({name: found for name, found in features.items() if found is not None}, seen)


def _rows_once(reader: Reader, *, progress: bool) -> Iterator[dict[str, Any]]:
    """Yields a reader's rows of an epoch, of its rank if it is one of several, without rows that fill batches up.

    Batches have at least 4,096 rows. The reader's own pass and epoch aren't touched.
    """
    data, ordering, _, running, _ = ReaderPasses(reader).parts
    rows = max(ordering.batch_size, _LEAST_BATCH)
    if ordering.world_size == 1 and not ordering.is_sample:
        chosen = Ordering.checked(batch_size=rows)
    else:
        chosen = replace(ordering, drop_last=False, uneven="allow")
    once = Reader(data, ordering=chosen, running=running, progress=progress, epochs=1)
    once.set_epoch(reader.epoch)
    with once:
        yield from once


def _rows(batch: dict[str, Any]) -> int:
    return len(next(iter(batch.values())))
