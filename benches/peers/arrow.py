"""Converts Arrow arrays to the same NumPy batches as fastpipe's.

Values and offsets are views of Arrow's buffers if possible. Only sparse indices, booleans, and arrays of several chunks
are copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import generate


def _whole(array: Any) -> Any:
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if pa.types.is_string_view(array.type):
        array = array.cast(pa.large_string())
    return array


def _items(array: Any) -> tuple[Any, Any]:
    """Returns the items of a list array as an Arrow array, and their offsets."""
    offsets = array.offsets.to_numpy(zero_copy_only=False)
    return array.flatten(), offsets - offsets[0]


def _numbers(array: Any) -> Any:
    return array.to_numpy(zero_copy_only=False)


def _text(array: Any) -> tuple[Any, Any]:
    """Returns the bytes and offsets of a string array."""
    array = _whole(array)
    _, ends, data = array.buffers()
    width = "i8" if str(array.type).startswith("large") else "i4"
    offsets = np.frombuffer(ends, width)[array.offset : array.offset + len(array) + 1]
    flat = np.frombuffer(data, "u1") if data is not None else np.empty(0, "u1")
    return flat[offsets[0] : offsets[-1]], offsets - offsets[0]


def to_numpy(column: generate.Column, array: Any) -> Any:
    """Converts one column of a batch.

    Args:
        column: The description of the column.
        array: The Arrow array, which may be chunked.
    """
    array = _whole(array)
    if column.nullable:
        zero = False if column.avro == "boolean" else 0
        return _numbers(array.fill_null(zero)), _numbers(array.is_valid())
    if column.kind == "scalar":
        return _numbers(array)
    if column.kind == "dense":
        return _numbers(array.flatten()).reshape(-1, column.size)
    if column.kind == "ragged":
        items, offsets = _items(array)
        return _numbers(items), offsets
    if column.kind == "sparse":
        fields = dict(zip([field.name for field in array.type], array.flatten(), strict=True))
        places, offsets = _items(fields["indices0"])
        indices = np.empty((len(places), 2), "i8")
        indices[:, 0] = np.repeat(np.arange(len(array)), np.diff(offsets))
        indices[:, 1] = _numbers(places)
        values = _numbers(fields["values"].flatten())
        return indices, values, np.array([len(array), generate.SPARSE_SIZE], "i8")
    if column.kind == "strings":
        items, offsets = _items(array)
        return _text(items), offsets
    return _text(array)
