"""Descriptions of items and of the batches that they form.

An item is described by a tree of dicts, lists, tuples and data classes with values at the leaves. The description
determines where each value is stored in a slab: all values of one leaf are adjacent and form the array that the batch
contains. The first item determines the description, and each further item is compared with it. If an item doesn't fit,
the differing leaves are described more loosely. An array of a fixed shape is then described by its number of
dimensions only. Any other value is described as an object, which is pickled.

`torch.utils.data.default_collate` defines the batch of some items. Before a description is used, torch collates an item
with itself. The result must match the description in classes, dtypes and shapes. Collation functions that are
registered with torch are therefore honored.
"""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from fastpipe._fastpipe import ItemLayout
from fastpipe.torch.loader._messages import storable


class _DataClass(type):
    """The metaclass that makes every instance of a data class an instance of `_AnyDataClass`."""

    def __instancecheck__(cls, item: Any) -> bool:
        return dataclasses.is_dataclass(item) and not isinstance(item, type)


class _AnyDataClass(metaclass=_DataClass):
    pass


def _collate_fields(batch: list[Any], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    """Collates data classes field by field, which torch doesn't support."""
    first = batch[0]
    if any(type(item) is not type(first) for item in batch):
        raise RuntimeError("each element in list of batch should be of the same data class")
    found = object.__new__(type(first))
    for field in dataclasses.fields(first):
        values = [getattr(item, field.name) for item in batch]
        value = torch_collate.collate(values, collate_fn_map=collate_fn_map)
        object.__setattr__(found, field.name, value)
    return found


def collate(batch: list[Any]) -> Any:
    """Collates like `torch.utils.data.default_collate`, and supports data classes as well.

    Example:
        >>> import torch
        >>> from fastpipe.torch.loader import collate
        >>> collate([{"x": 1.0}, {"x": 2.0}])
        {'x': tensor([1., 2.], dtype=torch.float64)}
    """
    with_fields = {**torch_collate.default_collate_fn_map, _AnyDataClass: _collate_fields}
    return torch_collate.collate(batch, collate_fn_map=with_fields)


def is_default(function: Callable[..., Any]) -> bool:
    """Whether a collation function is torch's default or `collate`."""
    return function in (torch_collate.default_collate, collate)


_of_tensors = torch_collate.collate_tensor_fn


def _collate_tensors(batch: list[Any], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    """Collates tensors like torch, but without the file in /dev/shm that torch creates for each tensor in workers."""
    first = batch[0]
    if first.is_nested or first.layout is not torch.strided:
        # torch's function raises the error that explains why these tensors can't be collated.
        return _of_tensors(batch, collate_fn_map=collate_fn_map)
    nbytes = first.nbytes * len(batch)
    if nbytes >= _LEAST_IN_PLACE and _thread.allocate is not None and all(_are_alike(first, each) for each in batch):
        memory = _thread.allocate(nbytes)
        if memory is not None:
            out = torch.from_numpy(memory).view(first.dtype).view(len(batch), *first.shape)
            return torch.stack(batch, 0, out=out)
    return torch.stack(batch, 0)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and storable(other)


# Smaller tensors are collated in private memory and copied.
_LEAST_IN_PLACE = 16 << 10


class _Thread(threading.local):
    """The function that allocates memory for tensors which this thread collates, or None."""

    allocate: Callable[[int], np.ndarray | None] | None = None


_thread = _Thread()


def collate_in(allocate: Callable[[int], np.ndarray | None], batch: list[Any]) -> Any:
    """Collates like `collate`, with large tensors in the given memory.

    Only for processes that have called `collate_privately`.

    Args:
        allocate: Function that returns this many bytes, or None if the tensor must be in private memory.
        batch: Items.
    """
    _thread.allocate = allocate
    try:
        return collate(batch)
    finally:
        _thread.allocate = None


def collate_privately() -> None:
    """Makes torch's default collation create tensors in private memory.

    Called in processes that are workers or have workers.

    The batch is written to its own memory afterwards. Without this, it would be in shared memory twice, and a process
    that exceeds the size of /dev/shm is killed (SIGBUS).
    """
    known = torch_collate.default_collate_fn_map
    if known.get(torch.Tensor) is _of_tensors:
        known[torch.Tensor] = _collate_tensors


Node: TypeAlias = "tuple[Any, ...]"

_OBJECT: Node = ("object",)

# Deeper items, and items with more leaves, are pickled.
_DEPTH = 32
_LEAVES = 1024

_FITTING = {
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}

# The DLPack code and bits of each dtype, and the NumPy dtype that stores the same bytes.
_TENSORS: dict[torch.dtype, tuple[tuple[int, int], str]] = {
    torch.bool: ((6, 8), "bool"),
    torch.uint8: ((1, 8), "uint8"),
    torch.int8: ((0, 8), "int8"),
    torch.int16: ((0, 16), "int16"),
    torch.int32: ((0, 32), "int32"),
    torch.int64: ((0, 64), "int64"),
    torch.float16: ((2, 16), "float16"),
    torch.float32: ((2, 32), "float32"),
    torch.float64: ((2, 64), "float64"),
    torch.bfloat16: ((4, 16), "int16"),
    torch.complex64: ((5, 64), "complex64"),
    torch.complex128: ((5, 128), "complex128"),
}
"""Dtypes that slabs store directly. Tensors of other dtypes are pickled."""


class _Described:
    """Builds the description of an item."""

    def __init__(self) -> None:
        self._leaves = 0

    def node(self, item: Any, depth: int = 0) -> Node:
        kind = type(item)
        if depth > _DEPTH:
            return _OBJECT
        if kind is dict:
            return ("dict", [(key, self.node(value, depth + 1)) for key, value in item.items()])
        if kind is list:
            return ("list", [self.node(value, depth + 1) for value in item])
        if kind is tuple or (isinstance(item, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")):
            return ("tuple", kind, [self.node(value, depth + 1) for value in item])
        if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(item)]
            if not all(hasattr(item, name) for name in names):
                return _OBJECT
            return ("fields", kind, [(name, self.node(getattr(item, name), depth + 1)) for name in names])
        self._leaves += 1
        return _OBJECT if self._leaves > _LEAVES else _leaf(item)


def _leaf(item: Any) -> Node:
    kind = type(item)
    if kind is int:
        return ("int",) if -(2**63) <= item < 2**63 else _OBJECT
    if kind in _PLAIN:
        return (_PLAIN[kind],)
    if kind in (np.ndarray, np.memmap) and item.dtype in _FITTING and item.dtype.isnative:
        return ("array", kind, item.dtype.str, item.shape)
    if isinstance(item, np.generic) and item.dtype in _FITTING:
        return ("scalar", kind, item.dtype.str)
    if kind is torch.Tensor and item.dtype in _TENSORS and item.layout is torch.strided and item.is_cpu:
        if item.requires_grad or item.is_nested or item.__dict__:
            return _OBJECT
        element, stored = _TENSORS[item.dtype]
        return ("tensor", item.dtype, element, tuple(item.shape), np.dtype(stored).str)
    return _OBJECT


_PLAIN = {bool: "bool", float: "float", str: "text", bytes: "bytes"}


def _joined(one: Node, other: Node) -> Node:
    """Returns a description that covers the items of both descriptions."""
    if one == other:
        return one
    kinds = one[0], other[0]
    if kinds == ("dict", "dict"):
        left, right = dict(one[1]), dict(other[1])
        # An item with another key order doesn't fit into a slab, but that doesn't justify another layout.
        if left.keys() == right.keys() and {*map(type, left)} == {*map(type, right)}:
            return ("dict", [(key, _joined(node, right[key])) for key, node in one[1]])
    elif kinds == ("list", "list"):
        if len(one[1]) == len(other[1]):
            return ("list", [_joined(*pair) for pair in zip(one[1], other[1], strict=True)])
    elif kinds == ("tuple", "tuple"):
        if one[1] is other[1] and len(one[2]) == len(other[2]):
            return ("tuple", one[1], [_joined(*pair) for pair in zip(one[2], other[2], strict=True)])
    elif kinds == ("fields", "fields"):
        if one[1] is other[1]:
            pairs = zip(one[2], other[2], strict=True)
            return ("fields", one[1], [(name, _joined(node, more)) for (name, node), (_, more) in pairs])
    else:
        loose = _loose(one)
        if loose is not None and loose == _loose(other):
            return loose
    return _OBJECT


def _loose(node: Node) -> Node | None:
    """Loosens an array's description from its shape to its number of dimensions. Returns None for other leaves."""
    match node:
        case ("array", kind, dtype, shape):
            return ("arrays", kind, dtype, len(shape))
        case ("tensor", dtype, element, shape, stored):
            return ("tensors", dtype, element, len(shape), stored)
        case ("arrays" | "tensors", *_):
            return node
    return None


def _leaves(node: Node) -> Iterator[Node]:
    match node:
        case ("dict", pairs) | ("fields", _, pairs):
            for _, child in pairs:
                yield from _leaves(child)
        case ("list", children) | ("tuple", _, children):
            for child in children:
                yield from _leaves(child)
        case _:
            yield node


_SIDE_BY_SIDE = {"int", "float", "bool", "text", "bytes", "array", "scalar", "tensor"}


def described(item: Any, before: bytes | None, *, default: bool) -> bytes | None:
    """Describes an item together with the items that `before` describes.

    Args:
        item: Item of the dataset.
        before: An earlier description, or None.
        default: Whether torch's default collation creates the batch from items.

    Returns:
        The description, or None if `before` already covers the item.
    """
    node = _Described().node(item)
    earlier = None
    if before is not None:
        earlier, _ = pickle.loads(before)
        node = _joined(earlier, node)
        if node == earlier:
            return None
    try:
        return _bytes(node, default and _is_batch(node, item))
    except Exception:
        # The class can't be pickled, so its objects can't either. Pickling an object reports why.
        return _bytes(_OBJECT, False) if earlier != _OBJECT else None


def _bytes(node: Node, in_place: bool) -> bytes:
    return bytes(ForkingPickler.dumps((node, in_place), 5))


def _is_batch(node: Node, item: Any) -> bool:
    """Whether adjacent values of items are the batch that torch would create."""
    if not all(leaf[0] in _SIDE_BY_SIDE for leaf in _leaves(node)):
        return False
    two = [item, item]
    try:
        wanted = collate(two)
        found = _builder(node)(iter(_twice(node, item)))
    except Exception:
        return False
    return _alike(wanted, found)


def _twice(node: Node, item: Any) -> Iterator[Any]:
    """Yields the parts of a batch that consists of an item twice."""
    match node:
        case ("dict", pairs):
            for key, child in pairs:
                yield from _twice(child, item[key])
        case ("list", children) | ("tuple", _, children):
            for child, value in zip(children, item, strict=True):
                yield from _twice(child, value)
        case ("fields", _, pairs):
            for name, child in pairs:
                yield from _twice(child, getattr(item, name))
        case ("text",) | ("bytes",):
            yield [item, item]
        case ("tensor", _, _, shape, stored):
            yield np.zeros((2, *shape), stored)
        case ("array", _, dtype, shape):
            yield np.zeros((2, *shape), dtype)
        case ("scalar", _, dtype):
            yield np.zeros(2, dtype)
        case (kind,):
            yield np.zeros(2, {"int": "int64", "float": "float64", "bool": "bool"}[kind])


def _alike(one: Any, other: Any) -> bool:
    """Whether two batches have the same classes, dtypes and shapes."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and one.requires_grad == other.requires_grad
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if dataclasses.is_dataclass(one):
        return all(_alike(getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one))
    return bool(one == other)


Builder: TypeAlias = "Callable[[Iterator[Any]], Any]"


def _builder(node: Node) -> Builder:
    """Returns a function that builds a batch from its parts."""
    match node:
        case ("dict", pairs):
            named = [(key, _builder(child)) for key, child in pairs]
            return lambda parts: {key: build(parts) for key, build in named}
        case ("list", children):
            return _list_of(children)
        case ("tuple", kind, children):
            builders = _list_of(children)
            return builders if kind is tuple else lambda parts: kind._make(builders(parts))
        case ("fields", kind, pairs):
            fields = [(name, _builder(child)) for name, child in pairs]
            return lambda parts: _with_fields(kind, [(name, build(parts)) for name, build in fields])
        case ("text",) | ("bytes",):
            return next
        case ("tensor", dtype, _, _, _) if torch.from_numpy(np.empty(0, node[4])).dtype is not dtype:
            return lambda parts: torch.from_numpy(next(parts)).view(dtype)
    return lambda parts: torch.from_numpy(next(parts))


def _list_of(children: list[Node]) -> Builder:
    builders = [_builder(child) for child in children]
    # As in torch, a tuple results in a list as well.
    return lambda parts: [build(parts) for build in builders]


def _with_fields(kind: type, fields: list[tuple[str, Any]]) -> Any:
    """Creates an object of a data class without calling its `__init__`."""
    found: Any = object.__new__(kind)
    for name, value in fields:
        object.__setattr__(found, name, value)
    return found


class Layout:
    """A compiled description.

    Args:
        description: Description, as returned by `described`.
    """

    def __init__(self, description: bytes) -> None:
        node, in_place = pickle.loads(description)
        self.rows = ItemLayout(node, in_place)
        self.in_place: bool = in_place
        self._build = _builder(node) if in_place else None

    def batch(self, parts: list[Any]) -> Any:
        """Returns the batch that consists of these parts."""
        assert self._build is not None
        return self._build(iter(parts))
