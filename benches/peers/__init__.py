"""The readers that are compared, each in a separate process and environment.

There is one file for each family: `ours` (fastpipe), `records` (fastavro), `frames` (polars, polars-avro, jetliner,
DuckDB, arrow-avro), `tensors` (AvroTensorDataset and AvroRecordDataset of tensorflow-io), `parquet` (readers of Parquet
files), `sql` (readers of databases), `training` (a model that is trained through `tf.data`), `small` (tensorflow-io's
small benchmarks) and `files` (files that aren't in the page cache). `worker` runs in the reader's process, `process`
controls it from the driver, and `environments` creates the environments. This module only lists the readers and imports
none of their libraries, because both the drivers and the workers of all environments import it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from peers.process import Peer

__all__ = ["READERS", "Peer", "Reader"]


@dataclass(frozen=True)
class Reader:
    """One measured way to read a file.

    Attributes:
        worker: The worker class and its module in this package, as `module:Class`.
        env: A key of `environments.PINS`, or None for the driver's environment.
        gives: The type of the results, as tables show it.
        peer: The library that the reader belongs to. The fastest reader of a peer counts.
        shuffles: Whether it can return the rows in a shuffled order.
        part: The reader reads only the first 1/`part` of the records; rates are compared.
        only: The cells of `compare.py` that it is measured in. Empty for all cells.
        name: Its name in tables.
    """

    worker: str
    env: str | None
    gives: str
    peer: str
    shuffles: bool = False
    part: int = 1
    only: tuple[str, ...] = ()
    name: str = ""


NEVER = ("none",)
"""No cell of `compare.py`: only other benches use the reader."""
TENSORS, NUMPY, RECORDS = "tensors", "NumPy batches", "record batches"
ATDS, FRAMES = "AvroTensorDataset", "frames"
_READERS = {
    "fastpipe": Reader("ours:FastpipeWorker", None, NUMPY, "fastpipe", True),
    "atds": Reader("tensors:AtdsWorker", "tensorflow-io", TENSORS, ATDS, True),
    "atds-numpy": Reader("tensors:AtdsNumpyWorker", "tensorflow-io", NUMPY, ATDS, True),
    "avro-record-dataset": Reader(
        "tensors:AvroRecordWorker", "tensorflow-io", TENSORS, "AvroRecordDataset", part=32, only=("a/null",)
    ),
    "fastavro": Reader("records:FastavroWorker", "fastavro", NUMPY, "fastavro", part=8),
    "fastavro-records": Reader(
        "records:FastavroRecordsWorker", "fastavro", "Python records, no arrays", "fastavro", part=8
    ),
    "polars": Reader("frames:PolarsWorker", "polars", "one frame", FRAMES),
    "polars-avro": Reader("frames:PolarsAvroWorker", "polars-avro", "one frame", FRAMES),
    "polars-avro-batches": Reader("frames:PolarsAvroBatchesWorker", "polars-avro", "frames of a batch", FRAMES),
    "polars-avro-numpy": Reader("frames:PolarsAvroNumpyWorker", "polars-avro", NUMPY, FRAMES),
    "jetliner": Reader("frames:JetlinerWorker", "jetliner", "one frame", FRAMES),
    "jetliner-batches": Reader("frames:JetlinerBatchesWorker", "jetliner", "frames of a batch or block", FRAMES),
    "jetliner-numpy": Reader("frames:JetlinerNumpyWorker", "jetliner", "NumPy, a batch or block", FRAMES),
    "duckdb": Reader("frames:DuckdbWorker", "duckdb", "one Arrow table", FRAMES, part=8),
    "duckdb-batches": Reader("frames:DuckdbBatchesWorker", "duckdb", "Arrow record batches", FRAMES, part=8),
    "duckdb-numpy": Reader("frames:DuckdbNumpyWorker", "duckdb", NUMPY, FRAMES, part=8),
    "atds-epochs": Reader("tensors:AtdsEpochsWorker", "tensorflow-io", TENSORS, ATDS, True, only=NEVER),
    "atds-graph": Reader("tensors:AtdsGraphWorker", "tensorflow-io", TENSORS, ATDS, True, only=NEVER),
    "fastpipe-atds": Reader("tensors:FastpipeAtdsWorker", None, TENSORS, "fastpipe.tf", True, only=NEVER),
    "fastpipe-atds-graph": Reader("tensors:FastpipeAtdsGraphWorker", None, TENSORS, "fastpipe.tf", True, only=NEVER),
    "fastpipe-table": Reader("frames:FastpipeTableWorker", None, "one Arrow table", "fastpipe", only=NEVER),
    "fastpipe-polars": Reader("frames:FastpipePolarsWorker", None, "one frame", "fastpipe", only=NEVER),
    "fastpipe-batches": Reader("frames:FastpipeRecordBatchesWorker", None, RECORDS, "fastpipe", only=NEVER),
    "arrow-avro": Reader("frames:ArrowAvroWorker", None, "record batches, kept", "arrow-avro", only=NEVER),
    "arrow-avro-batches": Reader("frames:ArrowAvroBatchesWorker", None, RECORDS, "arrow-avro", only=NEVER),
    "arrow-avro-views": Reader("frames:ArrowAvroViewsWorker", None, RECORDS, "arrow-avro", only=NEVER),
    "fastpipe-parquet": Reader("parquet:FastpipeWorker", None, NUMPY, "fastpipe", True, only=NEVER),
    "pyarrow-parquet": Reader("parquet:PyarrowWorker", None, RECORDS, "pyarrow", only=NEVER),
    "pyarrow-take": Reader("parquet:TakeWorker", None, RECORDS, "pyarrow", True, only=NEVER),
    "polars-parquet": Reader("parquet:PolarsWorker", "polars", "one frame", "polars", only=NEVER),
    "datasets": Reader("parquet:DatasetsWorker", "datasets", NUMPY, "datasets", True, only=NEVER),
    "ray-data": Reader("parquet:RayWorker", "ray-data", NUMPY, "ray-data", True, only=NEVER),
    "fastpipe-sql": Reader("sql:FastpipeWorker", None, NUMPY, "fastpipe", only=NEVER),
    "connectorx": Reader("sql:ConnectorxWorker", "sql", "an Arrow table", "connectorx", only=NEVER),
    "plain": Reader("files:PlainWorker", None, "nothing", "plain reads", True, only=NEVER),
    "plain-parallel": Reader("files:PlainParallelWorker", None, "nothing", "plain reads", True, only=NEVER),
    "fastpipe-first": Reader("files:FastpipeFirstWorker", None, NUMPY, "fastpipe", True, only=NEVER),
    "fastpipe-later": Reader("files:FastpipeLaterWorker", None, NUMPY, "fastpipe", True, only=NEVER),
    "train-held": Reader("training:HeldTrainingWorker", "tensorflow-io", "training", "none", only=NEVER),
    "train-avro-record": Reader(
        "training:AvroRecordTrainingWorker", "tensorflow-io", "training", "AvroRecordDataset", only=NEVER
    ),
    "train-atds": Reader("training:AtdsTrainingWorker", "tensorflow-io", "training", ATDS, only=NEVER),
    "train-fastpipe": Reader("training:FastpipeTrainingWorker", "tensorflow-io", "training", "fastpipe.tf", only=NEVER),
    "atds-small": Reader("small:SmallWorker", "tensorflow-io", TENSORS, ATDS, only=NEVER),
    "fastpipe-small": Reader("small:FastpipeSameSmallWorker", "tensorflow-io", TENSORS, "fastpipe.tf", only=NEVER),
    "fastpipe-small-newest": Reader("small:FastpipeSmallWorker", None, TENSORS, "fastpipe.tf", only=NEVER),
    "ray-sql": Reader("sql:RayWorker", "sql", NUMPY, "ray-data", only=NEVER),
    "pandas-sql": Reader("sql:PandasWorker", "sql", "frames", "pandas", only=NEVER),
}
READERS = {name: replace(reader, name=name) for name, reader in _READERS.items()}
