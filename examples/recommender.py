"""Trains a small recommender on sparse and ragged features from Avro, and resumes exactly after an interruption.

    python examples/recommender.py run/                      # writes the data, trains, plots run/loss.png
    python examples/recommender.py run/ --stop-after 60      # stops after 60 steps, as if the process were killed
    python examples/recommender.py run/                      # resumes from the last checkpoint
    python examples/recommender.py run/ --service            # reads batches from a separate process
    torchrun --nproc-per-node 2 examples/recommender.py two/ # trains on two ranks; can resume on three

On one rank, a resumed run has the same losses as an uninterrupted run, bit for bit, with or without `--service`. If the
number of ranks changes, each row is still read once per epoch. Gradients are averaged over all ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import torch
import torch.distributed as dist

# Must be imported before the process group is created. It keeps the group of that time, so its threads would never end.
import torch.distributed.nn
from torch import nn
from tqdm.auto import tqdm

import fastpipe
import fastpipe.torch

ITEMS, TERMS, ROWS = 500, 2_000, 40_000

SCHEMA = {
    "type": "record",
    "name": "Impression",
    "fields": [
        {"name": "history", "type": {"type": "array", "items": "int"}},
        {
            "name": "terms",
            "type": {
                "type": "record",
                "name": "Terms",
                "fields": [
                    {"name": "indices0", "type": {"type": "array", "items": "long"}},
                    {"name": "values", "type": {"type": "array", "items": "float"}},
                ],
            },
        },
        {"name": "item", "type": "int"},
        {"name": "label", "type": "float"},
    ],
}
FEATURES = {
    "history": fastpipe.RaggedSpec((None,), "int64"),
    "terms": fastpipe.SparseSpec((TERMS,), "float32", layout="csr"),
    "item": fastpipe.DenseSpec((), "int64"),
    "label": fastpipe.DenseSpec((), "float32"),
}


def make(path: Path) -> None:
    """Writes impressions. Labels depend on the item's popularity, its similarity to the history, and the terms."""
    random = np.random.default_rng(7)
    popularity, worth = random.normal(size=ITEMS), random.normal(size=TERMS)
    taste = random.normal(size=(ITEMS, 4))

    def record() -> dict[str, Any]:
        history = random.integers(ITEMS, size=random.integers(1, 20))
        terms, weights = random.integers(TERMS, size=random.integers(1, 8)), random.random(1)
        item = int(random.integers(ITEMS))
        liking = popularity[item] + taste[item] @ taste[history].mean(0) + weights[0] * worth[terms].sum()
        return {
            "history": history.tolist(),
            "terms": {"indices0": terms.tolist(), "values": [float(weights[0])] * len(terms)},
            "item": item,
            "label": float(liking + random.normal() * 0.3 > 0),
        }

    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        fastavro.writer(file, SCHEMA, (record() for _ in range(ROWS)), codec="deflate", sync_interval=32_000)
    unfinished.rename(path)


class Recommender(nn.Module):
    """Embeddings of the history, the terms, and the item, followed by a multilayer perceptron."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(ITEMS, width, mode="mean", include_last_offset=True)
        self.terms = nn.EmbeddingBag(TERMS, width, mode="sum", include_last_offset=True)
        self.item = nn.Embedding(ITEMS, width)
        self.top = nn.Sequential(nn.Linear(4 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        history, terms = batch["history"], batch["terms"]
        liked = self.items(history.values, history.offsets)
        wanted = self.terms(terms.indices, terms.offsets, per_sample_weights=terms.values)
        item = self.item(batch["item"])
        score: torch.Tensor = self.top(torch.cat([liked, wanted, item, item * liked], dim=1))
        return score.squeeze(1)


def prepare(path: Path, rank: int, world: int) -> None:
    """Writes the dataset if it is missing. With several ranks, rank 0 writes it and the other ranks wait."""
    if rank == 0 and not path.exists():
        make(path)
    if world > 1:
        dist.barrier()


@contextlib.contextmanager
def reading(path: Path, epochs: int, *, service: bool) -> Iterator[fastpipe.Reader]:
    """Yields a reader of the dataset. With `service`, another process on this machine prepares its batches."""
    reader = fastpipe.read_avro(path, features=FEATURES, batch_size=512, shuffle=True, seed=7, epochs=epochs)
    if not service:
        yield reader
        return
    with fastpipe.service.LocalService(reader) as local:
        print(f"batches come from {local}")
        yield local.reader


def train(folder: Path, *, epochs: int, every: int, stop_after: int | None, service: bool) -> None:
    """Trains from the last checkpoint in the folder, or from scratch, and saves a checkpoint every `every` steps."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    prepare(folder / "impressions.avro", rank, world)
    with reading(folder / "impressions.avro", epochs, service=service) as reader:
        learn(reader, folder, rank, world, every=every, stop_after=stop_after)


def learn(reader: fastpipe.Reader, folder: Path, rank: int, world: int, *, every: int, stop_after: int | None) -> None:
    """Trains the model on the shard of one rank."""
    torch.manual_seed(7)
    model: nn.Module = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = fastpipe.torch.dataset(reader, sparse="bag")
    losses: list[float] = []
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        data.load_state_dict(json.loads(saved["data"]))
        losses = saved["losses"]
        if saved["finished"]:
            print(f"{checkpoint} belongs to a finished run. Remove {folder} to train again")
            return
    ranked = nn.parallel.DistributedDataParallel(model) if world > 1 else model

    def save(*, finished: bool = False) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
        state["finished"] = finished
        unfinished = checkpoint.with_suffix(".unfinished")
        torch.save(state | {"data": json.dumps(data.state_dict())}, unfinished)
        unfinished.rename(checkpoint)  # Atomic: if the process is killed, one complete checkpoint remains.

    for batch in tqdm(data, initial=len(losses), unit="step", disable=rank > 0):
        loss = nn.functional.binary_cross_entropy_with_logits(ranked(batch), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 0 and len(losses) % every == 0:
            save()
        if len(losses) == stop_after:
            break
    else:
        if rank == 0:
            save(finished=True)
            (folder / "losses.json").write_text(json.dumps(losses))
            draw(losses, folder / "loss.png")


def leave() -> None:
    """Waits for the other ranks and closes the process group."""
    if dist.is_initialized():
        # The model refers to the process group, whose threads would abort the process at interpreter exit.
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


def draw(losses: list[float], path: Path) -> None:
    """Plots the loss of each step and its moving average."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = min(20, len(losses))
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(losses, color="tab:blue", alpha=0.3, label="each step")
    axes.plot(np.arange(width - 1, len(losses)), smooth, color="tab:blue", label=f"mean of {width} steps")
    axes.set(xlabel="step", ylabel="loss (binary cross-entropy)")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the data, the checkpoints, and the plot")
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="interval in steps; default: %(default)s")
    parser.add_argument("--stop-after", type=int, help="stop after this many steps, as if the run were killed")
    parser.add_argument("--service", action="store_true", help="prepare batches in another process on this machine")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    train(
        arguments.folder,
        epochs=arguments.epochs,
        every=arguments.checkpoint_every,
        stop_after=arguments.stop_after,
        service=arguments.service,
    )
    leave()


if __name__ == "__main__":
    main()
