from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe import DenseSpec, RaggedSpec, SparseSpec
from fastpipe.typing import Features

NUMBERS = [*("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")]


# --- Types ---


@pytest.mark.parametrize("name", NUMBERS)
def test_numpy_dtypes_are_kept_by_name(name: str) -> None:
    for dtype in (name, np.dtype(name), np.dtype(name).type, np.dtype(name).str):
        assert DenseSpec((), dtype).dtype == name
        assert type(DenseSpec((), dtype).dtype) is str


def test_other_names_of_dtypes() -> None:
    for dtype, name in [
        (int, "int64"),
        (float, "float64"),
        (bool, "bool"),
        ("f4", "float32"),
        ("longlong", "int64"),
        ("string", "string"),
        ("bytes", "bytes"),
        (str, "string"),
        (bytes, "bytes"),
    ]:
        assert DenseSpec((), dtype).dtype == name


@pytest.mark.parametrize(
    ("dtype", "error", "match"),
    [
        ("complex64", ValueError, "complex64"),
        ("datetime64", ValueError, "needs a unit"),
        ("timedelta64[W]", ValueError, "one of bool"),
        (object, ValueError, "object"),
        ("U5", ValueError, "one of bool"),
        ("flaot32", ValueError, "flaot32"),
        (None, TypeError, "None"),
        (3, TypeError, "one of bool"),
        (np.dtype("f4").newbyteorder(), ValueError, "byte order"),
    ],
)
def test_other_dtypes_are_refused(dtype: Any, error: type[Exception], match: str) -> None:
    for make in (lambda: DenseSpec((), dtype), lambda: RaggedSpec((None,), dtype), lambda: SparseSpec((3,), dtype)):
        with pytest.raises(error, match=match):
            make()


# --- Shapes ---


def test_shapes_become_tuples_of_python_ints() -> None:
    spec = RaggedSpec([None, np.int32(3)], "int8")
    assert spec.shape == (None, 3)
    assert type(spec.shape[1]) is int


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: DenseSpec((None,), "int8"), ValueError, "RaggedSpec"),
        (lambda: DenseSpec(64, "int8"), TypeError, r"write \(64,\)"),
        (lambda: DenseSpec("abc", "int8"), TypeError, "tuple"),
        (lambda: DenseSpec((0,), "int8"), ValueError, "at least 1"),
        (lambda: DenseSpec((-1,), "int8"), ValueError, "at least 1"),
        (lambda: DenseSpec((2**63,), "int8"), ValueError, "2\\*\\*63"),
        (lambda: DenseSpec((1.5,), "int8"), TypeError, "integer or None"),
        (lambda: DenseSpec((True,), "int8"), TypeError, "integer or None"),
        (lambda: RaggedSpec((), "int8"), ValueError, "DenseSpec"),
        (lambda: RaggedSpec((3,), "int8"), ValueError, "DenseSpec"),
        (lambda: SparseSpec((), "int8"), ValueError, "at least one dimension"),
        (lambda: fastpipe.specs.Spec((), "int8"), TypeError, "use DenseSpec"),
        (lambda: DenseSpec((1,) * 32, "int8"), ValueError, "at most 31 .*RaggedSpec"),
        (lambda: RaggedSpec((None, *(1,) * 32), "int8"), ValueError, "at most 31"),
        (lambda: RaggedSpec((None,) * 200, "int8"), ValueError, "at most 128 dimensions; got 200"),
        (lambda: SparseSpec((None,) * 129, "int8"), ValueError, "at most 128 dimensions; got 129"),
    ],
)
def test_other_shapes_are_refused(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


# --- Nulls, fill and pad ---


def test_a_fill_value_implies_fill() -> None:
    assert DenseSpec((), "int8").on_null == "error"
    assert DenseSpec((), "int8", fill=3).on_null == "fill"
    assert DenseSpec((), "int8", fill=0).on_null == "fill"
    assert DenseSpec((), "int8", on_null="fill").fill is None
    with pytest.raises(ValueError, match="not both"):
        DenseSpec((), "int8", on_null="mask", fill=3)
    with pytest.raises(ValueError, match="on_null must be"):
        DenseSpec((), "int8", on_null="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NUMBERS)
def test_values_that_fit_become_python_values(name: str) -> None:
    kind = bool if name == "bool" else float if name.startswith("float") else int
    for value in (0, 1, 1.0, True, np.dtype(name).type(1), np.array(1, dtype=name)):
        spec = DenseSpec((2,), name, fill=value, pad=value)
        assert type(spec.fill) is type(spec.pad) is kind
        assert spec.fill == spec.pad == value


@pytest.mark.parametrize("name", [name for name in NUMBERS if "int" in name])
def test_integers_must_be_in_range(name: str) -> None:
    limits = np.iinfo(name)
    for value in (limits.min, limits.max):
        assert DenseSpec((), name, fill=value).fill == value
    for value in (limits.min - 1, limits.max + 1, 0.5, math.nan, math.inf, 1e300):
        with pytest.raises(ValueError, match=f"doesn't fit dtype {name}"):
            DenseSpec((), name, fill=value)
        with pytest.raises(ValueError, match=f"pad=.* doesn't fit dtype {name}"):
            DenseSpec((1,), name, pad=value)


def test_floats_are_rounded_but_integers_are_not() -> None:
    assert DenseSpec((), "float32", fill=0.1).fill == 0.1
    assert DenseSpec((), "float32", fill=2**24).fill == 2**24
    assert math.isnan(DenseSpec((), "float32", fill=math.nan).fill)  # type: ignore[arg-type]
    assert DenseSpec((), "float64", fill=-math.inf).fill == -math.inf
    assert DenseSpec((), "float64", fill=1e300).fill == 1e300
    for name, value in [
        ("float32", 2**24 + 1),
        ("float32", 1e39),
        ("float32", 1e-60),
        ("float64", 2**53 + 1),
        ("float64", 10**400),
    ]:
        with pytest.raises(ValueError, match=f"doesn't fit dtype {name}"):
            DenseSpec((), name, fill=value)


def test_bools_are_0_or_1() -> None:
    assert DenseSpec((), "bool", fill=1).fill is True
    with pytest.raises(ValueError, match="doesn't fit dtype bool"):
        DenseSpec((), "bool", fill=2)


def test_string_and_bytes_fills_match_their_dtype() -> None:
    assert DenseSpec((), "string", fill="?").fill == "?"
    assert DenseSpec((), "string", fill=np.str_("?")).fill == "?"
    assert DenseSpec((), "bytes", fill=bytearray(b"?")).fill == b"?"
    for dtype, value in [("string", b"?"), ("bytes", "?"), ("string", 0), ("int8", "0"), ("int8", [0])]:
        with pytest.raises(TypeError, match="fill for dtype"):
            DenseSpec((), dtype, fill=value)
    with pytest.raises(ValueError, match="UTF-8"):
        DenseSpec((), "string", fill="\ud800")


def test_pad_is_for_arrays_of_numbers() -> None:
    with pytest.raises(ValueError, match="scalar"):
        DenseSpec((), "int8", pad=0)
    with pytest.raises(ValueError, match="for numbers"):
        DenseSpec((3,), "string", pad=0)


def test_options_of_sparse_specs() -> None:
    assert SparseSpec((None,), "float32").layout == "coo"
    with pytest.raises(ValueError, match="layout must be"):
        SparseSpec((3,), "float32", layout="csc")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="check_indices"):
        SparseSpec((3,), "float32", check_indices="no")  # type: ignore[arg-type]


# --- Specs as values ---

SPECS = {
    'fastpipe.DenseSpec((), "int32")': DenseSpec((), "int32"),
    'fastpipe.DenseSpec((64,), "float32", on_null="mask")': DenseSpec((64,), "float32", on_null="mask"),
    'fastpipe.DenseSpec((2, 3), "uint8", fill=0, pad=255)': DenseSpec((2, 3), "uint8", fill=0, pad=255),
    'fastpipe.DenseSpec((), "float64", fill=float("inf"))': DenseSpec((), "float64", fill=math.inf),
    'fastpipe.DenseSpec((), "string", on_null="fill")': DenseSpec((), "string", on_null="fill"),
    'fastpipe.DenseSpec((), "string", fill="say \\"ä\\"")': DenseSpec((), "string", fill='say "ä"'),
    "fastpipe.DenseSpec((), \"string\", fill='\\x07')": DenseSpec((), "string", fill="\a"),
    "fastpipe.RaggedSpec((None, 3), \"bytes\", fill=b'x')": RaggedSpec((None, 3), "bytes", fill=b"x"),
    'fastpipe.SparseSpec((None, 9), "float32", layout="csr", check_indices=False)': SparseSpec(
        (None, 9), "float32", layout="csr", check_indices=False
    ),
    'fastpipe.DenseSpec((), "int64", scale=2)': DenseSpec((), "int64", scale=np.int8(2)),  # type: ignore[arg-type]
    'fastpipe.RaggedSpec((None,), "uint8", fill=0, scale=-1)': RaggedSpec((None,), "uint8", fill=0, scale=-1),
    'fastpipe.SparseSpec((9,), "int32", scale=0)': SparseSpec((9,), "int32", scale=0),
}


@pytest.mark.parametrize("code", SPECS)
def test_repr_is_code(code: str) -> None:
    assert repr(SPECS[code]) == code
    assert eval(code, {"fastpipe": fastpipe}) == SPECS[code]


@pytest.mark.parametrize("code", SPECS)
def test_specs_are_values(code: str) -> None:
    spec = SPECS[code]
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
    assert sum(other == spec for other in SPECS.values()) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.dtype = "int8"
    assert dataclasses.replace(spec, on_null=spec.on_null) == spec


def test_options_are_keyword_only() -> None:
    for make in (DenseSpec, RaggedSpec, SparseSpec):
        with pytest.raises(TypeError, match="positional"):
            make((None,), "int8", "mask")  # type: ignore[call-arg]


def test_lowered_specs_are_plain_values() -> None:
    assert DenseSpec((2,), "int8", fill=3, pad=4)._lower() == (
        "dense",
        (2,),
        "int8",
        "fill",
        3,
        4,
        "",
        True,
        None,
        False,
        None,
    )
    string = RaggedSpec((None, 3), "string", field="a.b")
    assert string._lower() == ("ragged", (-1, 3), "string", "error", None, None, "", True, "a.b", False, None)
    assert DenseSpec((), "int64", length=True)._lower()[-3:] == (None, True, None)
    assert DenseSpec((), "int64", scale=3)._lower()[-1] == 3
    sparse = SparseSpec((None, 5), "float32", on_null="mask", layout="csr", check_indices=False)
    assert sparse._lower() == ("sparse", (-1, 5), "float32", "mask", None, None, "csr", False, None, False, None)


# --- Features ---


def test_maximum_numbers_of_dimensions() -> None:
    for spec in (
        DenseSpec((1,) * 31, "int8"),
        RaggedSpec((None, *(1,) * 31), "int8"),
        RaggedSpec((None,) * 128, "int8"),
    ):
        assert pickle.loads(pickle.dumps(spec)) == eval(repr(spec), {"fastpipe": fastpipe}) == spec


def test_fields_and_lengths() -> None:
    spec = DenseSpec((), np.int64, field="clicks", length=np.True_)
    assert repr(spec) == 'fastpipe.DenseSpec((), "int64", field="clicks", length=True)'
    assert eval(repr(spec), {"fastpipe": fastpipe}) == spec
    assert spec != DenseSpec((), np.int64, field="other", length=True)
    for make, error, match in [
        (lambda: DenseSpec((), "int32", length=True), ValueError, "dtype must be \"int64\"; got 'int32'"),
        (lambda: DenseSpec((3,), "int64", length=True, pad=0), ValueError, "pad"),
        (lambda: DenseSpec((), "int64", length="yes"), TypeError, "length must be True or False; got 'yes'"),
        (lambda: DenseSpec((), "int64", field=3), TypeError, "field must be a string, the path of a field; got 3"),
        (lambda: SparseSpec((3,), "int64", field=""), ValueError, "field is empty"),
    ]:
        with pytest.raises(error, match=match):
            make()


def test_scales_require_integers() -> None:
    for make, error, match in [
        (lambda: DenseSpec((), "float64", scale=2), ValueError, "dtype must be an integer type; got 'float64'"),
        (lambda: RaggedSpec((None,), "string", scale=0), ValueError, "got 'string'"),
        (lambda: SparseSpec((3,), "bool", scale=2), ValueError, "got 'bool'"),
        (lambda: DenseSpec((), "datetime64[s]", scale=2), ValueError, "got 'datetime64"),
        (lambda: DenseSpec((), "int64", scale=2, length=True), ValueError, r"pass either scale= .* or length=True"),
        (lambda: DenseSpec((), "int64", scale=77), ValueError, "scale must be between -76 and 76; got 77"),
        (lambda: DenseSpec((), "int64", scale=-77), ValueError, "scale must be between -76 and 76; got -77"),
        (lambda: DenseSpec((), "int64", scale=2.0), TypeError, "scale must be a number of decimal places; got 2.0"),
        (lambda: DenseSpec((), "int64", scale=True), TypeError, "scale must be a number of decimal places; got True"),
    ]:
        with pytest.raises(error, match=match):
            make()


def test_features_print_as_code() -> None:
    features = Features(
        {"user.age": DenseSpec((), "int32", on_null="mask"), 'odd "name"': RaggedSpec((None,), "string")}
    )
    assert repr(features) == (
        "{\n"
        '    "user.age": fastpipe.DenseSpec((), "int32", on_null="mask"),\n'
        '    "odd \\"name\\"": fastpipe.RaggedSpec((None,), "string"),\n'
        "}"
    )
    assert eval(repr(features), {"fastpipe": fastpipe}) == features
    assert repr(Features()) == "{}"


def test_features_are_dicts_that_can_be_changed_and_pickled() -> None:
    features = Features({"a": DenseSpec((), "int32")})
    features["b"] = DenseSpec((), "int8")
    assert list(features) == ["a", "b"]
    again = pickle.loads(pickle.dumps(features))
    assert type(again) is Features
    assert again == features == dict(features)


def test_features_hold_specs_by_name() -> None:
    with pytest.raises(TypeError, match="expected a DenseSpec"):
        Features({"a": "int32"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="names must be strings"):
        Features({1: DenseSpec((), "int8")})  # type: ignore[dict-item]
