"""`fastpipe.ray`: Ray actors share leases while actors join, leave and crash. Uses a real, local Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe.errors import StateError, WorkerError

ray = pytest.importorskip("ray")
import fastpipe.ray  # noqa: E402
from ray_cluster import LIGHT, MARKS, cluster, eventually  # noqa: E402

__all__ = ["cluster"]

pytestmark = MARKS

ROWS, BATCH = 600, 5
STEPS = ROWS // BATCH
LEASE = {"stretch": 4, "ttl": 2.0}


@pytest.fixture
def reader() -> fastpipe.Reader:
    return fastpipe.from_arrays(
        {"id": np.arange(ROWS)}, batch_size=BATCH, shuffle=True, shuffle_buffer=100, seed=3, epochs=2
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def each_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


def ids(batch: dict[str, Any]) -> list[int]:
    time.sleep(0.005)
    return [os.getpid(), *batch["id"].tolist()]


def expected(reader: fastpipe.Reader) -> list[tuple[int, int, list[int]]]:
    found = []
    for epoch in range(2):
        reader.set_epoch(epoch)
        found += [(epoch, step, reader.batch_at(step)["id"].tolist()) for step in range(STEPS)]
    return found


def check(results: list[fastpipe.ray.Result], reader: fastpipe.Reader) -> None:
    """Checks that each batch is returned once, in the order that `join` promises, with its rows."""
    assert [(epoch, step, value[1:]) for epoch, step, _, value in results] == expected(reader)


def test_each_batch_is_used_once_while_workers_change(reader: fastpipe.Reader, each_url: str, tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"

    def slowly(batch: dict[str, Any]) -> list[int]:
        if not hurry.exists():
            time.sleep(0.3)  # Lets all workers start before the first one finishes.
        return [os.getpid(), *batch["id"].tolist()]

    with fastpipe.ray.LeaseWorkers(
        reader, each_url, slowly, num_workers=2, actor_options=LIGHT, max_results=10_000, **LEASE
    ) as pool:
        eventually(lambda: len(pool.status().running) == 2)
        pool.scale(5)
        eventually(lambda: len(pool.status().running) == 5)
        first = set(pool.status().running)
        pool.scale(3)
        assert len(pool.status().running) == 3
        assert set(pool.status().running) < first
        hurry.touch()
        results = pool.join()
        assert pool.status().done
    check(results, reader)
    assert len({value[0] for *_, value in results}) > 2
    assert fastpipe.leases.Ledger(each_url).status().finished


class Dying:
    """Exits its process at its fifth batch, until a counter in a file reaches two exits."""

    def __init__(self, lives: Path) -> None:
        self._lives, self._used = lives, 0

    def __call__(self, batch: dict[str, Any]) -> list[int]:
        self._used += 1
        if self._used == 5 and len(self._lives.read_text()) < 2:
            with self._lives.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return ids(batch)


def test_a_worker_that_exits_is_restarted(reader: fastpipe.Reader, url: str, tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    lives.write_text("")
    with fastpipe.ray.LeaseWorkers(
        reader, url, Dying(lives), num_workers=2, actor_options=LIGHT, max_results=10_000, **LEASE
    ) as pool:
        results = pool.join()
        assert pool.status().restarts == 2
    check(results, reader)


def test_too_many_exits_end_the_pool(reader: fastpipe.Reader, url: str) -> None:
    def die(batch: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with (
        fastpipe.ray.LeaseWorkers(reader, url, die, actor_options=LIGHT, max_restarts=1, **LEASE) as pool,
        pytest.raises(WorkerError, match=r"died after 1 restarts") as error,
    ):
        pool.join()
    assert error.value.worker_name
    assert error.value.step is None


def test_errors_name_the_batch(reader: fastpipe.Reader, url: str) -> None:
    def fail(batch: dict[str, Any]) -> int:
        if 17 in batch["id"]:
            raise ZeroDivisionError("no 17")
        return 1

    with (
        fastpipe.ray.LeaseWorkers(reader, url, fail, actor_options=LIGHT, **LEASE) as pool,
        pytest.raises(WorkerError, match=r"with batch \d+ of epoch 0:\n(.|\n)*ZeroDivisionError: no 17") as error,
    ):
        pool.join()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert error.value.epoch == 0
    assert error.value.step is not None
    assert 17 in reader.batch_at(error.value.step)["id"]
    assert error.value.worker_name in str(error.value)


class Locked(Exception):
    """An error that can't be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


def test_errors_that_cannot_be_pickled_are_reported(reader: fastpipe.Reader, url: str) -> None:
    def fail(batch: dict[str, Any]) -> None:
        raise Locked

    with (
        fastpipe.ray.LeaseWorkers(reader, url, fail, actor_options=LIGHT, **LEASE) as pool,
        pytest.raises(WorkerError, match=r"with batch \d+ of epoch 0:\n(.|\n)*Locked: locked") as error,
    ):
        pool.join()
    assert error.value.__cause__ is None


def test_errors_of_the_ledger_are_raised_unchanged(reader: fastpipe.Reader, url: str) -> None:
    other = fastpipe.from_arrays({"id": np.arange(7)}, batch_size=1)
    with other.lease(url, worker_name="other"):
        pass
    with (
        fastpipe.ray.LeaseWorkers(reader, url, ids, actor_options=LIGHT, **LEASE) as pool,
        pytest.raises(StateError, match="differs from this reader"),
    ):
        pool.join()


class Counting:
    """A consumer class that counts its calls, to show that each worker creates one instance."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, batch: dict[str, Any]) -> int:
        self.count += 1
        return self.count


def test_a_class_is_instantiated_once_per_worker(reader: fastpipe.Reader, url: str) -> None:
    with fastpipe.ray.LeaseWorkers(reader, url, Counting, num_workers=2, actor_options=LIGHT, **LEASE) as pool:
        counts: dict[str, list[int]] = {}
        for result in pool:
            counts.setdefault(result.worker_name, []).append(result.value)
    most = Counter({worker: max(values) for worker, values in counts.items()})
    assert all(len(values) <= most[worker] for worker, values in counts.items())
    assert most.total() >= 2 * STEPS


def test_results_wait_for_the_consumer(reader: fastpipe.Reader, url: str) -> None:
    with fastpipe.ray.LeaseWorkers(
        reader, url, ids, num_workers=2, actor_options=LIGHT, max_results=1, **LEASE
    ) as pool:
        results = iter(pool)
        first = next(results)
        # Two results are queued or on their way, and may be committed. No further batch is.
        time.sleep(1)
        status = fastpipe.leases.Ledger(url).status()
        assert not status.finished
        rest = list(results)
    assert len(rest) + 1 == 2 * STEPS
    assert first[:2] not in [result[:2] for result in rest]


def test_without_results_the_ledger_reports_progress(reader: fastpipe.Reader, url: str, tmp_path: Path) -> None:
    def keep(batch: dict[str, Any]) -> None:
        with (tmp_path / str(os.getpid())).open("a") as file:
            file.write("".join(f"{row}\n" for row in batch["id"]))

    with fastpipe.ray.LeaseWorkers(reader, url, keep, num_workers=2, actor_options=LIGHT, **LEASE) as pool:
        assert pool.join() == []
    assert fastpipe.leases.Ledger(url).status().finished
    rows = Counter(int(line) for path in tmp_path.glob("[0-9]*") for line in path.read_text().split())
    # A copied lease range of a straggler may be used twice, but no row is left out.
    assert rows.keys() == set(range(ROWS))
    assert min(rows.values()) >= 2


def test_a_closed_pool_releases_its_leases(reader: fastpipe.Reader, url: str) -> None:
    with fastpipe.ray.LeaseWorkers(reader, url, ids, num_workers=2, actor_options=LIGHT, **LEASE) as pool:
        taken = [next(iter(pool))]
    pool.close()
    assert list(pool) == []
    with pytest.raises(WorkerError, match="closed"):
        pool.scale(2)
    # Another pool resumes at once with the batches that aren't committed.
    with fastpipe.ray.LeaseWorkers(reader, url, ids, actor_options=LIGHT, max_results=1000, **LEASE) as pool:
        rest = pool.join()
    assert 0 < len(rest) < 2 * STEPS
    assert len({result[:2] for result in taken + rest}) == len(taken + rest)
    assert fastpipe.leases.Ledger(url).status().finished


def test_workers_that_ray_cannot_start_yet_are_pending(reader: fastpipe.Reader, url: str) -> None:
    with fastpipe.ray.LeaseWorkers(
        reader, url, ids, num_workers=1, actor_options={"num_cpus": 2}, max_results=1000, **LEASE
    ) as pool:
        eventually(lambda: pool.status().running)
        pool.scale(2)
        assert (len(pool.status().running), len(pool.status().pending)) == (1, 1)
        assert "1 running, 1 pending" in repr(pool)
        pool.scale(1)
        assert (len(pool.status().running), len(pool.status().pending)) == (1, 0)
        check(pool.join(), reader)


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"reader": 3}, TypeError, "reader must be a fastpipe.Reader"),
        ({"consume": 3}, TypeError, "consume must be a function"),
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1; got 0"),
        ({"num_workers": "2"}, TypeError, "integer"),
        ({"max_results": 0}, ValueError, "max_results must be at least 1; got 0"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be at least 0; got -1"),
        ({"worker_name": "me"}, TypeError, "chooses the names of its workers"),
        ({"consume": threading.Lock().acquire}, TypeError, "pickle"),
    ],
    ids=["reader", "consume", "num_workers", "text", "max_results", "max_restarts", "worker_name", "pickle"],
)
def test_wrong_arguments_are_refused(
    reader: fastpipe.Reader, url: str, wrong: dict[str, Any], error: type[Exception], match: str
) -> None:
    arguments: dict[str, Any] = {"reader": reader, "url": url, "consume": ids} | wrong
    with pytest.raises(error, match=match):
        fastpipe.ray.LeaseWorkers(**arguments)


def test_ctrl_c_ends_the_pool(tmp_path: Path) -> None:
    script = """
        import sys, time
        import numpy as np
        import ray
        import fastpipe
        import fastpipe.ray

        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        reader = fastpipe.from_arrays({"id": np.arange(100_000)}, batch_size=1)

        def slow(batch):
            time.sleep(0.05)
            return 1

        try:
            with fastpipe.ray.LeaseWorkers(reader, sys.argv[1], slow) as pool:
                for result in pool:
                    print("waits", flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            ray.shutdown()
            sys.exit(7)
    """
    url = f"sqlite:///{tmp_path}/ledger.db"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=500)
    assert (out.splitlines()[-1], process.returncode) == ("interrupted", 7), errors
    assert not fastpipe.leases.Ledger(url).status().finished
