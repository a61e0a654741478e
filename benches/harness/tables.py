"""Tables of an integer column `key`, columns of float32 and a text column, as files of any kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    import fastpipe

FLOATS = 20


def keyed_table(keys: np.ndarray, draw: np.random.Generator) -> pa.Table:
    """Returns a table with these keys and random floats, without nulls."""
    import pyarrow as pa

    rows = len(keys)
    columns: dict[str, Any] = {"key": keys.astype("int32")}
    columns |= {f"x{i}": draw.random(rows, "float32") for i in range(FLOATS)}
    table = pa.table(columns | {"text": pa.array([f"the text of row {i}" for i in range(rows)])})
    return table.cast(pa.schema([field.with_nullable(False) for field in table.schema]))


def write(kind: str, table: pa.Table, path: Path, unit_rows: int) -> Callable[..., fastpipe.Reader]:
    """Writes a file, and returns a function that opens it.

    Args:
        kind: "avro", "csv", "arrow" or "parquet".
        table: The rows.
        path: The file.
        unit_rows: Rows of a record batch or row group.
    """
    import pyarrow.csv
    import pyarrow.feather
    import pyarrow.parquet

    import fastpipe

    if kind == "avro":
        fastpipe.write_avro(path, table, codec="null")
        return partial(fastpipe.read_avro, path)
    if kind == "csv":
        pyarrow.csv.write_csv(table, path)
        return partial(fastpipe.read_csv, path)
    if kind == "arrow":
        pyarrow.feather.write_feather(table, path, chunksize=unit_rows, compression="uncompressed")
        return partial(fastpipe.read_arrow, path)
    pyarrow.parquet.write_table(table, path, row_group_size=unit_rows)
    return partial(fastpipe.read_parquet, path)


def count(*readers: fastpipe.Reader) -> tuple[int, float]:
    """Reads a pass of each reader, and returns the number of rows and a sum."""
    rows, total = 0, 0.0
    for reader in readers:
        for batch in reader:
            rows += len(batch["x0"])
            total += float(batch["x0"].sum(dtype="f8"))
    return rows, total
