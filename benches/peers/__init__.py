"""The readers that are compared, each in a process and an environment of its own.

One family a file: `ours` (fastpipe), `records` (fastavro), `frames` (polars, polars-avro, jetliner, DuckDB,
arrow-avro), `tensors` (AvroTensorDataset and AvroRecordDataset of tensorflow-io) and `parquet` (readers of Parquet
files). `worker` is what runs in the reader's process, `process` the driver's end of it, `environments` makes the
environments. This module only names the readers: the drivers import it, and so do the workers, whose environments lack
one another's libraries.
"""

from __future__ import annotations

from dataclasses import dataclass

from peers.ours import FastpipeWorker
from peers.process import Peer, Sample

__all__ = ["READERS", "FastpipeWorker", "Peer", "Reader", "Sample"]


@dataclass(frozen=True)
class Reader:
    """A way to read a file that is measured.

    Attributes:
        name: What tables call it.
        env: A key of `environments.PINS`; None: the driver's own.
        worker: Module of this package and class, as `module:Class`.
        gives: What a pass yields.
        peer: Whose reader it is. A peer counts with the fastest of its readers.
        shuffles: Whether it can give the rows in a shuffled order.
        part: It reads the first records alone, one in so many of them, and rates are compared.
        only: The cells it takes part in; empty: all. "tf" stands for those of `atds.py`,
            "frames" and "parquet" for those of `frames.py` and `parquet.py`.
    """

    name: str
    env: str | None
    worker: str
    gives: str
    peer: str
    shuffles: bool = False
    part: int = 1
    only: tuple[str, ...] = ()


_ALL = [
    Reader("fastpipe", None, "ours:FastpipeWorker", "NumPy batches", "fastpipe", shuffles=True),
    Reader("atds", "tensorflow-io", "tensors:AtdsWorker", "tensors", "AvroTensorDataset", shuffles=True),
    Reader(
        "atds-numpy", "tensorflow-io", "tensors:AtdsNumpyWorker", "NumPy batches", "AvroTensorDataset", shuffles=True
    ),
    Reader(
        "avro-record-dataset",
        "tensorflow-io",
        "tensors:AvroRecordWorker",
        "tensors",
        "AvroRecordDataset",
        part=32,
        only=("a/null",),
    ),
    Reader(
        "atds-epochs", "tensorflow-io", "tensors:AtdsEpochsWorker", "tensors", "AvroTensorDataset", True, 1, ("tf",)
    ),
    Reader("atds-graph", "tensorflow-io", "tensors:AtdsGraphWorker", "tensors", "AvroTensorDataset", True, 1, ("tf",)),
    Reader("fastpipe-atds", None, "tensors:FastpipeAtdsWorker", "tensors", "fastpipe.tf", True, 1, ("tf",)),
    Reader("fastpipe-atds-graph", None, "tensors:FastpipeAtdsGraphWorker", "tensors", "fastpipe.tf", True, 1, ("tf",)),
    Reader("fastavro", "fastavro", "records:FastavroWorker", "NumPy batches", "fastavro", part=8),
    Reader(
        "fastavro-records",
        "fastavro",
        "records:FastavroRecordsWorker",
        "Python records, no arrays",
        "fastavro",
        part=8,
    ),
    Reader("polars", "polars", "frames:PolarsWorker", "one frame", "frames"),
    Reader("polars-avro", "polars-avro", "frames:PolarsAvroWorker", "one frame", "frames"),
    Reader("polars-avro-batches", "polars-avro", "frames:PolarsAvroBatchesWorker", "frames of a batch", "frames"),
    Reader("polars-avro-numpy", "polars-avro", "frames:PolarsAvroNumpyWorker", "NumPy batches", "frames"),
    Reader("jetliner", "jetliner", "frames:JetlinerWorker", "one frame", "frames"),
    Reader("jetliner-batches", "jetliner", "frames:JetlinerBatchesWorker", "frames of a batch or block", "frames"),
    Reader("jetliner-numpy", "jetliner", "frames:JetlinerNumpyWorker", "NumPy, a batch or block", "frames"),
    Reader("duckdb", "duckdb", "frames:DuckdbWorker", "one Arrow table", "frames", part=8),
    Reader("duckdb-batches", "duckdb", "frames:DuckdbBatchesWorker", "Arrow record batches", "frames", part=8),
    Reader("duckdb-numpy", "duckdb", "frames:DuckdbNumpyWorker", "NumPy batches", "frames", part=8),
    Reader("fastpipe-table", None, "frames:FastpipeTableWorker", "one Arrow table", "fastpipe", False, 1, ("frames",)),
    Reader("fastpipe-polars", None, "frames:FastpipePolarsWorker", "one frame", "fastpipe", False, 1, ("frames",)),
    Reader(
        "fastpipe-batches",
        None,
        "frames:FastpipeRecordBatchesWorker",
        "record batches",
        "fastpipe",
        False,
        1,
        ("frames",),
    ),
    Reader("arrow-avro", None, "frames:ArrowAvroWorker", "record batches, kept", "arrow-avro", False, 1, ("frames",)),
    Reader(
        "arrow-avro-batches", None, "frames:ArrowAvroBatchesWorker", "record batches", "arrow-avro", only=("frames",)
    ),
    Reader("arrow-avro-views", None, "frames:ArrowAvroViewsWorker", "record batches", "arrow-avro", only=("frames",)),
    Reader("fastpipe-parquet", None, "parquet:FastpipeWorker", "NumPy batches", "fastpipe", True, only=("parquet",)),
    Reader("pyarrow-parquet", None, "parquet:PyarrowWorker", "record batches", "pyarrow", only=("parquet",)),
    Reader("datasets", "datasets", "parquet:DatasetsWorker", "NumPy batches", "datasets", True, only=("parquet",)),
    Reader("ray-data", "ray-data", "parquet:RayWorker", "NumPy batches", "ray-data", True, only=("parquet",)),
]
READERS: dict[str, Reader] = {reader.name: reader for reader in _ALL}
