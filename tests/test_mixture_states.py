"""States of mixtures of 20 readers: below 2 KB in all forms of mixtures, and found again at any step of 10^9 rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastpipe
from every_source import ORDERS, digests
from fastpipe import Ragged, mix
from fastpipe._reader.state import checksum

pa = pytest.importorskip("pyarrow")

READERS, LARGEST = 20, 2048
NAMES = [f"dataset of texts {number}" for number in range(READERS)]
WEIGHTS = {name: number + 1 for number, name in enumerate(NAMES)}


def small(number: int) -> fastpipe.Reader:
    rows = 150 + 7 * number
    lengths = np.arange(rows) % 5 + 1
    items = Ragged(np.arange(lengths.sum()) + 10_000 * number, np.r_[0, np.cumsum(lengths)])
    order: dict[str, Any] = {"seed": number} | ORDERS[number % 4]
    return fastpipe.from_arrays({"x": np.arange(rows), "items": items}, batch_size=16, **order)


def readers_of(make: Callable[[fastpipe.Reader], Any] = lambda reader: reader) -> dict[str, Any]:
    return {name: make(small(number)) for number, name in enumerate(NAMES)}


def schedule(pairs: int) -> list[tuple[int, dict[str, float]]]:
    return [(3 * pair, {name: (i * pair) % 7 + 0.5 for i, name in enumerate(NAMES)}) for pair in range(pairs)]


def joining() -> list[tuple[int, dict[str, int]]]:
    """Returns pairs in which one reader joins at each step, and another is retired."""
    return [(4 * at, {name: WEIGHTS[name] for name in NAMES[max(at - 3, 0) : 4 + at]}) for at in range(READERS - 3)]


def halves(readers: dict[str, fastpipe.Reader]) -> list[fastpipe.Reader]:
    return [mix([readers[name] for name in names], stop=500) for names in (NAMES[::2], NAMES[1::2])]


VARIANTS: dict[str, Callable[[], Any]] = {
    "even": lambda: mix(readers_of(), WEIGHTS, stop=1000, epochs=2),
    "all rows": lambda: mix(readers_of(), WEIGHTS, stop="all_exhausted"),
    "random": lambda: mix(readers_of(), WEIGHTS, stop=1000, assignment="random", seed=2**64 - 1),
    "schedule": lambda: mix(readers_of(), schedule(24), stop=2000),
    "joining": lambda: mix(readers_of(), joining(), stop=2000),
    "ranks": lambda: mix(readers_of(), WEIGHTS, stop=9000, rank=3, world_size=7, on_uneven="allow"),
    "mixtures": lambda: mix(halves(readers_of()), [2, 1], stop=1000),
    "packs": lambda: mix(readers_of(lambda reader: reader.pack("items", length=12)), WEIGHTS, stop=1000),
    "split packs": lambda: mix(
        readers_of(lambda reader: reader.pack("items", length=4, on_long="split")), schedule(20), stop=1000
    ),
    "buckets": lambda: mix(readers_of(lambda reader: reader.bucket("items")), WEIGHTS, stop=60),
    "filters": lambda: mix(readers_of(lambda reader: reader.filter(fastpipe.col("x") > 30)), WEIGHTS, stop=1000),
    "map": lambda: mix(readers_of(), WEIGHTS, stop=1000).map(dict),
    "rebatched": lambda: mix(readers_of(), WEIGHTS, stop=1000).rebatch(11, shuffle_buffer=64, seed=5),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_are_small_and_resume(variant: str) -> None:
    expected = digests(VARIANTS[variant]())
    whole, again = VARIANTS[variant](), VARIANTS[variant]()
    steps = {0, len(expected), *np.random.default_rng(1).integers(1, len(expected), 8).tolist()}
    batches = iter(whole)
    for step, _ in enumerate(itertools.chain([None], batches)):
        if step in steps:
            state = json.loads(text := json.dumps(whole.state_dict()))
            assert len(text) < LARGEST
            again.load_state_dict(state)
            assert digests(itertools.islice(again, 2)) == expected[step : step + 2]


class Numbers:
    """Units of a million rows or fewer, which are computed when they are read."""

    def __init__(self, rows: int) -> None:
        self.rows = [min(1 << 20, rows - at) for at in range(0, rows, 1 << 20)]
        self.schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])

    def read(self, unit: int) -> Any:
        first = unit << 20
        return pa.table({"x": np.arange(first, first + self.rows[unit])}, schema=self.schema)

    def fingerprint(self) -> str:
        return "numbers"


ROWS = 10**9


@pytest.mark.parametrize("assignment", ["even", "random"])
@pytest.mark.parametrize("order", [{}, {"shuffle": True, "shuffle_buffer": 16_384}])
def test_states_of_a_billion_rows_are_small(order: dict[str, Any], assignment: Any) -> None:
    def mixed() -> fastpipe.Reader:
        total = sum(WEIGHTS.values())
        readers = {
            name: fastpipe.read_units(Numbers(ROWS * weight // total), batch_size=1024, **order)
            for name, weight in WEIGHTS.items()
        }
        return mix(readers, WEIGHTS, stop=ROWS, assignment=assignment, seed=7)

    reader, again = mixed(), mixed()
    assert reader.num_rows == ROWS
    state = reader.state_dict()
    # The steps before these would take hours to read.
    for step in [0, 1, len(reader) - 1, *np.random.default_rng(1).integers(0, len(reader), 20).tolist()]:
        state["progress"] |= {"step": step, "next": step}
        state["checksum"] = checksum({name: value for name, value in state.items() if name != "checksum"})
        reader.load_state_dict(state)
        assert reader.state_dict() == state
        assert len(json.dumps(state)) < LARGEST
    again.load_state_dict(state)
    passing = iter(again)
    for at in (step, step + 1):
        assert next(passing)["x"].tolist() == reader.batch_at(at)["x"].tolist()
        assert len(json.dumps(again.state_dict())) < LARGEST
