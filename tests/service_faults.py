"""Servers in separate processes, and a network that fails, for tests of the data service."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import fastpipe
from fastpipe.service import _asking, _local
from fastpipe.service._asking import Question
from fastpipe.service._local import LocalProcess
from samples import digests
from servers import free_port


def rows_of(rows: int, width: int = 0, draw: int = 1, **options: Any) -> fastpipe.Reader:
    """Returns a shuffled reader of this many rows: an `id`, and `x` of this many random values if `width` isn't 0."""
    arrays: dict[str, Any] = {"id": np.arange(rows)}
    if width:
        arrays["x"] = np.random.default_rng(draw).random((rows, width), "float32")
    return fastpipe.from_arrays(arrays, **{"batch_size": 64, "shuffle": True, "seed": 7} | options)


def check_states(local: fastpipe.Reader, remote: fastpipe.Reader) -> list[dict[str, Any]]:
    """Checks that both readers have the same batches and states, and resume from each state. Returns the states."""
    whole = digests(local)
    assert digests(remote) == whole
    for reader in (local, remote):
        reader.set_epoch(0)
    states, expected = ([of.state_dict(), *(of.state_dict() for _ in of)] for of in (remote, local))
    assert states == expected
    assert len(states) == len(whole) + 1 > 3
    for step, state in enumerate(states):
        for reader in (remote, local):
            reader.load_state_dict(json.loads(json.dumps(state)))
            assert digests(reader) == whole[step:]
    return states


def connect_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives connections and starts of local services a minute instead of their timeout: the machine may be busy."""

    def question(action: str, request: Any, read: Any, seconds: float) -> Any:
        return Question(action, request, read, 60.0 if action == "describe" else seconds)

    monkeypatch.setattr(_asking, "Question", question)
    monkeypatch.setattr(_local, "LocalProcess", lambda reader, _: LocalProcess(reader, 60.0))


def config_of(readers: fastpipe.Reader | dict[str, fastpipe.Reader], folder: Path, name: str = "readers") -> Path:
    """Writes a file of readers for `fastpipe serve`. A single reader is served as "default"."""
    path, pickled = folder / f"{name}.py", folder / f"{name}.pickle"
    pickled.write_bytes(pickle.dumps(readers if isinstance(readers, dict) else {"reader": readers}))
    path.write_text(
        f"import pathlib, pickle\nglobals().update(pickle.loads(pathlib.Path({str(pickled)!r}).read_bytes()))"
    )
    return path


class ServerProcess:
    """`fastpipe serve FILE` with more arguments. It can end and start again at the same port.

    Attributes:
        printed: The line that it has printed since it listens.
    """

    def __init__(self, config: Path, *arguments: object, log: Path | None = None) -> None:
        self.config, self.port, self.arguments = config, free_port(), arguments
        self.process: subprocess.Popen[str] | None = None
        self.printed = ""
        self._log = Path(os.devnull) if log is None else log

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def start(self, config: Path | None = None) -> None:
        command = [sys.executable, "-m", "fastpipe", "serve", str(config or self.config), "--port", str(self.port)]
        command += map(str, self.arguments)
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.printed = ""

    def wait(self) -> None:
        """Waits until it listens."""
        if not self.printed:
            assert self.process is not None
            assert self.process.stdout is not None
            self.printed = self.process.stdout.readline()
            assert "serving" in self.printed

    def watched(self) -> psutil.Process:
        assert self.process is not None
        return psutil.Process(self.process.pid)

    def send(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)

    def end(self, number: int = signal.SIGKILL) -> int | None:
        """Ends it, and returns its exit status."""
        if self.process is None:
            return None
        self.send(number)
        self.send(signal.SIGCONT)
        status = self.process.wait(100)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return status


@contextmanager
def several(config: Path, count: int, *arguments: object, log: Path | None = None) -> Iterator[list[ServerProcess]]:
    """Processes that serve the readers of one file. All of them listen."""
    found = [ServerProcess(config, *arguments, log=log) for _ in range(count)]
    try:
        for server in found:
            server.start()
        for server in found:
            server.wait()
        yield found
    finally:
        for server in found:
            server.end()


@contextmanager
def serving(
    readers: fastpipe.Reader | dict[str, fastpipe.Reader], folder: Path, *arguments: object, log: Path | None = None
) -> Iterator[ServerProcess]:
    """A process that serves readers. It listens."""
    with several(config_of(readers, folder), 1, *arguments, log=log) as (server,):
        yield server


class Proxy:
    """A network between clients and a server, whose attributes say how it fails.

    Args:
        port: The port of the server.

    Attributes:
        port: The port for clients.
        delay: Seconds before each piece of data is passed on.
        rate: Bytes per second to each client, or None for no limit. Only a little data is buffered.
        cut_after: Bytes to the client after which a connection is cut, or None.
        silent_after: Bytes to the client after which a connection carries no more data but stays open, or None.
        silent_most: The number of connections that fail this way. None is for all.
        corrupt_at: The offset of a byte to the client that is changed once, or None.
        corrupt_request_at: The offset of a byte from the client that is changed once, or None.
        corrupt_every: One byte of this many to clients is changed, or None.
        change_request: Bytes from a client, and the bytes that replace them once.
        change_answer: Bytes to a client, and the bytes that replace them once.
        sent: If it isn't None, all bytes from clients are added to it.
        faults: The number of failures so far.
        connections: The number of connections so far.
    """

    delay = 0.0
    rate: float | None = None
    cut_after: int | None = None
    silent_after: int | None = None
    silent_most: int | None = None
    corrupt_at: int | None = None
    corrupt_request_at: int | None = None
    corrupt_every: int | None = None
    change_request: tuple[bytes, bytes] | None = None
    change_answer: tuple[bytes, bytes] | None = None
    sent: bytearray | None = None

    def __init__(self, port: int) -> None:
        self._server = port
        self._until_corrupt = self.faults = self.connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        self._ended = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listening.accept()
            except OSError:
                continue
            server = socket.socket()
            try:
                if self.rate is not None:
                    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
                server.connect(("127.0.0.1", self._server))
            except OSError:
                server.close()
                client.close()
                continue
            self.connections += 1
            self._open += [client, server]
            threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, here: socket.socket, there: socket.socket, to_client: bool) -> None:
        passed, due = 0, 0.0
        with suppress(OSError, EOFError):
            while data := here.recv(1 << 16 if self.rate is None else 1 << 12):
                time.sleep(self.delay)
                if to_client and self.rate is not None:
                    # A thread that had to wait for the processor catches up.
                    now = time.monotonic()
                    due = max(due, now - 2.0) + len(data) / self.rate
                    time.sleep(max(due - now, 0.0))
                there.sendall(self._answer(data, passed) if to_client else self._request(data, passed))
                passed += len(data)
        for one in (here, there):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _changed(self, data: bytes, at: int) -> bytes:
        self.faults += 1
        return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]

    def _request(self, data: bytes, passed: int) -> bytes:
        if self.sent is not None:
            self.sent += data
        if self.corrupt_request_at is not None and passed <= self.corrupt_request_at < passed + len(data):
            data = self._changed(data, self.corrupt_request_at - passed)
            self.corrupt_request_at = None
        if self.change_request is not None and self.change_request[0] in data:
            data, self.change_request = data.replace(*self.change_request, 1), None
            self.faults += 1
        return data

    def _answer(self, data: bytes, passed: int) -> bytes:
        if self.change_answer is not None and self.change_answer[0] in data:
            data, self.change_answer = data.replace(*self.change_answer, 1), None
            self.faults += 1
        if self.corrupt_every is not None:
            at = self._until_corrupt
            while at < len(data):
                data = self._changed(data, at)
                at += self.corrupt_every
            self._until_corrupt = at - len(data)
        end = passed + len(data)
        if self.cut_after is not None and end > self.cut_after:
            self.faults += 1
            raise EOFError
        if self.corrupt_at is not None and passed <= self.corrupt_at < end:
            data = self._changed(data, self.corrupt_at - passed)
            self.corrupt_at = None
        elif self.silent_after is not None and end > self.silent_after and self.silent_most != 0:
            self.faults += 1
            self.silent_most = None if self.silent_most is None else self.silent_most - 1
            while not self._ended and self.silent_after is not None:
                time.sleep(0.02)
            raise EOFError
        return data

    def heal(self) -> None:
        """Ends all failures. Connections that were silent are cut."""
        self.delay = 0.0
        self.cut_after = self.corrupt_at = self.corrupt_request_at = self.silent_after = None
        self.corrupt_every = self.rate = None

    def close(self) -> None:
        self._ended = True
        self._listening.close()
        for one in self._open:
            one.close()


@contextmanager
def through(port: int) -> Iterator[Proxy]:
    """A network to a server."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
