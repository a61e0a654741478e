"""fastpipe.tf.parse_avro: parsing serialized records into tensors, eagerly and in graphs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import wire
from processes import together
from test_messages import USER, datum, users

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed", exc_type=ImportError)
fptf = pytest.importorskip("fastpipe.tf")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorflow")

USERS = users(50)
RECORDS = [datum(USER, user) for user in USERS]
ITEMS = wire.record(
    "Item",
    embedding=wire.list_of("float"),
    words=wire.list_of(wire.list_of("string")),
    terms=wire.record("Terms", indices0=wire.list_of("long"), values=wire.list_of("double")),
    age=["null", "int"],
    maybe=["null", "double"],
    raw="bytes",
)
FEATURES: dict[str, Any] = {
    "embedding": fastpipe.DenseSpec((3,), "float32"),
    "words": fastpipe.RaggedSpec((None, None), "string"),
    "terms": fastpipe.SparseSpec((100,), "float64"),
    "age": fastpipe.DenseSpec((), "int64", fill=-1),
    "maybe": fastpipe.DenseSpec((), "float64", on_null="mask"),
    "raw": fastpipe.DenseSpec((), "bytes"),
}


def item(i: int) -> dict[str, Any]:
    return {
        "embedding": [i, i + 0.5, -i],
        "words": [["w" * j] * j for j in range(i % 4)],
        "terms": {"indices0": list(range(i % 3)), "values": [i / 2] * (i % 3)},
        "age": None if i % 2 else i,
        "maybe": None if i % 3 else i / 4,
        "raw": b"\x00\xff" * i + b"\x00",
    }


def check_items(found: dict[str, Any], items: list[dict[str, Any]]) -> None:
    assert list(found) == sorted(FEATURES)
    n = len(items)
    assert found["embedding"].shape == (n, 3)
    assert found["embedding"].dtype == tf.float32
    assert found["embedding"].numpy().tolist() == [it["embedding"] for it in items]
    assert found["age"].numpy().tolist() == [-1 if it["age"] is None else it["age"] for it in items]
    assert found["raw"].numpy().tolist() == [it["raw"] for it in items]
    words = [[[word.encode() for word in words] for words in it["words"]] for it in items]
    assert found["words"].to_list() == words
    terms = tf.sparse.to_dense(found["terms"]).numpy()
    expected = np.zeros((n, 100))
    for row, it in enumerate(items):
        expected[row, it["terms"]["indices0"]] = it["terms"]["values"]
    assert np.array_equal(terms, expected)
    assert found["maybe"].valid.numpy().tolist() == [it["maybe"] is not None for it in items]
    assert found["maybe"].values.numpy().tolist() == [it["maybe"] or 0.0 for it in items]


def encoded(items: list[dict[str, Any]]) -> list[bytes]:
    return [datum(ITEMS, it) for it in items]


@pytest.mark.parametrize("count", [0, 1, 33])
def test_every_array_type_eagerly(count: int) -> None:
    items = [item(i) for i in range(count)]
    check_items(fptf.parse_avro(tf.constant(encoded(items), tf.string), ITEMS, FEATURES), items)


def test_every_array_type_in_a_dataset() -> None:
    items = [item(i) for i in range(103)]
    records = tf.data.Dataset.from_tensor_slices(encoded(items))
    parsed = records.batch(10).map(
        lambda s: fptf.parse_avro(s, ITEMS, FEATURES), num_parallel_calls=4, deterministic=True
    )
    at = 0
    for element in parsed.prefetch(2):
        rows = int(element["age"].shape[0])
        check_items(element, items[at : at + rows])
        at += rows
    assert at == len(items)


def test_shapes_are_known_statically() -> None:
    records = tf.data.Dataset.from_tensor_slices(RECORDS)
    wanted = {"words": tf.io.VarLenFeature(tf.string)}
    assert tf.data.Dataset.from_tensors([b""]).map(
        lambda s: fptf.parse_avro(s, wire.record("W", words=wire.list_of("string")), wanted)
    ).element_spec == {"words": tf.SparseTensorSpec((1, None), tf.string)}
    known = records.batch(5, drop_remainder=True).map(lambda s: fptf.parse_avro(s, ITEMS, FEATURES)).element_spec
    assert known["embedding"] == tf.TensorSpec((5, 3), tf.float32)
    assert known["words"] == tf.RaggedTensorSpec((5, None, None), tf.string, 2, tf.int64)
    assert known["terms"] == tf.SparseTensorSpec((5, 100), tf.float64)
    open_ended = records.batch(5).map(lambda s: fptf.parse_avro(s, ITEMS, FEATURES)).element_spec
    assert open_ended["raw"] == tf.TensorSpec((None,), tf.string)


def test_features_are_inferred() -> None:
    found = fptf.parse_avro(RECORDS, USER)
    assert found["id"].numpy().tolist() == [user["id"] for user in USERS]
    assert [name.decode() for name in found["name"].numpy()] == [user["name"] for user in USERS]
    assert found["scores"].to_list() == [user["scores"] for user in USERS]
    assert fptf.parse_avro([b"\x02", b"\x7f"], "long")["value"].numpy().tolist() == [1, -64]


def test_features_of_tensorflow() -> None:
    class VarLenFeatureWithRank:  # The class of tensorflow-io.
        dtype, rank = tf.string, 2

    items = [item(i) for i in range(9)]
    found = fptf.parse_avro(
        encoded(items),
        ITEMS,
        {
            "embedding": tf.io.FixedLenFeature([3], tf.float32),
            "age": tf.io.FixedLenFeature([], tf.int32, default_value=[7]),
            "raw": tf.io.FixedLenFeature((), tf.string),
            "floats": tf.io.RaggedFeature(tf.float32, value_key="embedding"),
            "long": tf.io.RaggedFeature(tf.float32, value_key="embedding", row_splits_dtype=tf.int64),
            "words": VarLenFeatureWithRank(),
        },
    )
    assert found["age"].numpy().tolist() == [7 if it["age"] is None else it["age"] for it in items]
    assert found["age"].dtype == tf.int32
    assert found["raw"].numpy().tolist() == [it["raw"] for it in items]
    assert found["embedding"].shape == (9, 3)
    assert found["floats"].to_list() == [it["embedding"] for it in items]
    assert found["floats"].dtype == tf.float32
    assert found["floats"].row_splits.dtype == tf.int32
    assert found["long"].row_splits.dtype == tf.int64
    assert found["words"].dense_shape.numpy().tolist() == [9, 3, 2]
    entries = [
        ([row, i, j], word.encode())
        for row, it in enumerate(items)
        for i, words in enumerate(it["words"])
        for j, word in enumerate(words)
    ]
    assert list(zip(found["words"].indices.numpy().tolist(), found["words"].values.numpy(), strict=True)) == entries


def test_var_len_matches_parse_example() -> None:
    found = fptf.parse_avro(RECORDS, USER, {"scores": tf.io.VarLenFeature(tf.float32)})["scores"]

    def example(user: dict[str, Any]) -> bytes:
        floats = tf.train.Feature(float_list=tf.train.FloatList(value=user["scores"]))
        text: bytes = tf.train.Example(features=tf.train.Features(feature={"scores": floats})).SerializeToString()
        return text

    same = tf.io.parse_example([example(user) for user in USERS], {"scores": tf.io.VarLenFeature(tf.float32)})["scores"]
    assert np.array_equal(found.indices, same.indices)
    assert np.array_equal(found.values, same.values)
    assert np.array_equal(found.dense_shape, same.dense_shape)


@pytest.mark.parametrize(
    ("feature", "raised", "told"),
    [
        (tf.io.SparseFeature("i", "v", tf.float32, [3, 4]), ValueError, "size must have one number per index_key"),
        (tf.io.FixedLenSequenceFeature([], tf.float32), TypeError, "expected a DenseSpec"),
        ("float32", TypeError, "expected a DenseSpec"),
        (tf.io.RaggedFeature(tf.float32, partitions=[tf.io.RaggedFeature.RowSplits("s")]), ValueError, "RaggedSpec"),
        (tf.io.FixedLenFeature([2], tf.int64, [1, 2]), ValueError, "default_value must be a single value"),
        (tf.io.FixedLenFeature([None], tf.int64), ValueError, "use RaggedSpec"),
        (fastpipe.SparseSpec((3,), "int64", layout="csr"), ValueError, "coordinates"),
        (fastpipe.DenseSpec((), "string"), fastpipe.errors.SchemaError, "which don't fit string"),
    ],
)
def test_invalid_features_are_refused(feature: Any, raised: type[Exception], told: str) -> None:
    schema = USER
    if isinstance(feature, fastpipe.SparseSpec):
        schema = wire.record("R", id=wire.record("S", indices0=wire.list_of("long"), values=wire.list_of("long")))
    with pytest.raises(raised, match=told) as caught:
        fptf.parse_avro(RECORDS, schema, {"id": feature})
    assert "'id'" in str(caught.value)


def test_invalid_schemas_are_refused() -> None:
    with pytest.raises(TypeError, match="features must be a dict"):
        fptf.parse_avro(RECORDS, USER, ["id"])
    with pytest.raises(TypeError, match="names must be strings"):
        fptf.parse_avro(RECORDS, USER, {1: fastpipe.DenseSpec((), "int64")})
    with pytest.raises(fastpipe.errors.SchemaError, match="other"):
        fptf.parse_avro(RECORDS, USER, {"other": fastpipe.DenseSpec((), "int64")})
    with pytest.raises(fastpipe.errors.SchemaError):
        fptf.parse_avro(RECORDS, "{}")


def test_malformed_records_raise_invalid_argument() -> None:
    damaged = [*RECORDS[:7], RECORDS[7][:-1], *RECORDS[8:]]
    told = r"MalformedFileError: .*record 7\b"
    with pytest.raises(fastpipe.errors.MalformedFileError) as plain:
        fastpipe.avro.decode_messages(damaged, USER)
    with pytest.raises(tf.errors.InvalidArgumentError, match=told) as caught:
        fptf.parse_avro(damaged, USER)
    assert str(plain.value) in caught.value.message
    assert f"offset {plain.value.offset}" in caught.value.message
    parsed = tf.data.Dataset.from_tensor_slices(damaged).batch(5).map(lambda s: fptf.parse_avro(s, USER))
    rows = iter(parsed)
    assert next(rows)["id"].numpy().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"MalformedFileError: .*record 2\b"):
        next(rows)
    # The iterator continues after the malformed batch.
    assert next(rows)["id"].numpy().tolist() == [10, 11, 12, 13, 14]


def test_the_first_malformed_record_is_reported() -> None:
    many = [datum(USER, {"id": i, "name": "n" * 2000, "scores": []}) for i in range(2000)]
    assert fptf.parse_avro(many, USER)["id"].numpy().tolist() == list(range(2000))
    for i in (1999, 1500, 431):
        many[i] = many[i][:-3]
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"record {i}\b"):
            fptf.parse_avro(many, USER)


def test_values_that_do_not_fit() -> None:
    record = datum("long", 300)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ValueRangeError"):
        fptf.parse_avro([record], "long", {"value": fastpipe.DenseSpec((), "int8")})
    lists = wire.list_of("long")
    with pytest.raises(tf.errors.InvalidArgumentError, match="ShapeError"):
        fptf.parse_avro([datum(lists, [1])], lists, {"value": fastpipe.DenseSpec((2,), "int64")})
    with pytest.raises(tf.errors.InvalidArgumentError, match="NullValueError"):
        fptf.parse_avro([b"\x00"], ["null", "long"], {"value": fastpipe.DenseSpec((), "int64")})


def test_serialized_must_be_a_vector_of_strings() -> None:
    for wrong in (tf.constant(RECORDS[0]), tf.constant([RECORDS])):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"not of rank {wrong.shape.rank}"):
            fptf.parse_avro(wrong, USER)
    records = tf.data.Dataset.from_tensor_slices(RECORDS)
    with pytest.raises(ValueError, match=r"got rank 0: batch\(\)"):
        records.map(lambda s: fptf.parse_avro(s, USER))

    @tf.function(input_signature=[tf.TensorSpec(None, tf.string)])  # type: ignore[untyped-decorator]
    def late(s: Any) -> Any:
        return fptf.parse_avro(s, USER)["id"]

    assert late(tf.constant(RECORDS)).shape == (50,)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not of rank 0"):
        late(tf.constant(RECORDS[0]))
    for other in (tf.constant([1, 2]), [1, 2], tf.ragged.constant([[b"a"]]), np.array(RECORDS), b"one", "one", None):
        with pytest.raises(TypeError, match=r"serialized|NumPy cuts"):
            fptf.parse_avro(other, USER)
    assert fptf.parse_avro(np.array(RECORDS, object), USER)["id"].shape == (50,)
    assert fptf.parse_avro([], USER)["scores"].to_list() == []


def test_two_schemas_at_once_and_threads() -> None:
    numbers = [datum("long", i) for i in range(50)]
    wanted = {"name": fastpipe.DenseSpec((), "bytes")}
    both = tf.data.Dataset.zip(
        tf.data.Dataset.from_tensor_slices(RECORDS), tf.data.Dataset.from_tensor_slices(numbers)
    ).batch(7)
    parsed = both.map(
        lambda a, b: (fptf.parse_avro(a, USER), fptf.parse_avro(b, "long"), fptf.parse_avro(a, USER, wanted)),
        num_parallel_calls=3,
    )
    failed: list[BaseException] = []

    def read() -> None:
        try:
            found = list(parsed)
            ids = [i for user, _, _ in found for i in user["id"].numpy().tolist()]
            values = [i for _, number, _ in found for i in number["value"].numpy().tolist()]
            names = [name.decode() for _, _, some in found for name in some["name"].numpy()]
            assert ids == values == list(range(50))
            assert names == [user["name"] for user in USERS]
            assert fptf.parse_avro(numbers, "long")["value"].numpy().tolist() == ids
        except BaseException as error:
            failed.append(error)

    together([threading.Thread(target=read) for _ in range(4)])
    assert not failed


def test_equal_arguments_share_a_parser() -> None:
    from fastpipe.tf import _parsing

    def parse(dtype: str) -> None:
        fptf.parse_avro(RECORDS, dict(USER), {"id": fastpipe.DenseSpec((), dtype, fill=3)})

    parse("int32")
    count = len(_parsing._parsers)
    parse("int32")
    assert len(_parsing._parsers) == count
    parse("int16")
    assert len(_parsing._parsers) == count + 1


def test_parsing_again_compiles_nothing() -> None:
    schema = wire.record("Named", id="long", flags={"type": "map", "values": ["long", "string"]})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            found = fptf.parse_avro([datum(schema, {"id": 3, "flags": {"a": 1}})], schema)
    assert found["id"].numpy().tolist() == [3]
    assert sum(issubclass(one.category, fastpipe.errors.ColumnsLeftOutWarning) for one in told) <= 1


def test_iterators_are_saved_and_restored(tmp_path: Path) -> None:
    parsed = tf.data.Dataset.from_tensor_slices(RECORDS).batch(5).map(lambda s: fptf.parse_avro(s, USER)["id"])
    rows = iter(parsed)
    next(rows)
    saved = tf.train.Checkpoint(rows=rows).save(str(tmp_path / "rows"))
    again = iter(parsed)
    tf.train.Checkpoint(rows=again).restore(saved)
    assert next(again).numpy().tolist() == next(rows).numpy().tolist() == [5, 6, 7, 8, 9]


LOADED = """
    import sys
    import tensorflow as tf
    import fastpipe.tf

    model = tf.saved_model.load(sys.argv[1])
    try:
        model.parse(tf.constant([b"\\x02"]))
        raise SystemExit("it ran")
    except tf.errors.FailedPreconditionError as error:
        assert "Call fastpipe.tf.parse_avro with the same schema and features" in error.message, error.message
    fastpipe.tf.parse_avro([], "int")
    try:
        model.parse(tf.constant([b"\\x02"]))
        raise SystemExit("it ran")
    except tf.errors.FailedPreconditionError:
        pass
    fastpipe.tf.parse_avro([], "long")
    print(model.parse(tf.constant([b"\\x02", b"\\x04"])).numpy().tolist())
"""


def test_a_saved_graph_needs_the_parser(tmp_path: Path) -> None:
    class Model(tf.Module):  # type: ignore[misc]
        @tf.function(input_signature=[tf.TensorSpec((None,), tf.string)])  # type: ignore[untyped-decorator]
        def parse(self, serialized: Any) -> Any:
            return fptf.parse_avro(serialized, "long")["value"]

    tf.saved_model.save(Model(), str(tmp_path / "model"))
    script = [sys.executable, "-c", textwrap.dedent(LOADED), str(tmp_path / "model")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1, 2]"


def test_numbers_become_indices_of_buckets() -> None:
    schema = wire.record("R", x="long", many=wire.list_of("double"))
    rows = [{"x": x, "many": [x / 2, 7.0]} for x in range(9)]
    records = [datum(schema, row) for row in rows]
    # Specs of many edges have the same text, and need different parsers.
    for edges in ([2, 5.5], list(range(100)), list(range(0, 200, 2))):
        found = fptf.parse_avro(records, schema, {name: fastpipe.BucketSpec(edges) for name in ("x", "many")})
        assert found["x"].numpy().tolist() == np.digitize([row["x"] for row in rows], edges).tolist()
        assert found["many"].to_list() == [np.digitize(row["many"], edges).tolist() for row in rows]
    record = datum(schema, {"x": 1, "many": [float("nan")]})
    with pytest.raises(tf.errors.InvalidArgumentError, match="on_nan="):
        fptf.parse_avro([record], schema, {"many": fastpipe.BucketSpec([1])})


def test_text_becomes_indices() -> None:
    names = sorted({user["name"] for user in USERS})
    features: dict[str, Any] = {"name": fastpipe.VocabularySpec(names), "hash": fastpipe.HashSpec(100, field="name")}
    found = fptf.parse_avro(RECORDS, USER, features)
    assert found["name"].numpy().tolist() == [names.index(user["name"]) for user in USERS]
    whole = fastpipe.avro.decode_messages(RECORDS, USER, features=features)
    assert found["hash"].numpy().tolist() == whole["hash"].tolist()
    # A different vocabulary requires a different parser.
    other = fptf.parse_avro(RECORDS, USER, features | {"name": fastpipe.VocabularySpec(names[::-1])})
    assert other["name"].numpy().tolist() == [names[::-1].index(user["name"]) for user in USERS]
    with pytest.raises(tf.errors.InvalidArgumentError, match="found the key"):
        fptf.parse_avro(RECORDS, USER, {"name": fastpipe.VocabularySpec(names[:1])})
