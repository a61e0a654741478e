"""From the forms of a batch to tensors, and what `tf.data` must know of them beforehand.

A column is described by nested nodes, as the forms of `fastpipe.batch` nest. A node says which flat arrays, its
*parts*, such a form consists of; takes them from a form, in NumPy; and puts tensors over them together, in a graph.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastpipe._memory import ALIGNMENT, aligned
from fastpipe.batch import Masked as MaskedForm
from fastpipe.batch import Strings
from fastpipe.specs import DenseSpec, SparseSpec, Spec

__all__ = ["Array", "Coordinates", "Masked", "Node", "Nullable", "Part", "Rows", "column"]


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
    """A flat array of a column.

    Attributes:
        dtype: of the tensor.
        shape: what is known of it; None for a dimension that differs from batch to batch.
    """

    dtype: tf.DType
    shape: tuple[int | None, ...]

    def convert(self, array: Any) -> tf.Tensor:
        """A tensor over the same memory, which is kept until the tensor dies.

        Strings are copied, as TensorFlow has its own, and so are arrays that don't lie as it wants: of what a reader
        yields the shapes of sparse tensors alone.
        """
        if isinstance(array, Strings):
            return tf.constant(_message(array))
        if not array.size:
            return tf.zeros(array.shape, self.dtype)
        if array.ctypes.data % ALIGNMENT or not array.flags.c_contiguous:
            copy = aligned(array.shape, array.dtype)
            copy[...] = array
            array = copy
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())

    def receive(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor on the other side, in a graph."""
        if self.dtype == tf.string:
            tensor = tf.io.parse_tensor(tensor, tf.string)
        tensor.set_shape(self.shape)
        return tensor


class Node(ABC):
    """How a form is taken apart in Python and put together in TensorFlow. All methods meet parts in the same order."""

    @abstractmethod
    def parts(self, rows: int | None) -> list[Part]:
        """The parts of a form of so many rows."""

    @abstractmethod
    def take(self, form: Any) -> list[Any]:
        """The parts of this form."""

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

    def take(self, form: Any) -> list[Any]:
        return [form]

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

    def take(self, form: Any) -> list[Any]:
        return [form.valid, *self.inner.take(form.values)]

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
        return [Part(tf.int64, (None if rows is None else rows + 1,)), *self.inner.parts(None)]

    def take(self, form: Any) -> list[Any]:
        return [form.offsets, *self.inner.take(form.values)]

    def build(self, parts: Iterator[tf.Tensor]) -> tuple[Any, list[Any]]:
        offsets = next(parts)
        values, masks = self.inner.build(parts)
        return _rows(values, offsets), [_rows(mask, offsets) for mask in masks]

    def specs(self, rows: int | None) -> tuple[tf.TypeSpec, list[tf.TypeSpec]]:
        values, masks = self.inner.specs(None)
        return _ragged_spec(values, rows), [_ragged_spec(mask, rows) for mask in masks]


@dataclass(frozen=True)
class Coordinates(Node):
    """A SparseTensor `[rows, *shape]`."""

    inner: Node
    shape: tuple[int | None, ...]

    def parts(self, rows: int | None) -> list[Part]:
        rank = len(self.shape) + 1
        return [Part(tf.int64, (None, rank)), Part(tf.int64, (rank,)), *self.inner.parts(None)]

    def take(self, form: Any) -> list[Any]:
        return [form.indices, form.dense_shape, *self.inner.take(form.values)]

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


def column(spec: Spec, sample: Any = None) -> Node:
    """The node of a feature.

    Args:
        spec: of the feature.
        sample: a form of it, from which to learn which levels are masked; None: none is.

    Raises:
        ValueError: for a sparse feature with `layout="csr"`.
    """
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


def _message(strings: Strings) -> bytes:
    """A serialized TensorProto, as TensorFlow writes tensors of strings itself: all lengths, then all bytes.

    So TensorFlow makes its strings from one buffer, and Python needs no object for each.
    """
    text, shape = np.diff(strings.offsets), strings.shape
    dims = b"".join(_field(2, _number(1, size)) for size in shape)
    head = _number(1, tf.string.as_datatype_enum) + _field(2, dims)
    if not math.prod(shape):
        return head
    lengths = _varints(text)
    start, stop = int(strings.offsets[0]), int(strings.offsets[-1])
    content = len(lengths) + stop - start
    return b"".join([head, _varint(4 << 3 | 2), _varint(content), lengths, memoryview(strings.values[start:stop])])


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varints(numbers: np.ndarray) -> bytes:
    """Numbers from 0 to 2^35 - 1 as varints, one after the other."""
    largest = int(numbers.max())
    if largest <= 0x7F:
        return numbers.astype(np.uint8).tobytes()
    width = -(-largest.bit_length() // 7)
    groups = numbers[:, np.newaxis] >> np.arange(0, 7 * width, 7)
    rest = groups >> 7
    present = groups.astype(bool)
    present[:, 0] = True
    more = rest > 0
    out: bytes = (groups & 0x7F | more << 7)[present].astype(np.uint8).tobytes()
    return out
