"""What `ATDSDataset` is asked for."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import tensorflow as tf

__all__ = ["ATDS_SUPPORTED_DTYPES", "DenseFeature", "Feature", "SparseFeature", "VarlenFeature"]

ATDS_SUPPORTED_DTYPES = [tf.int32, tf.int64, tf.float32, tf.float64, tf.string, tf.bool]
"""The dtypes of features, under the name that tensorflow-io has for them."""


class DenseFeature(namedtuple("DenseFeature", ["shape", "dtype"])):  # noqa: PYI024 - checks itself, in __new__
    """Nested arrays of exactly these lengths, as a Tensor.

    Args:
        shape: of one row, each dimension at least 1; `[]` for a scalar.
        dtype: tf.int32, int64, float32, float64, string or bool, as in the schema.

    Raises:
        ValueError: if a dimension or the dtype can't be.
    """

    __slots__ = ()

    def __new__(cls, shape: Sequence[int], dtype: tf.DType) -> Self:
        _check(shape, dtype)
        if any(size < 0 for size in shape):
            raise ValueError(f"Each dimension should be greater than 0 in DenseFeature but found {shape}.")
        return super().__new__(cls, shape, dtype)


class SparseFeature(namedtuple("SparseFeature", ["shape", "dtype"])):  # noqa: PYI024
    """A record of `indices0`, `indices1`, ... and `values`, as a SparseTensor.

    Args:
        shape: of one row; -1 for a dimension that is as large as the batch needs.
        dtype: of the values.

    Raises:
        ValueError: if a dimension or the dtype can't be, or there is no dimension.
    """

    __slots__ = ()

    def __new__(cls, shape: Sequence[int], dtype: tf.DType) -> Self:
        _check(shape, dtype)
        if not len(shape):
            raise ValueError("SparseFeature cannot be scalar. A scalar is a DenseFeature.")
        return super().__new__(cls, shape, dtype)


class VarlenFeature(namedtuple("VarlenFeature", ["shape", "dtype"])):  # noqa: PYI024
    """Nested arrays, as a SparseTensor.

    Args:
        shape: of one row; -1 for a dimension of any length, others are exact.
        dtype: of the items.

    Raises:
        ValueError: if a dimension or the dtype can't be.
    """

    __slots__ = ()

    def __new__(cls, shape: Sequence[int], dtype: tf.DType) -> Self:
        _check(shape, dtype)
        if any(size < -1 for size in shape):
            raise ValueError(f"Each dimension should be greater than 0 or -1 in VarlenFeature but found {shape}.")
        return super().__new__(cls, shape, dtype)


Feature: TypeAlias = DenseFeature | SparseFeature | VarlenFeature


def _check(shape: Any, dtype: Any) -> None:
    if shape is None:
        raise ValueError("Shape cannot be None. It is [] for a scalar.")
    if any(size is None or size == 0 for size in shape):
        raise ValueError(f"Dimension in shape cannot be None or 0 but found {shape}.")
    if dtype is None:
        raise ValueError("dtype cannot be None.")
    if dtype not in ATDS_SUPPORTED_DTYPES:
        raise ValueError(f"{dtype} is not supported in ATDS. Available dtypes are {ATDS_SUPPORTED_DTYPES}.")
