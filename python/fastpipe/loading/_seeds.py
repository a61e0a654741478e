"""Random generators of items: those of a process or thread, each seeded for each item, and those of a worker's info.

An item's seeds are a pure function of the pass's seed, the batch and the row (`fastpipe_random`), so it is the same
whoever makes it. To seed three generators takes longer than many an item; so `ItemGenerators` watches the generators'
states, and seeds those that items draw from. What it watches is found out here, by looking where a generator's memory
changes when it is drawn from; where that can't be found out, the generator is seeded for each item.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from fastpipe._fastpipe import ItemGenerators
from fastpipe.loading._own_generators import OwnGenerators, own_of_this_thread

__all__ = ["Draws", "ItemRng", "Seeding", "generators", "watched"]

Watched = list[tuple[int, int]]

# Bytes at the start of a generator of torch's that are looked at: it has more, since its state alone takes 2,500.
_SEEN = 1024
# A generator of torch's begins its state with the seed.
_MARK = 0x5A17_C0DE_1234_9E37


def _python(generator: Any) -> Watched:
    """Where one of `random` counts what is drawn: behind an object's head, in front of its 624 words."""
    if not isinstance(generator, random.Random):
        return []
    head = object.__basicsize__

    def found(generator: random.Random) -> tuple[int, int]:
        return ctypes.c_int32.from_address(id(generator) + head).value, ctypes.sizeof(ctypes.c_int32)

    probe = random.Random(1)
    before = found(probe)[0]
    probe.random()
    if (before, found(probe)[0]) != (624, 2):
        return []
    return [(id(generator) + head, 8)]


def _numpy(bits: Any) -> Watched:
    """Where one of NumPy counts what is drawn: behind its 624 words, as its interface for C says."""
    if type(bits) is not np.random.MT19937:
        return []

    def position(generator: Any) -> int:
        return ctypes.c_int32.from_address(generator.ctypes.state_address + 624 * 4).value

    probe = np.random.MT19937(1)
    probe._legacy_seeding(1)
    before = position(probe)
    probe.random_raw()
    if (before, position(probe)) != (624, 1):
        return []
    start = bits.ctypes.state_address
    return [(start, 8), (start + 624 * 4, 4)]


def _torch(generator: Any) -> Watched:
    """Where one of torch counts what is drawn: behind its seed, which is looked for."""
    probe: Any = torch.Generator()

    def place(generator: Any) -> int:
        seeded = generator.manual_seed(_MARK)
        start: int = seeded._cdata
        return ctypes.string_at(start, _SEEN).find(_MARK.to_bytes(8, "little"))

    def counted(generator: Any, at: int) -> tuple[int, int]:
        left, _, following = (ctypes.c_uint32 * 3).from_address(generator._cdata + at + 8)
        return left, following

    at = place(probe)
    if at < 0 or at % 8:
        return []
    before = counted(probe, at)
    torch.rand(1, generator=probe)
    if (before, counted(probe, at)) != ((1, 0), (624, 1)):
        return []
    seed = generator._cdata + at
    if int.from_bytes(ctypes.string_at(seed, 8), "little") != generator.initial_seed():
        return []
    # How far it is in its words, and the first of these.
    return [(seed + 8, 8), (seed + 16, 8)]


def _safely(find: Callable[[Any], Watched], get: Callable[[], Any]) -> Watched:
    try:
        return find(get())
    except Exception:
        return []


@functools.cache
def watched() -> tuple[Watched, Watched, Watched]:
    """What changes in the generators of Python, NumPy and torch. Forked processes have them where this one has."""
    numpy_random: Any = np.random
    return (
        _safely(_python, lambda: random._inst),
        _safely(_numpy, lambda: numpy_random.get_bit_generator()),
        _safely(_torch, lambda: torch.default_generator),
    )


class Seeding:
    """Seeds generators for items: the process's, or a thread's own.

    Args:
        own: the thread's; None for the process's.
        leaves: whether torch's operators are left alone when items draw nothing by them.
    """

    def __init__(self, own: OwnGenerators | None = None, *, leaves: bool = True) -> None:
        self._own, self._leaves = own, leaves
        self._of_python: Any = random if own is None else own.python
        self._of_numpy: Any = np.random if own is None else own.numpy
        self._of_torch = torch.default_generator if own is None else own.torch
        # What torch is to call its seed, whatever it was seeded with.
        self._called: int | None = None

    def begin(self, base_seed: int, ordinal: int) -> None:
        """Seeds them as torch does where a worker begins."""
        self._of_python.seed(base_seed + ordinal)
        self._of_torch.manual_seed(base_seed + ordinal)
        self._of_numpy.seed(torch_worker._generate_state(base_seed, ordinal))  # type: ignore[no-untyped-call]

    def watch(self, call: Callable[[], Any]) -> None:
        """Takes notice of torch's seed, if a call sets it: items are told of it by `torch.initial_seed`.

        What they draw doesn't follow from it, since the seeds that users give their workers differ from worker to
        worker, as a rule, and any of them may make an item.
        """
        before = self._of_torch.initial_seed()
        call()
        seed = self._of_torch.initial_seed()
        self._called = seed if seed != before else None

    def _python(self, seed: int) -> None:
        self._of_python.seed(seed)

    def _numpy(self, seed: int) -> None:
        self._of_numpy.seed(seed & 0xFFFF_FFFF)

    def _torch(self, seed: int) -> None:
        if self._own is not None:
            self._own.watch_torch()
        self._of_torch.manual_seed(seed)
        if self._called is None:
            return
        # A state begins with the seed.
        state = self._of_torch.get_state()
        state[:8] = torch.from_numpy(np.frombuffer(self._called.to_bytes(8, "little"), np.uint8).copy())
        self._of_torch.set_state(state)

    def generators(self, again: Callable[[], None] | None = None) -> ItemGenerators:
        """The three generators, for items.

        Args:
            again: called before an item is made once more.
        """
        leave: Callable[[], None] | None = None
        parts = watched()
        if (own := self._own) is not None:
            leave = own.leave_torch if self._leaves else None
            # Items that are left alone draw from the process's. Others draw from that, too: then an item is made once
            # more for nothing, and from then on such items have the thread's own.
            of_torch = _safely(_torch, lambda: own.torch)
            parts = (
                _safely(_python, lambda: own.python),
                _safely(_numpy, lambda: own.numpy._bit_generator),
                of_torch + parts[2] if of_torch else [],
            )
        seeds = [(self._python, None), (self._numpy, None), (self._torch, leave)]
        pairs = enumerate(zip(seeds, parts, strict=True), 1)
        return ItemGenerators([(seed, leave, which, found) for which, ((seed, leave), found) in pairs], again)


def generators(again: Callable[[], None] | None = None) -> ItemGenerators:
    """The generators of this process, or this thread's own, for a pass without workers. As `Seeding.generators`."""
    # Where it has its own it makes an item, which draws besides.
    return Seeding(own_of_this_thread(), leaves=False).generators(again)


class Draws:
    """Notices that somebody draws from the process's generators, other than a loader's pass itself.

    Not from torch's: items of threads that do, when nobody expects it, are made once more.
    """

    # Passes that have used the generators in this process, in any thread.
    _passes = 0

    def __init__(self) -> None:
        names = ("random", "numpy.random")
        numbers = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
        self._watched = [
            (name, numbers[length].from_address(address))
            for name, found in zip(names, watched(), strict=False)
            for address, length in found
        ]
        self.see()

    @classmethod
    def expect(cls) -> None:
        """A pass draws its seed, or makes items with generators that it puts back."""
        cls._passes += 1

    def see(self) -> None:
        """What was drawn before doesn't count."""
        self._seen, self._passes_seen = [number.value for _, number in self._watched], Draws._passes

    def drawn(self) -> list[str]:
        """The modules from whose generators numbers were drawn since."""
        if self._passes_seen != Draws._passes:
            return []
        pairs = zip(self._watched, self._seen, strict=True)
        return list(dict.fromkeys(name for (name, number), seen in pairs if number.value != seen))


class ItemRng:
    """Generators for items: `item_rng()`, and `get_worker_info().rng`.

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
        """Begins anew: the item is made once more."""
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
