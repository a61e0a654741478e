"""Iterable datasets: the batches equal those of torch's loader, memory is bounded, and passes resume at every step."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data._utils import collate as torch_collate

import plain_driver
from apart import apart, children, wait_until
from fastpipe.errors import OutOfMemoryError, UnsupportedError, WorkerError
from fastpipe.torch import DataLoader, worker_info
from loader_data import FORKED, IN_PROCESS, SPAWNED, assert_same, copied, listed, outcomes
from loader_streams import KINDS, Counted, Fails, Large, OfSteps, Plain, Stateful, with_noise, worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

MB = 1 << 20


def read(make: Any, dataset: Any, arguments: dict[str, Any], epochs: int = 1) -> list[Any]:
    """Returns the batches of some passes, and a number drawn from the loader's generator after them."""
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    generator = torch.Generator().manual_seed(7) if arguments.pop("seeded", False) else None
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    loader = make(dataset, generator=generator, **arguments)
    found = [[copied(batch) for batch in loader] for _ in range(epochs)]
    return [found, torch.rand(1, generator=generator)]


def assert_as_torch(dataset: Any, arguments: dict[str, Any], epochs: int = 1) -> None:
    found = read(DataLoader, dataset(), dict(arguments), epochs)
    assert_same(found, read(torch.utils.data.DataLoader, dataset(), dict(arguments), epochs))


@apart
def test_batches_of_workers_equal_those_of_torch() -> None:
    any_streams()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    workers=st.integers(1, 3),
    size=st.sampled_from([None, 1, 2, 4]),
    drop=st.booleans(),
    kind=st.sampled_from(list(KINDS)),
    collate=st.sampled_from([None, listed, with_noise]),
    ahead=st.integers(1, 3),
    seeded=st.booleans(),
)
def any_streams(
    lengths: list[int], workers: int, size: Any, drop: bool, kind: str, collate: Any, ahead: int, seeded: bool
) -> None:
    arguments = {"batch_size": size, "drop_last": drop and size is not None, "seeded": seeded, "collate_fn": collate}
    arguments |= FORKED | {"num_workers": workers, "prefetch_factor": ahead}
    del arguments["worker_method"]
    assert_as_torch(lambda: KINDS[kind](*lengths), arguments)


@apart
def test_batches_without_workers_equal_those_of_torch() -> None:
    for kind, size, drop, collate, seeded, count in itertools.product(
        KINDS, (None, 1, 3), (False, True), (None, with_noise), (False, True), (0, 7)
    ):
        if not (size is None and drop):
            arguments = {"batch_size": size, "drop_last": drop, "collate_fn": collate, "seeded": seeded}
            assert_as_torch(lambda kind=kind, count=count: KINDS[kind](count), arguments, 2)


@apart
def test_spawned_workers_make_the_same_batches() -> None:
    expected = read(DataLoader, Stateful(5), FORKED | {"batch_size": 2, "num_workers": 1})
    assert_same(read(DataLoader, Stateful(5), SPAWNED | {"batch_size": 2}), expected)


@apart
def test_persistent_workers_keep_their_datasets() -> None:
    arguments = {"batch_size": 2, "num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
    assert_as_torch(lambda: Stateful(5, 3), arguments, 3)
    loader = DataLoader(Plain(5, 3), **arguments)
    assert len(list(loader)) == 5
    started = set(children())
    batches = iter(loader)
    next(batches)
    # Another pass begins in the middle of a pass.
    assert iter(loader) is batches
    assert len(list(batches)) == 5
    assert set(children()) == started
    del loader, batches
    gc.collect()
    assert wait_until(lambda: not children())


@apart
def test_batches_may_arrive_in_any_order() -> None:
    loader = DataLoader(Plain(8, 8), 2, in_order=False, collate_fn=listed, **FORKED)
    found = [each["name"] for batch in loader for each in batch]
    for number in "01":
        assert [name for name in found if name[0] == number] == [f"{number}.{100 + at}" for at in range(8)]


class Late:
    """A consumer that says late whether a batch is ready: it has waited for all batches in the meantime.

    The first answers, with which the loader finds out that it has to wait, come at once.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._consumer = batches._consumer
        self._at_once = len(batches._begun)

    def ready(self, batch: int) -> bool:
        found = bool(self._consumer.ready(batch))
        self._at_once -= 1
        if self._at_once < 0:
            for each, _ in self._batches._begun:
                assert self._consumer.wait(each, 60)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def slowly(items: Any) -> Any:
    time.sleep(0.1)
    return items


@apart
def test_batches_of_one_worker_arrive_in_order() -> None:
    loader = DataLoader(Plain(8), 2, in_order=False, collate_fn=slowly, **FORKED | {"num_workers": 1})
    batches: Any = iter(loader)
    batches._consumer = Late(batches)
    assert [each["name"] for batch in batches for each in batch] == [f"0.{100 + at}" for at in range(8)]
    # A reference cycle would keep the workers.
    batches._consumer = batches._consumer._consumer


def seeds(_: Any) -> Any:
    info: Any = worker_info()
    return info.id, info.num_workers, info.seed, info.dataset.lengths, torch.initial_seed()


@apart
def test_worker_info_describes_the_worker() -> None:
    torch.manual_seed(5)
    found = list(DataLoader(Plain(1, 1), 1, collate_fn=seeds, **FORKED))
    torch.manual_seed(5)
    base = int(torch.empty((), dtype=torch.int64).random_().item())
    assert found == [(number, 2, base + number, (1, 1), base + number) for number in range(2)]


class Long(Plain):
    def __len__(self) -> int:
        return 3


@apart
def test_a_wrong_length_is_reported() -> None:
    for way in (IN_PROCESS, FORKED):
        loader = DataLoader(Long(3, 3), 1, **way)
        assert len(loader) == 3
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            batches = len(list(loader))
        said = [str(each.message) for each in found if "was reported to be 3" in str(each.message)]
        assert len(said) == batches - 3


# Memory


@apart
@pytest.mark.parametrize("workers", [1, 8])
def test_at_most_prefetch_factor_batches_are_made_ahead(workers: int) -> None:
    # Two batches exceed the memory for further ones.
    dataset = Counted(20 * MB, 32)
    loader = DataLoader(dataset, 2, collate_fn=listed, **FORKED | {"num_workers": workers, "prefetch_factor": 2})
    most = 0
    for delivered, batch in enumerate(loader, 1):
        assert batch[0][0] == batch[0][-1]
        assert wait_until(lambda at=delivered: dataset.made >= min(32, 2 * at + 4))
        most = max(most, dataset.made - 2 * delivered)
        del batch
    assert (dataset.made, most) == (32, 4)


@apart
def test_small_batches_use_all_workers() -> None:
    loader = DataLoader(Counted(10, 60, 0.02), 1, **FORKED | {"num_workers": 6})
    batches: Any = iter(loader)
    list(itertools.islice(batches, 30))
    assert len(batches._begun) > 2
    assert sum(view["items"] > 1 for view in batches.look().makers) == 6


@apart
def test_large_tensors_are_collated_as_in_torch() -> None:
    arguments = {"batch_size": 3, "num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
    for lengths in ((20, 7), (0, 3)):
        for drop in (False, True):
            assert_as_torch(lambda lengths=lengths: Large(*lengths), arguments | {"drop_last": drop}, 2)


class Wrapped:
    """A value that `Collates` collates."""

    def __init__(self, number: int) -> None:
        self.value = torch.full((9000,), float(number))


class Wraps(Counted):
    def __iter__(self) -> Any:
        return map(Wrapped, range(self.count))


class Collates:
    """Collates tensors, and keeps the results of the last batches.

    Args:
        keeps: How many results are kept.
    """

    def __init__(self, keeps: int) -> None:
        self.kept: list[Any] = []
        self.keeps = keeps

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> Any:
        whole = torch_collate.collate([each.value for each in batch], collate_fn_map=collate_fn_map)
        for kept in self.kept:
            assert (kept[-1] == kept[0, 0] + len(kept) - 1).all(), "memory of the worker was reused"
        self.kept = [whole, *self.kept][: self.keeps]
        return {"whole": whole, "part": whole[-1], "is shared": is_shared(whole)}


def is_shared(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is in a file without a name, as the memory of the loader."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return "memfd" in line
    return False


@apart
@pytest.mark.parametrize("keeps", [0, 3])
def test_batches_are_collated_in_shared_memory(keeps: int) -> None:
    """Batches that the worker keeps stay valid."""
    torch_collate.default_collate_fn_map[Wrapped] = Collates(keeps)
    more = FORKED | {"num_workers": 1, "prefetch_factor": 1, "persistent_workers": True}
    loader = DataLoader(Wraps(1, 61), 2, **more)
    for number in range(2):
        found = [(batch["is shared"], batch["whole"][:, 8999].tolist(), batch["part"][0].item()) for batch in loader]
        # The size of the first batch isn't known, so it is collated in private memory. The last one has one item.
        rows = [[2.0 * row, 2.0 * row + 1][: 61 - 2 * row] for row in range(31)]
        assert found == [(number > 0 or row > 0, values, values[-1]) for row, values in enumerate(rows)]


@apart
def test_a_batch_that_exceeds_the_limit_is_an_error() -> None:
    loader = DataLoader(Counted(8 * MB, 4), 4, memory_limit=4 * MB, **FORKED)
    with pytest.raises(OutOfMemoryError, match="exceed the limit of 4194304"):
        next(iter(loader))


# Errors


@apart
@pytest.mark.parametrize("how", ["raise", "exit", "go on"])
def test_errors_are_raised_in_place_of_their_batch(how: str) -> None:
    for workers, size in itertools.product((1, 2) if how == "exit" else (0, 1, 2), (None, 2)):
        way = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else IN_PROCESS
        found = outcomes(iter(DataLoader(Fails(how), size, collate_fn=listed, **way)))
        as_torch = Fails("raise" if how == "exit" else how)
        expected = outcomes(iter(torch.utils.data.DataLoader(as_torch, size, collate_fn=listed, **way)))
        assert found == [WorkerError if each is ValueError and how == "exit" else each for each in expected]


@apart
def test_errors_of_iter_are_raised() -> None:
    assert outcomes(iter(DataLoader(Fails("begin"), 2, **FORKED))) == [ValueError, ValueError]
    with pytest.raises(ValueError, match="cannot begin"):
        iter(DataLoader(Fails("begin"), 2))


@apart
def test_the_traceback_of_the_worker_is_told() -> None:
    with pytest.raises(ValueError, match=r"(?s)in DataLoader worker process 0.*_fail.*cannot yield"):
        list(DataLoader(Fails("raise"), 2, **FORKED))

    def refuse(number: int) -> None:
        raise KeyError(f"no {number}")

    with pytest.raises(KeyError, match="no"):
        list(DataLoader(Plain(3, 3), 1, worker_init_fn=refuse, **FORKED))


class Refusing:
    """A consumer of batches that refuses to begin the next one, once."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._refuses = True

    def begin(self, *arguments: Any) -> int:
        if self._refuses:
            self._refuses = False
            raise MemoryError("no memory for a request")
        return int(self._consumer.begin(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


@apart
def test_no_batch_is_lost_if_a_request_cannot_be_sent() -> None:
    def make() -> Any:
        return DataLoader(Plain(8, 3, 5), 2, collate_fn=listed, **FORKED | {"num_workers": 3})

    expected = [[item["name"] for item in batch] for batch in make()]
    batches: Any = iter(make())
    found = [next(batches)]
    batches._consumer = Refusing(batches._consumer)
    found += outcomes(batches)
    assert found.count(MemoryError) == 1
    assert [[item["name"] for item in batch] for batch in found if batch is not MemoryError] == expected


@apart
@pytest.mark.parametrize("how", ["end", "kill", "stop"])
def test_lost_workers_are_reported(how: str) -> None:
    loader = DataLoader(Fails(how), 1, persistent_workers=True, **FORKED)
    said = {"end": "exit code 3", "kill": "SIGKILL", "stop": "stopped"}[how]
    for _ in range(2):
        with pytest.raises(WorkerError, match=said):
            list(loader)
    loader.dataset.how = "never"  # type: ignore[attr-defined]
    assert len(list(loader)) == 12


@apart
def test_arguments_for_map_style_datasets_are_rejected() -> None:
    for more in ({"num_batch_workers": 1}, {"worker_method": "thread"}):
        with pytest.raises(UnsupportedError, match="is for map-style datasets only"):
            DataLoader(Plain(3), **more)
    with pytest.raises(ValueError, match="snapshot_every_n_steps"):
        DataLoader(Plain(3), snapshot_every_n_steps=-1)
    with pytest.raises(ValueError, match="timeout"):
        iter(DataLoader(Plain(3), timeout=1))


@apart
def test_passes_are_explained() -> None:
    loader = DataLoader(Counted(100, 40, 0.01), 4, **FORKED)
    list(loader)
    assert "item-bound" in loader.explain() or "start-bound" in loader.explain()
    alone = DataLoader(Counted(100, 4, 0.01), 4)
    list(alone)
    assert "the program makes batches itself" in alone.explain()


class Finalized(Plain):
    """Counts iterators that were closed."""

    def __init__(self, file: str) -> None:
        super().__init__(9, 9)
        self.file = file

    def __iter__(self) -> Any:
        try:
            yield from super().__iter__()
        finally:
            Path(f"{self.file}{worker()}").touch()


@apart
def test_workers_close_their_iterators(tmp_path: Path) -> None:
    batches = iter(DataLoader(Finalized(str(tmp_path / "closed")), 2, **FORKED))
    assert len(list(itertools.islice(batches, 2))) == 2
    del batches
    assert sorted(each.name for each in tmp_path.iterdir()) == ["closed0", "closed1"]


# Page-locked memory


@apart
def test_batches_are_pinned_in_place() -> None:
    pins = plain_driver.install()
    expected = [batch["torch"].clone() for batch in DataLoader(OfSteps(9, 4), 2, **FORKED)]
    assert len(expected) == 7
    loader = DataLoader(OfSteps(9, 4), 2, pin_memory=True, persistent_workers=True, collate_fn=wide, **FORKED)
    for _ in range(2):
        found = [(batch.is_pinned(), batch.shape[0]) for batch in loader]
        assert found == [(True, 2)] * 5 + [(True, 2), (True, 1)]
    assert pins.copies == 0
    del loader
    gc.collect()
    assert pins.driver.is_clean()


def wide(items: Any) -> Any:
    """A batch that isn't small."""
    return torch.ones(len(items), 1000)


@apart
def test_batches_are_pinned_by_a_thread() -> None:
    pins = plain_driver.install()
    pins.driver.limit = 0
    loader = DataLoader(Plain(9, 4), 2, pin_memory=True, collate_fn=wide, **FORKED)
    for _ in range(2):
        assert [(batch.is_pinned(), batch.shape[0]) for batch in loader][-2:] == [(True, 2), (True, 1)]
    assert pins.copies > 0
