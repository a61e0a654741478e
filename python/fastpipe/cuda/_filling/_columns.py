"""Features as columns of an array of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.batch import Masked
from fastpipe.errors import NullValueError, SchemaError
from fastpipe.specs import DenseSpec, Features, Spec

__all__ = ["Columns"]


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
