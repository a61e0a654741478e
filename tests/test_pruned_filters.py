"""Filters of Parquet files, which skip row groups in which no row can pass."""

from __future__ import annotations

import datetime
import decimal
import functools
import io
import operator
import random
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import fastpipe
from fastpipe import DenseSpec, col
from fastpipe._expressions import Expr

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

# Random conditions often select no row of a small table.
pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")

NAN, INF = float("nan"), float("inf")
DATES = [datetime.date(1970, 1, 1) + datetime.timedelta(days) for days in range(-2, 3)]
TIMES = [datetime.datetime(1970, 1, 1) + datetime.timedelta(hours=hours) for hours in (-25, -24, 0, 1, 24)]
TEXTS = ["", "a", "ab", "abb", "b", "bé", "é", "\ud7ff", "\ue000", "\U0010ffff"]
BLOBS = [*(text.encode() for text in TEXTS), b"\xff", b"a\xff", b"\x00"]
INTEGERS = [-4, -1, 0, 1, 2, 3]
UNSIGNED = [0, 1, 3, 2**63 - 1, 2**63, 2**64 - 1]
FLOATS = [-INF, -1.5, -0.0, 0.0, 0.1, 0.25, 1.0, INF, NAN]
PRICES = [decimal.Decimal(text) for text in ("-9.99", "-0.01", "0.00", "1.25", "2.00")]
# For each column: its type, its values, and constants to compare it with.
COLUMNS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "i8": (pa.int8(), INTEGERS, [*INTEGERS, 1.5, 2**70, NAN, INF]),
    "i64": (pa.int64(), [*INTEGERS, 2**53 + 1, -(2**63), 2**63 - 1], [*INTEGERS, 2.0**53, 2**53 + 1]),
    "u32": (pa.uint32(), [0, 1, 2, 2**31, 2**32 - 1], [*INTEGERS, 2**31]),
    "u64": (pa.uint64(), UNSIGNED, [*UNSIGNED, *INTEGERS]),
    "f32": (pa.float32(), FLOATS, [*FLOATS, *INTEGERS]),
    "f64": (pa.float64(), FLOATS, [*FLOATS, *INTEGERS]),
    "flag": (pa.bool_(), [False, True], [False, True]),
    "text": (pa.string(), TEXTS, TEXTS),
    "large": (pa.large_string(), TEXTS, TEXTS),
    "blob": (pa.binary(), BLOBS, BLOBS),
    "word": (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "bé"], TEXTS),
    "day": (pa.date32(), DATES, DATES + TIMES),
    "ms": (pa.timestamp("ms"), TIMES, DATES + TIMES),
    "ns": (pa.timestamp("ns"), TIMES, DATES + TIMES),
    "price": (pa.decimal128(5, 2), PRICES, [*PRICES, *INTEGERS]),
}


@st.composite
def tables(draw: st.DrawFn) -> Any:
    """Returns tables whose columns are often sorted, often have nulls, and are sometimes only nulls."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    rows, columns = draw(st.integers(1, 24)), {}
    for name, (kind, values, _) in COLUMNS.items():
        found = rng.choices(values, k=rows)
        if rng.random() < 0.6:
            found.sort(key=lambda value: (value != value, 0 if value != value else value))
        nulls = rng.choice([0, 0, 0.2, 0.7, 1])
        columns[name] = pa.array([None if rng.random() < nulls else value for value in found], kind)
    return pa.table(columns)


def constants(name: str) -> Any:
    return st.sampled_from(COLUMNS[name][2])


@st.composite
def conditions(draw: st.DrawFn, depth: int = 2) -> Expr:
    kind = draw(st.sampled_from(["compare", "in", "null", "prefix", "nan", "and", "or", "not", "computed"]))
    if depth and kind in ("and", "or"):
        parts = draw(st.lists(conditions(depth - 1), min_size=2, max_size=3))
        return functools.reduce(operator.and_ if kind == "and" else operator.or_, parts) | draw(st.just(False))
    if depth and kind == "not":
        return ~draw(conditions(depth - 1))
    if kind == "prefix":
        name = draw(st.sampled_from(["text", "large", "word", "blob"]))
        return col(name).starts_with(draw(constants(name)))
    if kind == "nan":
        return col(draw(st.sampled_from(["f32", "f64"]))).is_nan()
    if kind == "computed":
        return col("i8") + 1 > draw(constants("i8").filter(lambda value: value in INTEGERS))
    name = draw(st.sampled_from(list(COLUMNS)))
    if kind == "null":
        return draw(st.sampled_from([col(name).is_null(), col(name).is_not_null()]))
    if kind == "in":
        few = draw(st.lists(constants(name).filter(lambda value: value == value), max_size=3))
        # A long list is compared by its ends.
        more = range(5, 90) if name in ("i8", "i64", "f32", "f64") and draw(st.booleans()) else ()
        return col(name).is_in([*few, *more])
    tests = [operator.eq, operator.ne]
    if name != "flag":
        tests += [operator.lt, operator.le, operator.gt, operator.ge]
    compare, constant = draw(st.sampled_from(tests)), draw(constants(name))
    return compare(constant, col(name)) if draw(st.booleans()) and name != "flag" else compare(col(name), constant)


def written(table: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def rows_of(reader: fastpipe.Reader) -> list[int]:
    found: list[int] = pa.table(reader)["row"].to_pylist()
    return found


@given(tables(), conditions(), st.integers(1, 6), st.sampled_from(["1.0", "2.6"]), st.booleans())
def test_the_same_rows_pass_as_in_memory(table: Any, condition: Expr, group: int, version: str, whole: bool) -> None:
    table = table.append_column("row", pa.array(range(len(table))))
    options: dict[str, Any] = {"overrides": {"price": DenseSpec((), "int64", scale=2, on_null="mask")}}
    expected = rows_of(fastpipe.from_arrow(table, batch_size=7, **options).filter(condition))
    statistics = True if whole else ["i8", "f64", "text"]
    file = written(table, row_group_size=group, version=version, write_statistics=statistics)
    found = fastpipe.read_parquet(file, batch_size=7, **options).filter(condition)
    assert rows_of(found) == expected
    assert found.num_rows == len(expected)


@given(tables(), st.sampled_from(["i8", "f64", "text", "day"]), st.booleans(), st.data())
def test_specs_that_change_values(table: Any, name: str, filled: bool, data: st.DataObject) -> None:
    constant, compare = data.draw(constants(name)), data.draw(st.sampled_from([operator.eq, operator.gt, operator.ne]))
    dtype, fill = {
        "i8": ("int32", 3),
        "f64": ("float64", float("nan")),
        "text": ("string", "a"),
        "day": ("datetime64[D]", np.datetime64("1970-01-02")),
    }[name]
    spec = DenseSpec((), dtype, field=name, **({"fill": fill} if filled else {"on_null": "mask"}))
    features = {"x": spec, name: DenseSpec((), "int64", field="row"), "row": DenseSpec((), "int64")}
    table = table.append_column("row", pa.array(range(len(table))))
    condition = compare(col("x"), constant) | (col("x").is_null() & (col(name) > 3))
    expected = rows_of(fastpipe.from_arrow(table, batch_size=7, features=features).filter(condition))
    file = written(table, row_group_size=3)
    assert rows_of(fastpipe.read_parquet(file, batch_size=7, features=features).filter(condition)) == expected


def test_skipped_row_groups_arent_read(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec.implementations.local")
    reads: list[tuple[int, int]] = []

    class Counted(fsspec.LocalFileOpener):  # type: ignore[misc]
        def read(self, size: int = -1) -> bytes:
            reads.append((self.tell(), size))
            return super().read(size)  # type: ignore[no-any-return]

    class Counting(fsspec.LocalFileSystem):  # type: ignore[misc]
        cachable = False

        def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
            return Counted(path, mode, fs=self)

    x = np.arange(400_000)
    table = pa.table({"x": x, "noise": np.random.default_rng(0).random(len(x))})
    pq.write_table(table, path := tmp_path / "a.parquet", row_group_size=100_000, use_dictionary=False)
    metadata = pq.read_metadata(path)
    start = metadata.row_group(3).column(0).data_page_offset
    reader = fastpipe.read_parquet(path, batch_size=1000, filesystem=Counting())
    del reads[:]
    assert reader.filter(col("x") < 0).num_rows == 0
    assert reads == []
    kept = reader.filter((col("x") >= 399_000) & (col("noise") < 2))
    assert min(at for at, _ in reads) >= start
    assert kept.num_rows == 1000
    assert "(3 of 4 units weren't read): 1,000 of 400,000 rows" in str(kept.plan())
    assert [int(batch["x"][0]) for batch in kept] == [399_000]
    # Only the filter of the whole dataset skips units, and units without rows of a selection aren't read either.
    assert kept.filter(col("x") > 399_500).num_rows == 499
    same = fastpipe.from_arrow(table, batch_size=1000).filter(col("x") >= 399_000)
    assert [batch["x"].tolist() for batch in kept] == [batch["x"].tolist() for batch in same]


def test_folders_skip_files(tmp_path: Path) -> None:
    for day in ("1", "2", "3", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / f"day={day}/a.parquet")
    reader = fastpipe.read_parquet(tmp_path, batch_size=10)
    (tmp_path / "day=1/a.parquet").write_bytes(b"")
    # Reading the damaged file would be an error.
    found = reader.filter((col("day") >= 2) & (col("x") > 2))
    assert pa.table(found).to_pylist() == [{"x": 3, "day": 2}, {"x": 3, "day": 3}]
    assert pa.table(reader.filter(col("day").is_null() & (col("x") > 2)))["x"].to_pylist() == [3]
    assert reader.filter(col("day").is_in([3, 4]) | (col("day") == 5)).num_rows == 3
    with pytest.raises(fastpipe.errors.FastpipeError):
        reader.filter((col("day") < 2) & (col("x") > 0))


def test_slices_and_selections(tmp_path: Path) -> None:
    # Each row group is read in slices, because it is large.
    text = pa.array([f"{i // 17_000}".ljust(1000) for i in range(51_000)])
    pq.write_table(pa.table({"x": text}), path := tmp_path / "a.parquet", row_group_size=17_000, use_dictionary=False)
    reader = fastpipe.read_parquet(path, batch_size=5_000)
    found = reader.filter(col("x").starts_with("1"))
    assert found.num_rows == 17_000
    assert [location.unit for location in (found.locate(0, 0), found.locate(3, 1_999))] == [1, 1]
    assert next(iter(found))["x"].to_list() == ["1".ljust(1000)] * 5_000
    split = reader.split(0.5, 0.5)[0]
    assert 8_000 < split.filter(col("x").starts_with("2")).num_rows < 9_000
    part = reader.read_partition(reader.partition(3)[1])
    assert part.filter(col("x").starts_with("1")).num_rows == 17_000


@pytest.mark.parametrize(
    "condition",
    [col("x") != 5, ~(col("x") == 5), ~(col("x") < 6), ~(col("x") >= 5), ~col("x").is_in([5]), col("x").is_nan()],
)
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_statistics_of_floats_ignore_nan(kind: str, condition: Expr) -> None:
    file = written(pa.table({"x": pa.array([5, 5, 5, NAN], kind), "row": range(4)}), row_group_size=2)
    statistics = pq.read_metadata(io.BytesIO(file)).row_group(1).column(0).statistics
    assert (statistics.min, statistics.max) == (5, 5)
    assert rows_of(fastpipe.read_parquet(file, batch_size=4).filter(condition)) == [3]


@pytest.mark.parametrize("test", [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne])
def test_row_groups_without_statistics_are_read(test: Any) -> None:
    numbers = [{"x": [1, 2]}, {"x": [3, 4]}]
    for kind in ("int64", "uint32", "float64"):
        schema = pa.schema([pa.field("x", kind, nullable=False)])
        files = [
            written(pa.table(each, schema), write_statistics=known)
            for each, known in zip(numbers, (True, False), strict=True)
        ]
        reader = fastpipe.read_parquet(files, batch_size=4)
        for constant in range(6):
            for condition, is_not in ((test(col("x"), constant), False), (~test(col("x"), constant), True)):
                expected = [x for x in (1, 2, 3, 4) if test(x, constant) != is_not]
                assert pa.table(reader.filter(condition))["x"].to_pylist() == expected


def test_errors_of_nulls_remain() -> None:
    file = written(pa.table({"x": pa.array([1, None, 3, 4])}), row_group_size=2)
    reader = fastpipe.read_parquet(file, features={"x": DenseSpec((), "int64")}, batch_size=2)
    with pytest.raises(fastpipe.errors.NullValueError):
        reader.filter(col("x") > 3)
