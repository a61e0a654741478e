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

What makes the arrays is a function of jaxlib's, not a documented one of JAX's, since those take seven times as long. It
is tried out against them first. Should a release of JAX have changed it, they are used, and the logger `"fastpipe"`
warns.

Without `jax_enable_x64` JAX has no 64-bit types. Where `jnp.asarray` would wrap large numbers in silence, here int64
(offsets and indices among them) becomes int32 and uint64 uint32 if every value fits, else `ValueRangeError` is raised.
float64 is rounded to float32; one that is too large for it is a `ValueRangeError`, too. That takes a copy of these
columns: ask for int32 and float32 in the features, or enable 64-bit types, to go without.

`jax.jit` compiles once for each shape. With `drop_last=True` dense features have the same shape in each batch. Ragged
and sparse ones differ in their number of items. `pad_ragged=True` pads the values of ragged features to powers of two,
so that a step is compiled a few times only; `DenseSpec((20,), pad=0)` makes a dense feature of a ragged one, and with
it one shape.
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

from fastpipe._reader.passes import Passes, Position
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

__all__ = ["DatasetIterator", "IteratorState", "Masked", "Ragged", "Strings", "iterator"]

_log = logging.getLogger("fastpipe")


def iterator(
    reader: Reader, *, sharding: jax.sharding.Sharding | None = None, pad_ragged: PadRagged = False
) -> DatasetIterator:
    """One pass of a reader, as JAX arrays.

    In a multi-process program (`jax.process_count() > 1`) each process gets its own share of a reader that wasn't given
    a rank: `reader.shard(process_count, process_index)`; processes among which a sharding replicates rows get the same.
    The logger `"fastpipe"` says so.

    Args:
        reader: any reader. Its next pass is the one that is read; to read another epoch, make another iterator, also
            after one that was left by `break`.
        sharding: how to lay batches out over devices, such as a `jax.sharding.NamedSharding(mesh, P("data"))`; of
            multi-process programs over those of all processes. `batch_size` is then of one process, and the global
            batch is as many times larger as there are shares. None puts batches on JAX's default device, without
            committing them to it.
        pad_ragged: pads arrays that differ in length from batch to batch, so that `jax.jit` compiles a step for a few
            shapes instead of for each batch: the values of ragged features and the bytes of text. True pads to the next
            power of two, at least 16. A list of sizes in ascending order, such as `[1024, 4096]`, pads to the smallest
            that is large enough; a longer array is an error. A dict has either for some features. Padding is zeros
            after the last item, `offsets` are those of the rows, and `Ragged.mask` is False for it. Rows of a nested
            ragged feature are padded with empty ones. It copies these arrays.

    Returns:
        An iterator of batches, which can be checkpointed.

    Raises:
        TypeError: if `reader`, `sharding` or `pad_ragged` is of another type.
        UnsupportedError: if JAX has no array for a feature, or a sharding can't divide it.
        ValueError: if batches may differ in size under a sharding; if processes would not read shares of one order; or
            if `pad_ragged` has sizes that aren't ascending, or names a feature that isn't ragged.

    Example:
        >>> import jax
        >>> import fastpipe, fastpipe.jax
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["clicked_items"], batch_size=1024, drop_last=True)
        >>> @jax.jit
        ... def items_of_rows(items):
        ...     return jax.ops.segment_sum(items.mask, items.segment_ids, num_segments=1024)
        >>> for batch in fastpipe.jax.iterator(reader, pad_ragged=True):
        ...     counts = items_of_rows(batch["clicked_items"])
        >>> counts.shape
        (1024,)
    """
    passes = checked_passes(reader, sharding)
    padded = paddings(pad_ragged, passes.features)
    for name, spec in passes.features.items():
        check_feature(name, spec)
    shares, index, scale = jax.process_count(), jax.process_index(), 1
    if sharding is not None:
        check_sizes(passes)
        if not sharding.is_fully_addressable:
            shares, index = share_of(sharding)
            scale = shares
        for name, spec in passes.features.items():
            check_dense(name, spec)
            check_divisible(name, (passes.batch_size * scale, *spec.shape), sharding)
    own = passes
    if jax.process_count() > 1 and passes.world_size == 1:
        own = passes.share(shares, index)
        _log.info(
            "process %d of %d reads share %d of %d of %r",
            jax.process_index(),
            jax.process_count(),
            index,
            shares,
            passes,
        )
    elif scale > 1 and (passes.world_size, passes.rank) != (shares, index):
        raise ValueError(
            f"the sharding divides rows into {shares} shares, and this process holds share {index}, but the reader is"
            f" rank {passes.rank} of {passes.world_size}: leave rank and world_size out, or give these"
        )
    return DatasetIterator(own, passes, sharding, scale, padded)


class IteratorState(dict[str, Any]):
    """A state as `DatasetIterator.get_state` returns it: a dict fit for JSON, and what Grain asks of one."""

    def decode(self) -> str:
        """The state as JSON: Grain's `CheckpointSave` takes states of other iterators than its own for bytes."""
        return json.dumps(self)


class _Passing:
    """A pass, of which it is known what was left before each batch that has been asked for and isn't returned."""

    def __init__(self, batches: Iterator[dict[str, Any]], position: Position) -> None:
        self._batches = batches
        self._position = position
        self.open: dict[int, dict[str, Any]] = {}
        self.asked = 0

    def draw(self) -> dict[str, Any]:
        """The next batch, which stays open. Where it raises, one that was drawn stays open, too."""
        number, delivered = self.asked, self._position.delivered
        self.open[number] = self._position.progress()
        self.asked = number + 1
        try:
            return next(self._batches)
        except StopIteration:
            del self.open[number]
            raise
        except BaseException as error:
            # Ctrl-C while it waited: none is lost, and it can go on waiting.
            if not isinstance(error, Exception) and self._position.delivered == delivered:
                del self.open[number]
            raise

    @property
    def returned(self) -> int:
        """How many batches aren't open any more."""
        return max(self._position.delivered - len(self.open), 0)

    def before_open(self) -> dict[str, Any] | None:
        """What was left before the first open batch; None if there is none."""
        return min(self.open.copy().items(), default=(0, None))[1]


class DatasetIterator(Iterator[dict[str, Any]]):
    """Yields the batches of one pass as JAX arrays. `iterator` makes one.

    Its threads start with the first batch, and end with the pass, with `close`, or when it is dropped. Several threads
    may draw from it. An error ends it: it is raised again by each further `next`. So does Ctrl-C while a batch becomes
    JAX arrays; while one is awaited it ends nothing. A state that is set makes the iterator usable again.

    It is one pass: a second loop over it goes on where the first one was left, and another `iterator` of the reader
    reads the next epoch. A loop over one that has ended is a `RuntimeError`.

    It has Grain's `get_state` and `set_state`, and Grain's `CheckpointSave` and `CheckpointRestore` take it. States are
    dicts fit for JSON, so in Orbax's `CheckpointManager` they are an item of `orbax.checkpoint.args.JsonSave`. It is
    also what Orbax's newer interface calls a stateful checkpointable (`save` and `load`): there
    `save_checkpointables(path, {"model": params, "data": iterator})` will do.
    """

    def __init__(
        self,
        passes: Passes,
        origin: Passes,
        sharding: jax.sharding.Sharding | None,
        scale: int,
        padded: Mapping[str, Padding],
    ) -> None:
        # A share of `origin`, or that itself.
        self._passes = passes
        self._origin = origin
        # `scale` times larger is the global batch.
        self._put: Put = put if sharding is None else Sharded(sharding, scale)
        # Held while a batch is drawn, so that it is known what is left before each.
        self._drawing = threading.Lock()
        self._lock = threading.Lock()
        self._passing: _Passing | None = None
        self._ended = False
        self._error: BaseException | None = None
        self._narrowed = False
        self._padded = padded
        # With which `origin` was told to begin its next pass.
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
                "the pass that this iterator is of has ended: make another one, fastpipe.jax.iterator(reader), for the"
                " next epoch"
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
            # To go on with the next batch would lose this one in silence.
            if passing is not None and number in passing.open:
                self._fail(error)
            raise
        # It counts as seen from here on. Between these two statements no signal is looked for.
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
        """Lets the next iterator read the next epoch, with many processes as with one, where the origin itself is read.

        Once an epoch: it doesn't undo what the user says of the reader meanwhile.
        """
        if self._origin is self._passes:
            return
        epoch = self._passes.next_epoch
        if epoch != self._following:
            self._following = epoch
            self._origin.set_epoch(epoch)

    def get_state(self) -> IteratorState:
        """How far it has come: that of `Reader.state_dict`. Only batches that `next` has returned count as seen.

        Where several threads draw, the state is behind those batches before which all have been returned.

        Returns:
            A small dict that can be stored as JSON. With the orders and on the conditions that `Reader.state_dict`
            names it is the same in all processes, and can be gone on from with another number of them.
        """
        # Without a lock, so that a signal's handler can save it.
        left = None if self._passing is None else self._passing.before_open()
        if left is None:
            return IteratorState(self._passes.state_dict())
        return IteratorState(self._passes.state_behind(left, ended=False))

    def set_state(self, state: Mapping[str, Any] | bytes) -> None:
        """Goes on where a state was saved, whatever it has done before.

        Args:
            state: as `get_state` returned it; or that as JSON, as Grain's `CheckpointRestore` gives it.

        Raises:
            StateError: if it is of another data set, of other arguments, of a later fastpipe, or damaged. Nothing
                changes then.
        """
        if isinstance(state, bytes):
            state = _parsed(state)
        with self._lock:
            self._passes.load_state_dict(state)
            self._passing = self._error = None
            self._ended = False

    def start_prefetch(self) -> None:
        """Does nothing. Grain's `CheckpointRestore` calls it; threads start with the first batch."""

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
            _log.info("without jax_enable_x64 these become 32-bit, which takes a copy of them: %s", ", ".join(wide))
        placed = iter(self._put(arrays))
        return {name: pytree(node, placed) for name, node in batch.items()}


def _parsed(state: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(state)
        if not isinstance(parsed, dict):
            raise ValueError
    except (RecursionError, ValueError):
        raise StateError("this is no state of a reader, or it is damaged") from None
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
            f"the states of the {len(states)} processes in {directory} differ, so that {jax.process_count()} processes"
            " can't go on from there: restore with as many as saved them"
        )
    return states[0]
