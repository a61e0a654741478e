"""Expressions over the features of a row: the conditions of `Reader.filter`.

An expression is a tree that is built without data. `_reader/conditions.py` checks it against the features of a reader
and evaluates it.
"""

from __future__ import annotations

import datetime
import decimal
import json
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import numpy as np

from fastpipe._arguments import shown
from fastpipe._private_constructor import private_constructor
from fastpipe.errors import LimitError

Scalar: TypeAlias = (
    bool | int | float | str | bytes | datetime.date | datetime.datetime | datetime.timedelta | decimal.Decimal
)
"""A value that an expression can contain. NumPy scalars are converted."""

Closed: TypeAlias = Literal["both", "left", "right", "none"]

# Recursive functions, among them the pickle module's, handle trees of this depth.
_MOST_DEPTH = 100
# Larger numbers compare like these, but take long to convert.
_MOST_BITS, _MOST_DIGITS = 256, 400

BINARY = ("==", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/", "//", "%", "&", "|")
_MICROSECONDS = {"datetime64": "datetime64[us]", "timedelta64": "timedelta64[us]"}


class Expr:
    """An expression over the features of a row, which `fastpipe.col` and operators create. It can't be changed.

    Comparisons, `is_in` and other methods make conditions, which `&`, `|` and `~` combine. Put parentheses around the
    comparisons: `(col("age") >= 18) & (col("label") > 0)`. The names and the handling of nulls are those of polars: a
    comparison with a null is null, `null & False` is False, and `null | True` is True.

    Numbers are compared by value: an integer with a float too. The exception is a float feature, whose dtype the other
    value is rounded to, as in NumPy. NaN is not equal to any value, and it is neither less nor greater. `+`, `-`, `*`,
    `//` and `%` of integers are computed in 64 bits, and `/` in float64. An integer divided by 0 with `//` or `%` is
    null.

    Example:
        >>> from fastpipe import col
        >>> adults = (col("age") >= 18) & ~col("country").is_in(["DE", "AT"])
        >>> adults
        (col("age") >= 18) & ~col("country").is_in(["AT", "DE"])
    """

    __slots__ = ("_depth", "_op", "_operands", "_value")
    _op: str
    _operands: tuple[Expr, ...]
    _value: Any
    _depth: int

    __array_ufunc__ = None  # NumPy's scalars and arrays leave operators to this class.

    @private_constructor('fastpipe.col("name")')
    def _of(self, op: str, operands: tuple[Expr, ...] = (), value: Any = None) -> None:
        depth = 1 + max((operand._depth for operand in operands), default=0)
        if depth > _MOST_DEPTH:
            raise LimitError(
                f"an expression can be nested {_MOST_DEPTH} levels deep, and this one is deeper: use is_in([...]) in"
                " place of many comparisons, and filter() several times in place of one long condition"
            )
        for name, given in (("_op", op), ("_operands", operands), ("_value", value), ("_depth", depth)):
            object.__setattr__(self, name, given)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("an expression can't be changed: create a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("an expression can't be changed: create a new one")

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._op, self._operands, self._value)

    def __bool__(self) -> bool:
        raise TypeError(
            "an expression has no truth value before it is evaluated: use & instead of `and`, | instead of `or`, ~"
            " instead of `not`, is_in() instead of `in`, and is_between() instead of a < x < b"
        )

    __hash__ = None  # type: ignore[assignment]  # == makes an expression.

    def __eq__(self, other: object) -> Expr:  # type: ignore[override]
        return _binary("==", self, other)

    def __ne__(self, other: object) -> Expr:  # type: ignore[override]
        return _binary("!=", self, other)

    def __lt__(self, other: Any) -> Expr:
        return _binary("<", self, other)

    def __le__(self, other: Any) -> Expr:
        return _binary("<=", self, other)

    def __gt__(self, other: Any) -> Expr:
        return _binary(">", self, other)

    def __ge__(self, other: Any) -> Expr:
        return _binary(">=", self, other)

    def __add__(self, other: Any) -> Expr:
        return _binary("+", self, other)

    def __radd__(self, other: Any) -> Expr:
        return _binary("+", other, self)

    def __sub__(self, other: Any) -> Expr:
        return _binary("-", self, other)

    def __rsub__(self, other: Any) -> Expr:
        return _binary("-", other, self)

    def __mul__(self, other: Any) -> Expr:
        return _binary("*", self, other)

    def __rmul__(self, other: Any) -> Expr:
        return _binary("*", other, self)

    def __truediv__(self, other: Any) -> Expr:
        return _binary("/", self, other)

    def __rtruediv__(self, other: Any) -> Expr:
        return _binary("/", other, self)

    def __floordiv__(self, other: Any) -> Expr:
        return _binary("//", self, other)

    def __rfloordiv__(self, other: Any) -> Expr:
        return _binary("//", other, self)

    def __mod__(self, other: Any) -> Expr:
        return _binary("%", self, other)

    def __rmod__(self, other: Any) -> Expr:
        return _binary("%", other, self)

    def __neg__(self) -> Expr:
        return Expr._of("negative", (self,))

    def __and__(self, other: Any) -> Expr:
        return _joined("&", self, other)

    def __rand__(self, other: Any) -> Expr:
        return _joined("&", other, self)

    def __or__(self, other: Any) -> Expr:
        return _joined("|", self, other)

    def __ror__(self, other: Any) -> Expr:
        return _joined("|", other, self)

    def __invert__(self) -> Expr:
        return Expr._of("~", (self,))

    def is_in(self, values: Iterable[Scalar]) -> Expr:
        """Whether the value is one of `values`.

        Args:
            values: The values, in any order: a list, set, array or series. Millions are possible.

        Raises:
            TypeError: If `values` is text or not iterable, or if it contains None or a value of another type.

        Example:
            >>> from fastpipe import col
            >>> col("country").is_in(["DE", "AT", "DE"])
            col("country").is_in(["AT", "DE"])
        """
        return Expr._of("is_in", (self,), _values(values))

    def is_null(self) -> Expr:
        """Whether the value is null. Never null itself.

        Nulls are those of `fastpipe.to_arrow`: also NaT, and NaN in features with `fill=nan`. A null that the feature's
        spec replaces by another value is that value.
        """
        return Expr._of("is_null", (self,))

    def is_not_null(self) -> Expr:
        """Whether the value isn't null. See `is_null`."""
        return Expr._of("is_not_null", (self,))

    def is_nan(self) -> Expr:
        """Whether a float is NaN. Nulls stay null: see `is_null`."""
        return Expr._of("is_nan", (self,))

    def is_between(self, lower: Scalar | Expr, upper: Scalar | Expr, closed: Closed = "both") -> Expr:
        """Whether the value is between two bounds.

        Args:
            lower: The lower bound.
            upper: The upper bound.
            closed: Which bounds are included: `"both"`, `"left"`, `"right"` or `"none"`. Defaults to `"both"`.

        Raises:
            TypeError: If a bound has a type that expressions don't support.
            ValueError: If `closed` is another value.

        Example:
            >>> from fastpipe import col
            >>> col("age").is_between(18, 65, closed="left")
            (col("age") >= 18) & (col("age") < 65)
        """
        if closed not in ("both", "left", "right", "none"):
            raise ValueError(f'closed must be "both", "left", "right" or "none"; got {shown(closed)}')
        above = _binary(">=" if closed in ("both", "left") else ">", self, lower)
        return above & _binary("<=" if closed in ("both", "right") else "<", self, upper)

    def starts_with(self, prefix: str | bytes) -> Expr:
        """Whether a string starts with `prefix`."""
        return Expr._of("starts_with", (self,), _pattern("prefix", prefix))

    def ends_with(self, suffix: str | bytes) -> Expr:
        """Whether a string ends with `suffix`."""
        return Expr._of("ends_with", (self,), _pattern("suffix", suffix))

    def contains(self, pattern: str | bytes) -> Expr:
        """Whether a string contains `pattern`, which is compared literally and isn't a regular expression."""
        return Expr._of("contains", (self,), _pattern("pattern", pattern))

    def __repr__(self) -> str:
        """Returns Python code that creates this expression. Equal conditions on the same list of values look alike."""
        return _code(self, None)


def col(name: str) -> Expr:
    """Returns the value of a feature in a row, for conditions of `Reader.filter`.

    Args:
        name: The name of the feature.

    Raises:
        TypeError: If the name isn't a string.

    Example:
        >>> import fastpipe
        >>> from fastpipe import col
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["age", "label"], batch_size=256)
        >>> adults = reader.filter((col("age") >= 18) & (col("label") > 0))
        >>> adults.num_rows < reader.num_rows
        True
    """
    if not isinstance(name, str):
        raise TypeError(f"col() takes the name of a feature; got {shown(name)}")
    return Expr._of("col", (), str(name))


def names_of(expression: Expr) -> list[str]:
    """Returns the names of the features in an expression, each once."""
    return list(dict.fromkeys(_names(expression)))


def _names(expression: Expr) -> Iterator[str]:
    if expression._op == "col":
        yield expression._value
    for operand in expression._operands:
        yield from _names(operand)


def most_values(expression: Expr) -> int:
    """Returns the number of values in the longest list of an expression."""
    own = len(expression._value) if expression._op == "is_in" else 0
    return max([own, *map(most_values, expression._operands)])


def same_kind(one: Scalar, other: Scalar) -> bool:
    """Returns whether the values of a list from one value to another, in their sequence, can be compared."""
    return _place(one)[0] == _place(other)[0]


def abridged(expression: Expr, most: int = 240) -> str:
    """Returns the code of an expression for messages: few of many values, and at most `most` characters."""
    text = _code(expression, 4)
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def scalar_code(value: Scalar) -> str:
    """Returns Python code for a value."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not np.isfinite(value):
        return f'float("{value}")'
    return f"decimal.{value!r}" if isinstance(value, decimal.Decimal) else repr(value)


def _made(op: str, operands: tuple[Expr, ...], value: Any) -> Expr:
    return Expr._of(op, operands, value)


def _code(expression: Expr, most: int | None) -> str:
    """Returns Python code for an expression. At most `most` of the values of a list are shown."""
    op, operands, value = expression._op, expression._operands, expression._value
    if op == "col":
        return f"col({scalar_code(value)})"
    if op == "literal":
        return scalar_code(value)
    parts = [_code(operand, most) for operand in operands]
    inner = [
        f"({part})" if operand._op in BINARY or operand._op == "negative" else part
        for operand, part in zip(operands, parts, strict=True)
    ]
    if op in BINARY:
        return f" {op} ".join(inner)
    if op in ("~", "negative"):
        return f"{'~' if op == '~' else '-'}{inner[0]}"
    first = f"({inner[0]})" if operands[0]._op == "~" else inner[0]
    if op == "is_in":
        listed = list(map(scalar_code, value if most is None else value[:most]))
        more = [f"... {len(value) - most:,} more"] if most is not None and len(value) > most else []
        return f"{first}.is_in([{', '.join(listed + more)}])"
    return f"{first}.{op}({'' if value is None else scalar_code(value)})"


def _binary(op: str, left: Any, right: Any) -> Expr:
    return Expr._of(op, (_operand(left), _operand(right)))


def _joined(op: str, left: Any, right: Any) -> Expr:
    """Combines conditions. A chain of one operator has one level, however long it is."""
    operands: list[Expr] = []
    for given in (left, right):
        if not isinstance(given, (Expr, bool, np.bool_)):
            raise TypeError(
                f"{op} combines conditions; got {shown(given)}. Put parentheses around comparisons:"
                f' (col("a") > 0) {op} (col("b") < 5)'
            )
        operand = _operand(given)
        operands += operand._operands if operand._op == op else (operand,)
    return Expr._of(op, tuple(operands))


def _operand(value: Any) -> Expr:
    return value if isinstance(value, Expr) else Expr._of("literal", (), scalar(value))


_CONVERSIONS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (bool, bool),
    (int, operator.index),
    (float, float),
    (str, str),
    (bytes, bytes),
)


def scalar(value: Any) -> Scalar:
    """Returns a value that an expression can contain, without subclasses of types, NumPy's scalars and time zones.

    Raises:
        TypeError: If the type isn't supported.
        ValueError: If a number has too many digits, or a time has fractions of microseconds.
    """
    if value is None:
        raise TypeError("a comparison with None is null for each row: use is_null() or is_not_null()")
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return _time(value)
    if isinstance(value, np.generic):
        value = value.item()
    for kind, convert in _CONVERSIONS:
        if isinstance(value, kind):
            converted = convert(value)
            if kind is int and converted.bit_length() > _MOST_BITS:
                raise ValueError(f"an integer in an expression must have at most {_MOST_BITS} bits")
            if kind is str:
                _check_text(converted)
            return converted  # type: ignore[no-any-return]
    if isinstance(value, decimal.Decimal):
        if not value.is_finite() or max(len(value.as_tuple().digits), abs(value.adjusted())) > _MOST_DIGITS:
            raise ValueError(f"a decimal in an expression must be finite, with at most {_MOST_DIGITS} digits")
        return value
    if isinstance(value, datetime.datetime):
        return _without_zone(value)
    if isinstance(value, (datetime.date, datetime.timedelta)):
        return value
    raise TypeError(
        "an expression takes bool, int, float, str, bytes, date, datetime, timedelta, Decimal or another expression;"
        f" got {shown(value)}"
    )


def _without_zone(value: datetime.datetime) -> datetime.datetime:
    """Returns a time in UTC. Times without a zone are in UTC, as datetime64 is."""
    if getattr(value, "nanosecond", 0):
        raise ValueError(f"times in an expression must be whole microseconds; got {shown(value)}")
    # A subclass such as pandas' becomes Python's type.
    utc = value.utctimetuple() if value.tzinfo is not None else value.timetuple()
    return datetime.datetime(*utc[:6], value.microsecond)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"text in an expression must be valid Unicode; got {shown(text)}") from None


def _time(value: np.datetime64 | np.timedelta64) -> Scalar:
    """Returns a NumPy time as Python's type."""
    name = type(value).__name__
    rounded: Any = value.astype(_MICROSECONDS[name])
    if np.isnat(value):
        raise TypeError("a comparison with NaT is null for each row: use is_null() or is_not_null()")
    found = rounded.item()
    if rounded != value or not isinstance(found, (datetime.datetime, datetime.timedelta)):
        raise ValueError(f"times in an expression must be whole microseconds in the years 1 to 9999; got {value!r}")
    return found


def _pattern(name: str, pattern: Any) -> str | bytes:
    if not isinstance(pattern, (str, bytes)):
        raise TypeError(f"{name} must be text or bytes; got {shown(pattern)}")
    found = scalar(pattern)
    assert isinstance(found, (str, bytes))
    return found


def _values(values: Any) -> tuple[Scalar, ...]:
    """Returns the values of `is_in` in a fixed order, each once."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"is_in() takes a list of values; got {shown(values)}")
    if hasattr(values, "to_pylist"):  # The elements of pyarrow's arrays are objects of pyarrow.
        values = values.to_pylist()
    # A dict keeps the first of equal values: 1, 1.0 and True are equal, but not of one type.
    found = {(type(value), value): value for value in map(_value, values)}
    return tuple(sorted(found.values(), key=_place))


def _value(value: Any) -> Scalar:
    if value is None or isinstance(value, Expr):
        kind = "None" if value is None else "expressions"
        raise TypeError(
            f"is_in() takes values without {kind}: combine it with is_null() or comparisons, as in"
            ' col("x").is_in([1, 2]) | col("x").is_null()'
        )
    found = scalar(value)
    if found != found:
        raise ValueError("is_in() takes no NaN, which is not equal to any value: combine it with is_nan()")
    return found


def _place(value: Scalar) -> tuple[str, Any]:
    kind = "number" if isinstance(value, (int, float, decimal.Decimal)) else type(value).__name__
    return kind, value
