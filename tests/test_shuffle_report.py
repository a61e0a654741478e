from __future__ import annotations

import gzip
import io
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import fixtures
from every_source import Make, make, order
from fastpipe.statistics import _shuffle_math, _shuffle_report
from fastpipe.statistics._shuffle_report import Measure
from fastpipe.typing import ShuffleReport
from fixtures import Run
from wire import SYNC, container, header, long, stored

# The fixture that makes readers of each source.
__all__ = ["make"]

KINDS = ("window", "block", "buffer")
ID = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": "long"}]}
UNEVEN = (37, 5, 60, 1, 44, 18, 60, 23, 9, 80, 31, 2, 55, 40, 35)


def write(path: Path, sizes: Sequence[int], first: int = 0) -> Path:
    """Writes a file of blocks with the given numbers of rows. Rows are numbered from `first`."""
    ends = np.cumsum([first, *sizes]).tolist()
    blocks = [(stop - start, b"".join(map(long, range(start, stop)))) for start, stop in pairwise(ends)]
    path.write_bytes(container(ID, blocks))
    return path


def write_files(folder: Path, files: Sequence[Sequence[int]]) -> list[Path]:
    starts = np.cumsum([0, *map(sum, files)]).tolist()
    return [write(folder / f"{i}.avro", sizes, starts[i]) for i, sizes in enumerate(files)]


def report_of(
    source: Any, *, batch_size: int, shuffle: Any = True, seed: int = 0, shuffle_buffer: int | None = None, **other: Any
) -> ShuffleReport:
    """Returns the report of an order of Avro files."""
    order = {"batch_size": batch_size, "shuffle": shuffle, "shuffle_buffer": shuffle_buffer, "seed": seed}
    with fastpipe.read_avro(source, **order) as reader:
        return reader.shuffle_report(**other)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def scores(report: ShuffleReport) -> dict[str, float]:
    return {name: getattr(report, name).score for name in ("displacement", "units", "files", "same_unit_pairs")}


# --- Comparison with the batches of readers ---


def check_measures(
    report: ShuffleReport, batches: list[np.ndarray], unit_of: np.ndarray, file_of: np.ndarray | None
) -> None:
    """Compares a report of all batches with values that are computed from the rows of the batches.

    Args:
        report: The report.
        batches: For each batch, the indices of its rows in the dataset.
        unit_of: For each row of the dataset, its unit.
        file_of: For each row of the dataset, its file. None if it has no files.
    """
    total, size = len(unit_of), report.batch_size
    unshuffled = [np.arange(start, min(start + size, total)) for start in range(0, total, size)]
    assert (
        (report.num_rows, report.num_units) == (sum(map(len, batches)), len(set(unit_of))) == (total, len(set(unit_of)))
    )
    assert report.num_files == (0 if file_of is None else len(set(file_of)))
    assert report.batches_seen == report.num_batches == len(batches) == len(unshuffled)
    for measure, group_of in ((report.units, unit_of), (report.files, file_of)):
        if group_of is None:
            assert math.isnan(measure.found)
            continue
        assert measure.found == pytest.approx(mean([len(set(group_of[batch])) for batch in batches]))
        assert measure.unshuffled == pytest.approx(mean([len(set(group_of[batch])) for batch in unshuffled]))

    moved = np.abs(np.concatenate(batches) - np.arange(total))
    assert report.displacement.found == pytest.approx(moved.mean())
    found = [measure.found for measure in report.displacement_quantiles]
    assert found == np.quantile(moved, [0.05, 0.5, 0.95], method="inverted_cdf").tolist()

    def same_unit(batches: list[np.ndarray]) -> float:
        same = all_pairs = 0
        for batch in batches:
            units = unit_of[batch]
            same += (np.count_nonzero(units[:, None] == units) - len(batch)) // 2
            all_pairs += len(batch) * (len(batch) - 1) // 2
        return same / all_pairs if all_pairs else math.nan

    assert report.same_unit_pairs.found == pytest.approx(same_unit(batches), nan_ok=True)
    assert report.same_unit_pairs.unshuffled == pytest.approx(same_unit(unshuffled), nan_ok=True)


@pytest.mark.parametrize("shuffle", [False, *KINDS])
@pytest.mark.parametrize(("batch_size", "seed", "epoch"), [(16, 0, 0), (7, 5, 3), (500, 1, 0), (1000, 1, 1), (1, 2, 0)])
def test_measures_match_the_batches_of_a_reader(
    tmp_path: Path, shuffle: bool, batch_size: int, seed: int, epoch: int
) -> None:
    files = [UNEVEN[:4], (), (0, 30, 0), UNEVEN[4:]]
    paths = write_files(tmp_path, files)
    buffer = None if shuffle is False else 100
    order = {"batch_size": batch_size, "shuffle": shuffle, "shuffle_buffer": buffer, "seed": seed}
    report = report_of(paths, **order, epoch=epoch, max_batches=10**6)
    with fastpipe.read_avro(paths, **order) as reader:
        reader.set_epoch(epoch)
        batches = [batch["id"] for batch in reader]
    block_of = np.repeat(np.arange(sum(map(len, files))), [size for sizes in files for size in sizes])
    file_of = np.repeat(np.arange(len(files)), [sum(sizes) for sizes in files])
    check_measures(report, batches, block_of, file_of)


# --- Every source ---


def locations(reader: fastpipe.Reader, epoch: int) -> list[list[fastpipe.typing.Location]]:
    """Returns the locations of the rows of each batch."""
    sizes = [len(next(iter(reader.batch_at(step, epoch).values()))) for step in range(len(reader))]
    return [[reader.locate(step, row, epoch) for row in range(size)] for step, size in enumerate(sizes)]


def unit_at(location: Any, row: int, ends: np.ndarray) -> object:
    """Returns the unit of a row, from its location if the location says so."""
    for name in ("unit", "block"):
        if hasattr(location, name):
            return location.file, getattr(location, name)
    return int(np.searchsorted(ends, row, side="right"))


@order
@pytest.mark.parametrize("epoch", [0, 2])
def test_measures_match_the_locations_of_rows(
    make: Make, order: dict[str, Any], epoch: int, request: pytest.FixtureRequest
) -> None:
    source = request.node.callspec.params["make"]
    stored = [location for batch in locations(make(batch_size=32), 0) for location in batch]
    place_of = {location: row for row, location in enumerate(stored)}
    reader = make(batch_size=32, **order)
    batches = [np.array([place_of[location] for location in batch]) for batch in locations(reader, epoch)]
    ends = np.cumsum(reader._data.handle.unit_rows())
    units = [unit_at(location, row, ends) for row, location in enumerate(stored)]
    unit_of = np.array([sorted(set(map(str, units))).index(str(unit)) for unit in units])
    files = None if "part" in source or stored[0].file is None else np.array([location.file for location in stored])
    report = reader.shuffle_report(epoch=epoch)
    check_measures(report, batches, unit_of, files)
    assert math.isnan(report.bytes_per_row) == (files is None)
    assert f"{report.unit_name}s in a batch" in str(report)
    assert ("files in a batch" in str(report)) == (files is not None)
    names = {
        "avro": "block",
        "bags": "block",
        "part of avro": "block",
        "csv": "chunk",
        "tfrecord": "chunk",
        "interactions": "shard",
    }
    assert report.unit_name == names.get(source, "unit")


@order
@pytest.mark.parametrize("buffer", [{}, {"shuffle_buffer": None}])
def test_another_order_has_the_report_of_its_reader(make: Make, order: dict[str, Any], buffer: dict[str, Any]) -> None:
    other = {"seed": 9, **order, **(buffer if order else {}), "batch_size": 16}
    own = make(**other).shuffle_report()
    assert repr(make(batch_size=32).shuffle_report(**{"shuffle": False, **other})) == repr(own)
    if order.get("shuffle") and buffer == {}:
        # A window is rounded up to whole batches of the size in its order, not of the reader's batch size.
        shuffled = make(batch_size=48, shuffle=True, shuffle_buffer=order["shuffle_buffer"], seed=9)
        other.pop("shuffle_buffer")
        assert repr(shuffled.shuffle_report(**other)) == repr(own)


def test_the_epoch_is_that_of_the_next_pass(make: Make) -> None:
    reader = make(batch_size=32, shuffle=True, seed=3)
    assert reader.shuffle_report().epoch == 0
    batches = iter(reader)
    next(batches)
    state = reader.state_dict()
    assert reader.shuffle_report().epoch == 1
    assert len(list(batches)) == len(reader) - 1, "the report doesn't change the reader"
    reader.set_epoch(7)
    assert reader.shuffle_report().epoch == 7
    reader.load_state_dict(state)
    assert reader.shuffle_report().epoch == 0
    assert repr(reader.shuffle_report(epoch=0)) == repr(make(batch_size=32, shuffle=True, seed=3).shuffle_report())


def test_readers_of_other_rows_are_refused(make: Make) -> None:
    ranks = make(batch_size=32, shuffle=True, seed=3, world_size=2)
    with pytest.raises(ValueError, match="call it on a reader without rank and world_size"):
        ranks.shuffle_report()
    with pytest.raises(fastpipe.errors.UnsupportedError, match="the reader that this sample was drawn from"):
        make(batch_size=32).sample(50, seed=1, redraw=True).shuffle_report()


def test_served_readers_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.flight")
    with fastpipe.read_avro(write(tmp_path / "a.avro", UNEVEN), batch_size=8).serve() as server:
        remote = fastpipe.connect(server.url)
        with pytest.raises(fastpipe.errors.UnsupportedError, match="call it on the reader that is served"):
            remote.shuffle_report()


def test_slices_of_units_count_as_their_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    from toy_units import Numbers

    class Sliced(Numbers):
        def read_slices(self, unit: int, start: int, rows: int) -> Any:
            raise AssertionError("a report reads no data")

    monkeypatch.setattr("fastpipe.units._data._SLICE_BYTES", 80)
    reader = fastpipe.read_units(Sliced([4, 25, 0, 3, 30]), batch_size=8)
    assert len(reader._data.handle.unit_rows()) > 5
    assert reader.shuffle_report().num_units == 4
    order: dict[str, Any] = {"shuffle": True, "shuffle_buffer": 16, "seed": 3}
    own = fastpipe.read_units(Sliced([4, 25, 0, 3, 30]), batch_size=8, **order).shuffle_report()
    assert repr(reader.shuffle_report(**order)) == repr(own)
    part = reader.read_partition(reader.partition(2)[0]).shuffle_report()
    assert (part.num_units, part.num_rows) == (3, 32)


def test_drop_last_may_leave_no_batch(tmp_path: Path) -> None:
    reader = fastpipe.read_avro(write(tmp_path / "a.avro", UNEVEN), batch_size=8, shuffle=True, drop_last=True, seed=1)
    assert (reader.num_rows, reader.shuffle_report().num_batches) == (500, 62)
    report = reader.shuffle_report(batch_size=501)
    assert (report.num_batches, report.batches_seen, report.num_rows) == (0, 0, 500)
    assert all(map(math.isnan, scores(report).values()))
    assert str(report).endswith("There are no batches to shuffle: a batch has more rows than the dataset.")


# --- Maps ---


def test_the_map_counts_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", UNEVEN)
    report = report_of(path, batch_size=10, shuffle_buffer=50, seed=3)
    with fastpipe.read_avro(path, batch_size=10, shuffle=True, shuffle_buffer=50, seed=3) as reader:
        rows = np.concatenate([batch["id"] for batch in reader])
    counts = np.zeros((12, 40))
    for place, row in enumerate(rows):
        counts[place * 12 // 500, row * 40 // 500] += 1
    perfect = np.array([[(500 / 12) / 40]])
    # Some cells of the map cover one row more than others.
    np.testing.assert_allclose(np.array(report.density), counts / perfect, rtol=0.1)
    assert np.array(report.density).shape == (12, 40)


def test_the_map_of_a_few_rows_is_small(tmp_path: Path) -> None:
    report = report_of(write(tmp_path / "a.avro", [2, 3]), batch_size=2, shuffle=False)
    assert np.array(report.density).tolist() == (np.eye(5) * 5).tolist()
    assert report.map.splitlines() == ["█    ", " █   ", "  █  ", "   █ ", "    █"]


def test_shades() -> None:
    density = [[0.0, 0.04, 0.06, 0.49, 0.5, 1.0, 1.49, 1.5, 3.9, 4.0, 12.0, math.nan]]
    assert _shuffle_report.shaded(density) == "  ░░▒▒▒▓▓██ "


# --- Values of a perfect permutation ---


def test_the_probability_to_miss_a_group_is_exact() -> None:
    for total in range(1, 40):
        groups = np.arange(total + 1)
        for drawn in range(total + 1):
            exact = [math.comb(total - group, drawn) / math.comb(total, drawn) for group in range(total + 1)]
            np.testing.assert_allclose(np.exp(_shuffle_math.log_miss(total, drawn, groups)), exact, atol=1e-11)


@pytest.mark.parametrize("total", [130, 131, 160, 200, 1000, 20_000])
def test_the_probability_to_miss_a_large_group(total: int) -> None:
    # Covers arguments beyond the number of terms that are added one by one.
    for drawn in {65, 66, 100, total // 4, total // 2, total - 65} - set(range(65)):
        groups = np.unique([65, 66, 80, total // 3, total - drawn])
        groups = groups[(groups > _shuffle_math._TERMS) & (groups <= total)]
        exact = [math.comb(total - int(group), drawn) / math.comb(total, drawn) for group in groups]
        np.testing.assert_allclose(np.exp(_shuffle_math.log_miss(total, drawn, groups)), exact, atol=1e-7)


@pytest.mark.parametrize(
    ("total", "drawn", "group"),
    [
        *[(10**9, drawn, group) for drawn in (5, 65, 1024, 100_000) for group in (1, 64, 65, 100, 70_000)],
        (10**9, 5, 10**9 - 6),
        (10**9, 1024, 10**7),
        (10**12, 8, 3),
    ],
)
def test_the_logarithm_is_exact_for_many_rows(total: int, drawn: int, group: int) -> None:
    # The exact value is a product with one factor per drawn row.
    exact = math.fsum(math.log1p(-group / (total - i)) for i in range(drawn))
    found = _shuffle_math.log_miss(total, drawn, np.array([group]))
    np.testing.assert_allclose(found, [exact], rtol=1e-6)


def test_blocks_of_a_perfect_permutation_of_a_billion_rows() -> None:
    # Nearly every row of a batch is from another block.
    blocks = np.full(10**6, 1000)
    exact = 10**6 * -math.expm1(math.fsum(math.log1p(-1000 / (10**9 - i)) for i in range(1024)))
    assert _shuffle_math.distinct(blocks, 1024) == pytest.approx(exact, rel=1e-7)


def test_blocks_and_pairs_of_a_perfect_permutation() -> None:
    groups = np.array(UNEVEN)
    block_of = np.repeat(np.arange(len(groups)), groups)
    rng = np.random.default_rng(0)
    for batch in (2, 16, 100):
        drawn = [rng.permutation(block_of)[:batch] for _ in range(3000)]
        distinct = [len(set(blocks)) for blocks in drawn]
        pairs = [(np.bincount(blocks) * (np.bincount(blocks) - 1)).sum() / (batch * (batch - 1)) for blocks in drawn]
        for expected, found in (
            (_shuffle_math.distinct(groups, batch), distinct),
            (_shuffle_math.same_group(groups), pairs),
        ):
            assert abs(expected - np.mean(found)) < 4 * np.std(found) / math.sqrt(len(found))
    assert _shuffle_math.distinct(groups, 500) == pytest.approx(15)
    assert _shuffle_math.distinct(groups, 1) == pytest.approx(1)


@pytest.mark.parametrize("total", [1, 2, 3, 10, 101])
def test_displacement_of_a_perfect_permutation(total: int) -> None:
    places = np.arange(total)
    distances = np.abs(places[:, None] - places)
    assert _shuffle_math.mean_displacement(places, total) == pytest.approx(distances.mean())
    assert _shuffle_math.mean_displacement(places, total) == pytest.approx((total - 1 / total) / 3)
    assert _shuffle_math.mean_displacement(places[:1], total) == pytest.approx(distances[0].mean())
    for q in (0.05, 0.5, 0.95, 1.0):
        exact = np.quantile(distances, q, method="inverted_cdf")
        assert _shuffle_math.displacement_quantile(q, total) == exact


def test_displacement_of_a_perfect_permutation_of_many_rows() -> None:
    quantiles = [_shuffle_math.displacement_quantile(q, 10**12) / 10**12 for q in (0.05, 0.5, 0.95)]
    np.testing.assert_allclose(quantiles, [0.0253206, 0.2928932, 0.7763932], atol=1e-7)


def test_spans_of_groups() -> None:
    ends = np.array([3, 10, 11])
    assert [_shuffle_math.stretch(ends, *part).tolist() for part in [(0, 11), (0, 3), (2, 4), (10, 11), (4, 6)]] == [
        [3, 7, 1],
        [3],
        [1, 1],
        [1],
        [2],
    ]


# --- Scores ---


@pytest.mark.parametrize(
    ("measure", "score"),
    [
        (Measure(5.0, 10.0, 0.0), 0.5),
        (Measure(0.5, 0.1, 0.9), 0.5),
        (Measure(12.0, 10.0, 2.0), 1.0),
        (Measure(1.0, 10.0, 2.0), 0.0),
        (Measure(1.0, 1.0, 1.0), math.nan),
        (Measure(math.nan, math.nan, math.nan), math.nan),
    ],
)
def test_scores_range_from_unshuffled_to_perfect(measure: Measure, score: float) -> None:
    assert measure.score == pytest.approx(score, nan_ok=True)


@pytest.mark.parametrize("shuffle", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_buffer_of_all_rows_is_perfect(tmp_path: Path, shuffle: str, seed: int) -> None:
    paths = write_files(tmp_path, [[20] * 50] * 4)
    report = report_of(paths, batch_size=25, shuffle=shuffle, shuffle_buffer=4000, seed=seed)
    assert min(scores(report).values()) > 0.95
    assert [measure.score > 0.9 for measure in report.displacement_quantiles] == [True] * 3
    assert report.units.found == pytest.approx(report.units.perfect, rel=0.02)


def test_no_shuffling_has_no_score(tmp_path: Path) -> None:
    report = report_of(write_files(tmp_path, [[20] * 50] * 4), batch_size=25, shuffle=False)
    assert set(scores(report).values()) == {0.0}
    assert {str(score) for score in scores(report).values()} == {"0.0"}
    assert report.displacement.found == 0
    assert report.units.found == report.units.unshuffled
    assert (report.shuffle, report.shuffle_buffer, report.buffer_bytes) == ("sequential", None, 0.0)


def test_windows_move_rows_far_but_mix_few_blocks(tmp_path: Path) -> None:
    report = report_of(write(tmp_path / "a.avro", [50] * 400), batch_size=50, shuffle_buffer=100, max_batches=400)
    assert report.displacement.score > 0.9
    assert report.units.score < 0.1
    assert "gives it: a larger shuffle_buffer mixes more of them." in report.advice
    buffer = report_of(tmp_path / "a.avro", batch_size=50, shuffle="buffer", shuffle_buffer=1000, max_batches=400)
    assert buffer.displacement.score < 0.2
    assert buffer.units.score > 0.5


@pytest.mark.parametrize("shuffle", KINDS)
def test_a_larger_buffer_shuffles_better(tmp_path: Path, shuffle: str) -> None:
    paths = write_files(tmp_path, [[20] * 40] * 5)
    found = [report_of(paths, batch_size=20, shuffle=shuffle, shuffle_buffer=buffer) for buffer in (20, 100, 500, 2500)]
    for name in ("units", "files", "same_unit_pairs"):
        values = [getattr(report, name).score for report in found]
        assert values == sorted(values)
        assert values[-1] > values[0]


def test_blocks_of_one_row_have_nothing_to_mix(tmp_path: Path) -> None:
    report = report_of(write(tmp_path / "a.avro", [1] * 100), batch_size=10)
    assert math.isnan(report.units.score)
    assert math.isnan(report.same_unit_pairs.score)
    assert math.isnan(report.files.score)
    assert report.displacement.score > 0.8
    assert "Even without shuffling" in report.advice


# --- Selection of batches ---


def test_many_batches_are_sampled(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", [40] * 2500)
    sample = report_of(path, batch_size=50, shuffle_buffer=4000)
    whole = report_of(path, batch_size=50, shuffle_buffer=4000, max_batches=2000)
    assert (sample.batches_seen, sample.num_batches, whole.batches_seen) == (200, 2000, 2000)
    assert sample.units.found == pytest.approx(whole.units.found, rel=0.02)
    assert sample.units.perfect == pytest.approx(whole.units.perfect)
    assert sample.same_unit_pairs.found == pytest.approx(whole.same_unit_pairs.found, rel=0.05)
    assert sample.displacement.found == pytest.approx(whole.displacement.found, rel=0.05)
    assert "looked at 200 of 2,000 batches" in str(sample)


@pytest.mark.parametrize("batches", [1, 5, 199, 200, 201, 1000, 10**6])
@pytest.mark.parametrize("most", [1, 7, 200])
@pytest.mark.parametrize("jump", [1, 10**6, 10**10])
def test_the_sample_is_spread_over_the_epoch(batches: int, most: int, jump: int) -> None:
    steps = _shuffle_report._steps(batches, most, 1000, jump)
    assert steps == sorted(set(steps))
    assert 0 <= steps[0] <= steps[-1] < batches
    if batches <= most:
        assert steps == list(range(batches))
        return
    assert most * 0.9 < len(steps) <= most
    twelfths = np.bincount(np.array(steps) * 12 // batches, minlength=12)
    assert most < 12 or twelfths.min() > 0
    if batches == 1000:  # The report iterates over this few rows anyway.
        assert steps == [(2 * i + 1) * 1000 // (2 * most) for i in range(most)]


@pytest.mark.parametrize("shuffle", [False, *KINDS])
def test_batches_do_not_depend_on_skipped_batches(tmp_path: Path, shuffle: bool) -> None:
    reader = fastpipe.read_avro(write(tmp_path / "a.avro", UNEVEN), batch_size=5, shuffle=shuffle, seed=1)
    order = reader._order
    steps = [3, 4, 20, 50, 51, 99]
    batches = [list(_shuffle_report._batches(order, 2, steps, near)) for near in (0, 17, 1000)]
    for step, found in zip(steps, zip(*batches, strict=True), strict=True):
        expected = [rows.tolist() for rows in order.rows(2, step)]
        assert [batch[0] for batch in found] == [step] * 3
        assert [[rows.tolist() for rows in batch[1:]] for batch in found] == [expected] * 3


def test_reports_are_deterministic(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", UNEVEN)
    first, second = (report_of(path, batch_size=8) for _ in range(2))
    assert first.units == second.units
    assert str(first) == str(second)
    other = report_of(path, batch_size=8, seed=1)
    assert other.displacement != first.displacement
    assert report_of(path, batch_size=8, epoch=1).displacement not in (first.displacement, other.displacement)


# --- Data that is and isn't read ---


@pytest.mark.parametrize("sizes", [[], [0, 0]])
@pytest.mark.parametrize("shuffle", [False, *KINDS])
def test_reports_without_rows(tmp_path: Path, sizes: list[int], shuffle: bool) -> None:
    report = report_of(write(tmp_path / "a.avro", sizes), batch_size=8, shuffle=shuffle)
    assert (report.num_rows, report.num_units, report.num_files, report.num_batches) == (0, 0, 0, 0)
    assert all(map(math.isnan, scores(report).values()))
    assert report.density == ()
    assert "There are no rows to shuffle." in str(report)


@pytest.mark.parametrize("shuffle", [False, *KINDS])
def test_one_row(tmp_path: Path, shuffle: bool) -> None:
    report = report_of(write(tmp_path / "a.avro", [1]), batch_size=8, shuffle=shuffle)
    assert all(map(math.isnan, scores(report).values()))
    assert report.density == ((1.0,),)
    assert report.units.found == report.units.perfect == 1
    assert "1 row, 1 block, 1 file; looked at 1 of 1 batch\n" in str(report)


def test_data_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.avro"
    path.write_bytes(header(ID, "deflate") + stored(10, b"\xff" * 30) + stored(30, b"\xff" * 30))
    report = report_of(path, batch_size=4)
    assert (report.num_rows, report.num_units) == (40, 2)
    assert report.bytes_per_row == path.stat().st_size / 40


def test_bytes_of_the_buffer(tmp_path: Path) -> None:
    report = report_of(write(tmp_path / "a.avro", UNEVEN), batch_size=10, shuffle_buffer=100)
    assert report.bytes_per_row == pytest.approx((tmp_path / "a.avro").stat().st_size / 500)
    assert report.buffer_bytes == pytest.approx(100 * report.bytes_per_row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be between"),
        ({"shuffle": "sorted"}, "shuffle must be True, False"),
        ({"shuffle": False, "shuffle_buffer": 10}, "shuffle_buffer has no effect"),
        ({"max_batches": 0}, "max_batches must be between"),
        ({"epoch": -1}, "epoch must be between"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    path = write(tmp_path / "a.avro", [3])
    reader = fastpipe.read_avro(path, batch_size=8, shuffle=True, shuffle_buffer=100, seed=1)
    with pytest.raises(ValueError, match=message):
        reader.shuffle_report(**arguments)


# --- As text ---


def test_reports_as_text(tmp_path: Path) -> None:
    text = str(report_of(write_files(tmp_path, [[25] * 20] * 2), batch_size=20, shuffle=False))
    assert text == (
        "shuffle=False, batch_size=20, epoch 0\n"
        "1,000 rows, 40 blocks, 2 files; looked at 50 of 50 batches\n"
        "\n"
        "                                 this order  perfect  unshuffled  score\n"
        "-------------------------------  ----------  -------  ----------  -----\n"
        "places that a row moves: mean             0      333           0   0.00\n"
        "  5 % quantile                            0       25           0   0.00\n"
        "  median                                  0      293           0   0.00\n"
        "  95 % quantile                           0      776           0   0.00\n"
        "blocks in a batch                       1.6       16         1.6   0.00\n"
        "files in a batch                          1        2           1   0.00\n"
        "pairs in a batch from one block      73.7 %    2.4 %      73.7 %   0.00\n"
        "\n"
        "       dataset\n"
        "      ┌────────────────────────────────────────┐\n"
        "epoch │████                                    │\n"
        "      │   ████                                 │\n"
        "      │      ▓███                              │\n"
        "      │          ████                          │\n"
        "      │             ████                       │\n"
        "      │                ▓███                    │\n"
        "      │                    ████                │\n"
        "      │                       ████             │\n"
        "      │                          ▓███          │\n"
        "      │                              ████      │\n"
        "      │                                 ████   │\n"
        "      │                                    ▓███│\n"
        "      └────────────────────────────────────────┘\n"
        "▒ about as many rows as in a perfect permutation, ░ less than half, ▓ and █ over 1.5 and 4 times as many\n"
        "\n"
        "A batch has rows of 9.99 % of the blocks that a perfect permutation gives it: shuffle=True mixes\n"
        "more of them."
    )


def test_maps_in_the_manual_match_reports(tmp_path: Path) -> None:
    paths = write_files(tmp_path, [[1000] * 50] * 4)
    left, right, left_below, right_below = (
        report_of(paths, batch_size=256, shuffle=shuffle, shuffle_buffer=20_000 if shuffle else None).map.splitlines()
        for shuffle in (False, True, "block", "buffer")
    )
    page = (Path(__file__).parent.parent / "docs/shuffling.md").read_text(encoding="utf-8")
    for lines in (zip(left, right, strict=True), zip(left_below, right_below, strict=True)):
        assert "\n".join(f"│{a}│  │{b}│" for a, b in lines) in page


def test_advice_for_sorted_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.avro", [20] * 500)
    assert "if the rows are sorted, use shuffle=True" in report_of(path, batch_size=20, shuffle="block").advice
    assert "sorted" not in report_of(path, batch_size=20).advice
    assert "sorted" not in report_of(path, batch_size=20, shuffle="block", shuffle_buffer=10_000).advice


# --- The command ---


run = fixtures.command(100, "inspect")


@pytest.mark.parametrize("suffix", ["csv", "tsv.gz", "parquet", "arrow"])
def test_the_command_reports_on_every_format(tmp_path: Path, run: Run, suffix: str) -> None:
    path = tmp_path / f"table.{suffix}"
    numbers = list(range(600))
    if "sv" in suffix:
        text = "".join(f"{number}{chr(9) if suffix[0] == 't' else ','}{'x' * 1000}\n" for number in ["id", *numbers])
        path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    else:
        pa = pytest.importorskip("pyarrow")
        table = pa.table({"id": numbers})
        if suffix == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=30)
        else:
            pytest.importorskip("pyarrow.feather").write_feather(table, path, chunksize=30)
    order: dict[str, Any] = {"batch_size": 10, "shuffle": "block", "shuffle_buffer": 64, "seed": 0}
    read = {"parquet": fastpipe.read_parquet, "arrow": fastpipe.read_arrow}.get(suffix, fastpipe.read_csv)
    report = read(path, **order, **({"delimiter": "\t"} if suffix[0] == "t" else {})).shuffle_report()
    code, out, err = run("--shuffle", "block", path, "--shuffle-buffer", 64, "--batch-size", 10)
    assert (code, err) == (0, "")
    assert out.startswith(f"{report}\n\nshuffle_buffer ")
    assert f"{report.unit_name}s in a batch  of perfect" in out
    assert out.endswith("memory: bytes of the rows in the buffer, as stored, which may be compressed\n")


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_the_command_prints_the_report(tmp_path: Path, run: Run, kind: str) -> None:
    paths = write_files(tmp_path, [[30] * 100] * 2)
    code, out, err = run("--shuffle", *([kind] if kind else []), *paths, "--shuffle-buffer", 400, "--batch-size", 50)
    report = report_of(paths, batch_size=50, shuffle=kind or True, shuffle_buffer=400)
    assert (code, err) == (0, "")
    assert out.startswith(f"{report}\n\nshuffle_buffer ")
    table = out[len(str(report)) :].splitlines()
    assert [line.split()[0] for line in table[4:7]] == ["100", "400", "1_600"]
    assert table[5].split()[3] == _shuffle_report.number(report.units.found)
    assert table[7] == "memory: bytes of the rows in the buffer, uncompressed (sampled)"


def test_buffers_of_all_rows_are_compared_with_smaller_ones(tmp_path: Path, run: Run) -> None:
    code, out, _ = run("--shuffle=buffer", write(tmp_path / "a.avro", [40] * 10))
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[-4:-1]] == ["25", "100", "16_384"]


def test_the_command_as_json(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "a.avro", [30] * 100)
    code, out, _ = run("--shuffle", "--json", path, "--shuffle-buffer", "512", "--batch-size", "64")
    report = report_of(path, batch_size=64, shuffle_buffer=512)
    quarter, own, four = json.loads(out)
    assert code == 0
    assert [each["shuffle_buffer"] for each in (quarter, own, four)] == [128, 512, 2048]
    assert own["units"] == {
        "found": report.units.found,
        "perfect": report.units.perfect,
        "unshuffled": report.units.unshuffled,
        "score": report.units.score,
    }
    assert own["files"]["score"] is None
    assert own["density"] == [list(line) for line in report.density]
    assert own["memory"] == pytest.approx(512 * report.bytes_per_row)
    assert own["memory_is_uncompressed"] is True


def test_memory_of_undecodable_data_is_its_stored_size(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "a.avro"
    path.write_bytes(header(ID, "deflate") + stored(100, b"\xff" * 30, sync=SYNC))
    code, out, _ = run("--shuffle", path, "--batch-size", "10")
    assert code == 0
    assert out.endswith("memory: bytes of the rows in the buffer, as stored, which may be compressed\n")


def test_the_command_without_rows(tmp_path: Path, run: Run) -> None:
    code, out, err = run("--shuffle", write(tmp_path / "a.avro", []))
    assert (code, err) == (0, "")
    assert out.endswith("looked at 0 of 0 batches\n\nThere are no rows to shuffle.\n")
    code, out, _ = run("--shuffle", "--json", tmp_path / "a.avro")
    assert code == 0
    assert [each["num_rows"] for each in json.loads(out)] == [0]


def test_files_that_cannot_be_read_end_the_command(tmp_path: Path, run: Run) -> None:
    code, out, err = run("--shuffle", tmp_path / "none.avro")
    assert (code, out) == (1, "")
    assert err.startswith("fastpipe: ")
    assert "none.avro" in err


def test_wrong_usage(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.avro", [3])
    assert run("--batch-size", 5, path)[::2] == (
        2,
        "fastpipe inspect: --shuffle-buffer and --batch-size require --shuffle\n",
    )
    code, _, err = run("--shuffle", path, "--shuffle-buffer", 2**40)
    assert code == 2
    assert "shuffle_buffer must be between 1 and 2147483648" in err
    with pytest.raises(SystemExit, match="2"):
        run("--shuffle=sorted", path)
    assert "invalid choice: 'sorted'" in capsys.readouterr().err


def test_a_file_may_have_the_name_of_an_order(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "block", [3])
    monkeypatch.chdir(tmp_path)
    assert run("--shuffle=window", "block")[1].startswith("shuffle=True, ")
    assert run("--shuffle", "--", "block")[1].startswith("shuffle=True, ")
    assert run("--shuffle", "block", "block")[1].startswith('shuffle="block", ')


def test_progress_is_shown_on_a_terminal(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path = write(tmp_path / "a.avro", UNEVEN)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("fastpipe.cli._shuffle._PATIENCE", -1.0)
    assert run("--shuffle", path, "--batch-size", 50)[0] == 0
    assert "\rbatches examined: 10 of 10 " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
