"""Edge cases of in-memory tables: unusual arrays and streams, threads, forks, Ctrl-C, process exit, lack of memory."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe import DenseSpec, Masked, Ragged, Strings

pa = pytest.importorskip("pyarrow")

import table_programs  # noqa: E402
from processes import PROMPTLY, interrupt, printed, start, together  # noqa: E402
from toy_units import flat  # noqa: E402

# --- Arrays ---

SIX = np.arange(6)


@pytest.mark.parametrize(
    "array",
    [
        SIX.astype(">i4"),
        SIX.astype(">f8").reshape(3, 2),
        SIX.astype(">M8[s]"),
        SIX[::2],
        SIX[::-1],
        np.asfortranarray(SIX.reshape(3, 2)),
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.broadcast_to(np.float32(3), (4,)),
        np.frombuffer(bytes(range(17)), "u1")[1:].view("i4"),
        np.frombuffer(b"abcdefgh", "i2"),
        SIX.view(type("Sub", (np.ndarray,), {})),
        np.zeros((0,), "f4"),
        np.zeros((0, 3), "f4"),
        np.zeros((2,) + (1,) * 31),
    ],
    ids=lambda array: f"{array.dtype.str}{list(array.shape)}{array.strides}",
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_of_any_layout(array: Any, shuffle: bool) -> None:
    before = array.tobytes()
    reader = fastpipe.from_arrays({"x": array}, batch_size=2, shuffle=shuffle, seed=1)
    assert reader.features["x"].shape == array.shape[1:]
    batches = [batch["x"] for batch in reader]
    rows = [row for batch in batches for row in batch]
    for batch in batches:
        assert batch.dtype == array.dtype.newbyteorder("=")
        assert batch.dtype.isnative
        assert batch.flags.writeable
    expected = list(array.astype(array.dtype.newbyteorder("=")))
    if shuffle:
        rows, expected = (sorted(some, key=lambda row: np.array(row).tobytes()) for some in (rows, expected))
    np.testing.assert_array_equal(np.array(rows), np.array(expected))
    assert array.tobytes() == before


def test_rows_without_values_are_ragged() -> None:
    """Checks that a column with an empty dimension is ragged, because a dimension of a spec is at least 1."""
    found = list(fastpipe.from_arrays({"x": np.zeros((3, 0), "f4")}, batch_size=2))
    assert [batch["x"].to_list() for batch in found] == [[[], []], [[]]]


@pytest.mark.parametrize(
    ("column", "error", "match"),
    [
        (np.array(3), TypeError, "column 'x' is an array without dimensions"),
        (3, TypeError, "column 'x' must be a NumPy array, Ragged, Strings, Masked, Sparse or SparseCSR; got 3"),
        (None, TypeError, "column 'x' must be a NumPy array, .*; got None"),
        ([1, 2], TypeError, r"column 'x' must be a NumPy array, .*; got \[1, 2\]"),
        (("a", "b"), TypeError, "column 'x' must be a NumPy array, .*; got "),
        (range(2), TypeError, r"column 'x' must be a NumPy array, .*; got range\(0, 2\)"),
        (memoryview(b"ab"), TypeError, "column 'x' must be a NumPy array, .*; got <memory"),
        (pa.array([1, 2]), TypeError, "column 'x' must be a NumPy array, .*; got a Int64Array"),
        (
            np.array(["a", None], object),
            TypeError,
            "dtype object, which is not supported: convert it to fastpipe.Strings",
        ),
        (np.array([[1], [2, 3]], object), TypeError, "dtype object"),
        (np.array(["a", "b"]), TypeError, "dtype <U1, .* convert it to fastpipe.Strings"),
        (np.array([b"a", b"b"]), TypeError, r"dtype \|S1, .* convert it to fastpipe.Strings"),
        (np.zeros(2, [("a", "i4"), ("b", "f4")]), TypeError, "dtype .*, which is not supported"),
        (np.zeros(2, complex), TypeError, "dtype complex128, which is not supported"),
        (np.zeros(2, "V3"), TypeError, "which is not supported"),
        (np.zeros(2, "M8[ps]"), TypeError, "Arrow supports the units s, ms, us and ns"),
        (np.ma.array([1, 2], mask=[True, False]), TypeError, r"use fastpipe.Masked\(values.data, ~values.mask\)"),
        (Masked(np.arange(3), np.array([True, False])), ValueError, r"a mask of shape \(2,\) doesn't fit"),
        (Ragged(np.arange(3), np.array([0, -1, 2])), ValueError, "column 'x': .*offset"),
        (Ragged(np.arange(3), np.array([0, 2, 1])), ValueError, "column 'x': .*offset"),
        (Ragged(np.arange(3), np.array([0, 1, 9])), ValueError, "column 'x': Last offset 9"),
        (Ragged(np.arange(3), np.array([])), TypeError, "column 'x': offsets must be one-dimensional integers"),
        (Ragged(np.arange(3), np.array([0.0, 1.0])), TypeError, "column 'x': offsets must be one-dimensional integers"),
        (Ragged(Ragged(np.arange(3), np.array([0, 9])), np.array([0, 1])), ValueError, "column 'x': "),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_invalid_columns_are_named(column: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fastpipe.from_arrays({"x": column}, batch_size=1)


def test_columns_must_have_the_same_length() -> None:
    for other in (np.arange(4), np.arange(0), Ragged(np.arange(3), np.array([0, 3]))):
        with pytest.raises(ValueError, match=f"column 'x' has 3 rows, but column 'y' has {len(other)}"):
            fastpipe.from_arrays({"x": np.arange(3), "y": other}, batch_size=1)


@pytest.mark.parametrize(
    ("name", "error"), [(1, TypeError), (None, TypeError), ("a\0b", ValueError), ("a\ud800", ValueError)]
)
def test_invalid_column_names_are_refused(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        fastpipe.from_arrays({name: SIX}, batch_size=1)


@pytest.mark.parametrize("name", ["", "a.b", "ä", " "])
def test_unusual_column_names(name: str) -> None:
    assert flat(fastpipe.from_arrays({name: SIX, "a": SIX}, batch_size=4), name) == SIX.tolist()


def test_tables_must_have_columns() -> None:
    with pytest.raises(ValueError, match="arrays is empty: name at least one"):
        fastpipe.from_arrays({}, batch_size=1)
    table = pa.table({"x": [1, 2]})
    for empty in (pa.table({}), table.select([]), pa.table({"x": pa.array([{}, {}], pa.struct([]))})):
        with pytest.raises(fastpipe.errors.SchemaError, match="the table has no columns"):
            fastpipe.from_arrow(empty, batch_size=1)


@pytest.mark.parametrize("order", [{}, {"shuffle": True}, {"shuffle": "block"}, {"shuffle": "buffer"}], ids=str)
def test_tables_without_rows(order: dict[str, Any]) -> None:
    for table in (pa.table({"x": pa.array([], pa.int8())}), pa.table({"x": [1]}).schema.empty_table().to_reader()):
        reader = fastpipe.from_arrow(table, batch_size=2, **order)
        assert (list(reader), len(reader)) == ([], 0)


def test_modified_arrays_are_read_as_modified() -> None:
    """Checks that modifying an array, which the docstring forbids, neither crashes nor reads a copy."""
    array = np.arange(100)
    reader = fastpipe.from_arrays({"x": array}, batch_size=10, prefetch=1, num_threads=1)
    array[:] = 7
    assert flat(reader) == [7] * 100


@pytest.mark.parametrize("value", [10**12, -5, 2**63 - 1])
@pytest.mark.parametrize("kind", ["ragged", "nested", "text"])
def test_modified_offsets_do_not_crash(kind: str, value: int) -> None:
    offsets = np.arange(0, 301, 3)
    column: Any = {
        "ragged": lambda: Ragged(np.arange(300), offsets),
        "nested": lambda: Ragged(Ragged(np.arange(900), np.arange(0, 901, 3)), offsets),
        "text": lambda: Strings(np.full(300, 97, "u1"), offsets, (100,), False),
    }[kind]()
    reader = fastpipe.from_arrays({"x": column}, batch_size=10)
    offsets[50:] = value
    with pytest.raises(fastpipe.FastpipeError):
        list(reader)


# --- Streams ---


def raising(error: BaseException) -> Any:
    def batches() -> Iterator[Any]:
        yield pa.record_batch({"x": [1]})
        raise error

    return pa.RecordBatchReader.from_batches(table_programs.SCHEMA, batches())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("it is torn"), fastpipe.errors.StorageError),
        (OSError("it is torn"), fastpipe.errors.StorageError),
        (StopIteration("it is torn"), fastpipe.errors.StorageError),
        (MemoryError("it is torn"), fastpipe.errors.OutOfMemoryError),
    ],
    ids=repr,
)
def test_streams_that_raise(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="the Arrow stream failed: ") as raised:
        fastpipe.from_arrow(raising(error), batch_size=1)
    assert raised.value.__cause__ is error or raised.value.__cause__.__cause__ is error  # type: ignore[union-attr]
    with pytest.raises(kind, match="the Arrow stream failed: "):
        fastpipe.from_arrow(table_programs.Stream(raising(error)), batch_size=1)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), fastpipe.errors.MalformedFileError("torn", path="a")]
)
def test_interrupts_in_streams_are_raised_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        fastpipe.from_arrow(raising(error), batch_size=1)
    assert raised.value is error


def test_errors_of_a_record_batch_reader_are_raised() -> None:
    table = pa.table({"x": [1, None]})
    reader = fastpipe.from_arrow(table, features={"x": DenseSpec((), "int64")}, batch_size=1)
    with pytest.raises(fastpipe.errors.NullValueError) as raised:
        fastpipe.from_arrow(reader, batch_size=1)
    assert raised.value.feature == "x"


@pytest.mark.parametrize(
    "other",
    [
        pa.record_batch({"y": pa.array([1], pa.int64())}),
        pa.record_batch({"x": pa.array([1], pa.int32())}),
        pa.record_batch({"x": ["a"]}),
        pa.record_batch({"x": [1], "y": [2]}),
    ],
    ids=lambda batch: str(batch.schema),
)
def test_batches_of_another_schema_are_refused(other: Any) -> None:
    batches = [pa.record_batch({"x": [1]}), other]
    stream = pa.RecordBatchReader.from_batches(table_programs.SCHEMA, iter(batches))
    with pytest.raises(fastpipe.errors.SchemaError, match=r"record batch 1 of the stream has columns .*'x': int64$"):
        fastpipe.from_arrow(stream, batch_size=1)


def test_batches_may_differ_in_nullability() -> None:
    strict = pa.schema([pa.field("x", pa.int64(), nullable=False), pa.field("l", pa.map_(pa.string(), pa.int8()))])
    rows = {"x": [1, 2], "l": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.field("value", pa.int8(), False)))}
    stream = pa.RecordBatchReader.from_batches(strict, iter([pa.record_batch(rows)] * 2))
    assert flat(fastpipe.from_arrow(stream, batch_size=3)) == [1, 2, 1, 2]
    broken = pa.record_batch({"x": [1, None], "l": rows["l"]})
    stream = pa.RecordBatchReader.from_batches(strict, iter([broken]))
    with pytest.raises(
        fastpipe.errors.SchemaError, match=r"batch 0 of the stream doesn't fit the stream's schema: .*null"
    ):
        fastpipe.from_arrow(stream, batch_size=3)


def test_readers_of_streams_are_pickled() -> None:
    stream = pa.RecordBatchReader.from_batches(table_programs.SCHEMA, iter([pa.record_batch({"x": [1, 2, 3]})]))
    reader = fastpipe.from_arrow(stream, batch_size=2)
    assert flat(pickle.loads(pickle.dumps(reader))) == flat(reader) == [1, 2, 3]


# --- Threads and processes ---


def test_threads_share_a_reader_and_a_table() -> None:
    arrays = {"x": np.arange(20_000)}
    reader = fastpipe.from_arrays(arrays, batch_size=7, shuffle=True, seed=1, num_threads=2)
    batches = iter(reader)
    shared: list[list[int]] = [[] for _ in range(4)]
    own: list[list[int]] = [[] for _ in range(2)]

    def draw(place: int) -> None:
        for batch in batches:
            shared[place] += batch["x"].tolist()

    def read(place: int) -> None:
        own[place] = flat(fastpipe.from_arrays(arrays, batch_size=9))

    drawing = [threading.Thread(target=draw, args=(i,)) for i in range(4)]
    together([*drawing, *(threading.Thread(target=read, args=(i,)) for i in range(2))])
    assert sorted(itertools.chain(*shared)) == list(range(20_000))
    assert own == [list(range(20_000))] * 2


PROGRAM = table_programs.__file__
posix = pytest.mark.skipif(os.name != "posix", reason="needs signals and fork")


@posix
@pytest.mark.parametrize("what", ["endless", "hang", "many", "draw"])
def test_ctrl_c(what: str) -> None:
    with start(PROGRAM, "interrupted", what) as process:
        interrupt(process, PROMPTLY)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for shared memory in /dev/shm")
def test_a_killed_process_leaves_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    before = set(os.listdir("/dev/shm"))
    printed(PROGRAM, "killed", status=-signal.SIGKILL)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "fastpipe" in name]
    assert not list(tmp_path.iterdir())


@posix
def test_forked_children_read_independently() -> None:
    printed(PROGRAM, "forked")


@pytest.mark.parametrize("method", [pytest.param("fork", marks=posix), "spawn"])
def test_readers_are_sent_to_processes(method: str) -> None:
    printed(PROGRAM, "in_pool", method)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits address space")
@pytest.mark.parametrize("megabytes", [1, 40, 150])
@pytest.mark.parametrize("what", ["plain", "strided", "text", "stream"])
def test_running_out_of_memory_raises_an_error(what: str, megabytes: int) -> None:
    # The error depends on which library's allocation fails: Python's, fastpipe's, or pyarrow's for the table.
    assert printed(PROGRAM, "exhausted", what, str(megabytes)) in (
        "MemoryError\n",
        "OutOfMemoryError\n",
        "ArrowMemoryError\n",
    )
