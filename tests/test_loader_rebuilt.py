"""Libraries that rebuild a loader from the attributes of another one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from typing import Any

import pytest
import torch.utils.data
from torch.utils.data import DistributedSampler, IterableDataset

from apart import apart
from fastpipe.errors import UnsupportedError
from fastpipe.torch import DataLoader
from loader_data import IN_PROCESS, WORKERS, Numbers, listed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")


def begin(worker: int) -> None:
    pass


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(6))


def as_accelerate(loader: Any) -> Any:
    """Builds a torch loader from the public attributes of another loader, as accelerate does."""
    names = set(inspect.signature(torch.utils.data.DataLoader.__init__).parameters)
    names -= {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
    streams = isinstance(loader.dataset, IterableDataset)
    batches = {"batch_size": loader.batch_size} if streams else {"batch_sampler": loader.batch_sampler}
    arguments = {name: getattr(loader, name) for name in names} | batches
    return torch.utils.data.DataLoader(loader.dataset, **arguments)


def as_fabric(loader: Any, sampler: Any) -> Any:
    """Builds a loader of the same class with another sampler, as Lightning Fabric does."""
    attributes = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    attributes["multiprocessing_context"] = loader.multiprocessing_context
    parameters = inspect.signature(type(loader)).parameters
    given = {name: attributes[name] for name, p in parameters.items() if attributes.get(name, p.default) != p.default}
    return type(loader)(**{**given, "sampler": sampler, "shuffle": False, "batch_sampler": None})


@apart
@pytest.mark.parametrize("init", [None, begin])
@pytest.mark.parametrize("way", WORKERS)
def test_replacing_it_by_torchs_loader_is_an_error(way: str, init: Any) -> None:
    loader: Any = DataLoader(Numbers(8), 4, worker_init_fn=init, **WORKERS[way])
    told = r"accelerate\.prepare .* leave it out of prepare, pass sampler="
    with pytest.raises(UnsupportedError, match=told) as raised:
        list(as_accelerate(loader))
    # If the garbage collector ends torch's iterator, its queues end first, and torch waits 5 seconds for each worker.
    traceback.clear_frames(raised.tb)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@apart
def test_torchs_loader_replaces_streams_and_loaders_without_workers() -> None:
    stream: Any = DataLoader(Stream(), 4, num_workers=1, multiprocessing_context="fork")
    for loader in (stream, DataLoader(Numbers(6), 4, **IN_PROCESS)):
        assert [batch.tolist() for batch in as_accelerate(loader)] == [[0, 1, 2, 3], [4, 5]]


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_a_rebuilt_loader_of_its_class_works_the_same(way: str) -> None:
    more: dict[str, Any] = {"num_batch_workers": 1, "memory_limit": 1 << 30, "prefetch_factor": 3, "collate_fn": listed}
    calls: list[int] = []
    loader: Any = DataLoader(Numbers(8), 2, worker_init_fn=calls.append, **more, **WORKERS[way])
    rebuilt = as_fabric(loader, DistributedSampler(loader.dataset, num_replicas=2, rank=1, shuffle=False))
    assert type(rebuilt) is DataLoader
    assert {name: getattr(rebuilt, name) for name in more} == more
    assert rebuilt.worker_method == loader.worker_method
    assert list(rebuilt) == [[1, 3], [5, 7]]
    if way == "thread":
        assert {0, 1} <= set(calls)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
@apart
@pytest.mark.parametrize("way", WORKERS)
def test_replacing_it_by_accelerate_is_an_error(way: str) -> None:
    accelerate: Any = importlib.import_module("accelerate")
    loader: Any = DataLoader(Numbers(8), 4, **WORKERS[way])
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    with pytest.raises(UnsupportedError, match=r"leave it out of prepare"):
        list(prepared)
