"""The promise of the data service for each source and order: ranks, rebatching and places are the local ones, too."""

from __future__ import annotations

import json
from typing import Any

import pytest

import fastpipe
from every_source import Make, digests, make, order

pytest.importorskip("pyarrow.flight")

__all__ = ["make"]

WORLD = 3


@order
def test_ranks_have_the_local_batches_from_every_state(make: Make, order: dict[str, Any]) -> None:
    options = {"batch_size": 8, "uneven": "pad", **order}
    if len(make(**options)._data.handle.unit_rows()) < WORLD and "shuffle" in order:
        # Or there is no block for each rank.
        options["shard_by"] = "batch"
    with make(**options).serve() as server:
        for rank in range(WORLD):
            options |= {"rank": rank, "world_size": WORLD}
            whole = digests(make(**options))
            assert len(whole) > 3
            remote = fastpipe.connect(server.url, rank=rank, world_size=WORLD)
            again = fastpipe.connect(server.url).shard(WORLD, rank)
            assert digests(again) == whole
            batches, local = iter(remote), make(**options)
            states = [remote.state_dict(), *(remote.state_dict() for _ in batches)]
            assert len(states) == len(whole) + 1
            for step, state in enumerate(states):
                stored = json.loads(json.dumps(state))
                again.load_state_dict(stored)
                local.load_state_dict(stored)
                assert digests(again) == digests(local) == whole[step:]


@order
def test_what_clients_rebatch_is_the_local(make: Make, order: dict[str, Any]) -> None:
    reader = make(batch_size=32, **order)
    with reader.serve() as server:
        remote = fastpipe.connect(server.url)
        ours, theirs = (fastpipe.rebatch(of, batch_size=20) for of in (reader, remote))
        assert digests(theirs) == digests(ours)
        # From the middle of the next epoch, and shuffled.
        middle = iter(reader)
        for _ in range(len(reader) // 2):
            next(middle)
        state = json.loads(json.dumps(reader.state_dict()))
        found = []
        for of in (reader, remote):
            of.load_state_dict(state)
            found.append(digests(fastpipe.rebatch(of, batch_size=20, shuffle_buffer=50, seed=5)))
        assert found[0] == found[1]
        assert len(found[0]) < len(reader) * 32 // 20


@order
def test_batches_by_step_and_places_are_the_local_ones(make: Make, order: dict[str, Any]) -> None:
    reader = make(batch_size=32, **order)
    with reader.serve() as server:
        remote = fastpipe.connect(server.url)
        for step in (0, len(reader) - 1):
            there, here = (digests([of.batch_at(step, epoch=2)]) for of in (remote, reader))
            assert there == here
            there, here = (of.locate(step, 5, epoch=2)._asdict() for of in (remote, reader))
            assert there == {name: known(value) for name, value in here.items()}


def known(value: Any) -> Any:
    """A field of a place, as servers tell it."""
    return value if isinstance(value, (int, float, type(None))) else str(value)
