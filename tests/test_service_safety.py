"""Who gets into a server: where it listens, and who is refused, by a typed error."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import fastpipe
import fastpipe.service
from fastpipe import cli

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")

CONFIG = """
import numpy as np
import fastpipe

reader = fastpipe.from_arrays({"id": np.arange(500)}, batch_size=64, shuffle=True, seed=7)
"""


def read() -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(500)}, batch_size=64, shuffle=True, seed=7)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


@contextmanager
def started(folder: Path, *options: object) -> Iterator[tuple[str, psutil.Process]]:
    """`fastpipe serve`: its URL, and its process."""
    config = folder / "readers.py"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "fastpipe", "serve", str(config), "--port", "0", *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            said, url = process.stdout.readline().rsplit(maxsplit=1)
            assert said == "serving default at"
            yield url, psutil.Process(process.pid)
        finally:
            process.kill()


# Where servers listen.


def listening(process: psutil.Process, port: int) -> set[str]:
    """The addresses at which a process listens, at a port."""
    found = process.net_connections(kind="tcp")
    return {
        one.laddr.ip.removeprefix("::ffff:")
        for one in found
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    }


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def test_servers_listen_at_loopback_unless_told_otherwise(tmp_path: Path) -> None:
    here = psutil.Process()
    with read().serve() as server:
        assert listening(here, server.port) == {"127.0.0.1"}
    with fastpipe.service.Server(read()) as server:
        assert listening(here, server.port) == {"127.0.0.1"}
    with started(tmp_path) as (url, process):
        assert listening(process, port_of(url)) == {"127.0.0.1"}
        assert ids(fastpipe.connect(url)) == ids(read())
    with started(tmp_path, "--host", "0.0.0.0") as (url, process):
        assert listening(process, port_of(url)) in ({"0.0.0.0"}, {"::"})


def test_other_addresses_of_this_machine_reach_only_a_server_that_listens_there() -> None:
    """All of 127.0.0.0/8 is this machine, on Linux; a server at all addresses is at each of those."""
    if sys.platform != "linux":
        pytest.skip("only 127.0.0.1 is there")

    def reached(port: int) -> bool:
        with socket.socket() as client:
            client.settimeout(5)
            return client.connect_ex(("127.0.0.77", port)) == 0

    with read().serve() as narrow, fastpipe.service.Server(read(), host="0.0.0.0") as wide:
        assert not reached(narrow.port)
        assert reached(wide.port)


# Encryption, certificates and tokens, by the command line.


@pytest.fixture(scope="module")
def guarded(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that wants a certificate and a token, which is "open sesame"."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text("open sesame\n")
    options = ["--tls", certificates / "server.pem", certificates / "server.key"]
    options += ["--client-ca", certificates / "ca.pem", "--token-file", folder / "token"]
    with started(folder, *options) as (url, _):
        yield url


def shown(certificates: Path, **changed: Any) -> dict[str, Any]:
    """What a client shows to be let in, but for what is changed."""
    return {
        "ca": certificates / "ca.pem",
        "certificate": (certificates / "client.pem", certificates / "client.key"),
        "token": "open sesame",
    } | changed


def test_a_client_with_certificate_and_token_is_let_in(guarded: str, certificates: Path, tmp_path: Path) -> None:
    assert guarded.startswith("grpc+tls://127.0.0.1:")
    assert ids(fastpipe.connect(guarded, **shown(certificates))) == ids(read())
    (tmp_path / "token").write_text("open sesame")
    arguments = ["--ca", certificates / "ca.pem", "--token-file", tmp_path / "token", "--certificate"]
    arguments += [certificates / "client.pem", certificates / "client.key"]
    assert cli.main(["health", guarded, *map(str, arguments)]) == 0
    assert cli.main(["health", guarded, "--timeout", "1", *map(str, arguments[:4])]) == 1


def test_a_certificate_that_another_authority_has_signed_is_refused(guarded: str, certificates: Path) -> None:
    stranger = (certificates / "stranger.pem", certificates / "stranger.key")
    for changed in ({"certificate": stranger}, {"certificate": None}, {"ca": stranger[0]}, {"ca": None}):
        with pytest.raises(fastpipe.ServiceError, match=re.escape(guarded)):
            fastpipe.connect(guarded, **shown(certificates, **changed), timeout=0.5)


@pytest.mark.parametrize("token", [None, "", "open barley", "open sesame ", "open sesam", "Bearer open sesame"])
def test_a_wrong_token_is_refused(guarded: str, certificates: Path, token: str | None) -> None:
    with pytest.raises(fastpipe.ServiceError, match=r"requires a token: connect\(..., token=...\)"):
        fastpipe.connect(guarded, **shown(certificates, token=token), timeout=60)


@pytest.mark.parametrize(
    ("token", "error"),
    [("sésame", ValueError), ("open\nsesame", ValueError), ("\0", ValueError), (b"open", TypeError), (7, TypeError)],
)
def test_tokens_that_no_header_can_hold_are_refused_at_once(token: Any, error: type[Exception]) -> None:
    reader = fastpipe.from_arrays({"x": np.arange(3)}, batch_size=1)
    for start in (lambda: fastpipe.connect("grpc://127.0.0.1:1", token=token), lambda: reader.serve(token=token)):
        with pytest.raises(error, match="token") as raised:
            start()
        assert "sesame" not in str(raised.value)


def test_batches_need_the_token_too_not_only_the_first_request(guarded: str, certificates: Path) -> None:
    secure: dict[str, Any] = {
        "tls_root_certs": (certificates / "ca.pem").read_bytes(),
        "cert_chain": (certificates / "client.pem").read_bytes(),
        "private_key": (certificates / "client.key").read_bytes(),
    }
    client = flight.FlightClient(guarded, **secure)
    for ask in (
        lambda: client.do_get(flight.Ticket(b"{}")).read_all(),
        *(
            lambda name=name: list(client.do_action(flight.Action(name, b"")))
            for name in ("health", "metrics", "place")
        ),
        lambda: list(client.list_actions()),
    ):
        with pytest.raises(flight.FlightUnauthenticatedError, match="token"):
            ask()
    client.close()


def test_an_unencrypted_client_is_refused(guarded: str, certificates: Path) -> None:
    plain = guarded.replace("grpc+tls", "grpc")
    with pytest.raises(fastpipe.ServiceError, match=re.escape(plain)):
        fastpipe.connect(plain, token="open sesame", timeout=0.5)
    assert ids([fastpipe.connect(guarded, **shown(certificates)).batch_at(0)]) == ids([read().batch_at(0)])


def test_commands_that_would_let_others_in_are_refused(
    tmp_path: Path, certificates: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastpipe.service.Server, "wait", lambda server: pytest.fail("it serves"))
    config = tmp_path / "readers.py"
    config.write_text(CONFIG)
    serve = ["serve", str(config), "--port", "0"]
    pem, key = str(certificates / "server.pem"), str(certificates / "server.key")
    missing = str(tmp_path / "missing")
    for options, said in (
        (["--client-ca", pem], "needs tls="),
        (["--tls", missing, key], "missing"),
        (["--tls", pem, key, "--client-ca", missing], "missing"),
        (["--token-file", missing], "missing"),
    ):
        assert cli.main([*serve, *options]) in (1, 2)
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
