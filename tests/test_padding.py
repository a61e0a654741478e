"""`Ragged.to_padded`, `truncated`, `cu_seqlens` and `positions`, and `Masked.fill`, compared with lists."""

from __future__ import annotations

import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from fastpipe import Masked, Ragged, Sparse, Strings
from fastpipe.batch import Padded, SparseCSR, _dense

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "uint64", ">i4", "float16", "float32", "float64", "M8[D]", "m8[s]"]
SIDES = st.sampled_from(["left", "right"])
Rows = list[list[Any]]


# --- Forms of lists, and a naive oracle ---


def offsets_of(rows: list[Any]) -> np.ndarray:
    return np.array([0, *np.cumsum([len(row) for row in rows])], np.int64)


def ragged(rows: Rows, make: Any = "int64") -> Ragged:
    items = [item for row in rows for item in row]
    return Ragged(np.array(items, make) if isinstance(make, str) else make(items), offsets_of(rows))


def strings(rows: list[Any], *, binary: bool = False, shape: tuple[int, ...] | None = None) -> Strings:
    encoded = [row if binary else row.encode() for row in rows]
    values = np.frombuffer(bytearray(b"".join(encoded)), np.uint8)
    return Strings(values, offsets_of(encoded), shape or (len(rows),), binary)


def masked(rows: list[Any], make: Any, blank: Any) -> Masked:
    return Masked(make([blank if row is None else row for row in rows]), np.array([r is not None for r in rows], bool))


def cut(row: list[Any], length: int | None, truncate: str | None) -> list[Any]:
    if length is None or len(row) <= length:
        return row
    assert truncate is not None, "the row is too long"
    return row[:length] if truncate == "right" else row[len(row) - length :]


def padded(rows: Rows, width: int, pad: Any, side: str) -> Rows:
    missing = [[pad] * (width - len(row)) for row in rows]
    return [row + more if side == "right" else more + row for row, more in zip(rows, missing, strict=True)]


def width_of(rows: Rows, length: int | None, multiple_of: int | None) -> int:
    width = max(map(len, rows), default=0) if length is None else length
    while multiple_of is not None and width % multiple_of:
        width += 1
    return width


def flags(rows: Rows) -> Rows:
    return [[item is not None for item in row] for row in rows]


lengths_ = st.none() | st.integers(0, 7)
multiples = st.none() | st.integers(1, 5)
numbers = st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6)


# --- Padding ---


@given(
    rows=numbers,
    dtype=st.sampled_from(DTYPES),
    length=lengths_,
    multiple_of=multiples,
    side=SIDES,
    truncate=SIDES,
    start=st.integers(0, 3),
)
def test_padded_rows_match_lists(
    rows: Rows, dtype: str, length: Any, multiple_of: Any, side: Any, truncate: Any, start: int
) -> None:
    whole = ragged(rows, dtype)
    start = min(start, len(rows))
    # A slice's offsets begin at 0, and the offsets of the last form don't.
    for form, of in [
        (whole, rows),
        (whole[start:], rows[start:]),
        (Ragged(whole.values, whole.offsets[start:]), rows[start:]),
    ]:
        cuts = [cut(row, length, truncate) for row in of]
        width = width_of(of, length, multiple_of)
        found = form.to_padded(length, pad=1, multiple_of=multiple_of, side=side, truncate=truncate)
        expected = np.array(padded(cuts, width, 1, side), dtype).reshape(len(of), width)
        assert found.values.dtype == np.dtype(dtype)
        assert np.array_equal(found.values, expected)
        assert (found.mask.dtype, found.mask.shape) == (np.bool_, expected.shape)
        assert found.mask.tolist() == padded([[True] * len(row) for row in cuts], width, False, side)
        assert (found.lengths.dtype, found.lengths.tolist()) == (np.int64, list(map(len, cuts)))
        assert not any(np.shares_memory(part, memory) for part in found for memory in whole)


@given(rows=numbers, length=st.integers(0, 7))
def test_long_rows_raise_without_truncate(rows: Rows, length: int) -> None:
    form, longest = ragged(rows), max(map(len, rows), default=0)
    if longest <= length:
        assert form.to_padded(length).values.shape == (len(rows), length)
        return
    first = [len(row) for row in rows].index(longest)
    # A multiple doesn't raise the limit.
    for multiple_of in (None, 8):
        with pytest.raises(ValueError, match=f'row {first} has {longest} items, and length is {length}: .*"right"'):
            form.to_padded(length, multiple_of=multiple_of)


@given(
    rows=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=3), max_size=4),
    lengths=st.tuples(lengths_, lengths_),
    multiples=st.none() | st.tuples(multiples, multiples),
    side=SIDES,
    truncate=SIDES,
)
def test_all_levels_are_padded(rows: list[Rows], lengths: Any, multiples: Any, side: Any, truncate: Any) -> None:
    form = ragged(rows, ragged)
    outer = [cut(row, lengths[0], truncate) for row in rows]
    inner = [items for row in outer for items in row]
    multiple, below = multiples or (None, None)
    shape = (len(rows), width_of(rows, lengths[0], multiple), width_of(inner, lengths[1], below))
    cuts = [[cut(items, lengths[1], truncate) for items in row] for row in outer]

    def blocks(pad: Any, rows: list[Rows]) -> list[Rows]:
        inside = [padded(row, shape[2], pad, side) for row in rows]
        return padded(inside, shape[1], [pad] * shape[2], side)

    found = form.to_padded(lengths, pad=5, multiple_of=multiples, side=side, truncate=truncate)
    assert found.values.shape == found.mask.shape == shape
    assert found.values.tolist() == blocks(5, cuts)
    assert found.mask.tolist() == blocks(False, [flags(row) for row in cuts])
    assert found.lengths.tolist() == list(map(len, outer))


@given(
    rows=st.lists(st.lists(st.none() | st.integers(1, 9), max_size=5), max_size=5),
    length=lengths_,
    side=SIDES,
    truncate=SIDES,
)
def test_null_items_are_padding(rows: Rows, length: Any, side: Any, truncate: Any) -> None:
    # Values of nulls are arbitrary.
    form = ragged(rows, lambda items: masked(items, lambda found: np.array(found, np.int64), 77))
    cuts = [cut(row, length, truncate) for row in rows]
    width = width_of(rows, length, None)
    found = form.to_padded(length, pad=-1, side=side, truncate=truncate)
    assert found.values.tolist() == padded([[-1 if i is None else i for i in row] for row in cuts], width, -1, side)
    assert found.mask.tolist() == padded(flags(cuts), width, False, side)
    assert found.lengths.tolist() == list(map(len, cuts))


@given(
    rows=st.lists(st.lists(st.none() | st.text(max_size=3), max_size=4), max_size=4),
    pad=st.sampled_from(["", "<pad>", "é"]),
    length=lengths_,
    side=SIDES,
    truncate=SIDES,
    binary=st.booleans(),
)
def test_text_is_padded_as_strings(rows: Rows, pad: Any, length: Any, side: Any, truncate: Any, binary: bool) -> None:
    if binary:
        pad, rows = pad.encode(), [[None if item is None else item.encode() for item in row] for row in rows]
    null = b"no" if binary else "no"
    form = ragged(rows, lambda items: masked(items, lambda found: strings(found, binary=binary), null))
    cuts = [cut(row, length, truncate) for row in rows]
    width = width_of(rows, length, None)
    found = form.to_padded(length, pad=pad, side=side, truncate=truncate)
    assert (type(found.values), found.values.shape, found.values.binary) == (Strings, (len(rows), width), binary)
    expected = padded([[pad if i is None else i for i in row] for row in cuts], width, pad, side)
    if rows:
        assert found.values.to_list() == expected
    assert found.mask.tolist() == padded(flags(cuts), width, False, side)


def test_items_of_fixed_shapes() -> None:
    pairs = Ragged(np.arange(6.0).reshape(3, 2), np.array([0, 1, 3]))
    found = pairs.to_padded(pad=math.inf, side="left")
    assert found.values.tolist() == [[[math.inf] * 2, [0, 1]], [[2, 3], [4, 5]]]
    assert found.mask.tolist() == [[False, True], [True, True]]
    valid = np.array([[True, False], [True, True], [False, True]])
    single = Ragged(Masked(pairs.values, valid), pairs.offsets).to_padded(pad=9)
    assert single.values.tolist() == [[[0, 9], [9, 9]], [[2, 3], [9, 5]]]
    assert single.mask.tolist() == [[[True, False], [False, False]], [[True, True], [False, True]]]
    # A mask of items around a mask of entries.
    both = Ragged(Masked(Masked(pairs.values, valid), np.array([False, True, True])), pairs.offsets).to_padded(pad=9)
    assert both.values.tolist() == [[[9, 9], [9, 9]], [[2, 3], [9, 5]]]
    text = Ragged(strings(list("abcdef"), shape=(3, 2)), pairs.offsets).to_padded(pad="-")
    assert text.values.to_list() == [[["a", "b"], ["-", "-"]], [["c", "d"], ["e", "f"]]]


def test_null_rows_within_rows_are_empty() -> None:
    inner = Masked(ragged([[1], [], [2, 3], [4]]), np.array([True, True, False, True]))
    for items in (inner, Masked(inner, np.array([False, True, True, True]))):
        found = Ragged(items, np.array([0, 2, 4])).to_padded(pad=-1)
        first = -1 if isinstance(items.values, Masked) else 1
        assert found.values.tolist() == [[[first], [-1]], [[-1], [4]]]
        assert found.mask.tolist() == [[[first == 1], [False]], [[False], [True]]]
        assert found.lengths.tolist() == [2, 2]
    words = ragged([[["a"], []], [], [["bc", "d"]]], lambda rows: ragged(rows, strings)).to_padded(pad="_")
    assert words.values.to_list() == [[["a", "_"], ["_", "_"]], [["_", "_"], ["_", "_"]], [["bc", "d"], ["_", "_"]]]
    assert words.mask.sum() == 3


def test_three_levels() -> None:
    rows = [[[[1], [2, 3]]], []]
    found = ragged(rows, lambda r: ragged(r, ragged)).to_padded((2, None, 2), multiple_of=(None, 3, None))
    assert found.values.shape == (2, 2, 3, 2)
    assert found.values[0, 0].tolist() == [[1, 0], [2, 3], [0, 0]]
    assert found.values.sum() == 6
    assert found.mask.sum() == 3


def test_no_rows_and_huge_lengths() -> None:
    empty = ragged([])
    assert [part.shape for part in empty.to_padded(multiple_of=8)] == [(0, 0), (0, 0), (0,)]
    assert empty.to_padded(2**40).values.shape == (0, 2**40)
    assert ragged([], ragged).to_padded((3, 4)).values.shape == (0, 3, 4)
    assert ragged([[], []]).to_padded().values.shape == (2, 0)
    assert ragged([[1]], "int8").to_padded(300).values.sum() == 1, "the width doesn't fit the dtype of the items"
    for length in (2**44, 2**58, 2**62, 2**63 - 1):
        for form in (ragged([[1], [2]]), ragged([[], []]), ragged([["a"]], strings)):
            pad: Any = "" if isinstance(form.values, Strings) else 0
            for arguments in ({"length": length}, {"multiple_of": length}):
                if form.lengths.any() or "length" in arguments:
                    with pytest.raises(MemoryError, match=r"an array of the shape \("):
                        form.to_padded(**arguments, pad=pad)
    with pytest.raises(MemoryError):
        ragged([[[1]], [[2]]], ragged).to_padded((2**20, 2**40))
    assert ragged([[1, 2]]).truncated(2**63 - 1).to_list() == [[1, 2]]


def test_arrays_larger_than_the_free_memory_are_not_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system would end the process, but only when the array is written."""
    monkeypatch.setattr(_dense, "available_memory", lambda: 2**30)
    monkeypatch.setattr(np, "full", None)
    with pytest.raises(MemoryError, match=r"of the shape \(2, 268435456\) takes 4294967296 bytes, and 1073741824 are"):
        ragged([[], []]).to_padded(2**28)


# --- Packed rows ---


@given(
    rows=numbers, length=st.integers(0, 7), side=SIDES, start=st.integers(0, 3), offsets=st.sampled_from(["i4", "i8"])
)
def test_truncated_and_packed_rows_match_lists(rows: Rows, length: int, side: Any, start: int, offsets: str) -> None:
    whole = ragged(rows)
    start = min(start, len(rows))
    form, rows = Ragged(whole.values, whole.offsets[start:].astype(offsets)), rows[start:]
    found = form.truncated(length, side)
    assert found.to_list() == [cut(row, length, side) for row in rows]
    assert found.offsets[0] == 0
    assert not np.shares_memory(found.values, form.values)
    assert form.cu_seqlens().dtype == np.int32
    assert form.cu_seqlens().tolist() == offsets_of(rows).tolist()
    assert form.positions().dtype == np.int64
    assert form.positions().tolist() == [place for row in rows for place in range(len(row))]


def test_any_items_are_truncated() -> None:
    rows = [[["a", "b"], [], ["c"]], [["d"]]]
    form = ragged(rows, lambda r: ragged(r, strings))
    assert form.truncated(2, side="left").to_list() == [rows[0][1:], rows[1]]
    items = Masked(np.array([1, 0, 3]), np.array([True, False, True]))
    assert Ragged(items, np.array([0, 3])).truncated(2).to_list() == [[1, None]]


def test_too_many_items_for_int32() -> None:
    huge = Ragged(np.empty(0), np.array([0, 2**31]))
    with pytest.raises(ValueError, match="2147483648 items are too many for int32"):
        huge.cu_seqlens()
    assert Ragged(np.empty(0), np.array([0, 2**31 - 1])).cu_seqlens().tolist() == [0, 2**31 - 1]


# --- Nulls ---


@given(values=st.lists(st.none() | st.integers(0, 1), max_size=8), dtype=st.sampled_from(DTYPES))
def test_filled_numbers_match_lists(values: list[Any], dtype: str) -> None:
    form = masked(values, lambda found: np.array(found, dtype), 0)
    found = form.fill(1)
    assert found.dtype == np.dtype(dtype)
    assert np.array_equal(found, np.array([1 if value is None else value for value in values], dtype))
    assert not np.shares_memory(found, form.values)


@given(
    rows=st.lists(st.none() | st.lists(st.none() | st.text(max_size=2), max_size=3), max_size=5),
    row=st.lists(st.text(max_size=2), max_size=2),
)
def test_filled_rows_match_lists(rows: list[Any], row: list[str]) -> None:
    # The blanks of nulls are not empty.
    form = masked(rows, lambda r: ragged(r, lambda items: masked(items, strings, "no")), ["x", "y"])
    expected = [row if found is None else found for found in rows]
    for value in (row, tuple(row)):
        found = form.fill(value)
        assert type(found) is Ragged
        assert found.to_list() == expected
    inner = form.fill([]).values.fill("")
    assert inner.to_list() == [item or "" for found in rows for item in (found or [])]
    again = form[::-1].fill(row)
    assert again.to_list() == expected[::-1]


def test_filled_forms() -> None:
    values, valid = np.arange(6).reshape(2, 3), np.array([[True, False, True], [False, True, True]])
    assert Masked(values, valid).fill(9).tolist() == [[0, 9, 2], [9, 4, 5]]
    assert Masked(values, valid[:, 0]).fill(9).tolist() == [[0, 1, 2], [9, 9, 9]]
    text = strings(["a", "b", "c", "d"], shape=(2, 2))
    assert Masked(text, valid[:, :2]).fill("xyz").to_list() == [["a", "xyz"], ["xyz", "d"]]
    assert Masked(text, valid[:, 0]).fill("").to_list() == [["a", "b"], ["", ""]]
    assert Masked(strings([b"\xff", b""], binary=True), valid[:, 0]).fill(b"\x00").to_list() == [b"\xff", b"\x00"]
    twice = Masked(Masked(np.array([1.0, 2.0, 3.0]), np.array([True, False, True])), np.array([True, True, False]))
    assert twice.fill(0).tolist() == [1, 0, 0]
    pairs = Masked(Ragged(values.reshape(3, 2), np.array([0, 1, 3])), np.array([True, False]))
    assert pairs.fill([[7, 8]]).to_list() == [[[0, 1]], [[7, 8]]]
    assert pairs.fill(np.array([[7, 8]])).to_list() == [[[0, 1]], [[7, 8]]]
    nested = Masked(ragged([[[1]], [[2]]], ragged), np.array([False, True]))
    assert nested.fill([[], [5, 6]]).to_list() == [[[], [5, 6]], [[2]]]
    assert math.isnan(Masked(np.ones(1, "f4"), np.array([False])).fill(math.nan)[0])
    assert Masked(np.ones(1, "M8[D]"), np.array([False])).fill("2026-01-02")[0] == np.datetime64("2026-01-02")
    assert np.isnat(Masked(np.ones(1, "M8[D]"), np.array([False])).fill(np.datetime64("NaT"))[0])
    assert Masked(np.empty(0, np.int8), np.empty(0, bool)).fill(1).shape == (0,)
    assert Masked(strings([]), np.empty(0, bool)).fill("a").to_list() == []


# --- Arguments, results, readers ---

ONE = ragged([[1, 2]])


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ONE.to_padded(-1), ValueError, "length must be between 0"),
        (lambda: ONE.to_padded(1.5), TypeError, "length must be an integer"),
        (lambda: ONE.to_padded("a"), TypeError, "length must be an integer"),
        (lambda: ONE.to_padded(True), TypeError, "length must be an integer"),
        (
            lambda: ONE.to_padded((2, 2)),
            ValueError,
            r"one ragged level, so length must be None or like 8; got \(2, 2\)",
        ),
        (lambda: ONE.to_padded([]), ValueError, "one ragged level"),
        (lambda: ONE.to_padded(multiple_of=0), ValueError, "multiple_of must be between 1"),
        (lambda: ragged([[[1]]], ragged).to_padded(4), ValueError, r"2 ragged levels, so length .* like \(None, 8\)"),
        (lambda: ragged([[[1]]], ragged).to_padded(multiple_of=4), ValueError, "2 ragged levels, so multiple_of must"),
        (lambda: ONE.to_padded(side="both"), ValueError, 'side must be "left" or "right"; got'),
        (lambda: ONE.to_padded(side=None), ValueError, 'side must be "left" or "right"; got None'),
        (lambda: ONE.to_padded(truncate=True), ValueError, 'truncate must be "left", "right" or None; got True'),
        (lambda: ragged([[1]], "int8").to_padded(pad=300), ValueError, "pad=300 doesn't fit dtype int8"),
        (lambda: ONE.to_padded(pad=0.5), ValueError, "doesn't fit dtype int64"),
        (lambda: ONE.to_padded(pad=math.nan), ValueError, "doesn't fit dtype int64"),
        (lambda: ragged([[1]], "bool").to_padded(pad=2), ValueError, "doesn't fit dtype bool"),
        (lambda: ragged([[1]], "float32").to_padded(pad=1e300), ValueError, "doesn't fit dtype float32"),
        (lambda: ONE.to_padded(pad="a"), TypeError, "pad for dtype int64 must be a number; got 'a'"),
        (lambda: ONE.to_padded(pad=None), TypeError, "must be a number; got None"),
        (lambda: ONE.to_padded(pad=[1, 2]), TypeError, "pad must be a single value"),
        (lambda: ragged([["a"]], strings).to_padded(), TypeError, 'the items are text: pass pad=""'),
        (lambda: ragged([["a"]], strings).to_padded(pad=b""), TypeError, "must be a str"),
        (lambda: ragged([["a"]], "U1").to_padded(pad="ab"), ValueError, "doesn't fit"),
        (lambda: ragged([["a"]], "U1").to_padded(), ValueError, "doesn't fit"),
        (lambda: ONE.truncated(-1), ValueError, "length must be between 0"),
        (lambda: ONE.truncated(None), TypeError, "length must be an integer"),
        (lambda: ONE.truncated(1, "both"), ValueError, "side must be"),
        (lambda: Masked(np.ones(1, "i1"), np.array([True])).fill(128), ValueError, "value=128 doesn't fit dtype int8"),
        (lambda: Masked(np.ones(1, "f4"), np.array([True])).fill(2**24 + 1), ValueError, "doesn't fit dtype float32"),
        (lambda: Masked(np.ones(1, "M8[D]"), np.array([True])).fill(0.5), TypeError, "must be a time"),
        (
            lambda: Masked(np.ones(1, "M8[D]"), np.array([True])).fill(np.datetime64("2026-01-02T03")),
            ValueError,
            "doesn't fit",
        ),
        (lambda: Masked(strings(["a"]), np.array([False])).fill(0), TypeError, "value for dtype string must be a str"),
        (lambda: Masked(strings(["a"]), np.array([False])).fill("\ud800"), ValueError, "UTF-8"),
        (
            lambda: Masked(ONE, np.array([False])).fill(0),
            TypeError,
            "value must be a list of the items of a row; got 0",
        ),
        (lambda: Masked(ONE, np.array([False])).fill([None]), TypeError, "must be a number; got None"),
        (lambda: Masked(ONE, np.array([False])).fill("ab"), TypeError, "must be a list"),
    ],
)
def test_arguments_are_checked(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_sparse_rows_are_neither_padded_nor_filled() -> None:
    coo = Sparse(np.array([[0, 5]]), np.array([1.0]), np.array([1, 9]))
    csr = SparseCSR(np.array([0, 1]), np.array([5]), np.array([1.0]), np.array([1, 9]))
    for form in (coo, csr):
        with pytest.raises(TypeError, match=f"null rows of {type(form).__name__} have no entries"):
            Masked(form, np.array([False])).fill(0)
        with pytest.raises(TypeError, match=f"the items are {type(form).__name__}"):
            Ragged(form, np.array([0, 1])).to_padded()


def test_forms_with_parts_that_do_not_match() -> None:
    """Forms check nothing. A mismatch must not repeat values."""
    for offsets in ([0, 3], [0, 3, 1, 5], [-3, 3], [0, 1, 2]):
        with pytest.raises(ValueError, match="by their offsets, but there are values of"):
            Ragged(np.ones(1), np.array(offsets)).to_padded()
    one = np.array([False])
    for values in (np.ones(2), strings(["a", "b"]), ragged([[1], [2]])):
        with pytest.raises(ValueError, match=r"valid has the shape \(1,\), and its values have the shape \(2,\)"):
            Masked(values, one).fill(0)
        with pytest.raises(ValueError, match=r"valid has the shape|there are values of"):
            Ragged(Masked(values, one), np.array([0, 2])).to_padded()
    assert Masked(np.arange(3), np.array([1, 0, 2])).fill(9).tolist() == [0, 9, 2], "not bools"


def test_results_are_named_tuples() -> None:
    found = ONE.to_padded()
    assert repr(found) == "Padded(values=int64[1, 2], mask=bool[1, 2], lengths=int64[1])"
    assert found._fields == ("values", "mask", "lengths")
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is Padded
    assert again.values.tolist() == [[1, 2]]
    assert list(inspect.signature(Ragged.to_padded).parameters)[1:] == [
        "length",
        "pad",
        "multiple_of",
        "side",
        "truncate",
    ]


def test_columns_of_a_reader() -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table(
        {"tokens": [[3, 1, 2], None, [], [5, None]], "age": [30, None, 41, None], "name": ["a", None, "c", ""]}
    )
    (batch,) = fastpipe.from_arrow(table, batch_size=4)
    tokens, age, name = batch["tokens"], batch["age"], batch["name"]
    ids, mask, lengths = tokens.fill([]).to_padded(2, pad=9, truncate="left", multiple_of=4)
    assert ids.tolist() == [[1, 2, 9, 9], [9] * 4, [9] * 4, [5, 9, 9, 9]]
    assert mask.sum(axis=1).tolist() == [2, 0, 0, 1]
    assert lengths.tolist() == [2, 0, 0, 2]
    assert age.fill(0).tolist() == [30, 0, 41, 0]
    assert name.fill("?").to_list() == ["a", "?", "c", ""]
    copies = (ids, age.fill(0), name.fill("?").values, tokens.fill([]).offsets)
    parts = (tokens.values.offsets, tokens.values.values.values, age.values, age.valid, name.values.values)
    assert not any(np.shares_memory(copy, part) for copy in copies for part in parts)
