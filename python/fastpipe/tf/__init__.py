"""Batches as tensors of TensorFlow.

    import fastpipe
    import fastpipe.tf

    reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)
    model.fit(fastpipe.tf.dataset(reader).map(split).prefetch(2), epochs=3)

Needs TensorFlow 2.16 or newer (extra `tf`), which is imported with this module and not with fastpipe.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from fastpipe._fastpipe import Pass
from fastpipe._reader.passes import Passes, passes_of
from fastpipe._reader.reader import Reader
from fastpipe.tf._forms import Array, Masked, columns_of
from fastpipe.tf._parsing import parse_avro
from fastpipe.tf._passes import Layout, Source, Told, from_passes, keep, unconverted

__all__ = ["Masked", "dataset", "parse_avro"]


@unconverted
def dataset(reader: Reader, *, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
    """A `tf.data.Dataset` of a reader's batches.

    Each iteration over it is a pass of the reader, which reads ahead by itself; a further iteration closes the one
    before, which then fails if it is gone on with. Its elements are dicts, with

    - `tf.Tensor` `[rows, *shape]` for `DenseSpec`, over the memory of the batch;
    - `tf.RaggedTensor` for `RaggedSpec`, with int64 row splits, ragged in all dimensions up to the last that is None;
    - `tf.SparseTensor` for `SparseSpec`; its indices are in the order in which they were written, which
      `tf.sparse.reorder` makes ascending where it isn't;
    - `Masked(values, valid)` of these where `nulls="mask"` lets values be null;
    - for strings and bytes tensors of dtype `tf.string`, which TensorFlow copies to objects of its own;
    - with `uneven="pad"` the entry `valid`, a bool tensor `[rows]`.

    `rows` is known beforehand with `drop_last=True` and with `uneven="pad"`, else None in `element_spec`.

    TensorFlow adds no `prefetch` of its own, as it does elsewhere: the reader's state is that of the last batch. (To a
    `map` it does, unless `options.experimental_optimization.map_parallelization` is False.)

    Auto-sharding is off, as ranks are the reader's: each worker of `tf.distribute` has to read a share of its own, by
    `input_context` or the reader's `rank` and `world_size`. TensorFlow can't save where an iteration stands: save
    `reader.state_dict()`, which counts what TensorFlow has taken, prefetched batches among it.

    Args:
        reader: whose batches are wanted.
        input_context: of `strategy.distribute_datasets_from_function`: the share of this input pipeline is read,
            `reader.shard(num_input_pipelines, input_pipeline_id)`.

    Raises:
        TypeError: if it isn't a reader.
        ValueError: if a sparse feature has `layout="csr"`, the reader has `progress=True`, or it can't be shared out
            so: a shuffled one needs a seed, since each input pipeline makes its own.
        FastpipeError: if a feature has `nulls="mask"`, and the reader's next batch can't be read: it tells which
            levels may be null.

    Errors of reading fail the `next` that meets them, behind which the iteration is over: with
    `tf.errors.InvalidArgumentError` for what `ValueError` is raised for, `tf.errors.NotFoundError` for a missing file,
    and `tf.errors.UnknownError` for all others. The message is fastpipe's.
    """
    passes = passes_of(reader)
    if input_context is not None:
        passes = passes.share(input_context.num_input_pipelines, input_context.input_pipeline_id)
    if passes.shows_progress:
        raise ValueError("progress=True shows what Python draws; here TensorFlow draws, and Keras has a bar of its own")
    layout = _layout(passes)

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # It would have a batch that nobody asked for, which the reader's state counts.
    options.experimental_optimization.inject_prefetch = False
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
        """The reader's next pass."""
        return self._passes.start_in_engine(), []


def _layout(passes: Passes) -> Layout:
    columns = columns_of(passes.features, lambda: _first(passes))
    if passes.uneven == "pad":
        columns["valid"] = Array(tf.bool, ())
    return Layout(columns, passes.batch_size if passes.one_size else None)


def _first(passes: Passes) -> dict[str, Any]:
    try:
        return passes.batch_at(0)
    except IndexError:  # An epoch without batches: no mask will be seen.
        return {}
