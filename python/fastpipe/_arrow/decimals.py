"""Integers of features with a scale as Arrow's decimals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe._arrow.schema import require_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["with_decimals"]

_WORD = 8


def with_decimals(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array that was just made, with decimals where `kind` has them in place of integers: these alone are copied."""
    if array.type == kind:
        return array
    pa = require_pyarrow()
    if pa.types.is_decimal(kind):
        return _decimals(array, kind)
    if pa.types.is_struct(kind):
        children = [with_decimals(array.field(i), kind.field(i).type) for i in range(kind.num_fields)]
        own = 1
    else:
        children = [with_decimals(array.values, kind.value_type)]
        own = 1 if pa.types.is_fixed_size_list(kind) else 2
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:own], children=children)


def _decimals(array: pa.Array, kind: Any) -> pa.Array:
    """Integers of the array, widened: little-endian words, the sign in all but the first."""
    pa = require_pyarrow()
    bitmap, data = array.buffers()
    dtype = np.dtype(array.type.to_pandas_dtype())
    integers = np.frombuffer(data, dtype, len(array)) if len(array) else np.empty(0, dtype)
    words = np.empty((len(array), kind.bit_width // 8 // _WORD), "<i8")
    words[:, 0] = integers.view(np.int64) if dtype == np.uint64 else integers
    words[:, 1:] = -(integers < 0).astype(np.int64)[:, np.newaxis]
    return pa.Array.from_buffers(kind, len(array), [bitmap, pa.py_buffer(words)])
