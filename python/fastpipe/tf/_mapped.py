"""A `tf.data.Dataset` of batches that Python makes or counts: of maps, packs, buckets, and readers around damage.

TensorFlow calls Python for each batch, and copies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from fastpipe._reader.passes import Passes
from fastpipe.batch import Masked, Ragged, Sparse, Strings
from fastpipe.tf._passes import Layout


def from_batches(passes: Passes, layout: Layout) -> tf.data.Dataset:
    """Returns a dataset in which each iteration is a pass.

    Args:
        passes: Passes whose batches are dicts with the columns of the layout.
        layout: Layout of the dataset's elements.
    """

    def elements() -> Iterator[dict[str, Any]]:
        started = passes.start()
        try:
            for batch in started.batches:
                yield _element(batch, layout, passes)
        finally:
            started.close()

    return tf.data.Dataset.from_generator(elements, output_signature=layout.element_spec)


def _element(batch: Any, layout: Layout, passes: Passes) -> dict[str, Any]:
    if not isinstance(batch, dict) or batch.keys() != layout.columns.keys():
        found = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise TypeError(
            f"the batches of {passes!r} must be dicts with the features {', '.join(map(repr, layout.columns))};"
            f" got {found!r:.200}: pass the features that the function returns as features= of map()"
        )
    return layout.build([part for name in layout.columns for part in _parts(batch[name])])


def _parts(value: Any) -> Iterator[tf.Tensor]:
    """Yields the tensors of a value, in the order in which `Node.build` uses them."""
    if isinstance(value, Masked):
        yield tf.constant(value.valid)
        yield from _parts(value.values)
    elif isinstance(value, Ragged):
        yield tf.constant(value.offsets, tf.int64)
        yield from _parts(value.values)
    elif isinstance(value, Sparse):
        yield tf.constant(value.indices, tf.int64)
        yield tf.constant(value.dense_shape, tf.int64)
        yield from _parts(value.values)
    elif isinstance(value, Strings):
        yield tf.constant(value.to_list(), tf.string)
    else:
        array = np.asarray(value)
        # TensorFlow has no times.
        yield tf.constant(array.view(np.int64) if array.dtype.kind in "mM" else array)
