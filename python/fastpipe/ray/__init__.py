"""fastpipe on Ray (extra `ray`): lease workers, batch servers, Ray Data datasets, and shards for Ray Train.

    import fastpipe.ray

    reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)
    with fastpipe.ray.serve(reader, num_servers=4) as service:
        remote = service.connect()        # four actors make its batches
    ds = fastpipe.ray.dataset(reader)     # a ray.data.Dataset, in the reader's order
    share = fastpipe.ray.shard(reader)    # within a loop of Ray Train

The contents of a batch depend only on the reader's seed, the epoch and the step. They never depend on how many
processes make the batches or which of them fail. The processes therefore keep no state.
"""

from __future__ import annotations

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("fastpipe.ray requires Ray: pip install 'fastpipe-data[ray]'") from error

from fastpipe.ray._datasets import dataset, shard
from fastpipe.ray._lease_workers import LeaseWorkers, PoolStatus, Result
from fastpipe.ray._service import Service, ServiceStatus, serve

__all__ = ["LeaseWorkers", "PoolStatus", "Result", "Service", "ServiceStatus", "dataset", "serve", "shard"]
