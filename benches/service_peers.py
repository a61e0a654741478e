"""Other services that send batches to a consumer: tf.data service and Ray Data.

Each service has the decoded dataset in memory and runs with the settings that suit it best:

* tf.data service: The dispatcher and the worker run in a separate process, without compression, with gRPC messages, the
  default number of outstanding requests, and `prefetch(AUTOTUNE)`. Each epoch is a separate job; otherwise, batches
  prefetched in advance would seem to take no time. Starting a job, up to its first batch, isn't timed. There are two
  variants: `tfdata` batches shuffled rows, as the fastpipe service does. `tfdata-ready` stores whole batches as
  dataset elements and only sends them.
* Ray Data: `iter_batches` reads a materialized dataset from the object store of this machine without shuffling. Blocks
  are Arrow tables of whole batches, and several batches are prefetched. Blocks are mapped instead of sent, and Ray
  yields NumPy views of them if possible. It needs pandas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from harness.children import program

BATCH = 1024
# Shuffle buffer of tf.data in rows.
SHUFFLED = 16_384
# Maximum number of shuffled batches to read from tf.data. A whole epoch would take minutes.
MOST = 100
# Blocks of Ray's dataset, and batches that Ray prefetches.
BLOCKS, PREFETCH = 16, 8

Arrays = dict[str, Any]
Way = Callable[[], Callable[[], int]]
"""Prepares an epoch, which isn't timed. Returns a function that reads it, or a part, and returns its row count."""
Peer = Callable[[str], Way]
"""Returns the way to read a table."""


def whole(arrays: Arrays) -> Arrays:
    """Returns the rows that fill whole batches."""
    rows = len(next(iter(arrays.values()))) // BATCH * BATCH
    return {name: array[:rows] for name, array in arrays.items()}


def serve_tf_data(tables: dict[str, Arrays]) -> None:
    """Runs a dispatcher and a worker until the process is killed. Prints their address and dataset ids."""
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    target = dispatcher.target
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=target.split("://")[1]))
    ids = {}
    for kind, arrays in tables.items():
        rows = whole(arrays)
        ready = {name: array.reshape(-1, BATCH, *array.shape[1:]) for name, array in rows.items()}
        datasets = {
            "ready": tf.data.Dataset.from_tensor_slices(ready).repeat(),
            "rows": tf.data.Dataset.from_tensor_slices(rows)
            .repeat()
            .shuffle(SHUFFLED)
            .batch(BATCH, drop_remainder=True, num_parallel_calls=tf.data.AUTOTUNE),
        }
        for name, dataset in datasets.items():
            ids[f"{kind} {name}"] = service.register_dataset(target, dataset, compression=None).numpy().decode()
    print(json.dumps({"target": target, "ids": ids}), flush=True)
    worker.join()


@contextmanager
def tf_data(command: list[str], tables: dict[str, Arrays]) -> Iterator[dict[str, Peer]]:
    """Starts tf.data service in a separate process. Yields its peers by name.

    Args:
        command: Command of a process that calls `serve_tf_data`.
        tables: Tables that the service contains.
    """
    import tensorflow as tf

    service = tf.data.experimental.service
    with program(command) as (_, line):
        told = json.loads(line)

        def way(kind: str, made_of: str) -> Way:
            arrays = whole(tables[kind])
            spec = {name: tf.TensorSpec((BATCH, *array.shape[1:]), array.dtype) for name, array in arrays.items()}
            dataset = service.from_dataset_id(
                processing_mode=service.ShardingPolicy.OFF,
                service=told["target"],
                dataset_id=told["ids"][f"{kind} {made_of}"],
                element_spec=spec,
                data_transfer_protocol="grpc",
            )
            number = len(next(iter(arrays.values()))) // BATCH
            if made_of == "rows":
                number = min(number, MOST)

            def prepared() -> Callable[[], int]:
                batches = iter(dataset.prefetch(tf.data.AUTOTUNE).as_numpy_iterator())
                first = next(batches)
                if made_of == "ready":
                    assert all(np.array_equal(first[name], array[:BATCH]) for name, array in arrays.items())
                return lambda: sum(len(next(iter(next(batches).values()))) for _ in range(number))

            return prepared

        yield {"tfdata": lambda kind: way(kind, "rows"), "tfdata-ready": lambda kind: way(kind, "ready")}


@contextmanager
def ray_data(tables: dict[str, Arrays]) -> Iterator[Peer]:
    """Starts Ray on this machine. Yields the peer that reads with Ray Data."""
    import pyarrow as pa
    import ray

    # "local" avoids a connection to a cluster that happens to run on this machine.
    ray.init("local", include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30, logging_level="ERROR")
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False

        def block(arrays: Arrays) -> Any:
            if any(array.ndim > 1 for array in arrays.values()):
                tensors = ray.data.extensions.ArrowTensorArray
                return pa.table({name: tensors.from_numpy(array) for name, array in arrays.items()})
            return pa.table(arrays)

        def peer(kind: str) -> Way:
            arrays = whole(tables[kind])
            rows = len(next(iter(arrays.values())))
            step = -(-rows // BATCH // BLOCKS) * BATCH
            blocks = [
                block({name: array[start : start + step] for name, array in arrays.items()})
                for start in range(0, rows, step)
            ]
            dataset = ray.data.from_arrow(blocks).materialize()

            def read() -> int:
                found = 0
                for batch in dataset.iter_batches(batch_size=BATCH, batch_format="numpy", prefetch_batches=PREFETCH):
                    found += len(next(iter(batch.values())))
                return found

            assert read() == rows
            return lambda: read

        yield peer
    finally:
        ray.shutdown()
