"""What the scripts about loads share: specs, taking turns, memory, tables, bounds."""

from __future__ import annotations

import dataclasses
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import fastpipe
import generate
from fastpipe._reader.pass_options import memory_size

QUICK = os.environ.get("QUICK") == "1"
MB = 1e6


def features(dataset: str) -> dict[str, Any]:
    """The specs of a data set's columns."""
    found: dict[str, Any] = {}
    for column in generate.DATASETS[dataset]:
        dtype = generate.DTYPES.get(column.avro, "string")
        nulls: dict[str, Any] = {"nulls": "mask"} if column.nullable else {}
        if column.kind in ("ragged", "strings"):
            found[column.name] = fastpipe.RaggedSpec((None,), dtype, **nulls)
        elif column.kind == "sparse":
            found[column.name] = fastpipe.SparseSpec((generate.SPARSE_SIZE,), dtype, **nulls)
        else:
            found[column.name] = fastpipe.DenseSpec((column.size,) if column.kind == "dense" else (), dtype, **nulls)
    return found


def window(rows: int = 16_384) -> dict[str, Any]:
    """The options of shuffling by windows."""
    return {"shuffle": "window", "shuffle_buffer": rows, "seed": 1}


def recording(reader: fastpipe.Reader) -> fastpipe.Reader:
    """Lets a reader's passes keep a record of their tasks."""
    reader._running = dataclasses.replace(reader._running, record_tasks=True)
    return reader


def least_limit(reader: fastpipe.Reader) -> int:
    """The least memory_limit with which a reader's passes run, in bytes, as the error rounds it up."""
    running = reader._running
    reader._running = dataclasses.replace(running, memory_limit=1)
    try:
        reader.close()
        iter(reader)
    except fastpipe.LimitError as error:
        said = str(error)
    else:
        raise RuntimeError("a limit of one byte was accepted")
    finally:
        reader._running = running
    found = re.search(r"at least ([0-9.]+ ?[kKMGT]?i?B)\b", said)
    if found is None:
        raise RuntimeError(f"the error doesn't say what is needed: {said}")
    return memory_size("least", found[1])


def nbytes(value: Any) -> int:
    """Bytes of a batch's arrays."""
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    if isinstance(value, np.ndarray):
        return value.nbytes
    # Batch forms unpack into their parts; the shape of a sparse one is a tuple of numbers.
    return sum(map(nbytes, value)) if hasattr(value, "__iter__") else 0


def drain(reader: fastpipe.Reader, consume: Callable[[], None] | None = None) -> int:
    """Reads a pass, dropping each batch before the next is asked for. Returns the number of batches."""
    batches = 0
    for batch in reader:
        del batch
        batches += 1
        if consume is not None:
            consume()
    return batches


def take_turns(tasks: dict[Any, Callable[[], Any]], rounds: int, warm: int = 1) -> dict[Any, list[tuple[float, Any]]]:
    """Runs tasks in turn, A B A B. Returns the seconds and the result of each turn, without the warm-up.

    Every other round goes backwards, so that none always comes behind the same one.
    """
    found: dict[Any, list[tuple[float, Any]]] = {name: [] for name in tasks}
    for turn in range(rounds + warm):
        for name, task in list(tasks.items())[:: -1 if turn % 2 else 1]:
            begun = time.perf_counter()
            result = task()
            seconds = time.perf_counter() - begun
            if turn >= warm:
                found[name].append((seconds, result))
    return found


def ratio(mine: Sequence[float], other: Sequence[float]) -> float:
    """Median of the ratios within rounds."""
    return statistics.median(a / b for a, b in zip(mine, other, strict=True))


def rss_anon() -> int:
    """This process's anonymous memory, in bytes."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel doesn't tell RssAnon")


class Peak:
    """The greatest RssAnon that was sampled."""

    def __init__(self) -> None:
        self.bytes = rss_anon()
        self.samples = 0

    def look(self) -> None:
        """Takes a sample."""
        self.bytes = max(self.bytes, rss_anon())
        self.samples += 1


@contextmanager
def sampled(interval: float = 0.002) -> Iterator[Peak]:
    """Samples RssAnon from a thread while something runs."""
    peak, stop = Peak(), threading.Event()

    def run() -> None:
        while not stop.wait(interval):
            peak.look()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak.look()


class Bounds:
    """Figures with what is wanted of them: bounds, which must hold on any machine, and aims, which are speeds."""

    def __init__(self) -> None:
        self.missed: list[str] = []
        self.slower: list[str] = []

    def check(self, what: str, value: float, *, most: float | None = None, least: float | None = None) -> str:
        """Notes whether a figure keeps to its bound: a miss fails the script. Returns a mark for the table."""
        return self._mark(self.missed, "MISSED", what, value, most, least)

    def aim(self, what: str, value: float, *, most: float | None = None, least: float | None = None) -> str:
        """Notes whether a speed reaches its aim. The machine has a say in it, so a miss is shown and fails nothing."""
        return self._mark(self.slower, "below", what, value, most, least)

    @staticmethod
    def _mark(misses: list[str], mark: str, what: str, value: float, most: float | None, least: float | None) -> str:
        low, high = least is not None and value < least, most is not None and value > most
        if not (low or high):
            return "ok"
        wanted = f"at least {least:g}" if low else f"at most {most:g}"
        misses.append(f"{what}: {value:.3g}, wanted {wanted}")
        return mark

    def status(self) -> int:
        """Prints what was missed and returns the exit status."""
        print()
        for line in self.slower:
            print(f"aim not reached: {line}")
        for line in self.missed:
            print(f"missed: {line}")
        if not self.missed:
            print("all bounds kept")
        return min(len(self.missed), 1)


def table(columns: Sequence[tuple[str, int]]) -> Callable[..., None]:
    """Prints a heading; returns what prints a row. Text goes left, everything else right."""
    print()
    print("  ".join(f"{name:>{width}}" if width > 0 else f"{name:<{-width}}" for name, width in columns))

    def row(*values: Any) -> None:
        cells = []
        for value, (_, width) in zip(values, columns, strict=True):
            text = f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            cells.append(f"{text:>{width}}" if width > 0 else f"{text:<{-width}}")
        print("  ".join(cells), flush=True)

    return row
