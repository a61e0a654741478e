"""Interactions of users and items: indexed users and items, and their positives."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import within
from fastpipe._fastpipe import Positives
from fastpipe._files._in_memory_files import Source, opened
from fastpipe._files._index_cache import IndexCache
from fastpipe._files._paths import Paths
from fastpipe._omissions import report, share
from fastpipe._private_constructor import private_constructor
from fastpipe._reader.ordering import digest
from fastpipe.batch._form import described
from fastpipe.csv._reading import DEFAULT_NULLS, SUFFIXES, CsvData, Dialect, Header, OnRagged
from fastpipe.errors import InteractionsError, RowsLeftOutWarning
from fastpipe.recsys import _shards, _sources
from fastpipe.recsys._csr import CSR, Duplicates, compress, core
from fastpipe.recsys._ids import Codes, IdEncoder, Vocabulary
from fastpipe.recsys._sources import Chunk, Columns
from fastpipe.specs import Features, Spec

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
    """Assigns indices to users and items, and converts their interactions to the compact form.

    Args:
        chunks: The interactions.
        duplicates: Whether to keep the `"first"` or the `"last"` of several interactions of a user and an item.
        min_per_user: The minimum number of positives of a user.
        min_per_item: The minimum number of positives of an item.
        users: All user IDs; None for the users with positives.
        items: All item IDs; None for the items with positives.

    Returns:
        The users, the items, and the positives.

    Raises:
        InteractionsError: If the interactions are invalid.
        ValueError: If an option is out of range.
    """
    if duplicates not in ("first", "last"):
        raise ValueError(f'duplicates must be "first" or "last"; got {duplicates!r}')
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
    if repeated := len(user_codes) - len(csr.items):
        report(
            f"{share(repeated, len(user_codes), 'interactions')} repeat the user and the item of another one: "
            f'duplicates="{duplicates}" keeps one of each'
        )
    del user_codes, item_codes, times
    if least_user > 1 or least_item > 1:
        before = len(csr.items), len(user_numbers), len(item_numbers)
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
                f"no interactions remain with min_per_user={least_user} and min_per_item={least_item}: lower them"
            )
        _check_counts(len(csr.items), len(user_numbers), len(item_numbers))
        _report_filtered(before, (len(csr.items), len(user_numbers), len(item_numbers)), least_user, least_item)
    return user_numbers, item_numbers, csr


def _encode(chunks: Iterable[Chunk]) -> tuple[Vocabulary, Codes, Vocabulary, Codes, np.ndarray | None]:
    """Returns the IDs and indices of users and items, and the times, of all chunks together."""
    users, items = IdEncoder("user"), IdEncoder("item")
    times: list[np.ndarray] = []
    for chunk in chunks:
        lengths = {"user ids": users.add(chunk.users), "item ids": items.add(chunk.items)}
        if chunk.times is not None:
            lengths["timestamps"] = len(chunk.times)
            times.append(chunk.times)
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise InteractionsError(f"the counts must be equal: there are {counts}")
    return *users.finish(), *items.finish(), _joined(times) if times else None


def _joined(times: list[np.ndarray]) -> np.ndarray:
    return times[0] if len(times) == 1 else np.concatenate(times)


def _renumbered(found: Vocabulary, codes: Codes, known: Vocabulary | None, what: str) -> tuple[Vocabulary, Codes]:
    return (found, codes) if known is None else (known, known.places_of(found, what).astype(np.uint32)[codes])


def _report_filtered(
    before: tuple[int, int, int], after: tuple[int, int, int], least_user: int, least_item: int
) -> None:
    """Reports positives, users and items that the minimum counts leave out."""
    positives, users, items = (old - new for old, new in zip(before, after, strict=True))
    if positives or users or items:
        report(
            f"{share(positives, before[0], 'positives')}, {share(users, before[1], 'users')} and "
            f"{share(items, before[2], 'items')} are left out, with min_per_user={least_user} and "
            f"min_per_item={least_item}",
            RowsLeftOutWarning if 2 * positives > before[0] else None,
        )


def _check_counts(positives: int, users: int, items: int) -> None:
    if positives == 0:
        raise InteractionsError("there are no interactions")
    for count, what in ((users, "user"), (items, "item")):
        if count > _LARGEST:
            raise InteractionsError(f"there are {count} {what}s, but the maximum is 2^31 - 1")
        if count < 2:
            raise InteractionsError(f"there is only one {what}: at least two {what}s are required")


LARGEST = 2**31 - 1


class HeldOut(NamedTuple):
    """Positives that are held out of training.

    Attributes:
        users: int64 `[m]`, the indices of users, as in batches.
        items: int64 `[m]`, the index of each positive's item.
    """

    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]

    def __repr__(self) -> str:
        return described(self)


class Interactions:
    """The positives of implicit feedback: which user has interacted with which items.

    Class methods such as `from_arrays` create the object. Users and items get dense indices from 0, which batches
    contain: index `u` stands for `users[u]`. Indices follow the sorted order of the IDs, so the order of the input
    doesn't matter. The object takes 4 bytes per positive (8 with timestamps) and 8 bytes per user, plus the IDs.

    All class methods that prepare interactions accept these options:

    - `duplicates`: Which of several interactions of the same user and item to keep, the `"first"` or the `"last"` in
      time. For equal times, or without times, the order of the input decides.
    - `min_per_user`, `min_per_item`: Leave out users and items with fewer positives, repeatedly, until none is left.
      The logger `fastpipe` has their counts. If more than half of the positives are left out, `RowsLeftOutWarning`
      says so.
      The result is the largest set in which all users and items have enough positives (with both options equal to k,
      the k-core).
    - `users`, `items`: All IDs, in the order of their indices. By default, only users and items with positives get
      indices. With these options, users and items may have no positives, every item can be drawn as a negative, and an
      unlisted ID raises an error. To give a test set the indices of its training set, pass `users=train.users` and
      `items=train.items`.

    They raise `InteractionsError` if IDs are negative, missing, of mixed types, or neither integers nor strings; if
    timestamps are missing; if lengths differ; or if there are fewer than two users or two items.

    Example:
        >>> import fastpipe
        >>> data = fastpipe.recsys.Interactions.from_arrays([10, 10, 11, 12], ["a", "b", "b", "c"])
        >>> data.num_users, data.num_items, data.num_positives
        (3, 3, 4)
    """

    @private_constructor("Interactions.from_arrays(...) or another of its from_ methods")
    def _of(self, users: Vocabulary, items: Vocabulary, csr: CSR, part: _shards.Part | None = None) -> None:
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
        """Creates interactions from arrays, lists or other sequences, with one element per interaction.

        If integer IDs repeat many times, preparing them temporarily takes up to 12 bytes per interaction, or 24 bytes
        with timestamps, in addition to the arrays: up to 1.5 times the memory of the arrays. It uses all processors.

        Args:
            user_ids: `[n]`, integers from 0 to 2^64 - 1, strings, or bytes, but not a mixture.
            item_ids: `[n]`, like `user_ids`.
            timestamps: `[n]`, numbers or datetime64. Only their order matters. Defaults to None: no times.
            duplicates: Whether to keep the `"first"` (the default) or the `"last"` of several interactions of a user
                and an item.
            min_per_user: The minimum number of positives of a user. Defaults to 1.
            min_per_item: The minimum number of positives of an item. Defaults to 1.
            users: All user IDs, in the order of their indices. Defaults to the users with positives.
            items: All item IDs, in the order of their indices. Defaults to the items with positives.

        Raises:
            InteractionsError: If the interactions are invalid; the class documentation lists the reasons.
            ValueError: If an option is out of range.
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
        return cls._of(*prepared)

    @classmethod
    def from_avro(
        cls, source: Paths, *, user: str = "user", item: str = "item", timestamp: str | None = None, **options: Any
    ) -> Self:
        """Creates interactions from Avro files with one record per interaction.

        Args:
            source: A path, a glob, a directory (all `*.avro` files below it), or a list of these.
            user: The column of user IDs: integers, strings, bytes or an enum. Logical types such as uuid are read as
                the values that are stored.
            item: The column of item IDs, with the same types.
            timestamp: The column of times, which must be numbers. Defaults to None: no times.
            options: The options `duplicates`, `min_per_user`, `min_per_item`, `users` and `items` of `from_arrays`.

        Raises:
            InteractionsError: If the interactions are invalid (see the class documentation) or a value is null.
            SchemaError: If a column does not exist, or doesn't have one value per record.
            UnsupportedError: If a column has another type.
            FastpipeError: If the files can't be read; `read_avro` lists the errors.
        """
        return cls._of(*prepare(_sources.from_avro(source, Columns(user, item, timestamp)), **options))

    @classmethod
    def from_arrow(
        cls, source: Any, *, user: str = "user", item: str = "item", timestamp: str | None = None, **options: Any
    ) -> Self:
        """Creates interactions from a `pyarrow.Table` or another Arrow stream, such as a data frame (extra `arrow`).

        Args:
            source: A table, or an object with `__arrow_c_stream__`, which is read once.
            user: The column of user IDs: integers, strings, binary, or a dictionary of these types.
            item: The column of item IDs, with the same types.
            timestamp: The column of times: numbers, dates or timestamps. Defaults to None: no times.
            options: The options `duplicates`, `min_per_user`, `min_per_item`, `users` and `items` of `from_arrays`.

        Raises:
            InteractionsError: If the interactions are invalid (see the class documentation) or a value is null.
            SchemaError: If a column does not exist.
        """
        return cls._of(*prepare(_sources.from_arrow(source, Columns(user, item, timestamp)), **options))

    @classmethod
    def from_csv(
        cls,
        source: Source,
        *,
        user: str = "user",
        item: str = "item",
        timestamp: str | None = None,
        overrides: Mapping[str, Spec] | None = None,
        delimiter: str = ",",
        quote: str | None = '"',
        header: Header = True,
        comment: str | None = None,
        decimal: str = ".",
        null_values: Sequence[str] = DEFAULT_NULLS,
        on_ragged: OnRagged = "error",
        index_cache: IndexCache = None,
        **options: Any,
    ) -> Self:
        r"""Creates interactions from CSV files, which `read_csv` reads.

        IDs are integers if the text of all of them is that of an integer, and otherwise text: if one ID is `007`, then
        all IDs of the column are text. Types are inferred as `read_csv` describes. If a row that inference didn't read
        has another type or leading zeros, `ValueRangeError` contains the argument to pass.

        Args:
            source: The files: a path, a glob, a directory, bytes, a binary file object, or a list of these, compressed
                or not (see `read_csv`).
            user: The column of user IDs.
            item: The column of item IDs.
            timestamp: The column of times: numbers, dates or times. Defaults to None: no times.
            overrides: The specs of these columns, by name, instead of the inferred ones. `DenseSpec((), "int64")` reads
                `007` as 7, and `DenseSpec((), "string")` reads `7` as text. Defaults to None.
            delimiter: The ASCII character between fields. Defaults to ",".
            quote: The ASCII character that quotes fields. None disables quoting. Defaults to '"'.
            header: True (the default) if the first row names the columns; False, or the names of the columns, for files
                without a header.
            comment: The ASCII character that begins comment lines. Defaults to None: there are no comments.
            decimal: The ASCII character before the decimals of a time. Defaults to ".".
            null_values: The fields that are null, which is an error. Pass `[]` if an ID is called "NA", for example.
            on_ragged: "error" (the default) or "skip": what to do with a row that has too many or too few fields.
            index_cache: A directory that keeps the offsets of all rows; True for the user's cache directory. Defaults
                to None: no cache.
            options: The options `duplicates`, `min_per_user`, `min_per_item`, `users` and `items` of `from_arrays`.

        Raises:
            InteractionsError: If the interactions are invalid (see the class documentation), or a value is missing.
            SchemaError: If a column does not exist, or exists more than once.
            ValueRangeError: If a field has another type than its column.
            ValueError: If `overrides` names another column, or an argument is out of range.
            FastpipeError: If the files can't be read; `read_csv` lists the errors.

        Example:
            >>> import fastpipe
            >>> data = fastpipe.recsys.Interactions.from_csv(b"user,item\n007,1\n7,1\n7,2\n")
            >>> data.users.tolist(), data.items.tolist()
            (['007', '7'], [1, 2])
        """
        columns = Columns(user, item, timestamp)
        given = {} if overrides is None else dict(Features(overrides))
        if others := [name for name in given if name not in columns.wanted]:
            raise ValueError(f"overrides must name the columns {columns.wanted}; got {others[0]!r}")
        dialect = Dialect.of(delimiter, quote, header, comment, decimal, null_values, on_ragged)
        data = CsvData(opened(source, SUFFIXES), dialect, None, columns.wanted, index_cache)
        data.report_skipped()
        return cls._of(*prepare(_sources.from_csv(data, columns, given), **options))

    @classmethod
    def from_movielens(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Creates interactions from MovieLens ratings with their times. Each rating is an interaction.

        Args:
            path: The path of `u.data` (100k), `ratings.dat` (1M, 10M), `ratings.csv` (20M and later), or an `.inter`
                file of RecBole.
            options: The options `duplicates`, `min_per_user`, `min_per_item`, `users` and `items` of `from_arrays`.

        Raises:
            InteractionsError: If the file has another format.
            MissingFileError: If the file does not exist.
            StorageError: If the file can't be read.
        """
        return cls._of(*prepare(_sources.from_movielens(path), **options))

    @property
    def users(self) -> np.ndarray:
        """The IDs of users: int64 (uint64 if an ID is 2^63 or more), or objects that are all str or all bytes.

        The shape is `[num_users]`. If only some shards are read, it contains their users, from index `first_user`.
        """
        return self._users.ids

    @property
    def items(self) -> np.ndarray:
        """The IDs of items, `[num_items]`, with the same types as `users`."""
        return self._items.ids

    @property
    def num_users(self) -> int:
        """The number of users, including users of other shards. Indices of users are smaller."""
        return len(self._users) if self._part is None else self._part.num_users

    @property
    def num_items(self) -> int:
        """The number of items. Indices of items are smaller."""
        return len(self._items)

    @property
    def num_positives(self) -> int:
        """The number of positives. If only some shards are read, only their positives count."""
        return len(self._csr.items)

    @property
    def first_user(self) -> int:
        """The index of the first user: 0, unless only some shards are read and the first shard is missing."""
        return 0 if self._part is None else self._part.first_user

    @property
    def indptr(self) -> npt.NDArray[np.int64]:
        """The offsets of each user's positives in `indices`, int64 `[len(users) + 1]`; read-only."""
        return self._csr.indptr

    @property
    def indices(self) -> npt.NDArray[np.uint32]:
        """The items of all users, user by user, ascending within a user: uint32 `[num_positives]`; read-only."""
        return self._csr.items

    @cached_property
    def item_counts(self) -> npt.NDArray[np.int64]:
        """The number of positives of each item, int64 `[num_items]`, including positives of other shards."""
        if self._part is not None:
            return self._part.item_counts
        return np.bincount(self._csr.items, minlength=self.num_items)

    def user_indices(self, ids: Any) -> npt.NDArray[np.int64]:
        """Returns the indices of users, int64 `[n]`, from their IDs. It is the inverse of `users`.

        Raises:
            InteractionsError: If an ID is unknown.
        """
        return self.first_user + self._users.encode(ids, "user")

    def item_indices(self, ids: Any) -> npt.NDArray[np.int64]:
        """Returns the indices of items, int64 `[n]`, from their IDs. It is the inverse of `items`.

        Raises:
            InteractionsError: If an ID is unknown.
        """
        return self._items.encode(ids, "item")

    def leave_one_out(self) -> tuple[Self, HeldOut]:
        """Holds out the latest positive of each user with at least two positives.

        For equal times, the last positive in the input is the latest. Users and items keep their indices. Call the
        method again on the training set to hold out a validation set.

        Returns:
            The training set and the held-out positives.

        Raises:
            InteractionsError: If there are no timestamps, or only some shards are read.
        """
        if self._part is not None:
            raise InteractionsError("only some of the shards are read: call leave_one_out before you write shards")
        if self._csr.sequence is None:
            raise InteractionsError(
                "leave_one_out needs timestamps: if the input is ordered by time, pass timestamps=numpy.arange(n)"
            )
        counts, users = self._csr.counts, self._csr.users()
        held = (self._csr.sequence == (counts - 1)[users]) & (counts > 1)[users]
        held_out = HeldOut(users[held], self._csr.items[held].astype(np.int64))
        return type(self)._of(self._users, self._items, self._csr.keep(~held)), held_out

    def write_shards(
        self, folder: str | os.PathLike[str], *, format: _shards.Format = "avro", shard_positives: int = 32_000
    ) -> list[str]:
        """Writes shards that `from_shards` can read together or separately.

        A shard is a file of the users `first_user` to `first_user + n - 1` and all of their positives. The file `items`
        next to the shards contains the IDs and counts of items, which all shards need.

        Args:
            folder: The folder of the files, which is created if necessary.
            format: `"avro"` (the default) or `"arrow"`, Arrow's IPC format (extra `arrow`).
            shard_positives: The number of positives at which a shard ends, after the current user. Defaults to 32,000.

        Returns:
            The paths of the shards.

        Raises:
            FileExistsError: If the folder already contains shards.
            InteractionsError: If only some shards are read.
            UnsupportedError: If IDs of 2^63 or more are written to Avro files.
        """
        if self._part is not None:
            raise InteractionsError("only some of the shards are read: read and write all shards together")
        most = within("shard_positives", shard_positives, 1, LARGEST)
        return _shards.write(os.fspath(folder), format, most, self._users, self._items, self._csr)

    @classmethod
    def from_shards(cls, source: Paths) -> Self:
        """Reads all shards, or consecutive shards, that `write_shards` wrote.

        Users have the same indices and get the same negatives, no matter how many shards are read. Each of several
        workers can therefore read its own shards.

        Args:
            source: A folder that contains all shards, or the paths of consecutive shards in order. The file `items`
                must be next to the first shard.

        Raises:
            MissingFileError: If a file does not exist.
            InteractionsError: If shards belong to different data, aren't consecutive, or have invalid content.
            MalformedFileError: If a file is damaged, or its content doesn't match its checksum.
            UnsupportedError: If a later version of fastpipe wrote the shards.
        """
        return cls._of(*_shards.read(source))

    def fingerprint(self) -> dict[str, Any]:
        """Returns a JSON value that identifies the data: the counts of users, items and positives, and a digest."""
        return {
            "users": len(self._users),
            "items": self.num_items,
            "positives": self.num_positives,
            "digest": self._digest,
        }

    @cached_property
    def _positives(self) -> Positives:
        """A copy of the positives in the form that negatives are drawn from."""
        return Positives(self._csr.indptr, self._csr.items, self.num_items)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._users, self._items, self._csr, self._part)

    @cached_property
    def _digest(self) -> str:
        arrays = (self.indptr, self.indices, self.item_counts)
        first_positive = 0 if self._part is None else self._part.first_positive
        place = f"{self.first_user} {first_positive} {self.num_users}"
        return digest(*(np.ascontiguousarray(array).data for array in arrays), place.encode())

    def __len__(self) -> int:
        """Returns the number of positives, like `num_positives`."""
        return self.num_positives

    def __repr__(self) -> str:
        part = "" if self._part is None else f", {len(self._users)} of them here"
        return (
            f"<fastpipe.recsys.Interactions: {self.num_users} users{part}, {self.num_items} items, "
            f"{self.num_positives} positives>"
        )


def _rebuilt(users: Vocabulary, items: Vocabulary, csr: CSR, part: _shards.Part | None) -> Interactions:
    return Interactions._of(users, items, csr, part)
