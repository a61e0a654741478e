"""Types of what Python and the extension module pass to each other.

The stub of the extension module names them. They are below everything else, so that the stub needs no other module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fastpipe._fastpipe import Vocabulary

Value: TypeAlias = "bool | int | float | str | bytes"

# A spec, as it is asked for.
Lowered: TypeAlias = (
    "tuple[str, tuple[int, ...], str, str, Value | None, Value | None, str, bool, str | None, bool, int | None]"
)

# The spec of a feature, as a source has it.
Described: TypeAlias = "tuple[str, str, list[int | None], str, str, int | None]"

# How CSV files are written.
LoweredDialect: TypeAlias = "tuple[int, int | None, int | None, int, bool | list[str], list[bytes], bool, bool]"

# How the values of a feature become numbers.
LoweredLookup: TypeAlias = "tuple[Vocabulary | None, str, int, int, bytes, str | None, str]"

# The features to read: the spec of each, and the lookup of text that is read as indices.
LoweredFeatures: TypeAlias = "dict[str, tuple[Lowered, LoweredLookup | None]]"

# The features to read, or the columns, whose specs are inferred; None for all columns.
Wanted: TypeAlias = "LoweredFeatures | list[str] | None"

# The bytes of a file that is in memory, and from where to where; None for one that isn't.
InMemory: TypeAlias = "tuple[bytes, int, int] | None"

# Paths or names of files, and the directory that has their indexes.
LoweredFiles: TypeAlias = "tuple[list[tuple[str, InMemory]], str | None]"


class NegativeSampling(NamedTuple):
    """How negatives are drawn.

    Attributes:
        negatives: how many are drawn for each positive.
        repeats: whether the negatives of one positive may be the same.
        weights: of the items; None if all have the same probability.
    """

    negatives: int
    repeats: bool = True
    weights: npt.NDArray[np.float64] | None = None


class AvroWriting(NamedTuple):
    """How an Avro file is written.

    Attributes:
        codec: its name.
        level: of the codec; None for the default.
        block_bytes: bytes of a block, about.
        num_threads: threads that compress.
        sync: the sync marker, 16 bytes.
        metadata: more entries of the header.
    """

    codec: str
    level: int | None
    block_bytes: int
    num_threads: int
    sync: bytes
    metadata: list[tuple[str, bytes]]


class ItemConsumerOptions(NamedTuple):
    """How items become batches in shared memory.

    Attributes:
        makers: item workers.
        joiners: batch workers.
        slots: batches that may be in flight at once.
        joining: 0 if rows side by side are a batch, 1 if item workers make batches, 2 if batch workers do.
        whole: whether one worker makes all items of a batch.
        turns: whether item workers take turns, as threads do that share an interpreter.
        ahead: batches that are begun in advance.
        slack: bytes of batches that may be begun besides.
        most: bytes of all batches.
        shared: whether workers are processes.
    """

    makers: int
    joiners: int
    slots: int
    joining: int
    whole: bool
    turns: bool
    ahead: int
    slack: int
    most: int
    shared: bool
