"""Conversion of objects to bytes in a batch's memory and back: items that don't fit into a slab, and whole batches.

Objects are pickled, but the bytes of arrays and tensors are written separately, once and unchanged, and are read as
views. A message therefore consists of a table of pieces with their locations, and a pickle that refers to the pieces.
Tensor storages that contain more than the elements (of subclasses, sparse, quantized, or with gradients) are pieces as
well. Otherwise torch would create a file in /dev/shm for each storage and request it from the worker when the message
is read.

Batches of worker threads are copied if they are small, and pickled otherwise. Pickling holds the GIL, so threads that
pickle small batches for each other are slower than one thread: batches of 32 arrays of 4 KB took 2 to 6 times as long.
A copy has the same effect as a pickle. The consumer may modify the batch in place, because the dataset never shares the
batch's memory.
"""

from __future__ import annotations

import functools
import io
import itertools
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import reduce_tensor

from fastpipe._fastpipe import ItemBatch, ItemMemory, ItemRoom

# Arrays with fewer bytes are part of the pickle.
_SMALL = 256

# The kinds of numeric dtypes.
_PLAIN_KINDS = frozenset("biufc")

_HEAD = np.dtype([("pieces", "<u8")])
_PIECE = np.dtype([("offset", "<u8"), ("len", "<u8"), ("tensor", "<u8")])


def storable(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists only of its elements in this process's memory."""
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
    """Returns the elements of a contiguous tensor as bytes over the same memory."""
    # Dimensions of size 1 may have any stride, so set the stride explicitly.
    found: np.ndarray = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return found


class _Piece(NamedTuple):
    """The bytes of an array or a tensor."""

    data: np.ndarray
    tensor: bool


_REBUILT = (torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3)


def _reduced(tensor: Any) -> Any:
    """Reduces a tensor of a subclass for pickling, with a copy of its elements if its storage is far larger."""
    reduced = tensor.__reduce_ex__(5)
    match reduced:
        case (outer, (inner, kind, (storage, _, size, _, *more), *state)) if inner in _REBUILT and tensor.is_cpu:
            if tensor.is_conj() or tensor.is_neg():
                return reduced
            # Accessing a typed storage warns that it is deprecated.
            whole = getattr(storage, "_untyped_storage", storage).nbytes()
            if tensor.nbytes >= whole // 2 and inner is torch._utils._rebuild_tensor_v2:
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
    """Reduces a tensor like torch does for other processes, but keeps the parameters of quantized tensors."""
    if tensor.is_quantized:
        return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _array(pieces: list[_Piece], buffer: pickle.PickleBuffer) -> bool:
    """Returns True if an array's bytes belong in the pickle. Otherwise adds them as a piece."""
    raw = buffer.raw()
    if raw.nbytes < _SMALL:
        return True
    pieces.append(_Piece(np.frombuffer(raw, np.uint8), False))
    return False


class _Pickler(ForkingPickler):
    """Pickles an object and collects its arrays.

    Other objects that torch can send to processes are pickled as torch does.
    """

    def __init__(self, file: io.BytesIO) -> None:
        # The callback must not reference the pickler: the cycle would keep arrays alive until garbage collection.
        self.pieces: list[_Piece] = []
        # ForkingPickler accepts positional arguments only.
        super().__init__(file, 5, True, functools.partial(_array, self.pieces))
        # False if the program has registered a reducer for arrays. The lookup is slow, so do it once.
        self._has_plain_arrays = np.ndarray not in self.dispatch_table
        self._storages: dict[tuple[int, int], int] = {}
        self._tensors = 0

    def reducer_override(self, item: Any) -> Any:
        """Reduces an object. pickle doesn't call this for Python's built-in types."""
        kind = type(item)
        if kind is np.ndarray and self._has_plain_arrays:
            if 0 < item.nbytes < _SMALL and item.dtype.kind in _PLAIN_KINDS and item.flags.c_contiguous:
                return _small_array, (item.tobytes(), item.dtype, item.shape, item.flags.writeable)
            # Returns the result that pickle would find after searching all of torch's classes.
            return item.__reduce_ex__(5)
        if isinstance(item, torch.Tensor):
            return self._of_tensor(item)
        if isinstance(item, torch.TypedStorage) and item._untyped_storage.device.type == "cpu":
            return _storage_of, (self._storage(item._untyped_storage), item.dtype)
        if isinstance(item, torch.UntypedStorage) and item.device.type == "cpu":
            return _storage_of, (self._storage(item), None)
        return NotImplemented

    def _of_tensor(self, item: torch.Tensor) -> Any:
        if storable(item):
            return self._elements(item)
        if item.is_conj() or item.is_neg():
            # torch would lose the conjugate or negative bit.
            plain = item.resolve_conj().resolve_neg()
            return self._elements(plain) if storable(plain) else NotImplemented
        if type(item) is torch.Tensor:
            return _reduced_plain(item)
        return NotImplemented if type(item) in self.dispatch_table else _reduced(item)

    def _elements(self, item: torch.Tensor) -> Any:
        if item.nbytes < _SMALL:
            return _small, (_bytes_of(item.contiguous()).tobytes(), item.dtype, tuple(item.shape))
        storage = item.untyped_storage()
        if item.is_contiguous() and item.nbytes < storage.nbytes() // 2:
            # Only a small part of a large storage is needed.
            return _tensor_of, (self._tensor(_bytes_of(item)), item.dtype, tuple(item.shape), item.stride(), 0)
        place = item.dtype, tuple(item.shape), item.stride(), item.storage_offset()
        return _tensor_of, (self._storage(storage), *place)

    def _storage(self, storage: torch.UntypedStorage) -> int:
        """Returns the index of the storage's piece. Tensors that share a storage keep sharing it."""
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


def _small_array(data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], writeable: bool) -> np.ndarray:
    """Restores an array whose elements are part of the pickle."""
    return np.frombuffer(bytearray(data) if writeable else data, dtype).reshape(shape)


def _small(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Restores a tensor whose elements are part of the pickle."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _tensor_of(
    pieces: Sequence[np.ndarray],
    number: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> torch.Tensor:
    return torch.from_numpy(pieces[number]).view(dtype).as_strided(shape, stride, offset)


def _storage_of(pieces: Sequence[np.ndarray], number: int, dtype: torch.dtype | None) -> Any:
    storage = torch.from_numpy(pieces[number]).untyped_storage()
    return storage if dtype is None else _typed(storage, dtype)


_OF_PIECES = {function.__name__: function for function in (_tensor_of, _storage_of)}
"""Functions that pickles call without the first argument, which the unpickler supplies."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: memoryview, arrays: Sequence[np.ndarray], tensors: Sequence[np.ndarray]) -> None:
        super().__init__(io.BytesIO(data), buffers=arrays)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in _OF_PIECES:
            # A method would reference the unpickler, which caches the functions that it has found.
            return functools.partial(_OF_PIECES[name], self._tensors)
        return super().find_class(module, name)


def _pickled(item: Any) -> tuple[bytes, list[_Piece]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(item)
    return file.getvalue(), pickler.pieces


def _written(data: bytes, pieces: Sequence[tuple[int, int, bool]], room: ItemRoom) -> tuple[int, int]:
    head = np.array([(len(pieces),)], _HEAD).tobytes()
    table = np.array(pieces, _PIECE).tobytes() if pieces else b""
    whole = head + table + data
    return room.write(whole), len(whole)


def _reserve(data: bytes, pieces: Sequence[_Piece], room: ItemRoom) -> None:
    """Reserves memory for the bytes of pieces and for the message that refers to them."""
    sizes = [len(piece.data) for piece in pieces]
    room.reserve([*sizes, _HEAD.itemsize + len(pieces) * _PIECE.itemsize + len(data)])


def message(item: Any, room: ItemRoom) -> tuple[int, int]:
    """Writes an object and returns the offset and length of the message.

    Raises:
        OutOfMemoryError: If the memory is full.
        Exception: Any exception that pickling the object raises.
    """
    data, pieces = _pickled(item)
    _reserve(data, pieces, room)
    return _written(data, [(room.write(piece.data), len(piece.data), piece.tensor) for piece in pieces], room)


def message_of_batch(made: list[Any], batch: ItemBatch, room: ItemRoom) -> tuple[int, int]:
    """Writes a collated batch, of which parts may be in its memory already. Otherwise overwrites the batch's items.

    Args:
        made: List that contains only the result. The result is removed, so that no reference to the memory remains.
        batch: The batch.
        room: Memory of that batch.

    Returns:
        Offset and length of the message.
    """
    data, pieces = _pickled(made.pop())
    places = _places(batch.memory(), pieces)
    # Only the batch itself references the memory now, unless the user's code has kept a reference.
    kept = batch.release(any(place is not None for place in places))
    _reserve(data, pieces, room)

    def placed(piece: _Piece, place: tuple[int, int] | None) -> tuple[int, int, bool]:
        if place is None:
            return room.write(piece.data), len(piece.data), piece.tensor
        offset, size = place
        return room.copy(offset, size) if kept else offset, size, piece.tensor

    return _written(data, [placed(*pair) for pair in zip(pieces, places, strict=True)], room)


def _places(memory: ItemMemory, pieces: list[_Piece]) -> list[tuple[int, int] | None]:
    """Returns the location of each piece in the memory, or None. Releases references to pieces in the memory."""
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


# Length of a message that contains the index of a copied batch. All other messages are longer: a header of 8 bytes and
# a pickle.
_LENGTH = 8

# Larger batches are pickled. They are stored in slabs, which `memory_limit` includes, and pickling them is
# comparatively cheap.
_MOST_BYTES = 1 << 20
_MOST_PARTS = 1024
_DEPTH = 32

_IMMUTABLE = frozenset({int, float, bool, complex, type(None)})


class _NotCopiedError(Exception):
    """Raised if a batch is large or contains values that only a pickle can copy."""


class _Copier:
    """Copies a batch."""

    def __init__(self) -> None:
        self._bytes, self._parts = _MOST_BYTES, _MOST_PARTS

    def copy(self, part: Any, depth: int = 0) -> Any:
        """Returns a copy that shares no memory with the original.

        Raises:
            _NotCopiedError: If the value must be pickled instead.
        """
        kind = type(part)
        self._count(1, 0)
        if kind in _IMMUTABLE:
            return part
        if kind is str or kind is bytes:
            self._count(0, len(part))
            return part
        if kind is np.ndarray and part.flags.writeable and not part.dtype.hasobject:
            self._count(0, part.nbytes)
            return part.copy(order="K")
        if kind is torch.Tensor and storable(part):
            self._count(0, part.nbytes)
            return part.clone()
        if depth < _DEPTH:
            if kind is list:
                return [self.copy(each, depth + 1) for each in part]
            if kind is tuple:
                return tuple([self.copy(each, depth + 1) for each in part])
            if kind is dict:
                return {self.copy(key, depth + 1): self.copy(value, depth + 1) for key, value in part.items()}
        raise _NotCopiedError

    def _count(self, parts: int, nbytes: int) -> None:
        self._parts -= parts
        self._bytes -= nbytes
        if self._parts < 0 or self._bytes < 0:
            raise _NotCopiedError


class ThreadBatches:
    """Writes and reads the messages of batches that a thread created by itself."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._copies: dict[int, Any] = {}

    def message(self, batch: Any, room: ItemRoom) -> tuple[int, int]:
        """Writes the message of a batch and returns its offset and length.

        Raises:
            OutOfMemoryError: If the memory is full.
            Exception: Any exception that pickling the batch raises.
        """
        try:
            copied = _Copier().copy(batch)
        except _NotCopiedError:
            return message(batch, room)
        number = next(self._numbers)
        offset = room.write(number.to_bytes(_LENGTH, "little"))
        self._copies[number] = copied
        return offset, _LENGTH

    def read(self, memory: ItemMemory, offset: int, length: int) -> Any:
        """Reads a message. A copied batch can be read only once."""
        if length == _LENGTH:
            return self._copies.pop(int.from_bytes(memory.bytes(offset, length), "little"))
        return read(memory, offset, length)

    def clear(self) -> None:
        """Drops batches whose messages won't be read."""
        self._copies.clear()
