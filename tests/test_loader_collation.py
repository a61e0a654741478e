"""Collation: for any kind of items, a batch is bitwise equal to the result of torch's collation.

Items of all kinds are generated. If torch can't collate some items, the loader fails for that batch only.
"""

from __future__ import annotations

import collections
import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from torch.utils.data import default_collate

from apart import apart
from fastpipe.torch import DataLoader
from fastpipe.torch.loader import collate
from loader_data import (
    FORKED,
    SHARED,
    THREADS,
    WORKERS,
    Fixed,
    Items,
    Own,
    Pair,
    Record,
    Tagged,
    assert_same,
    copied,
    listed,
    outcomes,
)
from strategies import FEW

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers use shared memory of Linux")

# Each example starts workers. Shrinking is disabled because it would take minutes.
few = settings(max_examples=FEW, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])

# Excludes aliases of dtypes ("q"), which torch may reject and loaders accept.
NUMPY_DTYPES = [*"?bBhHiIlLefdFD", ">i4", "<f8", ">f4", "g", "U3", "S2", "O", "M8[s]", "m8[us]"]
TORCH_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
SHAPES = st.sampled_from([(), (1,), (3,), (0,), (2, 3), (2, 0, 3), (1, 1, 4), (2, 1, 2, 2), (70,), (40, 9)])
ORDERS = st.sampled_from(["C", "C", "F", "every other", "swapped", "broadcast"])


class Make(NamedTuple):
    """A function that makes the item of a row."""

    what: Any
    item: Callable[[int], Any]

    def __repr__(self) -> str:
        return repr(self.what)


def bits(shape: tuple[int, ...], size: int, row: int) -> np.ndarray:
    rng = np.random.default_rng(row)
    return rng.integers(0, 256, (*shape, size), np.uint8)


def laid_out(array: Any, order: str) -> Any:
    """Returns an equal array or tensor with another memory layout."""
    if order == "F" and isinstance(array, np.ndarray):
        return np.asfortranarray(array)
    if order == "swapped" and array.ndim > 1:
        return (array.swapaxes(0, 1) if isinstance(array, np.ndarray) else array.transpose(0, 1)).__getitem__(...)
    if order == "every other" and array.ndim:
        join = np.concatenate if isinstance(array, np.ndarray) else torch.cat
        return join([array, array])[::2]
    if order == "broadcast" and array.ndim and array.shape[0]:
        if isinstance(array, np.ndarray):
            return np.broadcast_to(array[:1], array.shape).copy(order="K")
        return array[:1].expand(array.shape)
    return array


def an_array(dtype: str, shape: tuple[int, ...], order: str) -> Make:
    kind = np.dtype(dtype)

    def make(row: int) -> np.ndarray:
        if kind.kind == "O":
            return np.full(shape, row, object)
        if kind.kind in "USmMg" or dtype == "g":
            return laid_out(
                (np.arange(np.prod(shape, dtype=int)) + row).astype("i8").astype(kind).reshape(shape), order
            )
        raw = bits(shape, kind.itemsize, row)
        found = (raw & 1).view(bool) if kind.kind == "b" else raw.view(kind)
        # NumPy's pickles of other layouts change the byte order.
        return laid_out(found.reshape(shape).copy(), order if kind.isnative else "C")

    return Make((dtype, shape, order), make)


def a_scalar(dtype: str) -> Make:
    made = an_array(dtype, (), "C")
    return Make(f"a {dtype}", lambda row: made.item(row)[()])


def a_tensor(dtype: torch.dtype, shape: tuple[int, ...], order: str, more: str) -> Make:
    def make(row: int) -> torch.Tensor:
        raw = torch.from_numpy(bits(shape, dtype.itemsize, row))
        if dtype is torch.bool:
            raw &= 1
        found = laid_out(raw.reshape(-1).view(dtype).reshape(shape), order)
        match more:
            case "conjugate" if dtype.is_complex:
                return found.conj()
            case "negative" if dtype in (torch.complex64, torch.complex128):
                return found.conj().imag
            case "tagged":
                return found.as_subclass(Tagged)
            case "part":
                return torch.stack([found, found])[1]
        return found

    return Make((dtype, shape, order, more), make)


NUMBERS = st.integers() | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**63, -(2**63) - 1, 2**64])
TEXT = st.text() | st.text(st.characters(categories=["Cs", "Lu", "So"]), max_size=5)


@st.composite
def plain(draw: st.DrawFn) -> Make:
    """Values of Python's builtin types."""
    values = draw(
        st.sampled_from([st.integers(-5, 5), NUMBERS, st.floats(), st.booleans(), TEXT, st.binary()]).flatmap(
            lambda each: st.lists(each, min_size=9, max_size=9)
        )
    )
    return Make(values, lambda row: values[row % len(values)])


arrays = st.builds(an_array, st.sampled_from(NUMPY_DTYPES), SHAPES, ORDERS)
scalars = st.builds(a_scalar, st.sampled_from(NUMPY_DTYPES))
tensors = st.builds(
    a_tensor,
    st.sampled_from(TORCH_DTYPES),
    SHAPES,
    ORDERS,
    st.sampled_from(["", "", "", "conjugate", "negative", "tagged", "part"]),
)
odd = st.sampled_from([None, Own(3), range(3), {1}, slice(2), torch.float32, Ellipsis]).map(
    lambda each: Make(each, lambda row: each)
)
values = st.one_of(plain(), arrays, scalars, tensors, tensors, odd)

KEYS = st.sampled_from(["a", "b", "c", 1, (2, "x"), None])


def containers(parts: st.SearchStrategy[Make]) -> st.SearchStrategy[Make]:
    def joined(kind: Callable[[list[Any]], Any]) -> Callable[[list[Make]], Make]:
        return lambda made: Make((kind, made), lambda row: kind([make.item(row) for make in made]))

    some = st.lists(parts, max_size=3)
    two = st.tuples(parts, parts).map(list)
    kinds = [list, tuple, collections.UserList, collections.deque]
    pairs = [lambda both: Pair(*both), lambda both: Record(*both), lambda both: Fixed(*both)]
    dicts = [dict, collections.OrderedDict, collections.UserDict, lambda found: collections.defaultdict(int, found)]

    def keyed(kind: Callable[[dict[Any, Any]], Any], named: dict[Any, Make]) -> Make:
        return Make((kind, named), lambda row: kind({key: make.item(row) for key, make in named.items()}))

    return st.one_of(
        st.sampled_from(kinds).flatmap(lambda kind: some.map(joined(kind))),
        st.sampled_from(pairs).flatmap(lambda kind: two.map(joined(kind))),
        st.builds(keyed, st.sampled_from([dict, *dicts]), st.dictionaries(KEYS, parts, max_size=3)),
    )


makes = st.recursive(values, containers, max_leaves=5)

# The index of the generator for each of nine items. Most often all items use the same generator.
alike = st.just([0] * 9)
mixed = st.lists(st.integers(0, 1), min_size=9, max_size=9)


def quiet(function: Callable[[], Any]) -> Any:
    """Returns the result of a call, or the class of its exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function()
        except Exception as error:
            return type(error)


def ours(items: Sequence[Any], way: dict[str, Any], seconds: float = 0.0, **more: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcomes(iter(DataLoader(Items(items, seconds), batch_size=3, **way, **more)))  # type: ignore[arg-type]


def each_batch(items: Sequence[Any], function: Callable[[list[Any]], Any]) -> list[Any]:
    return [quiet(lambda at=at: function(list(items[at : at + 3]))) for at in range(0, len(items), 3)]  # type: ignore[misc]


@apart(most=580)
@pytest.mark.parametrize("way", WORKERS)
def test_batches_match_torch(way: str) -> None:
    @few
    @given(makes, makes, alike | alike | mixed)
    def check(one: Make, other: Make, which: list[int]) -> None:
        items = [(one, other)[each].item(row) for row, each in enumerate(which)]
        assert_same(ours(items, WORKERS[way]), each_batch(items, collate))

    check()


@apart(most=580)
@pytest.mark.parametrize("way", WORKERS)
def test_a_collate_fn_sees_the_items(way: str) -> None:
    @few
    @given(makes, makes, alike | mixed, st.integers(0, 2), st.sampled_from([0.0, SHARED]))
    def check(one: Make, other: Make, which: list[int], joiners: int, seconds: float) -> None:
        items = [(one, other)[each].item(row) for row, each in enumerate(which)]
        found = ours(items, WORKERS[way], seconds, collate_fn=listed, num_batch_workers=joiners)
        assert_same(found, [items[at : at + 3] for at in (0, 3, 6)])

    check()


@apart
def test_collation_matches_torch_except_for_data_classes() -> None:
    @settings(max_examples=200)
    @given(makes, makes, alike | mixed)
    def check(one: Make, other: Make, which: list[int]) -> None:
        items = [(one, other)[each].item(row) for row, each in enumerate(which)]
        assume("Record" not in repr(items) and "Fixed" not in repr(items))
        assert_same(quiet(lambda: collate(items)), quiet(lambda: default_collate(items)))

    check()


def test_data_classes_are_batches_of_their_fields() -> None:
    batch = collate([Record(1, "a"), Record(2, "b")])
    assert_same(batch, Record(torch.tensor([1, 2]), ["a", "b"]))
    assert_same(
        collate([Fixed(1.0, [2]), Fixed(3.0, [4])]), Fixed(torch.tensor([1.0, 3.0]).double(), [torch.tensor([2, 4])])
    )
    with pytest.raises(RuntimeError, match="data class"):
        collate([Record(1), Fixed(1, 2)])


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_data_classes_are_read_in_place(way: str) -> None:
    items = [Fixed(np.full((2, 2), row, np.int16), Record(row, f"n{row}")) for row in range(7)]
    expected = [
        Fixed(torch.tensor([[[r] * 2] * 2 for r in rows]).short(), Record(torch.tensor(rows), [f"n{r}" for r in rows]))
        for rows in ([0, 1, 2], [3, 4, 5], [6])
    ]
    assert_same(ours(items, WORKERS[way]), expected)


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_varying_shapes_need_a_collate_fn(way: str) -> None:
    items = [np.arange(row % 4, dtype=np.float32) for row in range(12)]
    assert ours(items, WORKERS[way]) == [RuntimeError] * 4
    assert_same(ours(items, WORKERS[way], collate_fn=listed), [items[at : at + 3] for at in range(0, 12, 3)])
    padded = ours(items, WORKERS[way], collate_fn=pad)
    assert_same(padded, [pad(items[at : at + 3]) for at in range(0, 12, 3)])
    tensors = [torch.arange(row % 4) for row in range(12)]
    assert_same(ours(tensors, WORKERS[way], collate_fn=pad), [pad(tensors[at : at + 3]) for at in range(0, 12, 3)])


def pad(items: list[Any]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(item) for item in items], batch_first=True)


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_reversed_arrays_are_supported(way: str) -> None:
    """torch can't convert such arrays to tensors."""
    items = [np.arange(row, row + 4)[::-1] for row in range(3)]
    assert each_batch(items, collate) == [ValueError]
    assert_same(ours(items, WORKERS[way]), [torch.tensor([[3, 2, 1, 0], [4, 3, 2, 1], [5, 4, 3, 2]])])
    assert_same(ours(items, WORKERS[way], collate_fn=listed), [items])


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_one_odd_item_affects_only_its_batch(way: str) -> None:
    items: list[Any] = [torch.full((3,), float(row)) for row in range(15)]
    items[7] = torch.zeros(4)
    items[10] = np.zeros(3)
    found = ours(items, WORKERS[way])
    expected = each_batch(items, default_collate)
    assert_same(found, expected)
    assert [kind for kind in found if isinstance(kind, type)] == [RuntimeError, TypeError]


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_read_only_arrays_and_mapped_files(way: str, tmp_path: Path) -> None:
    whole = np.arange(60, dtype=np.float32).reshape(10, 6)
    fixed = [row.copy() for row in whole]
    for row in fixed:
        row.flags.writeable = False
    expected = [torch.from_numpy(whole[at : at + 3]) for at in (0, 3, 6, 9)]
    assert_same(ours(fixed, WORKERS[way]), expected)
    np.save(tmp_path / "rows.npy", whole)
    assert_same(ours(list(np.load(tmp_path / "rows.npy", mmap_mode="r")), WORKERS[way]), expected)


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_tensors_with_gradients_and_other_layouts(way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) for _ in range(3)]
        compressed = [torch.eye(3).to_sparse_csr() for _ in range(3)]
        quantized = [torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8) for _ in range(3)]
    sparse = [torch.eye(3).to_sparse() for _ in range(3)]
    for items in (nested, sparse, compressed):
        assert ours(items, WORKERS[way]) == [RuntimeError]
    for items in (sparse, compressed, quantized):
        assert_same(ours(items, WORKERS[way], collate_fn=listed), [items])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = torch.ones(3)
        told.note = "kept"  # type: ignore[attr-defined]
        (found,) = ours([told] * 3, WORKERS[way], collate_fn=listed)
    assert_same(found, [torch.ones(3)] * 3)
    leaf = torch.ones(2, requires_grad=True)
    # As with torch's workers, non-leaf tensors can't be sent.
    assert ours([leaf] * 3, WORKERS[way]) == [RuntimeError]
    (kept,) = ours([leaf] * 3, WORKERS[way], collate_fn=listed)
    assert all(each.requires_grad for each in kept)


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_types_registered_with_torch_are_collated(way: str) -> None:
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[Own] = lambda batch, *, collate_fn_map=None: [item.value for item in batch]
    kept = default_collate_fn_map[str]
    assert ours([Own(row) for row in range(4)], WORKERS[way]) == [[0, 1, 2], [3]]
    default_collate_fn_map[str] = lambda batch, *, collate_fn_map=None: "+".join(batch)
    default_collate_fn_map[int] = lambda batch, *, collate_fn_map=None: sum(batch)
    try:
        assert ours([("a", 1), ("b", 2), ("c", 3)], WORKERS[way]) == [["a+b+c", 6]]
    finally:
        default_collate_fn_map[str] = kept


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_batches_have_separate_memory(way: str) -> None:
    """Memory of a batch that the consumer keeps or writes to is not shared with other batches."""
    items = [{"a": np.full(5, row), "b": torch.full((300,), float(row))} for row in range(60)]
    loader = DataLoader(Items(items), batch_size=2, **WORKERS[way])
    kept: list[Any] = []
    for number, batch in enumerate(loader):
        assert batch["a"].tolist() == [[2 * number] * 5, [2 * number + 1] * 5]
        assert (batch["b"][1] == 2 * number + 1).all()
        batch["a"] += 1000
        if number % 3 == 0:
            kept.append((number, batch, copied(batch)))
        # A part keeps the whole batch alive.
        elif number % 3 == 1:
            kept.append((number, batch["b"][1:], copied(batch["b"][1:])))
    for number, one, other in kept:
        assert_same(one, other)
        assert number * 2 in np.unique(other["a"]) - 1000 if isinstance(other, dict) else True
    arrays = [batch["a"].numpy() for batch in loader]
    addresses = {array.ctypes.data for array in arrays}
    assert len(addresses) == len(arrays)
    assert all(address % 64 == 0 for address in addresses)
    assert all(array.flags.writeable for array in arrays)
    # Memory of released batches is reused.
    few_addresses = {batch["a"].data_ptr() for batch in loader}
    assert len(few_addresses) < 12


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_items_kept_by_collate_fn_stay_valid(way: str) -> None:
    """Items and views that a `collate_fn` keeps in a global beyond its call remain unchanged."""
    items = Items([np.full((2000,), row, np.int32) for row in range(90)], SHARED)
    for joiners in (0, 1, 2):
        loader = DataLoader(items, 3, collate_fn=Keeps(), num_batch_workers=joiners, **WORKERS[way])
        assert [batch[0] for batch in loader] == list(range(0, 90, 3))
    views = DataLoader(items, 3, collate_fn=one_of, num_batch_workers=1, **WORKERS[way])
    assert_same([batch.copy() for batch in views], [item[::2] for item in items.items[1::3]])
    twice = DataLoader(items, 3, collate_fn=doubled, num_batch_workers=1, **WORKERS[way])
    for number, (one, other) in enumerate(twice):
        assert one is other
        assert (one == number * 3).all()
        assert (other == number * 3).all()


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_batches_stay_valid_after_collate_fn_has_dropped_items_that_it_kept(way: str) -> None:
    """The items have several sizes, so some are stored outside of the memory for rows."""
    items = Items([np.full(2000 + row % 7 * 500, row, np.int32) for row in range(90)], SHARED)
    for joiners in (0, 1):
        more = WORKERS[way] | {"num_batch_workers": joiners, "prefetch_factor": 8}
        batches: Any = iter(DataLoader(items, 3, collate_fn=KeepsLast(), **more))
        found = [next(batches)]
        # The workers make further batches, and drop the items of earlier ones.
        for batch, _ in batches._begun:
            assert batches._consumer.wait(batch, 60)
        found += batches
        assert found == [(row, "text" * 100 * (row % 5)) for row in range(0, 90, 3)]


class KeepsLast:
    """Keeps the items of the last batch only."""

    kept: list[Any]

    def __call__(self, items: list[Any]) -> tuple[int, str]:
        self.kept = items
        row = int(items[0][0])
        return row, "text" * 100 * (row % 5)


class Keeps:
    """Keeps an item of each batch and checks the kept items."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, items: list[Any]) -> tuple[int, Any]:
        self.kept.append((int(items[0][0]), items[0], items[1][5:9]))
        for value, whole, part in self.kept:
            assert (whole == value).all(), (value, whole)
            assert (part == value + 1).all(), (value, part)
        if len(self.kept) > 5:
            del self.kept[::2]
        return int(items[0][0]), items[2]


def one_of(items: list[Any]) -> Any:
    """Returns a view of an item."""
    return items[1][::2]


def doubled(items: list[Any]) -> Any:
    """Returns one item twice."""
    return items[0], items[0]


@apart
def test_items_are_not_changed() -> None:
    items = [{"a": np.arange(4.0), "b": [torch.ones(2), "x"]} for _ in range(6)]
    before = copy.deepcopy(items)
    for way in (FORKED, THREADS):
        for more in ({}, {"collate_fn": listed}):
            for batch in DataLoader(Items(items), batch_size=2, **way, **more):
                (batch["a"] if isinstance(batch, dict) else batch[0]["a"]).fill_(7) if isinstance(batch, dict) else None
    assert_same(items, before)


def tagged(items: list[Any]) -> Any:
    return torch.tensor(items).as_subclass(Tagged)


@apart
@pytest.mark.parametrize("way", WORKERS)
def test_batches_of_a_derived_class_come_without_warnings(way: str) -> None:
    """Warnings of workers are errors here, and torch warns if the storage of such a tensor is asked for its size."""
    found = list(DataLoader(Items([1, 2, 3]), 3, collate_fn=tagged, **WORKERS[way]))
    assert_same(found, [torch.tensor([1, 2, 3]).as_subclass(Tagged)])
