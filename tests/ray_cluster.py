"""A Ray cluster of two nodes on this machine, with three cores. A test file imports its fixture `cluster`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

__all__ = ["LIGHT", "MARKS", "cluster", "eventually"]

# Ray and pandas cause these warnings. Ray leaves some of its sockets and files to the garbage collector.
MARKS = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
# Options of actors that use no core, so that eight of them run on two cores.
LIGHT = {"num_cpus": 0}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    store = {"object_store_memory": 200_000_000}
    environment = pytest.MonkeyPatch()
    # Set for all nodes, so that tests can use the workers that the nodes start in advance. A runtime environment would
    # need other workers.
    environment.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    # The collector of these statistics logs to a file that pytest has closed.
    environment.setenv("RAY_DATA_USAGE_DISABLED", "1")
    # Other tests may use most of the machine's memory or cores, which must not make Ray kill or replace workers.
    environment.setenv("RAY_memory_monitor_refresh_ms", "0")
    environment.setenv("RAY_worker_register_timeout_seconds", "250")
    environment.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "250")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **store})
    cluster.add_node(num_cpus=1, **store)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
    cluster.shutdown()
    environment.undo()


def eventually(true: Callable[[], object]) -> None:
    """Waits until a condition is true. If it never is, pytest's timeout ends the test."""
    while not true():
        time.sleep(0.02)
