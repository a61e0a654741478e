"""The order of items: batches of indices from samplers, and states from which a later pass resumes.

A pass creates an iterator of the sampler and draws batches of indices from it, some before the consumer needs them. A
state resumes in one of two ways:

- A sampler, or an iterator, with `state_dict` and `load_state_dict` restores its own state, which was saved after the
  last delivered batch.
- Any other sampler yields the same batches again, and those batches are skipped, as in torchdata's
  `StatefulDataLoader`. torch's generators are restored before that: the generators of the loader and its samplers, and
  torch's default generator while the iterator is created and draws its first batch. All of torch's samplers draw only
  from these generators.

A custom sampler that draws from Python's or NumPy's generators, or later from torch's default generator, needs its own
`state_dict`. The last skipped batch is compared with the batch after which the state was saved. A sampler that doesn't
repeat itself therefore raises an error instead of silently changing the order.
"""

from __future__ import annotations

import base64
import copy
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data.sampler import BatchSampler, RandomSampler

from fastpipe.errors import StateError
from fastpipe.torch.loader._stream import is_stateful

_T = TypeVar("_T")

# Indices at the start of a batch that are saved to recognize the batch.
_RECOGNIZED = 8


def _text(state: torch.Tensor) -> str:
    return base64.b85encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b85decode(text)), dtype=torch.uint8)


def _samplers(sampler: Any) -> list[Any]:
    """Returns a sampler and the samplers that it draws from."""
    found: list[Any] = []
    while sampler is not None and all(sampler is not each for each in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def _stateful_of(sampler: Any) -> Any:
    """Returns the first sampler with a `state_dict` among a sampler and the samplers that it draws from, or None."""
    return next((each for each in _samplers(sampler) if is_stateful(each)), None)


def _load_sampler(root: Any, state: Any) -> None:
    sampler = _stateful_of(root)
    if sampler is None:
        raise StateError(
            "cannot resume from this state: the saved sampler has a state_dict, and this loader's sampler doesn't"
        )
    sampler.load_state_dict(copy.deepcopy(state))


class _Generators:
    """The generators of a loader and its samplers, without duplicates."""

    def __init__(self, loader: Any) -> None:
        named = {"loader": loader.generator}
        for number, sampler in enumerate(_samplers(loader._index_sampler)):
            named[f"sampler {number}"] = getattr(sampler, "generator", None)
        self._all: dict[str, torch.Generator] = {}
        for name, generator in named.items():
            if isinstance(generator, torch.Generator) and all(generator is not each for each in self._all.values()):
                self._all[name] = generator

    def states(self) -> dict[str, torch.Tensor]:
        return {name: each.get_state() for name, each in self._all.items()}

    def put_back(self, states: dict[str, torch.Tensor]) -> None:
        for name, generator in self._all.items():
            generator.set_state(states[name])

    def decoded(self, states: dict[str, str]) -> dict[str, torch.Tensor]:
        """Returns the generators' states from the encoded states of a loader."""
        if states.keys() != self._all.keys():
            raise StateError(
                "cannot resume from this state: the saved loader and its samplers have different generators"
            )
        return {name: _tensor(text) for name, text in states.items()}


def _encoded(states: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: _text(state) for name, state in states.items()}


class BetweenPasses:
    """The state of a loader between passes: the generators and samplers that its next pass will draw from.

    Args:
        loader: The loader.
        state: Its state, as returned by `told`.

    Attributes:
        seed: Seed of the next pass, or None if it isn't drawn yet.
        starts: For each worker of an iterable dataset, the state from which its stream starts, if there are any.
    """

    @staticmethod
    def told(loader: Any, seed: int | None) -> dict[str, Any]:
        """Returns the state, which can be stored as JSON if the samplers' states can."""
        sampler = _stateful_of(loader._index_sampler)
        return {
            "process": _text(torch.get_rng_state()),
            "generators": _encoded(_Generators(loader).states()),
            "sampler": None if sampler is None else copy.deepcopy(sampler.state_dict()),
            "seed": seed,
        }

    def __init__(self, loader: Any, state: dict[str, Any]) -> None:
        self._state = state
        self._seen = torch.get_rng_state()
        self.seed: int | None = state["seed"]
        self.starts: list[Any] | None = state.get("starts")
        self._generators = _Generators(loader).decoded(state["generators"])

    def put_back(self, loader: Any) -> None:
        """Restores the generators and samplers, so that the next pass draws the same values.

        torch's default generator is restored only if it hasn't changed since the state was loaded. Otherwise the
        program has seeded it or draws from it.
        """
        _Generators(loader).put_back(self._generators)
        if torch.equal(self._seen, torch.get_rng_state()):
            torch.set_rng_state(_tensor(self._state["process"]))
        if self._state["sampler"] is not None:
            _load_sampler(loader._index_sampler, self._state["sampler"])


class Order:
    """The batches of indices of a pass.

    Args:
        loader: The loader whose sampler yields the indices.
        resumed: State to resume from. None starts a pass from the beginning.

    Attributes:
        next: Index of the next batch.
    """

    def __init__(self, loader: Any, resumed: dict[str, Any] | None = None) -> None:
        # Only the sampler: the loader may reference the pass, which references this order.
        self._root = loader._index_sampler
        self._generators = _Generators(loader)
        self._resumed = resumed
        # States of the generators of the loader and its samplers when the pass began, and when the first batch was
        # drawn. A loader may draw its seed between the two.
        self._own: dict[str, torch.Tensor] = {}
        self._own_at_first: dict[str, torch.Tensor] | None = None
        # States of torch's default generator if the iterator drew from it when it was created ("begin") or for the
        # first batch ("first").
        self._drawn: dict[str, torch.Tensor] = {}
        self._seed: int | None = None
        # The sampler or its iterator, if it has a state_dict.
        self._stateful: Any = None
        self._by_iterator = False
        # For each batch that the consumer may not have received: the sampler's state or the first indices of the batch.
        self._places: deque[tuple[int, Any]] = deque()
        self._iterator: Iterator[Any] = iter(())
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        """Returns the sampler's iterator, as `iter` of a sampler does. Called once."""
        resumed = self._resumed
        if resumed is None:
            self._own = self._generators.states()
        else:
            self._own = self._generators.decoded(resumed["generators"])
            self._own_at_first = self._generators.decoded(resumed["at_first"])
            self._drawn, self._seed = _decoded_draws(resumed["drawn"]), resumed["seed"]
            self._generators.put_back(self._own)
            if resumed["stateful"] == "sampler":
                _load_sampler(self._root, resumed["sampler"])
        self._iterator = self._default_put_back("begin", self._asked)
        self._by_iterator = is_stateful(self._stateful)
        if resumed is not None and resumed["stateful"] == "iterator":
            if not self._by_iterator:
                raise StateError(
                    "cannot resume from this state: the saved sampler's iterators have a state_dict, and this loader's"
                    " don't"
                )
            self._stateful.load_state_dict(copy.deepcopy(resumed["sampler"]))
        if not self._by_iterator:
            self._stateful = _stateful_of(self._root)
        self._note(None)
        return self._iterator

    def _asked(self) -> Iterator[Any]:
        """Creates the sampler's iterator and remembers the iterator whose state can be saved."""
        root = self._root
        if type(root) is BatchSampler and _may_have_states(root.sampler):
            # torch's BatchSampler doesn't expose the iterator that it draws from.
            self._stateful = inner = iter(root.sampler)
            return _batches(inner, root.batch_size, root.drop_last)
        iterator: Iterator[Any] = iter(root)
        self._stateful = iterator
        return iterator

    def _default_put_back(self, when: str, call: Callable[[], _T]) -> _T:
        """Calls a function that may draw from torch's default generator, which a resumed pass restores first."""
        if self._resumed is not None:
            with _put_back(self._drawn.get(when)):
                return call()
        before = torch.get_rng_state()
        try:
            return call()
        finally:
            if not torch.equal(before, torch.get_rng_state()):
                self._drawn[when] = before

    def draw(self) -> Any:
        """Returns the indices of the next batch, or the index of the next sample if the loader doesn't batch.

        Raises:
            StopIteration: If the sampler is exhausted.
        """
        found = next(self._iterator) if self.next else self._first()
        self.next += 1
        self._note(found)
        return found

    def _first(self) -> Any:
        """Returns the indices of the first batch."""
        if self._own_at_first is None:
            self._own_at_first = self._generators.states()
        else:
            self._generators.put_back(self._own_at_first)
        sampler = _samplers(self._root)[-1]
        if self._seed is None and (self._resumed is not None or not self._draws_seed(sampler)):
            return self._default_put_back("first", lambda: next(self._iterator))
        if not self._draws_seed(sampler):
            raise StateError(
                "cannot resume from this state: the saved loader shuffles with RandomSampler, and this loader doesn't"
            )
        if self._seed is None:
            # Draw the seed the way RandomSampler does.
            self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
        sampler.generator = torch.Generator().manual_seed(self._seed)
        try:
            return next(self._iterator)
        finally:
            sampler.generator = None

    def _draws_seed(self, sampler: Any) -> bool:
        """Whether a sampler is a `RandomSampler` that seeds itself from torch's default generator."""
        return type(sampler) is RandomSampler and sampler.generator is None and self._stateful is None

    def _note(self, batch: Any) -> None:
        """Records the sampler's state after a batch."""
        if self._stateful is not None:
            self._places.append((self.next, copy.deepcopy(self._stateful.state_dict())))
        else:
            self._places.append((self.next, batch[:_RECOGNIZED] if type(batch) is list else batch))

    def owner(self, number: int) -> int | None:
        """Returns the item worker that must make a batch, or None if any may."""
        return None

    def state(self, batches: int) -> dict[str, Any]:
        """Returns the state after a number of batches."""
        drawn = self._drawn
        if self._resumed is None and self.next == 0:
            # The first batch hasn't been drawn yet and will be drawn from this state.
            drawn = drawn | {"first": torch.get_rng_state()}
        place = next((place for number, place in self._places if number == batches), None)
        at_first = self._generators.states() if self._own_at_first is None else self._own_at_first
        return {
            "generators": _encoded(self._own),
            "at_first": _encoded(at_first),
            "drawn": {when: {"torch": _text(state)} for when, state in drawn.items()},
            "seed": self._seed,
            "stateful": None if self._stateful is None else "iterator" if self._by_iterator else "sampler",
            "sampler": None if self._stateful is None else copy.deepcopy(place),
            "last": None if self._stateful is not None else _recognized(place),
        }

    def skip(self, batches: int) -> None:
        """Skips the batches that a resumed pass has already delivered.

        Raises:
            StateError: If the sampler yields other batches than before.
        """
        resumed = self._resumed
        if resumed is None or batches == 0:
            return
        if resumed["stateful"] is not None:
            self.next = batches
            self._places.append((batches, copy.deepcopy(resumed["sampler"])))
            return
        if any(states.keys() - {"torch"} for states in resumed["drawn"].values()):
            # An earlier version of fastpipe saved the state.
            raise StateError(f"{_NOT_REPEATED} It drew from the generator of random or numpy.random.")
        last = None
        for _ in range(batches):
            try:
                last = self.draw()
            except StopIteration:
                raise StateError(f"{_NOT_REPEATED} It ended after {self.next} batches, of {batches}.") from None
            self.forget(self.next)
        expected = resumed.get("last")
        if expected is not None and expected != (found := _recognized(last)):
            raise StateError(f"{_NOT_REPEATED} Batch {batches - 1} began with {expected}, and now with {found}.")

    def forget(self, batches: int) -> None:
        """Drops the records before a number of batches."""
        while self._places and self._places[0][0] < batches:
            self._places.popleft()


_NOT_REPEATED = (
    "cannot resume from this state: the sampler yields different indices than before the state was saved. A sampler"
    " without state_dict and load_state_dict must yield the same indices again. Draw from a torch.Generator that is"
    " the sampler's attribute `generator`, or add these methods; use the same dataset; and call set_epoch, if it"
    " exists, before you resume."
)


def _may_have_states(sampler: Any) -> bool:
    """Whether a sampler's iterators may have states. Generator iterators have none."""
    iterate = getattr(type(sampler), "__iter__", None)
    return iterate is not None and not inspect.isgeneratorfunction(iterate)


def _batches(indices: Iterator[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
    """Yields lists of `size` indices, like torch's `BatchSampler`."""
    while batch := list(itertools.islice(indices, size)):
        if len(batch) == size or not drop_last:
            yield batch


def _recognized(batch: Any) -> list[int] | None:
    """Returns the first indices of a batch, or None if an index isn't an int."""
    first = batch[:_RECOGNIZED] if isinstance(batch, list) else [batch]
    return first if first and all(type(each) is int for each in first) else None


def _decoded_draws(drawn: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Returns the states of torch's default generator from the encoded states of a loader.

    States saved by earlier versions may also contain states of Python's and NumPy's generators.
    """
    return {when: _tensor(states["torch"]) for when, states in drawn.items() if "torch" in states}


@contextmanager
def _put_back(state: torch.Tensor | None) -> Iterator[None]:
    """Context manager that sets the state of torch's default generator. None leaves it unchanged."""
    if state is None:
        yield
        return
    kept = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(kept)
