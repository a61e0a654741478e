"""Which server makes which batches: decided here, without threads or sockets.

Batches are numbered from the first of a pass. A server that is free takes the next *stretch* of them that nobody has
taken: so one that is twice as fast takes twice as many. Stretches are as long as takes `_TURN` seconds at the
server's rate, but no longer than a server's share of the room, or others would find none; a server alone takes all,
until another one comes: servers may come and go at any time. Nothing is begun that lies further ahead of the consumer
than there is room for. When the consumer waits for a batch, and whoever was to bring it is late, a server that is free
brings it, too: the first one counts.
"""

from __future__ import annotations

from dataclasses import dataclass

# Seconds of work that a server takes at once: many times what a request costs, and few enough to wait for.
_TURN = 0.1
# A batch is late when it takes this many times as long as batches of its server do, and at least this long, in seconds.
_LATE, _LEAST_LATE = 4.0, 0.25
_SMOOTHING = 0.3


@dataclass(slots=True, eq=False)
class Stretch:
    """Batches that a server has taken.

    Attributes:
        next: the one that it brings next.
        stop: behind the last of them.
        since: when it began to bring that, in seconds.
        again: whether others were to bring them, and are late.
    """

    server: int
    next: int
    stop: int
    since: float
    again: bool = False


@dataclass(slots=True)
class _Server:
    """What is known of a server: seconds a batch, None as long as none has come."""

    pace: float | None = None


class Schedule:
    """Deals batches out to servers.

    Args:
        servers: how many there are to begin with; they are numbered from 0.
        total: batches of the pass; None if it has no end.
        first_epoch: batches of its first epoch: no stretch goes on into the next one.
        epoch: batches of each further epoch.
        group: batches that are cheaper to make together: stretches end with them.
    """

    def __init__(self, servers: int, total: int | None, first_epoch: int, epoch: int, group: int = 1) -> None:
        self._servers = {server: _Server() for server in range(servers)}
        self._total = total
        self._first, self._epoch = first_epoch, max(epoch, 1)
        self._group = max(group, 1)
        # The first batch that nobody has taken, and stretches that came back.
        self._next = 0
        self._back: list[tuple[int, int]] = []
        self._taken: list[Stretch] = []
        # A batch, and when it will be late: nobody needs to look for it before.
        self._not_late = (-1, 0.0)

    @property
    def alone(self) -> bool:
        """Whether there is one server."""
        return len(self._servers) == 1

    def add(self, server: int) -> None:
        """A server has come, under a number that none has had. One that was alone leaves it the rest of its stretch."""
        self._servers[server] = _Server()
        for stretch in self._taken:
            # Behind the batch that is on its way.
            cut = stretch.next + self._length(self._servers.get(stretch.server))
            if stretch.again or cut >= stretch.stop:
                continue
            if stretch.stop == self._next:
                self._next = cut
            else:
                self._back.append((cut, stretch.stop))
            stretch.stop = cut

    def remove(self, server: int) -> None:
        """A server has gone. What it has taken is `done` as ever, when nobody waits for it any more."""
        del self._servers[server]

    def boundary(self, number: int) -> int:
        """Behind the last batch of the epoch that a batch is of."""
        if number < self._first:
            return self._first
        return self._first + ((number - self._first) // self._epoch + 1) * self._epoch

    def take(self, server: int, now: float, wanted: int, ahead: int, *, waiting: bool) -> Stretch | None:
        """The stretch that a free server is to bring; None if there is nothing to do just now.

        Args:
            server: which one.
            now: seconds, of any clock that doesn't go back.
            wanted: the batch that the consumer takes next.
            ahead: how many of them there is room for.
            waiting: whether the consumer waits for it.
        """
        alone = self.alone
        self._back.sort()
        if self._back and self._back[0][0] < wanted + ahead:
            start, stop = self._back.pop(0)
            return self._give(server, now, start, stop, self._share(ahead))
        start = max(self._next, wanted)
        if (self._total is None or start < self._total) and start < wanted + ahead:
            stop = self.boundary(start) if self._total is None else min(self.boundary(start), self._total)
            if not alone:
                stop = min(stop, max(start + 1, wanted + ahead))
            self._next = start
            stretch = self._give(server, now, start, stop, self._share(ahead))
            self._next = stretch.stop
            return stretch
        return self._hedge(server, now, wanted) if waiting else None

    def _share(self, ahead: int) -> int:
        """Batches that a stretch may have, so that all others find room, too."""
        return max(1, ahead // max(len(self._servers), 1))

    def _give(self, server: int, now: float, start: int, stop: int, most: int) -> Stretch:
        if not self.alone:
            length = min(self._length(self._servers.get(server)), most)
            end = start + length
            if length >= self._group:
                end -= end % self._group
            else:
                # Or what two groups are made of would be read for a few batches of each.
                end = min(end, start - start % self._group + self._group)
            if end < stop and start < end:
                if stop <= self._next:
                    self._back.append((end, stop))
                stop = end
        stretch = Stretch(server, start, stop, now)
        self._taken.append(stretch)
        return stretch

    @staticmethod
    def _length(server: _Server | None) -> int:
        """Batches of a turn."""
        if server is None or server.pace is None:
            return 1
        return max(1, int(_TURN / max(server.pace, 1e-9)))

    def _hedge(self, server: int, now: float, wanted: int) -> Stretch | None:
        """The batch that the consumer waits for, if whoever was to bring it is late."""
        if self._not_late[0] == wanted and now < self._not_late[1]:
            return None
        found = [one for one in self._taken if one.next <= wanted < one.stop]
        if not found or any(one.server == server or one.again for one in found):
            return None
        late = found[0]
        of = self._servers.get(late.server)
        pace = 0.0 if of is None or of.pace is None else of.pace
        when = late.since + max(_LEAST_LATE, _LATE * pace)
        if now < when:
            self._not_late = wanted, when
            return None
        length = self._length(self._servers.get(server))
        stretch = Stretch(server, wanted, min(late.stop, wanted + length), now, again=True)
        self._taken.append(stretch)
        return stretch

    def brought(self, stretch: Stretch, now: float, count: int = 1, *, waited: float = 0.0) -> None:
        """A server has brought the next batches of a stretch; `waited` seconds of that it had to wait for room."""
        server = self._servers.get(stretch.server)
        if server is not None:
            took = max(now - stretch.since - waited, 0.0) / count
            server.pace = took if server.pace is None else server.pace + _SMOOTHING * (took - server.pace)
        stretch.next += count
        stretch.since = now

    def done(self, stretch: Stretch) -> None:
        """A server has ended with a stretch: what it hasn't brought is to be brought by others."""
        self._taken.remove(stretch)
        if stretch.next < stretch.stop and not stretch.again:
            self._back.append((stretch.next, stretch.stop))

    def came_back(self, number: int) -> bool:
        """Whether a batch was taken, wasn't brought, and is to be taken again."""
        return any(start <= number < stop for start, stop in self._back)

    @property
    def finished(self) -> bool:
        """Whether all batches were brought."""
        return self._total is not None and self._next >= self._total and not self._back and not self._taken
