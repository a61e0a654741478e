"""Iterators over a pass for torch loaders: converted batches, the state that the consumer has seen, and errors.

A batch counts as seen when `next` has returned it to the consumer.

`DataLoader` sends the class and the text of a worker's error, and raises `class(text)` in the training process, which
loses attributes. So a worker raises the error as an instance of a subclass that stores the attributes. Each error gets
its own subclass, which is pickled by its base class and attributes.
"""

from __future__ import annotations

import copy
import copyreg
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from fastpipe._fastpipe import PassMemory
from fastpipe._reader.passes import Passes, Started
from fastpipe.errors import FastpipeError


class _Carrier(type):
    """The metaclass of error classes that store attributes."""

    _of: type[FastpipeError]
    _attributes: dict[str, Any]


def carrying(error: FastpipeError) -> FastpipeError:
    """Returns an error of the same class and text that keeps its attributes in `type(error)(another_text)`."""
    kind = type(error)
    if isinstance(kind, _Carrier):
        return error
    # The state that pickle would save, including attributes that aren't in __dict__.
    attributes = error.__reduce__()[2]
    found: FastpipeError = _carrier(kind, attributes)(*error.args)
    return found.with_traceback(error.__traceback__)


def _carrier(of: type[FastpipeError], attributes: dict[str, Any]) -> Any:
    def begin(self: FastpipeError, message: str) -> None:
        of.__init__(self, message)
        for name, value in attributes.items():
            setattr(self, name, value)

    names = {"__init__": begin, "__module__": of.__module__, "__doc__": of.__doc__}
    made = _Carrier(of.__name__, (of,), names)
    made._of, made._attributes = of, attributes
    return made


def _reduced(kind: _Carrier) -> tuple[Any, ...]:
    return _carrier, (kind._of, kind._attributes)


copyreg.pickle(_Carrier, _reduced)


class Seen:
    """The state of a pass as its consumer has seen it. It holds no reference to the batches."""

    def __init__(self, passes: Passes, started: Started) -> None:
        self._passes = passes
        self.begin(started)

    def begin(self, started: Started) -> None:
        """Tracks a pass that has just begun."""
        self.position = started.position
        self.ended = False
        # The batch count and the progress after that many batches. Stored in one attribute, because Ctrl-C may
        # interrupt between any two assignments.
        self.mark = 0, self.position.progress()

    @property
    def is_current(self) -> bool:
        """Whether this pass is still the reader's last one."""
        return self._passes.is_current(self.position)

    def state(self, *, ended_stays: bool) -> dict[str, Any]:
        """Returns the state as the consumer has seen it. `ended_stays` has the same meaning as in `Passes.state`."""
        if not self.is_current:
            return self._passes.state(ended_stays=ended_stays)
        return self._passes.state_at(self.mark[1], ended=self.ended and not ended_stays)


class Batches(Iterator[Any]):
    """The batches of a pass, each converted by a function. Creating the iterator starts the pass.

    An error of the pass or of the function ends the pass, and each further `next` raises it again. Ctrl-C doesn't end
    the pass: the next call returns the batch that was interrupted.

    Args:
        passes: The passes of the reader. The iterator starts the next one.
        make: Function that converts a batch.
        fail: Function that returns the error to raise for an error that occurred.
        follow: Called before a batch is returned and when the pass ends, with the number of batches requested so far
            and with whether the pass has ended.
        memory: Memory in which the pass creates its batches. None lets the pass choose.
    """

    def __init__(
        self,
        passes: Passes,
        make: Callable[[dict[str, Any]], Any],
        fail: Callable[[Exception], Exception],
        follow: Callable[[int, bool], None],
        memory: PassMemory | None = None,
    ) -> None:
        self._passes = passes
        self._make, self._fail, self._follow = make, fail, follow
        self._memory = memory
        started = passes.start(memory)
        self._batches = started.batches
        self.seen = Seen(passes, started)
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._error is not None:
                raise _twin(self._error)
            try:
                return self._next()
            except StopIteration:
                raise
            except Exception as error:
                self.seen.position.close()
                failed = self._fail(error)
                self._error = _twin(failed)
                try:
                    if failed is error:
                        raise
                    raise failed from error.__cause__
                finally:
                    # Break the reference cycle between the error and this frame.
                    del failed

    def _next(self) -> Any:
        seen = self.seen
        if seen.position.delivered != seen.mark[0]:
            self._restart()
        try:
            batch = next(self._batches)
        except StopIteration:
            if not seen.ended:
                seen.mark = seen.mark[0], seen.position.progress()
                seen.ended = True
                self._follow(seen.mark[0] + 1, True)
            raise
        try:
            made = self._make(batch)
        except StopIteration as error:
            raise RuntimeError("the function that converts a batch raised StopIteration") from error
        self._follow(seen.mark[0] + 1, False)
        seen.mark = seen.mark[0] + 1, seen.position.progress()
        return made

    def _restart(self) -> None:
        """Restarts the pass after the last batch that was seen, because Ctrl-C lost a batch after it was drawn."""
        if not self.seen.is_current:
            raise FastpipeError("Ctrl-C ended this pass, and the next one is prepared; iter() starts it")
        self._passes.go_back(self.seen.mark[1])
        started = self._passes.start(self._memory)
        self._batches = started.batches
        self.seen.begin(started)


def _twin(error: Exception) -> Exception:
    """Returns a copy of the error without its traceback.

    The traceback references all its frames and would keep the pass alive.
    """
    try:
        twin = copy.copy(error)
    except Exception:
        # Some classes can't be created from their arguments.
        return error
    return twin if type(twin) is type(error) else error
