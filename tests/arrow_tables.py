"""Random Arrow tables and their expected rows in batches: an oracle built on pyarrow."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from fastpipe import Masked, Ragged, Strings

INTEGERS = {
    pa.int8(): (-128, 127),
    pa.int16(): (-(2**15), 2**15 - 1),
    pa.int32(): (-(2**31), 2**31 - 1),
    pa.int64(): (-(2**63), 2**63 - 1),
    pa.uint8(): (0, 255),
    pa.uint16(): (0, 2**16 - 1),
    pa.uint32(): (0, 2**32 - 1),
    pa.uint64(): (0, 2**64 - 1),
}
DAY = 86_400
TIMES = {
    pa.date32(): (-100_000, 100_000),
    pa.time32("s"): (0, DAY - 1),
    pa.time32("ms"): (0, DAY * 1_000 - 1),
    pa.time64("us"): (0, DAY * 10**6 - 1),
    pa.time64("ns"): (0, DAY * 10**9 - 1),
    **{pa.timestamp(unit): (-(2**62), 2**62) for unit in ("s", "ms", "us", "ns")},
    pa.timestamp("us", "Europe/Berlin"): (-(2**50), 2**50),
    **{pa.duration(unit): (-(2**62), 2**62) for unit in ("s", "ms", "us", "ns")},
}
TEXTS = (pa.string(), pa.large_string(), pa.string_view())
BINARIES = (pa.binary(), pa.large_binary(), pa.binary_view())
LEAVES = (
    *INTEGERS,
    *TIMES,
    *TEXTS,
    *BINARIES,
    pa.bool_(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(12, 3),
    pa.binary(3),
)
# The value types of dictionaries and runs.
BEHIND = (
    *TEXTS,
    *BINARIES,
    pa.bool_(),
    pa.int32(),
    pa.int64(),
    pa.float64(),
    pa.date32(),
    pa.time32("s"),
    pa.timestamp("us", "Europe/Berlin"),
    pa.decimal128(12, 3),
    pa.binary(3),
)


def leaf_values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type in the form that `pyarrow.array` accepts, with times as numbers."""
    if kind in INTEGERS:
        return st.integers(*INTEGERS[kind])
    if kind in TIMES:
        return st.integers(*TIMES[kind])
    if kind in TEXTS:
        return st.text(st.characters(codec="utf-8"), max_size=20)
    if kind in BINARIES:
        return st.binary(max_size=20)
    if kind == pa.bool_():
        return st.booleans()
    if kind == pa.float16():
        return st.integers(-2048, 2048).map(np.float16)
    if kind == pa.decimal128(12, 3):
        return st.decimals(-(10**8), 10**8, places=3)
    if kind == pa.binary(3):
        return st.binary(min_size=3, max_size=3)
    return st.floats(width=32, allow_nan=False)


@st.composite
def types(draw: st.DrawFn, depth: int = 3) -> pa.DataType:
    """Arrow types, nested up to `depth` levels."""
    kinds = ["leaf", "leaf", "dictionary", "run ends"]
    if depth:
        kinds += ["list", "large list", "list view", "large list view", "fixed", "struct", "map"]
    kind = draw(st.sampled_from(kinds))
    if kind == "leaf":
        return draw(st.sampled_from(LEAVES))
    if kind == "dictionary":
        return pa.dictionary(
            draw(st.sampled_from((pa.int16(), pa.uint16(), pa.int64()))), draw(st.sampled_from(BEHIND))
        )
    if kind == "run ends":
        return pa.run_end_encoded(
            draw(st.sampled_from((pa.int16(), pa.int32(), pa.int64()))), draw(st.sampled_from(BEHIND))
        )
    if kind == "struct":
        # The name "values" is left out: together with "indices" it would make a sparse column.
        return pa.struct([(name, draw(types(depth=depth - 1))) for name in ("p", "q")[: draw(st.integers(1, 2))]])
    if kind == "map":
        return pa.map_(pa.string(), draw(types(depth=depth - 1)))
    item = draw(types(depth=depth - 1))
    if kind == "fixed":
        return pa.list_(item, draw(st.integers(1, 3)))
    lists = {"list": pa.list_, "large list": pa.large_list, "list view": pa.list_view}
    return lists.get(kind, pa.large_list_view)(item)


def values(kind: pa.DataType, *, nulls: bool) -> st.SearchStrategy[Any]:
    """Values of a type, with nulls if `on_null` is set."""
    found: st.SearchStrategy[Any]
    if pa.types.is_struct(kind):
        found = st.fixed_dictionaries({field.name: values(field.type, nulls=nulls) for field in kind})
    elif pa.types.is_map(kind):
        found = st.lists(st.tuples(st.text("abc", max_size=3), values(kind.item_type, nulls=nulls)), max_size=3)
    elif pa.types.is_fixed_size_list(kind):
        found = st.lists(values(kind.value_type, nulls=nulls), min_size=kind.list_size, max_size=kind.list_size)
    elif is_list(kind):
        found = st.lists(values(kind.value_type, nulls=nulls), max_size=4)
    elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        found = leaf_values(kind.value_type)
    else:
        found = leaf_values(kind)
    return st.one_of(st.none(), found) if nulls else found


def is_list(kind: pa.DataType) -> bool:
    """Returns whether a type is a list of variable length."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_list_view, pa.types.is_large_list_view)
    return any(test(kind) for test in tests)


def array(items: list[Any], kind: pa.DataType) -> pa.Array:
    """Returns an array of a type.

    pyarrow can't create run-end encoded arrays, or arrays that contain them, from Python values.
    """
    if pa.types.is_run_end_encoded(kind):
        ends = [i + 1 for i in range(len(items)) if i + 1 == len(items) or items[i] != items[i + 1]]
        inner = pa.array([items[end - 1] for end in ends], kind.value_type)
        return pa.RunEndEncodedArray.from_arrays(pa.array(ends, kind.run_end_type), inner)
    if pa.types.is_dictionary(kind):
        distinct = list(dict.fromkeys(item for item in items if item is not None))[::-1]
        keys = [None if item is None else distinct.index(item) for item in items]
        return pa.DictionaryArray.from_arrays(pa.array(keys, kind.index_type), pa.array(distinct, kind.value_type))
    missing = pa.array([item is None for item in items], pa.bool_())
    if pa.types.is_struct(kind):
        parts = [array([None if item is None else item[field.name] for item in items], field.type) for field in kind]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=missing)
    if pa.types.is_fixed_size_list(kind):
        flat = [entry for item in items for entry in (item or [None] * kind.list_size)]
        return pa.FixedSizeListArray.from_arrays(array(flat, kind.value_type), type=kind, mask=missing)
    if pa.types.is_map(kind):
        flat = [entry for item in items for entry in item or ()]
        offsets = _offsets(items)
        keys, entries = pa.array([key for key, _ in flat], kind.key_type), array([v for _, v in flat], kind.item_type)
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, entries, type=kind, mask=missing)
    if is_list(kind):
        flat = [entry for item in items for entry in item or ()]
        offsets, sizes = _offsets(items), [len(item or ()) for item in items]
        inner = array(flat, kind.value_type)
        if pa.types.is_list(kind):
            return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inner, type=kind, mask=missing)
        if pa.types.is_large_list(kind):
            return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), inner, type=kind, mask=missing)
        width = pa.int32() if pa.types.is_list_view(kind) else pa.int64()
        make = pa.ListViewArray if pa.types.is_list_view(kind) else pa.LargeListViewArray
        starts = pa.array(offsets[:-1], width)
        return make.from_arrays(starts, pa.array(sizes, width), inner, type=kind, mask=missing)
    return pa.array(items, kind)


def _offsets(items: list[Any]) -> list[int]:
    return [0, *np.cumsum([len(item or ()) for item in items], dtype=int).tolist()]


@st.composite
def tables(
    draw: st.DrawFn, most_rows: int = 30, kinds: st.SearchStrategy[pa.DataType] | None = None
) -> tuple[pa.Table, list[list[Any]]]:
    """Returns a sliced and chunked table of a counting column `row` and random columns, and the values of the random
    ones.
    """
    kinds = types() if kinds is None else kinds
    front, back = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    some = front + draw(st.integers(0, most_rows)) + back
    # Null bits are processed in words of 64 rows. Repeating the values makes some tables span several words.
    times = draw(st.sampled_from((1, 6)))
    rows = some * times - front - back
    columns: dict[str, pa.Array] = {"row": pa.array(range(-front, rows + back), pa.int64())}
    kept = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        kind = draw(kinds)
        strategy = values(kind, nulls=draw(st.booleans()))
        items = draw(st.lists(strategy, min_size=some, max_size=some)) * times
        columns[name] = array(items, kind)
        kept.append(items[front : front + rows])
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=4)))
    whole = pa.RecordBatch.from_pydict(columns).slice(front, rows)
    edges = [0, *cuts, rows]
    batches = [whole.slice(a, b - a) for a, b in pairwise(edges)]
    return pa.Table.from_batches(batches, whole.schema), kept


def item_of(scalar: Any) -> Any:
    """Returns the value of a pyarrow scalar in the form that `values` generates, with times as numbers."""
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if pa.types.is_struct(kind):
        return {field.name: item_of(scalar[i]) for i, field in enumerate(kind)}
    if pa.types.is_map(kind):
        return [(item_of(pair[0]), item_of(pair[1])) for pair in scalar.values]
    if is_list(kind) or pa.types.is_fixed_size_list(kind):
        return [item_of(item) for item in scalar.values]
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return item_of(scalar.value)
    return scalar.value if pa.types.is_temporal(kind) else scalar.as_py()


def has(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    """Returns whether `test` holds for a type or for a type nested in it."""
    return test(kind) or any(has(kind.field(i).type, test) for i in range(kind.num_fields))


def leaves(kind: pa.DataType, name: str) -> list[tuple[str, pa.DataType, tuple[str, ...]]]:
    """Returns the features of a column: name, type of the values, and the steps from the column to the values."""
    if pa.types.is_struct(kind):
        found = [(f"{name}.{field.name}", field.type, (f"field {field.name}",)) for field in kind]
    elif pa.types.is_map(kind):
        found = [(f"{name}.keys", kind.key_type, ("keys",)), (f"{name}.values", kind.item_type, ("values",))]
    elif pa.types.is_fixed_size_list(kind):
        found = [(name, kind.value_type, (f"fixed {kind.list_size}",))]
    elif is_list(kind):
        found = [(name, kind.value_type, ("list",))]
    else:
        return [(name, kind, ())]
    return [(path, end, (*steps, *more)) for inner, below, steps in found for path, end, more in leaves(below, inner)]


def expected(value: Any, kind: pa.DataType, steps: tuple[str, ...]) -> Any:
    """Returns the value expected in a batch, as nested lists with None for nulls."""
    if not steps:
        if value is None:
            return None
        kind = kind.value_type if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind) else kind
        return float(value) if kind == pa.decimal128(12, 3) else value
    step, below = steps[0], steps[1:]
    if step.startswith("field "):
        return expected(None if value is None else value[step.removeprefix("field ")], kind, below)
    if step.startswith("fixed "):
        size = int(step.removeprefix("fixed "))
        items = [None] * size if value is None else value
        return [expected(item, kind, below) for item in items]
    if value is None:
        return None
    if step in ("keys", "values"):
        return [expected(pair[step == "values"], kind, below) for pair in value]
    return [expected(item, kind, below) for item in value]


def ragged_steps(steps: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the steps as batches represent them: fixed-size lists outside of other lists are ragged levels."""
    last = max((i for i, step in enumerate(steps) if step in ("list", "keys", "values")), default=-1)
    return tuple("list" if i < last and step.startswith("fixed ") else step for i, step in enumerate(steps))


def as_lists(form: Any) -> Any:
    """Returns a batch value or an array as nested lists, with times as numbers."""
    if isinstance(form, np.ndarray) and form.dtype.kind in "mM":
        return form.view(np.int64).tolist()
    if isinstance(form, (Ragged, Masked)) and (times := _times(form)) is not None:
        return times.to_list()
    if isinstance(form, (Ragged, Masked, Strings)):
        return form.to_list()
    return form.tolist()


def _times(form: Any) -> Any:
    """Returns the same value with numbers in place of times, or None if it has no times."""
    values = form.values
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "mM":
            return None
        values = values.view(np.int64)
    elif isinstance(values, (Ragged, Masked)):
        values = _times(values)
        if values is None:
            return None
    else:
        return None
    return Ragged(values, form.offsets) if isinstance(form, Ragged) else Masked(values, form.valid)
