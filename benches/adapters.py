"""Measures what adapters cost: batches of dataset (a) as NumPy, Torch and JAX arrays, in turn.

On one core with one thread (`--cores 1`, the default) all that an adapter does is added to decoding; on several there
are as many threads as fastpipe chooses by default.

All ways read one reader, which is made once, so that none pays for fresh memory, and the batches of all are in the same
memory: its addresses make some 4 % of a difference. Times are relative to plain batches of the same round. Beside them
is Torch's `DataLoader` over fastavro, which makes each record a dict and collates 1,024 of them to the same tensors; it
reads a small part of the file, and its rate is compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import fastavro
import jax
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

import fastpipe
import fastpipe.jax
import fastpipe.torch
import generate
from harness import Bench, take_turns
from harness.data import cores, drain, open_reader


class Records(IterableDataset[dict[str, Any]]):
    """Records of an Avro file, the first `rows` of them."""

    def __init__(self, path: str, rows: int) -> None:
        super().__init__()
        self._path, self._rows = path, rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with open(self._path, "rb") as file:
            for record, _ in zip(fastavro.reader(file), range(self._rows), strict=False):
                yield record  # type: ignore[misc] # Records are dicts here.


class Collate:
    """Collates records to what fastpipe's adapter yields."""

    def __init__(self, features: fastpipe.Features) -> None:
        self._features = features

    def __call__(self, records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {}
        for name, spec in self._features.items():
            column = [record[name] for record in records]
            if isinstance(spec, fastpipe.SparseSpec):
                lengths = [len(value["values"]) for value in column]
                rows = np.repeat(np.arange(len(column)), lengths)
                index = np.concatenate([value["indices0"] for value in column])
                values = np.concatenate([value["values"] for value in column]).astype(spec.dtype)
                place = torch.from_numpy(np.stack([rows, index]))
                size = (len(column), *(int(n or 0) for n in spec.shape))
                batch[name] = torch.sparse_coo_tensor(place, torch.from_numpy(values), size, check_invariants=False)
            else:
                batch[name] = torch.from_numpy(np.array(column, dtype=spec.dtype))
        return batch


def main(bench: Bench) -> None:
    """Runs the comparison."""
    args = bench.args
    os.sched_setaffinity(0, cores()[: args.cores])
    torch.set_num_threads(1)
    # Else JAX has no int64, and has nothing to compare with.
    jax.config.update("jax_enable_x64", True)
    path, _ = generate.generate("a", args.rows)
    size = args.batch_size
    reader = open_reader(path, "a", batch_size=size, num_threads=1 if args.cores == 1 else "auto")
    tensors = fastpipe.torch.IterableDataset(reader)
    records = DataLoader(Records(str(path), args.loader_rows), batch_size=size, collate_fn=Collate(reader.features))
    ways: dict[str, Callable[[], Any]] = {
        "NumPy": lambda: reader,
        "Torch": lambda: tensors,
        "Torch, DataLoader(num_workers=0)": partial(DataLoader, tensors, batch_size=None),
        "JAX": partial(fastpipe.jax.iterator, reader),
        "DataLoader over fastavro": lambda: records,
    }
    turns = take_turns({name: partial(lambda made: drain(made()), way) for name, way in ways.items()}, bench.rounds)
    row = bench.table("batches", "records/s|,.0f", "times as long as NumPy|,.2f")
    for name in ways:
        rows = args.loader_rows if name == "DataLoader over fastavro" else args.rows
        row(name, rows / turns.median(name), turns.ratio(name, "NumPy").median * args.rows / rows)


if __name__ == "__main__":
    sizes = {"rows": (65_536, 8_192), "loader_rows": 2_048, "batch_size": 1024, "cores": 1}
    Bench("adapters", __doc__, rounds=(15, 3), packages=("numpy", "torch", "jax", "fastavro"), **sizes).run(main)
