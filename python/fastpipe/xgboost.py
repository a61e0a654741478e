"""XGBoost matrices from readers.

    import xgboost
    import fastpipe.xgboost

    reader = fastpipe.read_csv("big.csv", batch_size=65_536)
    matrix = xgboost.QuantileDMatrix(fastpipe.xgboost.data_iter(reader, label="y"), max_bin=256)
    booster = xgboost.train({"tree_method": "hist", "max_bin": 256}, matrix, 100)

XGBoost reads all batches several times: to find the quantiles, to fill its matrix, and, if the matrix is in external
memory, during training. Each time it gets the batches of the same epoch in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xgboost
import xgboost.collective

from fastpipe._arguments import column_names, within
from fastpipe._interop.distributed import World
from fastpipe._reader.passes import passes_of, shard_of_this_rank
from fastpipe._reader.reader import Reader
from fastpipe.batch import Masked
from fastpipe.errors import SchemaError
from fastpipe.specs import DenseSpec, Spec

__all__ = ["DataIter", "data_iter"]

# Name of the mask that a reader adds when it pads batches.
_VALID = "valid"


def data_iter(
    reader: Reader,
    *,
    label: str | None = None,
    weight: str | None = None,
    columns: str | Sequence[str] | None = None,
    epoch: int = 0,
    cache_prefix: str | None = None,
    distributed: bool = True,
    **options: Any,
) -> DataIter:
    """Returns an iterator that feeds `xgboost.QuantileDMatrix`, `ExtMemQuantileDMatrix` and `DMatrix` from a reader.

    Features are converted to float32 columns. A number or truth value is one column. An array of `k` numbers is `k`
    columns, named `x(0)` to `x(k-1)`, because XGBoost doesn't allow brackets in names. NaN and masked values are
    missing values to XGBoost. Rows that pad a batch (`on_uneven="pad"`) are skipped.

    A reader without a rank is divided among the ranks of the program: the workers of `xgboost.collective` or, if there
    are none, the ranks of the environment variables RANK and WORLD_SIZE. The division is logged (logger `fastpipe`,
    level INFO). A reader that has a rank is not divided again.

    Args:
        reader: Reader of dense features with one epoch per pass (the default).
        label: Feature to predict, which may be an array. Defaults to no label.
        weight: Feature with the weights of rows. Defaults to no weights.
        columns: Features of the matrix, in this order: a list, or one name as a string. Defaults to None for all
            features except the label and the weight.
        epoch: Index of the epoch to feed, from 0. Defaults to 0.
        cache_prefix: Path prefix for matrices in external memory, as in `xgboost.DataIter`. A `QuantileDMatrix` doesn't
            use it. A `DMatrix` also stores its data there, or by default in the working directory.
        distributed: Whether to divide the reader among ranks. Set it to False if each rank must read everything.
            Defaults to True.
        **options: Further arguments of `xgboost.DataIter`: `release_data`, `on_host`, `min_cache_page_bytes`.

    Raises:
        SchemaError: If a feature doesn't exist or isn't numeric.
        TypeError: If an argument has the wrong type.
        ValueError: If a pass of the reader has several epochs, or no feature is left.

    Example:
        >>> import xgboost
        >>> import fastpipe
        >>> import fastpipe.xgboost
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["user.age", "label"], batch_size=1024)
        >>> matrix = xgboost.QuantileDMatrix(fastpipe.xgboost.data_iter(reader, label="label"))
        >>> matrix.num_row(), matrix.num_col()
        (6144, 1)
    """
    return DataIter(
        reader,
        label=label,
        weight=weight,
        columns=columns,
        epoch=epoch,
        cache_prefix=cache_prefix,
        distributed=distributed,
        **options,
    )


class DataIter(xgboost.DataIter):
    """Feeds the batches of a reader to XGBoost. Created by `data_iter`."""

    def __init__(
        self,
        reader: Reader,
        *,
        label: str | None,
        weight: str | None,
        columns: str | Sequence[str] | None,
        epoch: int,
        cache_prefix: str | None,
        distributed: bool,
        **options: Any,
    ) -> None:
        # Call this first: the base class's destructor needs it, even if a later check fails.
        super().__init__(cache_prefix, **options)
        workers = World(xgboost.collective.get_rank(), xgboost.collective.get_world_size(), "xgboost.collective")
        framework = workers if workers.size > 1 else None
        self._passes = shard_of_this_rank(passes_of(reader), distributed=distributed, framework=framework)
        if self._passes.epochs != 1:
            raise ValueError(
                f"a pass of the reader has epochs={self._passes.epochs}, but XGBoost needs exactly one: remove epochs"
            )
        self._epoch = within("epoch", epoch, 0, 2**62)
        features = self._passes.features
        self._label, self._weight = label, weight
        apart = [name for name in (label, weight) if name is not None]
        wanted = column_names(columns)
        if wanted is None:
            wanted = [name for name in features if name not in apart]
        for name in [*apart, *wanted]:
            if name not in features:
                there = ", ".join(map(repr, features))
                raise SchemaError(f"unknown feature {name!r}; the features are {there}", feature=name)
            _check(name, features[name])
        if not wanted:
            raise ValueError("no columns are left for the matrix")
        self._wanted = wanted
        self.columns = [column for name in wanted for column in _columns(name, features[name])]
        self._batches: Iterator[dict[str, Any]] | None = None

    def reset(self) -> None:
        """Makes the next call of `next` start with the first batch again."""
        self._batches = None

    def next(self, input_data: Callable[..., Any]) -> bool:
        """Passes the next batch to XGBoost. Returns False after the last one."""
        if self._batches is None:
            self._passes.set_epoch(self._epoch)
            self._batches = self._passes.start().batches
        batch = next(self._batches, None)
        if batch is None:
            # A finished pass leaves the reader at the next epoch.
            self._passes.set_epoch(self._epoch)
            return False
        keep = batch.get(_VALID) if self._passes.marks_valid else None
        more = {
            word: _kept(_plain(name, batch[name]), keep)
            for word, name in (("label", self._label), ("weight", self._weight))
            if name is not None
        }
        table = np.column_stack([_with_nan(batch[name]) for name in self._wanted])
        input_data(data=_kept(table, keep), feature_names=self.columns, **more)
        return True


def _check(name: str, spec: Spec) -> None:
    if not isinstance(spec, DenseSpec) or spec.dtype in ("string", "bytes") or spec.dtype[:4] in ("date", "time"):
        raise SchemaError(
            f"XGBoost requires numbers, but {name!r} is {spec!r}: choose features with columns=, or read it as numbers",
            feature=name,
        )


def _columns(name: str, spec: Spec) -> list[str]:
    allowed = name.translate(str.maketrans("[]<", "()("))
    sizes = [size or 0 for size in spec.shape]
    if not sizes:
        return [allowed]
    return [f"{allowed}({', '.join(map(str, place))})" for place in np.ndindex(*sizes)]


def _with_nan(values: Any) -> npt.NDArray[np.float32]:
    """Converts values to a float32 matrix `[n, k]`, with NaN for nulls."""
    valid = None
    if isinstance(values, Masked):
        values, valid = values.values, np.asarray(values.valid)
    found = np.asarray(values).astype(np.float32)
    if valid is not None:
        valid = valid.reshape(valid.shape + (1,) * (found.ndim - valid.ndim))
        found = np.where(valid, found, np.float32(np.nan))
    return found.reshape(len(found), -1)


def _plain(name: str, values: Any) -> Any:
    if isinstance(values, Masked):
        if not np.asarray(values.valid).all():
            raise ValueError(f"{name!r} is null in a row: XGBoost requires labels and weights without nulls")
        values = values.values
    return np.asarray(values)


def _kept(values: Any, keep: Any) -> Any:
    return values if keep is None else values[np.asarray(keep)]
