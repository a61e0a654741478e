"""Arithmetic in conditions, with the results of NumPy: `//` rounds down, and `%` has the sign of the divisor.

Integers are computed in 64 bits with checks for overflow, and an integer divided by 0 is null. Floats follow IEEE 754.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.condition_values import INT64, NUMBERS, Columns, Run, TypedValue, refused, rounded
from fastpipe.errors import ValueRangeError

_ADDING = {"+": "add", "-": "subtract", "*": "multiply"}


def number(value: TypedValue, op: str) -> TypedValue:
    """Returns a number to compute with: an int64 or a float. Decimals are converted to floats.

    Raises:
        SchemaError: If the value isn't a number.
    """
    pa = require_pyarrow()
    if value.kind not in NUMBERS:
        raise refused(f"{op} is for numbers, but {value}")
    if value.kind == "decimal":
        return replace(value, kind="float", dtype="float64", run=as_float(value))
    if value.kind == "integer" and value.range != INT64:
        return replace(value, range=INT64, run=lambda columns: value.run(columns).cast(pa.int64()))
    return value


def as_float(value: TypedValue) -> Run:
    """Returns a function for a value as float64, rounded if necessary."""
    kind = require_pyarrow().float64()
    return lambda columns: value.run(columns).cast(kind, safe=False)


def negative(value: TypedValue, code: str) -> TypedValue:
    """Returns `-value`."""
    import pyarrow.compute

    pc: Any = pyarrow.compute
    checked = number(value, "-")
    function = pc.negate_checked if checked.kind == "integer" else pc.negate
    return replace(checked, code=code, run=lambda columns: function(checked.run(columns)))


def computed(op: str, code: str, operands: list[Any]) -> TypedValue:
    """Returns the result of an operator for two numbers.

    Args:
        op: The operator.
        code: The operation as Python code.
        operands: Two operands, each a `TypedValue` or a constant. At least one is a `TypedValue`.

    Raises:
        SchemaError: If an operand isn't a number.
        ValueRangeError: If an integer constant has more than 64 bits.
    """
    pa = require_pyarrow()
    operands = [number(operand, op) if isinstance(operand, TypedValue) else operand for operand in operands]
    values = [operand for operand in operands if isinstance(operand, TypedValue)]
    constants = [operand for operand in operands if not isinstance(operand, TypedValue)]
    for constant in constants:
        values[0].check_constant(constant)
    is_integer = (
        op != "/" and all(value.kind == "integer" for value in values) and all(type(each) is int for each in constants)
    )
    rounds: Any = np.float64
    if op != "/" and all(value.kind == "float" for value in values):
        # Halves are computed as float32.
        rounds = np.result_type(*(value.rounds for value in values), np.float32).type
    kind = pa.int64() if is_integer else pa.from_numpy_dtype(rounds)

    def side(operand: Any) -> Run:
        if isinstance(operand, TypedValue):
            return lambda columns: operand.run(columns).cast(kind, safe=False)
        if is_integer and not INT64[0] <= operand <= INT64[1]:
            reason = f"{operand} doesn't fit into 64 bits, in which integers are computed: use the float {operand}.0"
            raise ValueRangeError(reason, reason=reason)
        constant = pa.scalar(operand if is_integer else rounded(operand, rounds), kind)
        return lambda columns: constant

    left, right = map(side, operands)
    function = _function(op, in_floats=not is_integer)
    dtype = "int64" if is_integer else np.dtype(rounds).name

    def run(columns: Columns) -> Any:
        return function(left(columns), right(columns))

    return TypedValue("integer" if is_integer else "float", code, dtype, run, rounds=rounds)


def _function(op: str, *, in_floats: bool) -> Callable[[Any, Any], Any]:
    import pyarrow.compute

    pc: Any = pyarrow.compute
    if op == "/":
        return lambda left, right: pc.divide(left, right)
    if op in _ADDING:
        function = getattr(pc, _ADDING[op] if in_floats else f"{_ADDING[op]}_checked")
        return lambda left, right: function(left, right)
    if in_floats:
        return functools.partial(_in_numpy, np.floor_divide if op == "//" else np.mod)
    return functools.partial(_floored, op == "//")


def _in_numpy(function: Any, left: Any, right: Any) -> Any:
    """Applies a function of NumPy to floats. pyarrow has no such function."""
    pa = require_pyarrow()
    arrays = [side for side in (left, right) if isinstance(side, pa.Array)]
    plain = [
        side.fill_null(math.nan).to_numpy(zero_copy_only=False) if isinstance(side, pa.Array) else side.as_py()
        for side in (left, right)
    ]
    nulls = functools.reduce(np.logical_or, (each.is_null().to_numpy(zero_copy_only=False) for each in arrays))
    with np.errstate(all="ignore"):
        return pa.array(function(*plain), arrays[0].type, mask=nulls)


def _floored(quotient: bool, left: Any, right: Any) -> Any:
    """Divides integers, and rounds the quotient down."""
    import pyarrow.compute

    pa = require_pyarrow()
    pc: Any = pyarrow.compute
    divisor = pc.if_else(pc.equal(right, 0), pa.scalar(None, pa.int64()), right)
    truncated = pc.divide_checked(left, divisor)
    rest = pc.subtract(left, pc.multiply(truncated, divisor))
    below = pc.and_(pc.not_equal(rest, 0), pc.less(pc.bit_wise_xor(rest, divisor), 0))
    if quotient:
        return pc.subtract(truncated, below.cast(pa.int64()))
    return pc.add(rest, pc.if_else(below, divisor, 0))
