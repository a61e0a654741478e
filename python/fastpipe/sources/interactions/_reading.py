"""Reading interactions, with sampled negatives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import flag
from fastpipe._boundary import NegativeSampling
from fastpipe._fastpipe import InteractionsDataset, Positives
from fastpipe._reader.dataset import SourceWording
from fastpipe._reader.options import Options, Settings, takes_options, whole_window
from fastpipe._reader.ordering import within
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import VERSION
from fastpipe.errors import UnseenItemsError
from fastpipe.sources.interactions._interactions import Interactions
from fastpipe.specs import DenseSpec, Features

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
    positives: Positives,
    sampling: NegativeSampling,
    hint: str = "",
) -> None:
    """Sees that there are enough unseen items for each user who has positives.

    Args:
        ids: of the users.
        positives: what they have seen.
        sampling: how negatives are drawn.
        hint: what to do about it, for the error.

    Raises:
        UnseenItemsError: if a user has too few; it names the first.
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
        else f"has fewer than {sampling.negatives} unseen {what}, and as many different negatives are asked for"
    )
    others = f" (as do {len(full) - 1} others)" if len(full) > 1 else ""
    raise UnseenItemsError(f"the user {user!r} {short}{others}{hint}", user=user)


OnFull: TypeAlias = Literal["error", "skip"]

_MOST_UINT16 = 65_536


class PointLocation(NamedTuple):
    """Where a point comes from.

    Attributes:
        user: the user's number.
        positive: the number of the positive, as the data have them: by user, and by item within a user.
        draw: 0 for the positive itself, else which of its negatives it is, from 1.
    """

    user: int
    positive: int
    draw: int


class InteractionsData:
    """Interactions and how negatives are drawn for them: the `Data` of `read_interactions`.

    Args:
        data: the positives.
        negatives: as in `read_interactions`, as are those below.
        item_dtype: of the column `item`.
        label_dtype: of the column `label`.
        repeats: whether the negatives of one positive may be the same.
        sampling: in what proportion unseen items are drawn.
        power: exponent of the popularity.
        on_full: what becomes of users without enough unseen items.
    """

    interpretation: Mapping[str, Any] = MappingProxyType({})
    column_times = None
    words = SourceWording(units="shards", advice={"sampling": "Fewer negatives take less; so do more threads."})

    def __init__(
        self,
        data: Interactions,
        *,
        negatives: SupportsIndex,
        item_dtype: str,
        label_dtype: str,
        repeats: bool,
        sampling: str,
        power: float,
        on_full: str,
    ) -> None:
        self._data = data
        count = within("negatives", negatives, 0, 65_535)
        dtypes: dict[str, Any] = {
            "item_dtype": _dtype("item_dtype", item_dtype, ("uint16", "int32")),
            "label_dtype": _dtype("label_dtype", label_dtype, ("int8", "float32")),
        }
        if dtypes["item_dtype"] == "uint16" and data.num_items > _MOST_UINT16:
            raise ValueError(f"item_dtype uint16 takes up to 65,536 items; got {data.num_items}. Take int32")
        weights = weights_of(data.item_counts, sampling, power)
        if on_full not in ("error", "skip"):
            raise ValueError(f'on_full is "error" or "skip", not {on_full!r}')
        how = NegativeSampling(count, flag("repeats", repeats), weights)
        if on_full == "error":
            hint = ': on_full="skip" leaves such users out'
            check_unseen(data.users, data._positives, how, hint)
        self._options: dict[str, Any] = {
            "negatives": count,
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
        self.symbols: dict[str, list[str]] = {}

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """How many users, items and positives, and how negatives are drawn; and a digest of the positives.

        It is the same in states of all versions.
        """
        options = {name: value for name, value in self._options.items() if name not in ("item_dtype", "label_dtype")}
        if options["sampling"] == "uniform":
            del options["power"]
        return options | self._data.fingerprint()

    def place(self, unit: int, record: int) -> PointLocation:
        """The user, the positive and the draw."""
        _, user, positive, draw = self.handle.place_of(unit, record)
        return PointLocation(user, positive, draw)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._data, self._options)

    def __str__(self) -> str:
        return f"{self._data.num_positives} positives with {self._options['negatives']} negatives each"


def _rebuilt(data: Interactions, options: dict[str, Any]) -> InteractionsData:
    return InteractionsData(data, **options)


def _dtype(name: str, wanted: Any, allowed: tuple[str, ...]) -> str:
    """The name of a column's dtype.

    Raises:
        ValueError: if it isn't one of those that are allowed.
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
    negatives: int = 4,
    batch_size: SupportsIndex,
    item_dtype: Literal["uint16", "int32"] = "int32",
    label_dtype: Literal["int8", "float32"] = "float32",
    repeats: bool = True,
    sampling: Sampling = "uniform",
    power: float = 0.75,
    on_full: OnFull = "error",
    **options: Unpack[Options],
) -> Reader:
    """Reads interactions as batches of points, with negatives that are drawn anew in each epoch.

    Each positive is a point of label 1. For each, `negatives` points of the same user and label 0 follow, whose items
    are drawn from those that the user has no positive with: exactly, each with its probability. Which these are depends
    on seed, epoch, the positive and the number of the negative alone: not on batches, threads, ranks or shards.

    Batches are dicts of `"user"` (int32 `[batch]`, numbers that stand for `data.users`), `"item"` (int32) and `"label"`
    (float32): as embeddings and losses of Torch, JAX and TensorFlow take them. That is 12 bytes a point, or 7 with
    `item_dtype="uint16"` and `label_dtype="int8"`. `memory_limit` doesn't count the positives, which stay in memory.

    Args:
        data: the positives.
        negatives: points with label 0 for each positive, 0 to 65,535.
        batch_size: points a batch.
        item_dtype: `"int32"`, or `"uint16"` for up to 65,536 items, which Torch's embeddings don't take.
        label_dtype: `"float32"`, or `"int8"`, which Torch's `BCEWithLogitsLoss` doesn't take.
        repeats: whether the negatives of one positive are drawn independently, so that some may be the same; False for
            different ones.
        sampling: `"uniform"`, all unseen items alike; or `"popularity"`, in proportion to `data.item_counts ** power`.
            Items that nobody has a positive with are then never drawn, unless `power` is 0.
        power: exponent of the popularity, 0 or more.
        on_full: what becomes of users who have too few unseen items to draw from: none at all or, without repeats,
            fewer than `negatives`. `"error"` raises; `"skip"` leaves out their positives.
        seed: of negatives and shuffling, 0 to 2^64 - 1. One is drawn by default, and shown by `reader.seed`.
        shuffle: True or `"window"`: points are shuffled in windows of `shuffle_buffer` points, each of which is a
            uniform permutation. False: users as they are numbered, and each positive with its negatives behind it.
            Others: as in `fastpipe.Options`; units are shards of 32,000 positives, or more where there are many.
        shuffle_buffer: points of a window, pool or buffer, rounded up to whole batches. By default all points of an
            epoch, up to 2^31, so that it is one uniform permutation. Where that doesn't fit in `memory_limit`, an error
            names the largest number that does.
        epochs: how often each pass goes through the data, each time in another order and with other negatives; None for
            without end.
        **options: see `fastpipe.Options`.

    Returns:
        A `Reader`, as `read_avro` returns it: with states, ranks, `batch_at`, `locate` and `stats`; adapters take it,
        too.

    Raises:
        UnseenItemsError: if a user has too few unseen items; it names the user.
        LimitError: from `iter(reader)`, if `memory_limit` is below the least with which this can be read. It names the
            largest `shuffle_buffer` that fits.
        TypeError: for arguments of the wrong type.
        ValueError: if arguments exclude each other or are out of range.

    Example:
        >>> import fastpipe
        >>> data = fastpipe.Interactions.from_arrays([10, 10, 11, 12], ["a", "b", "b", "c"])
        >>> batch = next(iter(fastpipe.read_interactions(data, negatives=1, batch_size=8, seed=7)))
        >>> batch["user"].shape, int(batch["label"].sum())
        ((8,), 4)
    """
    if not isinstance(data, Interactions):
        raise TypeError(f"data is Interactions, as Interactions.from_arrays makes them, not {type(data).__name__}")
    settings = Settings(read_interactions, batch_size, options)
    source = InteractionsData(
        data,
        negatives=negatives,
        item_dtype=item_dtype,
        label_dtype=label_dtype,
        repeats=repeats,
        sampling=sampling,
        power=power,
        on_full=on_full,
    )
    return settings.reader(source, whole_window(source))
