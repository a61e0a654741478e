"""Files that aren't in the page cache yield the same batches as their contents in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wire
from fastpipe import DenseSpec, Reader, read_avro

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no posix_fadvise")

PADDING = st.sampled_from([0, 10, 5_000])
"""Sizes of a row's second field: many blocks within one page, and blocks of many pages."""


def content(blocks: list[tuple[int, int]], first: int) -> bytes:
    """Returns a file of blocks, each with a number of rows and the size of their second field."""
    fields = '[{"name": "x", "type": "int"}, {"name": "rest", "type": "bytes"}]'
    found: bytes = wire.header(f'{{"type": "record", "name": "r", "fields": {fields}}}')
    for rows, size in blocks:
        rest = wire.text(bytes(size))
        found += wire.block(rows, b"".join(wire.long(first + i) + rest for i in range(rows)))
        first += rows
    return found


def empty_cache(path: Path) -> None:
    """Removes a file from the page cache."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def batches(reader: Reader) -> Iterator[np.ndarray]:
    for batch in reader:
        yield batch["x"].copy()


@given(
    files=st.lists(st.lists(st.tuples(st.integers(0, 12), PADDING), max_size=25), min_size=1, max_size=4),
    shuffle=st.sampled_from([False, True, "block", "buffer"]),
    shuffle_buffer=st.integers(1, 200),
    num_threads=st.integers(1, 3),
    limited=st.booleans(),
)
@settings(deadline=None, max_examples=20)
def test_cold_files_yield_the_batches_of_their_contents(
    files: list[list[tuple[int, int]]], shuffle: Any, shuffle_buffer: int, num_threads: int, limited: bool
) -> None:
    contents = [content(blocks, 1000 * i) for i, blocks in enumerate(files)]
    options: dict[str, Any] = {"features": {"x": DenseSpec((), "int32")}, "batch_size": 7, "drop_last": False}
    if shuffle:
        options |= {"shuffle": shuffle, "shuffle_buffer": shuffle_buffer, "seed": 3}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.avro" for i in range(len(contents))]
        for path, stored in zip(paths, contents, strict=True):
            path.write_bytes(stored)
        limit: dict[str, Any] = {"memory_limit": "64 MB"} if limited else {}
        with (
            read_avro(contents, num_threads=1, **options) as memory,
            read_avro(paths, num_threads=num_threads, **limit, **options) as disk,
        ):
            for _ in range(2):
                for path in paths:
                    empty_cache(path)
                expected, found = list(batches(memory)), list(batches(disk))
                assert [batch.tolist() for batch in found] == [batch.tolist() for batch in expected]


def test_a_pass_over_cold_files_can_be_left_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "rows.avro"
    path.write_bytes(content([(3, 5_000)] * 60, 0))
    options: dict[str, Any] = {"features": {"x": DenseSpec((), "int32")}, "batch_size": 10, "num_threads": 2}
    with read_avro(path, shuffle=True, shuffle_buffer=40, seed=1, **options) as reader:
        whole = [batch.tolist() for batch in batches(reader)]
        for step in range(len(whole)):
            reader.set_epoch(0)
            empty_cache(path)
            passing = iter(reader)
            for _ in range(step):
                next(passing)
            state = reader.state_dict()
            del passing
            reader.load_state_dict(state)
            empty_cache(path)
            assert [batch.tolist() for batch in batches(reader)] == whole[step:]
