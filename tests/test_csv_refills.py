"""The line buffer of `method="buffered"`: over many refills and laps, a circle has each row exactly once."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

import fastpipe
import fastpipe.csv._line_buffer
import fastpipe.cuda
from fastpipe.csv._drawing import Asked
from fastpipe.csv._line_buffer import LineBuffer
from fastpipe.csv._reading import LosslessDialect
from order_model import words

SEED, ROWS = 11, 4000


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Returns two files with about 20 cells in total. Some cells have 20 times the rows of other cells."""
    sizes = np.random.default_rng(4).integers(0, 20, ROWS) * np.where(np.arange(ROWS) % 800 < 200, 20, 1)
    paths = []
    for number, rows in enumerate((range(2500), range(2500, ROWS))):
        path = tmp_path / f"{number}.csv"
        path.write_text("i,pad\n" + "".join(f"{i},{'x' * sizes[i]}\n" for i in rows))
        paths.append(str(path))
    return paths


def rows_of(files: list[str]) -> list[tuple[int, int, int]]:
    """Returns the file of each row, its offset in the file, and its offset in the rows of all files."""
    found, before = [], 0
    for number, path in enumerate(files):
        data = Path(path).read_bytes()
        first = at = data.index(b"\n") + 1
        while at < len(data):
            found.append((number, at, before + at - first))
            at = data.index(b"\n", at) + 1
        before += len(data) - first
    return found


def laps_of(files: list[str], share: float, circle: int) -> dict[tuple[int, int], int]:
    """Returns the lap of each row, computed from its word of NumPy's Philox: purpose 10, stream 2."""
    places = rows_of(files)
    drawn = words(SEED, circle, 10, 2, places[-1][2] + 1)
    each = int(share * 2.0**64)
    return {(file, offset): drawn[place] // each for file, offset, place in places}


def line_buffer(files: list[str], share: float) -> LineBuffer:
    asked = Asked.of(1, SEED, LosslessDialect.given({}), ["i"], "int64", "C", {"num_threads": 2})
    return LineBuffer(files, asked, share)


def drawn_from(buffer: LineBuffer, rows: int, nbytes: int) -> list[tuple[int, int, int]]:
    """Returns the file, offset and cell of each row of a circle, in drawing order."""
    found: list[tuple[int, int, int]] = []
    while len(found) <= ROWS:
        try:
            lines = buffer.next(rows, nbytes)
        except LookupError:
            return found
        order = np.argsort(lines.places)
        found += list(zip(*(part[order].tolist() for part in (lines.files, lines.offsets, lines.cells)), strict=True))
    raise AssertionError("a row was drawn twice")


@pytest.mark.parametrize(("rows", "nbytes"), [(37, 1 << 30), (10_000, 3000), (10_000, 1 << 30)])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.15])
def test_each_lap_has_its_rows_once(files: list[str], share: float, rows: int, nbytes: int) -> None:
    """The oracle derives the lap of each row from NumPy's generator. A lap reads each cell in one go."""
    buffer = line_buffer(files, share)
    circles = []
    for circle in (0, 1, 0):
        buffer.restart(circle)
        drawn = drawn_from(buffer, rows, nbytes)
        laps = laps_of(files, share, circle)
        assert sorted(row[:2] for row in drawn) == sorted(laps)
        assert len({row[:2] for row in drawn}) == len(drawn) == buffer.drawn == ROWS
        found = [laps[row[:2]] for row in drawn]
        assert found == sorted(found)
        for _, lap in groupby(drawn, key=lambda row: laps[row[:2]]):
            # A lap begins within a cell, whose earlier rows come last.
            cells = [cell for cell, _ in groupby(row[2] for row in lap)]
            assert len(cells) - len(set(cells)) <= (cells[0] == cells[-1])
        circles.append(drawn)
    assert circles[0] == circles[2] != circles[1]


@pytest.mark.parametrize("share", [1.0, 0.4, 0.15])
@pytest.mark.parametrize("rows", [[700, 300], [50, 30]])
def test_refills_have_each_row_once_in_the_order_of_laps(
    files: list[str], share: float, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refill needs several buffers, and all refills together need several laps."""
    monkeypatch.setattr(fastpipe.csv._line_buffer, "_MOST_HELD", 4000)
    options = {"rows": rows, "share": share, "columns": ["i"], "dtype": "int64", "memory_limit": "64MB"}
    filled = fastpipe.cuda.fill(files, ["cpu"] * 2, method="buffered", seed=SEED, **options)  # type: ignore[arg-type]
    laps = list(laps_of(files, share, 0).values())
    refills = [[device.values[:, 0].tolist() for device in filled]]
    while len(refills) < ROWS // sum(rows):
        filled.refill()
        refills.append([device.values[:, 0].tolist() for device in filled])
    with pytest.raises(ValueError, match="are more than the 4000 rows available"):
        filled.refill()
    seen = [i for refill in refills for device in refill for i in device]
    assert sorted(seen) == list(range(ROWS))
    ends = [max(laps[i] for device in refill for i in device) for refill in refills]
    begins = [min(laps[i] for device in refill for i in device) for refill in refills]
    assert all(end <= begin for end, begin in zip(ends[:-1], begins[1:], strict=True))
    assert ends[-1] == max(laps) == int(np.ceil(1 / share)) - 1
