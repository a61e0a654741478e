"""Tables in memory: Arrow data and NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack

from fastpipe._arguments import imported, shown
from fastpipe._arrow.export import table_of
from fastpipe._arrow.schema import is_time, require_pyarrow, rewritten, written
from fastpipe._fastpipe import TableDataset
from fastpipe._locations import RowLocation
from fastpipe._reader.dataset import BaseDataset, SourceWording, whole_window
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import VERSION
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR
from fastpipe.errors import FastpipeError, OutOfMemoryError, SchemaError, StorageError
from fastpipe.specs import Features, SparseSpec, Spec, inferred
from fastpipe.specs import _vocabularies as vocabularies
from fastpipe.specs._requests import FeatureRequest
from fastpipe.units._schemas import without_nulls

if TYPE_CHECKING:
    import pyarrow as pa


class TableData(BaseDataset):
    """A table in memory: the `Data` of `from_arrow` and `from_arrays`.

    Args:
        table: An object with `__arrow_c_stream__` or `__arrow_c_array__`, or a dict of arrays.
        features: The specs of the features to read, by name; None to infer them.
        columns: The names of the inferred columns to read; None for all.
    """

    words = SourceWording()
    column_times = None

    def __init__(self, table: Any, features: Features | None, columns: list[str] | None) -> None:
        # A stream can only be read once, but a reader may be pickled.
        self._table = table = _read(table)
        arrow = table_of(table) if isinstance(table, Mapping) else table
        self.handle = TableDataset(arrow, columns if features is None else features._lower())
        if features is None:
            features = inferred(self.handle.features())
            if not features:
                raise SchemaError("the table has no columns")
        self._asked = features
        self.features = vocabularies.in_form(features, self.handle.features)
        self.interpretation = vocabularies.interpretation(features)
        self.files: list[str] = []
        self.categories = dict(self.handle.categories())

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """Returns the number of rows, and a digest of the columns and some rows, for states of all versions."""
        return {"rows": self.handle.num_rows, "digest": self.handle.digest().hex()}

    @property
    def holds_units(self) -> bool:
        """Returns False: the rows are in memory anyway."""
        return False

    def default_window(self, batch_size: int) -> int:
        """Returns the number of rows that are shuffled together by default: all."""
        return whole_window(self, batch_size)

    def narrowed(self, names: Sequence[str]) -> TableData:
        """Returns the same rows with only some features."""
        features = Features({name: spec for name, spec in self._asked.items() if name in names})
        return TableData(self._table, features, None)

    def place(self, unit: int, record: int) -> RowLocation:
        """Returns the index of a row in the table."""
        return RowLocation(row=self.handle.row_of(unit, record))

    def __reduce__(self) -> tuple[Any, ...]:
        return TableData, (self._table, self._asked, None)

    def __str__(self) -> str:
        return f"a table of {self.handle.num_rows} rows"


@takes_options()
def from_arrow(
    table: Any,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    batch_size: int,
    **options: Unpack[Options],
) -> Reader:
    """Reads a table in memory as batches of NumPy arrays.

    Rows are gathered directly from the table's columns, including dictionaries, run ends and views, without copying the
    table first. Only values of a type other than the requested type are converted when the reader is created, and each
    value of a dictionary is converted once. Streams are read to their end and kept in memory: `memory_limit` doesn't
    count the table. Use `Rebatcher` to batch a stream as it arrives, and `read_units` to read data in units.

    When rows are shuffled, `shuffle_buffer` defaults to the size of the table, so that with `shuffle=True` every
    permutation of the rows is equally likely. The order doesn't depend on how the table is split into record batches.

    Args:
        table: An object with `__arrow_c_stream__` or `__arrow_c_array__`: a pyarrow table, record batch or record batch
            reader, a polars or pandas data frame, a DuckDB relation, the table of a Hugging Face dataset, or a
            `Reader`.
        features: The spec of each feature, by name. A name is the path of a column, with dots between the names of
            nested fields. By default, features come from the specs in the schema's metadata if fastpipe wrote the
            table, or else from the column types: lists are ragged, fixed-size lists are dense, and structs of
            `indices0`, ... and `values` are sparse. Other structs have a feature for each field, and maps have
            `name.keys` and `name.values`. Times are datetime64 or timedelta64, decimals float64, and dictionaries the
            type of their values. Columns with nulls have `on_null="mask"`. An integer dtype reads the codes of a text
            dictionary, which `reader.categories` lists. `scale=` reads decimals as integers. `VocabularySpec` and
            `HashSpec` read text, or lists of text, as indices.
        columns: The columns to read: a list of at least one name, or one name as a string. A name includes everything
            nested in it. Defaults to None: all columns.
        overrides: Specs that replace some of the specs that `features` has by default, by name. Not allowed with
            `features`. Streams of other libraries than pyarrow then need the extra `arrow`. Defaults to None.
        batch_size: Number of rows per batch.
        **options: See `fastpipe.typing.Options`.

    Returns:
        The reader, which keeps the table's memory alive.

    Raises:
        SchemaError: If the table has no columns, a column does not exist, a spec doesn't fit its type, `overrides`
            names a column that isn't read, or a record batch of a stream doesn't have the stream's schema.
        UnsupportedError: If the type of a requested column is not supported, such as intervals and unions.
        MalformedFileError: If the table is inconsistent: offsets are out of range, or text isn't UTF-8.
        StorageError: If the stream fails.
        OutOfMemoryError: If the data of a stream doesn't fit into memory.
        TypeError: If `table` isn't Arrow data, or an argument has the wrong type.
        ValueError: If arguments are out of range or exclude each other.

    Example:
        >>> import fastpipe
        >>> import pyarrow as pa
        >>> table = pa.table({"x": [1.0, 2.0, 3.0], "tags": [["a"], [], ["b", "c"]]})
        >>> for batch in fastpipe.from_arrow(table, batch_size=2):
        ...     print(batch["x"], batch["tags"].to_list())
        [1. 2.] [['a'], []]
        [3.] [['b', 'c']]
    """
    settings = Settings(from_arrow, batch_size, options)
    if not (hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__")):
        hint = "; from_arrays accepts a dict of arrays" if isinstance(table, Mapping) else ""
        raise TypeError(f"a table must have __arrow_c_stream__ or __arrow_c_array__; got {shown(table)}{hint}")
    return _reader(settings, table, FeatureRequest.of(features, columns, overrides))


@takes_options()
def from_arrays(
    arrays: Mapping[str, Any],
    *,
    features: Mapping[str, Spec] | None = None,
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    batch_size: int,
    **options: Unpack[Options],
) -> Reader:
    """Reads arrays in memory as batches of their rows.

    Args:
        arrays: A dict from name to NumPy array `[rows, *shape]` or batch form (`Ragged`, `Strings`, `Masked`, `Sparse`,
            `SparseCSR`), all with the same number of rows. Don't modify arrays while they are read: they are not copied
            if Arrow uses the same memory layout.
        features: The spec of each feature, by name. Inferred from the arrays by default: an array is dense with its
            dtype and shape, and batch forms are read as they are.
        columns: The arrays to read: a list of at least one name, or one name as a string. Defaults to None: all arrays.
        overrides: Specs that replace some of the inferred specs, by name. Not allowed with `features`. Defaults to
            None: all specs are inferred.
        batch_size: Number of rows per batch.
        **options: See `fastpipe.typing.Options`.

    Returns:
        The reader, which keeps the arrays alive.

    Raises:
        TypeError: If a column is not an array, or has an unsupported dtype.
        ValueError: If columns have different numbers of rows, or arguments are out of range or exclude each other.

    Example:
        >>> import fastpipe
        >>> import numpy as np
        >>> arrays = {"x": np.arange(6, dtype="float32").reshape(3, 2), "y": np.array([0, 1, 1])}
        >>> reader = fastpipe.from_arrays(arrays, batch_size=2, shuffle=True, seed=7)
        >>> [batch["x"].shape for batch in reader]
        [(2, 2), (1, 2)]
    """
    settings = Settings(from_arrays, batch_size, options)
    given: Any = arrays  # Callers may pass any type.
    if not isinstance(given, Mapping):
        hint = "; from_arrow accepts Arrow data" if hasattr(given, "__arrow_c_stream__") else ""
        raise TypeError(f"arrays must be a dict from name to array; got {shown(given)}{hint}")
    if not given:
        raise ValueError("arrays is empty: name at least one array")
    return _reader(settings, dict(arrays), FeatureRequest.of(features, columns, overrides))


def _reader(settings: Settings, table: Any, request: FeatureRequest) -> Reader:
    if (wanted := request.features) is None:
        wanted = _known(table, request.columns)
    if isinstance(table, Reader):
        table = table.to_arrow_reader()
    if request.overrides:
        table = _rereadable(table)
    data = TableData(table, wanted, request.columns if wanted is None else None)
    found = data.features
    if isinstance(table, Mapping) and wanted is None:
        found = Features({name: _formed(table.get(name), spec) for name, spec in found.items()})
    found = request.changed(found)
    if found != data.features:
        data = TableData(data._table, found, None)
    return settings.reader(data)


def _rereadable(table: Any) -> Any:
    """Returns a table that can be read twice: to infer its features, and with other specs.

    The streams of some libraries can be read once, or run a query each time.
    """
    if isinstance(table, Mapping) or not hasattr(table, "__arrow_c_stream__"):
        return table
    pa = require_pyarrow()
    return _read(table if isinstance(table, pa.Table | pa.RecordBatch) else pa.RecordBatchReader.from_stream(table))


def _read(table: Any) -> Any:
    """Returns the data of a pyarrow stream as a table, and other data unchanged.

    Python code may produce the batches of such a stream. Through the C interface, its exceptions, even a
    KeyboardInterrupt, would turn into text, and batches wouldn't be checked against the stream's schema.
    """
    pa = imported("pyarrow")
    if pa is None or not isinstance(table, pa.RecordBatchReader):
        return table
    batches: list[Any] = []
    try:
        for batch in table:
            batches.append(_of_schema(batch, table.schema, len(batches)))
    except FastpipeError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"the Arrow stream failed: {error}") from error
    except Exception as error:
        raise StorageError(f"the Arrow stream failed: {error}") from error
    return pa.Table.from_batches(batches, table.schema)


def _of_schema(batch: pa.RecordBatch, schema: pa.Schema, number: int) -> pa.RecordBatch:
    """Returns a record batch cast to the stream's schema. Only the nullability of its fields may differ."""
    import pyarrow as pa

    if batch.schema.equals(schema):
        return batch
    found, expected = ([(field.name, without_nulls(field).type) for field in given] for given in (batch.schema, schema))
    reason = (
        f"record batch {number} of the stream has columns {_told(found)}, but the stream's schema has {_told(expected)}"
    )
    if found != expected:
        raise SchemaError(reason)
    try:
        return batch.cast(schema)
    except (pa.ArrowInvalid, ValueError) as error:
        raise SchemaError(f"record batch {number} of the stream doesn't fit the stream's schema: {error}") from error


def _told(columns: list[tuple[str, Any]]) -> str:
    return ", ".join(f"{name!r}: {kind}" for name, kind in columns) or "none"


def _known(table: Any, columns: list[str] | None) -> Features | None:
    """Returns the specs of a table that fastpipe wrote or is about to write; None for other tables."""
    if isinstance(table, Reader):
        return rewritten(table.features, columns)
    pa = imported("pyarrow")
    if pa is not None and isinstance(table, (pa.Table, pa.RecordBatch, pa.RecordBatchReader)):
        return written(table.schema, columns)
    return None


def _formed(form: Any, spec: Spec) -> Spec:
    """Returns an inferred spec that also has the mask and the sparse shape of an array's batch form."""
    inner, masked = form, False
    while isinstance(inner, (Masked, Ragged)):
        masked |= isinstance(inner, Masked)
        inner = inner.values
    if isinstance(inner, (Sparse, SparseCSR)) and isinstance(spec, SparseSpec):
        layout: Literal["coo", "csr"] = "csr" if isinstance(inner, SparseCSR) else "coo"
        masked |= isinstance(inner.values, Masked)
        shape = tuple(int(size) for size in inner.dense_shape[1:])
        spec = replace(spec, shape=shape, layout=layout)
    if masked:
        return replace(spec, on_null="mask")
    return replace(spec, on_null="fill") if is_time(spec) else spec
