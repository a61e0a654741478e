"""Packs and batches of similar lengths of random pipelines, and checks of them by their definition.

Which rows are in which group is checked by properties: all groups together have each piece of each row exactly once,
and no group is too long.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import fastpipe
from every_source import ROWS, Make, digests
from fastpipe.typing import Mapped, MixtureLocation, PackLocation
from pipelines import Model, Rows, cut, expected, size, values_of

Piece = tuple[int, tuple[int, ...]]
"""A row, and its items in a group."""

Group = tuple[Piece, ...]

RAGGED = [
    *("avro", "arrays", "arrow", "units", "parquet", "arrow file", "tfrecord", "bags"),
    *("part of avro", "part of parquet"),
]
"""The sources with a ragged feature."""


@dataclass(frozen=True)
class Grouping:
    """How rows are grouped.

    Attributes:
        length: Maximum number of items of a pack, or of a batch with its padding.
        window: Number of rows among which groups are formed.
        on_long: How packs handle longer rows. None makes batches of rows with similar lengths.
        padded: Whether packs are padded.
    """

    length: int
    window: int
    on_long: Literal["truncate", "split"] | None
    padded: bool

    def pieces(self, docs: Sequence[Sequence[int]], rows: Rows) -> Counter[Piece]:
        """Returns the pieces that the groups of some rows have."""
        if self.on_long is None:
            return Counter((row, tuple(docs[row])) for row in rows)
        starts = {
            row: range(0, max(len(docs[row]), 1), self.length)[: None if self.on_long == "split" else 1] for row in rows
        }
        return Counter((row, tuple(docs[row][start : start + self.length])) for row in rows for start in starts[row])


class Documents(Model):
    """A source with a ragged feature. Sparse features, which can't be packed, are left out if possible."""

    def __init__(self, make: Make) -> None:
        features = make(batch_size=1, seed=3).features
        names = [name for name, spec in features.items() if not isinstance(spec, fastpipe.SparseSpec)]
        self.packable = "bag" not in features
        self.make = functools.partial(make, columns=names) if self.packable and len(names) < len(features) else make
        super().__init__(self.make)
        ragged = [(name, spec) for name, spec in self.reader.features.items() if isinstance(spec, fastpipe.RaggedSpec)]
        self.column = next(name for name, spec in ragged if spec.dtype.startswith("int"))
        self.docs: list[list[int]] = [doc or [] for doc in self.batch[self.column].to_list()]

    def grouping(self, draw: np.random.Generator) -> Grouping:
        longest = max(map(len, self.docs))
        # Some rows are longer than a pack.
        most = longest if draw.random() < 0.4 else 4 * longest
        return Grouping(
            int(draw.integers(2, most + 1)),
            int(draw.integers(1, ROWS)),
            draw.choice(np.array([None, "truncate", "split", "split"])) if self.packable else None,
            bool(draw.random() < 0.5),
        )

    def group(self, reader: fastpipe.Reader, how: Grouping) -> Mapped:
        if how.on_long is None:
            return reader.bucket(self.column, max_items=how.length, window=how.window)
        return reader.pack(self.column, how.length, window=how.window, on_long=how.on_long, padded=how.padded, pad=-1)

    def row(self, place: fastpipe.typing.Location) -> int:
        while isinstance(place, MixtureLocation):
            place = place.location
        return self.index[place]

    def batch_of(self, reader: Mapped, how: Grouping, step: int, epoch: int) -> list[tuple[int, Group]]:
        """Returns the groups of a batch, and the reader of a mixture from which they come. Checks their values."""
        batch = reader.batch_at(step, epoch)
        if how.on_long is None:
            places = [reader.locate(step, row, epoch) for row in range(size(batch))]
            rows = [self.row(place) for place in places]
            assert digests([batch]) == digests([values_of(self.batch, rows)])
            group = tuple((row, tuple(self.docs[row])) for row in rows)
            longest = max(len(items) for _, items in group)
            assert len(group) == 1 or len(group) * longest <= how.length
            return [(number_of(places), group)]
        packs = [located(reader, step, row, epoch) for row in range(len(batch[self.column]))]
        items = padded_items(batch, self.column, list(map(len, packs)), how.length) if how.padded else None
        found = batch[self.column].to_list() if items is None else items
        groups = [
            tuple((self.row(place), tuple(each)) for place, each in zip(places, pieces, strict=True))
            for places, pieces in zip(packs, found, strict=True)
        ]
        # The rows of other features.
        others = [name for name in self.batch if name != self.column]
        assert set(batch) == {*self.batch, *(("segment_ids", "positions") if how.padded else ())}
        ends = [0, *itertools.accumulate(map(len, groups))]
        assert all(batch[name].offsets.tolist() == ends for name in others)
        wanted = values_of({name: self.batch[name] for name in others}, [row for group in groups for row, _ in group])
        assert digests([{name: batch[name].values for name in others}]) == digests([wanted])
        pieces = how.pieces(self.docs, [row for group in groups for row, _ in group])
        for group in groups:
            assert sum(len(items) for _, items in group) <= how.length
            assert all(piece in pieces for piece in group)
        return [(number_of(places), group) for places, group in zip(packs, groups, strict=True)]

    def batches_of(self, reader: Mapped, how: Grouping, epoch: int) -> list[list[tuple[int, Group]]]:
        """Returns the groups of each batch of an epoch."""
        return [self.batch_of(reader, how, step, epoch) for step in range(len(reader))]

    def mixed(
        self, members: Sequence[Mapped], how: Grouping, draw: np.random.Generator, epoch: int
    ) -> tuple[Mapped, dict[str, Any]]:
        """Returns a mixture of groups, after a check of its batches in an epoch, and the arguments of the mixture."""
        shares = draw.integers(1, 9, len(members)).tolist()
        stop: Any = ["first_exhausted", "all_exhausted", 60][draw.integers(3)]
        batch_size = int(draw.integers(1, 20))
        options = {"weights": shares, "stop": stop, "batch_size": batch_size, "on_uneven": "allow"}
        mixture = fastpipe.mix(members, **options | ({} if how.on_long else {"batch_size": None}))
        counts = mixture._passes.origin._data.rows().values()
        of_members = [member._passes.origin.num_rows for member in members]
        epochs = [max(1, math.ceil(count / own)) for count, own in zip(counts, of_members, strict=True)]
        groups = {
            at: [groups_of(self.batches_of(member, how, each)) for each in range(epoch * passes, (epoch + 1) * passes)]
            for at, (member, passes) in enumerate(zip(members, epochs, strict=True))
        }
        naive = cut(expected(groups, shares, stop), batch_size if how.on_long else 1)
        assert self.batches_of(mixture, how, epoch) == naive
        return mixture, options


def groups_of(batches: Iterable[list[tuple[int, Group]]]) -> list[Group]:
    return [group for batch in batches for _, group in batch]


def located(reader: Mapped, step: int, row: int, epoch: int) -> tuple[fastpipe.typing.Location, ...]:
    """Returns the locations of the rows of a pack."""
    place = reader.locate(step, row, epoch)
    assert isinstance(place, PackLocation)
    return place.rows


def number_of(places: Sequence[fastpipe.typing.Location]) -> int:
    """Returns the reader of a mixture from which all rows of a group come. 0 without a mixture."""
    numbers = {int(place.reader) if isinstance(place, MixtureLocation) else 0 for place in places}
    (number,) = numbers
    return number


def padded_items(batch: dict[str, Any], column: str, counts: Sequence[int], length: int) -> list[list[list[int]]]:
    """Returns the items of each row of each pack, after a check of the padding, the segments and the positions."""
    found = []
    for count, *arrays in zip(counts, batch[column], batch["segment_ids"], batch["positions"], strict=True):
        tokens, segments, positions = arrays
        items = [tokens[segments == number].tolist() for number in range(1, count + 1)]
        rest = length - sum(map(len, items))
        assert tokens.tolist() == [*itertools.chain(*items), *[-1] * rest]
        numbers = [number for number, each in enumerate(items, 1) for _ in each]
        assert segments.tolist() == numbers + [0] * rest
        assert positions.tolist() == [at for each in items for at in range(len(each))] + [0] * rest
        found.append(items)
    return found
