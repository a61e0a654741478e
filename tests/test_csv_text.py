"""Text columns in samples and on devices: as text in host memory, or as indices on any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import fastpipe.cuda
from fastpipe import DenseSpec, HashSpec, VocabularySpec
from fastpipe.errors import NullValueError, SchemaError, UnsupportedError

ROWS = 4000
CITIES = ["Graz", 'Wien, "Neubau"', "Łódź", ""]
VOCABULARY = VocabularySpec(CITIES, on_unknown="error")
METHODS = ["exact", "block", "buffered", "estimate", "stream"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import csv

    path = tmp_path_factory.mktemp("text") / "x.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["i", "city", "code"])
        writer.writerows([i, CITIES[i % 4], f"{i:05}"] for i in range(ROWS))
    return path


def draw(path: Path, method: Any, **options: Any) -> fastpipe.csv.CsvSample:
    return fastpipe.csv.sample_csv(path, 300, method=method, seed=3, **options)


def fill(source: Any, devices: Any = ("cpu", "cpu"), **options: Any) -> fastpipe.cuda.Fill:
    return fastpipe.cuda.fill(source, devices, **{"seed": 3, "rows": 300, "memory_limit": "64MB"} | options)


@pytest.mark.parametrize("method", METHODS)
def test_samples_of_text(path: Path, method: str) -> None:
    drawn = draw(path, method, dtype="string", order="F")
    assert drawn.columns == ["i", "city", "code"]
    assert drawn.values.flags.f_contiguous
    for i, city, code in drawn.values.tolist():
        assert (city, code) == (CITIES[int(i) % 4], f"{int(i):05}")
    assert len(set(drawn.values[:, 0])) == 300
    assert drawn.to_pandas()["code"].tolist() == drawn.to_arrow()["code"].to_pylist() == drawn.values[:, 2].tolist()
    # Text has no variance.
    assert drawn.design_effect is None or np.isnan(drawn.design_effect).all()
    pytest.importorskip("torch")
    with pytest.raises(UnsupportedError, match="a tensor can't hold text: read it as indices with a HashSpec or Vocab"):
        drawn.to_torch()


@pytest.mark.parametrize("method", METHODS)
def test_samples_of_indices(path: Path, method: str) -> None:
    overrides = {"city": VOCABULARY, "code": HashSpec(50), "i": DenseSpec((), "int32")}
    drawn = draw(path, method, overrides=overrides)
    rows = drawn.values[:, 0].astype(int)
    assert (drawn.values[:, 1] == rows % 4).all()
    reader = fastpipe.read_csv(path, features={"code": HashSpec(50)}, batch_size=ROWS)
    assert (drawn.values[:, 2] == next(iter(reader))["code"][rows]).all()
    chosen = draw(path, method, columns=["city", "i"], overrides={"city": VOCABULARY}, dtype="int16")
    assert chosen.values.dtype == np.int16
    assert (chosen.values[:, 0] == chosen.values[:, 1] % 4).all()


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("method", ["exact", "block", "buffered"])
def test_devices_of_this_process_hold_text(path: Path, method: str, devices: int) -> None:
    filled = fill(path, ["cpu"] * devices, method=method, dtype="string", order="F")
    arrays, seen = [device.values for device in filled], []
    for _ in range(3):
        for array, device in zip(arrays, filled, strict=True):
            assert device.values is array
            assert all((city, code) == (CITIES[int(i) % 4], f"{int(i):05}") for i, city, code in array.tolist())
            seen += array[:, 0].tolist()
        filled.refill()
    assert len(set(seen)) == len(seen) == 900 * devices
    assert filled.design_effect is None
    train, test = filled[0].split(0.5)
    assert len(filled[0].values[train]) == len(filled[0].values[test]) == 150
    assert "overlapped" in filled.explain()


@pytest.mark.parametrize("method", ["exact", "block", "buffered"])
def test_devices_hold_indices(path: Path, method: str) -> None:
    overrides = {"city": VOCABULARY, "code": HashSpec(50)}
    filled = fill(path, method=method, overrides=overrides)
    for device in filled:
        assert device.values.dtype == np.float32
        assert (device.values[:, 1] == device.values[:, 0] % 4).all()
    if method != "buffered":
        reader = fastpipe.read_csv(path, overrides=overrides, batch_size=100)
        assert all((a.values == b.values).all() for a, b in zip(filled, fill(reader, method=method), strict=True))


def test_readers_of_text(path: Path) -> None:
    reader = fastpipe.read_csv(path, batch_size=100)
    filled = fill(reader, dtype="string", columns=["city"])
    assert filled[1].values[:, 0].tolist() == [CITIES[row % 4] for row in filled[1].rows]
    masked = {"city": DenseSpec((), "string", on_null="mask")}
    filled = fill(fastpipe.read_csv(path, features=masked, batch_size=100), dtype="string")
    assert filled[0].values[:, 0].tolist() == [CITIES[row % 4] or None for row in filled[0].rows]
    with pytest.raises(SchemaError, match=r"holds only text, but 'i' is .*: select others with columns="):
        fill(reader, dtype="string")
    with pytest.raises(SchemaError, match=r"'city' is .*: select others .* as indices with a VocabularySpec or Ha"):
        fill(reader)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, SchemaError, r"columns 'city', 'code'.*overrides=\{'city': fastpipe.HashSpec\(1000\)\} or a Vocabulary"),
        ({"overrides": {"city": VOCABULARY}}, SchemaError, "can't hold the columns 'code': name"),
        ({"overrides": {"town": VOCABULARY}}, SchemaError, "overrides: there is no column 'town'"),
        ({"columns": ["i"], "overrides": {"city": VOCABULARY}}, SchemaError, "columns= doesn't select a column 'city'"),
        ({"overrides": {"city": DenseSpec((), "string")}}, SchemaError, "the array holds numbers, but 'city' is"),
        ({"overrides": {"i": DenseSpec((), "datetime64[s]")}}, SchemaError, "the array holds numbers, but 'i' is"),
        ({"dtype": "string", "overrides": {"city": VOCABULARY}}, SchemaError, "reads all columns as text, but 'city'"),
        ({"overrides": {"city": HashSpec(2**24 + 2)}}, SchemaError, "float32 can't hold the indices of 'city', up to"),
        ({"dtype": "int8", "overrides": {"city": HashSpec(129)}}, SchemaError, "int8 can't hold the indices of 'city'"),
        ({"overrides": [VOCABULARY]}, TypeError, "overrides must be a dict from name to spec"),
    ],
)
@pytest.mark.parametrize("method", ["exact", "buffered"])
def test_columns_that_do_not_fit_an_array(path: Path, method: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        draw(path, method, **options)
    with pytest.raises(error, match=match):
        fill(path, method=method, **options)


def test_columns_that_do_not_fit_a_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        name = "cuda:0"

    monkeypatch.setattr(fastpipe.cuda._fill._fill, "_gpu_device", lambda *_: Gpu())
    for devices, options in ((["cuda:0"], {}), (["cpu"], {"framework": "torch"})):
        with pytest.raises(UnsupportedError, match="can't hold text: read it as indices with a VocabularySpec or"):
            fill(path, devices, dtype="string", **options)
    with pytest.raises(ValueError, match='the size of text is unknown: with dtype="string", pass rows='):
        fill(path, dtype="string", rows=None, device_memory="1GB")
    with pytest.raises(ValueError, match='dtype must be numeric or "string"'):
        fill(path, dtype="bytes")
    with pytest.raises(ValueError, match='dtype must be numeric or "string"; got bytes'):
        draw(path, "exact", dtype="bytes")
    with pytest.raises(ValueError, match="overrides and the dialect are for files only"):
        fill(fastpipe.read_csv(path, batch_size=1), overrides={"city": VOCABULARY})


def test_nulls_of_lookups(path: Path) -> None:
    spec = HashSpec(50, on_null="mask")
    drawn = draw(path, "exact", columns=["i", "city"], overrides={"city": spec})
    assert (np.isnan(drawn.values[:, 1]) == (drawn.values[:, 0] % 4 == 3)).all()
    with pytest.raises(NullValueError, match="'city' is null in a row, which int64 cannot represent"):
        draw(path, "exact", columns=["i", "city"], overrides={"city": spec}, dtype="int64")
