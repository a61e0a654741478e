"""The units that can contain rows that pass a condition, according to the smallest and largest values of each unit.

For each part of a condition, the results that it may have in a unit are found: true, false and null. Each one is
assumed unless the bounds exclude it. Comparisons with constants are evaluated for the bounds as for any other values,
so dtypes and rounding are those of the rows. NaN is not within the bounds of floats.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastpipe._expressions import Expr, same_kind
from fastpipe._reader.conditions import MIRRORED, Condition

if TYPE_CHECKING:
    import pyarrow as pa

_Flags = npt.NDArray[np.bool_]

# Values of a list that are looked for one by one.
_FEW = 64


class Bounds(NamedTuple):
    """What is known about the values of a feature in each unit.

    Attributes:
        low: Values that no value is less than, with the type of `schema_of`. Null if unknown.
        high: Values that no value is greater than. Null if unknown.
        nulls: Whether there may be nulls, bool `[units]`.
        values: Whether there may be other values, bool `[units]`.
    """

    low: pa.Array
    high: pa.Array
    nulls: _Flags
    values: _Flags


class _Results(NamedTuple):
    """Whether a condition may be true, false and null in some row of each unit."""

    true: _Flags
    false: _Flags
    null: _Flags


def may_pass(condition: Condition, bounds: Mapping[str, Bounds | None], units: int) -> _Flags:
    """Returns whether some row of each unit may pass a condition, bool `[units]`.

    Args:
        condition: The condition.
        bounds: The bounds of features; None if they are unknown.
        units: The number of units.
    """
    return _Possible(condition, bounds, units).of(condition.expression).true


class _Possible:
    """Finds the possible results of parts of a condition."""

    def __init__(self, condition: Condition, bounds: Mapping[str, Bounds | None], units: int) -> None:
        self._condition, self._bounds = condition, bounds
        self._all, self._none = np.ones(units, np.bool_), np.zeros(units, np.bool_)

    def of(self, expression: Expr) -> _Results:
        """Returns the possible results of a condition."""
        op, operands = expression._op, expression._operands
        if op == "literal":
            never = self._none
            return _Results(self._all, never, never) if expression._value else _Results(never, self._all, never)
        if op in ("&", "|"):
            parts = [self.of(operand) for operand in operands]
            every, some = (functools.partial(functools.reduce, join) for join in (np.logical_and, np.logical_or))
            true, false, null = ([part[i] for part in parts] for i in range(3))
            if op == "&":
                return _Results(every(true), some(false), some(null))
            return _Results(some(true), every(false), some(null))
        if op == "~":
            inner = self.of(operands[0])
            return _Results(inner.false, inner.true, inner.null)
        if op in MIRRORED:
            if operands[0]._op == "literal":
                op, operands = MIRRORED[op], operands[::-1]
            if operands[1]._op == "literal":
                return self._compared(op, operands[0], operands[1]._value)
        if op in ("is_null", "is_not_null", "is_in", "starts_with"):
            return self._tested(op, operands[0], expression._value)
        return self._anything

    @property
    def _anything(self) -> _Results:
        return _Results(self._all, self._all, self._all)

    def _known(self, value: Expr) -> Bounds | None:
        return self._bounds.get(value._value) if value._op == "col" else None

    def _compared(self, op: str, value: Expr, constant: Any) -> _Results:
        import pyarrow as pa

        known = self._known(value)
        if known is None:
            return self._anything
        if op in ("==", "!="):
            # Rows that are equal are neither less nor greater.
            least, most = self._compared(">=", value, constant), self._compared("<=", value, constant)
            equal, other = least.true & most.true, least.false | most.false
            return _Results(equal, other, least.null) if op == "==" else _Results(other, equal, least.null)
        smallest, largest = (self._results(Expr._of(op, (value, _literal(constant))), each) for each in known[:2])
        first, last = (smallest, largest) if op in ("<", "<=") else (largest, smallest)
        true, false = known.values & (first != 0), known.values & (last != 1)
        is_float = known.low.type in (pa.float32(), pa.float64())
        # A comparison with NaN is false.
        return _Results(true, known.values if is_float else false, known.nulls)

    def _results(self, test: Expr, values: pa.Array) -> npt.NDArray[np.int8]:
        """Returns 1 for each of the values that passes a test of a feature, 0 for others, and 2 for nulls."""
        import pyarrow as pa

        found = self._condition.of_part(test, test._operands[0]._value, values)
        results: npt.NDArray[np.int8] = found.cast(pa.int8()).fill_null(2).to_numpy(zero_copy_only=False)
        return results

    def _tested(self, op: str, value: Expr, given: Any) -> _Results:
        known = self._known(value)
        if known is None:
            return self._anything
        if op == "is_null":
            return _Results(known.nulls, known.values, self._none)
        if op == "is_not_null":
            return _Results(known.values, known.nulls, self._none)
        if op == "starts_with":
            # Texts with the prefix are the prefix or greater, and so is each text between two of them.
            within = self._compared(">=", value, given).true & (
                self._compared("<=", value, given).true | (self._results(value.starts_with(given), known.low) != 0)
            )
        elif len(given) <= _FEW:
            equal = (self._compared("==", value, constant).true for constant in given)
            within = functools.reduce(np.logical_or, equal, self._none)
        elif same_kind(given[0], given[-1]):  # The values are sorted.
            within = self._compared(">=", value, given[0]).true & self._compared("<=", value, given[-1]).true
        else:
            within = known.values
        return _Results(within, known.values, known.nulls)


def _literal(value: Any) -> Expr:
    return Expr._of("literal", (), value)
