"""The values of logical types, including edge cases. `test_avro_unions` tests them in random schemas."""

from __future__ import annotations

import decimal
import uuid
from fractions import Fraction
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import fastpipe
import oracle
import wire
from avro_schemas import container, files, read
from fastpipe import DenseSpec, RaggedSpec, SparseSpec
from oracle import Branch
from strategies import SOME

NAT = -(2**63)


def one(kind: Any, *values: Any) -> bytes:
    """Returns a file whose records have one field, `x`."""
    return container(wire.record("R", x=kind), [{"x": value} for value in values])


def decimals(precision: int, scale: int = 0, size: int | None = None) -> dict[str, Any]:
    kind = {"type": "bytes"} if size is None else {"type": "fixed", "name": "F", "size": size}
    return {**kind, "logicalType": "decimal", "precision": precision, "scale": scale}


def signed(value: int, size: int | None = None) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1 if size is None else size, "big", signed=True)


# --- Times ---

TIMES = {logical: (kind, dtype) for logical, (kind, dtype) in oracle.LOGICAL.items() if dtype}


@pytest.mark.parametrize("logical", TIMES)
def test_times(logical: str) -> None:
    kind, dtype = TIMES[logical]
    values = [0, -1, 2**31 - 1, -(2**31)] + ([2**63 - 1, NAT] if kind == "long" else [])
    schema = {"type": kind, "logicalType": logical}
    with files(one(schema, *values)) as paths:
        assert fastpipe.infer_features(paths) == {"x": DenseSpec((), dtype)}
        assert read(paths) == {"x": values}
        stored = {"int": "int32", "long": "int64"}[kind]
        assert fastpipe.infer_features(paths, logical_types=False) == {"x": DenseSpec((), stored)}
        assert read(paths, logical_types=False) == {"x": values}
        assert read(paths, features={"x": DenseSpec((), "int64")}) == {"x": values}
        for other in ("string", "bool", "datetime64[s]", "timedelta64[s]"):
            with pytest.raises(fastpipe.errors.SchemaError, match=f'request "{dtype}"'.replace("[", r"\[")):
                read(paths, features={"x": DenseSpec((), other)})


@pytest.mark.parametrize("logical", TIMES)
def test_times_of_sparse_records(logical: str) -> None:
    kind, dtype = TIMES[logical]
    values = wire.list_of({"type": kind, "logicalType": logical})
    record = wire.record("S", indices0=wire.list_of("long"), values=values)
    with files(one(record, {"indices0": [3, 7], "values": [5, -1]})) as paths:
        for asked in (dtype, "int64"):
            (batch,) = fastpipe.read_avro(paths, features={"x": SparseSpec((9,), asked)}, batch_size=1)
            assert batch["x"].values.view(np.int64).tolist() == [5, -1]
        for other in ("datetime64[s]", "timedelta64[s]"):
            with pytest.raises(fastpipe.errors.SchemaError, match=f'request "{dtype}"'.replace("[", r"\[")):
                read(paths, features={"x": SparseSpec((9,), other)})


def test_times_that_are_null() -> None:
    schema = ["null", {"type": "long", "logicalType": "timestamp-micros"}]
    with files(one(schema, None, 5, None)) as paths:
        assert read(paths) == {"x": [None, 5, None]}
        filled = {"x": DenseSpec((), "datetime64[us]", on_null="fill")}
        assert read(paths, features=filled) == {"x": [NAT, 5, NAT]}
        (batch,) = fastpipe.read_avro(paths, features=filled, batch_size=3)
        assert np.isnat(batch["x"]).tolist() == [True, False, True]
        given = {"x": DenseSpec((), "datetime64[us]", fill="1970-01-01T00:00:01")}
        assert read(paths, features=given) == {"x": [10**6, 5, 10**6]}


def test_arrays_of_times() -> None:
    schema = wire.list_of({"type": "int", "logicalType": "date"})
    with files(one(schema, [1, 2], [], [3])) as paths:
        assert read(paths) == {"x": [[1, 2], [], [3]]}
        padded = {"x": DenseSpec((2,), "datetime64[D]", pad=np.datetime64("NaT"))}
        assert read(paths, features=padded) == {"x": [[1, 2], [NAT, NAT], [3, NAT]]}
        assert read(paths, features={"x": DenseSpec((1,), "datetime64[D]", pad="1970-01-10")}) == {"x": [[1], [9], [3]]}


def test_units_of_other_files() -> None:
    millis, micros = ({"type": "long", "logicalType": f"timestamp-{unit}"} for unit in ("millis", "micros"))
    with files(one(millis, 1), one(micros, 2), one("long", 3)) as paths:
        with pytest.raises(fastpipe.errors.SchemaError, match="timestamp-micros") as caught:
            read(paths)
        assert (caught.value.path, caught.value.feature) == (paths[1], "x")
        assert read([paths[0], paths[2]]) == {"x": [1, 3]}
        assert read(paths, logical_types=False) == {"x": [1, 2, 3]}


# --- Decimals ---


@hypothesis.settings(max_examples=SOME)
@hypothesis.given(st.integers(1, 38), st.data())
def test_decimals_are_exact_or_nearest(precision: int, data: st.DataObject) -> None:
    scale = data.draw(st.integers(0, precision))
    size = data.draw(st.none() | st.integers(16, 20))
    most = 10**precision - 1
    values = data.draw(st.lists(st.integers(-most, most), min_size=1, max_size=8))
    with files(one(decimals(precision, scale, size), *(signed(value, size) for value in values))) as paths:
        nearest = [float(Fraction(value, 10**scale)) for value in values]
        if precision <= 18:
            assert fastpipe.infer_features(paths) == {"x": DenseSpec((), "int64", scale=scale)}
            assert read(paths) == {"x": values}
        else:
            assert fastpipe.infer_features(paths) == {"x": DenseSpec((), "float64")}
            assert read(paths) == {"x": nearest}
        assert read(paths, features={"x": DenseSpec((), "float64")}) == {"x": nearest}
        assert [float(decimal.Decimal(value).scaleb(-scale, decimal.Context(prec=80))) for value in values] == nearest
        more = data.draw(st.integers(0, 20))
        for dtype in ("int64", "uint64", "int8"):
            info = np.iinfo(dtype)
            spec = {"x": DenseSpec((), dtype, scale=scale + more)}
            scaled = [value * 10**more for value in values]
            if all(info.min <= value <= info.max for value in scaled):
                assert read(paths, features=spec) == {"x": scaled}
            else:
                with pytest.raises(fastpipe.errors.ValueRangeError, match=dtype):
                    read(paths, features=spec)


@pytest.mark.parametrize("size", [None, 16])
def test_decimals_that_exceed_their_precision(size: int | None) -> None:
    """Values that fit the dtype are read."""
    values = [12345, 2**63 - 1, -(2**63)]
    with files(one(decimals(2, 1, size), *(signed(value, size) for value in values))) as paths:
        assert read(paths) == {"x": values}
    for value in (2**63, -(2**63) - 1, 2**127 - 1):
        with files(one(decimals(2, 1, size), signed(value, 16))) as paths:
            with pytest.raises(fastpipe.errors.ValueRangeError, match="doesn't fit int64") as caught:
                read(paths)
            assert (caught.value.feature, caught.value.record) == ("x", 0)
            assert read(paths, features={"x": DenseSpec((), "float64")}) == {"x": [float(Fraction(value, 10))]}
            assert read(paths, features={"x": DenseSpec((), "bytes")}) == {"x": [signed(value, 16)]}


def test_decimals_of_more_than_128_bits() -> None:
    with files(one(decimals(40), signed(2**127))) as paths:
        with pytest.raises(fastpipe.errors.ValueRangeError, match='"bytes" all'):
            read(paths)
        assert read(paths, features={"x": DenseSpec((), "bytes")}) == {"x": [signed(2**127)]}
        assert read(paths, logical_types=False) == {"x": [signed(2**127)]}


def test_decimals_without_bytes_are_0() -> None:
    with files(one(decimals(9, 2), b"", b"\0", b"\xff")) as paths:
        assert read(paths) == {"x": [0, 0, -1]}


def test_requested_scales() -> None:
    with files(one(decimals(9, 2), signed(1234), signed(-5))) as paths:
        assert read(paths, features={"x": DenseSpec((), "int32", scale=3)}) == {"x": [12340, -50]}
        with pytest.raises(fastpipe.errors.SchemaError, match="2 decimal places, and scale=1 would round"):
            read(paths, features={"x": DenseSpec((), "int64", scale=1)})
        with pytest.raises(
            fastpipe.errors.SchemaError, match=r'integer dtype with scale=.*"int64", scale=2\)} reads it'
        ):
            read(paths, features={"x": DenseSpec((), "int64")})
    null = ["null", decimals(9, 2)]
    with files(one(null, Branch(0, None), Branch(1, signed(7)))) as paths:
        assert read(paths) == {"x": [None, 7]}
        assert read(paths, features={"x": DenseSpec((), "int64", scale=4, fill=-1)}) == {"x": [-1, 700]}
        assert read(paths, features={"x": DenseSpec((), "float32", fill=0.5)}) == {"x": [0.5, float(np.float32(0.07))]}
    with files(one(wire.list_of(decimals(9, 2)), [signed(7)], [])) as paths:
        assert read(paths, features={"x": DenseSpec((2,), "int64", scale=3, pad=-1)}) == {"x": [[70, -1], [-1, -1]]}


def test_scales_of_other_files() -> None:
    """The first file's scale applies to the column. Smaller scales of other files are converted to it."""
    with files(*(one(decimals(9, scale), signed(4)) for scale in (2, 1, 3))) as paths:
        assert read(paths[:2]) == {"x": [4, 40]}
        with pytest.raises(fastpipe.errors.SchemaError, match="3 decimal places") as caught:
            read(paths)
        assert caught.value.path == paths[2]
        assert read(paths, features={"x": DenseSpec((), "int64", scale=3)}) == {"x": [40, 400, 4]}
        assert read(paths, features={"x": DenseSpec((), "float64")}) == {"x": [0.04, 0.4, 0.004]}


@pytest.mark.parametrize(
    "schema",
    [
        decimals(3, 4),
        decimals(0),
        decimals(5, size=2),
        {"type": "bytes", "logicalType": "decimal"},
        {"type": "bytes", "logicalType": "decimal", "precision": "3"},
        {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": -1},
        {"type": "fixed", "name": "F", "size": 11, "logicalType": "duration"},
        {"type": "fixed", "name": "F", "size": 15, "logicalType": "uuid"},
        {"type": "bytes", "logicalType": "of-somebody"},
        {"type": "bytes", "logicalType": 5},
    ],
)
def test_logical_types_that_do_not_fit_are_ignored(schema: Any) -> None:
    value = bytes(schema.get("size", 1))
    with files(one(schema, value)) as paths:
        assert fastpipe.infer_features(paths) == {"x": DenseSpec((), "bytes")}
        assert read(paths) == {"x": [value]}


# --- UUIDs and durations ---

UUID = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")


def test_uuids() -> None:
    fixed = {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}
    text = {"type": "string", "logicalType": "uuid"}
    schema = wire.record("R", f=fixed, t=text)
    rows = [{"f": UUID.bytes, "t": str(UUID)}, {"f": bytes(16), "t": str(uuid.UUID(int=0)).upper()}]
    features = {
        "f": DenseSpec((), "bytes"),
        "f text": DenseSpec((), "string", field="f"),
        "f array": DenseSpec((16,), "uint8", field="f"),
        "t": DenseSpec((), "string"),
        "t bytes": DenseSpec((), "bytes", field="t"),
        "t array": DenseSpec((16,), "uint8", field="t"),
    }
    with files(container(schema, rows)) as paths:
        assert fastpipe.infer_features(paths) == {"f": DenseSpec((), "bytes"), "t": DenseSpec((), "string")}
        assert read(paths, features=features) == {
            "f": [UUID.bytes, bytes(16)],
            "f text": [str(UUID), str(uuid.UUID(int=0))],
            "f array": [list(UUID.bytes), [0] * 16],
            "t": [str(UUID), str(uuid.UUID(int=0))],
            "t bytes": [str(UUID).encode(), str(uuid.UUID(int=0)).encode()],
            "t array": [list(UUID.bytes), [0] * 16],
        }
        with pytest.raises(fastpipe.errors.SchemaError, match="last dimension of these values must be 16"):
            read(paths, features={"t": DenseSpec((15,), "uint8")})


@pytest.mark.parametrize(
    "wrong", ["", "nope", UUID.hex, f"{{{UUID}}}", str(UUID)[:-1] + "g", str(UUID) + "0", "ä" * 18]
)
def test_invalid_uuids_are_read_as_text(wrong: str) -> None:
    with files(one({"type": "string", "logicalType": "uuid"}, str(UUID), wrong)) as paths:
        assert read(paths) == {"x": [str(UUID), wrong]}
        with pytest.raises(fastpipe.errors.MalformedFileError, match="text of a UUID") as caught:
            read(paths, features={"x": DenseSpec((16,), "uint8")})
        assert caught.value.feature == "x"


def test_durations() -> None:
    schema = {"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}
    most = [2**32 - 1] * 3
    with files(one(["null", schema], None, b"\xff" * 12, bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]))) as paths:
        assert fastpipe.infer_features(paths) == {"x": DenseSpec((3,), "uint32", on_null="mask")}
        assert read(paths) == {"x": [None, most, [1, 2, 3]]}
        assert read(paths, features={"x": DenseSpec((3,), "uint32", fill=7)}) == {"x": [[7] * 3, most, [1, 2, 3]]}
        whole = {"x": DenseSpec((12,), "uint8", on_null="fill")}
        assert read(paths, features=whole)["x"][1] == [255] * 12
        assert read(paths, features={"x": DenseSpec((), "bytes", fill=b"-")})["x"][:2] == [b"-", b"\xff" * 12]
        for shape in ((), (2,), (3, 1)):
            with pytest.raises(fastpipe.errors.SchemaError):
                read(paths, features={"x": DenseSpec(shape, "uint32", on_null="mask")})
    with files(one(wire.list_of(schema), [bytes(12)] * 2, [b"\xff" * 12])) as paths:
        assert fastpipe.infer_features(paths) == {"x": RaggedSpec((None, 3), "uint32")}
        assert read(paths) == {"x": [[[0] * 3] * 2, [most]]}
        assert read(paths, features={"x": DenseSpec((2, 3), "uint32", pad=9)}) == {
            "x": [[[0] * 3] * 2, [most, [9] * 3]]
        }
        assert read(paths, features={"x": DenseSpec((), "int64", length=True)}) == {"x": [2, 1]}
    with files(one(wire.list_of(schema), *[[bytes(12)] * 2] * 16)) as paths:
        assert fastpipe.infer_features(paths) == {"x": DenseSpec((2, 3), "uint32")}


def test_sparse_arrays_have_no_logical_values() -> None:
    """Records of indices and times are treated as ordinary records."""
    times = wire.list_of({"type": "int", "logicalType": "date"})
    schema = wire.record("S", indices0=wire.list_of("long"), values=times)
    with files(one(schema, {"indices0": [3], "values": [7]})) as paths:
        assert read(paths) == {"x.indices0": [[3]], "x.values": [[7]]}
