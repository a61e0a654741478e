"""Mean and deviation, computed in one pass, match exact arithmetic no matter how the values are split."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpipe.statistics._moments import Moments


def of(values: np.ndarray) -> Moments:
    found = Moments()
    found.add(values)
    return found


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), st.integers(0, 40))
def test_integers_are_exact_for_every_split(values, at):
    array = np.array(values, np.int64)
    found = of(array[:at])
    found.merge(of(array[at:]))
    assert (found.count, found.total) == (len(values), sum(values))
    assert found.mean == sum(values) / len(values)
    assert (found.min, found.max) == (min(values), max(values))
    assert found.std == pytest.approx(statistics.pstdev(values), rel=1e-12)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
def test_large_offsets_do_not_cancel(dtype):
    offset = 2**50 if dtype == "float64" else 2**62
    small = np.arange(100_000) % 7
    found = of((small + offset).astype(dtype))
    assert found.std == pytest.approx(small.std(), rel=1e-9)


def test_nan_and_infinities_are_counted_separately():
    found = of(np.array([1.0, np.nan, np.inf, 3.0, -np.inf], "float32"))
    assert (found.count, found.nan_count, found.inf_count, found.mean, found.std) == (2, 1, 2, 2.0, 1.0)
    empty = of(np.array([np.nan]))
    assert empty.min is None
    assert np.isnan(empty.mean)
    assert np.isnan(empty.std)


def test_text_is_refused():
    with pytest.raises(TypeError, match="moments require integers"):
        of(np.array(["a"]))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40), st.integers(0, 40))
def test_floats_are_close_for_every_split(values, at):
    array = np.array(values)
    found = of(array[:at])
    found.merge(of(array[at:]))
    scale = max(map(abs, values))
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-12, abs=1e-14 * scale)
    assert found.std == pytest.approx(statistics.pstdev(values), rel=1e-9, abs=1e-14 * scale)
    assert (found.min, found.max) == (min(values), max(values))
