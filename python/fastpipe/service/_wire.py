"""What servers and clients say to each other, as bytes: tickets, batches, errors. Nothing here is ever unpickled.

A ticket asks for the batches `start` to `stop` of an epoch, in an order; it is JSON behind a checksum, since one that
is changed on its way would bring other batches. The answer is a stream of Arrow record batches of one binary column:
the bytes of batches' slabs, as they are, cut where it suits the transport. The first message of a batch, or of small
ones that are sent together, says in its metadata what they are (`rust/fastpipe-wire`). An error comes in place of a
batch, as JSON in the metadata of an empty message.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fastpipe import errors
from fastpipe._arrow.schema import encoded_features
from fastpipe._reader.dataset import Dataset
from fastpipe._reader.ordering import Ordering, digest, within
from fastpipe._reader.state import LARGEST_EPOCH
from fastpipe.errors import FastpipeError, MissingFileError, ServiceError, StateError, StorageError

VERSION = 3
LARGEST_TICKET = 1 << 20
"""Bytes: the places of an epoch that many ranks have shared."""

_ERROR = b"fpe1"
_LARGEST_NUMBER = 2**63 - 1
# Errors of the data are raised by the client as they were at the server; all others are said to be the server's.
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
    """A request, or an answer to one, that was changed on its way."""


def sealed(request: dict[str, Any]) -> bytes:
    """A request as bytes: its JSON behind a checksum."""
    text = json.dumps(request).encode()
    return _SEAL + zlib.crc32(text).to_bytes(4, "little") + text


def unsealed(data: bytes) -> Any:
    """What a request says. What doesn't begin with the seal, or nearly, is JSON without a checksum.

    Raises:
        DamagedError: if it isn't what was sent, or no JSON: so little may be left of the seal.
    """
    text = data
    if sum(map(operator.eq, data, _SEAL)) >= len(_SEAL) - 1:
        text = data[8:]
        if data[:4] != _SEAL or data[4:8] != zlib.crc32(text).to_bytes(4, "little"):
            raise DamagedError("a ticket, or another request, was changed on its way: its checksum differs")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        said = str(error)[:200]
        raise DamagedError(f"a ticket, or another request, is no JSON, or was changed on its way: {said}") from None


def summed(parts: list[bytes]) -> list[bytes]:
    """An answer to a request that isn't for batches: its parts, and a checksum as the last one."""
    return [*parts, _checksum(parts)]


def intact(parts: list[bytes]) -> list[bytes]:
    """The parts of an answer, without its checksum.

    Raises:
        DamagedError: if they aren't what was sent.
        ValueError: if they have none.
    """
    *rest, checksum = parts or [b""]
    if len(checksum) != 4:
        raise ValueError("its answer has no checksum: this is no server of fastpipe, or one of another version")
    if checksum != _checksum(rest):
        raise DamagedError("an answer was changed on its way: its checksum differs")
    return rest


def _checksum(parts: list[bytes]) -> bytes:
    checksum = 0
    for part in parts:
        # Of their lengths, too: a byte that wanders from one to the next makes a difference.
        checksum = zlib.crc32(part, zlib.crc32(len(part).to_bytes(8, "little"), checksum))
    return checksum.to_bytes(4, "little")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Batches that a client asks for.

    Attributes:
        reader: the name under which the server has it.
        data: what tells the data set, and the specs that it is read with, from others.
        order: of the batches. As JSON it is a text, `Ordering.text`.
        epoch: of the batches.
        progress: from where they are counted; None for the start of the epoch.
        start: the first of them.
        stop: behind the last of them.
        until: behind the last one that the client may go on to ask for, which the server may decode ahead.
        csr: whether sparse columns are laid out as Arrow's are.
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
        """A ticket from bytes.

        Raises:
            DamagedError: if they were changed on their way, or are no JSON.
            ValueError: if they are another ticket than there is.
        """
        if len(data) > LARGEST_TICKET:
            raise ValueError(f"a ticket has {LARGEST_TICKET} bytes at most, this one {len(data)}")
        found = unsealed(data)
        if not isinstance(found, dict) or found.pop("version", None) != VERSION:
            raise ValueError(f"a ticket is of version {VERSION}; let servers and clients have one version of fastpipe")
        if set(found) != set(cls.__slots__):
            raise ValueError(f"a ticket has the entries {', '.join(cls.__slots__)}")
        if not isinstance(found["reader"], str) or not isinstance(found["data"], dict):
            raise ValueError("the reader of a ticket is a name, its data a dict")
        if not isinstance(found["order"], str):
            raise ValueError("the order of a ticket is a text of JSON")
        if not (found["progress"] is None or isinstance(found["progress"], dict)):
            raise ValueError("the progress of a ticket is a dict, or null")
        if not isinstance(found["csr"], bool):
            raise ValueError("csr is true or false")
        try:
            stop = within("stop", found["stop"], 1, _LARGEST_NUMBER)
            within("start", found["start"], 0, stop - 1)
            within("until", found["until"], stop, _LARGEST_NUMBER)
            within("epoch", found["epoch"], 0, LARGEST_EPOCH)
            found["order"] = Ordering.read(found["order"])
        except TypeError as error:
            raise ValueError(str(error)) from None
        return cls(**found)


# What the code of a source of one's own raises: it would do so again, at any server.
_OF_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)


def error_bytes(error: Exception) -> bytes:
    """An error, for the metadata of a message. What it says, and where; never its traceback."""
    name = type(error).__name__
    said: dict[str, Any] = {"error": name if isinstance(error, FastpipeError) else "FastpipeError"}
    said["message"] = str(error) if isinstance(error, FastpipeError) else f"{name}: {error}"
    said["again"] = not isinstance(error, _OF_CODE)
    if isinstance(error, FastpipeError):
        said |= {part: getattr(error, part) for part in _LOCATION}
    return _ERROR + json.dumps(said).encode()


def error_parts(told: bytes) -> tuple[str, str] | None:
    """The name and the message of an error that this process has written with `error_bytes`; None if it is none."""
    if not told.startswith(_ERROR):
        return None
    said = json.loads(told[len(_ERROR) :])
    return said["error"], said["message"]


def as_error(metadata: bytes, server: str) -> FastpipeError | None:
    """The error that is said in a message's metadata; None if it is none.

    Those of a server are `ServiceError`s, and those of a source's own code, which no other server would do without,
    `FastpipeError`s. Errors of the data, and of its files, are those that were raised there.
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


def specs_digest(data: Dataset) -> str:
    """A digest of how a data set is read: it tells servers of one data set apart that would send other values.

    It covers what decides the values of a batch besides the contents of the files and the order: names and sequence of
    the features, their specs, the symbols of codes, vocabularies and hashes, and how the source decodes values. It is
    made of JSON, so it is the same in each process and on each machine.
    """
    told = {
        "features": encoded_features(data.features),
        "symbols": {name: list(symbols) for name, symbols in data.symbols.items()},
        # Whether there are masks depends on the files' schemas, too.
        "columns": data.handle.columns_text(),
        "interpretation": dict(data.interpretation),
    }
    return digest(json.dumps(told, sort_keys=True).encode())


def identity(fingerprint: Mapping[str, Any], specs: str) -> dict[str, Any]:
    """What a request says of the data that it is for: the data set's fingerprint, and the digest of its specs."""
    return {**fingerprint, "specs": specs}
