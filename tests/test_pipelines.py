"""Random pipelines of filters, splits, samples, taken rows and other steps of every source, beside lists of indices.

A split of filtered rows must have the rows of the same split of all rows that pass the filter. So the model of such a
step is a set of rows of the whole dataset. Samples and taken rows are positions in the list of the step before.
"""

from __future__ import annotations

import decimal
import json
import operator
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastpipe
from every_source import ORDERS, ROWS, Make, digests, make
from fastpipe import col

pytest.importorskip("pyarrow")

__all__ = ["make"]

pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")

PIPELINES = int(os.environ.get("FASTPIPE_PIPELINES", "20"))
"""Number of pipelines of each source."""

COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]

Rows = list[int]
Step = Callable[[fastpipe.Reader, Rows], tuple[fastpipe.Reader, Rows]]


class Model:
    """All rows of a source, and where they are."""

    def __init__(self, make: Make) -> None:
        self.reader = make(batch_size=ROWS, seed=3)
        self.batch = self.reader.batch_at(0)
        self.index = {self.reader.locate(0, row): row for row in range(ROWS)}
        # Scalar columns, in which a condition can compare values.
        self.columns = {name: found for name, values in self.batch.items() if (found := scalars(values)) is not None}

    def rows(self, reader: fastpipe.Reader, step: int, count: int) -> Rows:
        """Returns the rows of a batch in epoch 0."""
        return [self.index[reader.locate(step, slot, 0)] for slot in range(count)]

    def of(self, reader: fastpipe.Reader) -> set[int]:
        """Returns the rows of a reader without shuffling."""
        return {row for step, batch in enumerate(reader) for row in self.rows(reader, step, size(batch))}


def size(batch: dict[str, Any]) -> int:
    return len(next(iter(batch.values())))


def scalars(values: Any) -> list[Any] | None:
    """Returns the values of a column that has one number or text per row, or None."""
    found = values.tolist() if isinstance(values, np.ndarray) else values.to_list()
    return found if all(value is None or isinstance(value, (int, float, str)) for value in found) else None


def filtered(model: Model, draw: np.random.Generator) -> Step:
    name = str(draw.choice(sorted(model.columns)))
    values = model.columns[name]
    known = [value for value in values if value is not None]
    bound, compare = known[draw.integers(len(known))], COMPARISONS[draw.integers(len(COMPARISONS))]
    scale = model.reader.features[name].scale
    operand = bound if scale is None else decimal.Decimal(bound).scaleb(-scale)

    def step(reader: fastpipe.Reader, rows: Rows) -> tuple[fastpipe.Reader, Rows]:
        passing = [row for row in rows if values[row] is not None and compare(values[row], bound)]
        return reader.filter(compare(col(name), operand)), passing

    return step


def divided(model: Model, draw: np.random.Generator) -> Step:
    """Takes a part of a split, or a side of a fold."""
    keys = [name for name, values in model.columns.items() if not any(isinstance(value, float) for value in values)]
    by = str(draw.choice(sorted(keys))) if keys and draw.random() < 0.5 else None
    seed, number = int(draw.integers(100)), int(draw.integers(3))
    if draw.random() < 0.5:

        def part(reader: fastpipe.Reader) -> fastpipe.Reader:
            return reader.split(0.5, 0.3, 0.2, by=by, seed=seed)[number]
    else:

        def part(reader: fastpipe.Reader) -> fastpipe.Reader:
            return reader.folds(3, by=by, seed=seed)[number][0]

    def step(reader: fastpipe.Reader, rows: Rows) -> tuple[fastpipe.Reader, Rows]:
        members = model.of(part(model.reader))
        return part(reader), [row for row in rows if row in members]

    return step


def left_out(model: Model, draw: np.random.Generator) -> Step:
    share = draw.random()

    def step(reader: fastpipe.Reader, rows: Rows) -> tuple[fastpipe.Reader, Rows]:
        out = np.flatnonzero(draw.random(len(rows)) < share)
        return reader.without(rows=draw.permutation(out)), [row for at, row in enumerate(rows) if at not in set(out)]

    return step


def partitioned(model: Model, draw: np.random.Generator) -> Step:
    """Reads a partition. The rows of all partitions together are those of the reader."""

    def step(reader: fastpipe.Reader, rows: Rows) -> tuple[fastpipe.Reader, Rows]:
        parts = reader.partition(int(draw.integers(1, 5)))
        if not parts:
            return reader, rows
        part = parts[draw.integers(len(parts))]
        start = sum(each.rows for each in parts[: part.number])
        # A unit has the same rows in a sequence of rows as in storage order.
        members = sorted(range(len(rows)), key=rows.__getitem__)[start : start + part.rows]
        return reader.read_partition(part), [rows[at] for at in sorted(members)]

    return step


def taken(model: Model, draw: np.random.Generator) -> Step:
    """Takes rows by index, some of them several times."""
    in_order = draw.random() < 0.3

    def step(reader: fastpipe.Reader, rows: Rows) -> tuple[fastpipe.Reader, Rows]:
        if not rows:
            return reader, rows
        chosen = draw.integers(0, len(rows), draw.integers(1, 2 * len(rows)))
        chosen = np.sort(chosen) if in_order else chosen
        return reader.take(chosen), [rows[at] for at in chosen]

    return step


def drawn(model: Model, draw: np.random.Generator) -> Step:
    """Draws a sample of each kind."""
    seed, replace, share = int(draw.integers(100)), bool(draw.random() < 0.5), draw.random()
    how = str(draw.choice(["uniform", "stratify", "balance", "weights"]))

    def step(reader: fastpipe.Reader, rows: Rows) -> tuple[fastpipe.Reader, Rows]:
        if not rows:
            return reader, rows
        count = max(1, int(share * len(rows)))
        positions = np.arange(len(rows))
        values = {"stratify": positions % 3, "balance": np.zeros(len(rows)), "weights": 1 + positions % 2}
        options: dict[str, Any] = {"seed": seed, "replace": replace} | ({} if how == "uniform" else {how: values[how]})
        # The positions don't depend on the source.
        plain = fastpipe.from_arrays({"at": positions}, batch_size=len(rows)).sample(count, **options)
        chosen = [int(at) for batch in plain for at in batch["at"]]
        return reader.sample(count, **options), [rows[at] for at in chosen]

    return step


STEPS = [filtered, divided, left_out, partitioned, taken, drawn]


@pytest.fixture(scope="module")
def model(make: Make) -> Model:
    return Model(make)


@pytest.mark.parametrize("number", range(PIPELINES))
def test_a_pipeline_has_the_rows_of_the_model(make: Make, model: Model, number: int) -> None:
    draw = np.random.default_rng(number)
    options = ORDERS[draw.integers(len(ORDERS))]
    ranks, threads, batch_size = int(draw.integers(1, 4)), int(draw.integers(1, 4)), int(draw.integers(1, 40))

    def pipeline(rank: int, threads: int) -> tuple[fastpipe.Reader, Rows]:
        chosen = np.random.default_rng(number)
        shared = {"batch_size": batch_size, "num_threads": threads, "seed": 3, "on_uneven": "allow"}
        reader, rows = make(**shared | options, rank=rank, world_size=ranks), list(range(ROWS))
        for _ in range(chosen.integers(1, 4)):
            reader, rows = STEPS[chosen.integers(len(STEPS))](model, chosen)(reader, rows)
        return reader, rows

    found: Rows = []
    for rank in range(ranks):
        reader, rows = pipeline(rank, threads)
        whole = [digests([batch])[0] for batch in reader]
        batches = [model.rows(reader, step, size(reader.batch_at(step, epoch=0))) for step in range(len(reader))]
        found += [row for batch in batches for row in batch]
        if "user" not in model.batch:  # Negatives are drawn by the step.
            assert whole == [digests([values_of(model.batch, batch)])[0] for batch in batches]
        assert whole == [digests([reader.batch_at(step, epoch=0)])[0] for step in range(len(reader))]
        if not options and ranks == 1:
            assert found == rows
        # A state restores any step, with another number of threads.
        stop = int(draw.integers(len(whole) + 1))
        reader.set_epoch(0)
        for _, _batch in zip(range(stop), reader, strict=False):
            pass
        again, _ = pipeline(rank, threads % 3 + 1)
        again.load_state_dict(json.loads(json.dumps(reader.state_dict())))
        left = digests(again)
        assert left == whole[stop:] or (stop == len(whole) and again.epoch > 0)
    assert sorted(found) == sorted(rows)


def values_of(batch: dict[str, Any], rows: Rows) -> dict[str, Any]:
    return {name: values[np.array(rows, int)] for name, values in batch.items()}
