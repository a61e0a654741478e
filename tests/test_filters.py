"""Filters: expressions compared with polars and Python, and filtered readers of each source."""

from __future__ import annotations

import concurrent.futures
import datetime
import decimal
import functools
import itertools
import operator
import pickle
import warnings
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import fastpipe
from every_source import ORDERS, ROWS, Make, digests, make
from fastpipe import col
from fastpipe.errors import (
    LimitError,
    MalformedFileError,
    RowsLeftOutWarning,
    SchemaError,
    UnsupportedError,
    ValueRangeError,
)

pa = pytest.importorskip("pyarrow")
pl = pytest.importorskip("polars")

__all__ = ["make"]

# Random conditions often select no row of a small table.
pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")

COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
comparisons = st.sampled_from(list(COMPARISONS.values()))


def passing(table: Any, condition: Any, **options: Any) -> list[int]:
    """Returns the indices of the rows that pass a condition."""
    if not isinstance(table, pa.Table):
        table = pa.table(table)
    table = table.append_column("row", pa.array(range(len(table))))
    reader = fastpipe.from_arrow(table, batch_size=7, **options).filter(condition)
    found = [int(row) for batch in reader for row in batch["row"]]
    assert reader.num_rows == len(found)
    return found


# Random conditions, beside polars

DATES = st.dates(datetime.date(2019, 12, 30), datetime.date(2020, 1, 3))
TIMES = st.datetimes(datetime.datetime(2019, 12, 30), datetime.datetime(2020, 1, 3))
TEXTS = st.text("abé", max_size=3)
# Arithmetic with these floats is exact in float32.
FLOATS = st.integers(-32, 32).map(lambda number: number / 4)
VALUES = {
    "i8": (pl.Int8, st.integers(-5, 5)),
    "i64": (pl.Int64, st.integers(-5, 5)),
    "u64": (pl.UInt64, st.integers(0, 5)),
    "f32": (pl.Float32, FLOATS),
    "f64": (pl.Float64, FLOATS),
    "flag": (pl.Boolean, st.booleans()),
    "text": (pl.String, TEXTS),
    "blob": (pl.Binary, TEXTS.map(str.encode)),
    "day": (pl.Date, DATES),
    "time": (pl.Datetime("ms"), TIMES.map(lambda time: time.replace(microsecond=time.microsecond // 1000 * 1000))),
}


@st.composite
def tables(draw: st.DrawFn) -> pl.DataFrame:
    """Returns tables with nulls in each column."""
    rows = draw(st.integers(0, 20))
    columns = {
        name: pl.Series(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), dtype=kind)
        for name, (kind, values) in VALUES.items()
    }
    return pl.DataFrame(columns)


# An expression of fastpipe, and the same one of polars.
Both = tuple[Any, Any]


def integer(draw: st.DrawFn) -> Both:
    name = draw(st.sampled_from(["i8", "i64", "u64"]))
    return col(name), pl.col(name).cast(pl.Int64)


def real(draw: st.DrawFn) -> Both:
    name = draw(st.sampled_from(["f32", "f64"]))
    return col(name), pl.col(name).cast(pl.Float64)


def number(draw: st.DrawFn, depth: int) -> Both:
    """Draws a number."""
    kind = draw(st.sampled_from(["column", "integers", "floats", "quotient", "negative"])) if depth else "column"
    if kind == "column":
        return draw(st.sampled_from([integer, real]))(draw)
    if kind == "negative":
        mine, theirs = number(draw, depth - 1)
        return -mine, -theirs
    if kind == "quotient":
        (mine, theirs), by = number(draw, depth - 1), draw(st.sampled_from([-4, -0.5, 2, 8.0]))
        return mine / by, theirs / by
    if kind == "integers":
        apply = draw(st.sampled_from([operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]))
        (mine, theirs), other = integer(draw), draw(st.integers(-3, 3))
        if draw(st.booleans()):
            second, second_theirs = integer(draw)
            return apply(mine, second), apply(theirs, second_theirs)
        if draw(st.booleans()):
            return apply(other, mine), apply(pl.lit(other, pl.Int64), theirs)
        return apply(mine, other), apply(theirs, pl.lit(other, pl.Int64))
    apply = draw(st.sampled_from([operator.add, operator.sub, operator.mul]))
    (mine, theirs), (second, second_theirs) = real(draw), integer(draw)
    return apply(mine, second), apply(theirs, second_theirs)


def test_of(draw: st.DrawFn, name: str) -> Both:
    """Draws a test of a column that isn't a number."""
    compare, values = draw(comparisons), VALUES[name][1]
    if name in ("day", "time"):
        values = DATES | TIMES
    mine, theirs = col(name), pl.col(name)
    if draw(st.booleans()):
        few = draw(st.lists(VALUES[name][1], max_size=3))
        return mine.is_in(few), theirs.is_in(pl.Series(few, dtype=VALUES[name][0]).implode())
    if name in ("text", "blob") and draw(st.booleans()):
        part = draw(VALUES[name][1])
        test = draw(st.sampled_from(["starts_with", "ends_with", "contains"]))
        space = theirs.str if name == "text" else theirs.bin
        options = {"literal": True} if (name, test) == ("text", "contains") else {}
        return getattr(mine, test)(part), getattr(space, test)(part, **options)
    return compare(mine, value := draw(values)), compare(theirs, pl.lit(value))


test_of.__test__ = False  # type: ignore[attr-defined]


@st.composite
def conditions(draw: st.DrawFn, depth: int = 3) -> Both:
    """Draws conditions."""
    kinds = ["number", "numbers", "between", "in", "null", "flag", "other"]
    kind = draw(st.sampled_from([*kinds, "and", "or", "not", "not"] if depth else kinds))
    if kind in ("and", "or"):
        combine = operator.and_ if kind == "and" else operator.or_
        pairs = [draw(conditions(depth - 1)) for _ in range(draw(st.integers(2, 3)))]
        return tuple(functools.reduce(combine, side) for side in zip(*pairs, strict=True))  # type: ignore[return-value]
    if kind == "not":
        mine, theirs = draw(conditions(depth - 1))
        return ~mine, ~theirs
    if kind == "null":
        name = draw(st.sampled_from(list(VALUES)))
        if draw(st.booleans()):
            return col(name).is_null(), pl.col(name).is_null()
        return col(name).is_not_null(), pl.col(name).is_not_null()
    if kind == "flag":
        return draw(st.sampled_from([(col("flag"), pl.col("flag")), (col("flag") == False, ~pl.col("flag"))]))  # noqa: E712
    if kind == "other":
        return test_of(draw, draw(st.sampled_from(["text", "blob", "day", "time"])))
    mine, theirs = number(draw, 1)
    if kind == "between":
        low, high = draw(FLOATS), draw(st.integers(-5, 5))
        closed: Any = draw(st.sampled_from(["both", "left", "right", "none"]))
        return mine.is_between(low, high, closed), theirs.is_between(low, high, closed)
    if kind == "in":
        few = draw(st.lists(st.integers(-5, 5) | FLOATS, max_size=4))
        return mine.is_in(few), theirs.cast(pl.Float64).is_in(pl.Series(few, dtype=pl.Float64).implode())
    compare = draw(comparisons)
    if kind == "numbers":
        second, second_theirs = number(draw, 1)
        return compare(mine, second), compare(theirs, second_theirs)
    value = draw(st.integers(-6, 6) | FLOATS)
    return compare(mine, value), compare(theirs, value)


@settings(max_examples=settings().max_examples * 2)
@given(tables(), conditions())
def test_the_same_rows_pass_as_in_polars(table: pl.DataFrame, both: Both) -> None:
    mine, theirs = both
    expected = table.with_row_index().filter(theirs)["index"].to_list()
    assert passing(table.to_arrow(), mine) == expected
    again = eval(repr(mine), {"col": col, "datetime": datetime})
    assert repr(again) == repr(mine) == repr(pickle.loads(pickle.dumps(mine)))
    if len(table):
        assert passing(table.to_arrow(), again) == expected


TRUTHS = pl.DataFrame(itertools.product([True, False, None], repeat=3), schema=["a", "b", "c"], orient="row")


@st.composite
def truths(draw: st.DrawFn, depth: int = 4) -> Both:
    """Draws conditions on three bools."""
    kind = draw(st.sampled_from(["column", "and", "or", "not"])) if depth else "column"
    if kind == "column":
        name = draw(st.sampled_from("abc"))
        return col(name), pl.col(name)
    if kind == "not":
        mine, theirs = draw(truths(depth - 1))
        return ~mine, ~theirs
    (one, one_theirs), (two, two_theirs) = draw(truths(depth - 1)), draw(truths(depth - 1))
    return (one & two, one_theirs & two_theirs) if kind == "and" else (one | two, one_theirs | two_theirs)


@given(truths())
def test_nulls_are_neither_true_nor_false(both: Both) -> None:
    mine, theirs = both
    for test in (lambda truth: truth, operator.invert, lambda truth: truth.is_null()):
        assert passing(TRUTHS.to_arrow(), test(mine)) == TRUTHS.with_row_index().filter(test(theirs))["index"].to_list()


@pytest.mark.parametrize("apply", [operator.floordiv, operator.mod, operator.add, operator.sub, operator.mul])
def test_integers_are_computed_as_in_python(apply: Any) -> None:
    pairs = [(a, b) for a in range(-7, 8) for b in range(-4, 5)]
    table = pa.table({"a": [*(a for a, _ in pairs), None], "b": [*(b for _, b in pairs), 1]})
    divides = apply in (operator.floordiv, operator.mod)
    results = [None if divides and b == 0 else apply(a, b) for a, b in pairs]
    for value in range(-8, 9):
        equal = [i for i, result in enumerate(results) if result == value]
        assert passing(table, apply(col("a"), col("b")) == value) == equal
        expected = [i for i in equal if pairs[i][1] == 3]
        assert passing(table, (apply(col("a"), 3) == value) & (col("b") == 3)) == expected
        expected = [i for i in equal if pairs[i][0] == -5]
        assert passing(table, (apply(-5, col("b")) == value) & (col("a") == -5)) == expected
    missing = [i for i, result in enumerate(results) if result is None]
    assert passing(table, apply(col("a"), col("b")).is_null()) == [*missing, len(pairs)]


@pytest.mark.parametrize("closed", ["both", "left", "right", "none"])
def test_bounds_are_closed_as_in_polars(closed: Any) -> None:
    table = pl.DataFrame({"x": [0, 1, 2, 3, 4, None], "low": [1, 1, 1, 2, 4, 0]})
    for low, high in ((1, 3), (3, 1), (1.5, 3.5), (2, 2)):
        theirs = table.with_row_index().filter(pl.col("x").is_between(low, high, closed))["index"].to_list()
        assert passing(table.to_arrow(), col("x").is_between(low, high, closed)) == theirs
    theirs = table.with_row_index().filter(pl.col("x").is_between(pl.col("low"), 4, closed))["index"].to_list()
    assert passing(table.to_arrow(), col("x").is_between(col("low"), 4, closed)) == theirs


# Constants, beside Python's exact comparisons

EXTREMES = [-(2**63), 1 - 2**63, -(2**53) - 1, -1, 0, 1, 2**53 - 1, 2**53 + 1, 2**63 - 2, 2**63 - 1]
UNSIGNED = [0, 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
CONSTANTS = (
    st.sampled_from([*EXTREMES, *UNSIGNED, -(2**64), 2**64, 2**100, 0.0, -0.0, 0.5, float("nan")])
    | st.sampled_from([2.0**53, 2.0**63, -(2.0**63), 2.0**64, 1e300, float("inf"), -float("inf"), -0.5])
    | st.sampled_from([decimal.Decimal(2**63), decimal.Decimal("-0.5"), decimal.Decimal(2**53 + 1), decimal.Decimal(1)])
)


@given(comparisons, CONSTANTS)
def test_integers_are_compared_exactly(compare: Any, constant: Any) -> None:
    for kind, values in (("int64", EXTREMES), ("uint64", UNSIGNED), ("int8", [-128, -1, 0, 1, 127])):
        table = {"x": pa.array([*values, None], kind)}
        expected = [i for i, value in enumerate(values) if compare(value, constant)]
        assert passing(table, compare(col("x"), constant)) == expected
        assert passing(table, compare(constant, col("x"))) == [
            i for i, value in enumerate(values) if compare(constant, value)
        ]
        # The complement passes too, except for the null.
        assert passing(table, ~compare(col("x"), constant)) == sorted(set(range(len(values))) - set(expected))
        if constant == constant:
            equal = [i for i, value in enumerate(values) if value == constant]
            assert passing(table, col("x").is_in([constant])) == equal


@given(comparisons, st.sampled_from([0.1, 0.0, -0.0, 65504, 1e6, float("nan"), float("inf"), 2**24 + 1, 2**200]))
def test_floats_are_compared_as_in_numpy(compare: Any, constant: Any) -> None:
    values = [0.1, 0.0, -0.0, -1.5, 65504.0, float("inf"), -float("inf"), float("nan"), 2.0**24]
    for kind in ("float16", "float32", "float64"):
        with np.errstate(over="ignore"):
            array, scalar = np.array(values, kind), np.dtype(kind).type(float(constant))
        table = {"x": pa.array(array)}
        assert passing(table, compare(col("x"), constant)) == np.flatnonzero(compare(array, scalar)).tolist()
        if constant == constant:
            assert passing(table, col("x").is_in([constant])) == np.flatnonzero(array == scalar).tolist()


def test_nan_is_not_null() -> None:
    values = np.array([0.5, -0.0, float("nan")])
    for kind in ("float16", "float32", "float64"):
        table = {"x": pa.array(values.astype(kind))}
        assert passing(table, col("x").is_nan()) == [2]
        assert passing(table, col("x").is_null()) == []
        assert passing(table, col("x") == col("x")) == [0, 1]
        assert passing(table, ~(col("x") >= col("x"))) == [2]


@given(st.sampled_from(["//", "%"]), st.sampled_from([-2.5, 0.0, 0.75, float("inf"), float("nan")]))
def test_floats_are_divided_as_in_numpy(op: str, divisor: float) -> None:
    values = np.array([-7.25, -0.0, 0.0, 3.5, float("inf"), float("nan"), 1e300])
    apply: Any = operator.floordiv if op == "//" else operator.mod
    with np.errstate(all="ignore"):
        quotients = apply(values, divisor)
    assert passing({"x": values}, apply(col("x"), divisor) >= 0) == np.flatnonzero(quotients >= 0).tolist()
    assert passing({"x": values}, apply(col("x"), divisor).is_nan()) == np.flatnonzero(np.isnan(quotients)).tolist()
    assert passing({"x": pa.array([None, 1.0])}, apply(col("x"), 2.0).is_null()) == [0]


def test_overflow_is_an_error() -> None:
    table = {"x": pa.array([1, 2**63 - 1]), "u": pa.array([1, 2**64 - 1], "uint64"), "i": pa.array([1, 2], "int8")}
    for expression in (col("x") + 1, col("x") * 2, -(-col("x") - 2), col("u") - 1, (-col("x") - 1) // -1):
        with pytest.raises(ValueRangeError, match=r"can't be computed: .* 64 bits: multiply by 1\.0"):
            passing(table, expression > 0)
    with pytest.raises(ValueRangeError, match=r"doesn't fit into 64 bits.* use the float 9223372036854775808.0"):
        passing(table, col("i") + 2**63 > 0)
    assert passing(table, col("i") * 1000 > 1500) == [1]
    assert passing(table, col("x") * 1.0 + 1 > 2) == [1]
    assert passing(table, col("x") < col("u")) == [1]
    assert passing(table, col("u") >= col("x")) == [0, 1]


@pytest.mark.parametrize("unit", ["D", "s", "ms", "us", "ns"])
def test_times_are_compared_exactly(unit: str) -> None:
    stored = np.array(["1969-12-31", "1970-01-01", "2020-02-29", "2261-01-01", "NaT"], f"datetime64[{unit}]")
    whole = stored[:-1].astype("datetime64[us]")
    constants = [
        datetime.date(1970, 1, 1),
        datetime.datetime(1970, 1, 1, 0, 0, 0, 1),
        datetime.datetime(2020, 2, 29),
        datetime.datetime(2020, 2, 29, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
        datetime.datetime(9999, 12, 31),
        datetime.date(1, 1, 1),
        np.datetime64("2020-02-29", "s"),
    ]
    for constant in constants:
        naive = constant.replace(tzinfo=None) if constant is constants[3] else constant
        hour = np.timedelta64(1 if constant is constants[3] else 0, "h")
        for compare in COMPARISONS.values():
            expected = np.flatnonzero(compare(whole, np.datetime64(naive, "us") - hour)).tolist()
            reader = fastpipe.from_arrays({"t": stored, "row": np.arange(5)}, batch_size=2)
            found = [int(i) for batch in reader.filter(compare(col("t"), constant)) for i in batch["row"]]
            assert found == expected
    reader = fastpipe.from_arrays({"t": stored, "d": stored.astype("M8[D]"), "row": np.arange(5)}, batch_size=2)
    assert reader.filter(col("t") == col("d")).num_rows == 4
    assert reader.filter(col("t").is_in([datetime.date(1970, 1, 1), constants[1]])).num_rows == 1
    lengths = fastpipe.from_arrays({"d": np.array([1, 90, 4000], "m8[s]")}, batch_size=2)
    assert lengths.filter(col("d") > datetime.timedelta(minutes=1.5, microseconds=-1)).num_rows == 2


def test_decimals_are_compared_exactly() -> None:
    values = [decimal.Decimal(text) for text in ("-1.25", "0.10", "12.34", "99999.99")]
    table = pa.table({"price": pa.array([*values, None], pa.decimal128(7, 2)), "n": [0, 0, 12, 100_000, 1]})
    for spec in (fastpipe.DenseSpec((), "int64", scale=2), fastpipe.DenseSpec((), "int32", scale=3)):
        features = {"price": spec, "n": fastpipe.DenseSpec((), "int64"), "row": fastpipe.DenseSpec((), "int64")}
        masked = features | {"price": fastpipe.DenseSpec((), spec.dtype, scale=spec.scale, on_null="mask")}
        for compare in COMPARISONS.values():
            for constant in (decimal.Decimal("12.34"), 0.1, 0, -(10**30), 10**30, decimal.Decimal("0.101"), 99999.99):
                expected = [i for i, value in enumerate(values) if compare(value, constant)]
                assert passing(table, compare(col("price"), constant), features=masked) == expected
        assert passing(table, col("price").is_in([decimal.Decimal("0.1"), 10**40]), features=masked) == [1]
        assert passing(table, col("price") > col("n"), features=masked) == [1, 2]
        assert passing(table, col("price") * 2 == 24.68, features=masked) == [2]


def test_rows_whose_nulls_are_filled() -> None:
    text = b"x,name\n1,a\n,b\n3,\n"
    reader = fastpipe.read_csv(text, batch_size=2)
    assert reader.filter(col("x").is_null()).num_rows == 1
    floats = fastpipe.read_csv(
        text, overrides={"x": fastpipe.DenseSpec((), "float64", fill=float("nan"))}, batch_size=2
    )
    assert floats.filter(col("x").is_nan()).num_rows == 0
    assert floats.filter(col("x").is_null() | (col("x") == 3)).num_rows == 2
    filled = {"x": fastpipe.DenseSpec((), "int64", fill=-1), "name": fastpipe.DenseSpec((), "string", fill="?")}
    reader = fastpipe.read_csv(text, features=filled, batch_size=2)
    assert reader.filter(col("x").is_null()).num_rows == 0
    assert reader.filter((col("x") == -1) | (col("name") == "?")).num_rows == 2


# Readers of each source


def simple(reader: fastpipe.Reader) -> str:
    """Returns the name of a feature with one value per row."""
    return next(name for name, spec in reader.features.items() if spec._kind == "dense" and not spec.shape)


def condition_of(reader: fastpipe.Reader) -> Any:
    """Returns a condition that some of the rows pass."""
    name = simple(reader)
    if reader.features[name].dtype == "string":
        return ~col(name).starts_with("1") & (col(name) != "")
    return (col(name) % 3 != 1) | (col(name) == 7)


def passed(reader: fastpipe.Reader) -> Any:
    """Returns the rows that pass `condition_of`, as a table, according to Python."""
    whole = pa.table(reader)
    values = whole[simple(reader)].to_pylist()
    if isinstance(values[0], str):
        return whole.filter(pa.array([value != "" and not value.startswith("1") for value in values]))
    values = [float(value) for value in values]
    return whole.filter(pa.array([value % 3 != 1 or value == 7 for value in values]))


def test_filtered_readers_have_the_rows_that_pass(make: Make) -> None:
    expected = passed(make(batch_size=13))
    assert 0 < len(expected) < ROWS
    for options in ({}, {"num_threads": 3}):
        reader = make(batch_size=13, **options)
        filtered = reader.filter(condition_of(reader))
        assert filtered.num_rows == len(expected)
        assert pa.table(filtered).equals(expected)
        assert len(filtered) == -(-len(expected) // 13)
    parts = [pa.table(make(batch_size=7, rank=rank, world_size=2).filter(condition_of(reader))) for rank in range(2)]
    assert sum(map(len, parts)) in range(len(expected) - 13, len(expected) + 1)


@pytest.mark.parametrize("order", ORDERS, ids=["sequential", "window", "block", "buffer"])
def test_states_resume_at_every_step(make: Make, order: dict[str, Any]) -> None:
    if make(batch_size=30).features.keys() == {"user", "item", "label"}:
        order = {"shuffle": False} | order
    filtered = (reader := make(batch_size=30, epochs=2, **order)).filter(condition_of(reader))
    whole = digests(pickle.loads(pickle.dumps(filtered)))
    batches = iter(filtered)
    for step in range(len(filtered)):
        again = make(batch_size=30, epochs=2, **order).filter(condition_of(reader))
        again.load_state_dict(filtered.state_dict())
        assert digests(again) == whole[step:]
        next(batches)
    unfiltered = make(batch_size=30, epochs=2, **order)
    with pytest.raises(fastpipe.errors.StateError):
        unfiltered.load_state_dict(filtered.state_dict())


def test_filters_combine(make: Make) -> None:
    reader = make(batch_size=9)
    first = condition_of(reader)
    is_text = reader.features[simple(reader)].dtype == "string"
    second = col(simple(reader)) != "2" if is_text else col(simple(reader)) % 2 == 0
    twice, both = reader.filter(first).filter(second), reader.filter(first & second)
    assert twice.num_rows == both.num_rows < reader.filter(first).num_rows
    assert digests(twice) == digests(both)
    twice.load_state_dict(both.state_dict())
    assert repr(twice) == repr(both)


def test_all_rows_or_none_pass(make: Make) -> None:
    reader = make(batch_size=9)
    everything = reader.filter(col(simple(reader)).is_not_null() | True)
    assert everything.num_rows == ROWS
    assert digests(everything) == digests(make(batch_size=9))
    with pytest.warns(RowsLeftOutWarning, match=f"all {ROWS} rows .*is_null.. & False. Null is not true") as caught:
        nothing = reader.filter(col(simple(reader)).is_null() & False)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert (nothing.num_rows, len(nothing), list(nothing)) == (0, 0, [])
    assert f"0 of {ROWS} rows of" in nothing.explain()
    assert "is_null() & False" in nothing.explain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nothing.filter(col(simple(reader)).is_null()).num_rows == 0


def test_partitions_are_filtered(make: Make) -> None:
    reader = make(batch_size=9)
    expected = pa.table(reader.filter(condition_of(reader)))
    parts = [reader.read_partition(part) for part in reader.partition(3)]
    found = [pa.table(part.filter(condition_of(reader))) for part in parts]
    assert pa.concat_tables(found).equals(expected)


# Columns that aren't read


class Recorded:
    """Units that record which of their columns are read."""

    rows = (3, 2)
    schema = pa.schema([pa.field("a", pa.int64()), pa.field("b", pa.string()), pa.field("c", pa.float64())])

    def __init__(self, log: list[list[str]], columns: list[str] | None = None) -> None:
        self.log, self.columns = log, columns or self.schema.names

    def select(self, columns: list[str]) -> Recorded:
        return Recorded(self.log, columns)

    def read(self, unit: int) -> Any:
        self.log.append(self.columns)
        whole = pa.table({"a": [1, 2, 3], "b": ["x", "y", None], "c": [0.5, 1.5, 2.5]}, schema=self.schema)
        return whole.slice(0, self.rows[unit]).select(self.columns)

    def fingerprint(self) -> str:
        return "recorded"


def test_only_named_columns_are_read() -> None:
    log: list[list[str]] = []
    reader = fastpipe.read_units(Recorded(log), batch_size=2)
    filtered = reader.filter((col("c") > 1) & (col("a") > 0))
    assert log == [["a", "c"]] * 2
    assert filtered.num_rows == 3
    list(filtered.filter(col("b").is_not_null()))
    assert log[2:4] == [["b"]] * 2
    for divide in (lambda: reader.split(0.5, 0.5, by="b"), lambda: reader.folds(2, stratify="a")):
        del log[:]
        divide()
        assert log in ([["b"]] * 2, [["a"]] * 2)
    del log[:]
    for _, part in filtered.folds(2, by="a"):
        assert part.num_rows <= 3
    assert log == [["a"]] * 2


@pytest.mark.parametrize("kind", ["avro", "parquet"])
def test_folders_are_columns(tmp_path: Path, kind: str) -> None:
    for day in (1, 2, 3):
        (tmp_path / f"day={day}").mkdir()
        table = pa.table({"x": [day * 10, day * 10 + 1], "text": ["a", "b"]})
        if kind == "avro":
            fastpipe.write_avro(tmp_path / f"day={day}/a.avro", table)
        else:
            pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / f"day={day}/a.parquet")
    read = fastpipe.read_avro if kind == "avro" else fastpipe.read_parquet
    reader = read(tmp_path, batch_size=10)
    found = reader.filter((col("day") >= 2) & (col("text") == "b"))
    assert pa.table(found).select(["x", "day"]).to_pylist() == [{"x": 21, "day": 2}, {"x": 31, "day": 3}]
    assert reader.filter(col("day") == 2).num_rows == 2


def test_threads_filter_one_reader() -> None:
    reader = fastpipe.from_arrays({"x": np.arange(100_000)}, batch_size=100)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: reader.filter(col("x") % 10 == number % 5), range(8)))
    assert [each.num_rows for each in found] == [10_000] * 8
    assert all((batch["x"] % 10 == 3).all() for batch in found[3])


def test_only_named_columns_are_parsed(tmp_path: Path) -> None:
    text = "x,y\n1,2\n3,no number\n5,6\n"
    (tmp_path / "a.csv").write_text(text)
    features = {"x": fastpipe.DenseSpec((), "int64"), "y": fastpipe.DenseSpec((), "int64")}
    reader = fastpipe.read_csv(tmp_path / "a.csv", features=features, batch_size=2)
    # The second row fails in y, which only reading it would notice.
    assert [batch["y"].tolist() for batch in reader.filter(col("x") != 3)] == [[2, 6]]
    with pytest.raises(fastpipe.errors.FastpipeError, match="no number"):
        reader.filter(col("y") > 0)
    with pytest.raises(fastpipe.errors.FastpipeError, match="no number"):
        list(reader.filter(col("x") > 1))


def test_damage_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.avro"
    table = pa.table({"x": list(range(1000)), "text": ["a" * 50] * 1000})
    fastpipe.write_avro(path, table, codec="deflate")
    reader = fastpipe.read_avro(path, batch_size=8)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 20] = b"\xff" * 20
    path.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises((MalformedFileError, fastpipe.errors.StorageError)):
            reader.filter(col("x") > 3)


def test_an_interrupted_filter_can_be_repeated() -> None:
    class Interrupted(Recorded):
        calls = 0

        def select(self, columns: list[str]) -> Recorded:
            self.columns = columns
            return self

        def read(self, unit: int) -> Any:
            Interrupted.calls += 1
            if Interrupted.calls == 1:
                raise KeyboardInterrupt
            return super().read(unit)

    reader = fastpipe.read_units(Interrupted([]), batch_size=2, num_fetches=1)
    with pytest.raises(KeyboardInterrupt):
        reader.filter(col("a") > 1)
    assert reader.filter(col("a") > 1).num_rows == 3


def test_progress_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    reader = fastpipe.from_arrays({"x": np.arange(70_000)}, batch_size=10, progress=True)
    assert reader.filter(col("x") < 9).num_rows == 9
    assert "70.0k/70.0k" in capfd.readouterr().err
    quiet = fastpipe.from_arrays({"x": np.arange(70_000)}, batch_size=10)
    quiet.filter(col("x") < 9)
    assert capfd.readouterr().err == ""


def test_memory_limits_and_large_lists() -> None:
    x = np.arange(150_001)
    reader = fastpipe.from_arrays({"x": x}, batch_size=37, memory_limit="4MB", num_threads=2)
    few = reader.filter(col("x").is_in(x[::7]))
    assert few.num_rows == len(x[::7])
    assert np.concatenate([batch["x"] for batch in few]).tolist() == x[::7].tolist()
    assert len(repr(few)) < 400
    assert reader.filter(~col("x").is_in(range(100_000))).num_rows == 50_001
    texts = fastpipe.from_arrow(pa.table({"t": [str(i) for i in range(3000)]}), batch_size=9)
    assert texts.filter(col("t").is_in({str(i) for i in range(0, 90_000, 3)})).num_rows == 1000


def test_readers_say_what_they_are() -> None:
    reader = fastpipe.from_arrays({"x": np.arange(100)}, batch_size=10).filter(col("x") % 2 == 0)
    assert '50 of 100 rows of a table of 100 rows, where (col("x") % 2) == 0' in repr(reader)
    list(reader)
    assert 'The reader reads 50 of 100 rows of a table of 100 rows, where (col("x") % 2) == 0.' in reader.explain()
    assert 'where ((col("x") % 2) == 0) & (col("x") > 9)' in repr(reader.filter(col("x") > 9))
    assert (reader.locate(0, 3).row, reader.num_rows) == (6, 50)


# Invalid arguments

READER_TABLE = {
    "i": [1, 2],
    "text": ["a", "b"],
    "blob": [b"a", b"b"],
    "flag": [True, False],
    "items": [[1], [2, 3]],
    "day": [datetime.date(2020, 1, 1)] * 2,
    "x": [0.5, 1.5],
}


@pytest.mark.parametrize(
    ("condition", "error", "match"),
    [
        (lambda: col("countri") == "DE", SchemaError, "isn't a feature .* are 'i', 'text'.*columns="),
        (lambda: col("tex") == "DE", SchemaError, "did you mean 'text'"),
        (lambda: col("items") == 1, SchemaError, "names 'items', which has several values per row"),
        (lambda: col("text") > 18, SchemaError, r'\("text"\) is string, but 18 is int: .* a str, as in col\("text"\)'),
        (lambda: col("i") == "1", SchemaError, r'col\("i"\) is int64, but "1" is str: compare it with a number'),
        (lambda: col("i") == True, SchemaError, "True is bool"),  # noqa: E712
        (lambda: col("flag") == 1, SchemaError, r'True or False, or use col\("flag"\) and ~col\("flag"\)'),
        (lambda: col("flag") < True, SchemaError, "has no order"),
        (lambda: col("blob") == "a", SchemaError, r'is bytes, but "a" is str.* b"text"'),
        (lambda: col("text") == col("i"), SchemaError, "compare values of one type"),
        (lambda: col("day") > "2020-01-01", SchemaError, r"a date or datetime, as in .*datetime.date\("),
        (lambda: col("text") + "a" == "aa", SchemaError, r'\+ is for numbers, but col\("text"\) is string'),
        (lambda: col("i") + "a" == 1, SchemaError, '"a" is str'),
        (lambda: ~col("i"), SchemaError, r'~ combines conditions, but col\("i"\) is int64: compare it.* != 0'),
        (lambda: (col("i") > 0) & col("text"), SchemaError, "& combines conditions, .*string"),
        (lambda: col("i").is_nan(), SchemaError, "is_nan.. is for floats"),
        (lambda: col("i").contains("a"), SchemaError, "contains.. is for text and bytes"),
        (lambda: col("text").contains(b"a"), SchemaError, "is string, but b'a' is bytes"),
        (lambda: col("i").is_in([1, "a"]), SchemaError, '"a" is str'),
        (lambda: col("i"), TypeError, r'is true or false for each row, but col\("i"\) is int64: .* col\("i"\) != 0'),
        (lambda: col("text"), TypeError, "is true or false"),
        (lambda: "i > 0", TypeError, r"filter\(\) takes a condition, such as .* got 'i > 0'"),
        (lambda: True, TypeError, r"filter\(\) takes a condition"),
        (lambda: len, TypeError, r"filter\(\) takes a condition"),
        (lambda: col("i") == None, TypeError, r"use is_null\(\)"),  # noqa: E711
        (lambda: col("i") > [1], TypeError, "an expression takes bool, int"),
        (lambda: (col("i") > 0) and (col("x") > 0), TypeError, "use & instead of `and`"),
        (lambda: 0 < col("i") < 3, TypeError, r"is_between\(\) instead of a < x < b"),
        (lambda: col("i") in [1, 2], TypeError, r"is_in\(\) instead of `in`"),
        (lambda: col("i") > 0 & col("flag"), TypeError, "Put parentheses around comparisons"),
        (lambda: col("i").is_in("abc"), TypeError, r"is_in\(\) takes a list of values; got 'abc'"),
        (lambda: col("i").is_in(5), TypeError, "takes a list of values; got 5"),
        (lambda: col("i").is_in([1, None]), TypeError, "without None"),
        (lambda: col("x").is_in([1, float("nan")]), ValueError, "no NaN"),
        (lambda: col("i").is_between(1, 2, "all"), ValueError, "closed must be"),  # type: ignore[arg-type]
        (lambda: col("text").starts_with(3), TypeError, "prefix must be text or bytes; got 3"),  # type: ignore[arg-type]
        (lambda: col(3), TypeError, "takes the name of a feature; got 3"),  # type: ignore[arg-type]
        (lambda: col("i") > 2**300, ValueError, "at most 256 bits"),
        (lambda: col("x") > decimal.Decimal("1e99999"), ValueError, "finite, with at most 400 digits"),
        (lambda: col("text") == "\ud800", ValueError, "valid Unicode"),
        (lambda: col("day") > np.datetime64("NaT"), TypeError, "NaT is null"),
        (lambda: col("day") > np.datetime64(1, "ns"), ValueError, "whole microseconds"),
    ],
)
def test_the_message_says_what_to_do(condition: Any, error: type[Exception], match: str) -> None:
    reader = fastpipe.from_arrow(pa.table(READER_TABLE), batch_size=2)
    with pytest.raises(error, match=match):
        reader.filter(condition())


def test_readers_that_cant_be_filtered() -> None:
    reader = fastpipe.from_arrays({"x": np.arange(20)}, batch_size=2)
    with pytest.raises(ValueError, match=r"filter\(\) cannot select rows of samples.*redraw=False"):
        reader.sample(5, seed=1, redraw=True).filter(col("x") > 3)
    refused = pytest.raises(UnsupportedError, match=r"filter\(\) needs the data itself")
    with reader.serve() as server, fastpipe.connect(server.url) as served, refused:
        served.filter(col("x") > 3)
    assert reader.filter(col("x") > 3).sample(5, seed=1).num_rows == 5
    empty = fastpipe.from_arrays({"x": np.arange(0)}, batch_size=2).filter(col("x") > 3)
    assert (empty.num_rows, list(empty)) == (0, [])


def test_expressions_are_constants() -> None:
    expression = (col("x") + 1) * 2 > 3
    with pytest.raises(AttributeError, match="can't be changed"):
        expression._op = "<"
    with pytest.raises(AttributeError, match="can't be changed"):
        del expression._op
    with pytest.raises(TypeError, match="unhashable"):
        hash(expression)
    assert repr(expression) == '((col("x") + 1) * 2) > 3'
    assert repr(np.int64(3) < col("x")) == 'col("x") > 3'
    assert repr(np.float32(0.5) * col("x") == 1) == '(0.5 * col("x")) == 1'
    for values in (np.array([3, 1, 3]), pa.array([1, 3]), {1: 0, 3: 0}, (3, 1)):
        assert repr(col("x").is_in(values)) == 'col("x").is_in([1, 3])'
    assert repr(~(col("a") | col("b") | col("c"))) == '~(col("a") | col("b") | col("c"))'


def test_depth_is_limited() -> None:
    long = functools.reduce(operator.or_, (col("x") == i for i in range(3000)))
    reader = fastpipe.from_arrays({"x": np.arange(5000)}, batch_size=100)
    assert reader.filter(long).num_rows == 3000
    deep = functools.reduce(operator.add, [col("x"), *range(98)])
    assert reader.filter(pickle.loads(pickle.dumps(deep)) > 97 * 49).num_rows == 4999
    assert repr(eval(repr(deep > 0))) == repr(deep > 0)
    with pytest.raises(LimitError, match=r"nested 100 levels deep.*is_in"):
        functools.reduce(operator.add, [deep, 1, 2])


def test_filters_that_leave_holes_keep_the_steps(make: Make) -> None:
    reader = make(batch_size=13, num_threads=2)
    holes = reader.filter(condition_of(reader), mode="holes")
    assert "filter" in dict(holes.plan().stages)
    assert pa.table(holes).equals(passed(make(batch_size=13)))
    # pyarrow's table began with epoch 0.
    holes.set_epoch(0)
    batches = list(holes)
    assert len(batches) == len(holes) == len(reader)
    for step, batch in enumerate(batches):
        part = make(batch_size=13).take(range(13 * step, min(13 * step + 13, ROWS)))
        assert len(next(iter(batch.values()))) == part.filter(condition_of(reader)).num_rows
        assert digests([holes.batch_at(step, 0)]) == digests([batch])
    again = pickle.loads(pickle.dumps(make(batch_size=13).filter(condition_of(reader), mode="holes")))
    holes.set_epoch(0)
    for _ in itertools.islice(holes, 5):
        pass
    again.load_state_dict(holes.state_dict())
    assert digests(again) == digests(batches[5:])
    with pytest.raises(ValueError, match='mode must be "even", "holes" or "marks"'):
        reader.filter(condition_of(reader), mode="odd")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="takes a condition"):
        reader.filter(3, mode="holes")  # type: ignore[call-overload]


def test_filters_that_mark_rows_keep_all(make: Make) -> None:
    for uneven in ({}, {"on_uneven": "pad", "world_size": 2, "rank": 1}):
        reader, whole = (make(batch_size=13, **uneven) for _ in range(2))
        marked = reader.filter(condition_of(reader), mode="marks")
        holes = make(batch_size=13, **uneven).filter(condition_of(reader), mode="holes")
        assert marked._passes.marks_valid
        for batch, batch_of_all, passing in zip(marked, whole, holes, strict=True):
            valid, before = batch.pop("valid"), batch_of_all.pop("valid", None)
            assert digests([batch]) == digests([batch_of_all])
            # Rows that only pad the batch never count.
            assert before is None or not valid[~before].any()
            kept = np.ones(len(valid), bool) if before is None else before
            passes = passing.pop("valid", np.ones(len(next(iter(passing.values()))), bool))
            assert valid[kept].sum() == passes.sum()
        assert "valid" in marked.to_arrow_reader().schema.names
    named = fastpipe.from_arrays({"valid": np.arange(9)}, batch_size=3)
    with pytest.raises(fastpipe.errors.SchemaError, match="rename it"):
        named.filter(col("valid") > 3, mode="marks")
