"""The Arrow types and values that correspond to Avro data, and Arrow values in a comparable form."""

from __future__ import annotations

import decimal
import struct
from typing import Any

import pyarrow as pa

import oracle

WIDE = decimal.Context(prec=80)
UNITS = {"millis": "ms", "micros": "us", "nanos": "ns"}


def arrow_type(node: oracle.Type) -> pa.DataType:
    """Returns the Arrow type that corresponds to an Avro type."""
    match node.kind, node.logical:
        case "int", "date":
            return pa.date32()
        case "int", "time-millis":
            return pa.time32("ms")
        case "long", "time-micros":
            return pa.time64("us")
        case "long", logical if "timestamp" in logical:
            return pa.timestamp(UNITS[logical.rpartition("-")[2]], None if logical.startswith("local") else "UTC")
        case _, "decimal":
            return (pa.decimal128 if node.precision <= 38 else pa.decimal256)(node.precision, node.scale)
        case "fixed", "duration":
            return pa.month_day_nano_interval()
        case "fixed", _:
            return pa.binary(node.size)
        case "enum", _:
            return pa.dictionary(pa.int32(), pa.string())
        case "array", _:
            return pa.list_(arrow_type(node.parts[0]))
        case "map", _:
            return pa.map_(pa.string(), arrow_type(node.parts[0]))
        case "record", _:
            return pa.struct([(name, arrow_type(part)) for name, part in node.parts])
        case "union", _:
            return next((arrow_type(part) for part in node.parts if part.kind != "null"), pa.null())
    names = {"long": pa.int64(), "int": pa.int32(), "float": pa.float32(), "double": pa.float64()}
    return (
        names.get(node.kind)
        or {"boolean": pa.bool_(), "bytes": pa.binary()}.get(node.kind)
        or pa.type_for_alias(node.kind)
    )


def without_nullability(kind: pa.DataType) -> str:
    return str(kind).replace(" not null", "").replace("element:", "item:")


def refused(node: oracle.Type) -> bool:
    """Returns whether an Avro type has no counterpart in Arrow."""
    if node.kind == "union":
        kinds = [part.kind for part in node.parts]
        if len(kinds) > 2 or (len(kinds) == 2 and "null" not in kinds):
            return True
    if node.logical == "big-decimal" or node.kind == "recursive":
        return True
    parts = [part for _, part in node.parts] if node.kind == "record" else node.parts
    return node.kind != "enum" and any(map(refused, parts))


def stored(node: oracle.Type, value: Any) -> Any:
    """Returns a value in the form that `held` returns."""
    match node.kind, node.logical:
        case "union", _:
            return stored(node.parts[value.index], value.value)
        case _, "decimal":
            return int.from_bytes(value, "big", signed=True)
        case "fixed", "duration":
            months, days, millis = struct.unpack("<III", value)
            return (months, days, millis * 10**6)
        case "array", _:
            return [stored(node.parts[0], item) for item in value]
        case "map", _:
            return [(key, stored(node.parts[0], item)) for key, item in value.items()]
        case "record", _:
            return {name: stored(part, value[name]) for name, part in node.parts}
    return value


def held(array: pa.Array) -> list[Any]:
    """Returns the values of an array: times as stored, decimals as unscaled integers, intervals as tuples."""
    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        return held(array.dictionary_decode())
    if types.is_decimal(kind):
        return [None if value is None else int(value.scaleb(kind.scale, WIDE)) for value in array.to_pylist()]
    if types.is_temporal(kind) and not types.is_interval(kind):
        return array.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
    if types.is_interval(kind):
        return [None if value is None else tuple(value) for value in array.to_pylist()]
    if types.is_struct(kind):
        columns = {kind.field(i).name: held(array.field(i)) for i in range(kind.num_fields)}
        return [{name: columns[name][i] for name in columns} if array[i].is_valid else None for i in range(len(array))]
    if types.is_map(kind):
        pairs = list(zip(held(array.keys), held(array.items), strict=True))
    elif types.is_list(kind):
        pairs = held(array.values)
    else:
        return array.to_pylist()
    offsets = array.offsets.to_pylist()
    return [pairs[offsets[i] : offsets[i + 1]] if array[i].is_valid else None for i in range(len(array))]
