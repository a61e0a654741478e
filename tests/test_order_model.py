"""The orders match the model row for row, and never change between versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fastpipe
import order_model as model
from order_statistics import dataset, order, write

SHUFFLES = ("sequential", "window", "buffer", "block")
LARGEST_SEED, LARGEST_EPOCH = 2**64 - 1, 2**62 - 1

block_sizes = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(0, 9), st.integers(30, 90), st.just(700)), max_size=12
)
seeds = st.one_of(st.integers(0, 3), st.integers(0, LARGEST_SEED), st.just(LARGEST_SEED))
epochs = st.one_of(st.integers(0, 3), st.integers(0, LARGEST_EPOCH), st.just(LARGEST_EPOCH))


@pytest.mark.parametrize("shuffle", SHUFFLES)
@given(
    counts=block_sizes,
    files=st.integers(1, 3),
    batch_size=st.one_of(st.integers(1, 12), st.integers(100, 5000)),
    shuffle_buffer=st.one_of(st.integers(1, 12), st.integers(13, 300), st.just(2**31)),
    seed=seeds,
    epoch=epochs,
    drop_last=st.booleans(),
    which=st.randoms(use_true_random=False),
)
@example([], 1, 3, 4, 0, 0, False, None)
@example([0, 0], 2, 3, 4, 0, 0, True, None)
def test_orders_match_the_model(
    tmp_path: Path, shuffle, counts, files, batch_size, shuffle_buffer, seed, epoch, drop_last, which
) -> None:
    cuts = [len(counts) * i // files for i in range(files + 1)]
    paths = [write(tmp_path / f"{i}.avro", counts[cuts[i] : cuts[i + 1]]) for i in range(files)]
    settings = {"shuffle_buffer": shuffle_buffer, "batch_size": batch_size, "seed": seed}
    found = order(dataset(*paths), shuffle, **settings, drop_last=drop_last)
    rows = model.rows(counts, shuffle=shuffle, **settings, epoch=epoch)
    batches = model.batches(rows, batch_size, drop_last)
    assert found.steps == len(batches)
    for step, batch in enumerate(batches):
        assert pairs(found, epoch, step) == batch
    # Batches are the same when they are requested in any order.
    for _ in range(min(len(batches), 10)):
        step = which.randrange(len(batches))
        assert pairs(found, epoch, step) == batches[step]


def pairs(found, epoch: int, step: int) -> list[model.Row]:
    """Returns the block and record of each row of a batch."""
    blocks, records = found.rows(epoch, step)
    assert (blocks.dtype, records.dtype) == (np.uint64, np.uint32)
    return list(zip(blocks.tolist(), records.tolist(), strict=True))


@pytest.mark.parametrize("shuffle", ["buffer", "block"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_shuffle_their_own_blocks(tmp_path: Path, shuffle: str, world_size: int) -> None:
    counts = [4, 0, 7, 1, 1, 3, 9, 2]
    data = dataset(write(tmp_path / "rows.avro", counts))
    for rank in range(world_size):
        settings = {"shuffle_buffer": 5, "batch_size": 4, "seed": 8}
        found = order(data, shuffle, **settings, rank=rank, world_size=world_size, on_uneven="allow")
        rows = model.rows(counts[rank::world_size], shuffle=shuffle, **settings, epoch=2, shard=rank)
        rows = [(rank + world_size * block, record) for block, record in rows]
        assert [pairs(found, 2, step) for step in range(found.steps)] == model.batches(rows, 4, False)


@pytest.mark.parametrize("blocks", [65_536, 65_537, 131_072])
def test_many_blocks(tmp_path: Path, blocks: int) -> None:
    """Checks both sides of the limit: the order of up to 65,536 blocks is a table, of more a keyed permutation."""
    path = tmp_path / "rows.avro"
    write(path, [1])
    header, one = path.read_bytes()[:-19], path.read_bytes()[-19:]
    path.write_bytes(header + one * blocks)
    data = dataset(str(path))
    for epoch, n in [(0, 1000), (3, 777)]:
        found = order(data, "window", shuffle_buffer=n, batch_size=n, seed=5)
        units = model.units(blocks, 5, epoch)
        assert sorted(units) == list(range(blocks))
        for step in (0, 1, found.steps // 2, found.steps - 1):
            inside = units[step * n : (step + 1) * n]
            expected = model.shuffled(inside, model.words(5, epoch, model.WINDOW, step, len(inside)))
            assert [block for block, _ in pairs(found, epoch, step)] == expected


# Two epochs of each order. They must never change: a training run must be reproducible with later versions.
GOLDEN = {
    "sequential": [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14],
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14],
    ],
    "window": [
        [0, 6, 10, 2],
        [1, 4, 11, 5],
        [14, 13, 7, 12],
        [3, 9, 8],
        [1, 2, 0, 5],
        [8, 6, 4, 7],
        [14, 13, 3, 10],
        [11, 12, 9],
    ],
    "buffer": [
        [7, 1, 8, 4],
        [10, 3, 12, 9],
        [5, 0, 6, 2],
        [13, 14, 11],
        [0, 3, 7, 5],
        [8, 2, 10, 13],
        [14, 9, 12, 4],
        [1, 6, 11],
    ],
    "block": [
        [4, 0, 5, 6],
        [10, 11, 12, 1],
        [7, 8, 13, 2],
        [9, 14, 3],
        [0, 4, 5, 6],
        [7, 1, 10, 12],
        [13, 8, 14, 2],
        [3, 11, 9],
    ],
}


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_golden_orders(tmp_path: Path, shuffle: str) -> None:
    """Checks what users read. The values number the rows in file order."""
    reader = fastpipe.read_avro(
        write(tmp_path / "rows.avro", [3, 0, 1, 6, 2, 3]),
        batch_size=4,
        shuffle=shuffle != "sequential" and shuffle,
        shuffle_buffer=None if shuffle == "sequential" else 8,
        seed=42,
        epochs=2,
    )
    assert [batch["value"].tolist() for batch in reader] == GOLDEN[shuffle]


def test_golden_order_of_many_blocks() -> None:
    """Checks the model, which the tests above compare with fastpipe."""
    assert model.keyed(70_000, 42, 1)[:5].tolist() == [44_572, 33_840, 35_210, 42_654, 20_250]
    largest = model.keyed(1_000_000, LARGEST_SEED, LARGEST_EPOCH)
    assert largest[:5].tolist() == [671_777, 812_086, 784_698, 294_519, 971_341]


def test_golden_draws() -> None:
    assert model.words(42, 1, model.WINDOW, 7, 5) == [
        2_822_466_014_628_874_287,
        6_881_670_886_181_682_274,
        7_436_804_251_033_816_583,
        13_678_444_364_927_680_407,
        10_115_968_198_981_507_314,
    ]
