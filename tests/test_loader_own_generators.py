"""Worker threads' generators in place of the process's: threads draw what processes draw, and disturb nobody."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from random import choice, gauss, randint
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from apart import apart, wait_until
from fastpipe.errors import WorkerError
from fastpipe.loading._own_generators import _drawing, own_generators
from fastpipe.torch import DataLoader
from loader_data import ALL_WAYS, FORKED, IN_PROCESS, THREADS, Numbers, assert_same
from processes import outputs, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers share memory by means of Linux")

ONES = torch.ones(6)


def shuffled(shuffle: Callable[[Any], None]) -> list[int]:
    values = list(range(9))
    shuffle(values)
    return values


def of_check_random_state() -> Any:
    """What SciPy and scikit-learn draw from if nobody says otherwise."""
    numpy_random: Any = np.random
    return numpy_random.mtrand._rand.normal()


DRAWS: dict[str, Callable[[], Any]] = {
    "random": lambda: [random.random(), random.getrandbits(70), random.randbytes(3), random.uniform(1, 2)],
    "numbers": lambda: [
        random.randint(0, 9),
        random.choice("abc"),
        random.sample(range(9), 3),
        random.choices("ab", k=3),
    ],
    "shuffle": lambda: [shuffled(random.shuffle), shuffled(np.random.shuffle)],
    # The second of two is kept for the next call.
    "gauss": lambda: [random.gauss(0, 1), random.gauss(0, 1), random.gauss(0, 1)],
    "by name": lambda: [randint(0, 99), gauss(0, 1), choice("abcdef")],
    "seeds": lambda: [
        random.seed(5),
        random.random(),
        np.random.seed(6),
        np.random.rand(),
        torch.manual_seed(7).initial_seed(),
    ],
    "states": lambda: [random.setstate(random.getstate()), np.random.set_state(np.random.get_state()), random.random()],
    "numpy": lambda: [
        np.random.rand(2),
        np.random.randn(3),
        np.random.randn(),
        np.random.randint(9),
        np.random.choice(5),
    ],
    "numpy, too": lambda: [np.random.sample(), np.random.ranf(), np.random.permutation(5), np.random.beta(1, 2)],
    "check_random_state": of_check_random_state,
    "torch": lambda: [
        torch.rand(2),
        torch.randn(2),
        torch.randint(0, 9, (3,)),
        torch.randint(9, (3,)),
        torch.randperm(5),
    ],
    "in place": lambda: [torch.empty(3).uniform_(), torch.empty(3).normal_(), torch.empty(3).exponential_()],
    "like": lambda: [torch.rand_like(ONES), torch.randn_like(ONES), torch.randint_like(ONES, 9)],
    "of tensors": lambda: [
        torch.bernoulli(ONES / 2),
        torch.multinomial(ONES, 2),
        torch.normal(ONES, ONES),
        torch.poisson(ONES),
    ],
    "dropout": lambda: [functional.dropout(ONES), functional.alpha_dropout(ONES, training=True)],
    "rrelu": lambda: functional.rrelu(-ONES, training=True),
    "distributions": lambda: [
        torch.distributions.Gamma(1.0, 1.0).sample(),
        torch.distributions.Dirichlet(ONES).sample(),
        torch.distributions.Binomial(5, ONES / 2).sample(),
    ],
    "initial_seed": torch.initial_seed,
    "rng_state": lambda: [torch.set_rng_state(torch.get_rng_state()), torch.rand(1)],
    "own": lambda: torch.rand(2, generator=torch.Generator().manual_seed(3)),
    "the process's": lambda: [torch.rand(2, generator=torch.default_generator), torch.empty(2).uniform_()],
    "out": lambda: torch.rand(2, out=torch.empty(2)),
    "no numbers": lambda: torch.empty(2, device="meta").uniform_().shape,
}


def seed_all() -> None:
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)


def states() -> list[Any]:
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


def in_threads(call: Callable[[], Any], count: int = 3) -> list[Any]:
    """What threads with generators of their own return, all at once."""
    found: list[Any] = []
    together = threading.Barrier(count)

    def run() -> None:
        with own_generators():
            together.wait(20)
            found.append(call())
            together.wait(20)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("draws", DRAWS)
def test_threads_draw_what_a_process_draws(draws: str) -> None:
    def drawn() -> Any:
        seed_all()
        return [DRAWS[draws]() for _ in range(3)]

    expected = drawn()
    random.seed(8), np.random.seed(9), torch.manual_seed(10)
    before = states()
    found = in_threads(drawn)
    assert len(found) == 3
    for each in found:
        assert_same(each, expected)
    assert_same(states(), before)


def test_everything_is_put_back() -> None:
    numpy_random: Any = np.random

    def there() -> list[Any]:
        modules = [vars(module).copy() for module in (random, np.random, numpy_random.mtrand, torch.random)]
        return [*modules, type(random._inst), random._inst.__dict__.copy()]  # type: ignore[attr-defined]

    before = there()
    in_threads(lambda: None)
    assert there() == before

    # Whatever is kept of it meanwhile works from then on, too.
    kept: list[Any] = []
    in_threads(
        lambda: kept.extend([np.random.rand, numpy_random.mtrand._rand, random.random, torch.random.default_generator])
    )
    assert there() == before
    seed_all()
    expected = [np.random.rand(), np.random.rand(), random.random()]
    seed_all()
    assert [kept[0](), kept[1].rand(), kept[2]()] == expected
    assert kept[3].initial_seed() == 5


def test_copies_are_of_pythons_and_numpys_classes() -> None:
    def copies() -> list[Any]:
        seed_all()
        numpy_random: Any = np.random
        generator: Any = random._inst  # type: ignore[attr-defined]
        found = [
            pickle.loads(pickle.dumps(generator)),
            copy.deepcopy(generator),
            pickle.loads(pickle.dumps(numpy_random.mtrand._rand)),
        ]
        assert [type(each) for each in found] == [random.Random, random.Random, np.random.RandomState]
        assert isinstance(numpy_random.mtrand._rand, np.random.RandomState)
        return [found[0].random(), found[1].random(), found[2].rand()]

    expected = copies()
    assert in_threads(copies) == [expected] * 3


def test_every_operator_that_takes_a_generator_is_given_the_threads() -> None:
    tagged = 0
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            operator = getattr(packet, overload)
            names = [argument.name for argument in operator._schema.arguments]
            if torch.Tag.nondeterministic_seeded not in operator.tags:
                assert _drawing(operator) is None
            elif "generator" in names:
                assert _drawing(operator) is operator
                tagged += 1
            elif (drawing := _drawing(operator)) is not None:
                assert [each.name for each in drawing._schema.arguments if each.name != "generator"] == names
                tagged += 1
    assert tagged > 50


def test_torch_compiles_as_before() -> None:
    """It compiles nothing within a `TorchDispatchMode`, be it another thread's; and to use it imports its compiler."""
    script = """
        import sys, torch, fastpipe.torch
        from torch.utils import _python_dispatch

        class Noise(torch.utils.data.Dataset):
            def __len__(self):
                return 40

            def __getitem__(self, index):
                return torch.rand(2)

        for batch in fastpipe.torch.DataLoader(Noise(), 4, num_workers=2, worker_method="thread"):
            assert not getattr(_python_dispatch, "is_in_torch_dispatch_mode", lambda: False)()
            assert torch._C._len_torch_dispatch_stack() == 0
        print("torch._dynamo" in sys.modules)
    """
    assert outputs(run(script)) == ["False\n"]


def test_the_first_operator_under_a_dispatch_object_is_called_before_threads_start() -> None:
    """The first ones of several threads at once can end the process in torch."""
    script = """
        import threading, torch, fastpipe.torch
        from fastpipe.loading import _own_generators

        callers = []

        class Noted(_own_generators._Operators):
            def __torch_dispatch__(self, *args, **kwargs):
                callers.append(threading.current_thread().name)
                return super().__torch_dispatch__(*args, **kwargs)

        _own_generators._Operators = Noted
        before = torch.get_rng_state()
        dataset = torch.utils.data.TensorDataset(torch.arange(4))
        generator = torch.Generator()
        for _ in range(2):
            list(fastpipe.torch.DataLoader(dataset, num_workers=2, worker_method="thread", generator=generator))
        assert torch.equal(torch.get_rng_state(), before)
        print(callers[0], callers.count("MainThread"))
    """
    assert outputs(run(script)) == ["MainThread 1\n"]


class Noisy(Numbers):
    """Items of all generators of a process, from an item on."""

    def __init__(self, count: int, first: int = 0) -> None:
        super().__init__(count)
        self.first = first

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.0005)
        if index < self.first:
            return [0.0, 0.0, torch.zeros(2), torch.zeros(6)]
        return [random.gauss(0, 1), float(np.random.randn()), torch.rand(2), functional.dropout(ONES)]


def batches(dataset: Any, **more: Any) -> list[Any]:
    return list(DataLoader(dataset, 7, shuffle=True, generator=torch.Generator().manual_seed(3), **more))


@apart
@pytest.mark.parametrize("first", [0, 50])
def test_the_programs_generators_are_left_as_they_are(first: int) -> None:
    expected = batches(Noisy(80, first))
    seed_all()
    drawn = [(random.random(), np.random.randn(), torch.rand(2), torch.dropout(ONES, 0.5, True)) for _ in expected]
    for way in (IN_PROCESS, THREADS):
        if first and way is THREADS:
            # An item draws from torch's that isn't expected to, once in each thread, before it is made again.
            continue
        seed_all()
        loader = DataLoader(Noisy(80, first), 7, shuffle=True, generator=torch.Generator().manual_seed(3), **way)
        for batch, wanted, numbers in zip(loader, expected, drawn, strict=True):
            assert_same(batch, wanted)
            assert_same((random.random(), np.random.randn(), torch.rand(2), torch.dropout(ONES, 0.5, True)), numbers)


@apart
def test_items_are_the_same_while_the_program_draws() -> None:
    expected = batches(Noisy(80, 50))
    ended = threading.Event()

    def draw() -> None:
        while not ended.is_set():
            random.gauss(0, 1), np.random.randn(), torch.rand(1)

    drawing = threading.Thread(target=draw)
    drawing.start()
    try:
        with warnings.catch_warnings():
            # It isn't known who draws.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(5):
                assert_same(batches(Noisy(80, 50), **THREADS), expected)
    finally:
        ended.set()
        drawing.join()


def as_users_seed(number: int) -> None:
    """As pages on the web have it."""
    np.random.seed((torch.initial_seed() + number) % 2**32)
    random.seed(number)


def draws(number: int) -> None:
    random.random(), np.random.rand(number + 1), torch.rand(number + 1)


@apart
@pytest.mark.parametrize("init", [as_users_seed, draws])
def test_what_worker_init_fn_seeds_makes_no_item_depend_on_its_worker(init: Any) -> None:
    expected = batches(Noisy(40))
    for way in (FORKED, THREADS, FORKED | {"num_workers": 3}, THREADS | {"num_workers": 1}):
        assert_same(batches(Noisy(40), worker_init_fn=init, **way), expected)


class Told(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.initial_seed(), float(torch.rand(()))


def seeds_torch(number: int) -> None:
    torch.manual_seed(12345)


@apart
def test_torch_tells_the_seed_that_worker_init_fn_has_set() -> None:
    expected = batches(Told(20))
    for way in (FORKED, THREADS):
        found = batches(Told(20), worker_init_fn=seeds_torch, **way)
        assert all(seeds.tolist() == [12345] * len(seeds) for seeds, _ in found)
        # What they draw is that of the items all the same.
        assert_same([drawn for _, drawn in found], [drawn for _, drawn in expected])


class Outer(Numbers):
    """Items that draw, and have a loader of their own draw between."""

    def __getitem__(self, index: int) -> Any:
        first = random.random(), torch.rand(1)
        inner = [tuple(batch) for batch in DataLoader(Noisy(3), 2, shuffle=True)]
        return first, inner, random.random(), np.random.rand(), torch.rand(1)


@apart
def test_loaders_within_items_draw_the_same() -> None:
    expected = batches(Outer(12))
    for way in ALL_WAYS.values():
        assert_same(batches(Outer(12), **way), expected)


class Fails(Noisy):
    def __getitem__(self, index: int) -> Any:
        if index == 30:
            raise KeyboardInterrupt if self.first else ValueError("no")
        return super().__getitem__(index)


@apart
@pytest.mark.parametrize("first", [0, 1])
def test_nothing_stays_replaced_behind_an_error(first: int) -> None:
    with pytest.raises((ValueError, WorkerError)):
        list(DataLoader(Fails(40, first), 4, **THREADS))
    begun = iter(DataLoader(Noisy(40), 4, **THREADS))
    next(begun)
    assert type(random._inst) is not random.Random  # type: ignore[attr-defined]
    del begun
    gc.collect()
    assert wait_until(lambda: type(random._inst) is random.Random, 20)  # type: ignore[attr-defined]
    assert type(np.random.mtrand._rand) is np.random.RandomState  # type: ignore[attr-defined]
