"""IDs of users and items: conversion of integers or strings to dense indices, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import number_ids
from fastpipe.batch import Strings
from fastpipe.errors import InteractionsError

Codes: TypeAlias = npt.NDArray[np.uint32]

_IDS = (str, bytes, int, np.integer)


class Coded(NamedTuple):
    """IDs of a dictionary-encoded column.

    Attributes:
        codes: Integers `[n]`, indices into `values`.
        values: The IDs, which may include unused ones.
    """

    codes: npt.NDArray[np.integer[Any]]
    values: list[Any]


class Vocabulary:
    """A list of IDs. The index of an ID in the list stands for it.

    Attributes:
        ids: `[n]`, int64 (uint64 if an ID is 2^63 or more), or objects that are all str or all bytes.
    """

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        self.ids.flags.writeable = False
        self._order: npt.NDArray[np.int64] | None = None
        self._numbers: dict[Any, int] | None = None

    @classmethod
    def of(cls, ids: Any, what: str) -> Vocabulary:
        """Returns the vocabulary of IDs that a user lists, in that order.

        Raises:
            InteractionsError: If an ID is invalid or listed twice.
        """
        encoder = IdEncoder(what)
        encoder.add(ids)
        found, codes = encoder.finish()
        if len(found) < len(codes):
            repeated = found.ids[np.bincount(codes) > 1][0]
            raise InteractionsError(f"the {what} {_shown(repeated)} is listed more than once")
        places = np.empty(len(codes), np.int64)
        places[codes] = np.arange(len(codes))
        ordered = np.empty_like(found.ids)
        ordered[places] = found.ids
        return cls(ordered)

    def __len__(self) -> int:
        """Returns the number of IDs."""
        return len(self.ids)

    def encode(self, ids: Any, what: str) -> npt.NDArray[np.int64]:
        """Returns the index of each ID, int64 `[n]`.

        Raises:
            InteractionsError: If an ID is unknown. It names the first such ID.
        """
        encoder = IdEncoder(what)
        encoder.add(ids)
        found, codes = encoder.finish()
        return self.places_of(found, what)[codes]

    def places_of(self, others: Vocabulary, what: str) -> npt.NDArray[np.int64]:
        """Returns the index of each ID of another vocabulary, int64 `[n]`.

        Raises:
            InteractionsError: If an ID is unknown. It names the first such ID.
        """
        if not len(others):
            return np.empty(0, np.int64)
        if (self.ids.dtype == object) != (others.ids.dtype == object):
            kinds = [_kind(self.ids[0]) if len(self) else "none", _kind(others.ids[0])]
            raise InteractionsError(f"the {what}s are of type {kinds[1]}, but the known ones are of type {kinds[0]}")
        if self.ids.dtype == object:
            if self._numbers is None:
                self._numbers = {value: number for number, value in enumerate(self.ids.tolist())}
            get = self._numbers.get
            places = np.fromiter((get(value, -1) for value in others.ids.tolist()), np.int64, len(others))
            unknown = places < 0
        else:
            if self._order is None:
                self._order = np.argsort(self.ids, kind="stable")
            # The arrays may be int64 and uint64, which NumPy would compare as floats. IDs are never negative.
            mine, theirs = self.ids.astype(np.uint64), others.ids.astype(np.uint64)
            at = np.minimum(np.searchsorted(mine, theirs, sorter=self._order), len(self) - 1)
            places = self._order[at] if len(self) else np.zeros(len(others), np.int64)
            unknown = mine[places] != theirs if len(self) else np.ones(len(others), bool)
        if unknown.any():
            first = others.ids[unknown][0]
            raise InteractionsError(f"the {what} {_shown(first)} is not one of the {len(self)} known {what}s")
        return places

    def __reduce__(self) -> tuple[Any, ...]:
        return Vocabulary, (self.ids,)


class IdEncoder:
    """Assigns indices to IDs that arrive in chunks. Indices follow the sorted order of IDs, not the order of arrival.

    Args:
        what: `"user"` or `"item"`, for error messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._integers: list[np.ndarray] = []
        self._codes: list[npt.NDArray[np.int64]] = []
        self._seen: dict[Any, int] = {}
        self._type: type | None = None

    def add(self, ids: Any) -> int:
        """Adds IDs and returns their number.

        Args:
            ids: `[n]`: an array or a list of integers or strings, `Strings`, or `Coded`.

        Raises:
            InteractionsError: If an ID is negative or missing, or has another type than previous IDs.
        """
        integers: np.ndarray | None = None
        values: list[Any] | None = None
        if isinstance(ids, Strings):
            values = ids.to_list()
        else:
            integers, values = _integers_or_values(ids.values if isinstance(ids, Coded) else ids, self._what)
        if integers is not None:
            self._settle(int)
            self._integers.append(integers[ids.codes] if isinstance(ids, Coded) else integers)
            return len(self._integers[-1])
        assert values is not None
        for kind in set(map(type, values)):
            self._settle(kind)
        seen = self._seen
        codes = np.fromiter((seen.setdefault(value, len(seen)) for value in values), np.int64, len(values))
        self._codes.append(codes[ids.codes] if isinstance(ids, Coded) else codes)
        return len(self._codes[-1])

    def _settle(self, kind: type) -> None:
        """Raises an error if IDs have different types."""
        self._type = self._type or kind
        if kind is not self._type:
            raise _mixed(self._what, self._type.__name__, kind.__name__)

    def finish(self) -> tuple[Vocabulary, Codes]:
        """Returns the distinct IDs in sorted order, and the index of each added ID among them."""
        if self._integers:
            pieces, self._integers = self._integers, []
            return _numbered(_joined(pieces))
        if not self._seen:
            return Vocabulary(np.empty(0, np.int64)), np.empty(0, np.uint32)
        codes = np.concatenate(self._codes)
        used = np.bincount(codes, minlength=len(self._seen)) > 0
        values = [value for value, wanted in zip(self._seen, used.tolist(), strict=True) if wanted]
        order = sorted(range(len(values)), key=values.__getitem__)
        ids = np.empty(len(values), object)
        ids[:] = [values[i] for i in order]
        ranks = np.empty(len(values), np.uint32)
        ranks[order] = np.arange(len(values))
        places = np.zeros(len(used), np.uint32)
        places[used] = ranks
        return Vocabulary(ids), places[codes]


def _integers_or_values(ids: Any, what: str) -> tuple[np.ndarray | None, list[Any] | None]:
    """Returns integers `[n]` of any type, or strings or bytes as a list.

    Raises:
        InteractionsError: If the IDs have another type, or an ID is negative.
    """
    array = _array(ids, what)
    if array.ndim != 1:
        raise InteractionsError(f"the {what} ids must have one dimension; got shape {array.shape}")
    if array.dtype == object or array.dtype.kind == "T":  # NumPy's StringDType may contain nulls.
        values = array.tolist()
        kinds = set(map(type, values))
        for text in (str, bytes):
            if all(issubclass(kind, text) for kind in kinds):
                return None, values if kinds <= {text} else list(map(text, values))
        if kinds and all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
            least, most = min(values), max(values)
            if least < 0:
                raise _negative(what, least)
            if most >= 2**64:
                raise InteractionsError(f"the {what} id {most} exceeds 64 bits: pass it as a string")
            return np.array(values, np.uint64), None
        for value in values:
            if not isinstance(value, _IDS) or isinstance(value, bool):
                raise InteractionsError(f"{what} ids must be integers or strings; got {value!r}{_missing(value)}")
        raise _mixed(what, *sorted(kind.__name__ for kind in kinds)[:2])
    if array.dtype.kind in "US":
        return None, array.tolist()
    if array.dtype.kind in "iu":
        if len(array) and array.dtype.kind == "i" and (least := array.min()) < 0:
            raise _negative(what, int(least))
        return array, None
    if array.dtype.kind == "f" and np.isnan(array).any():
        at = int(np.isnan(array).argmax())
        raise InteractionsError(
            f"{what} ids must be integers or strings; got NaN at index {at}: drop interactions without an id"
        )
    hint = ": convert them, with .astype(numpy.int64)" if array.dtype.kind == "f" else ""
    raise InteractionsError(f"{what} ids must be integers or strings; got {array.dtype}{hint}")


def _array(ids: Any, what: str) -> np.ndarray:
    if np.ma.isMaskedArray(ids) and np.ma.getmaskarray(ids).any():
        raise InteractionsError(f"some {what} ids are masked: drop interactions that have no {what}")
    if isinstance(ids, str | bytes) or (not isinstance(ids, Sequence) and not hasattr(ids, "__array__")):
        raise InteractionsError(f"{what} ids must be an array or a list; got {type(ids).__name__}")
    if not hasattr(ids, "__array__"):
        # NumPy would turn [1, "a"] into strings, and [1, None] into floats or objects.
        values = list(ids)
        array = np.empty(len(values), object)
        array[:] = values
        return array
    return np.asarray(ids)


def _negative(what: str, value: int) -> InteractionsError:
    return InteractionsError(f"{what} ids must be at least 0, or strings; got {value}")


def _mixed(what: str, one: str, other: str) -> InteractionsError:
    return InteractionsError(f"some {what} ids are of type {one} and some of type {other}: use one type for all")


def _missing(value: Any) -> str:
    is_nan = isinstance(value, float) and value != value
    return ": drop interactions without an id" if value is None or is_nan else ""


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    """Concatenates arrays of integers, which may have different types, into a contiguous array. One is not copied."""
    if len(pieces) == 1:
        return np.ascontiguousarray(pieces[0], pieces[0].dtype.newbyteorder("="))
    if any(piece.dtype != pieces[0].dtype for piece in pieces):
        # NumPy would convert int64 and uint64 to floats. IDs are never negative.
        pieces = [piece.astype(np.uint64) for piece in pieces]
    return np.concatenate(pieces, dtype=pieces[0].dtype.newbyteorder("="))


def _numbered(ids: np.ndarray) -> tuple[Vocabulary, Codes]:
    """Returns the distinct integer IDs in order, and the index of each ID among them."""
    distinct, codes = number_ids(ids)
    fits = not len(distinct) or int(distinct[-1]) < 2**63
    return Vocabulary(distinct.view(np.int64) if fits else distinct), codes


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, str | bytes) else "int"


def _shown(value: Any) -> str:
    return repr(value.item() if isinstance(value, np.generic) else value)
