"""A dataset whose batches are prepared by servers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fastpipe import _locations as locations
from fastpipe._arguments import within
from fastpipe._arrow.schema import decoded_features
from fastpipe._fastpipe import BatchFeed, Data, Order, Pass, RemoteDataset
from fastpipe._locations import Location
from fastpipe._reader.dataset import BaseDataset, SourceWording
from fastpipe._reader.ordering import Ordering
from fastpipe._reader.packing import groups_of
from fastpipe._reader.packs import from_json
from fastpipe._reader.passes import passes_of
from fastpipe._reader.reader_passes import ReaderParts, ReaderPasses
from fastpipe._reader.state import VERSION as STATES
from fastpipe.errors import FastpipeError, ServiceError, UnsupportedError
from fastpipe.service._asking import NoAnswerError, Question
from fastpipe.service._directory import Servers
from fastpipe.service._wire import VERSION, check_size, identity, specs_digest

if TYPE_CHECKING:
    from fastpipe._reader.mapped import Mapped
    from fastpipe._reader.reader import Reader
    from fastpipe.service._connection import Connection


class Description:
    """A server's description of a reader. It is validated, and can be pickled.

    Args:
        told: Description in JSON.
        rows: Number of rows of each unit, as bytes of uint32.
        url: URL of the server.

    Raises:
        ServiceError: If the description is invalid, or comes from another version of fastpipe.
    """

    def __init__(self, told: bytes, rows: bytes, url: str) -> None:
        self._args = told, rows, url
        try:
            found = json.loads(told)
            if found.get("version") != VERSION:
                raise ServiceError(
                    f"{url} uses version {found.get('version')!r:.20} of the service, and this fastpipe {VERSION}:"
                    " install the same version of fastpipe on both"
                )
            self.rows = np.frombuffer(rows, np.uint32)
            self.fingerprints = {int(version): dict(of) for version, of in found["fingerprints"].items()}
            self.specs = str(found["specs"])
            self.columns, self.csr = str(found["columns"]), found["csr"]
            self.features = decoded_features(str(found["features"]))
            self.categories = {str(name): [str(one) for one in of] for name, of in found["categories"].items()}
            self.files = [str(file) for file in found["files"]]
            words = found["words"]
            self.words = SourceWording(
                units=str(words["units"]),
                advice=MappingProxyType({str(work): str(text) for work, text in words["advice"].items()}),
                bound=MappingProxyType({str(work): str(text) for work, text in words["bound"].items()}),
                other_digest=str(words["other_digest"]),
            )
            counts = ("uncut", "counted_rows", "together")
            self.uncut, self.counted_rows, self.together = (
                None if found[name] is None else within(name, found[name], 0, 2**63 - 1) for name in counts
            )
            self.groups = None if found["groups"] is None else from_json(found["groups"])
            self.in_sequence = None if found["in_sequence"] is None else str(found["in_sequence"])
            self.ordering: Ordering = Ordering.read(str(found["order"]), seed_given=found["seed_given"])
            self.epochs = None if found["epochs"] is None else int(found["epochs"])
            self.text = str(found["text"])
            whole = STATES in self.fingerprints and re.fullmatch("[0-9a-f]{32}", self.specs) is not None
            known = isinstance(self.csr, (str, type(None))) and isinstance(self.ordering.seed_given, bool)
            if not whole or not known:
                raise ValueError("entries are missing")
        except FastpipeError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise ServiceError(f"{url} sent a description of its reader that can't be read: {error!r:.300}") from error

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the dataset and its specs, as requests contain it."""
        return identity(self.fingerprints[STATES], self.specs)

    @classmethod
    def of(cls, name: str, reader: Reader | Mapped) -> Self:
        """Returns the description that a server would send for a reader of this process.

        Raises:
            TypeError: If it isn't a `Reader`.
            UnsupportedError: If the reader can't be served.
        """
        from fastpipe.service._served import Served

        served = Served(name, reader)
        return cls(json.dumps(served.description()).encode(), served.unit_rows().tobytes(), "the fallback")

    def __reduce__(self) -> tuple[Any, ...]:
        return Description, self._args


class RemoteData(BaseDataset):
    """A dataset whose batches are prepared by servers; the `Data` of `connect`.

    After unpickling it opens new connections.

    Args:
        name: Name of the reader on the servers.
        description: Description of the reader.
        servers: Servers that prepare the batches.
        patience: Seconds after which a pass fails, or uses the fallback, if no server responds.
        fallback: Reader of the same data in this process; None for no fallback.
    """

    def __init__(
        self,
        name: str,
        description: Description,
        servers: Servers,
        patience: float,
        fallback: Reader | Mapped | None,
    ) -> None:
        self._args = name, description, servers, patience, fallback
        self._description = description
        self._servers = servers
        self.features = description.features
        self.files = description.files
        self.categories = description.categories
        self.words = description.words
        self._name = name
        self._fallback = None if fallback is None else parts_of(fallback)
        bringing = _Bringing(name, description, servers, patience, self._fallback)
        self.handle: Data = RemoteDataset(
            description.columns,
            description.csr,
            description.rows,
            uncut=description.uncut,
            counted_rows=description.counted_rows,
            grouped=description.groups is not None,
            in_sequence=description.in_sequence,
            start=bringing.start,
        )

    @property
    def interpretation(self) -> dict[str, Any]:
        """A digest of how the servers interpret the dataset."""
        return {"served": self._description.specs}

    def fingerprint(self, version: int = STATES) -> dict[str, Any]:
        """Returns the fingerprint of the served dataset."""
        return dict(self._description.fingerprints[version])

    def place(self, unit: int, record: int) -> Location:
        """Raises an error: a client has no units."""
        raise UnsupportedError("only servers know where the rows of a unit come from: call locate() of the reader")

    def locate(self, order: Order, epoch: int, step: int, row: int, memory_limit: int | None) -> Location:
        """Returns where a row of a batch comes from. A server or the fallback looks it up.

        Raises:
            IndexError: If the row doesn't exist.
            LimitError: If the order needs more memory than the server or the fallback allows.
            ServiceError: If no server answers in time.
            StateError: If a server has other data.
        """
        servers, fallback = self._servers, self._fallback
        if fallback is None or not servers.absent:
            request: dict[str, Any] = {"reader": self._name, "data": self._description.identity}
            request |= {"order": order.text, "epoch": epoch, "step": step, "row": row}
            question = Question("locate", request, _location, servers.options.timeout)
            try:
                found = question.answer(servers.known, come=servers.changes, why=servers.why)
                if isinstance(found, str):
                    raise IndexError(found)
                return found
            except NoAnswerError as none:
                if fallback is None:
                    raise none.error from none.error.__cause__
            servers.absent = True
        own = Ordering.read(order.text).of(fallback.data.handle)
        return fallback.data.locate(own, epoch, step, row, memory_limit)

    def column_times(self) -> tuple[float, list[tuple[str, float]]]:
        """Returns zero and no columns, since this process decodes nothing."""
        return 0.0, []

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteData, self._args

    def __str__(self) -> str:
        return f"{self._description.text} at {self._servers}"


def _location(told: list[bytes], connection: Connection) -> Location | str:
    """Parses the location of a row that a server has sent, or the reason why there is no such row.

    Raises:
        ServiceError: If it is invalid.
    """
    try:
        found = json.loads(told[0])
        return str(found["missing"]) if "missing" in found else locations.from_json(found)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ServiceError(f"{connection.url} sent a location that can't be read: {error!r:.200}") from error


class _Bringing:
    """Starts receiving the batches of passes from servers.

    It holds no reference to the dataset, because the dataset's handle refers to this object.
    """

    def __init__(
        self,
        name: str,
        description: Description,
        servers: Servers,
        patience: float,
        fallback: ReaderParts | None,
    ) -> None:
        self._name, self._data, self._together = name, description.identity, description.together
        self._servers, self._patience = servers, patience
        self._fallback = fallback

    def start(self, feed: BatchFeed, order: str, progress: dict[str, Any] | None, csr: bool) -> None:
        """Starts receiving the batches of a pass."""
        servers, here, ordering = self._servers, self._fallback, Ordering.read(order)
        check_size(ordering)
        rows = 0 if ordering.shuffle == "sequential" else ordering.shuffle_buffer or 0
        rows = rows if self._together is None else self._together
        group = max(1, rows // ordering.batch_size // ordering.world_size)

        def make(epoch: int, resumed: bool, start: int, stop: int) -> Pass:
            assert here is not None
            options = replace(here.running, csr=csr)
            made = ordering.of(here.data.handle)
            return made.batches(options, epoch, start, stop, progress if resumed else None)

        same = {"version": VERSION, "reader": self._name, "data": self._data, "order": ordering.text(), "csr": csr}
        feed.bring(
            [connection.handle for connection in servers.known()],
            servers,
            ticket=json.dumps(same)[:-1],
            progress=None if progress is None else json.dumps(progress),
            group=group,
            patience=self._patience,
            timeout=servers.options.timeout,
            make=None if here is None else make,
            absent=servers.absent,
        )


def parts_of(reader: Reader | Mapped) -> ReaderParts:
    """Returns the parts of a reader, or of the reader of groups from which packs are made.

    Raises:
        TypeError: If the reader doesn't read a dataset itself.
    """
    passes = passes_of(groups_of(reader)[0])
    if not isinstance(passes, ReaderPasses):
        raise TypeError(f"fallback must be a fastpipe.Reader; got {type(reader).__name__}")
    return passes.parts


def check_fallback(fallback: Reader | Mapped, description: Description) -> None:
    """Checks that a fallback reads the servers' data with the same specs.

    Raises:
        UnsupportedError: If it doesn't. The message says what to do.
    """
    data = parts_of(fallback).data
    if data.fingerprint() != description.fingerprints[STATES]:
        raise UnsupportedError(
            "the fallback reads other data than the servers: pass a reader of the same files with the same specs"
        )
    if specs_digest(data, groups_of(fallback)[1]) != description.specs:
        raise UnsupportedError(
            "the fallback reads the data with other specs than the servers: create it with the features, vocabularies"
            " and other arguments of the served reader"
        )
