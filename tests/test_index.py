"""The block index cache: blocks are the same with and without it, even if files or entries change or are damaged."""

from __future__ import annotations

import logging
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path
from typing import Any

import fastavro
import pytest

import fastpipe
import fixtures
import wire
from fastpipe import _fastpipe, cli
from fastpipe._files import _index_cache
from fastpipe._files._in_memory_files import lowered
from fastpipe.cli import _index
from fixtures import Run

# Files that are read completely together with their header have no entry, so the header is padded.
PADDING = "x" * (64 << 10)
SCHEMA = wire.record("Row", id="long", text="string") | {"doc": PADDING}
LONG = {"type": "long", "doc": PADDING}
LONG_AGO = 1_600_000_000_123_456_789
PREFIX = 12  # Magic bytes and checksum.


def aged(path: Path, modified: int = LONG_AGO) -> Path:
    """Sets an old timestamp, because recently modified files are not indexed."""
    os.utime(path, ns=(modified, modified))
    return path


def write(path: Path, rows: int = 200, codec: str = "deflate", block: int = 100, first: int = 0) -> Path:
    records = [{"id": i, "text": "x" * (i % 7)} for i in range(first, first + rows)]
    with path.open("wb") as file:
        fastavro.writer(file, SCHEMA, records, codec=codec, sync_interval=block, sync_marker=wire.SYNC)
    return aged(path)


def ids(source: Any, cache: Any, **options: Any) -> list[int]:
    with fastpipe.read_avro(source, columns=["id"], batch_size=64, index_cache=cache, **options) as reader:
        return [i for batch in reader for i in batch["id"].tolist()]


def entry(cache: Path) -> Path:
    """Returns the only entry of a cache."""
    (path,) = cache.iterdir()
    return path


def overwrite(path: Path, data: bytes, modified: int | None = None) -> None:
    """Changes the content of a file, but keeps its timestamp unless `modified` is passed."""
    before = path.stat().st_mtime_ns
    path.write_bytes(data)
    aged(path, before if modified is None else modified)


def sealed(data: bytes) -> bytes:
    """Returns an entry's bytes with a matching checksum."""
    return data[: PREFIX - 4] + zlib.crc32(data[PREFIX:]).to_bytes(4, "little") + data[PREFIX:]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.avro")


# --- The same blocks ---


@pytest.mark.parametrize("codec", wire.CODECS)
def test_batches_are_the_same_with_and_without(codec: str, tmp_path: Path, cache: Path) -> None:
    numbers = random.Random(codec)
    files = [
        write(tmp_path / f"{i}.avro", numbers.randrange(400), codec, numbers.choice([1, 50, 500, 16_000]), 1000 * i)
        for i in range(12)
    ]
    expected = ids(files, None)
    written: dict[Path, float] = {}
    for _ in range(3):
        assert ids(files, cache) == expected
        entries = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
        assert len(entries) == len(files)
        assert entries == (written or entries)
        written = entries
    for file in files:
        blocks = fastpipe.avro.AvroFile(file).blocks
        counted = _fastpipe.index_file(lowered([str(file)], cache), lambda behind: None)
        assert counted[:3] == (len(blocks), blocks["rows"].sum(), file.stat().st_size)
        assert counted[4] == "before"


def test_a_second_opening_reads_no_block(path: Path, cache: Path) -> None:
    expected = ids(path, cache)
    data = path.read_bytes()
    start = int(fastpipe.avro.AvroFile(path).blocks["offset"][0])
    # Only the header is left intact. Size and timestamp don't reveal the change.
    overwrite(path, data[:start] + bytes(len(data) - start))
    with pytest.raises(fastpipe.errors.MalformedFileError):
        fastpipe.avro.AvroFile(path).blocks  # noqa: B018
    for file in (path, str(path), os.path.relpath(path)):
        with fastpipe.read_avro(file, features=features(), batch_size=10, index_cache=cache) as reader:
            assert reader.num_rows == len(expected)
            with pytest.raises(fastpipe.errors.StorageError, match="changed since the file was indexed") as error:
                next(iter(reader))
        assert (error.value.block, error.value.offset) == (0, start)


def features() -> dict[str, fastpipe.DenseSpec]:
    return {"id": fastpipe.DenseSpec((), "int64")}


def test_features_are_inferred_with_the_cache(path: Path, cache: Path) -> None:
    assert fastpipe.infer_features(path, index_cache=cache) == fastpipe.infer_features(path)
    assert entry(cache).stat().st_size > PREFIX


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links need a privilege")
def test_names_of_one_file_share_an_entry(path: Path, cache: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.avro"
    link.symlink_to(path)
    assert ids(path, cache) == ids(link, cache)
    assert entry(cache)


def test_a_file_without_blocks_and_blocks_without_records(tmp_path: Path, cache: Path) -> None:
    header = wire.header(LONG)
    empty = tmp_path / "empty.avro"
    empty.write_bytes(header)
    hollow = tmp_path / "hollow.avro"
    hollow.write_bytes(header + wire.block(0, b"") + wire.block(1, wire.long(7)) + wire.block(0, b""))
    for _ in range(2):
        with fastpipe.read_avro([aged(empty), aged(hollow)], batch_size=4, index_cache=cache) as reader:
            assert [batch["value"].tolist() for batch in reader] == [[7]]
    assert len(list(cache.iterdir())) == 2


# --- Files that change ---


@pytest.mark.parametrize("what", ["size", "modified", "marker"])
def test_a_changed_file_is_walked_again(what: str, path: Path, cache: Path, tmp_path: Path) -> None:
    ids(path, cache)
    old = entry(cache).read_bytes()
    if what == "size":
        other = write(tmp_path / "other.avro", 300).read_bytes()
        overwrite(path, other)
        assert ids(path, cache) == list(range(300))
    elif what == "modified":
        other = write(tmp_path / "other.avro", first=1).read_bytes()
        overwrite(path, other, LONG_AGO + 1)
        assert ids(path, cache) == list(range(1, 201))
    else:
        overwrite(path, path.read_bytes().replace(wire.SYNC, wire.SYNC[::-1]))
        assert ids(path, cache) == list(range(200))
    assert entry(cache).read_bytes() != old


def test_recently_modified_files_are_not_stored(path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fastpipe")
    # The second file could be mistaken for the first: its size is the same, and it is modified within one tick of a
    # coarse clock.
    for first in (0, 100_000):
        write(path, 100, "null", 50, 100 + first)
        # Up to a minute in the future, which a busy machine may need to read the file.
        aged(path, time.time_ns() + 60_000_000_000)
        assert ids(path, cache)[0] == 100 + first
    assert not list(cache.iterdir())
    assert "was not saved" in caplog.text


def test_a_file_that_changes_during_the_walk_is_not_stored(path: Path, cache: Path) -> None:
    # The first call comes before the file is opened.
    counted = _fastpipe.index_file(lowered([str(path)], cache), lambda behind: behind and aged(path, LONG_AGO + 1))
    assert counted[4] == "changed"
    assert not list(cache.iterdir())


# --- Damaged entries ---


def test_every_cut_and_every_changed_byte_of_an_entry(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "x.avro", 20, "null", 40)
    expected = ids(path, cache)
    whole = entry(cache).read_bytes()
    damaged = [whole[:n] for n in range(len(whole))]
    damaged += [whole[:n] + bytes([whole[n] ^ mask]) + whole[n + 1 :] for n in range(len(whole)) for mask in (1, 255)]
    damaged += [whole + b"\0", whole * 2, bytes(1000)]
    for data in damaged:
        caplog.clear()
        entry(cache).write_bytes(data)
        assert ids(path, cache, num_threads=1) == expected
        assert entry(cache).read_bytes() == whole
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("fastpipe", logging.WARNING)
        assert str(path) in record.getMessage()
        assert str(entry(cache)) in record.getMessage()


def test_outdated_entries_are_not_reported_as_damage(path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    for blocks in (10_000, 3, 10_000):
        path.write_bytes(wire.container(LONG, [(1, wire.long(1))] * blocks))
        with fastpipe.read_avro(aged(path), batch_size=4, index_cache=cache) as reader:
            assert reader.num_rows == blocks
    assert entry(cache)
    assert not caplog.records


@pytest.mark.parametrize("codec", ["null", "deflate"])
def test_forged_entries_never_yield_other_rows(codec: str, tmp_path: Path, cache: Path) -> None:
    """Checksums are not signatures, so a forged entry can have a valid checksum."""
    path = write(tmp_path / "x.avro", 30, codec, 20)
    expected = ids(path, cache)
    whole = entry(cache).read_bytes()
    numbers = random.Random(codec)
    start = PREFIX + len(os.path.realpath(path))  # All earlier bytes are about the path.
    wrong = 0
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(numbers.choice([1, 1, 2, 4])):
            data[numbers.randrange(start, len(data))] = numbers.choice([0, 1, 2, 127, 128, 255, numbers.randrange(256)])
        entry(cache).write_bytes(sealed(bytes(data)))
        try:
            assert ids(path, cache, num_threads=1) == expected
        except (fastpipe.errors.MalformedFileError, fastpipe.errors.StorageError) as error:
            wrong += 1
            assert error.path == str(path)  # noqa: PT017
    assert wrong


def test_an_entry_cannot_hide_records(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "x.avro"
    path.write_bytes(wire.container(LONG, [(1, wire.long(i)) for i in range(3)]))
    expected = [0, 1, 2]
    for _ in range(2):
        with fastpipe.read_avro(aged(path), batch_size=4, index_cache=cache) as reader:
            assert next(iter(reader))["value"].tolist() == expected
        whole = entry(cache).read_bytes()
        assert whole.endswith(bytes([1, 1, 2]) * 3)
        entry(cache).write_bytes(sealed(whole[:-6] + bytes([0, 1, 2]) + whole[-3:]))


def test_other_files_in_place_of_an_entry(path: Path, cache: Path) -> None:
    expected = ids(path, cache)
    place = entry(cache)
    place.unlink()
    with place.open("wb") as file:
        file.truncate(1 << 24)  # Larger than any index of such a small file.
    assert ids(path, cache) == expected
    place.unlink()
    place.mkdir()
    with pytest.raises(fastpipe.errors.StorageError, match="index_cache"):
        ids(path, cache)


# --- Directories ---


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_an_impossible_directory_is_a_typed_error(below: str, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(fastpipe.errors.StorageError, match="Choose a writable one") as error:
        ids(path, file / below)
    assert error.value.path == str(file / below)
    assert isinstance(error.value, OSError)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a folder that root can't write to")
def test_an_unwritable_directory_is_a_typed_error(path: Path) -> None:
    with pytest.raises(fastpipe.errors.StorageError, match="Choose a writable one") as error:
        ids(path, "/proc")
    assert error.value.path == "/proc"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has different folder permissions")
def test_a_filled_directory_may_be_read_only(path: Path, cache: Path, tmp_path: Path) -> None:
    expected = ids(path, cache)
    cache.chmod(0o500)
    try:
        assert ids(path, cache) == expected
        if os.geteuid() != 0:
            with pytest.raises(fastpipe.errors.StorageError):
                ids(write(tmp_path / "y.avro"), cache)
    finally:
        cache.chmod(0o700)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such file mode")
def test_entries_are_as_readable_as_other_files(path: Path, cache: Path) -> None:
    before = os.umask(0o022)
    try:
        ids(path, cache)
    finally:
        os.umask(before)
    assert entry(cache).stat().st_mode & 0o777 == 0o644


def test_the_directory_of_the_user(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "USERPROFILE", "LOCALAPPDATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    ids(path, True)
    assert entry(Path(_index_cache.user_cache_directory()))
    for platform, expected in {
        "linux": tmp_path / "XDG_CACHE_HOME",
        "darwin": Path(os.path.expanduser("~")) / "Library" / "Caches",
        "win32": tmp_path / "LOCALAPPDATA",
    }.items():
        monkeypatch.setattr(sys, "platform", platform)
        assert _index_cache.user_cache_directory() == str(expected / "fastpipe")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert _index_cache.user_cache_directory() == os.path.join(os.path.expanduser("~"), ".cache", "fastpipe")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(fastpipe.errors.StorageError, match="no home directory"):
        _index_cache.user_cache_directory()


@pytest.mark.parametrize(("value", "error"), [(3, TypeError), (b"x", TypeError), ("", ValueError)])
def test_invalid_directories(value: Any, error: type[Exception], path: Path) -> None:
    with pytest.raises(error, match="index_cache"):
        ids(path, value)


def test_false_disables_the_cache(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index_cache, "user_cache_directory", lambda: 1 / 0)
    assert ids(path, False) == ids(path, None)


# --- Processes ---


def test_processes_may_fill_the_cache_at_once(tmp_path: Path, cache: Path) -> None:
    files = [str(write(tmp_path / f"{i}.avro", 50, first=50 * i)) for i in range(20)]
    program = textwrap.dedent(f"""
        import glob, os, sys
        import fastpipe
        for _ in range(20):
            reader = fastpipe.read_avro({files!r}, columns=["id"], batch_size=999, index_cache={str(cache)!r})
            assert reader.num_rows == 1000
            for path in glob.glob({str(cache / "*.index1")!r}):
                try:
                    os.unlink(path)  # Forces the entry to be written again.
                except OSError:
                    pass
    """)
    command = [sys.executable, "-W", "error", "-c", program]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for process in running:
        _, err = process.communicate(timeout=500)
        assert (process.returncode, err) == (0, "")
    assert ids(files, cache) == list(range(1000))
    assert len([*cache.iterdir(), *cache.glob(".*")]) == len(files)


def test_pickled_readers_keep_the_cache(path: Path, cache: Path) -> None:
    reader = fastpipe.read_avro(path, features=features(), batch_size=64, index_cache=cache)
    entry(cache).unlink()
    again = pickle.loads(pickle.dumps(reader))
    assert again.num_rows == 200
    assert entry(cache)
    assert [batch["id"].tolist() for batch in again] == [batch["id"].tolist() for batch in reader]


# --- The command line ---


run = fixtures.command(200)


def test_index_reports_its_results(run: Run, tmp_path: Path, cache: Path) -> None:
    for i in range(2):
        write(tmp_path / f"{i}.avro", 100 + i)
    blocks = len(fastpipe.avro.AvroFile(tmp_path / "0.avro").blocks)
    code, out, err = run("index", tmp_path, "--cache", cache)
    assert (code, err) == (0, "")
    size = os.path.getsize(tmp_path / "0.avro")
    line = rf"^\S*0\.avro +{blocks} +100 +{re.escape(_index.size_text(size))} +\d+ bytes +written$"
    assert re.search(line, out, re.MULTILINE)
    assert re.search(r"^2 files .* 201 .* ok$", out, re.MULTILINE)
    out = run("index", tmp_path / "0.avro", "--cache", cache)[1]
    assert re.search(r"^\S*0\.avro .* was there$", out, re.MULTILINE)
    assert "files" not in out
    assert ids(tmp_path / "0.avro", cache) == list(range(100))


def test_index_continues_after_files_that_fail(run: Run, path: Path, cache: Path) -> None:
    broken = path.with_name("broken.avro")
    broken.write_bytes(path.read_bytes()[:-1])
    missing = path.with_name("missing.avro")
    code, out, err = run("index", missing, broken, path, "--cache", cache)
    assert code == 1
    assert re.findall(r"^fastpipe: .*(missing|cut short)", err, re.MULTILINE) == ["missing", "cut short"]
    assert re.search(r"x\.avro .* written$", out, re.MULTILINE)
    assert re.search(r"3 files .* 2 failed$", out, re.MULTILINE)
    assert entry(cache)


def test_index_names_an_unwritable_directory_once(run: Run, path: Path) -> None:
    write(path.with_name("y.avro"))
    code, out, err = run("index", path.parent, "--cache", path)
    assert code == 1
    assert re.fullmatch(r"fastpipe: block indexes can't be written .*--cache.*\n", err)
    assert out.count("failed") == 3


def test_index_waits_for_files_to_settle(run: Run, path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The timestamp is one day in the future. The command's sleep is patched to set it back.
    aged(path, time.time_ns() + 86_400_000_000_000)
    monkeypatch.setattr(_index.time, "sleep", lambda seconds: aged(path))
    code, out, err = run("index", path, "--cache", cache)
    assert (code, err) == (0, "")
    assert "written" in out
    monkeypatch.setattr(_index.time, "sleep", lambda seconds: None)
    aged(path, time.time_ns() + 86_400_000_000_000)
    code, out, err = run("index", path, "--cache", cache)
    assert code == 1
    assert re.fullmatch(r"fastpipe: its index was not saved: .*x\.avro\)\n", err)


def test_index_uses_the_directory_of_the_user(
    run: Run, path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "user_cache_directory", lambda: str(cache))
    assert run("index", path)[0] == 0
    assert entry(cache)
    with pytest.raises(SystemExit):
        run("index", path, "--cache", "")


def test_index_runs_as_a_module_and_without_tqdm(path: Path, cache: Path) -> None:
    program = "import sys; sys.modules['tqdm'] = None; from fastpipe import cli; sys.exit(cli.main(sys.argv[1:]))"
    for command, state in ((["-m", "fastpipe"], "written"), (["-c", program], "was there")):
        done = subprocess.run(
            [sys.executable, *command, "index", str(path), "--cache", str(cache)],
            capture_output=True,
            text=True,
            check=True,
            timeout=500,
        )
        assert state in done.stdout
        assert done.stderr == ""


def test_progress_reaches_the_end_of_the_file(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "x.avro"
    path.write_bytes(wire.container(LONG, [(1, wire.long(1))] * 10_000))
    for _ in range(2):
        behind: list[int] = []
        _fastpipe.index_file(lowered([str(aged(path))], cache), behind.append)
        assert behind == sorted(behind)
        assert behind[-1] == path.stat().st_size
    behind.clear()
    entry(cache).unlink()
    _fastpipe.index_file(lowered([str(path)], cache), behind.append)
    assert len(behind) > 4


def test_ctrl_c_ends_a_walk(run: Run, path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        _fastpipe.index_file(lowered([str(path)], cache), lambda behind: signal.raise_signal(signal.SIGINT))

    class Bar:
        def __init__(self, *args: Any, **options: Any) -> None:
            pass

        def update(self, n: int) -> None:
            raise KeyboardInterrupt

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(_index, "progress_bar", Bar)
    assert run("index", path, "--cache", cache)[0] == 130
    assert not list(cache.iterdir())
