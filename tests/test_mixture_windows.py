"""Default windows of readers in a mixture, and the units that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fastpipe
import samples
from every_source import digests
from fastpipe import mix
from test_mixtures import numbers, pairs
from test_slices import Sliced

DEFAULT = 64 * 20


@pytest.mark.parametrize("shuffle", ["window", "block", "buffer"])
@pytest.mark.parametrize(("readers", "buffer"), [(1, DEFAULT), (4, DEFAULT // 4), (100, 20)])
def test_default_windows_are_divided_by_the_number_of_readers(
    tmp_path: Path, shuffle: Any, readers: int, buffer: int
) -> None:
    data = samples.write(tmp_path, [[20] * 200])

    def mixed(batch_size: int = 16, **more: Any) -> fastpipe.Reader:
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "seed": 1}
        return mix([data.read(**options, **more) for _ in range(readers)], batch_size=16, stop=3000)

    # A default window isn't rounded up to batches of 16 rows.
    assert digests(mixed()) == digests(mixed(shuffle_buffer=buffer, batch_size=10 if buffer == 20 else 16))
    # A window that the user passed stays, also if it is the default.
    if readers > 1:
        assert digests(mixed()) != digests(mixed(shuffle_buffer=DEFAULT))


def test_windows_of_rows_in_memory_stay() -> None:
    readers = numbers(300, 300, shuffle=True, seed=1)
    own = pairs(readers[0])
    readers[0].set_epoch(0)
    assert [pair for pair in pairs(mix(readers)) if pair[0] == 0] == own
    chosen = [reader.filter(fastpipe.col("row") < 200) for reader in readers]
    own = pairs(chosen[1])
    chosen[1].set_epoch(0)
    assert [pair for pair in pairs(mix(chosen)) if pair[0] == 1] == own


def test_caching_keeps_the_order(tmp_path: Path) -> None:
    data = samples.write(tmp_path, [[20] * 200])
    readers = [data.read(batch_size=16, shuffle=True, seed=1) for _ in range(4)]
    assert digests(mix([reader.cache() for reader in readers])) == digests(mix(readers))


def test_readers_in_order_read_whole_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a unit must be read in order, which a mixture doesn't."""
    monkeypatch.setattr("fastpipe.units._data._SLICE_BYTES", 80)
    units = Sliced([50, 30])
    reader = fastpipe.read_units(units, batch_size=8)
    alone = digests(reader)
    assert units.begun
    units.begun.clear()
    reader.set_epoch(0)
    assert digests(mix([reader])) == alone
    assert not units.begun
