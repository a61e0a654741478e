"""fastpipe.tf.atds by itself: checks, orders, symbolic filenames, damage. test_atds_differential compares it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fastavro
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow isn't installed", exc_type=ImportError)
from fastpipe.tf import _atds_files  # noqa: E402 - needs TensorFlow
from fastpipe.tf.atds import ATDSDataset, DenseFeature, SparseFeature, VarlenFeature  # noqa: E402 - needs TensorFlow

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
    """What `ids` returns, from a loop in a graph, which takes less time; to be called for each epoch."""

    @tf.function  # type: ignore[untyped-decorator]
    def loop() -> Any:
        found = tf.zeros([0], tf.int64)
        for batch in dataset:
            tf.autograph.experimental.set_loop_options(shape_invariants=[(found, tf.TensorShape([None]))])
            found = tf.concat([found, batch["id"]], 0)
        return found

    return lambda: loop().numpy().tolist()


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
        (DenseFeature, None, tf.int32),
        (DenseFeature, [None], tf.int32),
        (DenseFeature, [0], tf.int32),
        (DenseFeature, [-1], tf.int32),
        (DenseFeature, [], None),
        (DenseFeature, [], tf.uint8),
        (SparseFeature, [], tf.int32),
        (VarlenFeature, [-2], tf.int32),
    ],
)
def test_features_check_themselves(kind: Any, shape: Any, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"shape|dimension|dtype"):
        kind(shape, dtype)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, INVALID),
        ({"batch_size": [2]}, INVALID),
        ({"batch_size": None}, ValueError),
        ({"batch_size": "a"}, ValueError),
        ({"batch_size": 1.5}, TypeError),
        ({"shuffle_buffer_size": -1}, INVALID),
        ({"reader_buffer_size": 0}, INVALID),
        ({"num_parallel_calls": 0}, INVALID),
        ({"num_parallel_calls": -2}, INVALID),
        ({"drop_remainder": "a"}, ValueError),
        ({"features": {}}, ValueError),
        ({"features": None}, ValueError),
        ({"features": {"id": tf.int64}}, ValueError),
        ({"filenames": None}, ValueError),
        ({"filenames": [["a"]]}, INVALID),
        ({"fill": {"absent": 1}}, ValueError),
    ],
)
def test_arguments_are_checked(files: list[str], options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ATDSDataset(**({"filenames": files, "batch_size": 2, "features": ID} | options))


@pytest.mark.parametrize("shuffle", [0, 1, 20, 200])
@pytest.mark.parametrize("batch_size", [2, 3, 10])
def test_a_hundred_epochs_have_every_row_once(files: list[str], shuffle: int, batch_size: int) -> None:
    def epochs(threads: int, count: int) -> list[list[int]]:
        options = {"shuffle_buffer_size": shuffle, "num_parallel_calls": threads, "seed": 5}
        epoch = graph_ids(ATDSDataset(files, batch_size, ID, **options))
        return [epoch() for _ in range(count)]

    orders = epochs(1, 100)
    assert all(sorted(order) == list(range(130)) for order in orders)
    assert len({tuple(order) for order in orders}) == (100 if shuffle else 1)
    for threads in (2, 4, tf.data.AUTOTUNE):
        assert epochs(threads, 5) == orders[:5]


def test_it_is_built_within_interleave(files: list[str]) -> None:
    names = tf.data.Dataset.from_tensor_slices(files)
    dataset = names.interleave(lambda name: ATDSDataset(name, 7, ID, shuffle_buffer_size=10), num_parallel_calls=2)
    for _ in range(2):
        assert sorted(ids(dataset)) == list(range(130))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The sets of files that are opened from here on, all of them written long ago."""
    seen: list[list[str]] = []
    data = _atds_files.AvroData
    monkeypatch.setattr(_atds_files, "_COARSEST_CLOCK", -(10**12))
    monkeypatch.setattr(_atds_files, "AvroData", lambda files, *a, **k: seen.append(files) or data(files, *a, **k))
    return seen


def test_files_are_opened_once(files: list[str], opened: list[list[str]]) -> None:
    dataset = ATDSDataset(files, 7, ID, shuffle_buffer_size=10)
    for _ in range(3):
        assert sorted(ids(tf.data.Dataset.zip(dataset, dataset).map(lambda a, b: a))) == list(range(130))
    # The two iterations of the first round may both find nothing open.
    assert opened == [files] * len(opened)
    assert len(opened) in (1, 2)


def test_changed_files_are_opened_again(files: list[str], opened: list[list[str]]) -> None:
    dataset = ATDSDataset(files, 7, ID)
    assert ids(dataset) == list(range(130))
    write(Path(files[1]), 100, 140)
    assert ids(dataset) == list(range(140))
    # The same size: the time tells.
    before = os.stat(files[1])
    write(Path(files[1]), 70, 110)
    os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert ids(dataset) == [*range(100), *range(70, 110)]
    assert len(opened) == 3
    Path(files[1]).unlink()
    with pytest.raises(tf.errors.NotFoundError, match=r"b\.avro"):
        ids(dataset)


def test_files_written_a_moment_ago_are_not_kept(files: list[str]) -> None:
    dataset = ATDSDataset(files[0], 7, ID)
    for start in range(5):
        # Of one size; changes within a tick of the file system's clock don't show.
        write(Path(files[0]), 10 + start, 50 + start)
        assert ids(dataset) == list(range(10 + start, 50 + start))


def test_no_more_than_a_few_sets_are_kept(tmp_path: Path, opened: list[list[str]]) -> None:
    names = [write(tmp_path / f"{i}.avro", i, i + 1) for i in range(_atds_files._KEPT + 1)]
    each = tf.data.Dataset.from_tensor_slices(names).interleave(lambda name: ATDSDataset(name, 1, ID), cycle_length=1)
    for _ in range(2):
        assert ids(each) == list(range(len(names)))
    assert len(opened) == 2 * len(names)
    # The last ones are.
    recent = tf.data.Dataset.from_tensor_slices(names[1:]).interleave(lambda name: ATDSDataset(name, 1, ID))
    for _ in range(3):
        assert len(ids(recent)) == len(names) - 1
    assert len(opened) == 2 * len(names) + len(names) - 1


def test_nulls_are_errors_or_filled(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", 0, 10, null=3)
    features = {"score": DenseFeature([], tf.float32)}
    iterator = iter(ATDSDataset(path, 2, features))
    next(iterator)
    with pytest.raises(INVALID, match=r"NullValueError.*'score'"):
        next(iterator)
    filled = [
        value for batch in ATDSDataset(path, 2, features, fill={"score": -1.0}) for value in batch["score"].numpy()
    ]
    assert filled == [-1 if i == 3 else i / 2 for i in range(10)]


@pytest.mark.parametrize(
    "feature",
    [
        DenseFeature([], tf.float32),
        DenseFeature([1], tf.int64),
        VarlenFeature([-1], tf.int64),
        SparseFeature([3], tf.int64),
    ],
)
def test_nothing_is_promoted(files: list[str], feature: Any) -> None:
    with pytest.raises(INVALID, match=r"feature 'id': .* but \w+Feature"):
        ids(ATDSDataset(files, 2, {"id": feature}))


def test_absent_files_and_fields(files: list[str]) -> None:
    with pytest.raises(tf.errors.NotFoundError, match="nowhere"):
        ids(ATDSDataset([*files, "nowhere.avro"], 2, ID))
    with pytest.raises(INVALID, match="no field 'absent'; it has id, score, items"):
        ids(ATDSDataset(files, 2, {"absent": DenseFeature([], tf.int64)}))
    with pytest.raises(INVALID, match="filenames is empty"):
        ids(ATDSDataset(tf.constant([], tf.string), 2, ID))


@pytest.mark.parametrize("shuffle", [0, 30])
def test_damage_loses_no_rows_in_silence(files: list[str], shuffle: int) -> None:
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
