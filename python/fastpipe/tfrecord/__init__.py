"""TFRecord files of `tf.train.Example`: reading and writing, without TensorFlow."""

from __future__ import annotations

from fastpipe._locations import TFRecordLocation
from fastpipe.tfrecord._reading import read_tfrecord

__all__ = ["TFRecordLocation", "read_tfrecord"]
