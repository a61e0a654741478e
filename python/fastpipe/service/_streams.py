"""Batches at a server, decoded once for all who ask for the same steps.

A *stream* is the batches of an epoch in an order. It has *passes*, each of which yields one step after the other, small
ones several at once, and decodes ahead; what was drawn is kept for a while. Whoever asks for a step gets what is kept,
or draws from the pass that comes to it soonest; a new pass begins where none does. So clients that share a stream share
its decoding, and one that comes back for what follows finds it decoded. Nothing here can't be made anew from a ticket.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    from fastpipe import _fastpipe

__all__ = ["Counts", "Drawn", "Streams"]

Begin: TypeAlias = "Callable[[int], _fastpipe.Pass]"
"""Begins a pass at a step, to the end of the epoch."""

# Steps that a pass may be behind: rather than begin another one, whoever asks draws those between, too.
_NEAR = 16
_PATIENCE = 0.2
TOGETHER = 512 << 10
"""Bytes of small batches that are drawn, and sent, together."""
# Bytes that are kept as long as no two clients read one stream: memory that is used again at once stays in the cache.
# One that comes later and lies further behind reads on its own until it has caught up.
_ALONE = 8 << 20
# Seconds for which a small batch may wait for others that are sent with it.
_PATIENCE_TOGETHER = 0.002


@dataclass(slots=True, eq=False)
class Drawn:
    """Batches of a stream that were drawn together.

    Attributes:
        first: the step of the first of them.
        sent: what there is to send.
    """

    first: int
    sent: _fastpipe.Sent

    @property
    def end(self) -> int:
        """The step behind the last of them."""
        return self.first + self.sent.count

    def part(self, start: int, stop: int) -> tuple[bytes, list[np.ndarray], int]:
        """Those of the steps `start` to `stop`: what is said of them, their memory, and the step behind them."""
        end = min(self.end, stop)
        said, pieces = self.sent.part(start - self.first, end - self.first)
        return said, pieces, end


@dataclass(slots=True)
class Counts:
    """What the streams of a server have done."""

    decoded: int = 0
    passes: int = 0
    kept_hits: int = 0


@dataclass(slots=True)
class _Pass:
    """A pass over a stream, or one that is to begin; the step that it comes to next, and what it has drawn last."""

    batches: _fastpipe.Pass | None
    next: int
    last: Drawn | None = None
    busy: bool = False
    used: int = 0


@dataclass(slots=True)
class _Stream:
    key: Any
    client: str
    passes: list[_Pass] = field(default_factory=list)
    kept: dict[int, Drawn] = field(default_factory=dict)


class Streams:
    """The streams of a server.

    Args:
        most_passes: passes that are open at once; the one that was used longest ago ends for a new one.
        keep: bytes of batches that are kept for others who may ask for them, once several clients read a stream.
    """

    def __init__(self, most_passes: int, keep: int) -> None:
        self._most, self._keep = most_passes, keep
        self._streams: dict[Any, _Stream] = {}
        # Of all streams, from what was drawn first.
        self._drawn: deque[tuple[_Stream, Drawn]] = deque()
        self._held = 0
        # Whether several clients have read one stream.
        self._shared = False
        self._clock = 0
        self._changed = threading.Condition()
        self._beginning = threading.Lock()
        self._closed = False
        self.counts = Counts()

    def get(
        self,
        key: Any,
        step: int,
        stop: int,
        begin: Begin,
        wanted: Callable[[], bool],
        *,
        client: str = "",
        now: bool = False,
    ) -> Drawn:
        """Batches of which one is that of a step.

        Args:
            key: of the stream.
            step: which batch.
            stop: behind the last one that is asked for.
            begin: begins a pass of this stream.
            wanted: whether whoever asks is still there.
            client: who that is.
            now: whether it is awaited more than those behind it.

        Raises:
            FastpipeError: what the pass raises.
            InterruptedError: if it isn't wanted any more, or the server ends.
        """
        while True:
            with self._changed:
                if self._closed or not wanted():
                    raise InterruptedError
                stream = self._streams.setdefault(key, _Stream(key, client))
                self._shared |= stream.client != client
                found = stream.kept.get(step) or _last(stream, step)
                if found is not None:
                    self.counts.kept_hits += min(found.end, stop) - step
                    return found
                near = [one for one in stream.passes if one.next <= step < one.next + _NEAR]
                one = max(near, key=lambda one: one.next, default=None)
                if one is not None and one.busy:
                    self._changed.wait(_PATIENCE)
                    continue
                if one is None:
                    # Begun below, without the lock.
                    one = _Pass(None, step)
                    stream.passes.append(one)
                one.busy = True
                self._clock += 1
                one.used = self._clock
            drawn = self._draw(stream, one, begin, 0.0 if now else _PATIENCE_TOGETHER)
            if drawn is not None and drawn.first <= step < drawn.end:
                return drawn

    def _draw(self, stream: _Stream, one: _Pass, begin: Begin, patience: float) -> Drawn | None:
        """Draws what comes next of a pass, which is busy until then."""
        try:
            batches = one.batches
            if batches is None:
                with self._beginning:
                    self._make_room()
                    batches = one.batches = begin(one.next)
                    self.counts.passes += 1
            sent = batches.next_sent(most=TOGETHER, patience=patience)
        except BaseException:
            self._drop(stream, one)
            raise
        if sent is None:
            self._drop(stream, one)
            return None
        with self._changed:
            drawn = one.last = Drawn(one.next, sent)
            one.next = drawn.end
            one.busy = False
            self.counts.decoded += sent.count
            self._keep_drawn(stream, drawn)
            self._changed.notify_all()
        if batches.position.delivered == batches.total:
            self._drop(stream, one)
        return drawn

    def _keep_drawn(self, stream: _Stream, drawn: Drawn) -> None:
        most = self._keep if self._shared else min(self._keep, _ALONE)
        if drawn.sent.nbytes > most or self._closed:
            return
        stream.kept.update((step, drawn) for step in range(drawn.first, drawn.end))
        self._drawn.append((stream, drawn))
        self._held += drawn.sent.nbytes
        while self._held > most:
            other, oldest = self._drawn.popleft()
            self._held -= oldest.sent.nbytes
            for step in range(oldest.first, oldest.end):
                # Two passes may come to the same step.
                if other.kept.get(step) is oldest:
                    del other.kept[step]
            self._forget(other)

    def _forget(self, stream: _Stream) -> None:
        """Forgets a stream of which nothing is left. What asks for it again begins anew."""
        if not stream.kept and not stream.passes and self._streams.get(stream.key) is stream:
            del self._streams[stream.key]

    def _drop(self, stream: _Stream, one: _Pass) -> None:
        with self._changed:
            if one in stream.passes:
                stream.passes.remove(one)
            self._forget(stream)
            self._changed.notify_all()
        if one.batches is not None:
            one.batches.close()

    def _make_room(self) -> None:
        """Ends passes until there may be one more: first the one that was used longest ago."""
        while True:
            with self._changed:
                open_ones = [
                    (one.used, stream, one)
                    for stream in self._streams.values()
                    for one in stream.passes
                    if one.batches is not None
                ]
                if len(open_ones) < self._most:
                    return
                idle = [found for found in open_ones if not found[2].busy]
                if not idle:
                    self._changed.wait(_PATIENCE)
                    continue
                _, stream, oldest = min(idle, key=lambda found: found[0])
                oldest.busy = True
            self._drop(stream, oldest)

    def look(self) -> dict[str, int]:
        """How many streams, passes and bytes there are now."""
        with self._changed:
            passes = sum(one.batches is not None for stream in self._streams.values() for one in stream.passes)
            return {"streams": len(self._streams), "passes": passes, "kept_bytes": self._held}

    def close(self) -> None:
        """Ends all passes."""
        with self._changed:
            self._closed = True
            passes = [one for stream in self._streams.values() for one in stream.passes]
            self._streams.clear()
            self._drawn.clear()
            self._changed.notify_all()
        for one in passes:
            if one.batches is not None:
                one.batches.close()


def _last(stream: _Stream, step: int) -> Drawn | None:
    """What a pass has drawn last, if that has a step: too much of it to be kept, say."""
    lasts = (one.last for one in stream.passes)
    return next((last for last in lasts if last is not None and last.first <= step < last.end), None)
