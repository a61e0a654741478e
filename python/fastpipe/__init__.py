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

from typing import TYPE_CHECKING

# Imported eagerly, so that importing fastpipe fails if the extension is broken.
from fastpipe._fastpipe import __version__ as __version__
from fastpipe._lazy import lazily

# Type checkers read the imports, and programs the table: each name is imported when it is first used.
if TYPE_CHECKING:
    from fastpipe._arrow import to_arrow as to_arrow
    from fastpipe._reader.growth import Growth as Growth
    from fastpipe._reader.growth import resume_grown as resume_grown
    from fastpipe._reader.options import Options as Options
    from fastpipe._reader.partitions import Partition as Partition
    from fastpipe._reader.reader import Reader as Reader
    from fastpipe._reader.rebatch import Rebatcher as Rebatcher
    from fastpipe._reader.rebatch import rebatch as rebatch
    from fastpipe._reader.sampling import sample as sample
    from fastpipe._reader.sampling import take as take
    from fastpipe.batch import Masked as Masked
    from fastpipe.batch import Ragged as Ragged
    from fastpipe.batch import Sparse as Sparse
    from fastpipe.batch import SparseCSR as SparseCSR
    from fastpipe.batch import Strings as Strings
    from fastpipe.batch._decimals import DecimalSpec as DecimalSpec
    from fastpipe.batch._decimals import to_decimals as to_decimals
    from fastpipe.errors import ColumnsLeftOutWarning as ColumnsLeftOutWarning
    from fastpipe.errors import DeviceError as DeviceError
    from fastpipe.errors import FastpipeError as FastpipeError
    from fastpipe.errors import InteractionsError as InteractionsError
    from fastpipe.errors import LedgerError as LedgerError
    from fastpipe.errors import LimitError as LimitError
    from fastpipe.errors import MalformedFileError as MalformedFileError
    from fastpipe.errors import MissingFileError as MissingFileError
    from fastpipe.errors import NullValueError as NullValueError
    from fastpipe.errors import OutOfMemoryError as OutOfMemoryError
    from fastpipe.errors import PassClosedError as PassClosedError
    from fastpipe.errors import RowsLeftOutWarning as RowsLeftOutWarning
    from fastpipe.errors import SchemaError as SchemaError
    from fastpipe.errors import ServiceError as ServiceError
    from fastpipe.errors import ShapeError as ShapeError
    from fastpipe.errors import StaleLeaseError as StaleLeaseError
    from fastpipe.errors import StateError as StateError
    from fastpipe.errors import StorageError as StorageError
    from fastpipe.errors import UnseenItemsError as UnseenItemsError
    from fastpipe.errors import UnsupportedError as UnsupportedError
    from fastpipe.errors import ValueRangeError as ValueRangeError
    from fastpipe.errors import WorkerError as WorkerError
    from fastpipe.leases import EpochStatus as EpochStatus
    from fastpipe.leases import LeaseWorker as LeaseWorker
    from fastpipe.leases import Ledger as Ledger
    from fastpipe.leases import LedgerStatus as LedgerStatus
    from fastpipe.leases import StepOfEpoch as StepOfEpoch
    from fastpipe.leases import WorkerStatus as WorkerStatus
    from fastpipe.service import LocalService as LocalService
    from fastpipe.service import connect as connect
    from fastpipe.sources._tables import RowLocation as RowLocation
    from fastpipe.sources._tables import from_arrays as from_arrays
    from fastpipe.sources._tables import from_arrow as from_arrow
    from fastpipe.sources.avro import AvroFile as AvroFile
    from fastpipe.sources.avro import Location as Location
    from fastpipe.sources.avro import MessageDecoder as MessageDecoder
    from fastpipe.sources.avro import WrittenFile as WrittenFile
    from fastpipe.sources.avro import decode_messages as decode_messages
    from fastpipe.sources.avro import infer_features as infer_features
    from fastpipe.sources.avro import read_avro as read_avro
    from fastpipe.sources.avro import write_avro as write_avro
    from fastpipe.sources.csv import CsvLocation as CsvLocation
    from fastpipe.sources.csv import CsvSample as CsvSample
    from fastpipe.sources.csv import RowEstimate as RowEstimate
    from fastpipe.sources.csv import read_csv as read_csv
    from fastpipe.sources.csv import sample_csv as sample_csv
    from fastpipe.sources.interactions import HeldOut as HeldOut
    from fastpipe.sources.interactions import Interactions as Interactions
    from fastpipe.sources.interactions import PointLocation as PointLocation
    from fastpipe.sources.interactions import read_interactions as read_interactions
    from fastpipe.sources.interactions._evaluation import Candidates as Candidates
    from fastpipe.sources.interactions._evaluation import evaluation_candidates as evaluation_candidates
    from fastpipe.sources.interactions._evaluation import hit_rate as hit_rate
    from fastpipe.sources.interactions._evaluation import ndcg as ndcg
    from fastpipe.sources.sql import SqlPartition as SqlPartition
    from fastpipe.sources.sql import SqlPlan as SqlPlan
    from fastpipe.sources.sql import partition_sql as partition_sql
    from fastpipe.sources.sql import read_sql as read_sql
    from fastpipe.sources.units import UnitLocation as UnitLocation
    from fastpipe.sources.units import Units as Units
    from fastpipe.sources.units import read_arrow as read_arrow
    from fastpipe.sources.units import read_parquet as read_parquet
    from fastpipe.sources.units import read_units as read_units
    from fastpipe.specs import DenseSpec as DenseSpec
    from fastpipe.specs import Features as Features
    from fastpipe.specs import RaggedSpec as RaggedSpec
    from fastpipe.specs import SparseSpec as SparseSpec
    from fastpipe.specs._vocabularies import HashSpec as HashSpec
    from fastpipe.specs._vocabularies import VocabularySpec as VocabularySpec
    from fastpipe.statistics import Description as Description
    from fastpipe.statistics import FeatureStatistics as FeatureStatistics
    from fastpipe.statistics import describe as describe
    from fastpipe.statistics._shuffle_report import ShuffleReport as ShuffleReport
    from fastpipe.statistics._shuffle_report import shuffle_report as shuffle_report
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            "fastpipe": "batch errors leases service sources specs statistics",
            "fastpipe._arrow": "to_arrow",
            "fastpipe._fastpipe": "__version__",
            "fastpipe._reader.growth": "Growth resume_grown",
            "fastpipe._reader.options": "Options",
            "fastpipe._reader.partitions": "Partition",
            "fastpipe._reader.reader": "Reader",
            "fastpipe._reader.rebatch": "Rebatcher rebatch",
            "fastpipe._reader.sampling": "sample take",
            "fastpipe.batch": "Masked Ragged Sparse SparseCSR Strings",
            "fastpipe.batch._decimals": "DecimalSpec to_decimals",
            "fastpipe.errors": (
                "ColumnsLeftOutWarning DeviceError FastpipeError InteractionsError LedgerError LimitError "
                "MalformedFileError MissingFileError NullValueError OutOfMemoryError PassClosedError "
                "RowsLeftOutWarning SchemaError ServiceError ShapeError StaleLeaseError StateError StorageError "
                "UnseenItemsError UnsupportedError ValueRangeError WorkerError"
            ),
            "fastpipe.leases": "EpochStatus LeaseWorker Ledger LedgerStatus StepOfEpoch WorkerStatus",
            "fastpipe.service": "LocalService connect",
            "fastpipe.sources._tables": "RowLocation from_arrays from_arrow",
            "fastpipe.sources.avro": (
                "AvroFile Location MessageDecoder WrittenFile decode_messages infer_features read_avro write_avro"
            ),
            "fastpipe.sources.csv": "CsvLocation CsvSample RowEstimate read_csv sample_csv",
            "fastpipe.sources.interactions": "HeldOut Interactions PointLocation read_interactions",
            "fastpipe.sources.interactions._evaluation": "Candidates evaluation_candidates hit_rate ndcg",
            "fastpipe.sources.sql": "SqlPartition SqlPlan partition_sql read_sql",
            "fastpipe.sources.units": "UnitLocation Units read_arrow read_parquet read_units",
            "fastpipe.specs": "DenseSpec Features RaggedSpec SparseSpec",
            "fastpipe.specs._vocabularies": "HashSpec VocabularySpec",
            "fastpipe.statistics": "Description FeatureStatistics describe",
            "fastpipe.statistics._shuffle_report": "ShuffleReport shuffle_report",
        },
    )
