"""fastpipe.tf.make_avro_record_dataset and AvroRecordDataset: replacements of tensorflow-io's."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastavro
import pytest

import fastpipe

tf = pytest.importorskip("tensorflow", reason="TensorFlow isn't installed", exc_type=ImportError)
import avro_record_cases  # noqa: E402 - needs TensorFlow
import fastpipe.tf as fptf  # noqa: E402 - needs TensorFlow
from avro_record_cases import SCHEMA, cases, reduced, row  # noqa: E402 - needs TensorFlow
from fastpipe.tf import tfio  # noqa: E402 - needs TensorFlow

sys.path.insert(0, str(Path(__file__).parent.parent / "benches"))
from peers.environments import NoEnvironmentError, interpreter  # noqa: E402 - in another folder

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorflow"),
    pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning"),
]
INVALID = tf.errors.InvalidArgumentError
COLUMNAR = tfio.experimental.columnar
ROWS = 17
LABEL = {"label": tf.io.FixedLenFeature([], tf.int32, -100)}


def write(path: Path, rows: list[dict[str, Any]], schema: Any = SCHEMA) -> None:
    with path.open("wb") as file:
        fastavro.writer(file, schema, rows, sync_interval=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of two files, which have 17 rows."""
    folder = tmp_path_factory.mktemp("records")
    write(folder / "a.avro", [row(i) for i in range(12)])
    write(folder / "b.avro", [row(i) for i in range(12, ROWS)])
    return folder


def expected(i: int) -> dict[str, Any]:
    """Returns the values of the features of row `i`. Arrays have the coordinates of each value."""
    found = row(i)
    entries = found["entries"]
    return {
        "label": -100 if found["label"] is None else found["label"],
        "dataType": found["dataType"].encode(),
        "text": b"none" if found["text"] is None else found["text"].encode(),
        **{name: found[name] for name in ("flag", "big", "single", "double", "raw")},
        "pair[*]": found["pair"],
        "user.age": found["user"]["age"],
        "features[*]": [((j,), value) for j, value in enumerate(found["features"])],
        "entries[*].value": [((j,), entry["value"]) for j, entry in enumerate(entries)],
        "nested[*][*]": [
            ((j, k), word.encode()) for j, words in enumerate(found["nested"]) for k, word in enumerate(words)
        ],
        "entries": sorted(((entry["row"], entry["column"]), entry["value"]) for entry in entries),
    }


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a batch like `expected`."""
    columns: dict[str, list[Any]] = {}
    for name, value in batch.items():
        if not isinstance(value, tf.SparseTensor):
            columns[name] = value.numpy().tolist()
            continue
        shape, places = value.dense_shape.numpy().tolist(), value.indices.numpy().tolist()
        columns[name] = [[] for _ in range(shape[0])]
        for (at, *rest), item in zip(places, value.values.numpy().tolist(), strict=True):
            columns[name][at].append((tuple(rest), item))
        if name != "entries":
            longest = [max((place[d] + 1 for place in places), default=0) for d in range(1, len(shape))]
            assert shape[1:] == longest, name
    return [dict(zip(columns, items, strict=True)) for items in zip(*columns.values(), strict=True)]


# The other cases have some of these features.
EVERY = [name for name in cases(COLUMNAR) if name.startswith("every") or "schema" in name]


@pytest.mark.parametrize("name", EVERY)
def test_batches_have_the_rows_in_order(folder: Path, name: str) -> None:
    features, options = cases(COLUMNAR)[name]
    schema = reduced() if "reader schema" in name else SCHEMA
    dataset = fptf.make_avro_record_dataset(str(folder / "*.avro"), features, reader_schema=schema, **options)
    size, epochs = options["batch_size"], options.get("num_epochs") or 5
    wanted = [expected(i) for i in range(ROWS)] * epochs
    full = options.get("drop_final_batch") or "num_epochs" not in options
    batches = [wanted[at : at + size] for at in range(0, len(wanted), size)]
    batches = [batch for batch in batches if len(batch) == size or not full]
    for _ in range(2):
        for batch, rows in itertools.zip_longest(dataset.take(len(batches)), batches):
            assert list(batch) == sorted(features)
            assert rows_of(batch) == [{key: value[key] for key in sorted(features)} for value in rows]
    assert all(spec.shape[0] == (size if full else None) for spec in dataset.element_spec.values())
    if "num_epochs" in options:
        assert len(list(dataset)) == len(batches)


def test_arrays_as_ragged_tensors(folder: Path) -> None:
    features = {
        "a": tf.io.RaggedFeature(tf.float32, "entries[*].value"),
        "features": tf.io.RaggedFeature(tf.int64, row_splits_dtype=tf.int64),
    }
    for epochs, sizes in ((1, [8, 8, 1]), (2, [8, 8, 8, 8, 2])):
        batches = list(fptf.make_avro_record_dataset(str(folder), features, 8, shuffle=False, num_epochs=epochs))
        pairs = (zip(batch["a"].to_list(), batch["features"].to_list(), strict=True) for batch in batches)
        found = list(itertools.chain.from_iterable(pairs))
        wanted = [([entry["value"] for entry in row(i)["entries"]], row(i)["features"]) for i in range(ROWS)]
        assert found == wanted * epochs
        assert [batch["a"].shape[0] for batch in batches] == sizes
        assert (batches[0]["a"].row_splits.dtype, batches[0]["features"].row_splits.dtype) == (tf.int32, tf.int64)


def test_shuffled_epochs_have_each_row_once(folder: Path) -> None:
    features = {"big": tf.io.FixedLenFeature([], tf.int64)}

    def epochs(seed: int | None) -> list[list[int]]:
        dataset = fptf.make_avro_record_dataset(str(folder), features, 5, num_epochs=2, shuffle_seed=seed)
        found = [int(i) >> 40 for _ in range(2) for batch in dataset for i in batch["big"]]
        return [found[at : at + ROWS] for at in range(0, 4 * ROWS, ROWS)]

    first = epochs(3)
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in first)
    assert len({tuple(epoch) for epoch in first}) == 4
    assert epochs(3) == first
    assert epochs(None) != epochs(None)


def test_files_may_have_several_schemas(folder: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.avro", [row(3)])
    other = {"type": "record", "name": "Row", "fields": [{"name": "big", "type": "int"}]}
    write(tmp_path / "b.avro", [{"big": 7}], other)
    schema = other | {
        "fields": [
            {"name": "big", "type": "long"},
            {"name": "label", "type": ["int", "null"], "default": 5},
        ]
    }
    features = LABEL | {"big": tf.io.FixedLenFeature([], tf.int64)}
    arguments: dict[str, Any] = {"batch_size": 2, "shuffle": False, "num_epochs": 1}
    (batch,) = fptf.make_avro_record_dataset(str(tmp_path), features, reader_schema=json.dumps(schema), **arguments)
    assert (batch["label"].numpy().tolist(), batch["big"].numpy().tolist()) == ([-100, 5], [3 << 40, 7])
    paths = tf.constant([str(tmp_path / "b.avro"), str(tmp_path / "a.avro")])
    with pytest.raises(fastpipe.errors.SchemaError, match="raw"):
        fptf.make_avro_record_dataset(paths, {"raw": tf.io.FixedLenFeature([], tf.string)}, **arguments)
    records = fptf.AvroRecordDataset(paths, reader_schema=schema)
    with pytest.raises(INVALID, match=r"its schema differs from reader_schema.*make_avro_record_dataset"):
        next(iter(records))


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": "a"}, TypeError, "batch_size"),
        ({"reader_buffer_size": 0}, ValueError, "reader_buffer_size"),
        ({"num_epochs": 0}, ValueError, "num_epochs"),
        ({"num_parallel_reads": 0}, ValueError, "num_parallel_reads"),
        ({"shuffle": 1}, TypeError, "shuffle must be True or False"),
        ({"shuffle_buffer_size": 0}, ValueError, "shuffle_buffer_size"),
        ({"drop_final_batch": "yes"}, TypeError, "drop_final_batch"),
        ({"features": {}}, TypeError, "features must be a dict of at least one feature of tf.io"),
        ({"features": {"label": fastpipe.DenseSpec((), "int32")}}, TypeError, "pass specs to fastpipe.read_avro"),
        ({"features": {"label": tf.int32}}, TypeError, "feature 'label': expected"),
        ({"features": {"features[0]": LABEL["label"]}}, ValueError, r"only \[\*\] \(all items\) is supported"),
        ({"features": {"absent": LABEL["label"]}}, fastpipe.errors.SchemaError, "absent"),
        ({"features": {"x": tf.io.SparseFeature(["a", "b"], "c", tf.int32, [5])}}, ValueError, "one number per index"),
        ({"file_pattern": "absent.avro"}, fastpipe.errors.MissingFileError, "absent.avro"),
    ],
)
def test_arguments_are_checked(folder: Path, changed: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"file_pattern": str(folder), "features": LABEL, "batch_size": 2} | changed
    with pytest.raises(error, match=match):
        fptf.make_avro_record_dataset(**arguments)


def test_indices_and_values_of_different_lengths(folder: Path) -> None:
    features = {"x": tf.io.SparseFeature("@features[*]", "@pair[*]", tf.float32, 9)}
    dataset = fptf.make_avro_record_dataset(str(folder), features, 4, num_epochs=1, shuffle=False)
    with pytest.raises(INVALID, match="a row has more or fewer indices than values"):
        list(dataset)


@pytest.mark.parametrize("reads", [None, 1, 2, tf.data.AUTOTUNE])
def test_encoded_records(folder: Path, reads: int | None) -> None:
    paths = [str(folder / "a.avro"), str(folder / "b.avro")]
    calls = None if reads is None else reads
    for names in (paths, tf.constant(paths), tf.data.Dataset.from_tensor_slices(paths)):
        records = fptf.AvroRecordDataset(names, 1 << 20, reads, calls, reader_schema=json.dumps(SCHEMA))
        assert isinstance(records, fptf.AvroRecordDataset)
        assert records.element_spec == tf.TensorSpec((), tf.string)
        parsed = records.batch(4).map(lambda batch: fptf.parse_avro(batch, SCHEMA, cases(COLUMNAR)["every: once"][0]))
        found = [values for batch in parsed for values in rows_of(batch)]
        assert sorted(values["big"] >> 40 for values in found) == list(range(ROWS))
        if reads in (None, 1):
            assert found == [{name: expected(i)[name] for name in found[0]} for i in range(ROWS)]
        if reads == 2:
            assert [values["big"] >> 40 for values in found][:4] == [0, 12, 1, 13]
    one = fptf.AvroRecordDataset(paths[1], num_parallel_reads=3, block_length=2)
    assert len(list(one)) == len(list(one)) == 5


def test_invalid_arguments_of_encoded_records(folder: Path) -> None:
    path = str(folder / "a.avro")
    for wrong in (3, None, tf.data.Dataset.range(3), tf.data.Dataset.from_tensors([path])):
        with pytest.raises(TypeError, match="filenames must be"):
            fptf.AvroRecordDataset(wrong)
    for reads, calls in ((None, 1), (2, 3), (0, None), (2, 0)):
        with pytest.raises(ValueError, match="num_parallel_"):
            fptf.AvroRecordDataset(path, num_parallel_reads=reads, num_parallel_calls=calls)
    with pytest.raises(ValueError, match="buffer_size"):
        fptf.AvroRecordDataset(path, -1)
    with pytest.raises(tf.errors.NotFoundError, match=r"absent\.avro"):
        next(iter(fptf.AvroRecordDataset("absent.avro")))
    (folder / "cut").write_bytes((folder / "a.avro").read_bytes()[:-30])
    with pytest.raises(INVALID, match="cut"):
        list(fptf.AvroRecordDataset(str(folder / "cut")))


# tensorflow-io's tutorial of its Avro datasets, whose file has four records. Only the import differs.
TUTORIAL = """
import tensorflow as tf
{import_line}
print(tfio.__version__)
features = {{
    "features[*]": tfio.experimental.avro.VarLenFeatureWithRank(dtype=tf.int32),
    "label": tf.io.FixedLenFeature(shape=[], dtype=tf.int32, default_value=-100),
    "dataType": tf.io.FixedLenFeature(shape=[], dtype=tf.string),
}}
schema = tf.io.gfile.GFile("train.avsc").read()
options = dict(file_pattern=["train.avro"], reader_schema=schema, shuffle=False, num_epochs=1)
make = tfio.experimental.avro.make_avro_record_dataset
for record in make(features=features, batch_size=3, **options):
    print(record["features[*]"].values.numpy().tolist(), record["label"].numpy().tolist(), record["dataType"].numpy())
for reads in (None, 16):
    dropped = make(features=features, batch_size=3, drop_final_batch=True, num_parallel_reads=reads, **options)
    print([len(record["label"]) for record in dropped])
model = tf.keras.Sequential()
model.compile(optimizer="sgd", loss="mse")
dataset = make(features={{"features[*]": features["features[*]"]}}, batch_size=1, **options)
print([record["features[*]"].dense_shape.numpy().tolist() for record in dataset])
"""


def test_the_tutorial_of_tensorflow_io(tmp_path: Path) -> None:
    chosen = {"features", "label", "dataType"}
    schema = {"type": "record", "name": "ImageDataset", "namespace": "com.example"}
    schema["fields"] = [field for field in SCHEMA["fields"] if field["name"] in chosen]  # type: ignore[assignment]
    write(tmp_path / "train.avro", [{name: row(i)[name] for name in chosen} for i in range(4)], schema)
    (tmp_path / "train.avsc").write_text(json.dumps(schema))
    program = TUTORIAL.format(import_line="from fastpipe.tf import tfio")
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        fastpipe.__version__,
        "[0, 0, 1, 0, 1, 2] [-100, 1, 2] [b'TRAINING' b'VALIDATION' b'TRAINING']",
        "[0, 1, 2, 3] [-100] [b'VALIDATION']",
        "[3]",
        "[3]",
        "[[1, 1], [1, 2], [1, 3], [1, 4]]",
    ]


@pytest.mark.timeout(600)
def test_results_match_tensorflow_io(folder: Path) -> None:
    try:
        peer = interpreter("tensorflow-io", print)
    except NoEnvironmentError as error:
        pytest.skip(f"no environment with tensorflow-io: {error}")
    command = [peer, avro_record_cases.__file__, "tensorflow_io", str(folder)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    wanted = dict(map(json.loads, re.findall(r"^\[.*\]$", done.stdout, re.MULTILINE)))
    # tensorflow-io may abort the process in the last case, which has arrays.
    assert len(wanted) >= 11, done.stderr[-2000:]
    found = {name: json.loads(json.dumps(result)) for name, result in avro_record_cases.results(COLUMNAR, folder)}
    for name, result in wanted.items():
        assert found[name] == result, name
