"""The documented behavior of torch's `DataLoader` in fastpipe's loader.

Tests cover arguments, samplers, batches and torch's datasets. torch's loader without workers is the oracle.
test_loader_collation.py tests collation, test_loader_workers.py workers, and test_loader_errors.py errors.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from apart import apart
from fastpipe.errors import UnsupportedError
from fastpipe.torch import DataLoader
from loader_data import (
    ALL_WAYS,
    FORKED,
    THREADS,
    WAYS,
    AtOnce,
    Described,
    Echo,
    Items,
    Numbers,
    Squares,
    assert_same,
    copied,
    listed,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

ways = pytest.mark.parametrize("way", WAYS)


def read(dataset: Any, way: str, **more: Any) -> list[Any]:
    """Returns a pass of fastpipe's loader with a fixed seed."""
    torch.manual_seed(3)
    return [copied(batch) for batch in DataLoader(dataset, **ALL_WAYS[way], **more)]


def oracle(dataset: Any, **more: Any) -> list[Any]:
    """Returns a pass of torch's loader with the same seed."""
    torch.manual_seed(3)
    return list(torch.utils.data.DataLoader(dataset, **more))


class InTurn(torch.utils.data.Sampler[int]):
    """Yields the given indices in each pass."""

    def __init__(self, indices: list[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequence": lambda: {"batch_size": 3},
    "one by one": dict,
    "one batch": lambda: {"batch_size": 100},
    "short batch left out": lambda: {"batch_size": 3, "drop_last": True},
    "shuffled": lambda: {"batch_size": 3, "shuffle": True},
    "shuffled by a generator": lambda: {
        "batch_size": 3,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(8),
    },
    "sampler": lambda: {"batch_size": 4, "sampler": InTurn([3, 3, 0, 9, 1])},
    "a list as sampler": lambda: {"batch_size": 2, "sampler": [5, 4, 3]},
    "replacement": lambda: {"batch_size": 3, "sampler": RandomSampler(range(10), replacement=True, num_samples=40)},
    "subset": lambda: {"batch_size": 2, "sampler": SubsetRandomSampler([1, 2, 3, 8, 9])},
    "weights": lambda: {"batch_size": 3, "sampler": WeightedRandomSampler([0.1, 0.9, 3.0], 20)},
    "rank": lambda: {"batch_size": 2, "sampler": DistributedSampler(range(10), num_replicas=3, rank=1, seed=2)},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(10)), 3, True)},
    "batches as lists": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6, 7], [0]]},
    "batches as tuples": lambda: {"batch_sampler": [(1, 2), range(3, 6)]},
    "an empty sampler": lambda: {"batch_size": 2, "sampler": []},
    "samples as they are": lambda: {"batch_size": None},
    "samples, shuffled": lambda: {"batch_size": None, "shuffle": True},
    "samples of a sampler": lambda: {"batch_size": None, "sampler": [7, 2]},
}


@apart
@ways
def test_each_order_matches_torch(way: str) -> None:
    for name, order in ORDERS.items():
        dataset = Squares(10)
        loader = DataLoader(dataset, **ALL_WAYS[way], **order())
        plain: Any = torch.utils.data.DataLoader(dataset, **order())
        assert len(loader) == len(plain), name
        # The same numbers are drawn from torch's generator.
        for epoch in range(2):
            for each in (loader.sampler, plain.sampler):
                if isinstance(each, DistributedSampler):
                    each.set_epoch(epoch)
            torch.manual_seed(epoch)
            expected = list(plain)
            left = torch.get_rng_state()
            torch.manual_seed(epoch)
            assert_same([copied(batch) for batch in loader], expected)
            assert torch.equal(torch.get_rng_state(), left), name


@apart
def test_the_order_does_not_depend_on_the_start_method() -> None:
    expected = oracle(Squares(10), batch_size=3, shuffle=True)
    # With the fork server, only the server imports torch.
    for way in ("spawn", "forkserver"):
        assert_same(read(Squares(10), way, batch_size=3, shuffle=True), expected)


def refusal(kind: Any, arguments: dict[str, Any]) -> Any:
    """Returns the error or warning of a loader for these arguments."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            kind(Numbers(4), **arguments)
        except Exception as error:
            return type(error), str(error), [str(each.message) for each in seen]
    raise AssertionError("no error or warning")


@apart
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"prefetch_factor": -1, "num_workers": 1},
        {"persistent_workers": True},
        {"sampler": [1], "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "sampler": [1]},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"batch_size": "2"},
        {"drop_last": 1},
        {"multiprocessing_context": "fork"},
        {"multiprocessing_context": "by hand", "num_workers": 1},
        {"multiprocessing_context": 3, "num_workers": 1},
        {"generator": 3, "shuffle": True, "batch_size": 1.5},
    ],
    ids=str,
)
def test_arguments_are_rejected_like_in_torch(arguments: dict[str, Any]) -> None:
    assert refusal(DataLoader, arguments) == refusal(torch.utils.data.DataLoader, arguments)


@apart
def test_additional_arguments_are_checked() -> None:
    for arguments, kind in [
        ({"num_batch_workers": -1}, ValueError),
        ({"num_batch_workers": 1.5}, TypeError),
        ({"memory_limit": 0}, ValueError),
        ({"memory_limit": "1 GX"}, ValueError),
        ({"worker_method": "green"}, ValueError),
        ({"worker_method": "thread", "multiprocessing_context": "fork"}, ValueError),
    ]:
        with pytest.raises(kind, match=r"num_batch_workers|memory_limit|worker_method|threads?"):
            DataLoader(Numbers(4), num_workers=1, **arguments)  # type: ignore[arg-type]
    assert DataLoader(Numbers(4), num_workers=1, memory_limit=np.int64(5)).memory_limit == 5
    assert DataLoader(Numbers(4), num_workers=1, memory_limit="5KiB").memory_limit == 5120
    with pytest.raises(TypeError):
        DataLoader(Numbers(4), 1, False, None, None, 0, None, False, False, 0, None, None, None, 2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unknown"):
        DataLoader(Numbers(4), unknown=1)  # type: ignore[call-arg]


@apart
@pytest.mark.parametrize("free_threaded", [False, True])
def test_processes_are_the_default(free_threaded: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "_is_gil_enabled", lambda: not free_threaded, raising=False)
        assert DataLoader(Numbers(5), num_workers=2).worker_method == "multiprocessing"
        assert DataLoader(Numbers(5), num_workers=2, worker_method="thread").worker_method == "thread"
        with pytest.raises(ValueError, match="multiprocessing_context"):
            DataLoader(Numbers(5), num_workers=2, multiprocessing_context="spawn", worker_method="thread")


@apart
def test_positional_arguments_match_torch() -> None:
    loader = DataLoader(
        Numbers(5),
        2,
        False,
        None,
        None,
        1,
        listed,
        False,
        True,
        7.5,
        None,
        "fork",
        torch.Generator(),
        prefetch_factor=3,
    )
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.timeout) == (2, 1, True, 7.5)
    assert (loader.collate_fn, loader.prefetch_factor, loader.in_order) == (listed, 3, True)
    assert loader.multiprocessing_context.get_start_method() == "fork"
    assert list(loader) == [[0, 1], [2, 3]]
    assert DataLoader(Numbers(1)).multiprocessing_context is None
    assert isinstance(DataLoader(Numbers(1), shuffle=True).sampler, RandomSampler)
    assert isinstance(DataLoader(Numbers(1)).sampler, SequentialSampler)
    assert isinstance(DataLoader(Numbers(1)).batch_sampler, BatchSampler)


@apart
def test_some_attributes_cannot_be_set() -> None:
    loader = DataLoader(Numbers(3))
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"):
        with pytest.raises(ValueError, match="should not be set after"):
            setattr(loader, name, 1)
    # As in torch's loader, other attributes can be set.
    loader.num_workers = 1
    loader.multiprocessing_context = "fork"
    assert [batch.item() for batch in loader] == [0, 1, 2]


@apart
@ways
def test_samples_are_converted_one_by_one_without_batches(way: str) -> None:
    items = [np.ones(2), 3, "text", {"a": np.float32(2)}, (b"x", [np.zeros((1, 2), np.int8)]), None]
    assert_same(read(Items(items), way, batch_size=None), oracle(Items(items), batch_size=None))
    assert read(Items([1, 2, 3]), way, batch_size=None, collate_fn=str) == ["1", "2", "3"]
    assert read(AtOnce(3), way, batch_size=None) == [0, 1, 2]


@apart
@ways
def test_a_collate_fn_is_given_lists_in_order(way: str) -> None:
    assert read(Numbers(7), way, batch_size=3, collate_fn=listed) == [[0, 1, 2], [3, 4, 5], [6]]
    found = read(Items([{"a": 1}, Ellipsis, "x"]), way, batch_size=2, collate_fn=lambda items: items[::-1])
    assert found == [[Ellipsis, {"a": 1}], ["x"]]
    sums = read(Squares(5), way, batch_size=2, collate_fn=lambda items: sum(item["row"] for item in items))
    assert_same(sums, oracle(Squares(5), batch_size=2, collate_fn=lambda items: sum(item["row"] for item in items)))


@apart
@ways
def test_getitems_is_used_if_available(way: str) -> None:
    for dataset in (AtOnce(10), Subset(AtOnce(10), [7, 1, 2, 3]), StackDataset(AtOnce(10), Squares(10))):
        for more in ({"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": 4, "shuffle": True}):
            assert_same(read(dataset, way, **more), oracle(dataset, **more))
    assert read(AtOnce(5), way, batch_size=3, collate_fn=listed) == [[(0, 3), (1, 3), (2, 3)], [(3, 2), (4, 2)]]
    # `__getitem__` is used if `__getitems__` is not a method.
    plain = Numbers(3)
    plain.__getitems__ = None  # type: ignore[attr-defined]
    assert read(plain, way, batch_size=3, collate_fn=listed) == [[0, 1, 2]]


@apart
@ways
def test_datasets_of_torch(way: str) -> None:
    rows = TensorDataset(torch.arange(24.0).reshape(8, 3), torch.arange(8))
    datasets: list[Any] = [
        rows,
        Subset(rows, [5, 1, 7]),
        Subset(Subset(rows, [5, 1, 7]), [2, 0]),
        ConcatDataset([Numbers(3), Numbers(4)]),
        StackDataset(rows, Numbers(8)),
        StackDataset(features=rows, number=Numbers(8)),
        *random_split(rows, [0.5, 0.5], torch.Generator().manual_seed(1)),
        [1, 2, 3],
        np.arange(6).reshape(3, 2),
        torch.eye(3),
        {0: "a", 1: "b"},
        "text",
        range(5),
    ]
    for dataset in datasets:
        for more in ({"batch_size": 3}, {"batch_size": 2, "shuffle": True}):
            assert_same(read(dataset, way, **more), oracle(dataset, **more))


@apart
@ways
def test_indices_keep_their_classes(way: str) -> None:
    class Sub(int):
        pass

    indices: list[Any] = [
        *("a", (1, "b"), 2**63 - 1, -(2**63), 2**63, -(2**70), True, None, 1.5, b"x", frozenset({3})),
        *(np.int32(5), np.str_("n"), torch.tensor(3), torch.tensor([1, 2]), slice(1, 2), np.arange(3), Ellipsis),
    ]
    expected = [f"{type(index).__module__}.{type(index).__name__} {index!r}" for index in indices]
    for more in ({"batch_size": 4}, {"batch_size": None}, {"batch_size": 1}):
        found = read(Described(), way, sampler=InTurn(indices), **more)
        assert list(itertools.chain.from_iterable(found) if more["batch_size"] else found) == expected
    # Objects that can't be pickled can't be sent to workers.
    if way == "alone":
        assert read(Described(), way, batch_sampler=[[Sub(3), 4]]) == [[f"{Sub.__module__}.Sub 3", "builtins.int 4"]]
    assert_same(
        read(Echo(), way, batch_sampler=[[np.int16(2), np.int16(3)]]), [torch.tensor([2, 3], dtype=torch.int16)]
    )


@apart
@ways
def test_a_loader_may_be_read_again_and_by_several_loops(way: str) -> None:
    loader = DataLoader(Numbers(6), batch_size=2, **WAYS[way])
    whole = [[0, 1], [2, 3], [4, 5]]
    assert [batch.tolist() for batch in loader] == whole
    pairs = [(one.tolist(), other.tolist()) for one in loader for other in loader]
    assert pairs == list(itertools.product(whole, whole))
    one, other = iter(loader), iter(loader)
    assert iter(one) is one
    assert [next(one).tolist(), next(other).tolist(), next(other).tolist(), next(one).tolist()] == [
        *(whole[0], whole[0]),
        *(whole[1], whole[1]),
    ]
    for batch in loader:
        assert batch.tolist() == [0, 1]
        break
    assert [batch.tolist() for batch in loader] == whole
    ended = iter(loader)
    assert len(list(ended)) == 3
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(ended)


@apart
@ways
def test_an_unsized_sampler_has_no_length(way: str) -> None:
    def counted() -> Iterator[int]:
        yield from range(5)

    class Unsized:
        def __iter__(self) -> Iterator[int]:
            return counted()

    loader = DataLoader(Numbers(5), batch_size=2, sampler=Unsized(), **WAYS[way])
    with pytest.raises(TypeError, match="len"):
        len(loader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert list(DataLoader(Numbers(0), **WAYS[way])) == []
    endless = iter(DataLoader(Echo(), batch_size=2, sampler=itertools.count(), **WAYS[way]))
    assert [next(endless).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


@apart
def test_iterators_and_loaders_are_pickled_like_those_of_torch() -> None:
    loader = DataLoader(Numbers(3), batch_size=2)
    assert [batch.tolist() for batch in pickle.loads(pickle.dumps(loader))] == [[0, 1], [2]]
    with pytest.raises(NotImplementedError):
        pickle.dumps(iter(loader))


class Stream(IterableDataset[int]):
    """Numbers, divided between the workers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, self.count, step)


class Sized(Stream):
    """A stream with a wrong length."""

    def __len__(self) -> int:
        return 4


@apart
def test_iterable_datasets_are_read_like_in_torch() -> None:
    for more in ({"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": None}):
        for workers in ({}, {"num_workers": 2, "multiprocessing_context": "fork"}):
            arguments: dict[str, Any] = more | workers
            assert_same(list(DataLoader(Stream(10), **arguments)), oracle(Stream(10), **arguments))
    for more in ({"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}):
        with pytest.raises(ValueError, match="IterableDataset"):
            DataLoader(Stream(10), **more)  # type: ignore[arg-type]
    assert len(DataLoader(Sized(10), batch_size=2)) == 2
    with pytest.raises(TypeError):
        len(DataLoader(Stream(10)))
    assert DataLoader(Stream(3)).explain() == "No pass has begun: explain() describes the last one."


@apart
def test_data_pipes_are_read_by_torch() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = IterableWrapper(range(5))
        loader = DataLoader(pipe, batch_size=2)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
        assert loader.explain() == "torch's own workers read data pipes, and their time isn't recorded."
        for call in (loader.state_dict, lambda: loader.load_state_dict({})):
            with pytest.raises(UnsupportedError, match="data pipes don't support states"):
                call()
        for more in ({"memory_limit": "1GB"}, {"num_batch_workers": 1}, {"worker_method": "thread"}):
            with pytest.raises(UnsupportedError, match=r"remove the argument|Remove the argument"):
                DataLoader(pipe, **more)  # type: ignore[arg-type]


@apart
def test_workers_require_linux() -> None:
    from fastpipe.torch.loader import _loader

    _loader.sys = SimpleNamespace(platform="darwin")  # type: ignore[assignment]
    for way in (FORKED, THREADS):
        with pytest.raises(UnsupportedError, match="require Linux; this is darwin"):
            DataLoader(Numbers(5), **way)
    assert list(DataLoader(Numbers(3))) == [0, 1, 2]
    with pytest.raises(UnsupportedError, match="require Linux; this is darwin"):
        DataLoader(Stream(5), **FORKED)
    assert list(DataLoader(Stream(3))) == [0, 1, 2]


@apart
def test_memory_is_pinned_only_with_an_accelerator() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    for way in WAYS.values():
        loader = DataLoader(Squares(4), batch_size=2, pin_memory=True, **way)
        with pytest.warns(UserWarning, match="no accelerator is found"):
            batches = list(loader)
        assert not batches[0]["row"].is_pinned()


@apart
def test_a_slow_item_delays_only_its_own_batch() -> None:
    from loader_data import Slow

    for way in (FORKED, THREADS):
        slow = Slow(40, {1: 0.3})
        loader = DataLoader(slow, batch_size=2, in_order=False, prefetch_factor=4, **way)
        found = [batch.tolist() for batch in loader]
        assert sorted(found) == [[2 * n, 2 * n + 1] for n in range(20)]
        assert found.index([0, 1]) >= 5, found
        assert [batch.tolist() for batch in DataLoader(slow, batch_size=2, **way)] == sorted(found)
