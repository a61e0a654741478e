"""Writing TFRecord files, compared with an independent encoder and with TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import fixtures
from fastpipe import errors
from fastpipe.tfrecord import write_tfrecord
from fixtures import Run
from tfrecords import example, file, frame

pa = pytest.importorskip("pyarrow")
run = fixtures.command(100)


def test_columns_of_all_types_come_back(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    table = pa.table(
        {
            "bool": [True, False, None],
            "int8": pa.array([-1, None, 3], pa.int8()),
            "uint64": pa.array([2**63 - 1, 0, 1], pa.uint64()),
            "half": pa.array(np.array([1, 2, 3], "float16")),
            "double": [0.5, None, float("nan")],
            "text": ["ä", "", None],
            "bytes": [b"\xff", None, b""],
            "view": pa.array(["a", "b", "c"]).cast(pa.string_view()),
            "codes": pa.array(["a", "b", "a"]).dictionary_encode(),
            "list": [[1, 2], [], None],
            "texts": [["a", "b"], [], None],
            "fixed": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
            "pairs": pa.array([[[1, 2], [3, 4]], [], None], pa.list_(pa.list_(pa.int64(), 2))),
            "s": [{"a": 1, "b": "x"}, None, {"a": 2, "b": None}],
        }
    )
    done = write_tfrecord(path, table)
    assert (done.rows, done.size) == (3, path.stat().st_size)
    with fastpipe.read_tfrecord(path, batch_size=3) as reader:
        found = fastpipe.to_arrow(next(iter(reader)), reader.features).to_pydict()
    assert np.isnan(found["double"].pop(2))
    assert found == {
        "bool": [1, 0, None],
        "int8": [-1, None, 3],
        "uint64": [2**63 - 1, 0, 1],
        "half": [1, 2, 3],
        "double": [0.5, None],
        "text": ["ä", "", None],
        "bytes": [b"\xff", None, b""],
        "view": ["a", "b", "c"],
        "codes": ["a", "b", "a"],
        "list": [[1, 2], [], None],
        "texts": [["a", "b"], [], None],
        "fixed": [[1, 2], None, [3, 4]],
        "pairs": [[1, 2, 3, 4], [], None],
        "s.a": [1, None, 2],
        "s.b": ["x", None, None],
    }


LISTS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    st.lists(st.floats(width=32), max_size=5),
    st.lists(st.binary(max_size=200), max_size=3),
)


@given(rows=st.lists(st.dictionaries(st.sampled_from(["a", "b", "long name" * 20]), LISTS, min_size=1), max_size=5))
@settings(deadline=None)
def test_an_independent_encoder_writes_the_same_files(rows: list[dict[str, list[Any]]], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "one.tfrecord"
    rows = [{name: values for name, values in row.items() if values} for row in rows]
    kinds = {int: pa.int64(), float: pa.float32(), bytes: pa.binary()}
    tables = [
        pa.table({name: pa.array([values], pa.list_(kinds[type(values[0])])) for name, values in row.items()})
        for row in rows
        if row
    ]
    write_tfrecord(path, tables)
    assert path.read_bytes() == b"".join(frame(example(row)) for row in rows if row)


def test_readers_and_batches_are_written(tmp_path: Path) -> None:
    batch = {
        "x": np.arange(5, dtype="int32"),
        "m": np.arange(10, dtype="float32").reshape(5, 2),
        "r": fastpipe.Ragged(np.arange(3), np.array([0, 1, 1, 3, 3, 3])),
        "s": fastpipe.Sparse(np.array([[0, 4], [3, 1]]), np.array([0.5, 1.5], "float32"), np.array([5, 9])),
    }
    one, two = tmp_path / "one.tfrecord", tmp_path / "two.tfrecord"
    assert write_tfrecord(one, batch).rows == 5
    with fastpipe.read_tfrecord(one, batch_size=2) as reader:
        assert sorted(reader.features) == ["m", "r", "s.indices0", "s.values", "x"]
        assert write_tfrecord(two, reader).rows == 5
    assert [one.stat().st_size] == [two.stat().st_size]
    with fastpipe.read_tfrecord([one, two], batch_size=5) as reader:
        first, second = reader
    for name, column in first.items():
        assert fastpipe.to_arrow({name: column}) == fastpipe.to_arrow({name: second[name]})
    assert write_tfrecord(one, []).rows == 0
    assert one.read_bytes() == b""


def test_columns_that_do_not_fit_are_refused_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    write_tfrecord(path, {"x": np.arange(3)})
    before = path.read_bytes()
    wrong: list[tuple[Any, type[fastpipe.FastpipeError]]] = [
        (pa.table({"x": pa.array([2**63], pa.uint64())}), errors.ValueRangeError),
        (pa.table({"x": [1e300]}), errors.ValueRangeError),
        (pa.table({"x": [[1, None]]}), errors.NullValueError),
        (pa.table({"x": [[[1], [2, 3]]]}), errors.UnsupportedError),
        (pa.table({"x": pa.array([1], pa.timestamp("s"))}), errors.UnsupportedError),
        (pa.table({"x": pa.nulls(1)}), errors.UnsupportedError),
    ]
    for data, kind in wrong:
        with pytest.raises(kind) as caught:
            write_tfrecord(path, [pa.table({"x": [1]}), data])
        assert caught.value.feature == "x"
    with pytest.raises(TypeError, match="data must be"):
        write_tfrecord(path, 3)
    with pytest.raises(errors.MissingFileError):
        write_tfrecord(tmp_path / "no" / "x.tfrecord", {"x": np.arange(3)})

    def raising() -> Iterator[Any]:
        yield {"x": np.arange(3)}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tfrecord(path, raising())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.tfrecord"]


def test_convert_writes_and_reads_tfrecord_files(run: Run, tmp_path: Path) -> None:
    fastpipe.write_avro(tmp_path / "in.avro", {"x": np.arange(50), "y": np.arange(50) / 2})
    for source, target in (("in.avro", "out.tfrecord"), ("out.tfrecord", "back.avro")):
        code, out, err = run("convert", tmp_path / source, tmp_path / target)
        assert (code, err) == (0, "")
        assert "50 rows" in out
    for name, read in (("out.tfrecord", fastpipe.read_tfrecord), ("back.avro", fastpipe.read_avro)):
        with read(tmp_path / name, batch_size=50) as reader:
            found = fastpipe.to_arrow(next(iter(reader))).to_pydict()
        assert found == {"x": list(range(50)), "y": [x / 2 for x in range(50)]}


def test_index_keeps_the_records_of_a_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    path.write_bytes(file({"x": i, "pad": "x" * 300} for i in range(1000)))
    os.utime(path, ns=(10**18, 10**18))
    code, out, err = run("index", path, "--cache", tmp_path / "cache")
    assert (code, err) == (0, "")
    assert "written" in out
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert "was there" in run("index", path, "--cache", tmp_path / "cache")[1]


def test_tensorflow_and_fastpipe_read_the_files_of_each_other(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    ours, theirs = tmp_path / "ours.tfrecord", tmp_path / "theirs.tfrecord"
    rows = 200
    lists = [[f"{i}-{j}" for j in range(i % 4)] for i in range(rows)]
    table = pa.table(
        {
            "label": [i % 3 - 1 for i in range(rows)],
            "x": pa.array([[i / 7, float(i)] for i in range(rows)], pa.list_(pa.float32(), 2)),
            "texts": lists,
            "maybe": [None if i % 5 == 0 else i for i in range(rows)],
        }
    )
    write_tfrecord(ours, table)
    records = [bytes(record) for record in tf.data.TFRecordDataset(str(ours)).as_numpy_iterator()]
    parsed = tf.io.parse_example(
        records,
        {
            "label": tf.io.FixedLenFeature([], tf.int64),
            "x": tf.io.FixedLenFeature([2], tf.float32),
            "texts": tf.io.RaggedFeature(tf.string),
            "maybe": tf.io.FixedLenFeature([], tf.int64, default_value=-1),
        },
    )
    assert parsed["label"].numpy().tolist() == table["label"].to_pylist()
    assert parsed["x"].numpy().tolist() == table["x"].to_pylist()
    assert parsed["texts"].to_list() == [[text.encode() for text in row] for row in lists]
    assert parsed["maybe"].numpy().tolist() == [-1 if i is None else i for i in table["maybe"].to_pylist()]
    with tf.io.TFRecordWriter(str(theirs)) as writer:
        for record in records:
            message = tf.train.Example.FromString(record)
            writer.write(message.SerializeToString())
    with fastpipe.read_tfrecord(theirs, batch_size=rows) as reader:
        (batch,) = reader
        found = fastpipe.to_arrow(batch, reader.features)
    for name in table.column_names:
        assert found[name].to_pylist() == table[name].to_pylist()
