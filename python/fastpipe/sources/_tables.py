"""Tables in memory: whatever is Arrow, and NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex, Unpack

from fastpipe._arguments import imported, shown
from fastpipe._arrow import to_arrow
from fastpipe._arrow.schema import asked_for, is_time, rewritten, written
from fastpipe._fastpipe import TableDataset
from fastpipe._reader.dataset import SourceWording
from fastpipe._reader.options import Options, Settings, takes_options, whole_window
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import VERSION
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR
from fastpipe.errors import FastpipeError, OutOfMemoryError, SchemaError, StorageError
from fastpipe.sources.units._schemas import without_nulls
from fastpipe.specs import Features, SparseSpec, Spec, inferred
from fastpipe.specs import _vocabularies as vocabularies

if TYPE_CHECKING:
    import pyarrow as pa


class RowLocation(NamedTuple):
    """Where a row of a table is.

    Attributes:
        row: its number, from 0.
    """

    row: int


class TableData:
    """A table in memory: the `Data` of `from_arrow` and `from_arrays`.

    Args:
        table: what has `__arrow_c_stream__` or `__arrow_c_array__`; or a dict of arrays.
        features: as in `from_arrow`.
        columns: as in `from_arrow`.
    """

    words = SourceWording()
    column_times = None

    def __init__(self, table: Any, features: Features | None, columns: list[str] | None) -> None:
        # A stream can be read once, but a reader may be pickled.
        self._table = table = _read(table)
        arrow = to_arrow(table) if isinstance(table, Mapping) else table
        self.handle = TableDataset(arrow, columns if features is None else features._lower())
        if features is None:
            features = inferred(self.handle.features())
            if not features:
                raise SchemaError("the table has no columns")
        self._asked = features
        self.features = vocabularies.in_form(features, self.handle.features)
        self.interpretation = vocabularies.interpretation(features)
        self.files: list[str] = []
        self.symbols = dict(self.handle.symbols())

    def fingerprint(self, version: int = VERSION) -> dict[str, Any]:
        """The number of rows, and a digest of the columns and of some rows; the same in states of all versions."""
        return {"rows": self.handle.num_rows, "digest": self.handle.digest().hex()}

    def place(self, unit: int, record: int) -> RowLocation:
        """The row."""
        return RowLocation(self.handle.row_of(unit, record))

    def __reduce__(self) -> tuple[Any, ...]:
        return TableData, (self._table, self._asked, None)

    def __str__(self) -> str:
        return f"a table of {self.handle.num_rows} rows"


@takes_options()
def from_arrow(
    table: Any,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: Sequence[str] | None = None,
    batch_size: SupportsIndex,
    **options: Unpack[Options],
) -> Reader:
    """Reads a table in memory as batches of NumPy arrays.

    The table's columns are finished: rows are gathered from where they are, through dictionaries, run ends and views,
    and nothing is copied before. Only values of another type than the wanted one are rewritten when the reader is made,
    those of a dictionary once each. Streams are read to their end, and held whole: `memory_limit` doesn't count the
    table. (`rebatch` batches streams as they come, `read_units` what can be read by parts.)

    When rows are shuffled, `shuffle_buffer` is the whole table, unless it is given: with `shuffle=True` every order of
    the rows is as likely as any other. The order doesn't depend on how the table is cut in record batches.

    Args:
        table: what has `__arrow_c_stream__` or `__arrow_c_array__`: a table, record batch or reader of pyarrow, a data
            frame of polars or pandas, a DuckDB relation, a Hugging Face data set's table, a `Reader`.
        features: dict from name to spec; the name is the path of a column, with dots between the names of nested
            fields. By default, the specs in the schema's metadata if fastpipe wrote the table, else what follows from
            its types: lists are ragged, fixed-size lists dense, structs of `indices0`, ... and `values` sparse, other
            structs a feature for each field, maps `name.keys` and `name.values`, times datetime64 or timedelta64,
            decimals float64, dictionaries what they stand for. Columns in which there are nulls have `nulls="mask"`.
            An integer dtype reads the codes of a dictionary of text, which `reader.symbols` lists; `scale=` reads
            decimals as integers; `VocabularySpec` and `HashSpec` read text, or lists of it, as indices.
        columns: only these, and what is nested in them; at least one.
        batch_size: rows a batch.
        **options: see `fastpipe.Options`.

    Returns:
        The reader. It keeps the table's memory alive.

    Raises:
        SchemaError: if there are no columns, one isn't there, a spec doesn't fit its type, or a record batch of a
            stream doesn't have the stream's schema.
        UnsupportedError: if a wanted column is of a type that isn't read, such as intervals and unions.
        MalformedFileError: if the table contradicts itself: offsets out of range, text that isn't UTF-8.
        StorageError: if its stream fails.
        OutOfMemoryError: if there isn't enough memory for what a stream holds.
        TypeError: if it isn't Arrow data, or an argument is of the wrong type.
        ValueError: for values out of range, and for arguments that exclude each other.

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
        hint = "; from_arrays takes a dict of arrays" if isinstance(table, Mapping) else ""
        raise TypeError(f"a table has __arrow_c_stream__ or __arrow_c_array__, which {shown(table)} lacks{hint}")
    return _reader(settings, table, features, columns)


@takes_options()
def from_arrays(
    arrays: Mapping[str, Any],
    *,
    features: Mapping[str, Spec] | None = None,
    columns: Sequence[str] | None = None,
    batch_size: SupportsIndex,
    **options: Unpack[Options],
) -> Reader:
    """Reads arrays as batches of some of their rows (extra `arrow`).

    Args:
        arrays: dict from name to NumPy array `[rows, *shape]` or batch form (`Ragged`, `Strings`, `Masked`, `Sparse`,
            `SparseCSR`), all with the same number of rows. They aren't copied where Arrow lays them out alike (see
            `to_arrow`), so they mustn't be changed while they are read.
        features: as in `from_arrow`.
        columns: as in `from_arrow`.
        batch_size: rows a batch.
        **options: see `fastpipe.Options`.

    Returns:
        The reader. It keeps the arrays alive.

    Raises:
        ImportError: if pyarrow isn't installed.
        TypeError: if a column is no array, or of a dtype that isn't read.
        ValueError: if columns have different numbers of rows, or as in `from_arrow`.

    Example:
        >>> import fastpipe
        >>> import numpy as np
        >>> arrays = {"x": np.arange(6, dtype="float32").reshape(3, 2), "y": np.array([0, 1, 1])}
        >>> reader = fastpipe.from_arrays(arrays, batch_size=2, shuffle=True, seed=7)
        >>> [batch["x"].shape for batch in reader]
        [(2, 2), (1, 2)]
    """
    settings = Settings(from_arrays, batch_size, options)
    given: Any = arrays  # Users may give anything.
    if not isinstance(given, Mapping):
        hint = "; from_arrow takes Arrow data" if hasattr(given, "__arrow_c_stream__") else ""
        raise TypeError(f"arrays is a dict from name to array, not {shown(given)}{hint}")
    if not given:
        raise ValueError("arrays is empty: name at least one")
    return _reader(settings, dict(arrays), features, columns)


def _reader(
    settings: Settings, table: Any, features: Mapping[str, Spec] | None, columns: Sequence[str] | None
) -> Reader:
    wanted, chosen = asked_for(features, columns)
    if wanted is None:
        wanted = _known(table, chosen)
    if isinstance(table, Reader):
        table = table.to_reader()
    data = TableData(table, wanted, chosen if wanted is None else None)
    if isinstance(table, Mapping) and wanted is None:
        formed = Features({name: _formed(table.get(name), spec) for name, spec in data.features.items()})
        if formed != data.features:
            data = TableData(table, formed, None)
    return settings.reader(data, whole_window(data))


def _read(table: Any) -> Any:
    """What a stream of pyarrow's holds, as a table; anything else as it is.

    Python may make the batches of such a stream. In C what it raises becomes a text, even a KeyboardInterrupt, and
    nobody looks whether batches have the stream's schema.
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
    """A record batch that may say something else of nulls than its stream does."""
    import pyarrow as pa

    if batch.schema.equals(schema):
        return batch
    found, expected = ([(field.name, without_nulls(field).type) for field in given] for given in (batch.schema, schema))
    reason = (
        f"record batch {number} of the stream has columns {_told(found)}, and the stream's schema {_told(expected)}"
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
    """The specs of a table that fastpipe wrote, or is about to; None for any other."""
    if isinstance(table, Reader):
        return rewritten(table.features, columns)
    pa = imported("pyarrow")
    if pa is not None and isinstance(table, (pa.Table, pa.RecordBatch, pa.RecordBatchReader)):
        return written(table.schema, columns)
    return None


def _formed(form: Any, spec: Spec) -> Spec:
    """An inferred spec with what an array's form says besides: whether there is a mask, and shapes of sparse rows."""
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
        return replace(spec, nulls="mask")
    return replace(spec, nulls="fill") if is_time(spec) else spec
