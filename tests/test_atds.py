"""Checks, orders, symbolic filenames and damage in fastpipe.tf.atds.

test_atds_differential compares it with tensorflow-io.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path
from typing import Any

import fastavro
import pytest

from web_server import serving

tf = pytest.importorskip("tensorflow", reason="TensorFlow isn't installed", exc_type=ImportError)
from fastpipe.tf import _atds_schema  # noqa: E402 - needs TensorFlow
from fastpipe.tf.atds import (  # noqa: E402 - needs TensorFlow
    ATDS_SUPPORTED_DTYPES,
    ATDSDataset,
    DenseFeature,
    SparseFeature,
    VarlenFeature,
)

SCHEMA = {
    "type": "record",
    "name": "Row",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "score", "type": ["null", "float"]},
        {"name": "items", "type": {"type": "array", "items": "int"}},
    ],
}
ID = {"id": DenseFeature([], tf.int64)}
INVALID = tf.errors.InvalidArgumentError


def write(path: Path, start: int, stop: int, null: int = -1) -> str:
    rows = [{"id": i, "score": None if i == null else i / 2, "items": list(range(i % 3))} for i in range(start, stop)]
    with path.open("wb") as file:
        fastavro.writer(file, SCHEMA, rows, sync_interval=40)
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [write(tmp_path / "a.avro", 0, 100), write(tmp_path / "b.avro", 100, 130)]


def ids(dataset: Any) -> list[int]:
    return [i for batch in dataset for i in batch["id"].numpy().tolist()]


def graph_ids(dataset: Any) -> Any:
    """Returns a function that reads an epoch like `ids`, but in a graph loop, which is faster."""

    @tf.function  # type: ignore[untyped-decorator]
    def loop() -> Any:
        found = tf.zeros([0], tf.int64)
        for batch in dataset:
            tf.autograph.experimental.set_loop_options(shape_invariants=[(found, tf.TensorShape([None]))])
            found = tf.concat([found, batch["id"]], 0)
        return found

    return lambda: loop().numpy().tolist()


def raises(error: Any, text: str) -> Any:
    """Expects an error whose message contains this exact text."""
    return pytest.raises(error, match=re.escape(text))


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "message"),
    [
        (DenseFeature, None, tf.int32, "Shape cannot be None."),
        (DenseFeature, [4, None], tf.int32, "Dimension in shape cannot be None or 0 but found [4, None]."),
        (VarlenFeature, [0, 4], tf.int32, "Dimension in shape cannot be None or 0 but found [0, 4]."),
        (DenseFeature, [4, -1], tf.int32, "Each dimension should be greater than 0 in DenseFeature but found [4, -1]."),
        (SparseFeature, [4], None, "dtype cannot be None."),
        (
            DenseFeature,
            [],
            tf.uint8,
            f"<dtype: 'uint8'> is not supported in ATDS. Available dtypes are {ATDS_SUPPORTED_DTYPES}.",
        ),
        (SparseFeature, [], tf.int32, "SparseFeature cannot be scalar."),
        (
            VarlenFeature,
            [-3],
            tf.int32,
            "Each dimension should be greater than 0 or -1 in VarlenFeature but found [-3].",
        ),
    ],
)
def test_features_check_themselves(kind: Any, shape: Any, dtype: Any, message: str) -> None:
    with raises(ValueError, message):
        kind(shape, dtype)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, INVALID, "`batch_size` must be greater than 0 but found 0"),
        ({"batch_size": [2]}, INVALID, "batch_size must be a scalar"),
        ({"batch_size": None}, ValueError, "Attempt to convert a value (None) with an unsupported type"),
        ({"batch_size": "a"}, ValueError, "batch_size must have dtype int64; got 'a'"),
        ({"batch_size": 1.5}, TypeError, "batch_size must have dtype int64; got 1.5"),
        ({"shuffle_buffer_size": -3}, INVALID, "`shuffle_buffer_size` must be greater than or equal to 0 but found -3"),
        ({"reader_buffer_size": 0}, INVALID, "`reader_buffer_size` must be greater than 0 but found 0"),
        ({"num_parallel_calls": 0}, INVALID, "must be a positive integer or tf.data.AUTOTUNE, got 0"),
        ({"num_parallel_calls": -2}, INVALID, "must be a positive integer or tf.data.AUTOTUNE, got -2"),
        ({"drop_remainder": "a"}, ValueError, "drop_remainder must have dtype bool; got 'a'"),
        ({"features": {}}, ValueError, "Features dict cannot be empty and should have at least one feature."),
        ({"features": None}, ValueError, "ATDS feature configuration as value but found None."),
        ({"features": {"id": tf.int64}}, ValueError, "Unknown ATDS feature configuration <dtype: 'int64'>. Only "),
        ({"filenames": None}, ValueError, "Attempt to convert a value (None) with an unsupported type"),
        (
            {"filenames": tf.data.Dataset.from_tensor_slices(["a"])},
            ValueError,
            "to a Tensor. filenames must be a scalar or a vector of strings: pass list(filenames.as_numpy_iterator())",
        ),
        ({"filenames": [["a"]]}, INVALID, "`filenames` must be a scalar or a vector."),
        ({"fill": {"absent": 1}}, ValueError, "fill names ['absent']"),
    ],
)
def test_arguments_are_checked(files: list[str], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with raises(error, message):
        ATDSDataset(**({"filenames": files, "batch_size": 2, "features": ID} | options))


@pytest.mark.parametrize(("shuffle", "batch_size"), [(0, 3), (1, 2), (20, 2), (20, 10), (200, 3), (200, 10)])
def test_every_epoch_has_every_row_once(files: list[str], shuffle: int, batch_size: int) -> None:
    def epochs(threads: int, count: int) -> list[list[int]]:
        options = {"shuffle_buffer_size": shuffle, "num_parallel_calls": threads, "seed": 5}
        epoch = graph_ids(ATDSDataset(files, batch_size, ID, **options))
        return [epoch() for _ in range(count)]

    orders = epochs(1, 20)
    assert all(sorted(order) == list(range(130)) for order in orders)
    assert len({tuple(order) for order in orders}) == (20 if shuffle else 1)
    for threads in (2, 4, tf.data.AUTOTUNE):
        assert epochs(threads, 5) == orders[:5]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of the process in /proc")
def test_threads_are_limited_to_the_processors(files: list[str]) -> None:
    before = len(os.listdir("/proc/self/task"))
    batches = iter(ATDSDataset(files, 1, ID, num_parallel_calls=4000))
    next(batches)
    # TensorFlow starts threads, too.
    assert len(os.listdir("/proc/self/task")) - before < 100 + 4 * (os.cpu_count() or 1)


def test_it_works_within_interleave(files: list[str], caplog: pytest.LogCaptureFixture) -> None:
    names = tf.data.Dataset.from_tensor_slices(files)
    dataset = names.interleave(lambda name: ATDSDataset(name, 7, ID, shuffle_buffer_size=10), num_parallel_calls=2)
    for _ in range(2):
        assert sorted(ids(dataset)) == list(range(130))
    # AutoGraph converts the functions it calls and warns about those it can't convert.
    assert [record.getMessage() for record in caplog.records] == []


def test_it_is_a_class(files: list[str]) -> None:
    class Mine(ATDSDataset):  # type: ignore[misc]
        def __init__(self, names: list[str]) -> None:
            super().__init__(names, 7, ID)
            self.names = names

    dataset = Mine(files)
    assert isinstance(dataset, ATDSDataset)
    assert isinstance(dataset, tf.data.Dataset)
    assert not isinstance(dataset.prefetch(1), ATDSDataset)
    assert ids(dataset) == list(range(130))
    assert dataset.element_spec == ATDSDataset(files, 7, ID).element_spec == {"id": tf.TensorSpec((None,), tf.int64)}
    assert ATDSDataset(files, 7, ID, drop_remainder=True).element_spec["id"].shape == (7,)


def mapped(dataset: Any) -> Any:
    return dataset.map(lambda batch: {"id": batch["id"] + 1})


@pytest.mark.parametrize("shuffle", [0, 30])
def test_it_outlives_its_python_object(files: list[str], shuffle: int) -> None:
    """Iterators, derived datasets, graphs and function results keep working after the Python object is gone."""

    def made() -> Any:
        return ATDSDataset(files, 7, ID, shuffle_buffer_size=shuffle, fill={"id": 0})

    @tf.function  # type: ignore[untyped-decorator]
    def passed_through(dataset: Any) -> Any:
        return mapped(dataset)

    def from_a_function() -> Any:
        return tf.function(made)()

    def from_a_closure() -> Any:
        dataset = made()
        return tf.data.Dataset.range(1).flat_map(lambda _: dataset)

    def iterator_in_a_function() -> Any:
        dataset = made()

        @tf.function  # type: ignore[untyped-decorator]
        def total() -> Any:
            out = tf.constant(0, tf.int64)
            for batch in dataset:
                out += tf.reduce_sum(batch["id"])
            return out

        return total

    for _ in range(2):
        iterator, behind, through = iter(made()), mapped(made()), passed_through(made())
        returned, closed, total = from_a_function(), from_a_closure(), iterator_in_a_function()
        gc.collect()
        assert sorted(ids(iterator)) == list(range(130))
        for _ in range(2):
            assert sorted(ids(behind)) == list(range(1, 131))
            assert sorted(ids(through)) == list(range(1, 131))
            assert sorted(ids(returned)) == list(range(130))
            assert sorted(ids(closed)) == list(range(130))
            assert int(total()) == sum(range(130))


def test_a_rebuilt_dataset_continues_its_orders(files: list[str]) -> None:
    """A rebuilt dataset yields the same orders, epoch by epoch, as one whose Python object still exists."""
    options: dict[str, Any] = {"shuffle_buffer_size": 30, "seed": 5}
    kept = ATDSDataset(files, 7, ID, **options)
    left = tf.function(lambda: ATDSDataset(files, 7, ID, **options))()
    gc.collect()
    orders = [ids(left) for _ in range(3)]
    assert orders == [ids(kept) for _ in range(3)]
    assert len(set(map(tuple, orders))) == 3


FILLS = [("long", tf.int64, -(2**60)), ("double", tf.float64, float("inf")), ("string", tf.string, b"\x00\xff"),
         ("string", tf.string, "\N{SNOWMAN}"), ("boolean", tf.bool, True)]  # fmt: skip


@pytest.mark.parametrize(("avro", "dtype", "fill"), FILLS)
def test_a_rebuilt_dataset_keeps_its_fills(tmp_path: Path, avro: str, dtype: Any, fill: Any) -> None:
    path = write_value(tmp_path, ["null", avro], None)
    dataset = tf.function(lambda: ATDSDataset(path, 7, {"it": DenseFeature([], dtype)}, fill={"it": fill}))()
    gc.collect()
    ((value,),) = [batch["it"].numpy().tolist() for batch in dataset]
    assert value == (fill.encode() if isinstance(fill, str) else fill)


def test_files_of_a_web_server_are_read_by_range(files: list[str]) -> None:
    with serving(Path(files[0]).parent) as server:
        urls = [server.url(Path(path).name) for path in files]
        dataset = ATDSDataset([urls[0], files[1]], 7, ID)
        assert ids(dataset) == list(range(130))
        assert set(server.methods) == {"GET"}
        assert ids(dataset) == list(range(130))
        write(Path(files[0]), 0, 90)
        assert ids(dataset) == [*range(90), *range(100, 130)]
        with raises(tf.errors.NotFoundError, f"{server.url('nowhere.avro')}; No such file or directory"):
            ids(ATDSDataset(server.url("nowhere.avro"), 7, ID))


def test_files_of_tensorflow_file_systems(files: list[str]) -> None:
    remote = [f"ram://fastpipe/{Path(path).name}" for path in files]
    for path, copy in zip(files, remote, strict=True):
        tf.io.gfile.copy(path, copy, overwrite=True)
    dataset = ATDSDataset([remote[0], files[1]], 7, ID)
    assert ids(dataset) == list(range(130))
    write(Path(files[0]), 0, 90)
    tf.io.gfile.remove(remote[0])  # An existing longer file would keep its tail.
    tf.io.gfile.copy(files[0], remote[0])
    assert ids(dataset) == [*range(90), *range(100, 130)]
    assert ids(ATDSDataset(f"file://{files[1]}", 7, ID)) == list(range(100, 130))
    tf.io.gfile.remove(remote[1])
    with tf.io.gfile.GFile(remote[1], "wb") as file:
        file.write(b"nonsense")
    with raises(INVALID, f"(file {remote[1]}"):
        ids(ATDSDataset(remote[1], 7, ID))
    with raises(tf.errors.NotFoundError, "ram://fastpipe/nowhere.avro; No such file or directory"):
        ids(ATDSDataset("ram://fastpipe/nowhere.avro", 7, ID))
    with raises(tf.errors.UnimplementedError, "File system scheme 'nosuch' not implemented"):
        ids(ATDSDataset("nosuch://bucket/a.avro", 7, ID))


@pytest.mark.parametrize(
    ("files_of", "features", "told"),
    [
        (lambda files: ["nowhere.avro"], ID, "nowhere.avro; No such file or directory"),
        (lambda files: files, {"absent": DenseFeature([], tf.int64)}, "User defined feature 'absent' cannot be found"),
        (lambda files: files, {"id": DenseFeature([], tf.int32)}, "Schema value type and metadata type mismatch in"),
        (lambda files: files, {"score": DenseFeature([], tf.float32)}, "Failed to decode feature score. Reason: "),
        (lambda files: tf.constant([], tf.string), ID, "filenames is empty"),
    ],
)
def test_messages_begin_like_those_of_tensorflow_io(files: list[str], files_of: Any, features: Any, told: str) -> None:
    write(Path(files[0]), 0, 100, null=3)
    with pytest.raises(tf.errors.OpError) as caught:
        list(ATDSDataset(files_of(files), 2, features))
    # Only TensorFlow's own prefix comes before it.
    assert re.sub(r"^\{\{[^}]*\}\} ", "", caught.value.message).startswith(told)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Records the lists of files that are opened. All files count as written long ago."""
    seen: list[list[str]] = []
    data = _atds_schema.AvroData
    monkeypatch.setattr(_atds_schema, "_SETTLED", -(10**12))
    monkeypatch.setattr(_atds_schema, "AvroData", lambda files, *a, **k: seen.append(files) or data(files, *a, **k))
    return seen


def test_files_are_opened_once(files: list[str], opened: list[list[str]]) -> None:
    dataset = ATDSDataset(files, 7, ID, shuffle_buffer_size=10)
    for _ in range(3):
        assert sorted(ids(tf.data.Dataset.zip(dataset, dataset).map(lambda a, b: a))) == list(range(130))
    # The two iterations of the first round may both find no open dataset.
    assert opened == [files] * len(opened)
    assert len(opened) in (1, 2)


def test_changed_files_are_opened_again(files: list[str], opened: list[list[str]]) -> None:
    dataset = ATDSDataset(files, 7, ID)
    assert ids(dataset) == list(range(130))
    write(Path(files[1]), 100, 140)
    assert ids(dataset) == list(range(140))
    # The size is equal, so only the timestamp shows the change.
    before = os.stat(files[1])
    write(Path(files[1]), 70, 110)
    os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert ids(dataset) == [*range(100), *range(70, 110)]
    assert len(opened) == 3
    Path(files[1]).unlink()
    with pytest.raises(tf.errors.NotFoundError, match=r"b\.avro"):
        ids(dataset)


def test_recently_written_files_are_not_cached(files: list[str]) -> None:
    dataset = ATDSDataset(files[0], 7, ID)
    for start in range(5):
        # The sizes are equal, and changes within a tick of the file system's clock don't show.
        write(Path(files[0]), 10 + start, 50 + start)
        assert ids(dataset) == list(range(10 + start, 50 + start))


def test_only_a_few_datasets_are_cached(tmp_path: Path, opened: list[list[str]]) -> None:
    names = [write(tmp_path / f"{i}.avro", i, i + 1) for i in range(_atds_schema._KEPT + 1)]
    each = tf.data.Dataset.from_tensor_slices(names).interleave(lambda name: ATDSDataset(name, 1, ID), cycle_length=1)
    for _ in range(2):
        assert ids(each) == list(range(len(names)))
    assert len(opened) == 2 * len(names)
    # The most recent ones are kept.
    recent = tf.data.Dataset.from_tensor_slices(names[1:]).interleave(lambda name: ATDSDataset(name, 1, ID))
    for _ in range(3):
        assert len(ids(recent)) == len(names) - 1
    assert len(opened) == 2 * len(names) + len(names) - 1


def test_nulls_are_errors_or_filled(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", 0, 10, null=3)
    features = {"score": DenseFeature([], tf.float32)}
    iterator = iter(ATDSDataset(path, 2, features))
    next(iterator)
    with raises(INVALID, "Failed to decode feature score. Reason: Feature value is null.") as caught:
        next(iterator)
    assert f"(file {path}, block " in caught.value.message
    filled = [
        value for batch in ATDSDataset(path, 2, features, fill={"score": -1.0}) for value in batch["score"].numpy()
    ]
    assert filled == [-1 if i == 3 else i / 2 for i in range(10)]


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (
            DenseFeature([], tf.float64),
            (
                "Schema value type and metadata type mismatch in feature 'id'. Avro schema data type: long, metadata "
                'type: double. Invalid schema found: "long", but DenseFeature(shape=[], dtype=tf.float64) was requested'
            ),
        ),
        (
            DenseFeature([1], tf.int64),
            (
                "Mismatch between avro schema rank and metadata rank in feature 'id'. Avro schema rank: 0, metadata "
                'rank: 1. Invalid schema found: "long"'
            ),
        ),
        (VarlenFeature([-1], tf.int64), "Avro schema rank: 0, metadata rank: 1"),
        (SparseFeature([3], tf.int64), "Sparse feature 'id' must be a record of arrays."),
    ],
)
def test_nothing_is_promoted(files: list[str], feature: Any, message: str) -> None:
    with raises(INVALID, message):
        ids(ATDSDataset(files, 2, {"id": feature}))


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def write_value(folder: Path, kind: Any, *values: Any) -> str:
    """Writes a file of records with one field, `it`."""
    path = folder / "it.avro"
    with path.open("wb") as file:
        schema = {"type": "record", "name": "One", "fields": [{"name": "it", "type": kind}]}
        fastavro.writer(file, schema, [{"it": value} for value in values])
    return str(path)


def sparse_record(**fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "It", "fields": [{"name": name, "type": kind} for name, kind in fields.items()]}


INDICES, LONGS = array("int"), array("long")


@pytest.mark.parametrize(
    ("kind", "feature", "message"),
    [
        (
            array({"type": "map", "values": "int"}),
            DenseFeature([2], tf.int32),
            "Dense feature 'it' must be non-nullable",
        ),
        (
            array(["int", "null"]),
            VarlenFeature([-1], tf.int32),
            "Varlen feature 'it' must be non-nullable nested arrays",
        ),
        (
            {"type": "enum", "name": "E", "symbols": ["A"]},
            DenseFeature([], tf.string),
            "Unsupported value type found in",
        ),
        (["null", "int", "long"], DenseFeature([], tf.int32), "Feature 'it' has invalid union schema."),
        (
            sparse_record(indices1=INDICES, values=LONGS),
            SparseFeature([-1], tf.int64),
            "Sparse schema indices should be contiguous (indices0, indices1, ...). Input data schema: ",
        ),
        (
            sparse_record(indices0=INDICES),
            SparseFeature([-1], tf.int64),
            "Sparse schema is missing values column. Input data schema: ",
        ),
        (
            sparse_record(values=LONGS, weights=LONGS, indices0=INDICES),
            SparseFeature([-1], tf.int64),
            "Sparse schema can only contain 'indices' columns and a 'values' column. Input data schema: ",
        ),
        (
            sparse_record(indices0=["null", INDICES], values=LONGS),
            SparseFeature([-1], tf.int64),
            (
                "Unsupported indices type found in feature 'it'. Sparse tensor indices must be a non-nullable array of "
                "non-nullable int or long. Invalid schema found: "
            ),
        ),
        (
            sparse_record(indices0=array("string"), values=LONGS),
            SparseFeature([-1], tf.int64),
            "Unsupported indices type found in feature 'it'.",
        ),
        (
            sparse_record(indices0=INDICES, values=array(LONGS)),
            SparseFeature([-1], tf.int64),
            (
                "Unsupported value type found in feature 'it'. Tensor value must be a non-nullable array of "
                "non-nullable int, long, float, double, boolean, bytes, or string. Invalid schema found: "
            ),
        ),
        (
            sparse_record(indices0=INDICES, values=LONGS),
            SparseFeature([-1], tf.float32),
            (
                "Schema value type and metadata type mismatch in feature 'it'. Avro schema data type: long, metadata "
                "type: float. Invalid schema found: "
            ),
        ),
    ],
)
def test_schemas_that_do_not_fit(tmp_path: Path, kind: Any, feature: Any, message: str) -> None:
    path = write_value(tmp_path, kind)
    with raises(INVALID, message) as caught:
        ids(ATDSDataset(path, 2, {"it": feature}))
    assert path in caught.value.message


def test_the_first_dense_feature_is_reported(files: list[str]) -> None:
    features = {
        "id": VarlenFeature([], tf.string),
        "items": SparseFeature([1], tf.int32),
        "score": DenseFeature([2], tf.float32),
        "absent": VarlenFeature([], tf.string),
    }
    for name in ("score", "items", "absent", "id"):
        with raises(INVALID, f"feature '{name}'"):
            ids(ATDSDataset(files, 2, features))
        del features[name]


def test_long_schemas_are_cut_in_messages(tmp_path: Path) -> None:
    path = write_value(tmp_path, sparse_record(**{f"field{i}": "int" for i in range(1000)}))
    with raises(INVALID, "Dense feature 'it'") as caught:
        ids(ATDSDataset(path, 2, {"it": DenseFeature([], tf.int32)}))
    assert len(caught.value.message) < 2000


@pytest.mark.parametrize(
    ("kind", "feature", "value", "found", "expected", "dimension", "shape"),
    [
        (INDICES, DenseFeature([2], tf.int32), [1, 2, 3], 3, 2, 1, "[2]"),
        (INDICES, VarlenFeature([2], tf.int32), [1], 1, 2, 1, "[2]"),
        (array(array(INDICES)), DenseFeature([2, 1, 2], tf.int32), [[[1, 2]], [[3]]], 1, 2, 3, "[2,1,2]"),
        (array(array("string")), VarlenFeature([-1, 1], tf.string), [["a"], []], 0, 1, 2, "[?,1]"),
        (["null", array(array("string"))], VarlenFeature([1, -1], tf.string), [["a"], []], 2, 1, 1, "[1,?]"),
    ],
)
def test_lengths_that_do_not_fit(
    tmp_path: Path, kind: Any, feature: Any, value: Any, found: int, expected: int, dimension: int, shape: str
) -> None:
    path = write_value(tmp_path, kind, value)
    reason = (
        f"Number of decoded value {found} does not match the expected dimension size {expected} at the {dimension}th "
        f"dimension in user defined shape {shape}"
    )
    with raises(INVALID, f"Failed to decode feature it. Reason: {reason} (file {path}, block 0"):
        ids(ATDSDataset(path, 2, {"it": feature}))


@pytest.mark.parametrize(
    ("fields", "shape", "value", "told"),
    [
        (("indices0", "values"), [9], {"indices0": [1, 2, 3], "values": [1]}, "[indices0, values] arrays are [3, 1]"),
        (("values", "indices0"), [9], {"indices0": [1], "values": [1, 2]}, "[values, indices0] arrays are [2, 1]"),
        (("values", "indices0"), [9], {"indices0": [1, 2], "values": [1]}, "[values, indices0] arrays are [1, 2]"),
        # With three arrays, the two that differ are named.
        (
            ("indices1", "values", "indices0"),
            [9, 9],
            {"indices0": [1, 2, 3], "values": [1, 2], "indices1": [4, 5]},
            "[indices1, indices0] arrays are [2, 3]",
        ),
    ],
)
def test_sparse_arrays_of_different_lengths(tmp_path: Path, fields: Any, shape: Any, value: Any, told: str) -> None:
    path = write_value(tmp_path, sparse_record(**dict.fromkeys(fields, INDICES)), value)
    told = f"Numbers of decoded value in indice and values array are different. Numbers of decoded value in {told}"
    with raises(INVALID, f"Failed to decode feature it. Reason: {told} (file {path}, block 0"):
        ids(ATDSDataset(path, 2, {"it": SparseFeature(shape, tf.int32)}))


def test_files_may_have_other_schemas(tmp_path: Path) -> None:
    """tensorflow-io rejects such files."""
    files = [tmp_path / "a.avro", tmp_path / "b.avro"]
    names = [["id", "items"], ["more", "items", "id"]]
    kinds = {"id": "long", "items": sparse_record(indices0=INDICES, values=LONGS), "more": "string"}
    kinds_by_file = [kinds, kinds | {"items": sparse_record(values=LONGS, indices0=LONGS)}]
    for number, path in enumerate(files):
        fields = [{"name": name, "type": kinds_by_file[number][name]} for name in names[number]]
        row = {"id": number, "items": {"indices0": [number], "values": [7 + number]}, "more": "x"}
        with path.open("wb") as file:
            fastavro.writer(file, {"type": "record", "name": "R", "fields": fields}, [row])
    features = ID | {"items": SparseFeature([5], tf.int64)}
    (batch,) = ATDSDataset([str(path) for path in files], 2, features)
    assert batch["id"].numpy().tolist() == [0, 1]
    assert batch["items"].indices.numpy().tolist() == [[0, 0], [1, 1]]
    assert batch["items"].values.numpy().tolist() == [7, 8]


def test_absent_files_and_fields(files: list[str]) -> None:
    with pytest.raises(tf.errors.NotFoundError, match="nowhere"):
        ids(ATDSDataset([*files, "nowhere.avro"], 2, ID))
    told = "User defined feature 'absent' cannot be found in the input data. Input data schema: it has the fields id, "
    with raises(INVALID, told):
        ids(ATDSDataset(files, 2, {"absent": DenseFeature([], tf.int64)}))
    with pytest.raises(INVALID, match="filenames is empty"):
        ids(ATDSDataset(tf.constant([], tf.string), 2, ID))


@pytest.mark.parametrize("shuffle", [0, 30])
def test_damage_never_loses_rows_silently(files: list[str], shuffle: int) -> None:
    data = Path(files[0]).read_bytes()
    for damaged in (data[:-20], data[:-16] + bytes(16), b"no" + data):
        Path(files[0]).write_bytes(damaged)
        with pytest.raises(INVALID, match=r"MalformedFileError.*a\.avro"):
            ids(ATDSDataset(files, 8, ID, shuffle_buffer_size=shuffle))


def test_varlen_is_row_major(files: list[str]) -> None:
    batch = next(iter(ATDSDataset(files, 4, {"items": VarlenFeature([-1], tf.int32)})))
    assert batch["items"].indices.numpy().tolist() == [[1, 0], [2, 0], [2, 1]]
    assert batch["items"].values.numpy().tolist() == [0, 0, 1]
    assert batch["items"].dense_shape.numpy().tolist() == [4, 2]
