"""What `fastpipe inspect` and `fastpipe head` show: schemas, files and rows as text.

Files come from anywhere, so text out of them is shown with control characters escaped, and shortened to the terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fastpipe
from fastpipe._avro_data import AvroData
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR
from fastpipe.errors import FastpipeError
from fastpipe.specs import Features

PRIMITIVES = {
    "null": None,
    "boolean": "bool",
    "int": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "bytes": "bytes",
    "string": "string",
}
COMPLEX = ("record", "error", "enum", "fixed", "array", "map")


# --- Text ---


def clean(text: str) -> str:
    """The text with control characters escaped, so that it can't steer the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def text_width(text: str) -> int:
    """Columns that the text takes in a terminal."""
    return len(text) if text.isascii() else sum(_char_width(c) for c in text)


def _char_width(char: str) -> int:
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1


def shorten(text: str, width: int, *, keep_end: bool = False) -> str:
    """The text, cut to `width` columns with an ellipsis in the place of its end, or of its beginning if `keep_end`."""
    if text_width(text) <= width:
        return text
    kept, used = [], 0
    for char in reversed(text) if keep_end else text:
        used += _char_width(char)
        if used > width - 1:
            break
        kept.append(char)
    return "…" + "".join(reversed(kept)) if keep_end else "".join(kept) + "…"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    right: Iterable[int] = (),
    keep_end: Iterable[int] = (),
) -> str:
    """A table with aligned columns; the widest ones are shortened until it fits into `width`.

    Args:
        header: titles of the columns.
        rows: the cells.
        width: columns of the terminal.
        right: numbers of the columns to align at their right.
        keep_end: numbers of the columns of which the end is kept when they are shortened.
    """
    right, keep_end = set(right), set(keep_end)
    widths = [max(map(text_width, column)) for column in zip(header, *rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1

    def line(cells: Sequence[str]) -> str:
        out = []
        for i, (cell, columns) in enumerate(zip(cells, widths, strict=True)):
            cell = shorten(cell, columns, keep_end=i in keep_end)
            padding = " " * (columns - text_width(cell))
            out.append(padding + cell if i in right else cell + padding)
        return "  ".join(out).rstrip()

    return "\n".join([line(header), "  ".join("-" * columns for columns in widths), *map(line, rows)])


def size_text(size: float) -> str:
    """A number of bytes in decimal units."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" or size >= 99.95 else f"{size:.3g} {units[0]}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# --- Schemas ---


class Names:
    """The named types of a schema, and how to get through names, nested `type`s and unions to what stands there."""

    def __init__(self, schema: Any) -> None:
        self._types: dict[str, Any] = {}
        self._collect(schema, "")

    def _collect(self, schema: Any, namespace: str) -> None:
        if isinstance(schema, list):
            for branch in schema:
                self._collect(branch, namespace)
        elif isinstance(schema, dict):
            name = schema.get("name")
            if name and schema.get("type") in COMPLEX[:4]:
                namespace = name.rpartition(".")[0] if "." in name else schema.get("namespace") or namespace
                # Both names are kept: a reference may be short within the namespace. A clash across namespaces only
                # blurs a table.
                short = name.rpartition(".")[2]
                self._types.setdefault(short, schema)
                self._types[f"{namespace}.{short}" if namespace else short] = schema
            for inner in (schema.get("type"), schema.get("items"), schema.get("values")):
                if isinstance(inner, (dict, list)):
                    self._collect(inner, namespace)
            for inner in schema.get("fields", ()):
                self._collect(inner["type"], namespace)

    def resolve(self, schema: Any) -> Any:
        """The schema with names looked up: a dict with a `type` that is a word, or a list for a union."""
        while True:
            if isinstance(schema, str):
                if schema in PRIMITIVES:
                    return {"type": schema}
                schema = self._types.get(schema, {"type": "null", "name": schema})
            elif isinstance(schema, dict) and isinstance(schema["type"], (dict, list)):
                schema = schema["type"]
            elif isinstance(schema, dict) and schema["type"] not in PRIMITIVES and schema["type"] not in COMPLEX:
                schema = self._types.get(schema["type"], {"type": "null", "name": schema["type"]})
            else:
                return schema

    def value(self, schema: Any) -> tuple[Any, bool]:
        """What stands there apart from null, and whether null may; a union of several types stays a list."""
        schema = self.resolve(schema)
        if not isinstance(schema, list):
            return schema, schema["type"] == "null"
        branches = [branch for branch in map(self.resolve, schema) if branch != {"type": "null"}]
        nullable = len(branches) < len(schema)
        return (branches[0] if len(branches) == 1 else branches or {"type": "null"}), nullable


@dataclass(frozen=True)
class Field:
    """A line of the table of a schema."""

    path: str
    parent: str
    type: str
    nullable: bool
    doc: str
    logical: str
    """The logical type of the values, or empty."""

    @property
    def full_type(self) -> str:
        """The type, marked if null is allowed."""
        return self.type + "?" * self.nullable


def schema_fields(schema: Any) -> list[Field]:
    """The fields of a schema from the outside inwards, named as features are."""
    names = Names(schema)
    fields: list[Field] = []

    def walk(schema: Any, path: str, parent: str, doc: str, around: tuple[int, ...]) -> None:
        inner, nullable = names.value(schema)
        fields.append(Field(path, parent, type_text(names, inner, around), nullable, doc, _logical(names, inner)))
        below, prefix = inner, path
        while isinstance(below, dict) and below["type"] in ("array", "map"):
            prefix = f"{prefix}.values" if below["type"] == "map" else prefix
            below = names.value(below.get("items") or below.get("values"))[0]
        if isinstance(below, dict) and "fields" in below and id(below) not in around:
            record(below, prefix, path, (*around, id(below)))

    def record(schema: Any, prefix: str, parent: str, around: tuple[int, ...]) -> None:
        for entry in schema["fields"]:
            path = f"{prefix}.{entry['name']}" if prefix else entry["name"]
            walk(entry["type"], path, parent, str(entry.get("doc") or ""), around)

    root = names.resolve(schema)
    if "fields" in root:
        record(root, "", "", (id(root),))
    else:
        walk(schema, "value", "", "", ())
    return fields


def type_text(names: Names, schema: Any, around: tuple[int, ...] = ()) -> str:
    """An Avro type in a few words: `array<record Item>`, `long (timestamp-millis)`; `?` stands for nullable."""
    schema = names.resolve(schema)
    if isinstance(schema, list):
        inner, nullable = names.value(schema)
        if not isinstance(inner, list):
            return type_text(names, inner, around) + "?" * nullable
        return f"union<{', '.join(type_text(names, branch, around) for branch in schema)}>"
    kind, name = schema["type"], str(schema.get("name", "")).rpartition(".")[2]
    if kind in ("array", "map"):
        return f"{kind}<{type_text(names, schema.get('items') or schema.get('values') or 'null', around)}>"
    notes = []
    if "fields" in schema and id(schema) in around:
        notes.append("recursive")
    if kind == "enum":
        notes.append(plural(len(schema.get("symbols", ())), "symbol"))
    if kind == "fixed":
        notes.append(plural(schema.get("size", 0), "byte"))
    if logical := logical_text(schema):
        notes.append(logical)
    return clean(f"{kind} {name}".strip() + (f" ({', '.join(notes)})" if notes else ""))


def _logical(names: Names, schema: Any) -> str:
    """The logical type of the values below arrays and maps: `decimal(10, 2)`; empty if they have none."""
    while isinstance(schema, dict) and schema["type"] in ("array", "map"):
        schema = names.value(schema.get("items") or schema.get("values") or "null")[0]
    return logical_text(schema) if isinstance(schema, dict) else ""


def logical_text(schema: Any) -> str:
    """The logical type of a resolved schema, empty if it has none."""
    logical = schema.get("logicalType")
    if not logical:
        return ""
    digits = f"({schema.get('precision')}, {schema.get('scale', 0)})" if logical == "decimal" else ""
    return clean(f"{logical}{digits}")


@dataclass
class Readable:
    """The features that can be read, and for the rest the reason why not."""

    features: Features = field(default_factory=Features)
    notes: dict[str, str] = field(default_factory=dict)
    """Features that aren't inferred, but read as what is stored: the logical type."""
    skipped: dict[str, str] = field(default_factory=dict)
    error: FastpipeError | None = None
    """Why not all of the features can be inferred at once."""

    def code(self) -> str:
        """The features as Python code."""
        lines = repr(self.features).splitlines()
        for i, name in enumerate(self.features, start=1):
            if name in self.notes:
                lines[i] += f"  # {self.notes[name]}, as it is stored"
        return "\n".join(lines)


def infer_readable(paths: Sequence[str], schema: Any) -> Readable:
    """Infers features; where a type stands in the way, of the rest, with logical types as they are stored.

    Args:
        paths: files of one schema.
        schema: theirs.
    """
    found = Readable()
    try:
        data = AvroData.inferring(list(paths), None, None, lenient=True)
    except FastpipeError as error:
        found.error = error
        return found
    found.features, found.skipped = data.features, data.left_out
    texts = {entry.path: entry.logical for entry in schema_fields(schema)}
    for name, logical in data.stored.items():
        # Values of maps have no line of their own in the table.
        found.notes[name] = texts.get(name) or texts.get(name.removesuffix(".values")) or logical
    if found.notes or found.skipped:
        try:
            fastpipe.infer_features(list(paths))
        except FastpipeError as error:
            found.error = error
    return found


# --- Files ---


@dataclass
class FileSummary:
    """What could be read of a file, and what stopped it."""

    path: str
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
        states = {fastpipe.MalformedFileError: "broken", fastpipe.MissingFileError: "missing"}
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


def summarise(path: str) -> FileSummary:
    """Reads the header, the blocks' headers and a few blocks; keeps what it got if one of these fails."""
    summary = FileSummary(path)
    with contextlib.suppress(OSError):  # AvroFile says it better.
        summary.size = os.stat(path).st_size
    try:
        file = fastpipe.AvroFile(path)
        summary.size, summary.codec, summary.schema = file.size, file.codec, file.schema
        shown = ("avro.schema", "avro.codec")
        summary.metadata = {key: value for key, value in file.metadata.items() if key not in shown}
        summary.blocks, summary.records = len(file.blocks), file.num_records
        summary.sample = file.sample_uncompressed()
    except fastpipe.UnsupportedError as error:
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


# --- Rows ---

_EDGE = 3  # Items shown at each end of a longer array, as NumPy does.


def batch_rows(batch: dict[str, Any], symbols: dict[str, list[str]], width: int) -> list[list[str]]:
    """The rows of a batch as cells, each a line of text.

    Args:
        batch: of a reader.
        symbols: for features that are enums, their symbols.
        width: no text within a cell is much longer than this.
    """
    columns = []
    for name, node in batch.items():
        show = _scalar_text(width, symbols.get(name))
        values = node.values if isinstance(node, Masked) else node
        if isinstance(values, (Sparse, SparseCSR)):
            columns.append([_sparse_text(row, show) for row in node.to_list()])
        else:
            columns.append([_cell(node, i, show) for i in range(len(node))])
    return [list(row) for row in zip(*columns, strict=True)]


def _scalar_text(width: int, symbols: list[str] | None) -> Callable[[Any], str]:
    def show(value: Any) -> str:
        if value is None:
            return "null"
        if isinstance(value, (str, bytes)):
            # repr escapes what a terminal would obey.
            return repr(value) if len(value) <= width else f"{value[:width]!r}…"
        if isinstance(value, (bool, np.bool_)):
            return "true" if value else "false"
        if isinstance(value, (float, np.floating)):
            return f"{value:.6g}"
        return symbols[value] if symbols and 0 <= value < len(symbols) else str(value)

    return show


def _cell(node: Any, index: int, show: Callable[[Any], str]) -> str:
    """One row, or one item within a row, of any form."""
    if isinstance(node, Masked):
        flags = node.valid[index]
        if node.valid.ndim == 1:
            return _cell(node.values, index, show) if flags else "null"
        values = node.values[index]
        return _items_text(Masked(values, flags), show)
    row = node[index]
    if isinstance(row, (np.ndarray, Ragged, Masked)):
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
    """Rows as a table if they fit into the terminal, else each as a paragraph."""
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
