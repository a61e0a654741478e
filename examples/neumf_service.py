"""Trains NeuMF on batches from the data service, which prepares them during training.

    python examples/neumf_service.py run/           # downloads the data, starts a server, trains
    python examples/neumf_service.py run/ --check   # also trains from a local reader and expects the same loss
    python examples/neumf_service.py run/ --tf      # also reads an epoch from the same server with TensorFlow

While this process loads Torch and the model, the server indexes users and movies and holds out each user's most recent
movie. Training begins as soon as the server has the first batches. The server samples new negatives in each epoch, and
draws the evaluation candidates while the first epoch trains. All data is read through the service, so the server can
run on another machine. The example prints a timeline from this process's clock and the server's log. The model and the
training loop are imported from neumf.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import fastpipe

# Torch is imported later: the server must start first, and TensorFlow must run in a process without Torch.

READERS = """
import pyarrow as pa
import fastpipe

data, held_out = fastpipe.recsys.Interactions.from_movielens({ratings!r}).leave_one_out()


class Drawn:
    # A single unit, computed when a client requests it.
    rows = [len(held_out.users)]
    schema = pa.schema(
        [
            pa.field("users", pa.int32(), nullable=False),
            pa.field("items", pa.list_(pa.field("item", pa.int32(), nullable=False), {ranked}), nullable=False),
            pa.field("valid", pa.list_(pa.field("item", pa.bool_(), nullable=False), {ranked}), nullable=False),
        ]
    )

    def read(self, unit):
        found = fastpipe.recsys.evaluation_candidates(data, held_out, {ranked} - 1, seed=1)
        columns = [pa.array(found.users)]
        for values, field in zip((found.items, found.valid), list(self.schema)[1:]):
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), type=field.type))
        return pa.table(columns, schema=self.schema)

    def fingerprint(self):
        return "candidates of " + {ratings!r}


reader = fastpipe.recsys.read_interactions(data, num_negatives={negatives}, batch_size={batch}, seed={seed})
candidates = fastpipe.read_units(Drawn(), batch_size=Drawn.rows[0])
sizes = {{"users": [data.num_users], "items": [data.num_items], "positives": [data.num_positives]}}
sizes = fastpipe.from_arrow(pa.table(sizes), batch_size=1)
"""


class Served:
    """A server in a child process, and the events that it has logged.

    Attributes:
        url: URL of the server. Empty until the server is listening.
    """

    def __init__(self, config: Path) -> None:
        command = [sys.executable, "-m", "fastpipe", "serve", str(config), "--port", "0"]
        self._process = subprocess.Popen(
            [*command, "--verbose", "--log-format", "json"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = ""
        self._times: dict[tuple[str, str], float] = {}
        self._changed = threading.Condition()
        self._log = threading.Thread(target=self._follow, daemon=True)
        self._log.start()

    def _follow(self) -> None:
        """Reads the server's log to its end. Forwards warnings, errors, and lines that are not JSON to stderr."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            told = json.loads(line) if line.startswith("{") else {}
            if told.get("level") != "info":
                sys.stderr.write(line)
                continue
            event = told["event"], told.get("reader", "")
            with self._changed:
                self._times.setdefault(event, datetime.fromisoformat(told["time"]).timestamp())
                self.url = told.get("url", self.url)
                self._changed.notify_all()
        with self._changed:
            self._times.setdefault(("stopped", ""), time.time())
            self._changed.notify_all()

    def when(self, event: str, reader: str = "") -> float:
        """Waits until the server logs an event. Returns the time of the first occurrence."""
        with self._changed:
            self._changed.wait_for(lambda: (event, reader) in self._times or ("stopped", "") in self._times)
            if (event, reader) not in self._times:
                sys.exit("the server has exited; see its error output above")
            return self._times[event, reader]

    def stop(self) -> None:
        """Stops the server and waits for it to exit."""
        self._process.terminate()
        self._process.wait()
        self._log.join()


class Streamed:
    """A server's batches as tensors. Each iteration yields one epoch.

    Attributes:
        first_step: Time when the first training step finished.
    """

    def __init__(self, url: str) -> None:
        import fastpipe.torch

        self._batches = fastpipe.torch.dataset(fastpipe.connect(url))
        self._candidates = fastpipe.connect(url, "candidates")
        self._asked: Iterator[dict[str, Any]] | None = None
        self.first_step = 0.0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            yield batch
            if self._asked is None:
                self.first_step = time.time()
                # This call doesn't block: the server draws the candidates while the epoch continues.
                self._asked = iter(self._candidates)

    @functools.cached_property
    def candidates(self) -> fastpipe.recsys.Candidates:
        """Returns the candidates for evaluation. The first epoch must have begun."""
        assert self._asked is not None
        (drawn,) = self._asked
        return fastpipe.recsys.Candidates(drawn["users"], drawn["items"], drawn["valid"])


@contextlib.contextmanager
def served(config: Path) -> Iterator[Served]:
    """Starts a server and stops it at the end of the block."""
    server = Served(config)
    try:
        yield server
    finally:
        server.stop()


def digest(batches: Iterable[dict[str, Any]]) -> str:
    """Returns a digest of all bytes of the batches in order."""
    found = hashlib.sha256()
    for batch in batches:
        for name in ("user", "item", "label"):
            found.update(np.ascontiguousarray(batch[name]).tobytes())
    return found.hexdigest()


def read_by_tensorflow(url: str) -> None:
    """Reads an epoch with `tf.data` in a process without Torch, and prints the number of rows and a digest."""
    import fastpipe.tf

    reader = fastpipe.connect(url)
    dataset = fastpipe.tf.dataset(reader)
    rows = 0

    def arrays() -> Iterator[dict[str, Any]]:
        nonlocal rows
        for batch in dataset:
            rows += len(batch["user"])
            yield {name: tensor.numpy() for name, tensor in batch.items()}

    found = digest(arrays())
    print(json.dumps({"rows": rows, "digest": found}))


def warm_up(neumf: Any) -> None:
    """Trains a small model for one step, so that Torch's lazy initialization happens now."""
    import torch

    model = neumf.NeuMF(10, 10)
    optimizer = torch.optim.Adam(model.parameters())
    ids = torch.arange(10)
    model(ids, ids).sum().backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the data, the configuration, and the metrics")
    parser.add_argument("--epochs", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and the negatives; default: %(default)s")
    parser.add_argument("--data", type=Path, help="ratings in MovieLens format; default: download them")
    parser.add_argument("--check", action="store_true", help="compare with a reader in this process")
    parser.add_argument("--tf", action="store_true", help="also read from the server with TensorFlow")
    parser.add_argument("--tf-from", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tf_from is not None:
        read_by_tensorflow(arguments.tf_from)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    ratings = arguments.data
    if ratings is None:
        import neumf

        ratings = neumf.fetch(arguments.folder)
    train(arguments.folder, ratings, arguments)


def train(folder: Path, ratings: Path, arguments: argparse.Namespace) -> None:
    """Starts the server, loads Torch while the server starts, trains, and runs the requested checks."""
    config = folder / "readers.py"
    # The same values as in neumf.py, which isn't imported yet. `--check` fails if they differ.
    sizes = {"negatives": 4, "ranked": 1 + 99, "batch": 1024}
    config.write_text(READERS.format(ratings=str(ratings), seed=arguments.seed, **sizes))
    begun = time.time()
    with served(config) as server:
        import neumf

        warm_up(neumf)
        ready, serving = time.time(), server.when("listening")
        batches = Streamed(server.url)
        (sizes_there,) = fastpipe.connect(server.url, "sizes")
        data: Any = SimpleNamespace(**{f"num_{name}": int(size[0]) for name, size in sizes_there.items()})
        of = {"epochs": arguments.epochs, "seed": arguments.seed}
        history = neumf.train(data, batches, lambda: batches.candidates, **of, title="from the server")
        for when, what in sorted(
            [
                (serving, "the server serves"),
                (ready, "Torch and its model are loaded"),
                (batches.first_step, "the first step of training is done"),
                (server.when("request", "default"), "the server has sampled and sent the first epoch"),
                (server.when("request", "candidates"), "the server has drawn the evaluation candidates"),
            ]
        ):
            print(f"{when - begun:6.3f} s: {what}")
        (folder / "metrics.json").write_text(json.dumps({"served": [history]}, indent=1))
        for epoch in history:
            print(f"epoch {epoch['epoch']}: loss {epoch['loss']:.4f}, HR@10 {epoch['hit_rate']:.4f}")
        failed = False
        if arguments.check:
            local, held_out = fastpipe.recsys.Interactions.from_movielens(ratings).leave_one_out()
            candidates = fastpipe.recsys.evaluation_candidates(local, held_out, neumf.CANDIDATES, seed=1)
            feed = neumf.fed_by_fastpipe(local, arguments.seed)
            here = neumf.train(local, feed, lambda: candidates, **of, title="from here")
            failed |= here != history
            print("a local reader: " + ("the same loss and metrics" if here == history else f"DIFFERS: {here}"))
        if arguments.tf:
            command = [sys.executable, __file__, str(folder), "--tf-from", server.url]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            told = json.loads(done.stdout.splitlines()[-1])
            same = told["digest"] == digest(fastpipe.connect(server.url))
            failed |= not same
            print(f"TensorFlow: {told['rows']:,} points of an epoch, {'the same' if same else 'OTHER'} ones")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
