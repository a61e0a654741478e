"""`pin_memory` of batches that are copied to page-locked memory, as far as it can be tested without an accelerator.

torch's loader pins nothing without an accelerator. So these tests patch the one function with which torch detects it,
and use batches whose classes pin themselves. Only code of torch and fastpipe handles these batches, and no tensor is
pinned.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from apart import apart, wait_until
from fastpipe.errors import WorkerError
from fastpipe.torch import DataLoader
from loader_data import FORKED, IN_PROCESS, THREADS, WORKERS, Items, outcomes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

WAYS: dict[str, dict[str, Any]] = {"alone": IN_PROCESS, "fork": FORKED, "thread": THREADS}
ways = pytest.mark.parametrize("way", WAYS)
workers = pytest.mark.parametrize("way", WORKERS)


class Page:
    """A value that can be pinned. It records each pinning's process, thread and number of torch threads."""

    def __init__(self, value: Any, pinned: tuple[tuple[int, int, int], ...] = ()) -> None:
        self.value = value
        self.pinned = pinned

    def pin_memory(self) -> Page:
        # Returns a new page in place of this one, as a tensor does.
        return Page(self.value, (*self.pinned, (os.getpid(), threading.get_ident(), torch.get_num_threads())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Page) and (self.value, self.pinned) == (other.value, other.pinned)

    __hash__ = None  # type: ignore[assignment]


class Two(NamedTuple):
    """A batch of two parts."""

    page: Any
    name: Any


class Refuses(Page):
    """A page that can't be pinned."""

    def pin_memory(self) -> Page:
        raise ValueError(f"no page for {self.value}")


def collated_page(items: list[Any]) -> Page:
    return Page([item.value for item in items])


def nested(items: list[Any]) -> Any:
    values = [item.value for item in items]
    return {"page": Page(values), "more": [Page(values[0]), "text", values[-1]], "two": Two(Page(0), "name")}


def refused(items: list[Any]) -> Page:
    kind = Refuses if items[0].value == 2 else Page
    return kind([item.value for item in items])


def loaded(make: Any, way: dict[str, Any], **more: Any) -> list[Any]:
    """Returns the batches of six pages, or the errors in their place."""
    return outcomes(iter(make(Items([Page(row) for row in range(6)]), pin_memory=True, **more, **way)))


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "custom": lambda: {"batch_size": 2, "collate_fn": collated_page},
    "custom, by item workers": lambda: {
        "batch_size": 2,
        "collate_fn": collated_page,
        "num_batch_workers": 0,
    },
    "custom, nested": lambda: {"batch_size": 2, "collate_fn": nested},
    "default, of a registered class": lambda: {"batch_size": 2},
    "default, one by one": lambda: {"batch_size": None},
    "not pinnable": lambda: {"batch_size": 2, "collate_fn": refused},
}


@apart
@ways
@pytest.mark.parametrize("case", CASES)
def test_batches_that_pin_themselves_are_pinned_by_the_program(way: str, case: str) -> None:
    torch.accelerator.is_available = lambda: True
    torch.set_num_threads(2)
    default_collate_fn_map[Page] = lambda batch, *, collate_fn_map=None: collated_page(batch)
    arguments = CASES[case]()
    expected = loaded(torch.utils.data.DataLoader, IN_PROCESS, **_torchs(arguments))
    found = loaded(DataLoader, WAYS[way], **arguments)
    assert torch.get_num_threads() == 2
    # Each page is pinned once, in this process: without workers by this thread, and otherwise by another one.
    pinned = list(_pages(found))
    (by,) = {page.pinned for page in pinned}
    ((process, thread, num_threads),) = by
    assert (process, num_threads) == (os.getpid(), 1)
    assert (thread == threading.get_ident()) is (way == "alone")
    for page in _pages(expected):
        page.pinned = by
    assert found == expected
    assert len(pinned) == {"custom, nested": 9, "default, one by one": 6, "not pinnable": 2}.get(case, 3)
    if case == "not pinnable":
        assert found[1] is ValueError
    # A loader that doesn't pin is unaffected.
    plain = DataLoader(Items([Page(row) for row in range(6)]), **arguments, **WAYS[way])
    assert all(page.pinned == () for page in _pages(list(plain)))


def _torchs(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "num_batch_workers"}


def _pages(value: Any) -> Iterator[Page]:
    """Yields the pages of one or several batches."""
    if isinstance(value, Page):
        yield value
    elif isinstance(value, dict):
        yield from _pages(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _pages(each)


PINNED: list[Any] = []


class Counted(Page):
    """A page that lists its value when it is pinned."""

    def pin_memory(self) -> Page:
        PINNED.append(self.value)
        return super().pin_memory()


def counted(items: list[Any]) -> Counted:
    return Counted([item.value for item in items])


def counting(way: str, **more: Any) -> Any:
    torch.accelerator.is_available = lambda: True
    items = Items([Page(row) for row in range(24)])
    return DataLoader(items, batch_size=2, collate_fn=counted, pin_memory=True, **WORKERS[way] | more)


BATCHES = [[row, row + 1] for row in range(0, 24, 2)]


@apart
@workers
def test_batches_are_pinned_ahead_of_the_consumer(way: str) -> None:
    batches = iter(counting(way))
    assert next(batches).value == [0, 1]
    # prefetch_factor is 2. No batch is requested in the meantime.
    assert wait_until(lambda: len(PINNED) >= 3)
    time.sleep(0.2)
    assert len(PINNED) == 3
    assert [batch.value for batch in batches] == BATCHES[1:]
    assert PINNED == BATCHES


@apart
@workers
def test_another_pass_pins_only_its_own_batches(way: str) -> None:
    loader = counting(way, persistent_workers=True)
    first = iter(loader)
    next(first)
    assert wait_until(lambda: len(PINNED) >= 2)
    for _ in range(2):
        assert [batch.value for batch in loader] == BATCHES
        # The batches of the first pass were pinned before.
        assert PINNED[-len(BATCHES) :] == BATCHES
    assert sum(thread.name == "fastpipe-pin-memory" for thread in threading.enumerate()) == 1


@apart
@workers
def test_pinned_batches_may_be_yielded_out_of_order(way: str) -> None:
    found = [batch.value for batch in counting(way, in_order=False)]
    assert sorted(found) == BATCHES
    assert sorted(PINNED) == BATCHES


@apart
@workers
def test_a_pinned_pass_resumes_after_the_batches_that_were_yielded(way: str) -> None:
    loader = counting(way)
    batches = iter(loader)
    assert [next(batches).value for _ in range(3)] == BATCHES[:3]
    # Further batches are pinned, but weren't yielded.
    assert wait_until(lambda: len(PINNED) >= 4)
    other = counting(way)
    other.load_state_dict(loader.state_dict())
    assert [batch.value for batch in other] == BATCHES[3:]


@apart
def test_a_lost_worker_ends_a_pinned_pass() -> None:
    batches = iter(counting("fork"))
    next(batches)
    for worker in batches._workers:
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        list(batches)


class Stops(Page):
    """A page that raises StopIteration."""

    def pin_memory(self) -> Page:
        raise StopIteration("no page")


@apart
@workers
def test_a_stop_iteration_does_not_end_a_pass(way: str) -> None:
    torch.accelerator.is_available = lambda: True
    items = Items([(Stops if row == 1 else Page)(row) for row in range(3)])
    found = outcomes(iter(DataLoader(items, batch_size=None, pin_memory=True, **WORKERS[way])))
    assert [batch.value if isinstance(batch, Page) else batch for batch in found] == [0, RuntimeError, 2]
