"""Trains NeuMF through the data service: a server prepares the data while this process loads Torch and its model.

    python examples/neumf_service.py run/           # fetches the data, starts a server, trains
    python examples/neumf_service.py run/ --check   # and trains from a local reader, too: the same loss, bit for bit
    python examples/neumf_service.py run/ --tf      # and lets TensorFlow read an epoch from the same server

The server gives users and movies their numbers, holds the latest movie of each user out, writes what is needed to
evaluate, and samples the negatives. It says when it has begun to serve, and this process when it had its model, and its
first batch: how much of the preparation cost no time. Model and training are those of neumf.py.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

# Torch isn't imported here: the server is to begin before, and TensorFlow to be in a process of its own.

READERS = """
import numpy as np
import fastpipe

data, held_out = fastpipe.Interactions.from_movielens({ratings!r}).leave_one_out()
candidates = fastpipe.evaluation_candidates(data, held_out, {candidates}, seed=1)
np.savez(
    {prepared!r},
    sizes=[data.num_users, data.num_items, data.num_positives],
    users=candidates.users,
    items=candidates.items,
    valid=candidates.valid,
)
reader = fastpipe.read_interactions(data, negatives={negatives}, batch_size={batch}, seed={seed}, item_dtype="int32")
"""


class Served:
    """A server in a process of its own.

    Attributes:
        url: where it is, once it serves.
        seconds: that it took from its start until it served.
    """

    def __init__(self, config: Path) -> None:
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastpipe", "serve", str(config), "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        self.url, self.seconds = "", 0.0
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.seconds = time.perf_counter() - self._begun
        self.url = line.split()[-1] if line.startswith("serving") else ""

    def wait(self) -> None:
        """Until it serves."""
        self._listening.join()
        if not self.url:
            sys.exit("the server has ended before it served; it says why above")

    def stop(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait()


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
    config, prepared = folder / "readers.py", folder / "prepared.npz"
    prepared.unlink(missing_ok=True)
    # As in neumf.py, which isn't there yet; `--check` would tell.
    sizes = {"negatives": 4, "candidates": 99, "batch": 1024}
    config.write_text(READERS.format(ratings=str(ratings), prepared=str(prepared), seed=arguments.seed, **sizes))
    begun = time.perf_counter()
    with served(config) as server:
        import neumf

        import fastpipe.torch

        warm_up(neumf)
        ready = time.perf_counter() - begun
        server.wait()
        remote = fastpipe.connect(server.url)
        next(iter(remote))
        first = time.perf_counter() - begun
        overlapped = min(ready, server.seconds) / server.seconds
        print(
            f"the server has prepared for {server.seconds:.2f} s, Torch and its model for {ready:.2f} s, and the first"
            f" batch came after {first:.2f} s: {overlapped:.0%} of the preparation was overlapped"
        )
        with np.load(prepared) as found:
            users, items, positives = (int(size) for size in found["sizes"])
            data: Any = SimpleNamespace(num_users=users, num_items=items, num_positives=positives)
            candidates = fastpipe.Candidates(found["users"], found["items"], found["valid"])
        remote.set_epoch(0)
        of = {"epochs": arguments.epochs, "seed": arguments.seed}
        batches = fastpipe.torch.IterableDataset(remote)
        history = neumf.train(data, batches, candidates, **of, title="from the server")
        (folder / "metrics.json").write_text(json.dumps({"served": [history]}, indent=1))
        for epoch in history:
            print(f"epoch {epoch['epoch']}: loss {epoch['loss']:.4f}, HR@10 {epoch['hit_rate']:.4f}")
        failed = False
        if arguments.check:
            local, _ = fastpipe.Interactions.from_movielens(ratings).leave_one_out()
            here = neumf.train(local, neumf.fed_by_fastpipe(local, arguments.seed), candidates, **of, title="from here")
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
