"""What fastpipe raises.

Each class derives from `FastpipeError` and from the builtin that fits it, so `except ValueError` and `except
FileNotFoundError` work as everywhere. The message already says where the fault is; the attributes say it again, for
programs.
"""

from __future__ import annotations

import errno
from typing import Any, TypeVar

__all__ = [
    "ColumnsLeftOutWarning",
    "DeviceError",
    "FastpipeError",
    "InteractionsError",
    "LedgerError",
    "LimitError",
    "MalformedFileError",
    "MissingFileError",
    "NullValueError",
    "OutOfMemoryError",
    "PassClosedError",
    "RowsLeftOutWarning",
    "SchemaError",
    "ServiceError",
    "ShapeError",
    "StaleLeaseError",
    "StateError",
    "StorageError",
    "UnseenItemsError",
    "UnsupportedError",
    "ValueRangeError",
    "WorkerError",
]


class FastpipeError(Exception):
    """Base of all errors of fastpipe.

    Args:
        message: what went wrong and where, as shown to people.
        path: the file.
        unit: what the unit is called by its source, where a file and a number don't say it.
        block: the number of the unit within its file, where those are counted.
        offset: byte offset in the file: of the fault itself where that is known, else of the unit's start.
        record: the number of the record within its unit.
        feature: the feature, or the path of the field in the schema.
        reason: what went wrong, without the location; the message if not given.

    Each argument but the message is an attribute too, and None where it isn't known.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        unit: str | None = None,
        block: int | None = None,
        offset: int | None = None,
        record: int | None = None,
        feature: str | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.unit = unit
        self.block = block
        self.offset = offset
        self.record = record
        self.feature = feature
        self.reason = message if reason is None else reason

    def __str__(self) -> str:
        # OSError would put "[Errno 2]" and the file name around it, which the message names already.
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        # The state is what __init__ has set, and whatever was added since (notes, for example).
        return type(self), self.args, dict(self.__dict__)


_Error = TypeVar("_Error", bound=FastpipeError)


def in_file(kind: type[_Error], path: str, reason: str, *, feature: str | None = None) -> _Error:
    """Makes an error about a file, whose message ends in the file's path."""
    return kind(f"{reason} (file {path})", path=path, feature=feature, reason=reason)


class MalformedFileError(FastpipeError, ValueError):
    """The bytes don't follow the format of their file.

    For example: wrong magic bytes, a truncated file, a number that doesn't end, a wrong checksum, a negative length, or
    bytes left over at the end of a unit.
    """


class LimitError(FastpipeError, ValueError):
    """A documented absolute limit is exceeded, such as the size of a unit or the depth of a schema."""


class SchemaError(FastpipeError, ValueError):
    """The schema doesn't parse, a feature isn't in it, or a spec doesn't fit the type of its field."""


class UnsupportedError(FastpipeError, ValueError):
    """Well-formed, but of a codec, type or storage that fastpipe doesn't read; the message says what to do instead."""


class ShapeError(FastpipeError, ValueError):
    """The length of an array doesn't fit the shape of its spec."""


class ValueRangeError(FastpipeError, ValueError):
    """A value doesn't fit the dtype of its spec, or a sparse index lies outside of the shape."""


class NullValueError(FastpipeError, ValueError):
    """A null in a feature whose spec says `nulls="error"`."""


class OutOfMemoryError(FastpipeError, MemoryError):
    """The system refused an allocation; the message says how many bytes, and for what.

    The reader stays usable: release batches, or read with a smaller `batch_size`, `shuffle_buffer` or `memory_limit`.
    """


class InteractionsError(FastpipeError, ValueError):
    """Interactions that can't be used: missing or negative ids, lengths that differ, too few users or items."""


class UnseenItemsError(InteractionsError):
    """A user has fewer unseen items than negatives are asked for.

    The attribute `user` is the user's id, None where it isn't known.
    """

    def __init__(self, message: str, *, user: Any = None, **location: Any) -> None:
        super().__init__(message, **location)
        self.user = user


class StateError(FastpipeError, ValueError):
    """A saved state isn't one of this reader: the message says what differs."""


class PassClosedError(FastpipeError, RuntimeError):
    """`next` of a pass that was closed before its end; the message says by what.

    A reader has one pass at a time: another `iter(reader)` closes it, and so do `close()`, `load_state_dict()` and the
    end of a `with` block. A pass of another process counts as closed, too.
    """


class DeviceError(FastpipeError, RuntimeError):
    """There is no such device, or nothing that drives it: the message says what is missing."""


class _OSError(FastpipeError, OSError):
    """What the two errors with the operating system's number in `errno` share."""

    def __init__(self, message: str, **location: Any) -> None:
        super().__init__(message, **location)
        self.filename = self.path

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError keeps these outside of __dict__.
        state = {**self.__dict__, "errno": self.errno, "filename": self.filename}
        return type(self), self.args, state


class MissingFileError(_OSError, FileNotFoundError):
    """A file, or everything that a pattern or directory names, isn't there."""

    def __init__(self, message: str, **location: Any) -> None:
        super().__init__(message, **location)
        self.errno = errno.ENOENT


class StorageError(_OSError):
    """The storage failed: no permission, a read error, a file that changed while it was read.

    `errno` is the operating system's number, and None where it isn't known.
    """


class LedgerError(_OSError):
    """The ledger of leases can't be reached, read or written; the message says why.

    A worker raises it when its database has been away for longer than its `patience`.
    """


class ServiceError(_OSError):
    """No server answers, or one answers what it shouldn't; the message names each server and what was wrong with it."""


class StaleLeaseError(FastpipeError, RuntimeError):
    """A commit was refused: the lease has passed to another worker, which does these batches.

    What was learned from them may be kept or dropped, but they count once: for the other one. The worker that raises
    it stays usable, and its next batch is of a lease of its own.

    Args:
        message: as of all errors.
        worker: whose commit was refused.
        epoch: of the batches.
        start: the first of them.
        stop: behind the last of them.
    """

    def __init__(
        self, message: str, *, worker: str = "", epoch: int = 0, start: int = 0, stop: int = 0, **location: Any
    ) -> None:
        super().__init__(message, **location)
        self.worker = worker
        self.epoch = epoch
        self.start = start
        self.stop = stop


class WorkerError(FastpipeError, RuntimeError):
    """A worker of a pool failed, or died too often; the message says which one, and what it says of it.

    Args:
        message: as of all errors.
        worker: its name in the ledger.
        epoch: of the batch that it failed with; None if it was none.
        step: of that batch.
    """

    def __init__(
        self, message: str, *, worker: str = "", epoch: int | None = None, step: int | None = None, **location: Any
    ) -> None:
        super().__init__(message, **location)
        self.worker = worker
        self.epoch = epoch
        self.step = step


class RowsLeftOutWarning(UserWarning):
    """More than a tenth of the rows are in no batch, since batches are left out that are short or uneven.

    A reader warns once, where it is made. `warnings.filterwarnings("ignore", category=fastpipe.RowsLeftOutWarning)`
    silences it, `"error"` makes an error of it.
    """


class ColumnsLeftOutWarning(UserWarning):
    """Columns of the files are left out: they are of types that are not read, or the first file with rows lacks them.

    A reader warns once for each of the two reasons, where it is made, and names the columns with what would read them.
    `warnings.filterwarnings("ignore", category=fastpipe.ColumnsLeftOutWarning)` silences it. For types that
    are not read `unsupported="ignore"` does, too, and `unsupported="error"` makes an error of it.
    """
