"""States of loaders with iterable datasets: a pass resumes after every step, with the same random numbers."""

from __future__ import annotations

import copy
import itertools
import sys
from typing import Any

import pytest
import torch

from apart import apart
from fastpipe.errors import StateError
from fastpipe.torch import DataLoader
from loader_data import FORKED, Squares, assert_same, copied, listed, outcomes
from loader_streams import KINDS, Fails, Plain, Stateful, resumed, with_noise

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")


def assert_resumes(make: Any, epochs: int = 1) -> None:
    """Asserts that the rest of each pass is the same after each step, also if it is resumed twice."""
    torch.manual_seed(5)
    loader = make()
    for epoch in range(epochs):
        batches = iter(loader)
        states, whole = [loader.state_dict()], []
        for batch in batches:
            whole.append(copied(batch))
            states.append(loader.state_dict())
        between = loader.state_dict()
        for step, state in enumerate(states):
            again = resumed(make, state)
            rest = iter(again)
            found = [copied(batch) for batch in itertools.islice(rest, min(step % 3, len(whole) - step))]
            if step % 2:
                again = resumed(make, again.state_dict())
                rest = iter(again)
            found += [copied(batch) for batch in rest]
            assert_same(found, whole[step:])
            del rest, again
        if epoch + 1 < epochs:
            again = resumed(make, between)
            expected = [copied(batch) for batch in again]
            states.clear()
            del again
            following = [copied(batch) for batch in loader]
            assert_same(expected, following)


@apart
@pytest.mark.parametrize(
    ("kind", "size", "every", "drop"),
    [
        ("plain", 2, 1, False),
        ("stateful", 2, 1, True),
        ("stateful", None, 3, False),
        ("iterator", 2, 2, False),
        ("itself", 2, None, False),
        ("itself", 3, 1, False),
    ],
)
def test_a_pass_of_workers_resumes_at_every_step(kind: str, size: Any, every: Any, drop: bool) -> None:
    def make() -> Any:
        more = {"snapshot_every_n_steps": every, "collate_fn": with_noise, "drop_last": drop}
        return DataLoader(KINDS[kind](7, 0, 3), size, **FORKED | {"num_workers": 3} | more)

    assert_resumes(make)


@apart
@pytest.mark.parametrize("kind", KINDS)
def test_persistent_workers_resume_in_later_passes(kind: str) -> None:
    def make() -> Any:
        return DataLoader(KINDS[kind](4, 3), 2, persistent_workers=True, collate_fn=with_noise, **FORKED)

    loader = make()
    torch.manual_seed(5)
    passes = [[copied(batch) for batch in loader]]
    between = loader.state_dict()
    batches = iter(loader)
    states = [loader.state_dict()]
    passes.append([])
    for batch in batches:
        passes[1].append(copied(batch))
        states.append(loader.state_dict())
    passes.append([copied(batch) for batch in loader])
    if kind == "plain":
        # The number of earlier passes is a state that this dataset doesn't save.
        return
    for step, state in enumerate([between, *states]):
        again = resumed(make, state)
        assert_same([copied(batch) for batch in again], passes[1][max(step - 1, 0) :])
        assert_same([copied(batch) for batch in again], passes[2])


@apart
@pytest.mark.parametrize("kind", ["stateful", "iterator", "itself"])
@pytest.mark.parametrize("received", [0, 1, 3])
def test_a_pass_after_one_that_was_left_resumes_at_every_step(kind: str, received: int) -> None:
    def make() -> Any:
        arguments = FORKED | {"num_workers": 3, "persistent_workers": True}
        return DataLoader(KINDS[kind](7, 2, 5), 2, collate_fn=with_noise, **arguments)

    loader = make()
    torch.manual_seed(5)
    for _ in range(2):
        left = iter(loader)
        assert len(list(itertools.islice(left, received))) == received
    batches = iter(loader)
    states, whole = [loader.state_dict()], []
    for batch in batches:
        whole.append(copied(batch))
        states.append(loader.state_dict())
    following = [copied(batch) for batch in loader]
    for step, state in enumerate(states):
        again = resumed(make, state)
        assert_same([copied(batch) for batch in again], whole[step:])
        assert_same([copied(batch) for batch in again], following)


@apart
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_without_workers_resumes_at_every_step(kind: str) -> None:
    for size in (None, 2):

        def numbers(loader: Any) -> list[Any]:
            return [each["number"] for each in loader]

        def make(size: Any = size) -> Any:
            return DataLoader(KINDS[kind](5), size)

        loader = make()
        batches = iter(loader)
        whole, states = [], [loader.state_dict()]
        for batch in batches:
            whole.append(batch["number"])
            states.append(loader.state_dict())
        for step, state in enumerate(states):
            again = resumed(make, state)
            assert_same(numbers(again), whole[step:])
        following = numbers(resumed(make, loader.state_dict()))
        if kind != "plain":
            assert_same(following, numbers(loader))


class Live(Plain):
    """A dataset that returns and keeps its state itself, and not a copy."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(*lengths)
        self.state = {"at": 0}

    def __iter__(self) -> Any:
        while self.state["at"] < self.length:
            self.state["at"] += 1
            yield self.state["at"]
        self.state["at"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@apart
@pytest.mark.parametrize("workers", [0, 2])
def test_states_share_no_object_with_the_dataset(workers: int) -> None:
    def make() -> Any:
        way = FORKED | {"num_workers": workers} if workers else {}
        return DataLoader(Live(6, 4), 1, collate_fn=listed, **way)

    loader = make()
    batches = iter(loader)
    states = [loader.state_dict()]
    whole = []
    for batch in batches:
        whole.append(batch)
        states.append(loader.state_dict())
    for step, state in [*enumerate(states)] * 2:
        again = make()
        again.load_state_dict(state)
        assert list(again) == whole[step:]
    # The program may change a state that it was given.
    batches = iter(loader)
    next(batches), next(batches)
    given = loader.state_dict()
    kept = copy.deepcopy(given)
    for each in given["pass"]["order"]["workers"]:
        each["state"]["dataset"]["at"] = 100
    assert loader.state_dict() == kept


@apart
def test_states_in_any_order_lose_no_batch() -> None:
    def make() -> Any:
        return DataLoader(Stateful(6, 9), 2, in_order=False, collate_fn=listed, **FORKED)

    expected = {each["name"] for batch in make() for each in batch}
    loader = make()
    batches = iter(loader)
    found = [each["name"] for batch in itertools.islice(batches, 3) for each in batch]
    state = loader.state_dict()
    del batches
    found += [each["name"] for batch in resumed(make, state) for each in batch]
    assert len(found) == len(expected)
    assert set(found) == expected


@apart
def test_states_of_other_loaders_are_rejected() -> None:
    loader = DataLoader(Stateful(6, 6), 2, **FORKED)
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    for other, said in [
        (DataLoader(Stateful(6, 6), 2), "Set num_workers=2; this loader has num_workers=0"),
        (DataLoader(Stateful(6, 6), 3, **FORKED), "batches of"),
        (DataLoader(Squares(6), 2), "with a map-style dataset"),
    ]:
        with pytest.raises(StateError, match=said):
            other.load_state_dict(state)
    for wrong in ({}, {"_snapshot": {}}, DataLoader(Squares(6), 2).state_dict()):
        with pytest.raises(StateError, match="with an iterable dataset"):
            loader.load_state_dict(wrong)
    assert len(list(batches)) == 4
    other = DataLoader(Plain(6, 6), 2, **FORKED)
    other.load_state_dict(state)
    with pytest.raises(StateError, match="a state of the dataset, and this dataset has no states"):
        next(iter(other))
    plain = DataLoader(Plain(6), 2)
    batches = iter(plain)
    list(itertools.islice(batches, 3))
    shorter = DataLoader(Plain(3), 2)
    shorter.load_state_dict(plain.state_dict())
    with pytest.raises(StateError, match="ended after 2 batches, of 3 to skip"):
        next(iter(shorter))


@apart
def test_a_pass_resumes_after_an_error() -> None:
    def make() -> Any:
        return DataLoader(Fails("go on"), 1, collate_fn=listed, **FORKED)

    loader = make()
    batches = iter(loader)
    found, rests = [], []
    whole = outcomes(iter(make()))
    for _ in whole:
        found += outcomes(itertools.islice(batches, 1))
        rests.append(outcomes(iter(resumed(make, loader.state_dict()))))
    assert found == whole
    assert rests == [whole[at + 1 :] for at in range(len(whole))]
