"""Properties of both Parquet and Arrow files: how they are found, damaged files, changed files, and metadata."""

from __future__ import annotations

import io
import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import fixtures

pa = pytest.importorskip("pyarrow")
import pyarrow.fs  # noqa: E402

import column_files  # noqa: E402
from column_files import FORMATS, Format, table  # noqa: E402
from toy_units import until  # noqa: E402

folder = fixtures.folder


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def numbers(form: Format, source: Any, **options: Any) -> list[int]:
    return [row["n"] for row in form.rows(source, **options)]


# --- Finding files ---


def lay_out(form: Format, folder: Path) -> None:
    """Creates data files, hidden files and files of other kinds."""
    for i, name in enumerate(["b/2", "a/1", "0", "_hidden/8", ".hidden/8", "a/_8", "a/.8"]):
        path = (folder / name).with_suffix(form.suffix) if not name.startswith("a/.") else folder / f"a/.8{form.suffix}"
        path.parent.mkdir(exist_ok=True, parents=True)
        form.write(table(1, i), path)
    for name in ("_SUCCESS", "a/_metadata", "notes.txt", f"a/part{form.suffix}.crc", f"b/x{form.suffix}.tmp"):
        (folder / name).write_text("something else")


@pytest.mark.parametrize("system", ["none", "pyarrow", "subtree", "fsspec"])
def test_files_are_found(form: Format, folder: Path, system: str) -> None:
    lay_out(form, folder)
    root, options = f"{folder}/", {}
    if system == "pyarrow":
        options = {"filesystem": pyarrow.fs.LocalFileSystem()}
    elif system == "subtree":
        root, options = "", {"filesystem": pyarrow.fs.SubTreeFileSystem(str(folder), pyarrow.fs.LocalFileSystem())}
    elif system == "fsspec":
        options = {"filesystem": pytest.importorskip("fsspec").filesystem("file")}
    for source, found in {
        f"{folder}/" if root else "": [2, 1, 0],
        f"{root}a": [1],
        f"{root}*{form.suffix}": [2],
        f"{root}*/*{form.suffix}": [1, 0],
        f"{root}**/*{form.suffix}": [2, 1, 0],
        f"{root}[ab]/?{form.suffix}": [1, 0],
        f"{root}a/_8{form.suffix}": [5],
        f"{root}a/.8{form.suffix}": [6],
    }.items():
        assert numbers(form, source, **options) == found, source
    first, second = f"{root}b/2{form.suffix}", f"{root}a/1{form.suffix}"
    assert numbers(form, [first, Path(second), first], **options) == [0, 1, 0]
    for source in (f"{root}nothing", f"{root}a/nothing{form.suffix}", f"{root}x*", f"{root}a/*/*", []):
        with pytest.raises(fastpipe.errors.MissingFileError):
            numbers(form, source, **options)
    (folder / "empty").mkdir()
    with pytest.raises(
        fastpipe.errors.MissingFileError, match=r"the directory contains no file that ends in \."
    ) as error:
        numbers(form, f"{root}empty", **options)
    assert error.value.path == f"{root}empty"
    for wrong in (3, None, [3], [b"a", 3], {"a": 1}.values()):
        with pytest.raises(TypeError, match="source must be a path"):
            numbers(form, wrong, **options)


def test_files_in_memory(form: Format) -> None:
    system = pytest.importorskip("fsspec").filesystem("memory")
    for i, name in enumerate(["a/1", "a/2", "b/3"]):
        with system.open(f"/files{form.suffix}/{name}{form.suffix}", "wb") as file:
            form.write(table(1, i), file)
    root = f"files{form.suffix}"
    for source in (root, f"/{root}", f"/{root}/", f"memory://{root}", f"{root}/*/*", f"/{root}/**/*{form.suffix}"):
        assert numbers(form, source, filesystem=system) == [0, 1, 2], source
        again = pickle.loads(pickle.dumps(form.read(source, batch_size=3, filesystem=system, columns=["l"])))
        assert [batch["l"].to_list() for batch in again] == [[[], [1], None]]
    assert numbers(form, f"{root}/b/3{form.suffix}", filesystem=system) == [2]
    with pytest.raises(fastpipe.errors.MissingFileError):
        numbers(form, "/nothing", filesystem=system)


@pytest.mark.parametrize("filesystem", ["s3", 3, object(), os])
def test_invalid_file_systems(form: Format, filesystem: Any) -> None:
    with pytest.raises(TypeError, match="filesystem must be of"):
        form.read("x", batch_size=1, filesystem=filesystem)


def test_invalid_files(form: Format, folder: Path) -> None:
    for url in ("s3://bucket/x", "https://example.com/x.parquet"):
        with pytest.raises(fastpipe.errors.UnsupportedError, match="a URL needs its file system"):
            form.read(url, batch_size=1)
    (folder / f"link{form.suffix}").symlink_to(folder / "nowhere")
    for source in (f"link{form.suffix}", folder):
        with pytest.raises(fastpipe.errors.MissingFileError, match="link"):
            form.read(source, batch_size=1)
    with pytest.raises(fastpipe.errors.MissingFileError) as error:
        form.read(f"missing{form.suffix}", batch_size=1)
    assert error.value.path == f"missing{form.suffix}"
    os.mkfifo("pipe")
    with pytest.raises(fastpipe.errors.StorageError, match="it is not a file"):
        form.read("pipe", batch_size=1)


# --- Contents ---


def test_empty_files(form: Format, folder: Path) -> None:
    form.write(table(0), f"none{form.suffix}")
    assert numbers(form, f"none{form.suffix}") == []
    form.write(table(12), f"some{form.suffix}")
    assert numbers(form, folder) == list(range(12))
    Path(f"zero{form.suffix}").touch()
    assert numbers(form, folder) == list(range(12)), "an empty file must count as one without rows"
    with pytest.raises(fastpipe.errors.MalformedFileError, match="zero"):
        numbers(form, f"zero{form.suffix}")
    Path("text").write_text("hello, world, this is no file of columns")
    with pytest.raises(fastpipe.errors.MalformedFileError, match=r"\(file text\)"):
        numbers(form, "text")
    form.write(pa.table({}), "columns")
    with pytest.raises(fastpipe.errors.UnsupportedError, match=r"the file has no columns \(file columns\)"):
        numbers(form, "columns")
    form.write(pa.table([[1], [2]], names=["x", "x"]), "twice")
    with pytest.raises(fastpipe.errors.SchemaError, match=r"several columns are called 'x' \(file twice\)"):
        numbers(form, "twice")


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"n": [1]}, "first has a column 't' of type string, but second has no column 't'"),
        ({"n": [1], "t": ["a"], "m": [1]}, "first has no column 'm', but second has a column 'm' of type int64"),
        ({"n": ["1"], "t": ["a"]}, "first has a column 'n' of type int64, but second has a column 'n' of type string"),
        ({"n": [[1]], "t": ["a"]}, "'n' of type int64, but second has a column 'n' of type list"),
    ],
)
def test_other_columns_are_named(form: Format, folder: Path, other: dict[str, Any], match: str) -> None:
    form.write(pa.table({"n": [1], "t": ["a"]}), "first")
    form.write(pa.table(other), "second")
    with pytest.raises(fastpipe.errors.SchemaError, match=match) as error:
        form.read(["first", "second"], batch_size=1)
    assert (error.value.path, error.value.feature) == ("second", match.split("column '")[1][0])


def test_columns_in_another_order_and_nulls_in_one_file(form: Format, folder: Path) -> None:
    def field(name: str, kind: Any, nullable: bool) -> Any:
        return pa.field(name, kind, nullable=nullable)

    inner = [pa.list_(field("item", pa.int64(), nullable)) for nullable in (False, True)]
    strict = pa.schema([field("n", pa.int64(), False), field("l", inner[0], False)])
    loose = pa.schema([field("l", inner[1], True), field("n", pa.int64(), True)])
    form.write(pa.table({"n": [1, 2], "l": [[1], []]}, strict), "first")
    form.write(pa.table({"n": [3, None], "l": [None, [None]]}, loose), "second")
    for source in (["first", "second"], ["second", "first"]):
        found = sorted(form.rows(source), key=lambda row: row["n"] or 9)
        lists = [[1], [], None, [None]]
        assert found == [{"n": n, "l": items} for n, items in zip([1, 2, 3, None], lists, strict=True)]


def test_nested_columns(form: Format, folder: Path) -> None:
    values = [{"b": 5, "c": {"d": 1, "e": ["x"]}}, {"b": 6, "c": None}]
    form.write(pa.table({"a": values, "p": [{"q": 1}, {"q": 2}], "a.x": [1, 2]}), "nested")
    assert [*form.rows("nested")[1].items()] == [("a.b", 6), ("a.c.d", None), ("a.c.e", None), ("p.q", 2), ("a.x", 2)]
    assert form.rows("nested", columns=["a.c.d", "p"]) == [{"a.c.d": 1, "p.q": 1}, {"a.c.d": None, "p.q": 2}]
    assert form.rows("nested", columns=["a.x"]) == [{"a.x": 1}, {"a.x": 2}]
    features = {"d": fastpipe.DenseSpec((), "int64", field="a.c.d", fill=0)}
    assert form.rows("nested", features=features) == [{"d": 1}, {"d": 0}]
    for wrong in ("a.y", "b", "a.c.", ".a", ""):
        with pytest.raises((fastpipe.errors.SchemaError, ValueError)):
            form.rows("nested", columns=[wrong])
    form.write(pa.table({"a": [{"b": 5}], "a.b": [7]}), "twice")
    for columns in (None, ["a"], ["a.b"]):
        with pytest.raises(fastpipe.errors.SchemaError, match=r"several columns are called 'a\.b'"):
            form.rows("twice", columns=columns)


def test_many_columns(form: Format, folder: Path) -> None:
    form.write(pa.table({f"c{i}": [i] for i in range(10_000)}), "wide")
    reader = form.read("wide", columns=["c7", "c9999"], batch_size=1)
    assert [column_files.as_rows(batch) for batch in reader] == [[{"c7": 7, "c9999": 9999}]]
    form.write(pa.table({f"c{i}": [i] for i in range(2000)}), "less wide")
    assert form.rows("less wide") == [{f"c{i}": i for i in range(2000)}]


def test_files_written_by_fastpipe_round_trip(form: Format, folder: Path) -> None:
    arrays = {
        "x": np.arange(12, dtype="float32").reshape(6, 2),
        "n": np.arange(6, dtype="uint8"),
        "s": fastpipe.Sparse(np.array([[0, 1], [3, 0]]), np.array([1.0, 2.0]), (6, 4)),
        "when": np.array(["2020-01-01", "NaT"] * 3, "datetime64[D]"),
        "m": fastpipe.Masked(np.arange(6), np.arange(6) % 2 == 0),
        "t": fastpipe.Ragged(np.arange(6.0), np.array([0, 0, 1, 3, 3, 6, 6])),
    }
    written = pa.table(fastpipe.from_arrays(arrays, batch_size=4))
    form.write(written, "file", 3)
    reader = form.read("file", batch_size=6)
    (batch,) = reader
    assert {name: type(array) for name, array in batch.items()} == {name: type(array) for name, array in arrays.items()}
    assert list(batch["s"].dense_shape) == [6, 4]
    for name in ("x", "n", "when"):
        assert batch[name].dtype == arrays[name].dtype
        np.testing.assert_array_equal(batch[name], arrays[name])
    assert batch["m"].to_list() == [0, None, 2, None, 4, None]
    assert list(form.read("file", columns=["t", "x"], batch_size=6).features) == ["t", "x"]
    # A second file without fastpipe's metadata doesn't describe array types, so the Arrow types decide.
    plain = written.replace_schema_metadata(None)
    form.write(plain, "plain", 3)
    assert form.read(["file", "plain"], batch_size=6).features == form.read("plain", batch_size=6).features
    form.write(written.append_column("more", [[1] * 6]), "more", 3)
    assert list(form.read("more", batch_size=6).features) == [*arrays, "more"]


# --- Damage ---


def damaged(data: bytes) -> list[bytes]:
    """Returns a file truncated at every 37th byte, and copies of it with some bytes changed."""
    cut = [data[:size] for size in range(0, len(data), 37)]
    draw = random.Random(7)
    for count in (1, 1, 1, 3, 20):
        for _ in range(60):
            flipped = bytearray(data)
            for at in draw.sample(range(len(data)), count):
                flipped[at] ^= draw.randrange(1, 256)
            cut.append(bytes(flipped))
    return cut


@pytest.mark.parametrize("place", ["local", "remote"])
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files(name: str, place: str, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    FORMATS[name].write(table(), whole)
    files = damaged(whole.read_bytes())
    folder = tmp_path / "damaged"
    folder.mkdir()
    for i, data in enumerate(files):
        (folder / f"{i:04}").write_bytes(data)
    command = [sys.executable, column_files.__file__, name, str(folder), place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, ""), (lines[-1:], done.stderr)
    assert len(lines) == len(files)
    kinds = {line.partition(" ")[2] for line in lines}
    assert kinds <= {"rows", "other rows", "MalformedFileError", "UnsupportedError", "SchemaError", "StorageError"} | {
        "ShapeError",
        "NullValueError",
        "OutOfMemoryError",
        "ArrowMemoryError",
        "LimitError",
    }
    truncated = [line for line in lines if int(line[:4]) * 37 < whole.stat().st_size]
    assert all(line.endswith("MalformedFileError") for line in truncated)


# --- Changed files ---

CHANGES = {
    "another": lambda form, path: form.write(table(31), path),
    "cut short": lambda form, path: os.truncate(path, 200),
    "touched": lambda form, path: os.utime(path, ns=(1, 1)),
    "replaced": lambda form, path: (form.write(table(30, 5), f"{path}.new"), os.replace(f"{path}.new", path)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change(form: Format, folder: Path, change: str) -> None:
    form.write(table(), "file")
    os.utime("file", ns=(10**18, 10**18))
    readers = [form.read("file", batch_size=7) for _ in range(2)]
    pickled = pickle.dumps(form.read("file", batch_size=7))
    state = readers[0].state_dict()
    CHANGES[change](form, "file")
    with pytest.raises(fastpipe.FastpipeError) as error:
        list(readers[0])
    assert isinstance(error.value, (fastpipe.errors.StorageError, fastpipe.errors.MalformedFileError))
    assert error.value.path == "file"
    with pytest.raises(fastpipe.errors.StorageError, match="the file changed after the reader was created"):
        pickle.loads(pickled)
    if change == "another":
        with pytest.raises(fastpipe.errors.StateError):
            form.read("file", batch_size=7).load_state_dict(state)
    os.unlink("file")
    with pytest.raises(fastpipe.errors.MissingFileError):
        list(readers[1])
    with pytest.raises(fastpipe.errors.MissingFileError):
        pickle.loads(pickled)


class Failing(pyarrow.fs.FileSystemHandler):
    """A file system that fails after `good` successful calls."""

    def __init__(self, error: Exception, good: int) -> None:
        self.error, self.good = error, good
        self.inner = pyarrow.fs.LocalFileSystem()

    def open_input_file(self, path: str) -> Any:
        self.good -= 1
        if self.good < 0:
            raise self.error
        return self.inner.open_input_file(path)

    def get_file_info(self, paths: list[str]) -> Any:
        return self.inner.get_file_info(paths)

    def normalize_path(self, path: str) -> str:
        return path

    def get_type_name(self) -> str:
        return "failing"

    def _none(self, *arguments: Any) -> Any:
        raise NotImplementedError

    copy_file = create_dir = delete_dir = delete_dir_contents = delete_file = delete_root_dir_contents = _none
    get_file_info_selector = move = open_append_stream = open_input_stream = open_output_stream = _none


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError(13, "no entry"), fastpipe.errors.StorageError),
        (OSError(5, "broken disk"), fastpipe.errors.StorageError),
        (FileNotFoundError(2, "gone"), fastpipe.errors.MissingFileError),
        (OSError("When reading: AWS Error NETWORK_CONNECTION during GetObject"), fastpipe.errors.StorageError),
        (KeyError("a bug of the file system's"), KeyError),
    ],
    ids=repr,
)
@pytest.mark.parametrize("good", [0, 1])
def test_file_systems_that_fail(form: Format, folder: Path, error: Exception, kind: Any, good: int) -> None:
    form.write(table(), folder / "file")
    system = pyarrow.fs.PyFileSystem(Failing(error, good))
    with pytest.raises(kind) as raised:
        list(form.read(str(folder / "file"), batch_size=7, filesystem=system))
    assert type(raised.value) is kind
    if isinstance(raised.value, fastpipe.FastpipeError):
        assert raised.value.path == str(folder / "file")
        assert (raised.value.unit is None) == (good == 0)


# --- Remote files ---


class Counted(pyarrow.fs.FileSystemHandler):
    """A file system that counts reads. Each read waits until `wanted` reads have been in progress at once."""

    def __init__(self, wanted: int = 1) -> None:
        self.inner = pyarrow.fs.LocalFileSystem()
        self.wanted, self.reads, self.now, self.most = wanted, 0, 0, 0
        self.changed = threading.Condition()

    def begin(self) -> None:
        with self.changed:
            self.reads, self.now = self.reads + 1, self.now + 1
            self.most = max(self.most, self.now)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.most >= self.wanted, timeout=500)
            self.now -= 1

    def open_input_file(self, path: str) -> Any:
        return pa.PythonFile(CountedFile(self, path), "r")

    def get_file_info(self, paths: list[str]) -> Any:
        return self.inner.get_file_info(paths)

    def normalize_path(self, path: str) -> str:
        return path

    def get_type_name(self) -> str:
        return "counted"

    def _none(self, *arguments: Any) -> Any:
        raise NotImplementedError

    copy_file = create_dir = delete_dir = delete_dir_contents = delete_file = delete_root_dir_contents = _none
    get_file_info_selector = move = open_append_stream = open_input_stream = open_output_stream = _none


class CountedFile(io.FileIO):
    def __init__(self, system: Counted, path: str) -> None:
        super().__init__(path)
        self.system = system

    def read(self, size: int | None = -1) -> Any:
        self.system.begin()
        return super().read(size)


def wide(rows: int) -> Any:
    """Returns columns of all kinds. Uncompressed, a thousand rows have hundreds of kilobytes."""
    draw = np.random.default_rng(1)
    texts = [draw.bytes(60).hex() for _ in range(rows)]
    schema = pa.schema([pa.field("n", pa.int64(), False), ("f", pa.float64()), ("t", pa.string()), ("m", pa.int64())])
    return pa.table({"n": range(rows), "f": draw.random(rows), "t": texts, "m": [None, 1] * (rows // 2)}, schema)


def test_as_many_requests_as_fetches(form: Format, folder: Path) -> None:
    form.write(wide(2000), folder / "file", rows=40)
    counted = Counted()
    system = pyarrow.fs.PyFileSystem(counted)
    reader = form.read(str(folder / "file"), filesystem=system, batch_size=2000, num_fetches=24, num_threads=1)
    counted.wanted, counted.most = 16, 0
    (batch,) = reader
    assert batch["n"].tolist() == list(range(2000))
    assert 16 <= counted.most <= 24, "pyarrow's own limit is eight threads"


def test_few_requests(form: Format, folder: Path) -> None:
    expected = wide(4000)
    form.write(expected, folder / "file", rows=1000)
    counted = Counted()
    system = pyarrow.fs.PyFileSystem(counted)

    def read(**options: Any) -> tuple[list[dict[str, Any]], int, int]:
        counted.reads = 0
        reader = form.read(str(folder / "file"), filesystem=system, batch_size=500, **options)
        opened, counted.reads = counted.reads, 0
        return [row for batch in reader for row in column_files.as_rows(batch)], opened, counted.reads

    found, opened, reads = read()
    assert found == expected.to_pylist()
    assert (opened <= 3, reads) == (True, 4), "expected one request per unit"
    found, _, reads = read(columns=["n", "m"])
    assert found == expected.select(["n", "m"]).to_pylist()
    assert reads <= 8, "unneeded bytes between the columns may need extra requests"


def test_arrow_files_are_opened_by_few_requests(folder: Path) -> None:
    FORMATS["arrow"].write(table(640), folder / "file", rows=10)
    counted = Counted()
    reader = fastpipe.read_arrow(str(folder / "file"), filesystem=pyarrow.fs.PyFileSystem(counted), batch_size=640)
    assert counted.reads <= 3
    assert [row for batch in reader for row in column_files.as_rows(batch)] == table(640).to_pylist()


@pytest.mark.parametrize("error", [OSError(5, "broken wire"), KeyError("a bug of the file system's")], ids=repr)
def test_requests_that_fail(form: Format, folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error may come from any of a unit's requests, on any thread."""
    monkeypatch.setattr("fastpipe.units._files._HOLE", 0)
    monkeypatch.setattr("fastpipe.units._files._LARGEST", 1)
    form.write(wide(1000), folder / "file", rows=500)
    counted = Counted()
    path = str(folder / "file")
    reader = form.read(path, filesystem=pyarrow.fs.PyFileSystem(counted), batch_size=100)

    def fail() -> None:
        counted.reads += 1
        if counted.reads % 3 == 0:
            raise error

    counted.reads = 0
    monkeypatch.setattr(counted, "begin", fail)
    expected = fastpipe.errors.StorageError if isinstance(error, OSError) else KeyError
    with pytest.raises(expected):
        [list(reader) for _ in range(3)]


# --- Metadata ---


def test_metadata_of_any_bytes(form: Format, folder: Path) -> None:
    fields = [pa.field("x", pa.int64(), metadata={b"\xff": b"\xfe"}), pa.field("y", pa.string())]
    strange = pa.schema(fields, metadata={b"a": b"\xff\xfe", b"b": b"b"})
    written = pa.table({"x": [1, 2], "y": ["a", "b"]}, strange)
    form.write(written, "file")
    for columns in (None, ["x"], ["y"]):
        assert form.rows("file", columns=columns) == written.select(columns or ["x", "y"]).to_pylist()
    (batch,) = fastpipe.from_arrow(written, batch_size=2)
    assert batch["x"].tolist() == [1, 2]


@pytest.mark.parametrize("columns", [None, ["x"], ["z"]])
def test_columns_of_nulls(form: Format, folder: Path, columns: list[str] | None) -> None:
    kinds = {"x": pa.int64(), "z": pa.null(), "l": pa.list_(pa.null())}
    for number, metadata in enumerate([{"a": "1"}, {"a": "2"}]):
        schema = pa.schema(kinds, metadata=metadata)
        form.write(pa.table({"x": [number], "z": [None], "l": [[None, None]]}, schema), f"{number}{form.suffix}")
    form.write(pa.table({"x": [], "z": [], "l": []}, schema), f"2{form.suffix}")
    expected = [{"x": x, "z": None, "l": [None, None]} for x in (0, 1)]
    assert form.rows(folder, columns=columns) == [{name: row[name] for name in columns or row} for row in expected]
    assert form.rows(f"2{form.suffix}", columns=columns) == []


def test_maps_with_keys_of_structs(form: Format, folder: Path) -> None:
    kind = pa.map_(pa.struct({"a": pa.int64(), "b": pa.string()}), pa.int8())
    written = pa.table({"m": pa.array([[({"a": 1, "b": "x"}, 7)], [], [({"a": 2, "b": "y"}, 8)] * 2], kind)})
    form.write(written, "file")
    found = {"m.keys.a": [[1], [], [2, 2]], "m.keys.b": [["x"], [], ["y", "y"]], "m.values": [[7], [], [8, 8]]}
    expected = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    assert form.rows("file") == expected
    (batch,) = fastpipe.from_arrow(written, batch_size=3)
    assert column_files.as_rows(batch) == expected
    assert form.rows("file", columns=["m.keys.b"]) == [{"m.keys.b": row["m.keys.b"]} for row in expected]
    with pytest.raises(fastpipe.errors.SchemaError, match=r"'m\.keys\.b' is of type Utf8, which has no fields"):
        form.rows("file", features={"x": fastpipe.RaggedSpec((None,), "int64", field="m.keys.b.c")})


def test_files_are_closed(form: Format, folder: Path) -> None:
    psutil = pytest.importorskip("psutil")
    form.write(table(1000), "file")
    form.rows("file")
    assert len(form.rows("file")) == 1000
    until(lambda: not [file for file in psutil.Process().open_files() if file.path.endswith("/file")])
