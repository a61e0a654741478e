"""A small shuffled reader, and a function whose results tests know."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastpipe

ROWS, SIZE = 44, 5
SPECS = {"x": fastpipe.DenseSpec((), "int64"), "y": fastpipe.DenseSpec((), "float32")}


def reader_of(**options: Any) -> fastpipe.Reader:
    shuffled: dict[str, Any] = {"shuffle": "window", "seed": 3, "shuffle_buffer": 10}
    return fastpipe.from_arrays({"x": np.arange(ROWS)}, **({"batch_size": SIZE} | shuffled | options))


def with_y(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"y": batch["x"].astype("float32") / 2}


def ids(batch: dict[str, Any]) -> list[int]:
    found: list[int] = batch["x"].tolist()
    return found


def values(batches: Any) -> list[Any]:
    return [(batch["x"].tolist(), batch["y"].tolist()) for batch in batches]


def expected(reader: fastpipe.Reader, epoch: int = 0) -> list[Any]:
    """Returns the results of `with_y`, from a plain reader."""
    reader.set_epoch(epoch)
    return [(batch["x"].tolist(), (batch["x"] / 2).tolist()) for batch in reader]
