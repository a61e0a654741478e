"""`columns=` selects inferred features, `overrides=` changes their specs, and `features=` defines all of them."""

from __future__ import annotations

import json
import pickle
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

import fastpipe
import samples
import wire
from every_source import Slices
from fastpipe import DenseSpec, HashSpec, RaggedSpec, VocabularySpec
from fastpipe.cuda import fill
from fastpipe.errors import SchemaError
from table_programs import Stream

pa = pytest.importorskip("pyarrow")

ROWS = 50
WORDS = ["w0", "w1", "w2", "w3"]
TABLE = pa.table(
    {"id": range(ROWS), "age": [i % 90 for i in range(ROWS)], "word": [WORDS[i % 4] for i in range(ROWS)]},
    pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in (("id", "int64"), ("age", "int64"), ("word", "string"))]
    ),
)
OVERRIDES: dict[str, Any] = {"word": VocabularySpec(WORDS[::-1]), "age": DenseSpec((), "float32")}
Read = Callable[..., fastpipe.Reader]


def _file(write: Callable[[Path], object], read: Callable[..., fastpipe.Reader]) -> Callable[[Path], Read]:
    def make(folder: Path) -> Read:
        path = folder / "rows"
        write(path)
        return lambda **options: read(path, **options)

    return make


def _avro(path: Path) -> None:
    schema = wire.record("R", id="long", age="long", word="string")
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), TABLE.to_pylist(), sync_interval=100)


def _csv(path: Path) -> None:
    lines = [",".join(map(str, row.values())) for row in TABLE.to_pylist()]
    path.write_text("\n".join(["id,age,word", *lines]) + "\n")


def _parquet(path: Path) -> None:
    pytest.importorskip("pyarrow.parquet").write_table(TABLE, path, row_group_size=20)


def _tfrecord(path: Path) -> None:
    fastpipe.tfrecord.write_tfrecord(path, TABLE)


def _arrow(path: Path) -> None:
    pytest.importorskip("pyarrow.feather").write_feather(TABLE, str(path), chunksize=20)


def _sql(**more: Any) -> Callable[[Path], Read]:
    def make(folder: Path) -> Read:
        pytest.importorskip("adbc_driver_sqlite")
        connection = sqlite3.connect(folder / "rows.db")
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, age INTEGER NOT NULL, word TEXT NOT NULL)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [tuple(row.values()) for row in TABLE.to_pylist()])
        connection.commit()
        connection.close()
        own = more | ({"materialize": folder / "copy"} if "materialize" in more else {})
        return lambda **options: fastpipe.read_sql("SELECT * FROM t", f"sqlite:///{folder}/rows.db", **own, **options)

    return make


SOURCES: dict[str, Callable[[Path], Read]] = {
    "avro": _file(_avro, fastpipe.read_avro),
    "csv": _file(_csv, fastpipe.read_csv),
    "parquet": _file(_parquet, fastpipe.read_parquet),
    "tfrecord": _file(_tfrecord, fastpipe.read_tfrecord),
    "arrow file": _file(_arrow, fastpipe.read_arrow),
    "sql": _sql(num_partitions=3),
    "materialized sql": _sql(materialize=True),
    "arrow": lambda _: lambda **options: fastpipe.from_arrow(TABLE, **options),
    "reader": lambda _: lambda **options: fastpipe.from_arrow(fastpipe.from_arrow(TABLE, batch_size=7), **options),
    "arrays": lambda _: (
        lambda **options: fastpipe.from_arrays(next(iter(fastpipe.from_arrow(TABLE, batch_size=ROWS))), **options)
    ),
    "units": lambda _: lambda **options: fastpipe.read_units(Slices(TABLE, 20, TABLE.schema), **options),
}


@pytest.fixture(scope="module", params=SOURCES)
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Returns a function that reads 50 rows of an ID, an age and a word."""
    make = SOURCES[request.param](tmp_path_factory.mktemp("overrides"))
    return lambda **options: make(**{"batch_size": 16} | options)


def test_other_features_keep_their_inferred_specs(read: Read) -> None:
    inferred = read().features
    reader = read(overrides=OVERRIDES)
    assert reader.features == inferred | {"word": DenseSpec((), "int64"), "age": DenseSpec((), "float32")}
    assert list(reader.features) == list(inferred)
    assert set(inferred) == {"id", "age", "word"}
    whole = read(features=dict(inferred) | OVERRIDES)
    assert samples.digests(reader) == samples.digests(whole)
    batch = next(iter(read(overrides=OVERRIDES)))
    assert batch["age"].dtype == np.float32
    assert batch["word"].tolist() == [3 - i % 4 for i in range(16)]


def test_columns_select_what_overrides_change(read: Read) -> None:
    reader = read(columns=["word", "age"], overrides=OVERRIDES)
    assert sorted(reader.features) == ["age", "word"]
    assert reader.features["age"] == DenseSpec((), "float32")
    reader = read(columns=["id", "age"], overrides={"age": DenseSpec((), "float32")})
    assert reader.features["id"] == read().features["id"]
    # No overrides change nothing.
    assert read(columns=["id"], overrides={}).features == read(columns=["id"]).features


def test_a_string_is_one_column(read: Read) -> None:
    assert samples.digests(read(columns="word")) == samples.digests(read(columns=["word"]))
    assert list(read(columns="age", overrides={"age": DenseSpec((), "int8")}).features) == ["age"]
    with pytest.raises(SchemaError, match="did you mean"):
        read(columns="words")


def test_an_override_must_name_a_column(read: Read) -> None:
    with pytest.raises(SchemaError, match=r"overrides: there is no column 'Agee'; did you mean 'age'\?") as caught:
        read(overrides={"word": DenseSpec((), "bytes"), "Agee": DenseSpec((), "int8")})
    assert caught.value.feature == "Agee"
    names = ", ".join(map(repr, read().features))
    with pytest.raises(SchemaError, match=rf"there is no column 'xyz'; the columns are {names}$"):
        read(overrides={"xyz": DenseSpec((), "int8")})
    with pytest.raises(SchemaError, match=r"columns= doesn't select a column 'age'; the columns are 'id'$"):
        read(columns="id", overrides={"age": DenseSpec((), "int8")})


def test_features_exclude_columns_and_overrides(read: Read) -> None:
    features = {"age": DenseSpec((), "int32")}
    for other in ({"columns": ["age"]}, {"overrides": {}}, {"overrides": features}):
        with pytest.raises(
            ValueError, match=f"pass either features .* not both; got features and {next(iter(other))}$"
        ):
            read(features=features, **other)
    with pytest.raises(TypeError, match=r"overrides must be a dict from name to spec; got \['age'\]"):
        read(overrides=["age"])
    with pytest.raises(TypeError, match=r"feature 'age': expected a DenseSpec, .* got 'int8'"):
        read(overrides={"age": "int8"})
    with pytest.raises(ValueError, match="columns is empty"):
        read(columns=[])


def test_pickles_and_states_keep_overrides(read: Read) -> None:
    def make() -> fastpipe.Reader:
        return read(overrides=OVERRIDES, shuffle=True, shuffle_buffer=32, seed=7)

    whole = samples.digests(make())
    again = pickle.loads(pickle.dumps(make()))
    assert again.features == make().features
    assert samples.digests(again) == whole
    reader = make()
    next(iter(reader))
    state = json.loads(json.dumps(reader.state_dict()))
    # The other reader has the same features, without an override.
    for later in (make(), read(features=dict(read().features) | OVERRIDES, shuffle=True, shuffle_buffer=32, seed=7)):
        later.load_state_dict(state)
        assert samples.digests(later) == whole[1:]


def test_connected_readers_have_overrides(read: Read) -> None:
    pytest.importorskip("pyarrow.flight")
    with read(overrides=OVERRIDES).serve() as server:
        remote = fastpipe.connect(server.url)
        assert remote.features == read(overrides=OVERRIDES).features
        assert samples.digests(remote) == samples.digests(read(overrides=OVERRIDES))


def test_a_misfit_is_reported_like_that_of_features(read: Read) -> None:
    wrong = {"word": RaggedSpec((None, None), "float32")}
    with pytest.raises(SchemaError) as expected:
        read(features=dict(read().features) | wrong)
    with pytest.raises(SchemaError, match=f"^{re.escape(str(expected.value))}$"):
        read(overrides=wrong)


ENTRY = wire.record("NTV", name="string", term="string", value="float")
NESTED = wire.record(
    "R", id="long", bag=wire.list_of(ENTRY), pair=["null", "int", "string"], user=wire.record("U", age="int")
)


@pytest.fixture
def nested(tmp_path: Path) -> str:
    path = tmp_path / "nested.avro"
    bag = [{"name": "n", "term": "t", "value": 2.0}]
    rows = [{"id": i, "bag": bag * i, "pair": (None, 1, "a")[i], "user": {"age": i}} for i in range(3)]
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(NESTED), rows)
    return str(path)


def test_nested_columns(nested: str) -> None:
    def features(**options: Any) -> list[str]:
        return list(fastpipe.read_avro(nested, batch_size=4, **options).features)

    bag = HashSpec(10)
    assert features() == ["id", "bag.name", "bag.term", "bag.value", "pair", "pair:int", "pair:string", "user.age"]
    # A bag replaces the fields of its records.
    replaced = ["id", "bag", "pair", "pair:int", "pair:string", "user.age"]
    assert features(overrides={"bag": bag}) == replaced
    assert features(columns="bag", overrides={"bag": bag}) == ["bag"]
    reader = fastpipe.read_avro(nested, overrides={"bag": bag, "user.age": DenseSpec((), "int8")}, batch_size=4)
    batch = next(iter(reader))
    assert np.bincount(batch["bag"].indices[:, 0]).tolist() == [0, 1, 2]
    assert batch["user.age"].dtype == np.int8
    # An override of a union changes only the index of the type.
    reader = fastpipe.read_avro(nested, overrides={"pair": DenseSpec((), "int8")}, batch_size=4)
    assert (list(reader.features)[4:7], reader.features["pair"]) == (replaced[2:5], DenseSpec((), "int8"))
    assert reader.features["pair:string"].on_null == "mask"
    # Fields of a bag that have their own override aren't replaced.
    both = features(overrides={"bag": bag, "bag.name": RaggedSpec((None,), "bytes")})
    assert both == ["id", "bag.name", "bag", *replaced[2:]]
    with pytest.raises(SchemaError, match=r"there is no column 'bags'; the columns are 'id', 'bag.name'"):
        features(overrides={"bags": bag})
    with pytest.raises(SchemaError, match="user"):
        features(overrides={"user": DenseSpec((), "int32")})


def test_columns_that_are_left_out(tmp_path: Path) -> None:
    schema = wire.record("R", id="long", next=["null", "R"])
    path = tmp_path / "recursive.avro"
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), [{"id": 1, "next": None}])
    with pytest.warns(fastpipe.errors.ColumnsLeftOutWarning) as warned:
        fastpipe.read_avro(path, batch_size=1)
    name = re.findall(r"types that are not read: '([^']+)'", str(warned[0].message))[0]
    with (
        pytest.warns(fastpipe.errors.ColumnsLeftOutWarning),
        pytest.raises(fastpipe.errors.UnsupportedError, match=rf"overrides: column '{name}' can't be read: ") as caught,
    ):
        fastpipe.read_avro(path, overrides={name: DenseSpec((), "int64")}, batch_size=1)
    assert caught.value.feature == name


def test_specs_that_fastpipe_wrote(tmp_path: Path) -> None:
    """Overrides change the specs in the metadata of a file or table. Only the others are used."""
    specs = {"x": DenseSpec((), "int64", on_null="mask"), "y": DenseSpec((), "float32")}
    written = fastpipe.from_arrow(pa.table({"x": [1, None], "y": [1.5, 2.5]}), features=specs, batch_size=2)
    table = written.to_arrow_reader().read_all()
    path = tmp_path / "table.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(table, path)
    overrides = {"x": DenseSpec((), "int64", fill=-1)}
    for reader in (
        fastpipe.from_arrow(table, overrides=overrides, batch_size=2),
        fastpipe.read_parquet(path, overrides=overrides, batch_size=2),
    ):
        assert reader.features == overrides | {"y": specs["y"]}
        assert next(iter(reader))["x"].tolist() == [1, -1]


def test_the_forms_of_arrays_are_kept() -> None:
    masked = fastpipe.Masked(np.arange(3), np.array([True, False, True]))
    times = np.array(["2026-01-01", "NaT", "2026-01-02"], "datetime64[D]")
    arrays = {"x": masked, "y": np.arange(3), "t": times}
    inferred = fastpipe.from_arrays(arrays, batch_size=3).features
    reader = fastpipe.from_arrays(arrays, overrides={"y": DenseSpec((), "int8")}, batch_size=3)
    assert reader.features == inferred | {"y": DenseSpec((), "int8")}
    assert inferred["x"].on_null == "mask"


def test_a_stream_is_read_once() -> None:
    class Once(Stream):
        taken = 0

        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            self.taken += 1
            return super().__arrow_c_stream__(requested_schema)

    table = Once(TABLE.to_reader())
    reader = fastpipe.from_arrow(table, overrides=OVERRIDES, batch_size=16)
    assert table.taken == 1
    assert samples.digests(reader) == samples.digests(fastpipe.from_arrow(TABLE, overrides=OVERRIDES, batch_size=16))
    assert table.taken == 1


@pytest.mark.parametrize("lookup", [False, True])
def test_messages(lookup: bool) -> None:
    schema = wire.record("R", x=wire.list_of("long"), word="string", y="long")
    message = wire.array(wire.long(1), wire.long(2)) + wire.text("w1") + wire.long(9)
    overrides: dict[str, Any] = {"x": DenseSpec((2,), "int32"), "word": VocabularySpec(WORDS)}
    framing: dict[str, Any] = {"framing": "registry"} if lookup else {}
    messages = [b"\0\0\0\0\7" + message if lookup else message]

    def decoder(**options: Any) -> fastpipe.avro.MessageDecoder:
        return fastpipe.avro.MessageDecoder((lambda _: schema) if lookup else schema, **framing, **options)

    made = decoder(overrides=overrides)
    for decode in (made, *([] if lookup else [pickle.loads(pickle.dumps(made))])):
        batch = decode(messages)
        assert (batch["x"].dtype, batch["x"].tolist(), batch["word"].tolist()) == (np.dtype("int32"), [[1, 2]], [1])
        assert batch["y"].tolist() == [9]
        assert list(decode.features) == ["x", "word", "y"]
    assert list(decoder(columns="y", overrides={"y": DenseSpec((), "int8")})(messages)) == ["y"]
    # An error isn't forgotten by the next call.
    for _ in range(2):
        with pytest.raises(SchemaError, match="there is no column 'z'"):
            decoder(overrides={"z": DenseSpec((), "int8")})(messages)
    broken = decoder(overrides={"z": DenseSpec((), "int8")}) if lookup else None
    for _ in range(2 if broken else 0):
        assert broken is not None
        with pytest.raises(SchemaError, match="there is no column 'z'"):
            broken(messages)
    if not lookup:
        batch = fastpipe.avro.decode_messages(messages, schema, columns=["x"], overrides={"x": DenseSpec((2,), "int8")})
        assert (list(batch), batch["x"].dtype) == (["x"], np.int8)


def test_a_string_is_one_column_of_samples(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    _csv(path)
    options: dict[str, Any] = {"rows": 9, "seed": 1}

    def selected(**columns: Any) -> list[list[str]]:
        sources = (path, fastpipe.read_csv(path, batch_size=8))
        filled = [fill(source, ["cpu"], **options, **columns)[0].columns for source in sources]
        return [fastpipe.csv.sample_csv(path, **options, **columns).columns, *filled]

    assert selected(columns="age") == selected(columns=["age"]) == [["age"]] * 3
    for empty in (fastpipe.csv.sample_csv, lambda path, **columns: fill(path, ["cpu"], **columns)):
        with pytest.raises(ValueError, match="columns is empty"):
            empty(path, **options, columns=[])


def test_a_string_is_one_column_of_inference(tmp_path: Path) -> None:
    _avro(tmp_path / "rows.avro")
    assert list(fastpipe.infer_features(tmp_path / "rows.avro", columns="age")) == ["age"]
