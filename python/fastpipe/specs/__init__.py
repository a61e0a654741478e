"""Specs, which define the shape, dtype and null handling of the features in a batch.

`fastpipe.batch` describes the resulting array types. A spec validates its arguments when it is created. fastpipe checks
it against the schema of a file when it opens the file.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fastpipe._arguments import flag, shown
from fastpipe._boundary import Described, Lowered, LoweredFeatures, LoweredLookup, Value

__all__ = ["DenseSpec", "Features", "RaggedSpec", "SparseSpec", "Spec"]

Nulls: TypeAlias = Literal["error", "mask", "fill"]

_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_UNITS = ("D", "s", "ms", "us", "ns")
_TIMES = tuple(f"{kind}[{unit}]" for kind in ("datetime64", "timedelta64") for unit in _UNITS)
_DTYPES = ("bool", *_NUMBERS, *_TIMES)
_NAMES = frozenset(("string", "bytes", *_DTYPES))
_TEXT = {str: "string", bytes: "bytes"}
# The maximum number of digits of Arrow's widest decimals.
_MOST_SCALE = 76
# NumPy before version 2 supports 32 dimensions, and one of them is for rows. The limit on ragged and sparse features is
# the depth to which schemas are read.
_MOST_FIXED = 31
_MOST = 128


@dataclass(frozen=True, repr=False)
class Spec:
    """Base class of all specs. Don't use it directly."""

    shape: tuple[int | None, ...]
    dtype: Any  # A str after construction; before, anything that numpy.dtype accepts.
    _: KW_ONLY
    on_null: Nulls = "error"
    fill: Value | None = None
    field: str | None = None
    scale: int | None = None

    _kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not self._kind:
            raise TypeError("Spec is abstract: use DenseSpec, RaggedSpec or SparseSpec")
        dtype = _dtype(self.dtype)
        self._set("dtype", dtype)
        self._set("shape", _shape(self.shape))
        _check_dimensions(self._kind, self.shape)
        if self.field is not None:
            if not isinstance(self.field, str):
                raise TypeError(f"field must be a string, the path of a field; got {shown(self.field)}")
            if not self.field:
                raise ValueError("field is empty: pass the path of a field, or omit it to use the feature's name")
            self._set("field", str(self.field))
        if self.on_null not in ("error", "mask", "fill"):
            raise ValueError(f'on_null must be "error", "mask" or "fill"; got {self.on_null!r}')
        if self.fill is not None:
            if self.on_null == "mask":
                raise ValueError('pass either fill= or on_null="mask", not both')
            self._set("fill", _fit("fill", self.fill, dtype))
            self._set("on_null", "fill")
        if self.scale is not None:
            self._set("scale", _scale(self.scale, dtype))

    def __repr__(self) -> str:
        """Returns Python code that creates this spec."""
        options = [
            f"{field.name}={_code(getattr(self, field.name))}"
            for field in fields(self)
            if field.default is not MISSING and not _same(getattr(self, field.name), field.default)
        ]
        if self.fill is not None:
            options.remove('on_null="fill"')  # The fill value implies it.
        return f"fastpipe.{type(self).__name__}({', '.join([_code(self.shape), _code(self.dtype), *options])})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self._set(name, math.nan if isinstance(value, float) and math.isnan(value) else value)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def _nan_is_null(self) -> bool:
        """Whether NaN represents null, because nulls are filled with it."""
        return isinstance(self.fill, float) and math.isnan(self.fill)

    def _lower(self) -> Lowered:
        """Returns plain values for Rust.

        They are the kind, shape (-1 for None), dtype, on_null, fill, pad, layout, check_indices, field, length and
        scale.
        """
        shape = tuple(-1 if size is None else size for size in self.shape)
        layout, check = getattr(self, "layout", ""), getattr(self, "check_indices", True)
        pad, length = getattr(self, "pad", None), getattr(self, "length", False)
        return (
            self._kind,
            shape,
            self.dtype,
            self.on_null,
            self.fill,
            pad,
            layout,
            check,
            self.field,
            length,
            self.scale,
        )

    def _lower_lookup(self) -> LoweredLookup | None:
        """Returns plain values for Rust that describe the lookup of a spec that reads values as indices."""
        return None

    def _check_length(self) -> None:
        self._set("length", flag("length", getattr(self, "length", False)))
        if getattr(self, "length", False) and self.dtype != "int64":
            raise ValueError(f'length=True counts items: dtype must be "int64"; got {self.dtype!r}')
        if getattr(self, "length", False) and self.scale is not None:
            raise ValueError("pass either scale= (for decimals) or length=True (counts items), not both")


@dataclass(frozen=True, repr=False)
class DenseSpec(Spec):
    """A feature with a fixed shape: an ndarray `[n, *shape]`, or `Strings` of that shape for strings and bytes.

    Args:
        shape: Shape of one row, with dimensions from 1 to 2^63 - 1; `()` for a scalar. Arrays must have exactly these
            lengths, unless `pad` is set.
        dtype: A dtype that `numpy.dtype` accepts: bool, int8 to int64, uint8 to uint64, float16 to float64, or
            datetime64 and timedelta64 in days (D), s, ms, us or ns. For text, "string" or "bytes". Reading a value that
            doesn't fit raises `ValueRangeError`. Avro numbers can be read as any number type except float16.
        pad: Number that is appended to arrays shorter than `shape`. Longer arrays are truncated. Defaults to None:
            arrays must have the exact length.
        on_null: How to read nulls. "error" raises `NullValueError`. "mask" wraps the values in `Masked` if the schema
            allows nulls. "fill" replaces nulls with the fill value. Defaults to "error".
        fill: Value that replaces nulls. Implies `on_null="fill"`. Without it, "fill" uses 0, False or the empty string,
            and NaT for times.
        field: Path of the field to read. Defaults to the feature's name. Several features may read the same field:
            `{"clicks": DenseSpec((20,), "int64", pad=0), "clicks_length": DenseSpec((), "int64", field="clicks",
            length=True)}`.
        scale: Number of decimal places, -76 to 76. Values are decimals, stored as integers in units of 10**-scale:
            `DenseSpec((), "int64", scale=2)` reads 12.34 as 1234. The dtype must be an integer type, and fill and pad
            values have the same unit. If the column has a smaller scale, its values are multiplied exactly. If it has a
            larger one, `SchemaError` is raised. Integers are decimals of scale 0. Defaults to None, which reads
            decimals as floats.
        length: Whether to read the number of items instead of their values. Counts the items of the array or map below
            the dimensions of `shape`: `()` counts the items of an array before they are padded or truncated. Requires
            dtype "int64". Defaults to False.

    Raises:
        ValueError: If a dimension, a dtype, or a fill or pad value is invalid, or if there are more than 31 dimensions
            (NumPy's limit, minus the one for rows).
        TypeError: If an argument has the wrong type.

    Example:
        >>> import fastpipe
        >>> features = {
        ...     "age": fastpipe.DenseSpec((), "int8", fill=-1),
        ...     "history": fastpipe.DenseSpec((3,), "int64", pad=0),
        ... }
        >>> batch = next(iter(fastpipe.read_avro("data/*.avro", features=features, batch_size=4)))
        >>> batch["age"].dtype, batch["age"][0], batch["history"].shape
        (dtype('int8'), np.int8(-1), (4, 3))
    """

    _: KW_ONLY
    pad: Value | None = None
    length: bool = False

    _kind: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        super().__post_init__()
        if None in self.shape:
            shape = _code(self.shape)
            raise ValueError(f"the shape {shape} has a ragged dimension: use RaggedSpec, or a fixed size with pad=")
        self._check_length()
        if self.pad is not None:
            if self.length:
                raise ValueError("pass either pad= (appends values) or length=True (counts values), not both")
            if not self.shape:
                raise ValueError("pad is for arrays, but the shape () is a scalar; for nulls use fill=")
            if self.dtype in ("string", "bytes"):
                raise ValueError(f"pad is for numbers, not for {self.dtype}: use RaggedSpec")
            self._set("pad", _fit("pad", self.pad, self.dtype))


@dataclass(frozen=True, repr=False)
class RaggedSpec(Spec):
    """A feature whose arrays differ in length: `Ragged(values, offsets)`, nested once for each ragged dimension.

    Args:
        shape: Shape of one row: None for a ragged dimension, a number for an exact one. At least one dimension must be
            None. Numbers after the last None are dimensions of the values. A number before it is a level of `Ragged`
            whose rows all have that length.
        dtype: Dtype of the items: bool, integers, floats, datetime64 or timedelta64 as for `numpy.dtype`, "string" or
            "bytes".
        on_null: How to read nulls at each level that the schema allows to be null: "error" raises `NullValueError`,
            "mask" wraps the values in `Masked`, and "fill" replaces a null array with an empty one, and null items with
            the fill value. Defaults to "error".
        fill: Value that replaces null items. Implies `on_null="fill"`.
        field: Path of the field to read. Defaults to the feature's name.
        scale: Number of decimal places, -76 to 76, to read decimals as integers in units of 10**-scale. Defaults to
            None, which reads decimals as floats.
        length: Whether to read the number of items instead of their values. `RaggedSpec((None,), "int64", length=True)`
            counts the items of arrays within arrays. Defaults to False.

    Raises:
        ValueError: If a dimension, a dtype or a fill value is invalid, or if there are more than 128 dimensions or more
            than 31 after the last None.
        TypeError: If an argument has the wrong type.

    Example:
        >>> import fastpipe
        >>> features = {"clicked_items": fastpipe.RaggedSpec((None,), "int64")}
        >>> batch = next(iter(fastpipe.read_avro("data/*.avro", features=features, batch_size=4)))
        >>> batch["clicked_items"].offsets.shape, batch["clicked_items"].values.dtype
        ((5,), dtype('int64'))
    """

    _: KW_ONLY
    length: bool = False

    _kind: ClassVar[str] = "ragged"

    def __post_init__(self) -> None:
        super().__post_init__()
        if None not in self.shape:
            raise ValueError(f"the shape {_code(self.shape)} has no ragged dimension (None): use DenseSpec")
        self._check_length()


@dataclass(frozen=True, repr=False)
class SparseSpec(Spec):
    """A feature with sparse arrays: `Sparse(indices, values, dense_shape)`.

    It is read from records of index arrays and a value array. The record has the fields `indices0`, `indices1` ... (one
    per dimension, or just `indices` for a single dimension) and `values`, all of the same length.

    Args:
        shape: Shape of one row, without the batch dimension. None stands for a dimension whose size is the largest
            index in the batch plus 1.
        dtype: Dtype of the values: bool, integers or floats, as for `numpy.dtype`.
        layout: "coo" for `Sparse`, or "csr" for `SparseCSR(offsets, indices, values, dense_shape)`. Defaults to "coo".
        on_null: How to read nulls: "error" raises `NullValueError`, "mask" wraps the values in `Masked`, and "fill"
            replaces a null record with one without entries. Defaults to "error".
        fill: Value that replaces null values. Implies `on_null="fill"`.
        check_indices: Whether an index outside of the shape raises `ValueRangeError`. False trusts the file. Defaults
            to True.
        field: Path of the record to read. Defaults to the feature's name.
        scale: Number of decimal places, -76 to 76, to read decimals as integers in units of 10**-scale. Defaults to
            None, which reads decimals as floats.

    Raises:
        ValueError: If a dimension, a dtype, the layout or the fill value is invalid, or if there are more than 128
            dimensions.
        TypeError: If an argument has the wrong type.

    Example:
        >>> import fastpipe
        >>> features = {"sparse_terms": fastpipe.SparseSpec((100_000,), "float32", layout="csr")}
        >>> batch = next(iter(fastpipe.read_avro("data/*.avro", features=features, batch_size=4)))
        >>> batch["sparse_terms"].dense_shape
        array([     4, 100000])
    """

    _: KW_ONLY
    layout: Literal["coo", "csr"] = "coo"
    check_indices: bool = True

    _kind: ClassVar[str] = "sparse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shape:
            raise ValueError("a sparse feature needs at least one dimension: use shape (size,) or (None,)")
        if self.layout not in ("coo", "csr"):
            raise ValueError(f'layout must be "coo" or "csr"; got {self.layout!r}')
        self._set("check_indices", flag("check_indices", self.check_indices))


class Features(dict[str, Spec]):
    """A dict from feature name to spec. Its repr is Python code that you can copy and edit.

    Raises:
        TypeError: If a name isn't a string, or if a value isn't a spec.
    """

    def __init__(self, features: Mapping[str, Spec] | None = None) -> None:
        given: Any = features  # Users may pass any type.
        if given is not None and not isinstance(given, Mapping):
            hint = ""
            if isinstance(given, (list, tuple)) and given and all(isinstance(name, str) for name in given):
                hint = f"; columns={shown(list(given))} reads them with inferred specs"
            raise TypeError(f"features must be a dict from name to spec; got {shown(given)}{hint}")
        super().__init__({} if features is None else features)
        for name, spec in self.items():
            if not isinstance(name, str):
                raise TypeError(
                    f"features must be a dict from name to spec, and names must be strings; got the name {shown(name)}"
                )
            if not isinstance(spec, Spec):
                raise TypeError(
                    f"feature {name!r}: expected a DenseSpec, RaggedSpec or SparseSpec, such as "
                    f'DenseSpec((), "float32"); got {shown(spec)}'
                )

    def __repr__(self) -> str:
        lines = "".join(f"    {_code(name)}: {spec!r},\n" for name, spec in self.items())
        return f"{{\n{lines}}}" if lines else "{}"

    def _lower(self) -> LoweredFeatures:
        """Returns plain values for Rust."""
        return {name: (spec._lower(), spec._lower_lookup()) for name, spec in self.items()}


_KINDS: dict[str, type[Spec]] = {kind._kind: kind for kind in (DenseSpec, RaggedSpec, SparseSpec)}


def spec_of(kind: str, shape: Any, dtype: Any, **options: Any) -> Spec:
    """Creates a spec from the name that the extension module and metadata use for its class.

    Raises:
        KeyError: If no class has this name.
        TypeError: If the class rejects the type of an argument.
        ValueError: If the class rejects a value.
    """
    return _KINDS[kind](shape, dtype, **options)


def inferred(columns: Iterable[Described]) -> Features:
    """Returns the specs of columns that the extension module describes by name, kind, shape, dtype, on_null and scale.

    Columns with the same description share one spec, because validating tens of thousands of specs would take seconds.
    """
    made: dict[tuple[Any, ...], Spec] = {}

    def spec(kind: str, shape: list[int | None], dtype: str, on_null: str, scale: int | None) -> Spec:
        key = (kind, *shape, dtype, on_null, scale)
        found = made.get(key)
        if found is None:
            found = made[key] = spec_of(kind, shape, dtype, on_null=on_null, scale=scale)
        return found

    return Features(
        {name: spec(kind, shape, dtype, on_null, scale) for name, kind, shape, dtype, on_null, scale in columns}
    )


def _dtype(dtype: Any) -> str:
    """Returns the canonical name of a dtype."""
    if isinstance(dtype, str) and dtype in _NAMES:
        # Without NumPy, which takes 15 us. A schema may have 50,000 columns.
        return str(dtype)
    if isinstance(dtype, type) and dtype in _TEXT:
        return _TEXT[dtype]
    among = f'one of bool, {", ".join(_NUMBERS)}, datetime64[ns] and the like, "string" or "bytes"'
    if dtype is None:
        raise TypeError(f"dtype must be {among}; got None")
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        kind = ValueError if isinstance(dtype, str) else TypeError
        raise kind(f"dtype must be {among}; got {dtype!r}") from error
    if found.name in ("datetime64", "timedelta64"):
        raise ValueError(f'{found.name} needs a unit: use "{found.name}[s]", or another unit ({", ".join(_UNITS)})')
    if found.name not in _DTYPES:
        raise ValueError(f"dtype must be {among}; got {found.name}")
    if not found.isnative:
        raise ValueError(f"values have the byte order of this machine: use {found.name!r} instead of {found.str!r}")
    return str(found.name)


def _shape(shape: Any) -> tuple[int | None, ...]:
    if not isinstance(shape, (tuple, list)):
        hint = f": write ({shape},)" if shape is None or isinstance(shape, (int, np.integer)) else ""
        raise TypeError(f"shape must be a tuple; got {shape!r}{hint}")
    return tuple(None if size is None else _size(size, shape) for size in shape)


def _check_dimensions(kind: str, shape: tuple[int | None, ...]) -> None:
    fixed = 0 if kind == "sparse" else len(shape) - max((i + 1 for i, n in enumerate(shape) if n is None), default=0)
    if fixed > _MOST_FIXED:
        raise ValueError(
            f"a NumPy array has at most {_MOST_FIXED} dimensions besides the one for rows, and the shape has "
            f"{fixed} fixed ones; RaggedSpec with None for the outer ones reads up to {_MOST} levels"
        )
    if len(shape) > _MOST:
        raise ValueError(f"a shape must have at most {_MOST} dimensions; got {len(shape)}. Schemas aren't read deeper")


def _size(size: Any, shape: Any) -> int:
    if isinstance(size, (bool, np.bool_)):
        raise TypeError(f"a dimension must be an integer or None; got {size!r} in {shape!r}")
    try:
        number = operator.index(size)
    except TypeError:
        raise TypeError(f"a dimension must be an integer or None; got {size!r} in {shape!r}") from None
    if not 1 <= number < 2**63:
        raise ValueError(f"a dimension must be at least 1 and less than 2**63; got {number} in {shape!r}")
    return number


def _scale(scale: Any, dtype: str) -> int:
    if isinstance(scale, (bool, np.bool_)):
        raise TypeError(f"scale must be a number of decimal places; got {scale!r}")
    try:
        number = operator.index(scale)
    except TypeError:
        raise TypeError(f"scale must be a number of decimal places; got {shown(scale)}") from None
    if not -_MOST_SCALE <= number <= _MOST_SCALE:
        raise ValueError(f"scale must be between {-_MOST_SCALE} and {_MOST_SCALE}; got {number}")
    if "int" not in dtype:
        raise ValueError(f"scale={number} stores decimals as integers: dtype must be an integer type; got {dtype!r}")
    return number


def _fit(what: str, value: Any, dtype: str) -> Value:
    """Returns the value as a Python object if it fits the dtype. Floats may be rounded, as in NumPy."""
    if dtype in _TIMES:
        return _fit_time(what, value, dtype)
    if isinstance(value, (np.generic, np.ndarray)) and np.ndim(value) == 0:
        value = value.item()
    if dtype in ("string", "bytes"):
        return _fit_text(what, value, dtype)
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"{what} for dtype {dtype} must be a number; got {value!r}")
    unfit = ValueError(f"{what}={value!r} doesn't fit dtype {dtype}")
    if dtype.startswith("float"):
        return _fit_float(value, np.dtype(dtype), unfit)
    if not math.isfinite(value) or value != int(value):
        raise unfit
    number = int(value)
    if dtype == "bool":
        if number not in (0, 1):
            raise unfit
        return bool(number)
    limits = np.iinfo(dtype)
    if not limits.min <= number <= limits.max:
        raise unfit
    return number


def _fit_float(value: float, dtype: np.dtype[Any], unfit: ValueError) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise unfit from None
    with np.errstate(over="ignore", under="ignore"):
        stored = float(dtype.type(number))
    if math.isnan(number):
        # Uses the NaN object that compares equal to itself when specs are compared.
        return math.nan
    overflows = math.isinf(stored) and not math.isinf(number)
    vanishes = stored == 0 and number != 0
    # Rounding 0.1 is expected, but an integer that changes is a mistake.
    changes = isinstance(value, int) and not overflows and int(stored) != value
    if overflows or vanishes or changes:
        raise unfit
    return number


def _fit_time(what: str, value: Any, dtype: str) -> int:
    """Returns a date, a time or a duration as the integer that NumPy stores."""
    if isinstance(value, (bool, float, np.bool_, np.floating)):
        raise TypeError(f"{what} for dtype {dtype} must be a time or a whole number of its unit; got {value!r}")
    try:
        return int(np.array(value, dtype).astype(np.int64))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what}={value!r} doesn't fit dtype {dtype}: {error}") from None


def _fit_text(what: str, value: Any, dtype: str) -> str | bytes:
    if dtype == "bytes":
        if not isinstance(value, (bytes, bytearray)):
            raise TypeError(f"{what} for dtype bytes must be bytes; got {value!r}")
        return bytes(value)
    if not isinstance(value, str):
        raise TypeError(f"{what} for dtype string must be a str; got {value!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what}={value!r} can't be written as UTF-8") from error
    return value


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and value == default)


def _code(value: Any) -> str:
    """Returns Python code for a name, a shape or an option."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if value.isprintable() else repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
