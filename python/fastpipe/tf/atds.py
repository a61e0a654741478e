"""A replacement for tensorflow-io's AvroTensorDataset (`ATDSDataset`) for any TensorFlow from 2.16 on.

    from fastpipe.tf.atds import ATDSDataset, DenseFeature, SparseFeature, VarlenFeature

The same arguments return the same tensors. Additional options are keyword-only. Damaged files raise an error in `next`
here, whereas tensorflow-io ends early or crashes the process. Error messages begin with the words of tensorflow-io,
since programs search for them, and then add details.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from fastpipe._fastpipe import Pass
from fastpipe._reader.ordering import LARGEST_BATCH, Ordering
from fastpipe._reader.pass_options import PassOptions, available_processors
from fastpipe._reader.reader import Reader
from fastpipe.errors import MissingFileError, SchemaError
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec, Spec
from fastpipe.tf._atds_schema import (
    ATDS_SUPPORTED_DTYPES,
    Copies,
    DenseFeature,
    Feature,
    OpenedFiles,
    SparseFeature,
    VarlenFeature,
    check,
)
from fastpipe.tf._forms import Array, Coordinates, Node
from fastpipe.tf._passes import Layout, Source, Told, from_passes, keep, restorers, unconverted

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
    """Raised for arguments of the wrong type, for which tensorflow-io raises TypeError or ValueError."""


class ATDSDataset(tf.data.Dataset):  # type: ignore[misc]  # TensorFlow has no types.
    """A dataset of the batches of Avro files.

    Elements are dicts, sorted by key, with a Tensor `[rows, *shape]` for a `DenseFeature` and a SparseTensor for other
    features. Batches can span files. The files may differ in codec, in the order of their fields and in fields that
    aren't requested. Files are opened at the start of the first iteration. The indexes of the last four sets of files
    are kept, with the memory of their batches, until a file changes.

    Args:
        filenames: Scalar or vector of dtype tf.string. It may be symbolic, so the dataset can be built in `interleave`.
            For a `tf.data.Dataset` of names, pass `list(filenames.as_numpy_iterator())`, since tensorflow-io rejects it
            as well. Object stores and web servers (`s3://`, `gs://`, `az://`, `https://`) are read by range. Files on
            TensorFlow's other file systems (`hdfs://`) are copied to a temporary folder first.
        batch_size: Number of rows per batch, at least 1.
        features: Features to read, by the name of the field.
        drop_remainder: Whether to drop a last batch with fewer rows. Defaults to False.
        reader_buffer_size: Number of bytes, at least 1. It is checked, but has no effect: blocks are read as a whole,
            and more read-ahead doesn't make local files faster. Defaults to 131072.
        shuffle_buffer_size: Number of records to draw from in addition to those of the batch, block by block (as with
            `shuffle="block"` of `read_avro`). Each iteration has another order. Defaults to 0, which doesn't shuffle.
        num_parallel_calls: Number of threads, at most the number of processors that the process may use: larger
            numbers mean this number. `tf.data.AUTOTUNE` uses as many threads as improve throughput. The order of the
            rows doesn't depend on it. Defaults to 1.
        seed: Seed of the shuffle, 0 to 2^64 - 1. The same seed gives the same orders. Defaults to a random seed.
        fill: Values that replace nulls, by the name of the feature. Other nulls raise errors.

    Raises:
        ValueError: If `features` isn't a dict or is empty, or an argument can't be converted to a tensor.
        ArgumentTypeError: If an argument has the wrong type. It is a TypeError and a ValueError.
            tf.errors.InvalidArgumentError: If a number is out of range or a shape is wrong.

    An error while reading fails the `next` that encounters it. A missing file raises `tf.errors.NotFoundError`.
    Features that don't match a schema, and damaged files, raise `tf.errors.InvalidArgumentError`. A storage failure
    raises `tf.errors.UnknownError`. Invalid symbolic arguments also raise in `next`.

    Iteration continues after damage, as `ignore_errors` requires. A record that can't be read loses the rest of its
    block, and the remaining rows are divided into batches again. A file that is truncated or has a wrong sync marker
    fails the first `next`, and its blocks before the damage are read after that. Other errors end the iteration.
    """

    @unconverted
    def __init__(
        self,
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
    ) -> None:
        _check_features(features)
        fills = dict(fill or {})
        if unknown := sorted(fills.keys() - features.keys()):
            raise ValueError(f"fill names {unknown}, which aren't in features")
        if isinstance(filenames, tf.data.Dataset):
            raise ArgumentTypeError(
                f"Attempt to convert a value ({filenames!r}) with an unsupported type ({type(filenames)}) to a Tensor. "
                "filenames must be a scalar or a vector of strings: pass list(filenames.as_numpy_iterator()), or build "
                "the dataset of each file in filenames.flat_map"
            )
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
        rows = int(known[0]) if known[1] and known[0] is not None else None
        source = _Source(features, fills, seed, rows=rows)
        self._element_spec = source.layout.element_spec
        super().__init__(from_passes(source, [files, *numbers]))
        keep(self, source)

    def _inputs(self) -> list[tf.data.Dataset]:
        return []

    @property
    def element_spec(self) -> dict[str, tf.TypeSpec]:
        """The spec of each feature's tensor."""
        return self._element_spec


def _check_features(features: Any) -> None:
    if not isinstance(features, dict):
        raise ValueError(
            "Features can only be a dict with feature name as key and ATDS feature configuration as value but found "
            f"{features}. Available feature configuration are {_FEATURES}."
        )
    if not features:
        raise ValueError("Features dict cannot be empty and should have at least one feature.")
    for name, feature in features.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"the name of a feature must be a string; got {name!r}")
        if not isinstance(feature, _FEATURES):
            raise ValueError(
                f"Unknown ATDS feature configuration {feature}. Only {_FEATURES} are supported. It is feature {name!r}."
            )


class _OutOfRangeError(ValueError):
    """Raised if a symbolic argument is out of range."""


class _Source(Source):
    """Starts the passes of a dataset.

    It can be recreated from its description, because graphs outlive the function that built a dataset in them.
    """

    skips = True

    def __init__(
        self,
        features: dict[str, Feature],
        fills: dict[str, Any],
        seed: int | None,
        *,
        number: int | None = None,
        rows: int | None = None,
    ) -> None:
        super().__init__(Layout({name: _node(feature) for name, feature in features.items()}, rows), number)
        specs = Features({name: _spec(feature, fills.get(name)) for name, feature in features.items()})
        self.shapes = {name: _shape_text(feature) for name, feature in features.items()}
        self._files = OpenedFiles(specs, lambda path, schema: check(path, schema, features))
        self._copies = Copies()
        self._seed = secrets.randbits(48) if seed is None else seed
        self.description = _described(features, fills, self._seed, self.number)

    def start(self, *arguments: Any) -> tuple[Pass | None, list[Told]]:
        """Starts a pass over some files. If it is shuffled, each pass has its own order."""
        try:
            started, errors = self._start(*arguments)
        except MissingFileError as error:
            started, errors = None, [(error, f"{error.path}; No such file or directory")]
        except (SchemaError, NotImplementedError, _OutOfRangeError) as error:
            started, errors = None, [(error, str(error))]
        return started, [(error, self._copies.named(told)) for error, told in errors]

    def _start(
        self,
        filenames: list[bytes],
        batch_size: int,
        drop_remainder: bool,
        buffer_size: int,
        shuffle: int,
        threads: int,
    ) -> tuple[Pass | None, list[Told]]:
        problem = _out_of_range(batch_size, drop_remainder, buffer_size, shuffle, threads)
        if problem is not None:
            raise _OutOfRangeError(problem)
        paths = tuple(os.fsdecode(name) for name in filenames)
        if not paths:
            raise _OutOfRangeError("filenames is empty: pass at least one file")
        local = tuple(map(self._copies.local, paths))
        data, errors = self._files.open(local)
        damaged = [(error, f"{type(error).__name__}: {error}") for error in errors]
        if not data.handle.num_rows:
            return None, damaged
        ordering = Ordering.checked(
            batch_size=min(batch_size, LARGEST_BATCH),
            drop_last=drop_remainder,
            shuffle="block" if shuffle else False,
            shuffle_buffer=min(shuffle + batch_size, LARGEST_BATCH) if shuffle else None,
            seed=self._seed,
        )
        threads = min(threads, available_processors())
        running = PassOptions.checked(num_threads="auto" if threads < 0 else threads, prefetch=None, memory_limit=None)
        # A reader has one pass at a time, but iterations of a dataset may overlap.
        reader = Reader._of(data, ordering=ordering, running=running, progress=False, epochs=1)
        reader.set_epoch(_next_epoch(self.number, paths))
        return reader._passes.start_in_engine(), damaged


_begun: OrderedDict[tuple[int, tuple[str, ...]], int] = OrderedDict()
"""Number of passes that a dataset has started over a set of files, for the most recent sets.

After thousands of other sets, the orders of a dropped set repeat.
"""
_begun_lock = threading.Lock()
_MOST_BEGUN = 10_000


def _next_epoch(number: int, paths: tuple[str, ...]) -> int:
    with _begun_lock:
        epoch = _begun.pop((number, paths), 0)
        _begun[number, paths] = epoch + 1
        while len(_begun) > _MOST_BEGUN:
            _begun.popitem(last=False)
    return epoch


def _described(features: Mapping[str, Feature], fills: Mapping[str, Any], seed: int, number: int) -> bytes:
    kinds = {
        name: [type(feature).__name__, [int(size) for size in feature.shape], tf.as_dtype(feature.dtype).name]
        for name, feature in features.items()
    }
    filled = {}
    for name, fill in fills.items():
        value = fill.item() if isinstance(fill, np.generic) else fill
        filled[name] = {"bytes": value.decode("latin-1")} if isinstance(value, bytes) else value
    return _WORD + b" " + json.dumps([kinds, filled, seed, number]).encode()


@functools.lru_cache(maxsize=4)
def _restored(description: bytes) -> _Source:
    """Returns the source of a dataset whose Python object no longer exists."""
    kinds, filled, seed, number = json.loads(description.partition(b" ")[2])
    by_name = {kind.__name__: kind for kind in _FEATURES}
    features = {name: by_name[kind](shape, tf.as_dtype(dtype)) for name, (kind, shape, dtype) in kinds.items()}
    fills = {name: fill["bytes"].encode("latin-1") if isinstance(fill, dict) else fill for name, fill in filled.items()}
    return _Source(features, fills, seed, number=number)


_WORD = b"atds"
restorers[_WORD] = _restored


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
        raise ArgumentTypeError(f"{error} ({name} must have dtype {dtype.name}; got {value!r})") from None


def _scalar(name: str, value: Any, dtype: tf.DType) -> tf.Tensor:
    tensor = _tensor(name, value, dtype)
    if tensor.shape.rank not in (None, 0):
        raise _invalid(f"{name} must be a scalar. Its shape is {tensor.shape}.")
    return tensor


def _out_of_range(batch_size: Any, drop_remainder: Any, buffer_size: Any, shuffle: Any, threads: Any) -> str | None:
    """Returns an error message if a known number is out of range."""
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
