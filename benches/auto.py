"""Measures what `num_threads="auto"` chooses, against every fixed number of threads.

* A consumer that drops batches at once: "auto" is within 5 % of the best fixed number.
* A consumer that takes 1 or 5 ms a batch, asleep or busy: "auto" yields the batches a second of all threads (no
  less than 98 %), for no more CPU time if one thread keeps up with it (`one` at least 98 %), else for at most 5 % more.
  What the consumer spends isn't counted.

Dataset (a), null codec. Readers are made once and take turns: all numbers of threads, and "auto", in each round.
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
"""Rows of a turn with a slow consumer at most, but for `LEAST_BATCHES`: then it's the reader that is slow."""
LEAST_BATCHES = 32
AUTO = 0
"""Instead of a number of threads."""


def measure(reader: fastpipe.Reader, consume: Callable[[], None] | None, most: int) -> Turn:
    """Returns seconds and CPU seconds of the reader for a batch, and the number of threads that it chose in the end."""
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
    """Measures one consumer, order and batch size."""
    args, path = bench.args, str(generate.generate(bench.args.dataset, bench.args.rows, codec=bench.args.codec)[0])
    fixed = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, len(cores())) if n <= len(cores())})
    kind, _, milliseconds = name.partition(" ")
    consume, batches = None, 0
    if milliseconds:
        consume = partial({"sleep": time.sleep, "spin": spin}[kind], float(milliseconds) / 1000)
        # Long enough for a choice to be made, and to last.
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
    """Measures all consumers. Missed targets fail nothing: they are times."""
    columns = ("best|", "auto / best|,.3f", "met", "auto / all|,.3f", "met", "CPU auto / all|,.3f", "met")
    row = bench.table("consumer", "order", "batch", *columns, "CPU one / all|,.3f", "chosen|g")
    for name, order, batch in itertools.product(bench.args.consumers, bench.args.orders, bench.args.batch_sizes):
        compare(bench, row, name, order, batch)


if __name__ == "__main__":
    consumers = (["fast", "sleep 1", "sleep 5", "spin 1", "spin 5"], ["fast", "sleep 1", "spin 5"])
    what: dict[str, Any] = {"dataset": "a", "codec": "null", "rows": 16_384, "consumers": consumers, "seconds": 0.3}
    what |= {"orders": ["sequential", "window"], "batch_sizes": ([64, 1024, 8192], [1024])}
    Bench("auto", __doc__, rounds=(15, 3), **what).run(main)
