"""The part of tensorflow-io's namespace that fastpipe replaces, for programs that change only their import.

    from fastpipe.tf import tfio  # instead of: import tensorflow_io as tfio

`tfio.experimental.columnar` and `tfio.experimental.avro`, its name in tensorflow-io's tutorial, have
`make_avro_record_dataset`, `AvroRecordDataset`, `parse_avro` and `VarLenFeatureWithRank`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from fastpipe._arguments import within
from fastpipe._fastpipe import __version__
from fastpipe.tf import _parsing
from fastpipe.tf._records import AvroRecordDataset, make_avro_record_dataset

__all__ = ["__version__", "experimental"]


class VarLenFeatureWithRank:
    """An array, or nested arrays, of any length as a SparseTensor.

    Args:
        dtype: Dtype of the values.
        rank: Number of dimensions of a row, 1 to 32. Defaults to 1.
    """

    def __init__(self, dtype: Any, rank: int = 1) -> None:
        self.dtype = tf.as_dtype(dtype)
        self.rank = within("rank", rank, 1, 32)


def parse_avro(
    serialized: Any, reader_schema: Any, features: Mapping[str, Any], avro_names: Any = None, name: str | None = None
) -> dict[str, Any]:
    """Calls `fastpipe.tf.parse_avro` with tensorflow-io's names of arguments.

    Args:
        serialized: A string tensor of records.
        reader_schema: The schema of the records.
        features: Features to read, by name.
        avro_names: Not used: errors give the index of the record.
        name: Name scope of the op in a graph.
    """
    with tf.name_scope(name or "ParseAvro"):
        return _parsing.parse_avro(serialized, reader_schema, features)


_columnar = SimpleNamespace(
    AvroRecordDataset=AvroRecordDataset,
    VarLenFeatureWithRank=VarLenFeatureWithRank,
    make_avro_record_dataset=make_avro_record_dataset,
    parse_avro=parse_avro,
)
experimental = SimpleNamespace(avro=_columnar, columnar=_columnar)
