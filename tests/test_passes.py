"""Adapters accept any object that yields batches by step, here a reader with one column doubled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import fastpipe
import fastpipe.cuda
import fastpipe.jax
import fastpipe.torch
import samples
from fastpipe._reader.passes import BatchPlace, Passes, Position, Started, passes_of
from plain_gpu import PlainEngine
from samples import Data, through_json

OPTIONS: dict[str, Any] = {
    "features": {name: samples.FEATURES[name] for name in ("id", "vector", "items")},
    "batch_size": 7,
    "shuffle": True,
    "seed": 3,
}


class Doubled(Passes):
    """The batches of another pass, with the numbers of one column doubled."""

    def __init__(self, passes: Passes, name: str) -> None:
        self._of, self._name = passes, name

    def _same(self, passes: Passes) -> Doubled:
        return Doubled(passes, self._name)

    def _made(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {self._name: batch[self._name] * 2}

    features = property(lambda self: self._of.features)
    batch_size = property(lambda self: self._of.batch_size)
    drop_last = property(lambda self: self._of.drop_last)
    on_uneven = property(lambda self: self._of.on_uneven)
    epochs = property(lambda self: self._of.epochs)
    shows_progress = property(lambda self: self._of.shows_progress)
    rank = property(lambda self: self._of.rank)
    world_size = property(lambda self: self._of.world_size)
    sharers = property(lambda self: self._of.sharers)
    epoch = property(lambda self: self._of.epoch)
    pass_epoch = property(lambda self: self._of.pass_epoch)
    next_epoch = property(lambda self: self._of.next_epoch)
    loaded = property(lambda self: self._of.loaded)

    def __len__(self) -> int:
        return len(self._of)

    def place_of(self, epoch: int, step: int) -> BatchPlace:
        return self._of.place_of(epoch, step)

    def shard(self, num_shards: int, index: int) -> Passes:
        return self._same(self._of.shard(num_shards, index))

    def share(self, processes: int, index: int) -> Passes:
        return self._same(self._of.share(processes, index))

    def worker(self, workers: int, worker: int) -> Passes:
        return self._same(self._of.worker(workers, worker))

    def rebuilt(self) -> Passes:
        return self._same(self._of.rebuilt())

    def share_processors(self, sharers: int) -> None:
        self._of.share_processors(sharers)

    def set_epoch(self, epoch: int) -> None:
        self._of.set_epoch(epoch)

    def is_current(self, position: Position) -> bool:
        return self._of.is_current(position)

    def go_back(self, progress: dict[str, Any]) -> None:
        self._of.go_back(progress)

    def state(self, *, ended_stays: bool) -> dict[str, Any]:
        return self._of.state(ended_stays=ended_stays)

    def state_at(self, progress: dict[str, Any], *, ended: bool) -> dict[str, Any]:
        return self._of.state_at(progress, ended=ended)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._of.load_state_dict(state_dict)

    def start(self, memory: Any = None) -> Started:
        started = self._of.start(memory)
        return started._replace(batches=map(self._made, started.batches))

    def batch_at(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        return self._made(self._of.batch_at(step, epoch))

    def close(self) -> None:
        self._of.close()


class Reading:
    """A custom user class that is neither a `Reader` nor a `Passes`, but has a `_passes` attribute."""

    def __init__(self, data: Data, **options: Any) -> None:
        self._passes = Doubled(data.read(**OPTIONS | options)._passes, "vector")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return samples.write(tmp_path_factory.mktemp("passes"), [samples.blocks_of(60), samples.blocks_of(40, (3, 1))])


def expected(data: Data, epoch: int = 0) -> list[tuple[list[int], list[Any]]]:
    reader = data.read(**OPTIONS)
    reader.set_epoch(epoch)
    return [(batch["id"].tolist(), (batch["vector"] * 2).tolist()) for batch in reader]


def found(batches: Any) -> list[tuple[list[int], list[Any]]]:
    return [(batch["id"].tolist(), batch["vector"].tolist()) for batch in batches]


def drawn(batches: Iterator[Any], count: int) -> list[Any]:
    return [next(batches) for _ in range(count)]


def test_torch_accepts_custom_passes(data: Data) -> None:
    wanted = expected(data)
    dataset = fastpipe.torch.dataset(Reading(data))
    loader = DataLoader(dataset, batch_size=None, num_workers=0)
    assert len(dataset) == len(wanted)
    batches = iter(loader)
    first = drawn(batches, 4)
    assert isinstance(first[0]["vector"], torch.Tensor)
    assert isinstance(first[0]["items"], fastpipe.torch.Jagged)
    assert found(first) == wanted[:4]
    state = through_json(dataset.state_dict())
    assert found(batches) == wanted[4:]
    assert found(loader) == expected(data, 1)

    again = fastpipe.torch.dataset(Reading(data, seed=None))
    again.load_state_dict(state)
    assert found(DataLoader(again, batch_size=None, num_workers=0)) == wanted[4:]


def test_torch_workers_share_custom_passes(data: Data) -> None:
    loader = DataLoader(
        fastpipe.torch.dataset(Reading(data)), batch_size=None, num_workers=2, multiprocessing_context="spawn"
    )
    assert found(loader) == expected(data)


def test_jax_accepts_custom_passes(data: Data) -> None:
    wanted = expected(data)
    batches = fastpipe.jax.iterator(Reading(data))
    first = drawn(batches, 4)
    assert isinstance(first[0]["vector"], jax.Array)
    assert found(first) == wanted[:4]
    state = through_json(batches.get_state())
    assert found(batches) == wanted[4:]

    again = fastpipe.jax.iterator(Reading(data))
    again.set_state(state)
    assert found(again) == wanted[4:]


def test_cuda_rings_accept_custom_passes(data: Data) -> None:
    wanted = expected(data)
    prefetcher = fastpipe.cuda.Prefetcher._of(Reading(data), [PlainEngine()], 2, several=False)
    batches = iter(prefetcher)
    assert found(drawn(batches, 4)) == wanted[:4]
    state = through_json(prefetcher.state_dict())
    assert found(batches) == wanted[4:]
    again = fastpipe.cuda.Prefetcher._of(Reading(data), [PlainEngine()], 2, several=False)
    again.load_state_dict(state)
    assert found(again) == wanted[4:]


def test_native_consumers_refuse_custom_passes(data: Data) -> None:
    passes = passes_of(Reading(data))
    with pytest.raises(fastpipe.errors.UnsupportedError, match="Python makes the batches"):
        passes.start_in_engine()


def test_a_reader_has_passes_and_no_further_public_name(data: Data) -> None:
    reader = data.read(**OPTIONS)
    passes = passes_of(reader)
    assert passes.origin is reader
    assert passes_of(passes) is passes
    np.testing.assert_array_equal(passes.batch_at(2)["id"], reader.batch_at(2)["id"])
    assert [name for name in dir(reader) if not name.startswith("_")] == PUBLIC


@pytest.mark.parametrize("other", [None, [], {"_passes": 1}, DataLoader([1])])
def test_other_objects_are_refused(other: object) -> None:
    with pytest.raises(TypeError, match=f"reader must be a fastpipe.Reader; got {type(other).__name__}: try another"):
        passes_of(other, ": try another")


PUBLIC = [
    "batch_at",
    "batch_size",
    "bucket",
    "cache",
    "categories",
    "close",
    "describe",
    "epoch",
    "explain",
    "features",
    "files",
    "filter",
    "folds",
    "head",
    "lease",
    "load_state_dict",
    "locate",
    "losses",
    "map",
    "num_rows",
    "pack",
    "partition",
    "plan",
    "rank",
    "read_partition",
    "rebatch",
    "resume_appended",
    "sample",
    "seed",
    "serve",
    "set_epoch",
    "shard",
    "shuffle_buffer",
    "shuffle_report",
    "split",
    "state_dict",
    "stats",
    "take",
    "to_arrow_reader",
    "without",
    "world_size",
]


@pytest.mark.parametrize("shuffle", [False, True])
def test_passes_can_start_and_end_at_any_batch(data: Data, shuffle: bool) -> None:
    reader = data.read(batch_size=7, shuffle=shuffle, seed=3)
    reader.set_epoch(1)
    wanted = found(reader)
    passes = data.read(batch_size=7, shuffle=shuffle, seed=3)._passes
    for start in range(len(wanted)):
        for stop in {start + 1, start + 3, len(wanted)}:
            if stop <= len(wanted):
                assert found(passes.batches(1, start, stop).batches) == wanted[start:stop]
    with pytest.raises(IndexError, match="does not exist"):
        passes.batches(1, 0, len(wanted) + 1)
    for start, stop in [(2, 2), (3, 2), (0, 0)]:
        with pytest.raises(ValueError, match="range of batches is empty"):
            passes.batches(1, start, stop)
    with pytest.raises(OverflowError):
        passes.batches(1, -1, 2)
    assert passes.epoch == 0
