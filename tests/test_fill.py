"""Devices filled with random rows: host memory, and GPU frameworks over host memory."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import fastpipe.cuda
import plain_cupy
from fastpipe._interop.memory import aligned
from fastpipe.csv._drawing import BlockVariance
from fastpipe.cuda._fill._devices import HostDevice
from fastpipe.cuda._fill._rows import BlockRows, ExactRows
from fastpipe.errors import NullValueError, OutOfMemoryError, SchemaError

torch = pytest.importorskip("torch")

ROWS, COLUMNS = 30_000, 4


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, table: np.ndarray) -> Path:
    path = tmp_path_factory.mktemp("fill") / "rows.csv"
    np.savetxt(path, table, fmt="%.9g", delimiter=",", header="a,b,c,d", comments="")
    return path


def fill(source: Any, devices: Any = ("cpu", "cpu"), **options: Any) -> fastpipe.cuda.Fill:
    return fastpipe.cuda.fill(source, devices, **{"seed": 5, "memory_limit": "64MB"} | options)


def design_effect(values: np.ndarray, units: np.ndarray) -> list[float]:
    """Returns the published formula: the variance of each column over units, relative to simple random sampling."""
    effects = []
    for column in values.T.astype(float):
        there = ~np.isnan(column)
        found, of = column[there], units[there]
        deviations = [(found[of == unit] - found.mean()).sum() for unit in np.unique(of)]
        count, variance = len(deviations), found.var(ddof=1)
        effects.append(np.sum(np.square(deviations)) * count / (count - 1) / len(found) / (variance or np.nan))
    return effects


def lanes() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("fastpipe-fill", "fastpipe-draw"))
    ]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("rows", [1, 700, 9_000])
@pytest.mark.parametrize("buffer", [1_000, 32 << 20])
def test_devices_hold_the_parts_of_a_sample(
    path: Path, table: np.ndarray, order: Any, devices: int, rows: int, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastpipe.cuda._fill._fill, "_LARGEST_BUFFER", buffer)
    filled = fill(path, ["cpu"] * devices, rows=rows, order=order, num_threads=2)
    assert (len(filled), filled.num_rows, filled.seed, filled.refills) == (devices, [rows] * devices, 5, 0)
    for part, device in enumerate(filled):
        drawn = fastpipe.csv.sample_csv(path, rows, seed=5, part=part)
        assert (device.rows == drawn.rows).all()
        assert device.values.dtype == np.float32
        assert (device.values == table[device.rows]).all()
        assert device.values.flags[f"{order}_CONTIGUOUS"]
        assert (device.device, device.columns, len(device)) == ("cpu", ["a", "b", "c", "d"], rows)
    assert filled.design_effect is None
    assert "overlapped with reading" in filled.explain()
    assert not lanes()


def test_refills_have_other_rows_until_there_are_none(path: Path, table: np.ndarray) -> None:
    filled = fill(path, rows=7_000)
    arrays = [device.values for device in filled]
    seen = [np.concatenate([device.rows for device in filled])]
    filled.refill()
    seen.append(np.concatenate([device.rows for device in filled]))
    assert len(np.unique(np.concatenate(seen))) == 28_000
    for device, array in zip(filled, arrays, strict=True):
        assert device.values is array
        assert (array == table[device.rows]).all()
    with pytest.raises(
        ValueError, match="7000 rows for each of 2 devices after 2 refills of the same size are more than"
    ):
        filled.refill()
    assert filled.refills == 1
    assert (arrays[1] == table[filled[1].rows]).all()


def test_refills_may_draw_from_all_rows(path: Path, table: np.ndarray) -> None:
    filled = fill(path, rows=7_000, replace=True)
    seen = []
    for refill in range(4):
        if refill:
            filled.refill()
        rows = [device.rows for device in filled]
        assert len(np.unique(np.concatenate(rows))) == 14_000
        assert all((device.values == table[device.rows]).all() for device in filled)
        seen.append(set(rows[0].tolist()))
    # Each fill draws 7,000 of 30,000 rows, so 23 % are drawn again, within five standard deviations.
    assert abs(len(seen[0] & seen[1]) - 7_000 * 7 / 30) < 5 * np.sqrt(7_000 * 0.233 * 0.767)
    assert fill(path, rows=7_000, replace=True)[0].rows.tolist() == sorted(seen[0])


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_blocks_contribute_a_share_of_their_rows(path: Path, table: np.ndarray, share: float) -> None:
    filled = fill(path, rows=2_000, method="block", share=share)
    rows = [device.rows for device in filled]
    together = np.sort(np.concatenate(rows))
    assert len(np.unique(together)) == 4_000
    assert all((device.values == table[device.rows]).all() for device in filled)
    units = filled._source._selection.unit_of(together)  # type: ignore[attr-defined]
    counts = fastpipe.read_csv(path, batch_size=1)._data.handle.unit_rows()
    taken = np.bincount(units, minlength=len(counts))
    assert (taken <= np.ceil(counts * share)).all()
    # The drawn range begins and ends within a unit. In all other units the fraction is rounded up or down.
    assert (taken[taken > 0] >= np.floor(counts * share)[taken > 0]).sum() >= (taken > 0).sum() - 2
    assert filled.design_effect is not None
    np.testing.assert_allclose(filled.design_effect, design_effect(table[together], units), rtol=1e-6)
    # The device of a row does not depend on the row's position.
    assert abs(np.mean(rows[0]) - np.mean(rows[1])) < 5 * np.std(together) * np.sqrt(2 / 2_000)


def test_refills_of_blocks(path: Path) -> None:
    filled = fill(path, ["cpu"], rows=3_000, method="block")
    seen = set(filled[0].rows.tolist())
    filled.refill()
    again = filled[0].rows
    assert not seen & set(again.tolist())
    seen |= set(again.tolist())
    for _ in range(8):
        filled.refill()
        seen |= set(filled[0].rows.tolist())
    assert len(seen) == ROWS
    with pytest.raises(ValueError, match="refills of the same size are more than the 30000 rows available; with repl"):
        filled.refill()
    other = fill(path, ["cpu"], rows=15_000, method="block", replace=True)
    first = set(other[0].rows.tolist())
    other.refill()
    assert first != set(other[0].rows.tolist())


def test_memory_does_not_change_lists_of_rows() -> None:
    exact = ExactRows(100_000, [20_000] * 3, 9, replace=False)
    counts = np.random.default_rng(1).integers(0, 700, 300).astype(np.uint32)
    blocks = BlockRows(counts, [6_000] * 3, 9, 0.4, replace=False)
    for rows, refill in ((exact, 0), (blocks, 0), (blocks, 1)):
        whole = list(rows.chunks(refill, 1 << 40))
        pieces = list(rows.chunks(refill, 100_000))
        assert len(whole) == 1
        assert len(pieces) > 10
        assert (np.concatenate([piece.rows for piece in pieces]) == whole[0].rows).all()
        assert (np.concatenate([piece.devices for piece in pieces]) == whole[0].devices).all()
        assert (np.diff(whole[0].rows) > 0).all()
        assert (np.bincount(whole[0].devices) == len(whole[0].rows) / 3).all()
        for device in range(3):
            assert (rows.of(refill, device) == whole[0].rows[whole[0].devices == device]).all()


def test_little_memory_makes_many_passes_over_ranges(
    path: Path, table: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = fill(path, rows=12_000, memory_limit=16 << 20)
    monkeypatch.setattr(fastpipe.cuda._fill._sources, "_PARTS", 400)
    again = fill(path, rows=12_000, memory_limit=16 << 20)
    assert all((one.values == other.values).all() for one, other in zip(filled, again, strict=True))
    assert (again[1].values == table[again[1].rows]).all()


@pytest.mark.parametrize("size", [0.1, 0.35])
def test_as_many_rows_as_fit(path: Path, size: float) -> None:
    filled = fill(path, device_memory=1_000_000, occupancy=size)
    assert filled.num_rows == [min(int(size * 1_000_000 / 16), ROWS // 2)] * 2
    assert fill(path, device_memory="1TB").num_rows == [ROWS // 2] * 2
    assert fill(path, device_memory="1TB", method="block").num_rows == [ROWS // 2] * 2
    assert fill(path, device_memory="1TB", method="block", share=0.3).num_rows == [ROWS * 0.3 // 2] * 2


def test_readers_of_other_sources(table: np.ndarray) -> None:
    arrays = {
        "x": table[:, :2],
        "i": np.arange(ROWS),
        "flag": np.arange(ROWS) % 2 == 0,
        "day": np.zeros(ROWS, "datetime64[D]"),
    }
    reader = fastpipe.from_arrays(arrays, batch_size=100, drop_last=True, epochs=3, shuffle=True)
    # The order does not affect which rows are drawn.
    plain = fastpipe.from_arrays(arrays, batch_size=100)
    filled = fill(reader, rows=5_001, columns=["i", "x", "flag"], dtype="float64")
    for part, device in enumerate(filled):
        rows = device.rows
        assert (
            rows.tolist() == fastpipe._reader.sampling.rows_of_sample(plain.sample(5_001, seed=5, part=part)).tolist()
        )
        assert device.columns == ["i", "x[0]", "x[1]", "flag"]
        expected = np.column_stack([rows, table[rows, :2], rows % 2 == 0])
        assert (device.values == expected).all()
    assert (
        fill(reader, ["cpu"], rows=10, columns=["i"], dtype="int64")[0].values[:, 0]
        == fill(reader, ["cpu"], rows=10, columns=["i"])[0].rows
    ).all()
    with pytest.raises(SchemaError, match="only numbers can be filled in, but 'day' is"):
        fill(reader, rows=10)
    with pytest.raises(SchemaError, match="'i' is int64, which int32 cannot represent"):
        fill(reader, rows=10, columns=["i"], dtype="int32")
    with pytest.raises(SchemaError, match="'x' is float32, which int64 cannot represent"):
        fill(reader, rows=10, columns=["x"], dtype="int64")
    with pytest.raises(SchemaError, match="unknown feature 'y'; the features are 'x', 'i'"):
        fill(reader, rows=10, columns=["y"])
    with pytest.raises(ValueError, match="columns is empty"):
        fill(reader, rows=10, columns=[])
    with pytest.raises(ValueError, match="are for files only"):
        fill(reader, rows=10, num_threads=2)
    with pytest.raises(ValueError, match="omit rank and world_size"):
        fill(fastpipe.from_arrays({"i": np.arange(9)}, batch_size=3, world_size=3, rank=0), rows=1)


def test_nulls(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n" + "".join(f"{i},{'' if i % 3 == 0 else i}\n" for i in range(300)))
    drawn = fill(path, ["cpu"], rows=200)[0]
    expected = np.where(drawn.rows % 3 == 0, np.nan, drawn.rows)
    np.testing.assert_array_equal(drawn.values, np.column_stack([drawn.rows, expected]).astype(np.float32))
    reader = fastpipe.read_csv(path, batch_size=10)
    assert reader.features["b"].on_null == "mask"
    again = fill(reader, ["cpu"], rows=200)[0]
    np.testing.assert_array_equal(again.values, drawn.values)
    with pytest.raises(NullValueError, match="'b' is null in a row, which int64 cannot represent"):
        fill(reader, rows=100, dtype="int64")
    assert not lanes()
    with pytest.raises(fastpipe.FastpipeError, match=r"rows\.csv"):
        fill(path, rows=100, dtype="int64")


def test_folds_and_splits_divide_rows(path: Path) -> None:
    device = fill(path, ["cpu"], rows=1_003)[0]
    folds = list(device.folds(5, seed=1))
    assert [len(test) for _, test in folds] == [200, 201, 200, 201, 201]
    assert sorted(np.concatenate([test for _, test in folds]).tolist()) == list(range(1_003))
    for train, test in folds:
        assert train.dtype == test.dtype == np.int64
        assert sorted(np.concatenate([train, test]).tolist()) == list(range(1_003))
        assert (np.diff(train) > 0).all()
        assert device.values[test].shape == (len(test), COLUMNS)
    same = list(fill(path, ["cpu"], rows=1_003, seed=8)[0].folds(5, seed=1))
    assert all(
        (a == b).all() for pair, other in zip(folds, same, strict=True) for a, b in zip(pair, other, strict=True)
    )
    assert folds[0][1].tolist() != next(device.folds(5, seed=2))[1].tolist()
    train, test = device.split(0.8, seed=3)
    assert (len(train), len(test)) == (802, 201)
    assert sorted(np.concatenate([train, test]).tolist()) == list(range(1_003))
    assert [len(part) for part in device.split(1e-9)] == [1, 1_002]
    boot = device.bootstrap(seed=4)
    assert len(boot) == 1_003
    assert 0 <= boot.min() <= boot.max() < 1_003
    # The expected number of rows drawn at least once, within five standard deviations.
    assert abs(len(np.unique(boot)) - 1_003 * (1 - np.exp(-1))) < 5 * np.sqrt(1_003 * 0.1)
    assert len(device.bootstrap(7)) == 7
    for call, message in (
        (lambda: device.folds(1), "k must be between 2 and 1003; got 1"),
        (lambda: device.folds(1_004), "k must be between 2 and 1003; got 1004"),
        (lambda: device.split(1.0), "fraction must be between 0 and 1; got 1.0"),
        (lambda: device.bootstrap(0), "rows must be between 1"),
        (lambda: fill(path, ["cpu"], rows=1)[0].folds(2), "1 rows can't be divided into 2 folds"),
        (lambda: fill(path, ["cpu"], rows=1)[0].split(0.5), "a table of one row can't be split"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_folds_are_uniform() -> None:
    """Each row is equally likely to be in the first of four folds: chi-square test, p > 0.001."""
    stats = pytest.importorskip("scipy.stats")
    device = fill(fastpipe.from_arrays({"x": np.arange(40.0)}, batch_size=8), ["cpu"], rows=40)[0]
    counts = np.zeros(40)
    for seed in range(2_000):
        counts[next(device.folds(4, seed=seed))[1]] += 1
    assert counts.sum() == 20_000
    # Rows are drawn without replacement. Drawing a quarter of 40 rows reduces the variance to three quarters.
    assert stats.chi2.sf(((counts - 500) ** 2 / 500).sum() / 0.75, 39) > 0.001


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"devices": "cpu", "rows": 1}, TypeError, r"did you mean \['cpu'\]"),
        ({"devices": [], "rows": 1}, ValueError, "devices must list 1 to 1024 devices; got 0"),
        ({}, ValueError, 'the free memory of "cpu" is unknown'),
        ({"rows": 1, "device_memory": "1GB"}, ValueError, "pass either rows or device_memory"),
        ({"device_memory": 3}, ValueError, "no row of 16 bytes fits into 0.8 of the 3 bytes"),
        ({"rows": 0}, ValueError, "rows must be between 1"),
        ({"rows": 15_001}, ValueError, "15001 rows for each of 2 devices are more than the 30000 rows available$"),
        ({"rows": 15_001, "replace": True}, ValueError, "15001 rows for each of 2 devices are more than the 30000"),
        ({"rows": 1, "occupancy": 1.5}, ValueError, "occupancy must be above 0 and at most 1"),
        ({"rows": 1, "share": 0.5}, ValueError, 'share is for method="block"'),
        ({"rows": 1, "method": "stream"}, ValueError, 'method must be "exact", "block" or "buffered"; got'),
        ({"rows": 1, "order": "K"}, ValueError, 'order must be "C" or "F"'),
        ({"rows": 1, "dtype": "str"}, ValueError, "dtype must be numeric"),
        ({"rows": 1, "dtype": "datetime64[s]"}, ValueError, "dtype must be numeric"),
        ({"rows": 1, "memory_limit": "1MB"}, ValueError, "memory_limit must be at least 16777216 bytes"),
        ({"rows": 1, "framework": "jax"}, ValueError, 'framework must be "torch" or "cupy"'),
        ({"rows": 1, "replace": "no"}, TypeError, "replace must be True or False"),
        ({"rows": 1, "columns": ["z"]}, SchemaError, "no column"),
        ({"rows": 1, "seed": -1}, ValueError, "seed must be between 0"),
        ({"devices": ["gpu"], "rows": 1}, fastpipe.errors.DeviceError, 'device must be a GPU such as "cuda:0"'),
    ],
)
def test_arguments(path: Path, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fill(path, **{"devices": ["cpu", "cpu"]} | options)


def test_files_without_rows(tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text("a,b\n")
    for options in ({"rows": 1}, {"device_memory": "1MB"}):
        with pytest.raises(ValueError, match="are more than the 0 rows available"):
            fill(tmp_path / "none.csv", columns=["a"], **options)


def test_without_frameworks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="requires PyTorch built with CUDA, or CuPy"):
        fill(path, ["cuda:0"], rows=1)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "fastpipe.cuda._cupy", raising=False)
    with pytest.raises(ImportError, match="requires cupy, which is not installed: pip install cupy"):
        fill(path, ["cuda:0"], rows=1, framework="cupy")


def test_tensors_of_this_process(path: Path, table: np.ndarray) -> None:
    device = fill(path, ["cpu"], rows=500, framework="torch", order="F")[0]
    assert isinstance(device.values, torch.Tensor)
    assert device.values.stride() == (1, 500)
    train, test = device.split(0.5)
    assert (device.values[test].numpy() == table[device.rows[test.numpy()]]).all()
    assert train.dtype == torch.int64


class Breaking(HostDevice):
    """Raises or misbehaves at its third piece."""

    copies = 0

    def copy(self, pieces: Any) -> None:
        Breaking.copies += 1
        if Breaking.copies == 3:
            self.break_off()
        super().copy(pieces)

    def break_off(self) -> None:
        raise RuntimeError("the device fell off the bus")


class Interrupting(Breaking):
    def break_off(self) -> None:
        _thread.interrupt_main()


@pytest.mark.parametrize(("broken", "error"), [(Breaking, RuntimeError), (Interrupting, KeyboardInterrupt)])
def test_a_device_that_breaks_ends_all_threads(
    path: Path, monkeypatch: pytest.MonkeyPatch, broken: Any, error: Any, table: np.ndarray
) -> None:
    monkeypatch.setattr(fastpipe.cuda._fill._fill, "HostDevice", broken)
    monkeypatch.setattr(fastpipe.cuda._fill._fill, "_LARGEST_BUFFER", 4_096)
    monkeypatch.setattr(Breaking, "copies", 0)
    with pytest.raises(error):
        fill(path, rows=10_000)
    assert not lanes()
    filled = fill(path, rows=10_000)
    assert (filled[1].values == table[filled[1].rows]).all()
    filled = fill(path, rows=4_000)
    monkeypatch.setattr(Breaking, "copies", 0)
    with pytest.raises(error):
        filled.refill()
    assert not lanes()
    filled.refill()
    assert all((device.values == table[device.rows]).all() for device in filled)


def test_threads_refill_one_after_the_other(path: Path, table: np.ndarray) -> None:
    filled = fill(path, rows=3_000, replace=True)
    threads = [threading.Thread(target=filled.refill) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert filled.refills == 6
    assert all((device.values == table[device.rows]).all() for device in filled)
    assert fill(path, rows=3_000, replace=True)[0].rows.tolist() != filled[0].rows.tolist()


def test_memory_that_is_not_available() -> None:
    with pytest.raises(OutOfMemoryError, match="could not allocate"):
        HostDevice().hold(1 << 60)


def test_variances_are_computed_incrementally() -> None:
    draw = np.random.default_rng(3)
    units = np.repeat(np.arange(50), draw.integers(1, 40, 50))
    values = draw.standard_normal((len(units), 3)) + 1e6 + draw.standard_normal(50)[units, None]
    values[::7, 1] = np.nan
    values[:, 2] = 4
    for pieces in (1, 7, 200):
        counted = BlockVariance(3)
        for part in np.array_split(np.arange(len(units)), pieces):
            counted.add(list(values[part].T), units[part])
        np.testing.assert_allclose(counted.design_effect(), design_effect(values, units), rtol=1e-6)
    assert np.isnan(BlockVariance(2).design_effect()).all()


OUT_OF_MEMORY = """
    import resource, sys
    import fastpipe, fastpipe.cuda, numpy.random

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    limit = taken + (int(sys.argv[2]) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        fastpipe.cuda.fill(sys.argv[1], ["cpu"] * 2, rows=10_000, seed=1, memory_limit="64MB", method=sys.argv[3])
    except fastpipe.errors.OutOfMemoryError as error:
        print("OutOfMemoryError", error)
    else:
        print("filled")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space can be limited only on Linux")
@pytest.mark.parametrize("method", ["exact", "block", "buffered"])
def test_out_of_address_space(path: Path, method: str) -> None:
    told = []
    for megabytes in (1, 3, 6, 12, 24, 60, 1_000):
        command = [sys.executable, "-c", textwrap.dedent(OUT_OF_MEMORY), str(path), str(megabytes), method]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.split()[0])
    assert set(told) == {"OutOfMemoryError", "filled"}
    assert told[-1] == "filled"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_fills_and_refills(path: Path, table: np.ndarray) -> None:
    reader = fastpipe.read_csv(path, batch_size=100)
    next(iter(reader))
    filled = fill(reader, rows=2_000)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            filled.refill()
            again = fill(reader, rows=2_000)
            right = [(device.values == table[device.rows]).all() for device in (*filled, *again)]
            status = 0 if all(right) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert all((device.values == table[device.rows]).all() for device in filled)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the GPUs of both frameworks by host memory."""
    modules = ("fastpipe.cuda._cupy", "fastpipe.cuda._cupy")
    monkeypatch.setitem(sys.modules, "cupy", plain_cupy.modules())
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)
    from fastpipe.cuda import _torch

    class Idle:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.recorded = False

        def record(self, stream: Any) -> None:
            self.recorded = True

        def synchronize(self) -> None:
            assert self.recorded

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(_torch, "gpu", lambda device: torch.device("cpu"))
    monkeypatch.setattr(_torch, "page_locked", lambda device, nbytes: aligned((nbytes + 100,), np.uint8))
    for name, stand_in in {
        "Stream": Idle,
        "Event": Idle,
        "stream": Idle,
        "synchronize": lambda device: None,
        "memory_reserved": lambda device: 300_000,
        "memory_allocated": lambda device: 50_000,
        "mem_get_info": lambda device: (512_000, 1 << 20),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    yield
    for module in modules:
        sys.modules.pop(module, None)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("framework", ["torch", "cupy"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_gpus_over_host_memory(path: Path, table: np.ndarray, framework: Any, order: Any) -> None:
    filled = fill(path, ["cuda:1"], framework=framework, order=order, occupancy=0.5)
    free = 512_000 + 250_000 if framework == "torch" else (1 << 20) * 3 // 4
    assert filled.num_rows == [free // 2 // 16]
    for _ in range(2):
        values = filled[0].values
        assert (np.asarray(values) == table[filled[0].rows]).all()
        if order == "F":
            assert np.asarray(values).flags.f_contiguous
        filled.refill() if filled.refills == 0 and 2 * filled.num_rows[0] <= ROWS else None
    train, test = filled[0].split(0.75)
    assert len(train) + len(test) == filled.num_rows[0]
    if framework == "cupy":
        assert filled[0].device == "cuda:1"
        with pytest.raises(OutOfMemoryError, match=r"cuda:0 cannot allocate \d+ contiguous bytes"):
            fill(
                fastpipe.from_arrays({"x": np.zeros(200_000)}, batch_size=10),
                ["cuda:0"],
                framework="cupy",
                rows=200_000,
                dtype="float64",
            )
        with pytest.raises(ValueError, match="list each GPU once; got cuda:0, cuda:0"):
            fill(path, ["cuda:0", "cuda:0"], framework="cupy", rows=1)


@pytest.mark.parametrize("method", ["exact", "block", "buffered"])
def test_host_memory_stays_within_the_limit(tmp_path: Path, method: str) -> None:
    """Private memory, without that of devices, exceeds the limit by at most 64 MiB."""
    path = tmp_path / "rows.csv"
    draw = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(b",".join(b"c%d" % i for i in range(20)) + b"\n")
        piece = b"\n".join(b",".join(b"%.6f" % value for value in row) for row in draw.standard_normal((10_000, 20)))
        for _ in range(60):
            file.write(piece + b"\n")
    script = """
        import sys, threading, time
        import fastpipe, fastpipe.cuda

        def private():
            with open("/proc/self/status") as status:
                return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) * 1024

        most = before = private()
        ended = threading.Event()

        def watch():
            global most
            while not ended.wait(0.002):
                most = max(most, private())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        filled = fastpipe.cuda.fill(
            sys.argv[1], ["cpu"] * 3, rows=100_000, seed=1, memory_limit=32 << 20, method=sys.argv[2]
        )
        ended.set()
        watcher.join()
        print(most - before - 3 * 100_000 * 80 - (32 << 20))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(path), method], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 << 20


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and PyTorch built with CUDA")
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_a_gpu_is_filled(path: Path, table: np.ndarray, order: Any, framework: Any) -> None:
    pytest.importorskip(framework)
    filled = fill(path, ["cuda:0"], rows=9_000, order=order, framework=framework)
    for _ in range(3):
        on_host = filled[0].values.cpu().numpy() if framework == "torch" else filled[0].values.get()
        assert (on_host == table[filled[0].rows]).all()
        if filled.refills < 2:
            filled.refill()
    train, test = filled[0].split(0.5)
    assert len(filled[0].values[train]) + len(filled[0].values[test]) == 9_000
    assert fill(path, ["cuda:0"], framework=framework, occupancy=1e-5).num_rows[0] > 1_000
