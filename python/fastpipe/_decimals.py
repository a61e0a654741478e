"""Decimals as Python has them."""

from __future__ import annotations

from decimal import Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown

__all__ = ["to_decimals"]

# 128 bits have 39 digits.
_EXACT = Context(prec=40)


def to_decimals(values: npt.NDArray[Any], scale: int, *, pairs: bool = False) -> npt.NDArray[np.object_]:
    """Makes Python decimals of integers in units of `10**-scale`.

    Args:
        values: an integer array of any shape, as `DenseSpec((), "int64", scale=2)` reads it; with `pairs` int64 of
            shape `[..., 2]`, as `DenseSpec((2,), "int64", scale=2)` reads decimals of up to 38 digits: the lower half
            of 128 bits, then the upper one.
        scale: the spec's.
        pairs: whether `values` are pairs.

    Returns:
        An array of `decimal.Decimal` of the same shape, without the last dimension if there are pairs.

    Raises:
        TypeError: if `values` isn't an array of integers.
        ValueError: if there are to be pairs and the last dimension isn't 2.

    Example:
        >>> import numpy as np, fastpipe
        >>> fastpipe.to_decimals(np.array([1234, -5]), scale=2)
        array([Decimal('12.34'), Decimal('-0.05')], dtype=object)
    """
    given: Any = values  # Users may give anything.
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iu":
        raise TypeError(f"values is an array of integers, not {shown(values)}")
    if pairs and (values.dtype != np.int64 or values.ndim == 0 or values.shape[-1] != 2):
        raise ValueError(f"pairs are int64 of shape [..., 2], not {values.dtype} of shape {list(values.shape)}")
    if pairs:
        halves = values.reshape(-1, 2).tolist()
        whole = [(high << 64) + (low & (1 << 64) - 1) for low, high in halves]
        shape = values.shape[:-1]
    else:
        whole, shape = values.ravel().tolist(), values.shape
    out = np.empty(len(whole), dtype=object)
    out[:] = [Decimal(number).scaleb(-scale, _EXACT) for number in whole]
    return out.reshape(shape)
