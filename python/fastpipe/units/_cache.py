"""The rows of a reader, kept in memory or in an Arrow file after they have been read once.

The kept rows have the units of the dataset that they were read from: as many, with as many rows. So each order of them
is the order of that dataset, and states fit both.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe._arguments import memory_size
from fastpipe._arrow import to_arrow
from fastpipe._arrow.schema import encoded_features, require_pyarrow, schema_of
from fastpipe._fastpipe import RemoteDataset
from fastpipe._files._atomic_write import replacing
from fastpipe._locations import Location
from fastpipe._reader.dataset import BaseDataset, DerivedDataset, FileDataset, SourceWording
from fastpipe._reader.mixed_data import MixedDataset
from fastpipe._reader.ordering import digest
from fastpipe._reader.state import VERSION
from fastpipe._text import size_text
from fastpipe.errors import LimitError, StorageError, UnsupportedError
from fastpipe.specs import Features, Spec
from fastpipe.specs._requests import FeatureRequest
from fastpipe.units._data import UnitsData

if TYPE_CHECKING:
    import pyarrow as pa

    from fastpipe._reader.dataset import Dataset
    from fastpipe._reader.reader import Reader

_FORMAT = 1

_FETCHES = 2

# Number of rows whose forms are compared.
_COMPARED = 16


def cached(
    data: Dataset,
    read: Callable[..., Reader],
    rows: int,
    directory: str | os.PathLike[str] | None,
    max_bytes: int | str | None,
) -> CachedData:
    """Returns a dataset of the kept rows of a dataset.

    Args:
        data: The dataset.
        read: Function `read(data, rows, **changes)`, which returns a reader in the order of a dataset, in batches of so
            many rows, with some changes of its options.
        rows: Number of rows that are read at once.
        directory: Folder for the file, or None.
        max_bytes: Maximum size, or None.
    """
    limit = None if max_bytes is None else memory_size("max_bytes", max_bytes)
    folder = None if directory is None else Path(os.fspath(directory))
    require_pyarrow()
    _check(data)
    schema = _schema(data.features)
    path = None if folder is None else folder / f"fastpipe-{_key(data)}.arrow"
    table = None if path is None else _opened(path, schema, data)
    if table is None:
        batches = _limited(_batches(read(data, rows), data.features), limit)
        if path is None:
            import pyarrow

            table = pyarrow.Table.from_batches(list(batches), schema)
        else:
            table = _written(path, batches, schema, data)
    found = CachedData(data, _Kept(table, path))
    if table.num_rows:
        _check_forms(*(read(each, _COMPARED, progress=False).batch_at(0) for each in (data, found)))
    return found


def _batches(reader: Reader, features: Features) -> Iterator[pa.RecordBatch]:
    """Yields a pass of a reader as record batches."""
    with reader:
        for batch in reader:
            yield to_arrow(batch, features)


def _origin(data: Dataset) -> Dataset:
    """Returns the dataset from whose rows partitions, selections and caches were made."""
    while isinstance(data, DerivedDataset):
        data = data.origin()[0]
    return data


def _identity(data: Dataset) -> list[Any]:
    """Returns values that differ if the contents of a dataset do, in addition to its fingerprint.

    Fingerprints of files have their sizes and some of their bytes, and those of queries and tables have few values.

    Raises:
        UnsupportedError: If there are no such values.
    """
    # The fingerprint of a custom source identifies its contents.
    if isinstance(data, UnitsData) and not type(data._units).__module__.startswith("fastpipe."):
        return []
    # The key must belong to the contents that were opened, even if a file has changed since.
    stamps = data.stamps() if isinstance(data, FileDataset) else []
    if not stamps or not all(map(os.path.isfile, data.files)):
        reason = (
            f"cache(directory=...) cannot tell whether {data} has changed, because it doesn't consist of local files:"
            " use cache() for memory, or write its rows to a file and read that"
        )
        raise UnsupportedError(reason, reason=reason)
    real = [os.fsencode(os.path.realpath(path)).hex() for path in data.files]
    return [[path, *stamp] for path, stamp in zip(real, stamps, strict=True)]


def _check(data: Dataset) -> None:
    """Checks that the rows can be kept.

    Raises:
        UnsupportedError: If they are those of a mixture, come from a server, or change with the epoch.
    """
    data = _origin(data)
    if isinstance(data, MixedDataset):
        reason = "cache() cannot keep the rows of a mixture: cache its readers, and mix these"
        raise UnsupportedError(reason, reason=reason)
    if isinstance(data.handle, RemoteDataset):
        reason = "cache() needs the data itself: call it on the server, and serve a reader of the cached rows"
        raise UnsupportedError(reason, reason=reason)
    if (redrawn := getattr(data, "redrawn", None)) is not None:
        reason = f"cache() cannot keep {redrawn}, which are drawn again in each epoch: don't cache this reader"
        raise UnsupportedError(reason, reason=reason)


def _key(data: Dataset) -> str:
    """Returns the digest of all that determines the rows and their values.

    Raises:
        UnsupportedError: If the rows may change without a change of the key.
    """
    identities = [data.fingerprint(), _identity(_origin(data)), dict(data.interpretation), data.categories]
    settings = json.dumps([_FORMAT, *identities], sort_keys=True)
    return digest(settings.encode(), b"\0", encoded_features(data.features).encode())


def _schema(features: Features) -> pa.Schema:
    """Returns the schema of the rows.

    Raises:
        UnsupportedError: If Arrow doesn't support a feature. The message names it.
    """
    try:
        return schema_of(features)
    except ValueError as error:
        reason = f"cache() keeps rows in Arrow: {error}. Leave the feature out, or don't cache this reader"
        raise UnsupportedError(reason, reason=reason) from error


def _limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """Yields the batches, and raises an error when they exceed the limit."""
    total = 0
    for batch in batches:
        total += batch.nbytes
        if limit is not None and total > limit:
            raise LimitError(
                f"the rows take more than max_bytes={size_text(limit)}: raise max_bytes, read fewer columns or rows, or"
                " keep them in files with cache(directory=...) if memory is the limit"
            )
        yield batch


def _opened(path: Path, schema: pa.Schema, data: Dataset) -> pa.Table | None:
    """Returns the rows of a file, mapped into memory. None if there is no such file, or if it isn't whole."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(path)) as source:
            table = pyarrow.ipc.open_file(source).read_all()
        table.validate()
    except FileNotFoundError:
        return None
    except OSError as error:
        # Errors of the operating system have a number. Other ones are about the contents of the file.
        if error.errno is None or (path.exists() and path.stat().st_size < 8):
            return None
        raise StorageError(f"cannot read the cache {path}: {error}") from error
    except pyarrow.ArrowException:
        return None
    whole = table.schema.equals(schema) and table.num_rows == data.handle.num_rows
    return table if whole else None


def _written(path: Path, batches: Iterator[pa.RecordBatch], schema: pa.Schema, data: Dataset) -> pa.Table:
    """Writes a file under a temporary name, renames it, and returns its rows."""
    import pyarrow
    import pyarrow.ipc

    with _storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(str(path)) as name:
        with _storing(path):
            file = pyarrow.OSFile(name, "wb")
        # Nothing is buffered, so closing the file after an error doesn't raise another one.
        with file:
            with _storing(path):
                writer = pyarrow.ipc.new_file(file, schema)
            for batch in batches:
                with _storing(path):
                    writer.write_batch(batch)
            with _storing(path):
                writer.close()
    table = _opened(path, schema, data)
    if table is None:
        raise StorageError(f"the cache {path} was changed while it was written: remove it and try again")
    return table


@contextlib.contextmanager
def _storing(path: Path) -> Iterator[None]:
    """Raises errors of the file system as `StorageError`."""
    try:
        yield
    except OSError as error:
        failed = StorageError(f"cannot write the cache {path}: {error}")
        failed.errno = error.errno
        raise failed from error


def _check_forms(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Checks that the kept rows are read in the same form as the original ones.

    Raises:
        UnsupportedError: If a feature isn't.
    """
    for name in before:
        forms = [_form(batch[name]) for batch in (before, after)]
        if forms[0] != forms[1]:
            reason = (
                f"cache() cannot keep the feature {name!r} exactly: its values are {forms[0]}, and would be {forms[1]}."
                " Read it without cache(), or with a spec of another form"
            )
            raise UnsupportedError(reason, reason=reason)


def _form(values: Any) -> str:
    """Returns the types and dtypes of an array or a batch form, without the number of rows."""
    if isinstance(values, np.ndarray):
        return f"{values.dtype}{list(values.shape[1:])}"
    return f"{type(values).__name__} of {_form(values.values)}"


class _Kept:
    """Kept rows as a source (see `Units`).

    Args:
        table: The rows.
        path: The file that has them; None for memory.
        columns: The columns to read; None for all.
    """

    def __init__(self, table: pa.Table, path: Path | None, columns: Sequence[str] | None = None) -> None:
        self.table, self.path, self._columns = table, path, columns
        self.schema: Any = table.schema
        self.rows: Sequence[int] = []
        self._starts: list[int] = []

    def of(self, rows: Sequence[int]) -> _Kept:
        """Returns the same rows in units of these numbers of rows."""
        found = _Kept(self.table, self.path, self._columns)
        found.rows = list(rows)
        found._starts = np.cumsum([0, *rows]).tolist()
        return found

    @property
    def nbytes(self) -> list[int]:
        average = self.table.nbytes / max(self.table.num_rows, 1)
        return [round(average * rows) for rows in self.rows]

    def select(self, columns: Sequence[str]) -> _Kept:
        """Returns the same units with only these columns."""
        return _Kept(self.table.select(list(columns)), self.path, columns).of(self.rows)

    def read(self, unit: int) -> pa.Table:
        """Returns the rows of a unit over the same memory."""
        return self.table.slice(self._starts[unit], self.rows[unit])

    def fingerprint(self) -> None:
        """Returns None: the dataset has its own fingerprint."""
        return

    def __reduce__(self) -> tuple[Any, ...]:
        return (_mapped, (self.path,)) if self.path is not None else (_Kept, (self.table, None))


def _mapped(path: Path) -> _Kept:
    """Opens a file again in another process."""
    import pyarrow
    import pyarrow.ipc

    try:
        with pyarrow.memory_map(str(path)) as source:
            return _Kept(pyarrow.ipc.open_file(source).read_all(), path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise StorageError(f"cannot read the cache {path}: {error}. Create the reader again") from error


def _kept_spec(spec: Spec) -> Spec:
    """Returns the spec of a kept column, which has the name of its feature, and values that are padded or counted."""
    done: dict[str, Any] = {"field": None, "pad": None, "length": False}
    return replace(spec, **{name: value for name, value in done.items() if hasattr(spec, name)})


class CachedData(BaseDataset):
    """The kept rows of a dataset, which replace its rows.

    Args:
        whole: The dataset that was read.
        kept: The rows.
        names: The names of the features to read; None for all.
    """

    words = SourceWording()
    column_times = None

    def __init__(self, whole: Dataset, kept: _Kept, names: Sequence[str] | None = None) -> None:
        self._whole, self._kept, self._names = whole, kept, names
        specs = {name: spec for name, spec in whole.features.items() if names is None or name in names}
        features = Features({name: _kept_spec(spec) for name, spec in specs.items()})
        units = kept.of(whole.handle.unit_rows().tolist())
        self.handle = UnitsData(units, FeatureRequest(features), _FETCHES, in_sequence=False).handle
        self.features = Features(specs)
        self.files, self.interpretation = whole.files, whole.interpretation
        self.categories = {name: texts for name, texts in whole.categories.items() if name in specs}

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the fingerprint of the dataset that was read."""
        return self._whole.fingerprint(version)

    @property
    def holds_units(self) -> bool:
        """Returns what holds for the dataset that was read."""
        return self._whole.holds_units

    def default_window(self, batch_size: int) -> int | None:
        """Returns the default of the dataset that was read."""
        return self._whole.default_window(batch_size)

    def origin(self) -> tuple[Dataset, slice]:
        """Returns the dataset that was read, and all of its rows."""
        return self._whole, slice(0, self._whole.handle.num_rows)

    def unsliced(self) -> CachedData:
        """Returns the same rows in the whole units of the dataset that was read."""
        whole = self._whole.unsliced()
        return self if whole is self._whole else self._whole_units

    @functools.cached_property
    def _whole_units(self) -> CachedData:
        return CachedData(self._whole.unsliced(), self._kept, self._names)

    def narrowed(self, names: Sequence[str]) -> CachedData:
        """Returns the same rows with only some features."""
        return CachedData(self._whole, self._kept, names)

    def place(self, unit: int, record: int) -> Location:
        """Returns where a row comes from in the dataset that was read."""
        return self._whole.place(unit, record)

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedData, (self._whole, self._kept, self._names)

    def __str__(self) -> str:
        return f"cached rows of {self._whole}"
