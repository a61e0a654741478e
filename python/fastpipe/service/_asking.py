"""Asks several servers the same question: the first one that answers counts.

One is asked after the other: at once when the one before has failed, and a little later when it is silent. So a server
that hangs costs no more than that, and one that answers keeps the others from being asked. Those that may answer later
are asked again until the time is over.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from fastpipe.errors import FastpipeError, ServiceError
from fastpipe.service._connection import Connection
from fastpipe.service._wire import FILE_ERRORS

_Read = TypeVar("_Read")
# Seconds before a server that has failed is asked again, and at most before the next one is asked, too.
_PAUSE = 0.1


class NoAnswerError(Exception):
    """No server has answered.

    Args:
        error: what is to be raised: what a server said of a file that it can't read, or what is wrong with each.
        passes: whether a server may answer another time.
    """

    def __init__(self, error: FastpipeError, *, passes: bool) -> None:
        super().__init__(str(error))
        self.error, self.passes = error, passes


class Question(Generic[_Read]):
    """A question to several servers.

    Args:
        action: what is asked.
        request: with it.
        read: makes something of an answer.
        seconds: for which servers are asked.
    """

    def __init__(
        self,
        action: str,
        request: dict[str, Any],
        read: Callable[[list[bytes], Connection], _Read],
        seconds: float,
    ) -> None:
        self._action, self._request, self._read = action, request, read
        self._seconds = seconds
        self._answers: queue.SimpleQueue[tuple[Connection, _Read | FastpipeError]] = queue.SimpleQueue()
        # By URL: who is being asked, when each may be asked (again), what went wrong, and whether that may pass.
        self._asked: set[str] = set()
        self._times: dict[str, float] = {}
        self._errors: dict[str, tuple[FastpipeError, bool]] = {}

    def answer(
        self,
        listed: Callable[[], Sequence[Connection]],
        *,
        come: bool,
        again: bool = True,
        why: Callable[[], str] = str,
    ) -> _Read:
        """The answer of the first server that has one.

        Args:
            listed: the servers that there are; called again and again.
            come: whether others may be listed later.
            again: whether servers that failed, but may answer later, are asked again as long as there is time.
            why: says why none is listed.

        Raises:
            FastpipeError: what a server tells, but for a `ServiceError`, and for a file that others may read.
            NoAnswerError: if there is no answer within the time, or none is to come.
        """
        end = time.monotonic() + self._seconds
        while True:
            connections = list(listed())
            left = end - time.monotonic()
            if left > 0:
                self._ask_next(connections, left)
            try:
                # Behind the end those that were asked say what went wrong.
                most = min(left, _PAUSE, self._seconds / (2 * max(len(connections), 1))) if left > 0 else _PAUSE
                connection, found = self._answers.get(timeout=most)
            except queue.Empty:
                pass
            else:
                self._asked.discard(connection.url)
                self._times[connection.url] = time.monotonic() + _PAUSE
                if not isinstance(found, FastpipeError):
                    return found
                if isinstance(found, FILE_ERRORS):
                    # Another server may read the file.
                    self._errors[connection.url] = found, False
                elif isinstance(found, ServiceError):
                    self._errors[connection.url] = found, connection.passes(found)
                else:
                    raise found
            failed = [self._errors[one.url] for one in connections if one.url in self._errors]
            passes = len(failed) < len(connections) or not connections or any(passing for _, passing in failed)
            settled = not self._asked and len(failed) == len(connections) and not come and not (passes and again)
            if settled or time.monotonic() >= end:
                raise NoAnswerError(self._error(connections, why()), passes=passes)

    def _ask_next(self, connections: list[Connection], seconds: float) -> None:
        """Asks a server that isn't being asked: first those that never were."""
        now = time.monotonic()
        free = [one for one in connections if one.url not in self._asked and self._times.get(one.url, 0.0) <= now]
        if free:
            one = min(free, key=lambda one: self._times.get(one.url, 0.0))
            self._asked.add(one.url)
            threading.Thread(target=self._ask, args=(one, seconds), name="fastpipe-ask", daemon=True).start()

    def _ask(self, connection: Connection, seconds: float) -> None:
        found: _Read | FastpipeError
        try:
            found = self._read(connection.ask(self._action, self._request, seconds), connection)
        except FastpipeError as error:
            found = error
        except Exception as error:  # A thread that dies silently would look like a server that hangs.
            found = ServiceError(f"{connection.url}: {type(error).__name__}: {error}")
        self._answers.put((connection, found))

    def _error(self, connections: list[Connection], why: str) -> FastpipeError:
        errors: list[FastpipeError] = []
        for one in connections:
            found = self._errors.get(one.url)
            if found is not None and isinstance(found[0], FILE_ERRORS):
                return found[0]
            silent = f"{one.url} has not answered for {self._seconds:g} seconds"
            errors.append(ServiceError(silent) if found is None else found[0])
        if not errors:
            return ServiceError(why or f"the directory has listed no server for {self._seconds:g} seconds")
        error = ServiceError("; ".join(map(str, errors)))
        error.__cause__ = errors[0]
        return error
