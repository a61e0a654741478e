"""Decimals as integers in units of a power of ten.

They are compared with Python's decimals for every source, in both directions.
"""

from __future__ import annotations

import pickle
import tempfile
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from arrow_tables import as_lists
from fastpipe import DenseSpec, RaggedSpec, SparseSpec
from strategies import FEW

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DIGITS = {pa.decimal32: 9, pa.decimal64: 18, pa.decimal128: 38, pa.decimal256: 76}
EXACT = Context(prec=200)


class Slices:
    """A table as units of three rows."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self.schema = table, table.schema
        self.rows = [len(table.slice(at, 3)) for at in range(0, len(table), 3)]

    def read(self, unit: int) -> pa.Table:
        return self.table.slice(3 * unit, 3)

    def fingerprint(self) -> str:
        return "slices"


def scaled(value: Any, places: int) -> int:
    """Returns a number in units of 10**-places. It must be exact."""
    found = EXACT.scaleb(Decimal(value), places)
    assert found == int(found)
    return int(found)


@st.composite
def columns(draw: st.DrawFn) -> tuple[pa.Array, list[Any]]:
    """A column of decimals or integers, and its values."""
    rows = draw(st.integers(1, 8))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(INTEGERS))
        limits = np.iinfo(dtype)
        values = st.integers(int(limits.min), int(limits.max)) | st.integers(0, 9)
        kind = pa.from_numpy_dtype(dtype)
    else:
        make = draw(st.sampled_from(list(DIGITS)))
        own = draw(st.integers(-2, 6))
        digits = draw(st.integers(max(own, 1), DIGITS[make]))
        most = 10 ** draw(st.integers(1, digits)) - 1
        values = st.integers(-most, most).map(lambda value: EXACT.scaleb(Decimal(value), -own))
        kind = make(digits, own)
    items = draw(st.lists(st.none() | values if draw(st.booleans()) else values, min_size=rows, max_size=rows))
    column = pa.array(items, kind)
    stored = draw(st.sampled_from(("plain", "dictionary", "run ends", "sliced")))
    if stored == "dictionary":
        keys = [None if item is None else key for key, item in enumerate(items)]
        column = pa.DictionaryArray.from_arrays(pa.array(keys, pa.int16()), column)
    elif stored == "run ends":
        column = pa.RunEndEncodedArray.from_arrays(pa.array(range(1, rows + 1), pa.int32()), column)
    elif stored == "sliced":
        column = pa.concat_arrays([column, column]).slice(rows)
    return column, items


@given(column=columns(), more=st.integers(0, 4), dtype=st.sampled_from(INTEGERS), data=st.data())
def test_values_are_exact_or_rejected(column: tuple[pa.Array, list[Any]], more: int, dtype: str, data: Any) -> None:
    array, items = column
    own = getattr(array.type, "scale", None)
    if own is None:
        own = getattr(getattr(array.type, "value_type", None), "scale", 0)
    scale = own + more
    table = pa.table({"x": array})
    if data.draw(st.booleans()):
        table = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    spec = DenseSpec((), dtype, scale=scale, fill=data.draw(st.integers(0, 100)))
    exact = [spec.fill if item is None else scaled(item, scale) for item in items]
    limits = np.iinfo(dtype)
    if data.draw(st.booleans()):
        reader = fastpipe.from_arrow(table, features={"x": spec}, batch_size=3)
    else:
        reader = fastpipe.read_units(Slices(table), features={"x": spec}, batch_size=3)
    if all(limits.min <= value <= limits.max for value in exact):
        assert [value for batch in reader for value in batch["x"].tolist()] == exact
    else:
        with pytest.raises(
            fastpipe.errors.ValueRangeError, match=rf"feature 'x': .* doesn't fit {dtype} in units of 10\*\*"
        ):
            list(reader)


@st.composite
def wide_columns(draw: st.DrawFn) -> tuple[pa.Array, list[Any]]:
    """A column of decimals of any width, many with more digits than a float64."""
    make = draw(st.sampled_from(list(DIGITS)))
    digits = draw(st.integers(1, DIGITS[make]))
    own = draw(st.integers(-3, digits))
    most = 10**digits - 1
    unscaled = draw(st.lists(st.none() | st.integers(-most, most), min_size=1, max_size=8))
    items = [None if number is None else EXACT.scaleb(Decimal(number), -own) for number in unscaled]
    return pa.array(items, make(digits, own)), items


@given(column=wide_columns(), dtype=st.sampled_from(["float64", "float32"]), stored=st.booleans())
def test_floats_are_the_nearest(column: tuple[pa.Array, list[Any]], dtype: str, stored: bool) -> None:
    array, items = column
    array = array.dictionary_encode() if stored and array.type.bit_width in (128, 256) else array
    spec = DenseSpec((), dtype, on_null="mask")
    (batch,) = fastpipe.from_arrow(pa.table({"x": array}), features={"x": spec}, batch_size=len(items))
    for found, item in zip(batch["x"].to_list(), items, strict=True):
        if dtype == "float64" or item is None:
            # Python's conversion is correctly rounded.
            assert found == (None if item is None else float(item))
            continue
        below, above = (np.nextafter(np.float32(found), np.float32(end)) for end in (-np.inf, np.inf))
        distance = abs(Decimal(found) - item)
        assert all(distance <= abs(Decimal(float(other)) - item) for other in (below, above))


PRICES = [Decimal("1.25"), Decimal("-3.00"), None, Decimal("99999999.99")]
CENTS = [125, -300, None, 9999999999]
KIND = pa.decimal128(10, 2)
FORMS: dict[str, tuple[pa.Array, fastpipe.specs.Spec, list[Any]]] = {
    "filled": (pa.array(PRICES, KIND), DenseSpec((), "int64", scale=2, fill=-1), [125, -300, -1, 9999999999]),
    "masked": (pa.array(PRICES, KIND), DenseSpec((), "int64", scale=2, on_null="mask"), CENTS),
    "larger scale": (pa.array(PRICES[:2], KIND), DenseSpec((), "int32", scale=4), [12500, -30000]),
    "fixed shape": (
        pa.array([PRICES[:2], PRICES[1::-1]], pa.list_(KIND, 2)),
        DenseSpec((2,), "int16", scale=2),
        [[125, -300], [-300, 125]],
    ),
    "padded": (
        pa.array([PRICES[:1], []], pa.list_(KIND)),
        DenseSpec((2,), "int16", scale=2, pad=-7),
        [[125, -7], [-7, -7]],
    ),
    "ragged": (
        pa.array([PRICES, [], PRICES[1:2]], pa.large_list(KIND)),
        RaggedSpec((None,), "int64", scale=2, on_null="mask"),
        [CENTS, [], [-300]],
    ),
    "nested": (
        pa.array([[[Decimal("1.25"), Decimal(3)], []], []], pa.list_(pa.list_(KIND))),
        RaggedSpec((None, None), "uint64", scale=2, on_null="mask"),
        [[[125, 300], []], []],
    ),
    "unsigned": (pa.array([2**64 - 1, 0], pa.uint64()), DenseSpec((), "uint64", scale=0), [2**64 - 1, 0]),
    "beyond 38 digits": (pa.array([0, 0], pa.int8()), DenseSpec((), "int8", scale=60), [0, 0]),
    "negative scale": (pa.array([1200, -300], pa.decimal128(5, -2)), DenseSpec((), "int8", scale=-2), [12, -3]),
}


@pytest.mark.parametrize("form", FORMS)
def test_decimals_round_trip_through_arrow(form: str, tmp_path: Path) -> None:
    column, spec, expected = FORMS[form]
    reader = fastpipe.from_arrow(pa.table({"x": column}), features={"x": spec}, batch_size=8)
    (batch,) = reader
    assert as_lists(batch["x"]) == expected
    reader.set_epoch(0)
    table = pa.table(reader)
    kind = table.schema.field("x").type
    while not pa.types.is_decimal(kind):
        kind = kind.value_type
    assert kind.scale == spec.scale
    assert table.column("x").combine_chunks().cast(table.schema.field("x").type).validate(full=True) is None
    again = [fastpipe.from_arrow(table, batch_size=8)]
    record_batch = fastpipe.to_arrow(batch, reader.features)
    assert record_batch.equals(table.combine_chunks().to_batches()[0], check_metadata=True)
    again.append(fastpipe.from_arrow(record_batch, batch_size=8))
    if spec.scale is not None and spec.scale >= 0:
        path = tmp_path / "table.parquet"
        pa.parquet.write_table(table, path)
        again.append(fastpipe.read_parquet(path, batch_size=8))
    for other in again:
        (found,) = pickle.loads(pickle.dumps(other))
        assert as_lists(found["x"]) == expected
        assert (other.features["x"].dtype, other.features["x"].scale) == (spec.dtype, spec.scale)
        assert other.features["x"].shape == spec.shape


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_values(layout: Any) -> None:
    rows = [{"indices0": [1, 3], "values": [Decimal("0.50"), Decimal("2.00")]}, {"indices0": [], "values": []}]
    kind = pa.struct([("indices0", pa.list_(pa.int32())), ("values", pa.list_(KIND))])
    spec = SparseSpec((5,), "int32", scale=2, layout=layout)
    reader = fastpipe.from_arrow(pa.table({"s": pa.array(rows, kind)}), features={"s": spec}, batch_size=2)
    (batch,) = reader
    assert batch["s"].values.tolist() == [50, 200]
    reader.set_epoch(0)
    table = pa.table(reader)
    assert table.column("s").to_pylist() == rows
    (again,) = fastpipe.from_arrow(table, batch_size=2)
    assert again["s"].values.dtype == "int32"
    assert again["s"].values.tolist() == [50, 200]
    wide = pa.array([{"indices0": [1], "values": [Decimal("99999999.00")]}], kind)
    with pytest.raises(
        fastpipe.errors.ValueRangeError, match=r"Decimal128\(10, 2\) doesn't fit int32 in units of 10\*\*-2"
    ):
        list(fastpipe.from_arrow(pa.table({"s": wide}), features={"s": spec}, batch_size=1))


@pytest.mark.parametrize(
    ("column", "spec", "error", "match"),
    [
        (
            PRICES,
            DenseSpec((), "int64", scale=1),
            fastpipe.errors.SchemaError,
            r"have 2 decimal places, and scale=1 would round .*scale=2",
        ),
        ([1.5], DenseSpec((), "int64", scale=1), fastpipe.errors.SchemaError, r"of type Float64: remove it"),
        (["1"], DenseSpec((), "int64", scale=1), fastpipe.errors.SchemaError, r"of type Utf8: remove it"),
        (PRICES, DenseSpec((), "int64"), fastpipe.errors.SchemaError, r'request "float64" .* integers with scale='),
        (PRICES, DenseSpec((), "int64", scale=2), fastpipe.errors.NullValueError, r"found null.*record 2"),
        (
            PRICES[3:],
            DenseSpec((), "int32", scale=2),
            fastpipe.errors.ValueRangeError,
            r'10\*\*-2; request "int64", or "float64" without scale=.*record 0',
        ),
        (
            [2**62],
            DenseSpec((), "int64", scale=2),
            fastpipe.errors.ValueRangeError,
            r'10\*\*-2; request a smaller scale, or "float64" without scale=.*record 0',
        ),
    ],
)
def test_errors_name_the_feature(column: list[Any], spec: Any, error: type[Exception], match: str) -> None:
    array = pa.array(column, KIND) if column[0] in PRICES else pa.array(column)
    with pytest.raises(error, match=f"feature 'x': .*{match}"):
        list(fastpipe.from_arrow(pa.table({"x": array}), features={"x": spec}, batch_size=4))


def test_decimals_are_floats_by_default() -> None:
    reader = fastpipe.from_arrow(pa.table({"x": pa.array(PRICES[:2], KIND)}), batch_size=2)
    assert reader.features == {"x": DenseSpec((), "float64")}
    assert next(iter(reader))["x"].tolist() == [1.25, -3.0]


def test_integers_must_have_the_dtype_of_the_spec() -> None:
    with pytest.raises(TypeError, match=r"has Arrow type int32, but its spec requires decimal128\(19, 2\)"):
        fastpipe.to_arrow({"x": np.arange(3, dtype="int32")}, {"x": DenseSpec((), "int64", scale=2)})


def test_integers_of_avro_files_have_scale_0(tmp_path: Path) -> None:
    path = tmp_path / "a.avro"
    schema = {"type": "record", "name": "r", "fields": [{"name": "x", "type": "long"}]}
    with path.open("wb") as file:
        fastavro.writer(file, schema, [{"x": 1}, {"x": -7}])
    (batch,) = fastpipe.read_avro(path, features={"x": DenseSpec((), "int64", scale=2)}, batch_size=2)
    assert batch["x"].tolist() == [100, -700]
    with pytest.raises(fastpipe.errors.SchemaError, match="0 decimal places, and scale=-1 would round them") as caught:
        fastpipe.read_avro(path, features={"x": DenseSpec((), "int64", scale=-1)}, batch_size=1)
    assert caught.value.feature == "x"


# --- Avro files ---


def decimals(kind: Any, values: list[Any], path: Path) -> Path:
    schema = {"type": "record", "name": "R", "fields": [{"name": "d", "type": kind}]}
    with path.open("wb") as file:
        fastavro.writer(file, schema, [{"d": value} for value in values])
    return path


_WIDE = {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}


@settings(max_examples=FEW)
@given(st.lists(st.integers(-(10**36) + 1, 10**36 - 1), max_size=20), st.integers(2, 4), st.booleans())
def test_pairs_are_exact(numbers: list[int], scale: int, shuffle: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        values = [Decimal(number).scaleb(-2, Context(prec=60)) for number in numbers]
        path = decimals(_WIDE, values, Path(folder) / "x.avro")
        spec = fastpipe.decimal_spec(values="pairs", scale=scale)
        with fastpipe.read_avro(path, features={"d": spec}, batch_size=3, shuffle=shuffle, seed=1) as reader:
            batches = [fastpipe.to_decimals(batch["d"], scale, pairs=True) for batch in reader]
        found = [value for batch in batches for value in batch.tolist()]
        assert sorted(found) == sorted(values)
        assert shuffle or found == values
        assert all(value.as_tuple().exponent == -scale for value in found)


@settings(max_examples=FEW)
@given(
    st.lists(st.none() | st.integers(-(10**36) + 1, 10**36 - 1), min_size=1, max_size=20),
    st.integers(2, 4),
    st.sampled_from([pa.decimal128, pa.decimal256]),
    st.sampled_from(["plain", "dictionary", "file"]),
)
def test_pairs_of_columns_are_exact(numbers: list[int | None], scale: int, make: Any, stored: str) -> None:
    values = [None if number is None else Decimal(number).scaleb(-2, Context(prec=60)) for number in numbers]
    array = pa.array(values, make(38, 2))
    table = pa.table({"d": array.dictionary_encode() if stored == "dictionary" else array})
    spec = fastpipe.decimal_spec(values="pairs", scale=scale, on_null="mask")
    with tempfile.TemporaryDirectory() as folder:
        if stored == "file":
            path = Path(folder) / "x.parquet"
            pa.parquet.write_table(table, path)
            reader = fastpipe.read_parquet(path, features={"d": spec}, batch_size=3)
        else:
            reader = fastpipe.from_arrow(table, features={"d": spec}, batch_size=3)
        found: list[Any] = []
        for batch in reader:
            halves, valid = batch["d"].values, batch["d"].valid
            assert (halves.dtype, halves.shape) == (np.int64, (len(valid), 2))
            decimals = fastpipe.to_decimals(halves, scale, pairs=True)
            found += [decimal if there else None for decimal, there in zip(decimals, valid, strict=True)]
    assert found == values
    assert all(value is None or value.as_tuple().exponent == -scale for value in found)


def test_pairs_of_lists_and_invalid_pairs() -> None:
    kind = pa.decimal128(38, 2)
    strict = pa.schema([pa.field("d", pa.list_(kind), nullable=False)])
    table = pa.table({"d": [[Decimal("1.25"), None], [], [Decimal("-0.01")]]}, strict)
    spec = fastpipe.decimal_spec((None,), values="pairs", scale=2, on_null="mask")
    (batch,) = fastpipe.from_arrow(table, features={"d": spec}, batch_size=3)
    items = batch["d"].values
    assert items.valid.tolist() == [True, False, True]
    assert fastpipe.to_decimals(items.values, 2, pairs=True)[items.valid].tolist() == [
        Decimal("1.25"),
        Decimal("-0.01"),
    ]
    assert batch["d"].offsets.tolist() == [0, 2, 2, 3]
    # A fixed-size list of two decimals is two numbers and not a pair.
    two = pa.table({"d": pa.array([[Decimal("1.25"), Decimal(3)]], pa.list_(kind, 2))})
    (batch,) = fastpipe.from_arrow(two, features={"d": DenseSpec((2,), "int64", scale=2)}, batch_size=1)
    assert batch["d"].tolist() == [[125, 300]]
    (batch,) = fastpipe.from_arrow(two, features={"d": DenseSpec((2, 2), "int64", scale=2)}, batch_size=1)
    assert batch["d"].tolist() == [[[125, 0], [300, 0]]]
    one = pa.table({"d": pa.array([Decimal(10**36 - 1)], kind)})
    for features, error, match in (
        (
            DenseSpec((2,), "int64", scale=5),
            fastpipe.errors.ValueRangeError,
            r"doesn't fit a pair of int64 in units of 10\*\*-5",
        ),
        (DenseSpec((2,), "int64", scale=1), fastpipe.errors.SchemaError, "scale=1 would round them"),
        (DenseSpec((2,), "int64", scale=2, fill=7), fastpipe.errors.SchemaError, "not supported for pairs of int64"),
        (DenseSpec((2,), "int64", scale=2, pad=7), fastpipe.errors.SchemaError, "not supported for pairs of int64"),
        (DenseSpec((3,), "int64", scale=2), fastpipe.errors.SchemaError, "the column has no lists, so 0 are needed"),
        (DenseSpec((2,), "int32", scale=2), fastpipe.errors.SchemaError, "the column has no lists, so 0 are needed"),
        (fastpipe.RaggedSpec((None,), "int64", scale=2), fastpipe.errors.SchemaError, "the column has no lists"),
    ):
        with pytest.raises(error, match=match):
            list(fastpipe.from_arrow(one, features={"d": features}, batch_size=1))


def test_pairs_in_arrays_and_nulls(tmp_path: Path) -> None:
    kind = {"type": "array", "items": ["null", _WIDE]}
    path = decimals(kind, [[Decimal("1.25"), None], [], [Decimal("-0.01")]], tmp_path / "x.avro")
    spec = fastpipe.decimal_spec((None,), values="pairs", scale=2, on_null="mask")
    assert spec == fastpipe.RaggedSpec((None, 2), "int64", on_null="mask", scale=2)
    (batch,) = fastpipe.read_avro(path, features={"d": spec}, batch_size=3)
    items = batch["d"].values
    found = fastpipe.to_decimals(items.values, 2, pairs=True)
    assert items.valid.tolist() == [True, False, True]
    assert found[items.valid].tolist() == [Decimal("1.25"), Decimal("-0.01")]
    assert batch["d"].offsets.tolist() == [0, 2, 2, 3]


def test_invalid_pairs(tmp_path: Path) -> None:
    path = decimals(_WIDE, [Decimal(10**30)], tmp_path / "x.avro")
    wider = fastpipe.decimal_spec(values="pairs", scale=30)
    with pytest.raises(fastpipe.errors.ValueRangeError, match="the decimal doesn't fit int64"):
        list(fastpipe.read_avro(path, features={"d": wider}, batch_size=1))
    with pytest.raises(fastpipe.errors.SchemaError, match="scale=1 would round them: use scale=2 or more"):
        fastpipe.read_avro(path, features={"d": fastpipe.decimal_spec(scale=1)}, batch_size=1)
    filled = fastpipe.DenseSpec((2,), "int64", scale=2, fill=7)
    with pytest.raises(fastpipe.errors.SchemaError, match="not supported for pairs of int64"):
        fastpipe.read_avro(path, features={"d": filled}, batch_size=1)
    for arguments, match in (
        ({}, "requires scale="),
        ({"values": "float64", "scale": 1}, "doesn't support scale="),
        ({"values": "pairs", "scale": 1, "fill": 1}, "not both"),
        ({"values": "decimal", "scale": 1}, "values must be"),
    ):
        with pytest.raises(ValueError, match=match):
            fastpipe.decimal_spec(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an array of integers"):
        fastpipe.to_decimals([1], 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pairs must be int64 of shape \[\.\.\., 2\]"):
        fastpipe.to_decimals(np.zeros(3, np.int64), 2, pairs=True)


def test_scaled_integers_as_decimals() -> None:
    found = fastpipe.to_decimals(np.array([[1234], [-5]]), 2)
    assert found.tolist() == [[Decimal("12.34")], [Decimal("-0.05")]]
    assert fastpipe.to_decimals(np.zeros((0, 2), np.int64), 2, pairs=True).shape == (0,)
