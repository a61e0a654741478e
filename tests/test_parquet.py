"""Features of Parquet files only: partition folders, statistics and row groups."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastpipe
import fixtures
from fastpipe import DenseSpec

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

import column_files  # noqa: E402
from column_files import FORMATS  # noqa: E402

folder = fixtures.folder
rows = FORMATS["parquet"].rows


def lay_out(files: dict[str, Any]) -> None:
    """Writes files. Each contains one row or a dict of columns."""
    for name, content in files.items():
        path = Path("data", name, "part.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table(content if isinstance(content, dict) else {"x": [content]}), path)


def patched(path: str, old: int, new: int, is_so: Callable[[Any], bool]) -> None:
    """Changes one byte of a file's footer from `old` to `new`, where that makes `is_so` true of the file's metadata."""
    data = Path(path).read_bytes()
    for at in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 8):
        if data[at] == old:
            Path(path).write_bytes(data[:at] + bytes([new]) + data[at + 1 :])
            try:
                if is_so(parquet.read_metadata(path)):
                    return
            except (OSError, pa.ArrowException):
                pass
    raise AssertionError("no such byte")


# --- Folders ---


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"y=1": 10, "y=2": 20}, [{"x": 10, "y": 1}, {"x": 20, "y": 2}]),
        ({"y=-1": 10, "y=0": 20}, [{"x": 10, "y": -1}, {"x": 20, "y": 0}]),
        ({"y=01": 10, "y=02": 20}, [{"x": 10, "y": "01"}, {"x": 20, "y": "02"}]),
        ({"y=1": 10, "y=a": 20}, [{"x": 10, "y": "1"}, {"x": 20, "y": "a"}]),
        ({"y=1.5": 10}, [{"x": 10, "y": "1.5"}]),
        ({f"y={2**63 - 1}": 10}, [{"x": 10, "y": 2**63 - 1}]),
        ({f"y={2**63}": 10}, [{"x": 10, "y": str(2**63)}]),
        ({"y=\uff11": 10}, [{"x": 10, "y": "\uff11"}]),
        ({"y=1_000": 10}, [{"x": 10, "y": "1_000"}]),
        ({"y=": 10}, [{"x": 10, "y": ""}]),
        ({"y=a=b": 10}, [{"x": 10, "y": "a=b"}]),
        ({"a%3Db=c%2Fd%20e": 10}, [{"x": 10, "a=b": "c/d e"}]),
        ({"y=__HIVE_DEFAULT_PARTITION__": 10, "y=2": 20}, [{"x": 20, "y": 2}, {"x": 10, "y": None}]),
        ({"y=__HIVE_DEFAULT_PARTITION__": 10, "y=b": 20}, [{"x": 10, "y": None}, {"x": 20, "y": "b"}]),
        ({"y=__HIVE_DEFAULT_PARTITION__": 10}, [{"x": 10, "y": None}]),
        ({"y=1/m=2": 10, "y=1/m=3": 20}, [{"x": 10, "y": 1, "m": 2}, {"x": 20, "y": 1, "m": 3}]),
        ({"y=1/other/m=2": 10}, [{"x": 10, "y": 1, "m": 2}]),
        ({"=1": 10}, [{"x": 10}]),
        ({"x=5": 10}, [{"x": 10}]),
        ({"x.y=5": 10}, [{"x": 10, "x.y": 5}]),
    ],
    ids=str,
)
def test_folders_are_columns(folder: Path, files: dict[str, Any], found: list[dict[str, Any]]) -> None:
    lay_out(files)
    for system in (None, pa.fs.LocalFileSystem()):
        by_x = sorted(rows("data", filesystem=system), key=lambda row: row["x"])
        assert by_x == sorted(found, key=lambda row: row["x"])
    assert sorted(rows("data", partitioning=None), key=str) == [{"x": row["x"]} for row in sorted(found, key=str)]
    again = pickle.loads(pickle.dumps(fastpipe.read_parquet("data", batch_size=9)))
    assert again.features == fastpipe.read_parquet("data", batch_size=9).features


def test_parent_folders_are_columns(folder: Path) -> None:
    lay_out({"y=1/m=2": 10})
    assert rows("data/y=1") == [{"x": 10, "y": 1, "m": 2}]
    assert rows("data/y=1/m=2/part.parquet") == [{"x": 10, "y": 1, "m": 2}]


def test_folders_of_different_depth_are_refused(folder: Path) -> None:
    lay_out({"y=1": 10, "y=1/m=2": 20})
    with pytest.raises(fastpipe.errors.SchemaError, match=r"other files are in folders m=.*partitioning=None") as error:
        rows("data")
    assert (error.value.path, error.value.feature) == ("data/y=1/part.parquet", "m")
    assert rows("data", partitioning=None) == [{"x": 20}, {"x": 10}]


def test_folder_columns_can_be_selected(folder: Path) -> None:
    lay_out({"y=1": {"x": [1, 2], "z": [3, 4]}, "y=2": {"x": [5], "z": [6]}})
    assert rows("data", columns=["y"]) == [{"y": 1}, {"y": 1}, {"y": 2}]
    assert rows("data", columns=["y", "z"]) == [{"y": 1, "z": 3}, {"y": 1, "z": 4}, {"y": 2, "z": 6}]
    assert rows("data", features={"year": DenseSpec((), "float32", field="y")}) == [
        {"year": y} for y in (1.0, 1.0, 2.0)
    ]
    with pytest.raises(ValueError, match="partitioning must be 'hive' or None"):
        rows("data", partitioning="dir")  # type: ignore[arg-type]


# --- Nulls ---


@pytest.mark.parametrize("statistics", [True, False, ["x"]])
def test_statistics_determine_nullability(folder: Path, statistics: Any) -> None:
    table = pa.table({"x": [1, 2, 3], "y": [1, None, 3], "l": [[1], [2], [3]], "s": [{"a": 1}] * 3})
    parquet.write_table(table, "file", row_group_size=1, write_statistics=statistics)
    nulls = {name: spec.on_null for name, spec in fastpipe.read_parquet("file", batch_size=2).features.items()}
    sure = "error" if statistics is True else "mask"
    assert nulls == {"x": "error" if statistics else "mask", "y": "mask", "l": sure, "s.a": sure}
    assert rows("file") == [{"x": i, "y": None if i == 2 else i, "l": [i], "s.a": 1} for i in (1, 2, 3)]


def test_one_row_group_with_nulls_is_enough(folder: Path) -> None:
    for name, last in (("a", 3), ("b", None)):
        parquet.write_table(pa.table({"x": pa.array([1, 2, last], pa.int64())}), name, row_group_size=1)
    assert fastpipe.read_parquet("a", batch_size=2).features["x"].on_null == "error"
    assert fastpipe.read_parquet(["a", "b"], batch_size=2).features["x"].on_null == "mask"
    assert [row["x"] for row in rows(["a", "b"])] == [1, 2, 3, 1, 2, None]


def test_wrong_statistics_are_overruled_by_a_spec(folder: Path) -> None:
    """Checks that a spec overrides the statistics, which only determine the default."""
    parquet.write_table(pa.table({"x": [1, None, 3]}), "file")
    # In Thrift, the minimum is followed by the null count.
    data, least = Path("file").read_bytes(), (1).to_bytes(8, "little")
    assert data.count(least + b"\x16\x02") > 0
    Path("file").write_bytes(data.replace(least + b"\x16\x02", least + b"\x16\x00"))
    assert parquet.read_metadata("file").row_group(0).column(0).statistics.null_count == 0
    assert parquet.read_table("file").column("x").to_pylist() == [1, None, 3]
    assert fastpipe.read_parquet("file", batch_size=3).features["x"].on_null == "error"
    with pytest.raises(fastpipe.errors.NullValueError, match=r'on_null="mask" marks nulls, fill=\.\.\. replaces them'):
        rows("file")
    assert rows("file", features={"x": DenseSpec((), "int64", on_null="mask")}) == [{"x": x} for x in (1, None, 3)]
    assert rows("file", features={"x": DenseSpec((), "int64", fill=-1)}) == [{"x": x} for x in (1, -1, 3)]


@pytest.mark.parametrize("nullable", [True, False])
def test_structs_that_are_all_null(folder: Path, nullable: bool) -> None:
    kind = pa.struct([pa.field("a", pa.int64(), nullable), pa.field("l", pa.list_(pa.string()), nullable)])
    table = pa.table({"s": pa.array([None] * 5, kind), "x": range(5)})
    parquet.write_table(table, "file", row_group_size=3)
    assert rows("file") == [{"s.a": None, "s.l": None, "x": x} for x in range(5)]
    assert rows("file", columns=["x"]) == [{"x": x} for x in range(5)]


@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize("texts", [[None] * 3, [None, {"a": "x"}, None]], ids=["all null", "some null"])
@pytest.mark.parametrize("options", [{}, {"store_schema": False}], ids=str)
def test_dictionaries_in_structs(folder: Path, nullable: bool, texts: list[Any], options: dict[str, Any]) -> None:
    """pyarrow's statistics claim that dictionaries have no nulls. Their keys are meaningless under null structs."""
    inner = pa.struct([pa.field("a", pa.dictionary(pa.int8(), pa.string()), nullable)])
    for kind, column in ((inner, texts), (pa.struct({"o": inner}), [text and {"o": text} for text in texts])):
        written = pa.table({"s": pa.array(column, kind), "x": range(3)})
        parquet.write_table(written, "file", row_group_size=2, **options)
        name = "s.a" if kind is inner else "s.o.a"
        expected = [{name: text and text["a"], "x": x} for x, text in enumerate(texts)]
        assert rows("file") == expected
        assert rows("file", shuffle=True, seed=1, columns=[name])
        found = fastpipe.from_arrow(parquet.read_table("file").slice(1), batch_size=3)
        assert [row for batch in found for row in column_files.as_rows(batch)] == expected[1:]


# --- Row groups ---


# Thrift encodes 7 and 10 as the varints 14 and 20.
@pytest.mark.parametrize(
    ("old", "new", "is_so", "match"),
    [
        (14, 13, lambda m: m.row_group(1).num_rows == -7, r"row group 1 has -7 rows according to the file's footer"),
        (14, 10, lambda m: m.row_group(1).num_rows == 5, r"the row groups have 8 rows in total, .* the file has 10"),
        (14, 0, lambda m: m.row_group(1).num_rows == 0, r"the row groups have 3 rows in total, .* the file has 10"),
        (20, 22, lambda m: m.num_rows == 11, r"the row groups have 10 rows in total, .* the file has 11"),
    ],
)
def test_wrong_row_counts_are_refused(
    folder: Path, old: int, new: int, is_so: Callable[[Any], bool], match: str
) -> None:
    table = pa.table({"x": range(10)})
    with parquet.ParquetWriter("file", table.schema) as writer:
        writer.write_table(table.slice(0, 3))
        writer.write_table(table.slice(3, 7))
    assert len(rows("file")) == 10
    patched("file", old, new, is_so)
    with pytest.raises(fastpipe.errors.MalformedFileError, match=match) as error:
        fastpipe.read_parquet("file", batch_size=2)
    assert error.value.path == "file"


@pytest.mark.parametrize("slice_bytes", [8 << 20, 100])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_page_checksums_are_verified(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_checksums: bool, slice_bytes: int
) -> None:
    monkeypatch.setattr("fastpipe.units._data._SLICE_BYTES", slice_bytes)
    table = pa.table({"x": range(1000)})
    parquet.write_table(
        table, "file", compression="none", use_dictionary=False, write_page_checksum=has_checksums, data_page_size=800
    )
    reader = fastpipe.read_parquet("file", batch_size=7, page_checksum_verification=True)
    for same in (reader, pickle.loads(pickle.dumps(reader))):
        assert [x for batch in same for x in batch["x"].tolist()] == list(range(1000))
    modified = os.stat("file").st_mtime_ns
    data = Path("file").read_bytes()
    Path("file").write_bytes(data.replace((777).to_bytes(8, "little"), (778).to_bytes(8, "little")))
    os.utime("file", ns=(modified, modified))
    assert [row["x"] for row in rows("file")] == [778 if x == 777 else x for x in range(1000)]
    for checked in (reader, pickle.loads(pickle.dumps(reader))):
        if has_checksums:
            with pytest.raises(fastpipe.errors.MalformedFileError, match=r"CRC.*\(row group 0 of file\)"):
                list(checked)
        else:
            assert sum(len(batch["x"]) for batch in checked) == 1000
    with pytest.raises(TypeError, match="page_checksum_verification must be True or False; got 1"):
        fastpipe.read_parquet("file", batch_size=1, page_checksum_verification=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("slice_bytes", [8 << 20, 100])
def test_dictionary_strings_are_not_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    """Checks that batches are equal whether or not a row group encodes a column as a dictionary."""
    monkeypatch.setattr("fastpipe.units._data._SLICE_BYTES", slice_bytes)
    few, many = [None, "a", "", "some longer text"], [f"{i} is one of many texts" for i in range(1000)]
    columns = {
        "t": [few[i % 4] for i in range(500)] + many[500:],
        "b": [str(few[i % 3]).encode() for i in range(1000)],
        "m": many,
        "n": [["a", "b"][: i % 3] for i in range(1000)],
        "a.b": ["x", "y"] * 500,
        "d": pa.array(["q", None] * 500).dictionary_encode(),
    }
    kinds = [pa.string(), pa.binary(), pa.string(), pa.list_(pa.string()), pa.string(), None]
    table = pa.table({name: pa.array(v, k) if k else v for (name, v), k in zip(columns.items(), kinds, strict=True)})
    parquet.write_table(table, "file", row_group_size=250)
    asked: list[list[str]] = []
    made = parquet.ParquetFile

    def opened(*arguments: Any, **options: Any) -> Any:
        asked.append(options.get("read_dictionary") or [])
        return made(*arguments, **options)

    monkeypatch.setattr("pyarrow.parquet.ParquetFile", opened)
    assert rows("file") == table.to_pylist()
    assert ["t", "b", "a.b"] in asked
    assert ["b", "a.b"] in asked, "the last row groups contain strings outside of the dictionary of t"
    shuffled = rows("file", shuffle=True, seed=1, columns=["m", "t", "b"])
    assert sorted(shuffled, key=str) == sorted(table.select(["m", "t", "b"]).to_pylist(), key=str)


def test_row_groups_without_rows(folder: Path) -> None:
    table = pa.table({"x": [1, 2]})
    with parquet.ParquetWriter("file", table.schema) as writer:
        for part in (table.slice(0, 0), table, table.slice(0, 0), table):
            writer.write_table(part)
    assert rows("file", batch_size=3) == [{"x": x} for x in (1, 2, 1, 2)]
    with parquet.ParquetWriter("none", table.schema):
        pass
    assert rows("none") == []
    assert rows(["none", "file"]) == rows("file")


def test_rows_are_located(folder: Path) -> None:
    parquet.write_table(pa.table({"x": range(5)}), "file", row_group_size=2)
    place = fastpipe.read_parquet("file", batch_size=3).locate(1, 1, epoch=0)
    assert place == fastpipe.units.UnitLocation(file="file", row=0, unit=2, name="row group 2 of file")


def test_only_wanted_columns_are_read(folder: Path) -> None:
    """Checks that damage in one column doesn't affect readers of other columns."""
    columns = {"x": list(range(1000)), "y": [f"a long text {i}" * 9 for i in range(1000)]}
    parquet.write_table(pa.table(columns), "file", compression="zstd", use_dictionary=False)
    chunk = parquet.read_metadata("file").row_group(0).column(1)
    data = bytearray(Path("file").read_bytes())
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    data[middle : middle + 9] = b"\0" * 9
    Path("file").write_bytes(data)
    assert rows("file", columns=["x"]) == [{"x": x} for x in range(1000)]
    with pytest.raises(fastpipe.errors.MalformedFileError, match=r"\(row group 0 of file\)") as error:
        rows("file")
    assert (error.value.path, error.value.unit) == ("file", "row group 0 of file")


def test_only_wanted_columns_count_for_the_window(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpipe.units._data._WINDOW_BYTES", 256 << 10)
    numbers = range(800)
    columns = {"x": numbers, "t": [f"{i:1000}" for i in numbers], "f": [[0.0] * 125] * 800}
    kinds = {"x": pa.int64(), "t": pa.string(), "f": pa.list_(pa.float64(), 125)}
    parquet.write_table(pa.table(columns, pa.schema(kinds)), "file", row_group_size=100, use_dictionary=False)

    def groups_of_batches(columns: list[str]) -> set[int]:
        reader = fastpipe.read_parquet("file", columns=columns, batch_size=100, shuffle=True, seed=1)
        return {len({x // 100 for x in batch["x"].tolist()}) for batch in reader}

    # The window would fit 32,768 rows of 8 bytes, or 262 rows of 1,000 bytes minus the rows at both edges.
    assert groups_of_batches(["x"]) == {8}
    assert groups_of_batches(["x", "t"]) == groups_of_batches(["f", "x"]) == {1}


def test_unsupported_types_are_named(folder: Path) -> None:
    parquet.write_table(pa.table({"x": [1], "d": pa.array([1], pa.decimal256(70, 3))}), "file")
    found = rows("file", columns=["x"])
    assert found == [{"x": 1}]
