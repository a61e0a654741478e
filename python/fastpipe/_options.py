"""The options that readers of all sources share."""

from __future__ import annotations

from typing import Any, Literal, SupportsIndex, TypedDict

from fastpipe._arguments import flag
from fastpipe._data import Data
from fastpipe._ordering import Ordering, ShardBy, Shuffle, Uneven
from fastpipe._running import Running
from fastpipe.reader import Reader, made

__all__ = ["Options", "Settings"]


class Options(TypedDict, total=False):
    """Keyword arguments of every function that makes a reader.

    `read_avro` documents them, in the words of Avro: its blocks are any source's units, and its records are rows.
    """

    drop_last: bool
    shuffle: bool | Shuffle
    shuffle_buffer: SupportsIndex | None
    seed: SupportsIndex | None
    epochs: SupportsIndex | None
    rank: SupportsIndex
    world_size: SupportsIndex
    shard_by: ShardBy | None
    uneven: Uneven
    num_threads: SupportsIndex | Literal["auto"] | None
    prefetch: SupportsIndex | None
    memory_limit: SupportsIndex | str | None
    progress: bool


_ORDERING = ("drop_last", "shuffle", "shuffle_buffer", "seed", "rank", "world_size", "shard_by", "uneven")
_RUNNING: dict[str, Any] = {"num_threads": "auto", "prefetch": None, "memory_limit": None}


class Settings:
    """Options, checked before any data is looked at.

    Args:
        name: of the function that takes them.
        batch_size: rows a batch.
        options: what else the user gave.

    Raises:
        TypeError: for arguments of the wrong type, and for unknown ones.
        ValueError: for values out of range, and for arguments that exclude each other.
    """

    def __init__(self, name: str, batch_size: SupportsIndex, options: Options) -> None:
        given: dict[str, Any] = dict(options)
        for unknown in given.keys() - Options.__annotations__.keys():
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown!r}")
        self.ordering = Ordering.checked(
            batch_size=batch_size, **{key: given[key] for key in _ORDERING if key in given}
        )
        self.running = Running.checked(**{key: given.get(key, default) for key, default in _RUNNING.items()})
        self._progress = flag("progress", given.get("progress", False))
        self._epochs = given.get("epochs", 1)

    def reader(self, data: Data, ordering: Ordering | None = None) -> Reader:
        """The reader of a data set; in another order than the user's, if one is given."""
        chosen = self.ordering if ordering is None else ordering
        return made(data, ordering=chosen, running=self.running, progress=self._progress, epochs=self._epochs)
