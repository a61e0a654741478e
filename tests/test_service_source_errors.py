"""What the code of a source of one's own raises at a server is raised in its batch's place, at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

import fastpipe

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.flight")


class Faulty:
    """Eight units of eight rows, of which the sixth has a fault in its code."""

    rows = [8] * 8
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0

    def read(self, unit: int) -> Any:
        if unit == 5:
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
        remote = fastpipe.connect(server.url, timeout=2)
        with pytest.raises(fastpipe.ServiceError, match="too many open files"):
            list(remote)
    assert source.asked > 1
