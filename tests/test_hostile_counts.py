"""Files that declare more rows than they contain, up to the number that their bytes could hold.

Everything runs in processes with a small limit on address space, in each order. There, an allocation that isn't
accounted for in advance fails, and an unchecked allocation ends the process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from hostile import TYPED
from wire import CODECS, compress, header, record, stored

LIES = [codec for codec in CODECS if codec != "null"]
MEMORY = 1 << 30

CHILD = textwrap.dedent(
    """
    import faulthandler, json, resource, sys, time, zlib
    import fastpipe

    path, options, memory = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    features = {"a": fastpipe.DenseSpec((), options.pop("dtype"))} if "dtype" in options else None
    options |= {"batch_size": 64, "num_threads": 1}
    # Maps the memory that the first use needs.
    list(fastpipe.read_avro(sys.argv[4], batch_size=2, num_threads=1))
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + memory, held + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.dump_traceback_later(50, exit=True)

    def reader(**more):
        return fastpipe.read_avro(path, features=features, **options | more)

    def resumed():
        begun = reader(seed=1)
        state = begun.state_dict()
        state["progress"] |= {"step": 3, "taken": 3}
        del state["checksum"]
        state["checksum"] = zlib.crc32(json.dumps(state, sort_keys=True, separators=(",", ":")).encode())
        again = reader(seed=1)
        again.load_state_dict(state)
        return next(iter(again))

    actions = {
        "infer": lambda: fastpipe.read_avro(path, **options),
        "iterate": lambda: next(iter(reader())),
        "first": lambda: reader().batch_at(0),
        "batch_at": lambda: reader().batch_at(len(reader()) // 2),
        "locate": lambda: reader().locate(len(reader()) // 2, 1),
        "resume": resumed,
        "report": lambda: reader(seed=1).shuffle_report(max_batches=12),
    }
    for name in sys.argv[5].split(","):
        start = time.monotonic()
        try:
            actions[name]()
            error = None
        except Exception as caught:
            error = [type(caught).__name__, str(caught)]
        print(json.dumps([name, error, time.monotonic() - start]), flush=True)
    """
)
ACTIONS = ("infer", "iterate", "first", "batch_at", "locate", "resume", "report")
SHUFFLES = [False, True, "block", "buffer"]


def avro(path: Path, kind: str, blocks: list[tuple[int, bytes]], codec: str) -> str:
    """Writes a container file with one field `a`, with the given row counts and stored bytes."""
    data = header(record("R", a=kind), codec) + b"".join(stored(rows, data) for rows, data in blocks)
    path.write_bytes(data)
    return str(path)


def outcomes(
    path: str, actions: tuple[str, ...] = ACTIONS, *, memory: int = MEMORY, **options: Any
) -> dict[str, tuple[str, str] | None]:
    """Returns the name and text of the error of each action."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the address space can be limited only on Linux")
    small = avro(Path(path).with_name("small.avro"), "long", [(3, b"\x02\x04\x06")], "null")
    command = [sys.executable, "-c", CHILD, path, json.dumps(options), str(memory), small, ",".join(actions)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, (ran.stdout, ran.stderr[-4000:])
    found = {name: error for name, error, _ in map(json.loads, ran.stdout.splitlines())}
    assert set(found) == set(actions)
    for name, error in found.items():
        assert error is None or error[0] in TYPED, (name, error)
    return found


@pytest.mark.parametrize("codec", LIES)
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_rows_beyond_the_bytes_are_rejected(codec: str, shuffle: bool | str, tmp_path: Path) -> None:
    path = avro(tmp_path / "a.avro", "long", [(2**31 - 1, compress(codec, b"\x02"))], codec)
    for name, error in outcomes(path, shuffle=shuffle, dtype="int64").items():
        assert error is not None, name
        assert error[0] == "MalformedFileError", (name, error)
        assert re.search(r"can't hold the 2147483647 records of at least 1 bytes .*block 0, byte offset", error[1])


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_rows_without_bytes_are_limited_per_file(shuffle: bool | str, tmp_path: Path) -> None:
    path = avro(tmp_path / "nulls.avro", "null", [(2**24, b"")] * 20_000, "null")
    for name, error in outcomes(path, ("infer", "report"), shuffle=shuffle).items():
        assert error is not None, name
        assert error[0] == "LimitError", (name, error)
        assert "the limit is 16777216 per file" in error[1], (name, error)
        assert "block 1," in error[1], (name, error)


@pytest.fixture(scope="module")
def vast(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three blocks that declare 2^30 booleans each.

    Their bytes could hold that many, so the counts don't reveal that they are wrong.
    """
    path = tmp_path_factory.mktemp("vast") / "vast.avro"
    return avro(path, "boolean", [(2**30, b"\xff" * (2**30 // 1032 + 1))] * 3, "deflate")


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_plausible_counts_end_in_documented_errors(shuffle: bool | str, vast: str) -> None:
    found = outcomes(vast, shuffle=shuffle, dtype="bool")
    assert found["iterate"] is not None
    if shuffle is False:
        assert found["locate"] is None
        assert found["report"] is None
        assert {found[name][0] for name in ("iterate", "batch_at", "resume")} == {"MalformedFileError"}  # type: ignore[index]
        return
    # The default buffer is the largest one of 2^31 rows. It is rejected because of its share of the machine's memory,
    # or by the system.
    for name in ("iterate", "first", "batch_at", "locate", "resume", "report"):
        error = found[name]
        assert error is not None, name
        assert error[0] in ("LimitError", "OutOfMemoryError"), (name, error)
        if error[0] == "LimitError":
            assert "; shuffle_buffer=" in error[1] or "no shuffle_buffer fits" in error[1], (name, error)


@pytest.mark.parametrize("shuffle", [True, "buffer"])
def test_small_buffers_work_with_vast_counts(shuffle: bool | str, vast: str) -> None:
    found = outcomes(
        vast, ("first", "batch_at", "locate", "report"), shuffle=shuffle, shuffle_buffer=1024, dtype="bool"
    )
    assert found["locate"] is None
    assert found["report"] is None
    assert found["batch_at"] is not None
    assert found["batch_at"][0] == "MalformedFileError"


@pytest.mark.parametrize("shuffle", [True, "block", "buffer"])
@pytest.mark.parametrize("action", ["iterate", "batch_at", "locate"])
def test_the_order_counts_against_the_limit(shuffle: Any, action: str, vast: str) -> None:
    reader = fastpipe.read_avro(
        vast,
        features={"a": fastpipe.DenseSpec((), "bool")},
        batch_size=64,
        shuffle=shuffle,
        shuffle_buffer=2**26,
        memory_limit="100MB",
        seed=1,
    )
    step = len(reader) // 2
    actions: dict[str, Callable[[], object]] = {
        "iterate": lambda: iter(reader),
        "batch_at": lambda: reader.batch_at(step),
        "locate": lambda: reader.locate(step, 0),
    }
    text = r"memory_limit is 100\.0 MB, (and this|but planning batches) takes at least"
    with pytest.raises(fastpipe.errors.LimitError, match=text) as refused:
        actions[action]()
    named = re.search(r"; (?:shuffle_buffer=(\d+) would fit|no shuffle_buffer fits)", str(refused.value))
    assert named, refused.value
    if shuffle == "block" or action == "iterate":
        assert named[1] is None, "pools and passes hold whole blocks, with four bytes per row once they are open"
    else:
        assert 2**20 < int(named[1]) < 2**26


def test_ctrl_c_ends_a_long_search(vast: str) -> None:
    """Tracing back 2^24 rows of a buffer takes many seconds."""
    script = """
        import signal, sys, time, fastpipe

        def interrupt(*_):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        order = {"batch_size": 64, "shuffle": "buffer", "shuffle_buffer": 2**24, "seed": 1}
        reader = fastpipe.read_avro(sys.argv[1], features={"a": fastpipe.DenseSpec((), "bool")}, **order)
        for action in (lambda: reader.locate(2**24, 0), lambda: reader.batch_at(2**24),
                       lambda: reader.shuffle_report()):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.7)
                action()
                print("done")
            except KeyboardInterrupt:
                print("interrupted")
        """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), vast], capture_output=True, text=True, timeout=500, check=False
    )
    assert ran.stdout.split() == ["interrupted"] * 3, ran.stderr


# --- Blocks that expand ---


def bombs(path: Path, codec: str, blocks: int, size: int = 256 << 20) -> str:
    """Writes blocks of valid records. Each record is the long 0, which is one byte."""
    data = bytes(size)
    if codec == "deflate":
        deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = deflater.compress(data) + deflater.flush()
    elif codec == "zstandard":
        packed = compress(codec, data)
    else:
        # Several members are faster to create.
        packed = compress(codec, bytes(size // 16)) * 16
    return avro(path, "long", [(len(data), packed)] * blocks, codec)


@pytest.mark.parametrize("codec", ["deflate", "zstandard", "bzip2", "xz"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_minimum_is_determined_within_the_limit(codec: str, shuffle: bool, tmp_path: Path) -> None:
    path = bombs(tmp_path / "bombs.avro", codec, 10)
    script = """
        import sys, fastpipe

        def peak():
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024

        features = {"a": fastpipe.DenseSpec((), "int64")}
        reader = fastpipe.read_avro(sys.argv[1], features=features, batch_size=16, num_threads=2, memory_limit="64MB",
                                    shuffle=sys.argv[2] == "True", shuffle_buffer=64 if sys.argv[2] == "True" else None)
        before = peak()
        try:
            iter(reader)
        except fastpipe.errors.LimitError as error:
            print(peak() - before, error)
        """
    if not sys.platform.startswith("linux"):
        pytest.skip("peaks are read on Linux only")
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), path, str(shuffle)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    grown, reason = ran.stdout.split(" ", 1)
    # The decompressor's own memory isn't counted. For xz this includes a dictionary, 8 MiB by default.
    beside = (16 << 20) if codec == "xz" else (8 << 20)
    assert int(grown) < 64_000_000 + beside, ran.stdout
    assert "memory_limit is 64.0 MB, and a " in reason
    assert "which memory_limit doesn't allow (file " in reason
