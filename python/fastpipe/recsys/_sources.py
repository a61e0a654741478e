"""Reads users, items and times in chunks from Avro files, Arrow tables and CSV files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fastpipe._arrow.schema import require_pyarrow
from fastpipe._files._in_memory_files import opened
from fastpipe._files._paths import Paths, expand
from fastpipe._reader.options import Settings
from fastpipe._reader.reader import Reader
from fastpipe.avro import read_avro
from fastpipe.batch import Masked, Strings
from fastpipe.csv._reading import DEFAULT_DIALECT, CsvData, read_csv
from fastpipe.errors import (
    InteractionsError,
    MalformedFileError,
    MissingFileError,
    SchemaError,
    UnsupportedError,
    ValueRangeError,
    in_file,
)
from fastpipe.recsys._files import unreadable
from fastpipe.recsys._ids import Coded
from fastpipe.specs import DenseSpec, Features, Spec

_ROWS = 1 << 16
_MOVIELENS = ("user", "item", "rating", "timestamp")
_POWERS = 10 ** np.arange(20, dtype=np.uint64)


class Columns(NamedTuple):
    """Names of columns. `timestamp` is None if there are no times."""

    user: str
    item: str
    timestamp: str | None

    @property
    def wanted(self) -> list[str]:
        """The names that are set."""
        return [name for name in self if name is not None]


class Chunk(NamedTuple):
    """Some interactions: IDs in a form that `IdEncoder.add` accepts, and times, if they are known."""

    users: Any
    items: Any
    times: np.ndarray | None


def times_of(values: Any) -> np.ndarray:
    """Returns times as an array `[n]` of numbers or datetime64.

    Raises:
        InteractionsError: If the times have another type, or a time is missing.
    """
    if np.ma.isMaskedArray(values) and np.ma.getmaskarray(values).any():
        raise InteractionsError("some timestamps are masked: drop these interactions, or pass no timestamps")
    times = np.asarray(values)
    if times.ndim != 1:
        raise InteractionsError(f"timestamps must have one dimension; got shape {times.shape}")
    if times.dtype.kind not in "iufM":
        raise InteractionsError(f"timestamps must be numbers or datetime64; got {times.dtype}")
    missing = np.isnat(times) if times.dtype.kind == "M" else np.isnan(times)
    if missing.any():
        raise InteractionsError(
            f"the timestamp at index {int(missing.argmax())} is missing: drop this interaction, or pass no timestamps"
        )
    return times


def from_avro(source: Paths, names: Columns) -> Iterator[Chunk]:
    """Yields users, items and times from columns of Avro files."""
    files = expand(source)
    readers: Iterable[Reader]
    try:
        readers = [_reader(files, names)]
    except SchemaError:
        if len(files) == 1:
            raise
        # The files' schemas may differ in nullable values or enums, so each file gets its own reader. Invalid columns
        # raise the error again.
        readers = (_reader([file], names) for file in files)
    for reader in readers:
        for batch in reader:
            users, items, *times = (_plain(name, batch[name], reader.categories.get(name)) for name in names.wanted)
            yield Chunk(users, items, times_of(times[0]) if times else None)


def _reader(files: list[str], names: Columns) -> Reader:
    ids = "ids: integers, strings, bytes or an enum"
    features = Features({name: _scalar_spec(files, name, "id", ids) for name in (names.user, names.item)})
    if names.timestamp is not None:
        features[names.timestamp] = _scalar_spec(files, names.timestamp, "time", "times: numbers")
    # IDs of a logical type (a date, a time or a UUID) are read as the number or text that is stored.
    return read_avro(files, features=features, batch_size=_ROWS, logical_types=False)


def _scalar_spec(files: list[str], name: str, word: str, wanted: str) -> DenseSpec:
    """Returns the spec of a column with one value per record."""
    try:
        found = read_avro(files, columns=name, batch_size=1, logical_types=False).features
    except UnsupportedError as error:
        raise _no_column(error.path, name, wanted) from None
    if any(other.startswith(f"{name}:") for other in found):
        raise _no_column(files[0], name, wanted)
    inferred = found.get(name)
    if not isinstance(inferred, DenseSpec) or inferred.shape != ():
        raise SchemaError(f"column {name!r} must have one {word} per record", feature=name)
    return inferred


def _no_column(path: str | None, name: str, what: str) -> UnsupportedError:
    reason = f"column {name!r} must contain {what}: read it with read_avro, and pass arrays to from_arrays"
    where = "" if path is None else f" (file {path})"
    return UnsupportedError(f"{reason}{where}", path=path, feature=name, reason=reason)


def _plain(name: str, values: Any, categories: list[str] | None) -> Any:
    """Returns the values of a column without nulls, in memory that isn't shared with the batch."""
    if isinstance(values, Masked):
        if not values.valid.all():
            raise InteractionsError(f"a value of the column {name!r} is null: drop records with nulls", feature=name)
        values = values.values
    if categories is not None:
        return Coded(values.astype(np.int64), list(categories))
    # A view would keep the memory of the whole batch alive.
    return values.copy() if isinstance(values, np.ndarray) else values


def from_arrow(source: Any, names: Columns) -> Iterator[Chunk]:
    """Yields users, items and times from columns of an Arrow table or another stream of record batches."""
    pa = require_pyarrow()
    if not hasattr(source, "__arrow_c_stream__"):
        raise TypeError(f"source must be a pyarrow.Table or another stream of Arrow data; got {type(source).__name__}")
    batches = pa.RecordBatchReader.from_stream(source)
    for name in names.wanted:
        if batches.schema.get_field_index(name) < 0:
            there = ", ".join(map(repr, batches.schema.names))
            raise SchemaError(f"column {name!r} must exist exactly once; the columns are {there}", feature=name)
    for batch in batches:
        columns = [batch.column(batch.schema.get_field_index(name)) for name in names.wanted]
        for name, column in zip(names.wanted, columns, strict=True):
            if column.null_count:
                raise InteractionsError(f"a value of the column {name!r} is null: drop rows with nulls", feature=name)
        users, items, *times = columns
        yield Chunk(_arrow_ids(users), _arrow_ids(items), times_of(_arrow_numbers(times[0])) if times else None)


def _arrow_ids(column: Any) -> Any:
    types = require_pyarrow().types
    kind = column.type
    if types.is_dictionary(kind):
        return Coded(column.indices.to_numpy(zero_copy_only=False).astype(np.int64), column.dictionary.to_pylist())
    if types.is_integer(kind) or types.is_floating(kind):  # IdEncoder rejects floats with a helpful error.
        return column.to_numpy(zero_copy_only=False)
    if getattr(types, "is_string_view", types.is_string)(kind) or types.is_large_string(kind) or types.is_string(kind):
        return _arrow_ids(column.cast(require_pyarrow().large_string()).dictionary_encode())
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _arrow_ids(column.dictionary_encode())
    raise InteractionsError(f"ids must be integers or strings; got Arrow's {kind}")


def _arrow_numbers(column: Any) -> Any:
    pa = require_pyarrow()
    if pa.types.is_timestamp(column.type) or pa.types.is_date64(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    return column.to_numpy(zero_copy_only=False)


def from_csv(data: CsvData, names: Columns, overrides: Mapping[str, Spec]) -> Iterator[Chunk]:
    """Yields users, items and times from columns of CSV files.

    Args:
        data: The files, with the columns of `names` and inferred features.
        names: The names of the columns.
        overrides: The specs of columns whose inferred spec isn't used.
    """
    specs = {name: overrides.get(name) or _id_spec(data.features[name]) for name in (names.user, names.item)}
    inferred = [name for name, spec in specs.items() if name not in overrides and spec.dtype in ("int64", "uint64")]
    if names.timestamp is not None:
        specs[names.timestamp] = overrides.get(names.timestamp, data.features[names.timestamp])
    # Types are inferred from a part of large files. The text of other rows may have leading zeros.
    texts = {_text_of(name): DenseSpec((), "bytes", field=name) for name in inferred}
    for batch in Settings(read_csv, _ROWS, {}).reader(data.with_features(Features(specs | texts))):
        for name in inferred:
            _check_digits(name, batch[name], batch[_text_of(name)])
        users, items, *times = (_plain(name, batch[name], None) for name in names.wanted)
        yield Chunk(users, items, times_of(times[0]) if times else None)


def _id_spec(spec: Spec) -> Spec:
    """Returns the spec to read a column of IDs with: the inferred one for numbers, and text for all other types."""
    if spec.dtype in ("int64", "uint64", "float64"):  # IdEncoder rejects floats with a helpful error.
        return spec
    return DenseSpec((), "string", on_null="mask")


def _text_of(name: str) -> str:
    """Returns the name of the feature that has the text of a column of integers."""
    return f"{name}\0text"


def _check_digits(name: str, integers: Any, texts: Strings) -> None:
    """Raises `ValueRangeError` if the text of an integer has other characters than its digits, such as leading zeros.

    Negative numbers are not checked, because they aren't IDs.
    """
    if isinstance(integers, Masked):  # `_plain` raises an error for nulls.
        return
    digits = np.searchsorted(_POWERS, integers.astype(np.uint64), side="right")
    wrong = (np.diff(texts.offsets) != np.maximum(digits, 1)) & (integers >= 0)
    if wrong.any():
        text = texts[int(wrong.argmax())].decode()
        override = f'overrides={{{name!r}: fastpipe.DenseSpec((), "string")}}'
        reason = (
            f"the id {text!r} of the column {name!r} is not written like other integers: pass {override} to read text, "
            f'or "{integers.dtype}" to read it as {int(text)}'
        )
        raise ValueRangeError(reason, feature=name, reason=reason)


def from_movielens(path: str | os.PathLike[str]) -> Iterator[Chunk]:
    """Yields ratings in the formats of MovieLens (`u.data`, `ratings.dat`, `ratings.csv`) and RecBole (`.inter`)."""
    path = os.fsdecode(path)
    try:
        with open(path, "rb") as file:
            first = file.readline()
            # A delimiter has one character.
            text = (first + file.read()).replace(b"::", b"\t") if b"::" in first else None
    except FileNotFoundError:
        raise in_file(MissingFileError, path, "there is no such file") from None
    except OSError as error:
        raise unreadable(path, error) from None
    columns, delimiter, header = Columns("user", "item", "timestamp"), "\t", False
    if first.startswith(b"userId,movieId,"):
        columns, delimiter, header = Columns("userId", "movieId", "timestamp"), ",", True
    elif first.startswith(b"user_id:token\titem_id:token\t"):
        columns, header = Columns("user_id:token", "item_id:token", "timestamp:float"), True
    dialect = replace(DEFAULT_DIALECT, delimiter=delimiter, header=header or _MOVIELENS)
    try:
        data = CsvData(opened([path] if text is None else text), dialect, None, columns.wanted)
        yield from from_csv(data, columns, {})
    except (MalformedFileError, SchemaError) as error:
        reason = f"the file doesn't contain MovieLens ratings (user, item, rating, timestamp): {error}"
        raise in_file(InteractionsError, path, reason) from None
