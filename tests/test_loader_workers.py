"""A loader's workers: their information, their lifetime, how they share work, and that nothing is left of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import get_worker_info

from apart import apart, children, open_files, wait_until
from fastpipe.errors import PassClosedError, WorkerError
from fastpipe.torch import DataLoader, worker_info
from loader_data import (
    ALL_WAYS,
    FORKED,
    IN_PROCESS,
    SPAWNED,
    THREADS,
    WAYS,
    WORKERS,
    AtOnce,
    Gated,
    Gathering,
    Items,
    Numbers,
    Slow,
    Squares,
    Workers,
    assert_same,
    listed,
)
from processes import together

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

workers = pytest.mark.parametrize("way", WORKERS)
ways = pytest.mark.parametrize("way", WAYS)


def told(way: dict[str, Any], **more: Any) -> list[Any]:
    """Returns the worker info of each item."""
    torch.manual_seed(5)
    loader = DataLoader(Workers(40), batch_size=4, collate_fn=listed, **way, **more)
    return [item for batch in loader for item in batch]


@apart
@workers
def test_workers_know_their_index_and_share_the_items(way: str) -> None:
    for count in (1, 2, 3):
        found = told(WORKERS[way] | {"num_workers": count})
        assert [index for *_, index in found] == list(range(40))
        assert {workers for _, _, workers, *_ in found} == {count}
        assert {number for _, number, *_ in found} == set(range(count))
        processes = {process for process, *_ in found}
        assert len(processes) == (count if way == "fork" else 1)
        assert (os.getpid() in processes) is (way == "thread")


@apart
def test_an_items_seed_is_the_same_for_any_worker() -> None:
    seeds = [
        [seed for _, _, _, seed, _ in told(way | {"num_workers": count}, prefetch_factor=ahead)]
        for way, count, ahead in [(FORKED, 1, 2), (FORKED, 3, 1), (THREADS, 2, 5), (THREADS, 1, 2)]
    ]
    assert len(set(seeds[0])) == 40
    assert all(each == seeds[0] for each in seeds)


class Tells(Numbers):
    """Returns the worker info that an item sees."""

    def __getitem__(self, index: int) -> Any:
        info: Any = worker_info()
        assert get_worker_info() is (None if info.worker_method == "thread" else info)
        for change in (lambda: setattr(info, "id", 3), lambda: setattr(info, "anything", 3)):
            with pytest.raises(RuntimeError, match="assign"):
                change()
        assert info.dataset is self
        assert type(info).__mro__[1].__name__ == "WorkerInfo"
        assert re.fullmatch(r"WorkerInfo\(id=\d, num_workers=2, seed=\d+, dataset=.*, worker_method='.*'\)", repr(info))
        assert info == info
        assert 0 <= info.seed < 2**63
        return info.worker_method


@apart
def test_worker_info_is_correct_and_read_only() -> None:
    assert worker_info() is None
    code = get_worker_info.__code__
    for way, method in ((FORKED, "multiprocessing"), (THREADS, "thread")):
        (found,) = DataLoader(Tells(6), batch_size=6, **way)
        assert found == [method] * 6
        assert worker_info() is None
        assert get_worker_info() is None
        assert get_worker_info.__code__ is code, "torch's functions must not be changed"
    # While workers run, the program's own threads have no worker info.
    batches = iter(DataLoader(Numbers(4), **THREADS))
    next(batches)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(worker_info()))
    thread.start()
    thread.join()
    assert seen == [None]


class Stream(torch.utils.data.IterableDataset[int]):
    """Yields the index of its worker."""

    def __iter__(self) -> Any:
        yield -1 if (info := worker_info()) is None else info.id


@apart
def test_worker_info_of_iterable_datasets_is_torchs() -> None:
    assert sorted(DataLoader(Stream(), batch_size=None, num_workers=2)) == [0, 1]
    assert list(DataLoader(Stream(), batch_size=None)) == [-1]


class Began(Numbers):
    """Returns what `worker_init_fn` stored in the worker's copy of the dataset."""

    began: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.began, worker_info().id  # type: ignore[union-attr]


def begin(number: int) -> None:
    info: Any = worker_info()
    assert info.id == number
    info.dataset.began = number


def collates(items: list[Any]) -> Any:
    return worker_info().id, items  # type: ignore[union-attr]


@apart
def test_worker_init_fn_is_called_in_each_worker() -> None:
    for way in (FORKED, SPAWNED):
        found = [item for batch in DataLoader(Began(8), 2, worker_init_fn=begin, **way) for item in batch[0].tolist()]
        assert set(found) <= {0, 1}
    (batch, *_) = DataLoader(Began(8), 1, worker_init_fn=begin, collate_fn=listed, **FORKED)
    assert batch[0][0] == batch[0][1]
    # Batch workers are numbered after the item workers.
    slow = DataLoader(Slow(4, {}, 0.01), 2, worker_init_fn=begin, collate_fn=collates, num_batch_workers=1, **FORKED)
    slow.dataset.began = None  # type: ignore[attr-defined]
    assert {number for number, _ in slow} == {2}
    called: list[int] = []
    list(DataLoader(Numbers(4), worker_init_fn=called.append, **THREADS))
    assert sorted(called) == [0, 1]


class Refuses:
    """A `worker_init_fn` that raises in some workers."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __call__(self, number: int) -> None:
        if number in self.numbers:
            raise ValueError(f"not {number}")


@apart
@workers
def test_errors_of_worker_init_fn_are_raised(way: str) -> None:
    for numbers in ((0, 1), (1,)):
        loader = DataLoader(Slow(40, {}, 0.001), 2, worker_init_fn=Refuses(*numbers), **WORKERS[way])
        with pytest.raises(ValueError, match=r"(?s)in DataLoader worker (process|thread) [01].*not [01]"):
            list(loader)
    joins = DataLoader(
        *(Slow(4, {}, 0.01), 2), worker_init_fn=Refuses(2), collate_fn=listed, num_batch_workers=1, **WORKERS[way]
    )
    with pytest.raises(ValueError, match="not 2"):
        next(iter(joins))


def pids(iterator: Any) -> list[int]:
    return [worker.pid for worker in iterator._workers]


@apart
def test_persistent_workers_are_kept() -> None:
    loader = DataLoader(Workers(12), 3, persistent_workers=True, collate_fn=listed, num_batch_workers=1, **FORKED)
    first = {item[0] for batch in loader for item in batch}
    started = children()
    assert len(started) == 3
    for _ in range(3):
        assert {item[0] for batch in loader for item in batch} <= {child.pid for child in started}
    # Another pass begins in the middle of a pass.
    batches = iter(loader)
    next(batches)
    assert iter(loader) is batches
    assert [item[-1] for batch in batches for item in batch] == list(range(12))
    assert set(children()) == set(started)
    assert first <= {child.pid for child in started}
    del loader, batches
    gc.collect()
    assert wait_until(lambda: not children())
    anew = DataLoader(Numbers(6), 3, **FORKED)
    list(anew)
    assert not children()


@apart
def test_persistent_threads_end_with_the_loader() -> None:
    def alive() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("fastpipe-"))

    loader = DataLoader(Numbers(12), 3, persistent_workers=True, **THREADS)
    for _ in range(2):
        assert len(list(loader)) == 4
        assert alive() == ["fastpipe-item-worker-0", "fastpipe-item-worker-1"]
    del loader
    gc.collect()
    assert wait_until(lambda: not alive())
    batches = iter(DataLoader(Numbers(12), 3, **THREADS))
    next(batches)
    del batches
    assert wait_until(lambda: not alive())


@apart
@workers
def test_nothing_is_left_of_a_loop_that_ends_early(way: str) -> None:
    loader = DataLoader(Slow(1000, {}, 0.001), 4, **WORKERS[way])
    for number in range(6):
        for batch in loader:
            assert batch.tolist() == [0, 1, 2, 3]
            if number % 2:
                break
            if number % 3 == 0:
                next(iter(loader))
            break
        assert wait_until(lambda: not children())

    def fails(loader: Any) -> None:
        for _ in loader:
            raise KeyError("the model")

    with pytest.raises(KeyError):
        fails(loader)
    gc.collect()
    assert wait_until(lambda: not children())
    # A batch outlives its loader.
    batches = iter(DataLoader(Squares(8), 4, **WORKERS[way]))
    kept = next(batches)
    del batches
    gc.collect()
    assert kept["row"][3].tolist() == [9.0, 16.0, 25.0]
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None


@apart
@workers
def test_no_files_are_left_open_over_many_passes(way: str) -> None:
    loader = DataLoader(Numbers(4), 2, **WORKERS[way])
    kept = DataLoader(Numbers(4), 2, persistent_workers=True, **WORKERS[way])
    for _ in range(2):
        list(loader), list(kept)
    before, threads = len(open_files()), threading.active_count()
    maps = len(psutil.Process().memory_maps(grouped=False))
    for _ in range(50):
        list(loader), list(kept)
    gc.collect()
    assert len(open_files()) == before
    assert threading.active_count() == threads
    assert len(psutil.Process().memory_maps(grouped=False)) < maps + 40


class Runs(Numbers):
    """Returns torch's number of threads in a worker, and whether the worker ignores Ctrl-C."""

    def __getitem__(self, index: int) -> Any:
        return torch.get_num_threads(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@apart
def test_workers_are_set_up_like_in_torch() -> None:
    threads, ignored = next(iter(DataLoader(Runs(2), 2, **FORKED)))
    assert threads.tolist() == [1, 1]
    assert ignored.tolist() == [True, True]
    assert all(child.daemon for child in iter(DataLoader(Numbers(2), **FORKED))._workers)  # type: ignore[attr-defined]


class Initial(Numbers):
    """torch's seed and the first draws of generators, in `worker_init_fn` of two workers."""

    drawn: Any = None

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.together = Gathering(2)

    def __getitem__(self, index: int) -> Any:
        # Ensures that each worker makes some items.
        self.together.wait(self.drawn[0])
        return self.drawn


def drawing(number: int) -> None:
    info: Any = worker_info()
    info.dataset.drawn = number, info.seed, torch.initial_seed(), random.random(), np.random.rand()


@apart
def test_workers_begin_with_the_seeds_of_torch() -> None:
    def drawn(loader: Any) -> list[Any]:
        return sorted({tuple(items[0]) for items in loader})

    arguments: dict[str, Any] = {"collate_fn": listed, "worker_init_fn": drawing} | FORKED
    arguments.pop("worker_method")
    torch.manual_seed(2)
    expected = drawn(torch.utils.data.DataLoader(Initial(60), **arguments))
    torch.manual_seed(2)
    found = drawn(DataLoader(Initial(60), worker_method="multiprocessing", num_batch_workers=0, **arguments))
    assert found == expected
    assert [each[2] - each[0] for each in found] == [found[0][2]] * 2


@apart
@ways
def test_timeout_is_for_workers(way: str, tmp_path: Path) -> None:
    if way == "alone":
        with pytest.raises((ValueError, AssertionError), match="timeout"):
            iter(DataLoader(Numbers(3), timeout=1, **IN_PROCESS))
        return
    go = tmp_path / "go"
    batches: Any = iter(DataLoader(Gated(4, 1, go), timeout=60, **WAYS[way]))
    assert next(batches).item() == 0
    # The timeout is set only now, because workers may take longer to start.
    batches._timeout = 0.3
    begin_of_wait = time.monotonic()
    with pytest.raises(WorkerError, match=r"timed out after 0.3 seconds.*row 0 of batch 1, index 1, for \d+\.\d s"):
        next(batches)
    assert time.monotonic() - begin_of_wait > 0.25
    # The batch may be requested again.
    batches._timeout = 60
    go.touch()
    assert [batch.item() for batch in batches] == [1, 2, 3]


@apart
@ways
def test_a_pass_is_read_by_several_threads(way: str) -> None:
    batches = iter(DataLoader(Slow(300, {}, 0.0005), 3, **WAYS[way]))
    found: list[list[int]] = []
    failed: list[BaseException] = []

    def read() -> None:
        try:
            found.extend(batch.tolist() for batch in batches)
        except BaseException as error:
            failed.append(error)

    together([threading.Thread(target=read) for _ in range(4)])
    assert not failed
    assert sorted(found) == [[row, row + 1, row + 2] for row in range(0, 300, 3)]


@apart
@workers
def test_a_loader_may_be_used_from_a_thread_that_ends(way: str) -> None:
    passes: list[Any] = []

    def start() -> None:
        passes.append(iter(DataLoader(Slow(60, {}, 0.01), 3, **WORKERS[way])))
        passes.append(next(passes[0]).tolist())

    thread = threading.Thread(target=start)
    thread.start()
    task = Path(f"/proc/self/task/{thread.native_id}")
    thread.join()
    assert wait_until(lambda: not task.exists())
    assert [passes[1], *(batch.tolist() for batch in passes[0])] == [[n, n + 1, n + 2] for n in range(0, 60, 3)]


@apart
def test_a_forked_child_does_not_take_part_in_a_pass() -> None:
    for way in (FORKED, THREADS):
        loader = DataLoader(Slow(20, {}, 0.005), 2, **way)
        batches = iter(loader)
        first = next(batches)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(PassClosedError, match="iter"):
                    next(batches)
                assert first.tolist() == [0, 1]
                del batches, first
                gc.collect()
                # A loader of the child's own.
                own = DataLoader(Numbers(5), 2, **FORKED)
                assert [batch.tolist() for batch in own] == [[0, 1], [2, 3], [4]]
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert [batch.tolist() for batch in batches] == [[n, n + 1] for n in range(2, 20, 2)]


class Nested(Numbers):
    """Items that use another loader."""

    def __getitem__(self, index: int) -> Any:
        arguments = THREADS if index % 2 else IN_PROCESS
        return torch.cat(list(DataLoader(Numbers(index + 1), 2, **arguments)))


@apart
@ways
def test_items_may_be_made_by_loaders(way: str) -> None:
    found = list(DataLoader(Nested(5), collate_fn=listed, **WAYS[way]))
    assert [items[0].tolist() for items in found] == [list(range(count)) for count in range(1, 6)]


@apart
def test_the_context_may_be_an_object() -> None:
    torch.manual_seed(0)
    for context in (multiprocessing.get_context("fork"), torch.multiprocessing.get_context("fork")):
        loader = DataLoader(Numbers(3), num_workers=1, multiprocessing_context=context, worker_method="multiprocessing")
        assert torch.cat(list(loader)).tolist() == [0, 1, 2]
    multiprocessing.set_start_method("fork", force=True)
    assert torch.cat(list(DataLoader(Numbers(3), num_workers=1))).tolist() == [0, 1, 2]


@apart
def test_spawned_workers_name_unpicklable_objects() -> None:
    lambdas = DataLoader(Items([lambda: 1]), **SPAWNED)
    with (
        pytest.warns(UserWarning, match="can't be pickled"),
        pytest.raises((TypeError, AttributeError), match="pickle"),
    ):
        iter(lambdas)
    assert wait_until(lambda: not children())


class Awaiting(Numbers):
    """Numbers. The first one waits until two more are made."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.made = Gathering(3)

    def __getitem__(self, index: int) -> int:
        if index == 0:
            self.made.wait(2)
        elif index <= 2:
            self.made.come(index - 1)
        return super().__getitem__(index)


@apart
def test_workers_share_the_items_of_a_batch() -> None:
    """Both workers make rows of one batch at the same time, so one slow item doesn't delay the others."""
    for way in (FORKED, THREADS):
        assert [batch.tolist() for batch in DataLoader(Awaiting(8), 8, **way)] == [[*range(8)]]


@apart
def test_a_slow_item_delays_no_other_batch(tmp_path: Path) -> None:
    for way in (FORKED, THREADS):
        go = tmp_path / way["worker_method"]
        batches = iter(DataLoader(Gated(400, 0, go), 4, prefetch_factor=2, in_order=False, **way))
        found = [next(batches).tolist() for _ in range(50)]
        assert [0, 1, 2, 3] not in found
        go.touch()
        found += [batch.tolist() for batch in batches]
        assert sorted(found) == [[*range(first, first + 4)] for first in range(0, 400, 4)]


@apart
def test_batches_of_all_ways_are_the_same() -> None:
    expected = list(DataLoader(Squares(50), 7, shuffle=True, generator=torch.Generator().manual_seed(1)))
    for way in ALL_WAYS.values():
        found = DataLoader(Squares(50), 7, shuffle=True, generator=torch.Generator().manual_seed(1), **way)
        assert_same(list(found), expected)
    whole = DataLoader(AtOnce(50), 7, **FORKED)
    assert_same(list(whole), list(DataLoader(AtOnce(50), 7)))


def by_whom(items: list[Any]) -> int:
    time.sleep(0.02)
    return int(worker_info().id)


@apart
@workers
def test_batch_workers_do_costly_collation_of_cheap_items(way: str) -> None:
    """An item worker collates cheap items itself, unless several batch workers are faster at a costly `collate_fn`."""
    options = WORKERS[way] | {"num_workers": 1, "num_batch_workers": 4, "prefetch_factor": 4}
    # No worker makes a batch before all have started. Otherwise the item worker would collate while others start.
    options["worker_init_fn"] = Gathering(5).wait
    found = list(DataLoader(Numbers(160), 4, collate_fn=by_whom, **options))
    assert len(found) == 40
    # The item worker may have collated some batches before the costs were known.
    assert sum(worker >= 1 for worker in found) > 30
    assert len(set(found)) > 2
