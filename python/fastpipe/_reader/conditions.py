"""Conditions on the rows of Arrow record batches: expressions that are checked against features and evaluated.

pyarrow's compute functions evaluate an expression. Its types are checked before, so that errors name the feature. Arrow
rounds an integer before it compares it with a float, and fails if a constant doesn't fit the type of a column. So a
comparison of integers or times with a constant is replaced by a comparison with an integer of the column's type that
has the same result, or by a constant result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe._arrow.schema import require_pyarrow, schema_of
from fastpipe._expressions import Expr, Scalar, abridged, names_of
from fastpipe._reader.condition_numbers import as_float, computed, negative
from fastpipe._reader.condition_values import NUMBERS, Columns, Run, TypedValue, column, loader, refused
from fastpipe.errors import ValueRangeError
from fastpipe.specs import DenseSpec, Features

if TYPE_CHECKING:
    import pyarrow as pa

# For each operator: the operator with exchanged sides.
MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_COMPARING = {
    "==": "equal",
    "!=": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}
_COMPUTING = ("+", "-", "*", "/", "//", "%")
_SEARCHING = {"starts_with": "starts_with", "ends_with": "ends_with", "contains": "match_substring"}
# Values in a list, per row of a record batch, for which pyarrow searches a list faster than Python.
_FEW = 8
# Digits of any 64-bit integer.
_DIGITS = 20


class Evaluated:
    """An expression that has a value for each row.

    Args:
        expression: The expression.
        features: The features of the rows.
        what: Name of the expression, for errors.

    Raises:
        ImportError: If pyarrow isn't installed.
        SchemaError: If the expression names other features, a feature with several values per row, or values of types
            that it can't combine.
        ValueRangeError: If an integer that is computed with has more than 64 bits.
    """

    def __init__(self, expression: Expr, features: Features, what: str = "the condition") -> None:
        pa = require_pyarrow()
        self.expression, self.names = expression, names_of(expression)
        specs = Features({name: _spec(name, features, what) for name in self.names})
        schema = schema_of(specs)
        self._loaders = {name: loader(schema.field(name).type) for name in self.names}
        columns = {name: column(name, schema.field(name).type, specs[name].dtype) for name in self.names}
        self._binder = _Binder(columns)
        self._value = self._binder.bind(expression)
        # Raises the errors of pyarrow that depend only on types.
        self.values(pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema))

    def values(self, batch: pa.RecordBatch) -> Any:
        """Returns the value of each row as an Arrow array.

        Raises:
            ValueRangeError: If an integer that is computed doesn't fit into 64 bits.
        """
        pa = require_pyarrow()
        columns = {name: load(batch.column(name)) for name, load in self._loaders.items()}
        try:
            return self._value.run(columns)
        except pa.ArrowInvalid as error:
            reason = (
                f"{self._value.code} can't be computed: {error}. Integers are computed in 64 bits: multiply by 1.0 to"
                " compute floats"
            )
            raise ValueRangeError(reason, reason=reason) from error


class Condition(Evaluated):
    """An expression that is true, false or null for each row.

    Raises:
        TypeError: If the expression isn't a condition. Otherwise as for `Evaluated`.
    """

    def __init__(self, expression: Expr, features: Features) -> None:
        super().__init__(expression, features)
        if (value := self._value).kind != "bool":
            compared = "!= 0" if value.kind in NUMBERS else "== ..."
            raise TypeError(
                f"a condition is true or false for each row, but {value}: compare it, as in {value.code} {compared}"
            )

    def of_part(self, part: Expr, name: str, values: pa.Array) -> Any:
        """Returns the results of a part of the condition that names only one feature, for values of the feature."""
        return self._binder.bind(part).run({name: self._loaders[name](values)})

    def passes(self, batch: pa.RecordBatch) -> np.ndarray:
        """Returns whether the condition is true for each row, bool `[rows]`. Null counts as false.

        Raises:
            ValueRangeError: If an integer that is computed doesn't fit into 64 bits.
        """
        passed: np.ndarray = self.values(batch).fill_null(False).to_numpy(zero_copy_only=False)
        return passed


def _spec(name: str, features: Features, what: str) -> DenseSpec:
    """Returns the spec of a feature with one value per row, which an expression names."""
    if name not in features:
        import difflib  # Only this error message needs it.

        near = difflib.get_close_matches(name, features, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise refused(
            f"{what} names {name!r}, which isn't a feature of the reader{hint} Its features are"
            f" {', '.join(map(repr, features))}. columns= or features= adds others",
            name,
        )
    spec = features[name]
    if isinstance(spec, DenseSpec) and not spec.shape:
        return spec
    raise refused(
        f"{what} names {name!r}, which has several values per row ({spec!r}): use features with one value, such as"
        ' DenseSpec((), "float32")',
        name,
    )


class _Binder:
    """Checks the types of expressions, and creates functions that evaluate them.

    Args:
        columns: The columns by name.
    """

    def __init__(self, columns: Mapping[str, TypedValue]) -> None:
        import pyarrow.compute

        self._columns = columns
        self._pa = require_pyarrow()
        self._pc: Any = pyarrow.compute
        self._null = self._pa.scalar(None, self._pa.bool_())

    def bind(self, expression: Expr) -> TypedValue:
        """Returns the value of an expression."""
        op, operands = expression._op, expression._operands
        if op == "col":
            return self._columns[expression._value]
        code = f"({abridged(expression)})"
        if op in _COMPUTING:
            return computed(op, code, [self._operand(operand) for operand in operands])
        if op == "negative":
            return negative(self.bind(operands[0]), code)
        if op in _COMPARING:
            run = self._compared(op, *operands)
        elif op in ("&", "|"):
            run = self._joined(op, operands)
        else:
            run = self._tested(op, self.bind(operands[0]), expression._value)
        return TypedValue("bool", code, "bool", run)

    def _operand(self, operand: Expr) -> Any:
        return operand._value if operand._op == "literal" else self.bind(operand)

    def _tested(self, op: str, value: TypedValue, given: Any) -> Run:
        """Returns a test of one value."""
        if op == "~":
            _check_bool(value, "~")
            return lambda columns: self._pc.invert(value.run(columns))
        if op == "is_in":
            return self._in(value, given)
        if op == "is_null":
            return lambda columns: value.run(columns).is_null()
        if op == "is_not_null":
            return lambda columns: value.run(columns).is_valid()
        if op == "is_nan":
            if value.kind != "float":
                raise refused(f"is_nan() is for floats, but {value}: use is_null() for missing values")
            return lambda columns: self._pc.is_nan(value.run(columns))
        if value.kind not in ("text", "bytes"):
            raise refused(f"{op}() is for text and bytes, but {value}")
        value.check_constant(given)
        function = getattr(self._pc, _SEARCHING[op])
        return lambda columns: function(value.run(columns), given)

    def _joined(self, op: str, operands: tuple[Expr, ...]) -> Run:
        function = self._pc.and_kleene if op == "&" else self._pc.or_kleene
        runs: list[Run] = []
        for each in operands:
            if each._op == "literal":
                constant = self._pa.scalar(each._value, self._pa.bool_())
                runs.append(functools.partial(lambda constant, columns: constant, constant))
                continue
            value = self.bind(each)
            _check_bool(value, op)
            runs.append(value.run)
        return lambda columns: functools.reduce(function, (run(columns) for run in runs))

    def _compared(self, op: str, left: Expr, right: Expr) -> Run:
        if left._op == "literal":
            op, left, right = MIRRORED[op], right, left
        value, other = self.bind(left), self._operand(right)
        if not isinstance(other, TypedValue):
            value.check_constant(other)
        elif value.kind != other.kind and not {value.kind, other.kind} <= set(NUMBERS):
            raise refused(f"{value}, but {other}: compare values of one type")
        if value.kind == "bool" and op not in ("==", "!="):
            raise refused(f"{value}, which has no order: compare it with == or !=")
        if not isinstance(other, TypedValue):
            return self._with_constant(op, value, other)
        one, two = self._alike(value, other)
        function = getattr(self._pc, _COMPARING[op])
        return lambda columns: function(one(columns), two(columns))

    def _alike(self, one: TypedValue, two: TypedValue) -> tuple[Run, Run]:
        """Returns functions for two values in types that Arrow compares exactly."""
        if one.kind != two.kind and "float" in (one.kind, two.kind):
            return as_float(one), as_float(two)
        if "integer" == one.kind == two.kind and one.range != two.range:
            exact = self._pa.decimal128(_DIGITS, 0)
            return (lambda columns: one.run(columns).cast(exact)), (lambda columns: two.run(columns).cast(exact))
        if one.kind in ("datetime", "timedelta") and one.tick != two.tick:
            tick = min(one.tick, two.tick)
            return self._finer(one, tick), self._finer(two, tick)
        return one.run, two.run

    def _finer(self, value: TypedValue, tick: Fraction) -> Run:
        ratio = self._pa.scalar(int(value.tick / tick), self._pa.int64())
        return lambda columns: self._pc.multiply_checked(value.run(columns), ratio)

    def _with_constant(self, op: str, value: TypedValue, constant: Scalar) -> Run:
        """Returns a comparison with a constant."""
        if value.kind in ("float", "text", "bytes", "bool"):
            return self._with_stored(op, value, constant)
        exact = value.ticks(constant)
        if isinstance(exact, float):
            smaller = not math.isnan(exact) and op in (("<", "<=") if exact > 0 else (">", ">="))
            return self._always(value, smaller or op == "!=")
        # x < 2.5 is x < 3, and x <= 2.5 is x <= 2.
        whole = math.ceil(exact) if op in ("<", ">=") else math.floor(exact)
        low, high = value.range
        if op in ("==", "!="):
            if whole != exact or not low <= whole <= high:
                return self._always(value, op == "!=")
        elif whole > high:
            return self._always(value, op in ("<", "<="))
        elif whole < low:
            return self._always(value, op in (">", ">="))
        return self._with_stored(op, value, whole)

    def _with_stored(self, op: str, value: TypedValue, constant: Any) -> Run:
        function = getattr(self._pc, _COMPARING[op])
        scalar = self._pa.scalar(value.stored(constant), value.arrow_type())
        return lambda columns: function(value.run(columns), scalar)

    def _always(self, value: TypedValue, result: bool) -> Run:
        """Returns a function whose result is the same for all values, and null for nulls."""
        return lambda columns: self._pc.if_else(value.run(columns).is_valid(), result, self._null)

    def _in(self, value: TypedValue, constants: tuple[Scalar, ...]) -> Run:
        for constant in constants:
            value.check_constant(constant)
        in_ticks = value.kind not in ("float", "text", "bytes", "bool")
        stored = list(map(value.stored, self._whole(value, constants) if in_ticks else constants))
        kind, zero = value.arrow_type(), None
        if value.kind == "float":
            # Adding zero makes zeros positive: pyarrow's hash tables distinguish them.
            zero = self._pa.scalar(0.0, kind)
            stored = [each + 0.0 for each in stored]
        listed, as_set = self._pa.array(stored, kind), frozenset(stored)

        def found(columns: Columns) -> Any:
            array = value.run(columns)
            if len(listed) > _FEW * len(array):
                # pyarrow would make a hash table of the list for each record batch.
                plain = array.to_pylist()
                return self._pa.array([None if each is None else each in as_set for each in plain], self._null.type)
            array = array if zero is None else self._pc.add(array, zero)
            # pyarrow's result is false for nulls.
            return self._pc.if_else(array.is_valid(), self._pc.is_in(array, value_set=listed), self._null)

        return found

    @staticmethod
    def _whole(value: TypedValue, constants: tuple[Scalar, ...]) -> list[int]:
        """Returns the constants that values can be equal to, in ticks."""
        low, high = value.range
        exact = map(value.ticks, constants)
        # Floats are infinite.
        return [int(each) for each in exact if isinstance(each, Fraction) and each % 1 == 0 and low <= each <= high]


def _check_bool(value: TypedValue, op: str) -> None:
    if value.kind != "bool":
        hint = f"compare it, as in {value.code} != 0" if value.kind in NUMBERS else "compare it first"
        raise refused(f"{op} combines conditions, but {value}: {hint}")
