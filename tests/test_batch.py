from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from fastpipe import Masked, Ragged, Sparse, Strings
from fastpipe.batch import SparseCSR

# --- A naive construction of array types from nested lists ---


def offsets_of(rows: list[Any]) -> np.ndarray:
    return np.array([0, *np.cumsum([len(row) for row in rows])], dtype=np.int64)


def strings(rows: list[Any], *, binary: bool = False, shape: tuple[int, ...] | None = None) -> Strings:
    encoded = [row if binary else row.encode() for row in rows]
    values = np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8)
    return Strings(values, offsets_of(encoded), shape or (len(rows),), binary)


def masked(rows: list[Any], make: Any, blank: Any) -> Masked:
    valid = np.array([row is not None for row in rows], dtype=bool)
    return Masked(make([blank if row is None else row for row in rows]), valid)


def ragged(rows: list[list[Any]], make: Any) -> Ragged:
    return Ragged(make([item for row in rows for item in row]), offsets_of(rows))


def floats(rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


def bools(rows: list[bool]) -> np.ndarray:
    return np.array(rows, dtype=np.bool_)


FORMS = [
    ragged([[1.5], [], [2, 3]], floats),
    ragged([[[1.5], []], [], [[2, 3]]], lambda rows: ragged(rows, floats)),
    strings(["a", "", "€uro"]),
    strings([b"\xff", b""], binary=True),
    strings(list("abcdef"), shape=(3, 2)),
    masked([1.5, None], floats, 0),
    masked([["a"], None, []], lambda rows: ragged(rows, strings), []),
    Sparse(np.array([[0, 3], [1, 0], [1, 4]]), floats([1, 2, 3]), np.array([3, 5])),
    SparseCSR(np.array([0, 1, 3, 3]), np.array([3, 0, 4]), floats([1, 2, 3]), np.array([3, 5])),
]


# --- All array types ---


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_forms_are_small_and_read_only(form: Any) -> None:
    assert not hasattr(form, "__dict__")
    with pytest.raises(AttributeError):
        form.values = None
    with pytest.raises(AttributeError):
        form.something = None
    assert len(form) == len(form.to_list())


@pytest.mark.parametrize("form", FORMS, ids=repr)
@pytest.mark.parametrize("again", [lambda form: pickle.loads(pickle.dumps(form)), copy.copy, copy.deepcopy])
def test_pickled_and_copied_forms_have_equal_values(form: Any, again: Any) -> None:
    other = again(form)
    assert type(other) is type(form)
    assert repr(other) == repr(form)
    assert other.to_list() == form.to_list()


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_forms_are_compared_by_identity(form: Any) -> None:
    assert form == form
    assert form != copy.copy(form)
    assert len({form, copy.copy(form)}) == 2


def test_forms_unpack_into_their_parts() -> None:
    for form, names in [
        (FORMS[0], ["values", "offsets"]),
        (FORMS[2], ["values", "offsets"]),
        (FORMS[5], ["values", "valid"]),
        (FORMS[7], ["indices", "values", "dense_shape"]),
        (FORMS[8], ["offsets", "indices", "values", "dense_shape"]),
    ]:
        assert all(part is getattr(form, name) for part, name in zip(form, names, strict=True))


def test_repr_names_dtypes_and_shapes() -> None:
    assert repr(FORMS[0]) == "Ragged(values=float64[3], offsets=int64[4])"
    assert repr(FORMS[4]) == "Strings(values=uint8[6], offsets=int64[7], shape=(3, 2), binary=False)"
    inner = "Strings(values=uint8[1], offsets=int64[2], shape=(1,), binary=False)"
    assert repr(FORMS[6]) == f"Masked(values=Ragged(values={inner}, offsets=int64[4]), valid=bool[3])"


def test_a_row_keeps_only_the_memory_alive() -> None:
    memory = np.arange(3.0)
    form = Ragged(memory, np.array([0, 3]))
    memory_alive, form_alive = weakref.ref(memory), weakref.ref(form)
    row = form.row(0)
    del memory, form
    gc.collect()
    assert form_alive() is None
    assert memory_alive() is row.base
    del row
    gc.collect()
    assert memory_alive() is None


def test_writing_into_the_arrays_shows_everywhere() -> None:
    form = ragged([[1], [2, 3]], floats)
    assert form.to_list() == [[1], [2, 3]]
    form.row(1)[0] = 7
    assert form.to_list() == [[1], [7, 3]]
    text = strings(["ab", "c"])
    assert text.to_list() == ["ab", "c"]
    text.values[0] = ord("x")
    assert text.to_list() == ["xb", "c"]


@pytest.mark.parametrize("form", [FORMS[0], FORMS[5], FORMS[7], FORMS[8]], ids=repr)
def test_converting_to_one_numpy_array_is_an_error(form: Any) -> None:
    with pytest.raises(TypeError, match="is not a single NumPy array"):
        np.asarray(form)


# --- Ragged ---


def test_rows_of_ragged_are_views() -> None:
    form = ragged([[1], [], [2, 3]], floats)
    for i, row in enumerate(form.to_list()):
        assert form.row(i).tolist() == form[i].tolist() == form[i - 3].tolist() == row
    assert np.shares_memory(form[2], form.values)
    assert form[np.int64(2)].tolist() == [2, 3]
    for beyond in (3, -4):
        with pytest.raises(IndexError, match="there are 3 rows"):
            form.row(beyond)


def test_rows_of_nested_forms_are_forms() -> None:
    rows = [[["a", None]], [], [[], ["b"], None]]
    form = ragged(rows, lambda r: masked(r, lambda q: ragged(q, lambda p: masked(p, strings, "")), []))
    assert form.to_list() == rows
    assert [form.row(i).to_list() for i in range(3)] == rows
    row = form.row(2)
    assert isinstance(row, Masked)
    assert row.values.offsets.tolist() == [0, 0, 1, 1]
    assert np.shares_memory(row.values.values.values.values, form.values.values.values.values.values)


def test_slices_have_the_same_form() -> None:
    rows = [[1.0], [], [2.0, 3.0], [4.0]]
    form = ragged(rows, floats)
    for key in (slice(None), slice(1, 3), slice(2, None), slice(-1, None), slice(3, 1), slice(9, 12)):
        assert form[key].to_list() == rows[key]
        assert form[key].offsets[0] == 0
    assert np.shares_memory(form[1:3].values, form.values)


MORE_FORMS = [
    *FORMS,
    Masked(FORMS[7], np.array([True, False, True])),
    Masked(FORMS[8], np.array([True, False, True])),
    Masked(floats([1, 2, 3, 4]).reshape(2, 2), np.array([[True, False], [True, True]])),
    Masked(Masked(FORMS[0], np.array([True, True, False])), np.array([True, False, True])),
    Ragged(np.arange(12).reshape(4, 3), np.array([0, 1, 1, 4], np.int32)),
    Sparse(np.array([[0, 3, 1], [2, 0, 0], [2, 4, 1]]), strings(["a", "", "c"]), np.array([3, 5, 2])),
    SparseCSR(np.array([0, 0, 2, 3]), np.array([[3, 1], [0, 0], [4, 1]]), floats([1, 2, 3]), np.array([3, 5, 2])),
]


def _chosen(rows: list[Any], key: Any) -> list[Any]:
    """Selects rows from a list with any key that array types support."""
    if isinstance(key, slice):
        return rows[key]
    keys = np.asarray(key).tolist()
    if keys and isinstance(keys[0], bool):
        return [row for row, kept in zip(rows, keys, strict=True) if kept]
    return [rows[i] for i in keys]


def _keys(count: int) -> list[Any]:
    """Returns slices, masks and row indices, including empty, repeated and negative ones."""
    rng = np.random.default_rng(count)
    slices = [slice(None, None, step) for step in (2, 3, -1, -2)] + [
        slice(count, None, -3),
        slice(-2, 1, -1),
        slice(1, -1),
    ]
    masks = [np.zeros(count, bool), np.ones(count, bool), rng.random(count) < 0.5]
    numbers = [[], np.array([], np.int64), [-1, 0, 0], rng.permutation(count), rng.integers(-count, count, 20)]
    unsigned = [np.arange(count, dtype=np.uint8)[::-1], np.array([count - 1], np.uint64)]
    return [*slices, *masks, masks[2].tolist(), *numbers, *unsigned]


@pytest.mark.parametrize("form", MORE_FORMS, ids=repr)
def test_rows_are_selected_as_from_a_list(form: Any) -> None:
    rows = form.to_list()
    for key in _keys(len(form)):
        chosen = form[key]
        assert type(chosen) is type(form)
        assert chosen.to_list() == _chosen(rows, key), key
        assert len(chosen) == len(_chosen(rows, key))
        again = chosen[np.arange(len(chosen))]
        assert again.to_list() == chosen.to_list(), "cannot select from a selection"
        for part, whole in zip(chosen, form, strict=True):
            if isinstance(part, np.ndarray):
                assert part.dtype == whole.dtype


@pytest.mark.parametrize("form", MORE_FORMS, ids=repr)
def test_invalid_row_indices(form: Any) -> None:
    count = len(form)
    for key in ([count], [-count - 1], np.array([0, count], np.uint64), np.array([2**40])):
        with pytest.raises(IndexError, match=f"there are {count} rows"):
            form[key]
    for mask in (np.ones(count + 1, bool), [True] * (count - 1)):
        with pytest.raises(IndexError, match=f"one entry for each of the {count} rows; got {len(mask)}"):
            form[mask]
    for key in ([0.0], np.array(["a"]), np.zeros((2, 2), int), (0, 1), None, ..., "a", 0.5, True, np.True_, [None]):
        with pytest.raises(TypeError, match="row"):
            form[key]
    for index in (count, -count - 1):
        with pytest.raises(IndexError, match=f"row {index} does not exist: there are {count} rows"):
            form[index]


@pytest.mark.parametrize("form", MORE_FORMS, ids=repr)
def test_single_rows(form: Any) -> None:
    rows = form.to_list()
    values = form.values if isinstance(form, Masked) else form
    for i in range(-len(form), len(form)):
        if isinstance(values, (Sparse, SparseCSR)):
            if isinstance(form, Masked) and rows[i] is None:
                continue
            with pytest.raises(TypeError, match=rf"\[{i % len(form)}:{i % len(form) + 1}\] for an array of one row"):
                form[i]
            assert not hasattr(values, "row")
            continue
        row = form[np.int64(i)]
        plain = row.to_list() if hasattr(row, "to_list") else row.tolist() if hasattr(row, "tolist") else row
        assert plain == rows[i]
        assert type(form.row(i)) is type(row)


@given(st.data())
def test_any_rows_of_any_nesting(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.lists(st.lists(st.text(max_size=3), max_size=3), max_size=3), min_size=1, max_size=6))
    form = ragged(rows, lambda items: ragged(items, strings))
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    masked = Masked(form, valid)
    key: Any = data.draw(
        st.slices(len(rows))
        | st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8)
        | st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)).map(np.array)
    )
    assert form[key].to_list() == _chosen(rows, key)
    assert masked[key].to_list() == _chosen(masked.to_list(), key)


@pytest.mark.parametrize("levels", [31, 128])
def test_deep_nesting_does_not_exceed_the_recursion_limit(levels: int) -> None:
    """A spec has at most 128 levels, and each level may also be masked."""
    form: Any = np.array([1.5, 2.5])
    rows: Any = [1.5, 2.5]
    for _ in range(levels):
        form = Ragged(Masked(form, np.array([True] * len(form))), np.array([0, 2] if len(form) == 2 else [0, 1]))
        rows = [rows]
    assert form.to_list() == rows
    assert form[:1].to_list() == form[[0]].to_list() == rows
    assert pickle.loads(pickle.dumps(form)).to_list() == rows
    if levels < 64:
        assert form.to_arrow().to_pylist() == rows
    else:
        with pytest.raises(fastpipe.errors.LimitError, match="at most 64 levels"):
            form.to_arrow()
    assert len(repr(form)) < 500
    assert "Ragged(...)" in repr(form)


def test_lengths() -> None:
    assert ragged([[1], [], [2, 3]], floats).lengths.tolist() == [1, 0, 2]
    assert strings(["a", "", "€", "bcd"], shape=(2, 2)).lengths.tolist() == [[1, 0], [3, 3]]


def test_fixed_dimensions_inside_ragged_ones() -> None:
    form = Ragged(np.arange(12).reshape(4, 3), np.array([0, 1, 4]))
    assert form.to_list() == [[[0, 1, 2]], [[3, 4, 5], [6, 7, 8], [9, 10, 11]]]
    assert form.row(1).shape == (3, 3)


# --- Strings ---


@pytest.mark.parametrize("rows", [[], [""], ["ascii", "only"], ["a", "€", "𝄞x", "", "nul\0"]])
def test_strings_as_python_and_numpy(rows: list[str]) -> None:
    form = strings(rows)
    assert form.to_list() == rows
    assert form.to_numpy().dtype == object
    assert form.to_numpy().tolist() == np.asarray(form).tolist() == rows
    assert [form[i] for i in range(len(form))] == rows


def test_bytes_as_python_and_numpy() -> None:
    rows = [b"\xff\x00", b"", b"abc"]
    form = strings(rows, binary=True)
    assert form.to_list() == form.to_numpy().tolist() == rows
    assert form[0] == b"\xff\x00"
    with pytest.raises(TypeError, match="to_numpy"):
        form.to_stringdtype()


def test_strings_are_not_ragged_rows() -> None:
    """The offsets of strings of more dimensions belong to entries. Code for ragged rows must not take them for rows."""
    assert not isinstance(strings(["a", "b"]), Ragged)
    assert not isinstance(ragged([["a"]], strings), Strings)


def test_strings_of_more_dimensions() -> None:
    form = strings(list("abcdef"), shape=(1, 3, 2))
    nested = [[["a", "b"], ["c", "d"], ["e", "f"]]]
    assert form.to_list() == nested
    assert form.to_numpy().shape == (1, 3, 2)
    assert form.to_numpy().tolist() == nested
    assert form.row(0).shape == (3, 2)
    assert form.row(0).row(-1).to_list() == ["e", "f"]
    assert len(form) == 1


@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="StringDType came with NumPy 2.0")
def test_stringdtype() -> None:
    form = strings(["a", "€", "", "b" * 99], shape=(2, 2))
    array = form.to_stringdtype()
    assert isinstance(array.dtype, np.dtypes.StringDType)
    assert array.tolist() == form.to_list()
    assert strings([]).to_stringdtype().shape == (0,)


def test_strings_that_are_not_utf8_raise() -> None:
    form = Strings(np.array([0xFF], np.uint8), np.array([0, 1]), (1,), False)
    for read in (form.to_list, form.to_numpy):
        with pytest.raises(UnicodeDecodeError):
            read()


def test_numpy_may_request_a_dtype_but_not_copy_false() -> None:
    assert np.asarray(strings(["1", "2"]), dtype="U1").tolist() == ["1", "2"]
    with pytest.raises(ValueError, match="without a copy"):
        strings(["1"]).__array__(copy=False)


# --- Masked ---


def test_masks_of_more_dimensions() -> None:
    values = np.arange(6).reshape(2, 3)
    valid = np.array([[True, False, True], [False, True, True]])
    assert Masked(values, valid).to_list() == [[0, None, 2], [None, 4, 5]]
    assert Masked(values, np.array([True, False])).to_list() == [[0, 1, 2], None]
    assert Masked(strings(list("abcd"), shape=(2, 2)), valid[:, :2]).to_list() == [["a", None], [None, "d"]]


def test_masks_within_masks() -> None:
    form = masked([[1, None], None], lambda r: ragged(r, lambda q: masked(q, floats, 0)), [])
    assert form.to_list() == [[1, None], None]
    twice = Masked(Masked(floats([1, 2, 3]), bools([True, False, True])), bools([True, True, False]))
    assert twice.to_list() == [1, None, None]


# --- Sparse ---


def test_sparse_rows() -> None:
    rows = [[((3,), 1.0)], [((0,), 2.0), ((4,), 3.0)], []]
    assert FORMS[7].to_list() == FORMS[8].to_list() == rows
    indices = np.array([[3, 1], [0, 0], [4, 2]])
    values = strings(["a", "b", "c"])
    rows = [[((3, 1), "a")], [((0, 0), "b"), ((4, 2), "c")], []]
    coo = Sparse(np.column_stack([[0, 1, 1], indices]), values, np.array([3, 5, 3]))
    assert coo.to_list() == rows
    assert SparseCSR(np.array([0, 1, 3, 3]), indices, values, np.array([3, 5, 3])).to_list() == rows
    assert masked([1, None, 1], lambda r: coo, 1).to_list() == [rows[0], None, rows[2]]


# --- Arrow ---


def test_arrow_types() -> None:
    pa = pytest.importorskip("pyarrow")
    assert FORMS[0].to_arrow().type == pa.large_list(pa.float64())
    assert FORMS[2].to_arrow().type == pa.large_string()
    assert FORMS[3].to_arrow().type == pa.large_binary()
    assert FORMS[4].to_arrow().type == pa.list_(pa.large_string(), 2)


@given(st.lists(st.none() | st.lists(st.lists(st.none() | st.text(max_size=4), max_size=3), max_size=4), max_size=6))
def test_any_nesting_round_trips(rows: list[Any]) -> None:
    form = masked(rows, lambda r: ragged(r, lambda q: ragged(q, lambda p: masked(p, strings, ""))), [])
    assert form.to_list() == rows
    for i, row in enumerate(rows):
        assert form.values.row(i).to_list() == (row or [])
        assert form.values[i : i + 2].to_list() == [r or [] for r in rows[i : i + 2]]
    pytest.importorskip("pyarrow")
    assert form.to_arrow().to_pylist() == rows


@given(st.lists(st.none() | st.lists(st.booleans(), min_size=3, max_size=3), max_size=20))
def test_any_mask_over_fixed_shapes(rows: list[Any]) -> None:
    form = masked(rows, lambda r: bools(r).reshape(len(r), 3), [False] * 3)
    assert form.to_list() == rows
    pytest.importorskip("pyarrow")
    assert form.to_arrow().to_pylist() == rows


def test_the_package_names_the_forms() -> None:
    for name in ("Masked", "Ragged", "Sparse", "SparseCSR", "Strings"):
        assert getattr(fastpipe.batch, name).__name__ == name
