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

from fastpipe._arrow import to_arrow
from fastpipe._fastpipe import __version__
from fastpipe._reader.growth import Growth, resume_grown
from fastpipe._reader.options import Options
from fastpipe._reader.partitions import Partition
from fastpipe._reader.reader import Reader
from fastpipe._reader.rebatch import Rebatcher, rebatch
from fastpipe._reader.sampling import sample, take
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.batch._decimals import DecimalSpec, to_decimals
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
from fastpipe.leases import EpochStatus, LeaseWorker, Ledger, LedgerStatus, StepOfEpoch, WorkerStatus
from fastpipe.service import LocalService, connect
from fastpipe.sources._tables import RowLocation, from_arrays, from_arrow
from fastpipe.sources.avro import (
    AvroFile,
    Location,
    MessageDecoder,
    WrittenFile,
    decode_messages,
    infer_features,
    read_avro,
    write_avro,
)
from fastpipe.sources.csv import CsvLocation, CsvSample, RowEstimate, read_csv, sample_csv
from fastpipe.sources.interactions import HeldOut, Interactions, PointLocation, read_interactions
from fastpipe.sources.interactions._evaluation import Candidates, evaluation_candidates, hit_rate, ndcg
from fastpipe.sources.sql import SqlPartition, SqlPlan, partition_sql, read_sql
from fastpipe.sources.units import UnitLocation, Units, read_arrow, read_parquet, read_units
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec
from fastpipe.specs._vocabularies import HashSpec, VocabularySpec
from fastpipe.statistics import Description, FeatureStatistics, describe
from fastpipe.statistics._shuffle_report import ShuffleReport, shuffle_report

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
