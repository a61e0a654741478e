"""Configuration and fixtures of all tests."""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastavro
import hypothesis
import pytest

import servers

# Every run uses the same examples, so that a failure can be reproduced on any machine. `make soak` runs more examples.
hypothesis.settings.register_profile(
    "fastpipe",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("FASTPIPE_EXAMPLES", "50")),
    print_blob=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("fastpipe")

# Shells make background jobs ignore Ctrl-C, but some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def plain_values() -> Iterator[None]:
    """Makes fastavro return the values that underlie logical types."""
    readers = fastavro.read.LOGICAL_READERS
    saved = dict(readers)
    readers.clear()
    yield
    readers.update(saved)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a certificate authority and the certificates of a server and a client that it signed."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj")
    for authority in ("ca", "stranger"):
        openssl(
            *new, f"/CN={authority}", "-x509", "-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-days", "2"
        )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(*new, f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    return folder


@pytest.fixture(scope="module")
def rewriter() -> Iterator[Callable[..., str]]:
    """Yields a function that copies a file with the apache-avro crate, resolved to a reader's schema if one is passed.

    The function's arguments are both paths, the codec, the bytes per block and the schema as JSON. It returns "ok" or
    "error: ...".
    """
    program = os.environ.get("FASTPIPE_REWRITE")
    if not program:
        pytest.skip("FASTPIPE_REWRITE is not set to the path of fastpipe-avro's example program `rewrite`")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def rewrite(*fields: object) -> str:
            requests.write("\t".join(map(str, fields)) + "\n")
            requests.flush()
            return answers.readline().rstrip("\n")

        yield rewrite
        requests.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="session")
def postgres() -> Iterator[servers.Postgres]:
    """Yields a PostgreSQL server."""
    programs = servers.postgres_programs()
    if programs is None:
        pytest.skip("the PostgreSQL server is not installed (Debian package: postgresql)")
    server = servers.Postgres(programs)
    yield server
    server.stop()


@pytest.fixture
def postgres_url(postgres: servers.Postgres) -> Iterator[str]:
    """Yields the URL of an empty PostgreSQL database."""
    url = postgres.new_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="module")
def mariadb() -> Iterator[servers.Mariadb]:
    """Yields a MariaDB server."""
    program = shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("the MariaDB server is not installed (Debian package: mariadb-server)")
    server = servers.Mariadb(Path(program))
    yield server
    server.stop()


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_for_others() -> Iterator[None]:
    """Frees passes and threads that exceptions of a file's tests keep alive, before the next file's tests start."""
    yield
    gc.collect()


# Matches tests that take long: they, or their helpers, import one of these modules or use one of these fixtures.
NEEDS = re.compile(
    r"^ *(?:import|from) (?:jax|multiprocessing|ray|subprocess|tensorflow|torch|xgboost)\b"
    r"|importorskip|\b(?:postgres|mariadb|certificates|soak)\b",
    re.MULTILINE,
)
HELPERS = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)


@functools.cache
def takes_long(path: Path) -> bool:
    """Returns whether a test file, or a helper of it, needs a framework, a server or another program."""
    text = path.read_text()
    helpers = (path.with_name(f"{name}.py") for name in HELPERS.findall(text))
    return NEEDS.search(text) is not None or any(takes_long(helper) for helper in helpers if helper.exists())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="skip tests that need frameworks, servers or other programs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores slow test files if `--quick` is set."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and config.getoption("--quick") and takes_long(collection_path) else None


# The slowest files run first, so that none of them is left to run at the end while other cores are idle.
LONG = (
    "test_torch_loading",
    "test_tf",
    "test_device_script",
    "test_service_faults",
    "test_example_recommender",
    "test_ray",
    "test_ray_data",
    "test_ray_service",
    "test_atds_differential",
    "test_hostile_container",
    "test_csv",
    "test_example_augmentation",
    "test_loader_interrupts",
    "test_loader_same",
    "test_example_neumf",
    "test_atds",
    "test_csv_compressed",
    "test_loader_chaos",
    "test_torch_lending",
    "test_avro_resolution_oracle",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the slowest files to the front."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, sched: Any) -> None:
    """Prints at once the test that crashed its process or timed out, because the run may end before its summary."""
    sched.config.pluginmanager.get_plugin("terminalreporter").write_line(f"\n{crashitem} crashed its process")
