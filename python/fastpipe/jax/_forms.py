"""The JAX types of batches: arrays and pytrees of arrays, and checks of whether a sharding can divide them.

Arrays of ragged features are padded to a few sizes, because `jax.jit` compiles once for each shape.
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

# Tree structures of sparse arrays by class and shape. Their number is limited, since shapes may differ from batch to
# batch.
_structures: dict[tuple[Any, tuple[int, ...]], Any] = {}
_MOST_STRUCTURES = 1024


@partial(jax.tree_util.register_dataclass, data_fields=["values", "offsets"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths: row `i` is `values[offsets[i]:offsets[i + 1]]`. A pytree.

    Attributes:
        values: Items of all rows in order, an array `[items, ...]` or another array type. Padding follows with
            `pad_ragged`.
        offsets: Offsets of the rows, int64 `[rows + 1]`. int32 without 64-bit types.
    """

    values: Any
    offsets: jax.Array

    @property
    def lengths(self) -> jax.Array:
        """The number of items in each row, `[rows]`."""
        return jnp.diff(self.offsets)

    @property
    def segment_ids(self) -> jax.Array:
        """The row of each item, `[items]`, in ascending order, for `jax.ops.segment_sum`. Can be used in a jit.

        Padding has the number of rows as its row. With `num_segments` set to the number of rows, `segment_sum` ignores
        padding.
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

    String `i`, in C order of `shape`, is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: Bytes of all strings, uint8 `[bytes]`. UTF-8 unless `binary` is set.
        offsets: Offsets of the strings, int64 `[prod(shape) + 1]`. int32 without 64-bit types.
        shape: Shape of the array of strings, whose first dimension is the rows. Static in a jit.
        binary: False for strings, True for bytes. Static in a jit.
    """

    values: jax.Array
    offsets: jax.Array
    shape: tuple[int, ...]
    binary: bool

    @property
    def lengths(self) -> jax.Array:
        """The number of bytes of each string, with shape `shape`."""
        return jnp.diff(self.offsets).reshape(self.shape)


@partial(jax.tree_util.register_dataclass, data_fields=["values", "valid"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Masked:
    """Rows that may be null. A pytree.

    Attributes:
        values: An array or another array type. Ignore its values where `valid` is False: they are zeros or empty.
        valid: bool, True where a value is present. Its shape is a prefix of the shape of `values`.
    """

    values: Any
    valid: jax.Array


def leaves(node: Any, name: str) -> list[np.ndarray]:
    """Returns the arrays of a reader's array or batch type, in the order in which `pytree` consumes them.

    Args:
        node: An array or a batch type.
        name: Name of the feature, for errors.

    Raises:
        UnsupportedError: If JAX has no array type for it.
    """
    if isinstance(node, np.ndarray):
        return [counted(node)]
    if not isinstance(node, (forms.Sparse, forms.SparseCSR)):
        return [array for part in node for array in leaves(part, name)]
    if not isinstance(node.values, np.ndarray):
        raise UnsupportedError(
            f"feature {name!r}: JAX's sparse arrays can only hold numbers, not {type(node.values).__name__}: leave it"
            ' out with columns=, or replace its nulls with on_null="fill"',
            feature=name,
        )
    if isinstance(node, forms.SparseCSR):
        return [node.values, node.indices, node.offsets]
    return [node.values, node.indices]


def pytree(node: Any, arrays: Iterator[jax.Array]) -> Any:
    """Converts a reader's array or batch type to its JAX counterpart, built from the JAX arrays of its `leaves`."""
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
    raise TypeError(f"readers don't yield {type(node).__name__}")


def _sparse(kind: Any, parts: tuple[jax.Array, ...], dense_shape: np.ndarray) -> Any:
    # Creating a sparse array takes JAX 20 times as long as building another one of the same structure from its parts.
    shape = tuple(dense_shape.tolist())
    structure = _structures.get((kind, shape))
    if structure is not None:
        return structure.unflatten(parts)
    made = kind(parts, shape=shape)
    if len(_structures) < _MOST_STRUCTURES:
        _structures[kind, shape] = jax.tree.structure(made)
    return made


def narrow(array: np.ndarray, name: str) -> np.ndarray:
    """Returns an array of a 64-bit type in 32 bits, aligned so that JAX doesn't copy it again.

    Args:
        array: An array of int64, uint64 or float64.
        name: Name of the feature, for errors.

    Raises:
        ValueRangeError: If a value doesn't fit.
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
            f"feature {name!r}: {unfit.flat[0]} doesn't fit into {dtype}, and without jax_enable_x64 JAX has no"
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
    """Returns the passes of a reader, after checking the types of the reader and the sharding."""
    passes = passes_of(reader)
    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        raise TypeError(
            "sharding must be a jax.sharding.Sharding, such as NamedSharding(mesh, PartitionSpec('data')); got"
            f" {type(sharding).__name__}"
        )
    return passes


def check_feature(name: str, spec: Spec) -> None:
    if not isinstance(spec, SparseSpec):
        return
    if spec.dtype in ("string", "bytes"):
        reason = f"JAX's sparse arrays can only hold numbers, not {spec.dtype}: leave it out with columns="
    elif spec.layout == "csr" and len(spec.shape) > 1:
        reason = f'JAX\'s BCSR supports one dimension besides the rows, not {len(spec.shape)}: use layout="coo"'
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
    if not passes.one_size and (passes.drop_last or passes.on_uneven == "pad"):
        raise ValueError(
            "a sharding requires batches of equal size, and damaged rows are left out: use Skip(fill=True)"
        )
    if not passes.one_size:
        raise ValueError(
            "a sharding requires batches of equal size, but the last may be smaller: read with drop_last=True, or with"
            ' on_uneven="pad" to fill it up'
        )
    if passes.on_uneven == "allow" and jax.process_count() > 1:
        raise ValueError('with on_uneven="allow" some processes would wait for others forever: use "drop" or "pad"')


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
    """Returns the number of shards into which a sharding divides the rows among processes, and this process's index."""
    dimensions = len(sharding.spec) if isinstance(sharding, jax.sharding.NamedSharding) else 1
    # The sizes of the mesh axes always divide the number of devices.
    rows = len(sharding.device_set)
    held: dict[int, set[tuple[int, int]]] = {}
    device: Any
    for device, index in sharding.devices_indices_map((rows,) * max(dimensions, 1)).items():
        start, stop, _ = index[0].indices(rows)
        held.setdefault(device.process_index, set()).add((start, stop))
    own = jax.process_index()
    if own not in held:
        raise UnsupportedError(f"process {own} has no device in the sharding's mesh: add one")
    shares = sorted({tuple(sorted(ranges)) for ranges in held.values()})
    sizes = {sum(stop - start for start, stop in ranges) for ranges in shares}
    if sizes != {rows // len(shares)} or rows % len(shares):
        raise UnsupportedError(
            "unsupported sharding: two processes must hold either the same rows or disjoint rows, and all processes"
            " must hold the same number of rows"
        )
    return len(shares), shares.index(tuple(sorted(held[own])))


PadRagged: TypeAlias = "bool | Sequence[int] | Mapping[str, bool | Sequence[int]]"

# The smallest power of two. Smaller sizes would cause more compilations and save little memory.
_LEAST = 16


class Padding:
    """Sizes to which the arrays of a feature are padded.

    Args:
        name: Name of the feature, for errors.
        sizes: Sizes in ascending order, or None for powers of two.
    """

    def __init__(self, name: str, sizes: Sequence[int] | None) -> None:
        self._name = name
        self._sizes = sizes

    def padded(self, node: Any, rows: int | None = None) -> Any:
        """Returns a reader's array or batch type with padded value arrays. Its offsets don't include the padding.

        Args:
            node: An array or a batch type.
            rows: Number of rows of the result, at least the current number. None keeps the number of rows.

        Raises:
            ValueRangeError: If an array is longer than the largest size.
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
                f" {self._sizes[-1]}. Add a larger size, or use pad_ragged=True for powers of two",
                feature=self._name,
            )
        return self._sizes[place]


def paddings(pad_ragged: Any, features: Features) -> dict[str, Padding]:
    """Returns the padding of each feature whose number of items or bytes differs from batch to batch.

    Args:
        pad_ragged: The argument of `fastpipe.jax.iterator`.
        features: Features of the reader.

    Raises:
        TypeError: If `pad_ragged` or a size has the wrong type.
        ValueError: If sizes aren't in ascending order, or a name isn't that of a ragged feature or text.
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
    """Returns sizes as integers. None stands for powers of two or, if `sizes` is False, for no padding."""
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
    """Returns the array with zeros after its rows."""
    if rows is None or rows == len(array):
        return array
    out = aligned((rows, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    out[len(array) :] = 0
    return out


def _offsets(offsets: np.ndarray, rows: int) -> np.ndarray:
    """Returns the offsets with empty rows after them."""
    if rows + 1 == len(offsets):
        return offsets
    out = aligned((rows + 1,), offsets.dtype)
    out[: len(offsets)] = offsets
    out[len(offsets) :] = offsets[-1]
    return out
