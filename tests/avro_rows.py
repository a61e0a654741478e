"""The rows of an Arrow table as an Avro file must store them: an oracle built on pyarrow and Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa

from arrow_tables import is_list, item_of


class MisfitError(Exception):
    """A value that the Avro type cannot represent exactly."""


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Returns the rows, with times as the numbers that Avro stores and decimals as integers."""
    columns = {
        name: [stored(item_of(scalar), column.type) for scalar in column]
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return [{name: values[row] for name, values in columns.items()} for row in range(table.num_rows)]


def stored(value: Any, kind: pa.DataType) -> Any:
    """Returns a value as fastavro reads it without logical types."""
    if value is None:
        return None
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return stored(value, kind.value_type)
    if pa.types.is_struct(kind):
        return {field.name: stored(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return {key: stored(item, kind.item_type) for key, item in value}
    if is_list(kind) or pa.types.is_fixed_size_list(kind):
        return [stored(item, kind.value_type) for item in value]
    if kind == pa.decimal128(12, 3):
        return int(value.scaleb(3))
    if pa.types.is_float16(kind):
        return float(value)
    if kind in (pa.timestamp("s"), pa.time32("s")):
        value *= 1000
    if kind == pa.time64("ns"):
        value, rest = divmod(value, 1000)
        if rest:
            raise MisfitError
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise MisfitError
    return value


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file, read by fastavro. Use it with the fixture `plain_values`."""
    with path.open("rb") as file:
        reader = fastavro.reader(file)
        schema = reader.writer_schema
        return [_decimals(row, schema) for row in reader]


def _decimals(value: Any, schema: Any) -> Any:
    """Returns the value with decimals as integers."""
    if isinstance(schema, list):
        return None if value is None else _decimals(value, next(branch for branch in schema if branch != "null"))
    if not isinstance(schema, dict):
        return value
    if schema.get("logicalType") == "decimal":
        return int.from_bytes(value, "big", signed=True)
    if schema["type"] == "record":
        return {field["name"]: _decimals(value[field["name"]], field["type"]) for field in schema["fields"]}
    if schema["type"] == "array":
        return [_decimals(item, schema["items"]) for item in value]
    if schema["type"] == "map":
        return {key: _decimals(item, schema["values"]) for key, item in value.items()}
    return value
