"""Batches as JAX arrays.

    import fastpipe.jax

    reader = fastpipe.read_avro("data/*.avro", batch_size=1024, drop_last=True, shuffle=True, seed=7)
    for batch in fastpipe.jax.iterator(reader):
        params, loss = train_step(params, batch)

A batch is a dict from feature name to `jax.Array` or to a pytree of arrays, so it can be passed to `jax.jit` and
`jax.tree.map` directly:

 the reader's array type | type in JAX |
|---|---|
| `numpy.ndarray` | `jax.Array` |
| `fastpipe.Ragged` | `Ragged(values, offsets)` |
| `fastpipe.Strings` | `Strings(values, offsets)`: uint8 and offsets, since JAX has no strings |
| `fastpipe.Masked` | `Masked(values, valid)` |
| `fastpipe.Sparse` | `jax.experimental.sparse.BCOO` |
| `fastpipe.batch.SparseCSR` of one dimension | `jax.experimental.sparse.BCSR` |

On CPU, the arrays share the reader's memory. The memory is reused only after the last array over it is released.
Dispatched computations also keep arrays alive.

The arrays are created by an undocumented function of jaxlib, because JAX's documented functions are seven times slower.
The function is first verified against the documented ones. If a release of JAX has changed it, the documented functions
are used, and the logger `"fastpipe"` warns.

Without `jax_enable_x64`, JAX has no 64-bit types, and `jnp.asarray` silently wraps large numbers. Here int64 (including
offsets and indices) is converted to int32, and uint64 to uint32. A value that doesn't fit raises `ValueRangeError`.
float64 is rounded to float32, and a number that is too large for float32 raises `ValueRangeError` as well. The
conversion copies these features. To avoid the copy, request int32 and float32 features, or enable 64-bit types.

`jax.jit` compiles once for each shape. With `drop_last=True`, dense features have the same shape in each batch, while
ragged and sparse features differ in their number of items. `pad_ragged=True` pads the values of ragged features to
powers of two, so that a step is compiled only a few times. `DenseSpec((20,), pad=0)` reads a ragged field as a dense
feature with a single shape.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, Self

import jax
import numpy as np

from fastpipe._interop.distributed import World
from fastpipe._private_constructor import private_constructor
from fastpipe._reader.passes import Passes, Position, shard_of_this_rank
from fastpipe._reader.reader import Reader
from fastpipe.errors import StateError
from fastpipe.jax._forms import (
    Masked,
    Padding,
    PadRagged,
    Ragged,
    Strings,
    check_dense,
    check_divisible,
    check_feature,
    check_sizes,
    checked_passes,
    leaves,
    narrow,
    paddings,
    pytree,
    share_of,
)
from fastpipe.jax._put import Put, Sharded, put
from fastpipe.specs import Features

__all__ = ["DatasetIterator", "IteratorState", "Masked", "Ragged", "Strings", "iterator"]

_log = logging.getLogger("fastpipe")


def iterator(
    reader: Reader,
    *,
    sharding: jax.sharding.Sharding | None = None,
    pad_ragged: PadRagged = False,
    distributed: bool = True,
) -> DatasetIterator:
    """Returns an iterator over one pass of a reader, with batches as JAX arrays.

    A reader without a rank is divided among the ranks of the program: the processes of JAX
    (`jax.process_count()` and `jax.process_index()`) or, if there is only one, the ranks of the environment variables
    RANK and WORLD_SIZE (set by torchrun). Processes that hold the same rows of a sharding read the same shard. The
    division is logged (logger `fastpipe`, level INFO). A reader that has a rank is not divided again.

    Args:
        reader: Any reader. The iterator reads its next pass. To read another epoch, create another iterator, also after
            leaving one by `break`.
        sharding: Layout of batches over devices, such as `jax.sharding.NamedSharding(mesh, P("data"))`. In a
            multi-process program, it covers the devices of all processes. `batch_size` is then the batch size of one
            process, and the global batch size is `batch_size` times the number of shards. Defaults to None,
            which puts batches on JAX's default device without committing them to it.
        pad_ragged: Padding of arrays that differ in length from batch to batch (the values of ragged features and the
            bytes of text), so that `jax.jit` compiles a step for a few shapes instead of for each batch. True pads to
            the next power of two, at least 16. A list of sizes in ascending order, such as `[1024, 4096]`, pads to the
            smallest sufficient size, and a longer array raises an error. A dict sets the padding of some features.
            Padding consists of zeros after the last item. `offsets` don't include it, and `Ragged.mask` is False for
            it. Rows of a nested ragged feature are padded with empty rows. Padding copies the arrays. Defaults to
            False.
        distributed: Whether to divide the reader among ranks. Set it to False if each rank must read everything, as in
            an evaluation on all ranks. A sharding over several processes requires True. Defaults to True.

    Returns:
        An iterator of batches whose state can be saved.

    Raises:
        TypeError: If `reader`, `sharding` or `pad_ragged` has the wrong type.
        UnsupportedError: If JAX has no array type for a feature, or a sharding can't divide it.
        ValueError: If batches may differ in size under a sharding, processes wouldn't read shards of the same order, or
            `pad_ragged` contains sizes that aren't ascending or the name of a feature that isn't ragged.

    Example:
        >>> import jax
        >>> import fastpipe, fastpipe.jax
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["clicked_items"], batch_size=1024, drop_last=True)
        >>> @jax.jit
        ... def items_of_rows(items):
        ...     return jax.ops.segment_sum(items.mask.astype("int32"), items.segment_ids, num_segments=1024)
        >>> for batch in fastpipe.jax.iterator(reader, pad_ragged=True):
        ...     counts = items_of_rows(batch["clicked_items"])
        >>> counts.shape
        (1024,)
    """
    passes = checked_passes(reader, sharding)
    # Without a sharding and padding, features of a map may be unknown.
    known = passes.known_features is not None or sharding is not None or bool(pad_ragged)
    features = passes.features if known else Features()
    padded = paddings(pad_ragged, features)
    for name, spec in features.items():
        check_feature(name, spec)
    shares, index, scale = jax.process_count(), jax.process_index(), 1
    if sharding is not None:
        check_sizes(passes)
        if not sharding.is_fully_addressable:
            shares, index = share_of(sharding)
            scale = shares
        for name, spec in features.items():
            check_dense(name, spec)
            check_divisible(name, (passes.batch_size * scale, *spec.shape), sharding)
    several = World(index, shares, "jax.process_index()") if jax.process_count() > 1 else None
    own = shard_of_this_rank(passes, distributed=distributed, framework=several)
    if scale > 1 and (own.world_size, own.rank) != (shares, index):
        raise ValueError(
            f"the sharding divides rows into {shares} shards, and this process holds shard {index}, but the reader is"
            f" rank {own.rank} of {own.world_size}: omit rank, world_size and distributed=False, or pass rank={index}"
            f" and world_size={shares}"
        )
    return DatasetIterator._of(own, passes, sharding, scale, padded)


class IteratorState(dict[str, Any]):
    """A state returned by `DatasetIterator.get_state`: a JSON-compatible dict with the method that Grain requires."""

    def decode(self) -> str:
        """Returns the state as JSON.

        Grain's `CheckpointSave` expects states of other iterators to be bytes, and decodes them.
        """
        return json.dumps(self)


class _Passing:
    """A pass that records the progress before each batch that was requested but not returned yet."""

    def __init__(self, batches: Iterator[dict[str, Any]], position: Position) -> None:
        self._batches = batches
        self._position = position
        self.open: dict[int, dict[str, Any]] = {}
        self.asked = 0

    def draw(self) -> dict[str, Any]:
        """Returns the next batch, which stays open. A batch whose request raises an error also stays open."""
        number, delivered = self.asked, self._position.delivered
        self.open[number] = self._position.progress()
        self.asked = number + 1
        try:
            return next(self._batches)
        except StopIteration:
            del self.open[number]
            raise
        except BaseException as error:
            # Ctrl-C interrupted the wait. No batch is lost, and the caller can wait again.
            if not isinstance(error, Exception) and self._position.delivered == delivered:
                del self.open[number]
            raise

    @property
    def returned(self) -> int:
        """Number of batches that were returned and are no longer open."""
        return max(self._position.delivered - len(self.open), 0)

    def before_open(self) -> dict[str, Any] | None:
        """Returns the progress before the first open batch, or None if no batch is open."""
        return min(self.open.copy().items(), default=(0, None))[1]


class DatasetIterator(Iterator[dict[str, Any]]):
    """Yields the batches of one pass as JAX arrays. Created by `iterator`.

    Its threads start with the first batch. They end with the pass, with `close`, or when the iterator is dropped.
    Several threads may draw from it. An error ends the iterator, and each further `next` raises it again. Ctrl-C during
    the conversion to JAX arrays also ends it, but Ctrl-C while waiting for a batch doesn't. Setting a state makes the
    iterator usable again.

    An iterator is a single pass. A second loop over it continues after the first one, and another `iterator` of the
    reader reads the next epoch. A loop over an iterator that has ended raises `RuntimeError`.

    It has Grain's `get_state` and `set_state`, and Grain's `CheckpointSave` and `CheckpointRestore` support it. States
    are dicts that can be stored as JSON. With Orbax's `CheckpointManager`, save them with
    `orbax.checkpoint.args.JsonSave`. The iterator is also a stateful checkpointable of Orbax's newer interface (`save`
    and `load`), so `save_checkpointables(path, {"model": params, "data": iterator})` works.
    """

    @private_constructor("fastpipe.jax.iterator(reader)")
    def _of(
        self,
        passes: Passes,
        origin: Passes,
        sharding: jax.sharding.Sharding | None,
        scale: int,
        padded: Mapping[str, Padding],
    ) -> None:
        # A shard of `origin`, or `origin` itself.
        self._passes = passes
        self._origin = origin
        # The global batch is `scale` times larger.
        self._put: Put = put if sharding is None else Sharded(sharding, scale)
        # Held while a batch is drawn, so that the progress before each batch is known.
        self._drawing = threading.Lock()
        self._lock = threading.Lock()
        self._passing: _Passing | None = None
        self._ended = False
        self._error: BaseException | None = None
        self._narrowed = False
        self._padded = padded
        # The epoch that was set for the next pass of `origin`.
        self._following: int | None = None

    def __repr__(self) -> str:
        passing = self._passing
        returned = 0 if passing is None else passing.returned
        end = ", ended" if self._ended else ", failed" if self._error is not None else ""
        batches = f"{returned:,} {'batch' if returned == 1 else 'batches'}"
        return f"<fastpipe.jax.DatasetIterator of {self._passes!r}: {batches} returned{end}>"

    def __iter__(self) -> Self:
        if self._ended:
            raise RuntimeError(
                "the pass of this iterator has ended: call fastpipe.jax.iterator(reader) to read the next epoch"
            )
        return self

    def __next__(self) -> dict[str, Any]:
        passing, number = None, 0
        try:
            with self._drawing:
                started = self._started()
                passing, number = started, started.asked
                batch = started.draw()
                self._follow()
            arrays = self._convert(batch)
        except StopIteration:
            self._end()
            raise
        except BaseException as error:
            # Continuing with the next batch would silently lose this one.
            if passing is not None and number in passing.open:
                self._fail(error)
            raise
        # The batch counts as seen from here on. Python checks for no signal between these two statements.
        del started.open[number]
        return arrays

    def _started(self) -> _Passing:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._passing is None:
                started = self._passes.start()
                self._passing = _Passing(started.batches, started.position)
            return self._passing

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
        self._passes.close()

    def _end(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended:
            self._follow()

    def _follow(self) -> None:
        """Makes the next iterator read the next epoch if the origin itself isn't read, as with a single process.

        Does so once per epoch, so that it doesn't override changes that the user makes to the reader.
        """
        if self._origin is self._passes:
            return
        epoch = self._passes.next_epoch
        if epoch != self._following:
            self._following = epoch
            self._origin.set_epoch(epoch)

    def get_state(self) -> IteratorState:
        """Returns the state, like `Reader.state_dict`, counting only batches that `next` has returned.

        If several threads draw, the state is after the last batch before which all batches have been returned.

        Returns:
            A small dict that can be stored as JSON. Under the conditions that `Reader.state_dict` describes, the state
            is the same in all processes and can be loaded with another number of processes.
        """
        # No lock is held, so that a signal handler can save the state.
        left = None if self._passing is None else self._passing.before_open()
        if left is None:
            return IteratorState(self._passes.state_dict())
        return IteratorState(self._passes.state_at(left, ended=False))

    def set_state(self, state: Mapping[str, Any] | bytes) -> None:
        """Resumes from a saved state, regardless of what was read before.

        Args:
            state: State, as returned by `get_state`, or its JSON as bytes, as passed by Grain's `CheckpointRestore`.

        Raises:
            StateError: If the state was saved for another dataset, with other arguments or by a later version of
                fastpipe, or is damaged. Nothing changes in that case.
        """
        if isinstance(state, bytes):
            state = _parsed(state)
        with self._lock:
            self._passes.load_state_dict(state)
            self._passing = self._error = None
            self._ended = False

    def start_prefetch(self) -> None:
        """Does nothing. Grain's `CheckpointRestore` calls it, but the threads start with the first batch."""

    async def save(self, directory: Any) -> Coroutine[Any, Any, None]:
        """Saves the current state for Orbax in a file `process_<index>-of-<count>.json`.

        Args:
            directory: A path with a method `await_creation()` that waits until the directory is created.

        Returns:
            A coroutine that writes the file. Orbax awaits it in the background.
        """
        return _write(directory, json.dumps(self.get_state()))

    async def load(self, directory: Any) -> Coroutine[Any, Any, None]:
        """Loads a state that `save` saved.

        If the number of processes has changed, all processes load the same state, provided that all saved states are
        equal.

        Args:
            directory: Directory that contains the state.

        Returns:
            A coroutine that reads the file and sets the state. It raises `StateError` if `set_state` does, if the file
            doesn't exist, or if the states of another number of processes differ.
        """
        return self._load(directory)

    async def _load(self, directory: Any) -> None:
        self.set_state(await asyncio.to_thread(_read, directory))

    def close(self) -> None:
        """Ends the pass and waits for its threads. Batches that were yielded stay valid."""
        self._passes.close()

    def _convert(self, batch: dict[str, Any]) -> dict[str, Any]:
        narrows = jax.dtypes.canonicalize_dtype(np.int64).itemsize < 8
        arrays: list[np.ndarray] = []
        wide = []
        if self._padded:
            batch = {name: self._padded[name].padded(x) if name in self._padded else x for name, x in batch.items()}
        for name, node in batch.items():
            found = leaves(node, name)
            if narrows and any(array.itemsize == 8 for array in found):
                wide.append(name)
                found = [narrow(array, name) if array.itemsize == 8 else array for array in found]
            arrays += found
        if wide and not self._narrowed:
            self._narrowed = True
            _log.info("without jax_enable_x64, these features are copied to 32-bit arrays: %s", ", ".join(wide))
        placed = iter(self._put(arrays))
        return {name: pytree(node, placed) for name, node in batch.items()}


def _parsed(state: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(state)
        if not isinstance(parsed, dict):
            raise ValueError
    except (RecursionError, ValueError):
        raise StateError("this is not the state of a reader, or it is damaged") from None
    return parsed


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
            f"the states of the {len(states)} processes in {directory} differ, so {jax.process_count()} processes"
            " cannot resume from them: restore with the number of processes that saved them"
        )
    return states[0]
