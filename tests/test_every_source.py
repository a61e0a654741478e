"""Promises that every source keeps: states, ranks, threads, memory limits and adapters."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from every_source import ROWS, Make, digests, make, order
from processes import together

# The fixture that makes readers of each source.
__all__ = ["make"]


@order
def test_a_state_resumes_at_every_step(make: Make, order: dict[str, Any]) -> None:
    reader = make(batch_size=32, **order)
    whole = digests(reader)
    reader.set_epoch(0)
    batches, states = iter(reader), [reader.state_dict()]
    states.extend(reader.state_dict() for _ in batches)
    for step, state in enumerate(states):
        again = make(batch_size=32, **order)
        again.load_state_dict(json.loads(json.dumps(state)))
        assert digests(again) == whole[step:]


@order
def test_an_abandoned_pass_counts_as_an_epoch(make: Make, order: dict[str, Any]) -> None:
    reader = make(batch_size=32, **order)
    whole = [digests(reader) for _ in range(4)]
    reader.set_epoch(0)
    # The last batch also belongs to the current epoch.
    for epoch, steps in enumerate((1, 3, len(whole[2]))):
        found = []
        for step, batch in enumerate(reader):
            found += digests([batch])
            assert reader.epoch == epoch
            assert digests([reader.batch_at(step)]) == found[-1:]
            assert reader.locate(step, 0) == reader.locate(step, 0, epoch=epoch)
            assert isinstance(reader.locate(step, 0), fastpipe.typing.Location)
            if step + 1 == steps:
                break
        assert found == whole[epoch][:steps]
        assert reader.epoch == epoch
        again = make(batch_size=32, **order)
        again.load_state_dict(json.loads(json.dumps(reader.state_dict())))
        assert digests(again) == whole[epoch][steps:]
    assert digests(reader) == whole[3]
    assert reader.epoch == 4


@order
def test_threads_and_memory_change_nothing(make: Make, order: dict[str, Any]) -> None:
    whole = digests(make(batch_size=32, **order))
    for options in ({"num_threads": 1}, {"num_threads": 4, "prefetch": 1}, {"memory_limit": "64MB"}):
        assert digests(make(batch_size=32, **order, **options)) == whole


@order
def test_batches_are_found_by_step(make: Make, order: dict[str, Any]) -> None:
    reader = make(batch_size=32, **order)
    whole = digests(reader)
    assert digests(reader.batch_at(step, epoch=0) for step in range(len(whole))) == whole
    assert len({reader.locate(step, row, epoch=0) for step in range(7) for row in range(32)}) == 7 * 32


def test_ranks_together_have_the_rows_of_one(make: Make) -> None:
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "shuffle_buffer": 32, "seed": 3}
    whole = digests(make(**options))
    shares = [digests(make(**options, rank=rank, world_size=3)) for rank in range(3)]
    assert sorted(digest for share in shares for digest in share) == sorted(whole)


def test_readers_are_pickled(make: Make) -> None:
    reader = make(batch_size=32, shuffle=True, seed=3)
    again = pickle.loads(pickle.dumps(reader))
    assert digests(again) == digests(reader)
    assert again.features == reader.features
    assert again.state_dict() == reader.state_dict()


def test_several_threads_draw_from_one_pass(make: Make) -> None:
    whole = digests(make(batch_size=4))
    batches, found = iter(make(batch_size=4, num_threads=2)), list[str]()
    together([threading.Thread(target=lambda: found.extend(digests(batches))) for _ in range(4)])
    assert sorted(found) == sorted(whole)


def test_a_limit_that_is_too_small_is_named(make: Make) -> None:
    with pytest.raises(fastpipe.errors.LimitError, match="memory_limit is 10 B, and this takes at least"):
        next(iter(make(batch_size=32, shuffle=True, seed=3, memory_limit=10)))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_tensors_of_torch(make: Make, request: pytest.FixtureRequest) -> None:
    torch = pytest.importorskip("torch")
    import fastpipe.torch as fptorch

    # A database connection can't be used after a fork.
    context = "spawn" if request.node.callspec.params["make"] == "sql" else None
    dataset = fptorch.dataset(make(batch_size=32))
    batches = list(
        torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=context)
    )
    assert sum(len(next(iter(batch.values()))) for batch in batches) == ROWS


def test_arrays_of_jax(make: Make) -> None:
    pytest.importorskip("jax")
    from fastpipe import jax

    found = list(jax.iterator(make(batch_size=32)))
    assert sum(len(next(iter(batch.values()))) for batch in found) == ROWS


def test_a_dataset_of_tensorflow(make: Make) -> None:
    pytest.importorskip("tensorflow")
    from fastpipe import tf

    found = list(tf.dataset(make(batch_size=32)))
    assert sum(int(next(iter(batch.values())).shape[0]) for batch in found) == ROWS


def test_a_stream_of_arrow(make: Make, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    reader = make(batch_size=32, shuffle=True, seed=3)
    table = pa.table(reader)
    assert table.num_rows == ROWS
    reader.set_epoch(0)
    assert digests(fastpipe.from_arrow(table, batch_size=32)) == digests(reader)


def test_explain_and_stats(make: Make) -> None:
    reader = make(batch_size=32)
    list(reader)
    assert reader.stats()["rows"] == ROWS
    assert reader.explain()
    assert repr(reader).startswith("<fastpipe.Reader of ")


@order
def test_a_description_is_of_all_rows(make: Make, order: dict[str, Any], request: pytest.FixtureRequest) -> None:
    pytest.importorskip("datasketches")
    whole = make(batch_size=32, **order).describe()
    assert whole.num_rows == ROWS
    assert set(whole) == set(make(batch_size=32).features)
    if request.node.callspec.params["make"] == "interactions":
        return  # The drawn negatives depend on the order and on ranks.
    # The description doesn't depend on batch size, order or ranks.
    same_description(make(batch_size=7).describe(), whole)
    ranks = [make(batch_size=8, **order, rank=rank, world_size=3, on_uneven="allow") for rank in range(3)]
    same_description(fastpipe.typing.Description.merged(rank.describe() for rank in ranks), whole)


def same_description(mine: fastpipe.typing.Description, other: fastpipe.typing.Description) -> None:
    """Asserts that counts are equal, and moments up to rounding."""
    assert mine.num_rows == other.num_rows
    for name in other:
        here, there = mine[name], other[name]
        assert (here.kind, here.dtype) == (there.kind, there.dtype)
        assert (here.count, here.null_count) == (there.count, there.null_count)
        if here.kind != "float":
            assert here.value_counts() == there.value_counts()
        if here.kind in ("float", "integer") and here.count:
            assert (here.min, here.max) == (there.min, there.max)
            assert here.mean == pytest.approx(there.mean, rel=1e-12)
            assert here.std == pytest.approx(there.std, rel=1e-9)
        if here.lengths is not None and there.lengths is not None:
            assert here.lengths.value_counts() == there.lengths.value_counts()
