"""Compares filters, mixtures, resuming and packing with other loaders.

The loaders (see `shaping_loaders.py`) run in this process, which is pinned to `--threads` cores, and take turns. Each
has the same rows: an id, a key, and 16 floats, in batches of 1,024 NumPy rows, in order. A peer that isn't installed is
left out. "fastpipe" in a title is fastpipe with the same data, or with Parquet if it doesn't read the peer's format.
`--parts` selects from four parts:

* `filter`: A filter on the key keeps 10 % of the rows, spread evenly. A first epoch evaluates it, and reads these rows.
  It is empty for loaders that evaluate it again in every epoch. Opening the data isn't timed.
* `mixture`: Four sources with weights of 0.4, 0.3, 0.2 and 0.1, and rows in this proportion, so that every loader reads
  each row once. datasets and torchdata draw the source of each row at random.
* `resume`: The time to the first batch after a state in the middle of an epoch was loaded: in a new pipeline, with
  opening the data and the filter, and in one that exists. Indexes and caches on disk are not made again. Loaders
  without states that have rows by index skip rows.
* `pack`: Sequences of 300 tokens on average in padded rows of 2,048 tokens, from memory. Grain packs into 64 bins in
  every epoch. fastpipe finds the packs when `pack` is called, which only its first epoch includes.

Loaders that make a Python object of each row would take minutes. They read only the first tenth of an epoch's batches,
and the times by row are compared. Their states, too, are from the middle of a whole epoch.

Before anything is timed, each loader's rows are compared with the data, and its resumed rows with those of a pass that
wasn't interrupted.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe
import shaping_loaders as loaders
from harness import Bench, CannotError, Turn, Turns, take_turns
from harness.data import cores
from shaping_loaders import BATCH_SIZE, KEPT, SHARES, Batch, Contender, Data, Pipeline

BUDGET = 60.0
"""Seconds of a loader after which it gets fewer rounds."""
SOME = 10
"""Batches after a state that are compared if a loader is slow."""
LENGTH, MEAN, BINS = 2048, 300, 64
"""Tokens of a packed row, mean tokens of a sequence, and rows that Grain fills at once."""


def fresh(contender: Contender) -> Pipeline:
    """Opens the data, and returns a pipeline."""
    return contender.shape(contender.open())


def restarted(contender: Contender) -> Pipeline:
    """Returns a pipeline as a program does that starts again. Indexes and other files are not written again."""
    return (contender.restarted or contender.shape)(contender.open())


def same(pipeline: Pipeline) -> Pipeline:
    """Returns a pipeline that exists."""
    return pipeline


def count(batches: Iterator[Batch], most: int | None = None) -> tuple[int, float]:
    """Reads batches, and returns their number of rows and a sum."""
    rows, total = 0, 0.0
    for batch in itertools.islice(batches, most):
        rows += len(batch["id"])
        total += float(batch["x"].sum(dtype="f8"))
    return rows, total


def ids_of(batches: Iterator[Batch]) -> Any:
    """Returns the ids of batches, whose rows must have the values of these ids."""
    found = [np.empty(0, np.int64)]
    for batch in batches:
        if batch["x"].dtype != np.float32 or not np.array_equal(batch["x"][:, 0], batch["id"] % 1000):
            raise RuntimeError(f"wrong values in the rows {batch['id']}")
        found.append(np.array(batch["id"]))
    return np.concatenate(found)


def most_of(contender: Contender, rows: int) -> int | None:
    """Returns how many batches of an epoch a contender reads. None stands for all of them."""
    return -(-rows // BATCH_SIZE // 10) if contender.slow else None


def check(contender: Contender, expected: Any, ordered: bool) -> None:
    """Raises an error unless the contender reads the expected ids, in order or each once.

    Grain ends a mixture before the first row of a source that has none left, so up to 1 % of the rows may be missing.
    """
    most = most_of(contender, len(expected))
    ids = ids_of(itertools.islice(fresh(contender).batches(), most))
    full = len(expected) if most is None else most * BATCH_SIZE
    if ordered:
        right = np.array_equal(ids, expected[:full])
    else:
        least = 0.99 * full if contender.loader.startswith("Grain") else full
        right = len(np.unique(ids)) == len(ids) >= least and bool(np.isin(ids, expected).all())
    if not right:
        raise RuntimeError(f"{contender.loader} read other rows: {len(ids)} of {full}")


def name_of(contender: Contender) -> tuple[str, str]:
    """Returns the name of a contender in tables."""
    return contender.loader, contender.data


def by_row(turn: Turn) -> float:
    """Returns the seconds of a turn by row."""
    return float(turn.seconds / turn.result[0])


def ratio(turns: Turns, contender: Contender, when: str) -> float | None:
    """Returns how many times as long a peer takes for a row as fastpipe. Lazy peers have only later epochs."""
    own = ("fastpipe", contender.beside, when)
    peer = (*name_of(contender), when if (*name_of(contender), when) in turns.turns else "later")
    return None if contender.loader == "fastpipe" else turns.ratio(peer, own, by_row).median


def timed(contenders: list[Contender], rows: int, bench: Bench) -> Turns:
    """Reads epochs of all contenders in turn: `later`, and `first` for those that are not lazy."""
    ways: dict[Any, Callable[[], Any]] = {}
    for contender in contenders:
        source, most = contender.open(), most_of(contender, rows)
        existing = partial(same, contender.shape(source))
        ways[(*name_of(contender), "later")] = partial(epoch, existing, most)
        if not contender.lazy:
            ways[(*name_of(contender), "first")] = partial(epoch, partial(contender.shape, source), most)
    return take_turns(ways, bench.rounds, budget=BUDGET)


def epoch(make: Callable[[], Pipeline], most: int | None) -> tuple[int, float]:
    """Reads the first batches of an epoch."""
    return count(make().batches(), most)


def filters(bench: Bench, folder: Path) -> None:
    """Measures first and later epochs of a filter."""
    data = Data(folder, [bench.args.rows], bench.args.threads)
    ids = data.tables[0]["id"][data.tables[0]["key"] < KEPT]
    contenders = loaders.filters(data)
    for contender in contenders:
        bench.say(f"filter: checking {', '.join(name_of(contender))}")
        check(contender, ids, ordered=True)
    turns = timed(contenders, len(ids), bench)
    columns = ("first epoch, ms|,.0f", "later epoch, ms|,.0f", "times fastpipe's, first|,.1f", "later|,.1f")
    row = bench.table("loader", "data", *columns, title="10 % of the rows of a file")
    for contender in contenders:
        name = name_of(contender)
        first = None if contender.lazy else turns.median((*name, "first"), by_row) * len(ids) * 1e3
        later = turns.median((*name, "later"), by_row) * len(ids) * 1e3
        row(*name, first, later, *(ratio(turns, contender, when) for when in ("first", "later")))


def mixtures(bench: Bench, folder: Path) -> None:
    """Measures mixtures of four sources."""
    data = sources(bench, folder)
    ids = np.concatenate([table["id"] for table in data.tables])
    contenders = [*loaders.one_by_one(data), *loaders.mixtures(data)]
    for contender in contenders:
        bench.say(f"mixture: checking {', '.join(name_of(contender))}")
        check(contender, ids, ordered=False)
    turns = timed(contenders, len(ids), bench)
    row = bench.table("loader", "data", "1,000 rows/s|,.0f", "times fastpipe's time|,.1f", title="A mixture of four")
    for contender in contenders:
        name = (*name_of(contender), "later")
        row(*name_of(contender), 1e-3 / turns.median(name, by_row), ratio(turns, contender, "later"))


def sources(bench: Bench, folder: Path) -> Data:
    """Returns four sources, whose rows have the proportion of their weights."""
    return Data(folder, [round(share * bench.args.rows) for share in SHARES], bench.args.threads)


def resumed(make: Callable[[], Pipeline], state: Any) -> Turn:
    """Measures the time to the first batch after a state."""
    gc.collect()
    cpu, begun = time.process_time(), time.perf_counter()
    batches = make().resume(state)
    next(batches)
    return Turn(time.perf_counter() - begun, time.process_time() - cpu)


def middle(contender: Contender, rows: int) -> Any:
    """Returns the state in the middle of an epoch, after checking that a pass continues from it with the same rows."""
    half = -(-rows // BATCH_SIZE) // 2
    some = half if most_of(contender, rows) is None else min(half, SOME)
    pipeline = fresh(contender)
    batches = pipeline.batches()
    ids_of(itertools.islice(batches, half))
    state = pipeline.state()
    expected = ids_of(itertools.islice(batches, some))
    again = ids_of(itertools.islice(restarted(contender).resume(state), some))
    if not len(expected) or not np.array_equal(again, expected):
        raise RuntimeError(f"{contender.loader} resumed with other rows")
    return state


def resume(bench: Bench, folder: Path) -> None:
    """Measures how long a state takes to load."""
    whole, parts = folder / "whole", folder / "parts"
    whole.mkdir()
    parts.mkdir()
    data = Data(whole, [bench.args.rows], bench.args.threads)
    kept = int((data.tables[0]["key"] < KEPT).sum())
    mixed = loaders.mixtures(sources(bench, parts))
    for title, contenders, rows in (("filter", loaders.filters(data), kept), ("mixture", mixed, bench.args.rows)):
        columns = ("new pipeline, ms|,.1f", "existing one, ms|,.1f", "times fastpipe's, new|,.1f", "existing|,.1f")
        row = bench.table("loader", "data", *columns, "", title=f"The first batch from the middle of a {title}")
        ways: dict[Any, Callable[[], Any]] = {}
        reasons = {}
        for contender in contenders:
            name = name_of(contender)
            bench.say(f"resume: checking {', '.join(name)}, {title}")
            try:
                state = middle(contender, rows)
            except CannotError as error:
                reasons[name] = str(error)
                continue
            pipeline = fresh(contender)
            ways[(*name, "new")] = partial(resumed, partial(restarted, contender), state)
            ways[(*name, "existing")] = partial(resumed, partial(same, pipeline), state)
        turns = take_turns(ways, bench.rounds, budget=BUDGET)
        for contender in contenders:
            name = name_of(contender)
            if name in reasons:
                row(*name, None, None, None, None, reasons[name])
                continue
            figures = [turns.median((*name, what)) * 1e3 for what in ("new", "existing")]
            own = ("fastpipe", contender.beside)
            peer = contender.loader != "fastpipe"
            ratios = [turns.ratio((*name, w), (*own, w)).median if peer else None for w in ("new", "existing")]
            row(*name, *figures, *ratios)


# Packing


class Sequences:
    """Sequences of tokens as a random-access source of Grain. Token 0 doesn't occur."""

    def __init__(self, number: int) -> None:
        draw = np.random.default_rng(1)
        lengths = np.minimum(1 + draw.exponential(MEAN, number).astype("int64"), LENGTH)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.tokens = draw.integers(1, 50_000, self.offsets[-1], dtype="int32")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Batch:
        return {"tokens": self.tokens[self.offsets[index] : self.offsets[index + 1]]}

    def __repr__(self) -> str:
        return f"Sequences({len(self)})"


Packed = tuple[int, int, int]
"""Packed rows, tokens, and the sum of the tokens."""


def packed(make: Callable[[], Any]) -> Packed:
    """Reads packed rows, which are padded with token 0."""
    rows = tokens = total = 0
    for batch in make():
        rows += len(batch["tokens"])
        tokens += int(np.count_nonzero(batch["tokens"]))
        total += int(batch["tokens"].sum(dtype="i8"))
    return rows, tokens, total


def pack(bench: Bench, folder: Path) -> None:
    """Measures packing."""
    sequences = Sequences(bench.args.sequences)
    ways: dict[str, Callable[[], Packed]] = {}
    arrays = {"tokens": fastpipe.Ragged(sequences.tokens, sequences.offsets)}
    reader = fastpipe.from_arrays(arrays, batch_size=BINS, num_threads=bench.args.threads)
    packs = reader.pack("tokens", length=LENGTH)
    ways["fastpipe"] = partial(packed, lambda: packs)
    ways["fastpipe, first epoch"] = partial(packed, lambda: reader.pack("tokens", length=LENGTH))
    if loaders.installed("grain"):
        import grain

        rows = loaders.iterated(grain.MapDataset.source(sequences))
        options: dict[str, Any] = {"length_struct": {"tokens": LENGTH}, "num_packing_bins": BINS}
        first = grain.experimental.FirstFitPackIterDataset(rows, **options)
        best = grain.experimental.BestFitPackIterDataset(rows, **options)
        ways["Grain, first fit"] = partial(packed, lambda: first.batch(BINS))
        ways["Grain, best fit"] = partial(packed, lambda: best.batch(BINS))
    turns = take_turns(ways, bench.rounds, budget=BUDGET)
    row = bench.table(
        "loader", "1,000 sequences/s|,.0f", "filled, %|.1f", "times fastpipe's time|,.1f", title="Packing"
    )
    for name in ways:
        filled, tokens, total = turns.turns[name][0].result
        if tokens != len(sequences.tokens) or total != sequences.tokens.sum(dtype="i8"):
            raise RuntimeError(f"{name} packed other tokens: {tokens} of {len(sequences.tokens)}")
        times = turns.ratio(name, "fastpipe").median if name != "fastpipe" and "fastpipe" in ways else None
        row(name, len(sequences) / turns.median(name) / 1e3, 100 * tokens / filled / LENGTH, times)


PARTS = {"filter": filters, "mixture": mixtures, "resume": resume, "pack": pack}


def main(bench: Bench) -> None:
    """Runs the selected parts."""
    # Peers whose number of threads can't be set share these cores. Lance's settings aren't used: with one thread for
    # I/O, `create_scalar_index` of Lance 14.0.2 waits for itself.
    os.sched_setaffinity(0, cores()[-bench.args.threads :])
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    # Grain and datasets report filters that drop many rows.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for module, package in loaders.PACKAGES.items():
        if not loaders.installed(module):
            bench.say(f"{module} is left out, because it isn't installed: pip install {package}")
    for part in bench.args.parts:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[part](bench, Path(folder))


if __name__ == "__main__":
    Bench(
        "shaping_peers",
        __doc__,
        rounds=(5, 2),
        packages=("numpy", "pyarrow", *loaders.PACKAGES.values()),
        rows=(1_000_000, 50_000),
        sequences=(1_000_000, 2_000),
        threads=1,
        parts=list(PARTS),
    ).run(main)
