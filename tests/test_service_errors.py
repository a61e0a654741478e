"""Errors of data, files and sources at a server: a client raises them in the place of their batch, at once."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

import fastpipe
from servers import free_port
from toy_units import Numbers

pytest.importorskip("pyarrow.flight")


def read_unit(error: Exception | None, unit: int) -> None:
    if unit == 5 and error is not None:
        raise error


def source(error: Exception | None) -> Numbers:
    """Returns eight units of eight rows. Reading the sixth raises the error."""
    return Numbers([8] * 8, partial(read_unit, error))


def reader(error: Exception | None) -> fastpipe.Reader:
    return fastpipe.read_units(source(error), batch_size=8)


def firsts(batches: Any) -> list[int]:
    return [batch["x"][0] for batch in batches]


ERRORS = [AttributeError("no such attribute"), KeyError("missing"), ZeroDivisionError("by zero"), TypeError("wrong")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_a_custom_source_are_raised_in_their_place(error: Exception) -> None:
    with reader(error).serve() as server:
        remote = fastpipe.connect(server.url, timeout=300)
        found, begun = [], time.monotonic()
        with pytest.raises(fastpipe.FastpipeError, match=type(error).__name__) as raised:
            found.extend(batch["x"][0] for batch in remote)
        # The client doesn't wait for the timeout.
        assert time.monotonic() < begun + 100
        assert not isinstance(raised.value, fastpipe.errors.ServiceError)
        assert str(server.url) in str(raised.value)
        assert found == [0, 8, 16, 24, 32]


def test_a_server_without_resources_is_asked_again() -> None:
    """A server that has run out of memory or files may recover."""
    numbers = source(OSError("too many open files"))
    with fastpipe.read_units(numbers, batch_size=8).serve() as server:
        remote = fastpipe.connect(server.url, timeout=4)
        with pytest.raises(fastpipe.errors.ServiceError, match="too many open files"):
            list(remote)
    assert numbers.calls.count(5) > 1


UNREADABLE = [
    fastpipe.errors.StorageError("the disk failed (file data.bin)", path="data.bin", reason="the disk failed"),
    fastpipe.errors.MissingFileError("file data.bin is missing", path="data.bin"),
]
unreadable = pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: type(error).__name__)
# Longer than any test may take, so no test waits for it.
LONG = 300


@unreadable
@pytest.mark.parametrize("servers", [1, 2])
def test_a_file_that_no_server_can_read_is_an_error_at_once(error: Exception, servers: int) -> None:
    with pytest.raises(type(error)) as expected:
        list(reader(error))
    with ExitStack() as stack:
        urls = [stack.enter_context(reader(error).serve()).url for _ in range(servers)]
        found: list[int] = []
        with pytest.raises(type(error)) as raised:
            found.extend(batch["x"][0] for batch in fastpipe.connect(urls, timeout=LONG))
    assert found == [0, 8, 16, 24, 32]
    assert not isinstance(raised.value, fastpipe.errors.ServiceError)
    assert str(raised.value) == str(expected.value)
    assert raised.value.path == expected.value.path == "data.bin"


@unreadable
@pytest.mark.parametrize("prefetch", [1, 2, None])
def test_a_server_that_can_read_a_file_makes_the_batches_of_others(error: Exception, prefetch: int | None) -> None:
    with reader(error).serve() as faulty, reader(None).serve() as sound:
        remote = fastpipe.connect([faulty.url, sound.url], prefetch=prefetch, epochs=5, timeout=LONG)
        assert firsts(remote) == firsts(reader(None)) * 5


@unreadable
def test_a_server_that_is_away_may_read_the_file_until_the_timeout(error: Exception) -> None:
    gone = f"grpc://127.0.0.1:{free_port()}"
    with reader(error).serve() as faulty:
        with pytest.raises(type(error), match=r"data\.bin") as raised:
            list(fastpipe.connect([faulty.url, gone], timeout=4))
        assert not isinstance(raised.value, fastpipe.errors.ServiceError)


@unreadable
def test_the_fallback_reads_what_servers_cannot(error: Exception) -> None:
    with reader(error).serve() as faulty:
        remote = fastpipe.connect(faulty.url, fallback=reader(None), epochs=3, prefetch=1, timeout=LONG)
        assert firsts(remote) == firsts(reader(None)) * 3
        both = fastpipe.connect(faulty.url, fallback=reader(error), timeout=LONG)
        with pytest.raises(type(error), match=r"data\.bin"):
            list(both)


@unreadable
def test_a_local_service_raises_what_its_reader_raises(error: Exception) -> None:
    with (
        fastpipe.service.LocalService(reader(error), timeout=LONG) as service,
        pytest.raises(type(error), match=r"data\.bin"),
    ):
        list(service.reader)
