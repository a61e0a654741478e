"""Readers that train a small model on the processor, through `tf.data`, all with tensorflow-io's TensorFlow.

The model has embeddings of the sparse features and two hidden layers over all features. Its loop runs inside a graph,
as in `model.fit`, and prefetches (`AUTOTUNE`). An epoch is timed to the end of its last step.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import generate
from peers.job import Job, Pass
from peers.tensors import AtdsWorker, AvroRecordWorker, FastpipeAtdsWorker, TensorWorker

DIMENSION = 16
"""Dimension of the embeddings."""
RATE = 0.01
LABEL = "clicked"
HELD = 8
"""Number of different batches of the training without input."""


class _Model:
    """The model and its step of gradient descent."""

    def __init__(self, tf: Any, columns: list[generate.Column], width: int) -> None:
        self._tf, self._columns = tf, columns
        numbers = sum(max(column.size, 1) for column in columns if column.kind in ("scalar", "dense")) - 1
        sparse = [column.name for column in columns if column.kind == "sparse"]
        draw = tf.random.Generator.from_seed(1)
        self._tables = {
            name: tf.Variable(draw.normal([generate.SPARSE_SIZE, DIMENSION], stddev=0.01)) for name in sparse
        }
        sizes = [numbers + DIMENSION * len(sparse), width, width, 1]
        self._layers = [
            (tf.Variable(draw.normal([a, b], stddev=a**-0.5)), tf.Variable(tf.zeros([b])))
            for a, b in itertools.pairwise(sizes)
        ]

    def _logits(self, batch: dict[str, Any], rows: Any) -> Any:
        tf, found = self._tf, []
        for column in self._columns:
            if column.kind == "sparse":
                owners, ids, values = batch[column.name]
                vectors = tf.gather(self._tables[column.name], ids) * values[:, None]
                found.append(tf.math.unsorted_segment_sum(vectors, owners, rows))
            elif column.name != LABEL:
                # The logarithm of large numbers, such as user ids.
                numbers = tf.math.asinh(tf.cast(batch[column.name], tf.float32))
                found.append(tf.reshape(numbers, [rows, max(column.size, 1)]))
        hidden = tf.concat(found, axis=1)
        for number, (weights, bias) in enumerate(self._layers):
            hidden = tf.matmul(hidden, weights) + bias
            hidden = tf.nn.relu(hidden) if number < len(self._layers) - 1 else hidden
        return hidden[:, 0]

    def step(self, batch: dict[str, Any]) -> list[Any]:
        """Returns the operations of a step on a batch, of dense tensors and of (row, id, value) for sparse features."""
        tf = self._tf
        label = tf.cast(batch[LABEL], tf.float32)
        variables = [*self._tables.values(), *(variable for layer in self._layers for variable in layer)]
        with tf.GradientTape() as tape:
            losses = tf.nn.sigmoid_cross_entropy_with_logits(label, self._logits(batch, tf.size(label)))
            loss = tf.reduce_mean(losses)
        steps = []
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                more = {"indices": gradient.indices, "updates": RATE * gradient.values}
                steps.append(tf.raw_ops.ResourceScatterSub(resource=variable.handle, **more))
            else:
                steps.append(variable.assign_sub(RATE * gradient, read_value=False))
        return steps


class TrainingWorker(TensorWorker):
    """Trains a model. Each pass is an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._loops: dict[Job, Any] = {}

    def parts(self, column: generate.Column, batch: dict[str, Any]) -> Any:
        """Returns a feature as a dense tensor, or the rows, ids and values of a sparse feature."""
        value = batch[column.name]
        return (value.indices[:, 0], value.indices[:, 1], value.values) if column.kind == "sparse" else value

    def epoch(self, job: Job) -> Any:
        """Returns the dataset of an epoch."""
        return self.dataset(job).prefetch(self._tf.data.AUTOTUNE)

    def read(self, job: Job) -> Pass:
        tf = self._tf
        if job not in self._loops:
            dataset, model = self.epoch(job), _Model(tf, job.columns, job.width)

            @tf.function  # type: ignore[untyped-decorator]
            def loop() -> Any:
                rows, last = tf.constant(0), tf.constant(0.0, tf.float64)
                for batch in dataset:
                    parts = {column.name: self.parts(column, batch) for column in job.columns}
                    with tf.control_dependencies(model.step(parts)):
                        last = tf.timestamp()
                    rows += tf.size(batch[LABEL])
                return rows, last

            self._loops[job] = loop.get_concrete_function()
        begun, cpu = time.time(), time.process_time()
        rows, last = self._loops[job]()
        seconds, spent = float(last) - begun, time.process_time() - cpu
        return Pass(int(rows), None, seconds, spent)


class AtdsTrainingWorker(TrainingWorker, AtdsWorker):
    """Training from AvroTensorDataset."""


class FastpipeTrainingWorker(AtdsTrainingWorker):
    """Training from `fastpipe.tf.atds`, with the extension that `make build` installs among the sources."""

    packages = FastpipeAtdsWorker.packages
    homes = FastpipeAtdsWorker.homes

    def __init__(self) -> None:
        sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "python"))
        super().__init__()


class HeldTrainingWorker(AtdsTrainingWorker):
    """Training on a few batches that are held in memory: the time of the model."""

    def epoch(self, job: Job) -> Any:
        tf = self._tf
        held = [tf.data.Dataset.from_tensors(batch) for batch in self.dataset(job).take(HELD)]
        steps = generate.rows_of(job.path) // job.batch
        dataset = held[0]
        for more in held[1:]:
            dataset = dataset.concatenate(more)
        return dataset.repeat().take(steps)


class AvroRecordTrainingWorker(TrainingWorker, AvroRecordWorker):
    """Training from AvroRecordDataset. It prefetches itself."""

    def parts(self, column: generate.Column, batch: dict[str, Any]) -> Any:
        found = [batch[name] for name in self._parts(column)]
        if column.kind != "sparse":
            return found[0]
        return found[0].indices[:, 0], found[0].values, found[1].values

    def epoch(self, job: Job) -> Any:
        return self.dataset(job)
