"""`infer_features`: files of each format, and what it says about other sources."""

from __future__ import annotations

import gzip
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from every_source import Slices
from fastpipe.errors import MissingFileError, SchemaError, UnsupportedError
from fastpipe.typing import InferOptions, Options

FORMATS = ["avro", "csv", "csv.gz", "tsv", "parquet", "pq", "arrow", "feather", "tfrecord"]
TEXT = "id,name,score\n" + "".join(f"{i},{chr(97 + i % 5)},{i / 7 if i % 3 else ''}\n" for i in range(60))
READ: dict[str, Callable[..., fastpipe.Reader]] = {
    "avro": fastpipe.read_avro,
    "csv": fastpipe.read_csv,
    "csv.gz": fastpipe.read_csv,
    "tsv": lambda source, **options: fastpipe.read_csv(source, delimiter="\t", **options),
    "parquet": fastpipe.read_parquet,
    "pq": fastpipe.read_parquet,
    "arrow": fastpipe.read_arrow,
    "feather": fastpipe.read_arrow,
    "tfrecord": fastpipe.read_tfrecord,
}


def write(path: Path, kind: str) -> Path:
    """Writes a file with the columns id, name and score. Some scores are null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if "sv" in kind:
        text = TEXT.replace(",", "\t") if kind == "tsv" else TEXT
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
        return path
    pa = pytest.importorskip("pyarrow")
    names = [chr(97 + i % 5) for i in range(60)]
    table = pa.table({"id": range(60), "name": names, "score": [i / 7 if i % 3 else None for i in range(60)]})
    if kind == "avro":
        fastpipe.write_avro(path, table)
    elif kind == "tfrecord":
        fastpipe.tfrecord.write_tfrecord(path, table)
    elif kind in ("parquet", "pq"):
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        pytest.importorskip("pyarrow.feather").write_feather(table, path)
    return path


@pytest.mark.parametrize("kind", FORMATS)
def test_the_result_equals_the_features_of_the_reader(tmp_path: Path, kind: str) -> None:
    path, read = write(tmp_path / f"a.{kind}", kind), READ[kind]
    write(tmp_path / f"b.{kind}", kind)
    whole = read(path, batch_size=7).features
    assert list(whole) == ["id", "name", "score"]
    for source in (path, str(path), [path], tmp_path, f"{tmp_path}/*.{kind}", iter([str(path)])):
        found = fastpipe.infer_features(source)
        assert list(found.items()) == list(whole.items())
        assert type(found) is fastpipe.typing.Features
    for columns in ("score", ["score", "id"]):
        expected = read(path, columns=columns, batch_size=7).features
        assert list(fastpipe.infer_features(path, columns=columns).items()) == list(expected.items())
    with pytest.raises(SchemaError, match="scores"):
        fastpipe.infer_features(path, columns="scores")


@pytest.mark.parametrize("kind", ["avro", "parquet", "arrow", "tfrecord"])
def test_first_bytes_determine_the_format_of_other_names(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "part-00000", kind)
    assert fastpipe.infer_features(path) == READ[kind](path, batch_size=1).features


@pytest.mark.parametrize("kind", ["avro", "parquet"])
def test_folders_in_hive_style_are_columns(tmp_path: Path, kind: str) -> None:
    for year in (2025, 2026):
        write(tmp_path / f"year={year}" / f"a.{kind}", kind)
    found = fastpipe.infer_features(tmp_path)
    assert list(found) == ["id", "name", "score", "year"]
    assert found == READ[kind](tmp_path, batch_size=1).features
    assert list(fastpipe.infer_features(tmp_path, partitioning=None)) == ["id", "name", "score"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("avro", {"logical_types": False, "reader_schema": "union"}),
        ("csv", {"null_values": ["a"], "quote": None}),
        ("tsv", {"delimiter": ","}),
        ("parquet", {"page_checksum_verification": True}),
        ("arrow", {"num_fetches": 2, "batch_size": 5}),
    ],
)
def test_options_are_those_of_the_reader(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    path = write(tmp_path / f"a.{kind}", kind)
    read = fastpipe.read_csv if kind == "tsv" else READ[kind]
    assert fastpipe.infer_features(path, **options) == read(path, **{"batch_size": 1} | options).features
    with pytest.raises(TypeError, match=f"{read.__name__}.. got an unexpected keyword argument 'colums'"):
        fastpipe.infer_features(path, colums=["id"])


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, io.BytesIO], ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", ["avro", "parquet", "arrow", "tfrecord"])
def test_files_in_memory(tmp_path: Path, kind: str, make: Callable[[bytes], Any]) -> None:
    path = write(tmp_path / f"a.{kind}", kind)
    whole = READ[kind](path, batch_size=1).features
    assert fastpipe.infer_features(make(path.read_bytes())) == whole
    assert fastpipe.infer_features([make(path.read_bytes()), path]) == whole


def test_a_name_of_an_open_file_is_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing")
    with path.open("rb") as file, pytest.raises(UnsupportedError, match=r"format of \S+notes.txt from its first bytes"):
        fastpipe.infer_features(file)


def test_other_sources_need_a_reader(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    unknown = tmp_path / "rows.dat"
    unknown.write_text(TEXT)
    table = pa.table({"id": range(240), "text": ["a"] * 240, "t": [[1]] * 240})
    for source in (unknown, TEXT.encode(), io.BytesIO(TEXT.encode()), gzip.compress(TEXT.encode())):
        with pytest.raises(UnsupportedError, match=r"cannot detect the format of .*read_csv.* use reader\.features"):
            fastpipe.infer_features(source)
    reader = fastpipe.from_arrow(table, batch_size=1)
    for source in (table, reader, {"id": np.arange(3)}, Slices(table, 17)):
        with pytest.raises(TypeError, match=r"source must be files; got .* from_arrow .* use reader\.features"):
            fastpipe.infer_features(source)
    for source in (5, [b"", 5]):
        with pytest.raises(TypeError, match=r"^source must be a path, .* or a list of these; got (5|int)$"):
            fastpipe.infer_features(source)
    with open(unknown) as text, pytest.raises(TypeError, match=r'was opened as text: open it with "rb"$'):
        fastpipe.infer_features(text)
    with pytest.raises(TypeError, match=r"no argument 'filesystem'. .* use reader.features"):
        fastpipe.infer_features("bucket/a.parquet", filesystem=object())
    with pytest.raises(MissingFileError, match=r"none\.csv"):
        fastpipe.infer_features(tmp_path / "none.csv")
    several = [write(tmp_path / f"a.{kind}", kind) for kind in ("csv", "parquet")]
    with pytest.raises(UnsupportedError, match="the files have several formats"):
        fastpipe.infer_features(several)


def test_options_are_typed_as_those_of_the_readers() -> None:
    typed = {name: annotation.__forward_arg__ for name, annotation in InferOptions.__annotations__.items()}
    known = {"source", "features", "columns", "batch_size", "filesystem", "on_error", *Options.__annotations__}
    expected = {}
    for read in (
        fastpipe.read_avro,
        fastpipe.read_csv,
        fastpipe.read_parquet,
        fastpipe.read_arrow,
        fastpipe.read_tfrecord,
    ):
        expected |= {name: one.annotation for name, one in inspect.signature(read).parameters.items()}
    assert typed == {name: annotation for name, annotation in expected.items() if name not in known}
