"""Errors of items, samplers and `collate_fn`, and edge cases.

An error is raised in place of its batch with the worker's traceback, and the iteration can continue. The edge cases are
no items, one item, many items, and invalid batches.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from apart import apart, wait_until
from fastpipe.errors import WorkerError
from fastpipe.torch import DataLoader
from loader_data import (
    FORKED,
    SHARED,
    WAYS,
    WORKERS,
    AtOnce,
    Failing,
    Items,
    Numbers,
    Squares,
    assert_same,
    listed,
    outcomes,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

ways = pytest.mark.parametrize("way", WAYS)
workers = pytest.mark.parametrize("way", WORKERS)


class Needs(Exception):
    """Can't be constructed from a message."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(one, other)


class Locked(Exception):
    """Can't be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Telling(Exception):
    """Requires its message as an argument named `message`."""

    message = "none"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Mute(Exception):
    """Raises in `__str__`."""

    def __str__(self) -> str:
        raise ValueError("no")


def noted(error: Exception, *notes: str) -> Exception:
    for note in notes:
        error.add_note(note)
    return error


def raised(loader: Any) -> BaseException:
    """Returns the error of a loader's only bad batch, after checking that all other batches arrive."""
    batches = iter(loader)
    found: list[list[int]] = []
    errors: list[BaseException] = []
    while True:
        try:
            found.append(next(batches).tolist())
        except StopIteration:
            break
        except BaseException as error:
            errors.append(error)
    assert found == [[0, 1], [2, 3], [6, 7], [8, 9], [10]]
    (error,) = errors
    return error


def one_bad(error: BaseException) -> Failing:
    return Failing(11, {5: error})


@apart
@ways
def test_iteration_continues_after_an_error(way: str) -> None:
    for error, kind, text in [
        (ValueError("five"), ValueError, "five"),
        (IndexError(5), IndexError, "5"),
        (KeyError("a\nb"), KeyError, "a"),
        (FileNotFoundError(2, "No such file", "x"), OSError, "No such file"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), (RuntimeError, UnicodeDecodeError), "bad"),
        (Needs(1, 2), (RuntimeError, Needs), r"Needs|\(1, 2\)"),
        (MemoryError("much"), MemoryError, "much"),
        (AssertionError(), AssertionError, ""),
        (ExceptionGroup("several", [ValueError("one")]), (RuntimeError, ExceptionGroup), "several"),
        (Telling("told"), Telling, "told"),
    ]:
        found = raised(DataLoader(one_bad(error), 2, **WAYS[way]))
        assert isinstance(found, kind), found
        assert re.search(text, str(found)), found
        if way != "alone":
            where = "process" if way == "fork" else "thread"
            assert re.search(rf"in DataLoader worker {where} [01]\b", str(found))
            assert "raise self.errors[index]" in str(found), "the worker's traceback is missing"


@apart
@workers
def test_errors_that_cannot_be_sent_are_described(way: str) -> None:
    class Local(Exception):
        pass

    found = raised(DataLoader(one_bad(Locked("why")), 2, **WORKERS[way]))
    assert isinstance(found, Locked)
    assert "why" in str(found)
    found = raised(DataLoader(one_bad(Local("here")), 2, **WORKERS[way]))
    assert isinstance(found, (WorkerError, Local))
    assert "here" in str(found)
    assert "Local" in str(found)
    found = raised(DataLoader(one_bad(Mute()), 2, **WORKERS[way]))
    assert isinstance(found, Mute)
    found = raised(DataLoader(one_bad(noted(ValueError("x"), "a note", "another")), 2, **WORKERS[way]))
    assert "a note" in str(found)
    assert "another" in str(found)


class Chained(Numbers):
    def __getitem__(self, index: int) -> int:
        if index != 5:
            return super().__getitem__(index)
        try:
            return int("five")
        except ValueError as error:
            raise LookupError("no number") from error


@apart
@workers
def test_causes_are_described(way: str) -> None:
    found = raised(DataLoader(Chained(11), 2, **WORKERS[way]))
    assert isinstance(found, LookupError)
    assert "invalid literal for int() with base 10: 'five'" in str(found)
    assert "direct cause" in str(found)


@apart
@ways
def test_stop_iteration_and_system_exit_are_errors(way: str) -> None:
    found = raised(DataLoader(one_bad(StopIteration(3)), 2, **WAYS[way]))
    assert type(found) is RuntimeError
    assert "StopIteration" in str(found)
    for error in (SystemExit(3), KeyboardInterrupt(), GeneratorExit()):
        found = raised(DataLoader(one_bad(error), 2, **WAYS[way]))
        if way == "alone":
            assert type(found) is type(error)
        else:
            assert type(found) is WorkerError
            assert type(error).__name__ in str(found)


@apart
@workers
def test_workers_survive_errors(way: str) -> None:
    dataset = Failing(40, {row: SystemExit(row) if row % 2 else ValueError(row) for row in range(0, 40, 3)})
    loader = DataLoader(dataset, 1, persistent_workers=True, **WORKERS[way])
    for _ in range(2):
        found = outcomes(iter(loader))
        kinds = [(WorkerError if row % 2 else ValueError) for row in range(0, 40, 3)]
        assert [kind for kind in found if isinstance(kind, type)] == kinds
        assert all(worker.is_alive() for worker in loader._iterator._workers)  # type: ignore[union-attr]


@apart
@ways
def test_the_error_of_the_first_row_is_raised(way: str) -> None:
    dataset = Failing(40, {row: ValueError(f"row {row}") for row in range(3, 40)})
    for _ in range(5):
        batches = iter(DataLoader(dataset, 8, **WAYS[way]))
        for first in (3, 8, 16, 24, 32):
            with pytest.raises(ValueError, match=rf"row {first}\b"):
                next(batches)
        assert list(batches) == []


def fails_for_some(items: list[Any]) -> Any:
    if 5 in items:
        raise ZeroDivisionError("collating")
    return torch.tensor(items)


@apart
@ways
def test_errors_of_collate_fn(way: str) -> None:
    for seconds in (0.0, SHARED * 2):
        for joiners in (0, 1, 2):
            loader = DataLoader(
                *(Items(range(11), seconds), 2), collate_fn=fails_for_some, num_batch_workers=joiners, **WAYS[way]
            )
            found = raised(loader)
            assert isinstance(found, ZeroDivisionError)
            assert "collating" in str(found)
    assert isinstance(raised(DataLoader(AtOnceFails(11), 2, collate_fn=torch.tensor, **WAYS[way])), OverflowError)


class AtOnceFails(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        if 4 in indices:
            raise OverflowError(4)
        return indices


def unsendable(items: list[Any]) -> Any:
    return (lambda: 1) if 5 in items else torch.tensor(items)


@apart
@workers
def test_unpicklable_batches_are_errors(way: str) -> None:
    for seconds in (0.0, SHARED * 2):
        loader = DataLoader(Items(range(11), seconds), 2, collate_fn=unsendable, **WORKERS[way])
        assert re.search("pickle", str(raised(loader)))
    items: list[Any] = [torch.tensor(row) for row in range(11)]
    items[5] = lambda: 5
    found = outcomes(iter(DataLoader(Items(items, SHARED * 2), 2, collate_fn=list, **WORKERS[way])))
    assert [isinstance(batch, list) for batch in found] == [True, True, False, True, True, True]
    # Default collation can't create a batch either.
    assert outcomes(iter(DataLoader(Items(items), 2, **WORKERS[way])))[2] in (
        TypeError,
        AttributeError,
        pickle.PicklingError,
    )


class Turns(Numbers):
    """A sampler that raises after some indices, once or each time."""

    def __init__(self, count: int, error: Exception, *, batches: bool = False) -> None:
        super().__init__(count)
        self.error = error
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from [[row] for row in range(self.count)] if self.batches else range(self.count)
        raise self.error


@apart
@ways
def test_errors_of_a_sampler_follow_the_batches_before_them(way: str) -> None:
    for count in (0, 1, 2, 3, 7):
        loader = DataLoader(Numbers(9), 1, sampler=Turns(count, OSError("sampler")), **WAYS[way])
        batches = iter(loader)
        assert [next(batches).item() for _ in range(count)] == list(range(count))
        with pytest.raises(OSError, match="sampler"):
            next(batches)
        assert list(batches) == []
    loader = DataLoader(Numbers(9), batch_sampler=Turns(3, OSError("sampler"), batches=True), **WAYS[way])
    assert outcomes(iter(loader))[3:] == [OSError]


@apart
@ways
def test_invalid_batches_of_indices_are_errors(way: str) -> None:
    found = outcomes(iter(DataLoader(Numbers(9), batch_sampler=[[1, 2], 3, [4]], **WAYS[way])))
    assert [batch if isinstance(batch, type) else batch.tolist() for batch in found] == [[1, 2], TypeError, [4]]
    assert outcomes(iter(DataLoader(Numbers(3), sampler=[0, 7, 2], **WAYS[way])))[1] is IndexError
    assert outcomes(iter(DataLoader(Numbers(3), sampler=[0, -1, "x"], **WAYS[way])))[1:] == [IndexError, TypeError]


def size(items: list[Any]) -> int:
    return len(items)


@apart
@ways
def test_empty_batches(way: str) -> None:
    batches = [[], [1, 2], [], [], [3]]
    found = outcomes(iter(DataLoader(Numbers(9), batch_sampler=batches, **WAYS[way])))
    assert [batch if isinstance(batch, type) else batch.tolist() for batch in found] == [
        *(IndexError, [1, 2], IndexError, IndexError, [3])
    ]
    assert list(DataLoader(Numbers(9), batch_sampler=batches, collate_fn=size, **WAYS[way])) == [0, 2, 0, 0, 1]
    assert list(DataLoader(AtOnce(9), batch_sampler=batches, collate_fn=listed, **WAYS[way])) == [
        *([], [(1, 2), (2, 2)], [], [], [(3, 1)])
    ]
    assert list(DataLoader(Numbers(0), 3, **WAYS[way])) == []
    assert list(DataLoader(Numbers(9), batch_sampler=[], **WAYS[way])) == []
    assert len(DataLoader(Numbers(0), 3, **WAYS[way])) == 0


@apart
@ways
def test_one_item_and_many(way: str) -> None:
    assert [batch.tolist() for batch in DataLoader(Numbers(1), 100, **WAYS[way])] == [[0]]
    (whole,) = DataLoader(Numbers(60_000), 100_000, **WAYS[way])
    assert torch.equal(whole, torch.arange(60_000))
    (rows,) = DataLoader(Squares(3000, 50), 10**9, **WAYS[way])
    assert rows["row"].shape == (3000, 50)
    (listed_rows,) = DataLoader(Numbers(5000), 10**6, collate_fn=listed, **WAYS[way])
    assert listed_rows == list(range(5000))


@apart
@ways
def test_empty_items(way: str) -> None:
    for item in ({}, [], (), np.zeros((0, 3)), torch.zeros(0), "", b"", {"a": []}, [{}, ()]):
        assert_same(
            list(DataLoader(Items([item] * 5), 2, **WAYS[way])), list(torch.utils.data.DataLoader(Items([item] * 5), 2))
        )
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    (found,) = DataLoader(Items([deep, deep]), 2, **WAYS[way])
    for _ in range(200):
        (found,) = found
    assert found.tolist() == [1, 1]
    wide = {f"k{n}": n for n in range(3000)}
    (found,) = DataLoader(Items([wide, wide]), 2, **WAYS[way])
    assert all(found[key].tolist() == [value] * 2 for key, value in wide.items())


class Warns(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            warnings.warn("five", stacklevel=2)
        return super().__getitem__(index)


@apart
@ways
def test_filters_for_warnings_apply_in_workers(way: str) -> None:
    # Warnings are errors in tests, including in workers.
    assert isinstance(raised(DataLoader(Warns(11), 2, **WAYS[way])), UserWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(list(DataLoader(Warns(11), 2, **WAYS[way]))) == 6


@apart
@workers
def test_errors_do_not_keep_memory(way: str) -> None:
    """The memory of a failed batch is reused, even if its error is kept."""
    items: list[Any] = [np.zeros(200_000, np.uint8) for _ in range(200)]
    for row in range(0, 200, 4):
        items[row] = np.zeros(3)
    loader = DataLoader(Items(items), 2, memory_limit=6 << 20, **WORKERS[way])
    batches = iter(loader)
    kept = []
    for row in range(0, 200, 2):
        if row % 4:
            next(batches)
        else:
            with pytest.raises(RuntimeError) as caught:
                next(batches)
            kept.append(caught.value)
    assert len({str(error).splitlines()[0] for error in kept}) <= 2
    assert all("equal size" in "".join(traceback.format_exception(error)) for error in kept)


def nothing(items: list[Any]) -> None:
    return None


@apart
@ways
def test_any_object_may_be_a_batch(way: str) -> None:
    kinds: list[Callable[[list[Any]], Any]] = [nothing, size, set, frozenset, str, iter_of, type]
    for function in kinds:
        found = list(DataLoader(Numbers(5), 2, collate_fn=function, **WAYS[way]))
        expected = [function(list(batch)) for batch in ([0, 1], [2, 3], [4])]
        assert [repr(each) if function is iter_of else each for each in found] == [
            repr(each) if function is iter_of else each for each in expected
        ]


def iter_of(items: list[Any]) -> Any:
    return range(len(items))


class Ends(Numbers):
    """Numbers. One number sends a signal to its own process."""

    def __init__(self, count: int, number: int) -> None:
        super().__init__(count)
        self.number = number

    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), self.number)
        return super().__getitem__(index)


@apart
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT], ids=str)
def test_a_signal_is_described_like_in_torch(number: int) -> None:
    with pytest.raises(
        WorkerError,
        match=rf"DataLoader worker \(pid \d+\) is killed by signal: {signal.strsignal(number)}: \S+ was killed by"
        rf" {signal.Signals(number).name} while making row 1 of batch 2, index 5",
    ):
        list(DataLoader(Ends(8, number), 2, **FORKED))


class AllEnd(Numbers):
    """Items that kill their processes."""

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGSEGV)
        return index


@apart
def test_several_killed_workers_are_described() -> None:
    batches = iter(DataLoader(AllEnd(8), 4, **FORKED))
    # If one worker is detected before the others have exited, only that one is reported.
    assert wait_until(lambda: not any(worker.is_alive() for worker in batches._workers))
    with pytest.raises(WorkerError, match=r"DataLoader worker \(pid \d+\) is killed by signal: Segm") as raised:
        next(batches)
    assert str(raised.value).count("was killed by SIGSEGV while making row") == 2
