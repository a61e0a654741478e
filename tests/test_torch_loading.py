"""Loaders with workers, and several ranks, read every row once per epoch and resume where they stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import loading
import samples
from apart import apart
from samples import Data, ids_by_batch
from servers import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="requires os.fork and /proc")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return samples.write(tmp_path_factory.mktemp("loading"), [samples.blocks_of(100), samples.blocks_of(103, (3, 1))])


def start(**request: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        # Spawned workers inherit warning filters only from the command line.
        [sys.executable, "-W", "ignore:num_workers=", loading.__file__, json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@apart(looks=False)
def answers(request: dict[str, Any], to: str) -> None:
    """Writes a program's result to a file, and checks that the program prints nothing."""
    # Spawned workers inherit warning filters only from `sys.warnoptions`.
    sys.warnoptions.append("ignore:num_workers=")
    Path(to).write_text(json.dumps(loading.answer(request)))
    sys.stderr.flush()
    assert os.fstat(sys.stderr.fileno()).st_size == 0, "the program must not print anything"


def run(**request: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder, "answer")
        answers(request=request, to=str(to))
        return json.loads(to.read_text())


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


@pytest.mark.parametrize(("method", "workers"), [("fork", 1), ("fork", 3), ("spawn", 2), ("forkserver", 2)])
def test_workers_read_every_row_once_each_epoch(data: Data, method: str, workers: int) -> None:
    count = 2 if method == "spawn" else 3
    found = run(program="passes", paths=data.paths, count=count, workers=workers, method=method)
    fresh, kept = found["passes"]
    assert fresh == kept
    orders = [flat(batches) for batches in fresh]
    assert [sorted(order) for order in orders] == count * [list(range(data.total))]
    assert len({tuple(order) for order in orders}) == count
    # Each worker reads the shard of one rank.
    assert sorted(fresh[0]) == batches_of(data, 0, workers)
    # A loop that was left early counts as an epoch.
    assert sorted(found["again"]) == batches_of(data, count + 1, workers)
    assert "StatefulDataLoader" in found["refused"]


def batches_of(data: Data, epoch: int, workers: int = 2) -> list[list[int]]:
    """Returns the sorted batches of an epoch that workers share."""
    options = loading.OPTIONS | {"on_uneven": "allow", "world_size": workers}
    shares = [data.read(**options, rank=rank) for rank in range(workers)]
    for share in shares:
        share.set_epoch(epoch)
    return sorted(batch for share in shares for batch in ids_by_batch(share))


# Workers of a fork server get the same data as spawned workers, which each spend seconds on importing torch.
@pytest.mark.parametrize(("method", "kept"), [("fork", False), ("fork", True), ("forkserver", False)])
def test_all_workers_of_a_pass_read_one_epoch(data: Data, method: str, kept: bool) -> None:
    ways = ["set at once", "set in the loop", "read"]
    found = run(program="meanwhile", paths=data.paths, ways=ways, method=method, kept=kept)
    assert list(found) == ways
    for what, (first, here, second, third, next_epoch) in found.items():
        later = 1 if what == "read" else 4
        for epoch, batches in ((0, first), (later, second), (later + 1, third)):
            assert sorted(flat(batches)) == list(range(data.total))
            assert sorted(batches) == batches_of(data, epoch), (what, epoch)
        assert here is None or sorted(here) == batches_of(data, 0)
        assert next_epoch == later + 2


@pytest.mark.parametrize(
    ("method", "kept", "by"),
    [
        ("fork", False, "torch"),
        ("fork", True, "torch"),
        ("forkserver", False, "torch"),
        ("fork", False, "torchdata"),
        ("fork", False, "fastpipe"),
        ("fork", True, "fastpipe"),
    ],
)
def test_loops_left_early_count_as_epochs(data: Data, method: str, kept: bool, by: str) -> None:
    found = run(program="left", paths=data.paths, method=method, kept=kept, by=by)
    for epoch, batches in enumerate(found["left"]):
        # Batches of workers alternate, so these are the first batches of each shard.
        assert batches
        assert all(batch in batches_of(data, epoch) for batch in batches)
    assert found["set"] == found["left"][2]
    assert sorted(found["whole"]) == batches_of(data, 3)
    assert sorted(found["next"]) == batches_of(data, 4)


def test_repeated_seeds_do_not_repeat_epochs(data: Data) -> None:
    # Epoch 1 is missing because that pass was left early.
    for epoch, batches in zip((0, 2, 3, 4), run(program="alike", paths=data.paths), strict=True):
        alone = data.read(**loading.OPTIONS)
        alone.set_epoch(epoch)
        assert sorted(batches) == sorted(ids_by_batch(alone))


def test_concurrent_loaders(data: Data) -> None:
    slow, quick, here = run(program="beside", paths=data.paths)
    assert sorted(slow) == batches_of(data, 0)
    assert sorted(quick) == batches_of(data, 1)
    assert sorted(here) == batches_of(data, 2)


@pytest.mark.parametrize("on_uneven", ["drop", "pad", "allow"])
@pytest.mark.parametrize(("batch_size", "more"), [(7, {}), (70, {"shuffle_buffer": 70}), (20, {"shuffle": "block"})])
def test_workers_share_the_shard_of_their_rank(
    data: Data, on_uneven: str, batch_size: int, more: dict[str, Any]
) -> None:
    """Uses 203 rows, which are 29 batches of 7 or 3 batches of 70, and 2 ranks with 5 workers each."""
    more = {"batch_size": batch_size, "on_uneven": on_uneven, **more}
    found = run(program="shares", paths=data.paths, workers=5, more=more)
    seen: list[int] = []
    for length, batches, alone in found:
        if more.get("shuffle") != "block":
            # With block order, each worker's last batch may be short.
            assert length == len(batches) == len(alone)
        assert any(batches)
        seen += flat(batches)
    assert len(set(seen)) == len(seen)
    if on_uneven != "allow":
        assert len({len(batches) for _, batches, _ in found}) == 1
    if on_uneven != "drop":
        assert sorted(seen) == list(range(data.total))


def test_workers_that_only_read_cause_one_warning(data: Data, tmp_path: Path) -> None:
    found = run(program="warned", paths=data.paths, folder=str(tmp_path))
    once = found.pop("plain")
    assert len(once) == 1
    assert re.match("num_workers=2 makes a DataLoader of this reader slower.* Set num_workers=0", once[0])
    assert found == {"kept": once, "map": [], "collate_fn": [], "none": []}


def test_errors_of_workers_name_the_place(data: Data, tmp_path: Path) -> None:
    broken = tmp_path / "broken.avro"
    content = bytearray(Path(data.paths[0]).read_bytes())
    # Overwrites the last block except for its header and the sync marker. No varint ends there.
    begin = content.rindex(content[-16:], 0, -16) + 16 + 4
    content[begin:-16] = b"\xff" * (len(content) - 16 - begin)
    broken.write_bytes(content)
    first, again, remote, remote_again = run(program="damaged", paths=[str(broken)])
    assert first == again
    assert first[:2] == ["MalformedFileError", True]
    assert first[3] == str(broken)
    assert first[4] is not None
    assert first[5] is not None
    for each in (remote, remote_again):
        assert [*each[:2], *each[3:]] == [*first[:2], *first[3:]]
        assert first[2] in each[2]
        assert "in DataLoader worker process 0" in each[2]


@pytest.mark.parametrize("by", ["torchdata", "fastpipe"])
@pytest.mark.parametrize(("workers", "shuffle"), [(1, True), (2, True), (2, "block")])
def test_stateful_loaders_with_workers_resume(
    data: Data, workers: int, shuffle: bool | str, by: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    steps = [0, 1, 4]
    if shuffle == "block":
        # Worker 1 finishes long before worker 0. The state must record that, or worker 1 would begin the next epoch.
        data = samples.write(tmp_path_factory.mktemp("on_uneven"), [[120, 5, 60, 6, 4]])
        steps = [6, 15]
    found = run(program="stateful", paths=data.paths, workers=workers, steps=steps, shuffle=shuffle, by=by)
    first, second = found["expected"]
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(data.total))
    *midway, at_end = found["found"]
    assert midway == len(midway) * [[first, second]]
    assert at_end[0][: len(first)] == first


def in_shm() -> set[str]:
    """Returns the names that these programs create in /dev/shm, except the name of another test's server, which exists
    as long as the server.
    """
    ways = ("fastpipe", "torch_", "sem.", "psm_", "pym")
    return {name for name in os.listdir("/dev/shm") if name.startswith(ways)}


@pytest.mark.parametrize("how", ["break", "exception", "worker killed", "Ctrl-C"])
def test_loops_end_at_once_and_leak_nothing(data: Data, how: str) -> None:
    shared = in_shm()
    process = start(program="ended", paths=data.paths, how=how)
    assert process.stdout is not None
    workers = json.loads(process.stdout.readline())
    if how == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        for left in [*psutil.Process(process.pid).children(recursive=True), process]:
            left.kill()
        raise
    assert len(workers) == 2
    for worker in workers:
        assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    # Other tests run at the same time. Their files disappear when they end.
    left, end = in_shm() - shared, time.monotonic() + 90
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left &= in_shm()
    if how == "worker killed":
        # Torch removes a file's name right after creating it. A worker that is killed in between leaves the name.
        halfway = {name for name in left if name.startswith(tuple(f"torch_{worker}_" for worker in workers))}
        assert len(halfway) <= 1
        left -= halfway
        for name in halfway:
            os.remove(f"/dev/shm/{name}")
    assert not left
    last = errors.strip().splitlines()[-1:]
    if how == "break":
        assert (process.returncode, errors) == (0, "")
    elif how == "exception":
        assert process.returncode == 1
        assert last == ["RuntimeError: the model failed"]
        assert errors.count("Traceback") == 1
    elif how == "worker killed":
        assert process.returncode == 1
        # The message is that of the loader's handler of SIGCHLD or of its check after a timeout, or, if the loader was
        # fetching a tensor at that moment, the error of the connection to the worker. Output of the other worker, whose
        # queue is closed, may follow. So may Python's report of an error during printing.
        messages = r"is killed by signal: Killed|exited unexpectedly|\b(EOFError|Connection\w+Error)\b"
        assert re.search(messages, errors), errors
    else:
        assert process.returncode in (1, -signal.SIGINT)
        # If the loader was fetching a tensor at that moment, the sending thread of the worker
        # (`multiprocessing.resource_sharer`) may print later that its connection is closed. An interrupt during
        # connecting leaves a socket that Python closes with a warning.
        told = [
            line for line in errors.splitlines() if not re.match("Exception ignored in: <socket|ResourceWarning", line)
        ]
        assert "KeyboardInterrupt" in told, errors
        assert re.match(r"KeyboardInterrupt$|(Connection\w+|BrokenPipe)Error\b", told[-1]), errors


def one_rank(place: dict[str, Any], folder: str, request: dict[str, Any]) -> None:
    os.environ |= {name: str(value) for name, value in place.items()}
    log = os.open(Path(folder, f"{place['RANK']}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, sys.stderr.fileno())
    loading.answer(request)


@apart(looks=False)
def run_ranks(world: int, folder: str, request: dict[str, Any]) -> None:
    """Forks a process for each rank. Their output goes to files."""
    where = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    places = [{"RANK": rank, "LOCAL_RANK": rank, **where} for rank in range(world)]
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=one_rank, args=(place, folder, request)) for place in places]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        process.join()
        assert process.exitcode == 0, Path(folder, f"{rank}.log").read_text()


def ranks(paths: list[str], world: int, folder: Path, stop: int) -> list[list[list[int]]]:
    """Returns the rows of the batches of each rank."""
    run_ranks(
        world=world,
        folder=str(folder),
        request={"program": "rank", "paths": paths, "folder": str(folder), "stop": stop},
    )
    for rank in range(world):
        said = (folder / f"{rank}.log").read_text()
        assert f"rank {rank} of {world} reads its shard (by torch.distributed)" in said
    return [json.loads((folder / f"{world}-{rank}.json").read_text())["rows"] for rank in range(world)]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_have_equal_numbers_of_batches_and_each_row_once(data: Data, world: int, tmp_path: Path) -> None:
    found = ranks(data.paths, world, tmp_path, 0)
    assert len({len(batches) for batches in found}) == 1
    seen = [row for batches in found for row in flat(batches)]
    assert len(set(seen)) == len(seen)
    # There are 29 batches. The remainder that can't be divided evenly is dropped.
    assert data.total - len(seen) <= (29 % world) * 7


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_resumes(data: Data, before: int, after: int, tmp_path: Path) -> None:
    first = ranks(data.paths, before, tmp_path, 4)
    assert {len(batches) for batches in first} == {4}
    rest = ranks(data.paths, after, tmp_path, 0)
    assert len({len(batches) for batches in rest}) == 1
    batches = [tuple(batch) for share in first + rest for batch in share]
    whole = {tuple(batch) for batch in ids_by_batch(data.read(**loading.OPTIONS))}
    assert len(set(batches)) == len(batches)
    assert set(batches) <= whole
    assert len(whole) - len(batches) < after
