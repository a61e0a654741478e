"""Random pipelines of filters, splits, samples, taken rows, mixtures and other steps, and naive models of them.

A split of filtered rows must have the rows of the same split of all rows that pass the filter. So the model of such a
step is a set of rows of the whole dataset. Samples and taken rows are positions in the list of the step before. The
model of a mixture has the rows of each reader in its own order.
"""

from __future__ import annotations

import decimal
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

import fastpipe
from every_source import ROWS, Make
from fastpipe import col

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
        # Without replacement, no value of `balance` has fewer rows than are drawn of it.
        values = {"stratify": positions % 3, "balance": positions // (-(-len(rows) // 2)), "weights": 1 + positions % 2}
        count = min(count, len(rows) - len(rows) % 2) if how == "balance" and len(rows) > 1 else count
        options: dict[str, Any] = {"seed": seed, "replace": replace} | ({} if how == "uniform" else {how: values[how]})
        # The positions don't depend on the source.
        plain = fastpipe.from_arrays({"at": positions}, batch_size=len(rows)).sample(count, **options)
        chosen = [int(at) for batch in plain for at in batch["at"]]
        return reader.sample(count, **options), [rows[at] for at in chosen]

    return step


STEPS = [filtered, divided, left_out, partitioned, taken, drawn]
STOPS: list[Any] = ["first_exhausted", "all_exhausted", 700]


def chain(model: Model, draw: np.random.Generator, reader: fastpipe.Reader) -> tuple[fastpipe.Reader, Rows]:
    """Applies one to three random steps to a reader of all rows."""
    rows = list(range(ROWS))
    for _ in range(draw.integers(1, 4)):
        reader, rows = STEPS[draw.integers(len(STEPS))](model, draw)(reader, rows)
    return reader, rows


def values_of(batch: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """Returns some rows of a batch."""
    return {name: values[np.array(rows, int)] for name, values in batch.items()}


def assigned(shares: Sequence[int]) -> Iterator[int]:
    """Yields the reader of each row, by the definition of the chairman assignment."""
    period, counts = sum(shares), [0] * len(shares)
    members = [member for member, share in enumerate(shares) if share]
    least = Fraction(1, max(2 * len(members) - 2, 1))
    for row in itertools.count(1):
        due = {member: Fraction(shares[member] * row, period) - counts[member] for member in members}
        ready = [member for member in members if due[member] >= least or len(members) == 1]
        last = 1 if len(members) == 1 else 1 - least
        chosen = min(ready, key=lambda member: ((last - due[member]) / shares[member], member))
        counts[chosen] += 1
        yield chosen


def expected(rows: Mapping[int, Sequence[Sequence[int]]], shares: Sequence[int], stop: Any) -> list[tuple[int, int]]:
    """Returns the reader of each row of an epoch, and the row.

    Args:
        rows: For each reader, its rows in successive epochs.
        shares: Share of each reader.
        stop: When the epoch ends.
    """
    found: list[tuple[int, int]] = []
    counts = [0] * len(shares)
    for member in assigned(shares):
        all_seen = all(counts[m] >= len(rows[m][0]) for m, share in enumerate(shares) if share)
        if (stop == "all_exhausted" and all_seen) or len(found) == stop:
            break
        own = rows[member]
        if stop == "first_exhausted" and counts[member] == len(own[0]):
            break
        epoch, at = divmod(counts[member], len(own[0]))
        found.append((member, own[epoch][at]))
        counts[member] += 1
    return found


def cut(items: Sequence[Any], length: int) -> list[Sequence[Any]]:
    """Returns successive parts of equal lengths; the last one may be shorter."""
    return [items[start : start + length] for start in range(0, len(items), length)]


def located(model: Model, mixed: fastpipe.Reader, epoch: int = 0) -> list[list[tuple[int, int]]]:
    """Returns the reader and the row of each row of each batch."""

    def of(step: int, row: int) -> tuple[int, int]:
        where = mixed.locate(step, row, epoch)
        assert isinstance(where, fastpipe.typing.MixtureLocation)
        return int(where.reader), model.index[where.location]

    counts = [size(mixed.batch_at(step, epoch)) for step in range(mixed._order.steps)]
    return [[of(step, row) for row in range(count)] for step, count in enumerate(counts)]


def rows_of(model: Model, reader: fastpipe.Reader, epochs: range) -> list[list[int]]:
    """Returns the rows of a reader in each epoch."""
    sizes = [size(reader.batch_at(step)) for step in range(len(reader))]
    places = [(step, row) for step, count in enumerate(sizes) for row in range(count)]
    return [[model.index[reader.locate(step, row, epoch)] for step, row in places] for epoch in epochs]
