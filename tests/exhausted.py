"""Runs for test_out_of_memory.py that keep batches until memory is exhausted.

Run as a program, it is a server that forks the runs, because importing fastpipe would dominate the time of each. It
reads a run's index and a folder, and answers with the process id. It then reads another line, waits for the process and
answers with its exit status. The results of a run are written to the folder.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastpipe
import samples
import wire

MB = 1 << 20
ROWS = 40  # Rows per block.
BLOCKS = 120
FILES = 30

SCHEMAS: dict[str, Any] = {
    "dense": wire.record("Row", id="long", x=wire.list_of("float")),
    "ragged": wire.record("Row", id="long", x=wire.list_of("double"), y=wire.list_of(wire.list_of("long"))),
    "sparse": wire.record(
        "Row", id="long", x=wire.record("Sparse", indices=wire.list_of("long"), values=wire.list_of("float"))
    ),
    "strings": wire.record("Row", id="long", s="string", t=wire.list_of("bytes")),
}
FEATURES: dict[str, Any] = {
    "dense": {"x": fastpipe.DenseSpec([256], "float32")},
    "ragged": {"x": fastpipe.RaggedSpec([None], "float64"), "y": fastpipe.RaggedSpec([None, None], "int64")},
    "sparse": {"x": fastpipe.SparseSpec([1 << 30], "float32")},
    "strings": None,
}


def _row(kind: str, i: int) -> bytes:
    number = wire.long(i)
    n = i * 7919 % 150
    match kind:
        case "dense":
            return number + wire.array(*[wire.float_(float(k + i)) for k in range(256)])
        case "ragged":
            inner = [wire.array(*[wire.long(k)] * (k % 4)) for k in range(n // 8)]
            return number + wire.array(*[wire.double(float(i))] * n) + wire.array(*inner)
        case "sparse":
            return number + wire.array(*map(wire.long, range(0, 5 * n, 5))) + wire.array(*[wire.float_(1.0)] * n)
    return number + wire.text("ä" * (4 * n)) + wire.array(*[wire.text(b"x" * (n // 3))] * (i % 5))


def write(folder: Path, kind: str, codec: str) -> Path:
    """Writes identical blocks to one file of about 5 MB, and links that file under several names. Returns its path."""
    path = folder / f"{kind}-{codec}-0.avro"
    rows = b"".join(_row(kind, i) for i in range(ROWS))
    block = wire.block(ROWS, rows, codec)
    path.write_bytes(wire.header(SCHEMAS[kind], codec) + block * BLOCKS)
    for i in range(1, FILES):
        os.link(path, folder / f"{kind}-{codec}-{i}.avro")
    return path


class Run:
    """A run that is determined by its index, so that it can be repeated."""

    def __init__(self, number: int, folder: Path) -> None:
        draw = random.Random(number)
        kinds = list(SCHEMAS)
        self.kind = kinds[number % len(kinds)]
        self.codec = wire.CODECS[number // len(kinds) % len(wire.CODECS)]
        self.order = draw.choice(["sequential", "window", "window", "block", "buffer"])
        self.threads = draw.choice([1, 2, 4, 16, None])
        # Reserves memory for the threads, without which nothing can be read.
        self.limit = draw.randrange(4, 160) * MB + draw.randrange(MB) + 5 * MB * (self.threads or os.cpu_count() or 1)
        self.prefetch = draw.choice([None, None, 1, 4, 30])
        self.batch_size = draw.choice([300, 1000, 3000, 4000])
        self.shuffle_buffer = draw.choice([500, 2000, 4000])
        self.rebatch = draw.choice([None, None, None, "cut", "shuffled"])
        self.path = folder / f"{self.kind}-{self.codec}-*.avro"

    def reader(self) -> fastpipe.Reader:
        order: dict[str, Any] = {"shuffle": False}
        if self.order != "sequential":
            order = {"shuffle": True if self.order == "window" else self.order, "shuffle_buffer": self.shuffle_buffer}
        return fastpipe.read_avro(
            str(self.path),
            features=FEATURES[self.kind],
            batch_size=self.batch_size,
            num_threads=self.threads,
            prefetch=self.prefetch,
            seed=1,
            **order,
        )

    def batches(self, reader: fastpipe.Reader) -> Iterator[dict[str, Any]]:
        if self.rebatch is None:
            return iter(reader)
        buffer = {"shuffle_buffer": 3 * self.batch_size, "seed": 2} if self.rebatch == "shuffled" else {}
        return iter(reader.rebatch(self.batch_size // 2 + 7, **buffer))

    def go(self) -> dict[str, Any]:
        """Keeps batches until memory is exhausted, then releases them and continues to read."""
        found: dict[str, Any] = {}
        reader = self.reader()
        expected = [samples.digest(batch) for batch, _ in zip(self.batches(reader), range(2), strict=False)]
        reader = self.reader()
        gc.collect()
        _limit(self.limit)
        kept: list[Any] = []
        try:
            while True:
                kept.extend(self.batches(reader))
        except (fastpipe.FastpipeError, MemoryError) as error:
            found["error"] = type(error).__name__
            found["text"] = str(error)
        except BaseException as error:
            found["error"] = "untyped " + type(error).__name__
            found["text"] = str(error)
        found["kept"] = len(kept)
        kept.clear()
        gc.collect()
        # The C library keeps address space for its heaps: each thread may have reserved 64 MB.
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (soft + 64 * MB, hard))
        try:
            reader.set_epoch(0)
            again = [samples.digest(batch) for batch, _ in zip(self.batches(reader), range(2), strict=False)]
            found["again"] = "the same" if again == expected else "other batches"
        except BaseException as error:
            found["again"] = f"{type(error).__name__}: {error}"
        return found


def _limit(more: int) -> None:
    """Limits the process to `more` bytes above its current address space."""
    _grow_stack(200)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _grow_stack(depth: int) -> None:
    """Grows the main thread's stack in advance: the kernel kills a process whose stack can't grow."""
    if depth:
        max([depth], key=lambda _: _grow_stack(depth - 1) or 0)


def _run(number: int, folder: Path) -> None:
    (folder / f"{number}.json").unlink(missing_ok=True)
    with (folder / f"{number}.log").open("wb") as log:
        os.dup2(log.fileno(), 2)
    found = Run(number, folder).go()
    text = json.dumps(found)
    (folder / f"{number}.json").write_text(text)


def serve() -> None:
    for line in sys.stdin:
        number, folder = line.split()
        child = os.fork()
        if child == 0:
            try:
                _run(int(number), Path(folder))
            except BaseException:
                traceback.print_exc()
                os._exit(3)
            os._exit(0)
        print(child, flush=True)
        sys.stdin.readline()
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    serve()
