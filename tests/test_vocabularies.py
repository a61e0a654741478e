"""Replacing text with indices: strings, arrays and bags, compared with plain Python on fastavro's records."""

from __future__ import annotations

import copy
import io
import pickle
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import oracle
import wire
from fastpipe import DenseSpec, HashSpec, RaggedSpec, SparseSpec, VocabularySpec
from fastpipe.specs._vocabularies import Vocabulary

# XXH3 (64 bits) with seeds, as computed by the package xxhash 3.5.
XXH3 = {(b"", 0): 0x2D06800538D394C2, (b"", 0x9E3779B185EBCA8D): 0xA8A6B918B2F0364A}


def write(path: Path, fields: dict[str, Any], records: list[Any], interval: int = 200) -> Path:
    with path.open("wb") as file:
        schema = fastavro.parse_schema(wire.record("R", **fields))
        fastavro.writer(file, schema, records, sync_interval=interval)
    return path


def bag(term: Any = "string", value: Any = "float", **more: Any) -> Any:
    fields: dict[str, Any] = {"name": "string"}
    if term is not None:
        fields["term"] = term
    return wire.list_of(wire.record("NTV", **fields, value=value, **more))


def entry(name: str, term: str | None, value: float) -> dict[str, Any]:
    return {"name": name, "term": term, "value": value}


def first(path: Path, spec: Any, name: str = "x", **options: Any) -> Any:
    with fastpipe.read_avro(path, features={name: spec}, **{"batch_size": 100} | options) as reader:
        return next(iter(reader))[name]


def entries(form: Any) -> list[list[tuple[int, float]]]:
    """Returns each row's indices and values, in order, for either layout."""
    if isinstance(form, fastpipe.Sparse):
        rows: list[list[tuple[int, float]]] = [[] for _ in range(form.dense_shape[0])]
        for (row, index), value in zip(form.indices.tolist(), form.values.tolist(), strict=True):
            rows[row].append((index, value))
        return rows
    pairs = list(zip(form.indices.tolist(), form.values.tolist(), strict=True))
    return [pairs[a:b] for a, b in zip(form.offsets[:-1], form.offsets[1:], strict=True)]


# --- Comparison with plain Python ---

LONG = "a name that is longer than most others, so it is hashed in chunks. " * 3
NAMES = ["", "a", "b", "a\x01b", "\x01", "ä", ",", "a,b", LONG]
TERMS = [None, "", "a", "b", "b\x01a", "ö", "c,d", "term " * 40]
KEYS = [f"{name}{separator}{term or ''}" for separator in ("\x01", ",") for name in NAMES for term in TERMS[1:]]
names, terms = st.sampled_from(NAMES), st.sampled_from(TERMS)
bags = st.lists(st.builds(entry, names, terms, st.integers(-99, 99)), max_size=80)


def looked_up(key: str, vocabulary: dict[str, int], on_unknown: str) -> int | None:
    size = max(vocabulary.values()) + 1
    return vocabulary.get(key, size if on_unknown == "bucket" else None)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.one_of(st.none(), bags), min_size=1, max_size=12),
    vocabulary=st.dictionaries(st.sampled_from(KEYS), st.integers(0, 50), min_size=1),
    on_unknown=st.sampled_from(["drop", "bucket"]),
    separator=st.sampled_from(["\x01", ","]),
    value=st.sampled_from(["float", "double", "int", "long"]),
    layout=st.sampled_from(["coo", "csr"]),
    batch_size=st.integers(1, 13),
    options=st.sampled_from(
        [
            {},
            {"num_threads": 3},
            {"shuffle": True, "shuffle_buffer": 5, "seed": 1},
            {"shuffle": "block", "shuffle_buffer": 5, "seed": 1},
            {"shuffle": "buffer", "shuffle_buffer": 5, "seed": 1},
        ]
    ),
)
def test_bags_match_plain_python(
    rows: list[Any],
    vocabulary: dict[str, int],
    on_unknown: Any,
    separator: str,
    value: str,
    layout: Any,
    batch_size: int,
    options: dict[str, Any],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fields = {"id": "int", "x": ["null", bag(["null", "string"], value, more="string")]}
        # The fields after the term and value of a bag are skipped.
        records = [{"id": i, "x": row and [e | {"more": "..." * i} for e in row]} for i, row in enumerate(rows)]
        path = write(Path(folder) / "a.avro", fields, records)
        spec = VocabularySpec(vocabulary, on_unknown=on_unknown, separator=separator, layout=layout, on_null="mask")
        features = {"id": DenseSpec((), "int32"), "x": spec}
        found: dict[int, Any] = {}
        with fastpipe.read_avro(path, features=features, batch_size=batch_size, **options) as reader:
            for batch in reader:
                sparse, valid = batch["x"].values, batch["x"].valid.tolist()
                assert sparse.dense_shape.tolist() == [len(valid), spec.size]
                assert sparse.values.dtype == {"float": "f4", "double": "f8", "int": "i4", "long": "i8"}[value]
                found |= zip(batch["id"].tolist(), zip(valid, entries(sparse), strict=True), strict=True)
    for i, row in enumerate(rows):
        keys = [(f"{e['name']}{separator}{e['term'] or ''}", e["value"]) for e in row or []]
        expected = [(looked_up(key, vocabulary, on_unknown), value) for key, value in keys]
        assert found[i] == (row is not None, [(index, value) for index, value in expected if index is not None])


texts = st.sampled_from(["", "a", "b", "ab", "ä", "long " * 30])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.one_of(st.none(), texts), max_size=70), min_size=1, max_size=9),
    vocabulary=st.lists(texts, min_size=1, unique=True),
    on_unknown=st.sampled_from(["drop", "bucket"]),
    nulls=st.sampled_from([{"on_null": "mask"}, {"fill": 77}]),
    nullable=st.booleans(),
    dtype=st.sampled_from(["int64", "int32", "uint8"]),
    batch_size=st.integers(1, 10),
)
def test_arrays_match_plain_python(
    rows: list[list[str | None]],
    vocabulary: list[str],
    on_unknown: Any,
    nulls: dict[str, Any],
    nullable: bool,
    dtype: str,
    batch_size: int,
) -> None:
    if not nullable:
        rows = [[text for text in row if text is not None] for row in rows]
    spec = VocabularySpec(vocabulary, on_unknown=on_unknown, dtype=dtype, **nulls)
    with tempfile.TemporaryDirectory() as folder:
        # Reads the same field twice. The two columns have different lengths.
        items = ["string", "null"] if nullable else "string"
        path = write(Path(folder) / "a.avro", {"x": wire.list_of(items)}, [{"x": row} for row in rows])
        text = RaggedSpec((None,), "string", fill="null")
        features = {"x": spec, "hash": HashSpec(1000, field="x", **nulls), "text": replace(text, field="x")}
        found: dict[str, list[Any]] = {name: [] for name in features}
        with fastpipe.read_avro(path, features=features, batch_size=batch_size) as reader:
            assert reader.features["x"] == RaggedSpec((None,), dtype, **nulls)
            for batch in reader:
                for name, form in batch.items():
                    found[name] += oracle.rows(form)
    null = nulls.get("fill")
    known = {key: index for index, key in enumerate(vocabulary)}
    every = [[null if text is None else looked_up(text, known, on_unknown) for text in row] for row in rows]
    kept = [
        [index for text, index in zip(row, indices, strict=True) if text is None or index is not None]
        for row, indices in zip(rows, every, strict=True)
    ]
    assert found["x"] == kept
    assert found["text"] == [["null" if text is None else text for text in row] for row in rows]
    assert [len(row) for row in found["hash"]] == [len(row) for row in rows]


# --- Array types ---

SCALARS: dict[str, tuple[Any, list[Any]]] = {
    "string": ("string", ["b", "a", "c", "b"]),
    "bytes": ("bytes", [b"b", b"a", b"c", b"b"]),
    "fixed": ({"type": "fixed", "name": "F", "size": 1}, [b"b", b"a", b"c", b"b"]),
    "enum": ({"type": "enum", "name": "E", "symbols": ["c", "b", "a"]}, ["b", "a", "c", "b"]),
}


@pytest.mark.parametrize("kind", SCALARS)
def test_single_keys_and_arrays_of_every_type(kind: str, tmp_path: Path) -> None:
    ty, values = SCALARS[kind]
    path = write(tmp_path / "one.avro", {"x": ty}, [{"x": value} for value in values])
    spec = VocabularySpec(["a", "b"], on_unknown="bucket")
    form = first(path, spec)
    assert (form.dtype, form.tolist()) == (np.int64, [1, 0, 2, 1])
    assert first(path, replace(spec, dtype="int8")).dtype == np.int8
    with pytest.raises(fastpipe.errors.ValueRangeError, match='found the key "c"') as caught:
        first(path, replace(spec, on_unknown="error"))
    assert caught.value.record == 2
    assert caught.value.feature == "x"
    with pytest.raises(fastpipe.errors.SchemaError, match='on_unknown="drop" leaves keys out'):
        first(path, replace(spec, on_unknown="drop"))
    in_map = {"type": "map", "values": ty}
    for items, wrap in ((wire.list_of(ty), list), (in_map, lambda v: dict(zip("wxyz", v, strict=False)))):
        rows = [wrap(values), wrap([]), wrap(values[:1])]
        path = write(tmp_path / "many.avro", {"x": items}, [{"x": row} for row in rows])
        field = "x" if wrap is list else "x.values"
        assert oracle.rows(first(path, VocabularySpec(["a", "b"], field=field, on_unknown="drop"))) == [
            [1, 0, 1],
            [],
            [1],
        ]
        with pytest.raises(fastpipe.errors.ValueRangeError, match='found the key "c"'):
            first(path, VocabularySpec(["a", "b"], field=field, on_unknown="error"))
    assert oracle.rows(first(path, VocabularySpec(["z", "x"], field="x.keys", on_unknown="drop"))) == [[1, 0], [], []]


def test_arrays_in_arrays(tmp_path: Path) -> None:
    rows = [[["a", "x"], [], ["b", "b"]], [], [["x"]]]
    path = write(tmp_path / "a.avro", {"x": wire.list_of(wire.list_of("string"))}, [{"x": row} for row in rows])
    assert oracle.rows(first(path, VocabularySpec(["a", "b"], on_unknown="drop"))) == [[[0], [], [1, 1]], [], [[]]]


def test_enums_whose_symbols_differ(tmp_path: Path) -> None:
    """Checks that tokens are looked up by symbol, not by code, because symbols may differ between files."""
    for name, symbols in (("1", ["a", "b"]), ("2", ["c", "b", "a"])):
        ty = {"type": "enum", "name": "E", "symbols": symbols}
        write(tmp_path / f"{name}.avro", {"x": ty}, [{"x": symbol} for symbol in symbols])
    spec = VocabularySpec({"a": 5, "b": 3}, on_unknown="bucket")
    reader = fastpipe.read_avro(tmp_path, features={"x": spec}, batch_size=9)
    assert next(iter(reader))["x"].tolist() == [5, 3, 6, 3, 5]
    assert not reader.categories


def test_a_bag_without_terms_and_one_with_nulls(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", {"x": bag(term=None)}, [{"x": [{"name": "a", "value": 1.0}]}])
    assert entries(first(path, VocabularySpec(["a", "a\x01"]))) == [[(1, 1.0)]]
    record = wire.record("E", name=["null", "string"], term=["null", "string"], value=["double", "null"])
    rows: list[Any] = [
        [entry("a", None, 1.0), None, entry("a", "b", 2.0)],
        [{"name": None, "term": "b", "value": 1.0}, {"name": "a", "term": "b", "value": None}],
    ]
    path = write(tmp_path / "b.avro", {"x": wire.list_of([record, "null"])}, [{"x": row} for row in rows])
    vocabulary = ["a\x01b", "a\x01"]
    assert entries(first(path, VocabularySpec(vocabulary, on_null="fill"))) == [[(1, 1.0), (0, 2.0)], []]
    for nulls in ("error", "mask"):
        with pytest.raises(fastpipe.errors.NullValueError, match='on_null="fill" leaves such entries out') as caught:
            first(path, VocabularySpec(vocabulary, on_null=nulls))
        assert caught.value.record == 0
    with pytest.raises(fastpipe.errors.SchemaError, match="leaves entries with nulls out"):
        first(path, VocabularySpec(vocabulary, fill=3))


def test_equal_keys_are_separate_entries(tmp_path: Path) -> None:
    rows = [[entry("a", "", 1.0), entry("b", "", 2.0), entry("a", "", 3.0)]]
    path = write(tmp_path / "a.avro", {"x": bag()}, [{"x": row} for row in rows])
    assert entries(first(path, VocabularySpec(["b\x01", "a\x01"]))) == [[(1, 1.0), (0, 2.0), (1, 3.0)]]


def test_a_bag_can_be_read_several_times(tmp_path: Path) -> None:
    """Reads a bag with two vocabularies, with a hash, and as its strings."""
    rows = [[entry("a", "b", 1.0), entry("c", "d", 2.0)], []]
    path = write(tmp_path / "a.avro", {"x": bag()}, [{"x": row} for row in rows])
    features = {
        "one": VocabularySpec(["a\x01b"], field="x", on_unknown="drop"),
        "other": VocabularySpec(["c\x01d"], field="x", on_unknown="drop", values="float64", layout="csr"),
        "hash": HashSpec(1, field="x"),
        "names": RaggedSpec((None,), "string", field="x.name"),
        "terms": VocabularySpec(["b"], field="x.term", on_unknown="bucket"),
    }
    reader = fastpipe.read_avro(path, features=features, batch_size=5)
    batch = next(iter(reader))
    assert entries(batch["one"]) == [[(0, 1.0)], []]
    assert entries(batch["other"]) == [[(0, 2.0)], []]
    assert entries(batch["hash"]) == [[(0, 1.0), (0, 2.0)], []]
    assert oracle.rows(batch["names"]) == [["a", "c"], []]
    assert oracle.rows(batch["terms"]) == [[0, 1], []]
    assert reader.features == {
        "one": SparseSpec((1,), "float32", field="x"),
        "other": SparseSpec((1,), "float64", field="x", layout="csr"),
        "hash": SparseSpec((1,), "float32", field="x"),
        "names": features["names"],
        "terms": RaggedSpec((None,), "int64", field="x.term"),
    }
    again = pickle.loads(pickle.dumps(reader))
    assert again.features == reader.features
    assert entries(next(iter(again))["other"]) == [[(0, 2.0)], []]


def test_batches_convert_to_arrow_and_back(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    rows = [[entry("a", "b", 1.0)], []]
    path = write(tmp_path / "a.avro", {"x": bag()}, [{"x": row} for row in rows])
    reader = fastpipe.read_avro(path, features={"x": VocabularySpec(["a\x01b"])}, batch_size=5)
    table = pa.table(reader)
    assert table["x"].to_pylist() == [{"indices0": [0], "values": [1.0]}, {"indices0": [], "values": []}]
    batch = next(iter(fastpipe.from_arrow(table, batch_size=5)))
    assert entries(batch["x"]) == [[(0, 1.0)], []]
    with pytest.raises(ValueError, match="pass reader"):
        fastpipe.to_arrow(batch, {"x": VocabularySpec(["a\x01b"])})


# --- Hashes ---


def test_hashes_are_pinned(tmp_path: Path) -> None:
    """Checks that hashes never change, because users store them."""
    path = write(tmp_path / "a.avro", {"x": "string"}, [{"x": key.decode()} for key, _ in XXH3])
    for (_, seed), digest in XXH3.items():
        assert first(path, HashSpec(2**40, seed=seed)).tolist() == [digest % 2**40] * 2
    keys = ["AT", "fastpipe", "a key of more than sixteen bytes", "long " * 60]
    path = write(tmp_path / "b.avro", {"x": "string"}, [{"x": key} for key in keys])
    assert first(path, HashSpec(1_000_003, dtype="int32")).tolist() == PINNED
    pairs = [[entry(key, key, 1.0)] for key in keys]
    joined = write(tmp_path / "c.avro", {"x": "string"}, [{"x": f"{key}\x01{key}"} for key in keys])
    path = write(tmp_path / "d.avro", {"x": bag()}, [{"x": row} for row in pairs])
    expected = first(joined, HashSpec(1_000_003, seed=5)).tolist()
    assert first(path, HashSpec(1_000_003, seed=5, layout="csr")).indices.tolist() == expected == JOINED


# From the package xxhash: xxh3_64_intdigest(key) % 1_000_003, and the same of key + "\x01" + key with the seed 5.
PINNED = [405010, 168649, 945849, 387724]
JOINED = [271488, 696613, 853047, 727189]


def test_unknown_keys_share_buckets(tmp_path: Path) -> None:
    keys = [f"key {i}" for i in range(200)]
    path = write(tmp_path / "a.avro", {"x": "string"}, [{"x": key} for key in keys])
    spec = VocabularySpec(keys[:100], on_unknown="bucket", num_buckets=7)
    found, hashes = first(path, spec, batch_size=200).tolist(), first(path, HashSpec(7), batch_size=200).tolist()
    assert found == [*range(100), *(100 + bucket for bucket in hashes[100:])]
    assert (spec.size, len(set(hashes))) == (107, 7)


# --- Vocabularies ---


def test_files_have_one_key_per_line(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.txt"
    path.write_bytes(b'a,b\nplain\r\n\n"quoted",\n\xff\xfe\nlast')
    vocabulary = Vocabulary(path)
    keys = [b"a,b", b"plain", b"", b'"quoted",', b"\xff\xfe", b"last"]
    assert vocabulary == Vocabulary(keys) == Vocabulary({key: i for i, key in reversed(list(enumerate(keys)))})
    assert (len(vocabulary), vocabulary.size, repr(vocabulary)) == (6, 6, repr(str(path)))
    path.write_bytes(path.read_bytes() + b"\n")
    assert vocabulary == Vocabulary(str(path))
    bag_path = write(tmp_path / "a.avro", {"x": bag()}, [{"x": [entry("a", "b", 1.0), entry("plain", "", 2.0)]}])
    assert entries(first(bag_path, VocabularySpec(path, separator=",", on_unknown="drop"))) == [[(0, 1.0)]]


def test_invalid_vocabulary_files(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.txt"
    for content, message in (
        (b"a\nb\nc\nb\n", 'found "b" on line 2 and on line 4'),
        (b"\xef\xbb\xbfa\nb\n", "byte order mark"),
        (b"\x1f\x8b\x08\x00", "compressed by gzip"),
    ):
        path.write_bytes(content)
        with pytest.raises(fastpipe.errors.MalformedFileError, match=message) as caught:
            VocabularySpec(path)
        assert caught.value.path == str(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        VocabularySpec(path)
    with pytest.raises(fastpipe.errors.MissingFileError, match="missing"):
        VocabularySpec(tmp_path / "missing.txt")
    with pytest.raises(fastpipe.errors.StorageError, match="found a directory"):
        VocabularySpec(tmp_path)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ([], ValueError, "empty"),
        ({}, ValueError, "empty"),
        (["a", "b", "a"], ValueError, "'a' occurs twice, with the indices 0 and 2"),
        ({"a": 1, b"a": 2}, ValueError, "occurs twice"),
        ({"a": -1}, ValueError, "from 0 to 4294967295; got -1 for 'a'"),
        ({"a": True}, ValueError, "from 0 to"),
        ({"a": 1.5}, ValueError, "from 0 to"),
        (["a", 7], TypeError, "key 1 is .*int"),
        (["\ud800"], ValueError, "can't be written as UTF-8"),
        ({"a", "b"}, TypeError, "a set has no order"),
        (b"path", TypeError, "a list of keys"),
        (7, TypeError, "a list of keys"),
    ],
)
def test_invalid_vocabularies(keys: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        VocabularySpec(keys)


def test_arrays_of_other_libraries_are_vocabularies() -> None:
    expected = Vocabulary(["a", "b"])
    assert Vocabulary(np.array(["a", "b"])) == expected
    assert Vocabulary(key for key in "ab") == expected
    pa = pytest.importorskip("pyarrow")
    assert Vocabulary(pa.array(["a", "b"])) == expected


def test_specs_are_values(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.txt"
    path.write_text("a\nb\n")
    specs: list[Any] = [
        VocabularySpec(["a", "b"]),
        VocabularySpec({"a": 4, "b": 0}, on_unknown="bucket", num_buckets=3, field="x.y", dtype="int16", fill=-1),
        VocabularySpec(str(path), separator=",", values="float64", layout="csr", on_null="fill"),
        VocabularySpec([b"\xff", "line\n"], on_unknown="error", on_null="mask"),
        HashSpec(1 << 20),
        HashSpec(1000, seed=7, field="x", dtype="uint32", separator=b"\0", fill=0),
    ]
    for spec in specs:
        for same in (eval(repr(spec), {"fastpipe": fastpipe}), pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
            assert same == spec
            assert hash(same) == hash(spec)
        assert replace(spec, field="other") != spec
        assert fastpipe.typing.Features({"a": spec})["a"] is spec
    assert len(set(specs)) == len(specs)
    assert repr(specs[2]) == (
        f"fastpipe.VocabularySpec({str(path)!r}, on_null='fill', separator=',', values='float64', layout='csr')"
    )
    assert repr(VocabularySpec([str(i) for i in range(1000)])) == "fastpipe.VocabularySpec(<1,000 keys>)"
    assert VocabularySpec(["a", "b"]) == replace(VocabularySpec(path), field=None)
    pickled = pickle.dumps(specs[2])
    path.write_text("a\nc\n")
    with pytest.raises(fastpipe.errors.StorageError, match="keys changed after it was pickled"):
        pickle.loads(pickled)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: VocabularySpec(["a"], on_unknown="keep"), ValueError, '"drop", "bucket" or "error"'),
        (lambda: VocabularySpec(["a"], num_buckets=2), ValueError, 'requires on_unknown="bucket"'),
        (
            lambda: VocabularySpec(["a"], on_unknown="bucket", num_buckets=0),
            ValueError,
            "num_buckets must be between 1",
        ),
        (lambda: VocabularySpec(["a"], dtype="float32"), ValueError, "indices are integers"),
        (lambda: VocabularySpec({"a": 300}, dtype="int8"), ValueError, "must hold indices up to 300; got 'int8'"),
        (lambda: VocabularySpec(["a"], values="string"), ValueError, "values of bags are numbers"),
        (lambda: VocabularySpec(["a"], values="float16"), ValueError, "float32"),
        (lambda: VocabularySpec(["a"], values="bool"), ValueError, "numbers"),
        (lambda: VocabularySpec(["a"], separator=1), TypeError, "separator"),
        (lambda: VocabularySpec(["a"], separator="\ud800"), ValueError, "UTF-8"),
        (lambda: VocabularySpec(["a"], layout="csc"), ValueError, '"coo" or "csr"'),
        (lambda: VocabularySpec(["a"], on_null="drop"), ValueError, "on_null must be"),
        (lambda: VocabularySpec(["a"], fill="b"), TypeError, "fill"),
        (lambda: VocabularySpec(["a"], field=""), ValueError, "field is empty"),
        (lambda: HashSpec(0), ValueError, "num_buckets must be between 1"),
        (lambda: HashSpec(True), TypeError, "integer"),
        (lambda: HashSpec(1.5), TypeError, "integer"),
        (lambda: HashSpec(10, seed=-1), ValueError, "seed"),
        (lambda: HashSpec(1000, dtype="int8"), ValueError, "must hold indices"),
    ],
)
def test_arguments_are_checked(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# --- Errors ---


@pytest.mark.parametrize(
    ("ty", "message"),
    [
        ("int", "keys must be strings, bytes, fixed or enums, or bags"),
        (wire.list_of("long"), "found values of type long"),
        (wire.list_of(wire.record("E", name="string")), "found no 'value' among name"),
        (wire.list_of(wire.record("E", value="float")), "found no 'name' among value"),
        (wire.list_of(wire.record("E", name="int", value="float")), "found 'name' of type int"),
        (wire.list_of(wire.record("E", name="string", value="string")), "found 'value' of type string"),
        (wire.record("E", name="string", value="float"), "the field is a record"),
    ],
)
def test_fields_without_keys(ty: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", {"x": ty}, [])
    for spec in (VocabularySpec(["a"]), HashSpec(7)):
        with pytest.raises(fastpipe.errors.SchemaError, match=message) as caught:
            first(path, spec)
        assert caught.value.feature == "x"
        assert caught.value.path == str(path)


def test_bags_in_arrays_are_not_supported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", {"x": wire.list_of(bag())}, [])
    with pytest.raises(fastpipe.errors.UnsupportedError, match="bags inside arrays or maps"):
        first(path, HashSpec(7))


def test_files_with_different_layouts(tmp_path: Path) -> None:
    write(tmp_path / "1.avro", {"x": bag(value="int")}, [{"x": [entry("a", "b", 1)]}])
    write(tmp_path / "2.avro", {"x": bag(["null", "string"], value="long")}, [{"x": [entry("a", None, 2)]}])
    spec = VocabularySpec(["a\x01b", "a\x01"])
    assert entries(first(tmp_path, spec)) == [[(0, 1)], [(1, 2)]]
    other = write(tmp_path / "3.avro", {"x": bag(value="double")}, [{"x": [entry("a", "b", 1.0)]}])
    with pytest.raises(fastpipe.errors.SchemaError, match='values="float32"') as caught:
        first(tmp_path, spec)
    assert caught.value.path == str(other)
    write(other, {"x": "string"}, [{"x": "a"}])
    with pytest.raises(fastpipe.errors.SchemaError, match="the first file's schema has a bag"):
        first(tmp_path, spec)


def test_unknown_keys_of_bags_are_named(tmp_path: Path) -> None:
    rows = [[entry("a", "b", 1.0)], [entry("a", "b", 1.0)] * 40 + [entry("näme", "te\nrm", 2.0)]]
    path = write(tmp_path / "a.avro", {"x": bag()}, [{"x": row} for row in rows])
    with pytest.raises(fastpipe.errors.ValueRangeError, match=r'the key of name "näme" and term "te\\nrm"') as caught:
        first(path, VocabularySpec(["a\x01b"], on_unknown="error"))
    assert (caught.value.record, caught.value.feature) == (1, "x")


def test_nulls_must_be_requested(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", {"x": ["null", "string"]}, [{"x": "a"}, {"x": None}])
    spec = VocabularySpec(["b", "a"], on_unknown="error")
    with pytest.raises(fastpipe.errors.NullValueError):
        first(path, spec)
    with pytest.raises(fastpipe.errors.SchemaError, match="the index that stands for a null"):
        first(path, replace(spec, on_null="fill"))
    assert first(path, replace(spec, fill=7)).tolist() == [1, 7]
    masked = first(path, replace(spec, on_null="mask"))
    assert (masked.values.tolist(), masked.valid.tolist()) == ([1, 0], [True, False])


WORDS = ["a", "b", None, "ä", "b", "zz", ""]
LISTS = [["a"], ["zz", "b"], None, [], ["ä", "zz", "a"], ["zz"], [""]]


def arrow_table(layout: str) -> Any:
    pa = pytest.importorskip("pyarrow")
    words, lists = pa.array(WORDS), pa.array(LISTS, pa.list_(pa.string()))
    if layout == "dictionary":
        words, lists = words.dictionary_encode(), pa.array(LISTS, pa.large_list(pa.dictionary(pa.int8(), pa.string())))
    if layout == "views":
        words, lists = words.cast(pa.string_view()), pa.array(LISTS, pa.list_view(pa.binary()))
    if layout == "binary":
        words, lists = words.cast(pa.large_binary()), lists.cast(pa.large_list(pa.binary()))
    # Slices have several record batches, and offsets that don't begin at 0.
    table = pa.table({"word": words, "list": lists})
    return pa.concat_tables([table.slice(0, 3), table.slice(3)])


def readers_of_text(kind: str, folder: Path) -> Any:
    """Returns a function that creates a reader of the same words and lists, given features and options."""
    if kind.startswith("arrow"):
        table = arrow_table(kind.partition(" ")[2])
        return lambda **options: fastpipe.from_arrow(table, **options)
    if kind == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow_table(""), folder / "a.parquet", row_group_size=2)
        return lambda **options: fastpipe.read_parquet(folder / "a.parquet", **options)
    if kind == "feather":
        feather = pytest.importorskip("pyarrow.feather")
        feather.write_feather(arrow_table(""), folder / "a.feather", chunksize=2)
        return lambda **options: fastpipe.read_arrow(folder / "a.feather", **options)
    fields: Any = {"word": ["null", "string"], "list": ["null", wire.list_of("string")]}
    rows = [{"word": word, "list": words} for word, words in zip(WORDS, LISTS, strict=True)]
    write(folder / "a.avro", fields, rows)
    return lambda **options: fastpipe.read_avro(folder / "a.avro", **options)


SOURCES = ["avro", "arrow", "arrow dictionary", "arrow views", "arrow binary", "parquet", "feather"]


@pytest.mark.parametrize("kind", SOURCES)
def test_all_sources_have_the_same_indices(kind: str, tmp_path: Path) -> None:
    read = readers_of_text(kind, tmp_path)
    known = ["b", "ä", "a", ""]
    features: Any = {
        "bucket": VocabularySpec(known, on_unknown="bucket", num_buckets=3, field="word", on_null="mask", dtype="int8"),
        "filled": VocabularySpec(known, on_unknown="bucket", field="word", fill=9),
        "hash": HashSpec(1000, seed=3, field="word", on_null="mask"),
        "dropped": VocabularySpec(known, on_unknown="drop", field="list", on_null="mask", dtype="int16"),
        "all": VocabularySpec(known, on_unknown="bucket", field="list", on_null="mask"),
    }
    reader = read(features=features, batch_size=100)
    (batch,) = reader
    assert {name: (type(spec), spec.dtype) for name, spec in reader.features.items()} == {
        "bucket": (DenseSpec, "int8"),
        "filled": (DenseSpec, "int64"),
        "hash": (DenseSpec, "int64"),
        "dropped": (RaggedSpec, "int16"),
        "all": (RaggedSpec, "int64"),
    }
    index = {key: place for place, key in enumerate(known)}
    assert batch["bucket"].valid.tolist() == [word is not None for word in WORDS]
    assert [int(i) for i in batch["bucket"].values[[0, 1, 3, 4, 6]]] == [2, 0, 1, 0, 3]
    assert 4 <= int(batch["bucket"].values[5]) < 7
    assert batch["filled"].tolist() == [9 if word is None else index.get(word, 4) for word in WORDS]
    assert oracle.rows(batch["dropped"]) == [
        None if words is None else [index[word] for word in words if word in index] for words in LISTS
    ]
    assert oracle.rows(batch["all"]) == [
        None if words is None else [index.get(word, 4) for word in words] for words in LISTS
    ]
    expected = fastpipe.read_csv(
        b'x\na\nb\nx\n\xc3\xa4\nb\nzz\n""\n', features={"x": HashSpec(1000, seed=3)}, batch_size=9
    )
    (hashed,) = expected
    there = batch["hash"].valid
    assert batch["hash"].values[there].tolist() == hashed["x"][there].tolist()
    # Pickles include the lookup tables.
    (again,) = pickle.loads(pickle.dumps(read(features=features, batch_size=100)))
    assert oracle.rows(again["dropped"]) == oracle.rows(batch["dropped"])


@pytest.mark.parametrize("kind", SOURCES)
def test_unknown_keys_are_an_error_by_default(kind: str, tmp_path: Path) -> None:
    read = readers_of_text(kind, tmp_path)
    for field, match in (
        ("word", 'found the key "zz"; on_unknown="bucket" gives'),
        ("list", 'on_unknown="drop" leaves'),
    ):
        reader = read(features={field: VocabularySpec(["a", "b", "ä", ""], on_null="mask")}, batch_size=100)
        with pytest.raises(fastpipe.errors.ValueRangeError, match=match) as caught:
            list(reader)
        assert caught.value.feature == field
        assert "zz" in str(caught.value)
    with pytest.raises(fastpipe.errors.SchemaError, match='on_unknown="drop" leaves keys out of'):
        read(features={"word": VocabularySpec(["a"], on_unknown="drop")}, batch_size=1)
    with pytest.raises(fastpipe.errors.SchemaError, match="the index that stands for a null"):
        read(features={"word": VocabularySpec(["a"], on_null="fill")}, batch_size=1)


def test_columns_that_are_not_text() -> None:
    reader = {"x": np.arange(3)}
    with pytest.raises(fastpipe.errors.SchemaError, match="keys are text, and the column's values are of type Int64"):
        fastpipe.from_arrays(reader, features={"x": HashSpec(7)}, batch_size=1)


def test_lookups_in_messages() -> None:
    schema = wire.record("R", word="string", words=wire.list_of("string"), bag=bag())
    rows = [{"word": w, "words": [w, "z"], "bag": [entry(w, "t", 2.0), entry("z", "t", 3.0)]} for w in ("b", "a", "b")]
    messages = []
    for row in rows:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(copy.deepcopy(schema)), row)
        messages.append(out.getvalue())
    features: Any = {
        "word": VocabularySpec(["a", "b"]),
        "words": VocabularySpec(["a", "b"], on_unknown="drop"),
        "bag": VocabularySpec(["a\x01t", "b\x01t"], on_unknown="drop"),
        "hash": HashSpec(10, field="word"),
    }
    decoder = fastpipe.avro.MessageDecoder(schema, features=features)
    for decode in (decoder, pickle.loads(pickle.dumps(decoder))):
        batch = decode(messages)
        assert batch["word"].tolist() == [1, 0, 1]
        assert oracle.rows(batch["words"]) == [[1], [0], [1]]
        assert entries(batch["bag"]) == [[(1, 2.0)], [(0, 2.0)], [(1, 2.0)]]
        assert batch["hash"][0] == batch["hash"][2]
    with pytest.raises(fastpipe.errors.ValueRangeError, match='found the key "b"') as caught:
        fastpipe.avro.decode_messages(messages, schema, features={"word": VocabularySpec(["a"])})
    assert (caught.value.feature, caught.value.record) == ("word", 0)
    with pytest.raises(fastpipe.errors.SchemaError, match='on_unknown="drop" leaves keys out'):
        fastpipe.avro.decode_messages(messages, schema, features={"word": VocabularySpec(["a"], on_unknown="drop")})


def test_lookups_in_folders(tmp_path: Path) -> None:
    for city in ("Graz", "Wien", "Linz"):
        (tmp_path / f"city={city}").mkdir()
        write(tmp_path / f"city={city}" / "a.avro", {"i": "long"}, [{"i": 1}, {"i": 2}])

    def cities(spec: Any) -> Any:
        reader = fastpipe.read_avro(tmp_path, features={"city": spec}, partitioning="hive", batch_size=10)
        return next(iter(reader))["city"].tolist()

    assert cities(VocabularySpec(["Wien", "Graz", "Linz"])) == [1, 1, 2, 2, 0, 0]
    assert cities(VocabularySpec(["Wien", "Graz"], on_unknown="bucket")) == [1, 1, 2, 2, 0, 0]
    assert len(set(cities(HashSpec(1 << 30)))) == 3
    with pytest.raises(fastpipe.errors.ValueRangeError, match='found the folder city=Linz; on_unknown="bucket" gives'):
        cities(VocabularySpec(["Wien", "Graz"]))
    with pytest.raises(fastpipe.errors.SchemaError, match='on_unknown="drop" leaves keys out'):
        cities(VocabularySpec(["Wien", "Graz"], on_unknown="drop"))


def test_lookups_in_queries(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE t (i INTEGER PRIMARY KEY, city TEXT)")
        connection.executemany("INSERT INTO t VALUES (?, ?)", enumerate(["Wien", "Graz", "Wien", None]))
    connection.close()
    features = {"city": VocabularySpec(["Wien", "Graz"], on_null="mask")}
    uri = f"sqlite:///{tmp_path / 't.db'}"
    (batch,) = fastpipe.read_sql("SELECT * FROM t", uri, features=features, batch_size=10)
    assert oracle.rows(batch["city"]) == [0, 1, 0, None]


def test_lookups_in_folders_of_parquet(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for city in ("Graz", "Wien"):
        (tmp_path / f"city={city}").mkdir()
        parquet.write_table(pa.table({"i": [1, 2]}), tmp_path / f"city={city}" / "a.parquet")
    features = {"city": VocabularySpec(["Wien", "Graz"])}
    (batch,) = fastpipe.read_parquet(tmp_path, features=features, partitioning="hive", batch_size=10)
    assert batch["city"].tolist() == [1, 1, 0, 0]
