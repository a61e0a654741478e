"""What the order of a reader's rows depends on, checked and completed."""

from __future__ import annotations

import json
import operator
import os
from dataclasses import dataclass, fields
from dataclasses import replace as replaced
from functools import cached_property
from typing import Any, Literal, Self, SupportsIndex, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag, shown
from fastpipe._fastpipe import Data, Order, check_settings

Shuffle: TypeAlias = Literal["window", "block", "buffer"]
ShardBy: TypeAlias = Literal["window", "block", "batch"]
Uneven: TypeAlias = Literal["drop", "pad", "allow"]


class OrderOptions(TypedDict, total=False):
    """The options of readers that decide about the order.

    Attributes:
        drop_last: whether to leave out a last batch of fewer rows.
        shuffle: False: units, and rows within them, in the order of the source. True or `"window"`: all units of the
            data set in a random order, cut into windows of `shuffle_buffer` rows, each of which is a uniform
            permutation. `"block"`: block sampling; units in the order of the source pass through a pool, and each row
            is the next one of a unit that is drawn in proportion to what it has left. `"buffer"`: what
            `tf.data.Dataset.shuffle(shuffle_buffer)` yields, in distribution. Each row is in exactly one batch of an
            epoch, in all of them.
        shuffle_buffer: rows of a window (rounded up to whole batches), a pool (at least) or a buffer; None for the
            default, which depends on the source: the function that makes the reader says how.
        seed: of the shuffling, 0 to 2^64 - 1. One is drawn by default, and shown by `reader.seed`.
        rank: which share of the batches to yield, 0 to `world_size - 1`.
        world_size: number of shares.
        shard_by: what ranks share out. `"window"` (the default with `shuffle=True` and without shuffling): each makes
            windows, or stretches as long, of its own. `"block"` (the default with `"block"` and `"buffer"`): each has
            every `world_size`-th unit, and an order of its own. `"batch"`: at each step all ranks together have the
            next `world_size` batches; each rank then reads nearly all units.
        uneven: what becomes of batches that can't be shared out evenly. `"drop"`: they are left out, fewer than there
            are ranks (with `shard_by="block"`, what ranks have above the one with fewest). `"pad"`: ranks without one
            get one of repeated rows; all batches are filled up to `batch_size` rows, with rows from all over their
            units, and have an entry `"valid"`, a bool array [batch_size] that is False for what was filled in.
            `"allow"`: some ranks have more batches, so whoever waits for all ranks at each step will hang. With one
            rank nothing is dropped.
    """

    drop_last: bool
    shuffle: bool | Shuffle
    shuffle_buffer: SupportsIndex | None
    seed: SupportsIndex | None
    rank: SupportsIndex
    world_size: SupportsIndex
    shard_by: ShardBy | None
    uneven: Uneven


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


class Rows:
    """Numbers of rows, as one value: equal to others with the same digest.

    Args:
        numbers: int64 `[n]`.
    """

    def __init__(self, numbers: npt.NDArray[np.int64]) -> None:
        self.numbers = numbers

    @cached_property
    def digest(self) -> str:
        """Of the numbers, in 32 hexadecimal digits."""
        return digest(self.numbers.data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class Ordering:
    """All that decides which rows stand in which batch of which rank, but for the data and the epoch.

    Attributes:
        shuffle: `"sequential"`, `"window"`, `"block"` or `"buffer"`; `"sample"` or (with replacement) `"bootstrap"`.
        shuffle_buffer: rows of a window, pool, buffer or sample; None for the default.
        seed: as given or drawn.
        seed_given: whether the user chose it.
        batch_size: rows a batch.
        drop_last: whether a last batch of fewer rows is left out.
        rank: of this reader.
        world_size: number of ranks.
        shard_by: what ranks share out.
        uneven: what becomes of the rest.
        in_step: how many ranks have equally many batches, as `uneven` says; None for all. With workers it is the ranks
            of which these are the workers.
        skipped: draws in front of those of a sample.
        rows: of a sample that isn't drawn: their numbers, ascending.
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
    uneven: str
    in_step: int | None = None
    skipped: int = 0
    rows: Rows | None = None

    @classmethod
    def checked(
        cls,
        *,
        batch_size: SupportsIndex,
        drop_last: bool = False,
        shuffle: bool | Shuffle = False,
        shuffle_buffer: SupportsIndex | None = None,
        seed: SupportsIndex | None = None,
        rank: SupportsIndex = 0,
        world_size: SupportsIndex = 1,
        shard_by: ShardBy | None = None,
        uneven: Uneven = "drop",
    ) -> Self:
        """From what users write.

        Raises:
            TypeError: for arguments of the wrong type.
            ValueError: for values out of range, and for arguments that exclude each other.
        """
        size = within("batch_size", batch_size, 1, LARGEST_BATCH)
        kind = _kind(shuffle)
        if shuffle_buffer is not None and kind == "sequential":
            raise ValueError("shuffle_buffer says how far rows are shuffled: give shuffle=True, too, or leave it out")
        buffer = None if shuffle_buffer is None else within("shuffle_buffer", shuffle_buffer, 1, _LARGEST_BUFFER)
        world = within("world_size", world_size, 1, LARGEST_WORLD)
        if seed is None and world > 1 and kind != "sequential":
            raise ValueError(
                "give a seed: all ranks must shuffle alike, and one that is drawn differs from rank to rank"
            )
        if uneven not in ("drop", "pad", "allow"):
            raise ValueError(f'uneven is "drop", "pad" or "allow", not {uneven!r}')
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
            uneven=uneven,
        )

    def sample(self, rows: int, skipped: int, seed: int | None, *, replace: bool) -> Self:
        """A sample of this many rows, drawn behind this many others."""
        kind = "bootstrap" if replace else "sample"
        sampled = self.with_seed(seed_of(seed))
        return replaced(
            sampled, shuffle=kind, shuffle_buffer=rows, skipped=skipped, shard_by="batch", seed_given=seed is not None
        )

    def take(self, rows: npt.NDArray[np.int64]) -> Self:
        """The rows with these numbers, which ascend."""
        numbers = Rows(rows)
        return replaced(self, shuffle="taken", shuffle_buffer=max(len(rows), 1), shard_by="batch", rows=numbers)

    def with_batch_size(self, batch_size: int) -> Self:
        """The same with batches of this many rows."""
        return replaced(self, batch_size=batch_size)

    @property
    def is_sample(self) -> bool:
        """Whether it is of some rows only."""
        return self.shuffle in ("sample", "bootstrap", "taken")

    def with_buffer(self, shuffle_buffer: int) -> Self:
        """The same with a window, pool or buffer of this many rows."""
        return replaced(self, shuffle_buffer=shuffle_buffer)

    def with_seed(self, seed: int) -> Self:
        """The same with another seed that the user didn't choose."""
        return replaced(self, seed=seed, seed_given=False)

    def shard(self, shards: int, index: int) -> Self:
        """One of equal shares of this rank's share.

        Raises:
            ValueError: if there would be too many ranks.
        """
        world = within("world_size * num_shards", self.world_size * shards, 1, LARGEST_WORLD)
        return replaced(self, rank=self.rank * shards + index, world_size=world)

    def worker(self, workers: int, worker: int) -> Self:
        """The share of one worker of this rank's.

        All shares are this rank's batches, so they are as many with any number of workers. Workers take them in turn,
        and some may have one more than others, or none: nobody waits for them but their own rank.

        Raises:
            ValueError: if there would be too many ranks.
        """
        world = within("world_size * num_workers", self.world_size * workers, 1, LARGEST_WORLD)
        return replaced(self, rank=worker * self.world_size + self.rank, world_size=world, in_step=self.world_size)

    def of(self, data: Data) -> Order:
        """The order of a data set."""
        buffer = data.default_buffer(self.batch_size) if self.shuffle_buffer is None else self.shuffle_buffer
        rows = None if self.rows is None else self.rows.numbers
        return Order(data, self.with_buffer(buffer).text(), rows)

    def stored(self, shuffle_buffer: int) -> dict[str, Any]:
        """Returns the settings that a state holds, which are those that all ranks share.

        A setting that has its default is left out, so that states from before it was added still fit.

        Args:
            shuffle_buffer: rows of a window, pool, buffer or sample.
        """
        settings = {field: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_STORED}
        order = {field.name: value for field, value in settings.items() if value != field.default}
        order["shuffle_buffer"] = shuffle_buffer
        if self.rows is not None:
            return order | {"rows": self.rows.digest}
        return order | ({"skipped": self.skipped} if self.is_sample else {})

    def text(self) -> str:
        """The settings of the order as JSON, as Rust's `fastpipe_order::Settings` has them."""
        settings = {name: getattr(self, name) for name in self.__slots__ if name not in ("seed_given", "rows")}
        if self.rows is not None:
            settings["shuffle"] = "bootstrap"
        return json.dumps(settings)

    @classmethod
    def read(cls, text: str, *, seed_given: bool = True) -> Self:
        """An ordering from its settings as `text` writes them.

        Raises:
            ValueError: if they are something else; it says which entry is wrong.
        """
        check_settings(text)
        return cls(**json.loads(text), seed_given=seed_given)


_NOT_STORED = ("seed_given", "rank", "world_size", "uneven", "in_step", "skipped", "rows")


def _kind(shuffle: Any) -> str:
    if isinstance(shuffle, (bool, np.bool_)):
        return "window" if shuffle else "sequential"
    if not (isinstance(shuffle, str) and shuffle in ("window", "block", "buffer")):
        raise ValueError(f'shuffle is True, False, "window", "block" or "buffer", not {shown(shuffle)}')
    return shuffle


def _shard_by(kind: str, shard_by: str | None) -> str:
    own = "block" if kind in ("block", "buffer") else "window"
    if shard_by is None:
        return own
    if shard_by not in (own, "batch"):
        what = "no shuffling" if kind == "sequential" else f'shuffle="{kind}"'
        raise ValueError(f'with {what} shard_by is "{own}" or "batch", not {shard_by!r}')
    return shard_by


def integer(name: str, value: SupportsIndex) -> int:
    """An integer argument as an int.

    Raises:
        TypeError: if it is none; a bool isn't, either.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is an integer, not a bool")
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name} is an integer, not {kind}: {shown(value)}") from None


def seed_of(seed: SupportsIndex | None) -> int:
    """Returns the given seed, or draws one.

    Raises:
        TypeError: if it isn't an integer.
        ValueError: if it is out of range.
    """
    # 48 bits are within what JSON and other languages' integers hold exactly.
    return int.from_bytes(os.urandom(6)) if seed is None else within("seed", seed, 0, 2**64 - 1)


def within(name: str, value: SupportsIndex, least: int, most: int) -> int:
    """An integer argument as an int.

    Raises:
        TypeError: if it is none; a bool isn't, either.
        ValueError: if it is out of range.
    """
    number = integer(name, value)
    if not least <= number <= most:
        raise ValueError(f"{name} is between {least} and {most}, not {number}")
    return number
