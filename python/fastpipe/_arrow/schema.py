"""Specs as an Arrow schema, and back.

The Arrow type of a feature follows from its spec alone, never from what a batch holds: so a stream has its schema
before its first batch, and all batches of it have the same.

| spec | Arrow type |
|---|---|
| `DenseSpec((), dtype)` | the primitive type; `large_string`, `large_binary` |
| `DenseSpec((2, 3), dtype)` | fixed-size lists of 2, of fixed-size lists of 3 |
| `RaggedSpec((None, 4, None, 2), dtype)` | three levels of `large_list`, of fixed-size lists of 2 |
| `DenseSpec((), dtype, scale=2)` | decimals of that scale, with the dtype's digits: `decimal128` up to scale 38 |
| `SparseSpec((5, 9), dtype)` | a struct of `large_list`s: int64 `indices0` and `indices1`, and `values` |

Each level is nullable, as Arrow's are by default, whatever `nulls` says: whether `nulls="mask"` makes a mask depends on
the files, and a schema must not.

The specs themselves are kept as JSON in the metadata of the schema, and `features_of` rebuilds them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from fastpipe._arguments import flag, names, shown
from fastpipe.errors import SchemaError, UnsupportedError
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec, Spec, spec_of

if TYPE_CHECKING:
    import pyarrow as pa

FEATURES = b"fastpipe:features"
# The column in which readers with uneven="pad" mark rows.
VALID = "valid"

_VERSION = 1
_TEXT = {"string": "large_string", "bytes": "large_binary"}
# Arrow counts the items of a fixed-size list in 32 bits.
_LARGEST_FIXED = 2**31 - 1
# Digits of the greatest number of a dtype, and those that a decimal of 128 bits has.
_DIGITS = {
    f"{kind}{bits}": len(str(2 ** (bits - sign)))
    for kind, sign in (("int", 1), ("uint", 0))
    for bits in (8, 16, 32, 64)
}
_MOST_DIGITS = 38


def require_pyarrow() -> Any:
    """The module `pyarrow`.

    Raises:
        ImportError: if it isn't installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("Arrow data needs pyarrow: pip install 'fastpipe-data[arrow]'") from error
    return pyarrow


def schema_of(features: Mapping[str, Spec], *, valid: bool = False) -> pa.Schema:
    """The schema of every batch of these features, with the specs in its metadata.

    Args:
        features: dict from name to spec, such as `reader.features`.
        valid: whether the bool column `valid` is behind them, as in batches of readers with `uneven="pad"`.

    Raises:
        ImportError: if pyarrow isn't installed.
        TypeError: if it is no dict from name to spec.
        ValueError: if Arrow has no such name or size.

    Example:
        >>> import fastpipe
        >>> from fastpipe._arrow import schema_of
        >>> schema_of({"items": fastpipe.RaggedSpec((None, 2), "float32")}).field("items").type
        LargeListType(large_list<item: fixed_size_list<item: float>[2]>)
    """
    pa = require_pyarrow()
    specs = Features(features)
    metadata = metadata_of(specs)
    columns = [pa.field(name, _type_of(spec)) for name, spec in specs.items()]
    if flag("valid", valid):
        if VALID in specs:
            raise ValueError(f"{VALID!r} is the name of a feature, and valid=True adds a column of that name")
        columns.append(pa.field(VALID, pa.bool_()))
    return pa.schema(columns, metadata=metadata)


def metadata_of(specs: Features) -> dict[str, str]:
    """The metadata of the schema of these features: the specs themselves. Needs no pyarrow.

    Raises:
        ValueError: if Arrow has no such name or size.
    """
    for name, spec in specs.items():
        checked_name(name)
        if spec._kind == "lookup":
            raise ValueError(f"feature {name!r}: its form follows from a file: give reader.features")
        # A sparse shape is how large an index may be, and has no lists.
        sizes = () if isinstance(spec, SparseSpec) else spec.shape
        for size in sizes:
            if size is not None and size > _LARGEST_FIXED:
                raise ValueError(f"feature {name!r}: a fixed-size list of Arrow has fewer than 2**31 items, not {size}")
    return {FEATURES.decode(): _encoded(specs).decode()}


def encoded_features(specs: Features) -> str:
    """Specs as text, without Arrow's limits of names and sizes."""
    return _encoded(specs).decode()


def decoded_features(text: str) -> Features:
    """Specs from what `encoded_features` has made.

    Raises:
        SchemaError: if it is something else.
        UnsupportedError: if a later version of fastpipe has written it.
    """
    return _decoded(text.encode())


def features_of(schema: pa.Schema) -> Features | None:
    """The specs of a schema that `schema_of` made, or that comes with data of `to_arrow` and of readers' streams.

    Columns that were taken out of the schema since have no spec in what is returned. Renamed ones count as taken out.

    Args:
        schema: of a table, a record batch, a stream or a file.

    Returns:
        The specs, equal to those that the schema was made of; None if it holds none.

    Raises:
        SchemaError: if the specs can't be read.
        TypeError: if it is no `pyarrow.Schema`.
        UnsupportedError: if a later version of fastpipe has written them.
    """
    pa = require_pyarrow()
    if not isinstance(schema, pa.Schema):
        raise TypeError(f"schema is a pyarrow.Schema, not {shown(schema)}")
    text = (schema.metadata or {}).get(FEATURES)
    if text is None:
        return None
    specs = _decoded(text)
    present = set(schema.names)
    return Features({name: spec for name, spec in specs.items() if name in present})


def checked_name(name: Any) -> str:
    """The name of a column.

    Raises:
        TypeError: if it is no string.
        ValueError: if Arrow can't pass it on whole.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a column is a string, not {shown(name)}")
    if "\0" in name or not _is_utf8(name):
        raise ValueError(f"Arrow has no column {name!r}: its names are UTF-8 without NUL characters")
    return name


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def integers_of(features: Mapping[str, Spec]) -> dict[str, pa.DataType]:
    """Of features with a scale, the type that their columns would have without it, by name."""
    return {name: _type_of(replace(spec, scale=None)) for name, spec in features.items() if spec.scale is not None}


def _value_type(spec: Spec) -> pa.DataType:
    pa = require_pyarrow()
    if spec.scale is not None:
        digits = max(_DIGITS[spec.dtype], spec.scale)
        return (pa.decimal128 if digits <= _MOST_DIGITS else pa.decimal256)(digits, spec.scale)
    text = _TEXT.get(spec.dtype)
    return pa.from_numpy_dtype(spec.dtype) if text is None else getattr(pa, text)()


def _type_of(spec: Spec) -> pa.DataType:
    pa = require_pyarrow()
    found = _value_type(spec)
    if isinstance(spec, SparseSpec):
        indices = [(f"indices{i}", pa.large_list(pa.int64())) for i in range(len(spec.shape))]
        return pa.struct([*indices, ("values", pa.large_list(found))])
    levels = max((i + 1 for i, size in enumerate(spec.shape) if size is None), default=0)
    for size in reversed(spec.shape[levels:]):
        found = pa.list_(found, size)
    for _ in range(levels):
        found = pa.large_list(found)
    return found


def _encoded(specs: Features) -> bytes:
    entries = {}
    for name, spec in specs.items():
        options = {field.name: _plain(getattr(spec, field.name)) for field in fields(spec)}
        entries[name] = {"kind": spec._kind, **options}
    return json.dumps({"version": _VERSION, "features": entries}, allow_nan=False).encode("ascii")


def _decoded(text: bytes) -> Features:
    unreadable = f"the features in the schema's metadata ({FEATURES.decode()}) can't be read"
    try:
        stored = json.loads(text)
        version = stored["version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SchemaError(f"{unreadable}: they aren't what fastpipe writes") from error
    if version != _VERSION:
        raise UnsupportedError(
            f"{unreadable}: they are of version {shown(version)}, and this fastpipe reads version {_VERSION}; "
            "a later fastpipe reads them"
        )
    try:
        return Features({name: _spec(entry) for name, entry in stored["features"].items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SchemaError(f"{unreadable}: {error}") from error


def _spec(entry: dict[str, Any]) -> Spec:
    options = {name: _value(value) for name, value in entry.items()}
    return spec_of(options.pop("kind"), options.pop("shape"), options.pop("dtype"), **options)


def _plain(value: Any) -> Any:
    """A value of a spec as JSON has it, which has no bytes and no infinite numbers."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _value(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, text),) = plain.items()
    if kind == "bytes":
        return bytes.fromhex(text)
    if kind == "float":
        return float(text)
    raise ValueError(f"no value is of kind {kind!r}")


def asked_for(
    features: Mapping[str, Spec] | None, columns: Sequence[str] | None
) -> tuple[Features | None, list[str] | None]:
    """The arguments `features` and `columns` of a reader.

    Raises:
        TypeError: if one is of the wrong type.
        ValueError: if both are given, or one is empty.
    """
    if features is not None and columns is not None:
        raise ValueError(
            "give features or columns, not both: features says the form of each, columns takes what is inferred"
        )
    wanted = None if features is None else Features(features)
    chosen = None if columns is None else names("columns", columns)
    for name, given in (("features", wanted), ("columns", chosen)):
        if given is not None and not given:
            raise ValueError(f"{name} is empty: name at least one")
    return wanted, chosen


def written(schema: pa.Schema, columns: list[str] | None) -> Features | None:
    """The specs that fastpipe wrote beside columns; None if it didn't, or if one of `columns` isn't among them.

    Raises:
        SchemaError: if they can't be read.
        UnsupportedError: if a later version of fastpipe has written them.
    """
    found = features_of(schema)
    return None if found is None else rewritten(found, columns)


def rewritten(features: Features, columns: list[str] | None) -> Features | None:
    """The specs of what a reader of these features yields; None if one of `columns` isn't among them."""
    if columns is not None and not features.keys() >= set(columns):
        return None
    chosen = features if columns is None else {name: features[name] for name in columns}
    return Features({name: _finished(spec) for name, spec in chosen.items()})


def _finished(spec: Spec) -> Spec:
    """The spec of what a spec has made: fields were renamed, lists padded or counted, and nulls replaced."""
    # Arrow data have nulls for NaT and for NaN that stands for null. They become NaT and NaN again.
    fill = spec.fill if spec._nan_is_null else None
    nulls = "mask" if spec.nulls == "mask" else "fill" if is_time(spec) or fill is not None else "error"
    options: dict[str, Any] = {"field": None, "fill": fill, "nulls": nulls}
    if isinstance(spec, DenseSpec):
        options |= {"pad": None}
    if isinstance(spec, (DenseSpec, RaggedSpec)):
        options |= {"length": False}
    return replace(spec, **options)


def is_time(spec: Spec) -> bool:
    """Whether its values are times, which may be NaT."""
    return bool(spec.dtype.startswith(("datetime64", "timedelta64")))
