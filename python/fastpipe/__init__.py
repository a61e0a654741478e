"""fastpipe reads Avro files into shuffled, batched NumPy arrays without copying them.

    import fastpipe

    for batch in fastpipe.read_avro("data/*.avro", batch_size=1024):
        batch["user_embedding"]  # numpy float32 [1024, 64]
        batch["clicked_items"]   # fastpipe.Ragged(values, offsets)

Importing fastpipe imports NumPy and nothing else.
"""

from __future__ import annotations

from fastpipe._fastpipe import __version__
from fastpipe._shuffle_report import ShuffleReport, shuffle_report
from fastpipe.avro import AvroFile, infer_features, read_avro
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.errors import (
    DeviceError,
    FastpipeError,
    LimitError,
    MalformedFileError,
    MissingFileError,
    NullValueError,
    SchemaError,
    ShapeError,
    StateError,
    StorageError,
    UnsupportedError,
    ValueRangeError,
)
from fastpipe.reader import Location, Reader
from fastpipe.rebatch import Rebatcher, rebatch
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec

__all__ = [
    "AvroFile",
    "DenseSpec",
    "DeviceError",
    "FastpipeError",
    "Features",
    "LimitError",
    "Location",
    "MalformedFileError",
    "Masked",
    "MissingFileError",
    "NullValueError",
    "Ragged",
    "RaggedSpec",
    "Reader",
    "Rebatcher",
    "SchemaError",
    "ShapeError",
    "ShuffleReport",
    "Sparse",
    "SparseCSR",
    "SparseSpec",
    "StateError",
    "StorageError",
    "Strings",
    "UnsupportedError",
    "ValueRangeError",
    "__version__",
    "infer_features",
    "read_avro",
    "rebatch",
    "shuffle_report",
]
