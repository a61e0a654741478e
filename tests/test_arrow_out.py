"""Batches as Arrow record batches: values, types, memory, and the specs in the schema."""

from __future__ import annotations

import gc
import json
import math
import pickle
import sys
import weakref
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
import oracle
from fastpipe import DenseSpec, Masked, Ragged, RaggedSpec, Sparse, SparseSpec, Strings, to_arrow
from fastpipe._arrow import features_of, schema_of
from fastpipe.batch import SparseCSR

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]

# --- Any batch value has the nested lists of its Arrow array ---


def entries(value: Any) -> Any:
    """Returns Arrow lists with sparse rows as batch values list them: (index tuple, value)."""
    if isinstance(value, dict):
        indices = [value[f"indices{i}"] for i in range(len(value) - 1)]
        return list(zip(zip(*indices, strict=True), entries(value["values"]), strict=True))
    if isinstance(value, list):
        return [entries(item) for item in value]
    return float(value) if isinstance(value, np.floating) else value


def listed(form: Any) -> list[Any]:
    rows: list[Any] = form.tolist() if isinstance(form, np.ndarray) else form.to_list()
    return rows


def offsets_of(draw: st.DrawFn, rows: int) -> np.ndarray:
    lengths = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    return np.cumsum([0, *lengths], dtype=np.int64)


@st.composite
def dense(draw: st.DrawFn, rows: int, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Numbers in any memory layout."""
    shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2))) if shape is None else shape
    dtype = np.dtype(draw(st.sampled_from(NUMBERS)))
    random = np.random.default_rng(draw(st.integers(0, 9)))
    values = random.integers(0, 2 if dtype == "?" else 100, shape).astype(dtype)
    layout = draw(st.sampled_from(["C", "C", "F", "strided", "swapped", "read only"]))
    if layout == "strided":
        values = np.repeat(values, 2, axis=0)[::2]
    elif layout == "swapped":
        values = values.astype(dtype.newbyteorder())
    elif layout == "read only":
        values.flags.writeable = False
    else:
        values = np.asarray(values, order=layout)  # type: ignore[call-overload]
    return values


@st.composite
def strings(draw: st.DrawFn, rows: int, shape: tuple[int, ...] | None = None) -> Strings:
    shape = (rows, *draw(st.lists(st.integers(0, 2), max_size=2))) if shape is None else shape
    count, binary = math.prod(shape), draw(st.booleans())
    texts = draw(st.lists(st.binary(max_size=3) if binary else st.text(max_size=3), min_size=count, max_size=count))
    encoded = [text if isinstance(text, bytes) else text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return Strings(np.frombuffer(b"".join(encoded), np.uint8), offsets, shape, binary)


@st.composite
def sparse(draw: st.DrawFn, rows: int) -> Sparse | SparseCSR:
    rank, offsets = draw(st.integers(1, 3)), offsets_of(draw, rows)
    count = int(offsets[-1])
    indices = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 9, (count, rank))
    values = draw(st.one_of(dense(count, (count,)), strings(count, (count,))))
    if draw(st.booleans()):
        values = Masked(values, flags(draw, (count,)))
    sizes = np.array([rows] + [9] * rank)
    if draw(st.booleans()):
        return SparseCSR(offsets, indices[:, 0] if rank == 1 and draw(st.booleans()) else indices, values, sizes)
    of = np.repeat(np.arange(rows), np.diff(offsets))
    return Sparse(np.column_stack([of, indices]), values, sizes)


def flags(draw: st.DrawFn, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(draw(st.integers(0, 9))).random(shape) < draw(st.sampled_from([0.0, 0.5, 1.0]))


@st.composite
def forms(draw: st.DrawFn, rows: int, depth: int = 3) -> Any:
    """A random batch value of `rows` rows, nested up to `depth` levels, with masks anywhere."""
    kind = draw(
        st.sampled_from(["dense", "strings", "sparse", "sparse", "ragged", "ragged"] if depth else ["dense", "strings"])
    )
    form: Any
    if kind == "ragged":
        offsets = offsets_of(draw, rows)
        form = Ragged(draw(forms(int(offsets[-1]), depth - 1)), offsets)
    else:
        form = draw({"dense": dense, "strings": strings, "sparse": sparse}[kind](rows))
    shape = form.shape if kind in ("dense", "strings") else (rows,)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2, 3]))):
        # An outer mask is not deeper than an inner one, because to_list would look for entries within None.
        inner = form.valid.ndim if isinstance(form, Masked) else len(shape)
        form = Masked(form, flags(draw, shape[: draw(st.integers(1, inner))]))
    return form


@given(st.data(), st.integers(0, 5))
def test_any_batch_has_equal_values_in_arrow(data: st.DataObject, rows: int) -> None:
    batch = {name: data.draw(forms(rows)) for name in "abc"}
    record_batch = to_arrow(batch)
    assert record_batch.num_rows == rows
    assert record_batch.schema.names == list("abc")
    record_batch.validate(full=True)
    for name, form in batch.items():
        assert repr(entries(record_batch[name].to_pylist())) == repr(listed(form))
        record_batch[name].validate(full=True)
        if not isinstance(form, np.ndarray):
            assert form.to_arrow().equals(record_batch[name])


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_are_shared_and_nat_is_null(unit: str) -> None:
    for kind, wanted in (("datetime64", pa.timestamp(unit)), ("timedelta64", pa.duration(unit))):
        times = np.array([1, "NaT", -3], f"{kind}[{unit}]")
        array = to_arrow({"t": times})["t"]
        assert array.type == wanted
        assert array.cast(pa.int64()).to_pylist() == [1, None, -3]
        assert array.buffers()[1].address == times.ctypes.data
        square = np.stack([times, times])
        masked = to_arrow({"t": Masked(square, np.array([True, False]))})["t"]
        assert masked.is_null().to_pylist() == [False, True]
        assert masked[0].values.is_null().to_pylist() == [False, True, False]
        swapped = to_arrow({"t": times.astype(times.dtype.newbyteorder())})["t"]
        assert swapped.equals(array)


def test_dates_and_long_units_are_converted() -> None:
    for dtype in ("datetime64[D]", "datetime64[W]", "datetime64[M]", "datetime64[Y]"):
        days = np.array(["1970-01-01", "NaT", "2035-06-07"], "datetime64[D]").astype(dtype)
        array = to_arrow({"t": days})["t"]
        assert array.type == pa.date32()
        assert array.to_pylist() == days.astype("datetime64[D]").tolist()
    for dtype in ("datetime64[h]", "datetime64[m]", "datetime64[10s]", "timedelta64[D]", "timedelta64[W]"):
        times = np.array([2, "NaT", -5], dtype)
        array = to_arrow({"t": times})["t"]
        unit = f"{dtype[: dtype.index('[')]}[s]"
        assert (
            array.cast(pa.int64()).fill_null(0).to_pylist()
            == np.where(np.isnat(times), 0, times.astype(unit).view(np.int64)).tolist()
        )
    for dtype, number in (("datetime64[D]", 2**31), ("datetime64[h]", 2**62), ("timedelta64[W]", 2**62)):
        with pytest.raises(ValueError, match=r"column 't' has .* fit"):
            to_arrow({"t": np.array([number], dtype)})


# --- Memory ---


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_nothing_is_copied_if_layouts_match() -> None:
    offsets = np.array([0, 1, 3])
    for dtype in NUMBERS[1:]:
        values = np.arange(12).reshape(2, 3, 2).astype(dtype)
        assert to_arrow({"x": values[:, 0, 0].copy(), "y": values})["y"].buffers()[-1].address == address(values)
    values, text = np.arange(3.0), np.frombuffer(b"abc", np.uint8)
    inner = Ragged(Strings(text, np.arange(4), (3,), False), offsets)
    bools = Masked(values[:2], np.array([True, False]))
    csr = SparseCSR(offsets, np.array([4, 0, 1]), values, np.array([2, 5]))
    coo = Sparse(np.array([[0, 4], [1, 0], [1, 1]]), values, np.array([2, 5]))
    found = to_arrow({"inner": inner, "mask": bools, "csr": csr, "coo": coo})
    assert [b and b.address for b in found["inner"].buffers()] == [
        None,
        address(offsets),
        None,
        address(inner.values.offsets),
        address(text),
    ]
    assert found["mask"].buffers()[1].address == address(values)
    assert [b and b.address for b in found["csr"].buffers()[1:]] == [
        None,
        address(offsets),
        None,
        address(csr.indices),
        None,
        address(offsets),
        None,
        address(values),
    ]
    assert found["coo"].buffers()[-1].address == address(values)
    assert found["coo"].to_pylist() == found["csr"].to_pylist()


def test_arrow_keeps_shared_memory_alive() -> None:
    values = np.arange(4.0)
    alive = weakref.ref(values)
    column = to_arrow({"x": Ragged(values, np.array([0, 4]))})["x"]
    values[0] = 7
    del values
    gc.collect()
    assert column.to_pylist() == [[7, 1, 2, 3]]
    column = column.values[2:3]
    gc.collect()
    assert alive() is not None
    del column
    gc.collect()
    assert alive() is None


def test_more_levels_than_pyarrow_imports_are_refused() -> None:
    column: Any = np.arange(1)
    for _ in range(62):
        column = Ragged(column, np.array([0, 1]))
    assert to_arrow({"x": column}).num_rows == 1
    column = Ragged(column, np.array([0, 1]))
    for convert in (lambda: to_arrow({"x": column}), lambda: Ragged(column, np.array([0, 1])).to_arrow()):
        with pytest.raises(fastpipe.errors.LimitError, match="at most 64 levels of nesting"):
            convert()


# --- Unsupported values ---

TWO = np.arange(2)


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [
        (np.float32(1), TypeError, "column 'x' must be a NumPy array, .*; got np.float32"),
        (np.array(1), TypeError, "column 'x' is an array without dimensions"),
        ([1, 2], TypeError, r"column 'x' must be a NumPy array, Ragged, .* or SparseCSR; got \[1, 2\]"),
        (None, TypeError, "column 'x' must be a NumPy array, .*; got None"),
        (np.array(["a", None], object), TypeError, r"column 'x' has dtype object.*Strings"),
        (np.array(["a", "b"]), TypeError, r"column 'x' has dtype <U1.*Strings"),
        (np.array([1j, 2]), TypeError, "column 'x' has dtype complex128"),
        (np.zeros(2, "i4,i4"), TypeError, "column 'x' has dtype"),
        (np.zeros(2, "timedelta64[M]"), TypeError, "units s, ms, us and ns"),
        (np.zeros(2, "datetime64[ps]"), TypeError, "units s, ms, us and ns"),
        (np.ma.masked_array(TWO, [True, False]), TypeError, r"use fastpipe\.Masked"),
        (Ragged(np.array([None], object), TWO), TypeError, "column 'x' has dtype object"),
        (
            Ragged(TWO, TWO.astype(float)),
            TypeError,
            r"column 'x': offsets must be one-dimensional integers.*float64\[2\]",
        ),
        (Ragged(TWO, TWO[:0]), ValueError, "column 'x': offsets"),
        (Ragged(TWO, np.array([0, 3, 2])), ValueError, "column 'x': "),
        (Ragged(TWO, np.array([0, 2, 9])), ValueError, "column 'x': "),
        (Ragged(TWO, np.array([-4, 0, 2])), ValueError, "column 'x': "),
        (Strings(np.array([0xFF, 0], np.uint8), np.arange(3), (2,), False), ValueError, "column 'x': .*UTF8"),
        (
            Strings(TWO, np.arange(3), (2,), False),
            TypeError,
            "column 'x': the bytes of Strings must be",
        ),
        (Strings(np.zeros(2, np.uint8), np.arange(3), (2, 2), False), ValueError, "column 'x': 4 strings must have 5"),
        (Masked(TWO, TWO), TypeError, "column 'x': a mask must be a bool array"),
        (Masked(TWO, np.ones(3, bool)), ValueError, r"column 'x': a mask of shape \(3,\)"),
        (Masked(TWO, np.ones((2, 1), bool)), ValueError, r"column 'x': a mask of shape \(2, 1\)"),
        (Masked(Masked(TWO, np.ones(2, bool)), np.ones(1, bool)), ValueError, "a mask of shape .* contains one"),
        (Sparse(np.array([[1, 0], [0, 0]]), TWO, np.array([2, 5])), ValueError, "must be sorted by row"),
        (Sparse(np.array([[0, 0], [2, 0]]), TWO, np.array([2, 5])), ValueError, "must be sorted by row, from 0 to 1"),
        (Sparse(np.array([[0, 0]]), TWO, np.array([2, 5])), ValueError, "1 sparse indices, but 2 values"),
        (Sparse(np.array([[0], [1]]), TWO, np.array([2, 5])), ValueError, "the row and an index per dimension"),
        (SparseCSR(np.arange(3), TWO / 2, TWO, np.array([2, 5])), TypeError, "sparse indices must be integers"),
    ],
)
def test_unsupported_columns_are_named(column: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        to_arrow({"first": TWO, "x": column})


def test_other_objects_are_rejected() -> None:
    with pytest.raises(TypeError, match="a batch must be a dict"):
        to_arrow([TWO])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="column 'a' has 2 rows, but column 'b' has 3"):
        to_arrow({"a": TWO, "b": np.arange(3)})
    with pytest.raises(TypeError, match="name of a column must be a string; got 1"):
        to_arrow({1: TWO})  # type: ignore[dict-item]
    for name in ("a\0b", "\udc80"):
        with pytest.raises(ValueError, match="UTF-8 without NUL"):
            to_arrow({name: TWO})
    assert to_arrow({}).num_rows == 0


def test_batches_that_do_not_fit_their_specs_are_rejected() -> None:
    specs = {"a": DenseSpec((), "int64"), "b": DenseSpec((2,), "float32")}
    batch = {"b": np.zeros((2, 2), np.float32), "a": TWO}
    assert to_arrow(batch, specs).schema.names == ["a", "b"]
    with_flags = to_arrow(batch | {"valid": np.array([True, False])}, specs)
    assert with_flags.schema.equals(schema_of(specs, valid=True), check_metadata=True)
    with pytest.raises(ValueError, match=r"lacks \['b'\]"):
        to_arrow({"a": TWO}, specs)
    with pytest.raises(ValueError, match=r"also has \['c'\]"):
        to_arrow(batch | {"c": TWO}, specs)
    with pytest.raises(TypeError, match="column 'a' has Arrow type int32, but its spec requires int64"):
        to_arrow(batch | {"a": TWO.astype(np.int32)}, specs)
    with pytest.raises(TypeError, match="dict from name to spec"):
        to_arrow(batch, ["a"])  # type: ignore[arg-type]


def test_missing_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for call in (lambda: to_arrow({"a": TWO}), lambda: schema_of({}), Ragged(TWO, TWO).to_arrow):
        with pytest.raises(ImportError, match=r"pip install 'fastpipe-data\[arrow\]'"):
            call()


# --- Specs ---

NULLABLE = ["null", "long"]
LISTS = {"type": "array", "items": {"type": "array", "items": "long"}}
HOLES = ["null", {"type": "array", "items": ["null", {"type": "array", "items": NULLABLE}]}]
TEXTS = ["null", {"type": "array", "items": ["null", "string"]}]
TERMS = {
    "type": "record",
    "name": "Terms",
    "fields": [{"name": f"indices{i}", "type": {"type": "array", "items": "int"}} for i in range(2)]
    + [{"name": "values", "type": {"type": "array", "items": "string"}}],
}
FIELDS: dict[str, Any] = {
    "number": "int",
    "real": "double",
    "flag": "boolean",
    "text": "string",
    "raw": "bytes",
    "maybe": NULLABLE,
    "three": {"type": "array", "items": "int"},
    "holes": HOLES,
    "texts": TEXTS,
    "lists": LISTS,
    "terms": ["null", TERMS],
}
SPECS: dict[str, Any] = {
    **{dtype: DenseSpec((), dtype, field="number") for dtype in ("int8", "int16", "int32", "int64")},
    **{dtype: DenseSpec((), dtype, field="number") for dtype in ("uint8", "uint16", "uint32", "uint64")},
    **{dtype: DenseSpec((), dtype, field="real") for dtype in ("float32", "float64")},
    "flag": DenseSpec((), "bool"),
    "text": DenseSpec((), "string"),
    "raw": DenseSpec((), "bytes"),
    "maybe": DenseSpec((), "int64", on_null="mask"),
    "filled": DenseSpec((), "int64", fill=-1, field="maybe"),
    "three": DenseSpec((3,), "int32"),
    "padded": DenseSpec((5,), "float32", pad=-1, field="three"),
    "count": DenseSpec((), "int64", field="three", length=True),
    "ragged": RaggedSpec((None,), "int32", field="three"),
    "holes": RaggedSpec((None, None), "int64", on_null="mask"),
    "no_holes": RaggedSpec((None, None), "int64", on_null="fill", field="holes"),
    "texts": RaggedSpec((None,), "string", on_null="mask"),
    "lists": RaggedSpec((None, 2), "int64"),
    "outer": RaggedSpec((2, None), "int64", field="lists"),
    "square": DenseSpec((2, 2), "int64", field="lists"),
    "counts": RaggedSpec((None,), "int64", length=True, field="lists"),
    "coo": SparseSpec((9, None), "string", on_null="mask", field="terms"),
    "csr": SparseSpec((9, 9), "string", on_null="fill", layout="csr", field="terms"),
}


def record(i: int) -> dict[str, Any]:
    terms = {"indices0": [i % 9] * (i % 3), "indices1": list(range(i % 3)), "values": ["t", "ü"][: i % 3]}
    return {
        "number": i,
        "real": i / 3,
        "flag": i % 2 == 0,
        "text": "ä" * (i % 4),
        "raw": b"\xff" * (i % 3),
        "maybe": None if i % 3 == 0 else i,
        "three": [i, -i, 0],
        "holes": [None, [], [None, [], [1, None, i]], [[2]]][i % 4],
        "texts": [None, [], [None, "a"], ["", "b", None]][i % 4],
        "lists": [[i, 1], [2, -i]],
        "terms": None if i % 5 == 0 else terms,
    }


@pytest.fixture(scope="module")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arrow") / "all.avro"
    fields = [{"name": name, "type": kind} for name, kind in FIELDS.items()]
    with path.open("wb") as file:
        fastavro.writer(file, {"type": "record", "name": "R", "fields": fields}, [record(i) for i in range(50)])
    return path


@pytest.mark.parametrize("options", [{}, {"rank": 1, "world_size": 3, "on_uneven": "pad"}])
def test_the_schema_is_that_of_every_batch(every_kind: Path, options: dict[str, Any]) -> None:
    reader = fastpipe.read_avro(every_kind, features=SPECS, batch_size=7, **options)
    schema = schema_of(reader.features, valid=bool(options))
    assert pa.schema(reader) == schema
    batches = list(reader)
    rows = 0
    for batch, streamed in zip(batches, reader.to_arrow_reader(), strict=True):
        found = to_arrow(batch, reader.features)
        for arrow in (found, streamed):
            assert arrow.schema.equals(schema, check_metadata=True)
            arrow.validate(full=True)
        assert to_arrow(batch).schema == schema, "the arrays alone determine the schema"
        for name, form in batch.items():
            rows_of = listed if name == "valid" else oracle.rows
            problem = oracle.difference(rows_of(form), entries(found[name].to_pylist()), name)
            assert problem is None, problem
        for cut in (slice(0, 0), slice(2, 3)):
            part = to_arrow({name: form[cut] for name, form in batch.items()}, reader.features)
            assert part.schema == schema
            assert part.to_pylist() == found[cut].to_pylist()
        assert found.equals(streamed) or options, "the epoch's order differs"
        rows += len(found)
    assert rows == 50 or options


def test_every_spec_survives_arrow(every_kind: Path, tmp_path: Path) -> None:
    reader = fastpipe.read_avro(every_kind, features=SPECS, batch_size=20)
    table = pa.table(reader)
    assert features_of(table.schema) == SPECS
    assert features_of(pickle.loads(pickle.dumps(table.schema))) == SPECS
    assert features_of(table.select(["coo", "flag"]).schema) == {name: SPECS[name] for name in ("flag", "coo")}
    with pa.ipc.new_file(tmp_path / "all.arrow", table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.open_file(tmp_path / "all.arrow") as file:
        assert features_of(file.schema) == SPECS
    assert features_of(table.schema.remove_metadata()) is None
    assert features_of(schema_of({})) == {}


shapes = st.lists(st.integers(1, 2**31 - 1), max_size=3).map(tuple)
VALUES: list[tuple[str, st.SearchStrategy[Any]]] = [
    ("bool", st.booleans()),
    ("int8", st.integers(-128, 127)),
    ("uint64", st.integers(0, 2**64 - 1)),
    ("float32", st.floats(width=32)),
    ("float64", st.floats(width=32)),
    ("string", st.text(max_size=5)),
    ("bytes", st.binary(max_size=5)),
]


@st.composite
def specs(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from([DenseSpec, RaggedSpec, SparseSpec]))
    options: dict[str, Any] = {"on_null": draw(st.sampled_from(["error", "mask", "fill"]))}
    options["field"] = draw(st.none() | st.text(min_size=1, max_size=5))
    dtype, value = draw(st.sampled_from(VALUES))
    if options["on_null"] == "fill" and draw(st.booleans()):
        options["fill"] = draw(value)
    shape: Any = draw(shapes)
    if kind is DenseSpec and shape and dtype not in ("string", "bytes") and draw(st.booleans()):
        options["pad"] = draw(value)
    if kind is SparseSpec:
        shape = (*shape, draw(st.none() | st.integers(1, 2**40)))
        options |= {"layout": draw(st.sampled_from(["coo", "csr"])), "check_indices": draw(st.booleans())}
    elif kind is RaggedSpec:
        shape = (*draw(shapes), None, *shape)
    if kind is not SparseSpec and "pad" not in options and "fill" not in options and draw(st.booleans()):
        options["length"], dtype = True, "int64"
    return kind(shape, dtype, **options)


@given(st.dictionaries(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), specs(), max_size=4))
def test_specs_round_trip_through_the_schema(features: dict[str, Any]) -> None:
    found = features_of(schema_of(features))
    assert found is not None
    # Compared by repr, because NaN isn't equal to itself.
    assert repr(found) == repr(fastpipe.typing.Features(features))
    assert list(found) == list(features)


def test_unreadable_metadata_is_rejected() -> None:
    schema = schema_of({"a": DenseSpec((), "bytes", fill=b"x")})
    stored = json.loads(schema.metadata[b"fastpipe:features"])

    def with_text(text: Any) -> pa.Schema:
        return schema.with_metadata({"fastpipe:features": text if isinstance(text, bytes) else json.dumps(text)})

    assert features_of(with_text(stored)) == {"a": DenseSpec((), "bytes", fill=b"x")}
    with pytest.raises(
        fastpipe.errors.UnsupportedError, match="version 2, and this version of fastpipe reads version 1"
    ):
        features_of(with_text(stored | {"version": 2}))
    entry = stored["features"]["a"]
    for wrong in (b"", b"\xff", b"[" * 100_000, b"3", b"[]", b"{}", {"version": 1}, stored | {"features": []}):
        with pytest.raises(fastpipe.errors.SchemaError, match="can't be read"):
            features_of(with_text(wrong))
    for change in ({"kind": "other"}, {"kind": {}}, {"shape": 3}, {"dtype": "int7"}, {"extra": 1}, {"fill": {}}):
        with pytest.raises(fastpipe.errors.SchemaError, match="can't be read"):
            features_of(with_text(stored | {"features": {"a": entry | change}}))
    with pytest.raises(TypeError, match=r"schema must be a pyarrow\.Schema"):
        features_of({})  # type: ignore[arg-type]


def test_unsupported_schemas_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"feature 'a': an Arrow fixed-size list"):
        schema_of({"a": DenseSpec((2**31,), "int8")})
    with pytest.raises(ValueError, match="'valid' is the name of a feature"):
        schema_of({"valid": DenseSpec((), "bool")}, valid=True)
    with pytest.raises(ValueError, match="UTF-8 without NUL"):
        schema_of({"\0": DenseSpec((), "bool")})
