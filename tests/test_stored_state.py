"""Stored states are small, and old ones can be read. Damaged states and states of other readers are refused."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

import fastpipe
import samples
import wire
from samples import SHUFFLES, Data, order_of, sealed, through_json
from strategies import FEW, SOME

# The last batch is a large part of the small datasets of these tests.
pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Writes 101 rows in two files."""
    return samples.write(tmp_path_factory.mktemp("stored"), [samples.blocks_of(60), samples.blocks_of(41, (6, 0, 2))])


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_states_are_small(tmp_path: Path, shuffle: Any) -> None:
    path = tmp_path / "x.avro"
    blocks = [(10, wire.longs(*range(at, at + 10))) for at in range(0, 100_000, 10)]
    path.write_bytes(wire.container(wire.record("R", id="long"), blocks))
    for buffer in (1000, 60_000):
        order = {"shuffle": shuffle, "seed": 2**64 - 1, "batch_size": 100, "epochs": 2}
        if shuffle:
            order["shuffle_buffer"] = buffer
        reader = fastpipe.read_avro(path, features=samples.ONLY_ID, **order)
        sizes = {len(json.dumps(reader.state_dict())) for _ in reader}
        assert max(sizes) < 2000


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_state_of_another_reader_is_refused(data: Data, shuffle: Any, tmp_path: Path) -> None:
    reader = data.read(**order_of(shuffle))
    next(iter(reader))
    state = reader.state_dict()
    others: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": 8}, "batch_size was 7 and is 8"),
        ({"seed": 12}, "seed was 11 and is 12"),
        ({"drop_last": True}, "drop_last was False and is True"),
        ({"shard_by": "batch"}, "shard_by was '(window|block)' and is 'batch'"),
        *(({"shuffle": other}, "shuffle was") for other in SHUFFLES[1:] if other != shuffle),
    ]
    if shuffle:
        others.append(({"shuffle_buffer": 28}, "shuffle_buffer was 21 and is 28"))
    for arguments, words in others:
        with pytest.raises(fastpipe.errors.StateError, match=words):
            data.read(**order_of(shuffle) | arguments).load_state_dict(state)
    swapped = Data(data.paths[::-1], {})
    with pytest.raises(
        fastpipe.errors.StateError, match=r"different contents .*or its files have different names or another order"
    ):
        swapped.read(**order_of(shuffle)).load_state_dict(state)
    fewer = Data(data.paths[:1], {})
    with pytest.raises(
        fastpipe.errors.StateError, match="the dataset's files was 2 and is 1; the dataset's rows was 101"
    ):
        fewer.read(**order_of(shuffle)).load_state_dict(state)
    # A file with the same size and number of rows, but written by another run.
    contents = Path(data.paths[1]).read_bytes()
    changed = tmp_path / os.path.basename(data.paths[1])
    changed.write_bytes(contents.replace(wire.SYNC, bytes(16)))
    rewritten = Data([data.paths[0], str(changed)], {})
    with pytest.raises(fastpipe.errors.StateError, match="sync markers"):
        rewritten.read(**order_of(shuffle)).load_state_dict(state)


def test_versions(data: Data) -> None:
    state = data.read(**order_of(True)).state_dict()
    assert state["version"] == 2
    with pytest.raises(
        fastpipe.errors.StateError, match="version 3, and this version of fastpipe reads versions up to 2"
    ):
        data.read(**order_of(True)).load_state_dict(sealed({**state, "version": 3}))
    with pytest.raises(fastpipe.errors.StateError, match="different contents"):
        data.read(**order_of(True)).load_state_dict(sealed({**state, "version": 1}))
    for version in (0, -1, None, "1", 1.5, 2.0, True, []):
        with pytest.raises(fastpipe.errors.StateError, match="not the state of a reader"):
            data.read(**order_of(True)).load_state_dict(sealed({**state, "version": version}))
    for other in (None, 3, "state", [state]):
        with pytest.raises(TypeError, match="state must be a dict"):
            data.read(**order_of(True)).load_state_dict(other)  # type: ignore[arg-type]


# States of version 1 as they are stored, their checksums, the next three batches, and the number of batches left in the
# epoch. Later versions of fastpipe must resume them identically.
STORED = {
    False: (
        {"shuffle": "sequential", "shuffle_buffer": 258, "shard_by": "window"},
        {"step": 4, "world_size": 2, "taken": 2, "next": 1, "open": [[0, 6]], "late": [], "places": []},
        2382872268,
        [[30, 31, 32], [33, 34, 35], [36, 37, 38]],
        10,
    ),
    True: (
        {"shuffle": "window", "shuffle_buffer": 12, "shard_by": "window"},
        {"step": 4, "world_size": 4, "taken": 1, "next": 3, "open": [], "late": [[1, 3], [2, 3]]}
        | {"places": [[1, 1, 11], [2, 2, 11], [3, 8, 1]]},
        68927333,
        [[4, 35, 33], [6, 34, 31], [8, 59, 57]],
        6,
    ),
    "block": (
        {"shuffle": "block", "shuffle_buffer": 12, "shard_by": "batch"},
        {"step": 4, "world_size": 2, "taken": 0, "next": 10, "open": [], "late": [], "places": []},
        1040081561,
        [[10, 38, 28], [39, 40, 33], [41, 42, 43]],
        10,
    ),
    "buffer": (
        {"shuffle": "buffer", "shuffle_buffer": 12, "shard_by": "batch"},
        {"step": 4, "world_size": 2, "taken": 0, "next": 10, "open": [], "late": [], "places": []},
        1958602611,
        [[31, 40, 29], [43, 28, 25], [47, 34, 44]],
        10,
    ),
}


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_states_of_version_1_are_read(tmp_path: Path, shuffle: Any) -> None:
    order, progress, checksum, expected, left = STORED[shuffle]
    state = {
        "version": 1,
        "data": {"files": 1, "rows": 60, "bytes": 449, "digest": "1e56086f7b9a7c32605eab58ebec26f1"},
        "order": {"batch_size": 3, "drop_last": False, "seed": 2**64 - 1, **order},
        "pass_epoch": 0,
        "progress": {"epoch": 0, **progress},
        "checksum": checksum,
    }
    path = tmp_path / "golden.avro"
    ids = iter(range(60))
    blocks = [(rows, wire.longs(*itertools.islice(ids, rows))) for rows in samples.blocks_of(60, (3, 1, 7, 0, 12, 2))]
    path.write_bytes(wire.container(wire.record("R", id="long"), blocks))
    options = {"shuffle": shuffle, "batch_size": 3, "seed": 2**64 - 1, "shard_by": order["shard_by"], "epochs": 2}
    if shuffle:
        options["shuffle_buffer"] = 12
    reader = fastpipe.read_avro(path, features=samples.ONLY_ID, **options)
    reader.load_state_dict(state)
    found = [batch["id"].tolist() for batch in reader]
    assert found[:3] == expected
    assert len(found) == left + 20, "the rest of the epoch and the second epoch"
    assert len(set(itertools.chain(*found[:left]))) == 3 * left


# Any JSON value, which a program may find in a damaged file.
numbers = st.sampled_from([-1, 0, 1, 2, 5, 100, 2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64, 2**70])
scalars = st.none() | st.booleans() | numbers | st.integers(-3, 40) | st.floats() | st.sampled_from(["", "0", "7", "x"])
values = st.recursive(
    scalars, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside)
)


def paths(node: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths to all values of a state."""
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [above, *(path for key, value in inside for path in paths(value, (*above, key)))]


def damage(state: dict[str, Any], choose: st.DataObject) -> dict[str, Any]:
    """Returns a state in which one value is changed, missing or duplicated."""
    state = through_json(state)
    *above, key = choose.draw(st.sampled_from(paths(state)[1:]))
    node: Any = state
    for step in above:
        node = node[step]
    match choose.draw(st.sampled_from(["near", "near", "other", "missing", "twice"])):
        case "near" if isinstance(node[key], int):
            node[key] += choose.draw(st.sampled_from([-1, 1, -2, 2, -7, 7, 100]))
        case "missing":
            del node[key]
        case "twice" if isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        case _:
            node[key] = choose.draw(values)
    return state


def is_refused(reader: fastpipe.Reader, state: dict[str, Any]) -> bool:
    """Returns whether the reader refuses the state, and checks that a refused state changes nothing."""
    before = reader.state_dict()
    try:
        reader.load_state_dict(state)
    except (fastpipe.errors.StateError, TypeError):
        assert reader.state_dict() == before
        return True
    return False


@pytest.fixture(scope="module")
def damaged(data: Data) -> Callable[[Any], tuple[dict[str, Any], list[str]]]:
    """Returns the options with which damaged states are read, and the batches of the first two epochs."""

    @functools.cache
    def prepared(shuffle: Any) -> tuple[dict[str, Any], list[str]]:
        options = {**order_of(shuffle), "columns": ["id"], "num_threads": 1, "epochs": 2}
        return options, samples.digests(data.read(**options))

    return prepared


def begun(data: Data, step: int, options: dict[str, Any]) -> dict[str, Any]:
    """Returns a state after `step` batches."""
    reader = data.read(**options)
    for _ in itertools.islice(reader, step):
        pass
    return reader.state_dict()


@pytest.mark.parametrize("shuffle", SHUFFLES)
@hypothesis.settings(max_examples=FEW)
@hypothesis.given(st.integers(0, 14), st.data())
def test_a_damaged_state_is_refused(data: Data, damaged: Any, shuffle: Any, step: int, choose: st.DataObject) -> None:
    options, _ = damaged(shuffle)
    state = begun(data, step, options)
    broken = damage(state, choose)
    # The draw may replace a value with itself.
    assert is_refused(data.read(**options), broken) == (json.dumps(broken) != json.dumps(state))


@pytest.mark.parametrize("shuffle", SHUFFLES)
@hypothesis.settings(max_examples=SOME)
@hypothesis.given(st.integers(0, 14), st.integers(1, 3), st.sampled_from([1, 2]), st.data())
def test_a_forged_state_does_no_harm(
    data: Data, damaged: Any, shuffle: Any, step: int, times: int, world_size: int, choose: st.DataObject
) -> None:
    """Checks states with a valid checksum: impossible ones are refused, and possible ones yield batches that exist."""
    options, expected = damaged(shuffle)
    state = begun(data, step, {**options, "world_size": world_size})
    for _ in range(times):
        state = damage(state, choose)
    reader = data.read(**options)
    if is_refused(reader, sealed(state)):
        return
    epoch = reader.epoch
    whole = expected if epoch in (0, 1) else samples.digests(reader.batch_at(at, epoch) for at in range(15))
    for batch in itertools.islice(reader, 15):
        assert len(batch["id"]) <= 7
        # `places` contains the starts of windows, which can't be verified.
        assert state["progress"].get("places") or samples.digest(batch) in whole


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_load_that_fails_changes_nothing(data: Data, shuffle: Any) -> None:
    reader = data.read(**order_of(shuffle), epochs=2)
    expected = samples.digests(reader)
    reader.set_epoch(0)
    batches = iter(reader)
    found = [samples.digest(next(batches)) for _ in range(4)]
    state = reader.state_dict()
    damaged = through_json(state)
    damaged["progress"]["next"] = 10**6
    for bad in (
        {},
        sealed(damaged),
        {**state, "version": 9},
        sealed({**state, "order": {**state["order"], "seed": 4}}),
    ):
        with pytest.raises(fastpipe.errors.StateError):
            reader.load_state_dict(bad)
    assert reader.state_dict() == state
    assert (reader.seed, reader.epoch) == (11, 0)
    assert found + samples.digests(batches) == expected, "the active pass must continue"
    # It also keeps the state that was loaded before.
    reader.load_state_dict(state)
    with pytest.raises(fastpipe.errors.StateError):
        reader.load_state_dict(damaged)
    assert samples.digests(reader) == expected[4:]
