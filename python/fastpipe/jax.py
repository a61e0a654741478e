"""Batches as JAX arrays.

    import fastpipe.jax

    reader = fastpipe.read_avro("data/*.avro", batch_size=1024, drop_last=True, shuffle=True, seed=7)
    for batch in fastpipe.jax.iterator(reader):
        params, loss = train_step(params, batch)

A batch is a dict from feature name to `jax.Array` or to a pytree of them, so it passes through `jax.jit` and
`jax.tree.map` as it is:

| the reader's form | becomes |
|---|---|
| `numpy.ndarray` | `jax.Array` |
| `fastpipe.Ragged` | `Ragged(values, offsets)` |
| `fastpipe.Strings` | `Strings(values, offsets)`: uint8 and offsets, since JAX has no strings |
| `fastpipe.Masked` | `Masked(values, valid)` |
| `fastpipe.Sparse` | `jax.experimental.sparse.BCOO` |
| `fastpipe.SparseCSR` of one dimension | `jax.experimental.sparse.BCSR` |

On CPU the arrays share the reader's memory. It isn't used again before the last array over it has died, whatever keeps
that alive: computations that have been dispatched do, too.

Without `jax_enable_x64` JAX has no 64-bit types. Where `jnp.asarray` would wrap large numbers in silence, here int64
(offsets and indices among them) becomes int32 and uint64 uint32 if every value fits, else `ValueRangeError` is raised.
float64 is rounded to float32; one that is too large for it is a `ValueRangeError`, too. That takes a copy of these
columns: ask for int32 and float32 in the features, or enable 64-bit types, to go without.

`jax.jit` compiles anew for each shape. With `drop_last=True` dense features have the same shape in each batch. Ragged
and sparse ones differ in their number of items, so a compiled step had better take `DenseSpec((20,), pad=0)`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR

from fastpipe import batch as forms
from fastpipe._memory import aligned
from fastpipe.errors import StateError, UnsupportedError, ValueRangeError
from fastpipe.reader import Reader
from fastpipe.specs import DenseSpec, SparseSpec, Spec

__all__ = ["DatasetIterator", "Masked", "Ragged", "Strings", "iterator"]

_log = logging.getLogger("fastpipe")

# Of sparse arrays, by class and shape. Those whose shape differs from batch to batch mustn't fill the memory.
_structures: dict[tuple[Any, tuple[int, ...]], Any] = {}
_MOST_STRUCTURES = 1024


@partial(jax.tree_util.register_dataclass, data_fields=["values", "offsets"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of differing length: row `i` is `values[offsets[i]:offsets[i + 1]]`. A pytree.

    Attributes:
        values: the items of all rows, one after the other: an array `[items, ...]`, or another form.
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
        """The row of each item, `[items]`, in rising order: what `jax.ops.segment_sum` takes. Can be used in a jit."""
        rows = jnp.arange(_rows(self), dtype=self.offsets.dtype)
        return jnp.repeat(rows, self.lengths, total_repeat_length=_rows(self.values))


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


def iterator(reader: Reader, *, sharding: jax.sharding.Sharding | None = None) -> DatasetIterator:
    """One pass of a reader, as JAX arrays.

    In a multi-process program (`jax.process_count() > 1`) each process gets its own share of a reader that wasn't given
    a rank: `reader.shard(process_count, process_index)`; processes among which a sharding replicates rows get the same.
    The logger `"fastpipe"` says so.

    Args:
        reader: any reader. Its next pass is the one that is read; to read another epoch, make another iterator.
        sharding: how to lay batches out over devices, such as a `jax.sharding.NamedSharding(mesh, P("data"))`; of
            multi-process programs over those of all processes. `batch_size` is then of one process, and the global
            batch is as many times larger as there are shares. None puts batches on JAX's default device, without
            committing them to it.

    Returns:
        An iterator of batches, which can be checkpointed.

    Raises:
        UnsupportedError: if JAX has no array for a feature, or a sharding can't divide it.
        ValueError: if batches may differ in size under a sharding; or if processes would not read shares of one order.
    """
    for name, spec in reader.features.items():
        _check_feature(name, spec)
    shares, index, scale = jax.process_count(), jax.process_index(), 1
    if sharding is not None:
        _check_sizes(reader)
        if not sharding.is_fully_addressable:
            shares, index = _share(sharding)
            scale = shares
        for name, spec in reader.features.items():
            _check_dense(name, spec)
            _check_divisible(name, (reader.batch_size * scale, *spec.shape), sharding)
    own = reader
    if jax.process_count() > 1 and reader.world_size == 1:
        own = reader._share(shares, index)
        _log.info(
            "process %d of %d reads share %d of %d of %r",
            jax.process_index(),
            jax.process_count(),
            index,
            shares,
            reader,
        )
    elif scale > 1 and (reader.world_size, reader.rank) != (shares, index):
        raise ValueError(
            f"the sharding divides rows into {shares} shares, and this process holds share {index}, but the reader is"
            f" rank {reader.rank} of {reader.world_size}: leave rank and world_size out, or give these"
        )
    return DatasetIterator(own, reader, sharding, scale)


class DatasetIterator(Iterator[dict[str, Any]]):
    """Yields the batches of one pass as JAX arrays. `iterator` makes one.

    Its threads start with the first batch, and end with the pass, with `close`, or when it is dropped. Several threads
    may draw from it. An error ends it: it is raised again by each further `next`.

    It has Grain's `get_state` and `set_state`. States are dicts fit for JSON, so in Orbax's `CheckpointManager` they
    are an item of `orbax.checkpoint.args.JsonSave`. It is also what Orbax's newer interface calls a stateful
    checkpointable (`save` and `load`): there `save_checkpointables(path, {"model": params, "data": iterator})` will do.
    """

    def __init__(self, reader: Reader, origin: Reader, sharding: jax.sharding.Sharding | None, scale: int) -> None:
        # A share of `origin`, or that itself.
        self._reader = reader
        self._origin = origin
        self._sharding = sharding
        # How many times larger the global batch is.
        self._scale = scale
        self._lock = threading.Lock()
        self._batches: Iterator[dict[str, Any]] | None = None
        self._ended = False
        self._error: BaseException | None = None
        self._narrowed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._batches is None:
                self._batches = iter(self._reader)
            batches = self._batches
        try:
            batch = next(batches)
        except StopIteration:
            self._end()
            raise
        try:
            return self._convert(batch)
        except BaseException as error:
            # This batch counts as seen. To go on with the next one would lose it in silence.
            with self._lock:
                self._error = error
            self._reader.close()
            raise

    def _end(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended and self._origin is not self._reader:
            # As if it had been read itself: the next iterator reads the next epoch, with one process and with many.
            self._origin.set_epoch(self._reader.epoch)

    def get_state(self) -> dict[str, Any]:
        """How far it has come: that of `Reader.state_dict`. Only batches that `next` has returned count as seen.

        Returns:
            A small dict that can be stored as JSON. With the orders and on the conditions that `Reader.state_dict`
            names it is the same in all processes, and can be gone on from with another number of them.
        """
        return self._reader.state_dict()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was saved, whatever it has done before.

        Args:
            state: as `get_state` returned it.

        Raises:
            StateError: if it is of another data set, of other arguments, of a later fastpipe, or damaged. Nothing
                changes then.
        """
        with self._lock:
            self._reader.load_state_dict(state)
            self._batches = self._error = None
            self._ended = False

    async def save(self, directory: Any) -> Coroutine[Any, Any, None]:
        """Saves the state for Orbax: `get_state()` of now, in a file `process_<index>-of-<count>.json`.

        Args:
            directory: a path whose creation can be waited for with `await_creation()`.

        Returns:
            A coroutine that writes the file; Orbax awaits it in the background.
        """
        return _write(directory, json.dumps(self.get_state()))

    async def load(self, directory: Any) -> Coroutine[Any, Any, None]:
        """Loads the state that `save` saved.

        If the number of processes has changed, one state serves all, if the states of all were the same.

        Args:
            directory: where it was saved.

        Returns:
            A coroutine that reads the file and sets the state. It raises `StateError` as `set_state` does, and if there
            is no file, or if the states of another number of processes differ.
        """
        return self._load(directory)

    async def _load(self, directory: Any) -> None:
        self.set_state(await asyncio.to_thread(_read, directory))

    def close(self) -> None:
        """Ends the pass and waits for its threads. Batches that were yielded stay as they are."""
        self._reader.close()

    def _convert(self, batch: dict[str, Any]) -> dict[str, Any]:
        leaves = {name: list(_leaves(node, name)) for name, node in batch.items()}
        if jax.dtypes.canonicalize_dtype(np.int64).itemsize < 8:
            wide = [name for name, arrays in leaves.items() if any(array.itemsize == 8 for array in arrays)]
            if wide and not self._narrowed:
                self._narrowed = True
                _log.info("without jax_enable_x64 these become 32-bit, which takes a copy of them: %s", ", ".join(wide))
            for name in wide:
                leaves[name] = [_narrow(array, name) if array.itemsize == 8 else array for array in leaves[name]]
        arrays = iter(self._put([array for arrays in leaves.values() for array in arrays]))
        return {name: _form(node, arrays) for name, node in batch.items()}

    def _put(self, arrays: list[np.ndarray]) -> list[jax.Array]:
        if self._sharding is None:
            # On CPU it shares aligned memory, as from_dlpack does. That takes twice the time for each array, and would
            # bind the arrays to their device.
            placed: list[jax.Array] = jax.device_put(arrays)
            return placed
        return [
            jax.make_array_from_process_local_data(
                self._sharding, array, (array.shape[0] * self._scale, *array.shape[1:])
            )
            for array in arrays
        ]


async def _write(directory: Any, state: str) -> None:
    path = await directory.await_creation()
    file = path / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
    await asyncio.to_thread(file.write_text, state)


def _read(directory: Any) -> dict[str, Any]:
    own = directory / f"process_{jax.process_index()}-of-{jax.process_count()}.json"
    files = [own] if own.exists() else sorted(directory.glob("process_*-of-*.json"))
    if not files:
        raise StateError(f"{directory} has no state of an iterator (process_<index>-of-<count>.json)")
    states: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    if any(state != states[0] for state in states):
        raise StateError(
            f"the states of the {len(states)} processes in {directory} differ, so that {jax.process_count()} processes"
            " can't go on from there: restore with as many as saved them"
        )
    return states[0]


def _leaves(node: Any, name: str) -> Iterator[np.ndarray]:
    """The arrays of a form, in the order in which `_form` takes them."""
    if isinstance(node, np.ndarray):
        yield node
    elif isinstance(node, (forms.Sparse, forms.SparseCSR)):
        if not isinstance(node.values, np.ndarray):
            raise UnsupportedError(
                f"feature {name!r}: JAX's sparse arrays hold numbers, not {type(node.values).__name__}: leave it out"
                ' with columns=, or give its nulls a value with nulls="fill"',
                feature=name,
            )
        yield from (node.values, node.indices)
        if isinstance(node, forms.SparseCSR):
            yield node.offsets
    else:
        for part in node:
            yield from _leaves(part, name)


def _form(node: Any, arrays: Iterator[jax.Array]) -> Any:
    match node:
        case forms.Strings():
            return Strings(next(arrays), next(arrays), shape=node.shape, binary=node.binary)
        case forms.Ragged():
            return Ragged(_form(node.values, arrays), next(arrays))
        case forms.Masked():
            return Masked(_form(node.values, arrays), next(arrays))
        case forms.Sparse():
            return _sparse(BCOO, (next(arrays), next(arrays)), node.dense_shape)
        case forms.SparseCSR():
            return _sparse(BCSR, (next(arrays), next(arrays), next(arrays)), node.dense_shape)
    return next(arrays)


def _sparse(kind: Any, parts: tuple[jax.Array, ...], dense_shape: np.ndarray) -> Any:
    # To make one takes JAX 20 times as long as to make another one of the same shape out of its parts.
    shape = tuple(dense_shape.tolist())
    structure = _structures.get((kind, shape))
    if structure is not None:
        return jax.tree.unflatten(structure, parts)
    made = kind(parts, shape=shape)
    if len(_structures) < _MOST_STRUCTURES:
        _structures[kind, shape] = jax.tree.structure(made)
    return made


def _narrow(array: np.ndarray, name: str) -> np.ndarray:
    """The array in 32 bits, aligned so that JAX takes it without another copy.

    Raises:
        ValueRangeError: if a value doesn't fit.
    """
    dtype = np.dtype(f"{array.dtype.kind}4")
    narrow = aligned(array.shape, dtype)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            np.copyto(narrow, array, casting="same_kind")
        infinite = np.isinf(narrow)
        unfit = array[infinite & np.isfinite(array)] if infinite.any() else array[:0]
    else:
        limits = np.iinfo(dtype)
        fits = array.size == 0 or (array.min() >= limits.min and array.max() <= limits.max)
        unfit = array[:0] if fits else array[(array < limits.min) | (array > limits.max)]
        np.copyto(narrow, array, casting="same_kind")
    if unfit.size:
        raise ValueRangeError(
            f"feature {name!r}: {unfit.flat[0]} doesn't fit {dtype}, and without jax_enable_x64 JAX has no"
            f" {array.dtype}: set jax.config.update('jax_enable_x64', True), or leave the feature out with columns=",
            feature=name,
        )
    return narrow


def _check_feature(name: str, spec: Spec) -> None:
    if not isinstance(spec, SparseSpec):
        return
    if spec.dtype in ("string", "bytes"):
        reason = f"JAX's sparse arrays hold numbers, not {spec.dtype}: leave it out with columns="
    elif spec.layout == "csr" and len(spec.shape) > 1:
        reason = f'JAX\'s BCSR has one dimension besides the rows, not {len(spec.shape)}: use layout="coo"'
    else:
        return
    raise UnsupportedError(f"feature {name!r}: {reason}", feature=name, reason=reason)


def _check_dense(name: str, spec: Spec) -> None:
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


def _check_sizes(reader: Reader) -> None:
    order = reader._ordering
    if not order.drop_last and order.uneven != "pad":
        raise ValueError(
            "a sharding needs batches of one size, and the last one may be smaller: read with drop_last=True, or with"
            ' uneven="pad" to fill it up'
        )
    if order.uneven == "allow" and jax.process_count() > 1:
        raise ValueError('with uneven="allow" some processes would wait for others for ever: use "drop" or "pad"')


def _check_divisible(name: str, shape: tuple[Any, ...], sharding: jax.sharding.Sharding) -> None:
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


def _share(sharding: jax.sharding.Sharding) -> tuple[int, int]:
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
