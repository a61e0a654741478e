"""What `fastpipe inspect` shows: files, how their schemas differ, and the features that can be read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastpipe._reader.sampling import counts_of
from fastpipe._text import clean, table
from fastpipe.cli._formats import AVRO, FileFormat
from fastpipe.errors import FastpipeError, MalformedFileError, MissingFileError, UnsupportedError
from fastpipe.sources.avro import AvroFile
from fastpipe.sources.avro._data import AvroData
from fastpipe.sources.avro._schemas import Field, schema_fields
from fastpipe.specs import Features


@dataclass
class Readable:
    """The features that can be read, and for the rest the reason why not."""

    features: Features = field(default_factory=Features)
    skipped: dict[str, str] = field(default_factory=dict)
    error: FastpipeError | None = None
    """Why nothing can be inferred."""


def infer_readable(paths: Sequence[str], format_: FileFormat = AVRO) -> Readable:
    """Infers features of files of one schema, as `infer_features` does."""
    found = Readable()
    try:
        if format_ is AVRO:
            data = AvroData.inferring(list(paths), None, None)
            found.features, found.skipped = data.features, data.left_out
        else:
            with format_.read(list(paths), batch_size=1) as reader:
                found.features = reader.features
    except FastpipeError as error:
        found.error = error
    return found


@dataclass
class FileSummary:
    """What could be read of a file, and what stopped it."""

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
        """What became of reading it, in a word or two."""
        if self.error is None:
            return "ok"
        states = {MalformedFileError: "broken", MissingFileError: "missing"}
        return states.get(type(self.error), "not read")

    @property
    def ratio(self) -> float | None:
        """Uncompressed bytes for each compressed byte."""
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


def summarise(path: str, format_: FileFormat = AVRO) -> FileSummary:
    """Reads what says how large a file is, of Avro the header, the blocks' headers and a few blocks.

    Keeps what it got if one of these fails.
    """
    summary = FileSummary(path, format_)
    with contextlib.suppress(OSError):  # Opening it says it better.
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
        summary.error = error if summary.schema is None else None  # An unknown codec is no fault of the file.
    except FastpipeError as error:
        summary.error = error
        if summary.blocks is None and summary.schema is not None:
            summary.blocks = error.block  # Those before the damage.
    return summary


def by_schema(summaries: Iterable[FileSummary]) -> list[list[FileSummary]]:
    """The files whose schema could be read, those of the same schema together, most files first.

    Schemas are the same if they differ in nothing but what doesn't change the data, such as documentation.
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
    """The fields of a schema as a table."""
    fields = schema_fields(schema)
    rows = [[clean(f.path), f.type, "yes" if f.nullable else "no", clean(" ".join(f.doc.split()))] for f in fields]
    header = ["path", "type", "nullable", "doc"]
    if not any(row[3] for row in rows):
        header, rows = header[:3], [row[:3] for row in rows]
    return table(header, rows, width)


def schema_differences(first: Any, second: Any, most: int = 5) -> list[str]:
    """How the second schema differs from the first, in a few lines."""
    old, new = ({field.path: field for field in schema_fields(schema)} for schema in (first, second))

    def only_in(some: dict[str, Field], others: dict[str, Field], verb: str) -> list[str]:
        # What is inside of a field that is missing goes without saying.
        outermost = [f for f in some.values() if f.path not in others and (not f.parent or f.parent in others)]
        return [f"{verb} {f.path}: {f.full_type}" for f in outermost]

    lines = only_in(old, new, "lacks") + only_in(new, old, "adds")
    both = [(old[path], new[path]) for path in old if path in new]
    lines += [f"has {a.path}: {b.full_type} instead of {a.full_type}" for a, b in both if a.full_type != b.full_type]
    if not lines:
        lines = ["has the same fields, in another order or with other names of types"]
    lines = lines[:most] + ([f"and {len(lines) - most} more"] if len(lines) > most else [])
    return [clean(line) for line in lines]
