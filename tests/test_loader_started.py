"""Workers of all start methods.

Tests cover CPU affinity set by `worker_init_fn`, convolutions after a fork, and passes that resume with workers of
another start method, including batch workers.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from apart import apart
from fastpipe.torch import DataLoader, worker_info
from loader_data import (
    FORKED,
    SERVED,
    SHARED,
    SPAWNED,
    WORKERS,
    Gathering,
    Numbers,
    Unhurried,
    assert_same,
    copied,
    with_noise,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

PROCESSORS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def own_processor(number: int) -> int:
    """Returns the processor on which a worker must run. Consecutive workers have different ones."""
    return PROCESSORS[number % len(PROCESSORS)]


def bind(number: int) -> None:
    os.sched_setaffinity(0, {own_processor(number)})


def here() -> tuple[int, list[int]]:
    """Returns the index and the affinity of the calling worker."""
    return worker_info().id, sorted(os.sched_getaffinity(0))  # type: ignore[union-attr]


class Bound(Numbers):
    """Items that report where they are made, by two workers."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.together = Gathering(2)

    def __getitem__(self, index: int) -> Any:
        # Ensures that each worker makes some items and that several workers make a batch.
        self.together.wait(worker_info().id)  # type: ignore[union-attr]
        time.sleep(0.002)
        return here()


def collated_here(items: list[Any]) -> Any:
    return items, here()


@apart
@pytest.mark.skipif(len(PROCESSORS) < 2, reason="needs two processors")
@pytest.mark.parametrize("way", WORKERS)
def test_processors_that_worker_init_fn_sets_are_kept(way: str) -> None:
    loader = DataLoader(
        Bound(24),
        *(4, False),
        collate_fn=collated_here,
        worker_init_fn=bind,
        num_batch_workers=1,
        persistent_workers=True,
        **WORKERS[way],
    )
    makers, joiners = set(), set()
    for _ in range(3):
        for items, (joiner, where) in loader:
            assert where == [own_processor(joiner)]
            assert all(processors == [own_processor(maker)] for maker, processors in items)
            makers |= {maker for maker, _ in items}
            joiners.add(joiner)
    assert makers == {0, 1}
    # Batch workers are numbered after the item workers.
    assert joiners == {2}
    assert sorted(os.sched_getaffinity(0)) == PROCESSORS


def convolved(seed: int) -> torch.Tensor:
    """Returns the convolution of a picture that is large enough for several threads."""
    generator = torch.Generator().manual_seed(seed)
    picture, weights = torch.rand(1, 8, 96, 96, generator=generator), torch.rand(16, 8, 3, 3, generator=generator)
    return torch.nn.functional.conv2d(picture, weights, padding=1)


class Convolved(Numbers):
    """Convolved pictures, with torch's number of threads in the worker."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(SHARED)
        return convolved(index), torch.get_num_threads()


def convolved_again(items: list[Any]) -> Any:
    pictures = torch.cat([picture for picture, _ in items])
    weights = torch.ones(4, pictures.shape[1], 3, 3)
    return torch.nn.functional.conv2d(pictures, weights), [threads for _, threads in items], torch.get_num_threads()


@apart
def test_forked_workers_can_convolve_after_their_program() -> None:
    """The threads that a program used for convolutions don't exist after a fork, and OpenMP would wait for them."""
    before = psutil.Process().num_threads()
    torch.set_num_threads(4)
    expected = [convolved(index) for index in range(12)]
    assert psutil.Process().num_threads() >= before + 3, "the program used only one thread for its convolutions"
    batches = list(DataLoader(Convolved(12), 3, timeout=100, **FORKED))
    for number, (pictures, threads) in enumerate(batches):
        torch.testing.assert_close(pictures[:, 0], torch.cat(expected[3 * number : 3 * number + 3]))
        assert threads.tolist() == [1, 1, 1]
    collated = DataLoader(Convolved(12), 3, collate_fn=convolved_again, num_batch_workers=1, timeout=100, **FORKED)
    for number, (pictures, by_makers, by_joiner) in enumerate(collated):
        whole = convolved_again([(picture, 4) for picture in expected[3 * number : 3 * number + 3]])[0]
        torch.testing.assert_close(pictures, whole)
        assert [*by_makers, by_joiner] == [1] * 4
    # The program is unaffected.
    assert torch.get_num_threads() == 4
    torch.testing.assert_close(convolved(5), expected[5])


@apart
def test_a_pass_resumes_with_other_start_methods() -> None:
    """Reads with forked, spawned, fork-server and forked workers in turn, each resuming from the previous state.

    So each kind is both resumed and stopped. Together they equal one pass of forked workers, with the draws of its
    batch workers.
    """

    def loader(way: dict[str, Any]) -> Any:
        generator = torch.Generator().manual_seed(7)
        arguments = way | {"num_workers": 1, "num_batch_workers": 1, "shuffle": True, "generator": generator}
        return DataLoader(Unhurried(44), 4, collate_fn=with_noise, **arguments)

    whole = loader(FORKED)
    expected = [copied(batch) for batch in whole]
    assert len(expected) == 11
    found: list[Any] = []
    state: Any = None
    for way, batches in ((FORKED, 3), (SPAWNED, 3), (SERVED, 3), (FORKED, 2)):
        resumed = loader(way)
        if state is not None:
            resumed.load_state_dict(json.loads(state))
        iterator: Iterator[Any] = iter(resumed)
        found += [copied(batch) for batch in itertools.islice(iterator, batches)]
        state = json.dumps(resumed.state_dict())
        assert_same(found, expected[: len(found)])
    assert list(iterator) == []
    # The state at the end of the pass leads to the next pass.
    assert_same([copied(batch) for batch in resumed], [copied(batch) for batch in whole])
