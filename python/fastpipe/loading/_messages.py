"""Objects to bytes in a batch's memory, and back: what has no place in a slab, and what was made of a batch.

Objects are pickled; but the bytes of arrays and tensors are written once, as they are, and read as views. So a message
is a list of pieces, which says where each of these lies, and a pickle that counts on them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch

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
    found: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


class _Piece(NamedTuple):
    """Bytes of an array or a tensor."""

    data: np.ndarray
    tensor: bool


class _Pickler(ForkingPickler):
    """Pickles an object, and lists its arrays. Whatever else torch sends to processes is sent as torch does it."""

    def __init__(self, file: io.BytesIO) -> None:
        # Its arguments have no names.
        super().__init__(file, 5, True, self._array)
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
        if not isinstance(item, torch.Tensor) or not _storable(item):
            return None
        if item.nbytes < _SMALL:
            return _bytes_of(item.contiguous()).tobytes(), item.dtype, tuple(item.shape), None, 0
        storage = item.untyped_storage()
        if item.is_contiguous() and item.nbytes < storage.nbytes() // 2:
            # Only a part of a large storage is wanted.
            return self._tensor(_bytes_of(item)), item.dtype, tuple(item.shape), item.stride(), 0
        # Tensors over one storage stay such.
        key = storage.data_ptr(), storage.nbytes()
        number = self._storages.get(key)
        if number is None:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            number = self._storages[key] = self._tensor(_bytes_of(whole))
        return number, item.dtype, tuple(item.shape), item.stride(), item.storage_offset()

    def _tensor(self, data: np.ndarray) -> int:
        self.pieces.append(_Piece(data, True))
        self._tensors += 1
        return self._tensors - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: memoryview, arrays: Sequence[np.ndarray], tensors: Sequence[np.ndarray]) -> None:
        super().__init__(io.BytesIO(data), buffers=arrays)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:
        data, dtype, shape, stride, offset = pid
        if isinstance(data, bytes):
            if not data:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        return torch.from_numpy(self._tensors[data]).view(dtype).as_strided(shape, stride, offset)


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
