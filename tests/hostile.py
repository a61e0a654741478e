"""Malformed files and helpers that read them in a separate process.

Cases that might crash or hang run in child processes, many in each. A failing case is then named and does not end other
tests.
"""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from wire import array, container, double, float_, items, list_of, long, record, text

TYPED = {
    "MalformedFileError",
    "LimitError",
    "OutOfMemoryError",
    "SchemaError",
    "UnsupportedError",
    "ShapeError",
    "ValueRangeError",
    "NullValueError",
    "MissingFileError",
    "StorageError",
}
GIB = 1 << 30
I64_MIN, I64_MAX = -(1 << 63), (1 << 63) - 1


@dataclasses.dataclass(frozen=True)
class Case:
    """A file and the arguments to read it with."""

    name: str
    data: bytes
    columns: tuple[str, ...] | None = None
    features: dict[str, Any] | None = None
    batch_size: int = 2
    threads: int = 1
    # Applied to the file after the reader is created: ("truncate", size), ("write", bytes) or ("remove", None).
    then: tuple[str, Any] | None = None
    # Whether to return only the number of rows instead of their values.
    count: bool = False
    # Number of zero bytes after the data. They are a hole, which uses no disk space.
    hole: int = 0


@dataclasses.dataclass(frozen=True)
class Seen:
    """The result of a case."""

    # Values of each batch as repr, which makes NaNs equal; None if rows are only counted.
    batches: list[str] | None
    rows: int
    # Class name and attributes of the error.
    error: str | None
    where: dict[str, Any]
    message: str
    # Whether calling `next` again raised the same error.
    again: bool
    # Whether the error came from creating the reader rather than from iterating.
    opening: bool
    # Processor time, which does not depend on the load of the machine.
    seconds: float


# Reads pickled cases from stdin, runs them in order, and writes their results. A case that hangs, or takes more than
# `patience` seconds of CPU time, ends the process with the stack of every thread. The progress file then ends with the
# index of that case. Wall-clock time would depend on the load of the machine.
CHILD = textwrap.dedent(
    """
    import faulthandler, itertools, os, pickle, resource, signal, sys, time

    folder, patience, memory, cpu = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if sys.platform.startswith("linux"):
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))

    import fastpipe

    path = os.path.join(folder, "case.avro")
    progress = os.open(os.path.join(folder, "progress"), os.O_WRONLY | os.O_CREAT)
    keys = ("path", "block", "offset", "record", "feature", "reason")

    def plain(value):
        return value.to_list() if hasattr(value, "to_list") else value.tolist()

    def write(data):
        with open(path, "wb") as file:
            file.write(data)

    def seen(case):
        values, rows, error, again, opening = [], 0, None, True, True
        start = time.process_time()
        try:
            reader = fastpipe.read_avro(
                path,
                features=case["features"],
                columns=case["columns"] and list(case["columns"]),
                batch_size=case["batch_size"],
                num_threads=case["threads"],
            )
            opening = False
            modified = os.stat(path).st_mtime_ns
            match case["then"]:
                case ("truncate", size):
                    os.truncate(path, size)
                case ("write", data):
                    with open(path, "r+b") as file:
                        file.write(data)
                        file.truncate()
                    # The file system's clock may not have ticked since.
                    os.utime(path, ns=(modified + 10**9, modified + 10**9))
                case ("remove", _):
                    os.remove(path)
            batches = iter(reader)
            for batch in batches:
                rows += len(next(iter(batch.values()))) if batch else 0
                if not case["count"]:
                    values.append(repr({k: plain(v) for k, v in batch.items()}))
        except fastpipe.FastpipeError as caught:
            error = caught
            if not opening:
                try:
                    next(batches)
                    again = False
                except fastpipe.FastpipeError as second:
                    again = (type(second), str(second), vars(second)) == (type(error), str(error), vars(error))
                except StopIteration:
                    again = False
        seconds = time.process_time() - start
        return {
            "batches": None if case["count"] else values,
            "rows": rows,
            "error": error and type(error).__name__,
            "where": {key: getattr(error, key, None) for key in keys},
            "message": str(error),
            "again": again,
            "opening": opening,
            "seconds": seconds,
        }

    out = []
    def most_memory():
        # On Linux, ru_maxrss includes the parent's memory at the time of the fork.
        if sys.platform.startswith("linux"):
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    faulthandler.register(signal.SIGPROF, chain=True)
    cases = pickle.load(sys.stdin.buffer)
    for number, case in enumerate(cases):
        os.pwrite(progress, b"%-12d" % number, 0)
        faulthandler.dump_traceback_later(400, exit=True)
        signal.setitimer(signal.ITIMER_PROF, patience)
        write(case["data"])
        os.truncate(path, len(case["data"]) + case["hole"])
        out.append(seen(case))
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_PROF, 0)
    pickle.dump((out, most_memory()), sys.stdout.buffer)
    """
)


def run(folder: Path, cases: Sequence[Case], *, patience: float = 20, memory: int = 8 * GIB) -> list[Seen]:
    return measured(folder, cases, patience=patience, memory=memory)[0]


def measured(
    folder: Path, cases: Sequence[Case], *, patience: float = 20, memory: int = 8 * GIB, cpu: int = 3600
) -> tuple[list[Seen], int]:
    """Returns the result of each case, and the peak of memory in bytes (on Linux).

    Allocations above `memory` bytes fail, which protects the machine. The process ends after `cpu` seconds of CPU time.
    """

    plain = [{f.name: getattr(c, f.name) for f in dataclasses.fields(c)} for c in cases]
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(patience), str(memory), str(cpu)],
        input=pickle.dumps(plain),
        capture_output=True,
        timeout=500,
        check=False,
    )
    errors = ran.stderr.decode(errors="replace")
    if ran.returncode != 0:
        last = int((folder / "progress").read_text())
        pytest.fail(f"the process ended with {ran.returncode} in case {cases[last].name!r}:\n{errors[-4000:]}")
    assert "panicked" not in errors, errors[-4000:]
    found, peak = pickle.loads(ran.stdout)
    return [Seen(**one) for one in found], peak * 1024


def check(case: Case, seen: Seen, folder: Path) -> None:
    """Checks that an error is documented, names its location, and is raised again by the next call."""
    if seen.error is None:
        return
    about = f"{case.name}: {seen.error}: {seen.message}"
    assert seen.error in TYPED, about
    assert seen.where["path"] == str(folder / "case.avro"), about
    assert seen.where["path"] in seen.message, about
    assert seen.where["reason"], about
    assert seen.where["reason"] in seen.message, about
    assert seen.again, f"{about}: the next call didn't raise the same error"


def outcomes(folder: Path, cases: Sequence[Case], **options: Any) -> Iterable[tuple[Case, Seen]]:
    found = run(folder, cases, **options)
    for case, seen in zip(cases, found, strict=True):
        check(case, seen, folder)
        yield case, seen


def one(folder: Path, case: Case, **options: Any) -> Seen:
    ((_, seen),) = outcomes(folder, [case], **options)
    return seen


# A record with most kinds of fields, whose data every codec can compress.
SMALL = record(
    "R",
    i="int",
    l="long",
    b="boolean",
    f=list_of("float"),
    s="string",
    e={"type": "enum", "name": "E", "symbols": ["A", "B"]},
    n=["null", "double"],
    m={"type": "map", "values": "int"},
)
SMALL_FEATURES = {
    "i": fastpipe.DenseSpec((), "int32"),
    "l": fastpipe.DenseSpec((), "int64"),
    "b": fastpipe.DenseSpec((), "bool"),
    "f": fastpipe.RaggedSpec((None,), "float32"),
    "s": fastpipe.DenseSpec((), "string"),
    "e": fastpipe.DenseSpec((), "int32"),
    "n": fastpipe.DenseSpec((), "float64", on_null="mask"),
    "m.keys": fastpipe.RaggedSpec((None,), "string"),
    "m.values": fastpipe.RaggedSpec((None,), "int32"),
}


def small_row(i: int) -> bytes:
    floats = items(-2, float_(i) + float_(-i)) + items(1, float_(0.5)) + long(0)
    number = long(1) + double(i) if i % 2 else long(0)
    return b"".join(
        (
            long(i),
            long(i << 40),
            bytes([i % 2]),
            floats,
            text("aäaäaäaä" * 3),
            long(i % 2),
            number,
            array(text("k") + long(-i), text("kk") + long(i)),
        )
    )


def small(codec: str) -> bytes:
    """Returns a file of five rows in blocks of 2, 1 and 2 rows."""
    rows = [small_row(i) for i in range(5)]
    return container(SMALL, [(2, b"".join(rows[:2])), (1, rows[2]), (2, b"".join(rows[3:]))], codec)


MALFORMED = "MalformedFileError"
EMPTY = record("Nothing")
