"""The forms of batches as Arrow arrays over the same memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def to_arrow(node: Any) -> pa.Array:
    """A form, or an array, as an Arrow array."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError("to_arrow needs pyarrow: pip install 'fastpipe-data[arrow]'") from error

    from fastpipe.batch import Masked, Ragged, Strings

    # A mask of k dimensions belongs to the k-th level of nesting; two of the same depth (a nullable field of a nullable
    # record) are one in Arrow.
    masks: dict[int, np.ndarray] = {}
    while isinstance(node, Masked):
        depth = node.valid.ndim
        masks[depth] = node.valid & masks[depth] if depth in masks else node.valid
        node = node.values

    def bitmap(depth: int) -> pa.Buffer | None:
        return pa.py_buffer(np.packbits(masks[depth], bitorder="little")) if depth in masks else None

    if isinstance(node, Strings):
        shape = node.shape
        kind = pa.large_binary() if node.binary else pa.large_string()
        buffers = [bitmap(len(shape)), pa.py_buffer(node.offsets), pa.py_buffer(node.values)]
        array = pa.Array.from_buffers(kind, math.prod(shape), buffers)
    elif isinstance(node, Ragged):
        shape = (len(node),)
        items = to_arrow(node.values)
        array = pa.Array.from_buffers(
            pa.large_list(items.type), len(node), [bitmap(1), pa.py_buffer(node.offsets)], children=[items]
        )
    elif isinstance(node, np.ndarray):
        shape = node.shape
        data = np.packbits(node, bitorder="little") if node.dtype == np.bool_ else np.ascontiguousarray(node)
        buffers = [bitmap(len(shape)), pa.py_buffer(data)]
        array = pa.Array.from_buffers(pa.from_numpy_dtype(node.dtype), node.size, buffers)
    else:
        raise TypeError(f"Arrow has no array for a {type(node).__name__}")

    for depth in range(len(shape) - 1, 0, -1):
        kind = pa.list_(array.type, shape[depth])
        array = pa.Array.from_buffers(kind, math.prod(shape[:depth]), [bitmap(depth)], children=[array])
    return array
