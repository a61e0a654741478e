"""Compares negative sampling and whole epochs of interactions with NumPy implementations.

The two synthetic datasets have the numbers of users, items, and positives of MovieLens-1M and MovieLens-20M. The number
of positives per user is log-normal.

**Samplers**, on the first dataset: Each draws four negatives per positive from the items that the user has no positive
for. The samplers take turns on the same arrays with the same number of threads, and their results are checked. `bisect`
and `reject` run in two variants: one call per user, and an unusually optimized one that handles 64 users per call.

**An epoch** of the second dataset: 100 million rows are drawn, permuted, and returned in batches of 98,304. `numpy`
draws with `bisect`, permutes an index of all rows, and gathers each batch. This is the work of a DataLoader's sampler
and collate function, without their Python code per row. Targets: at most 5 s on two cores, and at most 2 GB of memory
in addition to the dataset.

**Pipelines** for the points of the first dataset, 7 bytes each, in batches of 16,384, shuffled through a buffer of
131,072 points: `tf.data`'s `shuffle().batch()` and `batch().shuffle()` (which shuffles whole batches), over points
whose negatives were drawn before; `Rebatcher` over the same points in batches of 8,192; and `read_interactions`, which
also draws the negatives. All have the same number of threads. tf.data is slow, so it reads only the first points.

A quick run uses a tenth of the second dataset and doesn't check its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import fastpipe
from fastpipe import _fastpipe
from fastpipe._boundary import NegativeSampling
from harness import Bench, CannotError, Turn, sampled, take_turns
from harness.data import cores

NEGATIVES = 4
BATCH = 98_304
CHUNK = 64
"""Number of users that the peers process per call. It is small so that their arrays stay in the CPU cache."""

Items = npt.NDArray[np.uint32]


class Positives(NamedTuple):
    """Items of each user in ascending order."""

    indptr: npt.NDArray[np.int64]
    items: Items
    num_items: int

    @property
    def users(self) -> npt.NDArray[np.int64]:
        """User of each positive."""
        return np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))


def positives(users: int, items: int, total: int, seed: int = 1) -> Positives:
    """Draws about `total` positives. A few users have many of them."""
    rng = np.random.default_rng(seed)
    weights = rng.lognormal(0, 1.05, users)
    for _ in range(20):
        # Clipping changes the total, so rescale repeatedly.
        weights *= total / np.clip(weights, 20, items // 2).sum()
    counts = np.clip(weights, 20, items // 2).astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    owners = np.repeat(np.arange(users), counts)
    # Draw one item from each of `counts` equal ranges.
    at = np.arange(indptr[-1]) - indptr[owners] + rng.random(indptr[-1])
    found = (at * (items / counts[owners])).astype(np.uint32)
    keep = np.append(True, (found[1:] != found[:-1]) | (owners[1:] != owners[:-1]))
    kept = np.bincount(owners[keep], minlength=users)
    return Positives(np.concatenate([[0], np.cumsum(kept)]).astype(np.int64), found[keep], items)


Draw = Callable[[Positives, int, int, np.random.Generator, Items], None]
"""Draws the negatives for the positives of the users `first` to `end - 1`."""


def complement(data: Positives, first: int, end: int, rng: np.random.Generator, out: Items) -> None:
    """Lists the unseen items of each user, and draws from the list."""
    start = data.indptr[first]
    unseen = np.ones(data.num_items, bool)
    for user in range(first, end):
        low, high = data.indptr[user], data.indptr[user + 1]
        seen = data.items[low:high]
        unseen[seen] = False
        listed = np.flatnonzero(unseen).astype(np.uint32)
        unseen[seen] = True
        ranks = rng.integers(len(listed), size=(high - low, NEGATIVES), dtype=np.uint32)
        np.take(listed, ranks, out=out[low - start : high - start])


def bisect(data: Positives, first: int, end: int, rng: np.random.Generator, out: Items) -> None:
    """Draws a rank among the unseen items, and finds that item by bisection over the sorted positives.

    From each positive, subtract the number of smaller positives. The number of results that are at most k is the number
    of positives before the k-th unseen item.
    """
    low, high = data.indptr[first], data.indptr[end]
    counts = np.diff(data.indptr[first : end + 1])
    users = np.repeat(np.arange(end - first), counts)
    ranks_of_positives = data.items[low:high] - (np.arange(high - low) - (data.indptr[first:end] - low)[users])
    unseen = data.num_items - counts
    ranks = rng.integers(0, np.repeat(unseen, counts)[:, None], size=(high - low, NEGATIVES))
    # Store all users in one sorted array. Each user is shifted past the previous one.
    step = data.num_items + 1
    at = np.searchsorted(ranks_of_positives + users * step, ranks + (users * step)[:, None], side="right")
    out[:] = ranks + at - (data.indptr[first:end] - low)[users][:, None]


def reject(data: Positives, first: int, end: int, rng: np.random.Generator, out: Items) -> None:
    """Draws from all items, and redraws each item that `searchsorted` finds among the positives."""
    low, high = data.indptr[first], data.indptr[end]
    users = np.repeat(np.arange(end - first), np.diff(data.indptr[first : end + 1]))
    keys = users * data.num_items + data.items[low:high]
    starts = np.repeat(users * data.num_items, NEGATIVES)
    flat = out.reshape(-1)
    left = np.arange(flat.size)
    while left.size:
        flat[left] = rng.integers(data.num_items, size=left.size, dtype=np.uint32)
        wanted = starts[left] + flat[left]
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        left = left[keys[at] == wanted]


def in_threads(draw: Draw, data: Positives, threads: int, seed: int, chunk: int = CHUNK) -> Items:
    """Draws the negatives for all positives with a peer in several threads."""
    out = np.empty((len(data.items), NEGATIVES), np.uint32)
    users = len(data.indptr) - 1

    def some(first: int) -> None:
        end = min(first + chunk, users)
        draw(data, first, end, np.random.default_rng([seed, first]), out[data.indptr[first] : data.indptr[end]])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, range(0, users, chunk)))
    return out


def check(data: Positives, negatives: Items) -> None:
    """Checks that the user hasn't seen any of the negatives, and that all items are drawn about equally often."""
    users = data.users
    keys = users * data.num_items + data.items
    wanted = (users[:, None] * data.num_items + negatives).reshape(-1)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    if negatives.max() >= data.num_items or (keys[at] == wanted).any():
        raise RuntimeError("a negative is a positive")

    # Each tenth of the items must be drawn at the rate expected from the users who haven't seen them.
    def tenth(of: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        return of.astype(np.int64) * 10 // data.num_items

    counts = np.diff(data.indptr)
    seen = np.bincount(users * 10 + tenth(data.items), minlength=len(counts) * 10).reshape(-1, 10)
    sizes = np.bincount(tenth(np.arange(data.num_items)), minlength=10)
    fair = (counts[:, None] * NEGATIVES * (sizes - seen) / (data.num_items - counts)[:, None]).sum(0)
    found = np.bincount(tenth(negatives.reshape(-1)), minlength=10)
    if (np.abs(found - fair) > 6 * np.sqrt(fair)).any():
        raise RuntimeError(f"a tenth of the items is drawn at the wrong rate: {found} instead of {fair}")


def samplers(bench: Bench) -> None:
    """Compares the negative sampling of fastpipe and its peers."""
    data, threads = positives(6_040, 3_706, 1_000_209), bench.args.threads
    handle = _fastpipe.Positives(*data)
    tasks: dict[str, Callable[[], Items]] = {
        "fastpipe": lambda: handle.sample_negatives(NegativeSampling(NEGATIVES), seed=1, num_threads=threads),
        "complement": lambda: in_threads(complement, data, threads, 1),
        "bisect": lambda: in_threads(bisect, data, threads, 1, chunk=1),
        "reject": lambda: in_threads(reject, data, threads, 1, chunk=1),
        f"bisect, {CHUNK}": lambda: in_threads(bisect, data, threads, 1),
        f"reject, {CHUNK}": lambda: in_threads(reject, data, threads, 1),
    }
    for task in tasks.values():
        check(data, task())
    # Drop the negatives immediately to save memory.
    turns = take_turns({name: partial(lambda task: len(task()), task) for name, task in tasks.items()}, bench.rounds)
    count = len(data.items) * NEGATIVES
    title = f"{count:,} negatives for {len(data.items):,} positives of 6,040 users and 3,706 items; {threads} threads"
    columns = ("million/s|,.3f", "fastpipe is times as fast|,.3f", "by CPU time|,.3f", "wanted|", "|")
    row = bench.table("sampler", *columns, title=title)
    row("fastpipe", count / 1e6 / turns.median("fastpipe"))
    wanted: dict[str, float] = {"complement": 2, "bisect": 10, "reject": 10}
    for name in list(tasks)[1:]:
        times, by_cpu = (turns.ratio(name, "fastpipe", figure).median for figure in ("seconds", "cpu"))
        least = wanted.get(name)
        kept = None if least is None else bench.bound(name, times, least=least)
        row(name, count / 1e6 / turns.median(name), times, by_cpu, least, kept)


def points_of(data: Positives, negatives: Items) -> dict[str, npt.NDArray[Any]]:
    """Returns the columns of all points: each positive, followed by its negatives."""
    rows = 1 + NEGATIVES
    items = np.empty((len(data.items), rows), np.uint16)
    items[:, 0], items[:, 1:] = data.items, negatives
    labels = np.zeros((len(data.items), rows), np.int8)
    labels[:, 0] = 1
    users = np.repeat(data.users.astype(np.int32), rows)
    return {"user": users, "item": items.reshape(-1), "label": labels.reshape(-1)}


def epoch_by_numpy(data: Positives, threads: int, seed: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Draws, permutes, and gathers an epoch with NumPy."""
    columns = points_of(data, in_threads(bisect, data, threads, seed))
    order = np.random.default_rng(seed).permutation(len(columns["user"]))
    for start in range(0, len(order), BATCH):
        index = order[start : start + BATCH]
        yield {name: column[index] for name, column in columns.items()}


def pipelines(bench: Bench) -> None:
    """Compares shuffled batches of points with those of tf.data."""
    data, threads, batch, incoming = positives(6_040, 3_706, 1_000_209), bench.args.threads, 16_384, 8_192
    buffer, few = 131_072, 50_000 if bench.quick else 500_000
    interactions = fastpipe.recsys.Interactions.from_arrays(data.users, data.items)
    columns = points_of(data, in_threads(bisect, data, threads, 1))
    points = len(columns["user"])

    def drain(batches: Iterable[Mapping[str, Any]], points: int) -> int:
        count = total = 0
        for found in batches:
            count += len(found["user"])
            total += int(np.asarray(found["user"]).sum(dtype=np.int64))
        if (count, total) != (points, int(columns["user"][:points].sum(dtype=np.int64))):
            raise RuntimeError(f"{count} points instead of {points}, or other users")
        return count

    def by_tensorflow(shuffled: Callable[[Any], Any]) -> int:
        try:
            import tensorflow as tf
        except ImportError as error:
            raise CannotError(str(error)) from error
        options = tf.data.Options()
        options.threading.private_threadpool_size = threads
        some = tf.data.Dataset.from_tensor_slices({name: column[:few] for name, column in columns.items()})
        return drain(shuffled(some).with_options(options).as_numpy_iterator(), few)

    def by_rebatching() -> int:
        slices = (slice(start, start + incoming) for start in range(0, points, incoming))
        batches = ({name: column[rows] for name, column in columns.items()} for rows in slices)
        return drain(fastpipe.Rebatcher(batches, batch, shuffle_buffer=buffer, seed=1), points)

    def by_reading(shuffle: Any, rows: int | None) -> int:
        options: dict[str, Any] = {"num_negatives": NEGATIVES, "item_dtype": "uint16", "label_dtype": "int8", "seed": 1}
        options |= {"batch_size": batch, "shuffle": shuffle, "shuffle_buffer": rows, "num_threads": threads}
        return drain(fastpipe.recsys.read_interactions(interactions, **options), points)

    first = "tf.data: shuffle().batch()"
    sides: dict[str, Callable[[], int]] = {
        first: lambda: by_tensorflow(lambda found: found.shuffle(buffer).batch(batch)),
        "tf.data: batch().shuffle()": lambda: by_tensorflow(lambda found: found.batch(batch).shuffle(buffer // batch)),
        "Rebatcher, buffer": by_rebatching,
        "read_interactions, buffer": lambda: by_reading("buffer", buffer),
        "read_interactions, all rows": lambda: by_reading(True, None),
    }
    turns = take_turns(sides, bench.rounds)

    def rate(turn: Turn) -> float:
        return int(turn.result) / 1e6 / turn.seconds

    title = f"{points:,} points of 7 bytes in batches of {batch:,}, from a buffer of {buffer:,}; {threads} threads"
    row = bench.table(
        "pipeline", "shuffles", "million/s|,.3g", "times shuffle().batch()|", "ns of CPU|,.0f", title=title
    )
    for name in sides:
        if name in turns.errors:
            row(name, f"can't: {turns.errors[name]}")
            continue
        ratio = turns.ratio(name, first, rate) if first not in turns.errors and name != first else None
        unit = "batches" if name.endswith("batch().shuffle()") else "points"
        spent = turns.median(name, lambda turn: turn.cpu / int(turn.result) * 1e9)
        row(name, unit, turns.median(name, rate), ratio, spent)


def epochs(bench: Bench) -> None:
    """Measures whole epochs of fastpipe and of NumPy."""
    scale, threads = 10 if bench.quick else 1, bench.args.threads
    data = positives(138_493 // scale, 26_744, 20_000_263 // scale)
    interactions = fastpipe.recsys.Interactions.from_arrays(data.users, data.items)
    if interactions.num_positives != len(data.items):
        raise RuntimeError("positives were lost")
    points = len(data.items) * (1 + NEGATIVES)

    def by_fastpipe() -> int:
        options: dict[str, Any] = {"num_negatives": NEGATIVES, "batch_size": BATCH, "seed": 1, "num_threads": threads}
        with sampled() as peak:
            found = 0
            for batch in fastpipe.recsys.read_interactions(
                interactions, item_dtype="uint16", label_dtype="int8", **options
            ):
                found += len(batch["user"])
                del batch
        if found != points:
            raise RuntimeError(f"{found} points instead of {points}")
        return peak.bytes - peak.idle

    def by_numpy() -> None:
        if sum(len(batch["user"]) for batch in epoch_by_numpy(data, threads, 1)) != points:
            raise RuntimeError("points were lost")

    # NumPy is slow, so one turn is enough.
    turns = take_turns({"fastpipe": by_fastpipe}, bench.rounds)
    peer: Turn = take_turns({"numpy": by_numpy}, 1, warm=0).turns["numpy"][0]
    seconds, most = turns.median("fastpipe"), max(turns.values("fastpipe", "result"))
    users = len(data.indptr) - 1
    title = f"{points:,} points: {len(data.items):,} positives of {users:,} users and 26,744 items; {threads} threads"
    columns = ("seconds|,.3f", "CPU s|,.3f", "million/s|,.3f", "memory, MB|,.0f", "wanted|", "|")
    row = bench.table("epoch", *columns, title=title)
    met = {bench.bound("seconds of an epoch", seconds, most=None if bench.quick else 5)}
    met.add(bench.bound("GB of an epoch", most / 1e9, most=2))
    wanted = "" if bench.quick else "5 s, 2,000 MB"
    row("fastpipe", seconds, turns.median("fastpipe", "cpu"), points / 1e6 / seconds, most / 1e6, wanted, min(met))
    longer = f"{peer.seconds / seconds:.1f} times as long"
    row("numpy", peer.seconds, peer.cpu, points / 1e6 / peer.seconds, None, longer)


if __name__ == "__main__":
    parts, threads = {"samplers": samplers, "epochs": epochs, "pipelines": pipelines}, min(2, len(cores()))
    packages = ("numpy", "tensorflow", "tensorflow-cpu")
    Bench("interactions", __doc__, rounds=(5, 1), packages=packages, parts=list(parts), threads=threads).run(parts)
