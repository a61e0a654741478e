"""Converts batches to Arrow record batches over the same memory.

Arrow's layouts match fastpipe's forms, so most arrays are passed without a copy: numbers, offsets, and the bytes of
strings. The following arrays are copied because their layouts differ:

- bools and masks, which Arrow packs into bits;
- the indices of `Sparse`, because Arrow stores each dimension separately (a one-dimensional `SparseCSR` is shared);
- dates, which Arrow stores in 32 bits, and times in units that Arrow doesn't support;
- integers whose spec has a scale, which are converted to wider Arrow decimals;
- arrays that aren't C-contiguous or aligned, or have the other byte order.

Arrow buffers keep the NumPy arrays alive, and the arrays keep the reader's memory alive. So a record batch outlives the
batch, the pass and the reader. Later writes into the arrays change the record batch.

Readers are Arrow streams. The extension module creates all Arrow arrays, over the memory of NumPy arrays or of a pass's
batches, and exports them through Arrow's C data interface. So pyarrow is needed only for pyarrow objects. Sparse
columns are read as `SparseCSR`, which is Arrow's layout, even if the reader's batches have the layout "coo".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe._arguments import shown
from fastpipe._arrow.schema import VALID, checked_name, integers_of, metadata_of, require_pyarrow, schema_of
from fastpipe._fastpipe import ArrowArray, ArrowBatches, Pass
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.errors import LimitError, MalformedFileError
from fastpipe.specs import Features, Spec

if TYPE_CHECKING:
    import pyarrow as pa

    from fastpipe._progress import Counter

_WORD = 8


def with_decimals(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Replaces integers by decimals in a new array, as the type `kind` requires. Only these values are copied."""
    if array.type == kind:
        return array
    pa = require_pyarrow()
    if pa.types.is_decimal(kind):
        return _decimals(array, kind)
    if pa.types.is_struct(kind):
        children = [with_decimals(array.field(i), kind.field(i).type) for i in range(kind.num_fields)]
        own = 1
    else:
        children = [with_decimals(array.values, kind.value_type)]
        own = 1 if pa.types.is_fixed_size_list(kind) else 2
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:own], children=children)


def _decimals(array: pa.Array, kind: Any) -> pa.Array:
    """Widens the integers of an array: little-endian words, where all words except the first repeat the sign."""
    pa = require_pyarrow()
    bitmap, data = array.buffers()
    dtype = np.dtype(array.type.to_pandas_dtype())
    integers = np.frombuffer(data, dtype, len(array)) if len(array) else np.empty(0, dtype)
    words = np.empty((len(array), kind.bit_width // 8 // _WORD), "<i8")
    words[:, 0] = integers.view(np.int64) if dtype == np.uint64 else integers
    words[:, 1:] = -(integers < 0).astype(np.int64)[:, np.newaxis]
    return pa.Array.from_buffers(kind, len(array), [bitmap, pa.py_buffer(words)])


# Formats of types in Arrow's C data interface.
_NUMBERS = {
    (kind, 2**i): format
    for kind, formats in {"i": "csil", "u": "CSIL", "f": " efg", "b": "b"}.items()
    for i, format in enumerate(formats)
}
_DATE, _TEXT, _BINARY = "tdD", "U", "Z"

_TIMES = ("s", "ms", "us", "ns")
# The Arrow units to which other units are converted.
_DATES = ("Y", "M", "W", "D")
_LONG = ("W", "D", "h", "m")


def to_arrow(batch: Mapping[str, Any], features: Mapping[str, Spec] | None = None) -> pa.RecordBatch:
    """Returns a batch as a `pyarrow.RecordBatch` over the same memory (extra `arrow`).

    | column | Arrow array |
    |---|---|
    | ndarray `[rows]` | primitive; `datetime64` is a timestamp or a date, `timedelta64` a duration |
    | ndarray `[rows, *shape]` | a level of fixed-size lists for each dimension of `shape` |
    | `Ragged` | `large_list`, nested for several levels |
    | `Strings` | `large_string`, `large_binary`; in fixed-size lists if there are more dimensions |
    | `Sparse`, `SparseCSR` | struct of int64 `large_list`s `indices0`, `indices1` ... and a `large_list` `values` |
    | `Masked` | the array of the values, with nulls; if the mask has fewer dimensions, whole lists are null |

    Columns whose spec has a scale are converted to decimals of that scale.

    Only arrays with a different layout in Arrow are copied: bools and masks, indices of `Sparse`, dates, decimals, and
    arrays that aren't C-contiguous or aligned, or have the other byte order. All other arrays are shared, so writing
    into the batch's arrays later changes the record batch. `NaT` is converted to null, and so is NaN in columns whose
    spec has `fill=nan`. The `dense_shape` of sparse columns is not stored; their specs have it.

    Args:
        batch: A batch of a reader, or a similar dict from name to array or form. All columns must have the same number
            of rows.
        features: Specs of the columns, such as `reader.features`. They determine the types and the order of the
            columns, and are stored in the schema's metadata. The batch must have exactly these columns, and may have
            `valid` (of `on_uneven="pad"`). By default the types are determined by the arrays.

    Returns:
        The record batch.

    Raises:
        ImportError: If pyarrow isn't installed.
        LimitError: If a column has more than 64 levels of nesting.
        TypeError: If a column is neither a NumPy array nor a form, has a dtype that Arrow doesn't support, such as
            Python objects, or doesn't match its spec. The message names the column.
        ValueError: If columns have different numbers of rows, don't match `features`, or are inconsistent: a mask has
            another shape than its values, offsets are not in order, or text isn't valid UTF-8.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label", "clicked_items"], batch_size=4)
        >>> fastpipe.to_arrow(next(iter(reader)), reader.features).schema.remove_metadata()
        label: float
        clicked_items: large_list<item: int64>
          child 0, item: int64
    """
    pa = require_pyarrow()
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch must be a dict from column name to array; got {shown(batch)}")
    if features is None:
        return _in_pyarrow(pa.record_batch, table_of(batch))
    specs = Features(features)
    schema = schema_of(specs, valid=VALID in batch and VALID not in specs)
    if batch.keys() != set(schema.names):
        missing = sorted(set(schema.names) - batch.keys())
        problem = f"lacks {missing}" if missing else f"also has {[name for name in batch if name not in schema.names]}"
        raise ValueError(f"the columns of the batch don't match features: it {problem}")
    null_nans = {name for name, spec in specs.items() if spec._nan_is_null}
    forms = {name: _with_nulls(batch[name]) if name in null_nans else batch[name] for name in schema.names}
    integers, arrays = integers_of(specs), []
    for field, array in zip(schema, _in_pyarrow(pa.record_batch, table_of(forms)).columns, strict=True):
        if array.type == integers.get(field.name):
            array = with_decimals(array, field.type)
        if array.type != field.type:
            raise TypeError(f"column {field.name!r} has Arrow type {array.type}, but its spec requires {field.type}")
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def form_to_arrow(form: Any) -> pa.Array:
    """Returns a form as an Arrow array.

    Raises:
        ImportError: If pyarrow isn't installed.
        LimitError: If the form has more than 64 levels of nesting.
        TypeError: If the form has a dtype that Arrow doesn't support.
        ValueError: If the parts of the form are inconsistent.
    """
    return _in_pyarrow(require_pyarrow().array, _column(form, type(form).__name__))


def _in_pyarrow(function: Callable[[Any], Any], data: Any) -> Any:
    """Returns what a function of pyarrow makes of valid data with an Arrow interface."""
    try:
        return function(data)
    except require_pyarrow().ArrowInvalid as error:
        # pyarrow has no other error for this.
        if "Recursion level" not in str(error):
            raise
        raise LimitError("pyarrow supports at most 64 levels of nesting, and the data has more") from None


def table_of(batch: Mapping[str, Any]) -> ArrowArray:
    """Returns the columns of a batch as an Arrow struct over the same memory. Doesn't need pyarrow.

    Raises:
        TypeError: If a column has the wrong type (see `to_arrow`).
        ValueError: If the columns are inconsistent, or Arrow doesn't support a name.
    """
    columns: list[tuple[str, ArrowArray]] = []
    for name, form in batch.items():
        where = f"column {checked_name(name)!r}"
        array = _column(form, where)
        if columns and len(array) != len(columns[0][1]):
            first, other = columns[0]
            raise ValueError(f"column {first!r} has {len(other)} rows, but {where} has {len(array)}")
        columns.append((name, array))
    return ArrowArray("+s", len(columns[0][1]) if columns else 0, [None], columns)


def _with_nulls(form: Any) -> Any:
    """Adds a mask for values that are NaN, if there are any."""
    if isinstance(form, np.ndarray) and form.dtype.kind == "f":
        missing = np.isnan(form)
        return Masked(form, ~missing) if missing.any() else form
    if isinstance(form, Masked):
        return Masked(_with_nulls(form.values), form.valid)
    if isinstance(form, Ragged):
        return Ragged(_with_nulls(form.values), form.offsets)
    if isinstance(form, Sparse):
        return Sparse(form.indices, _with_nulls(form.values), form.dense_shape)
    if isinstance(form, SparseCSR):
        return SparseCSR(form.offsets, form.indices, _with_nulls(form.values), form.dense_shape)
    return form


def _column(node: Any, where: str) -> ArrowArray:
    """Returns a form as a valid array: offsets are in order, and strings are UTF-8."""
    try:
        return _array(node, where)
    except MalformedFileError as error:
        raise ValueError(f"{where}: {error}") from None


class _Masks:
    """The masks of a node, by the nesting level at which each mask marks nulls."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._masks: dict[int, np.ndarray] = {}

    def add(self, valid: Any) -> None:
        if not isinstance(valid, np.ndarray) or valid.dtype != np.bool_ or valid.ndim == 0:
            raise TypeError(
                f"{self._where}: a mask must be a bool array with one entry per row; got {_described(valid)}"
            )
        # Arrow merges two masks of the same depth (a nullable field of a nullable record) into one.
        depth = valid.ndim
        known = self._masks.get(depth)
        if known is not None and known.shape != valid.shape:
            raise ValueError(f"{self._where}: a mask of shape {valid.shape} contains one of shape {known.shape}")
        self._masks[depth] = valid if known is None else valid & known

    def check(self, shape: tuple[int, ...]) -> None:
        """Checks that the shape of each mask is a prefix of this shape."""
        for depth, valid in self._masks.items():
            if valid.shape != shape[:depth]:
                raise ValueError(f"{self._where}: a mask of shape {valid.shape} doesn't fit values of shape {shape}")

    def bitmap(self, depth: int) -> np.ndarray | None:
        valid = self._masks.get(depth)
        return None if valid is None else np.packbits(valid, bitorder="little")


def _array(node: Any, where: str) -> ArrowArray:
    """Returns a column, or one level of it, as an Arrow array with the same number of rows."""
    masks = _Masks(where)
    while isinstance(node, Masked):
        masks.add(node.valid)
        node = node.values
    if isinstance(node, Strings):
        shape, array = _strings(node, masks, where)
    elif isinstance(node, Ragged):
        shape, array = _ragged(node, masks, where)
    elif isinstance(node, (Sparse, SparseCSR)):
        shape, array = _sparse(node, masks, where)
    elif isinstance(node, np.ndarray):
        shape, array = _dense(node, masks, where)
    else:
        kinds = "a NumPy array, Ragged, Strings, Masked, Sparse or SparseCSR"
        hint = ""
        if isinstance(node, list):
            hint = ": convert it with numpy.array"
        elif isinstance(node, (str, bytes, int, float)):
            hint = ": a batch has a column of all rows; pyarrow.Table.from_pylist converts a list of rows"
        raise TypeError(f"{where} must be {kinds}; got {_described(node)}{hint}")
    for depth in range(len(shape) - 1, 0, -1):
        array = ArrowArray(f"+w:{shape[depth]}", math.prod(shape[:depth]), [masks.bitmap(depth)], [("item", array)])
    return array


def _dense(array: np.ndarray, masks: _Masks, where: str) -> tuple[tuple[int, ...], ArrowArray]:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{where} is a NumPy MaskedArray: use fastpipe.Masked(values.data, ~values.mask)")
    if array.ndim == 0:
        raise TypeError(f"{where} is an array without dimensions: a column must have one entry per row")
    shape, depth = array.shape, array.ndim
    if array.dtype.kind in "mM":
        missing = np.isnat(array)
        if missing.any():
            masks.check(shape)
            masks.add(~missing)
        kind, array = _times(array, where)
    elif array.dtype.kind in "biuf" and array.dtype.itemsize <= 8:
        array = np.asarray(array, array.dtype.newbyteorder("="), order="C")
        kind = _NUMBERS[array.dtype.kind, array.dtype.itemsize]
    else:
        raise TypeError(f"{where} has dtype {array.dtype}, which is not supported{_hint(array.dtype)}")
    masks.check(shape)
    data = np.packbits(array, bitorder="little") if array.dtype == np.bool_ else array
    return shape, ArrowArray(kind, array.size, [masks.bitmap(depth), np.ascontiguousarray(data)])


def _hint(dtype: np.dtype[Any]) -> str:
    return ": convert it to fastpipe.Strings" if dtype.kind in "SUTO" else ""


def _times(array: np.ndarray, where: str) -> tuple[str, np.ndarray]:
    """Returns Arrow's type for dates and times, and integers in its unit."""
    unit, _ = np.datetime_data(array.dtype)
    if array.dtype.kind == "M" and unit in _DATES:
        days = _converted(array, "datetime64[D]", where).view(np.int64)
        # Nulls may have any number.
        days = np.where(np.isnat(array), 0, days)
        if days.size and not -(2**31) <= days.min() <= days.max() < 2**31:
            raise ValueError(f"{where} has dates that don't fit Arrow dates, which count days in 32 bits")
        return _DATE, days.astype(np.int32)
    if unit in _LONG:
        unit = "s"
    if unit not in _TIMES:
        raise TypeError(f"{where} has dtype {array.dtype}: Arrow supports the units s, ms, us and ns")
    kind, wanted = (f"ts{unit[0]}:", "datetime64") if array.dtype.kind == "M" else (f"tD{unit[0]}", "timedelta64")
    return kind, _converted(array, f"{wanted}[{unit}]", where).view(np.int64)


def _converted(array: np.ndarray, dtype: str, where: str) -> np.ndarray:
    unfit = ValueError(f"{where} has times that don't fit {dtype}")
    try:
        converted = np.asarray(array, dtype, order="C")
    except OverflowError:
        raise unfit from None
    # Older versions of NumPy wrap around on overflow.
    if converted.dtype != array.dtype and not np.array_equal(converted.astype(array.dtype), array, equal_nan=True):
        raise unfit
    return converted


def _strings(node: Strings, masks: _Masks, where: str) -> tuple[tuple[int, ...], ArrowArray]:
    shape = node.shape
    values: Any = node.values  # A caller may have passed another type.
    masks.check(shape)
    if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.ndim != 1:
        raise TypeError(f"{where}: the bytes of Strings must be one-dimensional uint8; got {_described(values)}")
    entries = math.prod(shape)
    offsets = _offsets(node.offsets, where)
    if len(offsets) != entries + 1:
        raise ValueError(f"{where}: {entries} strings must have {entries + 1} offsets; got {len(offsets)}")
    buffers = [masks.bitmap(len(shape)), offsets, np.ascontiguousarray(values)]
    return shape, ArrowArray(_BINARY if node.binary else _TEXT, entries, buffers)


def _ragged(node: Ragged, masks: _Masks, where: str) -> tuple[tuple[int], ArrowArray]:
    offsets = _offsets(node.offsets, where)
    rows = len(offsets) - 1
    masks.check((rows,))
    return (rows,), _lists(offsets, _array(node.values, where), masks.bitmap(1))


def _sparse(node: Sparse | SparseCSR, masks: _Masks, where: str) -> tuple[tuple[int], ArrowArray]:
    """Returns a struct with one list per dimension and one for the values, all with the same offsets."""
    indices: Any = node.indices  # Users may pass any type.
    if not isinstance(indices, np.ndarray) or indices.dtype.kind not in "iu" or indices.ndim not in (1, 2):
        raise TypeError(f"{where}: sparse indices must be integers with one row per entry; got {_described(indices)}")
    if isinstance(node, SparseCSR):
        offsets = _offsets(node.offsets, where)
        dimensions = [indices] if indices.ndim == 1 else list(indices.T)
    elif indices.ndim == 2 and indices.shape[1] > 1:
        offsets = _row_offsets(indices[:, 0], len(node), where)
        dimensions = list(indices.T[1:])
    else:
        raise ValueError(
            f"{where}: sparse indices must contain the row and an index per dimension; got shape {indices.shape}"
        )
    rows = len(offsets) - 1
    masks.check((rows,))
    parts = {f"indices{i}": _array(np.asarray(index, np.int64), where) for i, index in enumerate(dimensions)}
    parts["values"] = _array(node.values, where)
    if len(parts["values"]) != len(indices):
        raise ValueError(f"{where} has {len(indices)} sparse indices, but {len(parts['values'])} values")
    lists = [(name, _lists(offsets, part)) for name, part in parts.items()]
    return (rows,), ArrowArray("+s", rows, [masks.bitmap(1)], lists)


def _row_offsets(of: np.ndarray, rows: int, where: str) -> np.ndarray:
    """Returns the start and end of each row's entries, given the row of each entry."""
    # All of the following operations are faster on contiguous memory.
    of = np.ascontiguousarray(of)
    if len(of) and not (of[0] >= 0 and of[-1] < rows and np.all(of[:-1] <= of[1:])):
        raise ValueError(f"{where}: sparse entries must be sorted by row, from 0 to {rows - 1}")
    return np.searchsorted(of, np.arange(rows + 1)).astype(np.int64, copy=False)


def _lists(offsets: np.ndarray, items: ArrowArray, bitmap: np.ndarray | None = None) -> ArrowArray:
    return ArrowArray("+L", len(offsets) - 1, [bitmap, offsets], [("item", items)])


def _offsets(offsets: Any, where: str) -> np.ndarray:
    """Returns offsets in Arrow's dtype. Their order is checked later, together with the array."""
    if not isinstance(offsets, np.ndarray) or offsets.dtype.kind not in "iu" or offsets.ndim != 1:
        raise TypeError(f"{where}: offsets must be one-dimensional integers; got {_described(offsets)}")
    if not len(offsets):
        raise ValueError(f"{where}: offsets must have one entry more than there are rows; got an empty array")
    return np.ascontiguousarray(offsets, np.int64)


def _described(node: Any) -> str:
    if isinstance(node, np.ndarray):
        return f"{node.dtype}[{', '.join(map(str, node.shape))}]"
    return shown(node)


class Capsules:
    """A batch for consumers of Arrow data."""

    def __init__(self, capsules: tuple[object, object]) -> None:
        self._capsules = capsules

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        return self._capsules


class ArrowStreams:
    """The Arrow streams of a reader. Each stream starts a pass.

    Args:
        features: Specs of the batches.
        padded: Whether batches have the column `valid`.
        schema: Function that makes the Arrow schema from `padded` and its metadata.
        start: Function that starts a pass whose sparse columns are CSR.
        counter: Function that makes the progress bar of a pass, or returns None.
    """

    def __init__(
        self,
        *,
        features: Features,
        padded: bool,
        schema: Callable[[bool, dict[str, str]], object],
        start: Callable[[], Pass],
        counter: Callable[[Pass], Counter | None],
    ) -> None:
        self._features, self._padded = features, padded
        self._schema, self._start, self._counter = schema, start, counter

    def record_batches(self) -> pa.RecordBatchReader:
        """Starts a pass and returns its batches as a pyarrow stream. Errors of the pass are raised unchanged.

        Raises:
            ImportError: If pyarrow isn't installed.
            ValueError: If Arrow doesn't support the name or size of a feature.
        """
        pyarrow = require_pyarrow()
        schema = schema_of(self._features, valid=self._padded)

        def record_batch(capsules: tuple[object, object]) -> pa.RecordBatch:
            return _in_pyarrow(pyarrow.record_batch, Capsules(capsules))

        # A generator is not suitable: its frame would hold a batch while the next one is made, and would add a
        # traceback to error messages.
        batches: Iterator[pa.RecordBatch] = map(record_batch, self._started())
        return pyarrow.RecordBatchReader.from_batches(schema, batches)

    def batches(self) -> Iterator[Capsules]:
        """Starts a pass and yields batches that have `__arrow_c_array__`. Errors of the pass are raised unchanged.

        Raises:
            ValueError: If Arrow doesn't support the name or size of a feature.
        """
        return map(Capsules, self._started())

    def stream_capsule(self) -> object:
        """Starts a pass and returns it as a stream of Arrow's C interface.

        Raises:
            ValueError: If Arrow doesn't support the name or size of a feature.
        """
        return self._started().stream()

    def schema_capsule(self) -> object:
        """Returns the schema of this stream in Arrow's C interface.

        Raises:
            ValueError: If Arrow doesn't support the name or size of a feature.
        """
        return self._schema(self._padded, metadata_of(self._features))

    def _started(self) -> ArrowBatches:
        metadata = metadata_of(self._features)
        nan_is_null = {name for name, spec in self._features.items() if spec._nan_is_null}
        started = self._start()
        return ArrowBatches(started, metadata, nan_is_null, self._counter(started))
