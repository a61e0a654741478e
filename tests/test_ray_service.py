"""`fastpipe.ray.serve`: servers that are killed, added and left while a pass runs. Ray is real: two nodes, local."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe.errors import ServiceError

ray = pytest.importorskip("ray")
pytest.importorskip("pyarrow.flight")
from ray._private.state import actors  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

import fastpipe.ray  # noqa: E402
from fastpipe.ray import _service  # noqa: E402

# Ray's own; of its sockets and files some are left to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

# Actors that take no core, so that several of them run on two.
LIGHT = {"num_cpus": 0}
# Batches of 100 KB, so that clients can hold servers back.
ARRAYS = {"id": np.arange(6400), "x": np.random.default_rng(1).random((6400, 800), "float32")}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    here = str(Path(__file__).parent)
    paths = {"PYTHONPATH": os.pathsep.join([here, *sys.path])}
    store = {"object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **store})
    cluster.add_node(num_cpus=1, **store)
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": paths},
    )
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpipe.service._directory._PAUSE", 0.1)
    # A server makes more batches in a turn than a test has.
    monkeypatch.setattr("fastpipe.service._schedule._TURN", 0.002)
    monkeypatch.setattr(_service, "_LEAVE", 0.5)


def read(**options: Any) -> fastpipe.Reader:
    given = {"batch_size": 32, "shuffle": True, "shuffle_buffer": 640, "seed": 7, "num_threads": 1}
    return fastpipe.from_arrays(ARRAYS, **given | options)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def eventually(true: Any) -> None:
    """Waits for something that must come; a test that waits in vain is ended by pytest's timeout."""
    while not true():
        time.sleep(0.02)


def kill(service: fastpipe.ray.Service, number: int = signal.SIGKILL) -> str:
    """Kills the process of a server as a machine that goes does. Returns the server's name."""
    server = next(one for one in service._servers if one.url is not None)
    os.kill(ray.get(server.actor.__ray_call__.remote(lambda actor: os.getpid())), number)
    return server.name


def test_an_actor_is_killed_in_an_epoch_and_two_are_added(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "fastpipe"),
        fastpipe.ray.serve(read(), num_servers=2, actor_options=LIGHT) as service,
    ):
        eventually(lambda: len(service.status().running) == 2)
        first = dict(service.status().running)
        remote = service.connect(prefetch=4, epochs=5)
        found, killed = [], ""
        for number, batch in enumerate(remote):
            found.append(batch["id"].tolist())
            time.sleep(0.005)
            if number == 20:
                killed = kill(service)
            if number == 60:
                service.scale(4)
            if number == 250:
                # Both that were added, and the one in place of the killed one.
                eventually(lambda: len(service.status().running) == 4)
                assert killed not in service.status().running
        status = service.status()
        stats = [ray.get(server.actor.stats.remote()) for server in service._servers]
    assert found == ids(read(epochs=5))
    assert status.restarts == 1
    assert len({*first.values(), *status.running.values()}) == 5, "each has a port of its own"
    assert sum(one["batches"] > 0 for one in stats) >= 2, "those that came have made batches"
    assert f"the server {killed} died and is replaced (1)" in caplog.text
    # Of the dashboard there would be a public way to ask.
    eventually(lambda: all(actor["State"] == "DEAD" for actor in actors().values()))


def test_servers_are_spread_over_nodes_and_left_before_they_stop() -> None:
    with fastpipe.ray.serve(read(), num_servers=2) as service:
        eventually(lambda: len(service.status().running) == 2)
        nodes = [
            ray.get(one.actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
            for one in service._servers
        ]
        assert len(set(nodes)) == 2
        # There is room for one more.
        service.scale(4)
        eventually(lambda: len(service.status().running) == 3)
        assert len(service.status().pending) == 1
        assert repr(service) == "Service(3 running, 1 pending, 0 stopping)"
        found = []
        for number, batch in enumerate(service.connect(prefetch=2)):
            found.append(batch["id"].tolist())
            if number == 5:
                service.scale(1)
                assert repr(service) == "Service(1 running, 0 pending, 2 stopping)"
            if number == 100:
                eventually(lambda: not service.status().stopping)
        assert found == ids(read())
        assert service.status().restarts == 0


class Slow:
    """Units that take long to read, one at a time."""

    def __init__(self) -> None:
        import pyarrow as pa

        self.schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
        self.rows = [10] * 300

    def read(self, unit: int) -> Any:
        import pyarrow as pa

        time.sleep(0.03)
        return pa.table({"id": np.arange(10) + 10 * unit}, schema=self.schema)

    def fingerprint(self) -> str:
        return "slow"


def test_servers_become_more_where_consumers_wait_and_fewer_where_none_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_service, "_LOOK", 0.2)
    reader = fastpipe.read_units(Slow(), batch_size=10, num_threads=1, prefetch=1, num_fetches=1)
    with (
        caplog.at_level(logging.INFO, "fastpipe"),
        fastpipe.ray.serve(reader, num_servers=(1, 3), actor_options=LIGHT) as service,
    ):
        remote = service.connect(prefetch=8)
        batches = iter(remote)
        begun = [next(batches)]
        while len(service.status().running) < 3:
            begun.append(next(batches))
        assert service.status().wanted == 3
        eventually(lambda: len(service.status().running) == 1 and not service.status().stopping)
        look = service.status().look
        assert look is None or look.making < 0.5
        assert ids(begun) == np.arange(10 * len(begun)).reshape(-1, 10).tolist()
        batches.close()  # type: ignore[attr-defined]
    assert "2 servers instead of 1: consumers wait" in caplog.text
    assert "1 servers instead of 2: one less would do" in caplog.text


def test_by_default_there_are_as_many_as_consumers_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_service, "_LOOK", 0.2)
    reader = fastpipe.read_units(Slow(), batch_size=10, num_threads=1, prefetch=1, num_fetches=1)
    with fastpipe.ray.serve(reader, num_servers="auto", actor_options=LIGHT) as service:
        eventually(lambda: service.status().running)
        assert service.status().wanted == 1
        batches = iter(service.connect(prefetch=8))
        begun = []
        while service.status().wanted == 1:
            begun.append(next(batches))
        # Nobody draws from now on.
        eventually(lambda: len(service.status().running) >= 2)
        eventually(lambda: service.status().wanted == 1 and len(service.status().running) == 1)
        begun += [next(batches) for _ in range(3)]
        assert ids(begun) == np.arange(10 * len(begun)).reshape(-1, 10).tolist()
        batches.close()  # type: ignore[attr-defined]


@pytest.fixture
def signed(certificates: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of servers at this node's address, and its key."""
    (tmp_path / "names").write_text(f"subjectAltName=IP:{ray.util.get_node_ip_address()}")
    sign = ["openssl", "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-set_serial", "7"]
    sign += ["-days", "2", "-extfile", tmp_path / "names", "-out", tmp_path / "server.pem"]
    subprocess.run(sign, cwd=certificates, check=True, capture_output=True)
    return tmp_path / "server.pem", certificates / "server.key"


def test_encrypted_services_let_in_who_has_a_certificate(certificates: Path, signed: tuple[Path, Path]) -> None:
    ca = certificates / "ca.pem"
    client = (certificates / "client.pem", certificates / "client.key")
    with fastpipe.ray.serve(read(), num_servers=1, tls=signed, client_ca=ca, actor_options=LIGHT) as service:
        assert ids(service.connect(ca=ca, certificate=client)) == ids(read())
        assert all(url.startswith("grpc+tls://") for url in service.urls)
        (shares,) = ray.get([steps_in_a_task.remote(service.connect(ca=ca, certificate=client), 1)])
        assert shares == ids(read().shard(2, 1))
        for wrong in ({"ca": ca}, {"ca": certificates / "stranger.pem", "certificate": client}, {}):
            with pytest.raises(ServiceError, match=r"grpc\+tls://"):
                service.connect(**wrong, timeout=1)
        with pytest.raises(ServiceError, match="token"):
            fastpipe.connect(service.urls, ca=ca, certificate=client, timeout=1)


@ray.remote(num_cpus=0)
def steps_in_a_task(reader: fastpipe.Reader, rank: int) -> list[list[int]]:
    return ids(reader.shard(2, rank))


def test_a_reader_of_a_service_goes_to_tasks_until_that_is_closed() -> None:
    with fastpipe.ray.serve({"train": read(), "other": read(seed=8)}, num_servers=1, actor_options=LIGHT) as service:
        remote = service.connect("train")
        both = ray.get([steps_in_a_task.remote(remote, rank) for rank in range(2)])
        assert both == [ids(read().shard(2, rank)) for rank in range(2)]
        assert ids(service.connect("other")) == ids(read(seed=8))
        with pytest.raises(ServiceError, match="token"):
            fastpipe.connect(service.urls, "train", timeout=1)
        assert ids([fastpipe.connect(service.urls, "train", token=service.token).batch_at(3)]) == ids(
            [read().batch_at(3)]
        )
        batches = iter(service.connect("train", prefetch=1, timeout=2))
        next(batches)
    service.close()
    assert service.status().running == {}
    with pytest.raises(ServiceError, match=r"for 2 seconds: .*service was closed"):
        list(batches)
    for use in (service.connect, lambda: service.scale(2)):
        with pytest.raises(ServiceError, match="the service is closed"):
            use()


def test_servers_that_die_too_often_are_an_error_that_says_so() -> None:
    with fastpipe.ray.serve(read(), num_servers=1, max_restarts=1, actor_options=LIGHT) as service:
        eventually(lambda: service.status().running)
        remote = service.connect(prefetch=2, timeout=10)
        batches = iter(remote)
        found = [next(batches)]
        kill(service)
        eventually(lambda: service.status().restarts == 1 and service.status().running)
        found.append(next(batches))
        name = kill(service)
        with pytest.raises(
            ServiceError, match=rf"for 10 seconds: .*the server {name} died, and 1 have been replaced .*max_restarts=1"
        ):
            found.extend(batches)
        assert ids(found) == ids(read())[: len(found)]
        for use in (service.connect, lambda: service.scale(2)):
            with pytest.raises(ServiceError, match=rf"{name} died"):
                use()
        assert name in service.status().failure


def test_a_server_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_service, "_HUNG", 1.5)
    monkeypatch.setattr(_service, "_LOOK", 0.2)
    with fastpipe.ray.serve(read(), num_servers=1, actor_options=LIGHT) as service:
        batches = iter(service.connect(prefetch=2, timeout=20))
        found = [next(batches)]
        kill(service, signal.SIGSTOP)
        eventually(lambda: service.status().restarts == 1)
        assert ids(found) + ids(batches) == ids(read())


def test_servers_that_cannot_start_are_an_error_that_says_why(tmp_path: Path) -> None:
    certificate = tmp_path / "certificate.pem"
    options: dict[str, Any] = {"actor_options": LIGHT, "tls": (certificate, certificate)}
    with (
        fastpipe.ray.serve(read(), num_servers=1, max_restarts=1, **options) as service,
        pytest.raises(ServiceError, match=r"did not start, and 1 have been replaced .*No such file.*certificate"),
    ):
        service.connect(timeout=20)


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"reader": 3}, TypeError, "reader is a Reader"),
        ({"reader": {}}, ValueError, "no reader to serve"),
        ({"num_servers": 0}, ValueError, "num_servers is at least 1, not 0"),
        ({"num_servers": (3, 2)}, ValueError, "the greatest of num_servers is at least 3, not 2"),
        ({"num_servers": (1, 2, 3)}, ValueError, "least and the greatest"),
        ({"num_servers": "many"}, ValueError, "\"auto\", not 'many'"),
        ({"max_restarts": -1}, ValueError, "max_restarts is at least 0"),
        ({"port": 80}, TypeError, "Ray chooses where servers listen"),
        ({"batch": 80}, TypeError, "no 'batch'.*max_passes"),
    ],
    ids=["reader", "none", "number", "bounds", "three", "text", "max_restarts", "port", "argument"],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fastpipe.ray.serve(**{"reader": read()} | wrong)


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(fastpipe.UnsupportedError, match="rebatch"):
        fastpipe.ray.serve(fastpipe.rebatch(read(), batch_size=7))  # type: ignore[arg-type]
    with pytest.raises(fastpipe.UnsupportedError, match="given rows"):
        fastpipe.ray.serve(fastpipe.take(read(shuffle=False, shuffle_buffer=None), [1, 2], batch_size=1))
