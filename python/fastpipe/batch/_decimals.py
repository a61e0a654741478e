"""Specs for decimals, and their conversion to Python decimals."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import shown
from fastpipe.specs import DenseSpec, Nulls, RaggedSpec, Spec

# 128 bits have up to 39 digits.
_EXACT = Context(prec=40)


def decimal_spec(
    shape: Sequence[int | None] = (),
    *,
    values: Literal["int64", "pairs", "float64"] = "int64",
    scale: int | None = None,
    on_null: Nulls = "error",
    fill: float | None = None,
    field: str | None = None,
) -> Spec:
    """Returns the `DenseSpec` or `RaggedSpec` that reads decimals.

    Args:
        shape: Shape of one row, `()` for a scalar. A None dimension is ragged. Defaults to a scalar.
        values: Representation of the decimals. "int64" reads integers in units of `10**-scale`, exact up to 18 digits
            and checked beyond. "pairs" reads int64 of shape `[..., 2]`, the lower and then the upper half of 128 bits,
            for up to 38 digits. "float64" reads the nearest number. `to_decimals` converts the first two to Python
            decimals. Defaults to "int64".
        scale: Number of decimal places for "int64" and "pairs", at least the field's scale.
        on_null: How to read nulls: "error" raises `NullValueError`, "mask" wraps the values in `Masked`, and "fill"
            replaces nulls with the fill value. Defaults to "error".
        fill: Value that replaces nulls, in units of `10**-scale`. Not supported with "pairs".
        field: Path of the field to read. Defaults to the feature's name.

    Raises:
        ValueError: If `scale` is missing, or if it is passed with "float64", or if `DenseSpec` rejects a value.
        TypeError: If an argument has the wrong type.

    Example:
        >>> import fastpipe
        >>> fastpipe.decimal_spec(scale=2, on_null="mask")
        fastpipe.DenseSpec((), "int64", on_null="mask", scale=2)
    """
    if values not in ("int64", "pairs", "float64"):
        raise ValueError(f'values must be "int64", "pairs" or "float64"; got {shown(values)}')
    if (scale is None) != (values == "float64"):
        has = "doesn't support scale=" if values == "float64" else "requires scale=, the number of decimal places"
        raise ValueError(f'values="{values}" {has}')
    if values == "pairs" and fill is not None:
        raise ValueError('pass either values="pairs" or fill, not both; on_null="mask" marks nulls')
    whole = (*shape, 2) if values == "pairs" else tuple(shape)
    kind = RaggedSpec if None in whole else DenseSpec
    dtype = "float64" if values == "float64" else "int64"
    return kind(whole, dtype, on_null=on_null, fill=fill, field=field, scale=scale)


def to_decimals(values: npt.NDArray[Any], scale: int, *, pairs: bool = False) -> npt.NDArray[np.object_]:
    """Converts integers in units of `10**-scale` to Python decimals.

    Args:
        values: Integer array of any shape, as `DenseSpec((), "int64", scale=2)` reads it. With `pairs`, int64 of shape
            `[..., 2]`, the lower and then the upper half of 128 bits, as `DenseSpec((2,), "int64", scale=2)` reads
            decimals of up to 38 digits.
        scale: Scale of the spec.
        pairs: Whether `values` are pairs. Defaults to False.

    Returns:
        An array of `decimal.Decimal` with the same shape, or without the last dimension for pairs.

    Raises:
        TypeError: If `values` isn't an array of integers.
        ValueError: If `pairs` is set and the last dimension isn't 2.

    Example:
        >>> import numpy as np, fastpipe
        >>> fastpipe.to_decimals(np.array([1234, -5]), scale=2)
        array([Decimal('12.34'), Decimal('-0.05')], dtype=object)
    """
    given: Any = values  # Users may pass any type.
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iu":
        raise TypeError(f"values must be an array of integers; got {shown(values)}")
    if pairs and (values.dtype != np.int64 or values.ndim == 0 or values.shape[-1] != 2):
        raise ValueError(f"pairs must be int64 of shape [..., 2]; got {values.dtype} of shape {list(values.shape)}")
    if pairs:
        halves = values.reshape(-1, 2).tolist()
        whole = [(high << 64) + (low & (1 << 64) - 1) for low, high in halves]
        shape = values.shape[:-1]
    else:
        whole, shape = values.ravel().tolist(), values.shape
    out = np.empty(len(whole), dtype=object)
    out[:] = [Decimal(number).scaleb(-scale, _EXACT) for number in whole]
    return out.reshape(shape)
