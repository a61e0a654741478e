"""In the place of tensorflow-io's AvroTensorDataset (`ATDSDataset`), with any TensorFlow from 2.16 on.

    from fastpipe.tf.atds import ATDSDataset, DenseFeature, SparseFeature, VarlenFeature

The same arguments give the same tensors; what this one does besides is asked for by keyword. Damaged files, which
that one reads to an early end or to the end of the process, fail the `next` here. Messages of errors have that one's
words in them, since programs look for those, and then say more.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from fastpipe._fastpipe import Pass
from fastpipe._ordering import LARGEST_BATCH, Ordering
from fastpipe._running import Running
from fastpipe.reader import Reader
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec, Spec
from fastpipe.tf._atds_features import ATDS_SUPPORTED_DTYPES, DenseFeature, Feature, SparseFeature, VarlenFeature
from fastpipe.tf._atds_files import OpenedFiles
from fastpipe.tf._atds_schema import check
from fastpipe.tf._forms import Array, Coordinates, Node
from fastpipe.tf._passes import Layout, from_passes, unconverted

__all__ = [
    "ATDS_SUPPORTED_DTYPES",
    "ATDSDataset",
    "ArgumentTypeError",
    "DenseFeature",
    "SparseFeature",
    "VarlenFeature",
]

_FEATURES = (DenseFeature, SparseFeature, VarlenFeature)


class ArgumentTypeError(TypeError, ValueError):
    """An argument of the wrong type, for which tensorflow-io raises now the one and now the other."""


@unconverted
def ATDSDataset(
    filenames: Any,
    batch_size: Any,
    features: dict[str, Feature],
    drop_remainder: Any = False,
    reader_buffer_size: Any = None,
    shuffle_buffer_size: Any = None,
    num_parallel_calls: Any = None,
    *,
    seed: int | None = None,
    fill: Mapping[str, bool | int | float | str | bytes] | None = None,
) -> tf.data.Dataset:
    """A dataset of the batches of Avro files.

    Elements are dicts, sorted by key: a Tensor `[rows, *shape]` for a `DenseFeature`, a SparseTensor for others.
    Batches cross files, which may differ in codec, in the order of their fields and in fields that aren't asked for.
    Files are opened at the start of the first iteration; what was found out about the last four sets of them is kept,
    with the memory of their batches, until one of them changes.

    Args:
        filenames: tf.string, a scalar or a vector; symbolic ones too, so that it can be built in `interleave`.
        batch_size: rows a batch, at least 1.
        features: by name of a field of the records.
        drop_remainder: whether to leave out a last batch of fewer rows.
        reader_buffer_size: checked, and not needed: fastpipe reads whole blocks. At least 1.
        shuffle_buffer_size: records to draw from besides those of the batch, block by block (`shuffle="block"` of
            `read_avro`); 0, the default, doesn't shuffle. Each iteration has another order.
        num_parallel_calls: threads; `tf.data.AUTOTUNE`: as many as pay. 1 by default. Changes nothing of what is
            yielded.
        seed: of the shuffling, 0 to 2^64 - 1; the same one gives the same orders. One is drawn by default.
        fill: by name of a feature, the value that stands for nulls, which are errors otherwise.

    Raises:
        ValueError: for `features` that is no dict, or is empty; for a value that isn't a tensor's.
        ArgumentTypeError: for values of the wrong type. It is a TypeError and a ValueError.
        tf.errors.InvalidArgumentError: for numbers out of range and wrong shapes.

    The `next` that meets it fails with `tf.errors.NotFoundError` for a file that isn't there, with
    `tf.errors.InvalidArgumentError` for features that a schema lacks or has otherwise, and for damage to files, and
    with `tf.errors.UnknownError` where storage fails. With symbolic arguments it is so for these as well.
    """
    if not isinstance(features, dict):
        raise ValueError(
            "Features can only be a dict with feature name as key and ATDS feature configuration as value but found "
            f"{features}. Available feature configuration are {_FEATURES}."
        )
    if not features:
        raise ValueError("Features dict cannot be empty and should have at least one feature.")
    for name, feature in features.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"the name of a feature is a string, not {name!r}")
        if not isinstance(feature, _FEATURES):
            raise ValueError(
                f"Unknown ATDS feature configuration {feature}. Only {_FEATURES} are supported. It is feature {name!r}."
            )
    fills = dict(fill or {})
    if unknown := sorted(fills.keys() - features.keys()):
        raise ValueError(f"fill names {unknown}, which features doesn't")
    files = _tensor("filenames", filenames, tf.string)
    if files.shape.rank not in (None, 0, 1):
        raise _invalid(f"`filenames` must be a scalar or a vector. Its shape is {files.shape}.")
    numbers = [
        _scalar("batch_size", batch_size, tf.int64),
        _scalar("drop_remainder", False if drop_remainder is None else drop_remainder, tf.bool),
        _scalar("reader_buffer_size", 131072 if reader_buffer_size is None else reader_buffer_size, tf.int64),
        _scalar("shuffle_buffer_size", 0 if shuffle_buffer_size is None else shuffle_buffer_size, tf.int64),
        _scalar("num_parallel_calls", 1 if num_parallel_calls is None else num_parallel_calls, tf.int64),
    ]
    known = [tf.get_static_value(number) for number in numbers]
    if (problem := _out_of_range(*known)) is not None:
        raise _invalid(problem)
    source = _Source(features, fills, seed)
    rows = int(known[0]) if known[1] and known[0] is not None else None
    layout = Layout({name: _node(feature) for name, feature in features.items()}, rows)
    shapes = {name: _shape_text(feature) for name, feature in features.items()}
    return from_passes(source.start, [files, *numbers], layout, shapes)


class _Source:
    """Makes the passes of a dataset."""

    def __init__(self, features: dict[str, Feature], fills: Mapping[str, Any], seed: int | None) -> None:
        specs = Features({name: _spec(feature, fills.get(name)) for name, feature in features.items()})
        self._files = OpenedFiles(specs, lambda path, schema: check(path, schema, features))
        self._seed = secrets.randbits(48) if seed is None else seed
        self._begun: Counter[tuple[str, ...]] = Counter()
        self._lock = threading.Lock()

    def start(
        self,
        filenames: list[bytes],
        batch_size: int,
        drop_remainder: bool,
        buffer_size: int,
        shuffle: int,
        threads: int,
    ) -> Pass:
        """A pass over these files, in an order of its own if it is shuffled."""
        problem = _out_of_range(batch_size, drop_remainder, buffer_size, shuffle, threads)
        if problem is not None:
            raise ValueError(problem)
        paths = tuple(os.fsdecode(name) for name in filenames)
        if not paths:
            raise ValueError("filenames is empty: name at least one file")
        data = self._files.open(paths)
        with self._lock:
            epoch = self._begun[paths]
            self._begun[paths] += 1
        ordering = Ordering.checked(
            batch_size=min(batch_size, LARGEST_BATCH),
            drop_last=drop_remainder,
            shuffle="block" if shuffle else False,
            shuffle_buffer=min(shuffle + batch_size, LARGEST_BATCH) if shuffle else None,
            seed=self._seed,
        )
        running = Running.checked(
            num_threads="auto" if threads < 0 else min(threads, _MOST_THREADS), prefetch=None, memory_limit=None
        )
        # A reader has one pass; iterations of a dataset may overlap.
        reader = Reader(data, ordering=ordering, running=running, progress=False, epochs=1)
        reader.set_epoch(epoch)
        return reader._start()


_MOST_THREADS = 4096


def _node(feature: Feature) -> Node:
    shape = tuple(None if size == -1 else size for size in feature.shape)
    if isinstance(feature, DenseFeature):
        return Array(tf.as_dtype(feature.dtype), shape)
    return Coordinates(Array(tf.as_dtype(feature.dtype), ()), shape, nested=isinstance(feature, VarlenFeature))


def _shape_text(feature: Feature) -> str:
    return "[" + ",".join("?" if size == -1 else str(size) for size in feature.shape) + "]"


def _spec(feature: Feature, fill: Any) -> Spec:
    shape = tuple(None if size == -1 else int(size) for size in feature.shape)
    dtype = "bytes" if feature.dtype == tf.string else tf.as_dtype(feature.dtype).name
    if dtype == "bytes" and isinstance(fill, str):
        fill = fill.encode()
    if isinstance(feature, SparseFeature):
        return SparseSpec(shape, dtype, fill=fill, check_indices=False)
    if None in shape:
        return RaggedSpec(shape, dtype, fill=fill)
    return DenseSpec(shape, dtype, fill=fill)


def _tensor(name: str, value: Any, dtype: tf.DType) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(value, dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name} is of dtype {dtype.name}, not {value!r}: {error}") from None


def _scalar(name: str, value: Any, dtype: tf.DType) -> tf.Tensor:
    tensor = _tensor(name, value, dtype)
    if tensor.shape.rank not in (None, 0):
        raise _invalid(f"{name} must be a scalar. Its shape is {tensor.shape}.")
    return tensor


def _out_of_range(batch_size: Any, drop_remainder: Any, buffer_size: Any, shuffle: Any, threads: Any) -> str | None:
    """What is wrong with the numbers that are known."""
    if batch_size is not None and batch_size < 1:
        return f"`batch_size` must be greater than 0 but found {batch_size}"
    if buffer_size is not None and buffer_size < 1:
        return f"`reader_buffer_size` must be greater than 0 but found {buffer_size}"
    if shuffle is not None and shuffle < 0:
        return f"`shuffle_buffer_size` must be greater than or equal to 0 but found {shuffle}"
    if threads is not None and threads < 1 and threads != tf.data.AUTOTUNE:
        return f"`num_parallel_calls` must be a positive integer or tf.data.AUTOTUNE, got {threads}"
    return None


def _invalid(message: str) -> tf.errors.InvalidArgumentError:
    return tf.errors.InvalidArgumentError(None, None, message)
