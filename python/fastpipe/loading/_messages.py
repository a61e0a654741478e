"""Objects to bytes in a batch's memory, and back: what has no place in a slab, and what was made of a batch.

Objects are pickled; but the bytes of arrays and tensors are written once, as they are, and read as views. So a message
is a list of pieces, which says where each of these lies, and a pickle that counts on them. Storages of tensors that are
more than their elements (of derived classes, sparse, quantized, with gradients) are pieces, too: torch would give each
one a file in /dev/shm, and ask the worker for it when the message is read.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from fastpipe._fastpipe import ItemBatch, ItemMemory, ItemRoom

__all__ = ["message", "message_of_batch", "read"]

# The bytes of smaller arrays are part of the pickle.
_SMALL = 256

_HEAD = np.dtype([("pieces", "<u8")])
_PIECE = np.dtype([("offset", "<u8"), ("len", "<u8"), ("tensor", "<u8")])


def _storable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its elements in this process's memory, and nothing more."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.requires_grad
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a contiguous tensor as bytes, over the same memory."""
    # Strides of sizes of 1 may be any.
    found: np.ndarray = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return found


class _Piece(NamedTuple):
    """Bytes of an array or a tensor."""

    data: np.ndarray
    tensor: bool


_REBUILT = (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3)


def _reduced(tensor: Any) -> Any:
    """How a tensor of a derived class is pickled: with a storage of its own elements, if its own has far more."""
    reduced = tensor.__reduce_ex__(5)
    match reduced:
        case (outer, (inner, kind, (storage, _, size, _, *more), *state)) if inner in _REBUILT and tensor.is_cpu:
            if tensor.is_conj() or tensor.is_neg():
                return reduced
            if tensor.nbytes >= storage.nbytes() // 2 and inner is torch._utils._rebuild_tensor_v2:
                return reduced
            plain = tensor.as_subclass(torch.Tensor).detach().clone(memory_format=torch.contiguous_format)
            dtype = plain.dtype if inner is torch._utils._rebuild_tensor_v2 else torch.uint8
            return outer, (
                inner,
                kind,
                (_typed(plain.untyped_storage(), dtype), 0, size, plain.stride(), *more),
                *state,
            )
    return reduced


def _reduced_plain(tensor: torch.Tensor) -> Any:
    """As torch does it for other processes, but that would forget what a quantized tensor's elements stand for."""
    if tensor.is_quantized:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


class _Pickler(ForkingPickler):
    """Pickles an object, and lists its arrays. Whatever else torch sends to processes is sent as torch does it."""

    def __init__(self, file: io.BytesIO) -> None:
        # Its arguments have no names.
        super().__init__(file, 5, True, self._array)
        # A copy, for this object alone.
        self.dispatch_table: dict[type, Any]
        self.dispatch_table[torch.Tensor] = _reduced_plain
        self.pieces: list[_Piece] = []
        self._storages: dict[tuple[int, int], int] = {}
        self._tensors = 0

    def _array(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _SMALL:
            return True
        self.pieces.append(_Piece(np.frombuffer(raw, np.uint8), False))
        return False

    def persistent_id(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if _storable(item):
                return self._elements(item)
            if item.is_conj() or item.is_neg():
                # torch would forget it.
                plain = item.resolve_conj().resolve_neg()
                return self._elements(plain) if _storable(plain) else None
            if type(item) not in self.dispatch_table:
                self.dispatch_table[type(item)] = _reduced
        elif isinstance(item, torch.TypedStorage) and item.device.type == "cpu":
            return "storage", self._storage(item._untyped_storage), item.dtype
        elif isinstance(item, torch.UntypedStorage) and item.device.type == "cpu":
            return "storage", self._storage(item), None
        return None

    def _elements(self, item: torch.Tensor) -> Any:
        if item.nbytes < _SMALL:
            return "tensor", _bytes_of(item.contiguous()).tobytes(), item.dtype, tuple(item.shape), None, 0
        storage = item.untyped_storage()
        if item.is_contiguous() and item.nbytes < storage.nbytes() // 2:
            # Only a part of a large storage is wanted.
            return "tensor", self._tensor(_bytes_of(item)), item.dtype, tuple(item.shape), item.stride(), 0
        place = item.dtype, tuple(item.shape), item.stride(), item.storage_offset()
        return "tensor", self._storage(storage), *place

    def _storage(self, storage: torch.UntypedStorage) -> int:
        """The number of its piece. Tensors over one storage stay such."""
        key = storage.data_ptr(), storage.nbytes()
        number = self._storages.get(key)
        if number is None:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            number = self._storages[key] = self._tensor(_bytes_of(whole))
        return number

    def _tensor(self, data: np.ndarray) -> int:
        self.pieces.append(_Piece(data, True))
        self._tensors += 1
        return self._tensors - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: memoryview, arrays: Sequence[np.ndarray], tensors: Sequence[np.ndarray]) -> None:
        super().__init__(io.BytesIO(data), buffers=arrays)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        match pid:
            case ("storage", number, dtype):
                storage = torch.from_numpy(self._tensors[number]).untyped_storage()
                return storage if dtype is None else _typed(storage, dtype)
            case (_, bytes() as data, dtype, shape, _, _):
                if not data:
                    return torch.empty(shape, dtype=dtype)
                return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        _, number, dtype, shape, stride, offset = pid
        return torch.from_numpy(self._tensors[number]).view(dtype).as_strided(shape, stride, offset)


def _pickled(item: Any) -> tuple[bytes, list[_Piece]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(item)
    # It refers to itself, and so would keep all it has seen.
    pickler.clear_memo()
    return file.getvalue(), pickler.pieces


def _written(data: bytes, pieces: Sequence[tuple[int, int, bool]], room: ItemRoom) -> tuple[int, int]:
    head = np.array([(len(pieces),)], _HEAD).tobytes()
    table = np.array(pieces, _PIECE).tobytes() if pieces else b""
    whole = head + table + data
    return room.write(whole), len(whole)


def message(item: Any, room: ItemRoom) -> tuple[int, int]:
    """Writes an object. Returns offset and length of the message.

    Raises:
        OutOfMemoryError: if there is no room.
        Exception: whatever pickling it raises.
    """
    data, pieces = _pickled(item)
    return _written(data, [(room.write(piece.data), len(piece.data), piece.tensor) for piece in pieces], room)


def message_of_batch(made: list[Any], batch: ItemBatch, room: ItemRoom) -> tuple[int, int]:
    """Writes what was made of a batch, in place of the batch's items where it has none of their memory.

    Args:
        made: has it, and nothing more; it is taken out, since nobody must refer to the items in the end.
        batch: whose items it was made of.
        room: of that batch.

    Returns:
        Offset and length of the message.
    """
    data, pieces = _pickled(made.pop())
    places = _places(batch.memory(), pieces)
    # Only the batch itself refers to the memory now, unless the user's code has kept some of it.
    kept = batch.release(any(place is not None for place in places))

    def placed(piece: _Piece, place: tuple[int, int] | None) -> tuple[int, int, bool]:
        if place is None:
            return room.write(piece.data), len(piece.data), piece.tensor
        offset, size = place
        return room.copy(offset, size) if kept else offset, size, piece.tensor

    return _written(data, [placed(*pair) for pair in zip(pieces, places, strict=True)], room)


def _places(memory: ItemMemory, pieces: list[_Piece]) -> list[tuple[int, int] | None]:
    """Where each piece lies in the memory, if it does; then what refers to it is taken out."""
    places: list[tuple[int, int] | None] = []
    for number, (data, tensor) in enumerate(pieces):
        offset = memory.offset(data.ctypes.data, len(data))
        places.append(None if offset is None else (offset, len(data)))
        if offset is not None:
            pieces[number] = _Piece(np.empty(0, np.uint8), tensor)
    return places


def read(memory: ItemMemory, offset: int, length: int) -> Any:
    """Reads a message. Its arrays and tensors are views of the memory."""
    whole = memoryview(memory.bytes(offset, length))
    count = int(np.frombuffer(whole[: _HEAD.itemsize], _HEAD)["pieces"][0])
    end = _HEAD.itemsize + count * _PIECE.itemsize
    arrays: list[np.ndarray] = []
    tensors: list[np.ndarray] = []
    for start, size, tensor in np.frombuffer(whole[_HEAD.itemsize : end], _PIECE).tolist():
        (tensors if tensor else arrays).append(memory.array(start, size))
    return _Unpickler(whole[end:], arrays, tensors).load()
