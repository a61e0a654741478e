"""What batches become in Torch: tensors, tuples of tensors, and what Torch has of ragged and sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch

from fastpipe import batch as forms
from fastpipe.batch._form import counted
from fastpipe.errors import UnsupportedError

RaggedAs: TypeAlias = Literal["offsets", "nested"]
SparseAs: TypeAlias = Literal["coo", "csr", "bag"]
StringsAs: TypeAlias = Literal["tensors", "lists"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "ragged": get_args(RaggedAs),
    "sparse": get_args(SparseAs),
    "strings": get_args(StringsAs),
}


def _described(parts: Any) -> str:
    """A named tuple of tensors, by their dtypes and shapes: their values take kilobytes."""
    fields = []
    for name, part in zip(parts._fields, parts, strict=True):
        text = repr(part)
        if isinstance(part, torch.Tensor):
            device = "" if part.device.type == "cpu" else f" on {part.device}"
            text = f"{str(part.dtype).removeprefix('torch.')}[{', '.join(map(str, part.shape))}]{device}"
        fields.append(f"{name}={text}")
    return f"{type(parts).__name__}({', '.join(fields)})"


class Jagged(NamedTuple):
    """Rows of differing length: row `i` is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: the items of all rows, a tensor `[items, ...]`, or another of these tuples with as many rows.
        offsets: int64 `[rows + 1]`.
    """

    values: Any
    offsets: torch.Tensor

    def __repr__(self) -> str:
        return _described(self)


class Masked(NamedTuple):
    """Rows of which some are null.

    Attributes:
        values: a tensor, or another of these tuples; to be ignored where `valid` is False.
        valid: bool `[rows]` or `[rows, ...]`, True where a value is present.
    """

    values: Any
    valid: torch.Tensor

    def __repr__(self) -> str:
        return _described(self)


class Strings(NamedTuple):
    """Strings as bytes: entry `i`, in C order of the feature's shape, is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: uint8 `[bytes]`: UTF-8 for strings.
        offsets: int64 `[entries + 1]`.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __repr__(self) -> str:
        return _described(self)


class Bag(NamedTuple):
    """Sparse rows of one dimension as `torch.nn.EmbeddingBag(..., include_last_offset=True)` takes them.

    `bag(indices, offsets, per_sample_weights=values)` with `mode="sum"`.

    Attributes:
        indices: int64 `[nnz]`.
        offsets: int64 `[rows + 1]`: the entries of row `i` are those from `offsets[i]` to `offsets[i + 1]`.
        values: `[nnz]`.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    values: Any

    def __repr__(self) -> str:
        return _described(self)


def tensors(
    batch: Mapping[str, Any],
    *,
    ragged: RaggedAs = "offsets",
    sparse: SparseAs = "coo",
    strings: StringsAs = "tensors",
) -> dict[str, Any]:
    """The tensors of a batch, over the memory of its arrays.

    Args:
        batch: of any reader: arrays and batch forms (`fastpipe.batch`) by name.
        ragged: `"offsets"`: `Jagged(values, offsets)`, at any depth. `"nested"`: nested tensors with the jagged layout,
            for one ragged dimension of numbers.
        sparse: `"coo"`: sparse COO tensors, uncoalesced, since indices stand as they were written; `"csr"`: sparse CSR
            tensors, of one dimension beside the rows; `"bag"`: `Bag(indices, offsets, values)`, for embeddings. `"csr"`
            and `"bag"` want a `SparseSpec` with `layout="csr"`: then nothing is computed. Of the default layout the
            offsets are counted.
        strings: `"tensors"`: `Strings(values, offsets)`; `"lists"`: nested Python lists of str or bytes.

    Returns:
        A dict of tensors, named tuples of tensors, and lists of strings, in the order of the batch. Nulls that are
        masked are `Masked(values, valid)`.

    Raises:
        UnsupportedError: if a feature has no such form.
        ValueError: if there is no such form at all.
    """
    return Forms(ragged, sparse, strings).convert(batch, torch.from_numpy)


def keyed_jagged(batch: Mapping[str, Any], keys: list[str]) -> dict[str, Any]:
    """Sparse or ragged features as `torchrec.KeyedJaggedTensor(**keyed_jagged(batch, keys))` takes them.

    Args:
        batch: of a reader.
        keys: names of sparse features of one dimension, whose indices become values and whose values become weights,
            or of ragged ones of integers; not of both.

    Returns:
        `keys`; `values` int64, the ids of the first key's rows, then those of the next (these are copied into one
        tensor); `lengths` int64 `[len(keys) * rows]`; and `weights`, or None for ragged features.

    Raises:
        UnsupportedError: if a feature isn't of such a form.
    """
    values, lengths, weights = [], [], []
    for name in keys:
        node = batch[name]
        if isinstance(node, (forms.Sparse, forms.SparseCSR)) and isinstance(node.values, np.ndarray):
            offsets, indices = _rows(name, node)
            values.append(torch.from_numpy(indices))
            lengths.append(torch.from_numpy(np.diff(offsets)))
            weights.append(torch.from_numpy(node.values))
        elif _is_ragged_ids(node):
            values.append(torch.from_numpy(node.values))
            lengths.append(torch.from_numpy(node.lengths))
        else:
            raise UnsupportedError(
                f"feature {name!r} is a {type(node).__name__}: keyed jagged tensors hold sparse features of one"
                " dimension, or ragged integers"
            )
    if weights and len(weights) < len(keys):
        raise UnsupportedError("one keyed jagged tensor holds sparse or ragged features: make one for each kind")
    return {
        "keys": list(keys),
        "values": torch.cat(values).to(torch.int64),
        "lengths": torch.cat(lengths),
        "weights": torch.cat(weights) if weights else None,
    }


def _is_ragged_ids(node: Any) -> bool:
    # Strings have values and offsets, too: of bytes, which are no ids.
    ragged = isinstance(node, forms.Ragged) and not isinstance(node, forms.Strings)
    return ragged and isinstance(node.values, np.ndarray) and node.values.ndim == 1 and node.values.dtype.kind in "iu"


@dataclass(frozen=True, slots=True)
class Forms:
    """What forms become: the arguments of `tensors`."""

    ragged: RaggedAs = "offsets"
    sparse: SparseAs = "coo"
    strings: StringsAs = "tensors"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                *others, last = map('"{}"'.format, choices)
                raise ValueError(f"{name} is {', '.join(others)} or {last}, not {value!r}")

    def convert(self, batch: Mapping[str, Any], tensor: Callable[[np.ndarray], torch.Tensor]) -> dict[str, Any]:
        """The batch in these forms, of tensors that `tensor` makes of its arrays, and of arrays made of these."""
        node = _Conversion(self, tensor).node
        # Most are arrays. Once a batch, behind decoding that leaves none of this in the caches: less of it is faster.
        return {
            name: tensor(counted(value)) if type(value) is np.ndarray else node(name, value)
            for name, value in batch.items()
        }


class _Conversion:
    """Goes through the forms of a batch."""

    __slots__ = ("tensor", "wanted")

    def __init__(self, wanted: Forms, tensor: Callable[[np.ndarray], torch.Tensor]) -> None:
        self.wanted = wanted

        def of_numbers(array: np.ndarray) -> torch.Tensor:
            return tensor(counted(array))

        self.tensor = of_numbers

    def node(self, name: str, node: Any) -> Any:
        if isinstance(node, np.ndarray):
            return self.tensor(node)
        if isinstance(node, (forms.Sparse, forms.SparseCSR)):
            if self.wanted.sparse == "coo":
                return self._coo(name, node)
            return self._bag(name, node) if self.wanted.sparse == "bag" else self._csr(name, node)
        if isinstance(node, forms.Masked):
            return Masked(self.node(name, node.values), self.tensor(node.valid))
        if isinstance(node, forms.Strings):
            if self.wanted.strings == "lists":
                return node.to_list()
            return Strings(self.tensor(node.values), self.tensor(node.offsets))
        if self.wanted.ragged == "nested":
            return self._nested(name, node)
        if self.wanted.strings == "lists" and _of_strings(node.values):
            return node.to_list()
        return Jagged(self.node(name, node.values), self.tensor(node.offsets))

    def _nested(self, name: str, node: forms.Ragged) -> torch.Tensor:
        if not isinstance(node.values, np.ndarray):
            raise UnsupportedError(
                f"feature {name!r} is ragged over a {type(node.values).__name__}: nested tensors have one ragged"
                ' dimension of numbers without nulls; ragged="offsets" takes any'
            )
        nested: Any = torch.nested.nested_tensor_from_jagged(self.tensor(node.values), self.tensor(node.offsets))
        # Until the longest length is known Torch takes the sum of all lengths for it, and pads to that. Given as the
        # argument `max_seqlen` it would import torch._dynamo and with it Triton, whose LLVM aborts processes in which
        # TensorFlow's is loaded. So it is kept where Torch itself keeps it: as the size of an empty tensor.
        nested._max_seqlen_tensor = torch.empty(int(np.diff(node.offsets).max(initial=0)), 0)
        found: torch.Tensor = nested
        return found

    def _numbers(self, name: str, values: Any) -> torch.Tensor:
        if not isinstance(values, np.ndarray):
            raise UnsupportedError(
                f'feature {name!r} has sparse strings, which no sparse tensor holds: use sparse="bag"'
            )
        return self.tensor(values)

    def _coo(self, name: str, node: forms.Sparse | forms.SparseCSR) -> torch.Tensor:
        size = node.dense_shape.tolist()
        if isinstance(node, forms.Sparse):
            indices = self.tensor(node.indices.T)
        else:
            columns = node.indices if node.indices.ndim > 1 else node.indices[:, np.newaxis]
            rows = np.repeat(np.arange(len(node)), np.diff(node.offsets))
            indices = self.tensor(np.concatenate([rows[np.newaxis], columns.T]))
        # Indices were held against the shape when they were read.
        return torch.sparse_coo_tensor(indices, self._numbers(name, node.values), size, check_invariants=False)

    def _csr(self, name: str, node: forms.Sparse | forms.SparseCSR) -> torch.Tensor:
        offsets, indices = (self.tensor(part) for part in _rows(name, node))
        size = node.dense_shape.tolist()
        values = self._numbers(name, node.values)
        return torch.sparse_csr_tensor(offsets, indices, values, size, check_invariants=False)

    def _bag(self, name: str, node: forms.Sparse | forms.SparseCSR) -> Bag:
        offsets, indices = _rows(name, node)
        values = self.node(name, node.values)
        return Bag(self.tensor(indices), self.tensor(offsets), values)


def _of_strings(node: Any) -> bool:
    while not isinstance(node, (forms.Strings, np.ndarray)):
        node = node.values
    return isinstance(node, forms.Strings)


def _rows(name: str, node: forms.Sparse | forms.SparseCSR) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of the rows and indices of the only dimension."""
    if len(node.dense_shape) != 2:
        raise UnsupportedError(
            f"feature {name!r} has {len(node.dense_shape) - 1} sparse dimensions, and this form has one:"
            ' use sparse="coo"'
        )
    if isinstance(node, forms.SparseCSR):
        return node.offsets, node.indices
    offsets = np.searchsorted(node.indices[:, 0], np.arange(len(node) + 1))
    return offsets, node.indices[:, 1]
