"""Mixtures of readers. `mixed_data.py` has their dataset, and the Rust module `mixture` their order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from numbers import Rational, Real
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from fastpipe._arguments import shown, within
from fastpipe._fastpipe import RemoteDataset
from fastpipe._reader.left_out_steps import check_all_steps
from fastpipe._reader.losses import refuse
from fastpipe._reader.mapped import Mapped
from fastpipe._reader.mixed_data import Member, MixedDataset
from fastpipe._reader.ordering import LARGEST_BATCH, Ordering, Uneven, digest
from fastpipe._reader.packing import groups_of, yielding
from fastpipe._reader.packs import Buckets, Packs
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.reader import Reader, made
from fastpipe.errors import SchemaError, UnsupportedError

Stop: TypeAlias = Literal["first_exhausted", "all_exhausted"] | int

Weights: TypeAlias = Mapping[str, float] | Sequence[float]

_Reader = TypeVar("_Reader", Reader, Mapped)

# Shares are multiples of 1 / _PERIOD at the finest. The assignment of one period is kept in memory.
_PERIOD = 2**20
_MOST_READERS = 2**12
_MOST_PHASES = 64
_MOST_ROWS = 2**62


def mix(
    readers: Mapping[str, _Reader] | Sequence[_Reader],
    weights: Weights | Sequence[tuple[int, Weights]] | None = None,
    *,
    batch_size: int | None = None,
    stop: Stop = "first_exhausted",
    assignment: Literal["even", "random"] = "even",
    seed: int | None = None,
    drop_last: bool = False,
    epochs: int | None = 1,
    rank: int = 0,
    world_size: int = 1,
    on_uneven: Uneven = "drop",
    num_threads: int | Literal["auto"] | None = "auto",
    prefetch: int | None = None,
    memory_limit: int | str | None = None,
    progress: bool = False,
) -> _Reader:
    """Mixes the rows of several readers in given proportions.

    Each reader's rows come in its own order: that of its `shuffle`, `shuffle_buffer` and `seed`. The default of
    `shuffle_buffer` for files and units is divided by the number of readers, because all windows are in memory. (If
    weights omit readers, it is the number of those in the first pair that has the reader.) Which
    reader row i of the mixture comes from depends only on i, the weights and `assignment`, and is the same in each
    epoch.

    The result is a reader like any other: any batch can be read at once, a state resumes exactly, also with another
    number of ranks, and all adapters work. All readers share its threads and its memory. A mixture can be mixed again.

    The readers may have different sources, but need the same features. Options of the readers other than what they read
    and their order don't matter: batch size, epochs, threads, limits. Readers with the same kind of source are decoded
    together, which is faster.

    Args:
        readers: The readers, as a dict from names to readers, or a list, whose readers are named "0", "1" and so on. 1
            to 4096 readers, each with rows unless its weight is 0. Or results of `Reader.pack`: then rows of the
            mixture are packs. Or results of `Reader.bucket`: then the mixture has their batches.
        weights: Weight of each reader, in the same form as `readers`: finite numbers that are at least 0, and not all
            0. A reader's share is its weight divided by the sum. Shares such as 0.7 and 0.3 are exact. If all shares
            together aren't multiples of 1 / n for any n up to 2^20, they are rounded to multiples of 2^-20, and readers
            with a weight have at least that share. A list of pairs `(step, weights)` changes the weights during an
            epoch: each pair applies from batch `step` of the epoch on, counted over all ranks. Steps ascend from 0; at
            most 64 pairs. The weights of a pair may omit readers, which have no rows from there on: readers that join
            at a later step, or that are retired. Lists may only omit the last readers, before they join. Defaults to
            None: equal weights.
        batch_size: Number of rows per batch, 1 to 2^31 - 1. Defaults to the batch size of the readers, if it is the
            same for all.
        stop: When an epoch ends. `"first_exhausted"`: before the first row of a reader that has no rows left, so no row
            occurs twice. `"all_exhausted"`: when every row of each reader with a weight has occurred; exhausted readers
            start again, with the order of their next epoch. A number: after this many rows, 1 to 2^62; exhausted
            readers start again. Defaults to `"first_exhausted"`.
        assignment: How rows are assigned to readers. `"even"`: for every n, the number of the first n rows that come
            from a reader differs from n times its share by less than one row (R. Tijdeman, The chairman assignment
            problem, 1980). `"random"`: in random sequence, which depends on `seed`. Counts are exact after every 2^18
            rows or somewhat fewer (2^20 for shares that need them), and the sequence then repeats. Defaults to
            `"even"`.
        seed: Seed of a random assignment, 0 to 2^64 - 1, from which each shuffled reader without a seed also gets a
            different one. Not needed if all shuffled readers have a seed and `assignment` is `"even"`. Defaults to
            None.
        drop_last: Whether to drop the last batch if it has fewer than `batch_size` rows. Defaults to False.
        epochs: Number of epochs in each pass, 1 to 2^31 - 1. None repeats without end. Defaults to 1.
        rank: Index of the shard that the mixture yields, 0 to `world_size - 1`. At each step, the ranks together get
            the next `world_size` batches. Defaults to 0.
        world_size: Number of shards, 1 to 2^20. Defaults to 1.
        on_uneven: How to handle batches that can't be divided evenly among the ranks: `"drop"`, `"pad"` or `"allow"`.
            See `fastpipe.typing.Options`. Defaults to `"drop"`.
        num_threads: Number of threads that make batches, 1 to 4096, or `"auto"`. Defaults to `"auto"`.
        prefetch: Number of batches that are prepared in advance, at least 1. None keeps all threads busy. Defaults to
            None.
        memory_limit: Memory for open units and for batches that are not yet yielded, as a number of bytes or as a
            string with a unit (`"512MB"`). Defaults to None: no limit.
        progress: Whether to show a progress bar (extra `progress`). Defaults to False.

    Returns:
        The mixture. Rows can't be selected from it (`filter`, `split`, `sample`, `take`, `without`), and it can't be
        partitioned: do that with the readers.

    Raises:
        SchemaError: If the readers have different features or categories.
        UnsupportedError: If a reader gets its batches from a server, leaves out steps or damaged data, or its units can
            only be read in sequence.
        LimitError: If an epoch would have more than 2^62 rows.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, a reader with a weight has no rows, is divided among ranks, or is
            shuffled without a seed, a random assignment has no seed, or the batch sizes differ and `batch_size` is
            missing.

    Example:
        >>> import fastpipe
        >>> import numpy as np
        >>> ones = fastpipe.from_arrays({"x": np.full(70, 1)}, batch_size=10)
        >>> twos = fastpipe.from_arrays({"x": np.full(70, 2)}, batch_size=10)
        >>> mixed = fastpipe.mix({"ones": ones, "twos": twos}, weights={"ones": 0.7, "twos": 0.3})
        >>> mixed.num_rows, next(iter(mixed))["x"]
        (100, array([1, 2, 1, 1, 1, 2, 1, 1, 2, 1]))
    """
    named, packs = _unpacked(_named(readers))
    if isinstance(packs, Buckets) and batch_size not in (None, 1):
        raise ValueError(
            f"the readers were made by bucket(), so the mixture has their batches: omit batch_size; got {batch_size}"
        )
    phases = _phases(named, weights)
    for name, reader in named.items():
        _check(name, reader, has_share=any(shares.get(name) for _, shares in phases))
    _check_features(named)
    if not isinstance(stop, str):
        stop = within("stop", stop, 1, _MOST_ROWS)
    elif stop not in ("first_exhausted", "all_exhausted"):
        raise ValueError(f'stop must be "first_exhausted", "all_exhausted" or a number of rows; got {shown(stop)}')
    if assignment not in ("even", "random"):
        raise ValueError(f'assignment must be "even" or "random"; got {shown(assignment)}')
    own = None if seed is None else within("seed", seed, 0, 2**64 - 1)
    if own is None and assignment == "random":
        raise ValueError('assignment="random" needs a seed: pass seed= to mix')
    members = [
        Member(
            name,
            reader._data.unsliced(),
            # Readers that join later must not change the orders of earlier ones.
            _seeded(name, number, _windowed(reader, next(len(shares) for _, shares in phases if name in shares)), own),
            tuple(shares.get(name, 0) for _, shares in phases),
        )
        for number, (name, reader) in enumerate(named.items())
    ]
    ordering = Ordering.checked(
        batch_size=_batch_size(named) if batch_size is None else within("batch_size", batch_size, 1, LARGEST_BATCH),
        drop_last=drop_last,
        seed=own or 0,
        rank=rank,
        world_size=world_size,
        shard_by="batch",
        on_uneven=on_uneven,
    )
    running = PassOptions.checked(num_threads=num_threads, prefetch=prefetch, memory_limit=memory_limit)
    if packs is not None and on_uneven == "pad":
        raise ValueError('a mixture of groups can\'t have on_uneven="pad": use "drop" or "allow"')
    starts = [step * ordering.batch_size for step, _ in phases]
    data = MixedDataset(members, starts, stop, own if assignment == "random" else None)
    mixed = made(data, ordering=ordering.of_mixture(), running=running, progress=progress, epochs=epochs)
    mixture: Any = mixed if packs is None else yielding(mixed, packs, mixed)
    return mixture  # type: ignore[no-any-return]


def _unpacked(named: Mapping[str, Any]) -> tuple[dict[str, Reader], Packs | Buckets | None]:
    """Returns readers whose rows are groups in place of their packs, and how groups are packed.

    Raises:
        ValueError: If only some of the readers are packed, or if they are packed differently.
    """
    found = {name: groups_of(reader) for name, reader in named.items()}
    first, *others = found
    packs = found[first][1]
    if different := [other for other in others if found[other][1] != packs]:
        raise ValueError(
            f"readers {first!r} and {different[0]!r} are packed differently: pass the same columns, length, padded and"
            " pad to the pack() of each reader"
        )
    return {name: reader for name, (reader, _) in found.items()}, packs


def _named(readers: Any) -> dict[str, Any]:
    """Returns the readers by name, checked. They are readers, or packs of readers."""
    if isinstance(readers, Mapping):
        named = dict(readers)
        if wrong := [name for name in named if not isinstance(name, str)]:
            raise TypeError(f"the names of readers must be strings; got {shown(wrong[0])}")
    elif isinstance(readers, Sequence) and not isinstance(readers, str):
        named = {str(number): reader for number, reader in enumerate(readers)}
    else:
        raise TypeError(f"readers must be a dict or a list of readers; got {shown(readers)}")
    for name, reader in named.items():
        if not isinstance(groups_of(reader)[0], Reader):
            hint = ". Call map() on the mixture" if hasattr(reader, "_passes") else ""
            raise TypeError(f"readers must be fastpipe.Reader objects; {name!r} is {shown(reader)}{hint}")
    if not 1 <= len(named) <= _MOST_READERS:
        raise ValueError(f"a mixture has 1 to {_MOST_READERS} readers; got {len(named)}")
    return named


def _phases(named: Mapping[str, Reader], weights: Any) -> list[tuple[int, dict[str, int]]]:
    """Returns the first step of each phase, and the shares of the readers that it names."""
    if not (isinstance(weights, Sequence) and any(isinstance(each, tuple) for each in weights)):
        return [(0, _shares(named, weights))]
    if wrong := [each for each in weights if not (isinstance(each, tuple) and len(each) == 2)]:
        raise TypeError(f"weights must be numbers, or pairs (step, weights); got {shown(wrong[0])}")
    if len(weights) > _MOST_PHASES:
        raise ValueError(f"weights can change at most {_MOST_PHASES} times; got {len(weights)} pairs")
    phases: list[tuple[int, dict[str, int]]] = []
    numbers, joined = {name: number for number, name in enumerate(named)}, 0
    for step, given in weights:
        first = within("the step of weights", step, 0, 2**31)
        own = named
        if isinstance(given, Mapping):
            own = {name: reader for name, reader in named.items() if name in given}
        elif isinstance(given, Sequence) and joined <= len(given):
            own = dict(itertools.islice(named.items(), len(given)))
        phases.append((first, _shares(own, given)))
        joined = max([joined, *(numbers[name] + 1 for name in own)])
    if never := named.keys() - set(itertools.chain(*(shares for _, shares in phases))):
        raise ValueError(f"weights must have the names of the readers: {min(never)!r} has no weight at any step")
    steps = [step for step, _ in phases]
    if steps[0] != 0 or any(step >= following for step, following in itertools.pairwise(steps)):
        raise ValueError(f"the steps of weights must ascend from 0; got {shown(steps)}")
    return phases


def _shares(named: Mapping[str, Reader], weights: Any) -> dict[str, int]:
    if weights is None:
        return dict.fromkeys(named, 1)
    if isinstance(weights, Mapping):
        if weights.keys() != named.keys():
            missing, unknown = named.keys() - weights.keys(), weights.keys() - named.keys()
            what = f"{min(missing)!r} has no weight" if missing else f"no reader is named {next(iter(unknown))!r}"
            raise ValueError(f"weights must have the names of the readers: {what}")
        given = [weights[name] for name in named]
    elif isinstance(weights, str) or not hasattr(weights, "__len__") or not hasattr(weights, "__iter__"):
        raise TypeError(f"weights must be a dict or a list of numbers; got {shown(weights)}")
    else:
        given = list(weights)
    if len(given) != len(named):
        raise ValueError(f"there are {len(named)} readers and {len(given)} weights")
    exact = [_weight(name, weight) for name, weight in zip(named, given, strict=True)]
    return dict(zip(named, shares_of(exact), strict=True))


def _weight(name: str, weight: Any) -> Fraction:
    """Returns a weight exactly as the user wrote it: 0.1 is 1/10."""
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"weights must be numbers; the weight of {name!r} is {shown(weight)}")
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"weights must be finite and at least 0; the weight of {name!r} is {weight}")
    return Fraction(weight) if isinstance(weight, Rational) else Fraction(repr(float(weight)))


def shares_of(weights: Sequence[Fraction]) -> list[int]:
    """Returns integers in the proportion of the weights, whose sum is at most 2^20.

    If no such integers exist, the shares are rounded to multiples of 2^-20, by the largest remainders.

    Raises:
        ValueError: If no weight is above 0.
    """
    total = sum(weights, Fraction(0))
    if total == 0:
        raise ValueError("at least one weight must be above 0")
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    common = math.gcd(*whole)
    if sum(whole) // common <= _PERIOD:
        return [share // common for share in whole]
    quotas = [weight * _PERIOD / total for weight in weights]
    shares = [max(1, int(quota)) if quota else 0 for quota in quotas]
    # At most one for each reader is missing or too many.
    by_rest = sorted(range(len(shares)), key=lambda index: int(quotas[index]) - quotas[index])
    for index in by_rest[: max(0, _PERIOD - sum(shares))]:
        shares[index] += 1
    for _ in range(sum(shares) - _PERIOD):
        shares[shares.index(max(shares))] -= 1
    return shares


def _check(name: str, reader: Reader, *, has_share: bool) -> None:
    if isinstance(reader._data.handle, RemoteDataset):
        remote = "servers send batches, and a mixture needs the data itself: mix readers of the data instead"
        raise UnsupportedError(f"reader {name!r} can't be mixed: {remote}", reason=remote)
    if reason := reader._data.handle.in_sequence():
        raise UnsupportedError(f"reader {name!r} can't be mixed: {reason}", reason=reason)
    refuse(reader._lost, f"mixing reader {name!r}", 'read it with on_error="raise"')
    advice = "rows of a mixture come in its own batches. Call without(steps=...) on the mixture"
    check_all_steps(reader._ordering, f"reader {name!r} can't be mixed", advice)
    if reader.world_size > 1:
        raise ValueError(f"reader {name!r} is divided among {reader.world_size} ranks: pass rank and world_size to mix")
    if has_share and not reader.num_rows:
        raise ValueError(f"reader {name!r} has a weight above 0, but no rows")


def _check_features(named: Mapping[str, Reader]) -> None:
    """Checks that all readers have the same features, in the same sequence."""
    first, *others = named
    expected, categories = named[first].features, named[first].categories
    for other in others:
        features = named[other].features
        pair = f"readers {first!r} and {other!r}"
        if features.keys() != expected.keys():
            only = next(_only(first, expected, other, features))
            raise SchemaError(f"{pair} have different features: {only}. Pass the same columns= or features= to both")
        for feature, spec in expected.items():
            if features[feature] != spec:
                raise SchemaError(
                    f"feature {feature!r} is {spec} in reader {first!r} and {features[feature]} in reader {other!r}:"
                    " pass the same spec to both, for example with overrides=",
                    feature=feature,
                )
            if named[other].categories.get(feature) != categories.get(feature):
                raise SchemaError(
                    f"the codes of feature {feature!r} mean different categories in {pair}: read it as text, or with"
                    " the same VocabularySpec",
                    feature=feature,
                )
        if list(features) != list(expected):
            raise SchemaError(f"{pair} have the same features in different sequences: pass features= in one sequence")


def _only(first: str, own: Mapping[str, Any], other: str, theirs: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"only {first!r} has {feature!r}" for feature in own if feature not in theirs)
    yield from (f"only {other!r} has {feature!r}" for feature in theirs if feature not in own)


def _windowed(reader: Reader, readers: int) -> Ordering:
    """Returns the order of a reader, with its part of the default window.

    All readers hold the units of their windows at once. A window has the rows of a unit at least. It needn't consist of
    the reader's batches, which the mixture doesn't yield.
    """
    ordering, data = reader._ordering, reader._data
    shuffled = ordering.shuffle in ("window", "block", "buffer")
    if readers == 1 or ordering.buffer_given or not shuffled or not data.holds_units:
        return ordering
    units = int(np.count_nonzero(data.unsliced().handle.unit_rows()))
    average = -(-data.handle.num_rows // max(units, 1))
    rows = max(reader._order.shuffle_buffer // readers, average, 1)
    batches = -(-rows // ordering.batch_size)
    # Windows consist of whole batches.
    return ordering.with_buffer(rows).with_batch_size(-(-rows // batches))


def _seeded(name: str, number: int, ordering: Ordering, seed: int | None) -> Ordering:
    """Returns the order of a reader, whose seed doesn't depend on chance."""
    if ordering.seed_given:
        return ordering
    if seed is None and ordering.shuffle != "sequential":
        raise ValueError(
            f"the order of reader {name!r} depends on a random seed: pass seed= to mix, or when the reader is created"
        )
    return ordering.with_seed(int(digest(f"mixture {seed or 0} {number}".encode())[:12], 16))


def _batch_size(named: Mapping[str, Reader]) -> int:
    sizes = {reader.batch_size for reader in named.values()}
    if len(sizes) > 1:
        raise ValueError(f"pass batch_size: the readers have different batch sizes, from {min(sizes)} to {max(sizes)}")
    return sizes.pop()
