"""Describing a reader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, SupportsIndex

from fastpipe._arguments import flag, shown
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.ordering import Ordering, within
from fastpipe._reader.reader import Reader
from fastpipe._reader.reader_passes import ReaderPasses
from fastpipe._reader.sampling import in_file_order, sample
from fastpipe.statistics._description import Description
from fastpipe.statistics._feature import FeatureStatistics
from fastpipe.statistics._quantiles import require_datasketches
from fastpipe.statistics._walk import added

__all__ = ["describe"]

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
