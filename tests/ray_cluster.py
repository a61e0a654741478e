"""A Ray cluster of two nodes on this machine, with three cores, for the tests of a file that imports `cluster`."""

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
# Options of actors that take no core, so that eight of them run on two.
LIGHT = {"num_cpus": 0}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    store = {"object_store_memory": 200_000_000}
    # What gathers these statistics logs to a file that pytest has closed.
    environment = pytest.MonkeyPatch()
    environment.setenv("RAY_DATA_USAGE_DISABLED", "1")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **store})
    cluster.add_node(num_cpus=1, **store)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": paths})
    yield
    ray.shutdown()
    cluster.shutdown()
    environment.undo()


def eventually(true: Callable[[], object]) -> None:
    """Waits for a condition that must become true. If it doesn't, pytest's timeout ends the test."""
    while not true():
        time.sleep(0.02)
