"""Hypothesis strategies that several tests share: layouts of files, and arguments that determine the row order."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st

from samples import SHUFFLES

# For tests that write files and start threads. Core tests use half as many again.
FEW = hypothesis.settings.default.max_examples // 4
SOME = hypothesis.settings.default.max_examples // 2

_block = st.one_of(st.just(0), st.just(1), st.integers(0, 6), st.integers(0, 6), st.integers(30, 70))
# The row counts of the blocks of each file.
layouts = st.lists(st.lists(_block, max_size=8), min_size=1, max_size=3)


@st.composite
def orders(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments that determine which rows are in which batch."""
    shuffle = draw(st.sampled_from([*SHUFFLES, "window"]))
    order = {"shuffle": shuffle, "batch_size": draw(st.integers(1, 12)), "drop_last": draw(st.booleans())}
    if shuffle:
        order["shuffle_buffer"] = draw(st.none() | st.integers(1, 60))
        order["seed"] = draw(st.integers(0, 2**64 - 1))
    return order
