"""Where the time of a pass goes: the account that `explain` reads."""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple, Protocol

__all__ = ["Account", "Look"]

_SPENT = ("items", "making", "placing", "joining", "waiting")


class Look(NamedTuple):
    """What there is to see of a pass's workers.

    Attributes:
        makers: what each item worker says of itself (`ItemConsumer.views`), with its `name`.
        joiners: the same of batch workers.
        awaited: the number of the batch that the consumer waits for just now, and how many of its rows are missing;
            None if it waits for none.
        collates: whether there is a `collate_fn` of the user's own.
    """

    makers: list[dict[str, Any]]
    joiners: list[dict[str, Any]]
    awaited: tuple[int, int] | None
    collates: bool


class _Seen(Protocol):
    def look(self) -> Look: ...


class Account:
    """Where the time of one pass goes. It outlives the pass, and keeps none of its memory.

    Args:
        of: the pass, if it has workers.
        before: what its workers had done before it began, if they were kept from another pass.

    Attributes:
        waited: seconds that the consumer has waited for batches.
        away: seconds between its calls of `next`, the workers' start among them.
    """

    def __init__(self, of: _Seen | None = None, before: Look | None = None) -> None:
        self._of = None if of is None else weakref.ref(of)
        self._before = before
        self._last: Look | None = None
        self._waited = self.away = 0.0
        self._turned = time.perf_counter()
        self._waits = False
        self._first: float | None = None

    def wait(self) -> None:
        """The consumer begins to wait."""
        now = time.perf_counter()
        self.away += now - self._turned
        self._turned, self._waits = now, True

    def leave(self) -> None:
        """The consumer has a batch, and leaves."""
        now = time.perf_counter()
        self._waited += now - self._turned
        self._turned, self._waits = now, False
        if self._first is None:
            self._first = self._waited + self.away

    @property
    def waits_since(self) -> float:
        """Seconds for which the consumer has waited for the next batch; 0 if it doesn't just now."""
        return time.perf_counter() - self._turned if self._waits else 0.0

    @property
    def waited(self) -> float:
        return self._waited + self.waits_since

    @property
    def first(self) -> float:
        """Seconds from the start of the workers to the first batch."""
        return self.waited + self.away if self._first is None else self._first

    def keep(self, look: Look) -> None:
        """Keeps what there is to see of workers that are about to go."""
        self._last = look

    def look(self) -> Look | None:
        """What the workers have done for this pass. None if it has none."""
        found = self._last
        if found is None:
            of = None if self._of is None else self._of()
            if of is None:
                return None
            found = of.look()
        if self._before is None:
            return found
        return found._replace(
            makers=_less(found.makers, self._before.makers), joiners=_less(found.joiners, self._before.joiners)
        )


def _less(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pairs = zip(now, before, strict=True)
    return [after | {name: after[name] - earlier[name] for name in _SPENT} for after, earlier in pairs]
