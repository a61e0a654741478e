"""Filters that keep the steps: batches have only the rows that pass a condition, or mark these rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe._arguments import shown
from fastpipe._arrow import to_arrow
from fastpipe._expressions import Expr, abridged
from fastpipe._reader.conditions import Condition
from fastpipe._reader.mapped import Mapped, map_passes
from fastpipe._reader.mapped_batches import OwnFunction
from fastpipe.errors import SchemaError
from fastpipe.specs import Features

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader


class PassingRows(OwnFunction):
    """Returns the rows of a batch that pass a condition.

    Args:
        condition: The condition.
        features: The features of the batches.
        marks: Whether the batch keeps its rows, and `valid` marks those that pass.
    """

    def __init__(self, condition: Expr, features: Features, marks: bool) -> None:
        self._condition, self._features, self.marks_valid = condition, features, marks
        self._checked = Condition(condition, features)
        self._read = Features({name: features[name] for name in self._checked.names})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns a batch of the passing rows, whose arrays are copies, or the marked batch."""
        columns = to_arrow({name: batch[name] for name in self._read}, features=self._read)
        passes = np.asarray(self._checked.passes(columns), bool)
        if self.marks_valid:
            return batch | {"valid": passes & batch.get("valid", True)}
        rows = np.flatnonzero(passes)
        return {name: values[rows] for name, values in batch.items()}

    @property
    def stage(self) -> tuple[str, str]:
        what = "mark" if self.marks_valid else "have"
        return "filter", f"{abridged(self._condition)}: batches {what} the rows that pass"

    def __reduce__(self) -> tuple[Any, ...]:
        return PassingRows, (self._condition, self._features, self.marks_valid)


def filter_batches(reader: Reader, condition: Expr, *, marks: bool) -> Mapped:
    """Returns a map to the rows of each batch that pass a condition, or that marks them. See `Reader.filter`."""
    if not isinstance(condition, Expr):
        raise TypeError(f'filter() takes a condition, such as fastpipe.col("age") >= 18; got {shown(condition)}')
    if marks and "valid" in reader.features:
        raise SchemaError("the batches get an entry 'valid', and the reader has a feature of that name: rename it")
    function = PassingRows(condition, reader.features, marks)
    return map_passes(reader._passes, reader, function, 0, 0, None, reader.features)
