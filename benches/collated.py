"""What one would write with Torch's `DataLoader` and fastavro: records as dicts, collated to batches of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fastavro
import numpy as np
import torch
from torch.utils.data import IterableDataset

import fastpipe


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
