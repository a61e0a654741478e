"""Readers without some steps: the remaining batches, states in both directions, ranks, maps, adapters and servers."""

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
    assert len(remaining) == len(wanted)
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
    assert list(mapped._passes.batches(0, 0, STEPS - len(left_out)).batches) == numbers[: STEPS - len(left_out)]
    assert mapped.batch_at(0, 0) == numbers[0]
    for taken, state in enumerate(states[:-1]):
        remaining.load_state_dict(through_json(state))
        assert list(map(ids, remaining)) == rows[taken:]
        mapped.load_state_dict(through_json(state))
        assert list(mapped) == numbers[taken:]
    # The reader resumes from these states. The state after the last remaining batch of an epoch is the next epoch.
    for (epoch, step, _), state in zip(wanted, states[1:-1], strict=False):
        ended = left_out.issuperset(range(step + 1, STEPS))
        plain.load_state_dict(state)
        rest = [[] if ended else whole[epoch][step + 1 :], *whole[epoch + 1 :]]
        assert list(map(ids, plain)) == list(itertools.chain(*rest))


@pytest.mark.parametrize("order", ORDERS_HERE)
def test_a_state_of_the_reader_resumes_before_in_and_after_the_steps(order: dict[str, Any]) -> None:
    plain = reader_of(epochs=2, **order)
    whole = batches_of(plain, 2)
    without = set(range(3, 6)) | {STEPS - 1}
    remaining = reader_of(epochs=2, **order).without(steps=without)
    batches = iter(plain)
    for epoch, step in itertools.product(range(2), range(STEPS)):
        state = plain.state_dict()
        remaining.load_state_dict(through_json(state))
        rest = [batch for s, batch in enumerate(whole[epoch]) if s >= step and s not in without]
        rest += [whole[1][s] for s in range(STEPS) if s not in without] if epoch == 0 else []
        assert list(map(ids, remaining)) == rest
        remaining.load_state_dict(state)
        assert remaining.state_dict() == state
        next(batches)


@pytest.mark.parametrize("order", ORDERS, ids=["sequential", "window", "block", "buffer"])
def test_every_source(make: Make, order: dict[str, Any]) -> None:
    if make(batch_size=30).features.keys() == {"user", "item", "label"}:
        order = {"shuffle": False} | order
    reader = make(batch_size=30, num_threads=2, **order)
    whole = digests(reader)
    remaining = reader.without(steps=[6, 0, 6, 3])
    assert digests(remaining) == [whole[step] for step in (1, 2, 4, 5, 7)]
    again = pickle.loads(pickle.dumps(remaining))
    assert pa.table(again).num_rows == sum(len(next(iter(batch.values()))) for batch in again)


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from([*ORDERS_HERE, {"shuffle": "buffer", "shuffle_buffer": 13, "shard_by": "batch"}]),
    left_out=st.sets(st.integers(0, 24), max_size=6),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    on_uneven=st.sampled_from(["drop", "pad", "allow"]),
    drop_last=st.booleans(),
    taken=st.integers(0, 9),
)
def test_ranks_leave_out_their_own_steps(
    order: dict[str, Any], left_out: set[int], worlds: tuple[int, int], on_uneven: str, drop_last: bool, taken: int
) -> None:
    one = fastpipe.from_arrays(
        {"x": np.arange(123)},
        **({"batch_size": 5, "shuffle": "window", "seed": 3, "shuffle_buffer": 10} | order),
        on_uneven=on_uneven,
        drop_last=drop_last,
    )
    remaining = one.without(steps=left_out & set(range(len(one) - 1)))
    without = left_out & set(range(len(one) - 1))
    worlds = worlds if remaining._ordering.shard_by != "block" else (1, 1)  # One unit.
    state = None
    for ranks in worlds:
        for rank in range(ranks):
            whole, rest = one.shard(ranks, rank), remaining.shard(ranks, rank)
            assert len(rest) == len(whole) - len(without & set(range(len(whole))))
            if state is not None:
                whole.load_state_dict(state)
                rest.load_state_dict(through_json(state))
            # Batches by their steps, from the steps of the states.
            steps, before = {}, whole.state_dict()["progress"]["step"]
            after = [whole.state_dict()]
            for step, batch in enumerate(whole, start=before):
                steps[step] = values(batch)
                after.append(whole.state_dict())
            kept = [step for step in steps if step not in without]
            found = []
            for batch, step in zip(rest, kept, strict=True):
                found.append(values(batch))
                if kept[-1] != step:
                    assert rest.state_dict() == after[step - before + 1]
            assert found == [steps[step] for step in kept]
        # Ranks change after some steps, or at the end of the epoch.
        state = after[min(taken, len(after) - 1)]


def values(batch: dict[str, Any]) -> list[list[Any]]:
    return [column.tolist() for column in batch.values()]


def test_more_steps_of_a_reader_without_some() -> None:
    whole = batches_of(reader_of())[0]
    first = reader_of(world_size=1).without(steps=[0, 4])
    both = first.without(steps=[0, 2, 3, 6])  # Steps 1, 3, 5 and 8.
    assert list(map(ids, both)) == [whole[step] for step in (2, 6, 7)]
    assert list(map(ids, first.without(steps=slice(1, 4)))) == [whole[step] for step in (1, 6, 7, 8)]
    assert both._ordering.without_steps == ((0, 2), (3, 6), (8, 9))
    with pytest.raises(ValueError, match="all 3 batches"):
        both.without(steps=range(3))
    with pytest.raises(ValueError, match="leave every rank without a batch"):
        reader_of().without(steps=range(5)).shard(2, 0)
    assert list(reader_of(on_uneven="allow").without(steps=range(5)).shard(2, 0)) == []


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


def test_batches_that_are_left_out_are_not_read() -> None:
    class Counted:
        schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
        rows = [10] * STEPS

        def read(self, unit: int) -> Any:
            opened.append(unit)
            return pa.table({"x": range(10 * unit, 10 * unit + 10)})

        def fingerprint(self) -> str:
            return "counted"

    opened: list[int] = []
    remaining = fastpipe.read_units(Counted(), batch_size=10).without(steps=[0, 3, 4, 8])
    assert [batch["x"][0] // 10 for batch in remaining] == [1, 2, 5, 6, 7]
    assert sorted(set(opened)) == [1, 2, 5, 6, 7]


def test_adapters() -> None:
    torch = pytest.importorskip("torch.utils.data")
    import fastpipe.torch

    wanted = [batch for step, batch in enumerate(batches_of(reader_of())[0]) if step != 2]
    remaining = reader_of().without(steps=[2])
    dataset = fastpipe.torch.dataset(remaining)
    assert list(map(ids, torch.DataLoader(dataset, batch_size=None))) == wanted
    rebatched = fastpipe.Rebatcher(reader_of().without(steps=[2]), 44)
    assert list(map(ids, rebatched)) == [list(itertools.chain(*wanted))]
    remaining = reader_of().without(steps=[2])
    assert remaining.head(20)["x"].to_pylist() == list(itertools.chain(*wanted))[:20]
    assert remaining.cache().batch_at(2)["x"].tolist() == wanted[2]
    assert remaining.describe().num_rows == 39
    assert dict(remaining.plan().stages)["without"] == "1 step of each epoch: 2"
    many = reader_of(batch_size=1, shuffle_buffer=2).without(steps=[0, 1, 2, *range(4, 40, 2)]).plan()
    text = "21 steps of each epoch: 0 to 2, 4, 6, 8, 10, 12, 14, 16, ..."
    assert many.stages[-2:] == [("without", text), ("batches", "23 batches of batch_size=1 in an epoch")]
    for passes in (remaining._passes, remaining.map(noisy, seed=1)._passes):
        assert passes.worker(1, 0).steps == 8
        with pytest.raises(UnsupportedError, match=r"each of the 2 workers counts its own. Set num_workers=0"):
            passes.worker(2, 0)


def test_servers_send_the_remaining_batches() -> None:
    reader = reader_of(epochs=2)
    wanted = [batch for epoch in batches_of(reader, 2) for step, batch in enumerate(epoch) if step not in (2, 3, 8)]
    with reader.without(steps=[2, 3, 8]).serve() as server, reader.serve() as plain:
        client = fastpipe.connect(server.url)
        for remaining in (client, fastpipe.connect(plain.url).without(steps=[2, 3, 8])):
            assert len(remaining) == len(wanted)
            states = [remaining.state_dict()]
            for batch, rows in zip(remaining, wanted, strict=True):
                assert ids(batch) == rows
                states.append(remaining.state_dict())
            for taken in range(0, 12, 3):
                remaining.load_state_dict(states[taken])
                assert list(map(ids, remaining)) == wanted[taken:]
            assert ids(remaining.batch_at(4, 0)) == wanted[4]
            ranks = [fastpipe.connect(server.url, rank=rank, world_size=2) for rank in range(2)]
            assert [len(rank) for rank in ranks] == [4, 4]
    long = fastpipe.from_arrays({"x": np.arange(300_000)}, batch_size=1).without(steps=range(0, 300_000, 2))
    assert len(long) == 150_000
    with pytest.raises(UnsupportedError, match="150000 separate ranges of steps, which don't fit"):
        long.serve()


def test_leases_agree_about_the_steps(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    wanted = [batch for step, batch in enumerate(batches_of(reader_of())[0]) if step not in (1, 8)]
    found = []
    with reader_of().without(steps=[1, 8]).lease(url, worker_name="a") as worker:
        for batch in worker:
            found.append(ids(batch))
            worker.commit()
    assert sorted(found) == sorted(wanted)
    with pytest.raises(StateError, match="without_steps was"):
        reader_of().without(steps=[1, 7]).lease(url, worker_name="b")
    with pytest.raises(StateError, match="without_steps was"):
        reader_of().lease(url, worker_name="b")


def test_rows_cannot_be_selected_afterwards() -> None:
    remaining = reader_of(shuffle=False, shuffle_buffer=None).without(steps=[1])
    calls = [
        lambda: remaining.filter(fastpipe.col("x") > 3),
        lambda: remaining.split(0.5, 0.5),
        lambda: remaining.take([1]),
        lambda: remaining.sample(3, seed=1),
        lambda: remaining.sample(3, seed=1, redraw=True),
        lambda: remaining.without(rows=[1]),
        lambda: remaining.partition(2),
        lambda: fastpipe.mix([remaining, reader_of()]),
    ]
    for call in calls:
        with pytest.raises(UnsupportedError, match="without some steps: "):
            call()
    mixed = fastpipe.mix([reader_of(), reader_of(seed=4)])
    whole = list(map(ids, mixed))
    mixed = mixed.without(steps=[0, 5, 6])
    assert list(map(ids, mixed)) == whole[1:5] + whole[7:]


@pytest.mark.parametrize(
    ("steps", "error", "match"),
    [
        ([9], ValueError, "step 9 does not exist: an epoch has 9 batches, counted from 0 to 8"),
        ([-1], ValueError, "step -1 does not exist"),
        (range(5, 10), ValueError, "step 9 does not exist"),
        (range(10**15), ValueError, "step 999999999999999 does not exist"),
        (range(0, 10**15, 7), ValueError, "step 99.* does not exist"),
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
    assert list(map(ids, reader_of().without(steps=range(8, 1, -1)))) == whole[:2]
    assert list(fastpipe.from_arrays({"x": np.arange(0)}, batch_size=2).without(steps=[])) == []
    huge = fastpipe.from_arrays({"x": np.arange(10**7)}, batch_size=1).without(steps=slice(1, 10**7 - 1))
    assert [ids(batch) for batch in huge] == [[0], [10**7 - 1]]
    remaining = reader_of().without(steps=[2])
    for step in (-1, 8, 2**70):
        with pytest.raises(IndexError, match="an epoch has 8 batches, counted from 0 to 7"):
            remaining.batch_at(step)
    with pytest.raises(TypeError, match="either rows or steps"):
        reader_of().without()
    with pytest.raises(TypeError, match="either rows or steps"):
        reader_of().without(rows=[1], steps=[1])
    with pytest.raises(StateError, match="damaged"):
        remaining.load_state_dict({})
