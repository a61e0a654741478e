"""Readers of the generated Avro files, and helpers that read and simulate work."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import generate

if TYPE_CHECKING:
    import fastpipe


def cores() -> list[int]:
    """Returns the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def features(dataset: str) -> dict[str, Any]:
    """Returns the specs of a dataset's columns."""
    import fastpipe

    found: dict[str, Any] = {}
    for column in generate.DATASETS[dataset]:
        dtype = generate.DTYPES.get(column.avro, "string")
        nulls: dict[str, Any] = {"on_null": "mask"} if column.nullable else {}
        if column.kind in ("ragged", "strings"):
            found[column.name] = fastpipe.RaggedSpec((None,), dtype, **nulls)
        elif column.kind == "sparse":
            found[column.name] = fastpipe.SparseSpec((generate.SPARSE_SIZE,), dtype, **nulls)
        else:
            found[column.name] = fastpipe.DenseSpec((column.size,) if column.kind == "dense" else (), dtype, **nulls)
    return found


def order(name: str, rows: int = 16_384) -> dict[str, Any]:
    """Returns the reader options of an order, which is "sequential" or a value of `shuffle`."""
    return {} if name == "sequential" else {"shuffle": name, "shuffle_buffer": rows, "seed": 1}


def open_reader(paths: Any, dataset: str, name: str = "sequential", **options: Any) -> fastpipe.Reader:
    """Returns a reader of generated files."""
    import fastpipe

    options = {"batch_size": 1024} | order(name) | options
    return fastpipe.read_avro(paths, features=features(dataset), **options)


def least_limit(reader: fastpipe.Reader) -> int:
    """Returns the minimum memory_limit of a reader in bytes, rounded up as in the error message."""
    import fastpipe
    from fastpipe._arguments import memory_size

    running = reader._running
    reader._running = dataclasses.replace(running, memory_limit=1)
    try:
        reader.close()
        iter(reader)
    except fastpipe.errors.LimitError as error:
        said = str(error)
    else:
        raise RuntimeError("a limit of one byte was accepted")
    finally:
        reader._running = running
    found = re.search(r"at least ([0-9.]+ ?[kKMGT]?i?B)\b", said)
    if found is None:
        raise RuntimeError(f"the error message contains no minimum: {said}")
    return memory_size("least", found[1])


def nbytes(value: Any) -> int:
    """Returns the bytes of a batch's arrays."""
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    # Batch types unpack into their parts. The shape of a sparse one is a tuple of numbers.
    return sum(map(nbytes, value)) if hasattr(value, "__iter__") else 0


def drain(batches: Any, consume: Callable[[], None] | None = None) -> int:
    """Reads a pass and drops each batch before the next one. Returns the number of batches."""
    count = 0
    for batch in batches:
        del batch
        count += 1
        if consume is not None:
            consume()
    return count


class Waiting:
    """Units that take `seconds` each to arrive, like remote data, without using the CPU."""

    def __init__(self, units: int, rows: int, seconds: float) -> None:
        import pyarrow as pa

        self.schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
        self.rows: Sequence[int] = [rows] * units
        self._seconds = seconds

    def read(self, unit: int) -> Any:
        """Returns a unit after a delay."""
        import pyarrow as pa

        time.sleep(self._seconds)
        rows = self.rows[unit]
        return pa.table({"x": range(rows * unit, rows * (unit + 1))}, schema=self.schema)

    def fingerprint(self) -> str:
        """Returns the identity of the dataset."""
        return "waiting"


def spin(seconds: float) -> None:
    """Keeps a core busy for `seconds`."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def slept(seconds: float, times: int = 20) -> float:
    """Returns the measured duration of a sleep of `seconds`."""
    begun = time.perf_counter()
    for _ in range(times):
        time.sleep(seconds)
    return (time.perf_counter() - begun) / times
