"""Codes of dictionaries: one dictionary for all chunks of a table, or for all units as the source declares."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
from arrow_tables import as_lists
from fastpipe import DenseSpec, RaggedSpec, SparseSpec

KEYS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
TEXTS = (pa.string(), pa.large_string(), pa.string_view())


class Slices:
    """Chunks of a table as units, each with a separate dictionary."""

    def __init__(self, table: pa.Table, dictionaries: Any = None) -> None:
        self.parts, self.schema = table.to_batches(), table.schema
        self.rows = [part.num_rows for part in self.parts]
        if dictionaries is not None:
            self.dictionaries = dictionaries

    def read(self, unit: int) -> Any:
        return self.parts[unit]

    def fingerprint(self) -> str:
        return "slices"


@st.composite
def chunked(draw: st.DrawFn) -> tuple[pa.Table, list[str | None], list[str]]:
    """A column of chunks with separate dictionaries, its values, and the values of all dictionaries."""
    kind = pa.dictionary(draw(st.sampled_from(KEYS)), draw(st.sampled_from(TEXTS)))
    chunks, values, seen = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        # A dictionary value may be duplicated, null or unused.
        texts = draw(st.lists(st.none() | st.sampled_from("abcdef") | st.text(max_size=20), min_size=1, max_size=6))
        keys = draw(st.lists(st.none() | st.integers(0, len(texts) - 1), min_size=1, max_size=8))
        chunk = pa.DictionaryArray.from_arrays(pa.array(keys, kind.index_type), pa.array(texts, kind.value_type))
        chunks.append(chunk)
        values += [None if key is None else texts[key] for key in keys]
        seen += [text for text in texts if text is not None]
    row = pa.chunked_array([pa.array([0] * len(chunk)) for chunk in chunks])
    return pa.table({"row": row, "c": pa.chunked_array(chunks, kind)}), values, list(dict.fromkeys(seen))


def decoded(codes: Any, symbols: list[str]) -> Any:
    if isinstance(codes, list):
        return [decoded(code, symbols) for code in codes]
    return None if codes is None else symbols[codes]


@given(column=chunked(), dtype=st.sampled_from(("int8", "uint16", "int32", "int64")), batch_size=st.integers(1, 9))
def test_codes_of_a_table_match_the_values(
    column: tuple[pa.Table, list[str | None], list[str]], dtype: str, batch_size: int
) -> None:
    table, values, symbols = column
    masked = {"c": DenseSpec((), dtype, on_null="mask")}
    reader = fastpipe.from_arrow(table, features=masked, batch_size=batch_size)
    assert reader.categories == {"c": symbols}
    batches = [batch["c"] for batch in reader]
    assert all(batch.values.dtype == dtype for batch in batches)
    assert [decoded(code, symbols) for batch in batches for code in as_lists(batch)] == values
    again = pickle.loads(pickle.dumps(reader))
    assert again.categories == reader.categories
    filled = fastpipe.from_arrow(table, features={"c": DenseSpec((), dtype, fill=99)}, batch_size=batch_size)
    expected = [99 if value is None else symbols.index(value) for value in values]
    assert [code for batch in filled for code in batch["c"].tolist()] == expected


@given(column=chunked(), more=st.integers(0, 2), missing=st.booleans())
def test_codes_of_units_match_the_declared_dictionary(
    column: tuple[pa.Table, list[str | None], list[str]], more: int, missing: bool
) -> None:
    table, values, symbols = column
    known = [str(i) * 30 for i in range(more)] + symbols[::-1]
    features = {"c": DenseSpec((), "int16", on_null="mask")}
    gone = known.pop() if missing and symbols else None
    reader = fastpipe.read_units(Slices(table, {"c": known, "other": []}), features=features, batch_size=3)
    assert reader.categories == {"c": known}
    if gone is None or gone not in values:
        assert [decoded(code, known) for batch in reader for code in as_lists(batch["c"])] == values
    else:
        with pytest.raises(fastpipe.errors.ValueRangeError, match=r"feature 'c': .* is not among the values") as error:
            list(reader)
        assert error.value.reason.startswith(f"'{gone}' is not among")


NAMES = pa.array(["AT", "DE", "AT", None]).dictionary_encode()


@pytest.mark.parametrize(
    ("column", "name", "spec", "expected"),
    [
        (
            pa.ListArray.from_arrays(pa.array([0, 2, 2, 3]), NAMES[:3]),
            "c",
            RaggedSpec((None,), "int32"),
            [["AT", "DE"], [], ["AT"]],
        ),
        (
            pa.FixedSizeListArray.from_arrays(NAMES, 2),
            "c",
            DenseSpec((2,), "uint8", on_null="mask"),
            [["AT", "DE"], ["AT", None]],
        ),
        (pa.StructArray.from_arrays([NAMES], ["d"]), "c.d", DenseSpec((), "int64", on_null="mask"), NAMES.to_pylist()),
        (
            pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 7, 8], pa.int16()), NAMES),
            "c",
            DenseSpec((), "int8", on_null="mask"),
            ["AT", "AT", "DE", "AT", "AT", "AT", "AT", None],
        ),
    ],
    ids=["lists", "fixed lists", "struct", "run ends"],
)
@pytest.mark.parametrize("source", ["arrow", "units"])
def test_codes_at_any_depth(source: str, column: pa.Array, name: str, spec: Any, expected: list[Any]) -> None:
    table = pa.table({"c": column})
    if source == "arrow":
        reader = fastpipe.from_arrow(table, features={"x": spec.__class__(**_options(spec, name))}, batch_size=9)
    else:
        units = Slices(table, {name: ["DE", "AT"]})
        reader = fastpipe.read_units(units, features={"x": spec.__class__(**_options(spec, name))}, batch_size=9)
    (batch,) = reader
    assert decoded(as_lists(batch["x"]), reader.categories["x"]) == expected
    assert reader.categories == {"x": ["AT", "DE"] if source == "arrow" else ["DE", "AT"]}


def _options(spec: Any, field: str) -> dict[str, Any]:
    return {"shape": spec.shape, "dtype": spec.dtype, "on_null": spec.on_null, "field": field}


def test_codes_as_sparse_values() -> None:
    offsets = pa.array([0, 2, 3])
    indices = pa.ListArray.from_arrays(offsets, pa.array([1, 4, 0]).dictionary_encode())
    column = pa.StructArray.from_arrays([indices, pa.ListArray.from_arrays(offsets, NAMES[:3])], ["indices", "values"])
    reader = fastpipe.from_arrow(pa.table({"s": column}), features={"s": SparseSpec((5,), "int8")}, batch_size=2)
    (batch,) = reader
    assert reader.categories == {"s": ["AT", "DE"]}
    assert (batch["s"].values.tolist(), batch["s"].indices.tolist()) == ([0, 1, 0], [[0, 1], [0, 4], [1, 0]])


def test_dictionaries_are_text_by_default_and_numbers_stay_numbers() -> None:
    table = pa.table({"c": NAMES, "n": pa.array([7, 5, 7, 7]).dictionary_encode()})
    reader = fastpipe.from_arrow(table, batch_size=4)
    (batch,) = reader
    assert (as_lists(batch["c"]), batch["n"].tolist()) == (["AT", "DE", "AT", None], [7, 5, 7, 7])
    assert reader.categories == {}
    reader = fastpipe.read_units(Slices(table), features={"n": DenseSpec((), "int8")}, batch_size=4)
    assert next(iter(reader))["n"].tolist() == [7, 5, 7, 7]
    assert reader.categories == {}


@pytest.mark.parametrize("source", ["units", "parquet", "arrow file"])
def test_units_without_a_declared_dictionary_have_no_codes(source: str, tmp_path: Path) -> None:
    table, features = pa.table({"c": NAMES[:3]}), {"c": DenseSpec((), "int32")}
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    pa.feather.write_feather(table, tmp_path / "a.arrow")
    read: dict[str, Callable[[], Any]] = {
        "units": lambda: fastpipe.read_units(Slices(table), features=features, batch_size=4),
        "parquet": lambda: fastpipe.read_parquet(tmp_path / "a.parquet", features=features, batch_size=4),
        "arrow file": lambda: fastpipe.read_arrow(tmp_path / "a.arrow", features=features, batch_size=4),
    }
    with pytest.raises(
        fastpipe.errors.SchemaError, match=r"feature 'c': units may differ .* `dictionaries` .*\"string\""
    ):
        read[source]()


def test_unsupported_codes_are_named() -> None:
    table = pa.table({"c": pa.array([str(i) for i in range(200)]).dictionary_encode()})
    with pytest.raises(
        fastpipe.errors.SchemaError, match="'c': codes of 200 values don't fit int8; request a wider integer"
    ):
        fastpipe.from_arrow(table, features={"c": DenseSpec((), "int8")}, batch_size=4)
    with pytest.raises(
        fastpipe.errors.SchemaError, match=r"don't fit float32; request .*, or an integer dtype for codes"
    ):
        fastpipe.from_arrow(table, features={"c": DenseSpec((), "float32")}, batch_size=4)
    with pytest.raises(fastpipe.errors.SchemaError, match=r'don\'t fit int8; request "string" or "bytes"; features='):
        fastpipe.from_arrow(pa.table({"c": ["a"]}), features={"c": DenseSpec((), "int8")}, batch_size=4)
    for listed, error, match in [
        ([("c", ["a"])], TypeError, "units.dictionaries must map columns to lists of their values"),
        ({"c": "ab"}, TypeError, "must map columns to lists"),
        ({"c": [1]}, TypeError, "must map columns to lists"),
        ({3: ["a"]}, TypeError, "must map columns to lists"),
        ({"c": ["a", "b", "a"]}, fastpipe.errors.SchemaError, "feature 'c': `dictionaries` lists 'a' twice"),
    ]:
        with pytest.raises(error, match=match):
            fastpipe.read_units(Slices(table, listed), features={"c": DenseSpec((), "int16")}, batch_size=4)


@pytest.mark.parametrize("kind", ["Categorical", "Enum"])
def test_categories_of_polars(kind: str) -> None:
    pl = pytest.importorskip("polars")
    dtype = pl.Categorical() if kind == "Categorical" else pl.Enum(["low", "middle", "high"])
    frame = pl.DataFrame({"c": pl.Series(["high", None, "low", "high"], dtype=dtype)})
    reader = fastpipe.from_arrow(frame, features={"c": DenseSpec((), "int32", on_null="mask")}, batch_size=4)
    (batch,) = reader
    assert decoded(as_lists(batch["c"]), reader.categories["c"]) == ["high", None, "low", "high"]
    if kind == "Enum":
        assert reader.categories == {"c": ["low", "middle", "high"]}
        assert as_lists(batch["c"]) == [2, None, 0, 2]


def test_categories_of_pandas() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"c": pd.Categorical(["high", None, "low"], categories=["low", "middle", "high"])})
    reader = fastpipe.from_arrow(frame, features={"c": DenseSpec((), "int8", fill=-1)}, batch_size=4)
    assert next(iter(reader))["c"].tolist() == [2, -1, 0]
    assert reader.categories == {"c": ["low", "middle", "high"]}
