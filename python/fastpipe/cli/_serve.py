"""`fastpipe serve` serves the readers that a Python file defines. `fastpipe health` checks a server."""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from fastpipe._reader.mapped import Mapped
from fastpipe._reader.packing import groups_of
from fastpipe._reader.reader import Reader
from fastpipe.errors import FastpipeError, ServiceError


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands `serve` and `health`."""
    serve = commands.add_parser("serve", help="serve the batches of readers to other processes and machines")
    serve.add_argument(
        "config",
        type=Path,
        metavar="FILE",
        help="Python file that defines readers as variables; `reader` is the default one",
    )
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, only this machine can connect)"
    )
    serve.add_argument("--port", type=int, default=8815, help="port to listen on, 0 for any free port (default: 8815)")
    serve.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token that clients must send")
    serve.add_argument(
        "--tls", type=Path, nargs=2, metavar=("CERTIFICATE", "KEY"), help="PEM files for encrypted connections"
    )
    serve.add_argument(
        "--client-ca", type=Path, metavar="FILE", help="PEM file with the CA that must have signed client certificates"
    )
    serve.add_argument(
        "--max-passes", type=int, default=16, metavar="N", help="maximum number of open passes (default: 16)"
    )
    serve.add_argument(
        "--cache-bytes",
        default="128MiB",
        metavar="SIZE",
        help="size of the cache of batches for other clients (default: 128MiB)",
    )
    serve.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="limit for all passes and batches together, such as 4GiB (default: no limit)",
    )
    serve.add_argument(
        "--max-requests",
        type=int,
        default=512,
        metavar="N",
        help="maximum number of concurrent requests (default: 512)",
    )
    serve.add_argument(
        "--metrics-port",
        type=int,
        metavar="N",
        help="HTTP port of /metrics (Prometheus) and /healthz (probes), 0 for any free port (needs the extra metrics)",
    )
    serve.add_argument("--metrics-host", metavar="HOST", help="address for --metrics-port (default: --host)")
    serve.add_argument("--verbose", action="store_true", help="log every request instead of only errors")
    serve.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="text, or json for one object per line (default: text)",
    )
    serve.set_defaults(run=_serve)

    health = commands.add_parser("health", help="check that a server accepts requests; exits with 1 if not")
    health.add_argument("url", metavar="URL", help="grpc://host:port, or grpc+tls://host:port")
    health.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token of the server")
    health.add_argument("--ca", type=Path, metavar="FILE", help="PEM file with the CA of the server certificate")
    health.add_argument(
        "--certificate",
        type=Path,
        nargs=2,
        metavar=("CERTIFICATE", "KEY"),
        help="PEM files with the client's certificate and key",
    )
    health.add_argument(
        "--timeout", type=_seconds, default=5.0, metavar="SECONDS", help="time to wait for the answer (default: 5)"
    )
    health.set_defaults(run=_health)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 86_400:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, up to 86400; got {text!r}")
    return found


def _token(file: Path | None) -> str | None:
    return None if file is None else file.read_text("utf-8").strip()


def _readers(config: Path) -> dict[str, Reader | Mapped]:
    """Returns the readers that a file defines as variables. The variable `reader` is the default."""
    if not config.is_file():
        raise FastpipeError(f"the file {str(config)!r}, which should define readers, does not exist")
    defined = runpy.run_path(str(config))
    found = {name: value for name, value in defined.items() if isinstance(groups_of(value)[0], Reader)}
    if not found:
        raise FastpipeError(
            f"{str(config)!r} defines no reader: add, for example, reader = fastpipe.read_avro('data/*.avro',"
            " batch_size=1024)"
        )
    if "reader" in found:
        found["default"] = found.pop("reader")
    elif len(found) == 1:
        found = {"default": next(iter(found.values()))}
    return found


def _serve(arguments: argparse.Namespace) -> int:
    from fastpipe._arrow.schema import require_pyarrow

    require_pyarrow()
    from fastpipe.service._logs import JsonLines
    from fastpipe.service._server import Server

    logs = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    logs.setFormatter(JsonLines() if arguments.log_format == "json" else text)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, handlers=[logs])
    options: dict[str, Any] = {}
    if arguments.token_file is not None:
        options["token"] = _token(arguments.token_file)
    if arguments.tls is not None:
        options["tls"] = tuple(arguments.tls)
    try:
        server = Server(
            _readers(arguments.config),
            host=arguments.host,
            port=arguments.port,
            client_ca=arguments.client_ca,
            max_passes=arguments.max_passes,
            cache_bytes=arguments.cache_bytes,
            memory_limit=arguments.memory_limit,
            max_requests=arguments.max_requests,
            metrics_port=arguments.metrics_port,
            metrics_host=arguments.metrics_host,
            **options,
        )
    except (OSError, ValueError) as error:
        if isinstance(error, FastpipeError):
            raise
        print(f"fastpipe: {error}", file=sys.stderr)
        return 2

    def stop(number: int, frame: FrameType | None) -> None:
        # Ignore further signals, which would interrupt the shutdown.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGTERM, stop)
        metrics = "" if server.metrics_url is None else f", metrics at {server.metrics_url}"
        print(f"serving {', '.join(sorted(server.names))} at {server.url}{metrics}", flush=True)
        server.wait()
    except KeyboardInterrupt:
        if not server.close():
            # A client that doesn't read what was sent would keep the process alive.
            sys.stdout.flush()
            os._exit(0)
    return 0


def _health(arguments: argparse.Namespace) -> int:
    from fastpipe._arrow.schema import require_pyarrow

    require_pyarrow()
    from fastpipe.service._connection import NetworkConnection
    from fastpipe.service._directory import checked_url
    from fastpipe.service._settings import Options

    try:
        checked_url(arguments.url)
    except ValueError as error:
        print(f"fastpipe health: {error}", file=sys.stderr)
        return 2
    shown = arguments.certificate
    options = Options(
        token=_token(arguments.token_file),
        ca=None if arguments.ca is None else arguments.ca.read_bytes(),
        certificate=None if shown is None else (shown[0].read_bytes(), shown[1].read_bytes()),
        timeout=arguments.timeout,
    )
    told = NetworkConnection(arguments.url, options).ask("health", {}, arguments.timeout)
    if told != [b'{"serving": true}']:
        raise ServiceError(f"{arguments.url} is not a fastpipe server that accepts requests")
    print(f"{arguments.url} accepts requests")
    return 0
