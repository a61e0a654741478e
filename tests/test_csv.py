"""CSV files, compared with Python's `csv` module and the C library's number parsing."""

from __future__ import annotations

import csv
import ctypes
import io
import math
import os
import pickle
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import fastpipe
import oracle
from fastpipe import DenseSpec
from strategies import SOME, orders

pytestmark = pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")

NUMBERS = int(os.environ.get("FASTPIPE_NUMBERS", "100000"))
libc = ctypes.CDLL(None)
libc.strtod.restype, libc.strtof.restype = ctypes.c_double, ctypes.c_float
libc.strtod.argtypes = libc.strtof.argtypes = [ctypes.c_char_p, ctypes.c_void_p]


def read(source: Any, **options: Any) -> dict[str, list[Any]]:
    """Returns all rows of each column."""
    return oracle.columns(fastpipe.read_csv(source, **{"batch_size": 3} | options))


def texts(columns: int) -> dict[str, DenseSpec]:
    return {f"f{i}": DenseSpec((), "string") for i in range(columns)}


def rows_of(source: Any, columns: int, **options: Any) -> list[list[str]]:
    """Returns the fields of all rows."""
    found = read(source, features=texts(columns), header=[f"f{i}" for i in range(columns)], **options)
    return list(map(list, zip(*found.values(), strict=True)))


def expected(text: str, columns: int, **options: Any) -> list[list[str]]:
    """Returns the rows that Python's module finds, without rows of a different length."""
    found = csv.reader(io.StringIO(text, newline=""), strict=False, **options)
    return [row for row in found if len(row) == columns]


# --- Rows and fields ---

PIECES = ["a", "bc", "ä€", " ", ",", ",", "\n", "\n", "\r\n", '"', '"', '""', ";", "#"]


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
@hypothesis.settings(max_examples=5 * SOME)
@hypothesis.given(st.lists(st.sampled_from(PIECES), max_size=60), st.integers(1, 3))
def test_any_text_is_read_like_the_csv_module(pieces: list[str], columns: int) -> None:
    text = "".join(pieces)
    try:
        found = rows_of(text.encode(), columns, on_ragged="skip") if text else []
    except fastpipe.errors.MalformedFileError:
        # Any following text would be part of the last field.
        assert list(csv.reader(io.StringIO(text + "\nbehind", newline="")))[-1] != ["behind"]
        return
    assert found == expected(text, columns)


@hypothesis.settings(max_examples=SOME)
@hypothesis.given(
    st.lists(st.lists(st.text(st.sampled_from("ab\",;\n\r 'é😀|"), max_size=8), min_size=3, max_size=3), max_size=30),
    st.sampled_from([",", ";", "|", "\t"]),
    st.sampled_from(['"', "'"]),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    orders(),
)
def test_output_of_the_csv_module_round_trips(
    rows: list[list[str]], delimiter: str, quote: str, end: str, always: bool, order: dict[str, Any]
) -> None:
    if not always:
        # The module doesn't quote a single carriage return.
        rows = [[field.replace("\r", "") for field in row] for row in rows]
    out = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if always else csv.QUOTE_MINIMAL
    writer = csv.writer(out, delimiter=delimiter, quotechar=quote, lineterminator=end, quoting=quoting)
    writer.writerows([["f0", "f1", "f2"], *rows])
    data = out.getvalue().encode()
    dialect: dict[str, Any] = {"delimiter": delimiter, "quote": quote, "features": texts(3)}
    found = read(data, **dialect)
    assert [list(row) for row in zip(*found.values(), strict=True)] == rows
    shuffled = read(data, **dialect, **order | {"drop_last": False})
    assert sorted(zip(*shuffled.values(), strict=True)) == sorted(map(tuple, rows))


def generated(seed: int, size: int, quoted: float) -> bytes:
    """Returns rows of three fields. The fraction `quoted` of the fields has quotes and may contain newlines."""
    draw = random.Random(seed)
    rows, total = [], 0
    while total < size:
        row = []
        for _ in range(3):
            text = "".join(draw.choices("abcdef, 0123é", k=draw.randint(0, 30)))
            if draw.random() < quoted:
                text = '"' + text + "\n" * draw.randint(0, 3) + '""' * draw.randint(0, 2) + text + '"'
            else:
                text = text.replace(",", "")
            row.append(text)
        rows.append(",".join(row))
        total += len(rows[-1]) + 1
    return ("\n".join(rows) + "\n").encode()


@pytest.mark.parametrize("quoted", [0, 0.01, 0.9])
def test_rows_of_a_file_scanned_by_several_threads(tmp_path: Path, quoted: float) -> None:
    """Threads scan regions of 8 MiB in pieces of 256 KiB, and rows cross the boundaries of both."""
    # The rows repeat ten times, so the boundaries fall at different places in them.
    once = generated(1, 2 << 20, quoted)
    path = tmp_path / "x.csv"
    path.write_bytes(once * 10)
    reader = fastpipe.read_csv(path, features=texts(3), header=["f0", "f1", "f2"], batch_size=5000)
    want = 10 * [row for row in csv.reader(io.StringIO(once.decode(), newline="")) if row]
    assert reader.num_rows == len(want)
    step = 0
    for batch in reader:
        columns = [oracle.rows(batch[f"f{i}"]) for i in range(3)]
        assert list(map(list, zip(*columns, strict=True))) == want[step : step + 5000]
        step += 5000
    assert step >= len(want)


@pytest.mark.parametrize("size", [100, 5 << 20])
def test_a_row_may_be_long(size: int) -> None:
    long = "x\n" * (size // 2)
    data = f'a,b\n1,"{long}"\n2,y\n'.encode()
    found = read(data, features={"a": DenseSpec((), "int64"), "b": DenseSpec((), "string")})
    assert found == {"a": [1, 2], "b": [long, "y"]}


def test_long_text_without_rows() -> None:
    """There is more text without rows between two rows than a chunk may contain."""
    filler = "\n" * (3 << 20) + "# no row\r\n" * 200_000
    data = f"{filler}a,b\n{filler}1,2\n{filler}3,4\n{filler}".encode()
    assert read(data, comment="#", shuffle=True, seed=1, epochs=1).keys() == {"a", "b"}
    assert read(data, comment="#") == {"a": [1, 3], "b": [2, 4]}


def test_bom_and_no_last_newline() -> None:
    assert read(b"\xef\xbb\xbfa,b\r\n1,2\r\n3,4") == {"a": [1, 3], "b": [2, 4]}
    assert read(b"\xef\xbb\xbf1,2", header=False) == {"f0": [1], "f1": [2]}
    assert read(b"a\n1\n\n2\n") == {"a": [1, 2]}
    assert read(b"a,b\n", features={"a": DenseSpec((), "int64")}) == {}


def test_files_have_columns_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,x\n2,y\n")
    (tmp_path / "2.csv").write_text("more,b,a\n.,z,3\n")
    with pytest.warns(fastpipe.errors.ColumnsLeftOutWarning, match=r"'more' \(file .*2\.csv\)"):
        assert read(tmp_path) == {"a": [1, 2, 3], "b": ["x", "y", "z"]}
    assert read(str(tmp_path / "*.csv"), columns=["b"]) == {"b": ["x", "y", "z"]}
    (tmp_path / "3.csv").write_text("a\n1\n")
    with pytest.raises(fastpipe.errors.SchemaError, match=r"no column \"b\".*3\.csv"):
        read(tmp_path)


# --- Numbers ---


def hard_numbers(seed: int, count: int) -> list[str]:
    """Returns decimals close to halfway between floats, and short, long, tiny and huge ones."""
    draw = random.Random(seed)
    out = [
        "0",
        "-0",
        "1e400",
        "-1e-400",
        "4.9e-324",
        "2.4703282292062327e-324",
        "1.7976931348623159e308",
        "9007199254740993",
    ]
    out += [
        "16777217",
        "1.17549435e-38",
        "7.0064923216240854e-46",
        "3.4028235677973366e38",
        ".5",
        "5.",
        "+7",
        "00012.500",
    ]
    while len(out) < count:
        bits = draw.getrandbits(64)
        value = struct.unpack("d", struct.pack("Q", bits))[0]
        if not math.isfinite(value):
            continue
        kind = draw.randrange(6)
        if kind == 0:
            out.append(repr(value))
        elif kind == 1:
            # Exactly halfway between two doubles, or one digit beside it.
            a = abs(value) if 1e-290 < abs(value) < 1e290 else draw.random()
            half = (float_exact(a) + float_exact(math.nextafter(a, math.inf))) / 2
            out.append(f"{half:e}" + draw.choice(["", ""]))
        elif kind == 2:
            out.append(f"{draw.uniform(-1e6, 1e6):.{draw.randint(0, 9)}f}")
        elif kind == 3:
            out.append("".join(draw.choices("0123456789", k=draw.randint(1, 40))) + "." + str(draw.getrandbits(60)))
        elif kind == 4:
            out.append(f"{draw.getrandbits(70)}e{draw.randint(-330, 310)}")
        else:
            out.append(str(draw.randint(-(10**9), 10**9)))
    return out


def float_exact(value: float) -> Any:
    from decimal import Context, Decimal

    return Context(prec=800).create_decimal(Decimal(value))


@pytest.mark.parametrize("seed", range(math.ceil(NUMBERS / 1_000_000)))
def test_floats_match_the_c_library(seed: int) -> None:
    """Runs in steps of a million numbers, because strings need much memory."""
    numbers = hard_numbers(seed, min(NUMBERS, 1_000_000))
    data = ("x\n" + "\n".join(numbers) + "\n").encode()
    features = {"x": DenseSpec((), "float64"), "y": DenseSpec((), "float32", field="x")}
    with fastpipe.read_csv(data, features=features, batch_size=4096) as reader:
        parts = [(batch["x"], batch["y"]) for batch in reader]
    doubles = np.array([libc.strtod(number.encode(), None) for number in numbers])
    singles = np.array([libc.strtof(number.encode(), None) for number in numbers], np.float32)
    assert (np.concatenate([x for x, _ in parts]).view(np.int64) == doubles.view(np.int64)).all()
    assert (np.concatenate([y for _, y in parts]).view(np.int32) == singles.view(np.int32)).all()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_integers_are_checked_for_their_range(dtype: str) -> None:
    limits = np.iinfo(dtype)
    features = {"x": DenseSpec((), dtype)}
    data = f"x,y\n{limits.min},\n {limits.max} ,\n+1,\n007,\n".encode()
    assert read(data, features=features) == {"x": [limits.min, limits.max, 1, 7]}
    for wrong in (limits.min - 1, limits.max + 1, 10**30):
        with pytest.raises(fastpipe.errors.ValueRangeError, match=f'"{wrong}" (doesn\'t fit|as) {dtype}'):
            read(f"x,y\n{wrong},\n".encode(), features=features)
    for wrong in ("1.0", "1e3", "x", "1 2", "--1", "0x10"):
        with pytest.raises(fastpipe.errors.ValueRangeError, match=f'cannot parse "{wrong}" as {dtype}'):
            read(f"x,y\n{wrong},\n".encode(), features=features)


def test_decimal_commas() -> None:
    data = b'a;b\n1,5;-0,25\n1234567,125;"3,5"\n12345678,5;,5\n'
    assert read(data, delimiter=";", decimal=",") == {"a": [1.5, 1234567.125, 12345678.5], "b": [-0.25, 3.5, 0.5]}
    with pytest.raises(fastpipe.errors.ValueRangeError, match=r'cannot parse "1\.5" as float64'):
        read(b"a;b\n1.5;2\n", delimiter=";", decimal=",", features={"a": DenseSpec((), "float64")})


def test_other_types() -> None:
    data = (
        b"b,d,t,h,y\ntrue,2024-02-29,2024-02-29T12:30:00.5Z,0.1,\xff\n"
        b"FALSE,1969-12-31,1969-12-31 23:59:59,65504,\n1,0001-01-01,2024-02-29,-2,ok\n"
    )
    features = {
        "b": DenseSpec((), "bool"),
        "d": DenseSpec((), "datetime64[D]"),
        "t": DenseSpec((), "datetime64[ms]"),
        "h": DenseSpec((), "float16"),
        "y": DenseSpec((), "bytes"),
    }
    with fastpipe.read_csv(data, features=features, batch_size=3) as reader:
        batch = next(iter(reader))
    assert batch["b"].tolist() == [True, False, True]
    assert (batch["d"] == np.array(["2024-02-29", "1969-12-31", "0001-01-01"], "datetime64[D]")).all()
    times = ["2024-02-29T12:30:00.500", "1969-12-31T23:59:59", "2024-02-29"]
    assert (batch["t"] == np.array(times, "datetime64[ms]")).all()
    assert batch["h"].tolist() == np.array([0.1, 65504, -2], np.float16).tolist()
    assert oracle.rows(batch["y"]) == [b"\xff", b"", b"ok"]


# --- Nulls ---


def test_nulls() -> None:
    data = b"x,s\n1,a\n,NA\nNA,\n-9,b\n"
    of: Callable[..., Any] = lambda **options: read(data, **options)  # noqa: E731
    assert of() == {"x": [1, None, None, -9], "s": ["a", "NA", "", "b"]}
    filled = {"x": DenseSpec((), "int32", fill=7), "s": DenseSpec((), "string", on_null="mask")}
    assert of(features=filled) == {"x": [1, 7, 7, -9], "s": ["a", None, None, "b"]}
    assert of(features=filled, null_values=["-9", "", "NA"])["x"] == [1, 7, 7, 7]
    floats = of(features={"x": DenseSpec((), "float64", fill=math.nan)})["x"]
    assert np.array_equal(floats, [1, math.nan, math.nan, -9], equal_nan=True)
    with pytest.raises(
        fastpipe.errors.NullValueError, match=r"feature 'x': the field is empty.*byte offset 8, record 1"
    ):
        of(features={"x": DenseSpec((), "int32")})
    with pytest.raises(fastpipe.errors.ValueRangeError, match='cannot parse "NA" as int32'):
        of(features={"x": DenseSpec((), "int32", fill=0)}, null_values=[""])


# --- Text as indices ---


def test_vocabularies_and_hashes() -> None:
    data = b'w,n\na,1\n"b ""x""",2\n,3\nNA,4\nz,5\n'
    keys = ["z", "a", 'b "x"', "", "NA"]
    vocabulary = fastpipe.VocabularySpec(keys, on_unknown="error", dtype="int8")
    features = {"w": vocabulary, "h": fastpipe.HashSpec(50, field="w"), "n": DenseSpec((), "int64")}
    reader = fastpipe.read_csv(data, features=features, batch_size=5)
    assert repr(reader.features["w"]) == 'fastpipe.DenseSpec((), "int8")'
    (batch,) = reader
    assert batch["w"].tolist() == [1, 2, 3, 4, 0]
    assert batch["w"].dtype == np.int8
    assert all(0 <= code < 50 for code in batch["h"].tolist())
    assert batch["n"].tolist() == [1, 2, 3, 4, 5]
    assert next(iter(pickle.loads(pickle.dumps(reader))))["w"].tolist() == batch["w"].tolist()
    of = lambda spec: next(iter(fastpipe.read_csv(data, features={"w": spec}, batch_size=5)))["w"]  # noqa: E731
    masked = of(fastpipe.VocabularySpec(keys, on_unknown="error", on_null="mask"))
    assert masked.valid.tolist() == [True, True, False, False, True]
    assert of(fastpipe.VocabularySpec(["a"], on_unknown="bucket", num_buckets=1, fill=9)).tolist() == [0, 1, 9, 9, 1]
    with pytest.raises(
        fastpipe.errors.ValueRangeError, match=r'feature \'w\': expected a key .* found the key "b.*record 1'
    ):
        of(fastpipe.VocabularySpec(["a"], on_unknown="error"))
    with pytest.raises(fastpipe.errors.SchemaError, match="each row has one key here"):
        of(fastpipe.VocabularySpec(["a"], on_unknown="drop"))


# --- Inference ---


@pytest.mark.parametrize(
    ("values", "spec"),
    [
        (["1", "-2"], DenseSpec((), "int64")),
        (["1", ""], DenseSpec((), "int64", on_null="mask")),
        (["1", "18446744073709551615"], DenseSpec((), "uint64")),
        (["1.5", "NA"], DenseSpec((), "float64", fill=math.nan)),
        (["true", "False"], DenseSpec((), "bool")),
        (["2024-01-01", "2024-12-31"], DenseSpec((), "datetime64[D]", on_null="fill")),
        (["2024-01-01 10:00:00", ""], DenseSpec((), "datetime64[us]", on_null="fill")),
        (["2024-01-01T10:00:00.123456789Z"], DenseSpec((), "datetime64[ns]", on_null="fill")),
        (["2024-01-02 03:04", "2024-01-02T03:05Z"], DenseSpec((), "datetime64[us]", on_null="fill")),
        (["2024-01-02 03:04", "2024-01-02 03:05:06.1234567891"], DenseSpec((), "string")),
        (["03:04", "12:30"], DenseSpec((), "string")),
        (["11/6/18", "25/6/18"], DenseSpec((), "string")),
        (["x", "1"], DenseSpec((), "string")),
        (["01234", "2"], DenseSpec((), "string")),
        (["1", "18446744073709551616"], DenseSpec((), "string")),
        (["1.5", "9007199254740993"], DenseSpec((), "string")),
        (["", "NA"], DenseSpec((), "float64", fill=math.nan)),
    ],
)
def test_types_are_inferred(values: list[str], spec: DenseSpec) -> None:
    data = ("x,more\n" + "".join(f"{value},.\n" for value in values)).encode()
    reader = fastpipe.read_csv(data, columns=["x"], batch_size=1)
    assert repr(reader.features["x"]) == repr(spec)
    assert len(list(reader)) == len(values)


def test_times_without_seconds() -> None:
    times = ["2024-01-02 03:04", "2024-01-02T04:04+01:00", "2024-01-02T03:04:00Z"]
    data = "t\n" + "\n".join(times) + "\n"
    for features in (None, {"t": DenseSpec((), "datetime64[s]")}):
        (batch,) = fastpipe.read_csv(data.encode(), features=features, batch_size=3)
        assert (batch["t"] == np.datetime64("2024-01-02T03:04")).all()
    with pytest.raises(fastpipe.errors.ValueRangeError, match='cannot parse "11/6/18" as a date'):
        read(b"t\n11/6/18\n", features={"t": DenseSpec((), "datetime64[D]")})


def test_columns_of_a_type_share_their_spec() -> None:
    """Making and checking a spec for each of 50,000 columns would take seconds."""
    names = [f"c{i}" for i in range(1000)]
    data = f"{','.join(names)}\n{','.join(['1.5'] * 500 + ['2'] * 500)}\n"
    features = fastpipe.read_csv(data.encode(), batch_size=1).features
    assert list(features) == names
    assert len({id(spec) for spec in features.values()}) == 2


def test_later_values_may_not_fit_the_inferred_type() -> None:
    rows = ["1"] * 4_000_000 + ["x"] + ["1"] * 8_000_000
    data = ("a,b\n" + "\n".join(f"{row},." for row in rows)).encode()
    reader = fastpipe.read_csv(data, batch_size=1 << 20)
    assert reader.features["a"] == DenseSpec((), "int64")
    with pytest.raises(fastpipe.errors.ValueRangeError, match='cannot parse "x" as int64') as caught:
        list(reader)
    assert (caught.value.record, caught.value.feature, caught.value.offset) == (4_000_000, "a", 4 + 4 * 4_000_000)


def test_unexpected_nulls() -> None:
    rows = ["1,1.5,2024-01-01,true"] * 2000
    names = "i,f,t,b\n"
    features = fastpipe.read_csv((names + "\n".join(rows) + "\n").encode(), batch_size=1000).features
    rows[750] = ",,,"
    data = (names + "\n".join(rows) + "\n").encode()
    reader = fastpipe.read_csv(data, features=features, batch_size=1000)
    with pytest.raises(fastpipe.errors.NullValueError, match=r"feature 'i': the field is empty.*record 750") as caught:
        next(iter(reader))
    # The error message suggests code that can be run.
    found = re.search(r"features=(\{.*\}) masks", str(caught.value))
    assert found is not None
    names = {"reader": reader, "fastpipe": fastpipe, "nan": math.nan}
    for name in "ib":
        features = eval(found[1].replace('"i"', f'"{name}"').replace("int64", str(reader.features[name].dtype)), names)
        reader = names["reader"] = fastpipe.read_csv(data, features=features, batch_size=1000)
    batch = next(iter(reader))
    assert np.isnan(batch["f"][750])
    assert np.isnat(batch["t"][750])
    assert not batch["i"].valid[750]
    assert not batch["b"].valid[750]
    assert batch["i"].valid.sum() == batch["b"].valid.sum() == 999


def test_columns_without_values_are_numbers(tmp_path: Path) -> None:
    """Later files may have values."""
    (tmp_path / "1.csv").write_text("a,b\n,1\n,2\n")
    assert np.isnan(read(tmp_path)["a"]).all()
    (tmp_path / "2.csv").write_text("a,b\n1.5,3\n")
    assert read(tmp_path)["a"][2] == 1.5
    features = fastpipe.read_csv(tmp_path / "1.csv", batch_size=1).features
    (tmp_path / "2.csv").write_text("a,b\nx,3\n")
    with pytest.raises(
        fastpipe.errors.ValueRangeError, match=r'cannot parse "x" as float64: .*"a": fastpipe.DenseSpec'
    ):
        read(tmp_path, features=features)


# --- Errors ---


@pytest.mark.parametrize(
    ("data", "options", "error", "match"),
    [
        (b"", {}, fastpipe.errors.MalformedFileError, "found no rows"),
        (
            b"a,b\n1,2\n3\n",
            {},
            fastpipe.errors.MalformedFileError,
            r"1 fields, but the file has 2 columns.*byte offset 8, record 1",
        ),
        (b"a,b\n1,2,3\n", {}, fastpipe.errors.MalformedFileError, r"3 fields.*record 0"),
        (b"a,b\n1,2\n\r3,4\n", {}, fastpipe.errors.MalformedFileError, r"a carriage return.*byte offset 8, record 1"),
        (b"a,b\n1,2\r3,4\n", {}, fastpipe.errors.MalformedFileError, r"a carriage return.*byte offset 7, record 0"),
        (b'a,b\n1,"2\n3,4\n', {}, fastpipe.errors.MalformedFileError, r"ends within quotes.*byte offset 4"),
        (
            b"a,b\n1,\xff\n",
            {},
            fastpipe.errors.MalformedFileError,
            r"feature 'b': .*isn't UTF-8.*byte offset 6, record 0",
        ),
        (b"a,\xff\n1,2\n", {}, fastpipe.errors.MalformedFileError, "name isn't UTF-8"),
        (b"a,a\n1,2\n", {}, fastpipe.errors.SchemaError, 'two columns are called "a"'),
        (b"a,b\n1,2\n", {"columns": ["c"]}, fastpipe.errors.SchemaError, 'no column "c".*it has "a", "b"'),
        (b"label,b\n1,2\n", {"columns": ["lable"]}, fastpipe.errors.SchemaError, 'did you mean "label"'),
        (b"\xff\xfea\x00", {}, fastpipe.errors.UnsupportedError, "UTF-16"),
        ("a,b\n1,2\n".encode("utf-16-be"), {}, fastpipe.errors.UnsupportedError, "iconv -f UTF-16BE"),
        ("a,b\n1,2\n".encode("utf-16-le"), {"header": False}, fastpipe.errors.UnsupportedError, "iconv -f UTF-16LE"),
        ("a,b\n1,2\n".encode("utf-32"), {}, fastpipe.errors.UnsupportedError, "UTF-32"),
        (b"a,b\r1,2\r", {}, fastpipe.errors.MalformedFileError, r"a carriage return.*`tr '\\r' '\\n'`.*byte offset 3"),
        (b"1,2\r3,4", {"header": ["a", "b"]}, fastpipe.errors.MalformedFileError, r"`tr '\\r' '\\n'`.*byte offset 3"),
        (b"\x1f\x8b....", {}, fastpipe.errors.MalformedFileError, "gzip"),
        (b"\x28\xb5\x2f\xfd...", {}, fastpipe.errors.MalformedFileError, "zstandard"),
        (b"Obj\x01...", {}, fastpipe.errors.UnsupportedError, "read_avro"),
        (
            b"a\n1\n",
            {"features": {"a": fastpipe.RaggedSpec((None,), "int64")}},
            fastpipe.errors.SchemaError,
            "one value",
        ),
        (b"a\n1\n", {"features": {"a": DenseSpec((2,), "int64")}}, fastpipe.errors.SchemaError, "one value"),
        (b"a\n1\n", {"features": {"a": DenseSpec((), "int64", scale=2)}}, fastpipe.errors.SchemaError, "decimals"),
        (b"a\n1\n", {"features": {"a": DenseSpec((), "timedelta64[s]")}}, fastpipe.errors.SchemaError, "durations"),
        (b"a\n1\n", {"delimiter": ",,"}, ValueError, "delimiter must be one ASCII character"),
        (b"a\n1\n", {"delimiter": '"'}, ValueError, "delimiter and quote are both"),
        (b"a\n1\n", {"quote": 3}, TypeError, "quote must be one character; got 3"),
        (b"a\n1\n", {"header": []}, ValueError, "header is empty"),
        (b"a\n1\n", {"header": ["a", "a"]}, ValueError, "header names 'a' twice"),
        (b"a\n1\n", {"null_values": "NA"}, TypeError, "null_values must be a list"),
        (b"a\n1\n", {"on_ragged": "drop"}, ValueError, "on_ragged must be"),
        (b"a\n1\n", {"index_cache": 3}, TypeError, "index_cache must be"),
    ],
)
def test_errors_name_location_and_cause(data: bytes, options: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        read(data, **options)
    with pytest.raises(error, match=match):
        read(data, shuffle=True, seed=1, **options)


def test_a_file_that_changes(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = [f"{i},{i}" for i in range(100_000)]
    path.write_text("a,b\n" + "\n".join(rows))
    reader = fastpipe.read_csv(path, batch_size=100, num_threads=1, prefetch=1)
    batches = iter(reader)
    next(batches)
    state = reader.state_dict()
    path.write_text("a,b\n" + "\n".join(rows[::-1]) + "\n1,2")
    with pytest.raises(fastpipe.errors.StorageError, match="the file changed"):
        list(batches)
    with pytest.raises(fastpipe.errors.StateError, match="cannot resume from this state"):
        fastpipe.read_csv(path, batch_size=100).load_state_dict(state)
    path.write_text("a,b\n" + "\n".join(rows))
    again = fastpipe.read_csv(path, batch_size=100)
    again.load_state_dict(state)
    assert next(iter(again))["a"][0] == 100


def test_rows_are_read_from_the_index(tmp_path: Path) -> None:
    path, cache = tmp_path / "x.csv", tmp_path / "cache"
    data = generated(5, 1 << 20, 0.2)
    path.write_bytes(data)
    os.utime(path, (1e9, 1e9))
    options: dict[str, Any] = {"header": ["f0", "f1", "f2"], "features": texts(3), "index_cache": cache}
    first = read(path, **options)
    (entry,) = cache.iterdir()
    assert entry.stat().st_size < len(data) / 1000
    assert read(path, **options) == first == read(path, header=["f0", "f1", "f2"], features=texts(3))
    # Options that affect row boundaries have a separate entry.
    read(path, **options, on_ragged="skip")
    assert len(list(cache.iterdir())) == 2
    entry.write_bytes(entry.read_bytes()[:-9])
    assert read(path, **options) == first


def test_a_file_of_more_than_4_gib(tmp_path: Path) -> None:
    """Offsets exceed 2^32. Most of the file is holes within comment lines."""
    path = tmp_path / "x.csv"
    with path.open("wb") as file:
        file.write(b"a,b\n1,x\n")
        for _ in range(2050):
            file.write(b"#")
            file.seek(2 << 20, os.SEEK_CUR)
            file.write(b"\n")
        file.write(b"2,y\n3,z\n4,?")
    assert path.stat().st_size > 4 << 30
    os.utime(path, (1e9, 1e9))
    cached: dict[str, Any] = {"comment": "#", "index_cache": tmp_path / "cache"}
    features = {"a": DenseSpec((), "int64"), "b": DenseSpec((), "string")}
    assert read(path, features=features, **cached) == {"a": [1, 2, 3, 4], "b": ["x", "y", "z", "?"]}
    with pytest.raises(fastpipe.errors.ValueRangeError, match=rf"byte offset {path.stat().st_size - 1}, record 3"):
        read(path, **cached, features={"b": DenseSpec((), "int64", fill=0)}, null_values=["x", "y", "z"])
    hole = tmp_path / "hole.csv"
    with hole.open("wb") as other:
        other.write(b"a,b\n1,")
        other.truncate(1 << 30)
    with pytest.raises(fastpipe.errors.LimitError, match="more than 268435456 bytes"):
        read(hole, features=features)


def test_locate_returns_rows_of_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("x\n" + "\n".join(map(str, range(5))))
    reader = fastpipe.read_csv(tmp_path, batch_size=3)
    assert reader.locate(2, 1, epoch=0) == fastpipe.csv.CsvLocation(file=str(tmp_path / "b.csv"), row=2)
