"""Shards of readers, which the workers and ranks of frameworks read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import fastpipe
import samples
from samples import Data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return samples.write(
        tmp_path_factory.mktemp("shards"), [samples.blocks_of(210, (3, 0, 1, 2)), samples.blocks_of(201, (2, 1))]
    )


def rows(reader: fastpipe.Reader) -> list[list[int]]:
    return [samples.ids_of([batch]) for batch in reader]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_shard_is_a_rank_of_a_larger_world(data: Data, shuffle: bool, world: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle, "seed": 3, "on_uneven": "allow"}
    seen: list[int] = []
    for rank in range(world):
        whole = data.read(**options, rank=rank, world_size=world)
        for index in range(2):
            shard = whole.shard(2, index)
            assert (shard.rank, shard.world_size, shard.seed) == (2 * rank + index, 2 * world, 3)
            expected = rows(data.read(**options, rank=2 * rank + index, world_size=2 * world))
            found = rows(pickle.loads(pickle.dumps(shard)))
            assert found == expected
            assert rows(shard) == expected
            seen += [row for batch in found for row in batch]
        assert (whole.rank, whole.world_size) == (rank, world)
    assert sorted(seen) == list(range(411))


def test_shards_share_a_generated_seed(data: Data) -> None:
    reader = data.read(batch_size=4, shuffle=True, on_uneven="allow")
    parts = [row for index in range(3) for batch in rows(reader.shard(3, index)) for row in batch]
    assert sorted(parts) == list(range(411))


@pytest.mark.parametrize("shuffle", [False, True])
def test_shards_begin_at_the_loaded_state(data: Data, shuffle: bool) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": shuffle, "seed": 3, "on_uneven": "allow"}
    reader = data.read(**options)
    batches = iter(reader)
    first = [row for _ in range(17) for row in samples.ids_of([next(batches)])]
    resumed = data.read(**options)
    resumed.load_state_dict(json.loads(json.dumps(reader.state_dict())))
    rest = [row for index in range(3) for batch in rows(resumed.shard(3, index)) for row in batch]
    assert len(first) == 4 * 17
    assert sorted(first + rest) == list(range(411))


def test_shards_begin_at_the_epoch(data: Data) -> None:
    reader = data.read(batch_size=4, shuffle=True, seed=3, on_uneven="allow")
    reader.set_epoch(5)
    shard = reader.shard(2, 1)
    assert shard.epoch == 5
    other = data.read(batch_size=4, shuffle=True, seed=3, on_uneven="allow", rank=1, world_size=2)
    other.set_epoch(5)
    assert rows(shard) == rows(other)


def test_states_that_cannot_be_sharded_are_refused(data: Data) -> None:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": "buffer", "seed": 3, "on_uneven": "allow"}
    reader = data.read(**options)
    batches = iter(reader)
    next(batches)
    resumed = data.read(**options)
    resumed.load_state_dict(reader.state_dict())
    with pytest.raises(fastpipe.errors.StateError, match="cannot resume from this state"):
        resumed.shard(2, 0)


def test_invalid_shards_are_refused(data: Data, tmp_path: Path) -> None:
    reader = data.read(batch_size=4)
    for shards, index in ((2, 2), (0, 0), (2, -1)):
        with pytest.raises(ValueError, match="must be between"):
            reader.shard(shards, index)
    with pytest.raises(ValueError, match="world_size"):
        reader.shard(2**20, 0).shard(2, 0)
    with pytest.raises(TypeError):
        reader.shard(True, 0)
    with pytest.raises(ValueError, match="would have no batches"):
        samples.write(tmp_path, [[3]]).read(batch_size=4, shuffle="block", seed=1).shard(2, 0)
