"""Encryption, certificates and tokens: a server refuses other clients with a typed error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import fastpipe.service
from fastpipe import cli
from samples import ids_by_batch as ids
from service_faults import config_of, rows_of, serving

pa = pytest.importorskip("pyarrow")
flight = pytest.importorskip("pyarrow.flight")


def read() -> fastpipe.Reader:
    return rows_of(500)


@pytest.fixture(scope="module")
def guarded(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a process that requires a certificate and the token "open sesame"."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text("open sesame\n")
    options: list[object] = ["--tls", certificates / "server.pem", certificates / "server.key"]
    options += ["--client-ca", certificates / "ca.pem", "--token-file", folder / "token"]
    with serving(read(), folder, *options) as server:
        said, url = server.printed.rsplit(maxsplit=1)
        assert said == "serving default at"
        yield url


def shown(certificates: Path, **changed: Any) -> dict[str, Any]:
    """Returns the arguments of a client that is admitted, with changes."""
    return {
        "ca": certificates / "ca.pem",
        "certificate": (certificates / "client.pem", certificates / "client.key"),
        "token": "open sesame",
    } | changed


def test_a_client_with_certificate_and_token_is_admitted(guarded: str, certificates: Path, tmp_path: Path) -> None:
    assert guarded.startswith("grpc+tls://127.0.0.1:")
    assert ids(fastpipe.connect(guarded, **shown(certificates))) == ids(read())
    (tmp_path / "token").write_text("open sesame")
    arguments = ["--ca", certificates / "ca.pem", "--token-file", tmp_path / "token", "--certificate"]
    arguments += [certificates / "client.pem", certificates / "client.key"]
    assert cli.main(["health", guarded, *map(str, arguments)]) == 0
    assert cli.main(["health", guarded, "--timeout", "1", *map(str, arguments[:4])]) == 1


def test_a_certificate_of_another_authority_is_refused(guarded: str, certificates: Path) -> None:
    stranger = (certificates / "stranger.pem", certificates / "stranger.key")
    for changed in ({"certificate": stranger}, {"certificate": None}, {"ca": stranger[0]}, {"ca": None}):
        with pytest.raises(fastpipe.errors.ServiceError, match=re.escape(guarded)):
            fastpipe.connect(guarded, **shown(certificates, **changed), timeout=0.5)


@pytest.mark.parametrize("token", [None, "", "open barley", "open sesame ", "open sesam", "Bearer open sesame"])
def test_a_wrong_token_is_refused(guarded: str, certificates: Path, token: str | None) -> None:
    with pytest.raises(fastpipe.errors.ServiceError, match=r"requires a token: connect\(..., token=...\)"):
        fastpipe.connect(guarded, **shown(certificates, token=token), timeout=60)


@pytest.mark.parametrize(
    ("token", "error"),
    [("sésame", ValueError), ("open\nsesame", ValueError), ("\0", ValueError), (b"open", TypeError), (7, TypeError)],
)
def test_tokens_that_headers_cannot_hold_are_refused_at_once(token: Any, error: type[Exception]) -> None:
    reader = fastpipe.from_arrays({"x": np.arange(3)}, batch_size=1)
    for start in (lambda: fastpipe.connect("grpc://127.0.0.1:1", token=token), lambda: reader.serve(token=token)):
        with pytest.raises(error, match="token") as raised:
            start()
        assert "sesame" not in str(raised.value)


def test_each_request_needs_the_token(guarded: str, certificates: Path) -> None:
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
    with pytest.raises(fastpipe.errors.ServiceError, match=re.escape(plain)):
        fastpipe.connect(plain, token="open sesame", timeout=0.5)
    assert ids([fastpipe.connect(guarded, **shown(certificates)).batch_at(0)]) == ids([read().batch_at(0)])


def test_encryption_without_certificates_of_clients(certificates: Path) -> None:
    tls = (certificates / "server.pem", certificates / "server.key")
    with read().serve(tls=tls) as server:
        assert server.url.startswith("grpc+tls://")
        assert ids(fastpipe.connect(server.url, ca=certificates / "ca.pem")) == ids(read())
        plain = server.url.replace("grpc+tls", "grpc")
        for url, ca in ((server.url, certificates / "stranger.pem"), (server.url, None), (plain, None)):
            with pytest.raises(fastpipe.errors.ServiceError, match="127"):
                fastpipe.connect(url, ca=ca, timeout=1)


def test_incomplete_protection_is_refused(
    tmp_path: Path, certificates: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastpipe.service.Server, "wait", lambda server: pytest.fail("it serves"))
    config = config_of(read(), tmp_path)
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
