"""Caches that are interrupted: Ctrl-C, killed programs, several threads, forked children, and full disks."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from fastpipe.errors import StorageError
from toy_units import until

pa = pytest.importorskip("pyarrow")
resource = pytest.importorskip("resource")


class Slow:
    """Units that take a while to read."""

    rows = (20_000,) * 10
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False)])

    def read(self, unit: int) -> Any:
        time.sleep(0.01)
        return pa.table({"a": np.arange(20_000)}, schema=self.schema)

    def fingerprint(self) -> str:
        return "slow"


def sums(reader: fastpipe.Reader) -> list[int]:
    return [int(batch["a"].sum()) for batch in reader]


def slow() -> fastpipe.Reader:
    return fastpipe.read_units(Slow(), batch_size=1000)


WANTED = [sum(range(start, start + 1000)) for start in range(0, 20_000, 1000)] * 10


@pytest.mark.parametrize("stored", [False, True])
def test_threads_and_a_forked_child_cache_the_same_rows(tmp_path: Path, stored: bool) -> None:
    folder, reader, found = tmp_path if stored else None, slow(), []
    threads = [threading.Thread(target=lambda: found.append(sums(reader.cache(folder)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [WANTED] * 3
    assert len(list(tmp_path.iterdir())) == stored
    cached = reader.cache(folder)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os._exit(not sums(cached) == sums(slow().cache(folder)) == sums(slow().cache()) == WANTED)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("stored", [False, True])
def test_ctrl_c_leaves_no_file(tmp_path: Path, stored: bool) -> None:
    def interrupt() -> None:
        if begun.wait(60):
            signal.pthread_kill(main, signal.SIGINT)

    begun, main = threading.Event(), threading.main_thread().ident or 0

    class Signalling(Slow):
        def read(self, unit: int) -> Any:
            if unit == 5:
                begun.set()
                time.sleep(0.2)
            return super().read(unit)

    thread = threading.Thread(target=interrupt)
    thread.start()
    reader = fastpipe.read_units(Signalling(), batch_size=1000)
    with pytest.raises(KeyboardInterrupt):
        reader.cache(tmp_path if stored else None)
    thread.join(60)
    assert list(tmp_path.iterdir()) == []
    assert sums(reader.cache(tmp_path if stored else None)) == WANTED


def test_a_killed_writer_leaves_a_file_that_is_never_read(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        slow().cache(tmp_path)
        time.sleep(60)
    until(lambda: bool(list(tmp_path.iterdir())))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert sums(slow().cache(tmp_path)) == WANTED
    assert len([path for path in tmp_path.iterdir() if path.suffix == ".arrow"]) == 1


@pytest.mark.parametrize("limit", [1, 10_000, 1_000_000])
def test_a_full_disk_is_a_storage_error(tmp_path: Path, limit: int) -> None:
    """A limit for the size of files fails in the same place as a full disk."""
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(StorageError, match="cannot write the cache") as raised:
            slow().cache(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert raised.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []
    assert sums(slow().cache(tmp_path)) == WANTED
