"""Rows of CSV files that `on_ragged="skip"` leaves out: their count, compared with Python's `csv` module."""

from __future__ import annotations

import csv
import gzip
import io
import os
import pickle
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

import fastpipe
from fastpipe import DenseSpec
from strategies import SOME

FEATURES = {"a": DenseSpec((), "string"), "b": DenseSpec((), "string")}
LONG_AGO = 1e9


# Indexes of smaller files aren't cached.
CACHED = 70_000


def member(text: bytes) -> bytes:
    """Returns a gzip member that is no smaller than its text."""
    return gzip.compress(text, 0)


def members(text: bytes) -> bytes:
    """Returns gzip members. They may begin anywhere within a row."""
    size = max(len(text) // 7, 1)
    return b"".join(member(text[at : at + size]) for at in range(0, len(text), size))


PACKED: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, "one member": member, "members": members}


def counted(text: str) -> tuple[int, int]:
    """Returns the numbers of ragged rows and of all rows that Python's module finds in rows of two fields."""
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    return sum(len(row) != 2 for row in rows), len(rows)


def opened(source: Any, caplog: pytest.LogCaptureFixture, **options: Any) -> tuple[int, int]:
    """Opens files and returns the logged number of ragged rows, and the number of all rows."""
    caplog.clear()
    with caplog.at_level("INFO", "fastpipe"):
        reader = fastpipe.read_csv(source, features=FEATURES, batch_size=9, on_ragged="skip", **options)
    text = "\n".join(message for message in caplog.messages if "too many or too few fields" in message)
    if not text:
        return 0, reader.num_rows
    found = re.match(r"(all|\d+ of) (\d+) rows", text)
    assert found is not None
    total = int(found[2])
    skipped = total if found[1] == "all" else int(found[1].removesuffix(" of"))
    assert skipped + reader.num_rows == total
    return skipped, total


@pytest.mark.parametrize(("ragged", "warns"), [(0, False), (2, False), (3, True)])
def test_ragged_rows_are_counted(ragged: int, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.csv"
    rows = [b"3\n", b"4,5,6\n", b"7\n"][:ragged] + [b"1,2\n"] * (20 - ragged)
    path.write_bytes(b"a,b\n" + b"".join(rows))
    caplog.set_level("INFO", "fastpipe")
    with pytest.warns(fastpipe.errors.RowsLeftOutWarning) if warns else nullcontext() as warned:
        reader = fastpipe.read_csv(path, batch_size=9, on_ragged="skip")
    assert reader.num_rows == 20 - ragged
    assert sum(len(batch["a"]) for batch in pickle.loads(pickle.dumps(reader))) == 20 - ragged
    said = caplog.messages
    if ragged:
        text = f"{ragged} of 20 rows ({ragged / 20:.0%}) are left out, because they have too many or too few fields"
        assert [message.startswith(text) for message in said] == [True]
    else:
        assert not said
    assert [str(warning.message) for warning in warned or []] == (said if warns else [])


PIECES = ["x", "yz", ",", ",", "1,2\n", "\n", "\n", "\r\n", '"', '"', '""', '"\n"']


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
@hypothesis.settings(max_examples=SOME)
@hypothesis.given(
    st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=40), min_size=1, max_size=4),
    st.lists(st.sampled_from(list(PACKED)), min_size=4, max_size=4),
    st.booleans(),
)
def test_counts_of_any_files(
    caplog: pytest.LogCaptureFixture, pieces: list[list[str]], packed: list[str], cached: bool
) -> None:
    texts = ["".join(piece) for piece in pieces]
    if cached:
        texts = [text * (CACHED // len(text) + 1) for text in texts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "files"
        folder.mkdir()
        for number, (text, how) in enumerate(zip(texts, packed, strict=False)):
            path = folder / f"{number}.csv"
            path.write_bytes(PACKED[how](f"a,b\n{text}".encode()))
            os.utime(path, (LONG_AGO, LONG_AGO))
        try:
            found = opened(folder, caplog)
        except fastpipe.errors.MalformedFileError as error:
            assert "ends within quotes" in str(error)  # noqa: PT017
            return
        counts = map(counted, texts)
        assert found == tuple(map(sum, zip(*counts, strict=True)))
        # The second time, the counts come from the cache.
        cache = Path(name) / "cache"
        assert [opened(folder, caplog, index_cache=cache) for _ in range(2)] == [found] * 2
        assert len(list(cache.iterdir())) == (len(texts) if cached else 0)


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
@pytest.mark.parametrize("packed", PACKED)
def test_counts_of_a_large_file(packed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Threads scan regions of 8 MiB, and chunks of 56 KiB cross the boundaries of the text that is repeated."""
    once = "".join(f'{i},"{i}\n{"x" * (i % 90)}"{",9" if i % 7 == 0 else ""}\n' for i in range(9_999)) + "only\n" * 999
    again = (20 << 20) // len(once)
    path, cache = tmp_path / "x.csv", tmp_path / "cache"
    path.write_bytes(PACKED[packed](b"a,b\n" + again * once.encode()))
    os.utime(path, (LONG_AGO, LONG_AGO))
    skipped, total = counted(once)
    for options in ({}, {"index_cache": cache}, {"index_cache": cache}):
        assert opened(path, caplog, **options) == (again * skipped, again * total)
