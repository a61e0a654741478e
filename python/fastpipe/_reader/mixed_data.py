"""Mixtures as datasets: the units of several datasets, and the order in which rows are taken from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastpipe._fastpipe import Order, mix_orders
from fastpipe._locations import MixtureLocation
from fastpipe._reader.dataset import BaseDataset, Dataset, SourceWording
from fastpipe._reader.ordering import Ordering, digest
from fastpipe._reader.state import VERSION

_WORDS = SourceWording(other_digest="its readers have other contents, or their orders or weights differ")
# Longer descriptions of readers are cut off.
_SHOWN = 4


def _digest(values: Any) -> str:
    return digest(json.dumps(values, sort_keys=True).encode())


class Member(NamedTuple):
    """A reader of a mixture.

    Attributes:
        name: The reader's name in the mixture.
        data: Its dataset, with whole units.
        ordering: Settings of its order.
        shares: For each phase, its rows out of every n rows of the mixture, where n is the sum over all readers.
    """

    name: str
    data: Dataset
    ordering: Ordering
    shares: tuple[int, ...]


class MixedDataset(BaseDataset):
    """The dataset of a mixture. Its handle also contains the order of its rows.

    Args:
        members: The readers, at least one. Their features and categories are equal.
        starts: First row of each phase, from 0 on.
        stop: When an epoch ends: `"first_exhausted"`, `"all_exhausted"`, or after this number of rows.
        seed: Seed of a random assignment of rows to readers. None for the even assignment.

    Raises:
        LimitError: If there are too many rows or units.
        ValueError: If the last weight of a reader is 0 before all its rows have occurred, with `"all_exhausted"`.
        UnsupportedError: If the units of a reader can't be read in any order.
    """

    column_times = None

    def __init__(self, members: Sequence[Member], starts: Sequence[int], stop: str | int, seed: int | None) -> None:
        self._members, self._starts, self._stop, self._seed = tuple(members), tuple(starts), stop, seed
        self._orders = [member.ordering.of(member.data.handle) for member in self._members]
        self.handle = mix_orders(
            self._orders,
            [(start, [member.shares[phase] for member in members]) for phase, start in enumerate(self._starts)],
            all_exhausted=stop == "all_exhausted",
            rows=stop if isinstance(stop, int) else None,
            seed=seed,
        )
        first = self._members[0].data
        self.features, self.categories = first.features, first.categories
        self.files = [file for member in self._members for file in member.data.files]
        self.words = _WORDS if len(self._members) > 1 else first.words
        self.interpretation: Mapping[str, Any] = {
            "readers": [dict(member.data.interpretation) for member in self._members]
        }

    @property
    def members(self) -> tuple[Member, ...]:
        """The readers."""
        return self._members

    def with_members(self, members: Sequence[Member], batch_size: int = 1) -> MixedDataset:
        """Returns a mixture of other readers with the same weights, whose rows stand for `batch_size` rows each."""
        return MixedDataset(members, [start // batch_size for start in self._starts], self._stop, self._seed)

    @property
    def orders(self) -> list[Order]:
        """The order of each reader."""
        return list(self._orders)

    def rows(self) -> dict[str, int]:
        """Returns the number of rows that an epoch has from each reader."""
        counts = self.handle.mixed_rows()
        return {member.name: count for member, count in zip(self._members, counts, strict=True)}

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the number of readers and rows, and digests.

        `digest` is that of the readers and their orders. `assignment` has the seed of a random one. `weights` has the
        first row of each phase and a digest of its shares. `passes` is a digest of the number of epochs that each
        reader begins in an epoch of the mixture.
        """
        return self._fingerprint(version, len(self._members))

    def _fingerprint(self, version: int, first: int) -> dict[str, Any]:
        """Returns the fingerprint with the digests of only the first readers."""
        members, counts = self._members[:first], list(self.rows().values())
        readers = [
            [member.data.fingerprint(version), member.ordering.stored(order.shuffle_buffer)]
            for member, order in zip(members, self._orders[:first], strict=True)
        ]
        passes = [-(-rows // max(order.num_rows, 1)) for order, rows in zip(self._orders, counts, strict=True)]
        return {
            "readers": len(readers),
            "rows": sum(counts),
            "digest": _digest(readers),
            "assignment": "even" if self._seed is None else f"random, seed={self._seed}",
            "weights": [
                [start, _digest([member.shares[phase] for member in members])]
                for phase, start in enumerate(self._starts)
            ],
            "passes": _digest(passes[:first]),
        }

    def fitted(self, saved: dict[str, Any], progress: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
        """Returns the fingerprint in a saved state, with the own weights if they are the same up to its position.

        The state may have fewer readers if the later ones join after its position. They come last, so the first ones
        are those of the state.

        The epochs of a reader that starts again are numbered by their count per epoch of the mixture. So that count
        must be the same too, except in epoch 0.
        """
        try:
            readers = min(max(int(saved["readers"]), 1), len(self._members))
            own, first = self.fingerprint(), self._fingerprint(VERSION, readers)
            # Ranks take single batches in turn. So all ranks together have read exactly the batches before this one.
            read = progress["next"] * batch_size
            before = [[phase for phase in each["weights"] if phase[0] < read] for each in (saved, first)]
            passed = len([start for start in self._starts if start < read])
            joined = any(any(member.shares[:passed]) for member in self._members[readers:])
            fits = before[0] == before[1] and (progress["epoch"] == 0 or saved["passes"] == first["passes"])
            # Other readers are refused, and the message says how many there are.
            same = [saved["readers"], saved["digest"]] == [readers, first["digest"]]
        except (IndexError, KeyError, OverflowError, TypeError, ValueError):
            return saved
        names = ["weights", "rows", "passes", *(["readers", "digest"] if same else [])]
        return saved | {name: own[name] for name in names} if fits and not joined else saved

    def together(self, ordering: Ordering) -> int:
        """Returns about how many rows of the mixture take the same units as their neighbors."""
        windows = [
            order.shuffle_buffer if member.ordering.shuffle != "sequential" else ordering.batch_size
            for member, order in zip(self._members, self._orders, strict=True)
        ]
        return sum(windows)

    def place(self, unit: int, record: int) -> MixtureLocation:
        """Returns the reader from which a row comes, and where that reader's row comes from."""
        number, own = self.handle.mixed_unit(unit)
        member = self._members[number]
        found = member.data.place(own, record)
        return MixtureLocation(file=found.file, row=found.row, reader=member.name, location=found)

    def __reduce__(self) -> tuple[Any, ...]:
        return MixedDataset, (self._members, self._starts, self._stop, self._seed)

    def __str__(self) -> str:
        period = sum(member.shares[0] for member in self._members)
        shown = [f"{member.name} {member.shares[0] / period:.3g}" for member in self._members[:_SHOWN]]
        more = len(self._members) - _SHOWN
        rest = f" and {more} more readers" if more > 0 else ""
        changes = f", later with {len(self._starts) - 1} other weights" if len(self._starts) > 1 else ""
        how = "" if self._seed is None else "random "
        return f"a {how}mixture of {', '.join(shown)}{rest}{changes}"
