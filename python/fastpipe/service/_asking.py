"""Asks several servers the same question and returns the first answer.

Servers are asked one after another: the next one at once if a server fails, and after a short delay if it is silent.
A server that hangs costs only this delay, and servers after the first one that answers aren't asked. Servers whose
failure may be temporary are asked again until the time is over.
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
# Seconds before a failed server is asked again. Also the maximum delay before the next server is asked.
_PAUSE = 0.1


class NoAnswerError(Exception):
    """No server has answered.

    Args:
        error: The error to raise: a server's error for a file that it can't read, or the errors of all servers.
        passes: Whether a later attempt may succeed.
    """

    def __init__(self, error: FastpipeError, *, passes: bool) -> None:
        super().__init__(str(error))
        self.error, self.passes = error, passes


class Question(Generic[_Read]):
    """A question to several servers.

    Args:
        action: Name of the action.
        request: Arguments of the action.
        read: Parses an answer.
        seconds: Time limit in seconds.
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
        # By URL: requests in progress, next attempts, last errors and whether they may be temporary.
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
        """Returns the answer of the first server that has one.

        Args:
            listed: Returns the current servers. It is called repeatedly.
            come: Whether more servers may be listed later.
            again: Whether servers whose failure may be temporary are asked again while there is time.
            why: Explains why no server is listed.

        Raises:
            FastpipeError: If a server reports an error of the data. Service errors and file errors don't count: another
                server may succeed.
            NoAnswerError: If no server answers in time, or all have failed and no other server can be asked.
        """
        end = time.monotonic() + self._seconds
        while True:
            connections = list(listed())
            left = end - time.monotonic()
            if left > 0:
                self._ask_next(connections, left)
            try:
                # After the time limit, this collects the errors of requests that end at the same time.
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
        """Asks a server without a request in progress. Servers that were never asked come first."""
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
        except Exception as error:  # If the thread ended silently, the server would seem to hang.
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
