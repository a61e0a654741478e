"""Expanding the names that users pass to files: folders, globs, links, and arguments that aren't paths."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import wire
from fastpipe._files._paths import alternatives, expand

links = pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a privilege")

Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Creates a folder of files and links (`name -> target`), and makes it the working directory."""

    def make(*names: str) -> Path:
        for name in names:
            path, _, target = name.partition(" -> ")
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            if target:
                (tmp_path / path).symlink_to(target, target_is_directory=True)
            else:
                (tmp_path / path).write_bytes(b"x")
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return make


COMMITTED = ("d/a.avro", "d/date=1/b.avro", "d/date=1/c.avro", "d/date=2/part/e.avro")
NOT_COMMITTED = (
    "d/_SUCCESS",
    "d/_x.avro",
    "d/.x.avro",
    "d/_temporary/0/x.avro",
    "d/.hive-staging_x/x.avro",
    "d/date=1/_temporary/x.avro",
    "d/date=1/.x/x.avro",
    "d/date=1/note.txt",
)


def test_directories_skip_uncommitted_files(tree: Tree) -> None:
    tree(*COMMITTED, *NOT_COMMITTED)
    assert expand("d") == list(COMMITTED)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("d/**/*.avro", COMMITTED),
        ("./d/**/*.avro", [f"./{name}" for name in COMMITTED]),
        ("d/**/**/*.avro", COMMITTED),
        ("d/**", [*COMMITTED[:3], "d/date=1/note.txt", COMMITTED[3]]),
        ("d/*", COMMITTED[:1]),
        ("*/*.avro", COMMITTED[:1]),
        ("d/*/*.avro", COMMITTED[1:3]),
        ("d/**/part/*.avro", COMMITTED[3:]),
        ("d/**/part/**/*.avro", COMMITTED[3:]),
        ("d/date=[12]/[bx].avro", COMMITTED[1:2]),
        ("d/date=?/b.avro", COMMITTED[1:2]),
        ("d/_*", ["d/_SUCCESS", "d/_x.avro"]),
        ("d/.*", ["d/.x.avro"]),
        ("d/_*/**/*.avro", ["d/_temporary/0/x.avro"]),
        ("d/.hive-staging_x/*.avro", ["d/.hive-staging_x/x.avro"]),
        ("d/*/_temporary/*.avro", ["d/date=1/_temporary/x.avro"]),
    ],
)
def test_globs_skip_uncommitted_files_unless_named(tree: Tree, pattern: str, expected: Any) -> None:
    folder = tree(*COMMITTED, *NOT_COMMITTED)
    assert expand(pattern) == list(expected)
    if not pattern.startswith("."):
        assert expand(folder / pattern) == [str(folder / name) for name in expected]


@pytest.mark.parametrize("name", [name for name in NOT_COMMITTED if name.endswith(".avro")])
def test_explicit_paths_are_read_regardless_of_name(tree: Tree, name: str) -> None:
    tree(*COMMITTED, *NOT_COMMITTED)
    assert expand(name) == [name]
    assert name in expand(os.path.dirname(name)) or os.path.basename(name).startswith(("_", "."))


@links
@pytest.mark.parametrize("source", ["d", "d/**/*.avro"])
def test_links_are_followed_and_each_folder_is_visited_once(tree: Tree, source: str) -> None:
    tree("d/a/x.avro", "d/a/loop -> ../..", "d/b -> a", "d/0 -> ../e", "d/1 -> ../e", "e/y.avro", "e/deep/z.avro")
    # A folder is listed under its real name if it is in the tree, else under the first of its links. Files of a link
    # cycle are also listed under their first name.
    assert expand(source) == ["d/0/deep/z.avro", "d/0/y.avro", "d/a/x.avro"]


@links
def test_a_glob_and_a_directory_agree_on_links(tree: Tree) -> None:
    tree("real/x.avro", "d/b -> ../real", "d/a -> ../real", "d/y.avro -> ../real/x.avro", "d/z.avro -> ../real/x.avro")
    # A file that is linked twice is read twice, as Hadoop does. A folder is read once.
    assert expand("d") == expand("d/**/*.avro") == ["d/a/x.avro", "d/y.avro", "d/z.avro"]
    assert expand("d/*/x.avro") == ["d/a/x.avro"]
    assert expand(["d/a", "d/b"]) == ["d/a/x.avro", "d/b/x.avro"], "sources named twice are read twice"


@links
def test_linked_rows_are_read_once(tmp_path: Path) -> None:
    schema = wire.record("R", id="long")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.avro").write_bytes(wire.container(schema, [(200, wire.longs(*range(200)))]))
    (tmp_path / "d" / "again").symlink_to(tmp_path / "d", target_is_directory=True)
    (tmp_path / "d" / "_temporary").mkdir()
    (tmp_path / "d" / "_temporary" / "x.avro").write_bytes((tmp_path / "d" / "x.avro").read_bytes())
    for source in (tmp_path / "d", tmp_path / "d" / "**" / "*.avro"):
        assert fastpipe.read_avro(source, batch_size=10).num_rows == 200


@links
@pytest.mark.parametrize("target", ["gone", "x.avro"])
@pytest.mark.parametrize("source", ["d", "d/**/*.avro", "d/*.avro", "d/x.avro", ["d/x.avro"], "*/x.avro"])
def test_dangling_links_are_named_with_their_target(tree: Tree, source: Any, target: str) -> None:
    tree(f"d/x.avro -> {target}", "d/y.avro")
    with pytest.raises(
        fastpipe.errors.MissingFileError, match=f"leads to '{target}', which does not exist.*d/x.avro"
    ) as error:
        expand(source)
    assert error.value.path == "d/x.avro"


@links
def test_hidden_links_may_dangle(tree: Tree) -> None:
    tree("d/.#x.avro -> someone@host.1", "d/_current -> gone", "d/y.avro", "d/readme.txt -> gone")
    assert expand("d/*.avro") == ["d/y.avro"]
    os.unlink("d/readme.txt")
    assert expand("d") == ["d/y.avro"]


@pytest.mark.parametrize("source", ["d", "d/**/*.avro", "d/*/x.avro"])
def test_unreadable_folders_are_refused(tree: Tree, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree("d/a.avro", "d/locked/x.avro")
    scandir = os.scandir
    locked = os.path.join("d", "locked") if source != "d/*/x.avro" else "d"

    def refusing(path: str) -> Any:
        if path == locked:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(
        fastpipe.errors.StorageError, match=f"can't be read: Permission denied .folder {locked}"
    ) as error:
        expand(source)
    assert (error.value.errno, error.value.path) == (13, locked)
    assert isinstance(pickle.loads(pickle.dumps(error.value)), OSError)


@pytest.mark.parametrize("source", ["d", "d/*.avro", "e/*.avro", [], "d/*/"])
def test_nothing_found_is_an_error(tree: Tree, source: Any) -> None:
    tree("d/_x.avro", "d/e/x.txt")
    with pytest.raises(fastpipe.errors.MissingFileError, match=r"contains no|no file matches|is empty"):
        expand(source)


def test_a_directory_uses_the_first_suffix_that_exists(tree: Tree) -> None:
    tree("a/1.x", "a/deep/2.x", "a/0.y", "b/3.y", "b/_4.x", "b/.5.x", "c/6.z", "b/7.xz")
    suffixes = (".x", ".y")
    assert expand("a", suffixes) == ["a/1.x", "a/deep/2.x"]
    assert expand(["b", "a"], suffixes) == ["b/3.y", "a/1.x", "a/deep/2.x"], "each directory has its own suffix"
    assert expand("a", (".y", ".x")) == ["a/0.y"]
    assert expand(["c/6.z", "*/*.y"], suffixes) == ["c/6.z", "a/0.y", "b/3.y"], "suffixes apply only to directories"
    for source in ("c", ["a", "c"]):
        with pytest.raises(
            fastpipe.errors.MissingFileError, match=r"no file that ends in \.x or \.y \(file c\)"
        ) as error:
            expand(source, suffixes)
        assert error.value.path == "c"


def test_the_home_directory(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tree("x.avro", "d/y.avro")
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(folder))
    assert expand("~/x.avro") == expand(Path("~") / "x.avro") == [str(folder / "x.avro")]
    assert expand("~/d") == expand("~/*/*.avro") == [str(folder / "d" / "y.avro")]
    tree("~/x.avro")
    assert expand("~/x.avro") == ["~/x.avro"], "an existing path is used literally"
    assert expand("~nobody-of-this-name/x.avro") == ["~nobody-of-this-name/x.avro"]


@pytest.mark.parametrize("url", ["HDFS://n:1/x", "file://host/x.avro"])
def test_urls_are_refused_by_their_scheme(url: str) -> None:
    with pytest.raises(
        fastpipe.errors.UnsupportedError, match=f"{url.split(':')[0]}:// URL can't be read here"
    ) as error:
        fastpipe.read_avro(url, batch_size=1)
    assert error.value.path == url
    assert isinstance(error.value, ValueError)


def test_urls_of_local_files_are_read(tree: Tree) -> None:
    folder = tree("a b.avro")
    assert expand((folder / "a b.avro").as_uri()) == [str(folder / "a b.avro")]
    if sys.platform != "win32":
        assert expand(f"file://localhost{folder}/*.avro") == [str(folder / "a b.avro")]
        tree("s3:/x.avro")
        assert expand("s3://x.avro") == ["s3://x.avro"], "an existing path is used literally"


@pytest.mark.parametrize("source", [b"Obj", bytearray(3), memoryview(b"x"), io.BytesIO(), io.StringIO()])
@pytest.mark.parametrize("listed", [False, True])
def test_contents_are_not_paths(source: Any, listed: bool) -> None:
    with pytest.raises(TypeError, match="AvroFile accept open files and bytes"):
        expand([source] if listed else source)


def test_other_types_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file, pytest.raises(TypeError, match="got BufferedWriter"):
        expand(file)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of these; got int"):
        expand(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of these; got 3"):
        expand(["x", 3])  # type: ignore[list-item]


def test_functions_of_one_file_accept_the_same_names(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tree()
    (folder / "x.avro").write_bytes(wire.container('"long"', [(1, wire.long(1))]))
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(folder))
    for path in ("~/x.avro", (folder / "x.avro").as_uri(), folder / "x.avro"):
        assert len(fastpipe.avro.AvroFile(path)) == 1
    with pytest.raises(fastpipe.errors.UnsupportedError, match="hdfs://"):
        fastpipe.avro.AvroFile("hdfs://x.avro")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems restrict the encoding of file names")
@pytest.mark.parametrize("name", [b"\xe4.avro", b"\xc3.avro", "ä😀.avro".encode()])
def test_names_that_are_not_utf_8(tmp_path: Path, name: bytes) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    with open(path, "wb") as file:
        file.write(wire.container(wire.record("R", id="long"), [(3, wire.longs(1, 2, 3)), (1, b"\xff" * 10)]))
    text = os.fsdecode(path)
    cache = tmp_path / "cache"
    for source in (text, [text], str(tmp_path), str(tmp_path / "*.avro"), Path(text)):
        reader = fastpipe.read_avro(source, batch_size=3, columns=["id"], index_cache=cache)
        batches = iter(reader)
        assert next(batches)["id"].tolist() == [1, 2, 3]
        assert reader.files == [text]
        assert reader.locate(0, 1).file == text
        assert reader.state_dict() == pickle.loads(pickle.dumps(reader.state_dict()))
        with pytest.raises(fastpipe.errors.MalformedFileError) as error:
            next(batches)
        assert error.value.path == text
        shown = os.path.basename(text).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        assert shown in str(error.value)
    assert fastpipe.avro.AvroFile(text).path == text
    os.unlink(path)
    with pytest.raises(fastpipe.errors.MissingFileError) as missing:
        fastpipe.avro.AvroFile(text)
    assert missing.value.filename == text
    with pytest.raises(fastpipe.errors.StorageError):
        fastpipe.avro.AvroFile("a\0b")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("d/{b,a}.avro", ["d/b.avro", "d/a.avro"]),
        ("d/{a,b}.avro", ["d/a.avro", "d/b.avro"]),
        ("d/{a,{b,c}}.avro", ["d/a.avro", "d/b.avro", "d/c.avro"]),
        ("{d/a,e/x}.avro", ["d/a.avro", "e/x.avro"]),
        ("{e,d}", ["e/x.avro", "d/a.avro", "d/b.avro", "d/c.avro"]),
        ("d/{[ab],b}*.avro", ["d/a.avro", "d/b.avro"]),
        ("d/a{,}.avro", ["d/a.avro"]),
        ("f{1,2}/y*.avro", ["f{1,2}/y.avro"]),
        ("f{1,2}/{y,z*}.avro", ["f{1,2}/y.avro", "f{1,2}/z.txt.avro"]),
        ("g[1]/*.avro", ["g[1]/w.avro"]),
        ("*/w[1].avro", ["g[1]/w[1].avro"]),
        ("g*/w[1].avro", ["g[1]/w[1].avro"]),
    ],
)
def test_braces_and_names_that_look_like_patterns(tree: Tree, source: str, expected: list[str]) -> None:
    tree(
        "d/a.avro", "d/b.avro", "d/c.avro", "e/x.avro", "f{1,2}/y.avro", "f{1,2}/z.txt.avro", "g[1]/w.avro", "g1/v.avro"
    )
    if "w[1]" in source:
        tree("g[1]/w[1].avro", "g1/w1.avro")
        # In each folder a literal name is used if it exists, else the pattern.
        expected = ["g1/w1.avro", *expected]
    assert expand(source) == expected


def test_alternatives() -> None:
    expected = {
        "a": ["a"],
        "{a}": ["{a}"],
        "{1..3}": ["{1..3}"],
        "a{b,c}d{e,f}": ["abde", "abdf", "acde", "acdf"],
        "{a,b{c,d}}": ["a", "bc", "bd"],
        "{a{b,c}}": ["{ab}", "{ac}"],
        "{a,b": ["{a,b"],
        "a,b}": ["a,b}"],
        "{{a,b}": ["{a", "{b"],
        "{,x}y": ["y", "xy"],
    }
    assert {text: alternatives(text) for text in expected} == expected
    for text in ("{a,b}" * 14, "{" * 65):
        with pytest.raises(fastpipe.errors.LimitError, match="pass a list of paths"):
            alternatives(text)


def test_every_alternative_must_match(tree: Tree) -> None:
    tree("d/a.avro", "$X/b.avro")
    with pytest.raises(fastpipe.errors.MissingFileError, match=r"no file matches the pattern .file d/b\*"):
        expand("d/{a,b}*.avro")
    assert expand("$X/*.avro") == ["$X/b.avro"], "environment variables must not be expanded"


UNFINISHED = ("x.avro.inprogress", "x.avro.inprogress.17-4", "x.tmp", "x.avro._COPYING_", "x.avro.crc", "x.TMP")


def test_files_being_written_are_skipped(tree: Tree) -> None:
    tree("d/x.avro", "d/x.tmp.avro", *(f"d/{name}" for name in UNFINISHED), "d/y.tmp/z.avro")
    assert expand("d") == ["d/x.avro", "d/x.tmp.avro", "d/y.tmp/z.avro"]
    assert expand("d/*") == ["d/x.avro", "d/x.tmp.avro"]
    assert expand("d/*.crc") == ["d/x.avro.crc"]
    assert expand("d/*.inprogress*") == ["d/x.avro.inprogress", "d/x.avro.inprogress.17-4"]
    for name in UNFINISHED:
        assert expand(f"d/{name}") == [f"d/{name}"]


@pytest.mark.parametrize(
    ("names", "pattern"),
    [(["d/000000_0", "d/000001_0"], "d/*"), (["d/day=1/part-00000", "d/day=1/part-00001"], "d/**/*")],
)
def test_the_error_names_a_pattern_for_files_without_suffix(tree: Tree, names: list[str], pattern: str) -> None:
    tree(*names, "d/_SUCCESS")
    with pytest.raises(fastpipe.errors.MissingFileError, match="without a suffix, such as") as error:
        expand("d")
    assert repr(pattern) in str(error.value)
    assert expand(pattern) == names


NAMES = st.sampled_from(
    [
        "a.avro",
        "b.avro",
        "part-0",
        "_a.avro",
        ".b.avro",
        "c.avro.crc",
        "d.avro.inprogress.1",
        "e.tmp",
        "_SUCCESS",
        "z.avro",
    ]
)
FOLDERS = st.sampled_from(["p", "q", "k=1", "k=2", "_temporary", ".hidden", "x.tmp"])


@links
@settings(max_examples=150, deadline=None)
@given(
    files=st.dictionaries(
        st.tuples(st.lists(FOLDERS, max_size=3).map(tuple), NAMES), st.integers(0, 1), min_size=1, max_size=14
    ),
    linked=st.lists(st.tuples(st.lists(FOLDERS, max_size=2).map(tuple), st.integers(0, 30)), max_size=3),
)
def test_generated_trees(
    tmp_path_factory: pytest.TempPathFactory, files: dict[tuple[tuple[str, ...], str], int], linked: list[Any]
) -> None:
    root = tmp_path_factory.mktemp("tree") / "d"
    root.mkdir()
    for (folders, name), size in files.items():
        path = root.joinpath(*folders, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    # Links to folders of the tree, including cycles, change nothing: each folder has its own name, unless it is hidden.
    below = sorted(path for path in [root, *root.rglob("*")] if path.is_dir() and not path.is_symlink())
    hidden = lambda path: any(part[0] in "_." for part in path.relative_to(root).parts)  # noqa: E731
    visible = [path for path in below if not hidden(path)]
    for number, (folders, target) in enumerate(linked):
        parent = root.joinpath(*folders)
        if parent.is_dir():
            (parent / f"link{number}").symlink_to(visible[target % len(visible)], target_is_directory=True)
    expected = sorted(
        str(path)
        for path in (root.joinpath(*folders, name) for (folders, name), size in files.items() if size)
        if path.suffix == ".avro" and not hidden(path)
    )
    sources = [root, root / "**" / "*.avro"]
    for source in sources:
        if expected:
            assert expand(source) == expected
        else:
            with pytest.raises(fastpipe.errors.MissingFileError):
                expand(source)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files_are_refused(tree: Tree) -> None:
    folder = tree("d/a.avro")
    (folder / "d/a.avro").chmod(0)
    with pytest.raises(fastpipe.errors.StorageError, match="ermission"):
        fastpipe.read_avro("d", batch_size=1)
