"""What batches become in JAX: arrays and pytrees of them, which a sharding can lay out.

Arrays of ragged features are padded to a few sizes: `jax.jit` compiles once for each shape.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR

from fastpipe import batch as forms
from fastpipe._arguments import shown
from fastpipe._interop.memory import aligned
from fastpipe._reader.passes import Passes, passes_of
from fastpipe.batch._form import counted
from fastpipe.errors import UnsupportedError, ValueRangeError
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec, Spec

# Of sparse arrays, by class and shape. Those whose shape differs from batch to batch mustn't fill the memory.
_structures: dict[tuple[Any, tuple[int, ...]], Any] = {}
_MOST_STRUCTURES = 1024


@partial(jax.tree_util.register_dataclass, data_fields=["values", "offsets"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of differing length: row `i` is `values[offsets[i]:offsets[i + 1]]`. A pytree.

    Attributes:
        values: the items of all rows, one after the other: an array `[items, ...]`, or another form. With `pad_ragged`
            padding follows.
        offsets: int64 `[rows + 1]`; int32 without 64-bit types.
    """

    values: Any
    offsets: jax.Array

    @property
    def lengths(self) -> jax.Array:
        """The number of items in each row, `[rows]`."""
        return jnp.diff(self.offsets)

    @property
    def segment_ids(self) -> jax.Array:
        """The row of each item, `[items]`, in rising order: what `jax.ops.segment_sum` takes. Can be used in a jit.

        For padding it is the number of rows: with `num_segments` of as many, `segment_sum` leaves padding out.
        """
        rows = jnp.arange(_rows(self) + 1, dtype=self.offsets.dtype)
        items = _rows(self.values)
        lengths = jnp.append(self.lengths, items - self.offsets[-1])
        return jnp.repeat(rows, lengths, total_repeat_length=items)

    @property
    def mask(self) -> jax.Array:
        """True for items, False for padding, bool `[items]`. Can be used in a jit."""
        return jnp.arange(_rows(self.values)) < self.offsets[-1]


@partial(jax.tree_util.register_dataclass, data_fields=["values", "offsets"], meta_fields=["shape", "binary"])
@dataclass(frozen=True, eq=False)
class Strings:
    """Strings or byte strings in one buffer. A pytree.

    Entry `i`, in C order of `shape`, is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: uint8 `[bytes]`: the bytes of all entries; UTF-8 unless `binary`.
        offsets: int64 `[prod(shape) + 1]`; int32 without 64-bit types.
        shape: the shape that the entries make; the first dimension is the rows. Static in a jit.
        binary: False for strings, True for bytes. Static in a jit.
    """

    values: jax.Array
    offsets: jax.Array
    shape: tuple[int, ...]
    binary: bool

    @property
    def lengths(self) -> jax.Array:
        """The number of bytes of each entry, with `shape`."""
        return jnp.diff(self.offsets).reshape(self.shape)


@partial(jax.tree_util.register_dataclass, data_fields=["values", "valid"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Masked:
    """Rows of which some are null. A pytree.

    Attributes:
        values: an array or another form. Where `valid` is False it holds zeros or nothing, to be ignored.
        valid: bool, True where a value is present; its shape is a prefix of that of `values`.
    """

    values: Any
    valid: jax.Array


def leaves(node: Any, name: str) -> list[np.ndarray]:
    """The arrays of a form of the reader's, in the order in which `pytree` takes them.

    Args:
        node: an array or a form.
        name: of the feature, for errors.

    Raises:
        UnsupportedError: if JAX has no array for it.
    """
    if isinstance(node, np.ndarray):
        return [counted(node)]
    if not isinstance(node, (forms.Sparse, forms.SparseCSR)):
        return [array for part in node for array in leaves(part, name)]
    if not isinstance(node.values, np.ndarray):
        raise UnsupportedError(
            f"feature {name!r}: JAX's sparse arrays hold numbers, not {type(node.values).__name__}: leave it out"
            ' with columns=, or give its nulls a value with nulls="fill"',
            feature=name,
        )
    if isinstance(node, forms.SparseCSR):
        return [node.values, node.indices, node.offsets]
    return [node.values, node.indices]


def pytree(node: Any, arrays: Iterator[jax.Array]) -> Any:
    """What a form of the reader's becomes in JAX, of the JAX arrays of its `leaves`."""
    if isinstance(node, np.ndarray):
        return next(arrays)
    match node:
        case forms.Strings():
            return Strings(next(arrays), next(arrays), shape=node.shape, binary=node.binary)
        case forms.Ragged():
            return Ragged(pytree(node.values, arrays), next(arrays))
        case forms.Masked():
            return Masked(pytree(node.values, arrays), next(arrays))
        case forms.Sparse():
            return _sparse(BCOO, (next(arrays), next(arrays)), node.dense_shape)
        case forms.SparseCSR():
            return _sparse(BCSR, (next(arrays), next(arrays), next(arrays)), node.dense_shape)
    raise TypeError(f"readers yield no {type(node).__name__}")


def _sparse(kind: Any, parts: tuple[jax.Array, ...], dense_shape: np.ndarray) -> Any:
    # To make one takes JAX 20 times as long as to make another one of the same shape out of its parts.
    shape = tuple(dense_shape.tolist())
    structure = _structures.get((kind, shape))
    if structure is not None:
        return structure.unflatten(parts)
    made = kind(parts, shape=shape)
    if len(_structures) < _MOST_STRUCTURES:
        _structures[kind, shape] = jax.tree.structure(made)
    return made


def narrow(array: np.ndarray, name: str) -> np.ndarray:
    """An array of a 64-bit type in 32 bits, aligned so that JAX takes it without another copy.

    Args:
        array: of int64, uint64 or float64.
        name: of the feature, for errors.

    Raises:
        ValueRangeError: if a value doesn't fit.
    """
    dtype = np.dtype(f"{array.dtype.kind}4")
    narrowed = aligned(array.shape, dtype)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            np.copyto(narrowed, array, casting="same_kind")
        infinite = np.isinf(narrowed)
        unfit = array[infinite & np.isfinite(array)] if infinite.any() else array[:0]
    else:
        limits = np.iinfo(dtype)
        fits = array.size == 0 or (array.min() >= limits.min and array.max() <= limits.max)
        unfit = array[:0] if fits else array[(array < limits.min) | (array > limits.max)]
        np.copyto(narrowed, array, casting="same_kind")
    if unfit.size:
        raise ValueRangeError(
            f"feature {name!r}: {unfit.flat[0]} doesn't fit {dtype}, and without jax_enable_x64 JAX has no"
            f" {array.dtype}: set jax.config.update('jax_enable_x64', True), or leave the feature out with columns=",
            feature=name,
        )
    return narrowed


def _rows(node: Any) -> int:
    match node:
        case Strings():
            return node.shape[0]
        case Ragged():
            return node.offsets.shape[0] - 1
        case Masked():
            return _rows(node.values)
    rows: int = node.shape[0]
    return rows


def checked_passes(reader: Any, sharding: Any) -> Passes:
    """The passes of a reader, if it is one, and the sharding is one."""
    passes = passes_of(reader)
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        raise TypeError(
            "sharding is a jax.sharding.Sharding, such as NamedSharding(mesh, PartitionSpec('data')), not"
            f" {type(sharding).__name__}"
        )
    return passes


def check_feature(name: str, spec: Spec) -> None:
    if not isinstance(spec, SparseSpec):
        return
    if spec.dtype in ("string", "bytes"):
        reason = f"JAX's sparse arrays hold numbers, not {spec.dtype}: leave it out with columns="
    elif spec.layout == "csr" and len(spec.shape) > 1:
        reason = f'JAX\'s BCSR has one dimension besides the rows, not {len(spec.shape)}: use layout="coo"'
    else:
        return
    raise UnsupportedError(f"feature {name!r}: {reason}", feature=name, reason=reason)


def check_dense(name: str, spec: Spec) -> None:
    if isinstance(spec, DenseSpec) and spec.dtype not in ("string", "bytes"):
        return
    if isinstance(spec, DenseSpec):
        reason = f"a sharding can't divide {spec.dtype}: read enums as codes, or leave it out with columns="
    elif isinstance(spec, SparseSpec):
        reason = (
            "a sharding can't divide sparse rows: leave it out with columns=, or read without a sharding and place it"
            " yourself"
        )
    else:
        reason = (
            "a sharding can't divide ragged rows: pad them with DenseSpec((size,), pad=0), or leave it out with"
            " columns="
        )
    raise UnsupportedError(f"feature {name!r}: {reason}", feature=name, reason=reason)


def check_sizes(passes: Passes) -> None:
    if not passes.one_size:
        raise ValueError(
            "a sharding needs batches of one size, and the last one may be smaller: read with drop_last=True, or with"
            ' uneven="pad" to fill it up'
        )
    if passes.uneven == "allow" and jax.process_count() > 1:
        raise ValueError('with uneven="allow" some processes would wait for others for ever: use "drop" or "pad"')


def check_divisible(name: str, shape: tuple[Any, ...], sharding: jax.sharding.Sharding) -> None:
    reason = ""
    if isinstance(sharding, jax.sharding.NamedSharding) and len(sharding.spec) > len(shape):
        reason = f"{sharding.spec} has more dimensions"
    else:
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            reason = str(error)
    if reason:
        raise UnsupportedError(
            f"feature {name!r}: the sharding can't divide batches of shape {shape}: {reason}", feature=name
        )


def share_of(sharding: jax.sharding.Sharding) -> tuple[int, int]:
    """Into how many shares a sharding divides the rows among processes, and which of them is this process's."""
    dimensions = len(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else 1
    # Whatever the axes of the mesh, their sizes divide the number of devices.
    rows = len(sharding.device_set)
    held: dict[int, set[tuple[int, int]]] = {}
    device: Any
    for device, index in sharding.devices_indices_map((rows,) * max(dimensions, 1)).items():
        start, stop, _ = index[0].indices(rows)
        held.setdefault(device.process_index, set()).add((start, stop))
    own = jax.process_index()
    if own not in held:
        raise UnsupportedError(f"process {own} has no device in the sharding's mesh: put one there")
    shares = sorted({tuple(sorted(ranges)) for ranges in held.values()})
    sizes = {sum(stop - start for start, stop in ranges) for ranges in shares}
    if sizes != {rows // len(shares)} or rows % len(shares):
        raise UnsupportedError(
            "under the sharding processes hold rows in part alike, or differ in how many they hold: let those that hold"
            " some of the same rows hold all of the same"
        )
    return len(shares), shares.index(tuple(sorted(held[own])))


PadRagged: TypeAlias = "bool | Sequence[int] | Mapping[str, bool | Sequence[int]]"

# Of powers of two: below that, sizes would differ often and save little.
_LEAST = 16


class Padding:
    """Sizes to which the arrays of a feature are padded.

    Args:
        name: of the feature, for errors.
        sizes: in ascending order; None for powers of two.
    """

    def __init__(self, name: str, sizes: Sequence[int] | None) -> None:
        self._name = name
        self._sizes = sizes

    def padded(self, node: Any, rows: int | None = None) -> Any:
        """A form of the reader's, whose arrays of values are padded. Offsets say what is padding.

        Args:
            node: an array or a form.
            rows: how many rows it is to have, at least as many as it has; None to keep their number.

        Raises:
            ValueRangeError: if an array is longer than the largest size.
        """
        match node:
            case forms.Strings():
                return self._strings(node, len(node) if rows is None else rows)
            case forms.Ragged():
                values = self.padded(node.values, self._size(len(node.values)))
                return forms.Ragged(values, _offsets(node.offsets, len(node) if rows is None else rows))
            case forms.Masked():
                return forms.Masked(self.padded(node.values, rows), _extended(node.valid, rows))
        return _extended(node, rows) if isinstance(node, np.ndarray) else node

    def _strings(self, node: forms.Strings, rows: int) -> forms.Strings:
        values = _extended(node.values, self._size(len(node.values)))
        offsets = _offsets(node.offsets, rows * math.prod(node.shape[1:]))
        return forms.Strings(values, offsets, (rows, *node.shape[1:]), node.binary)

    def _size(self, items: int) -> int:
        if self._sizes is None:
            return max(_LEAST, 1 << (items - 1).bit_length())
        place = bisect_left(self._sizes, items)
        if place == len(self._sizes):
            raise ValueRangeError(
                f"feature {self._name!r}: an array of a batch has {items} items, and the largest size of pad_ragged is"
                f" {self._sizes[-1]}. Give a larger size, or pad_ragged=True for powers of two",
                feature=self._name,
            )
        return self._sizes[place]


def paddings(pad_ragged: Any, features: Features) -> dict[str, Padding]:
    """How the features are padded whose number of items, or of bytes of text, differs from batch to batch.

    Args:
        pad_ragged: as `fastpipe.jax.iterator` takes it.
        features: of the reader.

    Raises:
        TypeError: if it, or a size, is of another type.
        ValueError: if sizes aren't in ascending order, or a name isn't that of such a feature.
    """
    ragged = [name for name, spec in features.items() if _is_ragged(spec)]
    if isinstance(pad_ragged, Mapping):
        for name in pad_ragged:
            if name not in ragged:
                there = ", ".join(ragged) or "none"
                raise ValueError(f"pad_ragged names {name!r}, which isn't a ragged feature or text. These are: {there}")
        wanted = dict(pad_ragged)
    else:
        wanted = dict.fromkeys(ragged, pad_ragged)
        _checked(pad_ragged)
    return {name: Padding(name, _checked(sizes)) for name, sizes in wanted.items() if sizes is not False}


def _is_ragged(spec: Spec) -> bool:
    return isinstance(spec, RaggedSpec) or (isinstance(spec, DenseSpec) and spec.dtype in ("string", "bytes"))


def _checked(sizes: Any) -> list[int] | None:
    """Sizes as whole numbers; None for powers of two, and for no padding."""
    if isinstance(sizes, bool):
        return None
    what = "pad_ragged must be a bool, sizes such as [1024, 4096], or a dict from features to these"
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, (Sequence, np.ndarray)):
        raise TypeError(f"{what}; got {shown(sizes)}")
    try:
        found = [operator.index(size) for size in sizes]
    except TypeError:
        raise TypeError(f"{what}; got {shown(sizes)}") from None
    if not found or found[0] < 1 or found != sorted(set(found)):
        raise ValueError(f"sizes of pad_ragged must be at least 1 and in ascending order; got {found}")
    return found


def _extended(array: np.ndarray, rows: int | None) -> np.ndarray:
    """The array with zeros after its rows."""
    if rows is None or rows == len(array):
        return array
    out = aligned((rows, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    out[len(array) :] = 0
    return out


def _offsets(offsets: np.ndarray, rows: int) -> np.ndarray:
    """The offsets with empty rows after them."""
    if rows + 1 == len(offsets):
        return offsets
    out = aligned((rows + 1,), offsets.dtype)
    out[: len(offsets)] = offsets
    out[len(offsets) :] = offsets[-1]
    return out
