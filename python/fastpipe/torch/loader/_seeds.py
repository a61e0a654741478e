"""Seeds of items: the generators of `random`, `numpy.random` and `torch`, seeded for each item, and `item_rng()`.

An item's seeds are a pure function of the pass's seed, the batch and the row (`fastpipe_random`). So the item is the
same in every worker process and without workers. Seeding three generators takes 7 µs, which is longer than many items
take. Therefore only the first 16 items are created with all generators seeded. A generator that none of these items
drew from is not seeded after that. It is checked instead, after each group of items that a worker claims: its next
number must be the one that follows from a known seed. If it isn't, some item drew from the generator. The items of that
group are then created again with the generator seeded, and it is seeded for all later items.

Only public functions of the three modules are used. Worker threads share the generators with the program, so these
generators aren't seeded there. `GlobalRngWatch` detects that worker threads use them.
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

# Row index that denotes a whole batch, as in `seeds.rs`.
BATCH = 2**32 - 1

# Seconds between checks of generators that the program also uses. A check takes 0.1 ms, mostly for NumPy's state, so
# checks take at most 1 % of the time.
REST = 0.01

# Checks at the start of a pass with worker threads that don't wait for `REST`.
_FIRST_CHECKS = 8

# Items that are created with all generators seeded, to see which generators they draw from.
_TRIED = 16
# Checks after which a generator is reset to the known seed.
_CHECKS = 64
_SEED = 0x5A17_C0DE

_number = torch.empty((), dtype=torch.int64, device="cpu")


def _same_numpy(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one[1], other[1])) and one[2:] == other[2:]


class _Generator(NamedTuple):
    """A generator of the process, accessed through public functions of its module."""

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
    """The states of the process's generators when this object was created."""

    def __init__(self) -> None:
        self._states = [each.get() for each in _GENERATORS]

    def put_back(self) -> None:
        for each, state in zip(_GENERATORS, self._states, strict=True):
            each.put(state)

    def changed(self) -> list[str]:
        """Returns the modules whose generators have changed."""
        pairs = zip(_GENERATORS, self._states, strict=True)
        return [each.name for each, state in pairs if not each.same(state, each.get())]


def seed_worker(base_seed: int, ordinal: int) -> None:
    """Seeds the generators of a worker process when it starts, as torch's workers do."""
    seed = base_seed + ordinal
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    entropy = [ordinal, base_seed & 0xFFFF_FFFF, base_seed >> 32, 0]
    np.random.seed(np.random.SeedSequence(entropy).generate_state(4))


@functools.cache
def _expected(generator: _Generator) -> list[Any]:
    """Returns the first numbers that a generator draws after the known seed."""
    generator.seed(_SEED)
    return [generator.draw() for _ in range(_CHECKS)]


class ItemGenerators:
    """Seeds the process's generators for items.

    Args:
        late: Called with the names of modules whose generators weren't seeded although items drew from them. The items
            are created again after the call.

    Attributes:
        seeding: Whether some generators are seeded for items, so that items must be created by `item`.
    """

    def __init__(self, late: Callable[[list[str]], None]) -> None:
        self._late = late
        self._seeded = list(_GENERATORS)
        # The generators that aren't seeded, their draw functions, and the number expected at each check after the known
        # seed.
        self._checked: list[_Generator] = []
        self._draws: list[Callable[[], Any]] = []
        self._expected: list[list[Any]] = []
        self._checks = 0
        self._tried = 0
        self._drawn: set[str] = set()
        self.seeding = True

    def item(self, dataset: Any, index: Any, seed: int, number: int, row: int) -> Any:
        """Returns the item of a dataset for a row of a batch."""
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
        """Records which generators one of the first items drew from."""
        for each, seed in zip(self._seeded, seeds, strict=True):
            number = each.draw()
            each.seed(seed)
            if number != each.draw():
                self._drawn.add(each.name)
        self._tried += 1
        if self._tried == _TRIED:
            self._check([each for each in _GENERATORS if each.name not in self._drawn])

    def restart(self) -> None:
        """Resets generators that aren't seeded for items to the known seed."""
        self._checks = 0
        for each in self._checked:
            each.seed(_SEED)

    def drawn(self) -> bool:
        """Whether items drew from unseeded generators since the last check. These generators are seeded from now on."""
        if not self._draws:
            return False
        # A Python loop would be slower.
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
        """Checks these generators from now on and seeds the remaining generators for each item."""
        self._checked = generators
        self._seeded = [each for each in _GENERATORS if each not in generators]
        self._draws = [each.draw for each in generators]
        self._expected = list(map(list, zip(*map(_expected, generators), strict=True)))
        self.seeding = bool(self._seeded)
        self.restart()


class GlobalRngWatch:
    """Detects that worker threads use the process's generators while the program waits for the threads.

    Attributes:
        found: Modules whose generators were used.
    """

    # Shared by all threads. No lock is used, because a thread might hold it while another thread forks. Each step is
    # atomic. Replaced by a new object whenever the program begins or ends using the generators.
    _last_change: object = None
    # One object for each use that has begun and not ended.
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
        """Context manager for code that draws a pass's seed, or creates items with generators that it restores."""
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
        """Context manager that checks the generators before and after a wait in which the program doesn't draw.

        Skips most checks (see `REST`).
        """
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
        """Context manager inside `watched` for code in which the program may draw."""
        if self._states is None:
            yield
            return
        self._look()
        try:
            yield
        finally:
            self._see()

    def warn(self, *, stacklevel: int) -> None:
        """Warns that items of worker threads aren't reproducible."""
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
            self.found = [each.name for each in _GENERATORS if each.name in {*self.found, *changed}]


class ItemRng:
    """Random generators for items, returned by `item_rng()` and `worker_info().rng`.

    Args:
        seed: Function that returns one of the four seeds of the current item, by index.
        item: Function that returns a number that distinguishes items with the same seed. None if seeds are unique.

    Attributes:
        random_generator: A `random.Random`.
        torch_generator: A `torch.Generator`.
        numpy_generator: A `numpy.random.Generator`.
    """

    def __init__(self, seed: Callable[[int], int], item: Callable[[], int] | None = None) -> None:
        self._seed = seed
        self._item = item
        self._made: dict[int, tuple[tuple[int, int], Any]] = {}

    def forget(self) -> None:
        """Drops the generators because the item is created again."""
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
