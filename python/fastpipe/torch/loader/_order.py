"""Which items stand in which batch: what the sampler says, and where it stands, so that a state can go back to it.

A pass begins by asking the sampler for an iterator, and draws batches of indices from it, some ahead of the consumer.
To begin again behind a batch, in another process, the iterator must be made as it was, and be where it was behind that
batch:

- A sampler or an iterator that has a `state_dict` tells where it stands. It is asked behind each batch.
- Any other is asked for the same batches once more, and these are passed over. It yields the same ones if it draws from
  generators that are put back: those that are its own (`generator`), and those of the process. Which of them it drew
  from, as the pass began, is found out by looking at them before and behind.

torch's own `RandomSampler` without a generator draws a seed from the process's, and everything else from that: then the
seed is the state.
"""

from __future__ import annotations

import base64
import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler

from fastpipe.errors import StateError

__all__ = ["Order", "Rest"]


class _Process(NamedTuple):
    """A generator of the process: how its state is got, put back, compared, and told (fit for JSON)."""

    get: Callable[[], Any]
    put: Callable[[Any], None]
    same: Callable[[Any, Any], bool]
    tell: Callable[[Any], Any]
    untell: Callable[[Any], Any]


def _text(state: torch.Tensor) -> str:
    return base64.b85encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b85decode(text)), dtype=torch.uint8)


def _same_numpy(one: Any, other: Any) -> bool:
    return bool(np.array_equal(one[1], other[1])) and one[2:] == other[2:]


# Looked up when they are called: in a worker's thread these are functions of its own generators.
_PROCESS = {
    "torch": _Process(torch.get_rng_state, torch.set_rng_state, torch.equal, _text, _tensor),
    "python": _Process(
        lambda: random.getstate(),
        lambda state: random.setstate(state),
        lambda one, other: bool(one == other),
        lambda state: [state[0], list(state[1]), state[2]],
        lambda told: (told[0], tuple(told[1]), told[2]),
    ),
    "numpy": _Process(
        lambda: np.random.get_state(legacy=True),
        lambda state: np.random.set_state(state),
        _same_numpy,
        lambda state: [state[0], state[1].tolist(), *state[2:]],
        lambda told: (told[0], np.array(told[1], np.uint32), *told[2:]),
    ),
}


def _is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _stateful_of(sampler: Any) -> Any:
    """The sampler that has states, of one and those that it draws from; None if none has."""
    return next((each for each in _samplers(sampler) if _is_stateful(each)), None)


def _samplers(sampler: Any) -> list[Any]:
    """A sampler, and those that it draws from."""
    found: list[Any] = []
    while sampler is not None and all(sampler is not each for each in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def _generators(loader: Any) -> dict[str, torch.Generator]:
    """The generators that are the loader's or its samplers' own, each once."""
    named = {"loader": loader.generator}
    named |= {
        f"sampler {number}": getattr(each, "generator", None) for number, each in enumerate(_samplers(_root(loader)))
    }
    found: dict[str, torch.Generator] = {}
    for name, generator in named.items():
        if isinstance(generator, torch.Generator) and all(generator is not each for each in found.values()):
            found[name] = generator
    return found


def _root(loader: Any) -> Any:
    return loader._index_sampler


class Rest:
    """The state of a loader between passes: of what its next pass will draw from.

    Args:
        loader: whose it is.
        seed: of the next pass, if that is known already.
    """

    @staticmethod
    def told(loader: Any, seed: int | None) -> dict[str, Any]:
        """The state, fit for JSON as far as those of samplers are."""
        sampler = _stateful_of(_root(loader))
        return {
            "process": _text(torch.get_rng_state()),
            "generators": {name: _text(each.get_state()) for name, each in _generators(loader).items()},
            "sampler": None if sampler is None else copy.deepcopy(sampler.state_dict()),
            "seed": seed,
        }

    def __init__(self, loader: Any, state: dict[str, Any]) -> None:
        self._state = state
        self._seen = torch.get_rng_state()
        self.seed: int | None = state["seed"]
        generators = _generators(loader)
        if generators.keys() != state["generators"].keys():
            raise StateError("the state is of a loader whose samplers have other generators")

    def put_back(self, loader: Any) -> None:
        """Lets the next pass draw what it would have drawn.

        The process's generator is put back only if nothing has drawn from it since the state was loaded: else the
        program knows what it does.
        """
        for name, generator in _generators(loader).items():
            generator.set_state(_tensor(self._state["generators"][name]))
        if torch.equal(self._seen, torch.get_rng_state()):
            torch.set_rng_state(_tensor(self._state["process"]))
        if self._state["sampler"] is not None:
            sampler = _stateful_of(_root(loader))
            if sampler is None:
                raise StateError("the state is of a sampler that has states, and this loader's has none")
            sampler.load_state_dict(copy.deepcopy(self._state["sampler"]))


class Order:
    """The batches of indices of a pass.

    Args:
        loader: whose samplers are asked.
        resumed: what an earlier one has told; None for a pass from its start.
    """

    def __init__(self, loader: Any, resumed: dict[str, Any] | None = None) -> None:
        # Not the loader, which may keep the pass that keeps this.
        self._root = _root(loader)
        self._generators = _generators(loader)
        self._resumed = resumed
        # What was drawn from as the pass began: where each generator stood.
        self._drawn: dict[str, Any] = {}
        # Where the loader's and the samplers' own generators stood then, and as the first batch was drawn: a loader
        # draws its seed between the two, or has it already.
        self._own: dict[str, torch.Tensor] = {}
        self._own_at_first: dict[str, torch.Tensor] | None = None
        self._seed: int | None = None
        self._states: dict[int, Any] = {}
        self._told_by: Any = None
        # What tells where the sampler stands; None if nothing does.
        self._teller: Any = None
        self._iterator: Iterator[Any] = iter(())
        # The number of the next batch.
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        """Begins, as `iter` of a sampler does; called once. It may draw from the process's generators."""
        resumed = self._resumed
        self._own = self._own_now()
        if resumed is not None:
            if any(resumed[when].keys() != self._generators.keys() for when in ("generators", "at_first")):
                raise StateError("the state is of a loader whose samplers have other generators")
            self._own, self._own_at_first = (
                {name: _tensor(told) for name, told in resumed[when].items()} for when in ("generators", "at_first")
            )
            self._put_own(self._own)
            self._drawn, self._seed = _untold(resumed["drawn"]), resumed["seed"]
            if resumed["stateful"] == "sampler":
                self._stateful_sampler().load_state_dict(copy.deepcopy(resumed["sampler"]))
            with _put(self._drawn.get("begin", {})):
                self._iterator = self._asked()
            if resumed["stateful"] == "iterator":
                self._told_by_iterator().load_state_dict(copy.deepcopy(resumed["sampler"]))
        else:
            self._iterator = self._watched("begin", self._asked)
        self._teller = self._told_by if self._told_by is not None else _stateful_of(self._root)
        self._note()
        return self._iterator

    def _own_now(self) -> dict[str, torch.Tensor]:
        return {name: each.get_state() for name, each in self._generators.items()}

    def _put_own(self, states: dict[str, torch.Tensor]) -> None:
        for name, generator in self._generators.items():
            generator.set_state(states[name])

    def _note(self) -> None:
        """Notes where the sampler stands."""
        if self._teller is not None:
            self._states[self.next] = copy.deepcopy(self._teller.state_dict())

    def _stateful_sampler(self) -> Any:
        found = _stateful_of(self._root)
        if found is None:
            raise StateError("the state is of a sampler that has states, and this loader's has none")
        return found

    def _asked(self) -> Iterator[Any]:
        root = self._root
        if type(root) is BatchSampler and _is_iterable_with_state(root.sampler):
            # torch's own keeps to itself the iterator that it draws from.
            inner = iter(root.sampler)
            self._told_by = inner if _is_stateful(inner) else None
            return _batches(inner, root.batch_size, root.drop_last)
        iterator: Iterator[Any] = iter(root)
        self._told_by = iterator if _is_stateful(iterator) else None
        return iterator

    def _told_by_iterator(self) -> Any:
        if self._told_by is None:
            raise StateError("the state is of a sampler whose iterators have states, and those of this one have none")
        return self._told_by

    def _watched(self, when: str, call: Callable[[], Any]) -> Any:
        """Calls what may draw from the process's generators, and notes where those stood that it drew from."""
        if self._draws_nothing():
            return call()
        before = {name: each.get() for name, each in _PROCESS.items()}
        try:
            return call()
        finally:
            drawn = {
                name: state for name, state in before.items() if not _PROCESS[name].same(state, _PROCESS[name].get())
            }
            if drawn:
                self._drawn[when] = drawn

    def _draws_nothing(self) -> bool:
        """Whether the samplers are torch's own in sequence."""
        return [type(each) for each in _samplers(self._root)] in (
            [SequentialSampler],
            [BatchSampler, SequentialSampler],
        )

    def draw(self) -> Any:
        """The indices of the next batch, or the only index of the next sample.

        Raises:
            StopIteration: if there are no more.
        """
        found = next(self._iterator) if self.next else self._begun()
        self.next += 1
        if self._teller is not None:
            self._note()
        return found

    def _begun(self) -> Any:
        """The first batch, which may be drawn from generators."""
        if self._resumed is None:
            self._own_at_first = self._own_now()
            return self._first()
        assert self._own_at_first is not None
        self._put_own(self._own_at_first)
        if self._seed is not None:
            return self._with_seed(self._seed)
        with _put(self._drawn.get("first", {})):
            return next(self._iterator)

    def _plain_random(self) -> Any:
        """Torch's random sampler, if it draws its seed from the process's generator."""
        last = _samplers(self._root)[-1]
        return last if type(last) is RandomSampler and last.__class__.__module__.startswith("torch.") else None

    def _first(self) -> Any:
        sampler = self._plain_random()
        if sampler is None or sampler.generator is not None or self._teller is not None:
            return self._watched("first", lambda: next(self._iterator))
        # What it is about to draw.
        state = torch.get_rng_state()
        self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
        torch.set_rng_state(state)
        return next(self._iterator)

    def _with_seed(self, seed: int) -> Any:
        sampler = self._plain_random()
        if sampler is None:
            raise StateError("the state is of a loader that shuffles by torch's RandomSampler, and this one doesn't")
        sampler.generator = torch.Generator().manual_seed(seed)
        try:
            return next(self._iterator)
        finally:
            sampler.generator = None

    def state(self, batches: int) -> dict[str, Any]:
        """Where the sampler stood behind so many batches."""
        stateful = None if self._teller is None else "sampler" if self._told_by is None else "iterator"
        drawn = self._drawn
        if self._resumed is None and self.next == 0 and not self._draws_nothing():
            # The first batch, which nobody has asked for, will be drawn from these.
            drawn = drawn | {"first": {name: each.get() for name, each in _PROCESS.items()}}
        at_first = self._own_now() if self._own_at_first is None else self._own_at_first
        return {
            "generators": {name: _text(state) for name, state in self._own.items()},
            "at_first": {name: _text(state) for name, state in at_first.items()},
            "drawn": {
                when: {name: _PROCESS[name].tell(state) for name, state in states.items()}
                for when, states in drawn.items()
            },
            "seed": self._seed,
            "stateful": stateful,
            "sampler": copy.deepcopy(self._states.get(batches)),
        }

    def skip(self, batches: int) -> None:
        """Goes on behind so many batches, of a resumed pass."""
        resumed = self._resumed
        if resumed is not None and resumed["stateful"] is not None and batches > 0:
            self.next = batches
            self._states[batches] = copy.deepcopy(resumed["sampler"])
            return
        for _ in range(batches):
            self.draw()

    def forget(self, batches: int) -> None:
        """What stood behind fewer batches isn't needed any more."""
        if self._states:
            for number in [number for number in self._states if number < batches]:
                del self._states[number]


def _untold(drawn: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        when: {name: _PROCESS[name].untell(told) for name, told in states.items()} for when, states in drawn.items()
    }


@contextmanager
def _put(states: dict[str, Any]) -> Iterator[None]:
    """Puts the process's generators to where they stood, and back."""
    kept = {name: _PROCESS[name].get() for name in states}
    for name, state in states.items():
        _PROCESS[name].put(state)
    try:
        yield
    finally:
        for name, state in kept.items():
            _PROCESS[name].put(state)


def _is_iterable_with_state(sampler: Any) -> bool:
    """Whether a sampler's iterators may have states: those of generators and lists don't."""
    iterate = getattr(type(sampler), "__iter__", None)
    code = getattr(iterate, "__code__", None)
    is_generator = code is not None and code.co_flags & 0x20
    return iterate is not None and not is_generator


def _batches(indices: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    """As torch's `BatchSampler`."""
    batch = []
    for index in indices:
        batch.append(index)
        if len(batch) == size:
            yield batch
            batch = []
    if batch and not drop_last:
        yield batch
