"""`fastpipe.ray.serve` on a real cluster: servers that are killed, added and removed during a pass."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from fastpipe.errors import ServiceError

ray = pytest.importorskip("ray")
pytest.importorskip("pyarrow.flight")
from ray._private.state import actors  # noqa: E402

import fastpipe.ray  # noqa: E402
from fastpipe.ray import _service  # noqa: E402
from ray_cluster import LIGHT, MARKS, cluster, eventually  # noqa: E402
from samples import ids_by_batch as ids  # noqa: E402
from service_faults import rows_of  # noqa: E402

__all__ = ["cluster"]

pytestmark = MARKS


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpipe.service._directory._PAUSE", 0.1)
    monkeypatch.setattr(_service, "_LEAVE", 0.5)


def read(**options: Any) -> fastpipe.Reader:
    """Batches of 100 KB, so that clients can slow servers down."""
    return rows_of(6400, 800, **{"batch_size": 32, "shuffle_buffer": 640, "num_threads": 1} | options)


def served(service: fastpipe.ray.Service, number: int) -> bool:
    """Returns whether this many servers run, and no server waits."""
    status = service.status()
    return (len(status.running), len(status.pending)) == (number, 0)


def kill(actor: Any) -> None:
    """Kills the process of an actor, like a failure of its machine."""
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def sent(actor: Any) -> float:
    """Returns how many batches a server has sent since it was started, or restarted."""
    asked = actor.__ray_call__.options(max_task_retries=-1)
    count: float = ray.get(asked.remote(lambda server: server._server.stats()["batches"]))
    return count


def test_a_pass_continues_with_a_server_that_ray_has_restarted() -> None:
    with fastpipe.ray.serve(read(), actor_options=LIGHT) as service:
        found = []
        for number, batch in enumerate(service.connect(prefetch=2, epochs=2)):
            found.append(batch["id"].tolist())
            if number in (20, 220):
                # It is the only server, so clients must find its new address.
                kill(service._servers[0].actor)
        assert found == ids(read(epochs=2))
        status = service.status()
        assert list(status.running) == [service._servers[0].name]
        assert (status.pending, status.failed) == ((), {})


def test_a_pass_continues_while_servers_are_added_removed_and_killed() -> None:
    found = []
    with fastpipe.ray.serve(read(), num_servers=2, actor_options=LIGHT) as service:
        eventually(lambda: served(service, 2))
        batches = iter(service.connect(prefetch=4, epochs=None))

        def until_sent(actor: Any) -> None:
            """Takes batches until a server has sent one."""
            while not sent(actor):
                found.append(next(batches))

        found += [next(batches) for _ in range(20)]
        kill(service._servers[0].actor)
        until_sent(service._servers[0].actor)
        service.scale(4)
        for server in service._servers[2:]:
            until_sent(server.actor)
        eventually(lambda: served(service, 4))
        removed = [server.name for server in service._servers[2:]]
        service.scale(2)
        assert not {*removed} & {*service.status().running}
        found += [next(batches) for _ in range(300)]
        kill(service._servers[1].actor)
        until_sent(service._servers[1].actor)
        batches.close()  # type: ignore[attr-defined]
    assert ids(found) == ids(itertools.islice(read(epochs=None), len(found)))
    # Ray's public function needs its dashboard.
    eventually(lambda: all(actor["State"] == "DEAD" for actor in actors().values()))


def registered(service: Any) -> int:
    """Returns the number of servers in the directory. Ray takes a while to restart it."""
    try:
        return len(service._directory.urls())
    except fastpipe.errors.ServiceError:
        return 0


def test_servers_register_at_a_directory_that_ray_has_restarted() -> None:
    with fastpipe.ray.serve(read(), num_servers=2, actor_options=LIGHT) as service:
        batches = iter(service.connect(prefetch=2))
        found = [next(batches)]
        eventually(lambda: registered(service) == 2)
        kill(service._directory_actor)
        eventually(lambda: registered(service) == 2)
        assert ids(service.connect()) == ids(read())
        assert ids(found) + ids(batches) == ids(read())


def test_servers_are_spread_over_nodes_and_wait_for_cores() -> None:
    with fastpipe.ray.serve(read(), num_servers=2) as service:
        eventually(lambda: served(service, 2))
        nodes = [
            ray.get(one.actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
            for one in service._servers
        ]
        assert len(set(nodes)) == 2
        # One of three cores is free.
        service.scale(4)
        eventually(lambda: len(service.status().running) == 3)
        assert len(service.status().pending) == 1
        service.scale(3)
        eventually(lambda: served(service, 3))
        # Removed servers release their cores.
        service.scale(1)
        service.scale(3)
        eventually(lambda: served(service, 3))
        assert ids(service.connect()) == ids(read())
        assert repr(service).endswith(" of 3 servers>")


def test_the_error_says_that_servers_wait_for_resources() -> None:
    with (
        fastpipe.ray.serve(read(), actor_options={"resources": {"loader": 1}}) as service,
        pytest.raises(ServiceError, match=r"1 servers wait for Ray to start them: `ray status`"),
    ):
        service.connect(timeout=0.5)


@pytest.fixture
def signed(certificates: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for servers at this node's address, and its key."""
    (tmp_path / "names").write_text(f"subjectAltName=IP:{ray.util.get_node_ip_address()}")
    sign = ["openssl", "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-set_serial", "7"]
    sign += ["-days", "2", "-extfile", tmp_path / "names", "-out", tmp_path / "server.pem"]
    subprocess.run(sign, cwd=certificates, check=True, capture_output=True)
    return tmp_path / "server.pem", certificates / "server.key"


def test_encrypted_services_admit_clients_with_a_certificate(certificates: Path, signed: tuple[Path, Path]) -> None:
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
            fastpipe.connect(service.urls, ca=ca, certificate=client, timeout=60)


@ray.remote(num_cpus=0)
def steps_in_a_task(reader: fastpipe.Reader, rank: int) -> list[list[int]]:
    return ids(reader.shard(2, rank))


def test_tasks_read_from_a_service_until_it_is_closed() -> None:
    with fastpipe.ray.serve({"train": read(), "other": read(seed=8)}, num_servers=1, actor_options=LIGHT) as service:
        remote = service.connect("train")
        both = ray.get([steps_in_a_task.remote(remote, rank) for rank in range(2)])
        assert both == [ids(read().shard(2, rank)) for rank in range(2)]
        assert ids(service.connect("other")) == ids(read(seed=8))
        with pytest.raises(ServiceError, match="token"):
            fastpipe.connect(service.urls, "train", timeout=60)
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


def test_the_error_says_why_servers_cannot_start(tmp_path: Path) -> None:
    certificate = tmp_path / "certificate.pem"
    tls = (certificate, certificate)
    with fastpipe.ray.serve(read(), num_servers=2, actor_options=LIGHT, tls=tls) as service:
        with pytest.raises(ServiceError, match=r"can't run: FileNotFoundError: .*certificate"):
            service.connect(timeout=300)
        eventually(lambda: len(service.status().failed) == 2)
        failed = set(service.status().failed)
        service.scale(1)
        status = service.status()
        assert len(status.pending) + len(status.failed) == 1
        assert not failed & {*status.pending, *status.failed}


def test_a_limit_of_restarts_is_kept() -> None:
    with fastpipe.ray.serve(read(), actor_options=LIGHT | {"max_restarts": 0}) as service:
        eventually(lambda: served(service, 1))
        batches = iter(service.connect(prefetch=2, timeout=300))
        found = [next(batches)]
        kill(service._servers[0].actor)
        eventually(lambda: service.status().failed)
        service.scale(1)
        assert ids(found) + ids(batches) == ids(read())


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"reader": 3}, TypeError, "reader must be a fastpipe.Reader"),
        ({"reader": {}}, ValueError, "no reader to serve"),
        ({"num_servers": 0}, ValueError, "num_servers must be at least 1; got 0"),
        ({"num_servers": 1.5}, TypeError, "num_servers must be an integer"),
        ({"num_servers": (1, 16)}, TypeError, r"integer; got \(1, 16\)\..*scale\(n\)"),
        ({"num_servers": "auto"}, TypeError, r"integer; got 'auto'\..*scale\(n\)"),
        ({"max_restarts": 10}, TypeError, r"unexpected argument 'max_restarts'.*actor_options={'max_restarts': 10}"),
        ({"port": 80}, TypeError, "Ray chooses where servers listen"),
        ({"batch": 80}, TypeError, "unexpected argument 'batch'.*max_passes"),
    ],
    ids=["reader", "none", "number", "float", "bounds", "auto", "max_restarts", "port", "argument"],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fastpipe.ray.serve(**{"reader": read()} | wrong)


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(fastpipe.errors.UnsupportedError, match="rebatch"):
        fastpipe.ray.serve(read().rebatch(batch_size=7))  # type: ignore[arg-type]
    with pytest.raises(fastpipe.errors.UnsupportedError, match=r"can't be served.*Serve the reader"):
        fastpipe.ray.serve(read().map(len))
