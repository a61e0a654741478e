"""The throughput of fastpipe beside that of fastavro.

The figures are medians of alternating passes over the same file, one decoding thread each. Both sides make the same
NumPy batches; a pass before the clock starts checks that they do.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fastpipe
from fastpipe._demo_batches import Batch, row_count
from fastpipe._demo_fastavro import Column, fastavro_batches, same
from fastpipe._progress import progress_bar
from fastpipe.errors import FastpipeError
from fastpipe.specs import Spec

ROUNDS = 5
SECONDS = 4.0
"""fastavro's share of the time of one pass over files of the user; it reads no more rows than that, nor does
fastpipe."""


@dataclass
class Throughput:
    """Records and bytes a second of both, on the first `rows` records of `all_rows`."""

    rows: int
    all_rows: int
    size: int
    fastpipe: list[float] = field(default_factory=list)
    fastavro: list[float] = field(default_factory=list)
    problem: str | None = None
    """Why fastavro isn't measured."""

    def rates(self, seconds: list[float]) -> tuple[float, float]:
        """Records/s and file bytes/s of the median pass."""
        median = statistics.median(seconds)
        return self.rows / median, self.rows / median * self.size / self.all_rows


def compare(paths: Sequence[str], features: Mapping[str, Spec], *, batch_size: int, rounds: int = ROUNDS) -> Throughput:
    """Times fastpipe and fastavro in turn, one thread each, after a look at whether their batches are the same."""

    def read() -> Any:
        return fastpipe.read_avro(list(paths), features=features, batch_size=batch_size, num_threads=1)

    with read() as reader:
        total, ordered = reader.num_rows, list(reader.files)
        result = Throughput(0, total, sum(os.stat(path).st_size for path in ordered))
        schema = fastpipe.AvroFile(ordered[0]).schema
        columns = {name: Column(schema, name, spec) for name, spec in features.items()}
        start = time.perf_counter()
        reference = fastavro_batches(ordered, columns, batch_size)
        try:
            with progress_bar(total, desc="checking", leave=False, disable=None) as bar:
                for ours, theirs in zip(reader, reference, strict=False):
                    different = [name for name in features if not same(ours[name], theirs[name])]
                    if different:
                        result.problem = f"the batches differ in {different[0]!r}"
                    result.rows += row_count(ours)
                    bar.update(row_count(ours))
                    if result.problem or time.perf_counter() - start > SECONDS:
                        break
        except FastpipeError:
            raise
        except Exception as error:  # What fastavro can't make of a file is worth a line, not the end of the demo.
            result.problem = f"{type(error).__name__}: {error}"
        finally:
            reference.close()
    if result.problem:
        result.rows = total
    with progress_bar(2 * rounds, unit="pass", desc="measuring", leave=False, disable=None) as bar:
        for _ in range(rounds):
            with read() as reader:
                result.fastpipe.append(_seconds(reader, result.rows))
            bar.update(1)
            if not result.problem:
                result.fastavro.append(_seconds(fastavro_batches(ordered, columns, batch_size), result.rows))
            bar.update(1)
    return result


def _seconds(batches: Iterable[Batch], rows: int) -> float:
    start, seen = time.perf_counter(), 0
    for batch in batches:
        seen += row_count(batch)
        if seen >= rows:
            break
    return time.perf_counter() - start
