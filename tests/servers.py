"""Servers for tests, which start in a second or two on loopback and stop with the tests."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

# PostgreSQL refuses to run as root.
_AS = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []


def postgres_programs() -> Path | None:
    """Returns the folder of the newest installed PostgreSQL server's programs, or None if there is none."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"), key=lambda path: float(path.split("/")[4]))
    path = found[-1] if found else shutil.which("initdb")
    if path is None or (_AS and not _has_user("postgres")):
        return None
    return Path(path).parent


# These ports are below the ranges from which operating systems and Ray assign ports automatically.
# So a port stays free until the test uses it, and while its server restarts. Each pytest-xdist process has its own
# range of ports.
_PORTS_OF_A_PROCESS = 1900
_FIRST_PORT = 2000 + _PORTS_OF_A_PROCESS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 4)
# Two runs of pytest on one machine rarely begin at the same port.
_ports = itertools.cycle(range(_PORTS_OF_A_PROCESS))
for _ in range(os.getpid() * 37 % _PORTS_OF_A_PROCESS):
    next(_ports)


def free_port() -> int:
    """Returns a loopback port on which no program listens and that no other test gets."""
    for place in itertools.islice(_ports, _PORTS_OF_A_PROCESS):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", _FIRST_PORT + place))
            return _FIRST_PORT + place
    raise RuntimeError("no port is free")


class Postgres:
    """A PostgreSQL server with a separate data folder, which is removed when the server is stopped.

    Args:
        programs: Folder of its programs.
        settings: Server settings such as `max_connections=200`.
    """

    def __init__(self, programs: Path, *settings: str) -> None:
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="fastpipe-postgres-"))
        if _AS:
            shutil.chown(self._folder, "postgres", "postgres")
        self.port = free_port()
        self._settings = ["fsync=off", "shared_buffers=64MB", "listen_addresses=127.0.0.1", *settings]
        self._databases = 0
        self._server: subprocess.Popen[bytes] | None = None
        initialize = [programs / "initdb", "-D", self._data, "-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8"]
        subprocess.run([*_AS, *initialize, "--locale=C.UTF-8"], check=True, stdout=subprocess.DEVNULL, cwd="/")
        self.start()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def url(self, database: str = "postgres") -> str:
        """Returns the URL of a database."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """Creates an empty database and returns its URL."""
        self._databases += 1
        name = f"test{self._databases}"
        self._psql(f"CREATE DATABASE {name}")
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Removes a database, including open connections to it."""
        self._psql(f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)")

    def _psql(self, statement: str) -> None:
        command = [self._programs / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", self.url(), "-c", statement]
        subprocess.run(command, check=True)

    def start(self) -> None:
        """Starts the server and waits until it answers. A killed server recovers first."""
        options = [argument for setting in self._settings for argument in ("-c", setting)]
        command = [self._programs / "postgres", "-D", self._data, "-p", str(self.port), "-k", self._folder, *options]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen([*_AS, *command], stdout=log, stderr=log, cwd="/")
        ready = [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        for _ in range(600):
            if subprocess.run(ready, check=False).returncode == 0:
                return
            if self._server.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"PostgreSQL did not start:\n{(self._folder / 'log').read_text()}")

    def kill(self) -> None:
        """Stops the server and its connections immediately, like a crash. `start` restarts it."""
        assert self._server is not None
        # On SIGQUIT it also ends its children, without a clean shutdown. On SIGKILL they would survive and hold its
        # memory.
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait(30)

    def stop(self) -> None:
        """Stops the server and removes its data."""
        if self._server is not None and self._server.poll() is None:
            self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


class Mariadb:
    """A MariaDB server with a separate data folder, which is removed when the server is stopped.

    Args:
        program: Path of `mariadbd`.
    """

    def __init__(self, program: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fastpipe-mariadb-"))
        self.port = free_port()
        data, socket_path = self._folder / "data", self._folder / "socket"
        if os.getuid() == 0:
            shutil.chown(self._folder, "mysql", "mysql")
        user = ["--user=mysql"] if os.getuid() == 0 else []
        install = [
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={data}",
            "--auth-root-authentication-method=normal",
        ]
        subprocess.run(
            [*install, "--skip-test-db", *user], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # TCP connections then need no password.
        start = self._folder / "start.sql"
        user_of = "test@'127.0.0.1'"
        start.write_text(f"CREATE DATABASE test;\nCREATE USER {user_of};\nGRANT ALL ON test.* TO {user_of};\n")
        start.chmod(0o644)
        options = [f"--datadir={data}", f"--socket={socket_path}", f"--port={self.port}", f"--init-file={start}"]
        command = [program, "--no-defaults", *options, "--bind-address=127.0.0.1", "--skip-name-resolve", *user]
        with (self._folder / "log").open("wb") as log:
            self._server = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        for _ in range(600):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._server.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"MariaDB did not start:\n{(self._folder / 'log').read_text()}")

    @property
    def url(self) -> str:
        """The URL of its empty database, for SQLAlchemy."""
        return f"mariadb+pymysql://test@127.0.0.1:{self.port}/test"

    def stop(self) -> None:
        """Stops the server and removes its data."""
        self._server.kill()
        self._server.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)
