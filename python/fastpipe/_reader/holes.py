"""Filters that leave holes: batches keep their steps, and have only the rows that pass a condition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe._arguments import shown
from fastpipe._arrow import to_arrow
from fastpipe._expressions import Expr, abridged
from fastpipe._reader.conditions import Condition
from fastpipe._reader.mapped import Mapped, map_passes
from fastpipe._reader.mapped_batches import OwnFunction
from fastpipe.specs import Features

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader


class PassingRows(OwnFunction):
    """Returns the rows of a batch that pass a condition.

    Args:
        condition: The condition.
        features: The features of the batches.
    """

    def __init__(self, condition: Expr, features: Features) -> None:
        self._condition, self._features = condition, features
        self._checked = Condition(condition, features)
        self._read = Features({name: features[name] for name in self._checked.names})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns a batch of the passing rows, whose arrays are copies."""
        columns = to_arrow({name: batch[name] for name in self._read}, features=self._read)
        rows = np.flatnonzero(self._checked.passes(columns))
        return {name: values[rows] for name, values in batch.items()}

    @property
    def stage(self) -> tuple[str, str]:
        return "filter", f"{abridged(self._condition)}: batches have the rows that pass"

    def __reduce__(self) -> tuple[Any, ...]:
        return PassingRows, (self._condition, self._features)


def filter_batches(reader: Reader, condition: Expr) -> Mapped:
    """Returns a map to the rows of each batch that pass a condition. See `Reader.filter`."""
    if not isinstance(condition, Expr):
        raise TypeError(f'filter() takes a condition, such as fastpipe.col("age") >= 18; got {shown(condition)}')
    return map_passes(reader._passes, reader, PassingRows(condition, reader.features), 0, 0, None, reader.features)
