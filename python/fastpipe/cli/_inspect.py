"""The output of `fastpipe inspect` and `head`.

It covers files, differences between their schemas, the features that can be read, and the rows of a batch as text.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastpipe._files._in_memory_files import opened
from fastpipe._files._remote_files import expander
from fastpipe._formats import AVRO, FileFormat
from fastpipe._reader.sampling import counts_of
from fastpipe._text import clean, shorten, table, text_width
from fastpipe.avro import AvroFile
from fastpipe.avro._reading import AvroData
from fastpipe.avro._schemas import Field, schema_fields
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.errors import FastpipeError, MalformedFileError, MissingFileError, UnsupportedError
from fastpipe.specs import Features


@dataclass
class Readable:
    """The features that can be read, and the reasons why others can't."""

    features: Features = field(default_factory=Features)
    skipped: dict[str, str] = field(default_factory=dict)
    error: FastpipeError | None = None
    """The error if no features can be inferred."""


def infer_readable(paths: Sequence[str], format_: FileFormat) -> Readable:
    """Infers the features of files with the same schema, as `infer_features` does."""
    found = Readable()
    try:
        if format_ is AVRO:
            data = AvroData.inferring(opened(list(paths), expand_path=expander(None)), None, None)
            found.features, found.skipped = data.features, data.left_out
        else:
            with format_.read(list(paths), batch_size=1) as reader:
                found.features = reader.features
    except FastpipeError as error:
        found.error = error
    return found


@dataclass
class FileSummary:
    """The metadata that could be read from a file, and the error that stopped reading."""

    path: str
    format: FileFormat = AVRO
    size: int | None = None
    codec: str | None = None
    schema: Any = None
    metadata: dict[str, bytes] = field(default_factory=dict)
    blocks: int | None = None
    records: int | None = None
    sample: tuple[int, int] | None = None
    error: FastpipeError | None = None

    @property
    def state(self) -> str:
        """The outcome of reading the file, in one or two words."""
        if self.error is None:
            return "ok"
        states = {MalformedFileError: "broken", MissingFileError: "missing"}
        return states.get(type(self.error), "not read")

    @property
    def ratio(self) -> float | None:
        """Ratio of uncompressed to compressed bytes."""
        return self.sample[1] / self.sample[0] if self.sample and self.sample[0] else None

    @property
    def bytes_per_record(self) -> float | None:
        return self.size / self.records if self.size is not None and self.records else None

    def as_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "size": self.size,
            "codec": self.codec,
            "blocks": self.blocks,
            "records": self.records,
            "bytes_per_record": self.bytes_per_record,
            "compression_ratio": self.ratio,
            "metadata": {key: value.decode("utf-8", "backslashreplace") for key, value in self.metadata.items()},
            "schema": self.schema,
            "error": None if self.error is None else {"type": type(self.error).__name__, "message": str(self.error)},
        }


def summarize(path: str, format_: FileFormat) -> FileSummary:
    """Reads the size and row count of a file. For Avro, reads the header, all block headers and a few blocks.

    If a step fails, the summary keeps the results of the earlier steps.
    """
    summary = FileSummary(path, format_)
    with contextlib.suppress(OSError):  # Opening the file gives a better message.
        summary.size = os.stat(path).st_size
    if format_ is not AVRO:
        try:
            with format_.read([path], batch_size=1) as reader:
                summary.records, summary.blocks = reader.num_rows, len(counts_of(reader))
        except FastpipeError as error:
            summary.error = error
        return summary
    try:
        file = AvroFile(path)
        summary.size, summary.codec, summary.schema = file.size, file.codec, file.schema
        shown = ("avro.schema", "avro.codec")
        summary.metadata = {key: value for key, value in file.metadata.items() if key not in shown}
        summary.blocks, summary.records = len(file.blocks), file.num_records
        summary.sample = file.sample_uncompressed()
    except UnsupportedError as error:
        summary.error = error if summary.schema is None else None  # The file isn't broken if its codec is unknown.
    except FastpipeError as error:
        summary.error = error
        if summary.blocks is None and summary.schema is not None:
            summary.blocks = error.block  # The number of blocks before the damage.
    return summary


def by_schema(summaries: Iterable[FileSummary]) -> list[list[FileSummary]]:
    """Groups files by schema, largest group first. Files whose schema couldn't be read are omitted.

    Two schemas are the same if they differ only in attributes that don't affect the data, such as documentation.
    """
    groups: dict[str, list[FileSummary]] = {}
    for summary in summaries:
        if summary.schema is not None:
            groups.setdefault(json.dumps(_strip(summary.schema), sort_keys=True), []).append(summary)
    return sorted(groups.values(), key=len, reverse=True)


_NO_DATA = ("doc", "aliases", "default", "order")


def _strip(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strip(inner) for inner in schema]
    if isinstance(schema, dict):
        return {key: _strip(value) for key, value in schema.items() if key not in _NO_DATA}
    return schema


def schema_table(schema: Any, width: int) -> str:
    """Formats the fields of a schema as a table."""
    fields = schema_fields(schema)
    rows = [[clean(f.path), f.type, "yes" if f.nullable else "no", clean(" ".join(f.doc.split()))] for f in fields]
    header = ["path", "type", "nullable", "doc"]
    if not any(row[3] for row in rows):
        header, rows = header[:3], [row[:3] for row in rows]
    return table(header, rows, width)


_MOST_DIFFERENCES = 5


def schema_differences(first: Any, second: Any) -> list[str]:
    """Describes in a few lines how the second schema differs from the first."""
    old, new = ({field.path: field for field in schema_fields(schema)} for schema in (first, second))

    def only_in(some: dict[str, Field], others: dict[str, Field], verb: str) -> list[str]:
        # If a whole field is missing, don't list the fields nested in it.
        outermost = [f for f in some.values() if f.path not in others and (not f.parent or f.parent in others)]
        return [f"{verb} {f.path}: {f.full_type}" for f in outermost]

    lines = only_in(old, new, "lacks") + only_in(new, old, "adds")
    both = [(old[path], new[path]) for path in old if path in new]
    lines += [f"has {a.path}: {b.full_type} instead of {a.full_type}" for a, b in both if a.full_type != b.full_type]
    if not lines:
        lines = ["has the same fields, but in a different order or with different type names"]
    if len(lines) > _MOST_DIFFERENCES:
        lines[_MOST_DIFFERENCES:] = [f"and {len(lines) - _MOST_DIFFERENCES} more"]
    return [clean(line) for line in lines]


_EDGE = 3  # Items to show at each end of a long array, like NumPy.


def batch_rows(batch: dict[str, Any], categories: dict[str, list[str]], width: int) -> list[list[str]]:
    """Formats the rows of a batch as cells, each one line of text.

    Args:
        batch: Batch of a reader.
        categories: Categories of features that are codes, by feature name.
        width: Approximate maximum length of a text within a cell.
    """
    columns = []
    for name, node in batch.items():
        show = _scalar_text(width, categories.get(name))
        values = node.values if isinstance(node, Masked) else node
        if isinstance(values, (Sparse, SparseCSR)):
            columns.append([_sparse_text(row, show) for row in node.to_list()])
        else:
            columns.append([_cell(node, i, show) for i in range(len(node))])
    return [list(row) for row in zip(*columns, strict=True)]


def _scalar_text(width: int, categories: list[str] | None) -> Callable[[Any], str]:
    def show(value: Any) -> str:
        if value is None:
            return "null"
        if isinstance(value, (str, bytes)):
            # repr escapes control sequences that a terminal would execute.
            return repr(value) if len(value) <= width else f"{value[:width]!r}…"
        if isinstance(value, (bool, np.bool_)):
            return "true" if value else "false"
        if isinstance(value, (float, np.floating)):
            return f"{value:.6g}"
        return categories[value] if categories and 0 <= value < len(categories) else str(value)

    return show


def _cell(node: Any, index: int, show: Callable[[Any], str]) -> str:
    """Formats one row of any array type, or one item within a row."""
    if isinstance(node, Masked):
        flags = node.valid[index]
        if node.valid.ndim == 1:
            return _cell(node.values, index, show) if flags else "null"
        values = node.values[index]
        return _items_text(Masked(values, flags), show)
    row = node[index]
    if isinstance(row, (np.ndarray, Ragged, Strings, Masked)):
        return _items_text(row, show)
    return show(row)


def _items_text(items: Any, show: Callable[[Any], str]) -> str:
    if isinstance(items, np.ndarray):
        with np.printoptions(threshold=2 * _EDGE, edgeitems=_EDGE, linewidth=10**6, formatter={"all": show}):
            return re.sub(r"\s*\n\s*", " ", np.array2string(items))
    count = len(items)
    shown = range(count) if count <= 2 * _EDGE else [*range(_EDGE), -1, *range(count - _EDGE, count)]
    return f"[{' '.join('...' if i < 0 else _cell(items, i, show) for i in shown)}]"


def _sparse_text(entries: list[Any] | None, show: Callable[[Any], str]) -> str:
    if entries is None:
        return "null"
    parts = [f"{index[0] if len(index) == 1 else index}: {show(value)}" for index, value in entries]
    if len(parts) > 2 * _EDGE:
        parts = [*parts[:_EDGE], "...", *parts[-_EDGE:]]
    return f"{{{', '.join(parts)}}}"


def rows_text(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Formats rows as a table if it fits the terminal. Otherwise, each row is a paragraph."""
    widths = [max(map(text_width, column)) for column in zip(names, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= width:
        return table(names, rows, width)
    margin = min(max(map(text_width, names)), max(width // 3, 8))
    paragraphs = []
    for i, row in enumerate(rows):
        lines = [f"record {i}"]
        for name, cell in zip(names, row, strict=True):
            name = shorten(name, margin)
            lines.append(f"  {name}{' ' * (margin - text_width(name))}  {shorten(cell, max(width - margin - 4, 8))}")
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)
