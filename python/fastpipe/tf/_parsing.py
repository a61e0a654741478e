"""Parsing of serialized Avro records to tensors by a TensorFlow op of fastpipe, in any graph.

A schema and features are compiled once per process to a *parser*, which a graph refers to by a number. The number is a
digest of the schema and the features, so a graph that is loaded in another process can't use a parser for something
else there.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from fastpipe._arguments import shown
from fastpipe._fastpipe import register_tensorflow_parser
from fastpipe.avro._messages import MessageDecoder, json_of
from fastpipe.specs._vocabularies import in_form
from fastpipe.tf._features import Wanted
from fastpipe.tf._forms import Array, Coordinates, Node, columns_of
from fastpipe.tf._passes import Layout, op, unconverted

_OP = "FastpipeParseAvro"


@unconverted
def parse_avro(serialized: Any, schema: Any, features: Mapping[str, Any] | None = None) -> dict[str, Any]:
    r"""Decodes a string tensor of Avro records, each a datum without a container file.

    Works eagerly and in graphs, such as the function of a `map`:
    `dataset.batch(64).map(lambda records: fastpipe.tf.parse_avro(records, schema, features))`. The op calls no Python,
    and decodes large batches on several threads. The first call with a schema and features compiles them, and they are
    kept until the process ends.

    Args:
        serialized: A string tensor `[n]`, or a list of bytes.
        schema: The writer's schema of all records: JSON text, the name of a primitive type, or parsed JSON.
        features: Features to read, by name. Defaults to None, which infers all features from the schema. The values can
            be:

                - `DenseSpec`, `RaggedSpec`, `SparseSpec`, `VocabularySpec`, `HashSpec` and `BucketSpec`, with the
                  tensors of `fastpipe.tf.dataset`.
                - `tf.io.FixedLenFeature`: a Tensor `[n, *shape]`, whose `default_value` replaces nulls.
                - `tf.io.VarLenFeature`, and tensorflow-io's `VarLenFeatureWithRank`: nested arrays as a SparseTensor.
                - `tf.io.SparseFeature`: an array of records as a SparseTensor `[n, *size]`. `index_key` and `value_key`
                  name fields of its records, or with a leading `@` arrays.
                - `tf.io.RaggedFeature` without partitions: arrays as a RaggedTensor. `value_key` names the field.

            Names of features of `tf.io` may contain `[*]`, tensorflow-io's sign for all items of an array.

    Returns:
        A dict from feature name to tensor, with one row for each record.

    Raises:
        TypeError: If `serialized` doesn't contain strings, or a feature or the schema has the wrong type.
        ValueError: If a feature is invalid, or a graph knows that the rank of `serialized` isn't 1.
        SchemaError: If the schema doesn't parse or lacks a feature.
        UnsupportedError: If a type isn't supported, and for dates, times and durations.
        LimitError: If the schema exceeds a limit.

    The op itself fails with `tf.errors.InvalidArgumentError` if a record is truncated or damaged, a value doesn't fit
    its feature, or the rank of `serialized` isn't 1. The message contains the index of the record and the byte in it.
    In a process that has loaded a saved graph, the op fails with `tf.errors.FailedPreconditionError` until `parse_avro`
    is called there with the same schema and features.

    Example:
        >>> import fastpipe.tf
        >>> fastpipe.tf.parse_avro([b"\x02", b"\x7f"], "long")["value"].numpy()
        array([  1, -64])
    """
    records = _records(serialized)
    parser = _parser(json_of(schema), features)
    values: dict[str, Any] = parser.eager(records) if tf.executing_eagerly() else parser.build(records)
    return values


class _Parser:
    """A compiled schema with features."""

    def __init__(self, number: int, schema: str, wanted: Wanted | None) -> None:
        decoder = MessageDecoder(schema, features=None if wanted is None else wanted.specs)
        self._wanted = Wanted({}) if wanted is None else wanted
        # Features of the decoder don't contain the layout of sparse features.
        features = decoder.features if wanted is None else in_form(wanted.specs, decoder._handle.features)
        self._columns: dict[str, Node] = columns_of(features, lambda: decoder([]))
        for name, feature in self._wanted.read.items():
            if feature.shape is not None:
                dtype = self._columns[name].parts(None)[-1].dtype
                self._columns[name] = Coordinates(Array(dtype, ()), feature.shape, nested=True)
        self._number = number
        register_tensorflow_parser(number, decoder._handle, Layout(self._columns, None).wanted())

    def build(self, records: tf.Tensor) -> dict[str, Any]:
        """Adds the op to the current graph, and assembles the features from its outputs."""
        if records.shape.rank not in (None, 1):
            raise ValueError(
                f"serialized must be a vector of records (rank 1); got rank {records.shape.rank}: batch() data "
                "before map, or pass [record]"
            )
        rows = None if records.shape.rank is None else records.shape[0]
        layout = Layout(self._columns, rows)
        types = [part.dtype for part in layout.parts]
        values = layout.build(op(_OP, [tf.constant(self._number, tf.int64), records], {"Tparts": types}, types))
        for value, spec in zip(tf.nest.flatten(values), tf.nest.flatten(layout.element_spec), strict=True):
            # The shapes of other tensors follow from their parts.
            if isinstance(value, tf.SparseTensor):
                value.set_shape(spec.shape)
        return self._wanted.finish(values)

    @functools.cached_property
    def eager(self) -> Any:
        """`build` as a function. An op that no library defines can't be called eagerly."""
        signature = [tf.TensorSpec(None, tf.string)]
        return tf.function(self.build, input_signature=signature, autograph=False)


_parsers: dict[str, _Parser] = {}
_lock = threading.Lock()


def _parser(schema: str, features: Mapping[str, Any] | None) -> _Parser:
    wanted = None if features is None else Wanted(features)
    key = repr((schema, wanted and wanted.key))
    with _lock:
        if key not in _parsers:
            # 63 bits, because int64 has no more. With a thousand parsers, the probability of a collision is 1 in
            # 10**13.
            number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
            _parsers[key] = _Parser(number, schema, wanted)
        return _parsers[key]


def _records(serialized: Any) -> tf.Tensor:
    if isinstance(serialized, np.ndarray) and serialized.dtype.kind == "S":
        raise TypeError("NumPy cuts trailing zero bytes off values of dtype S: pass a list or an array of objects")
    if isinstance(serialized, str | bytes):
        raise TypeError(f"serialized must be a vector of records; got {type(serialized).__name__}. Pass [record]")
    if not tf.is_tensor(serialized):
        try:
            return tf.convert_to_tensor(serialized, tf.string)
        except (TypeError, ValueError) as error:
            raise TypeError(f"serialized must be a string tensor or list of bytes; got {shown(serialized)}") from error
    if not isinstance(serialized, tf.Tensor):
        raise TypeError(f"serialized must be a dense tensor of strings; got a {type(serialized).__name__}")
    if serialized.dtype != tf.string:
        raise TypeError(f"serialized must be a tensor of strings; got {serialized.dtype.name}")
    return serialized


tf.no_gradient(_OP)
