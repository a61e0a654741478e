"""Random generators of items: those of the process, each seeded for each item, and those of a worker's info.

An item's seeds are a pure function of the pass's seed, the batch and the row (`fastpipe_random`), so it is the same
whoever makes it. To seed three generators takes longer than many an item; so `ItemGenerators` watches the generators'
states, and seeds those that items draw from. What it watches is found out here, by looking where a generator's memory
changes when it is drawn from; where that can't be found out, the generator is seeded for each item.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastpipe._fastpipe import ItemGenerators

__all__ = ["Draws", "ItemRng", "Seeding", "generators", "watched"]

Watched = list[tuple[int, int]]

# Bytes at the start of a generator of torch's that are looked at: it has more, since its state alone takes 2,500.
_SEEN = 1024
# A generator of torch's begins its state with the seed.
_MARK = 0x5A17_C0DE_1234_9E37


def _python() -> Watched:
    """Where `random` counts what is drawn: behind an object's head, in front of its 624 words."""
    instance = getattr(random, "_inst", None)
    if type(instance) is not random.Random:
        return []
    head = object.__basicsize__

    def found(generator: random.Random) -> tuple[int, int]:
        return ctypes.c_int32.from_address(id(generator) + head).value, ctypes.sizeof(ctypes.c_int32)

    probe = random.Random(1)
    before = found(probe)[0]
    probe.random()
    if (before, found(probe)[0]) != (624, 2):
        return []
    return [(id(instance) + head, 8)]


def _numpy() -> Watched:
    """Where NumPy's generator counts what is drawn: behind its 624 words, as its interface for C says."""
    numpy_random: Any = np.random
    bits = numpy_random.get_bit_generator()
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


def _torch() -> Watched:
    """Where torch's generator counts what is drawn: behind its seed, which is looked for."""
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
    generator: Any = torch.default_generator
    seed = generator._cdata + at
    if int.from_bytes(ctypes.string_at(seed, 8), "little") != generator.initial_seed():
        return []
    # How far it is in its words, and the first of these.
    return [(seed + 8, 8), (seed + 16, 8)]


@functools.cache
def watched() -> tuple[Watched, Watched, Watched]:
    """What changes in the generators of Python, NumPy and torch. Forked processes have them where this one has."""

    def safely(find: Callable[[], Watched]) -> Watched:
        try:
            return find()
        except Exception:
            return []

    return safely(_python), safely(_numpy), safely(_torch)


class Seeding:
    """Seeds the process's generators.

    What a user's `worker_init_fn` leaves of a generator's state counts: where it has seeded one, the seeds of items
    follow from what it did.
    """

    def __init__(self) -> None:
        # Of each generator, what its user's seed adds; None where there was none.
        self._added: list[int | None] = [None, None, None]

    @staticmethod
    def _states() -> list[bytes]:
        states = [random.getstate(), np.random.get_state(), torch.default_generator.get_state().numpy().tobytes()]
        return [hashlib.blake2b(pickle.dumps(state), digest_size=8).digest() for state in states]

    def watch(self, call: Callable[[], Any]) -> None:
        """Takes notice of what a call seeds."""
        before = self._states()
        call()
        pairs = zip(before, self._states(), strict=True)
        self._added = [None if old == new else int.from_bytes(new, "little") for old, new in pairs]
        self._user_seed = torch.initial_seed()

    def _python(self, seed: int) -> None:
        random.seed(seed ^ (self._added[0] or 0))

    def _numpy(self, seed: int) -> None:
        np.random.seed((seed ^ (self._added[1] or 0)) & 0xFFFF_FFFF)

    def _torch(self, seed: int) -> None:
        added = self._added[2]
        if added is None:
            torch.default_generator.manual_seed(seed)
            return
        state = torch.Generator().manual_seed((seed ^ added) & 0x7FFF_FFFF_FFFF_FFFF).get_state()
        # It says that it was seeded as the user did it.
        state[:8] = torch.from_numpy(np.frombuffer(self._user_seed.to_bytes(8, "little"), np.uint8).copy())
        torch.default_generator.set_state(state)

    def generators(self, again: Callable[[], None] | None = None) -> ItemGenerators:
        """The three generators of the process, for items.

        Args:
            again: called before an item is made once more.
        """
        pairs = zip((self._python, self._numpy, self._torch), watched(), strict=True)
        return ItemGenerators([(seed, which, found) for which, (seed, found) in enumerate(pairs, 1)], again)


def generators(again: Callable[[], None] | None = None) -> ItemGenerators:
    """The generators of this process, which no `worker_init_fn` has seeded. As `Seeding.generators`."""
    return Seeding().generators(again)


class Draws:
    """Notices that somebody draws from the process's generators, other than a loader's pass itself."""

    # Passes that have used the generators in this process, in any thread.
    _passes = 0

    def __init__(self) -> None:
        names = ("random", "numpy.random", "torch")
        numbers = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
        self._watched = [
            (name, numbers[length].from_address(address))
            for name, found in zip(names, watched(), strict=True)
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

    In threads, which share the process's generators, items draw from these; elsewhere they may.

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
