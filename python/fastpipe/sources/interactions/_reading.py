"""Reading interactions, with sampled negatives."""

from __future__ import annotations

from typing import Literal, SupportsIndex, Unpack

from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe.sources.interactions._data import InteractionsData, OnFull, Sampling
from fastpipe.sources.interactions._interactions import Interactions

__all__ = ["read_interactions"]


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
    return settings.reader(source, source.default_window)
