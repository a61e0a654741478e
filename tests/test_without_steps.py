"""Readers without some steps: the remaining batches, states in both directions, maps and adapters."""

from __future__ import annotations

import itertools
import pickle
import threading
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import fastpipe
from every_source import ORDERS, Make, digests, make
from fastpipe.errors import StateError, UnsupportedError
from mapping import ids, reader_of
from samples import through_json

pa = pytest.importorskip("pyarrow")

__all__ = ["make"]

STEPS = 9
ORDERS_HERE = [
    {"shuffle": False, "shuffle_buffer": None},
    {},
    {"shuffle": "block"},
    {"shuffle": "buffer", "shuffle_buffer": 13},
    {"shard_by": "batch"},
]


def batches_of(reader: fastpipe.Reader, epochs: int = 1) -> list[list[list[int]]]:
    """Returns the rows of each batch of each epoch, from a plain reader."""
    return [[ids(reader.batch_at(step, epoch)) for step in range(STEPS)] for epoch in range(epochs)]


def noisy(batch: dict[str, Any], rng: np.random.Generator) -> tuple[list[int], int]:
    return ids(batch), int(rng.integers(2**60))


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(ORDERS_HERE),
    left_out=st.sets(st.integers(0, STEPS - 1), max_size=STEPS - 1),
    epochs=st.integers(1, 3),
    threads=st.integers(0, 2),
)
def test_the_other_batches_are_the_same_and_resume_at_every_step(
    order: dict[str, Any], left_out: set[int], epochs: int, threads: int
) -> None:
    plain, remaining = (reader_of(epochs=epochs, **order) for _ in range(2))
    remaining = remaining.without(steps=left_out)
    whole = batches_of(plain, epochs)
    wanted = [(e, s, whole[e][s]) for e in range(epochs) for s in range(STEPS) if s not in left_out]
    rows = [batch for _, _, batch in wanted]
    assert (len(remaining), remaining.steps) == (len(wanted), sorted(left_out))
    for epoch in range(epochs):
        here = [batch for e, _, batch in wanted if e == epoch]
        assert [ids(remaining.batch_at(i, epoch)) for i in range(len(here))] == here
        assert [remaining.locate(i, 0, epoch).row for i in range(len(here))] == [batch[0] for batch in here]
        middle = remaining._passes.batches(epoch, len(here) // 2, len(here))
        assert list(map(ids, middle.batches)) == here[len(here) // 2 :]
        assert [remaining._passes.rows_of(epoch, i) for i in range(len(here))] == list(map(len, here))

    mapped = remaining.map(noisy, seed=4, num_threads=threads)
    numbers = [reader_of(epochs=epochs, **order).map(noisy, seed=4).batch_at(s, e) for e, s, _ in wanted]
    states = [remaining.state_dict()]
    for (epoch, _, batch), other in zip(wanted, remaining, strict=True):
        assert ids(other) == batch
        assert remaining.epoch == epoch
        states.append(remaining.state_dict())
    assert list(mapped) == [plain.map(noisy, seed=4).batch_at(s, e + epochs) for e, s, _ in wanted]
    last = wanted[0][0] if wanted else 0
    assert mapped.batch_at(0, last) == numbers[0]
    for taken, state in enumerate(states[:-1]):
        remaining.load_state_dict(through_json(state))
        assert list(map(ids, remaining)) == rows[taken:]
        mapped.load_state_dict(through_json(state))
        assert list(mapped) == numbers[taken:]
    # The reader, and the reader without other steps, resume from these states.
    for (epoch, step, _), state in zip(wanted, states[1:], strict=True):
        rest = list(itertools.chain(whole[epoch][step + 1 :], *whole[epoch + 1 :]))
        if (epoch, step) != (epochs - 1, STEPS - 1):
            plain.load_state_dict(state)
            assert list(map(ids, plain)) == rest


@pytest.mark.parametrize("order", ORDERS_HERE)
def test_a_state_of_the_reader_resumes_before_in_and_after_the_steps(order: dict[str, Any]) -> None:
    plain = reader_of(epochs=2, **order)
    whole = batches_of(plain, 2)
    remaining = reader_of(epochs=2, **order).without(steps=range(3, 6))
    batches = iter(plain)
    for epoch, step in itertools.product(range(2), range(STEPS)):
        remaining.load_state_dict(through_json(plain.state_dict()))
        rest = [batch for s, batch in enumerate(whole[epoch]) if s >= step and s not in range(3, 6)]
        rest += [whole[1][s] for s in (0, 1, 2, 6, 7, 8)] if epoch == 0 else []
        assert list(map(ids, remaining)) == rest
        next(batches)


@pytest.mark.parametrize("order", ORDERS, ids=["sequential", "window", "block", "buffer"])
def test_every_source(make: Make, order: dict[str, Any]) -> None:
    if make(batch_size=30).features.keys() == {"user", "item", "label"}:
        order = {"shuffle": False} | order
    reader = make(batch_size=30, **order)
    whole = digests(reader)
    remaining = reader.without(steps=[6, 0, 6, 3])
    assert digests(remaining) == [whole[step] for step in (1, 2, 4, 5, 7)]
    again = pickle.loads(pickle.dumps(remaining))
    assert pa.table(again).num_rows == sum(len(next(iter(batch.values()))) for batch in again)


def test_passes_follow_each_other() -> None:
    plain, remaining = reader_of(), reader_of().without(steps=[0, 4])
    whole = batches_of(plain, 4)
    next(iter(remaining))
    second = list(map(ids, remaining))
    assert second == [whole[1][s] for s in range(STEPS) if s not in (0, 4)]
    assert remaining.epoch == 2
    iter(remaining)  # A pass without a batch doesn't count.
    first = next(iter(remaining))
    assert ids(first) == whole[2][1]
    third = iter(remaining)
    fourth = iter(remaining)
    assert ids(next(fourth)) == whole[3][1]
    with pytest.raises(fastpipe.errors.PassClosedError):
        next(third)
    remaining.close()
    with pytest.raises(fastpipe.errors.PassClosedError, match="close"):
        next(fourth)
    with remaining:
        remaining.set_epoch(1)
        assert list(map(ids, remaining)) == second
    endless = reader_of(epochs=None).without(steps=[8])
    with pytest.raises(TypeError, match="no length"):
        len(endless)
    assert [ids(batch) for batch in itertools.islice(endless, 17)][8:] == [*whole[1][:8], whole[2][0]]


def test_threads_draw_from_one_pass() -> None:
    reader = fastpipe.from_arrays({"x": np.arange(4000)}, batch_size=2, num_threads=2)
    batches, found = iter(reader.without(steps=range(0, 2000, 3))), []

    def draw() -> None:
        found.extend(ids(batch)[0] for batch in batches)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [2 * step for step in range(2000) if step % 3]


@pytest.mark.parametrize("at", range(1, 7))
def test_an_interruption_loses_no_batch(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    remaining = reader_of().without(steps=[1, 2])
    whole = batches_of(reader_of())[0]
    batches = iter(remaining)
    calls = itertools.count()

    class Interrupting:
        """The incoming position, which Ctrl-C interrupts at one call."""

        def __init__(self, position: Any) -> None:
            self._position = position

        def progress(self) -> Any:
            if next(calls) == at:
                raise KeyboardInterrupt
            return self._position.progress()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._position, name)

    batches.position.incoming = Interrupting(batches.position.incoming)
    found = []
    while True:
        try:
            found.append(ids(next(batches)))
        except KeyboardInterrupt:
            continue
        except StopIteration:
            break
    assert found == [whole[step] for step in (0, 3, 4, 5, 6, 7, 8)]


def test_adapters() -> None:
    torch = pytest.importorskip("torch.utils.data")
    import fastpipe.torch

    wanted = [batch for step, batch in enumerate(batches_of(reader_of())[0]) if step != 2]
    dataset = fastpipe.torch.dataset(reader_of().without(steps=[2]))
    assert list(map(ids, torch.DataLoader(dataset, batch_size=None))) == wanted
    rebatched = fastpipe.Rebatcher(reader_of().without(steps=[2]), 44)
    assert list(map(ids, rebatched)) == [list(itertools.chain(*wanted))]


@pytest.mark.parametrize(
    ("steps", "error", "match"),
    [
        ([9], ValueError, "step 9 does not exist: an epoch has 9 batches, counted from 0 to 8"),
        ([-1], ValueError, "step -1 does not exist"),
        (range(5, 10), ValueError, "step 9 does not exist"),
        (range(10**15), ValueError, "step 999999999999999 does not exist"),
        (itertools.count(), ValueError, "step 9 does not exist"),
        (slice(5, 10), ValueError, "step 9 does not exist"),
        (slice(-2, None), ValueError, "step -2 does not exist"),
        (slice("a", None), TypeError, "start of the slice must be an integer"),
        (range(9), ValueError, "steps has all 9 batches of an epoch: keep at least one"),
        (slice(None), ValueError, "all 9 batches"),
        (3, TypeError, "steps must be a range, a slice or a list of integers; got 3"),
        ("12", TypeError, "steps must be a range"),
        ([1.0], TypeError, "each of the steps must be an integer; got 1.0"),
        ([True], TypeError, "each of the steps must be an integer; got True"),
        (np.array([0.5]), TypeError, "each of the steps must be an integer"),
    ],
)
def test_bad_steps_are_refused(steps: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        reader_of().without(steps=steps)


def test_edges() -> None:
    whole = batches_of(reader_of())[0]
    for none in ([], range(0), slice(0, 0), np.array([], int)):
        assert list(map(ids, reader_of().without(steps=none))) == whole
    assert list(map(ids, reader_of().without(steps=np.array([7, 7, 1])))) == whole[:1] + whole[2:7] + whole[8:]
    assert list(map(ids, reader_of().without(steps=slice(2, None)))) == whole[:2]
    assert list(fastpipe.from_arrays({"x": np.arange(0)}, batch_size=2).without(steps=[])) == []
    remaining = reader_of().without(steps=[2])
    assert repr(remaining).startswith("<fastpipe.RemainingSteps: 8 of 9 batches of <fastpipe.Reader")
    for step in (-1, 8, 2**70):
        with pytest.raises(IndexError, match="8 batches of an epoch remain"):
            remaining.batch_at(step)
    with pytest.raises(TypeError, match="either rows or steps"):
        reader_of().without()
    with pytest.raises(TypeError, match="either rows or steps"):
        reader_of().without(rows=[1], steps=[1])
    with pytest.raises(StateError, match="damaged"):
        remaining.load_state_dict({})


def test_ranks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"there are 2 ranks, .* without.rows=...., or skip the steps"):
        reader_of(rank=0, world_size=2).without(steps=[1])
    passes = reader_of().without(steps=[1])._passes
    assert passes.shard(1, 0).steps == 8
    with pytest.raises(UnsupportedError, match="there are 3 ranks"):
        passes.share(3, 0)
    with pytest.raises(UnsupportedError, match="2 workers of a DataLoader"):
        passes.worker(2, 0)
    # Ranks have read batches 0 to 3, and a batch of another window.
    rank = reader_of(rank=0, world_size=2)
    batches = iter(rank)
    next(batches)
    remaining = reader_of().without(steps=[1])
    began = iter(remaining)
    with pytest.raises(StateError, match="several ranks have read a part of its epoch"):
        remaining.load_state_dict(rank.state_dict())
    next(began)  # The pass is still active.
    next(batches)
    one = reader_of()
    one.load_state_dict(rank.state_dict())
    next(iter(one))
    with pytest.raises(StateError, match="several ranks"):
        remaining.load_state_dict(one.state_dict())
    list(one)
    remaining.load_state_dict(one.state_dict())
    assert next(map(ids, remaining)) == ids(one.batch_at(0))
