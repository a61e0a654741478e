"""Batches of readers as a `tf.data.Dataset`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from fastpipe._fastpipe import Pass
from fastpipe._interop.distributed import World
from fastpipe._reader.mapped import Mapped
from fastpipe._reader.passes import Passes, passes_of, shard_of_this_rank
from fastpipe._reader.reader import Reader
from fastpipe.tf._forms import Array, columns_of
from fastpipe.tf._mapped import from_batches
from fastpipe.tf._passes import Layout, Source, Told, from_passes, keep, unconverted


@unconverted
def dataset(
    reader: Reader | Mapped, *, input_context: tf.distribute.InputContext | None = None, distributed: bool = True
) -> tf.data.Dataset:
    """Returns a `tf.data.Dataset` of a reader's batches.

    Each iteration over it is a pass of the reader, which prefetches by itself. A further iteration closes the previous
    one, which then fails if it is continued. Elements are dicts with these values:

    - For `DenseSpec`, a `tf.Tensor` `[rows, *shape]` over the memory of the batch.
    - For `RaggedSpec`, a `tf.RaggedTensor` with int64 row splits. It is ragged in all dimensions up to the last None.
    - For `SparseSpec`, a `tf.SparseTensor`. Its indices are in the order in which they were written.
      `tf.sparse.reorder` sorts them if needed.
    - With `on_null="mask"`, `Masked(values, valid)` of these tensors if values may be null.
    - For strings and bytes, tensors of dtype `tf.string`, which TensorFlow copies to its own objects.
    - With `on_uneven="pad"` and `Skip(fill=True)`, the additional key `valid`, a bool tensor `[rows]`.

    With `drop_last=True` and with `on_uneven="pad"`, `rows` is known in advance. Otherwise, and for a map, it is None
    in `element_spec`.

    Packs, buckets and maps with `features` are supported, too. TensorFlow calls Python for each of their batches, and
    copies it. It also does so if the reader leaves out damage.

    TensorFlow doesn't add its usual `prefetch`, so the reader's state is the state after the last batch. (It does add
    one to a `map`, unless `options.experimental_optimization.map_parallelization` is False.)

    A reader without a rank is divided among the ranks of the program: the input pipelines of `input_context`, or the
    workers in the environment variable TF_CONFIG, or the ranks of RANK and WORLD_SIZE (set by torchrun). The division
    is logged (logger `fastpipe`, level INFO). A reader that has a rank is not divided again. TensorFlow's auto-sharding
    is off.

    TensorFlow can't save the state of an iteration. Save `reader.state_dict()`, which counts the batches that
    TensorFlow has taken, including prefetched ones. If the reader is divided here, use `reader.shard` instead, whose
    result has the state.

    Args:
        reader: Reader, or `Mapped` with features, whose batches the dataset yields.
        input_context: Context that `strategy.distribute_datasets_from_function` passes. The dataset then reads the
            shard of this input pipeline, `reader.shard(num_input_pipelines, input_pipeline_id)`. Defaults to None.
        distributed: Whether to divide the reader among ranks. Set it to False if each rank must read everything, as in
            an evaluation on all ranks. Defaults to True.

    Raises:
        TypeError: If `reader` isn't a reader.
        UnsupportedError: If `reader` is a map without `features`. Pass them to `map`, or map the dataset instead.
        ValueError: If a sparse feature has `layout="csr"`, the reader has `progress=True`, or it can't be divided. A
            shuffled reader needs a seed to be divided, since each input pipeline creates its own reader.
        FastpipeError: If a feature has `on_null="mask"` and the reader's next batch, which determines the masks, can't
            be read.

    An error while reading fails the `next` that encounters it, and ends the iteration. It is raised as
    `tf.errors.InvalidArgumentError` if fastpipe raises `ValueError`, as `tf.errors.NotFoundError` for a missing file,
    and otherwise as `tf.errors.UnknownError`. The message is fastpipe's.

    Example:
        >>> import fastpipe
        >>> import fastpipe.tf
        >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
        >>> for batch in fastpipe.tf.dataset(reader):
        ...     shape = batch["label"].shape
        >>> shape
        TensorShape([1024])
    """
    passes = shard_of_this_rank(passes_of(reader), distributed=distributed, framework=_world(input_context))
    if passes.shows_progress:
        raise ValueError("progress=True is not supported, since TensorFlow draws the batches; Keras has its own bar")
    layout = _layout(passes)

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The prefetch would take a batch that the consumer didn't request, and the reader's state would count it.
    options.experimental_optimization.inject_prefetch = False
    if not passes.in_engine:
        return from_batches(passes, layout).with_options(options)
    source = _Source(passes, layout)
    dataset = tf.data.experimental.from_variant(from_passes(source, []), layout.element_spec)
    keep(dataset, source)
    return dataset.with_options(options)


class _Source(Source):
    """A reader's passes."""

    def __init__(self, passes: Passes, layout: Layout) -> None:
        super().__init__(layout)
        self._passes = passes

    def start(self) -> tuple[Pass, list[Told]]:
        """Starts the reader's next pass."""
        return self._passes.start_in_engine(), []


def _world(context: tf.distribute.InputContext | None) -> World | None:
    """Returns the ranks that TensorFlow knows; None if it knows a single process."""
    if context is not None:
        return World(context.input_pipeline_id, context.num_input_pipelines, "input_context")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec()
    # With parameter servers, a single coordinator makes the datasets. An evaluator isn't a worker.
    tasks = [(job, task) for job in ("chief", "worker") if job in cluster.jobs for task in cluster.task_indices(job)]
    own = resolver.task_type, resolver.task_id
    if "ps" in cluster.jobs or len(tasks) < 2 or own not in tasks:
        return None
    return World(tasks.index(own), len(tasks), "TF_CONFIG")


def _layout(passes: Passes) -> Layout:
    columns = columns_of(passes.features, lambda: _first(passes))
    if passes.marks_valid:
        columns["valid"] = Array(tf.bool, ())
    # A map may yield batches of any size.
    return Layout(columns, passes.batch_size if passes.one_size and passes.in_engine else None)


def _first(passes: Passes) -> dict[str, Any]:
    try:
        return dict(passes.batch_at(0))
    except IndexError:  # An epoch without batches has no masks.
        return {}
