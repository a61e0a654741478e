"""Batches as Arrow record batches, over the same memory.

Arrow's layouts are those of fastpipe's forms, so most arrays are handed over as they are: numbers, offsets, bytes of
strings. What is copied, since the layouts differ:

- bools and masks, which Arrow packs into bits;
- the indices of `Sparse`, which Arrow wants a dimension at a time (those of a `SparseCSR` of one dimension are shared);
- dates, which Arrow counts in 32 bits, and times in units that it doesn't have;
- integers whose spec has a scale, which become Arrow's decimals, twice as wide;
- arrays that aren't C-contiguous or are of the other byte order.

Buffers keep the NumPy arrays alive over which they lie, and these the memory of the reader: so what was handed over
outlives batch, pass and reader. It also shares what is written into the arrays later.

Readers are Arrow streams: the extension makes record batches of what a pass yields, over its memory, and hands them out
through Arrow's C data interface. So only who wants objects of pyarrow's needs pyarrow. Sparse columns are read as
`SparseCSR`, whatever the layout of the reader's batches: that is how Arrow lays them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fastpipe._arguments import shown
from fastpipe._arrow.schema import VALID, checked_name, integers_of, metadata_of, require_pyarrow, schema_of
from fastpipe._fastpipe import ArrowBatches, Pass
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.specs import Features, Spec

if TYPE_CHECKING:
    import pyarrow as pa

    from fastpipe._progress import Counter

_WORD = 8


def with_decimals(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array that was just made, with decimals where `kind` has them in place of integers: these alone are copied."""
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
    """Integers of the array, widened: little-endian words, the sign in all but the first."""
    pa = require_pyarrow()
    bitmap, data = array.buffers()
    dtype = np.dtype(array.type.to_pandas_dtype())
    integers = np.frombuffer(data, dtype, len(array)) if len(array) else np.empty(0, dtype)
    words = np.empty((len(array), kind.bit_width // 8 // _WORD), "<i8")
    words[:, 0] = integers.view(np.int64) if dtype == np.uint64 else integers
    words[:, 1:] = -(integers < 0).astype(np.int64)[:, np.newaxis]
    return pa.Array.from_buffers(kind, len(array), [bitmap, pa.py_buffer(words)])


_TIMES = ("s", "ms", "us", "ns")
# To which of Arrow's units the others go.
_DATES = ("Y", "M", "W", "D")
_LONG = ("W", "D", "h", "m")


def to_arrow(batch: Mapping[str, Any], features: Mapping[str, Spec] | None = None) -> pa.RecordBatch:
    """A batch as a `pyarrow.RecordBatch` over the same memory (extra `arrow`).

    | column | Arrow array |
    |---|---|
    | ndarray `[rows]` | primitive; `datetime64` is a timestamp or a date, `timedelta64` a duration |
    | ndarray `[rows, *shape]` | a level of fixed-size lists for each dimension of `shape` |
    | `Ragged` | `large_list`; one in the other for several levels |
    | `Strings` | `large_string`, `large_binary`; in fixed-size lists if there are more dimensions |
    | `Sparse`, `SparseCSR` | struct of int64 `large_list`s `indices0`, `indices1` ... and a `large_list` `values` |
    | `Masked` | what the values are, with nulls: where a mask has fewer dimensions, whole lists are null |

    Columns whose spec has a scale are decimals of that scale.

    Only what Arrow lays out otherwise is copied: bools and masks, indices of `Sparse`, dates, decimals, and arrays that
    aren't C-contiguous or are of the other byte order. What is shared stays shared: writing into the batch's arrays
    afterwards changes the record batch. A `NaT` becomes null, and so does a NaN of a column whose spec has `fill=nan`.
    `dense_shape` of sparse columns is left to their specs.

    Args:
        batch: dict from name to array or form, all with the same number of rows, as readers yield them.
        features: specs of the columns, such as `reader.features`. They give the types and the order of the columns, and
            are kept in the schema's metadata. The batch has these columns, and may have `valid` (of `uneven="pad"`).
            Without them types follow from the arrays.

    Returns:
        The record batch.

    Raises:
        ImportError: if pyarrow isn't installed.
        TypeError: if a column is no NumPy array and no form, is of a dtype that Arrow doesn't have, such as Python
            objects, or isn't what its spec makes; the message names the column.
        ValueError: if columns have different numbers of rows, aren't those of `features`, or contradict themselves:
            masks of other shapes than values, offsets that aren't in order, text that isn't UTF-8.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label", "clicked_items"], batch_size=4)
        >>> fastpipe.to_arrow(next(iter(reader)), reader.features).schema.remove_metadata()
        label: float
        clicked_items: large_list<item: int64>
          child 0, item: int64
    """
    require_pyarrow()
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch is a dict from column name to array, not {shown(batch)}")
    if features is None:
        return _record_batch(batch, None, Features())
    specs = Features(features)
    schema = schema_of(specs, valid=VALID in batch and VALID not in specs)
    return _record_batch(batch, schema, specs)


def form_to_arrow(form: Any) -> pa.Array:
    """A form as an array.

    Raises:
        ImportError: if pyarrow isn't installed.
        TypeError: as `to_arrow`.
        ValueError: as `to_arrow`.
    """
    require_pyarrow()
    return _column(form, type(form).__name__)


def _record_batch(batch: Mapping[str, Any], schema: pa.Schema | None, specs: Features) -> pa.RecordBatch:
    pa = require_pyarrow()
    integers = integers_of(specs)
    names = list(batch) if schema is None else schema.names
    if schema is not None and batch.keys() != set(names):
        missing, others = sorted(set(names) - batch.keys()), [name for name in batch if name not in names]
        problem = f"lacks {missing}" if missing else f"also has {others}"
        raise ValueError(f"the columns of the batch aren't those of features: it {problem}")
    # Asked for one by one, they take as long as all the rest of a column.
    types = [None] * len(names) if schema is None else schema.types
    arrays: list[Any] = []
    for name, kind in zip(names, types, strict=True):
        where = f"column {(checked_name(name) if schema is None else name)!r}"
        form = _with_nulls(batch[name]) if name in specs and specs[name]._nan_is_null else batch[name]
        array = _column(form, where)
        if name in integers and array.type == integers[name]:
            array = with_decimals(array, kind)
        if kind is not None and array.type != kind:
            raise TypeError(f"{where} is of Arrow type {array.type}, but its spec makes {kind}")
        if arrays and len(array) != len(arrays[0]):
            raise ValueError(f"column {names[0]!r} has {len(arrays[0])} rows, but {where} {len(array)}")
        arrays.append(array)
    if schema is None:
        return pa.RecordBatch.from_arrays(arrays, names=names)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _with_nulls(form: Any) -> Any:
    """The form with a mask for values that are NaN, if there are any."""
    if isinstance(form, np.ndarray) and form.dtype.kind == "f":
        missing = np.isnan(form)
        return Masked(form, ~missing) if missing.any() else form
    if isinstance(form, Masked):
        return Masked(_with_nulls(form.values), form.valid)
    if type(form) is Ragged:
        return Ragged(_with_nulls(form.values), form.offsets)
    if isinstance(form, Sparse):
        return Sparse(form.indices, _with_nulls(form.values), form.dense_shape)
    if isinstance(form, SparseCSR):
        return SparseCSR(form.offsets, form.indices, _with_nulls(form.values), form.dense_shape)
    return form


def _column(node: Any, where: str) -> pa.Array:
    """A form as an array, its offsets in order and its strings UTF-8, on which other libraries rely."""
    invalid = require_pyarrow().ArrowInvalid
    try:
        array = _array(node, where)
        array.validate(full=True)
    except invalid as error:
        raise ValueError(f"{where}: {error}") from None
    return array


class _Masks:
    """The masks of a node, by the level of nesting of which each says what is null."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._masks: dict[int, np.ndarray] = {}

    def add(self, valid: Any) -> None:
        if not isinstance(valid, np.ndarray) or valid.dtype != np.bool_ or valid.ndim == 0:
            raise TypeError(f"{self._where}: a mask is a bool array, one entry a row, not {_described(valid)}")
        # Two of the same depth (a nullable field of a nullable record) are one in Arrow.
        depth = valid.ndim
        known = self._masks.get(depth)
        if known is not None and known.shape != valid.shape:
            raise ValueError(f"{self._where}: a mask of shape {valid.shape} is around one of shape {known.shape}")
        self._masks[depth] = valid if known is None else valid & known

    def check(self, shape: tuple[int, ...]) -> None:
        """Each is a prefix of this shape."""
        for depth, valid in self._masks.items():
            if valid.shape != shape[:depth]:
                raise ValueError(f"{self._where}: a mask of shape {valid.shape} doesn't fit values of shape {shape}")

    def bitmap(self, depth: int) -> pa.Buffer | None:
        valid = self._masks.get(depth)
        return None if valid is None else _buffer(np.packbits(valid, bitorder="little"))


def _array(node: Any, where: str) -> pa.Array:
    """A column, or a level of one, as an Arrow array with as many rows."""
    if type(node) is np.ndarray and node.ndim == 1 and node.flags.c_contiguous:
        # Most are plain numbers, and the rest of this takes longer than many a batch takes to decode.
        number = _number(node.dtype)
        if number is not None:
            pa = require_pyarrow()
            return pa.Array.from_buffers(number, len(node), [None, pa.py_buffer(node)])
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
        raise TypeError(f"{where} is {_described(node)}: Arrow data is made of NumPy arrays and fastpipe's forms")
    for depth in range(len(shape) - 1, 0, -1):
        kind = require_pyarrow().list_(array.type, shape[depth])
        array = _from_buffers(kind, math.prod(shape[:depth]), [masks.bitmap(depth)], [array])
    return array


@cache
def _number(dtype: np.dtype[Any]) -> pa.DataType | None:
    """Arrow's type for numbers that it lays out as NumPy does."""
    if dtype.kind in "iuf" and dtype.itemsize <= 8 and dtype.isnative:
        return require_pyarrow().from_numpy_dtype(dtype)
    return None


def _dense(array: np.ndarray, masks: _Masks, where: str) -> tuple[tuple[int, ...], pa.Array]:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{where} is a MaskedArray of NumPy: use fastpipe.Masked(values.data, ~values.mask)")
    if array.ndim == 0:
        raise TypeError(f"{where} is an array without dimensions: a column has one entry a row")
    shape, depth = array.shape, array.ndim
    if array.dtype.kind in "mM":
        missing = np.isnat(array)
        if missing.any():
            masks.check(shape)
            masks.add(~missing)
        kind, array = _times(array, where)
    elif array.dtype.kind in "biuf" and array.dtype.itemsize <= 8:
        array = np.asarray(array, array.dtype.newbyteorder("="), order="C")
        kind = require_pyarrow().from_numpy_dtype(array.dtype)
    else:
        raise TypeError(f"{where} is of dtype {array.dtype}, which Arrow doesn't have{_hint(array.dtype)}")
    masks.check(shape)
    data = np.packbits(array, bitorder="little") if array.dtype == np.bool_ else array
    return shape, _from_buffers(kind, array.size, [masks.bitmap(depth), _buffer(data)])


def _hint(dtype: np.dtype[Any]) -> str:
    return ": make it fastpipe.Strings" if dtype.kind in "SUTO" else ""


def _times(array: np.ndarray, where: str) -> tuple[pa.DataType, np.ndarray]:
    """Arrow's type for dates and times, and integers in its unit."""
    pa = require_pyarrow()
    unit, _ = np.datetime_data(array.dtype)
    if array.dtype.kind == "M" and unit in _DATES:
        days = _converted(array, "datetime64[D]", where).view(np.int64)
        # Nulls, whatever number stands for them.
        days = np.where(np.isnat(array), 0, days)
        if days.size and not -(2**31) <= days.min() <= days.max() < 2**31:
            raise ValueError(f"{where} has dates that don't fit Arrow's, which count days in 32 bits")
        return pa.date32(), days.astype(np.int32)
    if unit in _LONG:
        unit = "s"
    if unit not in _TIMES:
        raise TypeError(f"{where} is of dtype {array.dtype}: Arrow has the units s, ms, us and ns")
    kind = pa.timestamp(unit) if array.dtype.kind == "M" else pa.duration(unit)
    wanted = "datetime64" if array.dtype.kind == "M" else "timedelta64"
    return kind, _converted(array, f"{wanted}[{unit}]", where).view(np.int64)


def _converted(array: np.ndarray, dtype: str, where: str) -> np.ndarray:
    unfit = ValueError(f"{where} has times that don't fit {dtype}")
    try:
        converted = np.asarray(array, dtype, order="C")
    except OverflowError:
        raise unfit from None
    # Older versions of NumPy wrap around.
    if converted.dtype != array.dtype and not np.array_equal(converted.astype(array.dtype), array, equal_nan=True):
        raise unfit
    return converted


def _strings(node: Strings, masks: _Masks, where: str) -> tuple[tuple[int, ...], pa.Array]:
    pa = require_pyarrow()
    shape, values = node.shape, node.values
    masks.check(shape)
    if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.ndim != 1:
        raise TypeError(f"{where}: the bytes of Strings are uint8, one dimension, not {_described(values)}")
    kind = pa.large_binary() if node.binary else pa.large_string()
    entries = math.prod(shape)
    offsets = _offsets(node.offsets, where)
    if len(offsets) != entries + 1:
        raise ValueError(f"{where}: {entries} strings have {entries + 1} offsets, not {len(offsets)}")
    return shape, _from_buffers(kind, entries, [masks.bitmap(len(shape)), _buffer(offsets), _buffer(values)])


def _ragged(node: Ragged, masks: _Masks, where: str) -> tuple[tuple[int], pa.Array]:
    offsets = _offsets(node.offsets, where)
    rows = len(offsets) - 1
    masks.check((rows,))
    return (rows,), _lists(offsets, _array(node.values, where), masks.bitmap(1))


def _sparse(node: Sparse | SparseCSR, masks: _Masks, where: str) -> tuple[tuple[int], pa.Array]:
    """A struct with a list for each dimension, and one for the values; all have the same offsets."""
    pa = require_pyarrow()
    indices: Any = node.indices  # Users may give anything.
    if not isinstance(indices, np.ndarray) or indices.dtype.kind not in "iu" or indices.ndim not in (1, 2):
        raise TypeError(f"{where}: sparse indices are integers, one row an entry, not {_described(indices)}")
    if isinstance(node, SparseCSR):
        offsets = _offsets(node.offsets, where)
        dimensions = [indices] if indices.ndim == 1 else list(indices.T)
    elif indices.ndim == 2 and indices.shape[1] > 1:
        offsets = _row_offsets(indices[:, 0], len(node), where)
        dimensions = list(indices.T[1:])
    else:
        raise ValueError(f"{where}: sparse indices are the row and an index in each dimension, not {indices.shape}")
    rows = len(offsets) - 1
    masks.check((rows,))
    parts = {f"indices{i}": _array(np.asarray(index, np.int64), where) for i, index in enumerate(dimensions)}
    parts["values"] = _array(node.values, where)
    if len(parts["values"]) != len(indices):
        raise ValueError(f"{where} has {len(indices)} sparse indices, but {len(parts['values'])} values")
    lists = {name: _lists(offsets, part) for name, part in parts.items()}
    kind = pa.struct([(name, part.type) for name, part in lists.items()])
    return (rows,), _from_buffers(kind, rows, [masks.bitmap(1)], list(lists.values()))


def _row_offsets(of: np.ndarray, rows: int, where: str) -> np.ndarray:
    """Where each row begins and ends among entries of which each says its row."""
    # Every look at it is faster where it is in one piece.
    of = np.ascontiguousarray(of)
    if len(of) and not (of[0] >= 0 and of[-1] < rows and np.all(of[:-1] <= of[1:])):
        raise ValueError(f"{where}: sparse entries are in the order of their rows, 0 to {rows - 1}")
    return np.searchsorted(of, np.arange(rows + 1)).astype(np.int64, copy=False)


def _lists(offsets: np.ndarray, items: pa.Array, bitmap: pa.Buffer | None = None) -> pa.Array:
    kind = require_pyarrow().large_list(items.type)
    return _from_buffers(kind, len(offsets) - 1, [bitmap, _buffer(offsets)], [items])


def _offsets(offsets: Any, where: str) -> np.ndarray:
    """Offsets as Arrow has them. Their order is checked with all the rest."""
    if not isinstance(offsets, np.ndarray) or offsets.dtype.kind not in "iu" or offsets.ndim != 1:
        raise TypeError(f"{where}: offsets are integers, one dimension, not {_described(offsets)}")
    if not len(offsets):
        raise ValueError(f"{where}: offsets have one entry more than there are rows, and these have none")
    return np.asarray(offsets, np.int64)


def _from_buffers(
    kind: pa.DataType, length: int, buffers: list[pa.Buffer | None], children: list[pa.Array] | None = None
) -> pa.Array:
    return require_pyarrow().Array.from_buffers(kind, length, buffers, children=children)


def _buffer(array: np.ndarray) -> pa.Buffer:
    """A buffer over an array's memory, or over a copy if that isn't in one piece."""
    return require_pyarrow().py_buffer(np.ascontiguousarray(array))


def _described(node: Any) -> str:
    if isinstance(node, np.ndarray):
        return f"{node.dtype}[{', '.join(map(str, node.shape))}]"
    return shown(node)


class Capsules:
    """A batch for whoever takes Arrow data."""

    def __init__(self, capsules: tuple[object, object]) -> None:
        self._capsules = capsules

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        return self._capsules


class ArrowStreams:
    """The streams of a reader: each starts a pass.

    Args:
        features: of its batches.
        padded: whether these have the column `valid`.
        schema: makes their Arrow schema of `padded` and its metadata.
        start: starts a pass with sparse columns as CSR.
        counter: makes the progress bar of a pass, if there is one.
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
        """Starts a pass, the batches of which pyarrow reads. What is raised in it is raised as it is.

        Raises:
            ImportError: if pyarrow isn't installed.
            ValueError: if Arrow has no such name or size.
        """
        pyarrow = require_pyarrow()
        schema = schema_of(self._features, valid=self._padded)

        def record_batch(capsules: tuple[object, object]) -> pa.RecordBatch:
            return pyarrow.record_batch(Capsules(capsules))

        # No generator: its frame would hold a batch while the next one is made, and fill the messages of errors with a
        # traceback.
        batches: Iterator[pa.RecordBatch] = map(record_batch, self._started())
        return pyarrow.RecordBatchReader.from_batches(schema, batches)

    def batches(self) -> Iterator[Capsules]:
        """Starts a pass, the batches of which have `__arrow_c_array__`. What is raised in it is raised as it is.

        Raises:
            ValueError: if Arrow has no such name or size.
        """
        return map(Capsules, self._started())

    def stream_capsule(self) -> object:
        """Starts a pass, and makes it a stream of Arrow's C interface.

        Raises:
            ValueError: if Arrow has no such name or size.
        """
        return self._started().stream()

    def schema_capsule(self) -> object:
        """The schema of such a stream.

        Raises:
            ValueError: if Arrow has no such name or size.
        """
        return self._schema(self._padded, metadata_of(self._features))

    def _started(self) -> ArrowBatches:
        metadata = metadata_of(self._features)
        nan_is_null = {name for name, spec in self._features.items() if spec._nan_is_null}
        started = self._start()
        return ArrowBatches(started, metadata, nan_is_null, self._counter(started))
