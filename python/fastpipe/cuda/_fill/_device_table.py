"""A device that was filled, and index sets of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import Drawing
from fastpipe._reader.ordering import within
from fastpipe._reader.sampling import uniform
from fastpipe.batch import Masked
from fastpipe.cuda._fill._devices import Device
from fastpipe.errors import NullValueError, SchemaError
from fastpipe.specs import DenseSpec, Features, Spec


class Columns:
    """Which columns features become: a number one, an array of `k` numbers `k`, named `x[0]` to `x[k-1]`.

    Args:
        features: of the reader.
        wanted: their names, in this order; None for all.
        dtype: of the array.

    Raises:
        SchemaError: if a feature isn't there, is none of numbers, or has numbers that aren't among those of the dtype.
    """

    def __init__(self, features: Features, wanted: Sequence[str] | None, dtype: np.dtype[Any]) -> None:
        self._wanted = list(features) if wanted is None else list(wanted)
        self._dtype = dtype
        self.names: list[str] = []
        for name in self._wanted:
            if name not in features:
                there = ", ".join(map(repr, features))
                raise SchemaError(f"there is no feature {name!r}; there are {there}", feature=name)
            self._check(name, features[name])
            sizes = [size or 0 for size in features[name].shape]
            places = np.ndindex(*sizes) if sizes else [()]
            self.names += [name + (f"[{', '.join(map(str, place))}]" if place else "") for place in places]
        if not self.names:
            raise SchemaError("no column is left: name at least one feature that has numbers")

    def of(self, batch: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """The columns of a batch, `[rows]` each; NaN where there is no value."""
        return [column for name in self._wanted for column in self._columns(name, batch[name])]

    def _columns(self, name: str, values: Any) -> list[npt.NDArray[Any]]:
        if isinstance(values, Masked):
            valid = np.asarray(values.valid)
            values = np.asarray(values.values)
            if not valid.all():
                if self._dtype.kind != "f":
                    raise NullValueError(
                        f"{name!r} is null in a row, which {self._dtype} has no value for: take a dtype of floats, or "
                        "give its spec a fill",
                        feature=name,
                    )
                valid = valid.reshape(valid.shape + (1,) * (values.ndim - valid.ndim))
                values = np.where(valid, values.astype(self._dtype), np.nan)
        table = np.asarray(values).reshape(len(values), -1)
        return [table[:, column] for column in range(table.shape[1])]

    def _check(self, name: str, spec: Spec) -> None:
        if not isinstance(spec, DenseSpec) or np.dtype(_numpy(spec)).kind not in "biuf":
            raise SchemaError(
                f"devices are filled with numbers, and {name!r} is {spec!r}: name others with columns=, or read it as "
                "numbers",
                feature=name,
            )
        # What is rounded is no surprise, what wraps around is.
        if self._dtype.kind != "f" and not np.can_cast(_numpy(spec), self._dtype, "safe"):
            raise SchemaError(
                f"{name!r} is {spec.dtype}, and not all of that are {self._dtype}: take another dtype, or give it "
                "one by its spec",
                feature=name,
            )


def _numpy(spec: DenseSpec) -> Any:
    return object if spec.dtype in ("string", "bytes") else spec.dtype


class Filled:
    """The rows of one device.

    Index sets (`folds`, `split`, `bootstrap`) are arrays of int64 on the device: no row moves. They are a pure function
    of the number of rows and the seed, whatever device it is.

    Attributes:
        device: its name.
        values: `[rows, columns]`, on the device: `torch.Tensor`, `cupy.ndarray` or, for `"cpu"`, `numpy.ndarray`. Each
            has `__dlpack__`.
        columns: the names of the columns.
    """

    def __init__(
        self, device: Device, values: Any, columns: list[str], numbers: Callable[[], npt.NDArray[np.int64]]
    ) -> None:
        self.device = device.name
        self.values = values
        self.columns = columns
        self._device = device
        self._numbers = numbers

    def __len__(self) -> int:
        """The number of rows."""
        return int(self.values.shape[0])

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """int64 `[rows]`, ascending, in host memory: the numbers of the rows, counted over all units or files.

        They are computed each time: 8 bytes a row.
        """
        return self._numbers()

    def folds(self, k: SupportsIndex, seed: SupportsIndex = 0) -> Iterator[tuple[Any, Any]]:
        """Divides rows for cross-validation.

        Args:
            k: how many folds, at least 2.
            seed: 0 to 2^64 - 1.

        Yields:
            For each fold the rows to train with, and the rows of the fold to test with: index arrays, ascending. Each
            row is in one fold; sizes differ by one at most.

        Raises:
            ValueError: if there are fewer rows than folds, or an argument is out of range.
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

    def split(self, fraction: float, seed: SupportsIndex = 0) -> tuple[Any, Any]:
        """Divides rows at random.

        Args:
            fraction: of the rows in the first part, between 0 and 1; rounded to whole rows, so that neither part is
                empty.
            seed: 0 to 2^64 - 1.

        Returns:
            Index arrays of both parts, ascending.

        Raises:
            ValueError: if there are fewer than two rows, or an argument is out of range.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction is between 0 and 1, not {fraction}")
        if len(self) < 2:
            raise ValueError("one row can't be divided")
        size = min(max(round(len(self) * fraction), 1), len(self) - 1)
        rest, part = self._divided(0, size, within("seed", seed, 0, 2**64 - 1))
        return part, rest

    def bootstrap(self, rows: SupportsIndex | None = None, seed: SupportsIndex = 0) -> Any:
        """Draws rows with replacement.

        Args:
            rows: how many; None for as many as there are.
            seed: 0 to 2^64 - 1.

        Returns:
            An index array, ascending.

        Raises:
            ValueError: if an argument is out of range.
        """
        count = len(self) if rows is None else within("rows", rows, 1, 2**40)
        drawn = uniform(within("seed", seed, 0, 2**64 - 1), _BOOTSTRAP, count)
        numbers = (drawn * len(self)).astype(np.int64)
        # So that rows are read from memory as they stand.
        numbers.sort()
        return self._device.indices(np.minimum(numbers, len(self) - 1))

    def _divided(self, start: int, end: int, seed: int) -> tuple[Any, Any]:
        """All rows but those that stand in some places of a random order, and those."""
        drawing = Drawing(len(self), end - start, skipped=start, seed=seed, epoch=_DIVIDED)
        inside = drawing.within(0, len(self))[0]
        outside = np.ones(len(self), bool)
        outside[inside] = False
        return self._device.indices(np.flatnonzero(outside).astype(np.int64)), self._device.indices(inside)

    def __repr__(self) -> str:
        return f"<fastpipe.cuda.Filled {self.device}: {len(self)} rows of {len(self.columns)} columns>"


# Streams and epochs of draws of one seed are small numbers; these are none of them.
_BOOTSTRAP = 1 << 42
_DIVIDED = 1 << 42
