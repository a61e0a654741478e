"""Interactions of users and items: numbered users and items, and their positives."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import Positives
from fastpipe._reader.ordering import digest, within
from fastpipe.batch._form import described
from fastpipe.errors import InteractionsError
from fastpipe.sources.files._paths import Paths
from fastpipe.sources.interactions import _shards, _sources
from fastpipe.sources.interactions._csr import CSR, Duplicates, compress, core
from fastpipe.sources.interactions._ids import Codes, IdEncoder, Vocabulary
from fastpipe.sources.interactions._sources import Chunk, Columns

_LARGEST = 2**31 - 1


def prepare(
    chunks: Iterable[Chunk],
    *,
    duplicates: Duplicates = "first",
    min_per_user: int = 1,
    min_per_item: int = 1,
    users: Any = None,
    items: Any = None,
) -> tuple[Vocabulary, Vocabulary, CSR]:
    """Numbers users and items, and brings their interactions into compact form.

    Args:
        chunks: the interactions.
        duplicates: as in `Interactions`, as are those below.
        min_per_user: positives that a user has at least.
        min_per_item: positives that an item has at least.
        users: all user ids.
        items: all item ids.

    Returns:
        The users, the items, and the positives.

    Raises:
        InteractionsError: if they can't be used.
        ValueError: if an option is out of range.
    """
    if duplicates not in ("first", "last"):
        raise ValueError(f'duplicates is "first" or "last", not {duplicates!r}')
    least_user = within("min_per_user", min_per_user, 0, _LARGEST)
    least_item = within("min_per_item", min_per_item, 0, _LARGEST)
    known_users = None if users is None else Vocabulary.of(users, "user")
    known_items = None if items is None else Vocabulary.of(items, "item")
    user_numbers, user_codes, item_numbers, item_codes, times = _encode(chunks)
    user_numbers, user_codes = _renumbered(user_numbers, user_codes, known_users, "user")
    item_numbers, item_codes = _renumbered(item_numbers, item_codes, known_items, "item")
    _check_counts(len(user_codes), len(user_numbers), len(item_numbers))
    csr = compress(
        user_codes,
        item_codes,
        times,
        num_users=len(user_numbers),
        duplicates=duplicates,
    )
    del user_codes, item_codes, times
    if least_user > 1 or least_item > 1:
        csr = csr.keep(core(csr, len(item_numbers), least_user, least_item))
        if users is None:
            left = csr.counts > 0
            csr = CSR(np.concatenate([[0], csr.indptr[1:][left]]), csr.items, csr.sequence)
            user_numbers = Vocabulary(user_numbers.ids[left])
        if items is None:
            left = np.bincount(csr.items, minlength=len(item_numbers)) > 0
            csr = csr._replace(items=(np.cumsum(left) - 1).astype(np.uint32)[csr.items])
            item_numbers = Vocabulary(item_numbers.ids[left])
        if len(csr.items) == 0:
            raise InteractionsError(
                f"no interaction is left by min_per_user={least_user} and min_per_item={least_item}: lower them"
            )
        _check_counts(len(csr.items), len(user_numbers), len(item_numbers))
    return user_numbers, item_numbers, csr


def _encode(chunks: Iterable[Chunk]) -> tuple[Vocabulary, Codes, Vocabulary, Codes, np.ndarray | None]:
    """Ids and numbers of users and items, and times, of all chunks together."""
    users, items = IdEncoder("user"), IdEncoder("item")
    times: list[np.ndarray] = []
    for chunk in chunks:
        lengths = {"user ids": users.add(chunk.users), "item ids": items.add(chunk.items)}
        if chunk.times is not None:
            lengths["timestamps"] = len(chunk.times)
            times.append(chunk.times)
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise InteractionsError(f"there must be as many of each: these are {counts}")
    return *users.finish(), *items.finish(), _joined(times) if times else None


def _joined(times: list[np.ndarray]) -> np.ndarray:
    return times[0] if len(times) == 1 else np.concatenate(times)


def _renumbered(found: Vocabulary, codes: Codes, known: Vocabulary | None, what: str) -> tuple[Vocabulary, Codes]:
    return (found, codes) if known is None else (known, known.places_of(found, what).astype(np.uint32)[codes])


def _check_counts(positives: int, users: int, items: int) -> None:
    if positives == 0:
        raise InteractionsError("there are no interactions")
    for count, what in ((users, "user"), (items, "item")):
        if count > _LARGEST:
            raise InteractionsError(f"there are {count} {what}s, and at most 2^31 - 1 can be numbered")
        if count < 2:
            raise InteractionsError(f"there is only one {what}: nothing can be told of it by comparing {what}s")


LARGEST = 2**31 - 1


class HeldOut(NamedTuple):
    """Positives that are held out of training.

    Attributes:
        users: int64 `[m]`, numbers of users, as in batches.
        items: int64 `[m]`, the item of each.
    """

    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]

    def __repr__(self) -> str:
        return described(self)


class Interactions:
    """Which user has interacted with which items: the positives of implicit feedback. `from_arrays` and others make it.

    Users and items get dense numbers, from 0, by which batches name them: number `u` stands for `users[u]`. They are
    numbered in sorted order of their ids, so that the order of the input doesn't matter. Memory is 4 bytes a positive
    and 8 a user, besides the ids; with timestamps 4 more a positive.

    All that make one take

    - `duplicates`: which of several interactions of the same user and item stays, the `"first"` or the `"last"` in
      time; of those at the same time, or where no times are given, the first or last in the input.
    - `min_per_user`, `min_per_item`: leave out users and items that have fewer positives, again and again until none
      has: what is left is the largest set in which all have as many (with both equal to k, the k-core).
    - `users`, `items`: all ids there are, in the order in which to number them. Without it those are numbered that have
      positives. With it users and items may be without any, every item is drawn as a negative, and an id that isn't
      listed is an error: so a test set gets the numbers of its training set by `users=train.users, items=train.items`.

    and raise `InteractionsError` for ids that are negative, missing, of several types or neither integers nor strings,
    for timestamps that are missing, for lengths that differ, and if there are fewer than two users or two items.

    Example:
        >>> import fastpipe
        >>> data = fastpipe.Interactions.from_arrays([10, 10, 11, 12], ["a", "b", "b", "c"])
        >>> data.num_users, data.num_items, data.num_positives
        (3, 3, 4)
    """

    def __init__(self, users: Vocabulary, items: Vocabulary, csr: CSR, part: _shards.Part | None = None) -> None:
        self._users = users
        self._items = items
        self._csr = csr.frozen()
        self._part = part

    @classmethod
    def from_arrays(
        cls,
        user_ids: Any,
        item_ids: Any,
        timestamps: Any = None,
        *,
        duplicates: Duplicates = "first",
        min_per_user: int = 1,
        min_per_item: int = 1,
        users: Any = None,
        items: Any = None,
    ) -> Self:
        """From arrays, lists or other sequences, one entry an interaction.

        Of integer ids in arrays that hold each many times, this takes up to one and a half times the arrays' memory
        besides them, with all processors at work: 12 bytes an interaction, with timestamps 24.

        Args:
            user_ids: `[n]`, integers from 0 to 2^64 - 1, strings or bytes; not both.
            item_ids: `[n]`, the same.
            timestamps: `[n]`, numbers or datetime64; or None. Only their order matters.
            duplicates: as described above, as are those below.
            min_per_user: positives that a user has at least.
            min_per_item: positives that an item has at least.
            users: all user ids.
            items: all item ids.

        Raises:
            InteractionsError: as described above.
            ValueError: if an option is out of range.
        """
        times = None if timestamps is None else _sources.times_of(timestamps)
        prepared = prepare(
            [Chunk(user_ids, item_ids, times)],
            duplicates=duplicates,
            min_per_user=min_per_user,
            min_per_item=min_per_item,
            users=users,
            items=items,
        )
        return cls(*prepared)

    @classmethod
    def from_avro(
        cls, source: Paths, *, user: str = "user", item: str = "item", timestamp: str | None = None, **options: Any
    ) -> Self:
        """From Avro files of a record for each interaction, as `read_avro` reads them.

        Args:
            source: as in `read_avro`.
            user: name of the column of user ids: of integers, strings, bytes or an enum. Of a logical type, such as
                uuid, ids are what underlies it.
            item: the same of item ids.
            timestamp: name of the column of times, of numbers; None for none.
            options: as for `from_arrays`.

        Raises:
            InteractionsError: as described above, and if a value is null.
            SchemaError: if there is no such column, or if it isn't one value a record.
            UnsupportedError: if a column is of another type.
            FastpipeError: as in `read_avro`.
        """
        return cls(*prepare(_sources.from_avro(source, Columns(user, item, timestamp)), **options))

    @classmethod
    def from_arrow(
        cls, source: Any, *, user: str = "user", item: str = "item", timestamp: str | None = None, **options: Any
    ) -> Self:
        """From a `pyarrow.Table`, or from whatever else yields Arrow data: readers, data frames (extra `arrow`).

        Args:
            source: the table, or an object with `__arrow_c_stream__`, which is read once.
            user: name of the column of user ids: of integers, strings, binary, or a dictionary of these.
            item: the same of item ids.
            timestamp: name of the column of times: numbers, dates or timestamps; None for none.
            options: as for `from_arrays`.

        Raises:
            InteractionsError: as described above, and if a value is null.
            SchemaError: if there is no such column.
        """
        return cls(*prepare(_sources.from_arrow(source, Columns(user, item, timestamp)), **options))

    @classmethod
    def from_csv(
        cls,
        source: Paths,
        *,
        user: str = "user",
        item: str = "item",
        timestamp: str | None = None,
        delimiter: str = ",",
        column_names: list[str] | None = None,
        **options: Any,
    ) -> Self:
        """From CSV files, as `pyarrow.csv` reads them (extra `arrow`): columns of digits are integers.

        Where `007` is another id than `7`, read the files with pyarrow and types of your own, and use `from_arrow`.

        Args:
            source: a path, a glob, a directory (all `*.csv` below it), or a list of these; compressed files too.
            user: name of the column of user ids.
            item: the same of item ids.
            timestamp: name of the column of times; None for none.
            delimiter: the character between values.
            column_names: names of all columns, if the first line has none.
            options: as for `from_arrays`.

        Raises:
            InteractionsError: as described above, and if a file can't be parsed or a value is missing.
            MissingFileError: if a file isn't there.
            SchemaError: if there is no such column, or more than one.
            StorageError: if a file can't be read.
        """
        columns = Columns(user, item, timestamp)
        return cls(*prepare(_sources.from_csv(source, columns, delimiter, column_names), **options))

    @classmethod
    def from_movielens(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """From MovieLens' ratings, each of which counts as an interaction, with its time (extra `arrow`).

        Args:
            path: of `u.data` (100k), `ratings.dat` (1M, 10M), `ratings.csv` (20M and later), or an `.inter` file of
                RecBole.
            options: as for `from_arrays`.

        Raises:
            InteractionsError: if the file has another form.
            MissingFileError: if it isn't there.
            StorageError: if it can't be read.
        """
        return cls(*prepare(_sources.from_movielens(path), **options))

    @property
    def users(self) -> np.ndarray:
        """The ids of users: int64 (uint64 if one is 2^63 or more), or objects, all of them str or all bytes.

        `[num_users]`, but for shards: those have their own users, of which the first is number `first_user`.
        """
        return self._users.ids

    @property
    def items(self) -> np.ndarray:
        """The ids of items, `[num_items]`, of the same types."""
        return self._items.ids

    @property
    def num_users(self) -> int:
        """Users, also those of other shards: numbers of users are below it."""
        return len(self._users) if self._part is None else self._part.num_users

    @property
    def num_items(self) -> int:
        """Items: numbers of items are below it."""
        return len(self._items)

    @property
    def num_positives(self) -> int:
        """Positives, of these shards if they are some of many."""
        return len(self._csr.items)

    @property
    def first_user(self) -> int:
        """The number of the first user: 0, but for shards of which the first isn't there."""
        return 0 if self._part is None else self._part.first_user

    @property
    def indptr(self) -> npt.NDArray[np.int64]:
        """Where the positives of each user begin and end, int64 `[len(users) + 1]`; read-only."""
        return self._csr.indptr

    @property
    def indices(self) -> npt.NDArray[np.uint32]:
        """The items of each user one after the other, ascending within a user: uint32 `[num_positives]`; read-only."""
        return self._csr.items

    @cached_property
    def item_counts(self) -> npt.NDArray[np.int64]:
        """Positives of each item, int64 `[num_items]`, those of other shards among them."""
        if self._part is not None:
            return self._part.item_counts
        return np.bincount(self._csr.items, minlength=self.num_items)

    def user_indices(self, ids: Any) -> npt.NDArray[np.int64]:
        """Numbers of users, int64 `[n]`; the inverse of `users`.

        Raises:
            InteractionsError: if one isn't known.
        """
        return self.first_user + self._users.encode(ids, "user")

    def item_indices(self, ids: Any) -> npt.NDArray[np.int64]:
        """Numbers of items, int64 `[n]`; the inverse of `items`.

        Raises:
            InteractionsError: if one isn't known.
        """
        return self._items.encode(ids, "item")

    def leave_one_out(self) -> tuple[Self, HeldOut]:
        """Holds out the latest positive of each user who has at least two.

        Of several at the same time, the one that came last in the input is the latest. Users and items keep their
        numbers. Of the training set, the latest can be left out once more, for validation.

        Returns:
            The training set, and what is held out of it.

        Raises:
            InteractionsError: without timestamps, or of some of many shards.
        """
        if self._part is not None:
            raise InteractionsError("these are shards of more: leave one out before you write them")
        if self._csr.sequence is None:
            raise InteractionsError(
                "leaving out the latest needs timestamps; of a log that is in order of time, numpy.arange(n) will do"
            )
        counts, users = self._csr.counts, self._csr.users()
        held = (self._csr.sequence == (counts - 1)[users]) & (counts > 1)[users]
        held_out = HeldOut(users[held], self._csr.items[held].astype(np.int64))
        return type(self)(self._users, self._items, self._csr.keep(~held)), held_out

    def write_shards(
        self, folder: str | os.PathLike[str], *, format: _shards.Format = "avro", shard_positives: int = 32_000
    ) -> list[str]:
        """Writes shards that `from_shards` reads, together or each by itself.

        A shard is a file of the users `first_user` to `first_user + n - 1` and all of their positives. The file `items`
        beside them has the items' ids and counts, which all shards need.

        Args:
            folder: where to; made if it isn't there.
            format: `"avro"` (needs fastavro), or `"arrow"`, Arrow's IPC files (extra `arrow`).
            shard_positives: a shard ends with the user that brings it to that many.

        Returns:
            Paths of the shards.

        Raises:
            FileExistsError: if there are shards in the folder.
            InteractionsError: if these are some of many shards already.
            UnsupportedError: for ids of 2^63 or more in Avro files.
        """
        if self._part is not None:
            raise InteractionsError("these are shards of more: write all of them together")
        most = within("shard_positives", shard_positives, 1, LARGEST)
        return _shards.write(os.fspath(folder), format, most, self._users, self._items, self._csr)

    @classmethod
    def from_shards(cls, source: Paths) -> Self:
        """Reads shards that `write_shards` wrote: all, or some that follow each other.

        Users have the same numbers however many of the shards are read, and the same negatives are drawn for them. So
        each of several workers can read shards of its own.

        Args:
            source: the folder, of which all shards must be there; or paths of shards, in order. `items` is looked for
                beside the first one.

        Raises:
            MissingFileError: if a file isn't there.
            InteractionsError: if shards are of different data or don't follow each other, or if their content can't be.
            MalformedFileError: if a file is damaged, or its content isn't what its checksum is of.
            UnsupportedError: if a later fastpipe wrote them.
        """
        return cls(*_shards.read(source))

    def fingerprint(self) -> dict[str, Any]:
        """What tells it from others, fit for JSON: how many users, items and positives, and a digest of all of them."""
        return {
            "users": len(self._users),
            "items": self.num_items,
            "positives": self.num_positives,
            "digest": self._digest,
        }

    @cached_property
    def _positives(self) -> Positives:
        """The same in the form in which negatives are drawn for them; a copy."""
        return Positives(self._csr.indptr, self._csr.items, self.num_items)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._users, self._items, self._csr, self._part)

    @cached_property
    def _digest(self) -> str:
        arrays = (self.indptr, self.indices, self.item_counts)
        first_positive = 0 if self._part is None else self._part.first_positive
        place = f"{self.first_user} {first_positive} {self.num_users}"
        return digest(*(np.ascontiguousarray(array).data for array in arrays), place.encode())

    def __len__(self) -> int:
        """Positives, as `num_positives`."""
        return self.num_positives

    def __repr__(self) -> str:
        part = "" if self._part is None else f", {len(self._users)} of them here"
        return (
            f"<fastpipe.Interactions: {self.num_users} users{part}, {self.num_items} items, "
            f"{self.num_positives} positives>"
        )
