"""In-memory tables in processes that are interrupted, fork or run out of memory.

test_table_edges.py runs each program in a separate process: `python table_programs.py NAME ARGUMENTS...`
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import fastpipe
from toy_units import flat
from unit_programs import in_child

SCHEMA = pa.schema({"x": pa.int64()})
ROWS = 1000


class Stream:
    """An Arrow stream that isn't a pyarrow class."""

    def __init__(self, stream: pa.RecordBatchReader) -> None:
        self._stream = stream

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._stream.__arrow_c_stream__(requested_schema)


def numbers() -> Iterator[pa.RecordBatch]:
    """Yields batches without end."""
    while True:
        yield pa.record_batch({"x": np.arange(10_000)})


def hang() -> Iterator[pa.RecordBatch]:
    yield pa.record_batch({"x": np.arange(3)})
    time.sleep(1000)


def endless() -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(SCHEMA, numbers())


def hanging() -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(SCHEMA, hang())


def many() -> Stream:
    """Returns a stream that takes seconds to import without calling Python."""
    return Stream(pa.Table.from_batches([pa.record_batch({"x": np.arange(1)})] * 3_000_000).to_reader())


def interrupted(what: str) -> None:
    """Waits for an interrupt while it imports a table or draws batches."""
    # pyarrow imports pandas with the first array and swallows any exception of that import, including Ctrl-C.
    pa.array(np.arange(1))
    if what == "draw":
        reader = fastpipe.from_arrays({"x": np.arange(ROWS)}, batch_size=10, epochs=None, shuffle=True)
    else:
        make = {"endless": endless, "hang": hanging, "many": many}[what]
        table = make()
    try:
        print("waits", flush=True)
        while what != "draw":
            fastpipe.from_arrow(table, batch_size=10)
            table = make()
        for _ in reader:
            pass
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise


def killed() -> None:
    """Kills its own process in the middle of a pass."""
    reader = fastpipe.from_arrays({"x": np.arange(ROWS)}, batch_size=10, epochs=None, shuffle=True)
    for i, _ in enumerate(reader):
        if i == 300:
            os.kill(os.getpid(), signal.SIGKILL)


def made() -> fastpipe.Reader:
    return fastpipe.from_arrays({"x": np.arange(ROWS)}, batch_size=10, num_threads=2)


def forked() -> None:
    """Forks during a pass. The parent and the child then continue independently."""
    reader = made()
    batches = iter(reader)
    first = next(batches)["x"].tolist()

    def work() -> None:
        try:
            next(batches)
        except fastpipe.errors.PassClosedError:
            pass
        else:
            raise AssertionError("a pass was usable in another process")
        reader.set_epoch(0)
        assert flat(reader) == flat(made()) == list(range(ROWS))

    for _ in range(3):
        in_child(work)
    assert first + flat(batches) == list(range(ROWS))


def in_pool(method: str) -> None:
    """Sends readers to multiprocessing workers after one was used here, including a reader of a one-time stream."""
    used = made()
    next(iter(used))
    used.close()
    stream = pa.RecordBatchReader.from_batches(SCHEMA, [pa.record_batch({"x": np.arange(ROWS)})])
    readers = [made(), fastpipe.from_arrow(stream, batch_size=10), fastpipe.from_arrow(made(), batch_size=7)]
    with multiprocessing.get_context(method).Pool(2) as pool:
        for found in pool.map(flat, readers):
            assert found == list(range(ROWS))


def plain() -> fastpipe.Reader:
    return fastpipe.from_arrays({"x": np.zeros((ROWS, 10_000))}, batch_size=ROWS)


def strided() -> fastpipe.Reader:
    return fastpipe.from_arrays({"x": np.broadcast_to(np.float64(1), (ROWS, 100_000))}, batch_size=1)


def text() -> fastpipe.Reader:
    return fastpipe.from_arrow(pa.table({"x": ["a" * 10_000] * 10_000}), batch_size=10_000, shuffle=True)


def stream() -> fastpipe.Reader:
    return fastpipe.from_arrow(endless(), batch_size=10)


def exhausted(what: str, megabytes: str) -> None:
    """Keeps batches of a table until memory runs out, then checks that reading still works."""
    import resource

    assert flat(made()) == list(range(ROWS))
    make: Callable[[], fastpipe.Reader] = globals()[what]
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + int(megabytes) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        reader = make()
        reader.set_epoch(0)
        kept = []
        while True:
            kept += [list(reader)]
    except MemoryError as error:
        raised = type(error).__name__
    kept = []
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert flat(made()) == list(range(ROWS))
    print(raised)


def main() -> None:
    name, *arguments = sys.argv[1:]
    globals()[name](*arguments)


if __name__ == "__main__":
    main()
