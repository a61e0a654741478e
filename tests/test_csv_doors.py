"""Events that can happen to a process or a file while `read_csv` and `sample_csv` run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe import DenseSpec

LONG_AGO = 1_600_000_000
FEATURES = {"a": DenseSpec((), "int64"), "b": DenseSpec((), "float64")}
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, FIFOs and limits of Linux")


def write(path: Path, rows: int, first: int = 0) -> Path:
    path.write_text("a,b\n" + "".join(f"{i},{i}.5\n" for i in range(first, first + rows)))
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def ids(source: Any, **options: Any) -> list[int]:
    with fastpipe.read_csv(source, **{"features": FEATURES, "batch_size": 1000} | options) as reader:
        return [i for batch in reader for i in batch["a"].tolist()]


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- Processes that are killed or interrupted ---

OPEN_AGAIN_AND_AGAIN = """
    import os, sys, fastpipe
    path, cache = sys.argv[1:]
    print("begun", flush=True)
    time = 1_600_000_000
    while True:
        time += 1
        os.utime(path, (time, time))  # The timestamp changes, so the index is written again.
        fastpipe.read_csv(path, index_cache=cache, batch_size=9, columns=["a"]).close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_killed_while_the_index_is_written(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "x.csv", 100_000), tmp_path / "cache"
    draw = random.Random(1)
    for _ in range(8):
        child = start(OPEN_AGAIN_AND_AGAIN, path, cache)
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        time.sleep(draw.random() / 5)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.communicate()
        assert ids(path, index_cache=cache) == list(range(100_000))
    # Each killed process leaves at most one partial file beside the entries.
    left = [entry.name for entry in cache.iterdir() if not entry.name.endswith(".index1")]
    assert len(left) <= 8
    assert all(name.startswith(".tmp-") for name in left)


INTERRUPTED = """
    import sys, threading, fastpipe
    what, path = sys.argv[1:]
    # Names are imported on first use, some by exec of a string. CPython exits as if a KeyboardInterrupt that passes
    # through exec was not caught.
    fastpipe.read_csv(b"a,b\\n1,2.5\\n", batch_size=1).close()
    for method in ("exact", "block"):
        fastpipe.csv.sample_csv(b"a,b\\n1,2.5\\n", rows=1, columns=["a", "b"], seed=1, method=method)
    try:
        print("begun", flush=True)
        while True:
            if what == "scan":
                fastpipe.read_csv(path, batch_size=9, columns=["a"]).close()
            elif what == "sample":
                fastpipe.csv.sample_csv(path, rows=400_000, columns=["a", "b"], seed=1)
            elif what == "blocks":
                fastpipe.csv.sample_csv(path, rows=400_000, columns=["a", "b"], seed=1, method="block")
            else:
                for _ in fastpipe.read_csv(path, batch_size=9, columns=["a"], shuffle=True, seed=1):
                    pass
    except KeyboardInterrupt:
        import contextlib, os, time
        for _ in range(1200):
            threads = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []
            names = []
            for thread in threads:
                with contextlib.suppress(OSError):  # The process has just ended.
                    names.append(open(f"/proc/self/task/{thread}/comm").read())
            if not any("scan" in name or "open" in name for name in names):
                break
            time.sleep(0.05)
        else:
            sys.exit(f"threads are left: {names}")
        print("interrupted", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")
@pytest.mark.parametrize("what", ["scan", "sample", "blocks", "pass"])
def test_ctrl_c(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.csv"
    rows = "".join(f"{i},{i}.5\n" for i in range(1_000_000)).encode()
    path.write_bytes(b"a,b\n" + rows * 8)
    for delay in (0.0, 0.3):
        child = start(INTERRUPTED, what, path)
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        time.sleep(delay)
        child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=500)
        assert (out, child.returncode) == ("interrupted\n", 0), errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_forked_child_uses_the_reader_of_its_parent(tmp_path: Path, shuffle: bool) -> None:
    path = write(tmp_path / "x.csv", 60_000)
    reader = fastpipe.read_csv(path, features=FEATURES, batch_size=1000, shuffle=shuffle, seed=2, epochs=1)
    want = [batch["a"].tolist() for batch in reader]
    reader.set_epoch(0)
    batches = iter(reader)
    next(batches)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fresh = fastpipe.read_csv(path, features=FEATURES, batch_size=1000, shuffle=shuffle, seed=2, epochs=1)
            fresh.load_state_dict(reader.state_dict())
            same = [batch["a"].tolist() for batch in fresh] == want[1:]
            reader.set_epoch(0)
            same &= [batch["a"].tolist() for batch in reader] == want
            drawn = fastpipe.csv.sample_csv(path, rows=10, columns=["a"], seed=1).rows.tolist()
            os.write(writing, repr((same, drawn)).encode())
            os._exit(0)
        except BaseException as error:
            os.write(writing, repr(error).encode())
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        found = told.read().decode()
    assert os.waitpid(child, 0)[1] == 0, found
    drawn = fastpipe.csv.sample_csv(path, rows=10, columns=["a"], seed=1).rows.tolist()
    assert found == repr((True, drawn))
    # The parent's pass is unaffected.
    assert [batch["a"].tolist() for batch in batches] == want[1:]


# --- Threads ---


def test_threads_share_a_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", 50_000)
    reader = fastpipe.read_csv(path, features=FEATURES, batch_size=100)
    found: list[int] = []
    batches, lock = iter(reader), threading.Lock()

    def draw(_: int) -> None:
        for batch in batches:
            with lock:
                found.extend(batch["a"].tolist())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(draw, range(4)))
        assert sorted(found) == list(range(50_000))
        whole = [ids(path, shuffle=True, seed=4)] * 4
        assert list(pool.map(lambda _: ids(path, shuffle=True, seed=4), range(4))) == whole
        sample = lambda _: fastpipe.csv.sample_csv(path, rows=500, columns=["b"], seed=3).values  # noqa: E731
        first, *others = pool.map(sample, range(4))
        assert all(np.array_equal(first, other) for other in others)


# --- Files that change ---

CHANGES: dict[str, Any] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut within its first row": lambda path: os.truncate(path, 2),
    "emptied": lambda path: os.truncate(path, 0),
    "replaced": lambda path: os.replace(write(path.with_name("y"), 200_000, 7), path),
    "replaced by fewer rows": lambda path: os.replace(write(path.with_name("y"), 70_000), path),
    "appended to": lambda path: path.write_bytes(path.read_bytes() + b"7,8\n"),
    "removed": lambda path: path.unlink(),
}


def change(path: Path, how: str) -> None:
    CHANGES[how](path)
    if path.exists():
        os.utime(path, (LONG_AGO + 100, LONG_AGO + 100))


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_file_that_changes_between_opening_and_reading(tmp_path: Path, how: str, shuffle: bool) -> None:
    path = write(tmp_path / "x.csv", 100_000)
    reader = fastpipe.read_csv(path, features=FEATURES, batch_size=1000, shuffle=shuffle, seed=1)
    change(path, how)
    error = FileNotFoundError if how == "removed" else fastpipe.errors.StorageError
    with pytest.raises(error) as caught:
        list(reader)
    assert isinstance(caught.value, fastpipe.FastpipeError)
    assert "x.csv" in str(caught.value)


@pytest.mark.parametrize("how", [how for how in CHANGES if how != "removed"])
def test_a_file_that_changes_between_state_and_resuming(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "x.csv", 100_000)
    with fastpipe.read_csv(path, features=FEATURES, batch_size=1000) as reader:
        next(iter(reader))
        state = reader.state_dict()
    change(path, how)
    with pytest.raises(fastpipe.FastpipeError) as caught:
        fastpipe.read_csv(path, features=FEATURES, batch_size=1000).load_state_dict(state)
    # A truncated file may have lost its column names.
    typed = (
        fastpipe.errors.MalformedFileError | fastpipe.errors.SchemaError
        if how in ("emptied", "cut within its first row")
        else fastpipe.errors.StateError
    )
    assert isinstance(caught.value, typed)


@pytest.mark.parametrize("how", ["cut", "emptied", "replaced", "appended to"])
def test_a_file_that_changes_while_it_is_sampled(tmp_path: Path, how: str) -> None:
    """Depending on timing, the result is a sample of the old file, a sample of the new file, or a documented error."""
    path = tmp_path / "x.csv"
    outcomes = []
    for delay in (0.0, 0.001, 0.01, 0.03):
        write(path, 200_000)
        timer = threading.Timer(delay, change, (path, how))
        timer.start()
        try:
            drawn = fastpipe.csv.sample_csv(path, rows=1000, columns=["a"], seed=1)
            assert drawn.values.shape == (1000, 1)
            outcomes.append("drawn")
        except (fastpipe.FastpipeError, ValueError) as error:
            outcomes.append(type(error).__name__)
        timer.join()
    assert len(outcomes) == 4


# --- Paths ---


def test_links(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", 50_000)
    link, dangling = tmp_path / "link.csv", tmp_path / "dangling.csv"
    try:
        link.symlink_to(path)
        dangling.symlink_to(tmp_path / "nothing.csv")
    except OSError:
        pytest.skip("needs permission to create links")
    cache = tmp_path / "cache"
    assert ids(link, index_cache=cache) == ids(path, index_cache=cache) == list(range(50_000))
    # Both names refer to one file.
    assert len(list(cache.iterdir())) == 1
    for call in (lambda: ids(dangling), lambda: fastpipe.csv.sample_csv(dangling, rows=1, columns=["a"], seed=1)):
        with pytest.raises(FileNotFoundError, match="dangling") as caught:
            call()
        assert isinstance(caught.value, fastpipe.FastpipeError)


def test_partially_written_files_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "b.csv", 5, 5)
    write(tmp_path / "a.csv", 5)
    unfinished = ("_SUCCESS", "_x.csv", ".x.csv", "x.csv.tmp", "x.csv.inprogress", "x.csv._COPYING_", "x.csv.crc")
    for name in (*unfinished, "notes.txt"):
        (tmp_path / name).write_text('"half a r')
    assert ids(tmp_path) == ids(str(tmp_path / "*.csv")) == list(range(10))


@linux
def test_invalid_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.csv")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.csv").mkdir()
    for source, error, match in [
        (tmp_path / "fifo.csv", fastpipe.errors.StorageError, "expected a file, found a pipe"),
        ([tmp_path / "folder.csv"], OSError, "folder"),
        (tmp_path / "empty", OSError, "empty"),
    ]:
        with pytest.raises(error, match=match):
            ids(source)


# --- Memory ---

LIMITED = """
    import resource, sys, fastpipe
    path, more, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    import numpy
    fastpipe.csv.sample_csv(b"a,b\\n1,2\\n", rows=1, columns=["a"], seed=1)  # Imports modules that are loaded late.
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))
    try:
        if what == "sample":
            fastpipe.csv.sample_csv(path, rows=200_000, columns=["a", "b"], seed=1)
        else:
            for _ in fastpipe.read_csv(path, batch_size=50_000, shuffle=what == "shuffle", seed=1, epochs=1):
                pass
        print("done")
    except fastpipe.errors.OutOfMemoryError:
        print("out of memory")
    except MemoryError:
        print("out of memory")
"""


@linux
@pytest.mark.parametrize("what", ["sample", "sequential", "shuffle"])
def test_every_limit_of_memory(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n" + "".join(f"{i},{i}.5\n" for i in range(500_000)))
    outcomes = set()
    for megabytes in (0, 1, 2, 4, 8, 16, 40, 100, 4000):
        child = start(LIMITED, path, megabytes << 20, what)
        out, errors = child.communicate(timeout=500)
        assert child.returncode == 0, (megabytes, errors)
        outcomes.add(out.strip())
    assert outcomes == {"done", "out of memory"}
