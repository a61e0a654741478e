"""fastpipe on Ray (extra `ray`): workers on leases, servers of batches, data sets of Ray Data, shares for Ray Train.

    import fastpipe.ray

    reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)
    with fastpipe.ray.serve(reader, num_servers=4) as service:
        remote = service.connect()        # four actors make its batches
    ds = fastpipe.ray.dataset(reader)     # a ray.data.Dataset, in the reader's order
    share = fastpipe.ray.shard(reader)    # within a loop of Ray Train

Which batch is which never depends on how many processes make them, or on which of them die: it follows from the
reader's seed, epoch and step. So nothing has to be kept in any of them.
"""

from __future__ import annotations

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError("fastpipe.ray needs Ray: pip install 'fastpipe-data[ray]'") from error

from fastpipe.ray._datasets import dataset, shard
from fastpipe.ray._lease_workers import LeaseWorkers, PoolStatus, Result
from fastpipe.ray._service import Service, ServiceStatus, serve

__all__ = ["LeaseWorkers", "PoolStatus", "Result", "Service", "ServiceStatus", "dataset", "serve", "shard"]
