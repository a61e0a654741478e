"""A filled device, and index sets of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._arguments import within
from fastpipe._fastpipe import Drawing
from fastpipe._private_constructor import private_constructor
from fastpipe._reader.sampling import uniform
from fastpipe.csv._drawing import column_of
from fastpipe.cuda._fill._devices import Device
from fastpipe.errors import SchemaError
from fastpipe.specs import DenseSpec, Features, Spec


class Columns:
    """The columns of features. A number has one column, and an array of `k` numbers has `k`, named `x[0]` to `x[k-1]`.

    Args:
        features: Features of the reader.
        wanted: Names of the features to use, in this order, or None for all.
        dtype: Dtype of the array.

    Raises:
        SchemaError: If a feature doesn't exist, isn't numeric, or contains numbers that the dtype can't represent.
    """

    def __init__(self, features: Features, wanted: Sequence[str] | None, dtype: np.dtype[Any]) -> None:
        self._wanted = list(features) if wanted is None else list(wanted)
        self._dtype = dtype
        self.names: list[str] = []
        for name in self._wanted:
            if name not in features:
                there = ", ".join(map(repr, features))
                raise SchemaError(f"unknown feature {name!r}; the features are {there}", feature=name)
            self._check(name, features[name])
            sizes = [size or 0 for size in features[name].shape]
            places = np.ndindex(*sizes) if sizes else [()]
            self.names += [name + (f"[{', '.join(map(str, place))}]" if place else "") for place in places]

    def of(self, batch: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Returns the columns of a batch, `[rows]` each, with NaN for missing values."""
        return [column for name in self._wanted for column in self._columns(name, batch[name])]

    def _columns(self, name: str, values: Any) -> list[npt.NDArray[Any]]:
        found = column_of(name, values, self._dtype)
        table = found.reshape(len(found), -1)
        return [table[:, column] for column in range(table.shape[1])]

    def _check(self, name: str, spec: Spec) -> None:
        if self._dtype.kind == "O":
            if not isinstance(spec, DenseSpec) or spec.dtype != "string":
                reason = f'dtype="string" holds only text, but {name!r} is {spec!r}: select others with columns='
                raise SchemaError(reason, feature=name)
            return
        if not isinstance(spec, DenseSpec) or np.dtype(_numpy(spec)).kind not in "biuf":
            text = spec.dtype == "string"
            how = "read it as indices with a VocabularySpec or HashSpec" if text else "read it as numbers"
            raise SchemaError(
                f"only numbers can be filled in, but {name!r} is {spec!r}: select others with columns=, or {how}",
                feature=name,
            )
        # Rounding is expected, integer overflow isn't.
        if self._dtype.kind != "f" and not np.can_cast(_numpy(spec), self._dtype, "safe"):
            raise SchemaError(
                f"{name!r} is {spec.dtype}, which {self._dtype} cannot represent: use another dtype, or set it "
                "in its spec",
                feature=name,
            )


def _numpy(spec: DenseSpec) -> Any:
    return object if spec.dtype in ("string", "bytes") else spec.dtype


class Filled:
    """The rows of one device.

    Index sets (`folds`, `split`, `bootstrap`) are int64 arrays on the device, and rows aren't moved. They are a pure
    function of the number of rows and the seed, and don't depend on the device.

    Attributes:
        device: Name of the device.
        values: Array `[rows, columns]` on the device: a `torch.Tensor`, a `cupy.ndarray` or, for `"cpu"`, a
            `numpy.ndarray`. Arrays of numbers support `__dlpack__`.
        columns: Names of the columns.
    """

    @private_constructor("fastpipe.cuda.fill(...)[0]")
    def _of(
        self, device: Device, values: Any, columns: list[str], numbers: Callable[[], npt.NDArray[np.int64]]
    ) -> None:
        self.device = device.name
        self.values = values
        self.columns = columns
        self._device = device
        self._numbers = numbers

    def __len__(self) -> int:
        """Returns the number of rows."""
        return int(self.values.shape[0])

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Indices of the rows, counted over all units or files: int64 `[rows]`, ascending, in host memory.

        Each access computes them again. They use 8 bytes per row.
        """
        return self._numbers()

    def folds(self, k: int, seed: int = 0) -> Iterator[tuple[Any, Any]]:
        """Divides the rows into folds for cross-validation.

        Args:
            k: Number of folds, at least 2.
            seed: Seed of the division, 0 to 2^64 - 1. Defaults to 0.

        Yields:
            For each fold, two ascending index arrays: the rows to train with, and the rows of the fold to test with.
            Each row is in exactly one fold. Sizes differ by at most one.

        Raises:
            ValueError: If there are fewer rows than folds, or an argument is out of range.
        """
        count = within("k", k, 2, max(len(self), 2))
        if count > len(self):
            raise ValueError(f"{len(self)} rows can't be divided into {count} folds")
        key = within("seed", seed, 0, 2**64 - 1)
        return self._folds(count, key)

    def _folds(self, count: int, seed: int) -> Iterator[tuple[Any, Any]]:
        bounds = [len(self) * number // count for number in range(count + 1)]
        for start, end in pairwise(bounds):
            yield self._divided(start, end, seed)

    def split(self, fraction: float, seed: int = 0) -> tuple[Any, Any]:
        """Divides the rows into two parts at random.

        Args:
            fraction: Fraction of the rows in the first part, between 0 and 1. It is rounded to whole rows so that
                neither part is empty.
            seed: Seed of the division, 0 to 2^64 - 1. Defaults to 0.

        Returns:
            Ascending index arrays of both parts.

        Raises:
            ValueError: If there are fewer than two rows, or an argument is out of range.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must be between 0 and 1; got {fraction}")
        if len(self) < 2:
            raise ValueError("a table of one row can't be split: fill more rows")
        size = min(max(round(len(self) * fraction), 1), len(self) - 1)
        rest, part = self._divided(0, size, within("seed", seed, 0, 2**64 - 1))
        return part, rest

    def bootstrap(self, rows: int | None = None, seed: int = 0) -> Any:
        """Draws rows with replacement.

        Args:
            rows: Number of rows to draw. Defaults to the number of rows on the device.
            seed: Seed of the draw, 0 to 2^64 - 1. Defaults to 0.

        Returns:
            An ascending index array.

        Raises:
            ValueError: If an argument is out of range.
        """
        count = len(self) if rows is None else within("rows", rows, 1, 2**40)
        drawn = uniform(within("seed", seed, 0, 2**64 - 1), _BOOTSTRAP, count)
        numbers = (drawn * len(self)).astype(np.int64)
        # Sorted, so that rows are read from memory in order.
        numbers.sort()
        return self._device.indices(np.minimum(numbers, len(self) - 1))

    def _divided(self, start: int, end: int, seed: int) -> tuple[Any, Any]:
        """Returns the rows outside and inside the positions `start` to `end` of a random order."""
        drawing = Drawing(len(self), end - start, skipped=start, seed=seed, epoch=_DIVIDED)
        inside = drawing.within(0, len(self))[0]
        outside = np.ones(len(self), bool)
        outside[inside] = False
        return self._device.indices(np.flatnonzero(outside).astype(np.int64)), self._device.indices(inside)

    def __repr__(self) -> str:
        return f"<fastpipe.cuda.Filled {self.device}: {len(self)} rows of {len(self.columns)} columns>"


# Small numbers are streams and epochs of other draws with the same seed, so these are large.
_BOOTSTRAP = 1 << 42
_DIVIDED = 1 << 42
