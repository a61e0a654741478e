"""The readers that are compared, each in a process and an environment of its own.

`Peer` starts `python peers.py NAME CORE` under the peer's interpreter and talks to it in lines of JSON over stdin and
stdout. The worker lives as long as the run, so nothing but the read is timed: neither the interpreter's start nor the
import. Requests:

* `{"op": "read", "path", "dataset", "batch"}` -> `{"seconds", "cpu", "rows"}`: reads the file, keeping
  nothing. `seconds` runs from opening the file to having the last batch (or the frame); freeing a frame isn't counted.
  It is the mean of as many passes as fill a quarter of a second.
* `{"op": "check", ...}` -> `{"rows", "sums"}`: reads it again and sums up every value, untimed.

Anything that goes wrong comes back as `{"error"}`.

What each peer does for a read:

* fastpipe: NumPy batches, dropped one after the other.
* fastavro: the same batches, made as one would by hand: take n records, then one array a column.
* fastavro-records: only iterates over the records. No batch, no array: what fastavro costs alone.
* polars-avro, jetliner: the whole file to one polars frame.
* polars-avro-batches, jetliner-batches: frames of about a batch, dropped one after the other, so that no time goes to
  memory for a whole file.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import generate

HERE = Path(__file__).resolve().parent
ENVS = HERE / ".envs"

NUMPY = ["numpy==2.4.6; python_version >= '3.11'", "numpy==2.2.6; python_version < '3.11'"]
# NumPy serves the checksums of the frame readers.
PINS: dict[str, list[str]] = {
    "fastavro": ["fastavro==1.13.1", *NUMPY],
    "polars-avro": ["polars-avro==0.13.0", "polars==2.1.0", "pyarrow==26.0.1", *NUMPY],
    "jetliner": ["jetliner==0.2.0", "polars==2.1.0", *NUMPY],
}
ENV_OF = {
    "fastpipe": None,
    "fastavro": "fastavro",
    "fastavro-records": "fastavro",
    "polars-avro": "polars-avro",
    "polars-avro-batches": "polars-avro",
    "jetliner": "jetliner",
    "jetliner-batches": "jetliner",
}
PACKAGES = {"fastpipe": ["fastpipe-data"], "fastavro": ["fastavro"]}
PACKAGES |= {"polars-avro": ["polars-avro", "polars"], "jetliner": ["jetliner", "polars"]}
# Everything in these environments that would start threads. The core is pinned besides.
ONE_THREAD: tuple[str, ...] = ("POLARS_MAX_THREADS", "RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS", "OMP_NUM_THREADS")
ONE_THREAD += ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_NUM_THREADS")
ENOUGH = 0.25
"""Seconds that a turn lasts at least: shorter passes are repeated, so that a moment's disturbance weighs less."""


# --- The worker's side ----------------------------------------------------------------------------------------------

Batch = dict[str, Any]


def _leaves(sums: Any, column: Any, value: Any) -> None:
    """Adds one column of a NumPy batch to the sums.

    fastpipe's batch forms unpack like tuples, so tuples of the same make pass here too.
    """
    import numpy as np

    name, dtype = column.name, generate.DTYPES.get(column.avro, "u1")
    if column.nullable:
        values, valid = value
        sums.add(name, np.asarray(values)[np.asarray(valid)], dtype)
        sums.add(f"{name}.valid", valid, "bool")
    elif column.kind in ("scalar", "dense"):
        sums.add(name, value, dtype)
    elif column.kind == "sparse":
        indices, values, dense_shape = value
        sums.add(f"{name}.indices0", indices[:, 1], "i8")
        sums.add(f"{name}.values", values, dtype)
        counts = np.bincount(indices[:, 0], minlength=int(dense_shape[0]))
        # Row numbers must also ascend, or equal counts would hide exchanged entries.
        assert (np.diff(indices[:, 0]) >= 0).all(), f"{name}: sparse entries out of row order"
        sums.add(f"{name}.count", counts, "i8")
    else:
        values, offsets = value
        if column.kind == "strings":
            sums.add(f"{name}.count", np.diff(offsets), "i8")
            values, offsets = values
        sums.add(name, values, dtype)
        sums.add(f"{name}.{'count' if column.kind == 'ragged' else 'size'}", np.diff(offsets), "i8")


class FastpipeWorker:
    """fastpipe: NumPy batches with explicit features, one thread."""

    def __init__(self) -> None:
        import fastpipe

        self._fastpipe = fastpipe

    def _spec(self, column: Any) -> Any:
        fp = self._fastpipe
        dtype = generate.DTYPES.get(column.avro, "string")
        nulls = {"nulls": "mask"} if column.nullable else {}
        if column.kind in ("ragged", "strings"):
            return fp.RaggedSpec((None,), dtype, **nulls)
        if column.kind == "sparse":
            return fp.SparseSpec((generate.SPARSE_SIZE,), dtype, **nulls)
        return fp.DenseSpec((column.size,) if column.kind == "dense" else (), dtype, **nulls)

    def features(self, dataset: str) -> dict[str, Any]:
        """The specs of a data set's columns."""
        return {column.name: self._spec(column) for column in generate.DATASETS[dataset]}

    def batches(self, path: str, dataset: str, batch: int) -> Iterator[tuple[int, Batch]]:
        """Yields the batches of one pass, each with its number of rows."""
        features = self.features(dataset)
        first = next(iter(features))
        with self._fastpipe.read_avro(path, features=features, batch_size=batch, num_threads=1) as reader:
            for values in reader:
                yield len(values[first]), values

    def read(self, path: str, dataset: str, batch: int) -> tuple[int, Any]:
        """Reads the file to batches and drops them."""
        return sum(n for n, _ in self.batches(path, dataset, batch)), None

    def check(self, path: str, dataset: str, batch: int) -> tuple[int, dict[str, Any]]:
        """Sums up every value of the batches."""
        columns, sums, rows = generate.DATASETS[dataset], generate.Sums(), 0
        for n, values in self.batches(path, dataset, batch):
            rows += n
            for column in columns:
                _leaves(sums, column, values[column.name])
        return rows, sums.result()


class FastavroWorker(FastpipeWorker):
    """fastavro: the batches that fastpipe gives, put together in Python."""

    def __init__(self) -> None:
        import fastavro
        import numpy

        self._fastavro, self._np = fastavro, numpy

    def _column(self, column: Any, items: list[Any]) -> Any:
        np, dtype, chain = self._np, generate.DTYPES.get(column.avro), itertools.chain.from_iterable
        if column.nullable:
            valid = np.array([v is not None for v in items])
            return np.array([v or 0 for v in items], dtype), valid
        if column.kind in ("scalar", "dense"):
            return np.array(items, dtype)

        def offsets(sized: list[Any]) -> Any:
            out = np.zeros(len(sized) + 1, "i8")
            np.cumsum(np.fromiter(map(len, sized), "i8", len(sized)), out=out[1:])
            return out

        if column.kind == "ragged":
            ends = offsets(items)
            return np.fromiter(chain(items), dtype, int(ends[-1])), ends
        if column.kind == "sparse":
            ends = offsets([v["indices0"] for v in items])
            indices = np.empty((int(ends[-1]), 2), "i8")
            indices[:, 0] = np.repeat(np.arange(len(items)), np.diff(ends))
            indices[:, 1] = np.fromiter(chain(v["indices0"] for v in items), "i8", len(indices))
            values = np.fromiter(chain(v["values"] for v in items), dtype, len(indices))
            return indices, values, np.array([len(items), generate.SPARSE_SIZE], "i8")
        ends = offsets(items) if column.kind == "strings" else None
        texts = [text.encode() for text in (chain(items) if column.kind == "strings" else items)]
        strings = np.frombuffer(b"".join(texts), "u1"), offsets(texts)
        return strings if ends is None else (strings, ends)

    def batches(self, path: str, dataset: str, batch: int) -> Iterator[tuple[int, Batch]]:
        """Yields the batches of one pass, each with its number of rows."""
        columns = generate.DATASETS[dataset]
        with open(path, "rb") as file:
            records: Iterator[Any] = iter(self._fastavro.reader(file))
            while held := list(itertools.islice(records, batch)):
                yield len(held), {c.name: self._column(c, [r[c.name] for r in held]) for c in columns}


class FastavroRecordsWorker(FastavroWorker):
    """fastavro: iterates over the records and makes nothing of them."""

    def read(self, path: str, dataset: str, batch: int) -> tuple[int, Any]:
        """Counts the records."""
        with open(path, "rb") as file:
            return sum(1 for _ in self._fastavro.reader(file)), None


class FrameWorker:
    """What the two readers of polars frames share."""

    def __init__(self) -> None:
        import polars

        self._pl = polars

    def frame(self, path: str, batch: int) -> Any:
        """Reads the file to a frame."""
        raise NotImplementedError

    def read(self, path: str, dataset: str, batch: int) -> tuple[int, Any]:
        """Reads the file to a frame. The caller drops it, after the clock is stopped."""
        frame = self.frame(path, batch)
        return frame.height, frame

    def check(self, path: str, dataset: str, batch: int) -> tuple[int, dict[str, Any]]:
        """Sums up every value of the frame."""
        sums, frame = generate.Sums(), self.frame(path, batch)
        for c in generate.DATASETS[dataset]:
            series, dtype = frame[c.name], generate.DTYPES.get(c.avro, "u1")
            if c.nullable:
                sums.add(f"{c.name}.valid", series.is_not_null().to_numpy(), "bool")
                series = series.drop_nulls()
            if c.kind == "scalar":
                sums.add(c.name, series.to_numpy(), dtype)
            elif c.kind == "sparse":
                for field, kind in (("indices0", "i8"), ("values", dtype)):
                    sums.add(f"{c.name}.{field}", self._items(series.struct.field(field)).to_numpy(), kind)
                sums.add(f"{c.name}.count", series.struct.field("values").list.len().to_numpy(), "i8")
            elif c.kind in ("dense", "ragged"):
                sums.add(c.name, self._items(series).to_numpy(), dtype)
                if c.kind == "ragged":
                    sums.add(f"{c.name}.count", series.list.len().to_numpy(), "i8")
            else:
                self._strings(sums, c, series)
        return frame.height, sums.result()

    def _items(self, series: Any) -> Any:
        # An empty list becomes a null; no list of these data sets holds one of its own.
        return series.explode().drop_nulls()

    def _strings(self, sums: Any, column: Any, series: Any) -> None:
        import numpy as np

        if column.kind == "strings":
            sums.add(f"{column.name}.count", series.list.len().to_numpy(), "i8")
            series = self._items(series)
        text = b"".join(series.cast(self._pl.Binary).to_list())
        sums.add(column.name, np.frombuffer(text, "u1"), "u1")
        sums.add(f"{column.name}.size", series.str.len_bytes().to_numpy(), "i8")


class FrameBatchesWorker(FrameWorker):
    """A reader of frames, asked for one frame after another."""

    def frames(self, path: str, batch: int) -> Iterator[Any]:
        """Yields frames of about `batch` rows."""
        raise NotImplementedError

    def frame(self, path: str, batch: int) -> Any:
        """All of the frames, one below the other."""
        return self._pl.concat(list(self.frames(path, batch)))

    def read(self, path: str, dataset: str, batch: int) -> tuple[int, Any]:
        """Reads the file to frames and drops them."""
        return sum(frame.height for frame in self.frames(path, batch)), None


class PolarsAvroWorker(FrameWorker):
    """polars-avro, as its documentation reads a file."""

    def frame(self, path: str, batch: int) -> Any:
        """Reads the file to a frame."""
        import polars_avro

        return polars_avro.read_avro(path)


class PolarsAvroBatchesWorker(FrameBatchesWorker):
    """polars-avro, a batch at a time."""

    def frames(self, path: str, batch: int) -> Iterator[Any]:
        """Yields frames of `batch` rows.

        This is what `polars_avro.scan_avro` hands to polars. The public way, `scan_avro(...).collect_batches(...)`,
        goes through polars' streaming engine besides, which is slower here and takes from 1 to 3 times as long.
        """
        from polars_avro._avro_rs import AvroSource

        for arrow in AvroSource([path], False, False).batch_iter(batch, None):
            yield self._pl.DataFrame(arrow)


class JetlinerWorker(FrameWorker):
    """jetliner, as its documentation reads a file."""

    def frame(self, path: str, batch: int) -> Any:
        """Reads the file to a frame."""
        import jetliner

        return jetliner.read_avro(path)


class JetlinerBatchesWorker(FrameBatchesWorker):
    """jetliner, a batch at a time."""

    def frames(self, path: str, batch: int) -> Iterator[Any]:
        """Yields frames of at least `batch` rows: jetliner doesn't cut blocks."""
        import jetliner

        with jetliner.AvroReader(path, batch_size=batch) as reader:
            yield from reader


WORKERS: dict[str, Callable[[], Any]] = {
    "fastpipe": FastpipeWorker,
    "fastavro": FastavroWorker,
    "fastavro-records": FastavroRecordsWorker,
    "polars-avro": PolarsAvroWorker,
    "polars-avro-batches": PolarsAvroBatchesWorker,
    "jetliner": JetlinerWorker,
    "jetliner-batches": JetlinerBatchesWorker,
}


def _answer(worker: Any, request: dict[str, Any]) -> dict[str, Any]:
    where = request["path"], request["dataset"], request["batch"]
    if request["op"] == "check":
        rows, sums = worker.check(*where)
        return {"rows": rows, "sums": sums}
    seconds = cpu = 0.0
    passes = 0
    while seconds < ENOUGH:
        cpu_begun, begun = time.process_time(), time.perf_counter()
        rows, held = worker.read(*where)
        seconds += time.perf_counter() - begun
        cpu += time.process_time() - cpu_begun
        del held
        passes += 1
    return {"seconds": seconds / passes, "cpu": cpu / passes, "rows": rows}


def serve(name: str, core: int) -> None:
    """Answers requests until stdin ends.

    Args:
        name: A key of `WORKERS`.
        core: The core to stay on.
    """
    if core >= 0:
        os.sched_setaffinity(0, {core})
    # Answers keep the real stdout for themselves: a library that prints must not get between them.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(compute: Callable[[], dict[str, Any]]) -> None:
        try:
            line = compute()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # A Rust panic is no Exception, and is a result too.
            line = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(line) + "\n")

    worker: Any = None

    def start() -> dict[str, Any]:
        nonlocal worker
        worker = WORKERS[name]()
        packages = PACKAGES[ENV_OF[name] or "fastpipe"]
        return {"versions": {p: importlib.metadata.version(p) for p in packages}, "python": sys.version.split()[0]}

    answer(start)
    for line in sys.stdin:
        request = json.loads(line)
        answer(lambda: _answer(worker, request))  # noqa: B023 - called at once


# --- The driver's side ----------------------------------------------------------------------------------------------


def interpreter(name: str, log: Callable[[str], None]) -> str:
    """The Python that a peer runs under; its environment is made first, where it isn't there or has other versions.

    Args:
        name: A key of `ENV_OF`.
        log: Told of each environment that is made.
    """
    env = ENV_OF[name]
    if env is None:
        return sys.executable
    home = ENVS / env
    python, note = home / "bin" / "python", home / "pins.txt"
    wanted = "\n".join([sys.version.split()[0], *PINS[env]])
    if not (note.exists() and note.read_text() == wanted):
        log(f"making the environment {home.relative_to(HERE.parent)}: {', '.join(PINS[env][: -len(NUMPY)])}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary", ":all:"]
        subprocess.run([*pip, *PINS[env]], check=True)
        note.write_text(wanted)
    return str(python)


class Peer:
    """A worker process.

    Attributes:
        name: A key of `WORKERS`.
        versions: Package -> version, empty where the worker couldn't start.
        error: Why it couldn't start, or None.
    """

    def __init__(self, name: str, core: int, log: Callable[[str], None] = print) -> None:
        """Starts the worker.

        Args:
            name: A key of `WORKERS`.
            core: The core it stays on; -1 for any.
            log: Told of what takes time.
        """
        self.name = name
        self.versions: dict[str, str] = {}
        self.error: str | None = None
        self._core, self._python = core, ""
        self._process: subprocess.Popen[str] | None = None
        try:
            self._python = interpreter(name, log)
        except (OSError, subprocess.CalledProcessError) as error:
            self.error = f"no environment: {error}"
            return
        self._start()

    def _start(self) -> None:
        env = os.environ | dict.fromkeys(ONE_THREAD, "1") | {"PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [self._python, str(HERE / "peers.py"), self.name, str(self._core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        hello = self._receive()
        self.error = hello.get("error")
        self.versions = hello.get("versions", {})

    def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.wait()
        self._process = None
        return {"error": f"the process died: {signal.Signals(-code).name if code < 0 else f'exit status {code}'}"}

    def ask(self, op: str, path: Path, dataset: str, batch: int) -> dict[str, Any]:
        """Sends a request and waits for the answer.

        Args:
            op: read or check.
            path: The file.
            dataset: What lies in it, a key of `generate.DATASETS`.
            batch: Rows a batch.
        """
        if self.error is not None:
            return {"error": self.error}
        if self._process is None:  # It died over the request before: this one may do better.
            self._start()
            if self.error is not None:
                return {"error": self.error}
        assert self._process is not None
        assert self._process.stdin is not None
        request = {"op": op, "path": str(path), "dataset": dataset, "batch": batch}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def close(self) -> None:
        """Ends the worker."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(timeout=60)
            self._process = None


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
