"""From the parts of a batch to what `tf.data` hands out, and what it must know of that beforehand.

A column is described by nested nodes, as the forms of `fastpipe.batch` nest. A node says which tensors, its *parts*,
such a form consists of, as the kernel yields them, and puts them together in a graph.
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
    """A feature of which some entries are null.

    Attributes:
        values: a tensor of any kind. Where `valid` is False it holds zeros or nothing, to be ignored.
        valid: bool, True where a value is present: a tensor whose shape is a prefix of that of `values`, a RaggedTensor
            or SparseTensor beside them; a tuple of those, outermost first, if several levels may be null.
    """

    values: Any
    valid: Any


@dataclass(frozen=True)
class Part:
    """A tensor that the kernel makes of a column.

    Attributes:
        dtype: of the tensor.
        shape: what is known of it; None for a dimension that differs from batch to batch.
        least: what such dimensions are where there are no rows.
    """

    dtype: tf.DType
    shape: tuple[int | None, ...]
    least: int = 0


class Node(ABC):
    """How a form is put together. Methods meet parts in the kernel's order (`outputs.rs` of `fastpipe-tensorflow`)."""

    @abstractmethod
    def parts(self, rows: int | None) -> list[Part]:
        """The parts of a form of this many rows."""

    @abstractmethod
    def build(self, parts: Iterator[tf.Tensor]) -> tuple[Any, list[Any]]:
        """The values, and the masks, outermost first."""

    @abstractmethod
    def specs(self, rows: int | None) -> tuple[tf.TypeSpec, list[tf.TypeSpec]]:
        """The specs of what `build` returns."""


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
    """Something that may be null in places; its mask has these dimensions behind the rows."""

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
    """A RaggedTensor: rows of differing length."""

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
    """A SparseTensor `[rows, *shape]`; with `nested` of nested arrays, else of what a `SparseSpec` yields."""

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
    """The nodes of features.

    Args:
        features: by name.
        sample: makes forms of them, from which to learn which levels are masked. It is called if any may be.

    Raises:
        UnsupportedError: for dates, times and durations.
        ValueError: for a sparse feature with `layout="csr"`.
    """
    forms = sample() if any(spec.nulls == "mask" for spec in features.values()) else {}
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
    """The node of a feature.

    Args:
        name: of the feature, for errors.
        spec: of the feature.
        sample: a form of it, from which to learn which levels are masked; None: none is.

    Raises:
        ValueError: for a sparse feature with `layout="csr"`.
    """
    if spec.dtype.startswith(("datetime64", "timedelta64")):
        dtype = tf.int64  # TensorFlow has no dtype for them: the number that NumPy counts them in.
    else:
        dtype = tf.string if spec.dtype in ("string", "bytes") else tf.as_dtype(spec.dtype)
    node: Node
    if isinstance(spec, DenseSpec):
        node = Array(dtype, spec.shape)
    elif isinstance(spec, SparseSpec):
        if spec.layout != "coo":
            raise ValueError(f'a SparseTensor holds coordinates: read it with layout="coo", not {spec.layout!r}')
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
