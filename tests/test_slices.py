"""Large units that are read a slice at a time by sequential passes."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

from toy_units import Numbers, flat, readers, until  # noqa: E402

ROWS = [4, 25, 0, 3, 30]
NUMBERS = list(range(sum(ROWS)))


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes slices have 10 rows of `Numbers`, and splits units of more than 20 rows."""
    monkeypatch.setattr("fastpipe.units._data._SLICE_BYTES", 80)


class Sliced(Numbers):
    """Numbers that can be read in slices.

    Attributes:
        begun: The arguments of each call of `read_slices`.
        given: The unit and the first row of each slice that was returned.
    """

    def __init__(self, rows: Any = ROWS, slices: Callable[..., Any] | None = None) -> None:
        super().__init__(rows)
        self.slices = slices
        self.begun: list[tuple[int, int, int]] = []
        self.given: list[tuple[int, int]] = []

    def read_slices(self, unit: int, start: int, rows: int) -> Iterator[Any]:
        self.begun.append((unit, start, rows))
        return iter(self._slices(unit, start, rows))

    def _slices(self, unit: int, start: int, rows: int) -> Iterator[Any]:
        for first in range(start, self.rows[unit], rows):
            self.given.append((unit, first))
            table = self.table(unit).slice(first, rows)
            yield table if self.slices is None else self.slices(unit, first, table)
        if self.slices is not None and (more := self.slices(unit, self.rows[unit], None)) is not None:
            yield more


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("num_fetches", [1, 3])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_slices_are_read_one_after_the_other(batch_size: int, num_fetches: int, num_threads: int) -> None:
    units = Sliced()
    with fastpipe.read_units(units, batch_size=batch_size, num_fetches=num_fetches, num_threads=num_threads) as reader:
        assert flat(reader) == NUMBERS
    assert sorted(units.begun) == [(1, 0, 10), (4, 0, 10)]
    assert [first for unit, first in units.given if unit == 1] == [0, 10, 20]
    assert [first for unit, first in units.given if unit == 4] == [0, 10, 20]
    assert sorted(units.calls) == [0, 3]


def test_only_large_units_in_sequence_are_sliced() -> None:
    for options in ({"shuffle": True, "seed": 1}, {"shuffle": "buffer", "shuffle_buffer": 9, "seed": 1}):
        units = Sliced()
        assert sorted(flat(fastpipe.read_units(units, batch_size=8, **options))) == NUMBERS
        assert not units.begun
        assert set(units.calls) == {0, 1, 3, 4}
    units = Sliced([20, 20])
    assert flat(fastpipe.read_units(units, batch_size=8)) == list(range(40))
    assert not units.begun


def test_a_resumed_pass_begins_at_its_slice() -> None:
    reader = fastpipe.read_units(Sliced(), batch_size=3)
    with reader:
        states = [pickle.dumps(reader.state_dict()) for _ in reader]
    for step, state in enumerate(states):
        units = Sliced()
        again = fastpipe.read_units(units, batch_size=3)
        again.load_state_dict(pickle.loads(state))
        rest = [] if step + 1 == len(states) else flat(again)
        assert rest == NUMBERS[3 * step + 3 :]
        if rest and 4 + 10 < rest[0] < 4 + 20:
            # Another thread begins another unit at the same time.
            of_its_unit = [begun for begun in units.begun if begun[0] == 1]
            assert of_its_unit == [(1, 10, 10)], "rows before the slice must not be read"


def test_states_and_batches_do_not_depend_on_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    sliced = fastpipe.read_units(Sliced(), batch_size=4)
    with sliced:
        next(iter(sliced))
        state = sliced.state_dict()
    monkeypatch.undo()
    whole = fastpipe.read_units(Sliced(), batch_size=4)
    whole.load_state_dict(state)
    assert flat(whole) == NUMBERS[4:]
    assert whole.locate(5, 2, epoch=0) == sliced.locate(5, 2, epoch=0)
    assert whole.locate(5, 2, epoch=0) == fastpipe.units.UnitLocation(unit=1, name="page 1", row=18)


@pytest.mark.parametrize("shard_by", [None, "batch"])
def test_ranks_have_the_same_rows_with_and_without_slices(monkeypatch: pytest.MonkeyPatch, shard_by: Any) -> None:
    def of(rank: int) -> list[int]:
        options: Any = {"rank": rank, "world_size": 3, "on_uneven": "allow", "shard_by": shard_by}
        return flat(fastpipe.read_units(Sliced([4, 25, 0, 3, 300]), batch_size=1, **options))

    sliced = [of(rank) for rank in range(3)]
    assert sorted(itertools.chain(*sliced)) == list(range(332))
    monkeypatch.undo()
    assert [of(rank) for rank in range(3)] == sliced


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("sliced", [True, False])
def test_ranks_read_each_unit_once(monkeypatch: pytest.MonkeyPatch, num_threads: int, sliced: bool) -> None:
    if not sliced:
        monkeypatch.undo()
    for rank in range(3):
        units = Sliced([4, 25, 0, 3, 300])
        options: Any = {"rank": rank, "world_size": 3, "on_uneven": "allow", "shard_by": "batch"}
        assert flat(fastpipe.read_units(units, batch_size=1, num_threads=num_threads, **options)) == list(
            range(rank, 332, 3)
        )
        if sliced:
            assert sorted(units.given) == [(1, 0), (1, 10), (1, 20)] + [(4, first) for first in range(0, 300, 10)]
        assert sorted(units.calls) == ([0, 3] if sliced else [0, 1, 3, 4])


def test_concurrent_passes() -> None:
    reader = fastpipe.read_units(Sliced(), batch_size=5, num_fetches=1)
    with reader:
        for step, batch in enumerate(reader):
            assert batch["x"].tolist() == NUMBERS[5 * step : 5 * step + 5]
            assert reader.batch_at(7)["x"].tolist() == NUMBERS[35:40]


def test_an_abandoned_pass_closes_its_slices() -> None:
    closed = []

    class Closes(Sliced):
        def _slices(self, *of: int) -> Iterator[Any]:
            try:
                yield from super()._slices(*of)
            finally:
                closed.append(of)

    units = Closes([100])
    reader = fastpipe.read_units(units, batch_size=5)
    with reader:
        next(iter(reader))
    until(lambda: not list(readers()))
    until(lambda: closed == [(0, 0, 10)])


@pytest.mark.parametrize("at", [0, 10, 20])
def test_errors_of_a_slice_are_raised_at_its_batch(at: int) -> None:
    def fail(unit: int, first: int, table: Any) -> Any:
        if table is not None and (unit, first) == (1, at):
            raise ZeroDivisionError("the page is torn")
        return table

    batches = iter(fastpipe.read_units(Sliced(slices=fail), batch_size=2))
    whole = (4 + at) // 2
    assert flat(itertools.islice(batches, whole)) == NUMBERS[: 2 * whole]
    with pytest.raises(ZeroDivisionError, match="the page is torn") as raised:
        next(batches)
    assert raised.value.__notes__ == ["raised while fastpipe read a unit (unit page 1)"]


WRONG: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "too few": (
        lambda table, last: table.slice(1),
        fastpipe.errors.ShapeError,
        r"expected 5 rows in the slice that begins at row 20, but found 4 .*page 1",
    ),
    "too many": (
        lambda table, last: pa.concat_tables([table, table]),
        fastpipe.errors.ShapeError,
        r"expected 5 rows in the slice that begins at row 20, but found 10",
    ),
    "no table": (lambda table, last: 7, TypeError, r"read_slices\(1\) must yield Arrow data .* yielded 7"),
    "another schema": (
        lambda table, last: pa.table({"y": [0] * 5}),
        fastpipe.errors.SchemaError,
        "the column 'x', but the record batch does not",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_slices_that_contradict_the_units_are_refused(what: str) -> None:
    act, error, match = WRONG[what]

    def slices(unit: int, first: int, table: Any) -> Any:
        return act(table, first) if table is not None and (unit, first) == (1, 20) else table

    with pytest.raises(error, match=match):
        list(fastpipe.read_units(Sliced(slices=slices), batch_size=4))


def test_units_with_too_few_or_too_many_slices_are_refused() -> None:
    class Ends(Sliced):
        def _slices(self, unit: int, start: int, rows: int) -> Iterator[Any]:
            return itertools.islice(super()._slices(unit, start, rows), 2)

    with pytest.raises(
        fastpipe.errors.ShapeError, match=r"read_slices\(1\) ended before row 20, but .* the unit has 25 rows"
    ):
        list(fastpipe.read_units(Ends(), batch_size=4))

    def more(unit: int, first: int, table: Any) -> Any:
        return pa.table({"x": [1]}) if table is None else table

    with pytest.raises(fastpipe.errors.ShapeError, match=r"read_slices\(1\) continued after row 25"):
        list(fastpipe.read_units(Sliced(slices=more), batch_size=4))


def test_none_is_not_a_slice() -> None:
    class Nones(Sliced):
        def read_slices(self, unit: int, start: int, rows: int) -> Iterator[Any]:
            return iter([None, None, None])

    with pytest.raises(TypeError, match=r"read_slices\(1\) must yield Arrow data .* yielded None"):
        list(fastpipe.read_units(Nones(), batch_size=4))


def test_read_slices_must_return_an_iterator() -> None:
    class Returns(Sliced):
        def read_slices(self, unit: int, start: int, rows: int) -> Any:
            return None

    with pytest.raises(TypeError, match="not iterable"):
        list(fastpipe.read_units(Returns(), batch_size=4))


def test_errors_count_rows_from_the_start_of_the_unit() -> None:
    class Null(Sliced):
        def table(self, unit: int) -> pa.Table:
            table = super().table(unit)
            values = [None if (unit, i) == (1, 23) else value for i, value in enumerate(table["x"].to_pylist())]
            return pa.table({"x": pa.array(values, pa.int64())})

    with pytest.raises(fastpipe.FastpipeError, match=r"unit page 1, record 23") as raised:
        list(fastpipe.read_units(Null(), batch_size=4))
    assert raised.value.record == 23  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_row_groups_are_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    monkeypatch.undo()
    rows, width = 120_000, 256
    values = np.random.default_rng(1).random(rows * width, "float32")
    table = pa.table(
        {"x": pa.FixedSizeListArray.from_arrays(pa.array(values), width), "text": [f"row {i}" for i in range(rows)]}
    )
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=rows)
    values = values.reshape(rows, width)
    del table
    before = most = pa.total_allocated_bytes()
    reader = fastpipe.read_parquet(tmp_path, columns=["x"], batch_size=1000, num_threads=num_threads)
    with reader:
        for step, batch in enumerate(reader):
            most = max(most, pa.total_allocated_bytes())
            assert np.array_equal(batch["x"], values[1000 * step : 1000 * step + 1000])
    # 63 MB: the slices that are prefetched up to the limit because the consumer is slow, and memory of pyarrow itself.
    assert most - before < values.nbytes * 0.65


def test_row_groups_are_resumed_at_every_step(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"x": range(230)}), tmp_path / "a.parquet", row_group_size=150)
    reader = fastpipe.read_parquet(tmp_path, batch_size=9)
    with reader:
        states = [reader.state_dict() for _ in reader]
    for step, state in enumerate(states[:-1]):
        again = fastpipe.read_parquet(tmp_path, batch_size=9)
        again.load_state_dict(state)
        assert flat(again) == list(range(9 * step + 9, 230))


def test_a_limit_below_a_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpipe.units._data._SLICE_BYTES", 1 << 20)
    rows = 2_000_000
    pa.parquet.write_table(pa.table({"x": range(rows)}), tmp_path / "a.parquet", row_group_size=rows)
    reader = fastpipe.read_parquet(tmp_path, batch_size=4096, memory_limit="8MB", num_threads=2)
    assert sum(int(batch["x"].sum()) for batch in reader) == rows * (rows - 1) // 2
    with pytest.raises(fastpipe.errors.LimitError, match=r"memory_limit is 8.0 MB, and this takes at least"):
        list(fastpipe.read_parquet(tmp_path, batch_size=4096, memory_limit="8MB", shuffle=True, seed=1))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")
def test_a_forked_child_reads_its_own_slices() -> None:
    reader = fastpipe.read_units(Sliced([100]), batch_size=5)
    batches = iter(reader)
    next(batches)
    if (child := os.fork()) == 0:
        reader.set_epoch(0)
        os._exit(0 if flat(reader) == list(range(100)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert flat(batches) == list(range(5, 100))


def test_slices_of_row_groups_with_folders(tmp_path: Path) -> None:
    for year in (2025, 2026):
        folder = tmp_path / f"year={year}"
        folder.mkdir()
        table = pa.table({"x": range(1000), "text": [f"{year}-{i}" for i in range(1000)]})
        pa.parquet.write_table(table, folder / "a.parquet", row_group_size=600)
    reader = fastpipe.read_parquet(tmp_path, batch_size=70)
    batches = list(reader)
    assert [text for batch in batches for text in batch["text"].to_list()] == [
        f"{year}-{i}" for year in (2025, 2026) for i in range(1000)
    ]
    assert flat(batches, "year") == [2025] * 1000 + [2026] * 1000
    place = fastpipe.read_parquet(tmp_path, batch_size=70).locate(10, 3, epoch=0)
    assert (place.unit, place.row) == (1, 103)


def test_a_file_that_changes_between_slices(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"x": range(1000)}), path)
    reader = fastpipe.read_parquet(path, batch_size=10, num_threads=1)
    with reader:
        batches = iter(reader)
        next(batches)
        pa.parquet.write_table(pa.table({"x": range(1000)}), path)
        with pytest.raises(fastpipe.errors.StorageError, match="changed"):
            list(batches)


def test_partitions_do_not_depend_on_slices() -> None:
    sliced = fastpipe.read_units(Sliced(), batch_size=8)
    shuffled = fastpipe.read_units(Sliced(), batch_size=8, shuffle=True, seed=1)
    for count in (1, 2, 3, 9):
        parts = sliced.partition(count)
        assert parts == shuffled.partition(count)
        for reader in (sliced, shuffled):
            assert flat(reader.read_partition(parts[0])) or not parts[0].rows
            found = [sorted(flat(reader.read_partition(part))) for part in parts]
            assert list(map(len, found)) == [part.rows for part in parts]
            assert list(itertools.chain(*found)) == NUMBERS
    part = sliced.read_partition(parts[-1])
    rows = flat(part)
    found = [part.locate(row // 8, row % 8, epoch=0) for row in range(len(rows))]
    assert [sum(ROWS[: at.unit]) + at.row for at in found] == rows
    again = pickle.loads(pickle.dumps(part))
    assert flat(again) == rows
    for wrong in (parts[0]._replace(stop=9), parts[0]._replace(rows=5), parts[0]._replace(start=7, stop=9)):
        for reader in (sliced, shuffled):
            with pytest.raises(
                fastpipe.errors.StateError, match="the partition does not belong to this reader: it has"
            ):
                reader.read_partition(wrong)
    inner = part.partition(2)
    assert list(itertools.chain(*(flat(part.read_partition(each)) for each in inner))) == rows


def test_partitions_look_at_the_source_once() -> None:
    class Counted(Sliced):
        looks = 0

        @property
        def dictionaries(self) -> dict[str, Any]:
            self.looks += 1
            return {}

    units = Counted()
    reader = fastpipe.read_units(units, batch_size=8)
    before = units.looks
    for _ in range(3):
        for part in reader.partition(3):
            assert reader.read_partition(part).num_rows == part.rows
    assert units.looks == before + 1
