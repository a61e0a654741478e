"""Exceptions and warnings of fastpipe.

Each exception derives from `FastpipeError` and from the matching builtin class, so `except ValueError` and
`except FileNotFoundError` work. The message says where the problem is. Attributes contain the same information for
programs.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = [
    "ColumnsLeftOutWarning",
    "DamageError",
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
    """Base class of all errors of fastpipe.

    Args:
        message: What went wrong and where, for people.
        path: Path of the file.
        unit: The source's name for the unit, if a path and an index don't identify it.
        block: Index of the unit within its file, if units have one.
        offset: Byte offset in the file: of the problem itself if that is known, else of the unit's start.
        record: Index of the record within its unit.
        feature: Name of the feature, or path of the field in the schema.
        reason: What went wrong, without the location. Defaults to the message.

    Each argument except the message is also an attribute. An attribute whose value isn't known is set to None.
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
        # OSError would add "[Errno 2]" and the file name, which the message already contains.
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        # The state contains everything that __init__ has set or that was added later, such as notes.
        return type(self), self.args, dict(self.__dict__)


_Error = TypeVar("_Error", bound=FastpipeError)


def in_file(kind: type[_Error], path: str, reason: str, *, feature: str | None = None) -> _Error:
    """Creates an error about a file. The message ends with the file's path."""
    return kind(f"{reason} (file {path})", path=path, feature=feature, reason=reason)


class MalformedFileError(FastpipeError, ValueError):
    """The contents of a file don't follow its format.

    Examples are wrong magic bytes, a truncated file, a number without an end, a wrong checksum, a negative length, and
    extra bytes at the end of a unit.
    """


class DamageError(MalformedFileError):
    """More is damaged than `on_error=fastpipe.Skip(...)` allows.

    Args:
        message: What is lost, for people.
        losses: The `fastpipe.typing.Loss` of each damaged unit. Also an attribute.
        **known: Arguments of `FastpipeError`.
    """

    def __init__(self, message: str, *, losses: Sequence[Any] = (), **known: Any) -> None:
        super().__init__(message, **known)
        self.losses = list(losses)


class LimitError(FastpipeError, ValueError):
    """A documented limit is exceeded, such as the size of a unit or the depth of a schema."""


class SchemaError(FastpipeError, ValueError):
    """The schema is invalid, a feature isn't in it, or a spec doesn't fit the type of its field."""


class UnsupportedError(FastpipeError, ValueError):
    """The data has a codec, type or storage that fastpipe doesn't support. The message suggests an alternative."""


class ShapeError(FastpipeError, ValueError):
    """The length of an array doesn't match the shape of its spec."""


class ValueRangeError(FastpipeError, ValueError):
    """A value doesn't fit the dtype of its spec, or a sparse index is outside of the shape."""


class NullValueError(FastpipeError, ValueError):
    """A feature has a null, and its spec has `on_null="error"`."""


class OutOfMemoryError(FastpipeError, MemoryError):
    """The system refused an allocation. The message contains its size and purpose.

    The reader remains usable. Release batches, or use a smaller `batch_size`, `shuffle_buffer` or `memory_limit`.
    """


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Raises `OutOfMemoryError` in place of the errors of NumPy and Python's threads for lack of memory.

    Args:
        what: What can't be done, such as "fill devices".
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"cannot {what}: {error}; reduce rows or memory") from error
    except RuntimeError as error:
        # Python has no specific exception for this.
        if "can't start new thread" not in str(error):
            raise
        raise OutOfMemoryError(
            f"cannot {what}: the system has no memory for another thread, or reached its limit of threads"
        ) from error


class InteractionsError(FastpipeError, ValueError):
    """Interactions are invalid: missing or negative ids, arrays of different lengths, or too few users or items."""


class UnseenItemsError(InteractionsError):
    """A user has fewer unseen items than the requested number of negatives.

    The attribute `user` is the user's id, or None if it isn't known.
    """

    def __init__(self, message: str, *, user: Any = None, **location: Any) -> None:
        super().__init__(message, **location)
        self.user = user


class StateError(FastpipeError, ValueError):
    """A saved state doesn't belong to this reader. The message says what differs."""


class PassClosedError(FastpipeError, RuntimeError):
    """`next` was called on a pass that was closed before its end. The message says what closed it.

    A reader has one pass at a time. Another `iter(reader)`, `close()`, `load_state_dict()` or the end of a `with` block
    closes it. A pass that was started in another process also counts as closed.
    """


class DeviceError(FastpipeError, RuntimeError):
    """A device or its driver is missing. The message says what is missing."""


class _OSError(FastpipeError, OSError):
    """Base class of errors that have an operating system error number in `errno`."""

    def __init__(self, message: str, **location: Any) -> None:
        super().__init__(message, **location)
        self.filename = self.path

    def __reduce__(self) -> tuple[Any, ...]:
        # OSError stores these attributes outside of __dict__.
        state = {**self.__dict__, "errno": self.errno, "filename": self.filename}
        return type(self), self.args, state


class MissingFileError(_OSError, FileNotFoundError):
    """A file doesn't exist, or a pattern or directory matches no files."""

    def __init__(self, message: str, **location: Any) -> None:
        super().__init__(message, **location)
        self.errno = errno.ENOENT


class StorageError(_OSError):
    """The storage failed: permission was denied, a read failed, or a file changed while it was read.

    `errno` is the operating system's error number, or None if it isn't known.
    """


class LedgerError(_OSError):
    """The ledger of leases can't be reached, read or written. The message says why.

    A worker raises it if its database has been unreachable for longer than its `patience`.
    """


class ServiceError(_OSError):
    """No server answers, or a server's answer is invalid. The message describes the problem of each server."""


class StaleLeaseError(FastpipeError, RuntimeError):
    """A commit was refused because the lease has passed to another worker, which processes these batches.

    You may keep or discard what was learned from these batches, but they count only once, for the other worker. The
    worker that raises this error remains usable. Its next batch belongs to a new lease.

    Args:
        message: What went wrong.
        worker_name: Name of the worker whose commit was refused.
        epoch: Epoch of the batches.
        start: Index of the first batch.
        stop: Index after the last batch.
    """

    def __init__(
        self, message: str, *, worker_name: str = "", epoch: int = 0, start: int = 0, stop: int = 0, **location: Any
    ) -> None:
        super().__init__(message, **location)
        self.worker_name = worker_name
        self.epoch = epoch
        self.start = start
        self.stop = stop


class WorkerError(FastpipeError, RuntimeError):
    """A worker of a pool failed or exited too often. The message names it and contains its error.

    Args:
        message: What went wrong.
        worker_name: Name of the worker in the ledger, or of the process.
        epoch: Epoch of the batch that it failed on. None if it wasn't processing a batch.
        step: Index of that batch.
    """

    def __init__(
        self, message: str, *, worker_name: str = "", epoch: int | None = None, step: int | None = None, **location: Any
    ) -> None:
        super().__init__(message, **location)
        self.worker_name = worker_name
        self.epoch = epoch
        self.step = step


class RowsLeftOutWarning(UserWarning):
    """Many rows are left out.

    A reader warns once, when it is created: if more than a tenth of the rows are in no batch, because short or uneven
    batches are dropped, or because `on_ragged="skip"` or `on_full="skip"` leaves them out. `Reader.filter` warns if no
    row passes. `Interactions` warns if `min_per_user` and `min_per_item` leave out more than half of the positives. The
    logger `fastpipe` has an entry of level INFO for fewer rows, too.
    `warnings.filterwarnings("ignore", category=fastpipe.errors.RowsLeftOutWarning)` silences the warning; `"error"`
    turns it into an error.
    """


class ColumnsLeftOutWarning(UserWarning):
    """Columns are left out because their types are not supported, or because the first file lacks them.

    A reader warns once for each of the two reasons, when it is created. The message names the columns and says how to
    read them. `warnings.filterwarnings("ignore", category=fastpipe.errors.ColumnsLeftOutWarning)` silences the
    warning. For unsupported types, `on_unsupported="ignore"` also silences it, and `on_unsupported="error"` turns it
    into an error.
    """
