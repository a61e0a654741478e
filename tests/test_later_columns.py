"""Columns that only some files have, or that have different types. Readers don't leave them out silently."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fastpipe
import fixtures
import oracle
import tfrecords
import wire
from avro_schemas import container, files, read
from fastpipe import DenseSpec
from fastpipe.errors import ColumnsLeftOutWarning, SchemaError

folder = fixtures.folder
Row = dict[str, Any]


class Source(NamedTuple):
    """A source of files, for tests of files with different columns.

    Attributes:
        read: The function that reads files.
        write: The function that writes rows of integers and texts, all with the same columns, to a path.
        outcomes: What happens when all columns are read of files with a later column, an earlier one, and another
            type: a warning, an error, or the rows as they are read.
    """

    read: Callable[..., fastpipe.Reader]
    write: Callable[[list[Row], str], object]
    outcomes: dict[str, Any]


def write_avro(rows: list[Row], path: str) -> None:
    schema = wire.record("R", **{name: "int" if type(value) is int else "string" for name, value in rows[0].items()})
    Path(path).write_bytes(container(schema, rows))


def write_csv(rows: list[Row], path: str) -> None:
    lines = [rows[0].keys(), *(row.values() for row in rows)]
    Path(path).write_text("".join(",".join(map(str, line)) + "\n" for line in lines))


def write_parquet(rows: list[Row], path: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_arrow(rows: list[Row], path: str) -> None:
    pa, feather = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.feather")
    feather.write_feather(pa.Table.from_pylist(rows), path)


def write_tfrecord(rows: list[Row], path: str) -> None:
    Path(path).write_bytes(tfrecords.file(rows))


WARNS = r"1 column is left out because the first file.* lacks them: 'b' \(file 2 and 1 more\); "
LACKS = r"files must have the same columns: 1 has no column 'b', but 2 has a column 'b' of type int64: "
OTHER = r"1 has a column 'a' of type int64, but 2 has a column 'a' of type string"
COLUMNAR = {
    "later": SchemaError(LACKS + r"columns=\['a'\] reads all files"),
    "earlier": SchemaError(r"1 has a column 'b' of type int64, but 2 has no column 'b': columns=\['a'\] reads"),
    "types": SchemaError(OTHER),
}
SOURCES = {
    "avro": Source(
        fastpipe.read_avro,
        write_avro,
        {
            "later": ColumnsLeftOutWarning(WARNS + 'reader_schema="union" reads them'),
            "earlier": SchemaError(r"'b'.*reader_schema=\"union\""),
            "types": SchemaError("'a'"),
        },
    ),
    "csv": Source(
        fastpipe.read_csv,
        write_csv,
        {
            "later": ColumnsLeftOutWarning(WARNS + "read the files that have them with another reader"),
            "earlier": SchemaError(
                r'the file has no column "b".*; 1 has this column.*columns= with the names of other'
            ),
            "types": {"a": ["1", "x", "3"]},
        },
    ),
    "parquet": Source(fastpipe.read_parquet, write_parquet, COLUMNAR),
    "arrow": Source(fastpipe.read_arrow, write_arrow, COLUMNAR),
    "tfrecord": Source(
        fastpipe.read_tfrecord,
        write_tfrecord,
        {
            "later": {"a": [1, 2, 3], "b": [None, 5, 5]},
            "earlier": {"a": [1, 2, 3], "b": [5, None, None]},
            "types": SchemaError("a bytes_list in some records and a list of numbers in others"),
        },
    ),
}
FILES: dict[str, list[Row]] = {
    "later": [{"a": 1}, {"a": 2, "b": 5}, {"a": 3, "b": 5}],
    "earlier": [{"a": 1, "b": 5}, {"a": 2}, {"a": 3}],
    "types": [{"a": 1}, {"a": "x"}, {"a": 3}],
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Source:
    return SOURCES[request.param]


@pytest.mark.parametrize("case", FILES)
def test_different_columns_are_named_or_read(source: Source, case: str, folder: Path) -> None:
    for number, row in enumerate(FILES[case], 1):
        source.write([row], str(number))
    paths, expected = ["1", "2", "3"], source.outcomes[case]
    if isinstance(expected, ColumnsLeftOutWarning):
        with pytest.warns(ColumnsLeftOutWarning, match=str(expected)) as warned:
            reader = source.read(paths, batch_size=2)
        assert [warning.filename for warning in warned] == [__file__]
        assert oracle.columns(reader) == {"a": [1, 2, 3]}
    elif isinstance(expected, SchemaError):
        with pytest.raises(SchemaError, match=str(expected)):
            source.read(paths, batch_size=2)
    else:
        # Warnings are errors.
        assert oracle.columns(source.read(paths, batch_size=2)) == expected


@pytest.mark.parametrize("case", ["later", "earlier"])
def test_columns_that_are_not_requested_may_differ(source: Source, case: str, folder: Path) -> None:
    for number, row in enumerate(FILES[case], 1):
        source.write([row], str(number))
    # Warnings are errors.
    for options in ({"columns": "a"}, {"features": {"a": DenseSpec((), "int64")}}):
        reader = source.read(["1", "2", "3"], batch_size=2, **options)
        for each in (reader, pickle.loads(pickle.dumps(reader))):
            assert oracle.columns(each) == {"a": [1, 2, 3]}
    if source.read is not fastpipe.read_tfrecord:
        with pytest.raises(SchemaError, match="b"):
            source.read(["1", "2", "3"], columns=["a", "b"], batch_size=2)


@pytest.mark.parametrize("name", ["avro", "csv"])
def test_one_warning_about_many_files_is_short(name: str, folder: Path) -> None:
    source = SOURCES[name]
    paths = [f"{number:04}" for number in range(1000)]
    for number, path in enumerate(paths):
        source.write([{"a": number} | ({f"c{number // 4}": 1} if number >= 500 else {})], path)
    with pytest.warns(ColumnsLeftOutWarning) as warned:
        reader = source.read(paths, batch_size=1000)
    (text,) = [str(warning.message) for warning in warned]
    assert re.findall(r"'c(\d+)' \(file (\d+) and 3 more\)", text) == [
        (str(number), f"{4 * number:04}") for number in range(125, 135)
    ]
    assert text.startswith("125 columns are left out")
    assert "; and 115 more; " in text
    assert oracle.columns(reader) == {"a": list(range(1000))}


def test_unsampled_features_of_tfrecord_files_are_errors(tmp_path: Path) -> None:
    # Each record is a unit. 64 of the 290 units are sampled, but unit 2 isn't.
    rows: list[Row] = [{"a": number, "pad": b"x" * 70_000} for number in range(290)]
    rows[2]["later"] = 7
    path = tmp_path / "x.tfrecord"
    path.write_bytes(tfrecords.file(rows))
    size = len(tfrecords.file(rows[:2]))
    with fastpipe.read_tfrecord(path, batch_size=2) as reader:
        assert list(reader.features) == ["a", "pad"]
        copies = [reader, pickle.loads(pickle.dumps(reader)), reader.map(dict)]
        for each in copies:
            batches = iter(each)
            assert next(batches)["a"].tolist() == [0, 1]
            with pytest.raises(SchemaError, match="features= with a spec of it reads it, and columns= with") as error:
                next(batches)
            assert (error.value.path, error.value.feature) == (str(path), "later")
            assert (error.value.record, error.value.offset) == (2, size)
            each.close()
    changed = fastpipe.read_tfrecord(path, overrides={"a": DenseSpec((), "float64")}, batch_size=3)
    with changed, pytest.raises(SchemaError, match="later"):
        next(iter(changed))
    later = {"later": DenseSpec((), "int64", on_null="mask")}
    for options, (name, value) in (
        ({"columns": ["a"]}, ("a", 2)),
        ({"features": {"a": DenseSpec((), "int64")}}, ("a", 2)),
        ({"features": later}, ("later", 7)),
    ):
        assert oracle.columns(fastpipe.read_tfrecord(path, batch_size=290, **options))[name][2] == value


def later(*schemas: Any, rows: int = 2) -> list[bytes]:
    """Returns files of these schemas, whose fields are integers."""
    return [container(schema, [{f["name"]: 7 for f in schema["fields"]}] * rows) for schema in schemas]


def test_columns_of_later_files_only() -> None:
    schema = wire.record("R", a="int")
    more, most = wire.record("R", a="int", b="int"), wire.record("R", a="int", b="int", c="int")
    with files(*later(schema, more, schema, most)) as paths:
        match = rf"2 columns are left out .*lacks them: 'b' \(file {paths[1]} and 1 more\); 'c' \(file {paths[3]}\); "
        with pytest.warns(fastpipe.errors.ColumnsLeftOutWarning, match=match) as caught:
            reader = fastpipe.read_avro(paths, batch_size=3)
        assert list(reader.features) == ["a"]
        assert len(caught) == 1
        assert caught[0].filename == __file__
        with pytest.warns(fastpipe.errors.ColumnsLeftOutWarning, match="'b'"):
            assert list(fastpipe.infer_features(paths)) == ["a"]
        # The fix that the warning suggests.
        (hint,) = [word for word in str(caught[0].message).split() if word.startswith("reader_schema=")]
        assert hint == 'reader_schema="union"'
        union = read(paths, reader_schema="union")
        assert union == {"a": [7] * 8, "b": [None, None, 7, 7, None, None, 7, 7], "c": [None] * 6 + [7, 7]}
        # There is no warning if the caller selects the columns explicitly.
        assert read(paths, columns=["a"]) == {"a": [7] * 8}
        assert read(paths, features={"a": DenseSpec((), "int32")}) == {"a": [7] * 8}
        assert read(paths, reader_schema=schema) == {"a": [7] * 8}
        # Files with fewer columns than the first, or without rows, are treated differently.
        with pytest.raises(fastpipe.errors.SchemaError):
            read(paths[1:3])
    with files(*later(schema, rows=2), *later(most, rows=0)) as paths:
        assert read(paths) == {"a": [7, 7]}


def test_nested_columns_of_later_files_only() -> None:
    first = wire.record("R", u=wire.record("U", x="int"), v="int")
    second = wire.record("R", u=wire.record("U", x="int", y="int"), v="int", w="int")
    row = {"u": {"x": 1, "y": 2}, "v": 3, "w": 4}
    with files(container(first, [row]), container(second, [row])) as paths:
        with pytest.warns(fastpipe.errors.ColumnsLeftOutWarning, match=r"1 column is left out .*'u\.y'"):
            assert list(fastpipe.infer_features(paths, columns=["u"])) == ["u.x"]
        assert list(fastpipe.infer_features(paths, columns=["u"], reader_schema="union")) == ["u.x", "u.y"]
        assert read(paths, columns=["v"]) == {"v": [3, 3]}


def test_later_columns_of_incompatible_schemas() -> None:
    fixed = lambda size: {"type": "fixed", "name": "F", "size": size}  # noqa: E731
    first = wire.record("R", a="int", f=fixed(1))
    second = wire.record("R", a="int", f=fixed(2), b="int")
    blobs = container(first, [{"a": 1, "f": b"x"}]), container(second, [{"a": 2, "f": b"xy", "b": 3}])
    schema = wire.record("R", a="int", b=["null", "int"])
    schema["fields"][1]["default"] = None  # type: ignore[index]
    with files(*blobs) as paths:
        with pytest.raises(fastpipe.errors.SchemaError):
            read(paths, reader_schema="union")
        with pytest.warns(
            fastpipe.errors.ColumnsLeftOutWarning, match=r"can't be merged: pass reader_schema= a schema"
        ):
            fastpipe.infer_features(paths)
        assert list(fastpipe.infer_features(paths, columns=["a", "f"])) == ["a", "f"]
        assert read(paths, reader_schema=schema) == {"a": [1, 2], "b": [None, 3]}
