"""Partitions of a reader's data, read one at a time and all together.

`test_every_source` reads a partition in every way.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe.typing import Partition


def write(path: Path, blocks: list[int]) -> Path:
    """Writes a file of blocks with the given numbers of rows."""
    fastpipe.write_avro(path, {"i": np.arange(blocks[0], dtype=np.int64)})
    at = blocks[0]
    for rows in blocks[1:]:
        fastpipe.write_avro(path, {"i": np.arange(at, at + rows, dtype=np.int64)}, append=True)
        at += rows
    return path


def ids(reader: fastpipe.Reader) -> list[int]:
    return [int(i) for batch in reader for i in batch["i"]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 40))
def test_each_row_is_in_one_partition(tmp_path_factory: pytest.TempPathFactory, blocks: list[int], count: int) -> None:
    path = write(tmp_path_factory.mktemp("parts") / "x.avro", blocks)
    reader = fastpipe.read_avro(path, batch_size=7)
    parts = reader.partition(count)
    assert 1 <= len(parts) <= min(count, len(blocks))
    assert [part.number for part in parts] == list(range(len(parts)))
    assert {part.num_partitions for part in parts} == {len(parts)}
    assert (parts[0].start, parts[-1].stop) == (0, len(blocks))
    assert all(one.stop == other.start for one, other in pairwise(parts))
    assert [i for part in parts for i in ids(reader.read_partition(part))] == list(range(sum(blocks)))
    # A partition exceeds the mean by at most one block, which has 20 bytes besides its rows.
    costs = np.array([rows * 2 + 40 for rows in blocks], float)
    for part in parts:
        assert costs[part.start : part.stop].sum() <= costs.sum() / count + 2 * costs.max()


def test_partitions_pass_through_json_pickle_and_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.avro", [100] * 20)
    reader = fastpipe.read_avro(path, batch_size=32, shuffle=True, seed=3)
    parts = reader.partition(4)
    assert [Partition(*json.loads(json.dumps(part))) for part in parts] == parts
    assert pickle.loads(pickle.dumps(parts)) == parts
    assert len(pickle.dumps(parts[0])) < 300
    script = (
        "import json, sys, fastpipe; part = fastpipe.typing.Partition(*json.loads(sys.argv[2]));"
        "reader = fastpipe.read_avro(sys.argv[1], batch_size=32, shuffle=True, seed=3);"
        "print([int(i) for batch in reader.read_partition(part) for i in batch['i']])"
    )
    command = [sys.executable, "-c", script, str(path), json.dumps(parts[2])]
    elsewhere = subprocess.run(command, capture_output=True, text=True, check=True)
    here = reader.read_partition(parts[2])
    expected = ids(here)
    assert json.loads(elsewhere.stdout) == expected
    assert sorted(expected) == list(range(1000, 1500))
    assert expected != sorted(expected)
    assert ids(pickle.loads(pickle.dumps(here))) != expected, "the next epoch must have another order"
    here.set_epoch(0)
    assert here.locate(0, 0).block == 10 + (expected[0] - 1000) // 100
    assert "part 2 of 4 of" in repr(here)


def test_states_fit_only_their_partition(tmp_path: Path) -> None:
    path = write(tmp_path / "x.avro", [100] * 20)
    reader = fastpipe.read_avro(path, batch_size=32, shuffle=True, seed=3)
    parts = reader.partition(4)
    first = reader.read_partition(parts[0])
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    rest = ids(first)
    again = fastpipe.read_avro(path, batch_size=32, shuffle=True, seed=3).read_partition(parts[0])
    again.load_state_dict(state)
    assert len(ids(again)) == 500 - 32
    assert len(rest) == 500 - 32 or len(rest) == 500
    for other in (reader.read_partition(parts[1]), reader):
        with pytest.raises(fastpipe.errors.StateError):
            other.load_state_dict(state)


def test_partitions_have_the_negatives_of_the_whole() -> None:
    users = np.repeat(np.arange(400), 50)
    positives = fastpipe.recsys.Interactions.from_arrays(users, (users * 7 + np.arange(len(users))) % 900)

    def points(reader: fastpipe.Reader) -> list[tuple[int, ...]]:
        return [
            tuple(int(batch[name][i]) for name in ("user", "item", "label"))
            for batch in reader
            for i in range(len(batch["user"]))
        ]

    reader = fastpipe.recsys.read_interactions(positives, batch_size=500, num_negatives=2, shuffle=False, seed=1)
    parts = reader.partition(3)
    assert [point for part in parts for point in points(reader.read_partition(part))] == points(reader)


def test_unsupported_partitions_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.avro", [100] * 20)
    reader = fastpipe.read_avro(path, batch_size=32)
    (part,) = reader.partition(1)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: reader.partition(0), ValueError, "num_partitions must be between 1"),
        (lambda: reader.partition("2"), TypeError, "num_partitions must be an integer"),  # type: ignore[arg-type]
        (lambda: reader.sample(7, redraw=True).partition(1), ValueError, "cannot partition samples"),
        (lambda: reader.read_partition(tuple(part)), TypeError, "got tuple. From JSON: Partition"),  # type: ignore[arg-type]
        (
            lambda: fastpipe.read_avro(write(tmp_path / "y.avro", [5]), batch_size=1).read_partition(part),
            fastpipe.errors.StateError,
            "does not belong to this reader",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    empty = fastpipe.from_arrays({"i": np.arange(0)}, batch_size=1)
    assert empty.partition(3) == []
    ranks = fastpipe.read_avro(path, batch_size=10, rank=1, world_size=2)
    half = ranks.partition(2)[1]
    assert len(ids(ranks.read_partition(half))) == 500


@pytest.mark.parametrize("order", [{}, {"shuffle": True, "seed": 3}, {"shuffle": "buffer", "seed": 3}])
def test_rows_of_a_part_of_rows_in_a_sequence_are_selected(order: dict[str, Any]) -> None:
    draw = np.random.default_rng(0)
    chosen, positions = draw.integers(0, 240, 108), np.sort(draw.permutation(108)[:71])
    reader = fastpipe.from_arrays({"id": np.arange(240)}, batch_size=28, **order).take(chosen)
    (whole,) = reader.partition(1)
    part = reader.read_partition(whole)
    (again,) = part.partition(1)
    mask = np.isin(np.arange(108), positions)
    taken, few = chosen[positions], chosen[chosen < 90]
    for selected, wanted in (
        (part.take(positions), taken),
        (part.read_partition(again).take(positions), taken),
        (part.without(rows=np.flatnonzero(~mask)), taken),
        (part.take(positions).take(np.arange(71)), taken),
        (part.sample(71, weights=mask.astype(float), seed=1), taken),
        (part.filter(fastpipe.col("id") < 90), few),
        (part.filter(fastpipe.col("id") < 120).filter(fastpipe.col("id") < 90), few),
    ):
        found = [int(row) for batch in selected for row in batch["id"]]
        assert sorted(found) == sorted(wanted)
        assert order or found == wanted.tolist()
