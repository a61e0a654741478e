"""Random numbers of items from `fastpipe.torch.item_rng()`: the same whoever makes the item."""

from __future__ import annotations

import random
import sys
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from apart import apart
from fastpipe.torch import DataLoader, item_rng
from loader_data import ALL_WAYS, FORKED, THREADS, AtOnce, Items, Numbers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers share memory by means of Linux")


class Noise(Numbers):
    """Items of random numbers of each kind, some also of the process's generators."""

    def __init__(self, count: int, *, plain: bool = False) -> None:
        super().__init__(count)
        self.plain = plain

    def __getitem__(self, index: int) -> Any:
        rng = item_rng()
        drawn = [rng.random_generator.random(), rng.numpy_generator.random(), rng.random_generator.random()]
        drawn.append(float(torch.rand((), generator=rng.torch_generator)))
        if self.plain and index >= 20:
            drawn[2] += random.random()
        return np.array(drawn)


class NoiseAtOnce(AtOnce):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        rng = item_rng()
        return [rng.numpy_generator.random() + index for index in indices]


def noisily(items: list[Any]) -> Any:
    return torch.tensor(np.stack(items)) + item_rng().random_generator.random()


def batches(dataset: Any, **more: Any) -> list[Any]:
    return list(DataLoader(dataset, 7, shuffle=True, generator=torch.Generator().manual_seed(3), **more))


@apart
@pytest.mark.parametrize("collate_fn", [None, noisily])
def test_items_are_the_same_whoever_makes_them(collate_fn: Any) -> None:
    expected = batches(Noise(40), collate_fn=collate_fn)
    assert len(np.unique(torch.cat(expected))) == 160
    for way in [*ALL_WAYS.values(), THREADS | {"num_workers": 5}, FORKED | {"num_workers": 1}]:
        found = batches(Noise(40), collate_fn=collate_fn, **way)
        assert all(map(torch.equal, found, expected)), way


@apart
def test_data_sets_that_are_asked_for_batches_draw_the_same() -> None:
    expected = batches(NoiseAtOnce(40))
    for way in (FORKED, THREADS):
        assert all(map(torch.equal, batches(NoiseAtOnce(40), **way), expected))


@apart
def test_items_that_are_made_once_more_draw_the_same() -> None:
    """A data set begins to draw from the process's generators behind its first 20 items."""
    expected = batches(Noise(40, plain=True))
    for workers in (1, 3):
        assert all(map(torch.equal, batches(Noise(40, plain=True), **FORKED | {"num_workers": workers}), expected))


@apart
def test_items_that_are_made_anew_draw_the_same() -> None:
    """The same item is the last of one pass and the first of the next, of workers that are kept."""
    for way in (FORKED | {"num_workers": 1}, THREADS | {"num_workers": 1}):
        loader = DataLoader(Noise(1), generator=torch.Generator().manual_seed(3), persistent_workers=True, **way)
        begun = iter(loader)
        state = loader.state_dict()
        expected = list(begun)
        loader.load_state_dict(state)
        assert torch.equal(*list(loader), *expected)


def test_it_is_refused_where_no_item_is_made() -> None:
    with pytest.raises(RuntimeError, match=r"while fastpipe.torch.DataLoader makes them: none is being made here"):
        item_rng()
    found = list(DataLoader(Noise(3)))
    assert len(found) == 3
    with pytest.raises(RuntimeError, match="none is being made here"):
        item_rng()


class Nested(Numbers):
    """Items that are made by a loader of their own."""

    def __getitem__(self, index: int) -> Any:
        before = item_rng().random_generator.random()
        inner = torch.cat(list(DataLoader(Noise(3), generator=torch.Generator().manual_seed(index))))
        return np.append(inner.numpy().ravel(), [before, item_rng().random_generator.random()])


@apart
def test_loaders_within_items_have_generators_of_their_own() -> None:
    expected = batches(Nested(9))
    for way in (FORKED, THREADS):
        assert all(map(torch.equal, batches(Nested(9), **way), expected))


class Plain(Numbers):
    """Items of the process's generators."""

    def __init__(self, count: int, draw: Any) -> None:
        super().__init__(count)
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return float(self.draw())


@pytest.mark.parametrize(("draw", "name"), [(random.random, "random"), (np.random.random, r"numpy\.random")])
def test_threads_that_draw_from_the_process_are_warned_of_once(draw: Any, name: str) -> None:
    """By functions that were imported by name."""
    loader = DataLoader(Plain(40, draw), 4, **THREADS)
    with pytest.warns(UserWarning, match=rf"from the generator of {name} while worker threads made items") as told:
        list(loader)
    list(loader)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_what_the_program_draws_is_not_blamed_on_threads() -> None:
    loader = DataLoader(Items([torch.rand(4)] * 40, 0.002), 4, **THREADS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in loader:
            random.random(), torch.rand(1), np.random.random()
    assert not told
