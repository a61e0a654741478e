"""Damaged units: how much of a dataset may be lost, and what is lost."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from fastpipe._arguments import flag, shown, within
from fastpipe.errors import DamageError, MalformedFileError, StateError, UnsupportedError

if TYPE_CHECKING:
    from fastpipe._reader.dataset import Dataset

_LOG = logging.getLogger("fastpipe")

# The entry of a state. States of readers that have lost nothing don't have it.
ENTRY = "losses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Leaves damaged units out, up to a limit: a value of `on_error`.

    Which rows are lost depends only on the bytes of their unit, and not on the order of the rows, ranks or threads. If
    a unit can't be decompressed, or its records don't end where it ends, all of its rows are lost. If only some records
    can't be decoded, these records are lost. No other row moves: a batch keeps its step and its other rows, and becomes
    shorter. It may be empty. With `fill`, batches keep their sizes.

    `Reader.losses` lists what is lost. Each loss is also a warning of the logger `fastpipe`.

    Args:
        max_units: Maximum number of units with lost rows, over all epochs. Each unit counts once. 0 to 2^31 - 1.
            Defaults to 10.
        max_fraction: Maximum fraction of the dataset's rows that may be lost, 0 to 1. Defaults to 0.01.
        fill: Whether lost rows keep their places, with zeros and empty values. Batches then have a bool column `valid`,
            False for these rows and for rows that `on_uneven="pad"` adds. Defaults to False.

    Raises:
        TypeError: If an argument isn't a number.
        ValueError: If an argument is out of range.

    Example:
        >>> import fastpipe
        >>> on_error = fastpipe.Skip(max_units=20, max_fraction=0.001)
        >>> reader = fastpipe.read_avro("data/*.avro", batch_size=1024, on_error=on_error)
        >>> sum(len(batch["label"]) for batch in reader), reader.losses
        (6144, [])
    """

    max_units: int = 10
    max_fraction: float = 0.01
    fill: bool = False

    def __post_init__(self) -> None:
        within("max_units", self.max_units, 0, 2**31 - 1)
        flag("fill", self.fill)
        fraction: Any = self.max_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"max_fraction must be a number from 0 to 1; got {shown(fraction)}")
        if math.isnan(fraction) or not 0 <= fraction <= 1:
            raise ValueError(f"max_fraction must be from 0 to 1; got {fraction}")


def checked(on_error: Any) -> Skip | None:
    """Returns an argument `on_error`, or None if damage raises an error.

    Raises:
        TypeError: If it is another type of object.
        ValueError: If it is another text.
    """
    if isinstance(on_error, Skip):
        return on_error
    if isinstance(on_error, str) and on_error == "raise":
        return None
    advice = 'on_error must be "raise" or fastpipe.Skip(...)'
    raise (ValueError if isinstance(on_error, str) else TypeError)(f"{advice}; got {shown(on_error)}")


class Loss(NamedTuple):
    """Rows of a unit that are lost because the unit is damaged.

    Attributes:
        file: Path of the file.
        block: Index of the block within the file. None for TFRecord.
        start: Offset of the unit's first byte.
        end: Offset of the byte after the unit's last byte.
        rows: Number of lost rows.
        reason: The damage: what was expected and what was found.
    """

    file: str
    block: int | None
    start: int
    end: int
    rows: int
    reason: str

    @property
    def place(self) -> str:
        """Where the unit is, in words."""
        unit = "" if self.block is None else f"block {self.block}, "
        return f"{unit}bytes {self.start} to {self.end} of {self.file}"


class LostUnits:
    """Counts the damaged units of a dataset. Passes add the units of the batches that they yield.

    Args:
        data: The dataset.
        limits: How much may be lost.

    Attributes:
        fills: Whether lost rows keep their places.
    """

    def __init__(self, data: Dataset, limits: Skip) -> None:
        self._data, self._limits = data, limits
        self.fills = bool(limits.fill)
        self._lock = Lock()
        # The loss of each unit, and whether all rows of the unit are lost.
        self._found: dict[int, tuple[Loss, bool]] = {}

    @property
    def losses(self) -> list[Loss]:
        """The losses, in the sequence of the dataset."""
        with self._lock:
            return [self._found[unit][0] for unit in sorted(self._found)]

    def add(self, found: list[dict[str, Any]]) -> None:
        """Adds units, unless they are known.

        Raises:
            DamageError: If more is lost than the limits allow.
        """
        for unit in found:
            loss = Loss(*(unit[name] for name in Loss._fields))
            with self._lock:
                known = unit["unit"] in self._found
                self._found.setdefault(unit["unit"], (loss, unit["whole"]))
            if not known:
                _LOG.warning("%d rows are lost, of %s: %s", loss.rows, loss.place, loss.reason)
        self._check()

    def whole_units(self) -> list[int]:
        """Returns the units of which all rows are lost. A new pass doesn't judge them again.

        Raises:
            DamageError: If more is lost than the limits allow.
        """
        self._check()
        with self._lock:
            return [unit for unit, (_, whole) in self._found.items() if whole]

    def _check(self) -> None:
        losses, limits, all_rows = self.losses, self._limits, self._data.handle.num_rows
        rows = sum(loss.rows for loss in losses)
        if len(losses) <= limits.max_units and rows <= limits.max_fraction * all_rows:
            return
        places = "; ".join(f"{loss.place}: {loss.rows} rows ({loss.reason})" for loss in losses[:5])
        more = f"; and {len(losses) - 5} more" if len(losses) > 5 else ""
        raise DamageError(
            f"{rows} of {all_rows} rows in {len(losses)} damaged units are lost, and on_error={limits} allows fewer:"
            f" {places}{more}. Restore these files, or allow more",
            losses=losses,
        )

    def stored(self) -> list[list[Any]]:
        """Returns the entry of a state. It doesn't contain paths, since folders may differ when it is loaded."""
        with self._lock:
            return [
                [unit, int(whole), loss.block, loss.start, loss.end, loss.rows, loss.reason]
                for unit, (loss, whole) in sorted(self._found.items())
            ]

    def replaced(self, stored: list[list[Any]]) -> LostUnits:
        """Returns the units of a state, with the limits of this object.

        Raises:
            StateError: If the entry is damaged.
        """
        units = LostUnits(self._data, self._limits)
        try:
            for unit, whole, block, start, end, rows, reason in stored:
                file = str(getattr(self._data.place(int(unit), 0), "file", ""))
                number = None if block is None else int(block)
                loss = Loss(file, number, int(start), int(end), int(rows), str(reason))
                units._found[int(unit)] = loss, bool(whole)
        except (IndexError, OverflowError, TypeError, ValueError):
            raise StateError("the damaged units of the state don't belong to this reader's dataset") from None
        return units


def of(data: Dataset, limits: Skip | None) -> LostUnits | None:
    """Returns an empty list of damaged units, or None if damage raises an error.

    Raises:
        UnsupportedError: If the dataset can't be read around damage.
        ValueError: If lost rows are to be marked, and a feature has the name of the marks.
    """
    if limits is None:
        return None
    if not getattr(data, "may_lose_units", False):
        reason = "on_error=fastpipe.Skip(...) isn't supported for this dataset"
        advice = 'read its partitions, packs or caches with on_error="raise"'
        raise UnsupportedError(f"{reason} ({data}): {advice}", reason=reason)
    if limits.fill and "valid" in data.features:
        raise ValueError('fill=True adds a column "valid", but a feature already has that name: rename the feature')
    return LostUnits(data, limits)


@contextmanager
def framing_noted(limits: Skip | None) -> Iterator[None]:
    """Adds a note to errors for damage that prevents files from being opened."""
    try:
        yield
    except MalformedFileError as error:
        if limits is not None:
            error.add_note(
                "on_error=fastpipe.Skip(...) leaves out damage inside of blocks and records. This damage is in a header"
                " or between blocks, so it isn't known where the next rows are. Restore the file, leave it out, or copy"
                " what is intact of a container file with: fastpipe salvage IN OUT"
            )
        raise


def loaded(state: Mapping[str, Any], lost: LostUnits | None) -> LostUnits | None:
    """Returns the damaged units of a state that was checked.

    Raises:
        StateError: If the state has damaged units, and the reader doesn't leave out any.
    """
    stored = state.get(ENTRY, [])
    if lost is not None:
        return lost.replaced(stored)
    if stored:
        raise StateError(
            f"cannot resume from this state: its reader has left out {len(stored)} damaged units, and this reader"
            " leaves out none. Create the reader with on_error=fastpipe.Skip(...)"
        )
    return None


def refuse(lost: object, what: str, advice: str) -> None:
    """Raises an error if damaged units are left out.

    Raises:
        UnsupportedError: If they are. The message says what doesn't support that and what to do.
    """
    if lost is not None:
        reason = f"{what} with on_error=fastpipe.Skip(...) isn't supported"
        raise UnsupportedError(f"{reason}: {advice}", reason=reason)
