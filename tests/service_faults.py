"""Servers in processes of their own, and a network that fails: what tests of the data service are run against."""

from __future__ import annotations

import os
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

import pytest

from fastpipe.service import _asking, _local
from fastpipe.service._asking import Question
from fastpipe.service._local import LocalProcess
from servers import free_port

__all__ = ["Proxy", "ServerProcess", "connect_patiently", "serving", "several"]


def connect_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives readers and local services time to connect and to start, whatever their timeout: a machine may be busy."""

    def question(action: str, request: Any, read: Any, seconds: float) -> Any:
        return Question(action, request, read, 60.0 if action == "describe" else seconds)

    monkeypatch.setattr(_asking, "Question", question)
    monkeypatch.setattr(_local, "LocalProcess", lambda reader, _: LocalProcess(reader, 60.0))


class ServerProcess:
    """`fastpipe serve FILE`, at one port, started again and again, with further arguments."""

    def __init__(self, config: Path, *arguments: str) -> None:
        self.config, self.port, self.arguments = config, free_port(), arguments
        self.process: subprocess.Popen[str] | None = None
        self._listens = False

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def start(self, config: Path | None = None) -> None:
        command = [sys.executable, "-m", "fastpipe", "serve", str(config or self.config), "--port", str(self.port)]
        command += self.arguments
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._listens = False

    def wait(self) -> None:
        """Until it listens."""
        if self._listens:
            return
        assert self.process is not None
        assert self.process.stdout is not None
        assert "serving" in self.process.stdout.readline()
        self._listens = True

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
def serving(text: str, folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    """A server of the readers that a configuration of this text defines, with further arguments."""
    config = folder / "readers.py"
    config.write_text(text)
    server = ServerProcess(config, *arguments)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.end()


@contextmanager
def several(config: Path, count: int) -> Iterator[list[ServerProcess]]:
    """So many servers of the readers in a file, which listen."""
    found = [ServerProcess(config) for _ in range(count)]
    try:
        for server in found:
            server.start()
        for server in found:
            server.wait()
        yield found
    finally:
        for server in found:
            server.end()


class Proxy:
    """A network between a client and a server, which fails as it is told.

    Args:
        port: of the server.

    Attributes:
        port: to connect to.
        delay: seconds before each piece is passed on.
        cut_after: bytes to the client after which a connection is cut; None for never.
        corrupt_at: bytes to the client after which one byte is changed; None for never.
        corrupt_request_at: the same, of what a client sends.
        corrupt_every: of so many bytes to clients one is changed, again and again; None for none.
        rate: bytes a second to each client; None for as many as there are. It holds little that isn't passed on yet.
        silent_after: bytes to the client after which nothing comes any more, though the connection stays.
        silent_most: connections that fall silent; None for all.
        faults: how often something has failed.
        connections: how many there have been.
    """

    def __init__(self, port: int) -> None:
        self._server = port
        self.delay = 0.0
        self.cut_after: int | None = None
        self.corrupt_at: int | None = None
        self.corrupt_request_at: int | None = None
        self.corrupt_every: int | None = None
        self._until_corrupt = 0
        self.rate: float | None = None
        self.silent_after: int | None = None
        self.silent_most: int | None = None
        # What is changed once, of what a client sends, and of what it is sent.
        self.change_request: tuple[bytes, bytes] | None = None
        self.change_answer: tuple[bytes, bytes] | None = None
        # What clients have sent, if somebody wants to know.
        self.sent: bytearray | None = None
        self.faults = self.connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        self._ended = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                if self._ended:
                    return
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
        try:
            while data := here.recv(1 << 16 if self.rate is None else 1 << 12):
                time.sleep(self.delay)
                if to_client and self.rate is not None:
                    # A thread that had to wait for the processor catches up.
                    now = time.monotonic()
                    due = max(due, now - 2.0) + len(data) / self.rate
                    time.sleep(max(due - now, 0.0))
                passed += len(data)
                if self.sent is not None and not to_client:
                    self.sent += data
                at = None if self.corrupt_request_at is None else self.corrupt_request_at - passed + len(data)
                if to_client:
                    data = self._faulty(data, passed - len(data))
                elif at is not None and 0 <= at < len(data):
                    data = _changed(data, at)
                    self.corrupt_request_at = None
                    self.faults += 1
                elif self.change_request is not None and self.change_request[0] in data:
                    data = data.replace(*self.change_request, 1)
                    self.change_request = None
                    self.faults += 1
                there.sendall(data)
        except (OSError, EOFError):
            pass
        for one in (here, there):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _faulty(self, data: bytes, passed: int) -> bytes:
        if self.change_answer is not None and self.change_answer[0] in data:
            data = data.replace(*self.change_answer, 1)
            self.change_answer = None
            self.faults += 1
        if self.corrupt_every is not None:
            at = self._until_corrupt
            while at < len(data):
                data = _changed(data, at)
                self.faults += 1
                at += self.corrupt_every
            self._until_corrupt = at - len(data)
        end = passed + len(data)
        if self.cut_after is not None and end > self.cut_after:
            self.faults += 1
            raise EOFError
        if self.corrupt_at is not None and passed <= self.corrupt_at < end:
            self.faults += 1
            at = self.corrupt_at - passed
            self.corrupt_at = None
            return _changed(data, at)
        if self.silent_after is not None and end > self.silent_after and self.silent_most != 0:
            self.faults += 1
            self.silent_most = None if self.silent_most is None else self.silent_most - 1
            while not self._ended and self.silent_after is not None:
                time.sleep(0.02)
            raise EOFError
        return data

    def heal(self) -> None:
        """Nothing fails any more. What had fallen silent is cut."""
        self.delay = 0.0
        self.cut_after = self.corrupt_at = self.corrupt_request_at = self.silent_after = None
        self.corrupt_every = self.rate = None

    def close(self) -> None:
        self._ended = True
        self._listening.close()
        for one in self._open:
            one.close()


def _changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@contextmanager
def through(port: int) -> Iterator[Proxy]:
    """A network to a server."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
