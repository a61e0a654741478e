"""Features that only Arrow IPC files have: dictionaries, compression, and related formats that aren't supported."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import fastpipe
import fixtures

pa = pytest.importorskip("pyarrow")
import pyarrow.feather  # noqa: E402
import pyarrow.ipc  # noqa: E402

import column_files  # noqa: E402
from column_files import FORMATS, table  # noqa: E402

folder = fixtures.folder
rows = FORMATS["arrow"].rows


def write(path: str, batches: list[Any], **options: Any) -> None:
    options = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_file(path, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def test_streams_are_rejected(folder: Path) -> None:
    for options in ({}, {"use_legacy_format": True}):
        with pa.ipc.new_stream("stream.arrow", table().schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(table())
        match = r"an Arrow stream.*from_arrow\(pyarrow\.ipc\.open_stream\(path\)\)"
        expected = fastpipe.errors.MalformedFileError if options else fastpipe.errors.UnsupportedError
        with pytest.raises(expected, match=None if options else match) as error:
            rows("stream.arrow")
        assert error.value.path == "stream.arrow"


def test_old_feather_files_are_rejected(folder: Path) -> None:
    Path("old.feather").write_bytes(b"FEA1" + b"\0" * 60 + b"FEA1")
    with pytest.raises(
        fastpipe.errors.UnsupportedError, match=r"Feather file of version 1: .*pyarrow\.feather\.read_table"
    ):
        rows("old.feather")


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_feather_files(folder: Path, compression: str) -> None:
    pyarrow.feather.write_feather(table(100), "file.feather", compression=compression, chunksize=7)
    assert rows("file.feather") == table(100).to_pylist()
    assert rows("file.feather", columns=["l"]) == table(100).select(["l"]).to_pylist()


def test_a_directory_must_have_one_suffix(folder: Path) -> None:
    for i, suffix in enumerate([".ipc", ".feather", ".arrow"]):
        FORMATS["arrow"].write(table(1, i), folder / f"x{suffix}")
        for source in (folder, f"{folder}/"):
            assert rows(source) == table(1, i).to_pylist()
            assert rows(str(source), filesystem=pa.fs.LocalFileSystem()) == table(1, i).to_pylist()


def dictionaries(*values: list[str]) -> list[Any]:
    return [
        pa.record_batch(
            {"d": pa.DictionaryArray.from_arrays(pa.array([len(v) - 1, 0, None], pa.int8()), v), "x": [1, 2, 3]}
        )
        for v in values
    ]


@pytest.mark.parametrize("columns", [None, ["d"], ["x"], ["x", "d"]])
def test_growing_dictionaries(folder: Path, columns: list[str] | None) -> None:
    batches = dictionaries(["a"], ["a", "b"], ["a", "b", "c"])
    write("file", batches, emit_dictionary_deltas=True)
    names = columns or ["d", "x"]
    expected = [{name: row[name] for name in names} for batch in batches for row in batch.to_pylist()]
    for order in ({}, {"shuffle": True, "seed": 1}):
        found = rows("file", columns=columns, **order)
        assert sorted(found, key=str) == sorted(expected, key=str)
    assert rows("file", columns=columns) == expected


def test_nested_dictionaries_and_other_columns(folder: Path) -> None:
    """Dictionary fields are matched to columns, however they are nested."""
    kind = pa.list_(pa.dictionary(pa.int16(), pa.string()))
    whole = pa.table(
        {
            "s": [{"a": 1, "b": {"c": 2}}] * 4,
            "l": pa.array([["x"], ["y", "x"], None, []], kind),
            "d": pa.array(["q", None, "r", "q"]).dictionary_encode(),
            "x": [1, 2, 3, 4],
        }
    )
    write("file", whole.to_batches(max_chunksize=2), unify_dictionaries=True)
    for columns in (["x"], ["d", "x"], ["l"], ["x", "s"], ["s.b", "l"], ["d"]):
        found = rows("file", columns=columns)
        for name in columns:
            expected = [2] * 4 if name == "s.b" else whole[name].to_pylist()
            if name == "s":
                assert [(row["s.a"], row["s.b.c"]) for row in found] == [(1, 2)] * 4
            else:
                assert [row["s.b.c" if name == "s.b" else name] for row in found] == expected


@pytest.mark.parametrize(
    ("column", "nulls"),
    [
        (pa.array([1, 2]), "error"),
        (pa.array([1, None]), "mask"),
        (pa.array([[1], [2]]), "error"),
        (pa.array([[1], [None]]), "mask"),
        (pa.array([[1], None]), "mask"),
        (pa.array([[1], [2]], pa.list_(pa.int64(), 1)), "error"),
        (pa.array([[1], [None]], pa.list_(pa.int64(), 1)), "mask"),
        (pa.array(["a", "b"]).dictionary_encode(), "error"),
        (pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None])), "mask"),
        (pa.DictionaryArray.from_arrays(pa.array([0, None]), pa.array(["a", "b"])), "mask"),
        (pa.array([{"f": 1}, {"f": 2}]), "error"),
        (pa.array([{"f": 1}, {"f": None}]), "mask"),
        (pa.array([{"f": 1}, None]), "mask"),
        (pa.nulls(2), "mask"),
    ],
    ids=str,
)
def test_nulls_are_detected(folder: Path, column: Any, nulls: str) -> None:
    write("file", [pa.record_batch({"x": column})])
    (spec,) = fastpipe.read_arrow("file", batch_size=1).features.values()
    assert spec.on_null == nulls
    assert [next(iter(row.values())) for row in rows("file")] == [
        item["f"] if isinstance(item, dict) else None if "struct" in str(column.type) and item is None else item
        for item in column.to_pylist()
    ]


MAP = pa.map_(pa.string(), pa.int32())
TENSOR = pa.fixed_shape_tensor(pa.float32(), [2])


def tensors(values: Any) -> Any:
    return pa.ExtensionArray.from_storage(TENSOR, pa.array(values, pa.list_(pa.float32(), 2)))


@pytest.mark.parametrize(
    ("column", "nulls"),
    [
        (pa.array([[("a", 1)], []], MAP), ["error", "error"]),
        (pa.array([[("a", None)], []], MAP), ["mask", "mask"]),
        (pa.array([[("a", 1)], None], MAP), ["mask", "mask"]),
        (pa.array([[("a", {"f": 1})], []], pa.map_(pa.string(), pa.struct({"f": pa.int8()}))), ["error", "error"]),
        (pa.array([[1], []], pa.list_view(pa.int32())), ["error"]),
        (pa.array([[1], [None]], pa.list_view(pa.int32())), ["mask"]),
        (pa.array([[1], None], pa.large_list_view(pa.int32())), ["mask"]),
        (pa.array([[1], [2]], pa.large_list_view(pa.int32())), ["error"]),
        (pa.array([[{"f": 1}], []], pa.list_(pa.struct({"f": pa.int8()}))), ["error"]),
        (pa.array([[{"f": None}], []], pa.list_(pa.struct({"f": pa.int8()}))), ["mask"]),
        (pa.array([[{"f": [1]}], []], pa.list_view(pa.struct({"f": pa.list_view(pa.int8())}))), ["error"]),
        (pa.compute.run_end_encode(pa.array([3, 3])), ["error"]),
        (pa.compute.run_end_encode(pa.array([3, None])), ["mask"]),
        (tensors([[1, 2], [3, 4]]), ["error"]),
        (tensors([[1, 2], [3, None]]), ["mask"]),
        (tensors([[1, 2], None]), ["mask"]),
    ],
    ids=str,
)
def test_nulls_are_detected_at_all_levels(folder: Path, column: Any, nulls: list[str]) -> None:
    write("file", [pa.record_batch({"x": column})])
    reader = fastpipe.read_arrow("file", batch_size=2)
    assert [spec.on_null for spec in reader.features.values()] == nulls
    table = fastpipe.from_arrow(pa.table({"x": column}), batch_size=2)
    assert reader.features == table.features
    (found,), (expected,) = ([column_files.as_rows(batch) for batch in batches] for batches in (reader, table))
    assert found == expected


@pytest.mark.parametrize("unit", [0, 1], ids=["months", "days and milliseconds"])
@pytest.mark.parametrize("looked_at", [True, False])
def test_unsupported_intervals_fail_only_if_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unit: int, looked_at: bool
) -> None:
    """pyarrow doesn't support arrays with two kinds of intervals, so the test patches a file."""
    if not looked_at:
        monkeypatch.setattr("fastpipe.units._arrow_files._LOOKED_AT", 0)
    days = pa.array([pa.MonthDayNano([1, 2, 3])] * 3)
    write("file", [pa.record_batch({"x": [1, 2, None], "i": days, "s": [{"a": 1}] * 3})])
    data = Path("file").read_bytes()
    for at in range(len(data) - 10 - int.from_bytes(data[-10:-6], "little"), len(data) - 10):
        Path("file").write_bytes(data[:at] + bytes([unit]) + data[at + 1 :])
        try:
            kind = str(pa.ipc.open_file("file").schema.field("i").type) if data[at] == 2 else ""
        except (pa.ArrowException, OSError, KeyError):
            continue
        if kind == ("month_interval", "day_time_interval")[unit]:
            break
    else:
        raise AssertionError("no such byte")
    assert rows("file", columns=["x", "s"]) == [{"x": x, "s.a": 1} for x in (1, 2, None)]
    with pytest.raises(fastpipe.errors.UnsupportedError, match=r'Interval.* are not read; columns=\["x", "s\.a"\]'):
        rows("file")


def test_row_counts_match_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In large files fastpipe counts rows without pyarrow, which would read columns to count them."""
    kinds = {"x": pa.int8(), "t": pa.string(), "d": pa.dictionary(pa.int8(), pa.string())}
    sizes = [3, 0, 1, 1000, 5]
    old = {"metadata_version": pa.ipc.MetadataVersion.V4}
    for options in ({}, {"compression": "zstd"}, {"use_legacy_format": True}, old):
        whole = pa.table({name: pa.array([1 if name == "x" else "a"] * 1009, kind) for name, kind in kinds.items()})
        edges = list(itertools.accumulate(sizes, initial=0))
        with pa.ipc.new_file("file", whole.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            for a, b in itertools.pairwise(edges):
                writer.write_batch(whole.to_batches()[0].slice(a, b - a))
        looked = fastpipe.read_arrow("file", batch_size=7)
        with monkeypatch.context() as patch:
            patch.setattr("fastpipe.units._arrow_files._LOOKED_AT", 0)
            counted = fastpipe.read_arrow("file", batch_size=7)
            assert rows("file") == [{"x": 1, "t": "a", "d": "a"}] * sum(sizes)
        places = [looked.locate(step, 0, epoch=0) for step in range(len(looked))]
        assert [counted.locate(step, 0, epoch=0) for step in range(len(counted))] == places
        assert len(looked) == len(counted) == -(-sum(sizes) // 7)


def test_record_batches_without_rows(folder: Path) -> None:
    whole = pa.record_batch({"x": [1, 2]})
    write("file", [whole.slice(0, 0), whole, whole.slice(0, 0), whole])
    assert rows("file", batch_size=3) == [{"x": x} for x in (1, 2, 1, 2)]
    wanted = fastpipe.units.UnitLocation(file="file", row=1, unit=1, name="record batch 3 of file")
    assert fastpipe.read_arrow("file", batch_size=3).locate(1, 0, epoch=0) == wanted
