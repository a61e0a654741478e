"""Batches are bitwise equal however they are produced.

They do not depend on the number of workers, processes or threads, fork or spawn, batch workers, persistent workers, or
resuming.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from apart import apart
from fastpipe.errors import StateError
from fastpipe.torch import DataLoader, worker_info
from loader_data import (
    FORKED,
    IN_PROCESS,
    SPAWNED,
    THREADS,
    AtOnce,
    Augmented,
    Numbers,
    OwnGenerators,
    Unhurried,
    assert_same,
    copied,
    drawn_from_all,
    same,
    with_noise,
    with_own_noise,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

COUNTS = (1, 2, 3, 5)
BY_FORKS = [FORKED | {"num_workers": count} for count in COUNTS]
BY_THREADS = [THREADS | {"num_workers": count} for count in COUNTS]
# Each spawned process takes seconds to import torch, so one epoch by two processes must be enough.
BY_SPAWNING = SPAWNED | {"num_workers": 2, "persistent_workers": True}


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def epochs(loader: Any, count: int) -> list[Any]:
    return [[copied(batch) for batch in loader] for _ in range(count)]


def all_same(loaders: Iterator[tuple[Any, Any]], count: int = 2) -> None:
    """Checks that all loaders yield equal batches in `count` epochs.

    Each loader comes with its arguments for messages.
    """
    expected = None
    for arguments, loader in loaders:
        found = epochs(loader, count)
        assert not same(found[0], found[1]), "epochs must differ"
        if expected is None:
            expected = found
        assert same(found, expected), arguments


@apart
def test_items_that_draw_from_the_processs_generators_are_the_same() -> None:
    """Shuffles with torch's generator or with one of the loader's own."""
    for own in (False, True):

        def loaders(own: bool = own) -> Iterator[tuple[Any, Any]]:
            for way in [IN_PROCESS, *BY_FORKS]:
                torch.manual_seed(3)
                arguments = way | {"generator": generator()} if own else way
                yield way, DataLoader(Augmented(40), 4, shuffle=True, **arguments)

        all_same(loaders())


@apart
def test_items_that_draw_from_their_own_generators_are_the_same() -> None:
    def loaders() -> Iterator[tuple[Any, Any]]:
        for way in BY_FORKS + BY_THREADS:
            yield way, DataLoader(OwnGenerators(40), 4, shuffle=True, generator=generator(), **way)

    all_same(loaders())


class LateDraws(OwnGenerators):
    """Draws from the worker's generators, and after many items also from the process's."""

    def __getitem__(self, index: int) -> Any:
        found = super().__getitem__(index)
        return found, torch.rand(2) if index >= 30 else torch.zeros(2)


@apart
def test_items_made_again_are_the_same() -> None:
    def loaders() -> Iterator[tuple[Any, Any]]:
        for way in BY_FORKS:
            yield way, DataLoader(LateDraws(60), 4, generator=generator(), **way)

    all_same(loaders())


@apart
def test_persistent_workers_of_any_number_make_the_same() -> None:
    def loaders(dataset: Any, ways: list[dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
        for way in ways:
            yield way, DataLoader(dataset, 4, shuffle=True, generator=generator(), **(way | kept))

    kept = {"persistent_workers": True}
    all_same(loaders(Augmented(30), [*BY_FORKS, BY_SPAWNING]), 3)
    all_same(loaders(OwnGenerators(30), BY_FORKS + BY_THREADS), 3)


def noise_of_rng(items: list[Any]) -> Any:
    """A `collate_fn` that draws from the generators of the worker info."""
    rng: Any = worker_info().rng  # type: ignore[union-attr]
    drawn = rng.random_generator.random(), rng.numpy_generator.random(), torch.rand(2, generator=rng.torch_generator)
    return items, drawn


@apart
def test_batches_of_batch_workers_are_the_same() -> None:
    def loaders(dataset: Any, ways: list[Any], collate_fn: Any) -> Iterator[tuple[Any, Any]]:
        for way, joiners in [(IN_PROCESS, 0), *itertools.product(ways, (0, 1, 3))]:
            arguments = way | {"num_batch_workers": joiners, "generator": generator(), "shuffle": True}
            yield arguments, DataLoader(dataset, 4, collate_fn=collate_fn, **arguments)

    # Some batches are made and collated by one worker, others by several.
    for dataset in (Augmented, Unhurried):
        all_same(loaders(dataset(20), BY_FORKS, with_noise))
        all_same(loaders(dataset(20, own=True), BY_FORKS[1:2] + BY_THREADS[1:3], with_own_noise))


@apart
def test_batches_that_draw_from_their_own_generators_are_the_same() -> None:
    def loaders() -> Iterator[tuple[Any, Any]]:
        for way, joiners in itertools.product(BY_FORKS[:3] + BY_THREADS[:3], (0, 1, 3)):
            arguments = way | {"num_batch_workers": joiners, "generator": generator()}
            yield arguments, DataLoader(OwnGenerators(24), 4, collate_fn=noise_of_rng, **arguments)

    all_same(loaders())


class WholeNoise(AtOnce):
    """Items that are requested a batch at a time and draw random numbers."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [drawn_from_all(index) for index in indices]


@apart
def test_batches_of_getitems_are_the_same() -> None:
    def loaders(batch_size: int | None, dataset: Any) -> Iterator[tuple[Any, Any]]:
        for way in [IN_PROCESS, *BY_FORKS]:
            yield way, DataLoader(dataset, batch_size, generator=generator(), **way)

    all_same(loaders(5, WholeNoise(24)))
    all_same(loaders(None, Augmented(20)))


@apart
def test_any_arrangement_makes_the_same() -> None:
    """Items draw from a subset of the generators, starting with some item."""
    any_arrangement()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(
    count=st.integers(1, 60),
    batch=st.integers(1, 9),
    names=st.lists(st.sampled_from(("python", "numpy", "torch")), unique=True),
    first=st.integers(0, 40),
    own=st.booleans(),
    way=st.sampled_from([FORKED, THREADS]),
    workers=st.sampled_from(COUNTS),
    options=st.fixed_dictionaries(
        {
            "shuffle": st.booleans(),
            "drop_last": st.booleans(),
            "prefetch_factor": st.integers(1, 5),
            "persistent_workers": st.booleans(),
        }
    ),
    joiners=st.none() | st.integers(0, 3),
)
def any_arrangement(
    count: int,
    batch: int,
    names: Sequence[str],
    first: int,
    own: bool,
    way: dict[str, Any],
    workers: int,
    options: dict[str, Any],
    joiners: int | None,
) -> None:
    # Threads share the process's generators.
    own |= way is THREADS
    more: dict[str, Any] = {} if joiners is None else {"collate_fn": with_own_noise if own else with_noise}
    alone = {name: options[name] for name in ("shuffle", "drop_last")} | more
    dataset = Augmented(count, names, first, own=own)
    if first and not own:
        # Without workers, draws that start late are detected late if items are cheap.
        alone |= FORKED | {"num_workers": 1}
    expected = list(DataLoader(dataset, batch, generator=generator(), **alone))
    if joiners is not None:
        more["num_batch_workers"] = joiners
    arguments = way | {"num_workers": workers} | options | more
    assert_same(list(DataLoader(dataset, batch, generator=generator(), **arguments)), expected)


class Counts(torch.utils.data.Sampler[int]):
    """A sampler that has states."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.next = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        while self.next < self.count:
            self.next += 1
            yield (self.next * 7) % self.count
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Uneven(torch.utils.data.Sampler[list[int]]):
    """Batches of several sizes in an order drawn from torch's generator."""

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(28).tolist()
        for size in range(1, 8):
            yield [order.pop() for _ in range(size)]


class Remembering(torch.utils.data.Sampler[int]):
    """A sampler whose iterators have states."""

    class Iterator:
        def __init__(self) -> None:
            self.next = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            if self.next == 28:
                raise StopIteration
            self.next += 1
            return (self.next * 5) % 28

        def state_dict(self) -> dict[str, Any]:
            return {"next": self.next}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.next = state["next"]

    def __len__(self) -> int:
        return 28

    def __iter__(self) -> Any:
        return self.Iterator()


class Eager(torch.utils.data.Sampler[int]):
    """Draws everything from torch's generator when its iterator is created."""

    def __len__(self) -> int:
        return 28

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(28).tolist())


def epoch_three(sampler: Any) -> Any:
    sampler.set_epoch(3)
    return sampler


WEIGHTS = [1.0 + number % 5 for number in range(28)]
ORDERS: dict[str, Any] = {
    "in sequence": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "by its generator": lambda: {"batch_size": 5, "shuffle": True, "generator": generator(), "drop_last": True},
    "replacement": lambda: {"batch_size": 4, "sampler": RandomSampler(range(28), replacement=True, num_samples=70)},
    "replacement by its generator": lambda: {
        "batch_size": 4,
        "sampler": RandomSampler(range(28), replacement=True, num_samples=70, generator=generator(2)),
    },
    "weights": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler(WEIGHTS, 40)},
    "a subset": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler(range(3, 26))},
    "a subset by its generator": lambda: {
        "batch_size": 4,
        "sampler": SubsetRandomSampler(range(3, 26), generator(4)),
        "generator": generator(4),
    },
    "a rank": lambda: {"batch_size": 2, "sampler": epoch_three(DistributedSampler(range(28), 2, 1, seed=5))},
    "a batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(28)), 5, True)},
    "iterators with states": lambda: {"batch_size": 4, "sampler": Remembering()},
    "drawn when it begins": lambda: {"batch_size": 4, "sampler": Eager()},
    "a sampler with states": lambda: {"batch_size": 4, "sampler": Counts(28)},
    "its batches": lambda: {"batch_sampler": Uneven()},
    "no batches": lambda: {"batch_size": None, "shuffle": True},
}


def stored(state: dict[str, Any]) -> Any:
    """Returns a state after a round trip through JSON."""
    return json.loads(json.dumps(state))


# Loader arguments of the stopped pass and of the resumed pass.
OTHERS = [
    (IN_PROCESS, FORKED),
    (FORKED, IN_PROCESS),
    (FORKED, FORKED | {"num_workers": 3}),
    (FORKED | {"persistent_workers": True}, THREADS),
    (THREADS, THREADS | {"num_workers": 3}),
]


@apart
@pytest.mark.parametrize("order", ORDERS)
def test_a_pass_resumes_from_each_step(order: str) -> None:
    def loader(way: dict[str, Any], own: bool) -> Any:
        return DataLoader(Augmented(28, own=own), **ORDERS[order](), **way)

    for way, other in OTHERS:
        own = THREADS["worker_method"] in (way.get("worker_method"), other.get("worker_method"))
        torch.manual_seed(11)
        expected = epochs(loader(IN_PROCESS, own), 1)[0]
        torch.manual_seed(11)
        first = loader(way, own)
        batches = iter(first)
        states = [stored(first.state_dict())]
        for batch, wanted in zip(batches, expected, strict=True):
            assert_same(batch, wanted)
            states.append(stored(first.state_dict()))
        for step, state in enumerate(states):
            torch.manual_seed(99)
            second = loader(other, own)
            second.load_state_dict(state)
            assert_same(second.state_dict(), state)
            assert_same(list(second), expected[step:])


class ByPython(torch.utils.data.Sampler[int]):
    """Draws from Python's generator, or another one, and has no states."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(40), key=lambda _: self.draw()))


@apart
@pytest.mark.parametrize("draw", [random.random, np.random.rand, torch.default_generator.seed])
@pytest.mark.parametrize("way", [IN_PROCESS, FORKED, FORKED | {"persistent_workers": True}])
def test_a_sampler_that_yields_another_order_is_an_error(draw: Any, way: dict[str, Any]) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(40), 5, sampler=ByPython(draw), **way)

    first = loader()
    batches = iter(first)
    next(batches), next(batches)
    second = loader()
    if second.persistent_workers:
        list(second)
    second.load_state_dict(stored(first.state_dict()))
    # Retrying raises the error again instead of restarting the pass.
    for _ in range(2):
        with pytest.raises(StateError, match=r"sampler yields different indices .* state_dict.*Batch 1 began with \["):
            iter(second)


def test_a_sampler_that_ends_sooner_is_an_error() -> None:
    first = DataLoader(Numbers(40), 5)
    batches = iter(first)
    for _ in range(4):
        next(batches)
    second = DataLoader(Numbers(11), 5)
    second.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="It ended after 3 batches, of 4"):
        iter(second)


# A state after two batches by an earlier version, which stored the states of all generators.
OLD: dict[str, Any] = {
    "version": 1,
    "kind": "items",
    "batch_size": [4, False],
    "pass": {
        "batches": 2,
        "beyond": [],
        "seed": 99,
        "order": {"generators": {}, "at_first": {}, "drawn": {}, "seed": 1234, "stateful": None, "sampler": None},
    },
}


def test_states_of_earlier_versions_are_read() -> None:
    loader = DataLoader(Numbers(20), 4, shuffle=True)
    loader.load_state_dict(OLD)
    expected = torch.randperm(20, generator=generator(1234))[8:].reshape(3, 4)
    assert torch.equal(torch.stack(list(loader)), expected)


def test_old_states_that_need_pythons_generator_are_rejected() -> None:
    loader = DataLoader(Numbers(20), 4, shuffle=True)
    state = stored(OLD)
    state["pass"]["order"]["drawn"] = {"begin": {"python": [3, [1] * 625, None]}}
    loader.load_state_dict(state)
    with pytest.raises(StateError, match=r"It drew from the generator of random or numpy\.random"):
        iter(loader)


@apart
def test_a_pass_with_batch_workers_resumes_from_each_step() -> None:
    def loader(way: dict[str, Any], joiners: int) -> Any:
        arguments = way | {"num_batch_workers": joiners, "collate_fn": noise_of_rng, "shuffle": True}
        return DataLoader(OwnGenerators(20), 4, generator=generator(), **arguments)

    expected = epochs(loader(THREADS, 1), 2)
    ways = itertools.cycle([(THREADS | {"num_workers": 3}, 2), (FORKED, 0), (FORKED | {"num_workers": 3}, 2)])
    for way, joiners in [(THREADS, 1), (FORKED, 2)]:
        first = loader(way, joiners)
        for step, (_, (other, more)) in enumerate(zip(first, ways, strict=False), 1):
            second = loader(other, more)
            second.load_state_dict(stored(first.state_dict()))
            assert_same(list(second), expected[0][step:])
            assert_same(list(second), expected[1])


@apart
def test_later_epochs_are_the_same_after_resuming() -> None:
    """Each epoch draws from the loader's generator, or belongs to persistent workers."""
    for kept in (False, True):
        way = FORKED | {"persistent_workers": kept}

        def loader(way: dict[str, Any] = way) -> Any:
            return DataLoader(Augmented(16), 4, shuffle=True, generator=generator(), **way)

        expected = epochs(loader(), 4)
        for epoch, step in itertools.product((0, 1, 2), (0, 1, 3)):
            first = loader()
            for _ in range(epoch):
                list(first)
            batches = iter(first)
            for _ in range(step):
                next(batches)
            second = loader(way | {"num_workers": 1})
            second.load_state_dict(stored(first.state_dict()))
            found = [[copied(batch) for batch in second] for _ in range(epoch, 4)]
            assert_same(found, [expected[epoch][step:], *expected[epoch + 1 :]])


@apart
def test_a_state_between_passes_is_that_of_the_next_one() -> None:
    for kept, own in itertools.product((False, True), (False, True)):
        way = FORKED | {"persistent_workers": kept}

        def loader(way: dict[str, Any] = way, own: bool = own) -> Any:
            return DataLoader(Augmented(12), 4, shuffle=True, generator=generator() if own else None, **way)

        torch.manual_seed(5)
        first = loader()
        states, found = [stored(first.state_dict())], []
        for _ in range(3):
            found.append([copied(batch) for batch in first])
            states.append(stored(first.state_dict()))
        for epoch, state in enumerate(states[:3]):
            torch.manual_seed(6)
            second = loader(way | {"num_workers": 3})
            second.load_state_dict(state)
            assert_same([copied(batch) for batch in second], found[epoch])
            if kept or own:
                assert_same([[copied(batch) for batch in second] for _ in found[epoch + 1 :]], found[epoch + 1 :])


@apart
def test_an_unordered_pass_resumes_with_the_remaining_batches() -> None:
    def loader(workers: int) -> Any:
        way = FORKED | {"num_workers": workers, "in_order": False, "prefetch_factor": 3}
        return DataLoader(Unhurried(40), 2, **way)

    expected = {int(batch["index"][0]): batch for batch in DataLoader(Unhurried(40), 2, **IN_PROCESS)}
    torch.manual_seed(1)
    expected = {int(batch["index"][0]): batch for batch in loader(1)}
    for step in (0, 1, 5, 13, 19):
        torch.manual_seed(1)
        first = loader(3)
        batches = iter(first)
        had = [copied(next(batches)) for _ in range(step)]
        second = loader(2)
        second.load_state_dict(stored(first.state_dict()))
        del batches
        found = {int(batch["index"][0]): batch for batch in [*had, *second]}
        assert len(found) == len(had) + 20 - step
        assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))


@apart
def test_states_of_other_loaders_are_rejected() -> None:
    loader = DataLoader(Numbers(9), 2, **FORKED)
    next(iter(loader))
    state = loader.state_dict()
    for wrong, said in [
        ({}, "this is not the state"),
        (state | {"kind": "rows"}, "this is not the state"),
        ({"_snapshot": {}}, "torchdata"),
        (state | {"version": 9}, "version 9"),
        (state | {"batch_size": [3, False]}, "batches of"),
    ]:
        with pytest.raises(StateError, match=said):
            loader.load_state_dict(wrong)
    # The state is unchanged.
    assert loader.state_dict() == state
    for said, more in [("generators", {"generator": generator()}), ("shuffles", {})]:
        shuffled: Any = DataLoader(Numbers(9), 2, shuffle=True, **more)
        next(iter(shuffled))
        loader.load_state_dict(shuffled.state_dict())
        with pytest.raises(StateError, match=said):
            list(loader)
