"""How batches are dealt out to servers, simulated: each comes once, and servers together make what they can."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.service._faults import Damage
from fastpipe.service._schedule import Schedule, Stretch

Pace = Callable[[int, float], float]
"""Seconds that a server takes for its next batch at some time; infinite if it is stopped."""


def simulated(schedule: Schedule, servers: int, total: int, ahead: int, pace: Pace, consumer: float = 0.0) -> float:
    """Lets servers bring all batches of a pass. Returns the seconds that it took.

    Args:
        schedule: of the pass.
        servers: how many there are.
        total: batches of the pass.
        ahead: batches for which there is room.
        pace: of the servers.
        consumer: seconds that the consumer takes for a batch.
    """
    now, wanted, free_at = 0.0, 0, 0.0
    ready: set[int] = set()
    came: dict[int, int] = {}
    at: list[tuple[Stretch, float] | None] = [None] * servers
    for _ in range(400 * total + 10_000):
        while wanted in ready and free_at <= now:
            ready.discard(wanted)
            wanted += 1
            free_at = now + consumer
        if wanted == total:
            assert schedule.finished or any(at), "all is brought"
            assert sorted(came) == list(range(total))
            return now
        waiting = wanted not in ready and free_at <= now
        for server in range(servers):
            if at[server] is None:
                stretch = schedule.take(server, now, wanted, ahead, waiting=waiting)
                if stretch is not None:
                    assert stretch.next < stretch.stop
                    at[server] = stretch, now + pace(server, now)
        events = [entry[1] for entry in at if entry is not None]
        if wanted in ready:
            events.append(free_at)
        now = max(now, min([*events, now + 0.05]))
        for server, entry in enumerate(at):
            if entry is None or entry[1] > now:
                continue
            stretch, _ = entry
            if stretch.next >= wanted + ahead:
                at[server] = stretch, now + 0.001
                continue
            came[stretch.next] = came.get(stretch.next, 0) + 1
            if stretch.next >= wanted:
                ready.add(stretch.next)
            schedule.brought(stretch, now)
            if stretch.next >= stretch.stop:
                schedule.done(stretch)
                at[server] = None
            else:
                at[server] = stretch, now + pace(server, now)
    raise AssertionError(f"batch {wanted} of {total} never came")


@pytest.mark.parametrize(
    ("paces", "ahead"),
    [
        ((0.01, 0.01, 0.01), 256),
        ((0.002, 0.02), 256),
        ((0.01, 0.005, 0.0025), 256),
        ((0.03,) * 8, 256),
        # Little room: a fast server that takes all of it leaves none to the others.
        ((0.001,) * 8, 32),
    ],
)
def test_servers_together_make_what_they_can(paces: tuple[float, ...], ahead: int) -> None:
    total, best = 3000, sum(1 / pace for pace in paces)
    schedule = Schedule(len(paces), total, total, total)
    took = simulated(schedule, len(paces), total, ahead, lambda server, now: paces[server])
    assert total / took >= 0.9 * best


def test_a_server_that_stops_holds_nobody_up_for_long() -> None:
    total = 1000
    schedule = Schedule(3, total, total, total)
    stopped = lambda server, now: float("inf") if server == 1 and now > 0.5 else 0.01  # noqa: E731
    took = simulated(schedule, 3, total, 256, stopped)
    assert took <= total * 0.01 / 2 * 1.1 + 1.0


def test_one_server_takes_an_epoch_at_once() -> None:
    schedule = Schedule(1, 25, 7, 9)
    found = []
    while (stretch := schedule.take(0, 0.0, 0, 100, waiting=False)) is not None:
        found.append((stretch.next, stretch.stop))
        while stretch.next < stretch.stop:
            schedule.brought(stretch, 0.0)
        schedule.done(stretch)
    assert found == [(0, 7), (7, 16), (16, 25)]
    assert schedule.finished


def test_what_a_server_leaves_another_one_brings() -> None:
    schedule = Schedule(2, 10, 10, 10)
    first = schedule.take(0, 0.0, 0, 10, waiting=False)
    assert first is not None
    schedule.done(first)
    again = schedule.take(1, 0.0, 0, 10, waiting=True)
    assert again is not None
    assert (again.next, again.server) == (first.next, 1)


@given(st.integers(1, 6), st.integers(1, 120), st.integers(1, 40), st.integers(1, 64), st.integers(0, 2**32))
def test_each_batch_is_brought(servers: int, total: int, epoch: int, ahead: int, seed: int) -> None:
    """Whoever is slow, and whenever."""
    draw = random.Random(seed)
    schedule = Schedule(servers, total, min(epoch, total), epoch, group=draw.randint(1, 9))
    assert simulated(schedule, servers, total, ahead, lambda server, now: draw.choice([0.0001, 0.01, 0.3])) >= 0


def test_a_server_that_comes_takes_what_one_alone_has_taken() -> None:
    schedule = Schedule(1, 100, 100, 100)
    alone = schedule.take(0, 0.0, 0, 10, waiting=False)
    assert alone is not None
    assert (alone.next, alone.stop) == (0, 100)
    schedule.brought(alone, 0.05)
    schedule.add(1)
    assert alone.stop == 3, "a turn takes two batches"
    other = schedule.take(1, 0.05, 1, 10, waiting=False)
    assert other is not None
    assert (other.next, other.stop) == (3, 4)
    assert schedule.take(1, 0.05, 1, 2, waiting=False) is None, "there is no room"
    schedule.remove(0)
    schedule.done(alone)
    rest = schedule.take(1, 0.05, 1, 10, waiting=False)
    assert rest is not None
    assert (rest.next, rest.stop) == (1, 3)


@given(st.integers(1, 120), st.integers(1, 40), st.integers(1, 64), st.integers(0, 2**32))
def test_each_batch_is_brought_while_servers_come_and_go(total: int, epoch: int, ahead: int, seed: int) -> None:
    draw = random.Random(seed)
    servers, known = list(range(draw.randint(0, 3))), 10
    schedule = Schedule(len(servers), total, min(epoch, total), epoch, group=draw.randint(1, 9))
    at: dict[int, Stretch] = {}
    came: set[int] = set()
    now, wanted = 0.0, 0
    while wanted < total:
        now += draw.choice([0.001, 0.3])
        if draw.random() < 0.2 or not servers:
            servers.append(known)
            schedule.add(known)
            known += 1
        if servers and draw.random() < 0.2:
            gone = servers.pop(draw.randrange(len(servers)))
            schedule.remove(gone)
            if gone in at and draw.random() < 0.8:
                schedule.done(at.pop(gone))
        for server in draw.sample(list(at), len(at)):
            # Those that have gone may bring a batch that was on its way, and no more.
            stretch = at[server]
            if server in servers or draw.random() < 0.5:
                came.add(stretch.next)
                schedule.brought(stretch, now)
            if stretch.next >= stretch.stop or server not in servers:
                schedule.done(at.pop(server))
        for server in servers:
            if server not in at:
                stretch = schedule.take(server, now, wanted, ahead, waiting=wanted not in came)
                if stretch is not None:
                    assert stretch.next < stretch.stop
                    at[server] = stretch
        while wanted in came:
            wanted += 1
    while at:
        schedule.done(at.popitem()[1])
    assert came == set(range(total))


@given(st.lists(st.tuples(st.floats(0.01, 3.0), st.booleans()), max_size=200), st.floats(0.1, 20.0))
def test_most_batches_are_damaged_only_after_as_long(events: list[tuple[float, bool]], seconds: float) -> None:
    damage, now, history = Damage(seconds), 0.0, list[tuple[float, int]]()
    for pause, whole in events:
        now += pause
        if whole:
            damage.came(1)
        else:
            damage.damaged(now)
        history.append((now, -1 if whole else 1))
        if damage.is_hopeless(now):
            # Since some moment, that long ago or more, there were more damaged ones than others, at any time.
            sums = [sum(step for at, step in history if at >= since) for since, _ in history if now - since >= seconds]
            assert max(sums) >= 8


@pytest.mark.parametrize(("whole", "hopeless"), [(0, True), (1, True), (4, False), (20, False)])
def test_how_many_batches_are_damaged(whole: int, hopeless: bool) -> None:
    """Of each so many that come whole, three are damaged."""
    damage, found = Damage(10.0), False
    for second in range(100):
        for _ in range(3):
            damage.damaged(second)
        damage.came(whole)
        found |= damage.is_hopeless(second)
    assert found is hopeless
    if hopeless:
        assert f"most batches are damaged on their way: 300 of the last {100 * (3 + whole)}" in str(damage)


def test_a_stretch_that_came_back_is_known() -> None:
    schedule = Schedule(2, 10, 10, 10)
    first = schedule.take(0, 0.0, 0, 5, waiting=False)
    assert first is not None
    assert not schedule.came_back(0)
    schedule.done(first)
    assert schedule.came_back(0)
    again = schedule.take(1, 0.0, 0, 5, waiting=False)
    assert again is not None
    assert not schedule.came_back(0)
