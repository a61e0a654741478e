"""Loaders whose workers share their batches without a copy.

test_torch_lending.py runs these programs in separate processes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import fastpipe
import fastpipe.torch as adapter
from killed_worker import EndsInMap
from samples import FEATURES


def reader(paths: list[str], **more: Any) -> fastpipe.Reader:
    options = {
        "batch_size": 7,
        "shuffle": True,
        "seed": 11,
        "shuffle_buffer": 21,
        "features": FEATURES,
        "on_uneven": "allow",
    }
    return fastpipe.read_avro(paths, **options | more)


def tensors(item: Any) -> list[torch.Tensor]:
    """Returns the tensors within a value, including the components of sparse tensors."""
    if isinstance(item, torch.Tensor):
        if item.layout is torch.sparse_coo:
            return [item._indices(), item._values()]
        if item.layout is torch.sparse_csr:
            return [item.crow_indices(), item.col_indices(), item.values()]
        return [item]
    if isinstance(item, dict):
        item = list(item.values())
    return [tensor for part in item for tensor in tensors(part)] if isinstance(item, (list, tuple)) else []


def told(item: Any) -> Any:
    """Returns a value with all its properties in a form that can be compared."""
    if isinstance(item, dict):
        return {name: told(part) for name, part in item.items()}
    if isinstance(item, (list, tuple)):
        return [type(item).__name__, *map(told, item)]
    if isinstance(item, torch.Tensor):
        values = [(str(part.dtype), list(part.shape), part.tolist()) for part in tensors(item)]
        return [str(item.layout), list(item.shape), json.loads(json.dumps(values))]
    return item


def stretches() -> list[range]:
    """Returns the address ranges of shared memory in this process."""
    maps = Path("/proc/self/maps").read_text()
    found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ +/memfd:fastpipe", maps, re.MULTILINE)
    return [range(int(start, 16), int(end, 16)) for start, end in found]


def is_lent(tensor: torch.Tensor) -> bool:
    return any(tensor.data_ptr() in stretch for stretch in stretches())


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"twice": batch["vector"] * 2}


def loader_of(data: Any, workers: int, method: str, kind: str) -> Any:
    if kind == "stateful":
        return StatefulDataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=method)
    if kind == "fastpipe":
        return adapter.DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=method)
    return DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=method)


def same(paths: list[str], cases: list[tuple[str, str, dict[str, str]]]) -> Any:
    """Compares batches from workers with batches of the reader, and lists the tensors in the workers' memory."""
    return [_same(paths, *case) for case in cases]


def _same(paths: list[str], method: str, kind: str, forms: dict[str, str]) -> Any:
    data = adapter.dataset(reader(paths), map=doubled, **forms)
    found, lent, others = [], set(), set()
    for batch in loader_of(data, 2, method, kind):
        found.append(told(batch))
        for name, part in batch.items():
            for tensor in tensors(part):
                if tensor.numel():
                    (lent if is_lent(tensor) else others).add(name)
    whole = [told(batch) for batch in adapter.dataset(reader(paths), map=doubled, **forms)]
    alike = sorted(map(json.dumps, found)) == sorted(map(json.dumps, whole))
    return {"alike": alike, "batches": len(found), "lent": sorted(lent), "others": sorted(others)}


def kept(paths: list[str]) -> Any:
    """Keeps all batches until their worker has exited."""
    batches = list(loader_of(adapter.dataset(reader(paths)), 2, "fork", "torch"))
    ids = sorted(id for batch in batches for id in batch["id"].tolist())
    alike = all(
        batch["vector"].tolist() == [[id * 0.5, -float(id), 1.0] for id in batch["id"].tolist()] for batch in batches
    )
    for batch in batches:
        # The consumer owns the batches and may write to them.
        batch["vector"].fill_(1.0)
    return {"rows": len(ids), "sorted": ids == list(range(len(ids))), "alike": alike}


def reused(paths: list[str]) -> Any:
    """Returns the resident kilobytes of a worker's shared memory in each of ten passes, up to the highest so far."""
    data = adapter.dataset(reader(paths, epochs=10, batch_size=100))
    held = []
    for batch in loader_of(data, 1, "fork", "torch"):
        assert is_lent(batch["vector"])
        held.append(sum(_resident(stretch) for stretch in stretches()))
    return {"first": max(held[:20]), "last": max(held[-20:]), "batches": len(held)}


def _resident(stretch: range) -> int:
    smaps = Path("/proc/self/smaps").read_text()
    part = smaps[smaps.index(f"{stretch.start:x}-") :]
    found = re.search(r"Rss: +(\d+) kB", part)
    assert found
    return int(found[1])


def collated(paths: list[str]) -> Any:
    """Reads with a custom collate function, which gets NumPy batches and disables sharing."""
    data = adapter.dataset(reader(paths))
    loader = DataLoader(data, batch_size=None, num_workers=1, collate_fn=dict, multiprocessing_context="fork")
    batches = list(loader)
    return {
        "kinds": sorted({type(batch).__name__ for batch in batches}),
        "lent": any(is_lent(b["id"]) for b in batches),
    }


def killed(paths: list[str]) -> Any:
    """Checks that batches survive a killed worker."""
    ends = EndsInMap(worker=0, batch=1)
    data = adapter.dataset(reader(paths, epochs=50), map=ends)
    batches = iter(loader_of(data, 1, "fork", "torch"))
    first = next(batches)
    ids = first["id"].tolist()
    error = ""
    ends.go()
    try:
        batches._workers[0].join()
        for _ in batches:
            pass
    except RuntimeError as raised:
        error = type(raised).__name__
    return {"error": error, "same": first["id"].tolist() == ids and is_lent(first["id"])}


def answer(request: dict[str, Any]) -> Any:
    """Runs a program with its arguments and returns its result."""
    return globals()[request.pop("program")](**request)
