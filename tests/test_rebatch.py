from __future__ import annotations

import gc
import itertools
import json
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
import order_model
from fastpipe import Masked, Ragged, Reader, Rebatcher, Sparse, Strings
from fastpipe.batch import SparseCSR
from processes import together


def order(total: int, buffer: int, seed: int, epoch: int) -> list[int]:
    """Returns the order of all rows after they pass through the buffer. test_order_buffer.py tests its distribution."""
    return [row for _, row in order_model.buffer([total], buffer or 1, seed, epoch)]


# --- Columns: build them from lists, and convert them to lists ---

Make = Callable[[list[Any]], Any]


def offsets_of(rows: list[Any]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)], dtype=np.int64)


def dense(dtype: Any, shape: tuple[int, ...] = ()) -> Make:
    return lambda rows: np.array(rows, dtype=dtype).reshape(len(rows), *shape)


def ragged(make: Make) -> Make:
    return lambda rows: Ragged(make([item for row in rows for item in row]), offsets_of(rows))


def strings(*shape: int, binary: bool = False) -> Make:
    def make(rows: list[Any]) -> Strings:
        entries = rows
        for _ in shape:
            entries = [entry for row in entries for entry in row]
        encoded = [entry if binary else entry.encode() for entry in entries]
        values = np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8)
        return Strings(values, offsets_of(encoded), (len(rows), *shape), binary)

    return make


def masked(make: Make, blank: Any) -> Make:
    def made(rows: list[Any]) -> Masked:
        return Masked(
            make([blank if row is None else row for row in rows]), np.array([row is not None for row in rows], bool)
        )

    return made


def sparse(rank: int, make: Make) -> Make:
    def made(rows: list[Any]) -> Sparse:
        entries = [(i, *index, value) for i, row in enumerate(rows) for index, value in row]
        indices = np.array([entry[:-1] for entry in entries], dtype=np.int64).reshape(-1, rank + 1)
        return Sparse(indices, make([entry[-1] for entry in entries]), np.array([len(rows)] + [10] * rank))

    return made


def csr(rank: int, make: Make) -> Make:
    def made(rows: list[Any]) -> SparseCSR:
        entries = [entry for row in rows for entry in row]
        indices = np.array([index for index, _ in entries], dtype=np.int64).reshape(-1, rank)
        values = make([value for _, value in entries])
        shape = np.array([len(rows)] + [10] * rank)
        return SparseCSR(offsets_of(rows), indices[:, 0] if rank == 1 else indices, values, shape)

    return made


def listed(form: Any) -> list[Any]:
    rows: list[Any] = form.tolist() if isinstance(form, np.ndarray) else form.to_list()
    return rows


ints = st.integers(-100, 100)
pairs = st.lists(ints, max_size=2)
text = st.text("aäb€", max_size=4)


def rows_of(item: st.SearchStrategy[Any], length: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(item, min_size=length, max_size=length)


def entries(rank: int, value: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.tuples(st.tuples(*[st.integers(0, 9)] * rank), value), max_size=3)


COLUMNS: dict[str, tuple[st.SearchStrategy[Any], Make]] = {
    "bool": (st.booleans(), dense(bool)),
    "int8": (ints, dense(np.int8)),
    "big-endian": (ints, dense(">i2")),
    "float32": (ints.map(float), dense(np.float32)),
    "float64 [3]": (rows_of(ints.map(float), 3), dense(np.float64, (3,))),
    "int16 [40, 2]": (ints.map(lambda i: [[i + j, -j] for j in range(40)]), dense(np.int16, (40, 2))),
    "float64 [64]": (ints.map(lambda i: [i + 0.5] * 64), dense(np.float64, (64,))),
    "nullable float64 [64]": (st.none() | ints.map(lambda i: [float(i)] * 64), masked(dense(float, (64,)), [0.0] * 64)),
    "int64 [0]": (st.just([]), dense(np.int64, (0,))),
    "complex": (ints.map(complex), dense(np.complex128)),
    "time": (ints.map(lambda i: np.datetime64(i, "s").item()), dense("M8[s]")),
    "text": (text, dense("U4")),
    "struct": (st.tuples(ints, ints.map(float)), dense([("a", "i1"), ("b", "f8")])),
    "ragged": (st.lists(ints, max_size=4), ragged(dense(np.int32))),
    "ragged [2]": (st.lists(rows_of(ints, 2), max_size=3), ragged(dense(np.int64, (2,)))),
    "ragged 3": (
        st.lists(st.lists(st.lists(ints, max_size=2), max_size=2), max_size=3),
        ragged(ragged(ragged(dense(np.int8)))),
    ),
    "strings": (text, strings()),
    "binary": (st.binary(max_size=5), strings(binary=True)),
    "strings [2]": (rows_of(text, 2), strings(2)),
    "strings [0]": (st.just([]), strings(0)),
    "ragged strings": (st.lists(text, max_size=3), ragged(strings())),
    "ragged strings [1, 2]": (st.lists(rows_of(rows_of(text, 2), 1), max_size=2), ragged(strings(1, 2))),
    "nullable": (st.none() | ints, masked(dense(np.int64), 0)),
    "nullable ragged of nullable": (
        st.none() | st.lists(st.none() | text, max_size=3),
        masked(ragged(masked(strings(), "")), []),
    ),
    "sparse": (entries(1, ints), sparse(1, dense(np.float32))),
    "sparse 2": (entries(2, text), sparse(2, strings())),
    "csr": (entries(1, ints), csr(1, dense(np.int64))),
    "csr 2": (entries(2, text), csr(2, strings())),
    "nullable sparse": (st.none() | entries(1, ints), masked(sparse(1, dense(np.int8)), [])),
}


def check_sound(form: Any, rows: int) -> None:
    """Checks that a column has its own memory, and holds no values beyond its rows."""
    parts = form if not isinstance(form, np.ndarray) else [form]
    for part in parts:
        if isinstance(part, np.ndarray):
            assert part.base is None
            assert part.flags.c_contiguous
            assert part.flags.writeable
    if isinstance(form, Ragged | Strings):
        assert form.offsets.dtype == np.int64
        assert form.offsets[0] == 0
        assert len(form.values) == form.offsets[-1]
    elif isinstance(form, Sparse | SparseCSR):
        assert len(form.indices) == len(form.values)
        assert form.dense_shape[0] == rows
        assert form.dense_shape.dtype == np.int64
        assert set(form.dense_shape[1:].tolist()) == {10}
    assert len(form) == rows
    if isinstance(form, Ragged | Masked):
        check_sound(form.values, len(form.values))


@pytest.mark.parametrize("name", COLUMNS)
@given(data=st.data())
def test_rows_match_the_naive_order(name: str, data: st.DataObject) -> None:
    strategy, make = COLUMNS[name]
    chunks = data.draw(st.lists(st.lists(strategy, max_size=9), max_size=6))
    size, buffer = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 12))
    seed, epoch, drop_last = data.draw(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1), st.booleans()))

    total, batches = 0, []
    for rows in chunks:
        batches.append({"x": make(rows), "number": np.arange(total, total + len(rows))})
        total += len(rows)
    found = list(Rebatcher(batches, size, shuffle_buffer=buffer, seed=seed, epoch=epoch, drop_last=drop_last))

    numbers = order(total, buffer, seed, epoch)
    if drop_last:
        numbers = numbers[: total // size * size]
    everything = list(itertools.chain.from_iterable(listed(make(rows)) for rows in chunks))
    assert [batch["number"].tolist() for batch in found] == [
        numbers[i : i + size] for i in range(0, len(numbers), size)
    ]
    for batch in found:
        assert list(batch) == ["x", "number"]
        assert type(batch["x"]) is type(batches[0]["x"])
        assert listed(batch["x"]) == [everything[i] for i in batch["number"].tolist()]
        check_sound(batch["x"], len(batch["number"]))
        if isinstance(batch["x"], np.ndarray):
            assert (batch["x"].dtype, batch["x"].shape[1:]) == (batches[0]["x"].dtype, batches[0]["x"].shape[1:])


@pytest.mark.parametrize("buffer", [0, 1000])
def test_many_columns_and_many_rows(buffer: int) -> None:
    """Uses enough rows to reuse slots many times, compact arenas and start threads."""
    rng = np.random.default_rng(0)
    total, size = 20_000, 2700
    lengths = rng.integers(0, 50, total)
    whole = {
        "wide": rng.integers(0, 1 << 60, (total, 400)),
        "narrow": rng.integers(0, 255, total).astype(np.uint8),
        "ragged": Ragged(rng.random((int(lengths.sum()), 3)), np.cumsum([0, *lengths])),
    }
    cuts = [0, *np.sort(rng.integers(0, total, 30)).tolist(), total]
    batches = [{name: form[start:stop] for name, form in whole.items()} for start, stop in itertools.pairwise(cuts)]
    start = 0
    numbers = np.array(order(total, buffer, 5, 2))
    for batch in Rebatcher(batches, size, shuffle_buffer=buffer, seed=5, epoch=2):
        index = numbers[start : start + size]
        assert np.array_equal(batch["wide"], whole["wide"][index])
        assert np.array_equal(batch["narrow"], whole["narrow"][index])
        assert np.array_equal(batch["ragged"].lengths, lengths[index])
        for i in range(0, len(index), 97):
            assert np.array_equal(batch["ragged"].row(i), whole["ragged"].row(int(index[i])))
        assert batch["ragged"].values.sum() == pytest.approx(sum(whole["ragged"].row(int(i)).sum() for i in index))
        start += len(index)
    assert start == total


# --- The iterator ---


def test_the_seed_is_shown_and_repeats_the_order() -> None:
    batches = [{"x": np.arange(50)}]
    first = Rebatcher(batches, 8, shuffle_buffer=20)
    assert isinstance(first, Rebatcher)
    assert iter(first) is first
    assert first.batch_size == 8
    again = Rebatcher(batches, np.int64(8), shuffle_buffer=20, seed=first.seed, epoch=0)
    assert [b["x"].tolist() for b in first] == [b["x"].tolist() for b in again]
    assert Rebatcher(batches, 8, shuffle_buffer=20).seed != first.seed


@pytest.mark.parametrize("buffer", [0, 5])
def test_nothing_is_read_before_it_is_needed(buffer: int) -> None:
    read = 0

    def source() -> Iterator[dict[str, Any]]:
        nonlocal read
        for read in range(1, 11):  # noqa: B007
            yield {"x": np.arange(4)}

    batches = Rebatcher(source(), 4, shuffle_buffer=buffer)
    assert read == 0
    next(batches)
    assert read == (1 if buffer == 0 else 2)
    assert len(list(batches)) == 9
    assert list(batches) == []


@pytest.mark.parametrize("buffer", [0, 3, 50])
def test_input_arrays_may_be_overwritten(buffer: int) -> None:
    memory = np.zeros(20, dtype=np.int64)
    wide = np.zeros((20, 64), dtype=np.int64)
    items = np.zeros(40, dtype=np.int64)

    def source() -> Iterator[dict[str, Any]]:
        for i in range(10):
            memory[:] = np.arange(20) + 20 * i
            wide[:] = memory[:, None]
            items[:] = np.repeat(memory, 2)
            yield {"x": memory, "w": wide, "r": Ragged(items, np.arange(21) * 2)}
            memory[:] = wide[:] = items[:] = -1

    found = list(Rebatcher(source(), 4, shuffle_buffer=buffer, seed=0, copy=buffer > 0))
    assert sorted(itertools.chain.from_iterable(b["x"].tolist() for b in found)) == list(range(200))
    assert all(np.array_equal(b["r"].values, np.repeat(b["x"], 2)) for b in found)
    assert all((b["w"] == b["x"][:, None]).all() for b in found)


@pytest.mark.parametrize("copy", [False, True])
@given(
    chunks=st.lists(st.sampled_from([1, 2, 15, 16, 17, 40, 100, 300]), max_size=60),
    size=st.integers(1, 60),
    buffer=st.integers(1, 200),
)
def test_wide_rows_are_drawn_from_their_input_arrays(copy: bool, chunks: list[int], size: int, buffer: int) -> None:
    """Some rows stay in their input arrays. Rows of arrays that have waited too long are moved to a table."""
    total = sum(chunks)
    numbers = np.arange(total, dtype=np.int32)
    whole = {"x": np.repeat(numbers, 128).reshape(total, 128), "y": np.repeat(numbers, 131).reshape(total, 131)}
    ends = np.cumsum([0, *chunks]).tolist()
    source = ({name: x[i:j].copy() for name, x in whole.items()} for i, j in itertools.pairwise(ends))
    batches = Rebatcher(source, size, shuffle_buffer=buffer, seed=7, copy=copy)
    needed = buffer + size - 1
    most = needed + max(size, needed // 4)
    found = []
    for batch in batches:
        found += batch["x"][:, 0].tolist()
        assert (batch["x"] == batch["x"][:, :1]).all()
        assert (batch["y"] == batch["x"][:, :1]).all()
        if batches._rows is not None and not copy:
            assert batches._rows._buffer.nbytes <= (2 * most + max(chunks)) * 4 * (128 + 131)
    assert found == order(total, buffer, 7, 0)


def test_arrays_with_few_waiting_rows_are_released() -> None:
    arrays: list[weakref.ref[np.ndarray]] = []
    most = 0

    def source() -> Iterator[dict[str, Any]]:
        for _ in range(60):
            chunk = np.zeros((100, 128))
            arrays.append(weakref.ref(chunk))
            yield {"x": chunk}

    batches = Rebatcher(source(), 50, shuffle_buffer=1000, seed=0)
    for _ in batches:
        most = max(most, sum(array() is not None for array in arrays))
    assert 10 < most <= 2 * 1.25 * 1050 / 100 + 2
    assert not any(array() is not None for array in arrays)


def test_large_arrays_reuse_memory() -> None:
    def source() -> Iterator[dict[str, Any]]:
        for i in range(30):
            yield {"x": np.full((100, 512), i, dtype=np.float64)}

    batches = Rebatcher(source(), 100, shuffle_buffer=1, seed=0)
    kept = next(batches)["x"]
    addresses = set()
    for i, batch in enumerate(batches, 1):
        x = batch["x"]
        assert (x == i).all()
        assert x.ctypes.data % 64 == 0
        assert x.flags.c_contiguous
        assert x.flags.writeable
        x[:] = -1
        addresses.add(x.ctypes.data)
    assert len(addresses) <= 3
    assert kept.ctypes.data not in addresses
    del batches, batch, x
    assert (kept == 0).all()


@pytest.mark.parametrize("how", ["close", "drop", "end"])
@pytest.mark.parametrize("buffer", [0, 4])
def test_nothing_is_kept_after_the_end(how: str, buffer: int) -> None:
    ended = []
    chunk = np.arange(10)

    def source() -> Iterator[dict[str, Any]]:
        try:
            while len(ended) < 1:
                yield {"x": chunk[:]}
                if how == "end":
                    return
        finally:
            ended.append(True)

    batches = Rebatcher(source(), 4, shuffle_buffer=buffer)
    alive = weakref.ref(batches)
    next(batches)
    if how == "close":
        batches.close()
        batches.close()
        assert list(batches) == []
    elif how == "end":
        assert len(list(batches)) == 2
    else:
        del batches
        assert alive() is None
    assert ended == [True]
    assert len(gc.get_referrers(chunk)) <= 2  # This frame, and the closure cell of `source`.


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_memory_stays_below_about_twice_the_rows(kind: str) -> None:
    rows, size, buffer = 1000, 100, 2000

    def source() -> Iterator[dict[str, Any]]:
        for _ in range(40):
            x: Any = np.zeros((rows, 8))
            yield {"x": x if kind == "dense" else Ragged(x.reshape(-1), np.arange(rows + 1) * 8)}

    batches = Rebatcher(source(), size, shuffle_buffer=buffer, seed=0)
    seen = 0
    most = 0
    for batch in batches:
        seen += len(batch["x"])
        if batches._rows is not None:
            most = max(most, batches._rows._buffer.nbytes)
    needed = (buffer + size - 1) * 64
    assert seen == 40 * rows
    # Each ragged row also has a length.
    assert needed < most < 2 * needed + (0 if kind == "dense" else needed)


def test_a_large_buffer_uses_no_more_memory_than_the_data() -> None:
    batches = Rebatcher(({"x": np.zeros((100, 100))} for _ in range(10)), 64, shuffle_buffer=2**31 - 1)
    assert sum(len(batch["x"]) for batch in batches) == 1000


@pytest.mark.parametrize("width", [1, 200])
@pytest.mark.parametrize("buffer", [0, 50])
def test_arrays_with_waiting_rows_are_not_resized(buffer: int, width: int) -> None:
    array = np.ones((100, width))
    batches = fastpipe.Rebatcher([{"x": array}, {"x": np.zeros((40, width))}], 10, shuffle_buffer=buffer, seed=1)
    next(batches)
    with pytest.raises(ValueError, match="resize"):
        array.resize((1, 1), refcheck=False)
    assert sum(int(batch["x"][:, 0].sum()) for batch in batches) >= 90
    batches.close()
    array.resize((1, 1), refcheck=False)
    assert array.shape == (1, 1)


def test_threads_share_the_batches() -> None:
    batches = Rebatcher(({"x": np.arange(i * 100, i * 100 + 100)} for i in range(100)), 7, shuffle_buffer=300)
    seen: list[int] = []
    together(
        [threading.Thread(target=lambda: seen.extend(x for b in batches for x in b["x"].tolist())) for _ in range(4)]
    )
    assert sorted(seen) == list(range(10_000))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_continues_independently() -> None:
    source = [{"x": np.arange(4000 * i, 4000 * (i + 1)), "wide": np.zeros((4000, 200))} for i in range(4)]
    batches = Rebatcher(source, 3000, shuffle_buffer=2000, seed=3)
    first = next(batches)["x"].tolist()
    before = threading.active_count()
    child = os.fork()
    if child == 0:
        rest = [x for b in batches for x in b["x"].tolist()]
        os._exit(0 if first + rest == order(16_000, 2000, 3, 0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert first + [x for b in batches for x in b["x"].tolist()] == order(16_000, 2000, 3, 0)
    assert threading.active_count() == before


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("batch_size", [127, 128, 129, 256, 257, 300])
@pytest.mark.parametrize("shuffle_buffer", [0, 50])
def test_row_numbers_do_not_wrap_in_narrow_indices(dtype: Any, batch_size: int, shuffle_buffer: int) -> None:
    def column(first: int) -> Sparse:
        indices = np.array([[row, (first + row) % 9] for row in range(100)], dtype)
        return Sparse(indices, np.arange(first, first + 100), np.array([100, 9]))

    batches = list(
        Rebatcher(({"x": column(i * 100)} for i in range(6)), batch_size, shuffle_buffer=shuffle_buffer, seed=3)
    )
    for batch in batches:
        found = batch["x"]
        assert found.indices[:, 0].tolist() == list(range(len(found)))
        assert found.indices[:, 1].tolist() == [value % 9 for value in found.values.tolist()]
        assert found.indices.dtype == (dtype if batch_size - 1 <= np.iinfo(dtype).max else np.int64)
    assert sorted(value for batch in batches for value in batch["x"].values.tolist()) == list(range(600))


INDICES, NUMBERS, SHAPE = np.array([[0, 0], [0, 4], [1, 1]]), np.array([1.0, 2.0, 3.0]), np.array([2, 5])
OFFSETS = np.array([0, 2, 3])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (Sparse(INDICES, np.append(NUMBERS, 9), SHAPE), "3 indices and 4 values"),
        (Sparse(INDICES, NUMBERS[:-1], SHAPE), "3 indices and 2 values"),
        (SparseCSR(OFFSETS, INDICES[:, 1], np.append(NUMBERS, 9), SHAPE), "3 indices and 4"),
        (SparseCSR(OFFSETS, np.append(INDICES[:, 1], 0), NUMBERS, SHAPE), "4 indices and 3"),
        (Sparse(INDICES, NUMBERS, np.array([2, 4])), r"contain \[4\], .* dense_shape \[4\]"),
        (Sparse(INDICES - [0, 1], NUMBERS, SHAPE), r"\[-1\], .* dense_shape \[5\]"),
        (SparseCSR(OFFSETS, INDICES[:, 1] + 1, NUMBERS, SHAPE), r"\[5\], .* dense_shape"),
        (SparseCSR(OFFSETS, INDICES, NUMBERS, np.array([2, 2, 4])), r"\[0, 4\], .* \[2, 4\]"),
        (Sparse(INDICES, NUMBERS, np.array([2, 5, 5])), "dense_shape has 2 dimensions"),
        (SparseCSR(OFFSETS, INDICES, NUMBERS, SHAPE), "dense_shape has 1 dimensions"),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_invalid_sparse_columns_are_refused(column: Any, message: str, masked: bool) -> None:
    batch = {"x": Masked(column, np.ones(2, bool)) if masked else column}
    with pytest.raises(ValueError, match=f"column 'x'.*{message}"):
        list(Rebatcher([batch], 2))


def test_sizes_of_sparse_columns_grow_to_the_largest_seen() -> None:
    def column(*sizes: int) -> Sparse:
        return Sparse(np.array([[0, 0, 0], [1, 0, 0]]), np.ones(2), np.array([2, *sizes]))

    batches = [{"x": column(5, 3)}, {"x": column(2, 9)}, {"x": column(1, 1)}]
    found = [batch["x"].dense_shape.tolist() for batch in Rebatcher(batches, 2)]
    assert found == [[2, 5, 3], [2, 5, 9], [2, 5, 9]]


def test_a_reader_can_be_rebatched_with_other_batches() -> None:
    whole = [{"x": np.arange(10), "s": strings()([str(i) for i in range(10)])}]
    twice = Rebatcher(Rebatcher(whole, 3), 4)
    assert [listed(b["s"]) for b in twice] == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]


def test_input_views_may_have_any_layout() -> None:
    x = np.arange(60).reshape(10, 6)
    inner = Ragged(np.arange(100), np.array([3, 5, 5, 9]))  # The offsets neither begin at 0 nor end at the last value.
    batches = [{"x": x[:3, ::2], "r": inner}, {"x": x[::-3][:3, ::-2], "r": inner}, {"x": x[:3].T[:3], "r": inner}]
    batches[2]["x"] = np.asfortranarray(batches[1]["x"])
    (found,) = Rebatcher(batches, 100)
    assert np.array_equal(found["x"], np.concatenate([b["x"] for b in batches]))
    assert found["r"].to_list() == [[3, 4], [], [5, 6, 7, 8]] * 3


# --- Refused input ---


class Shouting(dict[str, Any]):
    """A dict subclass that returns other values than it stores."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) + 100


@pytest.mark.parametrize("buffer", [0, 3])
def test_columns_may_come_in_any_order(buffer: int) -> None:
    """Mixes plain arrays, which take a faster path, with views, subclasses and other mappings."""
    whole = {"x": np.arange(30, dtype=np.int32), "y": np.arange(60.0).reshape(30, 2), "z": np.arange(30) % 2 == 0}

    def cut(first: int) -> dict[str, Any]:
        return {name: column[first : first + 5] for name, column in whole.items()}

    def chunks() -> Iterator[Any]:
        yield cut(0)
        yield dict(reversed(cut(5).items()))
        yield MappingProxyType(cut(10))
        yield {name: np.repeat(column, 2, axis=0)[::2] for name, column in cut(15).items()}
        yield {name: column.view(np.recarray) for name, column in cut(20).items()}
        yield {name: column[:0] for name, column in whole.items()}
        yield cut(25)

    batches = list(Rebatcher(chunks(), 4, shuffle_buffer=buffer, seed=1))
    assert [list(batch) for batch in batches] == [["x", "y", "z"]] * 8
    rows = order(30, buffer, 1, 0)
    for name, column in whole.items():
        found = np.concatenate([batch[name] for batch in batches])
        assert found.dtype == column.dtype
        assert found.tolist() == column[rows].tolist()


def test_dict_subclasses_are_read_by_their_methods() -> None:
    batches = [{"x": np.arange(3)}, Shouting(x=np.arange(3)), {"x": np.arange(3)}]
    assert [batch["x"].tolist() for batch in Rebatcher(batches, 3)] == [[0, 1, 2], [100, 101, 102], [0, 1, 2]]


def a(rows: int = 2) -> np.ndarray:
    return np.zeros((rows, 2), dtype=np.float32)


@pytest.mark.parametrize(
    ("second", "error", "message"),
    [
        ({"x": a().astype(np.float64), "y": a()}, TypeError, "column 'x' has dtype float64 in a batch, but float32"),
        ({"x": a()[:, :1], "y": a()}, ValueError, r"column 'x' has rows of shape \(1,\) in a batch, but \(2,\)"),
        ({"x": a()}, ValueError, r"it lacks \['y'\]"),
        ({"x": a(), "y": a(), "z": a()}, ValueError, r"it also has \['z'\]"),
        ({"x": a(), "y": a(3)}, ValueError, "have 2 rows, but column 'y' has 3"),
        (
            {"x": a().tolist(), "y": a()},
            TypeError,
            "column 'x' must be a NumPy array or .*; got list",
        ),
        ({"x": Ragged(a(), np.array([0, 2])), "y": a()}, TypeError, "column 'x' is Ragged in a batch, but ndarray"),
        ({"x": np.ma.masked_array(a()), "y": a()}, TypeError, "column 'x' is a NumPy masked array"),
        ({"x": np.float32(0), "y": a()}, TypeError, "column 'x' must be a NumPy array or .*; got float32"),
        ({"x": np.array(0, np.float32), "y": a()}, ValueError, "column 'x' is an array without dimensions"),
        ([], TypeError, "a batch must be a dict from column name to array; got list"),
        ({}, ValueError, "it lacks"),
    ],
)
@pytest.mark.parametrize("buffer", [0, 3])
def test_batches_that_differ_from_the_first_are_refused(
    second: Any, error: type[Exception], message: str, buffer: int
) -> None:
    batches = Rebatcher([{"x": a(), "y": a()}, second], 2, shuffle_buffer=buffer)
    if buffer == 0:
        assert len(next(batches)["x"]) == 2
    for _ in range(2):
        with pytest.raises(error, match=message):
            next(batches)


def ragged_of(values: Any, *offsets: int) -> Ragged:
    return Ragged(values, np.array(offsets))


def sparse_of(*rows: int) -> Sparse:
    return Sparse(np.array([[row, 0] for row in rows]), np.ones(len(rows)), np.array([2, 5]))


RAGGED, SPARSE, TEXT = ragged_of(a(), 0, 1), sparse_of(0, 1), strings()(["a"])
NULLABLE = masked(dense(int), 0)([1])
NOT_IN_ORDER = "indices of column 'x' are not sorted by row, or outside of its 2 rows"


@pytest.mark.parametrize(
    ("form", "other", "error", "message"),
    [
        (RAGGED, ragged_of(a(3)[:, 0], 0, 1), ValueError, "values of column 'x' has rows of shape"),
        (RAGGED, ragged_of(a(), 0, 3), ValueError, "offsets of column 'x' must ascend"),
        (RAGGED, ragged_of(a(), 1, 0), ValueError, "offsets of column 'x' must ascend"),
        (RAGGED, ragged_of(a(), -1, 0), ValueError, "offsets of column 'x' must ascend"),
        (RAGGED, Ragged(a(), np.array([0.0, 1])), TypeError, "offsets of column 'x' must be an array"),
        (RAGGED, Ragged(a(), [0, 1]), TypeError, "offsets of column 'x' must be an array"),
        (RAGGED, TEXT, TypeError, "column 'x' is Strings in a batch, but Ragged"),
        (RAGGED, Ragged(a(), None), TypeError, "rows of column 'x' can't be counted"),
        (RAGGED, ragged_of(a()), TypeError, "rows of column 'x' can't be counted"),
        (RAGGED, ragged_of(None, 0, 1), TypeError, "values of column 'x' must be .* got NoneType"),
        (SPARSE, Sparse(None, np.ones(1), [2, 5]), TypeError, "indices of column 'x' must be an array"),
        (SPARSE, Sparse(sparse_of(0).indices, None, [2, 5]), TypeError, "values of column 'x' must be .* got NoneType"),
        (SPARSE, Sparse(sparse_of(0).indices, np.ones(1), []), TypeError, "can't be counted"),
        (TEXT, strings(binary=True)([b"a"]), TypeError, "column 'x' has binary True"),
        (strings(1)([["a"]]), strings(2)([["a", "b"]]), ValueError, "column 'x' has rows of shape"),
        (
            NULLABLE,
            Masked(np.ones(2, int), np.ones(1, bool)),
            ValueError,
            "'x' must have length 1; got 2",
        ),
        (NULLABLE, Masked(np.ones(1, int), np.ones(1)), TypeError, "valid of column 'x' has dtype float64"),
        (SPARSE, sparse_of(1, 0), ValueError, NOT_IN_ORDER),
        (SPARSE, sparse_of(1, 2), ValueError, NOT_IN_ORDER),
        (SPARSE, sparse_of(-1, 1), ValueError, NOT_IN_ORDER),
        (sparse_of(0), sparse(2, dense(int))([[], []]), ValueError, "column 'x' has dimensions 2 in a batch, but 1"),
        (sparse_of(0), csr(1, dense(float))([[], []]), TypeError, "column 'x' is SparseCSR in a batch, but Sparse"),
    ],
)
def test_inconsistent_or_broken_columns_are_refused(
    form: Any, other: Any, error: type[Exception], message: str
) -> None:
    batches = Rebatcher([{"x": form}, {"x": other}], 1000)
    with pytest.raises(error, match=message):
        next(batches)


@pytest.mark.parametrize(
    ("first", "error", "message"),
    [
        ({"x": np.array([None, "a"])}, TypeError, r"column 'x' holds Python objects \(dtype object\)"),
        ({"x": np.zeros(2, dtype=[("a", "O")])}, TypeError, "column 'x' holds Python objects"),
        ({"x": Ragged(np.array([None]), np.array([0, 1]))}, TypeError, "values of column 'x' holds Python objects"),
        ({"x": np.zeros(2, dtype=[])}, TypeError, "column 'x' has a dtype without bytes"),
        ({"x": np.array(1)}, ValueError, "column 'x' is an array without dimensions"),
        (
            {"x": ragged_of(sparse_of(0, 1), 0, 2)},
            TypeError,
            "values of column 'x' is Sparse: sparse values can't be nested",
        ),
        (
            {"x": Strings(np.zeros(1), np.array([0, 1]), (1,), False)},
            TypeError,
            "values of column 'x' must be an array",
        ),
        ({}, ValueError, "a batch has no columns"),
        ("x", TypeError, "a batch must be a dict"),
    ],
)
def test_columns_that_cannot_be_moved_are_refused(first: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        next(Rebatcher([first], 2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be between 1 and"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer"),
        ({"batch_size": 1.0}, TypeError, "batch_size must be an integer"),
        ({"shuffle_buffer": -1}, ValueError, "shuffle_buffer must be between 0 and"),
        ({"shuffle_buffer": True}, TypeError, "shuffle_buffer must be an integer"),
        ({"seed": -1}, ValueError, "seed must be between 0 and"),
        ({"seed": 2**64}, ValueError, "seed must be between 0 and"),
        ({"epoch": -1}, ValueError, "epoch must be between 0 and"),
        ({"epoch": None}, TypeError, "epoch must be an integer; got None"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Rebatcher([], **{"batch_size": 1, **options})


def test_non_iterables_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        Rebatcher(3, 1)  # type: ignore[arg-type]


def test_a_single_batch_is_not_an_iterable_of_batches() -> None:
    with pytest.raises(TypeError, match=r"got a dict. For a single batch, pass \[batch\]"):
        Rebatcher({"x": a()}, 1)  # type: ignore[arg-type]


def test_errors_name_the_input_batch() -> None:
    batches = Rebatcher([{"x": a()}, {"x": a(0)}, {"x": a(), "y": a()}], 1)
    with pytest.raises(ValueError, match="also has") as caught:
        list(batches)
    assert caught.value.__notes__ == ["The error is in incoming batch 2, counted from 0."]
    depth = len(list(traceback.walk_tb(caught.value.__traceback__)))
    for _ in range(5):
        with pytest.raises(ValueError, match="also has") as caught:
            next(batches)
    assert len(caught.value.__notes__) == 1
    assert len(list(traceback.walk_tb(caught.value.__traceback__))) <= depth


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_rows_lost_to_an_interrupt_are_reported(interrupt: type[BaseException]) -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"x": np.arange(3)}
        raise interrupt

    batches = Rebatcher(source(), 2)
    next(batches)
    with pytest.raises(interrupt):
        next(batches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{interrupt.__name__} interrupted an earlier call"):
            next(batches)


def test_output_cannot_be_its_own_input() -> None:
    made: list[Rebatcher] = []

    def source() -> Iterator[dict[str, Any]]:
        yield {"x": np.arange(3)}
        yield next(made[0])

    made.append(Rebatcher(source(), 2))
    assert next(made[0])["x"].tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="must not be derived from the resulting ones"):
        next(made[0])


@pytest.mark.parametrize("at", ["yield", "end"])
def test_the_source_may_close_the_iterator(at: str) -> None:
    made: list[Rebatcher] = []

    def source() -> Iterator[dict[str, Any]]:
        yield {"x": np.arange(3)}
        try:
            if at == "yield":
                made[0].close()
                yield {"x": np.arange(3)}
        finally:
            made[0].close()

    made.append(Rebatcher(source(), 2))
    assert [batch["x"].tolist() for batch in made[0]] == [[0, 1]]


def test_iteration_continues_after_an_error_of_the_source() -> None:
    def source() -> Iterator[dict[str, Any]]:
        yield {"x": np.arange(3)}
        raise RuntimeError("no more today")

    batches = Rebatcher(source(), 2)
    assert next(batches)["x"].tolist() == [0, 1]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no more today"):
            next(batches)


def test_the_buffer_refuses_parts_that_do_not_fit() -> None:
    """Checks that the buffer never copies beyond an array, even if its Python caller passes wrong sizes."""
    f4 = np.dtype(np.float32)
    options: dict[str, Any] = {
        "batch_size": 2,
        "shuffle_buffer": 3,
        "key": (0, 0),
        "drop_last": False,
        "copy": False,
    }

    def buffer() -> fastpipe._fastpipe.RowBuffer:
        return fastpipe._fastpipe.RowBuffer([[1, (f4, (2,))]], **options)

    def lengths(*numbers: int) -> np.ndarray:
        return np.array(numbers, dtype=np.int64)

    items = np.zeros((3, 2), dtype=f4)
    buffer().push(2, [lengths(1, 2), items])
    for rows, parts in [
        (3, [lengths(1, 2), items]),
        (2, [lengths(1, 1), items]),
        (2, [lengths(-1, 4), items]),
        (2, [items]),
        (2, [lengths(1, 2)]),
        (2, [items, lengths(1, 2)]),
        (2, [lengths(1, 2).astype(np.int32), items]),
        (2, [lengths(1, 2).reshape(2, 1), items]),
        (2, [lengths(1, 2), items, items]),
        (2, [lengths(1, 2), items.astype(np.float64)]),
        (2, [lengths(1, 2), items[:, :1]]),
        (2, [lengths(1, 2), np.asfortranarray(items)]),
    ]:
        with pytest.raises(ValueError, match=r"must match the first rows|out of bounds"):
            buffer().push(rows, parts)
    for dtype, shape in [(np.dtype(object), ()), (np.dtype("V0"), ()), (f4, (2**40, 2**40))]:
        with pytest.raises(ValueError, match=r"can't be copied|too large"):
            fastpipe._fastpipe.RowBuffer([[(dtype, shape)]], **options)
    with pytest.raises(TypeError):
        fastpipe._fastpipe.RowBuffer([["x"]], **options)  # type: ignore[list-item]
    columns: list[list[Any]]
    for columns, names in [
        ([[1, (f4, (2,))]], ["x"]),
        ([[1]], ["x"]),
        ([[(f4, (2,))]], ["x", "y"]),
        ([[(f4, ()), (f4, ())]], ["x", "y"]),
    ]:
        with pytest.raises(ValueError, match="must have exactly one part"):
            fastpipe._fastpipe.RowBuffer(columns, arrays=names, **options)
    with pytest.raises(ValueError, match="not all columns are arrays"):
        buffer().next_arrays()
    assert not buffer().push_arrays({"x": items})
    full = buffer()
    full.push(2, [lengths(1, 2), items])
    with pytest.raises(ValueError, match="before they were requested"):
        full.push(2, [lengths(1, 2), items])


@pytest.mark.parametrize("shuffle_buffer", [1, 7, 40, 1000])
@pytest.mark.parametrize("epoch", [0, 3])
def test_rebatching_matches_a_reader_with_a_buffer(tmp_path: Path, shuffle_buffer: int, epoch: int) -> None:
    path = tmp_path / "numbers.avro"
    with open(path, "wb") as file:
        fastavro.writer(file, "long", range(300), sync_interval=40)
    reader = fastpipe.read_avro(path, batch_size=13, shuffle="buffer", shuffle_buffer=shuffle_buffer, seed=5)
    reader.set_epoch(epoch)
    expected = [batch["value"].tolist() for batch in reader]
    pieces = fastpipe.read_avro(path, batch_size=11)
    found = pieces.rebatch(13, shuffle_buffer=shuffle_buffer, seed=5, epoch=epoch)
    assert [batch["value"].tolist() for batch in found] == expected
    # By default, the epoch is that of the pass.
    pieces.set_epoch(epoch)
    found = pieces.rebatch(13, shuffle_buffer=shuffle_buffer, seed=5)
    assert [batch["value"].tolist() for batch in found] == expected
    assert sorted(itertools.chain(*expected)) == list(range(300))
    assert (expected[0] == list(range(13))) == (shuffle_buffer == 1)


# --- States ---


def as_lists(batches: Iterable[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    return [{name: listed(form) for name, form in batch.items()} for batch in batches]


def stored(batches: Rebatcher) -> dict[str, Any]:
    return json.loads(json.dumps(batches.state_dict()))


def check_every_step(make: Callable[[], Rebatcher]) -> list[dict[str, list[Any]]]:
    """Restores at every step, before the first batch and after the last one included. Returns all batches."""
    batches, states, found = make(), [], []
    while True:
        states.append(stored(batches))
        if (batch := next(batches, None)) is None:
            break
        found += as_lists([batch])
    for step, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(state)
        assert stored(resumed) == state
        assert as_lists(resumed) == found[step:]
        assert next(resumed, None) is None
    return found


@pytest.mark.parametrize("name", ["float32", "float64 [64]", "nullable ragged of nullable", "sparse"])
@given(data=st.data())
def test_restoring_at_every_step_yields_the_remaining_batches(name: str, data: st.DataObject) -> None:
    strategy, make = COLUMNS[name]
    chunks = data.draw(st.lists(st.lists(strategy, max_size=9), max_size=6))
    options: dict[str, Any] = {
        "batch_size": data.draw(st.integers(1, 8)),
        "shuffle_buffer": data.draw(st.integers(0, 12)),
        "epoch": data.draw(st.integers(0, 2**63 - 1)),
        "drop_last": data.draw(st.booleans()),
    }
    found = check_every_step(lambda: Rebatcher([{"x": make(rows)} for rows in chunks], seed=5, **options))
    rows = sum(map(len, chunks))
    assert len(found) == (rows // options["batch_size"] if options["drop_last"] else -(-rows // options["batch_size"]))


def numbers(folder: Path, rows: int = 300) -> Path:
    path = folder / "numbers.avro"
    with open(path, "wb") as file:
        fastavro.writer(file, "long", range(rows), sync_interval=40)
    return path


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("shuffle_buffer", [0, 40])
@pytest.mark.parametrize("start", ["first epoch", "later epoch", "middle of an epoch"])
def test_a_reader_resumes_at_every_step(tmp_path: Path, shuffle: bool, shuffle_buffer: int, start: str) -> None:
    """The state has the reader's position at the beginning of the pass, and both seeds."""
    path = numbers(tmp_path)
    order: dict[str, Any] = {"shuffle": True, "shuffle_buffer": 33} if shuffle else {}
    reader_seed: dict[str, Any] = {"seed": 3} if shuffle else {}

    def reader(**seed: Any) -> Reader:
        return fastpipe.read_avro(path, batch_size=11, epochs=2, **order, **seed)

    def begun() -> Rebatcher:
        new = reader(**reader_seed)
        if start == "later epoch":
            new.set_epoch(4)
        elif start == "middle of an epoch":
            batches = iter(new)
            for _ in range(9):
                next(batches)
            state, new = new.state_dict(), reader(**reader_seed)
            new.load_state_dict(state)
        return new.rebatch(70, shuffle_buffer=shuffle_buffer, seed=5)

    expected = as_lists(begun())
    batches, states = begun(), []
    for _ in expected:
        states.append(stored(batches))
        next(batches)
    for step, state in enumerate(states):
        resumed = reader().rebatch(70, shuffle_buffer=shuffle_buffer)
        resumed.load_state_dict(state)
        assert (resumed.seed, stored(resumed)) == (5, state)
        assert as_lists(resumed) == expected[step:]
    # The same object goes back, too, and the reader continues with the epoch after the pass.
    same = reader()
    resumed = same.rebatch(70, shuffle_buffer=shuffle_buffer)
    resumed.load_state_dict(states[2])
    assert as_lists(resumed) == expected[2:]
    assert same.epoch == {"first epoch": 2, "later epoch": 6, "middle of an epoch": 2}[start]
    resumed.load_state_dict(states[1])
    assert as_lists(resumed) == expected[1:]


def test_the_batch_after_an_error_is_the_next_one() -> None:
    def source(broken: bool) -> Iterator[dict[str, Any]]:
        for number in range(9):
            if broken and number == 5:
                raise OSError("unplugged")
            yield {"x": np.arange(number * 4, number * 4 + 4)}

    failing = Rebatcher(source(True), 3, shuffle_buffer=5, seed=1)
    with pytest.raises(OSError, match="unplugged"):
        list(failing)
    resumed = Rebatcher(source(False), 3, shuffle_buffer=5, seed=1)
    resumed.load_state_dict(failing.state_dict())
    everything = as_lists(Rebatcher(source(False), 3, shuffle_buffer=5, seed=1))
    assert 0 < failing.state_dict()["batches"] < len(everything)
    assert as_lists(resumed) == everything[failing.state_dict()["batches"] :]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 9}, "batch_size was 8 and is 9"),
        ({"shuffle_buffer": 0}, "shuffle_buffer was 20 and is 0"),
        ({"seed": 8}, "seed was 7 and is 8"),
        ({"drop_last": True}, "drop_last was False and is True"),
        ({"batch_size": 9, "seed": 8}, "batch_size was 8 and is 9; seed was 7 and is 8"),
    ],
)
def test_states_of_other_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"batch_size": 8, "shuffle_buffer": 20, "seed": 7}
    batches = [{"x": np.arange(50)}]
    state = Rebatcher(batches, **options).state_dict()
    other = Rebatcher(batches, **options | changed)
    with pytest.raises(fastpipe.errors.StateError, match=f"cannot resume from this state: {message}$"):
        other.load_state_dict(state)
    assert as_lists(other) == as_lists(Rebatcher(batches, **options | changed))


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    batches = [{"x": np.arange(50)}]
    reader = fastpipe.read_avro(numbers(tmp_path), batch_size=11)
    begun, new = Rebatcher(batches, 8), Rebatcher(batches, 8)
    next(begun)
    state, of_reader = begun.state_dict(), reader.rebatch(8).state_dict()
    refused: list[tuple[Rebatcher, Any, str]] = [
        (new, {}, "this is not the state of a Rebatcher, or it is damaged"),
        (new, state | {"batches": 2}, "this is not the state of a Rebatcher, or it is damaged"),
        (new, state | {"version": 2}, "the state has version 2, .*: upgrade"),
        (new, reader.state_dict(), "this is not the state of a Rebatcher, or it is damaged"),
        (new, of_reader, "the batches came from a Reader and come from another iterable"),
        (reader.rebatch(8), state, "the batches came from another iterable and come from a Reader"),
        (begun, state, "cannot resume after batches were requested: create a Rebatcher"),
        (fastpipe.read_avro(numbers(tmp_path, 200), batch_size=11).rebatch(8), of_reader, "cannot resume from this st"),
    ]
    for batcher, wrong, message in refused:
        with pytest.raises(fastpipe.errors.StateError, match=message):
            batcher.load_state_dict(wrong)
    assert len(list(new)) == 7
    assert len(list(begun)) == 6
    with pytest.raises(TypeError, match="state_dict must be a dict that state_dict\\(\\) returned; got list"):
        new.load_state_dict([])  # type: ignore[arg-type]


def test_batches_that_end_before_the_position_are_refused() -> None:
    begun = Rebatcher([{"x": np.arange(50)}], 8)
    for _ in range(5):
        next(begun)
    resumed = Rebatcher([{"x": np.arange(30)}], 8)
    resumed.load_state_dict(begun.state_dict())
    for _ in range(2):
        with pytest.raises(
            fastpipe.errors.StateError, match="end before the position of the state, 1 batches too early"
        ):
            next(resumed)
