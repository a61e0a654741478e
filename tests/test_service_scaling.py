"""The formulas of docs/scaling.md, held to simulated clusters that deal out batches with the service's schedule."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyarrow.flight")

sys.path.insert(0, str(Path(__file__).parent.parent / "benches"))

from scaling import MB, Cluster, Simulation

# Simulated seconds of a thousand servers; `make soak` has more.
SECONDS = float(os.environ.get("FASTPIPE_SCALING_SECONDS", "2"))

EIGHT = Cluster(32, 8, 8)
MANY = Cluster(100, 25, 8, batch=4 * MB)

LIMITS = {
    "servers' processors": EIGHT,
    "servers' networks": replace(EIGHT, network=50 * MB),
    "consumers' networks": replace(EIGHT, consumer_network=300 * MB),
    "consumers": replace(EIGHT, demand=250 * MB),
    "storage": replace(EIGHT, storage=1000 * MB, stored=0.5),
    "enough storage, read again for each stretch": replace(EIGHT, storage=14_000 * MB, group=16),
    "too little storage, read again for each batch": replace(EIGHT, storage=2000 * MB, group=16),
    "requests of a consumer alone": Cluster(4, 1, 4, decode=1000 * MB, ahead=64),
    "a thousand servers of one consumer": Cluster(1000, 1, 1000, batch=4 * MB, ahead=4000),
    "servers that are killed": replace(MANY, mtbf=60.0, mttr=10.0),
    "servers that vanish": replace(MANY, mtbf=60.0, mttr=10.0, vanish=True, timeout=5.0),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_formulas_say_what_is_simulated(limit: str) -> None:
    cluster = LIMITS[limit]
    failing = cluster.mttr > 0
    result = Simulation(cluster, seed=1).run(30.0 if failing else 4.0)
    # Which servers fail, and for how long, is by chance.
    assert 0.9 * cluster.ideal <= result.rate <= (1.12 if failing else 1.05) * cluster.ideal
    assert (result.failures > 10) == failing
    assert result.twice < 0.01 * result.made


def test_bytes_that_are_read_are_those_of_the_formula() -> None:
    cluster = replace(EIGHT, group=16)
    result = Simulation(cluster).run(4.0)
    assert result.read / (result.made * cluster.batch) == pytest.approx(cluster.reads(cluster.ideal), rel=0.1)


@pytest.mark.parametrize(("servers", "decode"), [(3, 100), (8, 100), (8, 50), (24, 30)])
def test_each_server_finds_room(servers: int, decode: int) -> None:
    """In what a consumer has ahead by default, 32 MB: one server that takes all of it would leave none to others."""
    cluster = Cluster(servers, 1, servers, decode=decode * MB, ahead=32)
    assert Simulation(cluster).run(4.0).rate >= 0.9 * servers * decode * MB * cluster.busy


def test_a_thousand_servers_with_failures() -> None:
    cluster = Cluster(1000, 250, 8, batch=4 * MB, mtbf=200.0, mttr=10.0, vanish=True, timeout=5.0)
    result = Simulation(cluster).run(SECONDS)
    assert result.failures > SECONDS
    assert result.rate >= 0.9 * cluster.ideal
    assert result.idle < 1.0


def test_spare_servers_make_failures_free() -> None:
    spare = replace(MANY, mtbf=200.0, mttr=10.0, demand=0.75 * 4 * MANY.server)
    result = Simulation(spare).run(10.0)
    assert result.rate >= 0.98 * spare.consumers * spare.demand
