"""Packs, which are several rows in one row of a fixed number of tokens, and batches of rows with similar lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe._arguments import flag, shown, within
from fastpipe._reader.grouping import Grouping, OnLong, grouped
from fastpipe._reader.losses import refuse
from fastpipe._reader.mapped import Mapped, map_passes
from fastpipe._reader.mixed_data import Member, MixedDataset
from fastpipe._reader.packs import GROUPS, PLACES, Buckets, Packs
from fastpipe._reader.selection import check
from fastpipe.batch._padding import fitting
from fastpipe.errors import SchemaError, UnsupportedError
from fastpipe.specs import SparseSpec

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader

_LONGEST, _LARGEST_WINDOW = 2**31 - 1, 2**24
_MOST_ITEMS = 2**62


def pack(
    reader: Reader,
    columns: str | Sequence[str],
    length: int,
    *,
    window: int,
    on_long: OnLong,
    padded: bool,
    pad: float,
) -> Mapped:
    """Returns a map that yields packs. See `Reader.pack`."""
    names = (columns,) if isinstance(columns, str) else _names(columns)
    if on_long not in ("error", "truncate", "split"):
        raise ValueError(f'on_long must be "error", "truncate" or "split"; got {shown(on_long)}')
    grouping = Grouping(
        names, within("length", length, 1, _LONGEST), within("window", window, 1, _LARGEST_WINDOW), on_long
    )
    for name, spec in reader.features.items():
        if isinstance(spec, SparseSpec):
            reason = "packs can't have sparse features"
            advice = "read it as ragged arrays, or leave it out with columns="
            raise UnsupportedError(f"feature {name!r} is sparse, and {reason}: {advice}", reason=reason)
    groups = _grouped(reader, grouping)
    for name in names:
        fitting("pad", pad, np.dtype(reader.features[name].dtype))
    packs = Packs(names, grouping.length, flag("padded", padded), pad)
    _check_names(reader, [*GROUPS, *(PLACES if padded else ())])
    return yielding(groups, packs, reader)


def bucket(reader: Reader, column: str, *, max_items: int | None, window: int) -> Mapped:
    """Returns a map that yields batches of rows with similar lengths. See `Reader.bucket`."""
    most = _MOST_ITEMS if max_items is None else within("max_items", max_items, 1, _MOST_ITEMS)
    _check_names(reader, GROUPS)
    size = reader.batch_size
    grouping = Grouping((column,), most, within("window", window, 1, _LARGEST_WINDOW), "error", size)
    ordering = reader._ordering
    groups = _grouped(reader._like(reader._data, ordering=ordering.with_batch_size(1)), grouping)
    return yielding(groups, Buckets(), reader)


def yielding(groups: Reader, function: Packs | Buckets, reader: Any) -> Mapped:
    """Returns a map of a reader of groups that yields packs, or batches of rows with similar lengths."""
    return map_passes(groups._passes, reader, function, 0, 0, None, function.features(groups.features))


def _check_names(reader: Reader, names: Sequence[str]) -> None:
    if clash := [name for name in names if name in reader.features]:
        raise SchemaError(f"the batches get an entry {clash[0]!r}, and the reader has one: rename the feature")


def _names(columns: Any) -> tuple[str, ...]:
    if not isinstance(columns, Sequence) or not columns:
        raise TypeError(f"columns must be the name of a feature, or a list of names; got {shown(columns)}")
    if len(set(columns)) < len(columns):
        raise ValueError(f"columns has a name twice: {shown(columns)}")
    return tuple(columns)


def _grouped(reader: Reader, grouping: Grouping) -> Reader:
    """Returns a reader of groups. Those of a mixture are groups of its readers' rows."""
    refuse(reader._lost, "grouping rows", 'read them with on_error="raise"')
    data = reader._data
    if isinstance(data, MixedDataset):
        if reader._ordering.on_uneven == "pad":
            raise ValueError('a mixture of groups can\'t have on_uneven="pad": use "drop" or "allow"')
        return reader._like(_mixed(reader, data, grouping))
    check(reader, "pack")
    of_groups, ordering = grouped(reader, grouping)
    return reader._like(of_groups, ordering=ordering)


def _mixed(reader: Reader, data: MixedDataset, grouping: Grouping) -> MixedDataset:
    def groups(member: Member) -> Member:
        own = reader._like(member.data, ordering=replace(member.ordering, on_uneven="drop"))
        found = _grouped(own, grouping)
        return member._replace(data=found._data, ordering=found._ordering)

    return data.with_members([groups(member) for member in data.members], grouping.most_rows or 1)


def groups_of(reader: Any) -> tuple[Any, Packs | Buckets | None]:
    """Returns the reader of groups, and what a map makes of them, if `pack` or `bucket` made the map.

    Otherwise, returns the object itself and None.
    """
    if isinstance(reader, Mapped):
        function = reader._passes.options.function.function
        if isinstance(function, (Packs, Buckets)):
            return reader._passes.incoming.origin, function
    return reader, None
