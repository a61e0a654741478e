"""Batches as TensorFlow tensors.

    import fastpipe
    import fastpipe.tf

    reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)
    model.fit(fastpipe.tf.dataset(reader).map(split).prefetch(2), epochs=3)

Requires TensorFlow 2.16 or newer (extra `tf`), which is imported with this module but not with fastpipe.
"""

from __future__ import annotations

from fastpipe.tf._dataset import dataset
from fastpipe.tf._forms import Masked
from fastpipe.tf._parsing import parse_avro
from fastpipe.tf._records import AvroRecordDataset, make_avro_record_dataset

__all__ = ["AvroRecordDataset", "Masked", "dataset", "make_avro_record_dataset", "parse_avro"]
