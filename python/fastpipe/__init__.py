"""fastpipe reads Avro files into shuffled, batched NumPy arrays without copying them.

    import fastpipe

    for batch in fastpipe.read_avro("data/*.avro", batch_size=1024):
        batch["user_embedding"]  # numpy float32 [1024, 64]
        batch["clicked_items"]   # fastpipe.Ragged(values, offsets)

`read_csv`, `read_parquet`, `read_arrow`, `read_units` (custom sources), `from_arrow` and `from_arrays` (tables in
memory) read in the same way; `write_avro` writes.

Importing fastpipe imports NumPy and nothing else.
"""

from __future__ import annotations

from fastpipe._columns import to_arrow
from fastpipe._decimals import DecimalSpec, to_decimals
from fastpipe._fastpipe import __version__
from fastpipe._options import Options
from fastpipe._parts import Partition
from fastpipe._reader_growth import Growth, resume_grown
from fastpipe._reader_samples import sample, take
from fastpipe._shuffle_report import ShuffleReport, shuffle_report
from fastpipe.avro import (
    AvroFile,
    Location,
    MessageDecoder,
    WrittenFile,
    decode_messages,
    infer_features,
    read_avro,
    write_avro,
)
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.csv import CsvLocation, CsvSample, RowEstimate, read_csv, sample_csv
from fastpipe.description import Description, FeatureStatistics, describe
from fastpipe.errors import (
    ColumnsLeftOutWarning,
    DeviceError,
    FastpipeError,
    InteractionsError,
    LedgerError,
    LimitError,
    MalformedFileError,
    MissingFileError,
    NullValueError,
    OutOfMemoryError,
    PassClosedError,
    RowsLeftOutWarning,
    SchemaError,
    ServiceError,
    ShapeError,
    StaleLeaseError,
    StateError,
    StorageError,
    UnseenItemsError,
    UnsupportedError,
    ValueRangeError,
    WorkerError,
)
from fastpipe.evaluation import Candidates, evaluation_candidates, hit_rate, ndcg
from fastpipe.interactions import HeldOut, Interactions, PointLocation, read_interactions
from fastpipe.leases import EpochStatus, LeaseWorker, Ledger, LedgerStatus, StepOfEpoch, WorkerStatus
from fastpipe.reader import Reader
from fastpipe.rebatch import Rebatcher, rebatch
from fastpipe.service import LocalService, connect
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec
from fastpipe.sql import SqlPartition, SqlPlan, partition_sql, read_sql
from fastpipe.tables import RowLocation, from_arrays, from_arrow
from fastpipe.units import UnitLocation, Units, read_arrow, read_parquet, read_units
from fastpipe.vocabularies import HashSpec, VocabularySpec

__all__ = [
    "AvroFile",
    "Candidates",
    "ColumnsLeftOutWarning",
    "CsvLocation",
    "CsvSample",
    "DecimalSpec",
    "DenseSpec",
    "Description",
    "DeviceError",
    "EpochStatus",
    "FastpipeError",
    "FeatureStatistics",
    "Features",
    "Growth",
    "HashSpec",
    "HeldOut",
    "Interactions",
    "InteractionsError",
    "LeaseWorker",
    "Ledger",
    "LedgerError",
    "LedgerStatus",
    "LimitError",
    "LocalService",
    "Location",
    "MalformedFileError",
    "Masked",
    "MessageDecoder",
    "MissingFileError",
    "NullValueError",
    "Options",
    "OutOfMemoryError",
    "Partition",
    "PassClosedError",
    "PointLocation",
    "Ragged",
    "RaggedSpec",
    "Reader",
    "Rebatcher",
    "RowEstimate",
    "RowLocation",
    "RowsLeftOutWarning",
    "SchemaError",
    "ServiceError",
    "ShapeError",
    "ShuffleReport",
    "Sparse",
    "SparseCSR",
    "SparseSpec",
    "SqlPartition",
    "SqlPlan",
    "StaleLeaseError",
    "StateError",
    "StepOfEpoch",
    "StorageError",
    "Strings",
    "UnitLocation",
    "Units",
    "UnseenItemsError",
    "UnsupportedError",
    "ValueRangeError",
    "VocabularySpec",
    "WorkerError",
    "WorkerStatus",
    "WrittenFile",
    "__version__",
    "connect",
    "decode_messages",
    "describe",
    "evaluation_candidates",
    "from_arrays",
    "from_arrow",
    "hit_rate",
    "infer_features",
    "ndcg",
    "partition_sql",
    "read_arrow",
    "read_avro",
    "read_csv",
    "read_interactions",
    "read_parquet",
    "read_sql",
    "read_units",
    "rebatch",
    "resume_grown",
    "sample",
    "sample_csv",
    "shuffle_report",
    "take",
    "to_arrow",
    "to_decimals",
    "write_avro",
]
