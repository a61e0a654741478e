"""Settings of the tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import fastavro
import hypothesis
import pytest

# The same examples everywhere and each time: what fails in one place fails in all. FASTPIPE_EXAMPLES asks for more.
hypothesis.settings.register_profile(
    "fastpipe",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("FASTPIPE_EXAMPLES", "200")),
    print_blob=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("fastpipe")

# Shells let what they start in the background ignore Ctrl-C, and tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def plain_values() -> Iterator[None]:
    """Lets fastavro hand out the values that underlie logical types."""
    readers = fastavro.read.LOGICAL_READERS
    saved = dict(readers)
    readers.clear()
    yield
    readers.update(saved)


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_for_others() -> Iterator[None]:
    """What exceptions of a file's tests have kept by their tracebacks, passes and their threads, ends with the file."""
    yield
    gc.collect()
