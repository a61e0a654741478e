"""Writes TFRecord files."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from fastpipe._arguments import flag
from fastpipe._fastpipe import TfRecordWriter
from fastpipe._files._atomic_write import replacing
from fastpipe._files._written_rows import bar_of, parts_of
from fastpipe._local_path import local


class WrittenRecords(NamedTuple):
    """Result of `write_tfrecord`.

    Attributes:
        rows: Number of records that were written.
        size: Number of bytes.
    """

    rows: int
    size: int


def write_tfrecord(path: str | os.PathLike[str], data: Any, *, progress: bool = False) -> WrittenRecords:
    """Writes batches, Arrow data, or the batches of a reader to a TFRecord file of `tf.train.Example` messages.

    TensorFlow isn't needed. Data is written as it arrives; only one batch is held in memory. The file appears once it
    is complete and synced to disk. Until then, and after an error or Ctrl-C, `path` keeps its old content.

    | column | feature |
    |---|---|
    | integers, bools | `int64_list` |
    | floats | `float_list` of float32, which rounds float64 |
    | text, bytes | `bytes_list` |
    | ragged rows, fixed shapes | one list of all values, without the shape |
    | structs and sparse columns | a feature for each field: `name.indices0`, `name.values` |
    | null | the Example lacks the feature |

    Args:
        path: The path of the file. An existing file is replaced. The file isn't compressed.
        data: A batch (a dict from name to array or form), a `Reader`, an object with `__arrow_c_stream__` or
            `__arrow_c_array__` (such as tables and record batches of pyarrow or data frames of polars), or an iterable
            of these. Each item may have other columns.
        progress: Whether to show a progress bar, which requires the extra `progress`. Defaults to False.

    Returns:
        The counts of rows and bytes that were written.

    Raises:
        UnsupportedError: If an Example can't hold a column: times, decimals, and lists within lists.
        ValueRangeError: If an integer exceeds int64, or a finite float exceeds float32.
        NullValueError: If an item of a list is null.
        MalformedFileError: If Arrow data is inconsistent.
        MissingFileError: If the directory does not exist.
        StorageError: If the disk is full, permission is missing, or a stream fails.
        LimitError: If a record exceeds 2 GiB.
        ImportError: If `progress` is True and tqdm isn't installed.
        TypeError: If an argument has the wrong type.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label", "clicked_items"], batch_size=1024)
        >>> fastpipe.tfrecord.write_tfrecord("clicked.tfrecord", reader).rows
        6144
    """
    target = local(path, "path must be a path")
    given, showing = parts_of(data), flag("progress", progress)
    with bar_of(data, showing) as bar, replacing(target) as temporary:
        writer = TfRecordWriter(temporary, shown=target)
        try:
            for rows, _, declared in given:
                if declared is None:
                    writer.write(rows, None if bar is None else bar.update)
                del rows  # Releases it before the next item is drawn.
            written, size = writer.finish()
        finally:
            writer.close()
        if bar is not None:
            bar.total = bar.n
    return WrittenRecords(written, size)
