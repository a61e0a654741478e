"""Files on storage: reading them without decoding, which no reader can exceed, and fastpipe.

The plain reader reads a shuffled job in pieces of a block's size, in random order.
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import generate
from peers.job import CannotError, Job, Pass
from peers.ours import FastpipeWorker

ONE_READ = 1 << 20
AT_ONCE = 16


class PlainWorker:
    """Reads a file and does nothing with it, one read after the other."""

    packages: tuple[str, ...] = ()
    threads = 1

    def read(self, job: Job) -> Pass:
        """Reads the file. This is timed."""
        path = Path(job.path)
        size, step = path.stat().st_size, job.read_ahead or ONE_READ
        places = [*range(0, size, step)]
        if job.shuffle:
            random.Random(1).shuffle(places)
        file = os.open(path, os.O_RDONLY)
        buffers = [bytearray(step) for _ in range(self.threads)]

        def some(first: int) -> None:
            for place in places[first :: self.threads]:
                os.preadv(file, [buffers[first]], place)

        try:
            if self.threads == 1:
                some(0)
            else:
                with ThreadPoolExecutor(self.threads) as threads:
                    [*threads.map(some, range(self.threads))]
        finally:
            os.close(file)
        return Pass(generate.rows_of(path))

    def check(self, job: Job) -> tuple[int, None]:
        """Returns nothing to check."""
        raise CannotError("doesn't decode")


class PlainParallelWorker(PlainWorker):
    """Reads with 16 threads, to keep the storage busy."""

    threads = AT_ONCE


class FastpipeFirstWorker(FastpipeWorker):
    """fastpipe's first epoch: each pass opens the file."""

    def read(self, job: Job) -> Pass:
        begun = time.perf_counter()
        with self.open(job) as reader:
            opened = time.perf_counter()
            rows = sum(len(next(iter(batch.values()))) for batch in reader)
        return Pass(rows, notes={"opening": opened - begun})


class FastpipeLaterWorker(FastpipeWorker):
    """fastpipe's later epochs: the file is open."""

    def __init__(self) -> None:
        super().__init__()
        self._readers: dict[Job, Any] = {}

    def read(self, job: Job) -> Pass:
        if job not in self._readers:
            self._readers[job] = self.open(job)
        begun, cpu = time.perf_counter(), time.process_time()
        rows = sum(len(next(iter(batch.values()))) for batch in self._readers[job])
        return Pass(rows, None, time.perf_counter() - begun, time.process_time() - cpu)
