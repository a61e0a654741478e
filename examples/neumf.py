"""Trains NeuMF on the implicit feedback of MovieLens-100k with new negatives in each epoch.

    python examples/neumf.py run/              # downloads the data, trains, plots run/metrics.png
    python examples/neumf.py run/ --check      # compares with a slow, simple sampler on 5 seeds each

The most recent movie of each user is held out and ranked among 99 movies that the user has not seen. The example
reports HR@10 and NDCG@10 for each epoch. The model combines a generalized matrix factorization with a multilayer
perceptron, as in He et al., "Neural Collaborative Filtering" (WWW 2017). It trains on a GPU if one is available.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

import fastpipe
import fastpipe.torch

BATCH, NEGATIVES, CANDIDATES, SEEDS = 1024, 4, 99, 5

# The wheel of this package contains the ratings. We can't ship them: GroupLens' license forbids redistribution.
PACKAGE, MEMBER = "recbole==1.2.1", "recbole/dataset_example/ml-100k/ml-100k.inter"


def fetch(folder: Path) -> Path:
    """Returns the path of the ratings in `folder`, and downloads them if the file is missing."""
    path = folder / "ml-100k.inter"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as wheels:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--dest", wheels, PACKAGE], check=True)
            (wheel,) = Path(wheels).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                content = archive.read(MEMBER)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(content)
        unfinished.rename(path)
    return path


class NeuMF(nn.Module):
    """Matrix factorization and a perceptron with separate embeddings, combined in the last layer."""

    def __init__(self, users: int, items: int, factors: int = 16) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.deep_user, self.deep_item = nn.Embedding(users, 2 * factors), nn.Embedding(items, 2 * factors)
        widths = [4 * factors, 2 * factors, factors]
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
        self.deep = nn.Sequential(*(module for layer in layers for module in layer))
        self.top = nn.Linear(2 * factors, 1)
        for table in (self.user, self.item, self.deep_user, self.deep_item):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        wide = self.user(users) * self.item(items)
        deep = self.deep(torch.cat([self.deep_user(users), self.deep_item(items)], dim=-1))
        scores: torch.Tensor = self.top(torch.cat([wide, deep], dim=-1))
        return scores.squeeze(-1)


class ExactSampler:
    """Draws training rows with NumPy, user by user. It is slow but simple. Each iteration yields one epoch."""

    def __init__(self, data: fastpipe.recsys.Interactions, seed: int) -> None:
        self._data = data
        self._random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = []
        for user, positives in enumerate(np.split(self._data.indices, self._data.indptr[1:-1])):
            unseen = np.setdiff1d(np.arange(self._data.num_items), positives)
            drawn = self._random.choice(unseen, NEGATIVES * len(positives))
            items = np.concatenate([positives, drawn]).astype(np.int32)
            rows.append(np.stack([np.full_like(items, user), items, np.arange(len(items)) < len(positives)], axis=1))
        points = self._random.permutation(np.concatenate(rows)).astype(np.int32)
        for start in range(0, len(points), BATCH):
            user, item, label = torch.from_numpy(points[start : start + BATCH]).unbind(1)
            yield {"user": user, "item": item, "label": label.float()}


def fed_by_fastpipe(data: fastpipe.recsys.Interactions, seed: int) -> Iterable[dict[str, torch.Tensor]]:
    """Returns fastpipe's batches as tensors that share the memory of the NumPy arrays."""
    reader = fastpipe.recsys.read_interactions(data, num_negatives=NEGATIVES, batch_size=BATCH, seed=seed)
    return fastpipe.torch.dataset(reader)


def train(
    data: fastpipe.recsys.Interactions,
    batches: Iterable[dict[str, torch.Tensor]],
    candidates: Callable[[], fastpipe.recsys.Candidates],
    *,
    epochs: int,
    seed: int,
    title: str,
) -> list[dict[str, Any]]:
    """Trains a model and returns its loss and metrics by epoch. Calls `candidates` for evaluation after each epoch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = NeuMF(data.num_users, data.num_items).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = math.ceil(data.num_positives * (1 + NEGATIVES) / BATCH)
    history: list[dict[str, Any]] = []
    with tqdm(total=epochs * steps, unit="step", desc=title) as bar:
        for epoch in range(epochs):
            loss_sum = torch.zeros((), device=device)
            for batch in batches:
                user, item, label = (batch[name].to(device) for name in ("user", "item", "label"))
                loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_sum += loss.detach()
                bar.update()
            ranked = candidates()
            with torch.no_grad():
                users, items = (torch.from_numpy(ids).to(device) for ids in (ranked.users[:, None], ranked.items))
                scores = model(users.expand_as(items), items).cpu()
            history.append(
                {
                    "epoch": epoch + 1,
                    "loss": loss_sum.item() / steps,
                    "hit_rate": fastpipe.recsys.hit_rate(ranked, scores, 10),
                    "ndcg": fastpipe.recsys.ndcg(ranked, scores, 10),
                }
            )
            bar.set_postfix({key: f"{value:.4f}" for key, value in history[-1].items() if key != "epoch"})
    return history


def draw(histories: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """Plots HR@10 and NDCG@10 by epoch: the mean over the seeds of each feed, and each seed as a faint line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, (metric, title) in zip(axes, (("hit_rate", "HR@10"), ("ndcg", "NDCG@10")), strict=True):
        for color, (name, runs) in zip(("tab:blue", "tab:orange"), histories.items(), strict=False):
            values = np.array([[epoch[metric] for epoch in run] for run in runs])
            epochs = np.arange(1, values.shape[1] + 1)
            axis.plot(epochs, values.mean(axis=0), color=color, marker=".", label=name)
            if len(values) > 1:
                axis.plot(epochs, values.T, color=color, alpha=0.2)
        axis.set(xlabel="epoch", ylabel=title)
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def agree(histories: dict[str, list[list[dict[str, Any]]]]) -> bool:
    """Prints the final HR@10 of both feeds. Returns whether they differ by at most one standard error."""
    means, errors = [], []
    for name, runs in histories.items():
        last = np.array([run[-1]["hit_rate"] for run in runs])
        means.append(last.mean())
        errors.append(last.std(ddof=1) / math.sqrt(len(last)))
        print(f"{name}: HR@10 {means[-1]:.4f} (standard error {errors[-1]:.4f} of {len(last)} seeds)")
    difference, error = abs(means[0] - means[1]), math.hypot(*errors)
    within = bool(difference <= error)
    print(f"difference {difference:.4f}, {'within' if within else 'beyond'} its standard error of {error:.4f}")
    return within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the data, the metrics, and the plot")
    parser.add_argument("--epochs", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and the negatives; default: %(default)s")
    parser.add_argument("--data", type=Path, help="ratings in MovieLens format; default: download them")
    parser.add_argument("--exact", action="store_true", help="train on batches of the slow exact sampler")
    parser.add_argument("--check", action="store_true", help=f"compare with a slow exact sampler, {SEEDS} seeds each")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    data, held_out = fastpipe.recsys.Interactions.from_movielens(
        arguments.data or fetch(arguments.folder)
    ).leave_one_out()
    candidates = fastpipe.recsys.evaluation_candidates(data, held_out, CANDIDATES, seed=1)
    print(data)

    feeds = {"fastpipe": fed_by_fastpipe, "exact sampler": ExactSampler}
    seeds = range(arguments.seed, arguments.seed + SEEDS) if arguments.check else [arguments.seed]
    histories: dict[str, list[list[dict[str, Any]]]] = {}
    chosen = list(feeds) if arguments.check else ["exact sampler" if arguments.exact else "fastpipe"]
    for name in chosen:
        feed = feeds[name]
        histories[name] = [
            train(
                data,
                feed(data, seed),
                lambda: candidates,
                epochs=arguments.epochs,
                seed=seed,
                title=f"{name}, seed {seed}",
            )
            for seed in seeds
        ]
    (arguments.folder / "metrics.json").write_text(json.dumps(histories, indent=1))
    draw(histories, arguments.folder / "metrics.png")
    if arguments.check and not agree(histories):
        sys.exit(1)


if __name__ == "__main__":
    main()
