"""AvroTensorDataset (`ATDSDataset`) and the older AvroRecordDataset, both of tensorflow-io.

They yield tensors. `AtdsNumpyWorker` converts them to NumPy arrays itself: `as_numpy_iterator()` converts a
SparseTensor element by element, which takes minutes instead of milliseconds.

Iteration is timed up to the last batch. After it the dataset may wait up to two seconds for its prefetching thread,
which doesn't count.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import generate
from peers.batches import BatchWorker
from peers.job import CannotError, Job, Pass


class TensorWorker(BatchWorker):
    """A `tf.data` dataset over one file."""

    packages = ("tensorflow-io", "tensorflow-cpu")

    def __init__(self) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        import tensorflow as tf

        self._tf = tf
        self._types = {avro: getattr(tf, dtype) for avro, dtype in generate.DTYPES.items()} | {"string": tf.string}

    def dataset(self, job: Job) -> Any:
        """Returns the dataset. Creating it and iterating over it are timed."""
        raise NotImplementedError

    def batches(self, job: Job) -> Iterator[tuple[int, Any]]:
        return ((self.rows(batch), batch) for batch in self.dataset(job))

    def take(self, batch: dict[str, Any], job: Job) -> None:
        """Processes a batch. This is timed."""

    def rows(self, batch: dict[str, Any]) -> int:
        value = next(iter(batch.values()))
        shape = value.dense_shape if isinstance(value, self._tf.SparseTensor) else value.shape
        return int(shape[0])

    def read(self, job: Job) -> Pass:
        begun, cpu_begun = time.perf_counter(), time.process_time()
        last = cpu_last = 0.0
        count, batch = 0, None
        for batch in self.dataset(job):
            self.take(batch, job)
            count += 1
            last, cpu_last = time.perf_counter(), time.process_time()
        assert batch is not None
        # Reading the shape of each batch would cost a TensorFlow operation, and all batches but the last are full.
        return Pass((count - 1) * job.batch + self.rows(batch), None, last - begun, cpu_last - cpu_begun)


def _array(tensor: Any) -> Any:
    """Converts a tensor to a NumPy array: numbers without a copy, strings to an array of bytes objects."""
    return tensor.numpy() if tensor.dtype.name == "string" else np.asarray(memoryview(tensor))


def _offsets(owners: Any, rows: int) -> Any:
    return np.concatenate(([0], np.cumsum(np.bincount(owners, minlength=rows))))


def _text(items: Any) -> tuple[Any, Any]:
    sizes = np.fromiter(map(len, items), "i8", len(items))
    return np.frombuffer(b"".join(items), "u1"), np.concatenate(([0], np.cumsum(sizes)))


class AtdsWorker(TensorWorker):
    """AvroTensorDataset with its defaults, except for the number of threads.

    A larger reader buffer, `prefetch(1)` (as its authors' benchmarks do) and AUTOTUNE made no difference on one core.
    """

    homes = tuple(f"tensorflow_io.python.experimental.atds.{module}" for module in ("dataset", "features"))
    """The modules of the dataset and of its feature classes."""

    def dataset(self, job: Job) -> Any:
        made, kinds = map(importlib.import_module, self.homes)
        features: dict[str, Any] = {}
        for column in job.columns:
            if column.nullable:
                raise CannotError("no nullable values")
            dtype = self._types[column.avro]
            if column.kind in ("ragged", "strings"):
                features[column.name] = kinds.VarlenFeature([-1], dtype)
            elif column.kind == "sparse":
                features[column.name] = kinds.SparseFeature([generate.SPARSE_SIZE], dtype)
            else:
                features[column.name] = kinds.DenseFeature([column.size] if column.kind == "dense" else [], dtype)
        ahead = {"reader_buffer_size": job.read_ahead} if job.read_ahead else {}
        return made.ATDSDataset(
            job.path,
            batch_size=job.batch,
            features=features,
            shuffle_buffer_size=job.shuffle,
            num_parallel_calls=job.threads or self._tf.data.AUTOTUNE,
            **ahead,
        )

    def column(self, column: generate.Column, batch: dict[str, Any]) -> Any:
        value = batch[column.name]
        if column.kind in ("scalar", "dense"):
            return _array(value)
        if column.kind == "string":
            return _text(_array(value))
        indices, values = _array(value.indices), _array(value.values)
        shape = _array(value.dense_shape)
        if column.kind == "sparse":
            return indices, values, shape
        return (_text(values) if column.kind == "strings" else values), _offsets(indices[:, 0], int(shape[0]))


class AtdsNumpyWorker(AtdsWorker):
    """AvroTensorDataset with conversion to NumPy: of dense tensors, and of the three parts of sparse ones."""

    def take(self, batch: dict[str, Any], job: Job) -> None:
        """Converts the tensors of a batch to NumPy arrays."""
        sparse = self._tf.SparseTensor
        for value in batch.values():
            for part in (value.indices, value.values, value.dense_shape) if isinstance(value, sparse) else (value,):
                _array(part)


class AtdsEpochsWorker(AtdsWorker):
    """AvroTensorDataset in a Python loop. Each pass is an epoch of the same dataset, as in training."""

    def __init__(self) -> None:
        super().__init__()
        self._datasets: dict[Job, Any] = {}

    def dataset(self, job: Job) -> Any:
        if job not in self._datasets:
            self._datasets[job] = super().dataset(job)
        return self._datasets[job]


class AtdsGraphWorker(AtdsEpochsWorker):
    """AvroTensorDataset in a loop inside a graph, as in `model.fit`."""

    def __init__(self) -> None:
        super().__init__()
        self._loops: dict[Job, Any] = {}

    def read(self, job: Job) -> Pass:
        tf = self._tf
        if job not in self._loops:
            dataset = self.dataset(job)

            @tf.function  # type: ignore[untyped-decorator]
            def loop() -> Any:
                rows, last = tf.constant(0, tf.int64), tf.constant(0.0, tf.float64)
                for batch in dataset:
                    with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
                        last = tf.timestamp()
                    rows += tf.shape(batch[job.columns[0].name], tf.int64)[0]
                return rows, last

            self._loops[job] = loop.get_concrete_function()
        begun, cpu_begun = time.time(), time.process_time()
        rows, last = self._loops[job]()
        # This includes the CPU time after the last batch, which is negligible.
        seconds, spent = float(last) - begun, time.process_time() - cpu_begun
        return Pass(int(rows), None, seconds, spent)


class FastpipeAtdsWorker(AtdsEpochsWorker):
    """`fastpipe.tf.atds` in a Python loop, with the newest TensorFlow."""

    packages = ("fastpipe-data", "tensorflow-cpu")
    homes = ("fastpipe.tf.atds", "fastpipe.tf.atds")


class FastpipeAtdsGraphWorker(AtdsGraphWorker):
    """`fastpipe.tf.atds` in a loop inside a graph."""

    packages = FastpipeAtdsWorker.packages
    homes = FastpipeAtdsWorker.homes


class AvroRecordWorker(TensorWorker):
    """AvroRecordDataset with `parse_avro`, as `make_avro_record_dataset` combines them.

    Sparse features are read as two ragged arrays, because its `SparseFeature` would also merge and sort them.
    """

    def _parts(self, column: generate.Column) -> list[str]:
        if column.kind == "sparse":
            return [f"{column.name}.indices0[*]", f"{column.name}.values[*]"]
        return [f"{column.name}[*]" if column.kind != "scalar" else column.name]

    def dataset(self, job: Job) -> Any:
        from tensorflow_io.python.api.experimental import columnar

        tf = self._tf
        if job.dataset not in "abcd":
            raise CannotError("measured only with numbers")
        features: dict[str, Any] = {}
        for column in job.columns:
            for part in self._parts(column):
                dtype = tf.int64 if "indices0" in part else self._types[column.avro]
                if column.kind in ("scalar", "dense"):
                    features[part] = tf.io.FixedLenFeature([column.size] if column.kind == "dense" else [], dtype)
                else:
                    features[part] = columnar.VarLenFeatureWithRank(dtype)
        return columnar.make_avro_record_dataset(
            file_pattern=[job.path],
            features=features,
            batch_size=job.batch,
            reader_schema=json.dumps(generate.schema(job.dataset)),
            num_epochs=1,
            shuffle=job.shuffle > 0,
            shuffle_buffer_size=job.shuffle or None,
            # It has no automatic number.
            num_parallel_reads=None if job.threads == 1 else job.threads or len(os.sched_getaffinity(0)),
        )

    def column(self, column: generate.Column, batch: dict[str, Any]) -> Any:
        parts = [batch[name] for name in self._parts(column)]
        if column.kind in ("scalar", "dense"):
            return _array(parts[0])
        owners, shape = _array(parts[0].indices)[:, 0], _array(parts[0].dense_shape)
        values = [_array(part.values) for part in parts]
        if column.kind == "ragged":
            return values[0], _offsets(owners, int(shape[0]))
        return np.stack([owners, values[0]], axis=1), values[1], shape
