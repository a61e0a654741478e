"""In-memory tables as a source: batches contain the values that pyarrow reports, in every order."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import processes
from arrow_tables import as_lists, expected, leaves, ragged_steps, tables
from fastpipe import DenseSpec, Masked, Ragged, RaggedSpec, Sparse, SparseSpec, Strings
from fastpipe.batch import SparseCSR

ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"shuffle": True, "seed": 1},
    {"shuffle": True, "shuffle_buffer": 8, "seed": 1},
    {"shuffle": "block", "shuffle_buffer": 5, "seed": 1},
    {"shuffle": "buffer", "shuffle_buffer": 5, "seed": 1},
)


WIDE = {
    "x": np.arange(40, dtype="float32").reshape(20, 2),
    "n": np.arange(20, dtype="uint16"),
    "half": np.arange(20).astype("float16"),
    "flag": np.arange(20) % 3 == 0,
    "day": np.arange(20).astype("datetime64[D]"),
    "when": np.arange(20).astype("datetime64[us]"),
    "took": np.arange(20).astype("timedelta64[ms]"),
    "tags": Ragged(np.arange(30), np.r_[0:20, 30]),
    "maybe": Masked(np.arange(20.0) * (np.arange(20) % 2 == 0), np.arange(20) % 2 == 0),
}


@settings(max_examples=150)
@given(table=tables(), order=st.sampled_from(ORDERS), batch_size=st.integers(1, 12), threads=st.integers(1, 3))
def test_batches_have_the_values_of_the_table(
    table: tuple[pa.Table, list[list[Any]]], order: dict[str, Any], batch_size: int, threads: int
) -> None:
    arrow, columns = table
    reader = fastpipe.from_arrow(arrow, batch_size=batch_size, num_threads=threads, **order)
    seen: list[int] = []
    wanted = {}
    for items, field in zip(columns, list(arrow.schema)[1:], strict=True):
        for name, kind, steps in leaves(field.type, field.name):
            wanted[name] = items, kind, ragged_steps(steps)
    assert list(reader.features) == ["row", *wanted]
    for step, batch in enumerate(reader):
        rows = batch["row"].tolist()
        assert [reader.locate(step, at, epoch=0).row for at in range(len(rows))] == rows
        seen += rows
        for name, (items, kind, steps) in wanted.items():
            assert as_lists(batch[name]) == [expected(items[row], kind, steps) for row in rows], name
    assert sorted(seen) == list(range(arrow.num_rows))


def same(a: Any, b: Any) -> None:
    """Checks that two columns have the same type, dtype and content."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
        return
    for name in a._parts:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, (np.ndarray, Ragged, Masked, Strings)):
            same(left, right)
        else:
            assert left == right


def rows_of(form: Any, rows: np.ndarray) -> Any:
    return form[rows]


@pytest.mark.parametrize("order", ORDERS)
def test_arrays_are_returned_unchanged(order: dict[str, Any]) -> None:
    arrays = WIDE | {"row": np.arange(20)}
    for batch in fastpipe.from_arrays(arrays, batch_size=7, **order):
        for name, form in arrays.items():
            same(batch[name], rows_of(form, batch["row"]))


def test_arrays_need_no_pyarrow(tmp_path: pathlib.Path) -> None:
    script = """
        sys.modules["pyarrow"] = None
        import pickle, numpy as np, fastpipe
        numbers = np.arange(20)
        arrays = {
            "n": numbers,
            "square": numbers.reshape(20, 1).astype("f2"),
            "flag": numbers % 3 == 0,
            "day": numbers.astype("M8[D]"),
            "took": numbers.astype("m8[ms]"),
            "ragged": fastpipe.Ragged(numbers, np.r_[0:20, 20]),
            "sparse": fastpipe.batch.SparseCSR(np.r_[0:20, 20], numbers, numbers, np.array([20, 20])),
            "maybe": fastpipe.Masked(numbers, numbers % 2 == 0),
            "text": fastpipe.Strings(np.full(20, 97, "u1"), np.arange(21), (20,), False),
        }
        reader = fastpipe.from_arrays(arrays, batch_size=6, shuffle=True, seed=1)
        again = pickle.loads(pickle.dumps(reader))
        again.load_state_dict(reader.state_dict())
        assert all((a["n"] == b["n"]).all() for a, b in zip(reader, again, strict=True))
        print(sum(int(batch["n"].sum()) for batch in reader), reader.features["maybe"].on_null)
        print(fastpipe.write_avro(sys.argv[1], arrays).rows)
        try:
            fastpipe.to_arrow(arrays)
        except ImportError as error:
            print(error)
    """
    assert processes.outputs(processes.run(script, str(tmp_path / "a.avro")))[0].splitlines() == [
        "190 mask",
        "20",
        "Arrow data requires pyarrow: pip install 'fastpipe-data[arrow]'",
    ]


_TIMES = [f"{kind}8[{unit}]" for kind in "mM" for unit in ("s", "ms", "us", "ns")]


@given(st.data())
def test_arrays_are_read_like_tables_of_pyarrow(data: st.DataObject) -> None:
    """Checks features, batches and states against a table whose memory pyarrow made."""
    dtype = np.dtype(data.draw(st.sampled_from(["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "M8[D]", *_TIMES])))
    rows, size = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 3))
    numbers = np.array(data.draw(st.lists(st.integers(0, 100), min_size=rows * 3, max_size=rows * 3)), "i8")
    values, valid = numbers.astype(dtype), numbers % 3 > 0
    layout = data.draw(st.sampled_from(["plain", "strided", "reversed", "swapped", "read only", "unaligned"]))

    def laid_out(array: np.ndarray) -> np.ndarray:
        if layout == "strided":
            return np.repeat(array, 2, axis=0)[::2]
        if layout == "reversed":
            return array[::-1].copy()[::-1]
        if layout == "swapped":
            return array.astype(dtype.newbyteorder())
        if layout == "unaligned":
            return np.frombuffer(b"\0" + array.tobytes(), "u1")[1:].view(dtype).reshape(array.shape)
        array.flags.writeable = layout != "read only"
        return array

    texts = [str(number) * (number % 3) for number in numbers[:rows]]
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)])
    some = numbers[:rows] % 2 == 0
    arrays = {
        "x": laid_out(values[:rows].copy()),
        "square": laid_out(values.reshape(rows, 3)[:, :size].copy()),
        "ragged": Ragged(laid_out(values.copy()), np.arange(0, rows * 3 + 1, 3)),
        "text": Strings(np.frombuffer(b"".join(encoded), "u1"), ends, (rows,), False),
        "maybe": Masked(laid_out(values[:rows].copy()), valid[:rows]),
        "lists": Masked(Ragged(values.copy(), np.arange(0, rows * 3 + 1, 3)), some),
    }
    whole = pa.array(values)
    lists = pa.LargeListArray.from_arrays(pa.array(range(0, rows * 3 + 1, 3), pa.int64()), whole)
    square = pa.array(values.reshape(rows, 3)[:, :size].ravel(), whole.type)
    kind = pa.list_(whole.type, size)
    table = pa.table(
        {
            "x": whole[:rows],
            "square": pa.Array.from_buffers(kind, rows, [None], children=[square]),
            "ragged": lists,
            "text": pa.array(texts, pa.large_string()),
            "maybe": pa.array(values[:rows], mask=~valid[:rows]),
            "lists": pa.array([row if there else None for row, there in zip(lists, some, strict=True)], lists.type),
        }
    )
    order = data.draw(st.sampled_from(ORDERS))
    order = {"seed": 1} | order
    ours = fastpipe.from_arrays(arrays, batch_size=2, **order)
    inferred = fastpipe.from_arrow(table, batch_size=2).features
    assert {n: (s.shape, s.dtype) for n, s in ours.features.items()} == {
        n: (s.shape, s.dtype) for n, s in inferred.items()
    }
    theirs = fastpipe.from_arrow(table, features=ours.features, batch_size=2, **order)
    assert ours.state_dict() == theirs.state_dict()
    for mine, other in zip(ours, theirs, strict=True):
        for name in arrays:
            same(mine[name], other[name])


def test_a_default_window_is_the_whole_table() -> None:
    reader = fastpipe.from_arrays({"row": np.arange(100_000)}, batch_size=512, shuffle=True, seed=3)
    assert reader.shuffle_buffer == 100_352
    order = np.concatenate([batch["row"] for batch in reader])
    assert sorted(order.tolist()) == list(range(100_000))
    # In a random order of 100,000 rows, any 512 consecutive rows almost certainly include rows of both halves.
    assert all((part < 50_000).any() and (part >= 50_000).any() for part in np.array_split(order, 195))


def test_the_order_does_not_depend_on_chunks() -> None:
    whole = pa.table({"row": range(1000)})
    parts = pa.concat_tables([whole.slice(i, 7) for i in range(0, 1000, 7)])
    assert parts.column(0).num_chunks > 100
    readers = [fastpipe.from_arrow(t, batch_size=64, shuffle=True, seed=5, epochs=2) for t in (whole, parts)]
    for a, b in zip(*readers, strict=True):
        same(a["row"], b["row"])
    readers[1].load_state_dict(readers[0].state_dict())


def test_a_reader_is_a_table() -> None:
    reader = fastpipe.from_arrays(WIDE, batch_size=6)
    for a, b in zip(reader, fastpipe.from_arrow(fastpipe.from_arrays(WIDE, batch_size=5), batch_size=6), strict=True):
        for name in a:
            same(a[name], b[name])


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_columns(layout: str) -> None:
    lists = [([0, 3], [1.0, 2.0]), ([], []), ([2], [5.0]), ([1, 2, 4], [7.0, 8.0, 9.0])]
    table = pa.table({"s": [{"indices0": i, "values": v} for i, v in lists]})
    assert isinstance(fastpipe.from_arrow(table, batch_size=4).features["s"], SparseSpec)
    spec = SparseSpec((5,), "float32", layout=layout)  # type: ignore[arg-type]
    (batch,) = fastpipe.from_arrow(table, features={"s": spec}, batch_size=4)
    sparse = batch["s"]
    assert isinstance(sparse, SparseCSR if layout == "csr" else Sparse)
    dense = np.zeros((4, 5), "float32")
    for row, (indices, found) in enumerate(lists):
        dense[row, indices] = found
    rows = np.repeat(np.arange(4), np.diff(sparse.offsets)) if layout == "csr" else sparse.indices[:, 0]
    columns = sparse.indices if layout == "csr" else sparse.indices[:, 1]
    made = np.zeros((4, 5), "float32")
    made[rows, columns] = sparse.values
    np.testing.assert_array_equal(made, dense)
    (again,) = fastpipe.from_arrays({"s": sparse}, batch_size=4)
    same(again["s"], sparse)
    with pytest.raises(
        fastpipe.errors.ValueRangeError, match=r"index 4 is out of range for dimension 0, which has size 4"
    ):
        list(fastpipe.from_arrow(table, features={"s": SparseSpec((4,), "float32")}, batch_size=4))


LISTS = pa.table({"v": [[1, 2, 3], [4], None, []]})


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (RaggedSpec((None,), "int64", on_null="fill"), [[1, 2, 3], [4], [], []]),
        (RaggedSpec((None,), "float32", on_null="mask"), [[1.0, 2.0, 3.0], [4.0], None, []]),
        (DenseSpec((2,), "int16", pad=-1, fill=9), [[1, 2], [4, -1], [9, 9], [-1, -1]]),
        (DenseSpec((), "int64", length=True, fill=-5), [3, 1, -5, 0]),
    ],
)
def test_specs_determine_lists_and_nulls(spec: Any, found: list[Any]) -> None:
    (batch,) = fastpipe.from_arrow(LISTS, features={"v": spec}, batch_size=4)
    assert as_lists(batch["v"]) == found


def test_times_are_filled_with_none_and_text_is_checked() -> None:
    table = pa.table({"t": pa.array([1, None], pa.timestamp("s")), "b": [b"ab", b"\xff"]})
    (batch,) = fastpipe.from_arrow(table, features={"t": DenseSpec((), "datetime64[s]", on_null="fill")}, batch_size=2)
    assert np.isnat(batch["t"]).tolist() == [False, True]
    (batch,) = fastpipe.from_arrow(table, features={"t": DenseSpec((), "datetime64[ms]", fill=7)}, batch_size=2)
    assert batch["t"].view("int64").tolist() == [1000, 7]
    with pytest.raises(fastpipe.errors.ValueRangeError, match="feature 'b': a value of type Binary doesn't fit string"):
        list(fastpipe.from_arrow(table, features={"b": DenseSpec((), "string")}, batch_size=1))


@pytest.mark.parametrize(
    ("column", "spec", "error", "match"),
    [
        (
            [1, 300],
            DenseSpec((), "int8"),
            fastpipe.errors.ValueRangeError,
            r"feature 'x'.*Int64 doesn't fit int8.*record 1",
        ),
        ([1, None], DenseSpec((), "int64"), fastpipe.errors.NullValueError, r"feature 'x'.*on_null=\"mask\".*record 1"),
        ([[1], [1, 2]], DenseSpec((1,), "int64"), fastpipe.errors.ShapeError, r"expected 1 items, found 2.*record 1"),
        ([1.5], DenseSpec((), "int64"), fastpipe.errors.SchemaError, r"request a floating-point dtype; features="),
        (["a"], DenseSpec((), "int64"), fastpipe.errors.SchemaError, r'request "string" or "bytes"'),
        (
            [[1]],
            DenseSpec((), "int64"),
            fastpipe.errors.SchemaError,
            r"lists nested 1 deep, so 1 are needed; features=",
        ),
        ([{"a": 1}], DenseSpec((), "int64"), fastpipe.errors.SchemaError, r"request its fields as 'x.<field>' \(a\)"),
        ([1], DenseSpec((), "datetime64[s]"), fastpipe.errors.SchemaError, r"an integer or floating-point dtype"),
    ],
)
def test_misfits_are_named(column: list[Any], spec: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        list(fastpipe.from_arrow(pa.table({"x": column}), features={"x": spec}, batch_size=1))


def test_the_first_failing_row_is_named_in_any_column() -> None:
    table = pa.table({"a": [1] * 90 + [None] * 10, "b": [1] * 50 + [None] * 50})
    features = {name: DenseSpec((), "int64") for name in "ab"}
    for threads in (1, 2, 4):
        with pytest.raises(fastpipe.errors.NullValueError) as error:
            list(fastpipe.from_arrow(table, features=features, batch_size=100, num_threads=threads))
        assert (error.value.feature, error.value.record) == ("b", 50)


def test_later_columns_are_checked_up_to_the_failing_row() -> None:
    columns = {
        "a": [1] * 90 + [None] * 10,
        "t": [str(i) for i in range(100)],
        "n": [None if i % 2 else "x" for i in range(100)],
        "l": [[i] * (i % 3) for i in range(100)],
        "x": [float(i) for i in range(100)],
        "y": [i if i != 70 else 1000 for i in range(100)],
    }
    table = pa.table(columns)
    features: dict[str, Any] = {
        "a": DenseSpec((), "int64"),
        "t": DenseSpec((), "string"),
        "n": DenseSpec((), "string", on_null="mask"),
        "l": RaggedSpec((None,), "int64"),
        "x": DenseSpec((), "float64"),
    }
    for more, found in (({}, ("a", 90)), ({"y": DenseSpec((), "int8")}, ("y", 70))):
        for order in ({}, {"shuffle": True, "seed": 1}):
            with pytest.raises(fastpipe.FastpipeError) as error:
                list(fastpipe.from_arrow(table, features=features | more, batch_size=100, **order))
            if not order:
                assert (error.value.feature, error.value.record) == found
            assert error.value.feature in ("a", "y")


@pytest.mark.parametrize(
    ("column", "spec"),
    [
        ([[1, None]], RaggedSpec((None,), "int64", on_null="mask")),
        ([None], DenseSpec((), "string", on_null="mask")),
        ([[["a"], None]], RaggedSpec((None, None), "string", on_null="mask")),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_columns_after_one_whose_first_row_fails(column: list[Any], spec: Any, order: dict[str, Any]) -> None:
    table = pa.table({"a": [None] * 3, "b": column * 3})
    with pytest.raises(fastpipe.errors.NullValueError, match="feature 'a'"):
        list(fastpipe.from_arrow(table, features={"a": DenseSpec((), "int64"), "b": spec}, batch_size=2, **order))


def test_arguments() -> None:
    table = pa.table({"price": [1], "s": [{"deep": 1}]})
    with pytest.raises(fastpipe.errors.SchemaError, match="did you mean 'price'"):
        fastpipe.from_arrow(table, columns=["prise"], batch_size=1)
    with pytest.raises(fastpipe.errors.SchemaError, match=r"did you mean 's\.deep'"):
        fastpipe.from_arrow(table, features={"s.deap": DenseSpec((), "int64")}, batch_size=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'suffle'"):
        fastpipe.from_arrow(table, batch_size=1, suffle=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="from_arrays accepts a dict"):
        fastpipe.from_arrow({"x": [1]}, batch_size=1)
    with pytest.raises(TypeError, match="from_arrow accepts Arrow data"):
        fastpipe.from_arrays(table, batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="columns is empty"):
        fastpipe.from_arrow(table, columns=[], batch_size=1)
    with pytest.raises(ValueError, match="not both"):
        fastpipe.from_arrow(table, columns=["price"], features={"price": DenseSpec((), "int8")}, batch_size=1)
    with pytest.raises(fastpipe.errors.UnsupportedError, match=r"feature 'i': .*columns=\[\"x\"\] reads the others"):
        fastpipe.from_arrow(pa.table({"i": pa.nulls(1, pa.month_day_nano_interval()), "x": [1]}), batch_size=1)
    assert len(list(fastpipe.from_arrow(table.slice(0, 0), batch_size=1))) == 0
    with pytest.raises(fastpipe.errors.UnsupportedError, match="a single Arrow array, not a table"):
        fastpipe.from_arrow(pa.array([1]), batch_size=1)
    with pytest.raises(fastpipe.errors.UnsupportedError, match="rows of the table are null as a whole"):
        fastpipe.from_arrow(pa.array([{"a": 1}, None]), batch_size=1)
    twice = pa.table([[1], [2]], names=["x", "x"])
    for options in ({}, {"columns": ["x"]}, {"features": {"x": DenseSpec((), "int8")}}):
        with pytest.raises(fastpipe.errors.SchemaError, match="several columns are called 'x'"):
            fastpipe.from_arrow(twice, batch_size=1, **options)


def test_errors_of_streams_are_reported() -> None:
    def batches() -> Any:
        yield pa.record_batch({"x": [1]})
        raise OSError("the cable is out")

    stream = pa.RecordBatchReader.from_batches(pa.schema({"x": pa.int64()}), batches())
    with pytest.raises(fastpipe.errors.StorageError, match=r"the Arrow stream failed: .*the cable is out"):
        fastpipe.from_arrow(stream, batch_size=1)


def _damaged() -> dict[str, pa.Array]:
    def buffer(*numbers: int, dtype: str = "int32") -> pa.Buffer:
        return pa.py_buffer(np.array(numbers, dtype))

    text, runs = pa.array(["a", "b", "c"]), pa.run_end_encoded(pa.int32(), pa.string())
    long = b"thirteen bytes"
    prefix = int.from_bytes(long[:4], "little")
    arrays = {
        "offsets that aren't in order": pa.Array.from_buffers(
            pa.string(), 2, [None, buffer(0, 5, 2), pa.py_buffer(b"abcde")]
        ),
        "text that isn't UTF-8": pa.Array.from_buffers(pa.string(), 1, [None, buffer(0, 1), pa.py_buffer(b"\xff")]),
        "a missing buffer": pa.Array.from_buffers(
            pa.string_view(), 1, [None, buffer(14, prefix, 1, 0), pa.py_buffer(long)]
        ),
        "a view beyond its buffer": pa.Array.from_buffers(
            pa.string_view(), 1, [None, buffer(14, prefix, 0, 1), pa.py_buffer(long)]
        ),
        "a view with a negative offset": pa.Array.from_buffers(
            pa.binary_view(), 1, [None, buffer(14, prefix, 0, -1), pa.py_buffer(long)]
        ),
        "a short view that isn't UTF-8": pa.Array.from_buffers(pa.string_view(), 1, [None, buffer(1, 255, 0, 0)]),
        "runs that aren't in order": pa.Array.from_buffers(
            runs, 4, [None], children=[pa.array([3, 2, 4], pa.int32()), text]
        ),
        "a run that ends before the first row": pa.Array.from_buffers(
            runs, 4, [None], children=[pa.array([-1, 2, 4], pa.int32()), text]
        ),
    }
    for key in (3, -1, 127):
        keys = pa.array([0, key], pa.int8())
        arrays[f"key {key} of 3 values"] = pa.DictionaryArray.from_arrays(keys, text, safe=False)
    return arrays


DAMAGED = _damaged()


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("source", ["arrow", "units"])
def test_damaged_arrays_are_refused(what: str, nested: bool, source: str) -> None:
    class One:
        def __init__(self, table: pa.Table) -> None:
            self.table, self.schema, self.rows = table, table.schema, [table.num_rows]

        def read(self, unit: int) -> pa.Table:
            return self.table

        def fingerprint(self) -> str:
            return "one"

    array = DAMAGED[what]
    if nested:
        array = pa.StructArray.from_arrays([array], ["below"])
    table = pa.table({"x": array})
    read: dict[str, Callable[[], Any]] = {
        "arrow": lambda: fastpipe.from_arrow(table, batch_size=1),
        "units": lambda: list(fastpipe.read_units(One(table), batch_size=1)),
    }
    with pytest.raises(fastpipe.errors.MalformedFileError, match=r"damaged Arrow data"):
        read[source]()


def test_dictionary_keys_under_nulls_are_ignored() -> None:
    keys = pa.Array.from_buffers(pa.int8(), 3, [pa.py_buffer(b"\x05"), pa.py_buffer(b"\x01\x80\x00")])
    table = pa.table({"x": pa.DictionaryArray.from_arrays(keys, pa.array(["a", "b"]), safe=False)})
    assert as_lists(next(iter(fastpipe.from_arrow(table, batch_size=3)))["x"]) == ["b", None, "a"]
    codes = fastpipe.from_arrow(table, features={"x": DenseSpec((), "int8", fill=7)}, batch_size=3)
    assert next(iter(codes))["x"].tolist() == [1, 7, 0]


def test_readers_are_pickled_and_outlive_their_table() -> None:
    import gc
    import pickle

    table = pa.table({"x": np.arange(1000.0), "t": [str(i) for i in range(1000)]})
    reader = fastpipe.from_arrow(table, batch_size=10, shuffle=True, seed=1)
    again = pickle.loads(pickle.dumps(reader))
    del table
    gc.collect()
    for a, b in zip(reader, again, strict=True):
        same(a["x"], b["x"])
        assert a["t"].to_list() == [str(int(x)) for x in a["x"]]


@pytest.mark.parametrize("library", ["torch", "jax", "tf"])
def test_frameworks_get_times_as_integers(library: str) -> None:
    """Checks that dates and times are passed as integers, since frameworks have no dtypes for them."""
    pytest.importorskip({"tf": "tensorflow"}.get(library, library))
    day = WIDE["day"]
    ragged = Ragged(np.array([1, "NaT"], "datetime64[D]"), np.arange(21).clip(max=2))
    arrays = {"day": day, "r": ragged} if library == "torch" else {"day": day}
    reader = fastpipe.from_arrays(arrays, batch_size=10)
    if library == "torch":
        import torch

        import fastpipe.torch as fptorch

        batches: list[Any] = list(fptorch.dataset(reader))
        assert batches[0]["r"].values.tolist() == [1, np.iinfo(np.int64).min]
        (batch,) = fastpipe.from_arrays(arrays, batch_size=20)
        tensor = fptorch.tensors(batch)["day"]
        assert tensor.dtype == torch.int64
        assert tensor.data_ptr() == batch["day"].ctypes.data
    elif library == "jax":
        from fastpipe import jax

        batches = list(jax.iterator(reader))
    else:
        from fastpipe import tf

        batches = list(tf.dataset(reader))
    assert [int(number) for batch in batches for number in batch["day"]] == day.astype(np.int64).tolist()


@pytest.mark.parametrize("dtype", ["datetime64[D]", "datetime64[ns]", "timedelta64[s]"])
def test_nat_stays_nat(dtype: str) -> None:
    arrays = {"t": np.array([3, "NaT", 5], dtype), "r": Ragged(np.array([1, "NaT"], dtype), np.array([0, 1, 1, 2]))}
    (batch,) = fastpipe.from_arrays(arrays, batch_size=3)
    (again,) = fastpipe.from_arrow(fastpipe.from_arrays(arrays, batch_size=3), batch_size=3)
    for name, form in arrays.items():
        same(batch[name], form)
        same(again[name], form)
