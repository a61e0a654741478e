"""Mixtures whose readers join and are retired during a run, beside the rows of each reader in its own order."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from every_source import Make, digests, make
from fastpipe import mix
from fastpipe.errors import StateError

pytest.importorskip("pyarrow")

__all__ = ["make"]

Phases = list[tuple[int, dict[str, int]]]

JOIN, RETIRE, STOP, SIZE = 3, 6, 315, 35
# "c" joins at one step, and "a" is retired at another one.
LATER: Phases = [(0, {"a": 2, "b": 1}), (JOIN, {"a": 1, "b": 2, "c": 3}), (RETIRE, {"b": 1, "c": 1})]


def readers_of(make: Make) -> dict[str, fastpipe.Reader]:
    # The default windows depend on the number of readers.
    orders: list[dict[str, Any]] = [{"shuffle": True, "seed": 5}, {"shuffle": "buffer", "seed": 6}, {"shuffle": True}]
    return {name: make(batch_size=17, **order) for name, order in zip("abc", orders, strict=True)}


def test_states_before_and_after_a_change_resume(make: Make) -> None:
    readers = readers_of(make)

    def made(names: str, weights: Any, rank: int = 0, ranks: int = 1) -> fastpipe.Reader:
        chosen = {name: reader for name, reader in readers.items() if name in names}
        options: dict[str, Any] = {"seed": 3, "on_uneven": "allow"}
        return mix(chosen, weights, batch_size=SIZE, stop=STOP, rank=rank, world_size=ranks, **options)

    whole = digests(made("abc", LATER))
    # The batches before the change are those of the first run.
    assert whole[:JOIN] == digests(made("ab", {"a": 2, "b": 1}))[:JOIN]
    for step in range(len(whole)):
        # A run with two readers, a run to which the third one was added, and one that retires the first.
        name, phases = ("ab", LATER[:1]) if step <= JOIN else ("abc", LATER[: 2 if step <= RETIRE else 3])
        ranks = 1 + step % 3
        before = made(name, phases, ranks=1 if step % ranks else ranks)
        passing = iter(before)
        for _ in range(step // before.world_size):
            next(passing)
        state = json.loads(json.dumps(before.state_dict()))
        assert len(json.dumps(state)) < 2048
        resumed = []
        for rank in range(ranks):
            after = made("abc", LATER, rank, ranks)
            after.load_state_dict(state)
            resumed.append(digests(after))
        found = [batch for each in itertools.zip_longest(*resumed) for batch in each if batch is not None]
        assert found == whole[step:]
        if step in (JOIN, RETIRE):
            # The same readers begin as many epochs in each epoch of the mixture.
            same = made("abc", LATER)
            same.set_epoch(1)
            batches = iter(same)
            after = made("abc", LATER)
            skipped = digests(itertools.islice(batches, step))
            after.load_state_dict(same.state_dict())
            assert digests(after) == digests(batches)
            assert skipped != whole[:step]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], Phases]:
    """Returns the rows of readers, and phases. Readers join in their sequence, and each may be retired at any step."""
    counts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    names, phases, joined = [str(number) for number in range(len(counts))], [], 0
    steps = sorted({0, *draw(st.sets(st.integers(1, 12), max_size=4))})
    for step in steps:
        last = step == steps[-1]
        joined = len(names) if last else draw(st.integers(max(joined, 1), len(names)))
        weights = {name: draw(st.integers(0, 5)) for name in names[:joined] if last or draw(st.booleans())}
        if not any(weights.values()):
            weights[names[draw(st.integers(0, joined - 1))]] = 1
        phases.append((step, weights))
    return counts, phases


@given(schedules(), st.integers(1, 6), st.integers(0, 2))
def test_rows_come_in_the_order_of_each_reader(made: tuple[list[int], Phases], size: int, epoch: int) -> None:
    counts, phases = made
    orders = [{"shuffle": True, "seed": number} if number % 2 else {} for number in range(len(counts))]
    readers = {
        str(number): fastpipe.from_arrays({"x": np.arange(count) + 1000 * number}, batch_size=7, epochs=None, **order)
        for number, (count, order) in enumerate(zip(counts, orders, strict=True))
    }
    mixed = mix(readers, phases, stop=100, batch_size=size)
    rows_of_epoch = mixed._data.rows()  # type: ignore[attr-defined]
    mixed.set_epoch(epoch)
    found = [int(x) for batch in mixed for x in batch["x"]]
    assert len(found) == 100
    for number, (name, reader) in enumerate(readers.items()):
        own = [x for x in found if x // 1000 == number]
        # An epoch of the mixture begins as many epochs of the reader.
        passes = max(1, -(-rows_of_epoch[name] // counts[number]))
        reader.set_epoch(epoch * passes)
        rows = (int(x) for batch in reader for x in batch["x"])
        assert own == list(itertools.islice(rows, len(own)))
    ends = [step * size for step, _ in phases[1:]] + [100]
    for (step, weights), end in zip(phases, ends, strict=True):
        part = found[step * size : end]
        for number in range(len(counts)):
            exact = len(part) * weights.get(str(number), 0) / sum(weights.values())
            assert abs(sum(x // 1000 == number for x in part) - exact) < 1
    # A reader that a pair omits has no rows, as with a weight of 0.
    explicit = [(step, {name: weights.get(name, 0) for name in readers}) for step, weights in phases]
    same = mix(readers, explicit, stop=100, batch_size=size)
    same.load_state_dict(mixed.state_dict())


def numbers(*counts: int) -> list[fastpipe.Reader]:
    return [fastpipe.from_arrays({"x": np.full(count, number)}, batch_size=8) for number, count in enumerate(counts)]


def test_lists_of_weights_begin_with_the_first_readers() -> None:
    mixed = mix(numbers(50, 50, 50), [(0, [1]), (2, [1, 1]), (4, [0, 1, 1])], stop=48)
    assert [sorted(set(batch["x"].tolist())) for batch in mixed] == [[0], [0], [0, 1], [0, 1], [1, 2], [1, 2]]


def test_states_of_other_readers_are_refused() -> None:
    first = mix(dict(zip("ab", numbers(50, 60), strict=True)), stop=80)
    next(iter(first))
    state = first.state_dict()
    a, b, c = numbers(50, 60, 70)
    equal = {"a": 1, "b": 1}
    later: Any = [(0, equal), (1, equal | {"c": 1})]
    mix({"a": a, "b": b, "c": c}, later).load_state_dict(state)
    refused: list[tuple[dict[str, fastpipe.Reader], Any, str]] = [
        # It has had rows in the steps that were read.
        ({"a": a, "b": b, "c": c}, None, "readers was 2 and is 3"),
        # It isn't the last one.
        ({"c": c, "a": a, "b": b}, later, "readers was 2 and is 3"),
        # The first reader has other rows.
        ({"a": numbers(51)[0], "b": b, "c": c}, later, "readers was 2 and is 3"),
        # The other weights have changed.
        ({"a": a, "b": b, "c": c}, [(0, {"a": 1, "b": 2}), (1, equal | {"c": 1})], "weights was"),
        # A reader that was retired is still needed.
        ({"a": a}, None, "readers was 2 and is 1"),
    ]
    for readers, weights, message in refused:
        with pytest.raises(StateError, match=message):
            mix(readers, weights).load_state_dict(state)
    changed = state | {"data": state["data"] | {"readers": 10**400}}
    with pytest.raises(StateError, match="damaged"):
        first.load_state_dict(changed)


def test_a_reader_is_retired_with_any_stop() -> None:
    retired: Any = [(0, [1, 1]), (2, [0, 1])]
    assert mix(numbers(8, 60), retired).num_rows == 68
    with pytest.raises(ValueError, match="weight of reader 0 is 0 before all its rows have occurred"):
        mix(numbers(9, 60), retired, stop="all_exhausted")
    mix(numbers(8, 60), retired, stop="all_exhausted")


def test_bad_phases_are_refused() -> None:
    a, b = numbers(5, 5)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "'b' has no weight at any step", lambda: mix({"a": a, "b": b}, [(0, {"a": 1})])),
        (ValueError, "no reader is named 'c'", lambda: mix({"a": a, "b": b}, [(0, {"a": 1}), (1, {"c": 1})])),
        (ValueError, "at least one weight", lambda: mix({"a": a, "b": b}, [(0, {}), (1, {"b": 1})])),
        (ValueError, "2 readers and 1 weights", lambda: mix([a, b], [(0, [1, 1]), (1, [1])])),
        (ValueError, "2 readers and 1 weights", lambda: mix({"a": a, "b": b}, [(0, {"b": 1}), (1, [1])])),
        (ValueError, "2 readers and 3 weights", lambda: mix([a, b], [(0, [1]), (1, [1, 2, 3])])),
        (TypeError, "a dict or a list of numbers", lambda: mix([a, b], [(0, [1]), (1, 3)])),  # type: ignore[list-item]
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.parametrize("assignment", ["even", "random"])
@pytest.mark.parametrize("group", ["pack", "bucket"])
def test_groups_of_rows_join(group: str, assignment: Any) -> None:
    def grouped(number: int) -> Any:
        lengths = np.random.default_rng(number).integers(0, 9, 90)
        offsets = np.r_[0, np.cumsum(lengths)]
        rows = {"t": fastpipe.Ragged(np.full(offsets[-1], number), offsets)}
        reader = fastpipe.from_arrays(rows, batch_size=4, shuffle=True, seed=number)
        return reader.pack("t", length=16) if group == "pack" else reader.bucket("t")

    readers = {name: grouped(number) for number, name in enumerate("abc")}
    first = {name: readers[name] for name in "ab"}
    phases: Any = [(0, {"a": 1, "b": 1}), (3, {"a": 1, "c": 2})]
    options: dict[str, Any] = {"stop": 40, "assignment": assignment, "seed": 3}
    whole = digests(mix(readers, phases, **options))
    for step in range(len(whole)):
        before = mix(first, **options) if step <= 3 else mix(readers, phases, **options)
        assert digests(itertools.islice(before, step)) == whole[:step]
        after = mix(readers, phases, **options)
        after.load_state_dict(before.state_dict())
        assert digests(after) == whole[step:]
