"""The rows that functions such as `write_avro` write: batches, readers and Arrow data, one after another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias

import numpy as np

from fastpipe._arguments import imported, shown
from fastpipe._arrow.export import table_of
from fastpipe._progress import progress_bar
from fastpipe._reader.reader import Reader
from fastpipe._reader.reader_passes import arrow_streams
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR
from fastpipe.specs import SparseSpec, Spec

# Arrow data; the columns (and fields of columns) without nulls; and, instead of data, an object with its schema.
Part: TypeAlias = tuple[Any, list[str], Any]


def parts_of(data: Any) -> Iterator[Part]:
    """Returns an iterator over the data. Raises an error immediately if the data has the wrong type."""
    if isinstance(data, Reader):
        return _of_reader(data)
    if isinstance(data, Mapping) or _is_arrow(data):
        return _of_item(data, "data")
    if isinstance(data, Iterable) and not isinstance(
        data, (str, bytes, bytearray, memoryview, np.ndarray, os.PathLike)
    ):
        return _of_process(_of_items(data), os.getpid())
    kinds = "a batch, a Reader, Arrow data, or an iterable of these"
    hint = ": collect() it first" if hasattr(data, "collect") else ""
    raise TypeError(f"data must be {kinds}; got {shown(data)}{hint}")


def _is_arrow(data: Any) -> bool:
    return hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")


def _of_reader(reader: Reader) -> Iterator[Part]:
    required = [path for name, spec in reader.features.items() for path in _without_nulls(name, spec)]
    yield None, required, reader
    for batch in arrow_streams(reader).batches():
        yield batch, required, None


def _of_process(parts: Iterator[Part], process: int) -> Iterator[Part]:
    """Yields parts in one process only: a forked child that goes through the rest would write it to the same file."""
    for part in parts:
        _check_process(process)
        yield part
    _check_process(process)


def _check_process(process: int) -> None:
    if os.getpid() != process:
        raise RuntimeError(
            "this process was forked while its parent wrote a file, which only the parent can complete: end the child, "
            "or write another file in it"
        )


def _of_items(items: Iterable[Any]) -> Iterator[Part]:
    for number, item in enumerate(items):
        yield from _of_item(item, f"item {number} of data")


def _of_item(item: Any, what: str) -> Iterator[Part]:
    if isinstance(item, Mapping):
        # Rows can't be counted in an empty record batch, which has no columns.
        if not item:
            raise ValueError(f"{what} is a batch without columns")
        yield table_of(item), [name for name, form in item.items() if not _may_be_null(form)], None
    elif isinstance(item, Reader):
        yield from _of_reader(item)
    elif (pa := imported("pyarrow")) is not None and isinstance(item, pa.RecordBatchReader):
        # The batches may come from Python code. Through the C interface, its exceptions would turn into plain text.
        yield None, [], item.schema
        for batch in item:
            yield batch, [], None
    elif _is_arrow(item):
        yield item, [], None
    else:
        raise TypeError(f"{what} must be a batch (dict from name to array) or Arrow data; got {shown(item)}")


def _without_nulls(name: str, spec: Spec) -> list[str]:
    """Returns the column of a feature if its Arrow data has no nulls, otherwise the column's fields without nulls."""
    # Arrow data has nulls in place of NaT, and in place of NaN if NaN stands for null.
    whole = not spec._nan_is_null and not spec.dtype.startswith(("datetime64", "timedelta64"))
    if whole and spec.on_null != "mask":
        return [name]
    if not isinstance(spec, SparseSpec):
        return []
    # A mask marks the null rows of sparse features. Their values are never null.
    return [f"{name}.indices{i}" for i in range(len(spec.shape))] + [f"{name}.values"] * whole


def _may_be_null(form: Any) -> bool:
    if isinstance(form, Masked):
        return True
    if isinstance(form, (Ragged, Sparse, SparseCSR)):
        return _may_be_null(form.values)
    return isinstance(form, np.ndarray) and form.dtype.kind in "mM"


def bar_of(data: Any, showing: bool) -> Any:
    """Returns a progress bar over the rows, or a context manager of None."""
    if not showing:
        return nullcontext()
    total: int | None = None
    if isinstance(data, Reader):
        with suppress(TypeError):  # The reader may be endless.
            total = len(data) * data.batch_size
    elif not isinstance(data, Mapping):
        rows = getattr(data, "num_rows", getattr(data, "height", None))
        total = rows if isinstance(rows, int) else None
    return progress_bar(total)
