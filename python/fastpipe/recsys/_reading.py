"""Reads interactions with sampled negatives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag, within
from fastpipe._boundary import NegativeSampling
from fastpipe._fastpipe import InteractionsDataset, Positives
from fastpipe._locations import PointLocation
from fastpipe._omissions import is_large, report, share
from fastpipe._reader.dataset import BaseDataset, SourceWording, whole_window
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import VERSION
from fastpipe.errors import RowsLeftOutWarning, UnseenItemsError
from fastpipe.recsys._interactions import Interactions
from fastpipe.specs import DenseSpec, Features

Sampling: TypeAlias = Literal["uniform", "popularity"]


def weights_of(counts: npt.NDArray[np.int64], sampling: str, power: float) -> npt.NDArray[np.float64] | None:
    """Returns the weight of each item, or None if all items are equally likely.

    Args:
        counts: The number of positives of each item.
        sampling: `"uniform"` or `"popularity"`.
        power: The exponent of the popularity.

    Raises:
        ValueError: If the sampling is unknown, or the power is negative or not finite.
    """
    if sampling not in ("uniform", "popularity"):
        raise ValueError(f'sampling must be "uniform" or "popularity"; got {sampling!r}')
    exponent = float(power)
    if not 0 <= exponent < math.inf:
        raise ValueError(f"power must be 0 or more; got {power!r}")
    if sampling == "uniform" or exponent == 0:
        return None
    # Counts are divided by the maximum, so that large powers don't overflow.
    weights: npt.NDArray[np.float64] = (counts / counts.max(initial=1)) ** exponent
    return weights


def check_unseen(
    ids: np.ndarray,
    positives: Positives,
    sampling: NegativeSampling,
    hint: str = "",
) -> None:
    """Checks that each user with positives has enough unseen items.

    Args:
        ids: The IDs of the users.
        positives: The items that users have seen.
        sampling: How negatives are drawn.
        hint: What the caller can do about the error; added to its message.

    Raises:
        UnseenItemsError: If a user has too few unseen items. It names the first such user.
    """
    full = positives.full_users(sampling)
    if not len(full):
        return
    user = ids[full[0]]
    user = user.item() if isinstance(user, np.generic) else user
    what = "items" if sampling.weights is None else "items that can be drawn"
    short = (
        f"has no unseen {what} to draw negatives from"
        if sampling.repeats or sampling.negatives == 1
        else f"has fewer than {sampling.negatives} unseen {what}, too few for that many different negatives"
    )
    others = f" (as do {len(full) - 1} others)" if len(full) > 1 else ""
    raise UnseenItemsError(f"the user {user!r} {short}{others}{hint}", user=user)


OnFull: TypeAlias = Literal["error", "skip"]

_MOST_UINT16 = 65_536


class InteractionsData(BaseDataset):
    """Interactions, and how negatives are drawn for them: the `Data` of `read_interactions`.

    Args:
        data: The positives.
        num_negatives: The number of negatives for each positive.
        item_dtype: The dtype of the column `item`.
        label_dtype: The dtype of the column `label`.
        repeats: Whether the negatives of a positive may contain the same item twice.
        sampling: `"uniform"` or `"popularity"`: how unseen items are weighted.
        power: The exponent of the popularity.
        on_full: `"error"` or `"skip"`: what to do with users without enough unseen items.
    """

    interpretation: Mapping[str, Any] = MappingProxyType({})
    column_times = None
    words = SourceWording(units="shards", advice={"sampling": "Fewer negatives are faster. More threads help."})

    def __init__(
        self,
        data: Interactions,
        *,
        num_negatives: int,
        item_dtype: str,
        label_dtype: str,
        repeats: bool,
        sampling: str,
        power: float,
        on_full: str,
    ) -> None:
        self._data = data
        count = within("num_negatives", num_negatives, 0, 65_535)
        # The values that `Reader.cache` can't keep.
        self.redrawn = "negatives" if count else None
        dtypes: dict[str, Any] = {
            "item_dtype": _dtype("item_dtype", item_dtype, ("uint16", "int32")),
            "label_dtype": _dtype("label_dtype", label_dtype, ("int8", "float32")),
        }
        if dtypes["item_dtype"] == "uint16" and data.num_items > _MOST_UINT16:
            raise ValueError(f"item_dtype uint16 supports up to 65,536 items; got {data.num_items}. Use int32")
        weights = weights_of(data.item_counts, sampling, power)
        if on_full not in ("error", "skip"):
            raise ValueError(f'on_full must be "error" or "skip"; got {on_full!r}')
        how = NegativeSampling(count, flag("repeats", repeats), weights)
        if on_full == "error":
            hint = ': on_full="skip" leaves such users out'
            check_unseen(data.users, data._positives, how, hint)
        self._options: dict[str, Any] = {
            "num_negatives": count,
            **dtypes,
            "repeats": how.repeats,
            "sampling": sampling,
            "power": float(power),
            "on_full": on_full,
        }
        self.handle = InteractionsDataset(
            data._positives,
            how,
            dtypes=(dtypes["item_dtype"], dtypes["label_dtype"]),
            skip_full=on_full == "skip",
            first=(data.first_user, 0 if data._part is None else data._part.first_positive),
        )
        if data.num_positives and not self.handle.num_rows:
            raise UnseenItemsError("no user has enough unseen items to draw negatives from, so nothing is left to read")
        self.features = Features(
            {
                "user": DenseSpec((), "int32"),
                "item": DenseSpec((), dtypes["item_dtype"]),
                "label": DenseSpec((), dtypes["label_dtype"]),
            }
        )
        self.files: list[str] = []
        self.categories: dict[str, list[str]] = {}

    def report_skipped(self) -> None:
        """Reports positives of users that `on_full="skip"` leaves out."""
        positives = self._data.num_positives
        skipped = positives - self.handle.num_rows // (1 + self._options["num_negatives"])
        if skipped:
            report(
                f"{share(skipped, positives, 'positives')} are left out, because their users have too few unseen items "
                '(on_full="skip")',
                RowsLeftOutWarning if is_large(skipped, positives) else None,
            )

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the counts of users, items and positives, how negatives are drawn, and a digest of the positives.

        It is the same for states of all versions.
        """
        options = {name: value for name, value in self._options.items() if name not in ("item_dtype", "label_dtype")}
        if options["sampling"] == "uniform":
            del options["power"]
        return options | self._data.fingerprint()

    @property
    def holds_units(self) -> bool:
        """Returns False: the rows are in memory anyway."""
        return False

    def default_window(self, batch_size: int) -> int:
        """Returns the number of rows that are shuffled together by default: all."""
        return whole_window(self, batch_size)

    def place(self, unit: int, record: int) -> PointLocation:
        """Returns the user, the positive and the draw of a row."""
        _, user, positive, draw = self.handle.place_of(unit, record)
        row = positive * (1 + self._options["num_negatives"]) + draw
        return PointLocation(row=row, user=user, positive=positive, draw=draw)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._data, self._options)

    def __str__(self) -> str:
        return f"{self._data.num_positives} positives with {self._options['num_negatives']} negatives each"


def _rebuilt(data: Interactions, options: dict[str, Any]) -> InteractionsData:
    return InteractionsData(data, **options)


def _dtype(name: str, wanted: Any, allowed: tuple[str, ...]) -> str:
    """Returns the name of a column's dtype.

    Raises:
        ValueError: If the dtype is not allowed.
    """
    try:
        dtype = None if wanted is None else str(np.dtype(wanted).name)
    except TypeError:
        dtype = None
    if dtype not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}; got {wanted!r}")
    return dtype


@takes_options(shuffle=True)
def read_interactions(
    data: Interactions,
    *,
    num_negatives: int = 4,
    batch_size: int,
    item_dtype: Literal["uint16", "int32"] = "int32",
    label_dtype: Literal["int8", "float32"] = "float32",
    repeats: bool = True,
    sampling: Sampling = "uniform",
    power: float = 0.75,
    on_full: OnFull = "error",
    **options: Unpack[Options],
) -> Reader:
    """Reads interactions as batches of positives and negatives. Each epoch draws new negatives.

    Each positive is a row with label 1, followed by `num_negatives` rows with the same user and label 0. Their items
    are drawn from the items with which the user has no positive. The draws are exact: each unseen item has precisely
    its probability. They depend only on the seed, the epoch, the positive and the index of the negative, not on
    batches, threads, ranks or shards.

    Batches are dicts of `"user"` (int32 `[batch]`, indices into `data.users`), `"item"` (int32) and `"label"`
    (float32), as embeddings and losses of Torch, JAX and TensorFlow expect them. A row has 12 bytes, or 7 bytes with
    `item_dtype="uint16"` and `label_dtype="int8"`. `memory_limit` doesn't count the positives, which stay in memory.

    Args:
        data: The positives.
        num_negatives: The number of rows with label 0 for each positive, 0 to 65,535. Defaults to 4.
        batch_size: Number of rows per batch.
        item_dtype: `"int32"` (the default), or `"uint16"` for up to 65,536 items. Torch's embeddings don't accept
            uint16.
        label_dtype: `"float32"` (the default), or `"int8"`. Torch's `BCEWithLogitsLoss` doesn't accept int8.
        repeats: Whether the negatives of a positive are drawn independently, so that an item may appear twice. False
            draws different items. Defaults to True.
        sampling: `"uniform"` (the default): all unseen items are equally likely. `"popularity"`: items are drawn in
            proportion to `data.item_counts ** power`. Items without positives are then never drawn, unless `power` is
            0.
        power: The exponent of the popularity, 0 or more. Defaults to 0.75.
        on_full: What to do with users who have too few unseen items: none at all or, with `repeats=False`, fewer than
            `num_negatives`. `"error"` (the default) raises `UnseenItemsError`; `"skip"` leaves out the positives of
            these users: the logger `fastpipe` has their count, and `RowsLeftOutWarning` says if they are more than a
            tenth.
        seed: Seed of the negatives and the shuffle, 0 to 2^64 - 1. By default, a random seed is used, which
            `reader.seed` returns.
        shuffle: True (the default) or `"window"` shuffles rows in windows of `shuffle_buffer` rows, each a uniform
            permutation. False reads users in order of their indices, and each positive before its negatives.
            `fastpipe.typing.Options` describes the other orders; their units are shards of 32,000 positives, or more in
            large datasets.
        shuffle_buffer: The number of rows of a window, pool or buffer, rounded up to whole batches. Defaults to all
            rows of an epoch, up to 2^31, so that the epoch is one uniform permutation. If that exceeds `memory_limit`,
            the error message gives the largest value that fits.
        epochs: The number of epochs in each pass. Every epoch has another order and other negatives. None for an
            endless pass. Defaults to 1.
        **options: See `fastpipe.typing.Options`.

    Returns:
        A `Reader`, with states, ranks, `batch_at`, `locate` and `stats`. Adapters accept it.

    Raises:
        UnseenItemsError: If a user has too few unseen items. It names the user.
        LimitError: `iter(reader)` raises it if `memory_limit` is below the minimum. The message gives the largest
            `shuffle_buffer` that fits.
        TypeError: If an argument has the wrong type.
        ValueError: If arguments exclude each other or are out of range.

    Example:
        >>> import fastpipe
        >>> data = fastpipe.recsys.Interactions.from_arrays([10, 10, 11, 12], ["a", "b", "b", "c"])
        >>> batch = next(iter(fastpipe.recsys.read_interactions(data, num_negatives=1, batch_size=8, seed=7)))
        >>> batch["user"].shape, int(batch["label"].sum())
        ((8,), 4)
    """
    if not isinstance(data, Interactions):
        raise TypeError(f"data must be Interactions (see Interactions.from_arrays); got {type(data).__name__}")
    settings = Settings(read_interactions, batch_size, options)
    source = InteractionsData(
        data,
        num_negatives=num_negatives,
        item_dtype=item_dtype,
        label_dtype=label_dtype,
        repeats=repeats,
        sampling=sampling,
        power=power,
        on_full=on_full,
    )
    source.report_skipped()
    return settings.reader(source)
