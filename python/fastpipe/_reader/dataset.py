"""What a reader needs of a data set, whatever its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from fastpipe._fastpipe import Data
from fastpipe._reader.state import VERSION
from fastpipe.specs import Features


class SourceWording(NamedTuple):
    """How a source words what readers say of it.

    Attributes:
        units: what it calls its units.
        advice: for kinds of work, as `Reader.stats` names them, what takes less of it.
        bound: what a pass is that such work limits, where that isn't the work's name and "-bound".
        other_digest: why a state doesn't fit of whose data set only the digest differs.
    """

    units: str = "units"
    advice: Mapping[str, str] = MappingProxyType({})
    bound: Mapping[str, str] = MappingProxyType({})
    other_digest: str = "the data set has other contents"


class Dataset(Protocol):
    """A data set. Printed, it says what it is of; pickled, it opens itself anew where it is unpickled."""

    @property
    def handle(self) -> Data:
        """What orders and passes are made of."""

    @property
    def features(self) -> Features:
        """The spec of each feature."""

    @property
    def files(self) -> list[str]:
        """The files, in the order in which they stand in the data set."""

    @property
    def symbols(self) -> dict[str, list[str]]:
        """For each enum or dictionary that is read as codes its symbols."""

    @property
    def words(self) -> SourceWording:
        """How readers are to speak of it."""

    @property
    def interpretation(self) -> Mapping[str, Any]:
        """What decides the values of batches besides contents, `features` and `symbols`: fit for JSON.

        For example vocabularies, a reader's schema, or the dialect of CSV files. Servers and clients compare it.
        """

    @property
    def column_times(self) -> Callable[[], tuple[float, list[tuple[str, float]]]] | None:
        """Looks at some data for the nanoseconds that a row takes to decode, with all columns and without each.

        None if columns aren't decoded one by one.
        """

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """What tells it from other data sets, fit for JSON: a few numbers that say something, and a `digest`.

        States of a version have that of their version.
        """

    def place(self, unit: int, record: int) -> tuple[Any, ...]:
        """Where a row of a unit comes from, as a named tuple of the source's own."""
