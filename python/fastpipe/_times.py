"""Dates, times and durations, for which frameworks have no dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastpipe.batch import Masked, Ragged
from fastpipe.errors import UnsupportedError

__all__ = ["no_times", "times_in"]


def no_times(library: str, name: str, dtype: Any) -> UnsupportedError:
    """The error of a feature of times in a library that has none."""
    spec = 'fastpipe.DenseSpec((), "int64")'
    return UnsupportedError(
        f"feature {name!r} is {dtype}, which {library} has no dtype for; features={{{name!r}: {spec}}} reads numbers "
        "of its unit, and columns= leaves it out",
        feature=name,
    )


def times_in(batch: Mapping[str, Any]) -> tuple[str, np.dtype[Any]] | None:
    """The first column of times in a batch, and its dtype."""
    for name, form in batch.items():
        values = form
        while isinstance(values, (Masked, Ragged)):
            values = values.values
        if isinstance(values, np.ndarray) and values.dtype.kind in "mM":
            return name, values.dtype
    return None
