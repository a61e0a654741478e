"""Sources written in Python: what they may do, and how their mistakes are reported."""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import re
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe import DenseSpec
from fastpipe.units import UnitLocation
from processes import together

pa = pytest.importorskip("pyarrow")
import pyarrow.compute as pc  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from samples import threads_are  # noqa: E402
from toy_units import Numbers, flat, readers, until  # noqa: E402

ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"shuffle": True, "seed": 1},
    {"shuffle": True, "shuffle_buffer": 8, "seed": 1},
    {"shuffle": "block", "shuffle_buffer": 5, "seed": 1},
    {"shuffle": "buffer", "shuffle_buffer": 5, "seed": 1},
)
order = pytest.mark.parametrize("order", ORDERS, ids=["sequential", "whole", "window", "block", "buffer"])


class Broken(RuntimeError):
    """An exception class of the user."""


def failing(error: BaseException, at: int = 4) -> Any:
    def act(unit: int) -> None:
        if unit == at:
            raise error

    return act


@pytest.mark.parametrize("kind", [Broken, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration])
@pytest.mark.parametrize("threads", [1, 2])
def test_errors_of_read_are_raised_at_their_batch(kind: type[BaseException], threads: int) -> None:
    error = kind("the page is torn")
    batches = iter(fastpipe.read_units(Numbers([3] * 8, failing(error)), batch_size=5, num_threads=threads))
    assert flat(itertools.islice(batches, 2)) == list(range(10))
    for _ in range(3):
        with pytest.raises(kind) as raised:
            next(batches)
        if kind is StopIteration:
            continue
        assert raised.value is error
        assert error.__notes__ == ["raised while fastpipe read a unit (unit page 4)"]
        frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert frames[-2:] == ["read", "act"]
        assert len(frames) < 10, "the traceback must not grow with each raise"


def test_ctrl_c_during_the_start_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may interrupt the reader before or after a thread has started."""
    start, calls = threading.Thread.start, itertools.count()

    def interrupted(thread: threading.Thread) -> None:
        number = next(calls)
        if number % 2:
            start(thread)
        if number % 3 == 0:
            raise KeyboardInterrupt

    reader = fastpipe.read_units(Numbers([3] * 8), batch_size=5)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                iter(reader)
    assert flat(reader) == list(range(24))
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "fastpipe-read"])


@order
def test_errors_of_read_are_raised_in_every_order(order: dict[str, Any]) -> None:
    reader = fastpipe.read_units(Numbers([3] * 8, failing(Broken())), batch_size=5, **order)
    with pytest.raises(Broken):
        list(reader)
    good = Numbers([3] * 8)
    reader = fastpipe.read_units(good, batch_size=5, **order)
    assert sorted(flat(reader)) == list(range(24))


def lazily_failing(unit: int) -> Any:
    def batches() -> Iterator[Any]:
        yield pa.record_batch({"x": pa.array([0], pa.int64())})
        raise Broken("the cable is out")

    return pa.RecordBatchReader.from_batches(pa.schema({"x": pa.int64()}), batches())


@pytest.mark.parametrize(
    ("act", "error", "match"),
    [
        (lambda unit: pa.table({"x": [1, 2]}), fastpipe.errors.ShapeError, r"expected 3 rows.*found 2 \(unit page 0\)"),
        (lambda unit: pa.table({"x": [1] * 4}), fastpipe.errors.ShapeError, "expected 3 rows.*found 4"),
        (lambda unit: pa.table({"x": []}), fastpipe.errors.ShapeError, "expected 3 rows.*found 0"),
        (
            lambda unit: pa.table({"y": [1] * 3}),
            fastpipe.errors.SchemaError,
            "column 'x', but the record batch does not",
        ),
        (
            lambda unit: pa.table({"x": ["a"] * 3}),
            fastpipe.errors.SchemaError,
            "a column 'x' of type Utf8, but the schema",
        ),
        (
            lambda unit: pa.table({"x": pa.array([1] * 3, pa.int8())}),
            fastpipe.errors.SchemaError,
            "'x' of type Int8, but",
        ),
        (lambda unit: pa.table({"x": [[1]] * 3}), fastpipe.errors.SchemaError, "a column 'x' of type List"),
        (lambda unit: pa.table({"x": [1, None, 3]}), fastpipe.errors.NullValueError, r"feature 'x'.*record 1"),
        (lambda unit: pa.array([1, 2, 3]), fastpipe.errors.UnsupportedError, "a single Arrow array"),
        (lambda unit: {"x": [1, 2, 3]}, TypeError, r"read\(0\) must return Arrow data .* returned a dict"),
        (lambda unit: 7, TypeError, r"read\(0\) must return Arrow data .* returned 7"),
        (lambda unit: pa.Table, TypeError, None),
        (lazily_failing, fastpipe.errors.StorageError, r"the Arrow stream failed: .*the cable is out"),
    ],
)
@order
def test_results_of_read_are_checked(act: Any, error: type[Exception], match: str, order: dict[str, Any]) -> None:
    reader = fastpipe.read_units(Numbers([3] * 2, act), batch_size=2, **order)
    with pytest.raises(error, match=None if order else match) as raised:
        list(reader)
    if isinstance(raised.value, fastpipe.FastpipeError) and not hasattr(raised.value, "__notes__"):
        assert raised.value.unit in ("page 0", "page 1")


@pytest.mark.parametrize("store", [pa.Array.dictionary_encode, pc.run_end_encode], ids=["dictionary", "runs"])
def test_units_may_encode_values_in_any_way(store: Any) -> None:
    def act(unit: int) -> Any:
        numbers = pa.array([unit] * 3)
        return pa.table({"x": numbers if unit % 2 else store(numbers)})

    reader = fastpipe.read_units(Numbers([3] * 4, act), batch_size=5)
    assert flat(reader) == [unit for unit in range(4) for _ in range(3)]


class NoTable(Numbers):
    def read(self, unit: int) -> Any:
        return None


def test_none_is_not_a_table() -> None:
    with pytest.raises(TypeError, match=r"read\(0\) must return Arrow data .* returned None"):
        list(fastpipe.read_units(NoTable([3]), batch_size=2))


class Capsules:
    """An object whose `__arrow_c_stream__` doesn't return a valid capsule."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (None, TypeError),
        (3, TypeError),
        (pa.schema({"x": pa.int64()}).__arrow_c_schema__(), TypeError),
        (Broken(), Broken),
    ],
)
def test_invalid_capsules_are_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        list(fastpipe.read_units(Numbers([3], lambda unit: Capsules(given)), batch_size=2))


def test_a_stream_that_was_read_is_refused() -> None:
    stream = pa.table({"x": [1, 2, 3]}).to_reader()
    stream.read_all()
    with pytest.raises(fastpipe.errors.ShapeError, match="found 0"):
        list(fastpipe.read_units(Numbers([3], lambda unit: stream), batch_size=2))


def test_units_whose_name_fails_are_numbered() -> None:
    units = Numbers([3] * 2, failing(Broken(), 1))

    def name(unit: int) -> str:
        raise KeyError(unit)

    units.name = name  # type: ignore[method-assign]
    reader = fastpipe.read_units(units, batch_size=3)
    batches = iter(reader)
    next(batches)
    with pytest.raises(Broken) as raised:
        next(batches)
    assert raised.value.__notes__ == ["raised while fastpipe read a unit (unit 1)"]
    with pytest.raises(KeyError):
        reader.locate(0, 0, epoch=0)


@pytest.mark.parametrize("fingerprint", [{1, 2}, object(), float("nan"), b"x", {"a": {1: object()}}])
def test_fingerprints_must_be_json(fingerprint: Any) -> None:
    units = Numbers([3])
    units.fingerprint = lambda: fingerprint  # type: ignore[method-assign]
    reader = fastpipe.read_units(units, batch_size=2)
    with pytest.raises(TypeError, match=r"fingerprint\(\) must return a JSON value"):
        reader.state_dict()


def test_a_state_of_other_units_is_refused() -> None:
    units = Numbers([3] * 3)
    reader = fastpipe.read_units(units, batch_size=2)
    next(iter(reader))
    state = json.loads(json.dumps(reader.state_dict()))
    for other, fingerprint in ((Numbers([3] * 3), "other"), (Numbers([4, 2, 3]), "numbers"), (Numbers([3, 3]), None)):
        other.fingerprint = lambda told=fingerprint: told  # type: ignore[method-assign, misc]
        with pytest.raises(fastpipe.errors.StateError):
            fastpipe.read_units(other, batch_size=2).load_state_dict(state)
    fastpipe.read_units(Numbers([3] * 3), batch_size=2).load_state_dict(state)


@order
def test_states_at_every_step(order: dict[str, Any]) -> None:
    rows = [5, 0, 3, 1, 9, 0, 0, 4]
    whole = [batch["x"].tolist() for batch in fastpipe.read_units(Numbers(rows), batch_size=3, **order)]
    assert sorted(itertools.chain(*whole)) == list(range(22))
    for step in range(len(whole) + 1):
        reader = fastpipe.read_units(Numbers(rows), batch_size=3, **order)
        batches = iter(reader)
        for _ in range(step):
            next(batches)
        units = Numbers(rows)
        again = fastpipe.read_units(units, batch_size=3, **order)
        again.load_state_dict(json.loads(json.dumps(reader.state_dict())))
        assert [batch["x"].tolist() for batch in again] == whole[step:]
        if not order and step:
            assert 0 not in units.calls or step == 1, "units before the state must not be read again"
        reader.close()


BIG = [2**32]
# Allowed as numbers of bytes, but not of rows.
ALLOWED = (None, BIG)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([-1], ValueError),
        (BIG, ValueError),
        ([2**64], (TypeError, ValueError)),
        ([1.0], TypeError),
        ([True], TypeError),
        ([[1]], TypeError),
        ([[1], [1, 2]], TypeError),
        ([object()], TypeError),
        (["1"], TypeError),
        ([None], TypeError),
        (3, TypeError),
        (None, TypeError),
        ("12", TypeError),
        ([1, 2.5], TypeError),
        ({0: 1}, TypeError),
        (iter([1]), TypeError),
        (np.ones((2, 2), int), TypeError),
        (np.ones(2), TypeError),
    ],
    # Remove addresses from the ids, so that they are equal in every process.
    ids=lambda value: re.sub(r"0x[0-9a-f]+", "", repr(value)),
)
@pytest.mark.parametrize("name", ["rows", "nbytes"])
def test_invalid_counts_are_refused(rows: Any, error: Any, name: str) -> None:
    units = Numbers([1])
    setattr(units, name, rows)
    if name == "nbytes" and any(rows is there for there in ALLOWED):
        list(fastpipe.read_units(units, batch_size=2))
        return
    with pytest.raises(error, match=rf"units\.{name}"):
        fastpipe.read_units(units, batch_size=2)


@pytest.mark.parametrize(
    "rows", [[2, 1], (2, 1), np.array([2, 1]), np.array([2, 1], "uint8"), range(2, 0, -1)], ids=repr
)
def test_counts_of_any_kind(rows: Any) -> None:
    tables = [pa.table({"x": [0, 1]}), pa.table({"x": [2]})]
    assert flat(fastpipe.read_units(Numbers(rows, tables.__getitem__), batch_size=2)) == [0, 1, 2]


@pytest.mark.parametrize("nbytes", [[1], [1, 2, 3]])
def test_nbytes_has_one_value_per_unit(nbytes: list[int]) -> None:
    units = Numbers([1, 1])
    units.nbytes = nbytes  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=rf"units\.nbytes must have one entry for each of the 2 units; got {len(nbytes)}"
    ):
        fastpipe.read_units(units, batch_size=2)


@order
@pytest.mark.parametrize("rows", [[], [0], [0, 0, 0], [1], [0, 1, 0], [7], [1] * 20, [30, 1]], ids=repr)
@pytest.mark.parametrize("batch_size", [1, 4, 50])
def test_units_of_any_size(rows: list[int], batch_size: int, order: dict[str, Any]) -> None:
    units = Numbers(rows)
    reader = fastpipe.read_units(units, batch_size=batch_size, **order)
    found = list(reader)
    assert sorted(flat(found)) == list(range(sum(rows)))
    assert [len(batch["x"]) for batch in found[:-1]] == [batch_size] * (len(found) - 1)
    assert all(rows[unit] for unit in units.calls), "units without rows must not be read"


def test_many_units() -> None:
    class Singles(Numbers):
        def table(self, unit: int) -> Any:
            return pa.record_batch({"x": pa.array([unit], pa.int64())})

    reader = fastpipe.read_units(Singles(np.ones(100_000, int)), batch_size=1000)
    assert flat(itertools.islice(reader, 3)) == list(range(3000))
    batch = reader.batch_at(99, epoch=0)
    assert batch["x"].tolist() == list(range(99_000, 100_000))
    reader = fastpipe.read_units(Singles(np.ones(100_000, int)), batch_size=1000, shuffle=True, seed=1)
    assert len(set(flat(itertools.islice(reader, 2)))) == 2000


def test_calls_overlap() -> None:
    together = threading.Barrier(10, timeout=500)
    units = Numbers([4] * 20, lambda unit: together.wait() * 0 or None)
    assert flat(fastpipe.read_units(units, batch_size=8, num_fetches=10, num_threads=1)) == list(range(80))
    assert units.most == 10


@pytest.mark.parametrize("num_fetches", [1, 3])
@order
def test_calls_are_limited_by_num_fetches(num_fetches: int, order: dict[str, Any]) -> None:
    units = Numbers([4] * 20, lambda unit: time.sleep(0.001))
    reader = fastpipe.read_units(units, batch_size=8, num_fetches=num_fetches, **order)
    for epoch in range(2):
        reader.set_epoch(epoch)
        assert sorted(flat(reader)) == list(range(80))
    assert units.most <= num_fetches


def test_an_abandoned_pass_does_not_wait_for_calls() -> None:
    go = threading.Event()
    units = Numbers([4] * 20, lambda unit: (unit > 1 and not go.wait(200) and None) or None)
    reader = fastpipe.read_units(units, batch_size=4, num_fetches=3)
    for batch in reader:
        assert batch["x"].tolist() == [0, 1, 2, 3]
        until(lambda: units.under_way == 3)
        break
    reader.close()
    # No call has returned, because the event `go` isn't set.
    assert units.under_way == 3
    # Calls that still hang count towards the limit. The next pass continues when they return.
    reader.set_epoch(0)
    batches = iter(reader)
    time.sleep(0.1)
    assert units.most == 3
    go.set()
    assert flat(batches) == list(range(80))
    assert units.most == 3


def test_threads_end_with_the_pass() -> None:
    until(lambda: not list(readers()))
    reader = fastpipe.read_units(Numbers([4] * 20), batch_size=8, num_fetches=5)
    batches = iter(reader)
    next(batches)
    assert len(list(readers())) == 5
    assert all(thread.daemon for thread in readers())
    list(batches)
    until(lambda: not list(readers()))
    list(reader)
    reader.batch_at(0, epoch=0)
    until(lambda: not list(readers()))


def test_a_failed_pass_leaves_no_threads() -> None:
    reader = fastpipe.read_units(Numbers([4] * 20, failing(Broken())), batch_size=8)
    with pytest.raises(Broken):
        list(reader)
    del reader
    until(lambda: not list(readers()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="requires /proc/self/task")
@pytest.mark.parametrize(
    "order", [{}, {"shuffle": True, "shuffle_buffer": 20, "seed": 1}], ids=["sequential", "window"]
)
def test_a_kept_failed_pass_keeps_only_its_error(order: dict[str, Any]) -> None:
    """Keeps the exception in the source and in this test. The traceback of each keeps the pass alive."""
    reader = fastpipe.read_units(Numbers([4] * 20, failing(Broken(), at=11)), batch_size=5, num_threads=2, **order)
    batches = iter(reader)
    with pytest.raises(Broken) as raised:
        for _ in batches:
            pass
    assert batches.position.active
    until(lambda: not list(readers()))
    assert threads_are(0)
    stats = reader.stats()
    assert (stats["memory"]["reserved"], stats["ready"]) == (0, 0)
    assert stats["batches"] > 0
    others: list[BaseException] = []

    def draw() -> None:
        try:
            next(batches)
        except Broken as error:
            others.append(error)

    together([threading.Thread(target=draw) for _ in range(3)])
    assert others == [raised.value] * 3


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="requires /proc/self/task")
def test_a_failed_pass_kept_by_its_excinfo(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": pa.array([*range(99), None], pa.int64())}), path, row_group_size=10)
    reader = fastpipe.read_parquet(path, features={"x": DenseSpec((), "int64")}, batch_size=4, num_threads=2)
    batches = iter(reader)
    with pytest.raises(fastpipe.errors.NullValueError) as excinfo:
        list(batches)
    assert threads_are(0)
    assert reader.stats()["memory"]["reserved"] == 0
    with pytest.raises(fastpipe.errors.NullValueError) as again:
        next(batches)
    assert str(again.value) == str(excinfo.value)
    batches.close()
    with pytest.raises(fastpipe.errors.PassClosedError):
        next(batches)


def test_a_failed_pass_is_garbage_when_unreferenced() -> None:
    reader = fastpipe.read_units(Numbers([4] * 20, failing(Broken())), batch_size=8)
    batches = iter(reader)
    position = batches.position
    try:
        list(batches)
    except Broken as error:
        # The traceback of the error references this frame, which references the pass, which references the exception.
        kept = error
        assert kept.__traceback__ is not None
        del kept
    del batches, reader
    gc.collect()
    assert not position.active


def test_read_may_use_another_reader() -> None:
    def act(unit: int) -> Any:
        inner = fastpipe.read_units(Numbers([2, 2]), batch_size=3)
        return pa.table({"x": np.array(flat(inner)) + 4 * unit})

    assert flat(fastpipe.read_units(Numbers([4] * 12, act), batch_size=5)) == list(range(48))


def test_read_may_use_the_same_source() -> None:
    tables = {0: pa.table({"x": [0, 1, 2]})}

    def act(unit: int) -> Any:
        if unit == 0:
            return tables[0]
        before = outer.batch_at(unit - 1, epoch=0)["x"]
        return pa.table({"x": before + 3})

    outer = fastpipe.read_units(Numbers([3] * 4, act), batch_size=3, num_fetches=8)
    assert flat(outer) == list(range(12))


def test_read_may_close_the_pass() -> None:
    def act(unit: int) -> None:
        if unit == 3:
            reader.close()

    reader = fastpipe.read_units(Numbers([3] * 8, act), batch_size=3, num_fetches=1)
    batches = iter(reader)
    with pytest.raises(fastpipe.errors.PassClosedError):
        flat(batches)


@pytest.mark.parametrize("limit", [2_000, 50_000])
def test_a_limit_that_is_too_small_names_the_minimum(limit: int) -> None:
    big = Numbers([10_000] * 4)
    with pytest.raises(fastpipe.errors.LimitError, match=r"memory_limit is .*, and this takes at least") as raised:
        list(fastpipe.read_units(big, batch_size=10, memory_limit=limit))
    assert "memory_limit" in str(raised.value)


@pytest.mark.parametrize("told", [False, True])
@order
def test_a_limit_is_kept(told: bool, order: dict[str, Any]) -> None:
    units = Numbers([1000] * 60)
    if told:
        units.nbytes = [8000] * 60  # type: ignore[attr-defined]
    options: dict[str, Any] = {"shuffle_buffer": 2000} if order.get("shuffle") is True else {}
    # A batch of random rows needs most of the units.
    limit = 600_000 if order.get("shuffle") == "block" else 400_000
    reader = fastpipe.read_units(units, batch_size=500, memory_limit=limit, **order | options)
    assert sorted(flat(reader)) == list(range(60_000))
    assert 8000 <= reader.stats()["memory"]["most_reserved"] <= limit


def test_units_larger_than_their_nbytes() -> None:
    text = "x" * 10_000
    units = Numbers([10] * 3, lambda unit: pa.table({"x": pa.array([text] * 10)}))
    units.schema = pa.schema([pa.field("x", pa.string(), nullable=False)])
    units.nbytes = [100] * 3  # type: ignore[attr-defined]
    with pytest.raises(
        fastpipe.errors.LimitError, match=r"an open unit needs \d+ bytes, which is more than memory_limit"
    ):
        list(fastpipe.read_units(units, batch_size=2, memory_limit=60_000))


class Selects(Numbers):
    """Units with two columns that can be selected."""

    def __init__(self, rows: list[int], columns: list[str] | None = None) -> None:
        super().__init__(rows)
        self.schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("x", "y", "z")])
        self.columns, self.chosen = columns, []

    def select(self, columns: list[str]) -> Selects:
        self.chosen.append(columns)
        return type(self)(self.rows, columns)  # type: ignore[arg-type]

    def table(self, unit: int) -> Any:
        x = super().table(unit)["x"]
        whole = pa.table({"z": x, "y": x, "x": x})
        return whole if self.columns is None else whole.select(self.columns)


class Whole(Selects):
    select = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "select":
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", [Selects, Whole])
@pytest.mark.parametrize(
    ("options", "names", "chosen"),
    [
        ({}, ["x", "y", "z"], ["x", "y", "z"]),
        ({"columns": ["z", "x"]}, ["z", "x"], ["x", "z"]),
        ({"features": {"y": DenseSpec((), "int32")}}, ["y"], ["y"]),
        (
            {"features": {"a": DenseSpec((), "int32", field="y"), "b": DenseSpec((), "int8", field="y")}},
            ["a", "b"],
            ["y"],
        ),
    ],
)
def test_columns_are_selected_once(kind: Any, options: dict[str, Any], names: list[str], chosen: list[str]) -> None:
    units = kind([3] * 3)
    reader = fastpipe.read_units(units, batch_size=4, **options)
    batches = list(reader)
    assert list(batches[0]) == names
    for name in names:
        assert flat(batches, name) == list(range(9))
    assert units.chosen == ([chosen] if kind is Selects else [])


MASK = DenseSpec((), "int64", on_null="mask")


class Wide(Selects):
    """Units with three columns. According to `nbytes`, `z` is by far the largest."""

    def __init__(self, rows: list[int], columns: list[str] | None = None) -> None:
        super().__init__(rows, columns)
        sizes = {"x": 8, "y": 8, "z": 1 << 20}
        row = sum(sizes[name] for name in columns or sizes)
        self.nbytes = [row * number for number in rows]


@pytest.mark.parametrize(
    ("options", "window"),
    [
        # 256 rows of 1 MiB minus the rows at both edges, but at least the rows of one unit.
        ({}, 100),
        ({"columns": ["z", "x"]}, 100),
        ({"columns": ["x"]}, 10_000),
        ({"features": {"a": DenseSpec((), "int32", field="y")}}, 10_000),
    ],
    ids=str,
)
def test_only_selected_columns_count_for_the_window(options: dict[str, Any], window: int) -> None:
    reader = fastpipe.read_units(Wide([100] * 100), batch_size=100, shuffle=True, seed=1, **options)
    again = pickle.loads(pickle.dumps(reader))
    batches = [batch.popitem()[1] for batch in reader]
    units = [len({x // 100 for x in batch.tolist()}) for batch in batches]
    assert sum(map(len, batches)) == 10_000
    assert max(units) == 1 if window == 100 else min(units) > 40
    assert [batch.popitem()[1].tolist() for batch in again] == [batch.tolist() for batch in batches]


def test_only_selected_columns_count_for_a_limit() -> None:
    options: dict[str, Any] = {"batch_size": 100, "memory_limit": "8MB", "num_fetches": 1, "num_threads": 1}
    assert flat(fastpipe.read_units(Wide([100] * 10), columns=["x"], **options)) == list(range(1000))
    with pytest.raises(fastpipe.errors.LimitError, match=r"memory_limit is 8\.0 MB, and this takes at least 2\d\d"):
        list(fastpipe.read_units(Wide([100] * 10), **options))


@pytest.mark.parametrize("features", [None, {"x": MASK}], ids=["inferred", "mask"])
@order
def test_nulls_that_the_schema_denies(features: Any, order: dict[str, Any]) -> None:
    units = Numbers([3, 3], lambda unit: pa.table({"x": [3, None, 5]}) if unit else None)
    with pytest.raises(fastpipe.errors.NullValueError, match=r"feature 'x'.*unit page 1, record 1") as raised:
        list(fastpipe.read_units(units, batch_size=3, features=features, **order))
    assert (raised.value.unit, raised.value.record, raised.value.feature) == ("page 1", 1, "x")


ITEMS = pa.list_(pa.field("item", pa.int64(), nullable=False))
SPARSE = [("indices0", ITEMS), ("values", ITEMS)]


@pytest.mark.parametrize(
    ("kind", "column", "spec"),
    [
        (ITEMS, [[1], None], fastpipe.RaggedSpec((None,), "int64", on_null="mask")),
        (ITEMS, [[1], [None]], fastpipe.RaggedSpec((None,), "int64", on_null="mask")),
        (ITEMS, [[1], [None]], DenseSpec((1,), "int64", on_null="mask")),
        (pa.list_(ITEMS), [[[1]], [[None]]], fastpipe.RaggedSpec((None, None), "int64", on_null="mask")),
        (pa.string(), ["a", None], DenseSpec((), "string", on_null="mask")),
        (
            pa.struct(SPARSE),
            [{"indices0": [1], "values": [2]}, None],
            fastpipe.SparseSpec((3,), "int64", on_null="mask"),
        ),
    ],
    ids=str,
)
def test_nested_nulls_that_the_schema_denies(kind: Any, column: list[Any], spec: Any) -> None:
    units = Numbers([2], lambda unit: pa.table({"x": column}))
    units.schema = pa.schema([pa.field("x", kind, nullable=False)])
    with pytest.raises(fastpipe.errors.NullValueError, match="feature 'x'"):
        list(fastpipe.read_units(units, batch_size=2, features={"x": spec}))


def test_nulls_that_the_schema_denies_are_filled() -> None:
    units = Numbers([3, 3], lambda unit: pa.table({"x": [3, None, 5]}) if unit else None)
    features = {"x": DenseSpec((), "int64", fill=-1)}
    assert flat(fastpipe.read_units(units, batch_size=2, features=features)) == [0, 1, 2, 3, -1, 5]


def test_nulls_that_the_schema_allows() -> None:
    units = Numbers([3, 3], lambda unit: pa.table({"x": [1, None, 3]}) if unit else None)
    units.schema = pa.schema({"x": pa.int64()})
    batches = list(fastpipe.read_units(units, batch_size=3))
    assert [batch["x"].to_list() for batch in batches] == [[0, 1, 2], [1, None, 3]]


def test_rows_are_located() -> None:
    reader = fastpipe.read_units(Numbers([2, 0, 3]), batch_size=2)
    assert reader.locate(1, 1, epoch=0) == UnitLocation(unit=2, name="page 2", row=1)


def test_features_written_by_fastpipe_are_restored() -> None:
    arrays = {
        "x": np.arange(12, dtype="float32").reshape(6, 2),
        "s": fastpipe.Sparse(np.array([[0, 1], [3, 0]]), np.array([1.0, 2.0]), (6, 4)),
        "when": np.array(["2020-01-01", "NaT"] * 3, "datetime64[D]"),
        "m": fastpipe.Masked(np.arange(6), np.arange(6) % 2 == 0),
    }
    table = pa.table(fastpipe.from_arrays(arrays, batch_size=6))
    units = Numbers([3, 3], lambda unit: table.slice(3 * unit, 3))
    units.schema = table.schema
    (batch,) = fastpipe.read_units(units, batch_size=6)
    (again,) = fastpipe.from_arrow(table, batch_size=6)
    assert {name: type(form) for name, form in batch.items()} == {name: type(form) for name, form in arrays.items()}
    assert list(batch["s"].dense_shape) == [6, 4]
    for name in ("x", "when"):
        np.testing.assert_array_equal(batch[name], again[name])
    # Features of columns that were added later are inferred.
    units.act = lambda unit: table.slice(3 * unit, 3).append_column("more", pa.array(["a"] * 3))
    units.schema = table.schema.append(pa.field("more", pa.string(), nullable=False))
    assert list(fastpipe.read_units(units, batch_size=6).features) == [*arrays, "more"]
    assert list(fastpipe.read_units(units, batch_size=6, columns=["more", "x"]).features) == ["more", "x"]


class Lacking:
    """Units that lack one of the required attributes."""

    def __init__(self, name: str) -> None:
        self.__dict__ |= {"schema": pa.schema({"x": pa.int64()}), "rows": [1], "read": id, "fingerprint": str}
        del self.__dict__[name]


@pytest.mark.parametrize("name", ["schema", "rows", "read", "fingerprint"])
def test_missing_attributes_of_units_are_named(name: str) -> None:
    with pytest.raises(TypeError, match=rf"units must have .*has no {name}"):
        fastpipe.read_units(Lacking(name), batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"features": {}}, ValueError, "features is empty"),
        ({"columns": []}, ValueError, "columns is empty"),
        ({"columns": ["x"], "features": {"x": DenseSpec((), "int8")}}, ValueError, "not both"),
        ({"columns": "y"}, fastpipe.errors.SchemaError, "'y'"),
        ({"columns": [1]}, TypeError, "columns"),
        ({"features": {"y": DenseSpec((), "int8")}}, fastpipe.errors.SchemaError, "'y'"),
        ({"features": {"x": 3}}, TypeError, "x"),
        ({"features": [3]}, TypeError, None),
        ({"num_fetches": 0}, ValueError, "num_fetches"),
        ({"num_fetches": 1025}, ValueError, "num_fetches"),
        ({"num_fetches": True}, ValueError, "num_fetches"),
        ({"num_fetches": 1.0}, TypeError, "num_fetches"),
        ({"num_fetches": "1"}, TypeError, "num_fetches"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": "1"}, TypeError, "batch_size"),
        ({"suffle": True}, TypeError, "unexpected keyword argument 'suffle'"),
    ],
    ids=repr,
)
def test_arguments(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fastpipe.read_units(Numbers([3]), **{"batch_size": 2, **options})


@pytest.mark.parametrize(
    "schema", [None, {"x": "int64"}, pa.table({"x": [1]}), pa.int64(), "x", pa.schema([])], ids=repr
)
def test_invalid_schemas_are_refused(schema: Any) -> None:
    units = Numbers([3])
    units.schema = schema
    with pytest.raises((TypeError, fastpipe.errors.UnsupportedError, fastpipe.errors.SchemaError)):
        fastpipe.read_units(units, batch_size=1)


def test_schemas_of_other_libraries() -> None:
    class Schema:
        def __arrow_c_schema__(self) -> Any:
            return pa.schema([pa.field("x", pa.int64(), nullable=False)]).__arrow_c_schema__()

    units = Numbers([3])
    units.schema = Schema()
    assert flat(fastpipe.read_units(units, batch_size=1)) == [0, 1, 2]
