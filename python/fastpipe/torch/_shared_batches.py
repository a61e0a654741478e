"""Batches that a loader's worker creates in memory which the training process maps, so that no data is copied.

torch copies each tensor that a worker sends to a file in shared memory. Here the reader decodes directly into shared
memory (`SharedSlabs`), and the worker sends only the locations of a batch's slabs. The training process maps that
memory once and borrows the slabs. After the last tensor over them is released, the worker's reader reuses them.

A tensor that isn't a view of a slab, such as a result of the user's function, is sent the way torch sends it.
"""

from __future__ import annotations

import io
import os
import pickle
import secrets
import sys
import threading
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastpipe._fastpipe import BorrowedMemory, Memory, SharedArena, SharedSlabs
from fastpipe._reader.passes import Passes
from fastpipe.errors import WorkerError

_NO_LIMIT = 2**63


class _Key(NamedTuple):
    """Identifies a worker's memory by process id, file descriptor and a token, since both numbers are reused."""

    process: int
    file: int
    token: str


class _Slab(NamedTuple):
    """A slab: its address in this process, its size in bytes, and its offset in the shared memory."""

    address: int
    size: int
    offset: int


class Lending:
    """A worker's shared memory, in which its passes create batches.

    Args:
        passes: The passes whose batches are lent.
    """

    def __init__(self, passes: Passes) -> None:
        self._slabs = SharedSlabs(_NO_LIMIT)
        file = self._slabs.file
        assert file is not None
        self._key = _Key(os.getpid(), file, secrets.token_hex(8))
        # None if the passes can't choose where they create batches.
        self.memory = passes.shared_memory(self._slabs, 2)

    @staticmethod
    def of(passes: Passes) -> Lending | None:
        """Returns shared memory for passes, or None if they can't create batches there or the system isn't Linux."""
        if sys.platform != "linux":
            return None
        lending = Lending(passes)
        return None if lending.memory is None else lending

    def lent(self, batch: Mapping[str, Any], made: Any) -> Any:
        """Returns the value that a worker yields for `batch`, which was converted to `made`."""
        memory = _memory_of(batch)
        slabs = None if memory is None else memory.lend(self._slabs)
        return made if slabs is None else _Lent(self._key, [_Slab(*slab) for slab in slabs], made)


def _memory_of(node: Any) -> Memory | None:
    """Returns the memory in which the arrays of a batch are stored."""
    if isinstance(node, np.ndarray):
        base: Any = node.base
        return base if isinstance(base, Memory) else None
    parts = node.values() if isinstance(node, dict) else (getattr(node, name) for name in node._parts)
    found = (_memory_of(part) for part in parts if isinstance(part, np.ndarray) or hasattr(part, "_parts"))
    return next((memory for memory in found if memory is not None), None)


class _Lent:
    """A converted batch, which unpickles as its value over borrowed memory in the receiving process."""

    def __init__(self, key: _Key, slabs: list[_Slab], made: Any) -> None:
        self._key = key
        self._slabs = slabs
        # Keeps the batch's memory alive until the batch is sent.
        self._made = made

    def __reduce__(self) -> tuple[Any, ...]:
        file = io.BytesIO()
        pickler = _Pickler(file, self._slabs)
        pickler.dump(self._made)
        pickler.clear_memo()
        pieces = [(slab.offset, slab.size) for slab in self._slabs]
        return _borrowed, (tuple(self._key), pieces, pickler.arrays, file.getvalue())


class _Pickler(ForkingPickler):
    """Pickles tensors and arrays in slabs by their location, and everything else as torch does."""

    def __init__(self, file: io.BytesIO, slabs: list[_Slab]) -> None:
        # ForkingPickler accepts positional arguments only.
        super().__init__(file, 5, True, self._array)
        self._slabs = slabs
        self.arrays: list[tuple[int, int, int]] = []

    def _place(self, address: int, size: int) -> tuple[int, int, int] | None:
        for number, slab in enumerate(self._slabs):
            if slab.address <= address and address + size <= slab.address + slab.size:
                return number, address - slab.address, size
        return None

    def _array(self, buffer: pickle.PickleBuffer) -> bool:
        raw = np.frombuffer(buffer.raw(), np.uint8)
        place = self._place(raw.ctypes.data, raw.size) if raw.size else None
        if place is None:
            return True
        self.arrays.append(place)
        return False

    def persistent_id(self, item: Any) -> Any:
        if type(item) is not torch.Tensor or not item.is_cpu or item.requires_grad or item.__dict__:
            return None
        if item.layout is torch.sparse_coo:
            # Its indices and values may be stored in slabs.
            return "coo", (item._indices(), item._values(), tuple(item.shape), item.is_coalesced())
        if item.layout is torch.sparse_csr:
            return "csr", (item.crow_indices(), item.col_indices(), item.values(), tuple(item.shape))
        if item.layout is not torch.strided or item.is_nested or item.is_quantized or not item.numel():
            return None
        if item.is_conj() or item.is_neg():
            return None
        storage = item.untyped_storage()
        place = self._place(storage.data_ptr(), storage.nbytes())
        if place is None:
            return None
        return "tensor", (place, item.dtype, tuple(item.shape), item.stride(), item.storage_offset())


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, memory: BorrowedMemory, arrays: list[tuple[int, int, int]]) -> None:
        super().__init__(io.BytesIO(data), buffers=[memory.array(*place) for place in arrays])
        self._memory = memory

    def persistent_load(self, pid: Any) -> torch.Tensor:
        kind, parts = pid
        if kind == "coo":
            indices, values, shape, coalesced = parts
            return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)
        if kind == "csr":
            rows, columns, values, shape = parts
            return torch.sparse_csr_tensor(rows, columns, values, shape, check_invariants=False)
        place, dtype, shape, stride, start = parts
        flat = torch.from_numpy(self._memory.array(*place)).view(dtype)
        return flat.as_strided(shape, stride, start)


# The worker memory that this process has mapped, and the id of the process that mapped it. A forked child maps its own.
_mapped: dict[_Key, SharedArena] = {}
_mapped_by = 0
_lock = threading.Lock()


def _arena(key: _Key) -> SharedArena:
    global _mapped_by
    with _lock:
        if _mapped_by != os.getpid():
            _mapped.clear()
            _mapped_by = os.getpid()
        found = _mapped.get(key)
        if found is None:
            for other in [other for other in _mapped if not Path(f"/proc/{other.process}").exists()]:
                del _mapped[other]
            try:
                file = os.open(f"/proc/{key.process}/fd/{key.file}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise WorkerError(
                    f"cannot map the memory of a DataLoader's worker (pid {key.process}), which contains its"
                    f" batches: {error.strerror}. The worker has exited, or this process may not open its files"
                ) from error
            try:
                found = _mapped[key] = SharedArena(file)
            finally:
                os.close(file)
        return found


def _borrowed(
    key: tuple[int, int, str], pieces: list[tuple[int, int]], arrays: list[tuple[int, int, int]], data: bytes
) -> Any:
    """Rebuilds a converted batch over borrowed memory."""
    memory = _arena(_Key(*key)).borrow(pieces)
    return _Unpickler(data, memory, arrays).load()
