"""Ragged features whose arrays are padded to a few sizes: `jax.jit` compiles once for each shape."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fastpipe import batch as forms
from fastpipe._arguments import shown
from fastpipe._interop.memory import aligned
from fastpipe.errors import ValueRangeError
from fastpipe.specs import DenseSpec, Features, RaggedSpec, Spec

__all__ = ["PadRagged", "Padding", "paddings"]

PadRagged: TypeAlias = "bool | Sequence[int] | Mapping[str, bool | Sequence[int]]"

# Of powers of two: below that, sizes would differ often and save little.
_LEAST = 16


class Padding:
    """Sizes to which the arrays of a feature are padded.

    Args:
        name: of the feature, for errors.
        sizes: in ascending order; None for powers of two.
    """

    def __init__(self, name: str, sizes: Sequence[int] | None) -> None:
        self._name = name
        self._sizes = sizes

    def padded(self, node: Any, rows: int | None = None) -> Any:
        """A form of the reader's, whose arrays of values are padded. Offsets say what is padding.

        Args:
            node: an array or a form.
            rows: how many rows it is to have, at least as many as it has; None to keep their number.

        Raises:
            ValueRangeError: if an array is longer than the largest size.
        """
        match node:
            case forms.Strings():
                return self._strings(node, len(node) if rows is None else rows)
            case forms.Ragged():
                values = self.padded(node.values, self._size(len(node.values)))
                return forms.Ragged(values, _offsets(node.offsets, len(node) if rows is None else rows))
            case forms.Masked():
                return forms.Masked(self.padded(node.values, rows), _extended(node.valid, rows))
        return _extended(node, rows) if isinstance(node, np.ndarray) else node

    def _strings(self, node: forms.Strings, rows: int) -> forms.Strings:
        values = _extended(node.values, self._size(len(node.values)))
        offsets = _offsets(node.offsets, rows * math.prod(node.shape[1:]))
        return forms.Strings(values, offsets, (rows, *node.shape[1:]), node.binary)

    def _size(self, items: int) -> int:
        if self._sizes is None:
            return max(_LEAST, 1 << (items - 1).bit_length())
        place = bisect_left(self._sizes, items)
        if place == len(self._sizes):
            raise ValueRangeError(
                f"feature {self._name!r}: an array of a batch has {items} items, and the largest size of pad_ragged is"
                f" {self._sizes[-1]}. Give a larger size, or pad_ragged=True for powers of two",
                feature=self._name,
            )
        return self._sizes[place]


def paddings(pad_ragged: Any, features: Features) -> dict[str, Padding]:
    """How the features are padded whose number of items, or of bytes of text, differs from batch to batch.

    Args:
        pad_ragged: as `fastpipe.jax.iterator` takes it.
        features: of the reader.

    Raises:
        TypeError: if it, or a size, is of another type.
        ValueError: if sizes aren't in ascending order, or a name isn't that of such a feature.
    """
    ragged = [name for name, spec in features.items() if _is_ragged(spec)]
    if isinstance(pad_ragged, Mapping):
        for name in pad_ragged:
            if name not in ragged:
                there = ", ".join(ragged) or "none"
                raise ValueError(f"pad_ragged names {name!r}, which isn't a ragged feature or text. These are: {there}")
        wanted = dict(pad_ragged)
    else:
        wanted = dict.fromkeys(ragged, pad_ragged)
        _checked(pad_ragged)
    return {name: Padding(name, _checked(sizes)) for name, sizes in wanted.items() if sizes is not False}


def _is_ragged(spec: Spec) -> bool:
    return isinstance(spec, RaggedSpec) or (isinstance(spec, DenseSpec) and spec.dtype in ("string", "bytes"))


def _checked(sizes: Any) -> list[int] | None:
    """Sizes as whole numbers; None for powers of two, and for no padding."""
    if isinstance(sizes, bool):
        return None
    what = "pad_ragged must be a bool, sizes such as [1024, 4096], or a dict from features to these"
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, (Sequence, np.ndarray)):
        raise TypeError(f"{what}; got {shown(sizes)}")
    try:
        found = [operator.index(size) for size in sizes]
    except TypeError:
        raise TypeError(f"{what}; got {shown(sizes)}") from None
    if not found or found[0] < 1 or found != sorted(set(found)):
        raise ValueError(f"sizes of pad_ragged must be at least 1 and in ascending order; got {found}")
    return found


def _extended(array: np.ndarray, rows: int | None) -> np.ndarray:
    """The array with zeros after its rows."""
    if rows is None or rows == len(array):
        return array
    out = aligned((rows, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    out[len(array) :] = 0
    return out


def _offsets(offsets: np.ndarray, rows: int) -> np.ndarray:
    """The offsets with empty rows after them."""
    if rows + 1 == len(offsets):
        return offsets
    out = aligned((rows + 1,), offsets.dtype)
    out[: len(offsets)] = offsets
    out[len(offsets) :] = offsets[-1]
    return out
