"""Which reader each row of a mixture comes from: random assignments, and weights that change."""

from __future__ import annotations

import functools
import itertools
import json
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import fastpipe
import order_model
from every_source import digests
from fastpipe import mix
from test_mixtures import column, cut, numbers

ASSIGNMENT = 11
LONGEST = 2**18


@functools.lru_cache
def drawn(shares: tuple[int, ...], seed: int, first: int = 0) -> list[int]:
    """Returns the reader of each row of a phase, until the sequence repeats."""
    times = max(1, LONGEST // sum(shares))
    owners = [member for member, share in enumerate(shares) for _ in range(share * times)]
    return order_model.shuffled(owners, order_model.words(seed, 0, ASSIGNMENT, first, len(owners)))


def random(counts: Sequence[int], weights: Any, seed: int = 4, **options: Any) -> fastpipe.Reader:
    """Returns a random mixture of readers with these numbers of rows."""
    return mix(numbers(*counts), weights, assignment="random", seed=seed, **options)


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", 2000])
def test_rows_are_assigned_at_random(stop: Any) -> None:
    counts, weights = (300, 500, 40, 7), (4, 5, 1, 0)
    mixed = random(counts, weights, batch_size=9, stop=stop, epochs=2)
    owners = drawn(weights, 4)
    rows: list[tuple[int, int]] = []
    used = [0] * len(counts)
    for owner in owners:
        if len(rows) == stop or (stop == "first_exhausted" and used[owner] == counts[owner]):
            break
        rows.append((owner, used[owner] % counts[owner]))
        used[owner] += 1
        if stop == "all_exhausted" and all(used[member] >= counts[member] for member in range(3)):
            break
    assert mixed.num_rows == len(rows)
    assert list(mixed._data.rows().values()) == used
    batches = list(mixed)
    found = [pair for batch in batches for pair in zip(batch["x"].tolist(), batch["row"].tolist(), strict=True)]
    assert found == rows * 2
    for step in range(0, len(mixed) // 2, 7):
        assert list(mixed.batch_at(step)["x"]) == [owner for owner, _ in cut(rows, 9)[step]]


def test_random_sequences_are_exact_after_a_period_and_within_chance_before() -> None:
    weights = (5, 3, 2)
    mixed = random((10, 10, 10), weights, batch_size=2**16, stop=2 * LONGEST)
    owners = np.array(column(mixed))
    period = LONGEST // 10 * 10
    assert (owners[period:] == owners[: len(owners) - period]).all()
    assert np.bincount(owners[:period]).tolist() == [period // 10 * weight for weight in weights]
    # 99.9 % of hypergeometric counts are within 3.29 standard deviations.
    for rows in (100, 1000, 30_000, 131_072, 250_000):
        for member, weight in enumerate(weights):
            share = weight / 10
            deviation = math.sqrt(rows * share * (1 - share) * (period - rows) / (period - 1))
            assert abs((owners[:rows] == member).sum() - rows * share) < 3.29 * deviation
    # Successive rows are independent: the counts of pairs have 4 degrees of freedom.
    pairs = np.bincount(owners[: period - 1] * 3 + owners[1:period], minlength=9).reshape(3, 3)
    shares = np.array(weights) / 10
    wanted = (period - 1) * np.outer(shares, shares)
    assert ((pairs - wanted) ** 2 / wanted).sum() < 18.47


def test_random_sequences_depend_on_the_seed() -> None:
    def owners(seed: int, assignment: Any = "random") -> list[int]:
        return column(mix(numbers(900, 900), batch_size=100, stop=500, seed=seed, assignment=assignment))

    assert owners(1) == owners(1) != owners(2)
    assert owners(1, "even") == owners(2, "even") != owners(1)
    with pytest.raises(ValueError, match="needs a seed"):
        mix(numbers(5, 5), assignment="random")
    with pytest.raises(ValueError, match='"even" or "random"'):
        mix(numbers(5, 5), assignment="odd", seed=1)  # type: ignore[arg-type]


def test_states_of_another_assignment_are_refused() -> None:
    one = random((500, 500), (1, 1), batch_size=10)
    next(iter(one))
    state = one.state_dict()
    assert len(json.dumps(state)) < 1024
    random((500, 500), (2, 2), batch_size=10).load_state_dict(state)
    even = mix(numbers(500, 500), batch_size=10, seed=4)
    with pytest.raises(fastpipe.errors.StateError, match="assignment was 'random, seed=4' and is 'even'"):
        even.load_state_dict(state)
    with pytest.raises(fastpipe.errors.StateError, match="seed"):
        random((500, 500), (1, 1), seed=5, batch_size=10).load_state_dict(state)


@pytest.mark.parametrize("assignment", ["even", "random"])
def test_ranks_and_weights_change_within_an_epoch(assignment: Any) -> None:
    """The ranks and then the weights change: the weights of all rows that were read must be the same."""

    def mixed(weights: Any, rank: int = 0, ranks: int = 1, **options: Any) -> fastpipe.Reader:
        readers = numbers(500, 300, shuffle=True, seed=1)
        options = {"stop": 2000, "on_uneven": "allow", "seed": 9, "assignment": assignment} | options
        return mix(readers, weights, batch_size=16, rank=rank, world_size=ranks, **options)

    draw = np.random.default_rng(1)
    before = [1, 1]
    for _ in range(12):
        state, read = None, 0
        for ranks in draw.integers(1, 8, draw.integers(1, 4)).tolist():
            reader = mixed(before, ranks - 1, ranks)
            if state is not None:
                reader.load_state_dict(state)
            steps = int(draw.integers(1, 5))
            assert len(list(itertools.islice(reader, steps))) == steps
            state, read = json.loads(json.dumps(reader.state_dict())), read + steps * ranks
        later = [(0, before), (read, [1, 9])]
        whole = digests(mixed(later, stop=1500))
        ranks, found = int(draw.integers(1, 5)), []
        for rank in range(ranks):
            reader = pickle.loads(pickle.dumps(mixed(later, rank, ranks, stop=1500)))
            reader.load_state_dict(state)
            found.append(digests(reader))
        joined = [batch for each in itertools.zip_longest(*found) for batch in each if batch is not None]
        assert joined == whole[read:]
        with pytest.raises(fastpipe.errors.StateError, match="weights"):
            mixed([(0, before), (read - 1, [1, 9])] if read > 1 else [2, 1]).load_state_dict(state)
