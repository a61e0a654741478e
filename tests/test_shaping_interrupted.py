"""Ctrl-C while mixtures, packs and batches of similar lengths are planned or read. Afterwards, the readers work."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fastpipe
from every_source import digests
from fastpipe._reader import grouping, mixed_data
from fastpipe.typing import Mapped

pa = pytest.importorskip("pyarrow")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT")


@contextlib.contextmanager
def pressed(times: int) -> Iterator[None]:
    """Sends Ctrl-C to the main thread until its handler has run this often. The last run raises KeyboardInterrupt."""
    done, runs = threading.Event(), itertools.count(1)

    def handle(*_: object) -> None:
        if next(runs) == times:
            done.set()
            raise KeyboardInterrupt

    def press() -> None:
        while not done.wait(0.002):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before, thread = signal.signal(signal.SIGINT, handle), threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def interrupts(planning: Callable[..., Any], returned: list[bool]) -> Callable[..., Any]:
    """Returns a function that is interrupted by the third Ctrl-C that is handled during planning."""

    def interrupted(*arguments: Any, **options: Any) -> Any:
        with pressed(3):
            found = planning(*arguments, **options)
            returned.append(True)
            return found

    return interrupted


def of_lengths(lengths: Any, **options: Any) -> fastpipe.Reader:
    """Returns a reader of rows with these numbers of items."""
    offsets = np.r_[0, np.cumsum(lengths)]
    tokens = fastpipe.Ragged(np.arange(offsets[-1], dtype="int32"), offsets)
    return fastpipe.from_arrays({"tokens": tokens}, **{"batch_size": 8} | options)


def test_ctrl_c_interrupts_the_planning_of_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = [of_lengths([1] * 300, shuffle=True, seed=seed) for seed in range(2)]
    expected, returned = digests(fastpipe.mix(readers, [2, 1])), list[bool]()
    # Each of these weights needs a table of 2^20 rows.
    weights = [(step, [math.pi + step, 1]) for step in range(20)]
    with monkeypatch.context() as patch:
        patch.setattr(mixed_data, "mix_orders", interrupts(mixed_data.mix_orders, returned))
        with pytest.raises(KeyboardInterrupt):
            fastpipe.mix(readers, weights)
    assert not returned
    assert digests(fastpipe.mix(readers, [2, 1])) == expected


@pytest.mark.parametrize("shape", ["pack", "bucket"])
def test_ctrl_c_interrupts_the_planning_of_groups(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    reader, returned = of_lengths(np.tile([3, 1, 4, 2, 5], 300_000), batch_size=4096), list[bool]()

    def grouped() -> Mapped:
        return reader.pack("tokens", 8, window=500) if shape == "pack" else reader.bucket("tokens", window=500)

    with monkeypatch.context() as patch:
        patch.setattr(grouping, "GroupedDataset", interrupts(grouping.GroupedDataset, returned))
        with pytest.raises(KeyboardInterrupt):
            grouped()
    assert not returned
    groups = grouped()
    assert groups.locate(0, 0).row == 0


class Documents:
    """Units of rows with up to four items. Reads wait for `go`."""

    items = pa.list_(pa.field("item", pa.int64(), nullable=False))
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("tokens", items, nullable=False)])
    rows = [10] * 12

    def __init__(self, go: threading.Event) -> None:
        self.go = go

    def read(self, unit: int) -> Any:
        self.go.wait()
        ids = range(10 * unit, 10 * unit + 10)
        return pa.table({"id": ids, "tokens": [[id] * (id % 5) for id in ids]}, self.schema)

    def fingerprint(self) -> str:
        return "documents"


SHAPES: dict[str, Callable[[list[fastpipe.Reader]], Any]] = {
    "mixture": lambda readers: fastpipe.mix(readers, [2, 1], num_threads=2),
    "packs": lambda readers: readers[0].pack("tokens", 9),
    "similar": lambda readers: readers[0].bucket("tokens"),
    "mixed packs": lambda readers: fastpipe.mix([each.pack("tokens", 9) for each in readers], batch_size=4),
    "packs of a mixture": lambda readers: fastpipe.mix(readers, batch_size=4).pack("tokens", 9),
    "a map of packs": lambda readers: readers[0].pack("tokens", 9).map(dict, num_threads=2),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_ctrl_c_during_a_pass(shape: str) -> None:
    go = threading.Event()
    go.set()
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "shuffle_buffer": 20, "num_threads": 2}
    whole = SHAPES[shape]([fastpipe.read_units(Documents(go), seed=seed, **options) for seed in range(2)])
    expected = digests(whole)
    whole.set_epoch(0)
    go.clear()
    batches = iter(whole)
    for times in (1, 3):
        # The pass waits for the first read.
        with pytest.raises(KeyboardInterrupt), pressed(times):
            next(batches)
    state = json.dumps(whole.state_dict())
    go.set()
    # The pass continues, without a loss. A state from before its first batch begins it again.
    assert digests(batches) == expected
    whole.load_state_dict(json.loads(state))
    assert digests(whole) == expected
    # A pass that was interrupted can be closed, and another one begun.
    go.clear()
    batches = iter(whole)
    with pytest.raises(KeyboardInterrupt), pressed(1):
        next(batches)
    go.set()
    whole.close()
    with pytest.raises(fastpipe.errors.PassClosedError):
        next(batches)
    whole.set_epoch(0)
    assert digests(whole) == expected
