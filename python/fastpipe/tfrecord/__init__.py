"""TFRecord files of `tf.train.Example`: reading and writing, without TensorFlow."""

from __future__ import annotations

from fastpipe._locations import TFRecordLocation
from fastpipe.tfrecord._reading import read_tfrecord
from fastpipe.tfrecord._writing import WrittenRecords, write_tfrecord

__all__ = ["TFRecordLocation", "WrittenRecords", "read_tfrecord", "write_tfrecord"]
