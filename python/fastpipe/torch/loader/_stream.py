"""The stream of an iterable dataset, from which a worker, or the program itself, makes batches.

torch's own class makes the batches, so they are the same as in torch's loader.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import _utils
from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from fastpipe.errors import StateError


class Opening(NamedTuple):
    """A request to start a pass. As in torch, all workers do so at once, since they may wait for each other.

    Attributes:
        is_later: Whether the workers have started passes before. The answer is then the state before the pass.
        drops_last: Whether to drop the iterator of the last pass first if the pass was left, because the consumer
            received batches of it.
        start: State from which the stream resumes, and how many batches to skip after that. None starts from the
            dataset.
    """

    is_later: bool
    drops_last: bool
    start: tuple[dict[str, Any] | None, int] | None


class Turn(NamedTuple):
    """A request for the next batch of a worker's stream.

    Attributes:
        snapshot: Whether to return the state after the batch.
    """

    snapshot: bool


class StreamBatch:
    """The answer to a `Turn`.

    Attributes:
        data: The batch. None if the stream has ended.
        ended: Whether the stream has ended.
        is_last: Whether the stream has ended or will end, so that the batch may have fewer items than others.
        state: State after the batch, or at the end of the stream. None if neither the dataset nor its iterator has
            states, or if no state was requested. The end always has a state.
    """

    def __init__(self, data: Any = None, *, ended: bool = False) -> None:
        self.data = data
        self.ended = self.is_last = ended
        self.state: dict[str, Any] | None = None

    def pin_memory(self) -> StreamBatch:
        """Copies the batch, and not the states, to page-locked memory. torch calls this."""
        self.data = _utils.pin_memory.pin_memory(self.data)  # type: ignore[no-untyped-call]
        return self


def is_stateful(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _state_of(thing: Any) -> Any:
    return thing.state_dict() if is_stateful(thing) else None


def _load(thing: Any, state: Any, what: str) -> None:
    if not is_stateful(thing):
        raise StateError(f"cannot resume from this state: it has a state of the {what}, and this {what} has no states")
    thing.load_state_dict(state)


class Stream:
    """Batches of an iterable dataset.

    Args:
        dataset: The iterable dataset.
        size: Number of items per batch. None yields single items.
        collate_fn: Function that creates a batch from items.
        drop_last: Whether to drop a last batch with fewer items.
    """

    def __init__(self, dataset: Any, size: int | None, collate_fn: Callable[[Any], Any], drop_last: bool) -> None:
        self._dataset = dataset
        self._index = None if size is None else [None] * size
        self._arguments = size is not None, collate_fn, drop_last
        self._fetcher: Any = None

    def begin(self, start: dict[str, Any] | None = None, skip: int = 0) -> None:
        """Starts a pass, or resumes one.

        Args:
            start: State to resume from, as returned by `state` or `state_before`.
            skip: Number of batches to skip after that.

        Raises:
            StateError: If the dataset doesn't match the state, or ends within the skipped batches.
        """
        state = {} if start is None else start
        if state.get("dataset") is not None:
            _load(self._dataset, state["dataset"], "dataset")
        is_within = state.get("ended") is not None
        if not is_within:
            _put_back(state.get("generators"))
        # As in torch, the iterator of the last pass exists until there is the next one.
        fetcher: Any = _IterableDatasetFetcher(self._dataset, *self._arguments)
        if is_within:
            if state["iterator"] is not None:
                _load(fetcher.dataset_iter, state["iterator"], "dataset's iterator")
            fetcher.ended = state["ended"]
            _put_back(state.get("generators"))
        for skipped in range(skip):
            try:
                fetcher.fetch(self._index)
            except StopIteration:
                raise StateError(
                    f"cannot resume from this state: the dataset ended after {skipped} batches, of {skip} to skip. It"
                    " must yield the same items again, unless it has state_dict and load_state_dict"
                ) from None
            except Exception:
                # The error was raised before the state was saved.
                continue
        self._fetcher = fetcher

    def end(self) -> None:
        """Drops the iterator of the last pass."""
        self._fetcher = None

    def fetch(self) -> Any:
        """Returns the next batch.

        Raises:
            StopIteration: If the stream has ended.
        """
        if self._fetcher is None:
            raise StopIteration
        return self._fetcher.fetch(self._index)

    @property
    def ends(self) -> bool:
        """Whether the last batch used up the dataset's iterator."""
        return bool(self._fetcher.ended)

    def state(self) -> dict[str, Any] | None:
        """Returns the state within a pass. None if neither the dataset nor its iterator has states."""
        iterator = self._fetcher.dataset_iter
        of_dataset = None if iterator is self._dataset else _state_of(self._dataset)
        of_iterator = _state_of(iterator)
        if of_dataset is None and of_iterator is None:
            return None
        return {"dataset": of_dataset, "iterator": of_iterator, "ended": self._fetcher.ended}

    def state_before(self) -> dict[str, Any]:
        """Returns the state before a pass."""
        return {"dataset": _state_of(self._dataset)}

    def state_at_end(self) -> dict[str, Any]:
        """Returns the state at the end of a pass. A pass that resumes from it has no batches."""
        return self.state_before() | {"iterator": _state_of(self._fetcher.dataset_iter), "ended": True}


class WorkerStream:
    """The stream of a worker process. States include those of the process's random generators.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._failure: Exception | None = None
        self._ended = False

    def open(self, opening: Opening) -> dict[str, Any] | None:
        """Starts a pass, and returns the state before a later pass. The first `answer` of the pass raises any error."""
        before = self._failure = None
        try:
            if opening.drops_last and not self._ended:
                # A dataset of fastpipe counts a pass when its iterator is dropped.
                self._stream.end()
            if opening.is_later:
                before = self._stream.state_before() | {"generators": _generators()}
            self._stream.begin(*opening.start or ())
            self._ended = False
        except Exception as error:
            # The pass has no batches.
            self._failure, self._ended = error, True
        return before

    def answer(self, turn: Turn) -> StreamBatch:
        """Returns the next batch of the pass, or that the stream has ended."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._ended:
            return StreamBatch(ended=True)
        try:
            answer = StreamBatch(self._stream.fetch())
        except StopIteration:
            self._ended = True
            answer = StreamBatch(ended=True)
            answer.state = self._stream.state_at_end() | {"generators": _generators()}
            return answer
        answer.is_last = self._stream.ends
        state = self._stream.state() if turn.snapshot else None
        answer.state = None if state is None else state | {"generators": _generators()}
        return answer


def _generators() -> dict[str, Any]:
    """Returns the states of the process's random generators, which can be stored as JSON."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    name, key, *more = numpy
    return {
        "random": [version, list(words), gauss],
        "numpy": [name, key.tolist(), *more],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }


def _put_back(states: dict[str, Any] | None) -> None:
    """Restores the states of the process's random generators, if there are any."""
    if states is None:
        return
    version, words, gauss = states["random"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(states["torch"])), dtype=torch.uint8))
