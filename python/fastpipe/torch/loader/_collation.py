"""Items to batches, as torch does it, without memory that torch would share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils import collate as torch_collate

__all__ = ["collate", "collate_privately", "is_default"]


class _DataClass(type):
    """The class of all objects of data classes."""

    def __instancecheck__(cls, item: Any) -> bool:
        return dataclasses.is_dataclass(item) and not isinstance(item, type)


class _AnyDataClass(metaclass=_DataClass):
    pass


def _collate_fields(batch: list[Any], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    """A data class of batches, which torch doesn't know."""
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
    """`torch.utils.data.default_collate`, of data classes too."""
    with_fields = {**torch_collate.default_collate_fn_map, _AnyDataClass: _collate_fields}
    return torch_collate.collate(batch, collate_fn_map=with_fields)


def is_default(function: Callable[..., Any]) -> bool:
    """Whether a function to collate by is torch's own, or ours."""
    return function in (torch_collate.default_collate, collate)


_of_tensors = torch_collate.collate_tensor_fn


def _collate_tensors(batch: list[Any], *, collate_fn_map: dict[Any, Callable[..., Any]] | None = None) -> Any:
    """Torch's own, without the file in /dev/shm that it makes for each tensor in workers."""
    first = batch[0]
    if first.is_nested or first.layout is not torch.strided:
        # It says why not.
        return _of_tensors(batch, collate_fn_map=collate_fn_map)
    return torch.stack(batch, 0)


def collate_privately() -> None:
    """Lets torch's default collation make tensors in memory of this process, which is a worker or has workers.

    What was made of a batch is then written to the batch's own memory; else it would be in shared memory twice, and
    what /dev/shm can't hold ends a process (SIGBUS).
    """
    known = torch_collate.default_collate_fn_map
    if known.get(torch.Tensor) is _of_tensors:
        known[torch.Tensor] = _collate_tensors
