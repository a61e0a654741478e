"""What the code of a source of one's own raises at a server is raised in its batch's place, at once."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import pytest

import fastpipe
from servers import free_port

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.flight")


class Faulty:
    """Eight units of eight rows, of which the sixth has a fault in its code."""

    rows = [8] * 8
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked = 0

    def read(self, unit: int) -> Any:
        if unit == 5 and self.error is not None:
            self.asked += 1
            raise self.error
        return pa.table({"id": range(8 * unit, 8 * unit + 8)}, schema=self.schema)

    def fingerprint(self) -> str:
        return "faulty"


ERRORS = [AttributeError("no such attribute"), KeyError("missing"), ZeroDivisionError("by zero"), TypeError("wrong")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_a_sources_code_are_raised_in_their_place(error: Exception) -> None:
    reader = fastpipe.read_units(Faulty(error), batch_size=8)
    with reader.serve() as server:
        remote = fastpipe.connect(server.url, timeout=300)
        found, begun = [], time.monotonic()
        with pytest.raises(fastpipe.FastpipeError, match=type(error).__name__) as raised:
            found.extend(batch["id"][0] for batch in remote)
        # Not after all the time in which a server may be away.
        assert time.monotonic() < begun + 100
        assert not isinstance(raised.value, fastpipe.ServiceError)
        assert str(server.url) in str(raised.value)
        assert found == [0, 8, 16, 24, 32]


def test_what_the_server_lacks_is_asked_of_it_again() -> None:
    """A server that is out of memory, or of files, may have some again."""
    source = Faulty(OSError("too many open files"))
    with fastpipe.read_units(source, batch_size=8).serve() as server:
        remote = fastpipe.connect(server.url, timeout=4)
        with pytest.raises(fastpipe.ServiceError, match="too many open files"):
            list(remote)
    assert source.asked > 1


def ids(batches: Any) -> list[int]:
    return [batch["id"][0] for batch in batches]


def reader(error: Exception | None, **options: Any) -> fastpipe.Reader:
    return fastpipe.read_units(Faulty(error), **{"batch_size": 8} | options)


UNREADABLE = [
    fastpipe.StorageError("the disk failed (file data.bin)", path="data.bin", reason="the disk failed"),
    fastpipe.MissingFileError("there is no file data.bin", path="data.bin"),
]
unreadable = pytest.mark.parametrize("error", UNREADABLE, ids=lambda error: type(error).__name__)
# Longer than any test may take: nothing waits for it.
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
            found.extend(batch["id"][0] for batch in fastpipe.connect(urls, timeout=LONG))
    assert found == [0, 8, 16, 24, 32]
    assert not isinstance(raised.value, fastpipe.ServiceError)
    assert str(raised.value) == str(expected.value)
    assert raised.value.path == expected.value.path == "data.bin"


@unreadable
@pytest.mark.parametrize("prefetch", [1, 2, None])
def test_a_server_that_can_read_a_file_makes_the_batches_of_others(error: Exception, prefetch: int | None) -> None:
    with reader(error).serve() as faulty, reader(None).serve() as sound:
        remote = fastpipe.connect([faulty.url, sound.url], prefetch=prefetch, epochs=5, timeout=LONG)
        assert ids(remote) == ids(reader(None)) * 5


@unreadable
def test_a_server_that_is_away_may_read_the_file_until_the_timeout(error: Exception) -> None:
    gone = f"grpc://127.0.0.1:{free_port()}"
    with reader(error).serve() as faulty:
        with pytest.raises(type(error), match=r"data\.bin") as raised:
            list(fastpipe.connect([faulty.url, gone], timeout=4))
        assert not isinstance(raised.value, fastpipe.ServiceError)


@unreadable
def test_the_fallback_reads_what_servers_cannot(error: Exception) -> None:
    with reader(error).serve() as faulty:
        remote = fastpipe.connect(faulty.url, fallback=reader(None), epochs=3, prefetch=1, timeout=LONG)
        assert ids(remote) == ids(reader(None)) * 3
        both = fastpipe.connect(faulty.url, fallback=reader(error), timeout=LONG)
        with pytest.raises(type(error), match=r"data\.bin"):
            list(both)


@unreadable
def test_a_local_service_raises_what_its_reader_raises(error: Exception) -> None:
    with fastpipe.LocalService(reader(error), timeout=LONG) as remote, pytest.raises(type(error), match=r"data\.bin"):
        list(remote)
