"""Assembly of batches from the kernel's tensors for `tf.data`, and the specs that TensorFlow requires in advance.

A column is described by nested nodes, like the batch types of `fastpipe.batch`. A node lists the tensors (its *parts*)
that the kernel yields for its type, and assembles them in a graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from fastpipe.batch import Masked as MaskedForm
from fastpipe.errors import UnsupportedError
from fastpipe.specs import DenseSpec, SparseSpec, Spec


class Masked(NamedTuple):
    """A feature with null values.

    Attributes:
        values: A tensor of any kind. Ignore its values where `valid` is False: they are zeros or empty.
        valid: bool, True where a value is present. It is a tensor whose shape is a prefix of the shape of `values`, or
            a RaggedTensor or SparseTensor that corresponds to `values`. If several levels may be null, it is a tuple,
            outermost level first.
    """

    values: Any
    valid: Any


@dataclass(frozen=True)
class Part:
    """A tensor that the kernel creates for a column.

    Attributes:
        dtype: Dtype of the tensor.
        shape: Known shape, with None for a dimension that differs from batch to batch.
        least: Size of such dimensions in a batch without rows.
    """

    dtype: tf.DType
    shape: tuple[int | None, ...]
    least: int = 0


class Node(ABC):
    """Assembly of a batch type.

    Methods use parts in the order of the kernel (`outputs.rs` of `fastpipe-tensorflow`).
    """

    @abstractmethod
    def parts(self, rows: int | None) -> list[Part]:
        """Returns the parts for a batch with this number of rows."""

    @abstractmethod
    def build(self, parts: Iterator[tf.Tensor]) -> tuple[Any, list[Any]]:
        """Returns the values and the masks, outermost first."""

    @abstractmethod
    def specs(self, rows: int | None) -> tuple[tf.TypeSpec, list[tf.TypeSpec]]:
        """Returns the specs of the result of `build`."""


@dataclass(frozen=True)
class Array(Node):
    """A tensor `[rows, *shape]`."""

    dtype: tf.DType
    shape: tuple[int | None, ...]

    def parts(self, rows: int | None) -> list[Part]:
        return [Part(self.dtype, (rows, *self.shape))]

    def build(self, parts: Iterator[tf.Tensor]) -> tuple[Any, list[Any]]:
        return next(parts), []

    def specs(self, rows: int | None) -> tuple[tf.TypeSpec, list[tf.TypeSpec]]:
        return tf.TensorSpec((rows, *self.shape), self.dtype), []


@dataclass(frozen=True)
class Nullable(Node):
    """Values that may be null. `shape` is the shape of the mask after the rows."""

    inner: Node
    shape: tuple[int | None, ...]

    def parts(self, rows: int | None) -> list[Part]:
        return [Part(tf.bool, (rows, *self.shape)), *self.inner.parts(rows)]

    def build(self, parts: Iterator[tf.Tensor]) -> tuple[Any, list[Any]]:
        valid = next(parts)
        values, masks = self.inner.build(parts)
        return values, [valid, *masks]

    def specs(self, rows: int | None) -> tuple[tf.TypeSpec, list[tf.TypeSpec]]:
        values, masks = self.inner.specs(rows)
        return values, [tf.TensorSpec((rows, *self.shape), tf.bool), *masks]


@dataclass(frozen=True)
class Rows(Node):
    """A RaggedTensor: rows of different lengths."""

    inner: Node

    def parts(self, rows: int | None) -> list[Part]:
        return [Part(tf.int64, (None if rows is None else rows + 1,), least=1), *self.inner.parts(None)]

    def build(self, parts: Iterator[tf.Tensor]) -> tuple[Any, list[Any]]:
        offsets = next(parts)
        values, masks = self.inner.build(parts)
        return _rows(values, offsets), [_rows(mask, offsets) for mask in masks]

    def specs(self, rows: int | None) -> tuple[tf.TypeSpec, list[tf.TypeSpec]]:
        values, masks = self.inner.specs(None)
        return _ragged_spec(values, rows), [_ragged_spec(mask, rows) for mask in masks]


@dataclass(frozen=True)
class Coordinates(Node):
    """A SparseTensor `[rows, *shape]` of nested arrays if `nested` is set, otherwise of a `SparseSpec` feature."""

    inner: Node
    shape: tuple[int | None, ...]
    nested: bool = False

    def parts(self, rows: int | None) -> list[Part]:
        rank = len(self.shape) + 1
        return [Part(tf.int64, (None, rank)), Part(tf.int64, (rank,)), *self.inner.parts(None)]

    def build(self, parts: Iterator[tf.Tensor]) -> tuple[Any, list[Any]]:
        indices, dense_shape = next(parts), next(parts)
        values, masks = self.inner.build(parts)
        return tf.SparseTensor(indices, values, dense_shape), [
            tf.SparseTensor(indices, mask, dense_shape) for mask in masks
        ]

    def specs(self, rows: int | None) -> tuple[tf.TypeSpec, list[tf.TypeSpec]]:
        values, masks = self.inner.specs(None)
        shape = (rows, *self.shape)
        return tf.SparseTensorSpec(shape, values.dtype), [tf.SparseTensorSpec(shape, mask.dtype) for mask in masks]


def columns_of(features: Mapping[str, Spec], sample: Callable[[], Mapping[str, Any]]) -> dict[str, Node]:
    """Returns the nodes of features.

    Args:
        features: Specs of the features, by name.
        sample: Function that returns a batch, from which the masked levels are determined. Called only if a feature may
            be masked.

    Raises:
        UnsupportedError: If a feature contains dates, times or durations.
        ValueError: If a sparse feature has `layout="csr"`.
    """
    forms = sample() if any(spec.on_null == "mask" for spec in features.values()) else {}
    columns: dict[str, Node] = {}
    for name, spec in features.items():
        try:
            columns[name] = column(name, spec, forms.get(name))
        except UnsupportedError:
            raise
        except ValueError as error:
            raise ValueError(f"feature {name!r}: {error}") from None
    return columns


def column(name: str, spec: Spec, sample: Any = None) -> Node:
    """Returns the node of a feature.

    Args:
        name: Name of the feature, for errors.
        spec: Spec of the feature.
        sample: A batch's value of the feature, from which the masked levels are determined. None if no level is masked.

    Raises:
        ValueError: If a sparse feature has `layout="csr"`.
    """
    if spec.dtype.startswith(("datetime64", "timedelta64")):
        dtype = tf.int64  # TensorFlow has no such dtypes, so use the integers that NumPy stores.
    else:
        dtype = tf.string if spec.dtype in ("string", "bytes") else tf.as_dtype(spec.dtype)
    node: Node
    if isinstance(spec, DenseSpec):
        node = Array(dtype, spec.shape)
    elif isinstance(spec, SparseSpec):
        if spec.layout != "coo":
            raise ValueError(f'a SparseTensor stores coordinates: use layout="coo", not {spec.layout!r}')
        node = Coordinates(Array(dtype, ()), spec.shape)
    else:
        free = max(level for level, size in enumerate(spec.shape, 1) if size is None)
        node = Array(dtype, spec.shape[free:])
        for _ in range(free):
            node = Rows(node)
    return node if sample is None else _with_masks(node, sample)


def _with_masks(node: Node, form: Any) -> Node:
    if isinstance(form, MaskedForm):
        return Nullable(_with_masks(node, form.values), form.valid.shape[1:])
    if isinstance(node, Rows):
        return Rows(_with_masks(node.inner, form.values))
    if isinstance(node, Coordinates):
        return Coordinates(_with_masks(node.inner, form.values), node.shape)
    return node


def _rows(values: Any, offsets: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(values, offsets, validate=False)


def _ragged_spec(inner: Any, rows: int | None) -> tf.RaggedTensorSpec:
    rank = inner.ragged_rank if isinstance(inner, tf.RaggedTensorSpec) else 0
    return tf.RaggedTensorSpec([rows, *inner.shape], inner.dtype, ragged_rank=rank + 1, row_splits_dtype=tf.int64)
