"""The statistics of Parquet's column chunks as bounds of features.

A type is used only if its values are known to be the feature's values. Bounds of long text may be shorter text, but
are bounds nonetheless. Statistics of floats ignore NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastpipe._arrow.schema import schema_of
from fastpipe._reader.condition_bounds import Bounds
from fastpipe.specs import DenseSpec, Spec

if TYPE_CHECKING:
    import pyarrow as pa

_UNITS = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}


class Statistics(NamedTuple):
    """What a file says about a column in a row group.

    Attributes:
        kind: The type of its values.
        low: The lower bound, as a number or bytes. None if unknown.
        high: The upper bound, as a number or bytes. None if unknown.
        nulls: Whether there may be nulls.
        values: Whether there may be other values.
    """

    kind: pa.DataType
    low: Any
    high: Any
    nulls: bool
    values: bool


def folder_statistics(kind: pa.DataType, text: str | None) -> Statistics:
    """Returns the statistics of a partition column, from its value as text."""
    import pyarrow as pa

    value = None if text is None else int(text) if pa.types.is_integer(kind) else text.encode()
    return Statistics(kind, value, value, text is None, text is not None)


def stored_statistics(kind: pa.DataType, found: Any, rows: int) -> Statistics | None:
    """Returns the statistics of a column chunk that isn't nested.

    Args:
        kind: The Arrow type of the column.
        found: The statistics in the file's metadata, if there are any.
        rows: The number of rows.
    """
    import pyarrow as pa

    if found is None:
        return None
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    nulls = found.null_count if found.has_null_count else None
    low, high = (found.min_raw, found.max_raw) if found.has_min_max else (None, None)
    if pa.types.is_unsigned_integer(kind):
        # The numbers are stored as signed ones.
        low, high = (None if each is None else each % 2**kind.bit_width for each in (low, high))
    elif pa.types.is_timestamp(kind):
        unit = json.loads(found.logical_type.to_json()).get("timeUnit")
        if _UNITS.get(unit) != kind.unit:
            return None
    return Statistics(kind, low, high, nulls != 0, nulls != rows)


def bounds_of(spec: Spec, statistics: Iterable[Statistics | None]) -> Bounds | None:
    """Returns the bounds of a feature in each row group, or None if its values differ from those of its column.

    Args:
        spec: The spec of the feature.
        statistics: The statistics of its column in each row group; None if there are none.
    """
    import pyarrow as pa

    if type(spec) is not DenseSpec or spec.shape or spec.length or spec.scale is not None:
        return None
    kind = schema_of({"": spec}).field(0).type
    rows: list[tuple[Any, Any, bool, bool]] = []
    for found in statistics:
        if found is None or not _alike(kind, found.kind) or (found.nulls and spec.on_null != "mask"):
            # Nulls are errors, or replaced by a value.
            rows.append((None, None, True, True))
            continue
        rows.append((_value(kind, found.low), _value(kind, found.high), found.nulls, found.values))
    if all(low is None and high is None and nulls and values for low, high, nulls, values in rows):
        return None
    low, high, nulls, values = zip(*rows, strict=True)
    types: Any = pa.types
    storage = pa.int32() if types.is_date32(kind) else pa.int64() if types.is_timestamp(kind) else kind
    # NaN is null in a feature whose nulls are filled with NaN, and the smallest number of a time is NaT.
    may_be_null = np.array(nulls, np.bool_) | spec._nan_is_null | pa.types.is_timestamp(kind)
    try:
        least, most = (pa.array(each, storage).cast(kind) for each in (low, high))
    except (pa.ArrowInvalid, OverflowError):  # The metadata of a damaged file doesn't fit the type.
        return None
    return Bounds(least, most, may_be_null, np.array(values, np.bool_))


def _alike(kind: pa.DataType, stored: pa.DataType) -> bool:
    """Returns whether the values of a feature are exactly those of a column."""
    import pyarrow as pa

    types: Any = pa.types
    if types.is_integer(kind) and types.is_integer(stored):
        return bool(np.can_cast(stored.to_pandas_dtype(), kind.to_pandas_dtype()))
    if types.is_float32(kind) or types.is_float64(kind):
        return stored in (pa.float32(), kind)
    if types.is_timestamp(kind):
        return stored in (kind, pa.timestamp(kind.unit, getattr(stored, "tz", None)))
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return any(is_text(stored) for is_text in (types.is_string, types.is_large_string, types.is_binary))
    is_date: bool = types.is_date32(kind)
    return is_date and stored == kind


def _value(kind: pa.DataType, bound: Any) -> Any:
    """Returns a bound as a value of the feature, or None if it isn't known."""
    import pyarrow as pa

    if isinstance(bound, float) and math.isnan(bound):
        return None
    if isinstance(bound, bytes) and pa.types.is_large_string(kind):
        try:
            return bound.decode()
        except UnicodeDecodeError:
            return None
    return bound
