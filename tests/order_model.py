"""A second implementation of the orders and of their random draws, as simple as possible and independent of fastpipe.

A draw is a word of NumPy's Philox. The key is `(seed, epoch)` and the counter `(position / 4, stream, purpose, 0)`.
`position % 4` selects one of the four resulting words. The upper half of a word's product with `n` is a draw below `n`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

Row: TypeAlias = tuple[int, int]
"""The index of a block over all files, and the index of a record within the block."""

T = TypeVar("T")

UNITS, WINDOW, BUFFER = 1, 2, 3
MOST_IN_TABLE = 65_536


def words(seed: int, epoch: int, purpose: int, stream: int, count: int) -> list[int]:
    """Returns the first `count` draws for a purpose."""
    counter = purpose << 128 | stream << 64
    # NumPy increments the counter before it draws.
    philox = np.random.Philox(counter=(counter - 1) % 2**256, key=epoch << 64 | seed)
    return philox.random_raw(count).tolist()


def below(word: int, n: int) -> int:
    """Converts a word to a draw below `n`."""
    return word * n >> 64


def shuffled(items: Iterable[T], draws: Sequence[int]) -> list[T]:
    """A forward Fisher-Yates shuffle: place `i` receives a random item from the places `i` and later."""
    items = list(items)
    for i, word in enumerate(draws):
        j = i + below(word, len(items) - i)
        items[i], items[j] = items[j], items[i]
    return items


def keyed(count: int, seed: int, epoch: int, rounds: int = 8) -> np.ndarray:
    """Returns the order of more blocks than fit in a table: a Feistel network over the next power of two.

    Results outside of the range are passed through the network again.
    """
    bits = (count - 1).bit_length()
    low, high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    keys = [np.uint64(word) for word in words(seed, epoch, UNITS, 1, rounds)]

    def mix(half: np.ndarray, key: np.uint64, bits: np.uint64) -> np.ndarray:
        x = (half ^ key) * np.uint64(0x9E37_79B9_7F4A_7C15)
        return (x ^ x >> np.uint64(32)) * np.uint64(0xD6E8_FEB8_6659_FD93) >> np.uint64(64) - bits

    def network(x: np.ndarray) -> np.ndarray:
        lower, upper = x & (np.uint64(1) << low) - np.uint64(1), x >> low
        for i in range(0, rounds, 2):
            upper = upper ^ mix(lower, keys[i], high)
            lower = lower ^ mix(upper, keys[i + 1], low)
        return upper << low | lower

    order = network(np.arange(count, dtype=np.uint64))
    while (outside := order >= count).any():
        order[outside] = network(order[outside])
    return order.astype(np.int64)


def units(count: int, seed: int, epoch: int) -> list[int]:
    """Returns the order of blocks in an epoch of windows."""
    if count > MOST_IN_TABLE:
        return keyed(count, seed, epoch).tolist()
    return shuffled(range(count), words(seed, epoch, UNITS, 0, count))


def window(counts: Sequence[int], n: int, seed: int, epoch: int) -> list[Row]:
    """Takes all blocks in random order, cuts them into windows of `n` rows, and shuffles each window."""
    rows = [(block, record) for block in units(len(counts), seed, epoch) for record in range(counts[block])]
    out = []
    for stream, start in enumerate(range(0, len(rows), n)):
        inside = rows[start : start + n]
        out += shuffled(inside, words(seed, epoch, WINDOW, stream, len(inside)))
    return out


def buffer(counts: Sequence[int], n: int, seed: int, epoch: int, shard: int = 0) -> list[Row]:
    """Keeps a buffer of `n` rows.

    A random row is drawn, the first row takes its place, and the next row is appended.
    """
    rows = sequential(counts)
    waiting, out = rows[:n], []
    for i, word in enumerate(words(seed, epoch, BUFFER, shard, len(rows))):
        j = below(word, len(waiting))
        out.append(waiting[j])
        waiting[j] = waiting[0]
        waiting = waiting[1:] + rows[i + n : i + n + 1]
    return out


def block(counts: Sequence[int], n: int, seed: int, epoch: int, shard: int = 0) -> list[Row]:
    """Keeps a pool of at least `n` rows, which whole blocks enter.

    Each row adds a ticket with its block's index to a buffer. A drawn ticket only determines the block of the next row.
    """
    coming = list(enumerate(counts))
    lots: list[int] = []
    read, out = [0] * len(counts), []
    for word in words(seed, epoch, BUFFER, shard, sum(counts)):
        while len(lots) < n and coming:
            number, rows = coming.pop(0)
            lots += [number] * rows
        j = below(word, len(lots))
        drawn = lots[j]
        out.append((drawn, read[drawn]))
        read[drawn] += 1
        lots[j] = lots[0]
        del lots[0]
    return out


def sequential(counts: Sequence[int]) -> list[Row]:
    """Returns blocks and records in stored order."""
    return [(number, record) for number, rows in enumerate(counts) for record in range(rows)]


def rows(
    counts: Sequence[int], *, shuffle: str, shuffle_buffer: int, batch_size: int, seed: int, epoch: int, shard: int = 0
) -> list[Row]:
    """Returns an epoch of blocks with these row counts. `fastpipe.read_avro` documents the arguments.

    Args:
        shard: The rank, if ranks have separate blocks. `counts` then contains only the rank's blocks.
    """
    if shuffle == "sequential":
        return sequential(counts)
    if shuffle == "window":
        # Windows contain whole batches.
        return window(counts, -(-shuffle_buffer // batch_size) * batch_size, seed, epoch)
    return {"buffer": buffer, "block": block}[shuffle](counts, shuffle_buffer, seed, epoch, shard)


def batches(rows: Sequence[Row], batch_size: int, drop_last: bool) -> list[list[Row]]:
    """Cuts an epoch into batches."""
    cut = [list(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    return [batch for batch in cut if len(batch) == batch_size or not drop_last]
