"""Random pipelines of filters, splits, samples, taken rows, mixtures, packs and maps of every source, beside models."""

from __future__ import annotations

import itertools
import json
import math
import os
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest

import fastpipe
from every_source import ORDERS, Make, digests, make
from grouped_pipelines import RAGGED, Documents, groups_of
from pipelines import STOPS, Model, Rows, chain, cut, expected, located, rows_of, size, values_of

pytest.importorskip("pyarrow")

__all__ = ["make"]

pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")

PIPELINES = int(os.environ.get("FASTPIPE_PIPELINES", "20"))
"""Number of pipelines of each source, on average."""


@pytest.fixture(scope="module")
def model(make: Make) -> Model:
    return Model(make)


@pytest.mark.parametrize("number", range(PIPELINES * 7 // 20))
def test_a_pipeline_has_the_rows_of_the_model(make: Make, model: Model, number: int) -> None:
    draw = np.random.default_rng(number)
    options = ORDERS[draw.integers(len(ORDERS))]
    ranks, threads, batch_size = int(draw.integers(1, 4)), int(draw.integers(1, 4)), int(draw.integers(1, 40))

    def pipeline(rank: int, threads: int) -> tuple[fastpipe.Reader, Rows]:
        shared = {"batch_size": batch_size, "num_threads": threads, "seed": 3, "on_uneven": "allow"}
        reader = make(**shared | options, rank=rank, world_size=ranks)
        return chain(model, np.random.default_rng(number), reader)

    found: Rows = []
    for rank in range(ranks):
        reader, rows = pipeline(rank, threads)
        whole = [digests([batch])[0] for batch in reader]
        batches = [model.rows(reader, step, size(reader.batch_at(step, epoch=0))) for step in range(len(reader))]
        found += [row for batch in batches for row in batch]
        if "user" not in model.batch:  # Negatives are drawn by the step.
            assert whole == [digests([values_of(model.batch, batch)])[0] for batch in batches]
        assert whole == [digests([reader.batch_at(step, epoch=0)])[0] for step in range(len(reader))]
        if not options and ranks == 1:
            assert found == rows
        # A state restores any step, with another number of threads.
        stop = int(draw.integers(len(whole) + 1))
        reader.set_epoch(0)
        for _, _batch in zip(range(stop), reader, strict=False):
            pass
        again, _ = pipeline(rank, threads % 3 + 1)
        again.load_state_dict(json.loads(json.dumps(reader.state_dict())))
        left = digests(again)
        assert left == whole[stop:] or (stop == len(whole) and again.epoch > 0)
    assert sorted(found) == sorted(rows)


Result = tuple[str, int]


def noisy(batch: dict[str, Any], rng: np.random.Generator) -> Result:
    return digests([batch])[0], int(rng.integers(2**60))


def noise(epoch: int, batches: int, depth: int) -> list[int]:
    """Returns the random numbers of an epoch's batches, which don't depend on the number of ranks."""
    counters = [np.array([0, batch, 0, epoch], np.uint64) for batch in range(batches)]
    keyed = [np.random.Philox(key=np.array([7, depth], np.uint64), counter=counter) for counter in counters]
    return [int(np.random.Generator(each).integers(2**60)) for each in keyed]


def mixed(make: Make, model: Model, draw: np.random.Generator, epoch: int) -> tuple[fastpipe.Reader, list[Any]]:
    """Returns a mixture of two or three pipelines, and the reader and the row of each row of an epoch's batches."""
    readers: list[fastpipe.Reader] = []
    number, batch_size = int(draw.integers(2, 4)), int(draw.integers(5, 60))
    while len(readers) < number:
        options = {"batch_size": int(draw.integers(1, 40)), "seed": 3} | ORDERS[draw.integers(len(ORDERS))]
        reader, rows = chain(model, draw, make(**options))
        readers += [reader] if rows else []
    shares, stop = draw.integers(1, 9, number).tolist(), STOPS[draw.integers(len(STOPS))]
    whole = fastpipe.mix(readers, shares, batch_size=batch_size, stop=stop, on_uneven="allow")
    counts = whole._data.rows().values()
    passes = [max(1, math.ceil(count / reader.num_rows)) for count, reader in zip(counts, readers, strict=True)]
    rows_of_epoch = {
        at: rows_of(model, reader, range(epoch * passes[at], (epoch + 1) * passes[at]))
        for at, reader in enumerate(readers)
    }
    return whole, cut(expected(rows_of_epoch, shares, stop), batch_size)


@pytest.mark.parametrize("number", range(PIPELINES * 7 // 20))
def test_mixtures_and_maps_of_pipelines(make: Make, model: Model, number: int) -> None:
    """Up to nine ranks share the batches, and their number changes in the middle of an epoch."""
    draw = np.random.default_rng([1, number])
    epoch = int(draw.integers(3))
    if draw.random() < 0.7:
        reader, naive = mixed(make, model, draw, epoch)
        assert located(model, reader, epoch) == naive
        if "user" not in model.batch:  # Negatives are drawn by the epoch.
            batches = [reader.batch_at(step, epoch) for step in range(len(reader))]
            rows = [[row for _, row in places] for places in naive]
            assert digests(batches) == digests([values_of(model.batch, each) for each in rows])
    else:
        # Ranks with separate units keep their number.
        options = {"batch_size": int(draw.integers(1, 40)), "seed": 3, "on_uneven": "allow", "shard_by": "batch"}
        reader, _ = chain(model, draw, make(**options | ORDERS[draw.integers(len(ORDERS))]))
    check_maps(reader, draw, epoch)
    check_left_out_steps(reader, draw, epoch)


def check_left_out_steps(reader: fastpipe.Reader, draw: np.random.Generator, epoch: int) -> None:
    """Checks that the other batches of a reader stay, and that a state restores any of them."""
    steps = len(reader)
    if steps < 2:
        return
    left_out = draw.choice(steps, draw.integers(1, steps), replace=False).tolist()
    wanted = digests(reader.batch_at(step, epoch) for step in range(steps) if step not in left_out)
    remaining, again = reader.without(steps=left_out), reader.without(steps=left_out)
    remaining.set_epoch(epoch)
    found = digests(itertools.islice(remaining, int(draw.integers(len(wanted)))))
    again.load_state_dict(json.loads(json.dumps(remaining.state_dict())))
    assert found + digests(again) == wanted
    at = int(draw.integers(len(wanted)))
    assert digests([remaining.batch_at(at, epoch)]) == [wanted[at]]


def check_maps(reader: fastpipe.Reader | fastpipe.typing.Mapped, draw: np.random.Generator, epoch: int) -> None:
    """Checks a map of a reader whose ranks share the batches: its random numbers, and ranks whose number changes."""
    mapped = reader.map(noisy, seed=7, num_threads=int(draw.integers(3)))
    mapped.set_epoch(epoch)
    wanted: list[Result] = list(mapped)
    depth = int(isinstance(reader, fastpipe.typing.Mapped))
    assert [number for _, number in wanted] == noise(epoch, len(wanted), depth)
    assert [mapped.batch_at(step, epoch) for step in range(len(wanted))] == wanted
    mapped.set_epoch(epoch)
    found: list[Result] = []
    left, last = len(wanted), False
    while left and not last:
        world, last = int(draw.integers(1, 10)), bool(draw.random() < 0.3)
        steps, states = int(draw.integers(left // world + 1)), []
        for shard in [mapped.shard(world, rank) for rank in range(world)]:
            found += itertools.islice(shard, None if last else steps)
            states.append(json.dumps(shard.state_dict()))
        left -= world * steps
        if left and not last:
            assert set(states) == {states[0]}
            mapped.load_state_dict(json.loads(states[0]))
    assert sorted(found) == sorted(wanted)


@pytest.fixture(scope="module")
def documents(make: Make) -> Documents:
    return Documents(make)


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> np.random.Generator:
    """Returns a generator that differs between sources, too."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.mark.parametrize("make", RAGGED, indirect=True)
@pytest.mark.parametrize("number", range(PIPELINES // 4))
def test_packs_and_similar_batches_of_pipelines(documents: Documents, draw: np.random.Generator, number: int) -> None:
    how = documents.grouping(draw)
    epoch, ranks, batch_size = map(int, draw.integers([0, 2, 1], [3, 5, 20]))
    by_batch, order, seed = draw.random() < 0.5, ORDERS[draw.integers(len(ORDERS))], int(draw.integers(2**32))

    def pipeline(rank: int = 0, ranks: int = 1) -> tuple[fastpipe.typing.Mapped, Rows]:
        options = {"batch_size": batch_size, "seed": 3, "on_uneven": "allow", "num_threads": int(draw.integers(1, 4))}
        shared = {"rank": rank, "world_size": ranks} | ({"shard_by": "batch"} if by_batch else {})
        reader, rows = chain(documents, np.random.default_rng(seed), documents.make(**options | shared | order))
        return documents.group(reader, how), rows

    one, rows = pipeline()
    batches = documents.batches_of(one, how, epoch)
    groups = groups_of(batches)
    assert Counter(itertools.chain(*groups)) == how.pieces(documents.docs, rows)
    largest = batch_size if how.on_long else 1
    assert [len(batch) for batch in batches] == [len(batch) for batch in cut(groups, largest)]
    assert how.on_long or all(len(group) <= batch_size for group in groups)
    one.set_epoch(epoch)
    wanted = digests(one)
    assert wanted == digests(one.batch_at(step, epoch) for step in range(len(one)))
    # Epochs have the same groups, in another order if the reader is shuffled.
    following = groups_of(documents.batches_of(one, how, epoch + 1))
    assert following == groups if not order else sorted(following) == sorted(groups)
    # Ranks have the same groups.
    shares = [pipeline(rank, ranks)[0] for rank in range(ranks)]
    found = [documents.batches_of(share, how, epoch) for share in shares]
    assert sorted(groups_of(itertools.chain(*found))) == sorted(groups)
    assert not by_batch or found == [batches[rank::ranks] for rank in range(ranks)]
    # A state restores any step, with another number of threads, or of ranks if they don't have separate units.
    stop = int(draw.integers(max(len(wanted), 1)))
    one.set_epoch(epoch)
    for _ in itertools.islice(one, stop):
        pass
    state = json.dumps(one.state_dict())
    elastic = by_batch or order.get("shuffle") not in ("block", "buffer")
    for world in (1, ranks) if elastic else (1,):
        left = []
        for share in [pipeline(rank, world)[0] for rank in range(world)]:
            share.load_state_dict(json.loads(state))
            left.append(digests(share))
        assert sorted(itertools.chain(*left)) == sorted(wanted[stop:])
        assert left == [wanted[stop + rank :: world] for rank in range(world)] or (world > 1 and not by_batch)


@pytest.mark.parametrize("make", RAGGED, indirect=True)
@pytest.mark.parametrize("number", range(PIPELINES // 5))
def test_mixtures_and_maps_of_packs_and_similar_batches(
    documents: Documents, draw: np.random.Generator, number: int
) -> None:
    how, epoch = documents.grouping(draw), int(draw.integers(3))

    def reader(**shared: Any) -> fastpipe.Reader:
        options = {"batch_size": int(draw.integers(1, 20)), "seed": 3} | shared
        found, rows = chain(documents, draw, documents.make(**options | ORDERS[draw.integers(len(ORDERS))]))
        return found if rows else reader(**shared)

    if draw.random() < 0.2:
        whole = documents.group(reader(on_uneven="allow", shard_by="batch"), how)
    else:
        readers = [reader() for _ in range(draw.integers(2, 4))]
        whole, options = documents.mixed([documents.group(each, how) for each in readers], how, draw, epoch)
        if how.on_long:
            # The packs of a mixture are the mixture of the packs.
            other = documents.group(fastpipe.mix(readers, **options), how)
            one, two = ([each.batch_at(step, epoch) for step in range(len(whole))] for each in (whole, other))
            assert digests(one) == digests(two)
        if draw.random() < 0.4:
            whole, _ = documents.mixed([whole, documents.group(reader(), how)], how, draw, epoch)
    check_maps(whole, draw, epoch)
