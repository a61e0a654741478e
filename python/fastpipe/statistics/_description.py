"""Statistics of all features of a dataset, and the pass that computes them from a reader's batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe._arguments import flag, shown, within
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._private_constructor import private_constructor
from fastpipe._reader.ordering import Ordering
from fastpipe._reader.reader import Reader
from fastpipe._reader.reader_passes import ReaderPasses
from fastpipe._reader.sampling import in_file_order, sample
from fastpipe._text import clean, plural, table
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.errors import SchemaError, StateError, UnsupportedError
from fastpipe.specs import Spec
from fastpipe.statistics._accumulator import Accumulator, Kind
from fastpipe.statistics._counts import require_datasketches
from fastpipe.statistics._feature import FeatureStatistics

if TYPE_CHECKING:
    import pyarrow as pa

_VERSION = 1


class Description(Mapping[str, FeatureStatistics]):
    """Statistics of features, by feature name. `print(description)` shows them as a table.

    You can merge descriptions of disjoint parts of a dataset, for example of ranks, partitions or workers.

    Attributes:
        num_rows: Number of rows that were read.
    """

    @private_constructor("reader.describe() or Description.from_json(text)")
    def _of(self, features: Mapping[str, Accumulator], num_rows: int) -> None:
        self._features, self.num_rows = dict(features), num_rows

    def __getitem__(self, name: str) -> FeatureStatistics:
        try:
            return FeatureStatistics._of(self._features[name])
        except KeyError:
            raise KeyError(f"{name!r}: the features are {', '.join(map(repr, self._features))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def merge(self, other: Description) -> None:
        """Adds the statistics of another description with the same features. The other description doesn't change.

        Raises:
            SchemaError: If the features differ.
            TypeError: If `other` isn't a `Description`.
        """
        if not isinstance(other, Description):
            raise TypeError(f"other must be a Description; got {shown(other)}")
        if not other.num_rows:
            return
        if not self.num_rows:
            # An empty description copies the other one, so that the two share nothing.
            copied = Description.from_json(other.to_json())
            self._features, self.num_rows = copied._features, copied.num_rows
            return
        if set(self) != set(other):
            raise SchemaError(f"the descriptions have different features: {sorted(self)} and {sorted(other)}")
        for name, feature in self._features.items():
            added = other._features[name]
            if feature.form != added.form:
                reason = f"{name!r} is {feature.dtype} in one description, and {added.dtype} in the other"
                raise SchemaError(reason, feature=name, reason=reason)
        for name, feature in self._features.items():
            feature.merge(other._features[name])
        self.num_rows += other.num_rows

    @classmethod
    def merged(cls, descriptions: Iterable[Description]) -> Description:
        """Returns the merge of several descriptions, which don't change.

        Raises:
            SchemaError: If the features differ.
            ValueError: If `descriptions` is empty.
        """
        found: Description | None = None
        for each in descriptions:
            if found is None:
                found = cls.from_json(each.to_json())
            else:
                found.merge(each)
        if found is None:
            raise ValueError("merging requires at least one description")
        return found

    def to_json(self) -> str:
        """Returns the description as text, for files and other processes."""
        features = {name: feature.stored() for name, feature in self._features.items()}
        return json.dumps({"version": _VERSION, "num_rows": self.num_rows, "features": features})

    @classmethod
    def from_json(cls, text: str) -> Description:
        """Restores a description from the text that `to_json` returned.

        Raises:
            StateError: If the text is damaged or has another version.
        """
        try:
            stored = json.loads(text)
            version = stored["version"]
        except (ValueError, TypeError, KeyError) as error:
            raise StateError(f"the description is damaged: {error!r}") from None
        if version != _VERSION:
            raise StateError(
                f"the description has version {shown(version)}, but this version of fastpipe reads {_VERSION}"
            )
        try:
            features = {name: Accumulator.restored(each) for name, each in stored["features"].items()}
            return cls._of(features, int(stored["num_rows"]))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            raise StateError(f"the description is damaged: {error!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Description.from_json, (self.to_json(),)

    def __str__(self) -> str:
        width = max(shutil.get_terminal_size((120, 24)).columns, 60)
        header = ["feature", "dtype", "nulls", "n_unique", "mean", "std", "min", "median", "max", "most frequent"]
        rows = [[clean(name), *_cells(feature)] for name, feature in self.items()]
        return f"{plural(self.num_rows, 'row')}\n{table(header, rows, width, right=range(2, 9))}"


def _cells(feature: FeatureStatistics) -> list[str]:
    nulls = f"{feature.null_fraction:.1%}" if feature.null_count else "0"
    unique = "" if feature.kind == "float" else f"{feature.n_unique:,}"
    if feature.kind in ("string", "bytes"):
        numbers = [""] * 5
    else:
        median = feature.quantile(0.5)
        found = (feature.mean, feature.std, feature.min, median, feature.max)
        numbers = [
            f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value) for value in found
        ]
    most = "" if feature.kind == "float" else ", ".join(clean(str(value)) for value in feature.value_counts(3))
    dtype = feature.dtype if feature.lengths is None else f"{feature.dtype} x {feature.lengths.mean:.3g}"
    return [dtype, nulls, unique, *numbers, most]


_KINDS: dict[str, Kind] = {"i": "integer", "u": "integer", "f": "float", "b": "bool", "M": "time", "m": "time"}


def added(
    found: Accumulator | None,
    form: Any,
    *,
    exact_values: int,
    categories: Sequence[str] | None = None,
    nan_is_null: bool = False,
) -> Accumulator:
    """Adds the values of a form to statistics, and creates the statistics for the first batch.

    Args:
        found: Statistics of earlier batches, or None.
        form: Column of this batch.
        exact_values: Maximum number of distinct values that are counted exactly.
        categories: Categories of a feature of codes, or None.
        nan_is_null: Whether NaN represents null.

    Raises:
        UnsupportedError: If statistics don't support this form.
    """
    lengths: np.ndarray | None = None
    nulls = 0
    while not isinstance(form, (np.ndarray, Strings)):
        if isinstance(form, Masked):
            form, missing = _valid(form)
            nulls += missing
        elif isinstance(form, Ragged):
            inner = np.asarray(form.lengths)
            lengths = inner if lengths is None else lengths
            form = _inner(form.values, int(form.offsets[0]), int(form.offsets[-1]))
        elif isinstance(form, SparseCSR):
            lengths = np.diff(form.offsets)
            form = _inner(form.values, int(form.offsets[0]), int(form.offsets[-1]))
        elif isinstance(form, Sparse):
            rows = np.asarray(form.indices)[:, 0]
            lengths = np.bincount(rows, minlength=len(form))
            form = form.values
        else:
            raise _without(type(form).__name__)
    if isinstance(form, Strings):
        if found is None:
            kind: Kind = "bytes" if form.binary else "string"
            found = Accumulator(kind, kind, exact_values)
        found.add_texts(_bytes(form))
    else:
        found = _numbers(found, form, exact_values, categories, nan_is_null=nan_is_null)
    found.null_count += nulls
    if lengths is not None:
        if found.lengths is None:
            found.lengths = Accumulator("integer", "int64", exact_values)
        found.lengths.add_numbers(lengths.astype(np.int64))
    return found


def _numbers(
    found: Accumulator | None,
    array: np.ndarray,
    exact_values: int,
    categories: Sequence[str] | None,
    *,
    nan_is_null: bool,
) -> Accumulator:
    flat = array.reshape(-1)
    kind = _KINDS.get(flat.dtype.kind)
    if kind is None and flat.dtype.name == "bfloat16":
        flat, kind = flat.astype(np.float32), "float"
    if kind is None:
        raise _without(str(array.dtype))
    if found is None:
        found = Accumulator(kind, str(array.dtype), exact_values, categories)
    if kind == "time":
        missing = np.isnat(flat)
        found.null_count += int(missing.sum())
        flat = flat[~missing].view(np.int64)
    elif kind == "float" and nan_is_null:
        missing = np.isnan(flat)
        found.null_count += int(missing.sum())
        flat = flat[~missing]
    elif kind == "bool":
        flat = flat.view(np.uint8)
    found.add_numbers(flat)
    return found


def _without(what: str) -> UnsupportedError:
    reason = f"cannot compute statistics of {what}"
    return UnsupportedError(reason, reason=reason)


def _inner(form: Any, start: int, stop: int) -> Any:
    """Returns the rows of a form between two offsets of a list."""
    return form if start == 0 and stop == len(form) else form[start:stop]


def _valid(form: Masked) -> tuple[Any, int]:
    """Returns a form with only the values that aren't null, and the number of nulls."""
    valid, values = np.asarray(form.valid), form.values
    if isinstance(values, Strings):
        inner = int(np.prod(values.shape[valid.ndim :], dtype=np.int64))
        flat = Strings(values.values, values.offsets, (len(values.offsets) - 1,), values.binary)
        keep = np.repeat(valid.reshape(-1), inner)
        return flat[np.flatnonzero(keep)], int(len(keep) - keep.sum())
    if isinstance(values, np.ndarray):
        inner = int(np.prod(values.shape[valid.ndim :], dtype=np.int64))
        return values[valid], int((~valid).sum()) * inner
    if valid.ndim > 1:
        raise _without(f"rows of {type(values).__name__} with nulls at several levels")
    return values[np.flatnonzero(valid)], int((~valid).sum())


def _bytes(form: Strings) -> pa.Array:
    """Returns the texts as an Arrow array of bytes, over the same memory."""
    import pyarrow as pa

    offsets = np.ascontiguousarray(form.offsets, np.int64)
    values = np.ascontiguousarray(form.values, np.uint8)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


_LEAST_BATCH = 4096


def describe(
    reader: Reader,
    *,
    rows: int | None,
    seed: int,
    exact_values: int,
    progress: bool,
) -> Description:
    """Returns statistics of each feature of a reader. See `Reader.describe`."""
    require_datasketches()
    require_pyarrow()
    limit = within("exact_values", exact_values, 1, 2**31)
    chosen = reader if rows is None else sample(in_file_order(reader), rows, seed=seed, redraw=True)
    batches = _rows_once(chosen, progress=flag("progress", progress))
    return described(batches, reader.features, reader.categories, exact_values=limit)


def described(
    batches: Iterable[Mapping[str, Any]],
    specs: Mapping[str, Spec],
    categories: Mapping[str, Sequence[str]],
    *,
    exact_values: int,
) -> Description:
    """Returns statistics of the features in batches.

    Args:
        batches: The batches, with at least one column.
        specs: The specs of the features.
        categories: The categories of features of codes.
        exact_values: Maximum number of distinct values that are counted exactly.
    """
    features: dict[str, Accumulator | None] = dict.fromkeys(specs)
    seen = 0
    for batch in batches:
        seen += _rows(batch)
        for name, form in batch.items():
            if name in features:
                features[name] = added(
                    features[name],
                    form,
                    exact_values=exact_values,
                    categories=categories.get(name),
                    nan_is_null=specs[name]._nan_is_null,
                )
    return Description._of({name: found for name, found in features.items() if found is not None}, seen)


def _rows_once(reader: Reader, *, progress: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of one epoch, of the reader's rank if it has several, without padding rows.

    Batches have at least 4,096 rows, except the last one. The reader's own pass and epoch don't change.
    """
    data, ordering, _, running, _ = ReaderPasses(reader).parts
    rows = max(ordering.batch_size, _LEAST_BATCH)
    if ordering.world_size == 1 and not ordering.has_own_rows and not ordering.without_steps:
        chosen = Ordering.checked(batch_size=rows)
    else:
        chosen = replace(ordering, drop_last=False, on_uneven="allow")
    once = Reader._of(data, ordering=chosen, running=running.unfilled, progress=progress, epochs=1)
    once.set_epoch(reader.epoch)
    with once:
        yield from once


def _rows(batch: Mapping[str, Any]) -> int:
    return len(next(iter(batch.values())))
