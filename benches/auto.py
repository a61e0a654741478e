"""Compares `num_threads="auto"` with fixed numbers of threads.

* Fast consumer, which drops batches immediately: "auto" must be within 5 % of the best fixed number of threads.
* Slow consumer, which sleeps or computes for 1 or 5 ms per batch: "auto" must deliver at least 98 % of the batches per
  second that all threads deliver. It may use at most 5 % more CPU time than all threads, or no more if one thread
  already reaches 98 %. The consumer's CPU time isn't counted.

Dataset (a), null codec. The readers are created once. In each round, "auto" and every number of threads take a turn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import fastpipe
import generate
from harness import Bench, Turn, take_turns
from harness.data import cores, open_reader, spin

FAST_LEAST, SLOW_LEAST = 0.95, 0.98
ROWS = 200_000
"""Maximum rows per turn with a slow consumer. `LEAST_BATCHES` takes precedence for large batches."""
LEAST_BATCHES = 32
AUTO = 0
"""Key of the reader with `num_threads="auto"`."""


def measure(reader: fastpipe.Reader, consume: Callable[[], None] | None, most: int) -> Turn:
    """Returns the reader's wall and CPU seconds per batch, and the number of threads in use at the end."""
    wall, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
    count = 0
    for batch in reader:
        del batch
        count += 1
        if consume is not None:
            consume()
        if count == most:
            break
    reader.close()
    spent = time.process_time() - cpu - (time.thread_time() - own)
    return Turn((time.perf_counter() - wall) / count, spent / count, reader.stats()["threads"]["chosen"])


def compare(bench: Bench, row: Any, name: str, order: str, batch: int) -> None:
    """Measures one combination of consumer, order, and batch size."""
    args, path = bench.args, str(generate.generate(bench.args.dataset, bench.args.rows, codec=bench.args.codec)[0])
    fixed = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, len(cores())) if n <= len(cores())})
    kind, _, milliseconds = name.partition(" ")
    consume, batches = None, 0
    if milliseconds:
        consume = partial({"sleep": time.sleep, "spin": spin}[kind], float(milliseconds) / 1000)
        # Long enough for the thread count to settle and stay in use.
        batches = max(min(int(args.seconds * 1000 / float(milliseconds)), ROWS // batch), LEAST_BATCHES)
    paths = [path] * max(batches * batch // args.rows + 1, 4)
    readers = {
        number: open_reader(paths, args.dataset, order, batch_size=batch, num_threads=number or "auto")
        for number in (*fixed, AUTO)
    }
    turns = take_turns({n: partial(measure, reader, consume, batches) for n, reader in readers.items()}, bench.rounds)
    best, most = min(fixed, key=turns.median), fixed[-1]
    to_best, to_all = turns.ratio(best, AUTO).median, turns.ratio(most, AUTO).median
    spent, one = turns.ratio(AUTO, most, "cpu").median, turns.ratio(1, most, "cpu").median
    what = f"{name}, {order}, batches of {batch}"
    marks = ["", "", ""]
    if consume is None:
        marks[0] = bench.target(f"{what}: speed by that of {best} threads", to_best, least=FAST_LEAST)
    else:
        marks[1] = bench.target(f"{what}: speed by that of all threads", to_all, least=SLOW_LEAST)
        allowed = 1.0 if turns.ratio(most, 1).median >= SLOW_LEAST else 1.05
        marks[2] = bench.target(f"{what}: CPU time by that of all threads", spent, most=allowed)
    cells = [best, to_best, marks[0], to_all, marks[1], spent, marks[2], one, turns.median(AUTO, "result")]
    row(name, order, f"{batch:,}", *cells)


def main(bench: Bench) -> None:
    """Measures all consumers. A missed target is reported but doesn't fail the bench, because timings vary."""
    columns = ("best|", "auto / best|,.3f", "met", "auto / all|,.3f", "met", "CPU auto / all|,.3f", "met")
    row = bench.table("consumer", "order", "batch", *columns, "CPU one / all|,.3f", "chosen|g")
    for name, order, batch in itertools.product(bench.args.consumers, bench.args.orders, bench.args.batch_sizes):
        compare(bench, row, name, order, batch)


if __name__ == "__main__":
    consumers = (["fast", "sleep 1", "sleep 5", "spin 1", "spin 5"], ["fast", "sleep 1", "spin 5"])
    what: dict[str, Any] = {"dataset": "a", "codec": "null", "rows": 16_384, "consumers": consumers, "seconds": 0.3}
    what |= {"orders": ["sequential", "window"], "batch_sizes": ([64, 1024, 8192], [1024])}
    Bench("auto", __doc__, rounds=(15, 3), **what).run(main)
