"""Columns that exist only in later Avro files."""

from __future__ import annotations

from typing import Any

import pytest

import fastpipe
import wire
from avro_schemas import container, files, read
from fastpipe import DenseSpec


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
