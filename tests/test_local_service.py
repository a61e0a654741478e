"""A server in a process of this machine: its batches are the local ones, lie in memory in common, and leave nothing."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import fastpipe
import samples
from apart import apart, wait_until
from every_source import Make, digests, make, order
from processes import outputs, run
from service_faults import connect_patiently

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share memory by means of Linux")

__all__ = ["make"]

# Seconds within which everything is over, on a busy machine, too. Services wait longer for a server that is lost.
SOON, LONG = 60.0, 600.0
# Rows of more batches than are sent ahead.
MANY = 300_000


def read(rows: int = 5000, **options: Any) -> fastpipe.Reader:
    draw = np.random.default_rng(2)
    arrays = {"id": np.arange(rows), "x": draw.random((rows, 7), "float32")}
    return fastpipe.from_arrays(arrays, **{"batch_size": 64, "shuffle": True, "seed": 7} | options)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def server_of(service: fastpipe.LocalService) -> psutil.Process:
    return psutil.Process(int(repr(service).rsplit("pid ", 1)[1][:-1]))


# The promise.


def test_batches_are_the_local_ones(make: Make) -> None:
    reader = make(batch_size=32, shuffle=True, seed=3)
    with fastpipe.LocalService(reader, seed=4) as remote:
        again = make(batch_size=32, shuffle=True, seed=4)
        assert digests(remote) == digests(again)
        assert digests(remote) == digests(again), "the second epoch"
        assert (remote.features, len(remote), remote.num_rows) == (again.features, len(again), again.num_rows)
        assert str(remote.locate(3, 1)) == str(again.locate(3, 1))


@order
def test_states_pass_through_the_service_and_back_at_every_step(order: dict[str, Any]) -> None:
    local = read(500, **order)
    with fastpipe.LocalService(local) as remote:
        whole = digests(local)
        local.set_epoch(0)
        states = [remote.state_dict(), *(remote.state_dict() for _ in remote)]
        assert states == [local.state_dict(), *(local.state_dict() for _ in local)]
        for step, state in enumerate(states):
            for reader in (remote, local):
                reader.load_state_dict(json.loads(json.dumps(state)))
                assert digests(reader) == whole[step:]


@pytest.mark.parametrize(("own", "asked"), [(2, {}), (2, {"epochs": 1}), (None, {"epochs": 3}), (1, {"epochs": 2})])
def test_epochs_are_those_of_the_reader_unless_others_are_asked_for(own: int | None, asked: dict[str, Any]) -> None:
    with fastpipe.LocalService(read(500, epochs=own), **asked) as remote:
        assert ids(remote) == ids(read(500, **{"epochs": own} | asked))


def test_ranks_and_batches_by_step() -> None:
    reader = read()
    with fastpipe.LocalService(reader, rank=1, world_size=3, epochs=2) as remote:
        local = read(rank=1, world_size=3, epochs=2)
        assert ids(remote) == ids(local)
        assert remote.batch_at(2)["id"].tolist() == local.batch_at(2)["id"].tolist()
    with pytest.raises(ValueError, match="rank"):
        fastpipe.LocalService(reader, rank=3, world_size=3).start()


def mapped_at(address: int) -> str:
    """What is mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < end:
            return line
    return ""


def test_arrays_lie_in_memory_in_common() -> None:
    with fastpipe.LocalService(read()) as remote:
        batch = next(iter(remote))
        address = batch["x"].__array_interface__["data"][0]
        # What is mapped meanwhile may hide a line, or show it twice.
        assert wait_until(lambda: "memfd" in mapped_at(address), SOON)
        kept = batch["x"].copy()
        list(remote)
        np.testing.assert_array_equal(batch["x"], kept)
    np.testing.assert_array_equal(batch["x"], kept)


def test_several_passes_at_once() -> None:
    found: dict[int, list[list[int]]] = {}
    with fastpipe.LocalService(read()) as remote:
        others = [pickle.loads(pickle.dumps(remote)) for _ in range(3)]

        def run(number: int, reader: fastpipe.Reader) -> None:
            found[number] = ids(reader)

        threads = [threading.Thread(target=run, args=of) for of in enumerate(others)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [*found.values()] == [ids(read())] * 3


@pytest.mark.parametrize("rows", [1, 63, 64])
def test_few_rows(rows: int) -> None:
    with fastpipe.LocalService(read(rows)) as remote:
        assert ids(remote) == ids(read(rows))


def test_empty_batches_and_large_ones() -> None:
    pa = pytest.importorskip("pyarrow")
    reader = fastpipe.from_arrow(pa.table({"text": ["x" * (3 << 20), "", "y"]}), batch_size=1)
    with fastpipe.LocalService(reader) as remote:
        assert digests(remote) == digests(reader)


# What goes wrong.


def damaged(folder: Path) -> fastpipe.Reader:
    """Of a file that is whole, and one that isn't."""
    data = samples.write(folder, [[20] * 6, [20] * 6])
    changed = bytearray(Path(data.paths[1]).read_bytes())
    changed[-40] ^= 0xFF
    Path(data.paths[1]).write_bytes(changed)
    return data.read(batch_size=32)


def test_errors_of_data_stand_where_they_do_locally(tmp_path: Path) -> None:
    reader = damaged(tmp_path)

    def ended(of: fastpipe.Reader) -> tuple[list[str], str, Any]:
        got = []
        with pytest.raises(fastpipe.FastpipeError) as raised:
            got.extend(samples.digest(batch) for batch in of)
        of.close()
        return got, type(raised.value).__name__, (raised.value.path, raised.value.offset)

    expected = ended(reader)
    reader.set_epoch(0)
    with fastpipe.LocalService(reader) as remote:
        assert ended(remote) == expected


def test_what_cannot_be_served() -> None:
    with pytest.raises(fastpipe.UnsupportedError, match="let the client make"):
        fastpipe.LocalService(fastpipe.rebatch(read(), 32))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reader is a Reader"):
        fastpipe.LocalService([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        fastpipe.LocalService(read(), timeout=0)
    service = fastpipe.LocalService(read(MANY), prefetch=2)
    assert "not started" in repr(service)
    remote = service.start()
    with pytest.raises(fastpipe.ServiceError, match="make another"):
        service.start()
    passing = iter(remote)
    next(passing)
    for _ in range(2):
        service.close()
    assert "closed" in repr(service)
    # Told apart by whether the pass was waiting for an answer, or asks for another one.
    with pytest.raises(fastpipe.ServiceError, match=r"has ended|is closed"):
        list(passing)
    with pytest.raises(fastpipe.ServiceError, match="closed"):
        next(iter(remote))


@pytest.mark.parametrize("fallback", [False, True])
def test_a_server_that_is_killed(fallback: bool) -> None:
    service = fastpipe.LocalService(read(MANY), fallback=fallback, prefetch=2, timeout=LONG)
    with service as remote:
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
            with pytest.raises(fastpipe.ServiceError, match="has ended"):
                list(batches)
            local = read(MANY)
            local.load_state_dict(remote.state_dict())
            whole, rest = ids(read(MANY)), ids(local)
            assert len(rest) <= len(whole) - 5
            assert rest == whole[len(whole) - len(rest) :]
        assert time.monotonic() - begun < SOON


def test_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_patiently(monkeypatch)
    service = fastpipe.LocalService(read(MANY), timeout=1.0, prefetch=2)
    with service as remote:
        batches = iter(remote)
        next(batches)
        server_of(service).suspend()
        begun = time.monotonic()
        with pytest.raises(fastpipe.ServiceError, match="local"):
            list(batches)
    # By default it would be 30 seconds.
    assert time.monotonic() - begun < 29


def test_passes_that_are_left_keep_no_memory() -> None:
    reader = read(200_000, batch_size=4096)
    service = fastpipe.LocalService(reader)
    with service as remote:
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
    """Of this process's threads."""
    return sorted(thread.name for thread in threading.enumerate())


def mapped() -> int:
    """Stretches of address space as large as those that have a server's memory."""
    found = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(int(end, 16) - int(start, 16) >= 1 << 34 for start, end in found)


@pytest.mark.parametrize("fallback", [False, True])
def test_passes_that_end_in_errors_keep_no_memory(tmp_path: Path, fallback: bool) -> None:
    reader = damaged(tmp_path)
    gc.collect()
    before = mapped()
    for _ in range(5):
        service = fastpipe.LocalService(reader, fallback=fallback)
        with service as remote:
            assert mapped() > before
            if fallback:
                server_of(service).kill()
            with pytest.raises(fastpipe.MalformedFileError):
                list(remote)
        del remote, service
    gc.collect()
    # What the fallback replaced may be kept until there is another pass.
    assert wait_until(lambda: mapped() <= before + fallback, SOON), mapped()


def test_nothing_is_left() -> None:
    with fastpipe.LocalService(read()) as remote:
        list(remote)
    # The reader keeps a thread.
    del remote
    gc.collect()
    assert wait_until(lambda: "fastpipe-watch" not in names(), SOON)
    before, threads = descriptors(), names()
    service = fastpipe.LocalService(read())
    with service as remote:
        server = server_of(service)
        list(remote)
        assert server.is_running()
    del remote
    gc.collect()
    assert not server.is_running()
    assert wait_until(lambda: descriptors() == before, SOON), descriptors()
    assert wait_until(lambda: names() == threads, SOON), names()


# Programs.


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


READ = """
import fastpipe, numpy as np, os, signal, sys, time
reader = fastpipe.from_arrays({"id": np.arange(1000)}, batch_size=100, shuffle=True, seed=1)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_program_that_is_killed_leaves_no_server(tmp_path: Path, stopped: bool) -> None:
    text = READ + "service = fastpipe.LocalService(reader)\nnext(iter(service.start()))\nprint(service, flush=True)\n"
    with subprocess.Popen(script(tmp_path, text + "time.sleep(100)"), stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        server = psutil.Process(int(program.stdout.readline().rsplit("pid ", 1)[1][:-2]))
        if stopped:
            server.suspend()
        program.kill()
    assert wait_until(lambda: not server.is_running(), SOON)


def test_programs_without_a_guard_and_with_one(tmp_path: Path) -> None:
    plain = READ + "with fastpipe.LocalService(reader) as remote:\n    print(sum(len(batch['id']) for batch in remote))"
    own = """
import fastpipe, pyarrow as pa
class Numbers:
    rows = [3] * 4
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    def read(self, unit): return pa.table({"id": [unit] * 3}, schema=self.schema)
    def fingerprint(self): return "numbers"
if __name__ == "__main__":
    with fastpipe.LocalService(fastpipe.read_units(Numbers(), batch_size=2)) as remote:
        print(sum(len(batch["id"]) for batch in remote))
"""
    for text, rows in ((plain, "1000"), (own, "12")):
        done = subprocess.run(script(tmp_path, text), capture_output=True, text=True, timeout=500, check=False)
        assert (done.stdout.strip(), done.stderr) == (rows, "")


def test_ctrl_c_is_the_programs(tmp_path: Path) -> None:
    text = READ + (
        "service = fastpipe.LocalService(reader)\nremote = service.start()\n"
        "try:\n    print(service, flush=True)\n    while True: list(remote); remote.set_epoch(0)\n"
        "except KeyboardInterrupt:\n    print(len(next(iter(remote))['id']))\n"
    )
    command = script(tmp_path, text)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        server = psutil.Process(int(program.stdout.readline().rsplit("pid ", 1)[1][:-2]))
        time.sleep(0.3)
        os.killpg(program.pid, signal.SIGINT)
        out, errors = program.communicate(timeout=500)
    assert (out, errors, program.returncode) == ("100\n", "", 0)
    assert wait_until(lambda: not server.is_running(), SOON)


@apart
def test_a_forked_child_reads_from_it() -> None:
    with fastpipe.LocalService(read()) as remote:
        first = ids([next(iter(remote))])
        remote.set_epoch(0)
        child = os.fork()
        if child == 0:
            os._exit(0 if ids(remote) == ids(read()) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert ids(remote)[:1] == first


def test_another_process_cannot_use_its_readers() -> None:
    with fastpipe.LocalService(read()) as remote:
        text = (
            "import pickle, sys, fastpipe\nreader = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
            "try: list(reader)\nexcept fastpipe.ServiceError as error: print(error)"
        )
        command = [sys.executable, "-c", text, pickle.dumps(remote).hex()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert "another process's" in done.stdout


def test_a_reader_that_cannot_be_made_there(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[20] * 6])
    reader = data.read(batch_size=32)
    Path(data.paths[0]).unlink()
    with pytest.raises(fastpipe.FastpipeError, match=Path(data.paths[0]).name):
        fastpipe.LocalService(reader).start()


class Unpicklable(dict[str, int]):
    """Fails to be pickled."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def test_a_reader_that_is_not_pickled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, kind in ((MemoryError("no memory left"), MemoryError), (OSError("broken"), TypeError)):
        reader = read(500)
        monkeypatch.setattr(reader, "_progress", Unpicklable(error))
        with pytest.raises(kind, match=r"no memory left|can be pickled: broken"):
            fastpipe.LocalService(reader).start()


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
        with fastpipe.LocalService(reader, timeout=60) as remote:
            assert sum(len(batch["id"]) for batch in remote) == 200_000
        print("read")
    except (MemoryError, fastpipe.ServiceError):
        print("refused")
    except (OSError, ImportError, RuntimeError) as error:
        # Python's errors where it has no memory for a process, a module or a thread.
        assert any(word in str(error) for word in ("memory", "map", "thread")), error
        print("refused")
"""


@pytest.mark.parametrize("allowed", [20, 60, 150, 300, 600, 1500, 5000])
def test_every_limit_of_memory(allowed: int) -> None:
    """The limit holds for the program and its server. Either they read all rows, or an error says what is lacking."""
    (said,) = outputs(run(LIMITED, "RLIMIT_AS", str(allowed)))
    assert said in ("read\n", "refused\n")
    # Half of what is allowed is enough for everything but the batches.
    assert allowed < 600 or said == "read\n"


def test_memory_in_common_leaves_half_of_a_limited_address_space() -> None:
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


@pytest.mark.parametrize("allowed", [1, 10, 100])
def test_every_limit_of_files(allowed: int) -> None:
    (said,) = outputs(run(LIMITED, "RLIMIT_FSIZE", str(allowed)))
    assert said == ("read\n" if allowed == 100 else "refused\n")
