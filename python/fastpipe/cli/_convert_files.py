"""`fastpipe convert --files`: the rows of a dataset as a directory of files, each with consecutive rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastpipe._files._atomic_write import creating
from fastpipe.errors import FastpipeError


def even_counts(rows: int, files: int) -> list[int]:
    """Returns the number of rows of each file. The counts differ by at most one."""
    return [rows * (number + 1) // files - rows * number // files for number in range(files)]


def full_counts(rows: int, most: int) -> list[int]:
    """Returns the number of rows of each file: `most` in all but the last one, and at least one file."""
    return [most] * ((rows - 1) // most) + [rows - (rows - 1) // most * most] if rows else [0]


def write_files(
    folder: str, suffix: str, counts: list[int], tables: Iterator[Any], write: Callable[[str, Iterable[Any]], int]
) -> int:
    """Writes consecutive rows to the files of a new directory, which appears once all of them are complete.

    Args:
        folder: The directory. It must not exist.
        suffix: Suffix of the files, such as ".avro".
        counts: Number of rows of each file.
        tables: All rows, as tables or record batches of pyarrow.
        write: Function that writes rows to a file and returns their number.

    Returns:
        The number of bytes of all files.
    """
    rows, size = _Rows(tables), 0
    with creating(folder) as temporary:
        for number, count in enumerate(counts):
            path = os.path.join(temporary, f"part-{number:05}-of-{len(counts):05}{suffix}")
            written = write(path, rows.take(count))
            if written != count:
                raise FastpipeError(f"internal error: file {number} has {written} instead of {count} rows")
            size += os.path.getsize(path)
        if not rows.at_end():
            raise FastpipeError(f"internal error: there are more than {sum(counts)} rows")
    return size


class _Rows:
    """Tables that are taken in parts of any number of rows."""

    def __init__(self, tables: Iterator[Any]) -> None:
        self._tables = tables
        # The remaining rows of the last table.
        self._rest: Any = None

    def take(self, rows: int) -> Iterator[Any]:
        """Yields tables with the next `rows` rows, or fewer at the end."""
        while rows:
            table = next(self._tables, None) if self._rest is None else self._rest
            if table is None:
                return
            self._rest = table.slice(rows) if table.num_rows > rows else None
            part = table.slice(0, rows)
            del table
            rows -= part.num_rows
            yield part

    def at_end(self) -> bool:
        """Returns whether no row is left."""
        return self._rest is None and not any(table.num_rows for table in self._tables)


def sized(found: Iterable[Any], rows: int) -> Iterator[Any]:
    """Regroups tables into tables of `rows` rows. The last one may have fewer."""
    import pyarrow as pa

    waiting: list[Any] = []
    count = 0
    for batch in found:
        waiting.append(batch if isinstance(batch, pa.Table) else pa.table(batch))
        count += batch.num_rows
        while count >= rows:
            whole = pa.concat_tables(waiting)
            yield whole.slice(0, rows)
            waiting, count = [whole.slice(rows)], count - rows
    if count:
        yield pa.concat_tables(waiting).combine_chunks()
