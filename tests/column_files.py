"""Writes and reads Parquet and Arrow files through one interface.

Run as a program, it reads damaged files, because a crash would end the test run. Its arguments are a format, a folder,
and "local" or "remote". It prints the outcome for each file of the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.ipc
import pyarrow.parquet

import fastpipe

Reads = Callable[..., fastpipe.Reader]


class Format:
    """A file format: how its tables are written and read.

    Attributes:
        suffix: The suffix of its files.
        read: The function of fastpipe that reads them.
    """

    def __init__(self, suffix: str, read: Reads) -> None:
        self.suffix, self.read = suffix, read

    def write(self, table: pa.Table, path: Any, rows: int = 10) -> None:
        """Writes a table in units of `rows` rows."""
        if self.suffix == ".parquet":
            pa.parquet.write_table(table, path, row_group_size=rows)
            return
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)

    def rows(self, source: Any, **options: Any) -> list[dict[str, Any]]:
        """Returns all rows."""
        return [row for batch in self.read(source, **{"batch_size": 7, **options}) for row in as_rows(batch)]


FORMATS = {"parquet": Format(".parquet", fastpipe.read_parquet), "arrow": Format(".arrow", fastpipe.read_arrow)}


def as_rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    columns = [v.to_list() if hasattr(v, "to_list") else v.tolist() for v in batch.values()]
    return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]


def table(rows: int = 30, first: int = 0) -> pa.Table:
    """Returns a table of numbers, texts and lists, some of them null."""
    numbers = range(first, first + rows)
    return pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "t": pa.array([None if i % 7 == 3 else f"text {i}" for i in numbers], pa.string()),
            "l": pa.array([None if i % 5 == 2 else [i] * (i % 3) for i in numbers], pa.list_(pa.int32())),
        }
    )


def main(name: str, folder: str, place: str) -> None:
    """Reads every file of a folder and prints `rows`, `other rows` or the error's class for each."""
    expected = table().to_pylist()
    # fastpipe recognizes only a plain LocalFileSystem as local.
    system = None if place == "local" else pyarrow.fs.SubTreeFileSystem("/", pyarrow.fs.LocalFileSystem())
    for path in sorted(Path(folder).iterdir()):
        print(path.name, end=" ", flush=True)
        try:
            found = FORMATS[name].rows(str(path), num_threads=1, filesystem=system)
        # Files declare some sizes for which pyarrow allocates memory.
        except (fastpipe.FastpipeError, pa.ArrowMemoryError) as error:
            print(type(error).__name__, flush=True)
        else:
            print("rows" if found == expected else "other rows", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
