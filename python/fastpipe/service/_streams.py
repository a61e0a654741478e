"""Batches at a server, decoded once for all who ask for the same steps.

A *stream* is the batches of an epoch in an order. It has *passes*, each of which yields one step after the other, small
ones several at once, and decodes ahead; what was drawn is kept for a while. Whoever asks for a step gets what is kept,
or draws from the pass that comes to it soonest; a new pass begins where none does. So clients that share a stream share
its decoding, and one that comes back for what follows finds it decoded. Nothing here can't be made anew from a ticket.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from fastpipe.service._bounds import BusyError, Shares

if TYPE_CHECKING:
    import numpy as np

    from fastpipe._fastpipe import Pass, Sent

Begin: TypeAlias = "Callable[[int], Pass]"
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
# Streams of which there is nothing but what is kept.
_MOST_KEPT_STREAMS = 64
# What batches that are kept take besides their bytes: without it, a million small ones would be counted as nothing.
_OVERHEAD = 2 << 10
# Batches of rows of no fixed size may be larger by this than those that were made.
_LARGER = 1.25
# Seconds that a request waits for others' batches to be taken, before it is told that the server is busy.
_PATIENCE_BUSY = 5.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Drawn:
    """Batches of a stream that were drawn together. They are in memory for as long as it is.

    Attributes:
        first: the step of the first of them.
        sent: what there is to send.
    """

    first: int
    sent: Sent

    @property
    def end(self) -> int:
        """The step behind the last of them."""
        return self.first + self.sent.count

    @property
    def cost(self) -> int:
        """Bytes that it takes to keep them."""
        return self.sent.nbytes + _OVERHEAD

    def part(self, start: int, stop: int) -> tuple[bytes, list[np.ndarray], int]:
        """Those of the steps `start` to `stop`: what is said of them, their memory, and the step behind them."""
        end = min(self.end, stop)
        said, pieces = self.sent.part(start - self.first, end - self.first)
        return said, pieces, end


@dataclass(frozen=True, slots=True)
class Need:
    """What a pass of a stream may take.

    Attributes:
        reader: whose rows these are.
        rows: of a batch.
        limit: bytes; 0 if nobody bounds them.
    """

    reader: str = ""
    rows: int = 1
    limit: int = 0


_NOTHING = Need()


@dataclass(slots=True)
class Counts:
    """What the streams of a server have done."""

    decoded: int = 0
    passes: int = 0
    kept_hits: int = 0


@dataclass(slots=True)
class _Pass:
    """A pass over a stream, or one that is to begin; the step that it comes to next, and what it has drawn last."""

    batches: Pass | None
    next: int
    last: Drawn | None = None
    busy: bool = False
    used: int = 0


@dataclass(frozen=True, slots=True)
class _Waits:
    """Somebody who waits: whether they are still there, and until when they do."""

    wanted: Callable[[], bool]
    end: float

    def check(self, why: str) -> None:
        """Whether to wait on.

        Raises:
            BusyError: if that has taken too long; it says why.
            InterruptedError: if nobody waits any more.
        """
        if not self.wanted():
            raise InterruptedError
        if time.monotonic() > self.end:
            raise BusyError(f"this server is busy: {why}; ask another one, or later")


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream: what its passes may take, the client that began it, and when it was last asked for."""

    key: Any
    need: Need
    client: str
    used: int = 0
    passes: list[_Pass] = field(default_factory=list)
    kept: dict[int, Drawn] = field(default_factory=dict)


class Streams:
    """The streams of a server.

    Args:
        most_passes: passes that are open at once; the one that was used longest ago ends for a new one.
        keep: bytes of batches that are kept for others who may ask for them, once several clients read a stream.
        shares: what passes may take together, and what is being sent; None for no bounds of these.
        make_clients_take: called while a request waits until clients take what is sent to them.
    """

    def __init__(
        self,
        most_passes: int,
        keep: int,
        shares: Shares | None = None,
        make_clients_take: Callable[[], None] = lambda: None,
    ) -> None:
        self._most, self._keep, self._shares = most_passes, keep, shares
        self._make_clients_take = make_clients_take
        self._streams: dict[Any, _Stream] = {}
        # What is kept of all streams, from what was drawn first.
        self._drawn: OrderedDict[Drawn, _Stream] = OrderedDict()
        self._held = 0
        # Bytes that were handed over by passes and are still in memory, kept or being sent; and that are to come.
        self._alive = self._expected = 0
        # Bytes of a row, of the largest batches of each reader so far.
        self._row_bytes: dict[str, float] = {}
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
        need: Need = _NOTHING,
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
            need: what a pass of this stream may take.

        Raises:
            BusyError: if there is no memory for it, since other clients don't take what is sent to them, or too many
                passes are at work.
            FastpipeError: what the pass raises.
            InterruptedError: if it isn't wanted any more, or the server ends.
        """
        waits = _Waits(wanted, time.monotonic() + _PATIENCE_BUSY)
        while True:
            with self._changed:
                if self._closed or not wanted():
                    raise InterruptedError
                stream = self._streams.get(key)
                if stream is None:
                    self._forget_streams()
                    stream = self._streams[key] = _Stream(key, need, client)
                self._clock += 1
                stream.used = self._clock
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
                one.used = self._clock
            drawn = self._draw(stream, one, begin, waits, 0.0 if now else _PATIENCE_TOGETHER)
            if drawn is not None and drawn.first <= step < drawn.end:
                return drawn

    def _draw(self, stream: _Stream, one: _Pass, begin: Begin, waits: _Waits, patience: float) -> Drawn | None:
        """Draws what comes next of a pass, which is busy until then."""
        try:
            batches = one.batches
            if batches is None:
                with self._beginning:
                    self._make_room(stream.need.limit, waits)
                    batches = one.batches = begin(one.next)
                    self.counts.passes += 1
            # Behind what begins a pass, which waits for others to be idle: nobody who has this room waits for anything.
            with self._room_for(stream.need, waits):
                sent = batches.next_sent(most=TOGETHER, patience=patience)
                drawn = None if sent is None else self._handed_over(Drawn(one.next, sent))
        except BaseException:
            self._drop(stream, one)
            raise
        if drawn is None:
            self._drop(stream, one)
            return None
        with self._changed:
            one.last = drawn
            one.next = drawn.end
            one.busy = False
            row_bytes = drawn.sent.nbytes / (drawn.sent.count * stream.need.rows)
            self._row_bytes[stream.need.reader] = max(row_bytes, self._row_bytes.get(stream.need.reader, 0.0))
            self.counts.decoded += drawn.sent.count
            self._keep_drawn(stream, drawn)
            self._changed.notify_all()
        if batches.position.delivered == batches.total:
            self._drop(stream, one)
        return drawn

    def _handed_over(self, drawn: Drawn) -> Drawn:
        """Counts its bytes for as long as it is there."""
        nbytes = drawn.sent.nbytes
        with self._changed:
            self._alive += nbytes
        weakref.finalize(drawn, self._gone, nbytes).atexit = False
        return drawn

    def _gone(self, nbytes: int) -> None:
        # Wherever the last reference goes, and be it in this class: the lock may be taken again.
        with self._changed:
            self._alive -= nbytes
            self._changed.notify_all()

    @contextmanager
    def _room_for(self, need: Need, waits: _Waits) -> Iterator[None]:
        """Waits until what a pass hands over next may be in memory besides what others have."""
        if self._shares is None:
            yield
            return
        expected = self._bytes_of(need)
        most = self._shares.keep + self._shares.sending
        with self._changed:
            while self._alive + self._expected + expected > most:
                if self._let_go():
                    continue
                if self._closed:
                    raise InterruptedError
                self._make_clients_take()
                waits.check(f"{self._alive} bytes wait for clients to take them, {most} at most by its memory_limit")
                self._changed.wait(_PATIENCE)
            self._expected += expected
        try:
            yield
        finally:
            with self._changed:
                self._expected -= expected
                self._changed.notify_all()

    def _bytes_of(self, need: Need) -> int:
        """What is handed over at once: as much as a pass has room for, as long as nothing is known of its rows."""
        most, row_bytes = need.limit // 2, self._row_bytes.get(need.reader)
        if row_bytes is None:
            return most
        batch = int(_LARGER * row_bytes * need.rows)
        return min(most, batch if batch > TOGETHER // 2 else TOGETHER)

    def _let_go(self) -> bool:
        """Lets go of what nobody may ask for again: what is kept, and what passes have drawn last."""
        if self._drawn:
            self._let_go_of_oldest()
            return True
        found = False
        for stream in self._streams.values():
            for one in stream.passes:
                found |= one.last is not None
                one.last = None
        return found

    def _keep_drawn(self, stream: _Stream, drawn: Drawn) -> None:
        most = self._keep if self._shared else min(self._keep, _ALONE)
        if drawn.cost > most or self._closed:
            return
        stream.kept.update((step, drawn) for step in range(drawn.first, drawn.end))
        self._drawn[drawn] = stream
        self._held += drawn.cost
        while self._held > most:
            self._let_go_of_oldest()

    def _let_go_of_oldest(self) -> None:
        """Keeps no longer what was drawn first."""
        oldest, stream = self._drawn.popitem(last=False)
        self._held -= oldest.cost
        for step in range(oldest.first, oldest.end):
            # Two passes may come to the same step.
            if stream.kept.get(step) is oldest:
                del stream.kept[step]
        self._forget(stream)

    def _forget_streams(self) -> None:
        """Makes room for another stream: first those go that were asked for longest ago, if nobody reads them."""
        idle = [stream for stream in self._streams.values() if not stream.passes]
        if len(idle) < _MOST_KEPT_STREAMS:
            return
        stream = min(idle, key=lambda stream: stream.used)
        for drawn in set(stream.kept.values()):
            if self._drawn.pop(drawn, None) is not None:
                self._held -= drawn.cost
        stream.kept.clear()
        self._forget(stream)

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

    def _make_room(self, need: int, waits: _Waits) -> None:
        """Ends passes until there may be one more: first the one that was used longest ago."""
        while True:
            with self._changed:
                if self._closed or not waits.wanted():
                    raise InterruptedError
                open_ones = [
                    (one.used, stream, one)
                    for stream in self._streams.values()
                    for one in stream.passes
                    if one.batches is not None
                ]
                taken = sum(stream.need.limit for _, stream, _ in open_ones)
                fits = self._shares is None or taken + need <= self._shares.passes
                if len(open_ones) < self._most and fits:
                    return
                idle = [found for found in open_ones if not found[2].busy]
                if not idle:
                    bound = "memory_limit" if not fits else "max_passes"
                    waits.check(f"none of its {len(open_ones)} passes is idle, and its {bound} allows no more")
                    self._changed.wait(_PATIENCE)
                    continue
                _, stream, oldest = min(idle, key=lambda found: found[0])
                oldest.busy = True
            self._drop(stream, oldest)

    def look(self) -> dict[str, int]:
        """How many streams, passes and bytes there are now."""
        with self._changed:
            passes = sum(one.batches is not None for stream in self._streams.values() for one in stream.passes)
            return {
                "streams": len(self._streams),
                "passes": passes,
                "kept_bytes": self._held,
                "batch_bytes": self._alive,
            }

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
