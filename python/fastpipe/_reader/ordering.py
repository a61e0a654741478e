"""The settings that determine the order of a reader's rows, checked and completed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from dataclasses import replace as replaced
from typing import Any, Literal, Self, TypeAlias, TypedDict

import numpy as np

from fastpipe._arguments import flag, shown, within
from fastpipe._fastpipe import Data, Order, check_settings

Shuffle: TypeAlias = Literal["window", "block", "buffer"]
ShardBy: TypeAlias = Literal["window", "block", "batch"]
Uneven: TypeAlias = Literal["drop", "pad", "allow"]


class OrderOptions(TypedDict, total=False):
    """The options of readers that determine the order of rows.

    Attributes:
        drop_last: Whether to drop the last batch if it has fewer than `batch_size` rows. Defaults to False.
        shuffle: Order of the rows. False reads units and their rows in the order of the source. True or `"window"` puts
            all units of the dataset in a random order, cuts it into windows of `shuffle_buffer` rows, and permutes each
            window uniformly. `"block"` is block sampling: units enter a pool in the order of the source, and each row
            comes from a unit of the pool, drawn in proportion to its remaining rows. `"buffer"` has the distribution of
            `tf.data.Dataset.shuffle(shuffle_buffer)`. Each row is in exactly one batch of an epoch with each of these
            orders. Defaults to False.
        shuffle_buffer: Number of rows in a window (rounded up to whole batches), in a pool (at least) or in a buffer, 1
            to 2^31. The default of None depends on the source and is described by the function that creates the reader.
        seed: Seed of the shuffle, 0 to 2^64 - 1. By default a random seed is drawn, which `reader.seed` returns.
        rank: Index of the shard that this reader yields, 0 to `world_size - 1`. Defaults to 0.
        world_size: Number of shards, 1 to 2^20. Defaults to 1.
        shard_by: How the data is divided among ranks. `"window"` (the default with `shuffle=True` and without
            shuffling): each rank reads whole windows, or ranges of the same length. `"block"` (the default with
            `"block"` and `"buffer"`): each rank reads every `world_size`-th unit, in a separate order. `"batch"`: at
            each step the ranks together read the next `world_size` batches, so each rank opens nearly all units.
        on_uneven: How to handle batches that can't be divided evenly among the ranks. `"drop"` (the default) drops
            them: fewer than the number of ranks or, with `shard_by="block"`, all batches that a rank has in excess of
            the smallest rank. `"pad"` repeats rows, so that all ranks get equally many full batches. It adds an entry
            `"valid"`, a bool array [batch_size] that is False for repeated rows. `"allow"` gives some ranks more
            batches, so a program that synchronizes all ranks at each step will hang. With one rank nothing is dropped.
    """

    drop_last: bool
    shuffle: bool | Shuffle
    shuffle_buffer: int | None
    seed: int | None
    rank: int
    world_size: int
    shard_by: ShardBy | None
    on_uneven: Uneven


LARGEST_BATCH = 2**31 - 1
LARGEST_WORLD = 2**20
_LARGEST_BUFFER = 2**31


def digest(*parts: bytes | memoryview) -> str:
    """Returns 32 hexadecimal digits of the SHA-256 of the parts."""
    # Loading OpenSSL takes milliseconds, and most programs never save a state.
    import hashlib

    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Ordering:
    """All settings that determine the batches of each rank, except the data and the epoch.

    Attributes:
        shuffle: `"sequential"`, `"window"`, `"block"` or `"buffer"`; `"sample"` or (with replacement) `"bootstrap"` for
            samples that are drawn for each epoch; `"mixture"` for the order of a mixture's readers.
        shuffle_buffer: Number of rows in a window, pool, buffer or sample. None selects the default.
        seed: The seed that was passed or drawn.
        seed_given: Whether the user passed the seed.
        batch_size: Rows per batch.
        drop_last: Whether a shorter last batch is dropped.
        rank: Rank of this reader.
        world_size: Number of ranks.
        shard_by: How the data is divided among ranks.
        on_uneven: How to handle batches that can't be divided evenly.
        in_step: Number of ranks that must have the same number of batches, subject to `on_uneven`. None means all. In a
            reader of a worker it is the number of ranks, not of workers.
        skipped: Number of draws to skip before this sample.
        without_steps: Ranges `(start, stop)` of steps of each rank that are left out of every epoch, in ascending
            order. States don't depend on them.
        buffer_given: Whether the user passed `shuffle_buffer`.
    """

    shuffle: str
    shuffle_buffer: int | None
    seed: int
    seed_given: bool
    batch_size: int
    drop_last: bool
    rank: int
    world_size: int
    shard_by: str
    on_uneven: str
    in_step: int | None = None
    skipped: int = 0
    without_steps: tuple[tuple[int, int], ...] = ()
    buffer_given: bool = False

    @classmethod
    def checked(
        cls,
        *,
        batch_size: int,
        drop_last: bool = False,
        shuffle: bool | Shuffle = False,
        shuffle_buffer: int | None = None,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        shard_by: ShardBy | None = None,
        on_uneven: Uneven = "drop",
    ) -> Self:
        """Creates an ordering from the arguments that users pass.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If a value is out of range, or if two arguments exclude each other.
        """
        size = within("batch_size", batch_size, 1, LARGEST_BATCH)
        kind = _kind(shuffle)
        if shuffle_buffer is not None and kind == "sequential":
            raise ValueError("shuffle_buffer has no effect without shuffling: set shuffle=True or remove it")
        buffer = None if shuffle_buffer is None else within("shuffle_buffer", shuffle_buffer, 1, _LARGEST_BUFFER)
        world = within("world_size", world_size, 1, LARGEST_WORLD)
        if seed is None and world > 1 and kind != "sequential":
            raise ValueError("set a seed: every rank must use the same seed, and a random one differs between ranks")
        if on_uneven not in ("drop", "pad", "allow"):
            raise ValueError(f'on_uneven must be "drop", "pad" or "allow"; got {on_uneven!r}')
        if world == 1 and type(rank) is int and rank > 0:
            raise ValueError(
                f"rank must be between 0 and 0, because world_size is 1; got {rank}: pass world_size, the "
                "number of ranks"
            )
        return cls(
            shuffle=kind,
            shuffle_buffer=buffer,
            seed=seed_of(seed),
            seed_given=seed is not None,
            batch_size=size,
            drop_last=flag("drop_last", drop_last),
            rank=within("rank", rank, 0, world - 1),
            world_size=world,
            shard_by=_shard_by(kind, shard_by),
            on_uneven=on_uneven,
            buffer_given=shuffle_buffer is not None,
        )

    def sample(self, rows: int, skipped: int, seed: int | None, *, replace: bool) -> Self:
        """Returns the ordering of samples of `rows` rows, each drawn after the first `skipped` rows."""
        kind = "bootstrap" if replace else "sample"
        sampled = self.with_seed(seed_of(seed))
        return replaced(
            sampled, shuffle=kind, shuffle_buffer=rows, skipped=skipped, shard_by="batch", seed_given=seed is not None
        )

    def with_batch_size(self, batch_size: int) -> Self:
        """Returns a copy with batches of this many rows."""
        return replaced(self, batch_size=batch_size)

    @property
    def is_sample(self) -> bool:
        """Whether each epoch is a new sample of the rows."""
        return self.shuffle in ("sample", "bootstrap")

    @property
    def has_own_rows(self) -> bool:
        """Whether an epoch has other rows than the units of the dataset."""
        return self.is_sample or self.is_mixture

    @property
    def is_mixture(self) -> bool:
        """Whether the rows have the order of a mixture's readers."""
        return self.shuffle == "mixture"

    def of_mixture(self) -> Self:
        """Returns the ordering of a mixture with these batches and ranks. The order follows from the dataset."""
        return replaced(self, shuffle="mixture", shuffle_buffer=1)

    def with_buffer(self, shuffle_buffer: int) -> Self:
        """Returns a copy with a window, pool or buffer of this many rows."""
        return replaced(self, shuffle_buffer=shuffle_buffer)

    def with_seed(self, seed: int) -> Self:
        """Returns a copy with a seed that the user didn't pass."""
        return replaced(self, seed=seed, seed_given=False)

    def shard(self, shards: int, index: int) -> Self:
        """Returns one of `shards` equal shards of this rank's shard.

        Raises:
            ValueError: If there would be too many ranks.
        """
        world = within("world_size * num_shards", self.world_size * shards, 1, LARGEST_WORLD)
        return replaced(self, rank=self.rank * shards + index, world_size=world)

    def worker(self, workers: int, worker: int) -> Self:
        """Returns the shard of one worker of this rank.

        Together the workers read exactly this rank's batches, so their total doesn't depend on the number of workers.
        Workers take batches in turn. Some workers may have one batch more than others, or none, because only their own
        rank waits for them.

        Raises:
            ValueError: If there would be too many ranks.
        """
        world = within("world_size * num_workers", self.world_size * workers, 1, LARGEST_WORLD)
        return replaced(self, rank=worker * self.world_size + self.rank, world_size=world, in_step=self.world_size)

    def of(self, data: Data) -> Order:
        """Returns the order of a dataset's rows."""
        buffer = data.default_buffer(self.batch_size) if self.shuffle_buffer is None else self.shuffle_buffer
        return Order(data, self.with_buffer(buffer).text())

    def stored(self, shuffle_buffer: int) -> dict[str, Any]:
        """Returns the settings that are saved in a state. All ranks share them.

        Settings that have their default are omitted, so that states saved before a setting existed still match.

        Args:
            shuffle_buffer: Number of rows in a window, pool, buffer or sample.
        """
        settings = {field: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_STORED}
        order = {field.name: value for field, value in settings.items() if value != field.default}
        order["shuffle_buffer"] = shuffle_buffer
        return order | ({"skipped": self.skipped} if self.is_sample else {})

    def text(self) -> str:
        """Returns the settings as JSON in the format of `fastpipe_order::Settings` (Rust)."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__ if name not in _GIVEN})

    @classmethod
    def read(cls, text: str, *, seed_given: bool = True) -> Self:
        """Parses settings that `text` wrote.

        Raises:
            ValueError: If the text is invalid. The message names the invalid entry.
        """
        check_settings(text)
        found = json.loads(text)
        found["without_steps"] = tuple(map(tuple, found.get("without_steps", ())))
        return cls(**found, seed_given=seed_given)


_GIVEN = ("seed_given", "buffer_given")
_NOT_STORED = (*_GIVEN, "rank", "world_size", "on_uneven", "in_step", "skipped", "without_steps")


def _kind(shuffle: Any) -> str:
    if isinstance(shuffle, (bool, np.bool_)):
        return "window" if shuffle else "sequential"
    if not (isinstance(shuffle, str) and shuffle in ("window", "block", "buffer")):
        raise ValueError(f'shuffle must be True, False, "window", "block" or "buffer"; got {shown(shuffle)}')
    return shuffle


def _shard_by(kind: str, shard_by: str | None) -> str:
    own = "block" if kind in ("block", "buffer") else "window"
    if shard_by is None:
        return own
    if shard_by not in (own, "batch"):
        what = "no shuffling" if kind == "sequential" else f'shuffle="{kind}"'
        raise ValueError(f'with {what} shard_by must be "{own}" or "batch"; got {shard_by!r}')
    return shard_by


def seed_of(seed: int | None) -> int:
    """Returns the given seed, or draws one.

    Raises:
        TypeError: If the seed isn't an integer.
        ValueError: If the seed is out of range.
    """
    # JSON and the integers of other languages represent 48 bits exactly.
    return int.from_bytes(os.urandom(6)) if seed is None else within("seed", seed, 0, 2**64 - 1)
