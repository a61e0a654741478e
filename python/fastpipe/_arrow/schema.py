"""Converts specs to an Arrow schema, and back.

The Arrow type of a feature depends only on its spec, not on the contents of a batch. So the schema of a stream is known
before its first batch, and all of its batches have the same schema.

| spec | Arrow type |
|---|---|
| `DenseSpec((), dtype)` | the primitive type; `large_string`, `large_binary` |
| `DenseSpec((2, 3), dtype)` | fixed-size lists of 2, of fixed-size lists of 3 |
| `RaggedSpec((None, 4, None, 2), dtype)` | three levels of `large_list`, of fixed-size lists of 2 |
| `DenseSpec((), dtype, scale=2)` | decimals of that scale, with the dtype's digits: `decimal128` up to scale 38 |
| `SparseSpec((5, 9), dtype)` | a struct of `large_list`s: int64 `indices0` and `indices1`, and `values` |

Each level is nullable, which is Arrow's default. It doesn't depend on `on_null`: the presence of a mask with
`on_null="mask"` depends on the files, but the schema must not.

The schema's metadata contains the specs as JSON. `features_of` restores them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from fastpipe._arguments import flag, shown
from fastpipe.errors import SchemaError, UnsupportedError
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec, Spec, spec_of

if TYPE_CHECKING:
    import pyarrow as pa

FEATURES = b"fastpipe:features"
# The column that marks rows in batches of readers with on_uneven="pad".
VALID = "valid"

_VERSION = 1
_TEXT = {"string": "large_string", "bytes": "large_binary"}
# Arrow counts the items of a fixed-size list in 32 bits.
_LARGEST_FIXED = 2**31 - 1
# Number of digits of the largest number of a dtype, and of a 128-bit decimal.
_DIGITS = {
    f"{kind}{bits}": len(str(2 ** (bits - sign)))
    for kind, sign in (("int", 1), ("uint", 0))
    for bits in (8, 16, 32, 64)
}
_MOST_DIGITS = 38


def require_pyarrow() -> Any:
    """Returns the module `pyarrow`.

    Raises:
        ImportError: If it isn't installed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError("Arrow data requires pyarrow: pip install 'fastpipe-data[arrow]'") from error
    return pyarrow


def schema_of(features: Mapping[str, Spec], *, valid: bool = False) -> pa.Schema:
    """Returns the schema of all batches with these features. Its metadata contains the specs.

    Args:
        features: Dict from name to spec, such as `reader.features`.
        valid: Whether to append the bool column `valid`, as in batches of readers with `on_uneven="pad"`. Defaults to
            False.

    Raises:
        ImportError: If pyarrow isn't installed.
        TypeError: If `features` isn't a dict from name to spec.
        ValueError: If Arrow doesn't support the name or size of a feature.

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
            raise ValueError(f"{VALID!r} is the name of a feature, but valid=True adds a column with that name")
        columns.append(pa.field(VALID, pa.bool_()))
    return pa.schema(columns, metadata=metadata)


def metadata_of(specs: Features) -> dict[str, str]:
    """Returns the schema metadata of these features, which contains the specs. Doesn't need pyarrow.

    Raises:
        ValueError: If Arrow doesn't support the name or size of a feature.
    """
    for name, spec in specs.items():
        checked_name(name)
        if spec._kind == "lookup":
            raise ValueError(f"feature {name!r}: its type depends on a file: pass reader.features")
        # A sparse shape is a limit on indices and isn't converted to a list.
        sizes = () if isinstance(spec, SparseSpec) else spec.shape
        for size in sizes:
            if size is not None and size > _LARGEST_FIXED:
                raise ValueError(
                    f"feature {name!r}: an Arrow fixed-size list must have fewer than 2**31 items; got {size}"
                )
    return {FEATURES.decode(): _encoded(specs).decode()}


def encoded_features(specs: Features) -> str:
    """Returns specs as text, without Arrow's limits on names and sizes."""
    return _encoded(specs).decode()


def decoded_features(text: str) -> Features:
    """Returns the specs that `encoded_features` wrote.

    Raises:
        SchemaError: If the text is invalid.
        UnsupportedError: If a later version of fastpipe wrote it.
    """
    return _decoded(text.encode())


def features_of(schema: pa.Schema) -> Features | None:
    """Returns the specs from the metadata of a schema that `schema_of`, `to_arrow` or a reader's stream made.

    The result has no specs for columns that were removed from the schema or renamed.

    Args:
        schema: Schema of a table, a record batch, a stream or a file.

    Returns:
        The specs, equal to those from which the schema was made. None if the schema contains none.

    Raises:
        SchemaError: If the specs can't be read.
        TypeError: If the argument isn't a `pyarrow.Schema`.
        UnsupportedError: If a later version of fastpipe wrote the specs.
    """
    pa = require_pyarrow()
    if not isinstance(schema, pa.Schema):
        raise TypeError(f"schema must be a pyarrow.Schema; got {shown(schema)}")
    text = (schema.metadata or {}).get(FEATURES)
    if text is None:
        return None
    specs = _decoded(text)
    present = set(schema.names)
    return Features({name: spec for name, spec in specs.items() if name in present})


def checked_name(name: Any) -> str:
    """Returns the name of a column after checking it.

    Raises:
        TypeError: If the name isn't a string.
        ValueError: If Arrow can't represent the name.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a column must be a string; got {shown(name)}")
    if "\0" in name or not _is_utf8(name):
        raise ValueError(
            f"Arrow doesn't support the column name {name!r}: names must be valid UTF-8 without NUL characters"
        )
    return name


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def integers_of(features: Mapping[str, Spec]) -> dict[str, pa.DataType]:
    """Returns, for each feature with a scale, the Arrow type of its column without the scale."""
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
        raise SchemaError(f"{unreadable}: they were not written by fastpipe") from error
    if version != _VERSION:
        raise UnsupportedError(
            f"{unreadable}: they have version {shown(version)}, and this version of fastpipe reads version {_VERSION}; "
            "upgrade fastpipe"
        )
    try:
        return Features({name: _spec(entry) for name, entry in stored["features"].items()})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SchemaError(f"{unreadable}: {error}") from error


def _spec(entry: dict[str, Any]) -> Spec:
    options = {name: _value(value) for name, value in entry.items()}
    return spec_of(options.pop("kind"), options.pop("shape"), options.pop("dtype"), **options)


def _plain(value: Any) -> Any:
    """Returns a value of a spec in a form that JSON supports, which has no bytes and no infinite numbers."""
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
    raise ValueError(f"unknown kind of value {kind!r}")


def written(schema: pa.Schema, columns: list[str] | None) -> Features | None:
    """Returns the specs that fastpipe stored in a schema, or None.

    Returns None if the schema contains no specs, or if they lack one of `columns`.

    Raises:
        SchemaError: If the specs can't be read.
        UnsupportedError: If a later version of fastpipe wrote the specs.
    """
    found = features_of(schema)
    return None if found is None else rewritten(found, columns)


def rewritten(features: Features, columns: list[str] | None) -> Features | None:
    """Returns the specs of a reader's batches with these features, or None if they lack one of `columns`."""
    if columns is not None and not features.keys() >= set(columns):
        return None
    chosen = features if columns is None else {name: features[name] for name in columns}
    return Features({name: _finished(spec) for name, spec in chosen.items()})


def _finished(spec: Spec) -> Spec:
    """Returns the spec of the result of a spec: fields were renamed, lists padded or counted, and nulls replaced."""
    # Arrow data has nulls for NaT, and for NaN that represents null. They are read as NaT and NaN again.
    fill = spec.fill if spec._nan_is_null else None
    nulls = "mask" if spec.on_null == "mask" else "fill" if is_time(spec) or fill is not None else "error"
    options: dict[str, Any] = {"field": None, "fill": fill, "on_null": nulls}
    if isinstance(spec, DenseSpec):
        options |= {"pad": None}
    if isinstance(spec, (DenseSpec, RaggedSpec)):
        options |= {"length": False}
    return replace(spec, **options)


def is_time(spec: Spec) -> bool:
    """Whether the values are times, which may be NaT."""
    return bool(spec.dtype.startswith(("datetime64", "timedelta64")))
