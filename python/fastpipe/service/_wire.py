"""The messages of clients and servers as bytes: tickets, batches, errors. They are never unpickled.

A ticket requests the batches from `start` up to `stop` of an epoch, in an order. It is JSON after a checksum, because a
ticket that is damaged in transit could request other batches. The answer is a stream of Arrow record batches with one
binary column. Its values are the bytes of the batches' slabs, in sizes that suit the transport. The first message of
a batch, or of several small batches that are sent together, describes them in its metadata (`rust/fastpipe-wire`).
An error replaces a batch: it is JSON in the metadata of an empty message.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fastpipe import errors
from fastpipe._arguments import within
from fastpipe._arrow.schema import encoded_features
from fastpipe._reader.dataset import Dataset
from fastpipe._reader.ordering import Ordering, digest
from fastpipe._reader.packs import Buckets, Packs
from fastpipe._reader.state import LARGEST_EPOCH
from fastpipe.errors import (
    FastpipeError,
    MissingFileError,
    ServiceError,
    StateError,
    StorageError,
    UnsupportedError,
)

VERSION = 4
LARGEST_TICKET = 1 << 20
"""Bytes. Enough for the progress of an epoch that many ranks have shared."""

_ERROR = b"fpe1"
_LARGEST_NUMBER = 2**63 - 1
# The client raises errors of the data unchanged. Other errors are attributed to the server.
_OF_DATA = (
    "LimitError",
    "MalformedFileError",
    "NullValueError",
    "SchemaError",
    "ShapeError",
    "StateError",
    "UnsupportedError",
    "ValueRangeError",
)
# Other servers may be able to read the same file.
FILE_ERRORS = (MissingFileError, StorageError)
_LOCATION = ("path", "unit", "block", "offset", "record", "feature", "reason")


_SEAL = b"fps1"


class DamagedError(ValueError):
    """A request or an answer was changed in transit."""


def sealed(request: dict[str, Any]) -> bytes:
    """Encodes a request: a checksum, then its JSON."""
    text = json.dumps(request).encode()
    return _SEAL + zlib.crc32(text).to_bytes(4, "little") + text


def unsealed(data: bytes) -> Any:
    """Decodes a request. If it doesn't begin with the seal, apart from one byte, it is JSON without a checksum.

    Raises:
        DamagedError: If the checksum differs, or the request isn't JSON: damage may have destroyed the seal.
    """
    text = data
    if sum(map(operator.eq, data, _SEAL)) >= len(_SEAL) - 1:
        text = data[8:]
        if data[:4] != _SEAL or data[4:8] != zlib.crc32(text).to_bytes(4, "little"):
            raise DamagedError("a request was damaged in transit: its checksum differs")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        said = str(error)[:200]
        raise DamagedError(f"a request isn't JSON, or was damaged in transit: {said}") from None


def summed(parts: list[bytes]) -> list[bytes]:
    """Appends a checksum to the parts of an answer to an action."""
    return [*parts, _checksum(parts)]


def intact(parts: list[bytes]) -> list[bytes]:
    """Returns the parts of an answer without the checksum.

    Raises:
        DamagedError: If the checksum differs.
        ValueError: If the answer has no checksum.
    """
    *rest, checksum = parts or [b""]
    if len(checksum) != 4:
        raise ValueError("its answer has no checksum: it is not a fastpipe server, or has another version")
    if checksum != _checksum(rest):
        raise DamagedError("an answer was damaged in transit: its checksum differs")
    return rest


def _checksum(parts: list[bytes]) -> bytes:
    checksum = 0
    for part in parts:
        # The lengths are included: a byte that moves from one part to the next changes the checksum.
        checksum = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), checksum))
    return checksum.to_bytes(4, "little")


def check_size(ordering: Ordering) -> None:
    """Checks that an order fits into tickets.

    Raises:
        UnsupportedError: If it doesn't, because it leaves out too many ranges of steps.
    """
    if len(ordering.text()) > LARGEST_TICKET // 2:
        raise UnsupportedError(
            f"without(steps=...) leaves out {len(ordering.without_steps)} separate ranges of steps, which don't fit"
            " into the requests that clients send to servers: leave out fewer ranges, or skip the steps in the training"
            " loop"
        )


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request for batches.

    Attributes:
        reader: Name of the reader on the server.
        data: Identity of the dataset and the specs that it is read with.
        order: Order of the batches. In JSON it is the text that `Ordering.text` returns.
        epoch: Epoch of the batches.
        progress: Position from which steps are counted; None for the start of the epoch.
        start: Step of the first batch.
        stop: Step after the last batch.
        until: Step after the last batch that the client may request next. The server may decode up to it in advance.
        csr: Whether sparse features use Arrow's layout.
    """

    reader: str
    data: dict[str, Any]
    order: Ordering
    epoch: int
    progress: dict[str, Any] | None
    start: int
    stop: int
    until: int
    csr: bool

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Decodes and validates a ticket.

        Raises:
            DamagedError: If the ticket was changed in transit, or isn't JSON.
            ValueError: If the ticket is invalid, or comes from another version.
        """
        if len(data) > LARGEST_TICKET:
            raise ValueError(f"a ticket must have at most {LARGEST_TICKET} bytes; got {len(data)}")
        found = unsealed(data)
        if not isinstance(found, dict) or found.pop("version", None) != VERSION:
            raise ValueError(f"a ticket must have version {VERSION}: servers and clients need the same fastpipe")
        if set(found) != set(cls.__slots__):
            raise ValueError(f"a ticket must have the entries {', '.join(cls.__slots__)}")
        if not isinstance(found["reader"], str) or not isinstance(found["data"], dict):
            raise ValueError("the reader of a ticket must be a name, and its data a dict")
        if not isinstance(found["order"], str):
            raise ValueError("the order of a ticket must be JSON text")
        if not (found["progress"] is None or isinstance(found["progress"], dict)):
            raise ValueError("the progress of a ticket must be a dict or null")
        if not isinstance(found["csr"], bool):
            raise ValueError("the csr of a ticket must be true or false")
        try:
            stop = within("stop", found["stop"], 1, _LARGEST_NUMBER)
            within("start", found["start"], 0, stop - 1)
            within("until", found["until"], stop, _LARGEST_NUMBER)
            within("epoch", found["epoch"], 0, LARGEST_EPOCH)
            found["order"] = Ordering.read(found["order"])
        except TypeError as error:
            raise ValueError(str(error)) from None
        return cls(**found)


# Errors that the code of a custom source raises. Another server would raise them as well.
_OF_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)


def error_bytes(error: Exception) -> bytes:
    """Encodes an error for the metadata of a message: its text and location, but never its traceback."""
    name = type(error).__name__
    said: dict[str, Any] = {"error": name if isinstance(error, FastpipeError) else "FastpipeError"}
    said["message"] = str(error) if isinstance(error, FastpipeError) else f"{name}: {error}"
    said["again"] = not isinstance(error, _OF_CODE)
    if isinstance(error, FastpipeError):
        said |= {part: getattr(error, part) for part in _LOCATION}
    return _ERROR + json.dumps(said).encode()


def error_parts(told: bytes) -> tuple[str, str] | None:
    """Returns the name and message of an error that `error_bytes` encoded in this process; None for anything else."""
    if not told.startswith(_ERROR):
        return None
    said = json.loads(told[len(_ERROR) :])
    return said["error"], said["message"]


def as_error(metadata: bytes, server: str) -> FastpipeError | None:
    """Decodes an error from the metadata of a message. Returns None if the metadata contains no error.

    Errors of the data and of its files have the class that they had on the server. An error in the code of a custom
    source, which any server would raise, is raised as `FastpipeError`. All other errors are `ServiceError`s.
    """
    if not metadata.startswith(_ERROR):
        return None
    try:
        said = json.loads(metadata[len(_ERROR) :])
        name, message = str(said["error"]), str(said["message"])
        location = {part: said.get(part) for part in _LOCATION}
    except (ValueError, TypeError, KeyError, RecursionError):
        return ServiceError(f"{server} sent an error that can't be read")
    if name == "StateError":
        return StateError(f"{server}: {message}")
    if name in _OF_DATA or name in (kind.__name__ for kind in FILE_ERRORS):
        found: FastpipeError = getattr(errors, name)(message, **location)
        found.add_note(f"raised by {server}")
        return found
    if said.get("again") is False:
        return FastpipeError(f"{server}: {message}")
    return ServiceError(f"{server}: {message}")


def specs_digest(data: Dataset, groups: Packs | Buckets | None = None) -> str:
    """Returns a digest of how a dataset is read, and of what is made of groups of its rows.

    It differs between servers of a dataset that would send other values. It covers everything that determines the
    values of a batch except the contents of the files and the order: names and sequence of the features, their specs,
    the categories of codes, vocabularies and hashes, and how the source decodes values. The digest is computed from
    JSON, so it is the same in every process and on every machine.
    """
    told: dict[str, Any] = {
        "features": encoded_features(data.features),
        "categories": {name: list(texts) for name, texts in data.categories.items()},
        # The files' schemas also determine whether there are masks.
        "columns": data.handle.columns_text(),
        "interpretation": dict(data.interpretation),
    }
    if groups is not None:
        told["groups"] = groups.to_json()
    return digest(json.dumps(told, sort_keys=True).encode())


def identity(fingerprint: Mapping[str, Any], specs: str) -> dict[str, Any]:
    """Returns the identity of the data that a request is for: the dataset's fingerprint and the digest of its specs."""
    return {**fingerprint, "specs": specs}
