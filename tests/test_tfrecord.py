"""TFRecord files: values, inference, nulls, shapes, errors, damage and the index."""

from __future__ import annotations

import gzip
import os
import pickle
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
from fastpipe import errors
from tfrecords import crc, entry, example, feature, field, file, frame, varint

LONG_AGO = 1_600_000_000_123_456_789


def values(source: Any, **options: Any) -> dict[str, list[Any]]:
    """Returns the rows of each feature as Python values, with None for nulls."""
    found: dict[str, list[Any]] = {}
    with fastpipe.read_tfrecord(source, batch_size=options.pop("batch_size", 3), **options) as reader:
        for batch in reader:
            for name, column in fastpipe.to_arrow(batch, reader.features).to_pydict().items():
                found.setdefault(name, []).extend(column)
    return found


def failure(source: Any, **options: Any) -> Any:
    with pytest.raises(errors.FastpipeError) as caught:
        values(source, **options)
    return caught.value


INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32, allow_nan=False)
TEXTS = st.text(max_size=5)


@st.composite
def tables(draw: Any) -> dict[str, list[Any]]:
    """Draws columns of lists, with None for missing features. All columns have the same number of rows."""
    rows = draw(st.integers(1, 12))
    table: dict[str, list[Any]] = {}
    for name in draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)):
        kind = draw(st.sampled_from([INTS, FLOATS, TEXTS]))
        length = draw(st.sampled_from([(0, 4), (1, 1), (3, 3)]))
        lists = st.lists(kind, min_size=max(length[0], 1), max_size=length[1])
        column = st.one_of(lists, st.none()) if draw(st.booleans()) else lists
        table[name] = draw(st.lists(column, min_size=rows, max_size=rows))
    return table


@given(table=tables(), packed=st.booleans(), seed=st.integers(0, 9))
@settings(deadline=None)
def test_rows_come_back_as_ragged_rows_and_as_inferred(table: dict[str, Any], packed: bool, seed: int) -> None:
    chance = random.Random(seed)
    records = []
    for row in zip(*table.values(), strict=True):
        named = list(zip(table, row, strict=True))
        chance.shuffle(named)
        records.append(frame(example(dict(named), packed=packed) + field(9, b"unknown")))
    kinds = {int: "int64", float: "float32", str: "string"}
    types = {name: {kinds[type(value)] for row in rows if row for value in row} for name, rows in table.items()}
    known = {name: kind.pop() for name, kind in types.items() if kind}
    features = {name: fastpipe.RaggedSpec((None,), kind, on_null="mask") for name, kind in known.items()}
    if not features:
        return
    data = b"".join(records)
    expected = {name: table[name] for name in known}
    assert values(data, features=features) == expected
    # DenseSpec pads the lists with zeros to four values, or truncates them.
    numbers = {name: kind for name, kind in known.items() if kind != "string"}
    if numbers:
        padded = {name: fastpipe.DenseSpec((4,), kind, pad=0, on_null="mask") for name, kind in numbers.items()}
        filled = {name: [row if row is None else (row + [0] * 4)[:4] for row in table[name]] for name in numbers}
        assert values(data, features=padded) == filled
    inferred = values(data)
    assert list(inferred) == sorted(known)
    for name, rows in inferred.items():
        one = {len(row) for row in table[name] if row is not None} == {1}
        assert rows == [row[0] if one and row is not None else row for row in table[name]]


def test_features_are_inferred_from_the_lists() -> None:
    rows = [
        {"one": i, "three": [1.0, 2.0, float(i)], "any": [1] * (i % 3 + 1), "text": "ä", "raw": b"\xff", "maybe": 1.0}
        for i in range(9)
    ]
    rows[4]["maybe"] = None
    rows[5]["mixed"] = 1
    rows[6]["mixed"] = 1.5
    with fastpipe.read_tfrecord(file(rows), batch_size=2) as reader:
        assert reader.features == {
            "any": fastpipe.RaggedSpec((None,), "int64"),
            "maybe": fastpipe.DenseSpec((), "float32", on_null="mask"),
            "mixed": fastpipe.DenseSpec((), "float64", on_null="mask"),
            "one": fastpipe.DenseSpec((), "int64"),
            "raw": fastpipe.DenseSpec((), "bytes"),
            "text": fastpipe.DenseSpec((), "string"),
            "three": fastpipe.DenseSpec((3,), "float32"),
        }
    assert values(file(rows), columns=["mixed"])["mixed"][5:7] == [1.0, 1.5]
    changed = values(file(rows), columns=["one"], overrides={"one": fastpipe.DenseSpec((), "int8")})
    assert changed == {"one": list(range(9))}
    error = failure(file([{"x": 1}, {"x": "a"}]))
    assert isinstance(error, errors.SchemaError)
    assert "a bytes_list in some records" in str(error)


def test_numbers_are_converted_without_loss() -> None:
    rows = file([{"i": i, "f": float(i), "b": i % 2} for i in (0, 1, 127)])
    for dtype in ("int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"):
        assert values(rows, features={"i": fastpipe.DenseSpec((), dtype)})["i"] == [0, 1, 127]
    for dtype in ("float16", "float64"):
        assert values(rows, features={"f": fastpipe.DenseSpec((), dtype)})["f"] == [0, 1, 127]
    assert values(rows, features={"b": fastpipe.DenseSpec((), "bool")})["b"] == [False, True, True]
    for value, dtype in [
        *((128, "int8"), (-1, "uint64"), (2**31, "int32"), (2, "bool"), (2**24 + 1, "float32")),
        *((2**53 + 1, "float64"), (2049, "float16"), (1e6, "float16")),
    ]:
        rows = file([{"x": 0 if isinstance(value, int) else 0.0}, {"x": value}])
        error = failure(rows, features={"x": fastpipe.DenseSpec((), dtype)})
        assert isinstance(error, errors.ValueRangeError), (value, dtype)
        assert (error.feature, error.record, error.block) == ("x", 1, 0)


def test_nulls_are_errors_masks_or_filled() -> None:
    rows = file([{"a": 1, "t": "x"}, {}, {"a": 3, "t": "z"}])
    error = failure(rows, features={"a": fastpipe.DenseSpec((), "int64")})
    assert isinstance(error, errors.NullValueError)
    assert (error.feature, error.record, error.offset) == ("a", 1, len(frame(example({"a": 1, "t": "x"}))))
    read = {
        "a": fastpipe.DenseSpec((), "int64", fill=-1),
        "m": fastpipe.DenseSpec((), "int64", on_null="mask", field="a"),
        "t": fastpipe.DenseSpec((), "string", fill="?"),
        "list": fastpipe.RaggedSpec((None,), "string", on_null="fill", field="t"),
        "two": fastpipe.DenseSpec((2,), "int64", pad=0, fill=9, field="a"),
        "index": fastpipe.VocabularySpec(["z", "x"], fill=-1, field="t"),
        "hash": fastpipe.HashSpec(1, on_null="mask", field="t"),
    }
    assert values(rows, features=read) == {
        "a": [1, -1, 3],
        "m": [1, None, 3],
        "t": ["x", "?", "z"],
        "list": [["x"], [], ["z"]],
        "two": [[1, 0], [9, 9], [3, 0]],
        "index": [1, -1, 0],
        "hash": [0, None, 0],
    }
    # A feature without a list is null, but an empty list is not.
    empty = frame(field(1, entry("a", b""))) + frame(field(1, entry("a", feature([]))))
    assert values(empty, features={"a": fastpipe.RaggedSpec((None,), "int64", on_null="mask")}) == {"a": [None, []]}
    assert isinstance(failure(empty, features={"a": fastpipe.DenseSpec((), "int64", fill=0)}), errors.ShapeError)


def test_lists_are_reshaped() -> None:
    rows = file([{"x": list(range(6))}, {"x": list(range(6, 12))}])
    for spec in (fastpipe.DenseSpec((2, 3), "int64"), fastpipe.RaggedSpec((None, 3), "int64")):
        assert values(rows, features={"x": spec})["x"] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    padded = fastpipe.DenseSpec((3, 3), "int64", pad=-1)
    assert values(rows, features={"x": padded})["x"][0] == [[0, 1, 2], [3, 4, 5], [-1, -1, -1]]
    cut = fastpipe.DenseSpec((1, 3), "int64", pad=-1)
    assert values(rows, features={"x": cut})["x"] == [[[0, 1, 2]], [[6, 7, 8]]]
    wrong: list[Any] = [fastpipe.DenseSpec((5,), "int64"), fastpipe.DenseSpec((), "int64")]
    for other in [fastpipe.RaggedSpec((None, 4), "int64"), *wrong]:
        error = failure(rows, features={"x": other})
        assert isinstance(error, errors.ShapeError)
        assert (error.feature, error.record) == ("x", 0)


def test_texts_are_read_as_indices() -> None:
    rows = b"".join(
        frame(record)
        for record in (
            example({"one": "a", "any": ["b", "c"]}),
            field(1, entry("one", feature(["b"])) + entry("any", field(1, b""))),
            example({"one": "a", "any": ["a"] * 40}),
        )
    )
    known = fastpipe.VocabularySpec(["a", "b"], on_unknown="bucket")
    read = {
        "one": known,
        "any": known,
        "dropped": fastpipe.VocabularySpec(["a", "b"], on_unknown="drop", field="any"),
        "hash": fastpipe.HashSpec(7, field="any"),
    }
    found = values(rows, features=read)
    assert found["one"] == [0, 1, 0]
    assert found["any"] == [[1, 2], [], [0] * 40]
    assert found["dropped"] == [[1], [], [0] * 40]
    assert [len(row) for row in found["hash"]] == [2, 0, 40]
    error = failure(rows, features={"any": fastpipe.VocabularySpec(["a", "b"])})
    assert isinstance(error, errors.ValueRangeError)
    assert '"c"' in str(error)
    # A pickled reader keeps the forms of its lookups. It doesn't derive them from the files again.
    with fastpipe.read_tfrecord(rows, features=read, batch_size=2) as reader:
        again = pickle.loads(pickle.dumps(reader))
        assert again.features == reader.features
        again.close()


def test_the_last_entry_and_the_last_kind_count() -> None:
    twice = field(1, entry("x", feature([1])) + entry("y", feature([7])) + entry("x", feature([2])))
    merged = field(1, entry("x", feature([1]))) + field(1, entry("x", feature([3])) + entry("y", feature([7])))
    # Adjacent lists of the same kind are joined. A list of another kind replaces the earlier lists.
    joined = field(1, entry("x", feature(["a"]) + feature([4]) + b"\x38\x01" + feature([5])) + entry("y", feature([7])))
    rows = b"".join(map(frame, (twice, merged, joined)))
    assert values(rows, features={"x": fastpipe.RaggedSpec((None,), "int64")}) == {"x": [[2], [3], [4, 5]]}
    assert values(rows)["x"] == [[2], [3], [4, 5]]
    longer = frame(field(1, entry("x", feature([1])) + entry("x", feature([2, 3]))))
    with fastpipe.read_tfrecord(longer, batch_size=1) as reader:
        assert reader.features == {"x": fastpipe.DenseSpec((2,), "int64")}


def test_unknown_fields_of_every_message_are_skipped() -> None:
    # Field 15 with each wire type, and field 1 with a wire type that no message has.
    more = b"\x78\x05\x79" + bytes(8) + b"\x7a\x02ab\x7d" + bytes(4) + b"\x7b\x08\x01\x7c\x09" + bytes(8)

    def within(*fields: bytes) -> bytes:
        return more + b"".join(each + more for each in fields)

    for number, one, two, spec, expected in (
        (1, field(1, b"a"), field(1, b"b"), "string", ["a", "b"]),
        (2, b"\x0d\0\0\xa0\x40", field(1, b"\0\0\xc0\x40"), "float32", [5.0, 6.0]),
        (3, b"\x08\x07", field(1, b"\x09"), "int64", [7, 9]),
    ):
        lists = within(field(number, within(one)), field(number, within(two)))
        record = frame(within(field(1, within(field(1, within(field(1, b"x"), field(2, lists)))))))
        assert values(record, features={"x": fastpipe.RaggedSpec((None,), spec)}) == {"x": [expected]}


def test_specs_that_do_not_fit_are_refused_when_files_are_opened() -> None:
    rows = file([{"i": 1, "f": 1.0, "t": "a"}])
    wrong: dict[str, Any] = {
        "no record has the feature": {"ii": fastpipe.DenseSpec((), "int64")},
        "did you mean": {"x": fastpipe.DenseSpec((), "int64", field="I")},
        "float_list, not int64": {"f": fastpipe.DenseSpec((), "int64")},
        "bytes_list, not float32": {"t": fastpipe.DenseSpec((), "float32")},
        "int64_list, not string": {"i": fastpipe.DenseSpec((), "string")},
        "only the keys of a bytes_list": {"i": fastpipe.HashSpec(3)},
        "no times": {"i": fastpipe.DenseSpec((), "datetime64[s]")},
        "no sparse type": {"i": fastpipe.SparseSpec((3,), "float32")},
        "no decimals": {"i": fastpipe.DenseSpec((), "int64", scale=2)},
        "one dimension of any length": {"i": fastpipe.RaggedSpec((None, None), "int64")},
        "leaves keys out of arrays": {"t": fastpipe.VocabularySpec(["a"], on_unknown="drop")},
    }
    for reason, features in wrong.items():
        with pytest.raises(errors.SchemaError, match=reason):
            fastpipe.read_tfrecord(rows, features=features, batch_size=1)
    with pytest.raises(errors.SchemaError, match="no record has the feature"):
        fastpipe.read_tfrecord(rows, columns=["tt", "i"], batch_size=1)


def test_empty_files_and_records_have_no_values() -> None:
    with fastpipe.read_tfrecord(b"", batch_size=1, features={"x": fastpipe.DenseSpec((), "int64")}) as reader:
        assert (reader.num_rows, list(reader)) == (0, [])
    none = frame(b"") * 5
    assert values(none, features={"x": fastpipe.DenseSpec((), "int64", fill=3)}) == {"x": [3] * 5}


def test_files_that_are_not_tfrecord_files_are_refused() -> None:
    data = file([{"x": 1}] * 10)
    for compressed, hint in ((gzip.compress(data), "gunzip"), (zlib.compress(data), "pigz -dz")):
        with pytest.raises(errors.UnsupportedError, match=hint):
            fastpipe.read_tfrecord(compressed, batch_size=1)
    for other in (b"a,b\n1,2\n3,4\n5,6\n", b"x", b"\0" * 12):
        with pytest.raises(errors.MalformedFileError, match="no TFRecord file") as caught:
            fastpipe.read_tfrecord(other, batch_size=1)
        assert caught.value.offset == 0


@pytest.mark.parametrize("length", [100, 2**31, 2**40, 2**63, 2**64 - 1])
def test_declared_lengths_are_compared_with_the_file(length: int, tmp_path: Path) -> None:
    head = struct.pack("<Q", length)
    path = tmp_path / "x.tfrecord"
    path.write_bytes(frame(b"") + head + crc(head) + b"abc")
    with pytest.raises(errors.MalformedFileError, match="truncated") as caught:
        fastpipe.read_tfrecord(path, batch_size=1)
    assert (caught.value.path, caught.value.offset) == (str(path), 16)


def test_every_truncation_and_every_flipped_bit_is_found() -> None:
    rows = [{"x": i, "t": "ab"} for i in range(3)]
    data = file(rows)
    ends = np.cumsum([len(frame(example(row))) for row in rows])
    features = {"x": fastpipe.DenseSpec((), "int64"), "t": fastpipe.DenseSpec((), "string")}
    for cut in set(range(len(data))) - {0, *ends.tolist()}:
        error = failure(data[:cut], features=features)
        assert isinstance(error, errors.MalformedFileError)
        assert error.offset == max([0, *(int(end) for end in ends if end <= cut)])
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        error = failure(bytes(damaged), features=features)
        assert isinstance(error, errors.MalformedFileError)
        start = max([0, *(int(end) for end in ends if end <= at)])
        assert error.offset == start


def test_records_that_are_not_examples_name_the_byte() -> None:
    wrong = {
        b"\x0a\x05": "a length that ends within",
        b"\x0b": "ends within its message",
        b"\x0c": "a group ends",
        b"\x0f": "wire type",
        b"\x00\x00": "number of a field",
        field(1, entry("x", field(2, field(1, b"abc")))): "floats of 4 bytes",
        field(1, entry("x", field(3, field(1, b"\x80")))): "incomplete",
        field(1, field(1, field(2, b"") + field(2, b""))): "two values",
    }
    features = {"x": fastpipe.RaggedSpec((None,), "float32", on_null="fill")}
    for data, reason in wrong.items():
        error = failure(frame(example({"x": 1.0})) + frame(data), features=features)
        assert isinstance(error, errors.MalformedFileError)
        assert reason in str(error)
        assert error.record == 1
        assert (error.offset or 0) >= len(frame(example({"x": 1.0}))) + 12


def test_text_that_is_not_utf8_is_an_error() -> None:
    rows = file([{"t": "ä"}, {"t": b"\xff"}])
    for spec in (fastpipe.DenseSpec((), "string"), fastpipe.RaggedSpec((None,), "string")):
        error = failure(rows, features={"t": spec})
        assert isinstance(error, errors.MalformedFileError)
        assert 'isn\'t UTF-8: read the feature as "bytes"' in str(error)
        assert (error.feature, error.record) == ("t", 1)
    assert values(rows, features={"t": fastpipe.DenseSpec((), "bytes")}) == {"t": ["ä".encode(), b"\xff"]}


def test_damaged_records_do_not_hide_others() -> None:
    rows = [{"x": i} for i in range(100)]
    data = bytearray(file(rows))
    data[-6] ^= 1
    with fastpipe.read_tfrecord(bytes(data), features={"x": fastpipe.DenseSpec((), "int64")}, batch_size=9) as reader:
        found = [x for step in range(11) for x in reader.batch_at(step)["x"].tolist()]
        assert found == list(range(99))
        with pytest.raises(errors.MalformedFileError, match="checksum of the record's data"):
            reader.batch_at(11)


def aged(path: Path) -> Path:
    """Sets an old timestamp on a file, because recently modified files are not indexed."""
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return path


def test_an_index_is_kept_used_and_extended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"x": i, "pad": "x" * 300} for i in range(2000)]
    path, cache = tmp_path / "x.tfrecord", tmp_path / "cache"

    def read() -> list[int]:
        return values(path, columns=["x"], index_cache=cache, batch_size=500)["x"]

    path.write_bytes(file(rows[:1000]))
    aged(path)
    assert read() == list(range(1000))
    (kept,) = cache.iterdir()
    stored = kept.read_bytes()
    assert read() == list(range(1000))
    path.write_bytes(file(rows))
    os.utime(path, ns=(LONG_AGO + 10, LONG_AGO + 10))
    caplog.set_level("INFO", "fastpipe")
    assert read() == list(range(2000))
    assert "is extended" in caplog.text
    for at in range(0, len(stored), max(len(stored) // 20, 1)):
        for entry_file in cache.iterdir():
            data = bytearray(entry_file.read_bytes())
            data[at % len(data)] ^= 0xFF
            entry_file.write_bytes(bytes(data))
        assert read() == list(range(2000))


def test_an_index_of_other_contents_is_not_used(tmp_path: Path) -> None:
    path, cache = tmp_path / "x.tfrecord", tmp_path / "cache"
    one = file({"x": i, "pad": "x" * 300} for i in range(500))
    two = file({"x": -i, "pad": "x" * 100} for i in range(500))

    def read(**options: Any) -> Any:
        with fastpipe.read_tfrecord(path, columns=["x"], batch_size=70, shuffle=True, seed=1, **options) as reader:
            return reader._data.handle.layout(), [batch["x"].tolist() for batch in reader]

    # The same size, the same time and other records; other records and more of them; and more records.
    for later in (two + one, two + one + two, one + two + two):
        for data in (one + two, later):
            path.write_bytes(data)
            aged(path)
            assert read(index_cache=cache) == read()


def test_each_large_record_is_a_separate_unit() -> None:
    rows = [{"x": i, "pad": b"x" * (300_000 if i % 3 == 0 else 10)} for i in range(12)]
    with fastpipe.read_tfrecord(file(rows), columns=["x"], batch_size=5, shuffle=True, seed=1) as reader:
        assert sorted(x for batch in reader for x in batch["x"].tolist()) == list(range(12))
        units = reader._data.handle.unit_rows().tolist()
    assert units == [1, 2] * 4


def test_varints_of_every_length_come_back() -> None:
    numbers = [sign * (1 << power) - (sign < 0) for power in range(63) for sign in (1, -1)]
    assert varint(-1) == b"\xff" * 9 + b"\x01"
    assert values(file([{"x": numbers}]), features={"x": fastpipe.RaggedSpec((None,), "int64")}) == {"x": [numbers]}


def mutated(chance: random.Random, record: bytes) -> bytes:
    """Returns a message with a random change at one position."""
    at = chance.randrange(len(record) + 1)
    match chance.randrange(4):
        case 0:
            return record[:at] + bytes([chance.randrange(256)]) + record[at + 1 :]
        case 1:
            return record[:at] + varint(chance.choice([2**31, 2**32, 2**63, 2**64 - 1, 127, 128])) + record[at:]
        case 2:
            return record[:at] + record[at + chance.choice([1, 2, 8]) :]
        case _:
            return record[:at] + chance.randbytes(3) + record[at:]


@pytest.mark.parametrize("shuffle", [False, True, "block", "buffer"])
def test_mutated_records_are_read_or_raise_typed_errors(shuffle: Any) -> None:
    rows = [example({"a": [1, 2, 3], "b": 1.5, "c": ["x", "yy"], "d": 2 if i % 3 else None}) for i in range(40)]
    read = {
        "a": fastpipe.RaggedSpec((None,), "int32", on_null="mask"),
        "b": fastpipe.DenseSpec((), "float64", fill=0),
        "c": fastpipe.HashSpec(9, on_null="mask"),
        "d": fastpipe.DenseSpec((2,), "int64", pad=0, on_null="mask"),
    }
    order: dict[str, Any] = {"shuffle": shuffle, "shuffle_buffer": 7, "seed": 1} if shuffle else {}
    for number in range(60):
        chance = random.Random(number)
        records = list(rows)
        place = chance.randrange(len(records))
        records[place] = mutated(chance, records[place])
        found: dict[str, list[Any]] = {}
        reason = ""
        try:
            found = values(b"".join(map(frame, records)), features=None if number % 5 == 0 else read, **order)
        except errors.FastpipeError as error:
            reason = str(error)
        assert "internal error" not in reason
        assert all(len(column) == len(rows) for column in found.values())


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 12), min_size=1, max_size=40), max_size=8),
    st.lists(st.lists(st.floats(width=32), min_size=1, max_size=40), max_size=8),
    st.lists(st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=70), max_size=8),
    st.booleans(),
)
def test_buckets_and_dropped_keys(
    ints: list[list[int]], floats: list[list[float]], words: list[list[str]], packed: bool
) -> None:
    lists = [([1, 2], [0.5, 1.5], ["a", "b"]), *zip(ints, floats, words, strict=False)]
    rows = [dict(zip(("n", "x", "words"), row, strict=True)) for row in lists]
    content = b"".join(frame(example(row, packed=packed)) for row in rows)
    features = {
        "n": fastpipe.BucketSpec([-2, 2.5, 7, 2**63 - 5]),
        "x": fastpipe.BucketSpec([0.1, 1], on_nan="bucket", dtype="uint8"),
        "words": fastpipe.VocabularySpec(["b", "a"], on_unknown="drop"),
    }
    reader = fastpipe.read_tfrecord(content, features=features, batch_size=100)
    (batch,) = reader
    edges = (-2, 2.5, 7, 2**63 - 5)
    assert batch["n"].to_list() == [[sum(edge <= value for edge in edges) for value in row] for row, _, _ in lists]
    indices = [[3 if np.isnan(value) else (value >= 0.1) + (value >= 1) for value in row] for _, row, _ in lists]
    assert batch["x"].to_list() == indices
    assert batch["words"].to_list() == [["ba".index(word) for word in row if word in ("a", "b")] for _, _, row in lists]
    every = [word for _, _, row in lists for word in row]
    known = sum(word in ("a", "b") for word in every)
    assert reader.stats()["keys"] == {"words": {"read": len(every), "dropped": len(every) - known}}


@pytest.mark.parametrize(
    ("row", "spec", "match"),
    [
        ({"x": ["a"]}, fastpipe.BucketSpec([1]), "only numbers have buckets"),
        ({"x": [1]}, fastpipe.HashSpec(4), "BucketSpec reads numbers"),
        ({"x": [float("nan")]}, fastpipe.BucketSpec([1]), "on_nan"),
    ],
)
def test_values_without_an_index(row: dict[str, Any], spec: Any, match: str) -> None:
    with pytest.raises(fastpipe.FastpipeError, match=match):
        list(fastpipe.read_tfrecord(file([row]), features={"x": spec}, batch_size=1))
