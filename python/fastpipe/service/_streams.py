"""Batches at a server, decoded once for all who ask for the same steps.

A *stream* is the batches of an epoch in an order. It has *passes*, each of which yields one step after the other and
decodes ahead; steps that were drawn are kept for a while. Whoever asks for a step gets a kept one, or draws from the
pass that comes to it soonest; a new pass begins where none does. So clients that share a stream share its decoding, and
one that comes back for what follows finds it decoded. Nothing here can't be made anew from a ticket.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    from fastpipe import _fastpipe

__all__ = ["Counts", "Sent", "Streams"]

Begin: TypeAlias = "Callable[[int], _fastpipe.Pass]"
"""Begins a pass at a step, to the end of the epoch."""

# Steps that a pass may be behind: rather than begin another one, whoever asks draws those between, too.
_NEAR = 16
_PATIENCE = 0.2


@dataclass(slots=True)
class Sent:
    """A batch as it is sent: its header and its memory, uint8."""

    header: bytes
    slabs: list[np.ndarray]
    nbytes: int


@dataclass(slots=True)
class Counts:
    """What the streams of a server have done."""

    decoded: int = 0
    passes: int = 0
    kept_hits: int = 0


@dataclass(slots=True)
class _Pass:
    batches: _fastpipe.Pass | None
    next: int
    busy: bool = False
    used: int = 0


@dataclass(slots=True)
class _Stream:
    passes: list[_Pass] = field(default_factory=list)
    kept: dict[int, Sent] = field(default_factory=dict)


class Streams:
    """The streams of a server.

    Args:
        most_passes: passes that are open at once; the one that was used longest ago ends for a new one.
        keep: bytes of batches that are kept for others who may ask for them.
    """

    def __init__(self, most_passes: int, keep: int) -> None:
        self._most, self._keep = most_passes, keep
        self._streams: dict[Any, _Stream] = {}
        # Of all streams, from the one that was drawn first.
        self._drawn: OrderedDict[tuple[Any, int], int] = OrderedDict()
        self._held = 0
        self._clock = 0
        self._changed = threading.Condition()
        self._beginning = threading.Lock()
        self._closed = False
        self.counts = Counts()

    def get(self, key: Any, step: int, begin: Begin, wanted: Callable[[], bool]) -> Sent:
        """The batch of a step.

        Args:
            key: of the stream.
            step: which batch.
            begin: begins a pass of this stream.
            wanted: whether whoever asks is still there.

        Raises:
            FastpipeError: what the pass raises.
            InterruptedError: if it isn't wanted any more, or the server ends.
        """
        while True:
            with self._changed:
                if self._closed or not wanted():
                    raise InterruptedError
                stream = self._streams.setdefault(key, _Stream())
                found = stream.kept.get(step)
                if found is not None:
                    self.counts.kept_hits += 1
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
            drawn = self._draw(key, stream, one, begin)
            if drawn is not None and drawn[0] == step:
                return drawn[1]

    def _draw(self, key: Any, stream: _Stream, one: _Pass, begin: Begin) -> tuple[int, Sent] | None:
        """Draws the next step of a pass, which is busy until then."""
        try:
            batches = one.batches
            if batches is None:
                with self._beginning:
                    self._make_room()
                    batches = one.batches = begin(one.next)
                    self.counts.passes += 1
            drawn = batches.next_sent(sums=True)
        except BaseException:
            self._drop(stream, one)
            raise
        if drawn is None:
            self._drop(stream, one)
            return None
        header, memory = drawn
        sent = Sent(header, [array for array, _ in memory.pieces()], memory.nbytes)
        with self._changed:
            number = one.next
            one.next += 1
            one.busy = False
            self.counts.decoded += 1
            self._keep_batch(key, stream, number, sent)
            self._changed.notify_all()
        return number, sent

    def _keep_batch(self, key: Any, stream: _Stream, number: int, sent: Sent) -> None:
        if sent.nbytes > self._keep or self._closed:
            return
        # Two passes may come to the same step.
        self._held -= self._drawn.pop((key, number), 0)
        stream.kept[number] = sent
        self._drawn[key, number] = sent.nbytes
        self._held += sent.nbytes
        while self._held > self._keep:
            (of, first), nbytes = self._drawn.popitem(last=False)
            self._held -= nbytes
            other = self._streams[of]
            del other.kept[first]
            if not other.kept and not other.passes and of != key:
                del self._streams[of]

    def _drop(self, stream: _Stream, one: _Pass) -> None:
        with self._changed:
            if one in stream.passes:
                stream.passes.remove(one)
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
