"""Readers as Arrow streams.

The extension makes record batches of what a pass yields, over its memory, and hands them out through Arrow's C data
interface: so only who wants objects of pyarrow's needs pyarrow. Sparse columns are read as `SparseCSR`, whatever the
layout of the reader's batches: that is how Arrow lays them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastpipe import _fastpipe
from fastpipe._columns.arrow_schema import metadata_of, require_pyarrow, schema_of
from fastpipe._progress import Counter

if TYPE_CHECKING:
    import pyarrow as pa

    from fastpipe.reader import Reader

__all__ = ["record_batches", "schema_capsule", "stream_capsule"]


class _Capsules:
    """A batch for whoever takes Arrow data."""

    def __init__(self, capsules: tuple[object, object]) -> None:
        self._capsules = capsules

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        return self._capsules


def record_batches(reader: Reader) -> pa.RecordBatchReader:
    """Starts a pass of a reader, the batches of which pyarrow reads. What is raised in it is raised as it is.

    Raises:
        ImportError: if pyarrow isn't installed.
        ValueError: if Arrow has no such name or size.
    """
    pyarrow = require_pyarrow()
    schema = schema_of(reader.features, valid=_padded(reader))

    def record_batch(capsules: tuple[object, object]) -> pa.RecordBatch:
        return pyarrow.record_batch(_Capsules(capsules))

    # No generator: its frame would hold a batch while the next one is made, and fill the messages of errors with a
    # traceback.
    batches: Iterator[pa.RecordBatch] = map(record_batch, _started(reader))
    return pyarrow.RecordBatchReader.from_batches(schema, batches)


def stream_capsule(reader: Reader) -> object:
    """Starts a pass of a reader, and makes it a stream of Arrow's C interface.

    Raises:
        ValueError: if Arrow has no such name or size.
    """
    return _started(reader).stream()


def schema_capsule(reader: Reader) -> object:
    """The schema of such a stream.

    Raises:
        ValueError: if Arrow has no such name or size.
    """
    return reader._data.handle.arrow_schema(_padded(reader), metadata_of(reader.features))


def _started(reader: Reader) -> _fastpipe.ArrowBatches:
    metadata = metadata_of(reader.features)
    started = reader._start(csr=True)
    counter = Counter(total=started.total, batch_size=reader.batch_size) if reader._progress else None
    return _fastpipe.ArrowBatches(started, metadata, counter)


def _padded(reader: Reader) -> bool:
    """Whether its batches have the column `valid`."""
    return reader._ordering.uneven == "pad"
