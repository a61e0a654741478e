"""The typed values in conditions: columns of Arrow record batches, and constants of their types.

Columns are converted to few types before anything is computed: integers to int64 or uint64, times to int64 in the
column's unit. Such integers count *ticks*. A constant is converted to an exact number of ticks, a fraction.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fastpipe._arrow.schema import require_pyarrow
from fastpipe._expressions import Scalar, scalar_code
from fastpipe.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

Columns: TypeAlias = "Mapping[str, pa.Array]"
Run: TypeAlias = Callable[[Columns], Any]

NUMBERS = ("integer", "float", "decimal")
INT64 = (-(2**63), 2**63 - 1)
_UINT64 = (0, 2**64 - 1)
_MOST_DIGITS_128 = 38

# For each kind of value: the constants that it can be compared with, and the advice of an error.
_CONSTANTS: dict[str, tuple[tuple[type, ...], str]] = {
    "integer": ((int, float, decimal.Decimal), "a number"),
    "float": ((int, float, decimal.Decimal), "a number"),
    "decimal": ((int, float, decimal.Decimal), "a number"),
    "bool": ((bool,), "True or False, or use {0} and ~{0} as they are"),
    "text": ((str,), 'a str, as in {0} == "text"'),
    "bytes": ((bytes,), 'bytes, as in {0} == b"text"'),
    "datetime": ((datetime.date,), "a date or datetime, as in {0} >= datetime.date(2026, 1, 1)"),
    "timedelta": ((datetime.timedelta,), "a timedelta, as in {0} < datetime.timedelta(hours=1)"),
}
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY = Fraction(86_400)
_EPOCH = datetime.datetime(1970, 1, 1)


@dataclass(frozen=True)
class TypedValue:
    """A part of an expression, whose type is known.

    Attributes:
        kind: A key of `_CONSTANTS`.
        code: The part as Python code, for messages.
        dtype: Its type, for messages.
        run: Returns its values for the columns of a record batch.
        tick: The unit of times, in seconds, or of decimals. 1 for other values.
        range: The smallest and the largest number of ticks, for integers, times and decimals.
        rounds: The dtype that constants are rounded to, for floats.
    """

    kind: str
    code: str
    dtype: str
    run: Run
    tick: Fraction = Fraction(1)
    range: tuple[int, int] = INT64
    rounds: Any = np.float64

    def __str__(self) -> str:
        return f"{self.code} is {self.dtype}"

    def check_constant(self, constant: Scalar) -> None:
        """Raises an error if values can't be compared with a constant.

        Raises:
            SchemaError: If the constant has another type.
        """
        types, advice = _CONSTANTS[self.kind]
        if not isinstance(constant, types) or (self.kind == "bool") != isinstance(constant, bool):
            kind = type(constant).__name__
            raise refused(f"{self}, but {scalar_code(constant)} is {kind}: compare it with {advice.format(self.code)}")

    def arrow_type(self) -> pa.DataType:
        """Returns the Arrow type of the values that `run` returns."""
        pa = require_pyarrow()
        if self.kind == "float":
            return pa.float64() if self.rounds == np.float64 else pa.float32()
        if self.kind == "decimal":
            digits = len(str(self.range[1]))
            return (pa.decimal128 if digits <= _MOST_DIGITS_128 else pa.decimal256)(digits, _scale(self.tick))
        kinds = {"text": pa.large_string(), "bytes": pa.large_binary(), "bool": pa.bool_()}
        return kinds.get(self.kind, pa.uint64() if self.range == _UINT64 else pa.int64())

    def stored(self, constant: Any) -> Any:
        """Returns a constant as `arrow_type` stores it. Constants of integers, times and decimals are ticks."""
        if self.kind == "float":
            return rounded(constant, self.rounds)
        if self.kind == "decimal":
            digits = tuple(map(int, str(abs(constant))))
            return decimal.Decimal((int(constant < 0), digits, -_scale(self.tick)))
        return constant

    def ticks(self, constant: Any) -> Fraction | float:
        """Returns a constant in ticks: exactly, or a float that is infinite or NaN."""
        if isinstance(constant, float) and not math.isfinite(constant):
            return constant
        if isinstance(constant, datetime.date):
            is_time = isinstance(constant, datetime.datetime)
            constant = (constant if is_time else datetime.datetime(*constant.timetuple()[:3])) - _EPOCH
        if isinstance(constant, datetime.timedelta):
            constant = Fraction(constant // datetime.timedelta(microseconds=1), 10**6)
        return Fraction(constant) / self.tick


def refused(reason: str, feature: str | None = None) -> SchemaError:
    """Creates the error of an expression that doesn't fit the features."""
    return SchemaError(reason, feature=feature, reason=reason)


def rounded(number: Any, dtype: Any) -> float:
    """Returns a number after rounding it to a float dtype."""
    try:
        found = float(number)
    except OverflowError:
        found = math.copysign(math.inf, number)
    with np.errstate(over="ignore"):
        return float(dtype(found))


def _scale(tick: Fraction) -> int:
    """Returns the number of decimal places of a tick, which is a power of ten."""
    return len(str(tick.denominator)) - 1 if tick.denominator > 1 else 1 - len(str(tick.numerator))


def loader(kind: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    """Returns a function that converts a column to one of the few types that are computed with."""
    pa = require_pyarrow()
    types = pa.types
    if types.is_integer(kind) and not types.is_uint64(kind):
        return lambda array: array.cast(pa.int64())
    if types.is_float16(kind):
        return lambda array: array.cast(pa.float32())
    if types.is_date32(kind):
        return lambda array: array.view(pa.int32()).cast(pa.int64())
    if types.is_timestamp(kind) or types.is_duration(kind):
        return lambda array: array.view(pa.int64())
    return lambda array: array


def column(name: str, kind: pa.DataType, dtype: str) -> TypedValue:
    """Returns the value of a column after `loader`.

    Args:
        name: The name of the column.
        kind: Its Arrow type before `loader`.
        dtype: The dtype of its feature.
    """
    types = require_pyarrow().types
    code = f"col({scalar_code(name)})"

    def run(columns: Columns) -> Any:
        return columns[name]

    if types.is_boolean(kind):
        return TypedValue("bool", code, dtype, run)
    if types.is_integer(kind):
        return TypedValue("integer", code, dtype, run, range=_UINT64 if types.is_uint64(kind) else INT64)
    if types.is_floating(kind):
        return TypedValue("float", code, dtype, run, rounds=np.dtype(dtype).type)
    if types.is_decimal(kind):
        largest = 10**kind.precision - 1
        shown = f"{dtype} with scale={kind.scale}"
        return TypedValue("decimal", code, shown, run, tick=Fraction(10) ** -kind.scale, range=(-largest, largest))
    if types.is_date32(kind):
        return TypedValue("datetime", code, dtype, run, tick=_DAY)
    if types.is_timestamp(kind):
        return TypedValue("datetime", code, dtype, run, tick=Fraction(1, _PER_SECOND[kind.unit]))
    if types.is_duration(kind):
        return TypedValue("timedelta", code, dtype, run, tick=Fraction(1, _PER_SECOND[kind.unit]))
    return TypedValue("text" if types.is_large_string(kind) else "bytes", code, dtype, run)
