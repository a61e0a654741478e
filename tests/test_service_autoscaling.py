"""How many servers a service has: by what they say of their time, without going to and fro."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.service._autoscaling import GROW_AFTER, SHRINK_AFTER, Look, decide

WAITED_FOR = Look(0.9, 0.1, 0.0)
IDLE = Look(0.0, 0.0, 1.0)
HELD_BACK = Look(0.1, 0.9, 0.0)
BETWEEN = Look(0.6, 0.2, 0.2)


@pytest.mark.parametrize(
    ("looks", "servers", "wanted", "why"),
    [
        ([], 1, 1, "nothing is known"),
        ([WAITED_FOR] * (GROW_AFTER - 1), 1, 1, "90% making"),
        ([WAITED_FOR] * GROW_AFTER, 1, 2, "consumers wait: 90% making"),
        ([IDLE, *[WAITED_FOR] * GROW_AFTER], 3, 6, "consumers wait"),
        ([WAITED_FOR] * GROW_AFTER, 6, 8, "consumers wait"),
        ([WAITED_FOR] * GROW_AFTER, 8, 8, "there are 8 at most"),
        ([WAITED_FOR, BETWEEN, WAITED_FOR], 1, 1, "90% making"),
        ([IDLE] * (SHRINK_AFTER - 1), 4, 4, "100% idle"),
        ([IDLE] * SHRINK_AFTER, 4, 3, "one less would do: 0% making what is waited for, 0% held back, 100% idle"),
        ([HELD_BACK] * SHRINK_AFTER, 4, 3, "one less would do"),
        ([*[IDLE] * (SHRINK_AFTER - 1), BETWEEN], 4, 4, "60% making"),
        ([IDLE] * SHRINK_AFTER, 1, 1, "100% idle"),
        ([Look(0.3, 0.7, 0.0)] * SHRINK_AFTER, 2, 2, "30% making"),
        ([BETWEEN] * 50, 4, 4, "60% making"),
        ([], 1, 2, "there are 2 at least"),
        ([], 9, 8, "there are 8 at most"),
    ],
)
def test_decisions(looks: list[Look], servers: int, wanted: int, why: str) -> None:
    least = 2 if "least" in why else 1
    decision = decide(looks, servers, least, 8)
    assert decision.servers == wanted
    assert why in decision.why


def test_looks_are_means_of_servers_whose_requests_may_overlap() -> None:
    # Of one server three requests wait at a time; the other one has nobody.
    assert Look.of([(6.0, 2.0, 2.0), (0.0, 0.0, 2.0)]) == Look(0.5, 0.0, 0.5)
    assert Look.of([(0.5, 1.5, 2.0)]) == Look(0.25, 0.75, 0.0)


@given(st.floats(0.05, 12.0), st.integers(1, 16), st.integers(0, 2**32))
def test_the_number_of_servers_comes_to_rest(need: float, begun: int, seed: int) -> None:
    """Consumers take what `need` servers make, with some noise: then there are enough servers, and few too many."""
    draw, servers = random.Random(seed), begun
    looks: list[Look] = []
    grew: list[bool] = []
    for _ in range(400):
        making = min(1.0, need / servers * draw.uniform(0.95, 1.05))
        looks.append(Look(making, (1 - making) / 2, (1 - making) / 2))
        decision = decide(looks, servers, 1, 16)
        assert decision.servers == servers or decision.servers in (servers - 1, min(2 * servers, 16))
        if decision.servers != servers:
            grew.append(decision.servers > servers)
            servers, looks = decision.servers, []
    assert servers >= min(need, 16) * 0.95
    assert servers <= max(1, 2 * need / 0.75 + 1) or servers <= 2
    assert grew == sorted(grew, reverse=True), "never more again after fewer"
