"""Types of the values that Python and the extension module exchange.

The stub of the extension module uses them. This module is below all others, so the stub imports nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fastpipe._fastpipe import RemoteFile, Vocabulary

Value: TypeAlias = "bool | int | float | str | bytes"

# A spec that the user requested.
Lowered: TypeAlias = (
    "tuple[str, tuple[int, ...], str, str, Value | None, Value | None, str, bool, str | None, bool, int | None]"
)

# The spec of a feature as a source describes it.
Described: TypeAlias = "tuple[str, str, list[int | None], str, str, int | None]"

# The dialect of CSV files.
LoweredDialect: TypeAlias = "tuple[int, int | None, int | None, int, bool | list[str], list[bytes], bool, bool]"

# How the text of a feature is converted to indices.
LoweredKeys: TypeAlias = "tuple[Vocabulary | None, str, int, int, bytes, str | None, str]"

# How the numbers of a feature are converted to the indices of their buckets: the edges, and whether NaN has a bucket.
LoweredBuckets: TypeAlias = "tuple[list[int | float], bool]"

LoweredLookup: TypeAlias = "LoweredKeys | LoweredBuckets"

# The features to read: the spec of each feature, and the lookup if its values are read as indices.
LoweredFeatures: TypeAlias = "dict[str, tuple[Lowered, LoweredLookup | None]]"

# The features to read, or names of columns whose specs are inferred, or None for all columns.
Wanted: TypeAlias = "LoweredFeatures | list[str] | None"

# The contents of an in-memory file and the start and end of the range to read, a remote file, or None for a file on
# disk.
Elsewhere: TypeAlias = "tuple[bytes, int, int] | RemoteFile | None"

# An object of a listing: its URL, size in bytes, entity tag, and modification time in nanoseconds since 1970.
Listed: TypeAlias = "tuple[str, int, str | None, int]"

# Paths or names of files, and the directory of their indexes.
LoweredFiles: TypeAlias = "tuple[list[tuple[str, Elsewhere]], str | None]"


class NegativeSampling(NamedTuple):
    """Settings for drawing negatives.

    Attributes:
        negatives: Number of negatives per positive.
        repeats: Whether a positive may get the same negative several times.
        weights: Weights of the items. None if all items have the same probability.
    """

    negatives: int
    repeats: bool = True
    weights: npt.NDArray[np.float64] | None = None


class AvroWriting(NamedTuple):
    """Settings for writing an Avro file.

    Attributes:
        codec: Name of the codec.
        level: Compression level. None selects the codec's default.
        block_bytes: Approximate size of a block in bytes.
        num_threads: Number of threads that compress.
        sync: Sync marker, 16 bytes.
        metadata: Additional entries of the header.
    """

    codec: str
    level: int | None
    block_bytes: int
    num_threads: int
    sync: bytes
    metadata: list[tuple[str, bytes]]


class PageLocks(Protocol):
    """Locks of the pages of batches, so that a device can copy from them."""

    def unlock(self, address: int) -> bool:
        """Removes the lock of the memory at this address, if it has one. Returns whether it is unlocked now."""

    def close(self) -> None:
        """Removes all locks, before the memory is unmapped."""


class ItemConsumerOptions(NamedTuple):
    """Settings for collecting items into batches in shared memory.

    Attributes:
        makers: Number of item workers.
        joiners: Number of batch workers.
        slots: Maximum number of batches in flight.
        joining: 0 if adjacent rows form a batch, 1 if item workers make batches, 2 if batch workers do.
        whole: Whether a single worker makes all items of a batch.
        turns: Whether item workers take turns, as threads that share an interpreter do.
        ahead: Number of batches that are started in advance.
        slack: Bytes of further batches that may be started.
        most: Maximum number of bytes of all batches.
        shared: Whether workers are processes.
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
