"""What workers of torch's loaders yield: batches that become something else, and errors.

What counts as seen is what the consumer was given.

`DataLoader` sends the class of an error and its text, and raises `class(text)` in the process that trains: attributes
are lost. So a worker raises an error of a class that knows them; a class of its own for each error, which is pickled as
what it was made of.
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
    """The type of such classes."""

    _of: type[FastpipeError]
    _attributes: dict[str, Any]


def carrying(error: FastpipeError) -> FastpipeError:
    """An error of the same class and text, whose attributes outlast `type(error)(another_text)`."""
    kind = type(error)
    if isinstance(kind, _Carrier):
        return error
    # What is pickled for it, attributes that aren't in __dict__ among it.
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
    """How far the consumer of a pass has come. It doesn't keep the pass."""

    def __init__(self, passes: Passes, started: Started) -> None:
        self._passes = passes
        self.begin(started)

    def begin(self, started: Started) -> None:
        """Takes the pass that has just begun."""
        self.position = started.position
        self.ended = False
        # Batches, and the progress behind them: in one, since Ctrl-C may come between any two steps.
        self.mark = 0, self.position.progress()

    @property
    def is_current(self) -> bool:
        """Whether it still is the last pass."""
        return self._passes.is_current(self.position)

    def state(self, *, ended_stays: bool) -> dict[str, Any]:
        """The state as the consumer has seen it. As `Passes.state`."""
        if not self.is_current:
            return self._passes.state(ended_stays=ended_stays)
        return self._passes.state_behind(self.mark[1], ended=self.ended and not ended_stays)


class Batches(Iterator[Any]):
    """What a function makes of each batch of a pass. It starts the pass.

    An error, of the pass or of the function, ends the pass: it is raised again by each further `next`. Ctrl-C
    doesn't: the next batch is the one that it came into.

    Args:
        passes: whose pass it is.
        make: the function.
        fail: makes of an error what is raised.
        follow: called before a batch is returned, and when the end of the pass is seen: with how many batches were
            asked for, and whether that is the end.
        memory: of the passes, where batches are to lie; None for memory of their own choice.
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
                    # The error knows this frame.
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
            raise RuntimeError("what is made of a batch raised StopIteration") from error
        self._follow(seen.mark[0] + 1, False)
        seen.mark = seen.mark[0] + 1, seen.position.progress()
        return made

    def _restart(self) -> None:
        """Begins again behind the last batch that was seen: Ctrl-C came between the pass and the consumer."""
        if not self.seen.is_current:
            raise FastpipeError("Ctrl-C has ended the pass, and the next one was prepared since; iter() starts it")
        self._passes.go_back(self.seen.mark[1])
        started = self._passes.start(self._memory)
        self._batches = started.batches
        self.seen.begin(started)


def _twin(error: Exception) -> Exception:
    """The same error without its traceback, which knows all frames that it went through, and so would keep the pass."""
    try:
        twin = copy.copy(error)
    except Exception:
        # Not every class can be made of its arguments.
        return error
    return twin if type(twin) is type(error) else error
