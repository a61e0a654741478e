"""Replacements of tensorflow-io's `make_avro_record_dataset` and `AvroRecordDataset`.

`make_avro_record_dataset` reads batches with `read_avro`. It doesn't parse records one by one, as tensorflow-io does.
tensorflow-io repeats the data before it makes batches, so a batch can contain the end of an epoch and the beginning of
the next one. A `scan` joins these rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from fastpipe._arguments import flag, shown, within
from fastpipe._fastpipe import Pass
from fastpipe._files._paths import expand
from fastpipe._reader.ordering import LARGEST_BATCH
from fastpipe._reader.pass_options import available_processors
from fastpipe._reader.reader import Reader
from fastpipe.avro import AvroFile, read_avro
from fastpipe.avro._encoded import encoded_records
from fastpipe.errors import UnsupportedError, in_file
from fastpipe.specs import Spec
from fastpipe.tf._dataset import dataset
from fastpipe.tf._features import Wanted
from fastpipe.tf._forms import Array
from fastpipe.tf._passes import Layout, Source, Told, from_passes, keep, unconverted

# tensorflow-io's default.
_SHUFFLE_BUFFER = 10_000


@unconverted
def make_avro_record_dataset(
    file_pattern: Any,
    features: Mapping[str, Any],
    batch_size: int,
    reader_schema: Any = None,
    reader_buffer_size: int | None = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int | None = None,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int = tf.data.AUTOTUNE,
    num_parallel_reads: int | None = None,
    drop_final_batch: bool = False,
) -> tf.data.Dataset:
    """Returns a `tf.data.Dataset` of the batches of Avro files, as tensorflow-io's function of this name does.

    The files are opened immediately, and read with `read_avro`. Each iteration has another order if the rows are
    shuffled, and a further iteration closes the previous one, as in `dataset`, which divides the rows among the workers
    of TF_CONFIG. A batch can contain the last rows of an epoch and the first ones of the next epoch, so that only the
    last batch of all epochs is smaller.

    Args:
        file_pattern: A path, a glob or a directory, or a list or a string tensor of these. The files are read in the
            order of their paths.
        features: Features to read, by name: the path of a field, in which `[*]` means all items of an array. The values
            are `tf.io.FixedLenFeature`, `VarLenFeature`, `SparseFeature` and `RaggedFeature`, and tensorflow-io's
            `VarLenFeatureWithRank`, as in `parse_avro`.
        batch_size: Number of rows per batch, 1 to 2^31 - 1.
        reader_schema: A schema to which the schemas of all files are resolved, as in `read_avro`. Defaults to None:
            each file is read with its own schema.
        reader_buffer_size: Number of bytes, at least 1. It is checked, but has no effect: blocks are read as a whole.
        num_epochs: Number of epochs, 1 to 2^31 - 1. Defaults to None, which repeats the data forever.
        shuffle: Whether to shuffle the rows, as with `shuffle=True` of `read_avro`. Defaults to True.
        shuffle_buffer_size: Number of rows that are shuffled together, 1 to 2^31 - 1. Defaults to 10,000. It has no
            effect without `shuffle`.
        shuffle_seed: Seed of the shuffle, 0 to 2^64 - 1. Defaults to a random seed. It has no effect without `shuffle`.
        prefetch_buffer_size: Number of batches that TensorFlow prefetches, in addition to those that fastpipe
            prefetches. Defaults to `tf.data.AUTOTUNE`. 0 disables TensorFlow's prefetch.
        num_parallel_reads: Number of threads, at most the number of processors that the process may use: larger numbers
            mean this number. Defaults to None, the default of `read_avro`. `tf.data.AUTOTUNE` uses as many threads as
            improve throughput. The rows don't depend on it.
        drop_final_batch: Whether to drop a last batch with fewer rows. Defaults to False.

    Returns:
        A dataset of dicts, sorted by name, with a Tensor `[rows, *shape]` for a `FixedLenFeature`, a RaggedTensor for a
        `RaggedFeature`, and a SparseTensor for other features. If all batches are full, `rows` is known in advance,
        except for RaggedTensors.

    Raises:
        TypeError: If an argument has the wrong type. fastpipe's specs are features of `read_avro`, whose reader
            `dataset` accepts.
        ValueError: If a number is out of range or a feature is invalid.
        FastpipeError: If `read_avro` raises it: a file is missing or damaged, or a schema lacks a feature.

    Errors while reading are those of `dataset`.

    Example:
        >>> import fastpipe.tf
        >>> import tensorflow as tf
        >>> features = {
        ...     "label": tf.io.FixedLenFeature([], tf.float32),
        ...     "history[*]": tf.io.VarLenFeature(tf.int64),
        ... }
        >>> batches = fastpipe.tf.make_avro_record_dataset("data/*.avro", features, batch_size=1024, num_epochs=1)
        >>> for batch in batches:
        ...     labels, history = batch["label"], batch["history[*]"]
        >>> labels.shape, int(history.dense_shape[0])
        (TensorShape([1024]), 1024)
    """
    size = within("batch_size", batch_size, 1, LARGEST_BATCH)
    if reader_buffer_size is not None:
        within("reader_buffer_size", reader_buffer_size, 1, 2**63 - 1)
    wanted = _wanted(features)
    if num_epochs is not None:
        within("num_epochs", num_epochs, 1, 2**31 - 1)
    drop = flag("drop_final_batch", drop_final_batch) or num_epochs is None
    order: dict[str, Any] = {}
    if flag("shuffle", shuffle):
        rows = _SHUFFLE_BUFFER if shuffle_buffer_size is None else shuffle_buffer_size
        buffer = within("shuffle_buffer_size", rows, 1, LARGEST_BATCH)
        order = {"shuffle": True, "shuffle_buffer": buffer, "seed": shuffle_seed}
    once = num_epochs == 1
    reader = read_avro(
        sorted(expand(_patterns(file_pattern))),
        features=wanted.specs,
        batch_size=size,
        reader_schema=reader_schema,
        num_threads=_threads(num_parallel_reads),
        epochs=num_epochs,
        drop_last=drop and once,
        **order,
    )
    batches = dataset(reader)
    if not once:
        batches = _rebatched(batches, size, drop=drop, endless=num_epochs is None)

    def finish(values: dict[str, Any]) -> dict[str, Any]:
        found = wanted.finish(
            {
                name: values[name] if feature.shape is None else values[name].to_sparse()
                for name, feature in wanted.read.items()
            }
        )
        return {name: _with_rows(value, size if drop else None) for name, value in found.items()}

    # The functions of `map` and `scan` are fast, and another thread would request a batch ahead.
    batches = batches.map(finish)
    return batches if prefetch_buffer_size == 0 else batches.prefetch(prefetch_buffer_size)


def _wanted(features: Any) -> Wanted:
    if not isinstance(features, Mapping) or not features:
        raise TypeError(f"features must be a dict of at least one feature of tf.io; got {shown(features)}")
    for name, feature in features.items():
        if isinstance(feature, Spec):
            raise TypeError(
                f"feature {name!r} must be a feature of tf.io; got {type(feature).__name__}: pass specs to "
                "fastpipe.read_avro, and the reader to fastpipe.tf.dataset"
            )
    return Wanted(features)


def _patterns(file_pattern: Any) -> Any:
    """Returns paths as strings. TensorFlow's own are bytes."""
    if tf.is_tensor(file_pattern):
        file_pattern = tf.reshape(file_pattern, [-1]).numpy().tolist()
    if isinstance(file_pattern, str | bytes | os.PathLike):
        file_pattern = [file_pattern]
    return [os.fsdecode(item) if isinstance(item, bytes) else item for item in file_pattern]


def _threads(number: int | None) -> Any:
    if number is None:
        return None
    if number == tf.data.AUTOTUNE:
        return "auto"
    return min(within("num_parallel_reads", number, 1, 2**63 - 1), available_processors())


def _rebatched(batches: tf.data.Dataset, size: int, *, drop: bool, endless: bool) -> tf.data.Dataset:
    """Joins batches that have fewer than `size` rows with the next ones.

    Args:
        batches: A dataset of dicts of Tensors and RaggedTensors.
        size: Rows per batch.
        drop: Whether a last batch with fewer rows is dropped.
        endless: Whether the dataset has no end.
    """
    none = {name: _no_rows(spec) for name, spec in batches.element_spec.items()}
    marked = batches.map(lambda batch: (batch, False))
    if not (drop or endless):
        marked = marked.concatenate(tf.data.Dataset.from_tensors((none, True)))

    def step(left: dict[str, Any], element: tuple[dict[str, Any], tf.Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
        batch, is_end = element
        joined = {name: tf.concat([_joined(left[name]), batch[name]], axis=0) for name in batch}
        rows = _rows(joined)
        made = tf.where(rows >= size, tf.constant(size, tf.int64), tf.where(is_end, rows, 0))
        rest = {name: _parts(value[made:]) for name, value in joined.items()}
        return rest, {name: value[:made] for name, value in joined.items()}

    left = {name: _parts(value) for name, value in none.items()}
    return marked.scan(left, step).filter(lambda batch: _rows(batch) > 0)


def _parts(value: Any) -> tuple[tf.Tensor, ...]:
    """Returns a Tensor or RaggedTensor as tensors, because the state of a `scan` can't be ragged."""
    ragged = isinstance(value, tf.RaggedTensor)
    return (value.flat_values, *value.nested_row_lengths()) if ragged else (value,)


def _joined(parts: tuple[tf.Tensor, ...]) -> Any:
    """Returns the value of these parts."""
    values, *lengths = parts
    return tf.RaggedTensor.from_nested_row_lengths(values, list(lengths), validate=False) if lengths else values


def _rows(batch: dict[str, Any]) -> tf.Tensor:
    value = next(iter(batch.values()))
    return value.nrows() if isinstance(value, tf.RaggedTensor) else tf.shape(value, tf.int64)[0]


def _no_rows(spec: Any) -> Any:
    """Returns a value without rows."""
    if isinstance(spec, tf.RaggedTensorSpec):
        value = tf.zeros([0, *spec.shape[spec.ragged_rank + 1 :]], spec.dtype)
        for _ in range(spec.ragged_rank):
            value = tf.RaggedTensor.from_row_splits(value, tf.zeros([1], tf.int64), validate=False)
        return value
    return tf.zeros([0, *spec.shape[1:]], spec.dtype)


def _with_rows(value: Any, rows: int | None) -> Any:
    """Sets the number of rows that is known in advance."""
    if rows is None:
        return value
    if isinstance(value, tf.RaggedTensor):
        return value
    shape = [rows, *value.shape[1:]]
    if isinstance(value, tf.SparseTensor):
        value.set_shape(shape)
        return value
    return tf.ensure_shape(value, shape)


class AvroRecordDataset(tf.data.Dataset):  # type: ignore[misc]  # TensorFlow has no types.
    """A dataset of the encoded records of Avro files, one scalar string each, as tensorflow-io's class of this name.

    `parse_avro` decodes batches of them. `make_avro_record_dataset` and `fastpipe.tf.dataset` read the same rows many
    times faster, because TensorFlow doesn't handle each record separately.

    Args:
        filenames: The paths of the files: a scalar or a vector of strings, or a `tf.data.Dataset` of scalar strings.
        buffer_size: Number of bytes, at least 0. It is checked, but has no effect: blocks are read as a whole.
        num_parallel_reads: Number of files from which records are taken in turn, or `tf.data.AUTOTUNE`. Defaults to
            None: one file after another.
        num_parallel_calls: Number of threads of `tf.data.Dataset.interleave`, at most `num_parallel_reads`, or
            `tf.data.AUTOTUNE`. Defaults to None: one.
        reader_schema: The schema of all files, as JSON text or parsed JSON. Records aren't resolved, so it must have
            the same types, names and order of fields as the schema of each file. `make_avro_record_dataset` resolves
            schemas. Defaults to None: it isn't checked.
        deterministic: Whether records come in the same order each time. Defaults to True.
        block_length: Number of records that are taken from a file in its turn, at least 1. Defaults to 1.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range, or `num_parallel_calls` is larger than `num_parallel_reads`.

    Errors while reading are those of `dataset`, and `tf.errors.InvalidArgumentError` if the schema of a file differs
    from `reader_schema`.

    Example:
        >>> import fastpipe.avro
        >>> import fastpipe.tf
        >>> records = fastpipe.tf.AvroRecordDataset("data/part-0.avro")
        >>> schema = fastpipe.avro.AvroFile("data/part-0.avro").schema
        >>> labels = records.batch(1024).map(
        ...     lambda batch: fastpipe.tf.parse_avro(batch, schema, {"label": fastpipe.DenseSpec((), "float32")})
        ... )
        >>> next(iter(labels))["label"].shape
        TensorShape([1024])
    """

    @unconverted
    def __init__(
        self,
        filenames: Any,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        num_parallel_calls: int | None = None,
        reader_schema: Any = None,
        deterministic: bool = True,
        block_length: int | None = 1,
    ) -> None:
        if buffer_size is not None:
            within("buffer_size", buffer_size, 0, 2**63 - 1)
        auto = tf.data.AUTOTUNE
        for name, number in (("num_parallel_reads", num_parallel_reads), ("num_parallel_calls", num_parallel_calls)):
            if number is not None and number != auto:
                within(name, number, 1, 2**63 - 1)
        reads = num_parallel_reads
        if num_parallel_calls is not None and reads != auto and (reads is None or num_parallel_calls > reads):
            raise ValueError(
                f"num_parallel_calls must be at most num_parallel_reads ({reads}), or None; got {num_parallel_calls}"
            )
        names = _names(filenames)
        source = _Records(reader_schema)

        def records(name: tf.Tensor) -> tf.data.Dataset:
            variant = from_passes(source, [name])
            batches = tf.data.experimental.from_variant(variant, source.layout.element_spec)
            return batches.map(lambda batch: batch[""]).unbatch()

        if reads is None:
            whole = names.flat_map(records)
        else:
            whole = names.interleave(
                records,
                cycle_length=reads,
                block_length=1 if block_length is None else block_length,
                num_parallel_calls=num_parallel_calls,
                deterministic=None if num_parallel_calls is None else deterministic,
            )
        self._whole = whole
        super().__init__(tf.data.experimental.to_variant(whole))
        keep(self, source)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._whole]

    @property
    def element_spec(self) -> tf.TypeSpec:
        """The spec of a record: a scalar string."""
        return tf.TensorSpec((), tf.string)


def _names(filenames: Any) -> tf.data.Dataset:
    if isinstance(filenames, tf.data.Dataset):
        if filenames.element_spec != tf.TensorSpec((), tf.string):
            raise TypeError(f"filenames must be a dataset of scalar strings; got one of {filenames.element_spec}")
        return filenames
    try:
        names = tf.convert_to_tensor(filenames, tf.string)
    except (TypeError, ValueError):
        raise TypeError(
            f"filenames must be a string, a list of strings or a tf.data.Dataset; got {shown(filenames)}"
        ) from None
    return tf.data.Dataset.from_tensor_slices(tf.reshape(names, [-1]))


class _Records(Source):
    """Starts passes over the encoded records of a file."""

    def __init__(self, reader_schema: Any) -> None:
        super().__init__(Layout({"": Array(tf.string, ())}, None))
        self._schema = None if reader_schema is None else _essence(_parsed(reader_schema))

    def start(self, filenames: list[bytes]) -> tuple[Pass, list[Told]]:
        """Starts a pass over a file."""
        (path,) = map(os.fsdecode, filenames)
        if self._schema is not None and _essence(AvroFile(path).schema) != self._schema:
            reason = (
                "its schema differs from reader_schema, and AvroRecordDataset doesn't resolve schemas: use "
                "fastpipe.tf.make_avro_record_dataset, or read_avro(reader_schema=...) and fastpipe.tf.dataset"
            )
            raise in_file(UnsupportedError, path, reason)
        reader: Reader = encoded_records([path], ("",))
        return reader._passes.start_in_engine(), []


def _parsed(schema: Any) -> Any:
    if not isinstance(schema, str | bytes):
        return schema
    try:
        return json.loads(schema)
    except ValueError:
        return schema if isinstance(schema, str) else schema.decode()


# The attributes that determine how values are encoded (Avro 1.12, "Parsing Canonical Form").
_ATTRIBUTES = ("name", "namespace", "type", "fields", "symbols", "items", "values", "size")


def _essence(schema: Any) -> Any:
    """Returns a schema with only the attributes that determine how values are encoded."""
    if isinstance(schema, list):
        return [_essence(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: _essence(schema[name]) for name in _ATTRIBUTES if name in schema}
    return kept["type"] if kept.keys() == {"type"} else kept
