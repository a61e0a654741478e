"""In what proportion negatives are drawn, and whether there are enough to draw from."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fastpipe import _fastpipe
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
    positives: _fastpipe.Positives,
    *,
    negatives: int,
    repeats: bool,
    weights: npt.NDArray[np.float64] | None,
    hint: str = "",
) -> None:
    """Sees that there are enough unseen items for each user who has positives.

    Args:
        ids: of the users.
        positives: what they have seen.
        negatives: how many are drawn for each positive.
        repeats: whether these may be the same.
        weights: of the items; None if all are alike.
        hint: what to do about it, for the error.

    Raises:
        UnseenItemsError: if a user has too few; it names the first.
    """
    full = positives.full_users(negatives=negatives, repeats=repeats, weights=weights)
    if not len(full):
        return
    user = ids[full[0]]
    user = user.item() if isinstance(user, np.generic) else user
    what = "items" if weights is None else "items that can be drawn"
    short = (
        f"has no unseen {what} to draw negatives from"
        if repeats or negatives == 1
        else f"has fewer than {negatives} unseen {what}, and as many different negatives are asked for"
    )
    others = f" (as do {len(full) - 1} others)" if len(full) > 1 else ""
    raise UnseenItemsError(f"the user {user!r} {short}{others}{hint}", user=user)
