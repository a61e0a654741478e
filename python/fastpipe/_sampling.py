"""In what proportion negatives are drawn, and whether there are enough to draw from."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe._csr import CSR
from fastpipe.errors import UnseenItemsError

__all__ = ["Sampling", "check_unseen", "weights_of"]

Sampling: TypeAlias = Literal["uniform", "popularity"]


def weights_of(counts: npt.NDArray[np.int64], sampling: str, power: float) -> npt.NDArray[np.float64] | None:
    """The weight of each item; None if all are alike.

    Args:
        counts: positives of each item.
        sampling: `"uniform"` or `"popularity"`.
        power: exponent of the popularity.

    Raises:
        ValueError: if there is no such sampling, or the power isn't a number of 0 or more.
    """
    if sampling not in ("uniform", "popularity"):
        raise ValueError(f'sampling is "uniform" or "popularity", not {sampling!r}')
    exponent = float(power)
    if not 0 <= exponent < math.inf:
        raise ValueError(f"power is a number of 0 or more, not {power!r}")
    if sampling == "uniform" or exponent == 0:
        return None
    # Shares of the most popular one's: large powers don't overflow then.
    weights: npt.NDArray[np.float64] = (counts / counts.max(initial=1)) ** exponent
    return weights


def check_unseen(
    ids: np.ndarray,
    seen: CSR,
    num_items: int,
    weights: npt.NDArray[np.float64] | None,
    needed: int,
    hint: str = "",
) -> None:
    """Sees that each user who has positives has so many unseen items that can be drawn.

    Args:
        ids: of the users.
        seen: what they have seen.
        num_items: number of items.
        weights: of the items; None if all are alike.
        needed: items that must be left.
        hint: what to do about it, for the error.

    Raises:
        UnseenItemsError: if a user has fewer; it names the first.
    """
    if weights is None:
        unseen = num_items - seen.counts
    else:
        drawable = weights > 0
        before = np.concatenate([[0], np.cumsum(drawable[seen.items])])
        unseen = np.count_nonzero(drawable) - np.diff(before[seen.indptr])
    short = (unseen < needed) & (seen.counts > 0)
    if not short.any():
        return
    first = int(short.argmax())
    user, left = ids[first], int(unseen[first])
    user = user.item() if isinstance(user, np.generic) else user
    has = f"only {left} unseen item{'s'[: left != 1]}" if left else "no unseen item"
    drawn = "" if weights is None else " that can be drawn"
    others = int(np.count_nonzero(short)) - 1
    also = f"; so with {others} other user{'s'[: others != 1]}" if others else ""
    more = ", repeats=True draws an item more than once" if needed > 1 and left else ""
    raise UnseenItemsError(f"the user {user!r} has {has}{drawn}, and {needed} are needed{also}{hint}{more}", user=user)
