"""A pass of a reader whose batches become something else: what counts as seen is what the consumer was given."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from fastpipe.errors import FastpipeError
from fastpipe.reader import Reader

__all__ = ["Batches", "Seen"]


class Seen:
    """How far the consumer of a pass has come. It doesn't keep the pass."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.begin()

    def begin(self) -> None:
        """Takes the pass that the reader has just begun."""
        assert self._reader._position is not None
        self.position = self._reader._position
        self.ended = False
        # Batches, and the progress behind them: in one, since Ctrl-C may come between any two steps.
        self.mark = 0, self.position.progress()

    @property
    def is_current(self) -> bool:
        """Whether it still is what the reader is in."""
        return self._reader._position is self.position and self._reader._resume is None

    def state(self, *, ended_stays: bool) -> dict[str, Any]:
        """The reader's state as the consumer has seen it. As `Reader._state`."""
        if not self.is_current:
            return self._reader._state(ended_stays=ended_stays)
        return self._reader._state_behind(self.mark[1], ended=self.ended and not ended_stays)


class Batches(Iterator[Any]):
    """What a function makes of each batch of a pass. It starts the pass.

    An error, of the reader or of the function, ends the pass: it is raised again by each further `next`. Ctrl-C
    doesn't: the next batch is the one that it came into.

    Args:
        reader: whose pass it is.
        make: the function.
        fail: makes of an error what is raised.
        end: called when the end of the pass is seen.
    """

    def __init__(
        self,
        reader: Reader,
        make: Callable[[dict[str, Any]], Any],
        fail: Callable[[Exception], Exception],
        end: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._make, self._fail, self._end = make, fail, end
        self._batches = iter(reader)
        self.seen = Seen(reader)
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
                self._end()
            raise
        try:
            made = self._make(batch)
        except StopIteration as error:
            raise RuntimeError("what is made of a batch raised StopIteration") from error
        seen.mark = seen.mark[0] + 1, seen.position.progress()
        return made

    def _restart(self) -> None:
        """Begins again behind the last batch that was seen: Ctrl-C came between the reader and the consumer."""
        if not self.seen.is_current:
            raise FastpipeError("Ctrl-C has ended the pass, and the next one was prepared since; iter() starts it")
        reader = self._reader
        reader._resume = reader._epoch, self.seen.mark[1]
        self._batches = iter(reader)
        self.seen.begin()


def _twin(error: Exception) -> Exception:
    """The same error without its traceback, which knows all frames that it went through, and so would keep the pass."""
    try:
        twin = copy.copy(error)
    except Exception:
        # Not every class can be made of its arguments.
        return error
    return twin if type(twin) is type(error) else error
