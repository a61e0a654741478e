"""From interactions as they come to numbered users, numbered items and their positives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fastpipe._reader.ordering import within
from fastpipe.batch._csr import CSR, Duplicates, compress, core
from fastpipe.errors import InteractionsError
from fastpipe.sources.interactions._ids import Codes, IdEncoder, Vocabulary
from fastpipe.sources.interactions._sources import Chunk

__all__ = ["prepare"]

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
