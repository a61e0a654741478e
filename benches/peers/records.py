"""fastavro: the same batches as fastpipe's, built in Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

import generate
from peers.batches import BatchWorker
from peers.job import Job, Pass


def _offsets(sized: list[Any]) -> Any:
    out = np.zeros(len(sized) + 1, "i8")
    np.cumsum(np.fromiter(map(len, sized), "i8", len(sized)), out=out[1:])
    return out


def column_of(column: generate.Column, items: list[Any]) -> Any:
    """Converts the Python values of one column to the arrays of a batch."""
    dtype, chain = generate.DTYPES.get(column.avro), itertools.chain.from_iterable
    if column.nullable:
        valid = np.array([v is not None for v in items])
        return np.array([v or 0 for v in items], dtype), valid
    if column.kind in ("scalar", "dense"):
        return np.array(items, dtype)
    if column.kind == "ragged":
        ends = _offsets(items)
        return np.fromiter(chain(items), np.dtype(dtype), int(ends[-1])), ends
    if column.kind == "sparse":
        ends = _offsets([v["indices0"] for v in items])
        indices = np.empty((int(ends[-1]), 2), "i8")
        indices[:, 0] = np.repeat(np.arange(len(items)), np.diff(ends))
        indices[:, 1] = np.fromiter(chain(v["indices0"] for v in items), "i8", len(indices))
        values = np.fromiter(chain(v["values"] for v in items), np.dtype(dtype), len(indices))
        return indices, values, np.array([len(items), generate.SPARSE_SIZE], "i8")
    ends = _offsets(items) if column.kind == "strings" else None
    texts = [text.encode() for text in (chain(items) if column.kind == "strings" else items)]
    strings = np.frombuffer(b"".join(texts), "u1"), _offsets(texts)
    return strings if ends is None else (strings, ends)


class FastavroWorker(BatchWorker):
    """Collects the records of a batch, then builds one array per column."""

    packages = modules = ("fastavro",)

    def batches(self, job: Job) -> Iterator[tuple[int, dict[str, Any]]]:
        with open(job.path, "rb") as file:
            records = iter(self.library.reader(file))
            while held := list(itertools.islice(records, job.batch)):
                yield len(held), {c.name: column_of(c, [r[c.name] for r in held]) for c in job.columns}


class FastavroRecordsWorker(FastavroWorker):
    """Iterates over the records without building arrays."""

    def read(self, job: Job) -> Pass:
        with open(job.path, "rb") as file:
            return Pass(sum(1 for _ in self.library.reader(file)))

    def check(self, job: Job) -> tuple[int, generate.Sums | None]:
        return self.read(job).rows, None
