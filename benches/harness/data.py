"""Readers of the generated Avro files, and what is asked of them."""

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
        nulls: dict[str, Any] = {"nulls": "mask"} if column.nullable else {}
        if column.kind in ("ragged", "strings"):
            found[column.name] = fastpipe.RaggedSpec((None,), dtype, **nulls)
        elif column.kind == "sparse":
            found[column.name] = fastpipe.SparseSpec((generate.SPARSE_SIZE,), dtype, **nulls)
        else:
            found[column.name] = fastpipe.DenseSpec((column.size,) if column.kind == "dense" else (), dtype, **nulls)
    return found


def order(name: str, rows: int = 16_384) -> dict[str, Any]:
    """Returns the options of an order: "sequential", or a way to shuffle."""
    return {} if name == "sequential" else {"shuffle": name, "shuffle_buffer": rows, "seed": 1}


def open_reader(paths: Any, dataset: str, name: str = "sequential", **options: Any) -> fastpipe.Reader:
    """Returns a reader of generated files."""
    import fastpipe

    options = {"batch_size": 1024} | order(name) | options
    return fastpipe.read_avro(paths, features=features(dataset), **options)


def least_limit(reader: fastpipe.Reader) -> int:
    """Returns the least memory_limit that passes run with, in bytes, as the error rounds it up."""
    import fastpipe
    from fastpipe._reader.pass_options import memory_size

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
    """Returns the bytes of a batch's arrays."""
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    # Batch forms unpack into their parts; the shape of a sparse one is a tuple of numbers.
    return sum(map(nbytes, value)) if hasattr(value, "__iter__") else 0


def drain(batches: Any, consume: Callable[[], None] | None = None) -> int:
    """Reads a pass, dropping each batch before the next one. Returns the number of batches."""
    count = 0
    for batch in batches:
        del batch
        count += 1
        if consume is not None:
            consume()
    return count


class Waiting:
    """Units that come after `seconds` each, as from far away, and are no work: so no processor is needed."""

    def __init__(self, units: int, rows: int, seconds: float) -> None:
        import pyarrow as pa

        self.schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
        self.rows: Sequence[int] = [rows] * units
        self._seconds = seconds

    def read(self, unit: int) -> Any:
        """Returns a unit, after a while."""
        import pyarrow as pa

        time.sleep(self._seconds)
        rows = self.rows[unit]
        return pa.table({"x": range(rows * unit, rows * (unit + 1))}, schema=self.schema)

    def fingerprint(self) -> str:
        """Returns what identifies the data."""
        return "waiting"


def spin(seconds: float) -> None:
    """Keeps a core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def slept(seconds: float, times: int = 20) -> float:
    """Returns what sleeping for this long really takes."""
    begun = time.perf_counter()
    for _ in range(times):
        time.sleep(seconds)
    return (time.perf_counter() - begun) / times
