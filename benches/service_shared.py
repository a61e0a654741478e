"""A local server beside local reading: Avro files, decoded by one thread, on this side or on the other.

So the consumer has the other core in both cases. (With all cores busy decoding, whatever takes batches over takes some
of that, wherever it is.)
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import fastpipe
import generate

__all__ = ["WANTED", "measure", "table"]

WANTED = 0.9
ROWS = {"a": 300_000, "b": 6_000_000}


def measure(rounds: int, quick: bool) -> dict[str, Any]:
    """Rows a second of both, by data set, and the ratios of the rounds."""
    found = {}
    for kind, rows in ROWS.items():
        path, _ = generate.generate(kind, rows // (10 if quick else 1))
        reader = fastpipe.read_avro(path, batch_size=1024, num_threads=1)
        with fastpipe.LocalService(reader) as remote:
            rates: dict[str, list[float]] = {"local": [], "shared": []}
            for round_ in range(rounds + 1):
                for name, one in (("local", reader), ("shared", remote)):
                    begun = time.perf_counter()
                    batches = sum(1 for _ in one)
                    took = time.perf_counter() - begun
                    assert batches == len(reader)
                    if round_:
                        rates[name].append(reader.num_rows / took)
        ratios = [shared / local for shared, local in zip(rates["shared"], rates["local"], strict=True)]
        found[kind] = {
            "rows/s": {name: statistics.median(of) for name, of in rates.items()},
            "shared over local": [min(ratios), statistics.median(ratios), max(ratios)],
        }
    return found


def table(found: dict[str, Any]) -> str:
    """What was measured, as lines."""
    lines = []
    for kind, of in found.items():
        least, median, most = of["shared over local"]
        met = "met" if median >= WANTED else "MISSED"
        rates = of["rows/s"]
        lines.append(
            f"({kind}) of Avro: local {rates['local']:.0f} rows/s, shared {rates['shared']:.0f}: {median:.2f} times"
            f" ({least:.2f} to {most:.2f}), wanted {WANTED}: {met}"
        )
    return "\n".join(lines)
