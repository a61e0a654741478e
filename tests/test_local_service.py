"""A server process of this program: batches are in shared memory, errors come in time, and nothing is left."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import fastpipe
import samples
from apart import apart, wait_until
from every_source import digests
from processes import outputs, run, together
from samples import Data, order_of
from samples import ids_by_batch as ids
from service_faults import check_states, connect_patiently, rows_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sharing memory between processes requires Linux")

# Seconds: all waits end within SOON, on a busy machine, too. Services wait for a lost server for LONG.
SOON, LONG = 60.0, 600.0
# Rows of more batches than are sent in advance.
MANY = 300_000


def read(rows: int = 5000, **options: Any) -> fastpipe.Reader:
    return rows_of(rows, 7, **options)


def server_of(service: fastpipe.service.LocalService | str) -> psutil.Process:
    """Returns the server of a service, or of the text of a service."""
    return psutil.Process(int(str(service).rsplit("pid ", 1)[1].rstrip()[:-1]))


# Batches. `test_service.py` checks batches and states of each source and order.


FORMS: dict[str, dict[str, Any]] = {
    "dense": {"vector": fastpipe.DenseSpec((3,), "float32")},
    "text": {"note": fastpipe.DenseSpec((), "string", on_null="mask"), "words": fastpipe.RaggedSpec((None,), "string")},
    "ragged": {"items": fastpipe.RaggedSpec((None,), "int32")},
    "masked": {"score": fastpipe.DenseSpec((), "float64", on_null="mask")},
    "coo": {"terms": fastpipe.SparseSpec((8,), "float32")},
    "csr": {"terms": fastpipe.SparseSpec((8,), "float32", layout="csr")},
    "all": samples.FEATURES,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """59 rows in two files."""
    return samples.write(tmp_path_factory.mktemp("forms"), [samples.blocks_of(40), samples.blocks_of(19, (6, 0, 2))])


@pytest.mark.parametrize("features", FORMS.values(), ids=FORMS)
def test_every_form_of_batch(data: Data, features: dict[str, Any]) -> None:
    pa = pytest.importorskip("pyarrow")
    options = {"features": features, **order_of(True)}
    with fastpipe.service.LocalService(data.read(**options)) as service:
        remote = service.reader
        local = data.read(**options)
        kept = list(remote)
        assert len(kept) == 9
        assert samples.digests(kept) == digests(local)
        # Arrow's streams, in which sparse columns are CSR. All batches are kept until the end.
        table, expected = pa.table(remote), pa.table(local)
        assert table.equals(expected)
        assert table.schema.equals(expected.schema, check_metadata=True)
        # Other passes haven't used their memory.
        assert samples.digests(kept) == digests(data.read(**options))


@pytest.mark.parametrize("on_uneven", ["drop", "pad", "allow"])
def test_ranks_of_every_form(data: Data, on_uneven: str) -> None:
    options = {**order_of(True), "on_uneven": on_uneven, "world_size": 2}
    with (
        fastpipe.service.LocalService(data.read(**options, rank=0)) as one,
        fastpipe.service.LocalService(data.read(**options, rank=0), rank=1, world_size=2) as other,
    ):
        for rank, remote in enumerate((one.reader, other.reader)):
            local = data.read(**options, rank=rank)
            assert ("valid" in local.batch_at(0)) == (on_uneven == "pad")
            assert digests(remote) == digests(local)
            assert digests([remote.batch_at(2)]) == digests([local.batch_at(2)])
    with pytest.raises(ValueError, match="rank"):
        fastpipe.service.LocalService(read(), rank=3, world_size=3).start()


@pytest.mark.parametrize("rows", [1, 63, 64])
def test_few_rows(rows: int) -> None:
    with fastpipe.service.LocalService(read(rows)) as service:
        remote = service.reader
        assert ids(remote) == ids(read(rows))


def test_empty_and_large_batches() -> None:
    """Batches of one row, without values in some columns, of columns without width, and of long texts."""
    pa = pytest.importorskip("pyarrow")
    arrays = {"none": fastpipe.Ragged(np.empty(0, "int32"), np.zeros(6, np.int64)), "flat": np.empty((5, 0), "float32")}
    empty = fastpipe.from_arrays({"id": np.arange(5), **arrays}, batch_size=1)
    large = fastpipe.from_arrow(pa.table({"text": ["x" * (3 << 20), "", "y"]}), batch_size=1)
    for reader in (empty, large):
        with fastpipe.service.LocalService(reader) as service:
            remote = service.reader
            check_states(reader, remote)


def mapped_at(address: int) -> str:
    """Returns the line of /proc/self/maps for an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < end:
            return line
    return ""


def test_arrays_are_in_shared_memory() -> None:
    with fastpipe.service.LocalService(read()) as service:
        remote = service.reader
        batch = next(iter(remote))
        address = batch["x"].__array_interface__["data"][0]
        # Other mappings at the same time may hide a line, or show it twice.
        assert wait_until(lambda: "memfd" in mapped_at(address), SOON)
        kept = batch["x"].copy()
        list(remote)
        np.testing.assert_array_equal(batch["x"], kept)
    np.testing.assert_array_equal(batch["x"], kept)


def test_several_passes_at_once() -> None:
    found: list[list[list[int]]] = []
    with fastpipe.service.LocalService(read()) as service:
        remote = service.reader
        others = [pickle.loads(pickle.dumps(remote)) for _ in range(3)]
        together(threading.Thread(target=lambda of=of: found.append(ids(of))) for of in others)
    assert found == [ids(read())] * 3


# Errors.


def damaged(folder: Path) -> fastpipe.Reader:
    """Returns a reader of an intact and a damaged file."""
    data = samples.write(folder, [[20] * 6, [20] * 6])
    changed = bytearray(Path(data.paths[1]).read_bytes())
    changed[-40] ^= 0xFF
    Path(data.paths[1]).write_bytes(changed)
    return data.read(batch_size=32)


def test_errors_of_data_have_the_local_place(tmp_path: Path) -> None:
    reader = damaged(tmp_path)

    def ended(of: fastpipe.Reader) -> tuple[list[str], str, Any]:
        got = []
        with pytest.raises(fastpipe.FastpipeError) as raised:
            got.extend(samples.digest(batch) for batch in of)
        of.close()
        return got, type(raised.value).__name__, (raised.value.path, raised.value.offset)

    expected = ended(reader)
    reader.set_epoch(0)
    with fastpipe.service.LocalService(reader) as service:
        remote = service.reader
        assert ended(remote) == expected


def test_wrong_arguments_and_closed_services() -> None:
    with pytest.raises(fastpipe.errors.UnsupportedError, match="change the batches in the client"):
        fastpipe.service.LocalService(read().rebatch(32))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"reader must be a fastpipe\.Reader"):
        fastpipe.service.LocalService([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        fastpipe.service.LocalService(read(), timeout=0)
    service = fastpipe.service.LocalService(read(MANY), prefetch=2)
    assert "not started" in repr(service)
    with pytest.raises(fastpipe.errors.ServiceError, match="wasn't started; use `with`"):
        service.reader  # noqa: B018
    assert service.start() is service
    remote = service.reader
    assert service.reader is remote
    with pytest.raises(fastpipe.errors.ServiceError, match="create another"):
        service.start()
    passing = iter(remote)
    next(passing)
    for _ in range(2):
        service.close()
    assert "closed" in repr(service)
    # The message depends on whether the pass was waiting for an answer or makes another request.
    with pytest.raises(fastpipe.errors.ServiceError, match=r"has ended|is closed"):
        list(passing)
    with pytest.raises(fastpipe.errors.ServiceError, match="closed"):
        next(iter(remote))
    with pytest.raises(fastpipe.errors.ServiceError, match="is closed; make another one"):
        service.reader  # noqa: B018


@pytest.mark.parametrize("fallback", [False, True])
def test_a_server_that_is_killed(fallback: bool) -> None:
    service = fastpipe.service.LocalService(read(MANY), fallback=fallback, prefetch=2, timeout=LONG)
    with service:
        remote = service.reader
        batches = iter(remote)
        found = ids([next(batches) for _ in range(5)])
        server_of(service).kill()
        begun = time.monotonic()
        if fallback:
            assert found + ids(batches) == ids(read(MANY))
            second = read(MANY)
            second.set_epoch(1)
            assert ids(remote) == ids(second), "the next epoch, too"
        else:
            with pytest.raises(fastpipe.errors.ServiceError, match="has ended"):
                list(batches)
            local = read(MANY)
            local.load_state_dict(remote.state_dict())
            whole, rest = ids(read(MANY)), ids(local)
            assert len(rest) <= len(whole) - 5
            assert rest == whole[len(whole) - len(rest) :]
        assert time.monotonic() - begun < SOON


def test_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_patiently(monkeypatch)
    service = fastpipe.service.LocalService(read(MANY), timeout=1.0, prefetch=2)
    with service:
        remote = service.reader
        batches = iter(remote)
        next(batches)
        server_of(service).suspend()
        begun = time.monotonic()
        with pytest.raises(fastpipe.errors.ServiceError, match="local"):
            list(batches)
    # The default is 30 seconds.
    assert time.monotonic() - begun < 29


def test_a_reader_that_cannot_be_opened_there(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[20] * 6])
    reader = data.read(batch_size=32)
    Path(data.paths[0]).unlink()
    with pytest.raises(fastpipe.FastpipeError, match=Path(data.paths[0]).name):
        fastpipe.service.LocalService(reader).start()


class Unpicklable(dict[str, int]):
    """Raises an error when it is pickled."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def test_the_error_of_a_reader_that_cannot_be_pickled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, kind in ((MemoryError("no memory left"), MemoryError), (OSError("broken"), TypeError)):
        reader = read(500)
        monkeypatch.setattr(reader, "_progress", Unpicklable(error))
        with pytest.raises(kind, match=r"no memory left|can be pickled: broken"):
            fastpipe.service.LocalService(reader).start()


# Memory, files and threads.


def test_closed_passes_keep_no_memory() -> None:
    service = fastpipe.service.LocalService(read(200_000, batch_size=4096))
    with service:
        remote = service.reader
        server = server_of(service)
        memory = next(file for file in Path(f"/proc/{server.pid}/fd").iterdir() if "memfd" in os.readlink(file))

        def held() -> int:
            return os.stat(memory).st_blocks * 512

        sizes = []
        for _ in range(16):
            batches = iter(remote)
            next(batches)
            batches.close()  # type: ignore[attr-defined]
            del batches
            gc.collect()
            sizes.append(held())
        assert wait_until(lambda: held() < 48 << 20, SOON)
        assert max(sizes[10:]) <= max(sizes[:10]) + (8 << 20), sizes


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def names() -> list[str]:
    """Returns the names of this process's threads."""
    return sorted(thread.name for thread in threading.enumerate())


def mapped() -> int:
    """Returns the number of mappings as large as a server's memory."""
    found = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(int(end, 16) - int(start, 16) >= 1 << 34 for start, end in found)


@pytest.mark.parametrize("fallback", [False, True])
def test_passes_that_end_in_errors_keep_no_memory(tmp_path: Path, fallback: bool) -> None:
    reader = damaged(tmp_path)
    gc.collect()
    before = mapped()
    for _ in range(5):
        service = fastpipe.service.LocalService(reader, fallback=fallback)
        with service:
            remote = service.reader
            assert mapped() > before
            if fallback:
                server_of(service).kill()
            with pytest.raises(fastpipe.errors.MalformedFileError):
                list(remote)
        del remote, service
    gc.collect()
    # The memory of the replaced server may stay until the next pass.
    assert wait_until(lambda: mapped() <= before + fallback, SOON), mapped()


def test_nothing_is_left() -> None:
    with fastpipe.service.LocalService(read()) as service:
        remote = service.reader
        list(remote)
    # The reader keeps a thread.
    del remote
    gc.collect()
    assert wait_until(lambda: "fastpipe-watch" not in names(), SOON)
    before, threads = descriptors(), names()
    service = fastpipe.service.LocalService(read())
    with service:
        remote = service.reader
        server = server_of(service)
        list(remote)
        assert server.is_running()
    del remote
    gc.collect()
    assert not server.is_running()
    assert wait_until(lambda: descriptors() == before, SOON), descriptors()
    assert wait_until(lambda: names() == threads, SOON), names()


# Programs.

READ = """
import fastpipe, numpy as np, os, signal, sys, time
reader = fastpipe.from_arrays({"id": np.arange(1000)}, batch_size=100, shuffle=True, seed=1)
service = fastpipe.service.LocalService(reader)
"""


@contextmanager
def program(folder: Path, text: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A program in a separate session, and the first line that it prints."""
    path = folder / "program.py"
    path.write_text(text)
    with subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_program_that_is_killed_leaves_no_server(tmp_path: Path, stopped: bool) -> None:
    text = READ + "next(iter(service.start().reader))\nprint(service, flush=True)\ntime.sleep(100)"
    with program(tmp_path, text) as (process, printed):
        server = server_of(printed)
        if stopped:
            server.suspend()
        process.kill()
    assert wait_until(lambda: not server.is_running(), SOON)


OWN = """
import fastpipe, pyarrow as pa
class Numbers:
    rows = [3] * 4
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    def read(self, unit): return pa.table({"id": [unit] * 3}, schema=self.schema)
    def fingerprint(self): return "numbers"
if __name__ == "__main__":
    service = fastpipe.service.LocalService(fastpipe.read_units(Numbers(), batch_size=2))
"""
PRINT = "    with service: print(sum(len(batch['id']) for batch in service.reader))"


def test_programs_with_and_without_a_guard(tmp_path: Path) -> None:
    for text, rows in ((READ + PRINT.strip(), "1000\n"), (OWN + PRINT, "12\n")):
        with program(tmp_path, text) as (process, printed):
            assert (printed, *process.communicate(timeout=500)) == (rows, "", "")


def test_ctrl_c_interrupts_only_the_program(tmp_path: Path) -> None:
    text = READ + (
        "remote = service.start().reader\n"
        "try:\n    print(service, flush=True)\n    while True: list(remote); remote.set_epoch(0)\n"
        "except KeyboardInterrupt:\n    print(len(next(iter(remote))['id']))\n"
    )
    with program(tmp_path, text) as (process, printed):
        server = server_of(printed)
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        assert (*process.communicate(timeout=500), process.returncode) == ("100\n", "", 0)
    assert wait_until(lambda: not server.is_running(), SOON)


@apart
def test_a_forked_child_reads_from_it() -> None:
    with fastpipe.service.LocalService(read()) as service:
        remote = service.reader
        first = ids([next(iter(remote))])
        remote.set_epoch(0)
        child = os.fork()
        if child == 0:
            os._exit(0 if ids(remote) == ids(read()) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert ids(remote)[:1] == first


def test_another_process_cannot_use_its_readers() -> None:
    script = """
        import pickle, sys, fastpipe
        reader = pickle.loads(bytes.fromhex(sys.argv[1]))
        try:
            list(reader)
        except fastpipe.errors.ServiceError as error:
            print(error)
    """
    with fastpipe.service.LocalService(read()) as service:
        remote = service.reader
        (printed,) = outputs(run(script, pickle.dumps(remote).hex()))
    assert "another process's" in printed


LIMITED = """
    import resource, sys
    import numpy as np, psutil
    import fastpipe, pyarrow

    arrays = {"id": np.arange(200_000), "x": np.zeros((200_000, 20), "float32")}
    reader = fastpipe.from_arrays(arrays, batch_size=4096, shuffle=True, seed=1)
    kind, allowed = getattr(resource, sys.argv[1]), int(sys.argv[2]) << 20
    if kind == resource.RLIMIT_AS:
        allowed += psutil.Process().memory_info().vms
    resource.setrlimit(kind, (allowed, resource.RLIM_INFINITY))
    try:
        with fastpipe.service.LocalService(reader, timeout=60) as service:
            assert sum(len(batch["id"]) for batch in service.reader) == 200_000
        print("read")
    except (MemoryError, fastpipe.errors.ServiceError):
        print("refused")
    except (OSError, ImportError, RuntimeError) as error:
        # Python's errors if it has no memory for a process, a module or a thread.
        assert any(word in str(error) for word in ("memory", "map", "thread")), error
        print("refused")
"""


@pytest.mark.parametrize(
    ("kind", "allowed", "enough"),
    [
        # Half of the allowed memory is enough for everything except the batches.
        *(("RLIMIT_AS", allowed, allowed >= 600) for allowed in (20, 60, 150, 300, 600, 1500, 5000)),
        *(("RLIMIT_FSIZE", allowed, allowed == 100) for allowed in (1, 10, 100)),
    ],
)
def test_every_limit_of_memory_and_files(kind: str, allowed: int, enough: bool) -> None:
    """The limit holds for the program and its server. They read all rows, or an error names the lacking resource."""
    (said,) = outputs(run(LIMITED, kind, str(allowed)))
    assert said in ("read\n", "refused\n")
    assert not enough or said == "read\n"
    assert kind != "RLIMIT_FSIZE" or enough or said == "refused\n"


def test_shared_memory_leaves_half_of_a_limited_address_space() -> None:
    script = """
        import mmap, resource
        import psutil
        from fastpipe._fastpipe import SharedSlabs

        for megabytes in range(100, 1200, 20):
            space = megabytes << 20
            before = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (before + space, resource.RLIM_INFINITY))
            slabs = SharedSlabs(1 << 40)
            assert psutil.Process().memory_info().vms - before > space // 8
            mmap.mmap(-1, space // 2 - (1 << 20)).close()
            del slabs
        print("half is left")
    """
    assert outputs(run(script)) == ["half is left\n"]
