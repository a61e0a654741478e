"""Decimals: specs that read them, and what Python has for them."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown
from fastpipe.specs import DenseSpec, Nulls, RaggedSpec, Spec

# 128 bits have 39 digits.
_EXACT = Context(prec=40)


def DecimalSpec(
    shape: Sequence[int | None] = (),
    *,
    values: Literal["int64", "pairs", "float64"] = "int64",
    scale: int | None = None,
    nulls: Nulls = "error",
    fill: float | None = None,
    field: str | None = None,
) -> Spec:
    """The `DenseSpec` or `RaggedSpec` that reads decimals.

    Args:
        shape: of one row, as for these.
        values: "int64" for integers in units of `10**-scale`, exact up to 18 digits and checked beyond; "pairs" for
            int64 of shape `[..., 2]`, the lower half of 128 bits and then the upper one, for up to 38
            digits; "float64" for the nearest number. `to_decimals` makes Python's of the first two.
        scale: the decimal places of "int64" and "pairs": as many as the field's, or more.
        nulls: as for `DenseSpec`.
        fill: as for `DenseSpec`, in units of `10**-scale`; not with "pairs".
        field: as for `DenseSpec`.

    Raises:
        ValueError: if `scale` is missing, or given for "float64"; as of `DenseSpec`.
        TypeError: as of `DenseSpec`.

    Example:
        >>> import fastpipe
        >>> fastpipe.DecimalSpec(scale=2, nulls="mask")
        fastpipe.DenseSpec((), "int64", nulls="mask", scale=2)
    """
    if values not in ("int64", "pairs", "float64"):
        raise ValueError(f'values is "int64", "pairs" or "float64", not {shown(values)}')
    if (scale is None) != (values == "float64"):
        has = "has no scale" if values == "float64" else "needs scale=, the number of decimal places"
        raise ValueError(f'values="{values}" {has}')
    if values == "pairs" and fill is not None:
        raise ValueError('values="pairs" and fill exclude each other; nulls="mask" marks nulls')
    whole = (*shape, 2) if values == "pairs" else tuple(shape)
    kind = RaggedSpec if None in whole else DenseSpec
    dtype = "float64" if values == "float64" else "int64"
    return kind(whole, dtype, nulls=nulls, fill=fill, field=field, scale=scale)


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
