"""Other services that carry batches to a consumer: tf.data service, and Ray Data's `iter_batches`.

Each has the data decoded and in memory, and what suits it best:

* tf.data service: dispatcher and worker in a separate process; no compression, messages by gRPC, as many requests
  outstanding as it likes, `prefetch(AUTOTUNE)`. Each epoch is of a job of its own, or what was fetched ahead would
  count as read in no time; starting a job, up to its first batch, isn't timed. Twice: `tfdata` makes batches of
  shuffled rows, as the service does; `tfdata-ready` has whole batches as the elements of its data set, and does nothing
  but send them.
* Ray Data: a materialized data set in the object store of this machine, in blocks of whole batches, as Arrow; read with
  several batches prefetched, without shuffling. Its blocks are mapped, not carried: it yields NumPy views of them where
  it can. It needs pandas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from harness.children import program

BATCH = 1024
# Rows that tf.data shuffles; blocks of Ray's data set, and batches that it prefetches.
SHUFFLED = 16_384
# Batches of shuffled rows that are read of tf.data: an epoch would take minutes.
MOST = 100
BLOCKS, PREFETCH = 16, 8

Arrays = dict[str, Any]
Way = Callable[[], Callable[[], int]]
"""Prepares to read an epoch, which isn't timed; what it returns reads it, or some of it, and returns the rows."""
Peer = Callable[[str], Way]
"""The way to read a table."""


def whole(arrays: Arrays) -> Arrays:
    """The rows of whole batches."""
    rows = len(next(iter(arrays.values()))) // BATCH * BATCH
    return {name: array[:rows] for name, array in arrays.items()}


def serve_tf_data(tables: dict[str, Arrays]) -> None:
    """A dispatcher and a worker in this process, until it is killed; prints where they are, and of what."""
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
    """tf.data service in a separate process.

    Args:
        command: starts it: it calls `serve_tf_data`.
        tables: that it has.
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
    """Ray on this machine alone."""
    import pyarrow as pa
    import ray

    # Not a cluster that happens to run here.
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
