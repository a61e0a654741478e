"""Ranks read everything exactly once and in step, and their number may change at any step."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import fastpipe
import samples
from samples import ELASTIC, SHUFFLES, Data
from strategies import FEW, SOME, layouts, orders

# The last batch is a large part of the small datasets of these tests.
pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")

UNEVEN = ("drop", "pad", "allow")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Writes 411 rows in two files of small blocks, so that the default windows are short."""
    return samples.write(
        tmp_path_factory.mktemp("ranks"), [samples.blocks_of(210, (3, 0, 1, 2)), samples.blocks_of(201, (2, 1))]
    )


def world(data: Data, size: int, **options: Any) -> list[fastpipe.Reader]:
    """Returns a reader for each rank."""
    return [data.read(**options, rank=rank, world_size=size, num_threads=1) for rank in range(size)]


def steps_of(readers: list[fastpipe.Reader]) -> list[list[dict[str, Any] | None]]:
    """Returns the batches of all ranks for each step, with None for ranks without a batch."""
    return list(map(list, itertools.zip_longest(*readers)))


def all_of(steps: list[list[dict[str, Any] | None]]) -> list[dict[str, Any]]:
    """Returns all batches, step by step."""
    return [batch for step in steps for batch in step if batch is not None]


def in_step(readers: list[fastpipe.Reader], steps: int) -> list[list[dict[str, Any] | None]]:
    """Returns the batches of the next steps, ending at the first step that some rank doesn't have."""
    passes = [iter(reader) for reader in readers]
    found = []
    while len(found) < steps:
        found.append([next(batches, None) for batches in passes])
        if None in found[-1]:
            break
    return found


@hypothesis.settings(max_examples=SOME)
@hypothesis.given(layouts, orders(), st.integers(1, 5), st.sampled_from(UNEVEN), st.booleans())
def test_ranks_share_every_row(
    tmp_path: Path, files: list[list[int]], order: dict[str, Any], size: int, on_uneven: str, by_batch: bool
) -> None:
    data = samples.write(tmp_path, files)
    options = {"seed": 1, "on_uneven": on_uneven} | order | ({"shard_by": "batch"} if by_batch else {})
    own_blocks = order["shuffle"] in ("block", "buffer") and not by_batch
    rows = [sum(blocks[rank::size]) for blocks in [list(itertools.chain(*files))] for rank in range(size)]
    least = order["batch_size"] if order["drop_last"] else 1
    if own_blocks and on_uneven != "allow" and min(rows) < least <= max(rows):
        with pytest.raises(ValueError, match='shard_by="batch" to distribute batches'):
            world(data, size, **options)
        return
    batches = data.total // order["batch_size"] if order["drop_last"] else -(-data.total // order["batch_size"])
    nothing = max(rows) < least if own_blocks else batches < (size if on_uneven == "drop" else 1)
    if data.total and size > 1 and on_uneven != "allow" and nothing:
        with pytest.raises(ValueError, match="would leave every rank without a batch"):
            world(data, size, **options)
        return
    readers = world(data, size, **options)
    lengths = [len(reader) for reader in readers]
    steps = steps_of(readers)
    assert len(steps) == max(lengths)
    if on_uneven != "allow":
        assert set(lengths) == {len(steps)}
        assert not any(batch is None for step in steps for batch in step)
    elif not own_blocks:
        assert max(lengths) - min(lengths) <= 1
    ids = samples.ids_of(all_of(steps))
    assert len(set(ids)) == len(ids)
    batch_size = order["batch_size"]
    if on_uneven != "drop" and not order["drop_last"]:
        assert sorted(ids) == list(range(data.total))
    elif on_uneven == "drop" and not own_blocks:
        assert batches - len(steps) * size < size, "the number of dropped batches is less than the number of ranks"
    for step, batches in enumerate(steps):
        for reader, batch in zip(readers, batches, strict=True):
            if batch is not None:
                samples.check(batch, data.located(reader, step, len(batch["id"]), 0))
                if on_uneven == "pad":
                    check_padded(batch, batch_size)


def check_padded(batch: dict[str, Any], batch_size: int) -> None:
    """Checks that a padded batch is full, with the real rows first."""
    assert list(batch)[-1] == "valid"
    valid = batch["valid"]
    assert (valid.dtype, valid.shape) == (np.bool_, (batch_size,))
    assert len(batch["id"]) == len(batch["items"]) == batch["terms"].dense_shape[0] == batch_size
    assert (np.diff(valid.astype(int)) <= 0).all()


@pytest.mark.parametrize(("shuffle", "shard_by"), [*ELASTIC, ("block", "block"), ("buffer", "block")])
@pytest.mark.parametrize("on_uneven", UNEVEN)
def test_padding_and_dropping(data: Data, shuffle: Any, shard_by: str, on_uneven: str) -> None:
    """Uses 411 rows: 82 batches of 5 rows and one of 1 row. These 83 batches are 20 for each of 4 ranks, and 3 more."""
    options = {"shuffle": shuffle, "shard_by": shard_by, "on_uneven": on_uneven, "batch_size": 5, "seed": 1}
    readers = world(data, 4, **options)
    steps = steps_of(readers)
    ids = samples.ids_of(all_of(steps))
    assert len(ids) == len(set(ids))
    if on_uneven == "pad":
        assert all(len(batch["valid"]) == 5 for batch in all_of(steps))
    if shard_by == "block":
        return
    last = steps[20] if len(steps) > 20 else []
    if on_uneven == "drop":
        assert (len(steps), len(ids)) == (20, 400)
    elif on_uneven == "allow":
        assert [None if batch is None else len(batch["id"]) for batch in last] == [5, 5, 1, None]
    else:
        assert [int(batch["valid"].sum()) for batch in all_of([last])] == [5, 5, 1, 0]
    if on_uneven == "drop":
        (alone,) = world(data, 1, **options)
        assert len(samples.ids_of(alone)) == 411, "a single rank drops nothing"


def test_a_feature_named_valid_cannot_be_padded(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[3]])
    renamed = tmp_path / "renamed.avro"
    renamed.write_bytes(Path(data.paths[0]).read_bytes().replace(b'"score"', b'"valid"'))
    features = {"valid": samples.FEATURES["score"]}
    with pytest.raises(ValueError, match="a feature already has that name"):
        fastpipe.read_avro(renamed, features=features, batch_size=2, on_uneven="pad")
    assert len(list(fastpipe.read_avro(renamed, features=features, batch_size=2))) == 2


schedules = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 25)), min_size=1, max_size=6)


@pytest.mark.parametrize(("shuffle", "shard_by"), ELASTIC)
@hypothesis.settings(max_examples=FEW)
@hypothesis.given(schedules, st.integers(1, 3), st.sampled_from([3, 4, 11]), st.sampled_from(UNEVEN), st.booleans())
def test_the_number_of_ranks_may_change(
    data: Data,
    shuffle: Any,
    shard_by: str,
    schedule: list[tuple[int, int]],
    windows: int,
    batch_size: int,
    on_uneven: str,
    drop_last: bool,
) -> None:
    """Stops and resumes with different numbers of ranks, repeatedly. The last ranks read to the end."""
    # With "allow", ranks are no longer in step after the end of the first epoch.
    epochs = 1 if on_uneven == "allow" else 2
    options = {"shuffle": shuffle, "shard_by": shard_by, "batch_size": batch_size, "drop_last": drop_last, "seed": 3}
    options |= {"columns": ["id", "items"], "on_uneven": on_uneven, "epochs": epochs}
    if shuffle:
        options["shuffle_buffer"] = windows * batch_size
    expected = samples.digests(data.read(**options))
    found: list[str] = []
    state = None
    for number, (size, steps) in enumerate(schedule):
        readers = world(data, size, **options)
        if state is not None:
            for reader in readers:
                reader.load_state_dict(state)
        last = number + 1 == len(schedule)
        taken = in_step(readers, len(expected) + 1 if last else steps)
        # Ranks without a batch yield one without valid rows.
        found += samples.digests(batch for batch in all_of(taken) if batch.get("valid", np.ones(1)).any())
        if taken and None in taken[-1]:
            break
        state = readers[0].state_dict()
        if on_uneven != "allow":
            assert all(reader.state_dict() == state for reader in readers)
    seen, wanted = collections.Counter(found), collections.Counter(expected)
    assert seen <= wanted
    missing = len(expected) - len(found)
    assert missing == 0 if on_uneven != "drop" else missing <= epochs * max(size - 1 for size, _ in schedule)


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("shard_by", [None, "batch"])
@pytest.mark.parametrize("on_uneven", ["drop", "pad"])
def test_states_of_all_ranks_are_equal(data: Data, shuffle: Any, shard_by: str | None, on_uneven: str) -> None:
    readers = world(data, 3, shuffle=shuffle, shard_by=shard_by, on_uneven=on_uneven, batch_size=7, seed=1, epochs=2)
    passes = [iter(reader) for reader in readers]
    for _ in range(min(map(len, readers))):
        states = [reader.state_dict() for reader in readers]
        assert states[1:] == states[:-1]
        for batches in passes:
            next(batches)
    assert len({reader.epoch for reader in readers}) == 1


@pytest.mark.parametrize(("shuffle", "shard_by"), ELASTIC)
def test_states_are_equal_if_some_ranks_have_more(data: Data, shuffle: Any, shard_by: str) -> None:
    """Uses 59 batches: 19 for each of 3 ranks, and 2 more. While all have read the same number, any state fits all
    ranks.
    """
    options = {"shuffle": shuffle, "shard_by": shard_by, "on_uneven": "allow", "batch_size": 7, "seed": 1}
    readers = world(data, 3, **options)
    passes = [iter(reader) for reader in readers]
    for _ in range(19):
        for batches in passes:
            next(batches)
    states = [reader.state_dict() for reader in readers]
    assert states[1:] == states[:-1]


@pytest.mark.parametrize("shuffle", ["block", "buffer"])
def test_block_shards_need_the_same_number_of_ranks(data: Data, shuffle: Any) -> None:
    options = {"shuffle": shuffle, "batch_size": 5, "seed": 1}
    readers = world(data, 3, **options)
    begun = readers[0].state_dict()
    first = in_step(readers, 4)
    state = readers[0].state_dict()
    for size in (1, 2, 4):
        for reader in world(data, size, **options):
            with pytest.raises(
                fastpipe.errors.StateError, match=f"world_size=3, but this reader has world_size={size}"
            ):
                reader.load_state_dict(state)
            reader.load_state_dict(begun)  # Any number of ranks can load an epoch that hasn't begun.
    # The state of any rank serves all ranks if their number is the same.
    again = world(data, 3, **options)
    for reader in again:
        reader.load_state_dict(state)
    found = samples.digests(all_of(first + steps_of(again)))
    assert found == samples.digests(all_of(steps_of(world(data, 3, **options))))


@pytest.mark.parametrize("shuffle", ["block", "buffer"])
def test_fewer_blocks_than_ranks(tmp_path: Path, shuffle: Any) -> None:
    data = samples.write(tmp_path, [[9, 8]])
    options = {"shuffle": shuffle, "batch_size": 3, "seed": 1}
    with pytest.raises(ValueError, match='only 2 units: set shard_by="batch"'):
        world(data, 3, **options)
    with pytest.raises(ValueError, match="only 2 units"):
        world(data, 3, **options, on_uneven="pad")
    assert list(map(len, world(data, 3, **options, on_uneven="allow"))) == [3, 3, 0]
    assert list(map(len, world(data, 3, **options, shard_by="batch"))) == [2, 2, 2]
    assert sorted(samples.ids_of(all_of(steps_of(world(data, 2, **options))))) == list(range(17))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_decode_only_their_own_blocks(tmp_path: Path, shuffle: bool, size: int) -> None:
    """Checks that ranks share no block if windows consist of whole blocks, and else only blocks cut by an edge."""
    # By default a window has the number of rows of 64 blocks.
    for blocks, cut in (([10] * 64 * 12, False), (samples.blocks_of(640 * 12, (7, 13, 10)), True)):
        data = samples.write(tmp_path, [blocks])
        readers = world(data, size, shuffle=shuffle, batch_size=16, seed=6, features=samples.ONLY_ID)
        shared = collections.Counter[int]()
        for reader in readers:
            places = itertools.product(range(len(reader)), range(16))
            shared.update({reader.locate(step, row).block for step, row in places})
        twice = sum(ranks > 1 for ranks in shared.values())
        assert len(shared) == len(blocks)
        assert twice <= 11 if cut else twice == 0


@pytest.mark.parametrize(("shuffle", "shard_by"), ELASTIC)
def test_one_rank_and_many_see_the_same_batches(data: Data, shuffle: Any, shard_by: str) -> None:
    options = {"shuffle": shuffle, "shard_by": shard_by, "batch_size": 5, "seed": 2, "on_uneven": "allow"}
    if shuffle:
        options["shuffle_buffer"] = 20
    alone = samples.digests(data.read(**options))
    steps = steps_of(world(data, 3, **options))
    assert sorted(samples.digests(all_of(steps))) == sorted(alone)
    if shard_by == "batch":
        assert samples.digests(all_of(steps)) == alone, "each step has the next batches"
