"""Plans: the stages from each source to the batches."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import fastpipe
from every_source import ROWS, Make, make
from fastpipe import col
from fastpipe.typing import Plan
from mapping import reader_of, with_y

pytest.importorskip("pyarrow")

__all__ = ["make"]


def stages(plan: Plan) -> dict[str, str]:
    found = dict(plan.stages)
    assert len(found) == len(plan.stages)
    return found


def test_the_source_and_its_rows_are_named(make: Make) -> None:
    reader = make(batch_size=9)
    found = dict(reader.plan().stages)
    assert "rows: " in found["source"]
    if "partition" in found:
        assert found["partition"].startswith("part ")
        assert f": {ROWS} of " in found["partition"]
    else:
        assert f"rows: {ROWS}" in found["source"]
    assert (f"files: {len(reader.files)}" in found["source"]) == bool(reader.files)
    assert found["batches"] == "27 batches of batch_size=9 in an epoch"
    assert reader.stats() == {}


def test_each_stage_has_a_line() -> None:
    reader = reader_of(world_size=2, rank=1, epochs=2)
    train, _ = reader.filter(col("x") >= 4).split(0.5, 0.5)
    rows = train.num_rows
    assert repr(train.without(rows=[0]).map(with_y, num_threads=2, seed=3).map(len).plan()).split("\n") == [
        "source   a table of 44 rows (rows: 44; units: 1)",
        'filter   col("x") >= 4: 40 of 44 rows',
        f"split    part 0 of 2, fraction 0.5, by the place of the row, seed=0: {rows} of 40 rows",
        f"without  rows by index: {rows - 1} of {rows} rows",
        'order    shuffle="window", shuffle_buffer=10, seed=3',
        'ranks    rank 1 of 2, shard_by="window", on_uneven="drop"',
        f"batches  {train.plan().stages[-1][1].split(',')[0]}{left_out(train)}, 2 epochs in a pass",
        "map      with_y, num_threads=2, prefetch=2, seed=3",
        "map      len",
    ]


def left_out(reader: fastpipe.Reader) -> str:
    rows = reader.without(rows=[0])._order.left_out
    return f", {rows} rows of all ranks in no batch" if rows else ""


def test_other_stages() -> None:
    reader = fastpipe.from_arrays({"x": np.arange(100), "k": np.arange(100) % 3}, batch_size=30, drop_last=True)
    assert stages(reader.plan())["batches"] == "3 batches of batch_size=30 in an epoch, 10 rows in no batch"
    assert stages(reader.plan())["order"] == "as in the source"
    steps = reader.without(steps=[1]).plan()
    assert stages(steps)["without"] == "1 step of each epoch: 1"
    others, fold = reader.folds(4, stratify="k", seed=5)[1]
    assert stages(fold.plan())["folds"] == "fold 1 of 4, stratify='k', seed=5: 25 of 100 rows"
    assert stages(others.plan())["folds"].startswith("all but fold 1 of 4, stratify='k'")
    assert "by 'k', seed=0" in stages(reader.split(1.0, by="k")[0].plan())["split"]
    whole = fastpipe.from_arrays({"x": np.arange(100)}, batch_size=30)
    assert stages(whole.sample(40, seed=2).plan())["sample"] == "uniform, part 0: 40 of 100 rows"
    assert (
        stages(whole.sample(140, seed=2, replace=True).plan())["sample"] == "with replacement, part 0: 140 of 100 rows"
    )
    assert stages(whole.take([5, 3, 3]).plan())["take"] == "rows by index: 3 of 100 rows"
    anew = stages(whole.sample(40, seed=2, redraw=True).plan())["sample"]
    assert anew == "40 rows, drawn in each epoch, seed=2"
    again = stages(whole.sample(40, seed=2, replace=True, redraw=True).plan())["sample"]
    assert again == "40 rows, drawn in each epoch, seed=2, with replacement"
    endless = fastpipe.from_arrays({"x": np.arange(0)}, batch_size=3, epochs=None, shuffle=True)
    found = stages(endless.plan())
    assert found["batches"] == "0 batches of batch_size=3 in an epoch, epochs without end"
    assert found["order"].endswith(", drawn at random")
    assert repr(pickle.loads(pickle.dumps(steps))) == repr(steps) == str(steps)


def test_selections_keep_their_stages_when_they_are_pickled_or_divided(make: Make) -> None:
    reader = make(batch_size=9).split(0.5, 0.5)[0].without(rows=[1])
    plan = repr(reader.plan())
    assert plan.count("\nsplit ") == plan.count("\nwithout ") == 1
    assert repr(pickle.loads(pickle.dumps(reader)).plan()) == plan
    names = [name for name, _ in part_of(reader).plan().stages]
    assert names[-5:] == ["split", "without", "partition", "order", "batches"]


def part_of(reader: fastpipe.Reader) -> Any:
    return reader.read_partition(reader.partition(1)[0])


def test_control_characters_are_escaped() -> None:
    reader = fastpipe.from_arrays({"a\x1b[1mb": np.arange(4)}, batch_size=2)
    assert "\x1b" not in repr(reader.filter(col("a\x1b[1mb") > 1).plan())
