"""Creates the virtual environments of the readers, with pinned packages."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

ENVS = Path(__file__).resolve().parent.parent / ".envs"

NUMPY = ["numpy==2.4.6; python_version >= '3.11'", "numpy==2.2.6; python_version < '3.11'"]
# The frame readers need Arrow and NumPy for checksums and for the conversion to NumPy.
FRAMES = ["polars==2.1.0", "pyarrow==26.0.1", *NUMPY]
PINS: dict[str, list[str]] = {
    "fastavro": ["fastavro[snappy,zstandard]==1.13.1", *NUMPY],
    "polars": [*FRAMES],
    "polars-avro": ["polars-avro==0.13.0", *FRAMES],
    "jetliner": ["jetliner==0.2.0", *FRAMES],
    # DuckDB downloads extensions from its server. This package contains the avro extension of the same version.
    "duckdb": ["duckdb==1.5.5", "duckdb-extension-avro==1.5.5", "pyarrow==26.0.1", *NUMPY],
    "datasets": ["datasets==5.2.0", "pyarrow==26.0.1", *NUMPY],
    "ray-data": ["ray[data]==2.60.0", "pyarrow==26.0.1", *NUMPY],
    "sql": [
        "connectorx==0.4.6",
        "ray[data]==2.60.0",
        "pandas==3.1.1",
        "sqlalchemy==2.1.9",
        "psycopg[binary]==3.3.9",
        "pyarrow==26.0.1",
    ],
    # The last release of tensorflow-io. It was built for TensorFlow 2.16, which needs NumPy 1.
    "tensorflow-io": ["tensorflow-io==0.37.1", "tensorflow-cpu==2.16.2", "numpy==1.26.4"],
}
PYTHON = {"tensorflow-io": "3.11"}
"""The newest Python that has wheels, for environments that don't support the running one."""


class NoEnvironmentError(Exception):
    """A reader's environment can't be created."""


def _base(env: str) -> str:
    wanted = PYTHON.get(env)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if wanted is None or wanted == running:
        return sys.executable
    found = shutil.which(f"python{wanted}")
    if found is None:
        raise NoEnvironmentError(f"needs Python {wanted}, but python{wanted} is not on the path")
    return found


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise NoEnvironmentError((errors or lines)[-1])
    return done.stdout


def _make(env: str, log: Callable[[str], None]) -> str:
    home, base = ENVS / env, _base(env)
    python, note = home / "bin" / "python", home / "pins.txt"
    wanted = "\n".join([_run([base, "-c", "import platform; print(platform.python_version())"]).strip(), *PINS[env]])
    ENVS.mkdir(exist_ok=True)
    # Several tests may need the environment at the same time.
    with (ENVS / f"{env}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (note.exists() and note.read_text() == wanted):
            _create(env, home, base, log)
            note.write_text(wanted)
    return str(python)


def _create(env: str, home: Path, base: str, log: Callable[[str], None]) -> None:
    log(f"creating the environment benches/.envs/{env}: {', '.join(pin for pin in PINS[env] if ';' not in pin)}")
    _run([base, "-m", "venv", "--clear", str(home)])
    python = str(home / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary", ":all:"]
    _run([*pip, *PINS[env]])


@cache
def _result(env: str, log: Callable[[str], None]) -> tuple[str, str]:
    # Failures are cached, too: otherwise each cell would wait for the same failure.
    try:
        return _make(env, log), ""
    except (NoEnvironmentError, OSError) as error:
        return "", str(error)


def interpreter(env: str | None, log: Callable[[str], None]) -> str:
    """Returns the Python of an environment. Creates the environment if it is missing or its pins have changed.

    Args:
        env: A key of `PINS`, or None for the driver's environment.
        log: Called with a message before an environment is created.

    Raises:
        NoEnvironmentError: The environment can't be created. The message is the installer's last error.
    """
    if env is None:
        return sys.executable
    python, error = _result(env, log)
    if error:
        raise NoEnvironmentError(error)
    return python
