"""Random numbers of items from `fastpipe.torch.item_rng()` do not depend on the worker that makes the item."""

from __future__ import annotations

import random
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from apart import apart
from fastpipe.torch import DataLoader, item_rng
from fastpipe.torch.loader import _in_process
from loader_data import ALL_WAYS, FORKED, IN_PROCESS, SPAWNED, THREADS, AtOnce, Items, Numbers, assert_same

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")


class Noise(Numbers):
    """Items of random numbers of each kind, optionally also from the process's generators."""

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
def test_items_do_not_depend_on_workers(collate_fn: Any) -> None:
    expected = batches(Noise(40), collate_fn=collate_fn)
    assert len(np.unique(torch.cat(expected))) == 160
    for way in [*ALL_WAYS.values(), THREADS | {"num_workers": 5}, FORKED | {"num_workers": 1}]:
        found = batches(Noise(40), collate_fn=collate_fn, **way)
        assert all(map(torch.equal, found, expected)), way


@apart
def test_datasets_with_getitems_draw_the_same() -> None:
    expected = batches(NoiseAtOnce(40))
    for way in (FORKED, THREADS):
        assert all(map(torch.equal, batches(NoiseAtOnce(40), **way), expected))


@apart
def test_items_made_again_draw_the_same() -> None:
    """The dataset starts to draw from the process's generators after its first 20 items."""
    expected = batches(Noise(40, plain=True), **FORKED | {"num_workers": 2})
    for workers in (1, 3):
        assert all(map(torch.equal, batches(Noise(40, plain=True), **FORKED | {"num_workers": workers}), expected))


@apart
def test_items_of_a_resumed_pass_draw_the_same() -> None:
    """With a persistent worker, the same item is the last of one pass and the first of the next."""
    for way in (FORKED | {"num_workers": 1}, THREADS | {"num_workers": 1}):
        loader = DataLoader(Noise(1), generator=torch.Generator().manual_seed(3), persistent_workers=True, **way)
        begun = iter(loader)
        state = loader.state_dict()
        expected = list(begun)
        loader.load_state_dict(state)
        assert torch.equal(*list(loader), *expected)


def test_it_is_an_error_outside_of_items() -> None:
    with pytest.raises(RuntimeError, match=r"while fastpipe.torch.DataLoader makes an item: none is being made here"):
        item_rng()
    found = list(DataLoader(Noise(3)))
    assert len(found) == 3
    with pytest.raises(RuntimeError, match="none is being made here"):
        item_rng()


class Nested(Numbers):
    """Items that use another loader."""

    def __getitem__(self, index: int) -> Any:
        before = item_rng().random_generator.random()
        inner = torch.cat(list(DataLoader(Noise(3), generator=torch.Generator().manual_seed(index))))
        return np.append(inner.numpy().ravel(), [before, item_rng().random_generator.random()])


@apart
def test_loaders_within_items_have_separate_generators() -> None:
    expected = batches(Nested(9))
    for way in (FORKED, THREADS):
        assert all(map(torch.equal, batches(Nested(9), **way), expected))


class Plain(Numbers):
    """Items that draw from the process's generators."""

    def __init__(self, count: int, draw: Any) -> None:
        super().__init__(count)
        self.draw = draw

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return float(self.draw())


def seeds_all() -> int:
    seed = time.perf_counter_ns() % 2**32
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    return 0


USES = [
    (random.random, "random"),
    (np.random.randn, r"numpy\.random"),
    (lambda: torch.rand(1), "torch"),
    # Both checks may come between two of the three calls.
    (seeds_all, r"(random|numpy\.random|torch)( and (numpy\.random|torch))*"),
]


@pytest.mark.parametrize(("draw", "name"), USES)
def test_threads_that_draw_from_the_process_warn_once(draw: Any, name: str) -> None:
    loader = DataLoader(Plain(40, draw), 4, **THREADS)
    with pytest.warns(UserWarning, match=rf"generator of {name} was used while worker threads made items") as told:
        list(loader)
    list(loader)
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("persistent", [False, True])
def test_draws_of_the_program_do_not_warn(persistent: bool) -> None:
    loader = DataLoader(Items([torch.rand(4)] * 40, 0.002), 4, persistent_workers=persistent, shuffle=True, **THREADS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            batches = iter(loader)
            seeds_all()
            for _ in batches:
                random.random(), torch.rand(1), np.random.random()
    assert not told


class Drawing(torch.utils.data.Sampler[int]):
    """Indices in a random order that is drawn one index at a time."""

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        for _ in range(60):
            yield int(random.random() + np.random.random() + float(torch.rand(1)))


def test_draws_of_samplers_do_not_warn() -> None:
    loader = DataLoader(Items([torch.rand(4)] * 3, 0.002), 2, sampler=Drawing(), prefetch_factor=4, **THREADS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        list(loader)
    assert not told


class Late(Numbers):
    """Items that draw from the process's generators, starting with the item `first`."""

    def __init__(self, count: int, first: int = 0, seconds: float = 0.001) -> None:
        super().__init__(count)
        self.first = first
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        if index < self.first:
            return [0.0, 0.0, torch.zeros(2), torch.zeros(6)]
        # `gauss` and `randn` keep the second of two numbers for the next call.
        return [random.gauss(0, 1), float(np.random.randn()), torch.rand(2), functional.dropout(torch.ones(6))]


def seed_all() -> None:
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)


@apart
@pytest.mark.parametrize("first", [0, 50])
def test_the_programs_generators_are_unchanged(first: int) -> None:
    """Without workers, and in worker threads whose items draw from `item_rng()`."""

    def drawn() -> Any:
        return random.gauss(0, 1), np.random.randn(), torch.rand(2), torch.dropout(torch.ones(6), 0.5, True)

    for dataset, way in [(Late(80, first), IN_PROCESS), (Noise(80), IN_PROCESS), (Noise(80), THREADS)]:
        generator = torch.Generator().manual_seed(3)
        seed_all()
        expected = [drawn() for _ in range(12)]
        seed_all()
        loader = DataLoader(dataset, 7, shuffle=True, generator=generator, **way)
        assert_same([drawn() for _ in loader], expected)


@apart
def test_items_that_start_to_draw_late_are_the_same() -> None:
    """An item takes 1 ms, so every batch takes over 10 ms and is checked."""
    arguments: dict[str, Any] = {"shuffle": True}
    for first in (0, 50, 100, 119):
        found = []
        for way in (IN_PROCESS, FORKED, FORKED | {"num_workers": 3}):
            generator = torch.Generator().manual_seed(3)
            found.append(list(DataLoader(Late(120, first), 12, generator=generator, **arguments, **way)))
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])


class Clocked(Numbers):
    """Items without cost that draw from item 40 on."""

    def __getitem__(self, index: int) -> float:
        return random.random() if index >= 40 else 0.0


def test_cheap_items_that_start_to_draw_late_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(_in_process.time, "monotonic", lambda: now[0])
    loader = DataLoader(Clocked(80), 4, generator=torch.Generator())

    def read() -> None:
        for number, _ in enumerate(loader):
            now[0] += 1.0 if number == 14 else 0.0

    with pytest.warns(UserWarning, match=r"generator of random after .*Batches 4 to 14 weren't checked") as told:
        read()
    assert [each.filename for each in told] == [__file__]


@apart
def test_an_item_that_draws_late_and_fails_is_the_same() -> None:
    class Fails(Late):
        def __getitem__(self, index: int) -> Any:
            found = super().__getitem__(index)
            if index == 60:
                raise ValueError(str(random.random()))
            return found

    said = []
    for way in (IN_PROCESS, FORKED):
        batches = iter(DataLoader(Fails(80, 60), 12, generator=torch.Generator().manual_seed(1), **way))
        for _ in range(5):
            next(batches)
        with pytest.raises(ValueError, match=r"0\.\d+") as raised:
            next(batches)
        said.append(re.findall(r"0\.\d+", str(raised.value))[-1])
    assert said[0] == said[1]


def as_users_seed(number: int) -> None:
    """Seeds generators as tutorials recommend."""
    np.random.seed((torch.initial_seed() + number) % 2**32)
    random.seed(number)


def draws(number: int) -> None:
    random.random(), np.random.rand(number + 1), torch.rand(number + 1)


@apart
@pytest.mark.parametrize("init", [as_users_seed, draws])
def test_seeds_in_worker_init_fn_do_not_affect_items(init: Any) -> None:
    expected = batches(Late(40))
    for way in (FORKED, FORKED | {"num_workers": 3}):
        assert_same(batches(Late(40), worker_init_fn=init, **way), expected)


class Outer(Numbers):
    """Items that draw before and after using a loader that they create."""

    def __getitem__(self, index: int) -> Any:
        first = random.random(), torch.rand(1)
        inner = [tuple(batch) for batch in DataLoader(Late(3), 2, shuffle=True)]
        return first, inner, random.random(), np.random.rand(), torch.rand(1)


@apart
def test_loaders_within_items_draw_the_same() -> None:
    expected = batches(Outer(12))
    for way in (IN_PROCESS, FORKED, SPAWNED):
        assert_same(batches(Outer(12), **way), expected)
