"""Readers as Arrow streams.

The extension makes record batches of what a pass yields, over its memory, and hands them out through Arrow's C data
interface: so only who wants objects of pyarrow's needs pyarrow. Sparse columns are read as `SparseCSR`, whatever the
layout of the reader's batches: that is how Arrow lays them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fastpipe._arrow.schema import metadata_of, require_pyarrow, schema_of
from fastpipe._fastpipe import ArrowBatches, Pass

if TYPE_CHECKING:
    import pyarrow as pa

    from fastpipe._progress import Counter
    from fastpipe.specs import Features

__all__ = ["ArrowStreams", "Capsules"]


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
