"""Specs: what a feature should look like in a batch.

A spec says shape, dtype and what happens to nulls; `fastpipe.batch` describes the forms that come out. Specs check
themselves when they are made. Whether one fits a file's schema is checked when the file is opened.
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
_TEXT = {str: "string", bytes: "bytes"}
# The digits that Arrow's widest decimals have.
_MOST_SCALE = 76
# Of NumPy's 32 (before its version 2) one is for rows. Those of ragged and sparse features are no array's, but schemas
# aren't read deeper.
_MOST_FIXED = 31
_MOST = 128


@dataclass(frozen=True, repr=False)
class Spec:
    """Base of the specs; not for use by itself."""

    shape: tuple[int | None, ...]
    dtype: Any  # A str once made; whatever numpy.dtype takes before.
    _: KW_ONLY
    nulls: Nulls = "error"
    fill: Value | None = None
    field: str | None = None
    scale: int | None = None

    _kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not self._kind:
            raise TypeError("use DenseSpec, RaggedSpec or SparseSpec")
        dtype = _dtype(self.dtype)
        self._set("dtype", dtype)
        self._set("shape", _shape(self.shape))
        _check_dimensions(self._kind, self.shape)
        if self.field is not None:
            if not isinstance(self.field, str):
                raise TypeError(f"field is the path of a field, a string, not {shown(self.field)}")
            if not self.field:
                raise ValueError("field is empty: name a field, or leave it out to take the feature's name")
            self._set("field", str(self.field))
        if self.nulls not in ("error", "mask", "fill"):
            raise ValueError(f'nulls is "error", "mask" or "fill", not {self.nulls!r}')
        if self.fill is not None:
            if self.nulls == "mask":
                raise ValueError('a fill value and nulls="mask" exclude each other')
            self._set("fill", _fit("fill", self.fill, dtype))
            self._set("nulls", "fill")
        if self.scale is not None:
            self._set("scale", _scale(self.scale, dtype))

    def __repr__(self) -> str:
        """Python code that makes this spec."""
        options = [
            f"{field.name}={_code(getattr(self, field.name))}"
            for field in fields(self)
            if field.default is not MISSING and not _same(getattr(self, field.name), field.default)
        ]
        if self.fill is not None:
            options.remove('nulls="fill"')  # The fill value says it.
        return f"fastpipe.{type(self).__name__}({', '.join([_code(self.shape), _code(self.dtype), *options])})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self._set(name, math.nan if isinstance(value, float) and math.isnan(value) else value)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def _nan_is_null(self) -> bool:
        """Whether NaN stands for a null: nulls are filled with it."""
        return isinstance(self.fill, float) and math.isnan(self.fill)

    def _lower(self) -> Lowered:
        """Gives Rust plain values.

        Kind, shape (-1 for None), dtype, nulls, fill, pad, layout, check_indices, field, length and scale.
        """
        shape = tuple(-1 if size is None else size for size in self.shape)
        layout, check = getattr(self, "layout", ""), getattr(self, "check_indices", True)
        pad, length = getattr(self, "pad", None), getattr(self, "length", False)
        return self._kind, shape, self.dtype, self.nulls, self.fill, pad, layout, check, self.field, length, self.scale

    def _lower_lookup(self) -> LoweredLookup | None:
        """Gives Rust plain values of the lookup of a spec that reads text as indices."""
        return None

    def _check_length(self) -> None:
        self._set("length", flag("length", getattr(self, "length", False)))
        if getattr(self, "length", False) and self.dtype != "int64":
            raise ValueError(f'length=True counts items: the dtype is "int64", not {self.dtype!r}')
        if getattr(self, "length", False) and self.scale is not None:
            raise ValueError("scale= is for decimals, and length=True counts items: give one of the two")


@dataclass(frozen=True, repr=False)
class DenseSpec(Spec):
    """A fixed shape: an ndarray `[n, *shape]`; `Strings` of that shape for strings and bytes.

    Args:
        shape: of one row; `()` for a scalar. Arrays must have exactly these lengths, unless `pad` is given.
        dtype: what `numpy.dtype` takes among bool, int8 to int64, uint8 to uint64, float16 to float64, and datetime64
            and timedelta64 in days (D), s, ms, us or ns; or "string" or "bytes". Values that don't fit raise
            `ValueRangeError` when they are read. Avro's numbers are read as any number but float16.
        pad: number with which shorter arrays are filled up at their end; longer ones are cut.
        nulls: "error" raises `NullValueError` at a null; "mask" wraps the values in `Masked` if the schema lets them be
            null; "fill" puts the fill value there.
        fill: value in the place of a null; giving it implies `nulls="fill"`. Without it, "fill" takes 0, False or the
            empty string; for times NaT.
        field: path of the field to read, if it isn't the feature's name. Several features may read one field:
            `{"clicks": DenseSpec((20,), "int64", pad=0), "clicks_length": DenseSpec((), "int64", field="clicks",
            length=True)}`.
        scale: values are decimals, stored as integers in units of 10**-scale: `DenseSpec((), "int64", scale=2)` reads
            12.34 as 1234. The dtype is an integer one, and a fill or pad value is in these units too. A larger scale
            than the column's multiplies, exactly; a smaller one raises `SchemaError`. Integers are decimals of scale
            0. Without it decimals become floats.
        length: True for the number of items in the array, or map, that lies below the dimensions of `shape`, instead of
            its values: `()` counts an array's items, before they are padded or cut. The dtype is "int64".

    Raises:
        ValueError: if a dimension, a dtype, or a fill or pad value can't be, or there are more than 31 dimensions, all
            that a NumPy array has beside the one for rows.
        TypeError: if one is of the wrong type.

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
            raise ValueError(f"the shape {shape} has a ragged dimension: use RaggedSpec, or a number with pad=")
        self._check_length()
        if self.pad is not None:
            if self.length:
                raise ValueError("pad fills up arrays with values, and length=True counts them: give one of the two")
            if not self.shape:
                raise ValueError("pad is for arrays, and the shape () is a scalar; fill= is for nulls")
            if self.dtype in ("string", "bytes"):
                raise ValueError(f"pad is for numbers, not for {self.dtype}: use RaggedSpec")
            self._set("pad", _fit("pad", self.pad, self.dtype))


@dataclass(frozen=True, repr=False)
class RaggedSpec(Spec):
    """Arrays of differing length: `Ragged(values, offsets)`, one within the other for each ragged dimension.

    Args:
        shape: of one row: None for a ragged dimension, a number for an exact one; at least one None. Numbers after the
            last None are dimensions of the values; a number before it is a level of `Ragged` like the others, whose
            rows all have that length.
        dtype: as for `DenseSpec`.
        nulls: as for `DenseSpec`, at each level that the schema lets be null; a null array that is filled is empty.
        fill: value in the place of a null item; giving it implies `nulls="fill"`.
        field: as for `DenseSpec`.
        scale: as for `DenseSpec`.
        length: as for `DenseSpec`: `RaggedSpec((None,), "int64", length=True)` counts the items of arrays in arrays.

    Raises:
        ValueError: if a dimension, a dtype or a fill value can't be, or there are more than 128 dimensions, or more
            than 31 behind the last None.
        TypeError: if one is of the wrong type.

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
    """Sparse arrays, read from records of index arrays and a value array: `Sparse(indices, values, dense_shape)`.

    The record has the fields `indices0`, `indices1` ... (one for each dimension; `indices` will do if there is only
    one) and `values`, all of the same length.

    Args:
        shape: of one row, without the batch dimension; None for a dimension that is as large as the batch needs
            (greatest index + 1).
        dtype: as for `DenseSpec`, of the values.
        layout: "coo", or "csr" for `SparseCSR(offsets, indices, values, dense_shape)`.
        nulls: as for `DenseSpec`; a null record that is filled has no entries.
        fill: value in the place of a null value; giving it implies `nulls="fill"`.
        check_indices: whether an index outside of the shape raises `ValueRangeError`; False trusts the file.
        field: as for `DenseSpec`, of the record.
        scale: as for `DenseSpec`, of the values.

    Raises:
        ValueError: if a dimension, a dtype, the layout or the fill value can't be, or there are more than 128
            dimensions.
        TypeError: if one is of the wrong type.

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
            raise ValueError("a sparse feature has at least one dimension: the shape is (size,) or (None,)")
        if self.layout not in ("coo", "csr"):
            raise ValueError(f'layout is "coo" or "csr", not {self.layout!r}')
        self._set("check_indices", flag("check_indices", self.check_indices))


class Features(dict[str, Spec]):
    """A dict from feature name to spec whose repr is Python code, to be pasted and changed.

    Raises:
        TypeError: if a name isn't a string, or a spec isn't a spec.
    """

    def __init__(self, features: Mapping[str, Spec] | None = None) -> None:
        given: Any = features  # Users may give anything.
        if given is not None and not isinstance(given, Mapping):
            hint = ""
            if isinstance(given, (list, tuple)) and given and all(isinstance(name, str) for name in given):
                hint = f"; columns={shown(list(given))} reads them as they are inferred"
            raise TypeError(f"features is a dict from name to spec, not {shown(given)}{hint}")
        super().__init__({} if features is None else features)
        for name, spec in self.items():
            if not isinstance(name, str):
                raise TypeError(
                    f"features is a dict from name to spec; the name of a feature is a string, not {shown(name)}"
                )
            if not isinstance(spec, Spec):
                raise TypeError(
                    f"feature {name!r}: expected a DenseSpec, RaggedSpec or SparseSpec, such as "
                    f'DenseSpec((), "float32"), not {shown(spec)}'
                )

    def __repr__(self) -> str:
        lines = "".join(f"    {_code(name)}: {spec!r},\n" for name, spec in self.items())
        return f"{{\n{lines}}}" if lines else "{}"

    def _lower(self) -> LoweredFeatures:
        """Gives Rust plain values."""
        return {name: (spec._lower(), spec._lower_lookup()) for name, spec in self.items()}


_KINDS: dict[str, type[Spec]] = {kind._kind: kind for kind in (DenseSpec, RaggedSpec, SparseSpec)}


def spec_of(kind: str, shape: Any, dtype: Any, **options: Any) -> Spec:
    """The spec whose class goes by this name in the extension module and in metadata.

    Raises:
        KeyError: if no class does.
        TypeError: as of the class.
        ValueError: as of the class.
    """
    return _KINDS[kind](shape, dtype, **options)


def inferred(columns: Iterable[Described]) -> Features:
    """The specs of columns as the extension module describes them: by name, kind, shape, dtype, nulls and scale.

    Columns that are described alike share one spec: checking tens of thousands of them would take seconds.
    """
    made: dict[tuple[Any, ...], Spec] = {}

    def spec(kind: str, shape: list[int | None], dtype: str, nulls: str, scale: int | None) -> Spec:
        key = (kind, *shape, dtype, nulls, scale)
        found = made.get(key)
        if found is None:
            found = made[key] = spec_of(kind, shape, dtype, nulls=nulls, scale=scale)
        return found

    return Features(
        {name: spec(kind, shape, dtype, nulls, scale) for name, kind, shape, dtype, nulls, scale in columns}
    )


def _dtype(dtype: Any) -> str:
    """The canonical name of a dtype."""
    if isinstance(dtype, str) and dtype in ("string", "bytes"):
        return str(dtype)
    if isinstance(dtype, type) and dtype in _TEXT:
        return _TEXT[dtype]
    among = f'one of bool, {", ".join(_NUMBERS)}, datetime64[ns] and the like, "string" or "bytes"'
    if dtype is None:
        raise TypeError(f"dtype is {among}, not None")
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        kind = ValueError if isinstance(dtype, str) else TypeError
        raise kind(f"dtype is {among}, not {dtype!r}") from error
    if found.name in ("datetime64", "timedelta64"):
        raise ValueError(f'{found.name} needs a unit: dtype "{found.name}[s]", or {", ".join(_UNITS)} in its place')
    if found.name not in _DTYPES:
        raise ValueError(f"dtype is {among}, not {found.name}")
    if not found.isnative:
        raise ValueError(f"values come in the byte order of this machine: dtype {found.name!r}, not {found.str!r}")
    return str(found.name)


def _shape(shape: Any) -> tuple[int | None, ...]:
    if not isinstance(shape, (tuple, list)):
        hint = f": write ({shape},)" if shape is None or isinstance(shape, (int, np.integer)) else ""
        raise TypeError(f"shape is a tuple, not {shape!r}{hint}")
    return tuple(None if size is None else _size(size, shape) for size in shape)


def _check_dimensions(kind: str, shape: tuple[int | None, ...]) -> None:
    fixed = 0 if kind == "sparse" else len(shape) - max((i + 1 for i, n in enumerate(shape) if n is None), default=0)
    if fixed > _MOST_FIXED:
        raise ValueError(
            f"a NumPy array has no more than {_MOST_FIXED} dimensions beside the one for rows, and the shape has "
            f"{fixed} fixed ones; RaggedSpec with None for the outer ones reads up to {_MOST} levels"
        )
    if len(shape) > _MOST:
        raise ValueError(f"a shape has at most {_MOST} dimensions, not {len(shape)}: schemas aren't read deeper")


def _size(size: Any, shape: Any) -> int:
    if isinstance(size, (bool, np.bool_)):
        raise TypeError(f"a dimension is a number or None, not {size!r} in {shape!r}")
    try:
        number = operator.index(size)
    except TypeError:
        raise TypeError(f"a dimension is a number or None, not {size!r} in {shape!r}") from None
    if not 1 <= number < 2**63:
        raise ValueError(f"a dimension is at least 1 and less than 2**63, not {number} in {shape!r}")
    return number


def _scale(scale: Any, dtype: str) -> int:
    if isinstance(scale, (bool, np.bool_)):
        raise TypeError(f"scale is a number of decimal places, not {scale!r}")
    try:
        number = operator.index(scale)
    except TypeError:
        raise TypeError(f"scale is a number of decimal places, not {shown(scale)}") from None
    if not -_MOST_SCALE <= number <= _MOST_SCALE:
        raise ValueError(f"scale is from {-_MOST_SCALE} to {_MOST_SCALE}, not {number}")
    if "int" not in dtype:
        raise ValueError(f'scale={number} stores decimals as integers: the dtype is "int64" or the like, not {dtype!r}')
    return number


def _fit(what: str, value: Any, dtype: str) -> Value:
    """The value as Python has it, if it fits the dtype; floats may be rounded to the nearest one, as NumPy does."""
    if dtype in _TIMES:
        return _fit_time(what, value, dtype)
    if isinstance(value, (np.generic, np.ndarray)) and np.ndim(value) == 0:
        value = value.item()
    if dtype in ("string", "bytes"):
        return _fit_text(what, value, dtype)
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"{what} for dtype {dtype} is a number, not {value!r}")
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
        # The one that equals itself where specs are compared.
        return math.nan
    overflows = math.isinf(stored) and not math.isinf(number)
    vanishes = stored == 0 and number != 0
    # 0.1 is never exact, and nobody minds; an integer that changes is a mistake.
    changes = isinstance(value, int) and not overflows and int(stored) != value
    if overflows or vanishes or changes:
        raise unfit
    return number


def _fit_time(what: str, value: Any, dtype: str) -> int:
    """A date, a time or a duration as the number that NumPy keeps of it."""
    if isinstance(value, (bool, float, np.bool_, np.floating)):
        raise TypeError(f"{what} for dtype {dtype} is a time or a whole number of its unit, not {value!r}")
    try:
        return int(np.array(value, dtype).astype(np.int64))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what}={value!r} doesn't fit dtype {dtype}: {error}") from None


def _fit_text(what: str, value: Any, dtype: str) -> str | bytes:
    if dtype == "bytes":
        if not isinstance(value, (bytes, bytearray)):
            raise TypeError(f"{what} for dtype bytes is bytes, not {value!r}")
        return bytes(value)
    if not isinstance(value, str):
        raise TypeError(f"{what} for dtype string is a str, not {value!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what}={value!r} can't be written as UTF-8") from error
    return value


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and value == default)


def _code(value: Any) -> str:
    """Python code for a name, a shape or an option."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if value.isprintable() else repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
