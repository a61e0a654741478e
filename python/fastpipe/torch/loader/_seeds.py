"""Seeds of items: the generators of `random`, `numpy.random` and `torch`, seeded for each item, and `item_rng()`.

An item's seeds are a pure function of the pass's seed, the batch and the row (`fastpipe_random`), so the item is the
same in any worker process, and without workers. Seeding three generators takes 7 µs, longer than many an item takes. So
the first 16 items are made with all generators seeded. A generator that none of them drew from is not seeded after
that. It is checked instead, after each claim of items: its next number must be the one that follows from a known seed.
If it isn't, some item drew from it. Then the items of the claim are made again, with that generator seeded, and so are
all later items.

Only public functions of the three modules are used. Worker threads share the generators with the program, so nothing
seeds them there. `GlobalRngWatch` notices that they are used.
"""

from __future__ import annotations

import functools
import operator
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from fastpipe._fastpipe import item_seed

# Stands for the row of an item where a batch as a whole is made, as in `seeds.rs`.
BATCH = 2**32 - 1

# Seconds between checks of generators that the program uses, too. A check takes 0.1 ms, mostly for NumPy's state, so
# checks take at most 1 % of the time.
REST = 0.01

# Checks at the start of a pass that worker threads make, which come as soon as they can.
_FIRST_CHECKS = 8

# Items that are made with all generators seeded, to see which of them they draw from.
_TRIED = 16
# Checks after which a generator begins again at the known seed.
_CHECKS = 64
_SEED = 0x5A17_C0DE

_number = torch.empty((), dtype=torch.int64, device="cpu")


def _same_numpy(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one[1], other[1])) and one[2:] == other[2:]


class _Generator(NamedTuple):
    """A generator of the process, as the public functions of its module use it."""

    name: str
    which: int
    seed: Callable[[int], Any]
    draw: Callable[[], Any]
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]


_GENERATORS = (
    _Generator("random", 1, random.seed, random.random, random.getstate, random.setstate, operator.eq),
    _Generator(
        "numpy.random",
        2,
        lambda seed: np.random.seed(seed & 0xFFFF_FFFF),
        np.random.random,
        np.random.get_state,
        np.random.set_state,
        _same_numpy,
    ),
    _Generator(
        "torch",
        3,
        torch.default_generator.manual_seed,
        lambda: _number.random_().item(),
        torch.get_rng_state,
        torch.set_rng_state,
        torch.equal,
    ),
)


class States:
    """The states of the process's generators when this was made."""

    def __init__(self) -> None:
        self._states = [each.get() for each in _GENERATORS]

    def put_back(self) -> None:
        for each, state in zip(_GENERATORS, self._states, strict=True):
            each.put(state)

    def changed(self) -> list[str]:
        """The modules whose generators have other states now."""
        pairs = zip(_GENERATORS, self._states, strict=True)
        return [each.name for each, state in pairs if not each.same(state, each.get())]


def seed_worker(base_seed: int, ordinal: int) -> None:
    """Seeds the generators of a worker's process when it starts, as torch's workers do."""
    seed = base_seed + ordinal
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    entropy = [ordinal, base_seed & 0xFFFF_FFFF, base_seed >> 32, 0]
    np.random.seed(np.random.SeedSequence(entropy).generate_state(4))


@functools.cache
def _expected(generator: _Generator) -> list[Any]:
    """The first numbers that a generator draws after the known seed."""
    generator.seed(_SEED)
    return [generator.draw() for _ in range(_CHECKS)]


class ItemGenerators:
    """Seeds the process's generators for items.

    Args:
        late: Called with the names of modules that items drew from though they weren't seeded, before items are made
            again.

    Attributes:
        seeding: Whether items are made by `item`, since some generators are seeded for them.
    """

    def __init__(self, late: Callable[[list[str]], None]) -> None:
        self._late = late
        self._seeded = list(_GENERATORS)
        # Generators that aren't seeded, how they draw, and the numbers that follow from the known seed at each check.
        self._checked: list[_Generator] = []
        self._draws: list[Callable[[], Any]] = []
        self._expected: list[list[Any]] = []
        self._checks = 0
        self._tried = 0
        self._drawn: set[str] = set()
        self.seeding = True

    def item(self, dataset: Any, index: Any, seed: int, number: int, row: int) -> Any:
        """The item of a dataset in a row of a batch."""
        return self._made(operator.itemgetter(index), dataset, seed, number, row)

    def call(self, function: Callable[[Any], Any], argument: Any, seed: int, number: int) -> Any:
        """Returns the result of a function for a batch, which has its own seeds."""
        try:
            made = self._made(function, argument, seed, number, BATCH)
        except Exception:
            if not self.drawn():
                raise
        else:
            if not self.drawn():
                return made
            del made
        return self._made(function, argument, seed, number, BATCH)

    def _made(self, function: Callable[[Any], Any], argument: Any, seed: int, number: int, row: int) -> Any:
        seeds = [item_seed(seed, number, row, each.which) for each in self._seeded]
        for each, own in zip(self._seeded, seeds, strict=True):
            each.seed(own)
        if self._tried == _TRIED:
            return function(argument)
        try:
            return function(argument)
        finally:
            self._try(seeds)

    def _try(self, seeds: list[int]) -> None:
        """Notes which generators one of the first items drew from."""
        for each, seed in zip(self._seeded, seeds, strict=True):
            number = each.draw()
            each.seed(seed)
            if number != each.draw():
                self._drawn.add(each.name)
        self._tried += 1
        if self._tried == _TRIED:
            self._check([each for each in _GENERATORS if each.name not in self._drawn])

    def restart(self) -> None:
        """Puts generators that aren't seeded for items to the known seed."""
        self._checks = 0
        for each in self._checked:
            each.seed(_SEED)

    def drawn(self) -> bool:
        """Whether items drew from generators since the last check though these weren't seeded: they are from now on."""
        if not self._draws:
            return False
        # A loop would take longer.
        found = list(map(operator.call, self._draws))
        expected = self._expected[self._checks]
        self._checks += 1
        if self._checks == _CHECKS:
            self.restart()
        if found == expected:
            return False
        late = [each.name for each, *numbers in zip(self._checked, found, expected, strict=True) if len({*numbers}) > 1]
        self._check([each for each in self._checked if each.name not in late])
        self._late(late)
        return True

    def _check(self, generators: list[_Generator]) -> None:
        """Checks these generators from now on, and seeds the others for each item."""
        self._checked = generators
        self._seeded = [each for each in _GENERATORS if each not in generators]
        self._draws = [each.draw for each in generators]
        self._expected = list(map(list, zip(*map(_expected, generators), strict=True)))
        self.seeding = bool(self._seeded)
        self.restart()


class GlobalRngWatch:
    """Notices that worker threads use the process's generators, while the program waits for them.

    Attributes:
        found: The modules whose generators were used.
    """

    # Of all threads. There is no lock, which a thread might hold when another one forks: each step is a single one.
    # Another object whenever the program begins or ends to use the generators.
    _last_change: object = None
    # An object for each time that it has begun and not ended.
    _in_use: ClassVar[set[object]] = set()

    def __init__(self) -> None:
        self.found: list[str] = []
        self._states: States | None = None
        self._change_before: object = None
        self._next = 0.0
        self._checks = 0

    @classmethod
    @contextmanager
    def expected(cls) -> Iterator[None]:
        """Within this a pass draws its seed, or makes items with generators that it puts back."""
        token = object()
        cls._in_use.add(token)
        cls._last_change = token
        try:
            yield
        finally:
            cls._last_change = object()
            cls._in_use.discard(token)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within this the program itself doesn't draw. Often nothing is checked, since that takes time: see `REST`."""
        now = time.monotonic()
        if self._checks >= _FIRST_CHECKS and now < self._next:
            yield
            return
        self._see()
        try:
            yield
        finally:
            self._look()
            self._states = None
            self._next = now + REST
            self._checks += 1

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within `watched`, the program may draw within this."""
        if self._states is None:
            yield
            return
        self._look()
        try:
            yield
        finally:
            self._see()

    def warn(self, *, stacklevel: int) -> None:
        """Warns that items of threads aren't reproducible."""
        warnings.warn(
            f"the global generator of {' and '.join(self.found)} was used while worker threads made items. Threads"
            " share it with the program, so items that draw from it differ from run to run. Draw from"
            ' fastpipe.torch.item_rng() instead, or use worker_method="multiprocessing", where it is seeded for each'
            " item.",
            stacklevel=stacklevel + 1,
        )

    def _see(self) -> None:
        self._change_before = GlobalRngWatch._last_change
        self._states = States()

    def _look(self) -> None:
        if self._states is None:
            return
        changed = self._states.changed()
        if not GlobalRngWatch._in_use and GlobalRngWatch._last_change is self._change_before:
            self.found += [name for name in changed if name not in self.found]


class ItemRng:
    """Generators for items: `item_rng()`, and `worker_info().rng`.

    Args:
        seed: the seed of the item that is being made: which of four.
        item: tells items from each other whose seeds are the same.

    Attributes:
        random_generator: a `random.Random`.
        torch_generator: a `torch.Generator`.
        numpy_generator: a `numpy.random.Generator`.
    """

    def __init__(self, seed: Callable[[int], int], item: Callable[[], int] | None = None) -> None:
        self._seed = seed
        self._item = item
        self._made: dict[int, tuple[tuple[int, int], Any]] = {}

    def forget(self) -> None:
        """Drops the generators: the item is made again."""
        self._made.clear()

    def _of_item(self, which: int, make: Callable[[int], Any]) -> Any:
        seed = self._seed(which)
        of = seed, 0 if self._item is None else self._item()
        if self._made.get(which, (None,))[0] != of:
            self._made[which] = of, make(seed)
        return self._made[which][1]

    @property
    def random_generator(self) -> random.Random:
        found: random.Random = self._of_item(1, random.Random)
        return found

    @property
    def numpy_generator(self) -> np.random.Generator:
        found: np.random.Generator = self._of_item(2, np.random.default_rng)
        return found

    @property
    def torch_generator(self) -> torch.Generator:
        found: torch.Generator = self._of_item(3, lambda seed: torch.Generator().manual_seed(seed))
        return found

    def __repr__(self) -> str:
        return "ItemRng(random_generator, numpy_generator, torch_generator)"
