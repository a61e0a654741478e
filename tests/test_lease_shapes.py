"""Leases of mixtures, packs, buckets, samples and maps: workers together have the batches of a single pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastpipe
import fixtures
from processes import together
from samples import digests

pa = pytest.importorskip("pyarrow")

url = fixtures.url


def rows(first: int, **options: Any) -> fastpipe.Reader:
    table = pa.table(
        {
            "id": np.arange(first, first + 300),
            "tokens": [np.arange(each % 7, dtype="int32") for each in range(300)],
        }
    )
    return fastpipe.from_arrow(table, **{"batch_size": 8, "shuffle": True, "seed": 3} | options)


def mixture() -> fastpipe.Reader:
    return fastpipe.mix([rows(0), rows(1000, shuffle="block")], weights=[0.7, 0.3], seed=7)


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"] * 2}


SHAPES: dict[str, Callable[[], Any]] = {
    "mixture": mixture,
    "packs": lambda: rows(0).pack("tokens", 12),
    "buckets of a mixture": lambda: mixture().bucket("tokens"),
    "sample": lambda: rows(0).sample(100, seed=2),
    "filter": lambda: rows(0).filter(fastpipe.col("id") % 3 == 0),
    "map": lambda: rows(0).map(doubled, num_threads=2),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_workers_share_the_batches(url: str, shape: str) -> None:
    found: dict[Any, str] = {}

    def work(name: str) -> None:
        with SHAPES[shape]().lease(url, worker_name=name, stretch=3) as worker:
            for batch in worker:
                found[worker.position] = digests([batch])[0]
                worker.commit()

    together([threading.Thread(target=work, args=(f"w{number}",)) for number in range(3)])
    whole = SHAPES[shape]()
    assert found == {(0, step): digest for step, digest in enumerate(digests(whole))}
    status = fastpipe.leases.Ledger(url).status()
    assert status.finished
    assert sum(worker.batches for worker in status.workers) == len(whole)


def test_results_that_are_no_batches_are_leased(url: str) -> None:
    sums = rows(0).map(lambda batch: int(batch["id"].sum()))
    with sums.lease(url, worker_name="one") as worker:
        found = []
        for each in worker:
            found.append(each)
            worker.commit()
    sums.set_epoch(0)
    assert found == list(sums)


def test_another_grouping_is_another_job(url: str) -> None:
    with rows(0).pack("tokens", 12).lease(url, worker_name="one"), pytest.raises(fastpipe.errors.StateError):
        rows(0).pack("tokens", 13).lease(url, worker_name="two")
