"""Measures what `num_threads="auto"` chooses, against every fixed number of threads.

* A consumer that drops batches at once: "auto" is within 5 % of the best fixed number.
* A consumer that takes 1 or 5 ms a batch, asleep or busy: "auto" yields as many batches a second as all threads do (no
  less than 98 %), for no more CPU time where one thread keeps up with it (`one` at least 98 %), else for at most 5 %
  more. What the consumer spends itself isn't counted.

Data set (a), null codec. Readers are made once and take turns: all numbers of threads, and "auto", in each round. The
median of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import fastpipe
import generate
import loads

FAST_LEAST = 0.95
SLOW_LEAST = 0.98
ROWS = 200_000
"""Rows of a turn with a slow consumer at most, but for `LEAST_BATCHES`: then it's the reader that is slow."""
LEAST_BATCHES = 32


def sleep(seconds: float) -> Callable[[], None]:
    """A consumer that waits for something else, say for an accelerator."""
    return lambda: time.sleep(seconds)


def spin(seconds: float) -> Callable[[], None]:
    """A consumer that is busy."""

    def busy() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return busy


def measure(reader: fastpipe.Reader, consume: Callable[[], None] | None, most: int) -> tuple[float, float, int]:
    """Seconds by the clock, CPU seconds of the reader, and the threads that were chosen in the end."""
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
    return (time.perf_counter() - wall) / count, spent / count, reader.stats()["threads"]["chosen"]


def main() -> int:
    """Runs the comparison, and names the aims that "auto" misses. They fail nothing: they are times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="a", choices=generate.DATASETS)
    parser.add_argument("--codec", default="null")
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--batch-sizes", default="64,1024,8192")
    parser.add_argument("--consumers", default="fast,sleep 1,sleep 5,spin 1,spin 5")
    parser.add_argument("--orders", default="sequential,window")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn with a slow consumer")
    parser.add_argument("--rounds", type=int, default=5 if loads.QUICK else 15)
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fixed = sorted({n for n in (1, 2, 3, 4, 6, 8, 12, 16, cores) if n <= cores})
    path = str(generate.generate(arguments.dataset, arguments.rows, codec=arguments.codec)[0])
    bounds = loads.Bounds()
    columns = [("consumer", -9), ("order", -10), ("batch", 6), ("best", 5), ("auto/best", 9), ("", -6), ("auto/all", 8)]
    columns += [("", -6), ("CPU auto/all", 12), ("", -6), ("CPU one/all", 11), ("chosen", 6)]
    row = loads.table(columns)
    kinds = {"sleep": sleep, "spin": spin}
    for name in arguments.consumers.split(","):
        kind, _, milliseconds = name.partition(" ")
        consume = kinds[kind](float(milliseconds) / 1000) if kind in kinds else None
        for order in arguments.orders.split(","):
            options: dict[str, Any] = {} if order == "sequential" else loads.window()
            for batch in map(int, arguments.batch_sizes.split(",")):
                # Long enough for a choice to be made, and to last.
                batches = 0
                if consume is not None:
                    batches = max(
                        min(int(arguments.seconds * 1000 / float(milliseconds)), ROWS // batch), LEAST_BATCHES
                    )
                times = max(batches * batch // arguments.rows + 1, 4)
                readers = {
                    threads: fastpipe.read_avro(
                        [path] * times,
                        features=loads.features(arguments.dataset),
                        batch_size=batch,
                        num_threads="auto" if threads == 0 else threads,
                        **options,
                    )
                    for threads in (*fixed, 0)
                }
                turns = loads.take_turns(
                    {t: partial(measure, reader, consume, batches) for t, reader in readers.items()},
                    arguments.rounds,
                )
                wall = {t: [result[0] for _, result in taken] for t, taken in turns.items()}
                cpu = {t: [result[1] for _, result in taken] for t, taken in turns.items()}
                best = min(fixed, key=lambda t: statistics.median(wall[t]))
                most = fixed[-1]
                to_best, to_all = loads.ratio(wall[best], wall[0]), loads.ratio(wall[most], wall[0])
                spent, one = loads.ratio(cpu[0], cpu[most]), loads.ratio(cpu[1], cpu[most])
                what = f"{name}, {order}, batches of {batch}"
                marks = ["", "", ""]
                if consume is None:
                    marks[0] = bounds.aim(f"{what}: speed by that of {best} threads", to_best, least=FAST_LEAST)
                else:
                    marks[1] = bounds.aim(f"{what}: speed by that of all threads", to_all, least=SLOW_LEAST)
                    keeps_up = loads.ratio(wall[most], wall[1]) >= SLOW_LEAST
                    marks[2] = bounds.aim(
                        f"{what}: CPU time by that of all threads", spent, most=1.0 if keeps_up else 1.05
                    )
                chosen = statistics.median(result[2] for _, result in turns[0])
                row(name, order, batch, best, to_best, marks[0], to_all, marks[1], spent, marks[2], one, f"{chosen:g}")
    return bounds.status()


if __name__ == "__main__":
    raise SystemExit(main())
