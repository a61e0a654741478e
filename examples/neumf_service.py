"""Trains NeuMF through the data service: training begins while the server still prepares.

    python examples/neumf_service.py run/           # fetches the data, starts a server, trains
    python examples/neumf_service.py run/ --check   # and trains from a local reader, too: the same loss, bit for bit
    python examples/neumf_service.py run/ --tf      # and lets TensorFlow read an epoch from the same server

The server numbers users and movies, and holds the latest movie of each user out, while this process loads Torch and its
model. Then it serves, and training begins: batches come as the server makes them, with negatives that it samples anew
in each epoch, and what the model is evaluated on is drawn while the first epoch trains. Everything comes through the
service, so the server may be another machine. What was done when is printed, by this process's clock and by the
server's log. Model and training are those of neumf.py.
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

# Torch isn't imported here: the server is to begin before, and TensorFlow to be in a process of its own.

READERS = """
import pyarrow as pa
import fastpipe

data, held_out = fastpipe.Interactions.from_movielens({ratings!r}).leave_one_out()


class Drawn:
    # One unit, which is made when a client asks for it.
    rows = [len(held_out.users)]
    schema = pa.schema(
        [
            pa.field("users", pa.int32(), nullable=False),
            pa.field("items", pa.list_(pa.field("item", pa.int32(), nullable=False), {ranked}), nullable=False),
            pa.field("valid", pa.list_(pa.field("item", pa.bool_(), nullable=False), {ranked}), nullable=False),
        ]
    )

    def read(self, unit):
        found = fastpipe.evaluation_candidates(data, held_out, {ranked} - 1, seed=1)
        columns = [pa.array(found.users)]
        for values, field in zip((found.items, found.valid), list(self.schema)[1:]):
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), type=field.type))
        return pa.table(columns, schema=self.schema)

    def fingerprint(self):
        return "candidates of " + {ratings!r}


reader = fastpipe.read_interactions(data, negatives={negatives}, batch_size={batch}, seed={seed})
candidates = fastpipe.read_units(Drawn(), batch_size=Drawn.rows[0])
sizes = {{"users": [data.num_users], "items": [data.num_items], "positives": [data.num_positives]}}
sizes = fastpipe.from_arrow(pa.table(sizes), batch_size=1)
"""


class Served:
    """A server in a process of its own, and what it has logged.

    Attributes:
        url: where it is, once it serves.
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
        """Reads its log to the end. What is no line of that is an error, which is passed on."""
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
        """The time at which it first logged an event; waits for that."""
        with self._changed:
            self._changed.wait_for(lambda: (event, reader) in self._times or ("stopped", "") in self._times)
            if (event, reader) not in self._times:
                sys.exit("the server has ended; it says why above")
            return self._times[event, reader]

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait()
        self._log.join()


class Streamed:
    """A server's batches as tensors; an iteration is an epoch.

    Attributes:
        first_step: the time at which the first step of training was done.
    """

    def __init__(self, url: str) -> None:
        import fastpipe.torch

        self._batches = fastpipe.torch.IterableDataset(fastpipe.connect(url))
        self._candidates = fastpipe.connect(url, "candidates")
        self._asked: Iterator[dict[str, Any]] | None = None
        self.first_step = 0.0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            yield batch
            if self._asked is None:
                self.first_step = time.time()
                # Nobody waits for it here: the server draws them while the epoch goes on.
                self._asked = iter(self._candidates)

    @functools.cached_property
    def candidates(self) -> fastpipe.Candidates:
        """What the model is evaluated on, once it has trained."""
        assert self._asked is not None
        (drawn,) = self._asked
        return fastpipe.Candidates(drawn["users"], drawn["items"], drawn["valid"])


@contextlib.contextmanager
def served(config: Path) -> Iterator[Served]:
    """A server that ends with the block."""
    server = Served(config)
    try:
        yield server
    finally:
        server.stop()


def digest(batches: Iterable[dict[str, Any]]) -> str:
    """Of all bytes of batches of arrays or tensors, in order."""
    found = hashlib.sha256()
    for batch in batches:
        for name in ("user", "item", "label"):
            found.update(np.ascontiguousarray(batch[name]).tobytes())
    return found.hexdigest()


def read_by_tensorflow(url: str) -> None:
    """Reads an epoch by `tf.data`, in a process that Torch isn't in, and says what came."""
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
    """A step of a small model: Torch loads and compiles what it first needs then."""
    import torch

    model = neumf.NeuMF(10, 10)
    optimizer = torch.optim.Adam(model.parameters())
    ids = torch.arange(10)
    model(ids, ids).sum().backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the data, the prepared data and the metrics")
    parser.add_argument("--epochs", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the negatives; default: %(default)s")
    parser.add_argument("--data", type=Path, help="ratings as MovieLens has them; fetched by default")
    parser.add_argument("--check", action="store_true", help="compare with a reader in this process")
    parser.add_argument("--tf", action="store_true", help="let TensorFlow read from the server, too")
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
    """Starts the server, builds the model meanwhile, trains, and checks what it is asked to."""
    config = folder / "readers.py"
    # As in neumf.py, which isn't there yet; `--check` would tell.
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
                (server.when("request", "candidates"), "the server has drawn what the model is evaluated on"),
            ]
        ):
            print(f"{when - begun:6.3f} s: {what}")
        (folder / "metrics.json").write_text(json.dumps({"served": [history]}, indent=1))
        for epoch in history:
            print(f"epoch {epoch['epoch']}: loss {epoch['loss']:.4f}, HR@10 {epoch['hit_rate']:.4f}")
        failed = False
        if arguments.check:
            local, held_out = fastpipe.Interactions.from_movielens(ratings).leave_one_out()
            candidates = fastpipe.evaluation_candidates(local, held_out, neumf.CANDIDATES, seed=1)
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
