"""fastpipe reads Avro files into shuffled, batched NumPy arrays without copying them.

    import fastpipe

    for batch in fastpipe.read_avro("data/*.avro", batch_size=1024):
        batch["user_embedding"]  # numpy float32 [1024, 64]
        batch["clicked_items"]   # fastpipe.Ragged(values, offsets)

`read_parquet`, `read_arrow`, `read_units` (custom sources), `from_arrow` and `from_arrays` (tables in memory)
read in the same way.

Importing fastpipe imports NumPy and nothing else.
"""

from __future__ import annotations

from fastpipe._columns import to_arrow
from fastpipe._fastpipe import __version__
from fastpipe._growth import Growth, resume_grown
from fastpipe._options import Options
from fastpipe._shuffle_report import ShuffleReport, shuffle_report
from fastpipe.avro import AvroFile, Location, infer_features, read_avro
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.errors import (
    DeviceError,
    FastpipeError,
    InteractionsError,
    LimitError,
    MalformedFileError,
    MissingFileError,
    NullValueError,
    OutOfMemoryError,
    PassClosedError,
    RowsLeftOutWarning,
    SchemaError,
    ShapeError,
    StateError,
    StorageError,
    UnseenItemsError,
    UnsupportedError,
    ValueRangeError,
)
from fastpipe.evaluation import Candidates, evaluation_candidates, hit_rate, ndcg
from fastpipe.interactions import HeldOut, Interactions, PointLocation, read_interactions
from fastpipe.reader import Reader
from fastpipe.rebatch import Rebatcher, rebatch
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec
from fastpipe.tables import RowLocation, from_arrays, from_arrow
from fastpipe.units import UnitLocation, Units, read_arrow, read_parquet, read_units

__all__ = [
    "AvroFile",
    "Candidates",
    "DenseSpec",
    "DeviceError",
    "FastpipeError",
    "Features",
    "Growth",
    "HeldOut",
    "Interactions",
    "InteractionsError",
    "LimitError",
    "Location",
    "MalformedFileError",
    "Masked",
    "MissingFileError",
    "NullValueError",
    "Options",
    "OutOfMemoryError",
    "PassClosedError",
    "PointLocation",
    "Ragged",
    "RaggedSpec",
    "Reader",
    "Rebatcher",
    "RowLocation",
    "RowsLeftOutWarning",
    "SchemaError",
    "ShapeError",
    "ShuffleReport",
    "Sparse",
    "SparseCSR",
    "SparseSpec",
    "StateError",
    "StorageError",
    "Strings",
    "UnitLocation",
    "Units",
    "UnseenItemsError",
    "UnsupportedError",
    "ValueRangeError",
    "__version__",
    "evaluation_candidates",
    "from_arrays",
    "from_arrow",
    "hit_rate",
    "infer_features",
    "ndcg",
    "read_arrow",
    "read_avro",
    "read_interactions",
    "read_parquet",
    "read_units",
    "rebatch",
    "resume_grown",
    "shuffle_report",
    "to_arrow",
]
