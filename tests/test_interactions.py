"""Batches of interactions: their content, which does not depend on threads, ranks, shards or states."""

from __future__ import annotations

import itertools
import os
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import fastpipe
import samples
from fastpipe._boundary import NegativeSampling
from fastpipe.errors import InteractionsError, UnseenItemsError
from fastpipe.recsys import Interactions, PointLocation, read_interactions
from samples import through_json

NEGATIVES = 3


def make(users: int = 60, items: int = 90, positives: int = 900, seed: int = 4) -> Interactions:
    random = np.random.default_rng(seed)
    # Some users have no positives.
    chosen = random.integers(0, users - 5, positives)
    return Interactions.from_arrays(
        chosen, random.integers(0, items, positives), users=range(users), items=range(items)
    )


@pytest.fixture(scope="module")
def data() -> Interactions:
    return make()


@pytest.fixture(scope="module")
def large() -> Interactions:
    """Returns interactions of several shards."""
    return make(2000, 3000, 150_000)


def read(data: Interactions, **options: Any) -> fastpipe.Reader:
    return read_interactions(data, **({"batch_size": 128, "num_negatives": NEGATIVES, "seed": 7} | options))


def points(batches: Any) -> list[tuple[int, int, int]]:
    """Returns user, item and label of all points, without padding."""
    return [
        point
        for batch in batches
        for point, valid in zip(
            zip(batch["user"].tolist(), batch["item"].tolist(), batch["label"].tolist(), strict=True),
            batch.get("valid", np.ones(len(batch["user"]), bool)),
            strict=True,
        )
        if valid
    ]


def positives_of(data: Interactions) -> list[tuple[int, int, int]]:
    users = np.repeat(np.arange(len(data.users)) + data.first_user, np.diff(data.indptr))
    return [(user, item, 1) for user, item in zip(users.tolist(), data.indices.tolist(), strict=True)]


def check_epoch(data: Interactions, found: list[tuple[int, int, int]], negatives: int) -> None:
    """Checks that each positive comes once, and that each user has the right number of unseen items."""
    positives = positives_of(data)
    assert sorted(point for point in found if point[2]) == positives
    drawn = [point for point in found if not point[2]]
    expected = Counter(user for user, _, _ in positives)
    assert Counter(user for user, _, _ in drawn) == {user: n * negatives for user, n in expected.items() if negatives}
    assert not {(user, item) for user, item, _ in drawn} & {(user, item) for user, item, _ in positives}


def check_batches(data: Interactions, batches: list[dict[str, np.ndarray]], negatives: int) -> None:
    """Like `check_epoch`, for many points."""
    user, item, label = (np.concatenate([batch[name] for batch in batches]) for name in ("user", "item", "label"))
    pairs = user.astype(np.int64) * data.num_items + item
    counts = np.diff(data.indptr)
    positives = np.repeat(np.arange(data.num_users), counts) * data.num_items + data.indices
    assert np.array_equal(np.sort(pairs[label == 1]), positives)
    assert np.array_equal(np.bincount(user[label == 0], minlength=data.num_users), counts * negatives)
    assert not np.isin(pairs[label == 0], positives).any()


# --- Batches ---


@pytest.mark.parametrize(
    ("options", "item", "label", "size"),
    [
        ({}, "int32", "float32", 12),
        ({"item_dtype": "uint16", "label_dtype": "int8"}, "uint16", "int8", 7),
        ({"item_dtype": "uint16", "label_dtype": np.float32}, "uint16", "float32", 10),
    ],
)
def test_dtypes_of_columns(data: Interactions, options: dict[str, Any], item: str, label: str, size: int) -> None:
    for batch in read(data, **options):
        assert {name: column.dtype.name for name, column in batch.items()} == {
            "user": "int32",
            "item": item,
            "label": label,
        }
        assert sum(column.nbytes for column in batch.values()) == size * len(batch["user"])
        for column in batch.values():
            assert column.ctypes.data % 64 == 0
            assert column.flags.writeable
            assert column.base is not None
            assert not column.flags.owndata


def test_they_share_memory_with_torch(data: Interactions) -> None:
    torch = pytest.importorskip("torch")
    import fastpipe.torch

    for batch in read(data):
        for column in batch.values():
            assert torch.from_numpy(column).data_ptr() == column.ctypes.data
    reader = read(data)
    for tensors, batch in zip(fastpipe.torch.dataset(reader), read(data), strict=True):
        assert {name: tensor.dtype for name, tensor in tensors.items()} == {
            "user": torch.int32,
            "item": torch.int32,
            "label": torch.float32,
        }
        assert all(np.array_equal(tensors[name].numpy(), column) for name, column in batch.items())


def test_torch_layers_accept_them(data: Interactions) -> None:
    torch = pytest.importorskip("torch")
    import fastpipe.torch

    users, items = torch.nn.Embedding(data.num_users, 3), torch.nn.Embedding(data.num_items, 3)
    for batch in fastpipe.torch.dataset(read(data)):
        scores = (users(batch["user"]) * items(batch["item"])).sum(1)
        assert torch.nn.BCEWithLogitsLoss()(scores, batch["label"]) > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks workers")
def test_workers_share_them(data: Interactions) -> None:
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    import fastpipe.torch

    loader = DataLoader(
        fastpipe.torch.dataset(read(data, on_uneven="allow")),
        batch_size=None,
        num_workers=2,
        multiprocessing_context="fork",
    )
    arrays = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in loader]
    assert sorted(points(arrays)) == sorted(points(read(data)))


def test_other_frameworks_accept_them(data: Interactions) -> None:
    jax = pytest.importorskip("jax")
    import fastpipe.jax

    options = {"drop_last": True, "num_threads": 1}
    for arrays, batch in zip(fastpipe.jax.iterator(read(data, **options)), read(data, **options), strict=True):
        assert all(isinstance(array, jax.Array) for array in arrays.values())
        assert all(np.array_equal(np.asarray(arrays[name]), column) for name, column in batch.items())


def test_tensorflow_accepts_them(data: Interactions) -> None:
    pytest.importorskip("tensorflow")
    import fastpipe.tf

    for tensors, batch in zip(fastpipe.tf.dataset(read(data)), read(data), strict=True):
        assert all(np.array_equal(tensors[name].numpy(), column) for name, column in batch.items())


@pytest.mark.parametrize(
    ("items", "dtype", "expected"),
    [
        (1000, None, "int32"),
        (65_536, "int32", "int32"),
        (65_536, "uint16", "uint16"),
        (200_000, None, "int32"),
        (200_000, np.int32, "int32"),
    ],
)
def test_the_type_of_items(items: int, dtype: Any, expected: str) -> None:
    last = Interactions.from_arrays([0, 0, 1], [items - 1, 1, items - 2], users=[0, 1], items=np.arange(items))
    reader = read(last, num_negatives=500, **({} if dtype is None else {"item_dtype": dtype}))
    assert reader.features["item"].dtype == expected
    found = points(reader)
    check_epoch(last, found, 500)
    assert max(item for _, item, _ in found) == items - 1


def test_types_change_nothing_else(large: Interactions) -> None:
    """States do not depend on the types."""
    types: dict[str, Any] = {"item_dtype": "uint16", "label_dtype": "int8"}
    for narrow, wide in zip(read(large, batch_size=5000, **types), read(large, batch_size=5000), strict=True):
        assert all(np.array_equal(narrow[name], wide[name]) for name in narrow)


def test_invalid_item_types(data: Interactions) -> None:
    many = Interactions.from_arrays([0, 1], [0, 1], items=np.arange(65_537))
    with pytest.raises(ValueError, match="item_dtype uint16 supports up to 65,536 items; got 65537"):
        read(many, item_dtype="uint16")
    for dtype in ("int64", "uint8", "float32", None, "no type"):
        with pytest.raises(ValueError, match=f"item_dtype must be 'uint16' or 'int32'; got {dtype!r}"):
            read(data, item_dtype=dtype)
    for dtype in ("int64", "bool", None):
        with pytest.raises(ValueError, match=f"label_dtype must be 'int8' or 'float32'; got {dtype!r}"):
            read(data, label_dtype=dtype)


@pytest.mark.parametrize("shuffle", [False, True, "block", "buffer"])
@pytest.mark.parametrize("negatives", [0, 1, NEGATIVES])
@pytest.mark.parametrize("repeats", [True, False])
def test_each_positive_comes_once_an_epoch(data: Interactions, shuffle: Any, negatives: int, repeats: bool) -> None:
    reader = read(data, shuffle=shuffle, num_negatives=negatives, repeats=repeats, epochs=2)
    assert reader.num_rows == len(data) * (1 + negatives)
    assert len(reader) == 2 * -(-reader.num_rows // 128)
    found = points(reader)
    first, second = found[: reader.num_rows], found[reader.num_rows :]
    for epoch in (first, second):
        check_epoch(data, epoch, negatives)
    # A pool of one shard returns its positives in order.
    if negatives or shuffle not in (False, "block"):
        assert first != second, "epochs must have different negatives and orders"


def test_several_shards(large: Interactions) -> None:
    reader = read(large, batch_size=10_000, num_negatives=4)
    assert len(large._positives.full_users(NegativeSampling(4))) == 0
    assert reader._data.handle.unit_rows().size == 5
    check_batches(large, list(reader), 4)


def test_unshuffled_positives_precede_their_negatives(data: Interactions) -> None:
    found = points(read(data, shuffle=False))
    assert [point for point in found if point[2]] == found[:: 1 + NEGATIVES] == positives_of(data)
    assert all(found[i][0] == found[i - i % (1 + NEGATIVES)][0] for i in range(len(found)))


@pytest.mark.parametrize("shuffle", [False, True, "block", "buffer"])
def test_every_point_can_be_located(data: Interactions, shuffle: Any) -> None:
    reader = read(data, shuffle=shuffle)
    plain = points(read(data, shuffle=False))
    places = []
    for step, batch in enumerate(reader):
        for row, point in enumerate(points([batch])):
            place = reader.locate(step, row, 0)
            assert isinstance(place, PointLocation)
            assert place.row == place.positive * (1 + NEGATIVES) + place.draw
            assert point == plain[place.row], "the order must not change negatives"
            assert place.user == point[0]
            assert (place.draw == 0) == bool(point[2])
            places.append(place)
    assert len(set(places)) == len(places) == reader.num_rows
    with pytest.raises(IndexError):
        reader.locate(0, 128)


def test_by_default_the_epoch_is_one_permutation(large: Interactions) -> None:
    reader = read(large, batch_size=1000)
    assert reader.shuffle_buffer == -(-reader.num_rows // 1000) * 1000
    # Each batch has points from the whole dataset.
    for batch in itertools.islice(reader, 20):
        assert np.ptp(batch["user"]) > 1800
    assert read(large, batch_size=10_000_000).shuffle_buffer == 10_000_000
    assert read(large, batch_size=1000, shuffle_buffer=2500).shuffle_buffer == 3000
    assert read(large, shuffle=False).shuffle_buffer is None


def refusal(reader: fastpipe.Reader) -> str | None:
    """Returns the message for an insufficient memory limit, or None."""
    try:
        iter(reader)
    except fastpipe.errors.LimitError as error:
        return str(error)
    finally:
        reader.close()
    return None


@pytest.mark.parametrize("negatives", [0, 1, 4, 20])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_memory_limit_changes_no_row(large: Interactions, negatives: int, threads: int) -> None:
    """The rows are those without a limit, or an error names a buffer that fits."""
    options = {"batch_size": 1000, "num_negatives": negatives, "num_threads": threads}
    expected = samples.digests(read(large, **options))
    # The engine's estimate for a shard of 32,000 positives, plus a margin.
    largest = 32_100 * 5 * (1 + negatives) + (64 << 10)
    outcomes = set()
    for limit in (largest // 2, 5 * largest, 20 * largest):
        reader = read(large, **options, memory_limit=limit)
        assert reader.shuffle_buffer == read(large, **options).shuffle_buffer
        message = refusal(reader)
        if message is None:
            outcomes.add("all fit")
            assert samples.digests(reader) == expected
            continue
        fits = re.search(r"shuffle_buffer=(\d+) would fit", message)
        if fits is None:
            outcomes.add("none fits")
            assert "no shuffle_buffer fits" in message
            continue
        outcomes.add("a smaller one fits")
        assert int(fits[1]) < reader.num_rows
        smaller = read(large, **options, memory_limit=limit, shuffle_buffer=int(fits[1]))
        check_batches(large, list(smaller), negatives)
        assert smaller.stats()["memory"]["most_reserved"] <= limit
    assert outcomes == {"none fits", "a smaller one fits", "all fit"}


def test_a_limit_includes_the_permutation(large: Interactions) -> None:
    options = {"batch_size": 1000, "num_negatives": 20}
    rows = read(large, **options).num_rows
    with pytest.raises(fastpipe.errors.LimitError, match="the order of shuffle_buffer=") as caught:
        iter(read(large, **options, shuffle_buffer=rows, memory_limit=1 << 20))
    found = re.search(r"takes at least ([\d.]+) MB", str(caught.value))
    assert found is not None
    # A positive needs 2 bytes each for its user, its item and each negative. A point needs 4 bytes in the permutation.
    assert float(found[1]) * 1e6 > 2 * 22 * len(large) + 4 * rows


# --- Bit-for-bit equality ---

ORDERS: list[dict[str, Any]] = [
    {"shuffle": False},
    {"shuffle": True},
    {"shuffle": True, "shuffle_buffer": 384},
    {"shuffle": "block", "shuffle_buffer": 300},
    {"shuffle": "buffer", "shuffle_buffer": 300},
    {"shuffle": True, "repeats": False},
    {"shuffle": True, "sampling": "popularity"},
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_threads_and_prefetch_change_nothing(large: Interactions, order: dict[str, Any]) -> None:
    options = order | {"batch_size": 4096, "epochs": 2}
    expected = samples.digests(read(large, **options, num_threads=1, prefetch=1))
    for threads in (2, 8):
        assert samples.digests(read(large, **options, num_threads=threads)) == expected
        assert samples.digests(read(large, **options, num_threads=threads, prefetch=1)) == expected


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_step_can_be_resumed(data: Interactions, order: dict[str, Any]) -> None:
    reader = read(data, **order, epochs=2, num_threads=2)
    states, expected = [], []
    for batch in reader:
        expected.append(samples.digest(batch))
        states.append(reader.state_dict())
    for step, state in enumerate(states, 1):
        again = read(data, **order, epochs=2, num_threads=1)
        again.load_state_dict(through_json(state))
        assert samples.digests(again) == expected[step:], step


@pytest.mark.parametrize("order", ORDERS[:4], ids=str)
def test_any_batch_can_be_produced_separately(data: Interactions, order: dict[str, Any]) -> None:
    reader = read(data, **order)
    for epoch in (0, 3):
        reader.set_epoch(epoch)
        for step, batch in enumerate(reader):
            assert samples.digest(read(data, **order).batch_at(step, epoch)) == samples.digest(batch)


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.sampled_from(ORDERS[:3]), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data())
def test_ranks_may_change(order: dict[str, Any], worlds: list[int], draw: st.DataObject) -> None:
    """The number of ranks may change at any step. Together the ranks read each batch of a single rank once."""
    data = make(30, 40, 400)
    expected = Counter(samples.digests(read(data, **order)))
    found: Counter[str] = Counter()
    state = None
    for number, size in enumerate(worlds):
        readers = [read(data, **order, rank=rank, world_size=size, on_uneven="allow") for rank in range(size)]
        if state is not None:
            for reader in readers:
                reader.load_state_dict(state)
        is_last = number == len(worlds) - 1
        steps = min(map(len, readers)) if is_last else draw.draw(st.integers(0, 3))
        passes = [iter(reader) for reader in readers]
        for batches in passes:
            found.update(samples.digests(batches if is_last else itertools.islice(batches, steps)))
        state = through_json(readers[0].state_dict())
        if any(reader.state_dict()["progress"] != readers[0].state_dict()["progress"] for reader in readers):
            return  # The epoch ended within these steps, and some ranks read one batch more.
        if sum(found.values()) == sum(expected.values()):
            break
    assert found == expected


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_every_point(data: Interactions, size: int) -> None:
    """With padding, all ranks have the same number of batches of equal size, with marked points as padding."""
    readers = [read(data, rank=rank, world_size=size, on_uneven="pad", batch_size=100) for rank in range(size)]
    batches = [list(reader) for reader in readers]
    assert len({len(own) for own in batches}) == 1
    assert {len(batch["valid"]) for own in batches for batch in own} == {100}
    check_epoch(data, points(itertools.chain(*batches)), NEGATIVES)


@pytest.mark.parametrize("items", [65_535, 65_536, 65_537])
def test_items_at_the_limit_of_16_bits(items: int) -> None:
    data = Interactions.from_arrays([0, 1], [items - 1, 0], users=range(2), items=range(items))
    check_epoch(data, points(read(data)), NEGATIVES)


@pytest.mark.parametrize("shuffle", [False, True, "block", "buffer"])
def test_padding_is_spread_over_users_and_items(large: Interactions, shuffle: Any) -> None:
    """Otherwise all padding would access the same row of an embedding."""
    rows = len(large) * (1 + NEGATIVES)
    size = next(size for size in range(50_000, 300_000) if 0 < rows % size < 10)
    *_, last = read(large, batch_size=size, shuffle=shuffle, on_uneven="pad")
    assert int(last["valid"].sum()) == rows % size
    assert len(np.unique(last["item"])) == large.num_items
    users, items = (np.bincount(last[name]) for name in ("user", "item"))
    # Each user of these shards, and each item, occurs about as often as in any other batch.
    assert users.max() <= 10 * np.median(users[users > 0])
    assert items.max() <= 3 * np.median(items[items > 0])


def test_single_shards_yield_the_same_points(tmp_path: Path, large: Interactions) -> None:
    options = {"shuffle": False, "sampling": "popularity", "seed": 11, "epochs": 2}
    expected = points(read(large, **options))
    epochs = [expected[: len(expected) // 2], expected[len(expected) // 2 :]]
    found: list[list[tuple[int, int, int]]] = [[], []]
    for path in large.write_shards(tmp_path, shard_positives=32_000):
        shard = pickle.loads(pickle.dumps(Interactions.from_shards(path)))
        reader = read(shard, **options)
        place = reader.locate(0, 0)
        assert place.user == points([reader.batch_at(0)])[0][0]
        part = points(reader)
        found[0] += part[: len(part) // 2]
        found[1] += part[len(part) // 2 :]
    assert found == epochs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_the_same(data: Interactions) -> None:
    reader = read(data, num_threads=2)
    batches = iter(reader)
    next(batches)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(samples.digests(read(data)) != samples.digests(read(data, num_threads=1)))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(batches)) == len(reader) - 1


def test_the_order_of_the_input_changes_nothing(data: Interactions) -> None:
    users = np.repeat(np.arange(data.num_users), np.diff(data.indptr))
    order = np.random.default_rng(1).permutation(len(data))
    again = Interactions.from_arrays(
        users[order], data.indices[order], users=range(data.num_users), items=range(data.num_items)
    )
    assert samples.digests(read(again)) == samples.digests(read(data))


def test_points_are_stable() -> None:
    """The points are the same in all versions, so that training can be repeated and states remain valid."""
    users = [user for user in range(9) for _ in range(user)]
    items = [(user * user + 3 * k) % 11 for user in range(9) for k in range(user)]
    data = Interactions.from_arrays(users, items, items=range(11))
    plain = {"num_negatives": 2, "batch_size": 15, "shuffle": False}
    for options, expected in (
        ({}, [1, 4, 8, 4, 2, 0, 7, 2, 0, 1, 5, 2, 4, 5, 3]),
        ({"repeats": False}, [1, 4, 8, 4, 2, 1, 7, 2, 1, 1, 5, 2, 4, 5, 0]),
        ({"sampling": "popularity", "on_full": "skip"}, [1, 8, 0, 4, 1, 1, 7, 1, 2, 1, 7, 8, 4, 7, 0]),
    ):
        assert next(iter(read(data, **plain, **options)))["item"].tolist() == expected
    first = next(iter(read(data, num_negatives=2, batch_size=12)))
    assert first["user"].tolist() == [7, 7, 5, 2, 7, 7, 5, 4, 7, 6, 5, 1]
    assert first["item"].tolist() == [3, 3, 0, 5, 0, 3, 8, 10, 5, 5, 5, 2]
    assert first["label"].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0]
    held_out = fastpipe.recsys.HeldOut(np.array([0, 7]), np.array([0, 0]))
    candidates = fastpipe.recsys.evaluation_candidates(data, held_out, 6, seed=7)
    assert candidates.items.tolist() == [[0, 7, 7, 2, 7, 5, 10], [0, 3, 3, 3, 3, 3, 6]]


# --- States of other readers, and invalid arguments ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_negatives": 2}, "the dataset's num_negatives was 3 and is 2"),
        ({"repeats": False}, "the dataset's repeats was True and is False"),
        ({"sampling": "popularity"}, "the dataset's sampling was 'uniform' and is 'popularity'"),
        ({"on_full": "skip"}, "the dataset's on_full was 'error' and is 'skip'"),
        ({"shuffle_buffer": 256}, "shuffle_buffer was"),
        ({"seed": 8}, "seed was 7 and is 8"),
    ],
)
def test_states_of_other_readers_are_rejected(data: Interactions, options: dict[str, Any], message: str) -> None:
    state = read(data).state_dict()
    with pytest.raises(fastpipe.errors.StateError, match=message):
        read(data, **options).load_state_dict(state)
    read(data, item_dtype="uint16", label_dtype="int8", num_threads=1).load_state_dict(state)


def test_states_of_other_data_are_rejected(data: Interactions, tmp_path: Path) -> None:
    state = read(data).state_dict()
    items = data.indices.copy()
    items[0] = next(item for item in range(90) if item not in items[: data.indptr[1]])
    users = np.repeat(np.arange(data.num_users), np.diff(data.indptr))
    other = Interactions.from_arrays(users, items, users=range(data.num_users), items=range(data.num_items))
    with pytest.raises(fastpipe.errors.StateError, match="the dataset has different contents"):
        read(other).load_state_dict(state)
    files = samples.write(tmp_path, [[10]])
    with pytest.raises(fastpipe.errors.StateError, match="the dataset's"):
        read(data).load_state_dict(files.read(batch_size=128, shuffle=True, seed=7).state_dict())


def full() -> Interactions:
    """User `b` has every item, `c` all but two, `d` none."""
    pairs = [("a", 0), *(("b", item) for item in range(6)), *(("c", item) for item in range(4))]
    return Interactions.from_arrays(*zip(*pairs, strict=True), users=["d", "c", "b", "a"])


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
def test_a_user_who_has_everything_is_named_or_skipped() -> None:
    data = full()
    with pytest.raises(UnseenItemsError, match=r"the user 'b' has no unseen items.*on_full=\"skip\"") as caught:
        read(data)
    assert (caught.value.user, pickle.loads(pickle.dumps(caught.value)).user) == ("b", "b")
    assert isinstance(caught.value, fastpipe.errors.InteractionsError)
    reader = read(data, on_full="skip")
    found = points(reader)
    assert {user for user, _, _ in found} == set(data.user_indices(["a", "c"]).tolist())
    assert sum(label for _, _, label in found) == 5
    assert all(item in (4, 5) for user, item, label in found if user == 1 and not label)
    # The other users draw the same negatives as without that user.
    assert reader.num_rows == len(found) == 5 * (1 + NEGATIVES)
    assert {label for _, _, label in points(read(data, num_negatives=0))} == {1}


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
def test_more_negatives_than_unseen_items() -> None:
    data = full()
    with pytest.raises(UnseenItemsError, match="fewer than 3 unseen items, too few for that many different") as caught:
        read(data, repeats=False, num_negatives=3, on_full="error")
    assert caught.value.user == "c"
    found = points(read(data, repeats=False, num_negatives=3, on_full="skip"))
    assert {user for user, _, _ in found} == {3}
    nobody = Interactions.from_arrays([0, 0, 1, 1], [0, 1, 0, 1])
    with pytest.raises(UnseenItemsError, match=r"the user 0 has no unseen items .*as do 1 others"):
        read(nobody)
    with pytest.raises(UnseenItemsError, match="nothing is left to read"):
        read(nobody, on_full="skip")


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
def test_no_item_can_be_drawn_by_popularity() -> None:
    data = Interactions.from_arrays([0, 0, 1], [0, 1, 0], users=[0, 1], items=range(5))
    points(read(data))
    with pytest.raises(UnseenItemsError, match="the user 0 has no unseen items that can be drawn"):
        read(data, sampling="popularity")
    assert {item for _, item, label in points(read(data, sampling="popularity", on_full="skip")) if not label} == {1}
    points(read(data, sampling="popularity", power=0))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_negatives": -1}, ValueError, "num_negatives must be between 0"),
        ({"num_negatives": 2.5}, TypeError, "num_negatives must be an integer"),
        ({"num_negatives": True}, TypeError, "num_negatives must be an integer; got True"),
        ({"batch_size": 0}, ValueError, "batch_size must be between 1"),
        ({"seed": 2**64}, ValueError, "seed must be between 0"),
        ({"sampling": "hard"}, ValueError, 'sampling must be "uniform" or "popularity"'),
        ({"power": -1}, ValueError, "power must be 0 or more"),
        ({"power": float("nan")}, ValueError, "power must be 0 or more"),
        ({"power": float("inf")}, ValueError, "power must be 0 or more"),
        ({"on_full": "drop"}, ValueError, 'on_full must be "error" or "skip"'),
        ({"shuffle": "all"}, ValueError, "shuffle must be True"),
        ({"shuffle": False, "shuffle_buffer": 10}, ValueError, "set shuffle=True or remove it"),
        ({"shuffle_buffer": 0}, ValueError, "shuffle_buffer must be between 1"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be between 0 and 1"),
        ({"world_size": 2, "seed": None}, ValueError, "set a seed"),
        ({"epochs": 0}, ValueError, "epochs must be between 1"),
        ({"num_threads": 0}, ValueError, "num_threads must be between 1"),
        ({"memory_limit": "much"}, ValueError, "memory_limit must be a number of bytes"),
    ],
)
def test_invalid_arguments(data: Interactions, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        read(data, **options)


def test_other_objects_are_rejected() -> None:
    with pytest.raises(TypeError, match="data must be Interactions"):
        read_interactions([[1, 2]], batch_size=3)  # type: ignore[arg-type]


def test_a_large_power_has_no_infinities(data: Interactions) -> None:
    check_epoch(data, points(read(data, sampling="popularity", power=300, on_full="skip", num_negatives=1)), 1)


def test_repr_and_features_of_readers(data: Interactions) -> None:
    reader = read(data)
    assert repr(reader).startswith(f"<fastpipe.Reader of {len(data)} positives with 3 negatives each: ")
    assert (reader.files, reader.categories) == ([], {})
    assert list(reader.features) == ["user", "item", "label"]
    assert "Nothing was read yet" in reader.explain()
    assert len(list(reader)) == reader.stats()["batches"]
    assert "sampling" in reader.explain()
    assert {"sampling", "gathering"} < set(reader.stats()["seconds"])
    assert not {"decompressing", "decoding"} & set(reader.stats()["seconds"])
    with pytest.raises(InteractionsError):
        data.user_indices([1000])
