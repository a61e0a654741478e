"""Converts batches to Torch: tensors, tuples of tensors, and Torch's ragged and sparse tensors."""

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
    """Describes a named tuple of tensors by dtypes and shapes, because the values would need kilobytes."""
    fields = []
    for name, part in zip(parts._fields, parts, strict=True):
        text = repr(part)
        if isinstance(part, torch.Tensor):
            device = "" if part.device.type == "cpu" else f" on {part.device}"
            text = f"{str(part.dtype).removeprefix('torch.')}[{', '.join(map(str, part.shape))}]{device}"
        fields.append(f"{name}={text}")
    return f"{type(parts).__name__}({', '.join(fields)})"


class Jagged(NamedTuple):
    """Rows that differ in length: row `i` is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: Concatenated items of all rows: a tensor `[items, ...]`, or another of these tuples with that many rows.
        offsets: Start and end of each row, int64 `[rows + 1]`.
    """

    values: Any
    offsets: torch.Tensor

    def __repr__(self) -> str:
        return _described(self)


class Masked(NamedTuple):
    """Values with a mask of nulls.

    Attributes:
        values: A tensor, or another of these tuples. Entries for which `valid` is False must be ignored.
        valid: True for values that are present, bool `[rows]` or `[rows, ...]`.
    """

    values: Any
    valid: torch.Tensor

    def __repr__(self) -> str:
        return _described(self)


class Strings(NamedTuple):
    """Strings as bytes: entry `i`, in C order of the feature's shape, is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: Bytes of all entries, uint8 `[bytes]`; UTF-8 for strings.
        offsets: Start and end of each entry, int64 `[entries + 1]`.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __repr__(self) -> str:
        return _described(self)


class Bag(NamedTuple):
    """Sparse rows of one dimension, for `torch.nn.EmbeddingBag(..., include_last_offset=True)`.

    Call `bag(indices, offsets, per_sample_weights=values)` with `mode="sum"`.

    Attributes:
        indices: Index of each entry, int64 `[nnz]`.
        offsets: Start and end of each row's entries, int64 `[rows + 1]`.
        values: Values of the entries, `[nnz]`.
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
    """Returns the tensors of a batch, over the memory of its arrays.

    Args:
        batch: A batch of any reader: a dict from name to array or batch form (`fastpipe.batch`).
        ragged: Form of ragged features. `"offsets"`: `Jagged(values, offsets)`, at any depth. `"nested"`: nested
            tensors with the jagged layout, for one ragged dimension of numbers. Defaults to `"offsets"`.
        sparse: Form of sparse features. `"coo"`: sparse COO tensors. They are marked as uncoalesced, because indices
            keep their order in the file. `"csr"`: sparse CSR tensors, for one dimension besides the rows. `"bag"`:
            `Bag(indices, offsets, values)`, for embeddings. `"csr"` and `"bag"` need no computation if the `SparseSpec`
            has `layout="csr"`; with the default layout, offsets are computed. Defaults to `"coo"`.
        strings: Form of strings. `"tensors"`: `Strings(values, offsets)`. `"lists"`: nested Python lists of str or
            bytes. Defaults to `"tensors"`.

    Returns:
        A dict of tensors, named tuples of tensors, and lists of strings, in the order of the batch. Masked features are
        `Masked(values, valid)`.

    Raises:
        UnsupportedError: If a feature doesn't support the requested form.
        ValueError: If a form is unknown.
    """
    return Forms(ragged, sparse, strings).convert(batch, torch.from_numpy)


def keyed_jagged(batch: Mapping[str, Any], keys: list[str]) -> dict[str, Any]:
    """Returns sparse or ragged features as the arguments of `torchrec.KeyedJaggedTensor(**keyed_jagged(batch, keys))`.

    Args:
        batch: A batch of a reader.
        keys: Names of the features. They must be either all sparse with one dimension or all ragged integers. Sparse
            indices are used as values, and sparse values as weights.

    Returns:
        `keys`; `values`, int64, the ids of each key's rows, key after key (copied into one tensor); `lengths`, int64
        `[len(keys) * rows]`; and `weights`, or None for ragged features.

    Raises:
        UnsupportedError: If a feature has another form.
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
                f"feature {name!r} is a {type(node).__name__}: keyed jagged tensors support sparse features of one"
                " dimension, or ragged integers"
            )
    if weights and len(weights) < len(keys):
        raise UnsupportedError("a keyed jagged tensor can't combine sparse and ragged features: make one for each kind")
    return {
        "keys": list(keys),
        "values": torch.cat(values).to(torch.int64),
        "lengths": torch.cat(lengths),
        "weights": torch.cat(weights) if weights else None,
    }


def _is_ragged_ids(node: Any) -> bool:
    values = node.values if isinstance(node, forms.Ragged) else None
    return isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu"


@dataclass(frozen=True, slots=True)
class Forms:
    """The requested forms: the arguments of `tensors`."""

    ragged: RaggedAs = "offsets"
    sparse: SparseAs = "coo"
    strings: StringsAs = "tensors"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                *others, last = map('"{}"'.format, choices)
                raise ValueError(f"{name} must be {', '.join(others)} or {last}; got {value!r}")

    def convert(self, batch: Mapping[str, Any], tensor: Callable[[np.ndarray], torch.Tensor]) -> dict[str, Any]:
        """Returns the batch in these forms. `tensor` converts the arrays of the batch, and arrays derived from them."""
        node = _Conversion(self, tensor).node
        # Most values are arrays. This runs once per batch, after decoding has evicted it from the caches, so it must be
        # short.
        return {
            name: tensor(counted(value)) if type(value) is np.ndarray else node(name, value)
            for name, value in batch.items()
        }


class _Conversion:
    """Converts the forms of a batch recursively."""

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
                ' dimension of numbers without nulls; ragged="offsets" supports all'
            )
        nested: Any = torch.nested.nested_tensor_from_jagged(self.tensor(node.values), self.tensor(node.offsets))
        # Until Torch knows the longest length, it uses the sum of all lengths instead and pads to that. The argument
        # `max_seqlen` would import torch._dynamo and with it Triton, whose LLVM aborts processes that have loaded
        # TensorFlow's. So the length is stored where Torch itself stores it: as the size of an empty tensor.
        nested._max_seqlen_tensor = torch.empty(int(np.diff(node.offsets).max(initial=0)), 0)
        found: torch.Tensor = nested
        return found

    def _numbers(self, name: str, values: Any) -> torch.Tensor:
        if not isinstance(values, np.ndarray):
            raise UnsupportedError(
                f'feature {name!r} has sparse strings, which no sparse tensor supports: use sparse="bag"'
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
        # The indices were checked against the shape when they were read.
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
    """Returns the offsets of the rows, and the indices of the only dimension."""
    if len(node.dense_shape) != 2:
        raise UnsupportedError(
            f"feature {name!r} has {len(node.dense_shape) - 1} sparse dimensions, but only one is supported here:"
            ' use sparse="coo"'
        )
    if isinstance(node, forms.SparseCSR):
        return node.offsets, node.indices
    offsets = np.searchsorted(node.indices[:, 0], np.arange(len(node) + 1))
    return offsets, node.indices[:, 1]
