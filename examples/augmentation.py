"""Trains a convolutional net on heavily augmented digits, loaded by fastpipe's DataLoader or by torch's.

    python examples/augmentation.py                           # trains with fastpipe's loader and two workers
    python examples/augmentation.py --loader torch            # trains with torch's loader
    python examples/augmentation.py --check                   # tests whether images depend on the number of workers
    python examples/augmentation.py --memory memory.png --size 256 --batch-size 64 --epochs 1
                                                              # plots memory over time: 1 to 16 workers, both loaders

The images are the 8 x 8 digits of scikit-learn. On each access, a worker enlarges and rotates an image, distorts it
elastically, and adds noise, which takes a few milliseconds. fastpipe's loader returns the same images for any number of
workers, including 0, so runs are reproducible. With torch's loader, the images depend on the number of workers.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.utils.data
from scipy import ndimage
from sklearn.datasets import load_digits
from torch import nn

import fastpipe.torch

LOADERS = {"fastpipe": fastpipe.torch.DataLoader, "torch": torch.utils.data.DataLoader}
SEED = 7
ANGLE, SHIFT, SMOOTH, NOISE = 25.0, 0.5, 0.08, 0.1
"""Strength of the augmentation.

* `ANGLE`: Maximum rotation in degrees.
* `SHIFT`: Maximum elastic displacement in pixels of the small image.
* `SMOOTH`: Smoothing width of the displacement as a fraction of the image size.
* `NOISE`: Standard deviation of the pixel noise. Pixels range from 0 to 1.
"""


def progress(steps: Iterable[Any], name: str, leave: bool = True) -> Iterable[Any]:
    """Returns the steps with a progress bar if tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return steps
    return tqdm(steps, desc=name, leave=leave)


class Digits(torch.utils.data.Dataset[Any]):
    """Enlarged digits, augmented on each access.

    Args:
        images: Images of shape [count, 8, 8] with values from 0 to 16.
        labels: Digit of each image.
        size: Width and height of the enlarged images in pixels.
        augmented: Whether to rotate and distort the images and add noise.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, size: int, *, augmented: bool) -> None:
        self._images, self._labels = images.astype(np.float32) / 16, labels
        self._size, self._augmented = size, augmented

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        side = self._images.shape[1]
        grid = np.linspace(0, side - 1, self._size, dtype=np.float32)
        places = np.stack(np.meshgrid(grid, grid, indexing="ij"))
        image = self._images[index]
        if not self._augmented:
            return ndimage.map_coordinates(image, places, order=1)[None], int(self._labels[index])
        # The loader seeds Python's generator for each image. NumPy's generator draws whole arrays at once.
        draw = np.random.default_rng(random.getrandbits(63))
        angle, middle = np.deg2rad(draw.uniform(-ANGLE, ANGLE)), (side - 1) / 2
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]], np.float32)
        places = np.einsum("ij,jxy->ixy", turn, places - middle) + middle
        for field in places:
            moved = ndimage.gaussian_filter(draw.uniform(-1, 1, field.shape), SMOOTH * self._size)
            field += moved * (SHIFT / max(float(np.abs(moved).max()), 1e-9))
        found = ndimage.map_coordinates(image, places, order=3, mode="nearest")
        found += draw.normal(0, NOISE, found.shape)
        return found.astype(np.float32)[None], int(self._labels[index])


class Net(nn.Sequential):
    """Three convolutional layers and a linear layer."""

    def __init__(self, size: int) -> None:
        super().__init__(
            nn.Conv2d(1, 12, 5, stride=max(size // 32, 1), padding=2),
            nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(24 * 16, 10),
        )


def data(arguments: argparse.Namespace) -> tuple[Digits, Digits]:
    """Returns augmented training digits, and every fifth digit without augmentation for testing."""
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    images, labels = pixels.reshape(-1, 8, 8)[: arguments.images], labels[: arguments.images]
    held_out = np.arange(len(images)) % 5 == 0
    return (
        Digits(images[~held_out], labels[~held_out], arguments.size, augmented=True),
        Digits(images[held_out], labels[held_out], arguments.size, augmented=False),
    )


def loader_of(name: str, dataset: Digits, workers: int, arguments: argparse.Namespace) -> Any:
    """Returns a loader of shuffled batches. Both loaders accept the same arguments.

    `persistent_workers` is off: persistent workers draw no new seed for later epochs, so a run without workers would
    return different images.
    """
    return LOADERS[name](
        dataset,
        batch_size=arguments.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(SEED),
    )


def train(arguments: argparse.Namespace) -> None:
    """Trains the network and prints the time, loss, and accuracy of each epoch."""
    training, held_out = data(arguments)
    loader = loader_of(arguments.loader, training, arguments.workers, arguments)
    images, labels = torch.utils.data.default_collate([held_out[index] for index in range(len(held_out))])
    torch.manual_seed(SEED)
    net = Net(arguments.size)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(1, arguments.epochs + 1):
        begin, losses = time.perf_counter(), []
        for batch, wanted in progress(loader, f"epoch {epoch}", leave=False):
            loss = nn.functional.cross_entropy(net(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seconds = time.perf_counter() - begin
        with torch.no_grad():
            accuracy = (net(images).argmax(dim=1) == labels).float().mean().item()
        print(f"epoch {epoch}: {seconds:.2f} s, loss {np.mean(losses):.3f}, accuracy {accuracy:.3f}", flush=True)


def digest(name: str, workers: int, arguments: argparse.Namespace) -> str:
    """Returns a digest of all images and labels of two epochs in order."""
    found = hashlib.sha256()
    loader = loader_of(name, data(arguments)[0], workers, arguments)
    for _ in range(2):
        for images, labels in loader:
            found.update(images.numpy().tobytes() + labels.numpy().tobytes())
    return found.hexdigest()[:16]


def check(arguments: argparse.Namespace) -> bool:
    """Returns whether fastpipe's images are the same for any number of workers, and prints both loaders' digests."""
    numbers = sorted({0, 1, 2, 3, arguments.workers})
    same = {}
    for name in LOADERS:
        digests = {workers: digest(name, workers, arguments) for workers in numbers}
        for workers, found in digests.items():
            print(f"{name}, {workers} workers: {found}", flush=True)
        same[name] = len(set(digests.values())) == 1
        print(f"{name}: augmentation {'is the same for' if same[name] else 'depends on'} any number of workers")
    return same["fastpipe"]


def feed(arguments: argparse.Namespace) -> None:
    """Reads batches and pauses after each to simulate training. `memory` runs this in a child process."""
    for _ in range(arguments.epochs):
        for images, _labels in loader_of(arguments.loader, data(arguments)[0], arguments.workers, arguments):
            float(images.sum())
            time.sleep(0.02)


def memory_of(process: int) -> float:
    """Returns the memory of a process and its children in MB. Shared memory counts once (PSS)."""
    total = 0
    try:
        root = psutil.Process(process)
        for each in [root, *root.children(recursive=True)]:
            total += each.memory_full_info().pss
    except psutil.Error:
        pass
    return total / 1e6


def memory(arguments: argparse.Namespace) -> None:
    """Samples and plots the memory of all processes over time for both loaders."""
    numbers = [number for number in (1, 2, 4, 8, 16) if number <= arguments.most_workers]
    curves: dict[str, dict[int, list[tuple[float, float]]]] = {name: {} for name in LOADERS}
    for name, number in progress([(name, number) for name in LOADERS for number in numbers], "runs"):
        given = {"--loader": name, "--workers": number, "--size": arguments.size, "--images": arguments.images}
        given |= {"--batch-size": arguments.batch_size, "--epochs": arguments.epochs}
        words = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
        begin, curve = time.perf_counter(), []
        program = subprocess.Popen([sys.executable, __file__, "--feed", *words])
        while program.poll() is None:
            curve.append((time.perf_counter() - begin, memory_of(program.pid)))
            time.sleep(0.1)
        if program.returncode:
            sys.exit(f"the run with {number} workers of {name} ended with {program.returncode}")
        curves[name][number] = curve
        print(f"{name}, {number} workers: {max(megabytes for _, megabytes in curve):,.0f} MB at most", flush=True)
    draw(curves, arguments.memory)


def draw(curves: dict[str, dict[int, list[tuple[float, float]]]], path: Path) -> None:
    """Plots memory over time with one panel per loader and one line per number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(10, 4), sharey=True, layout="constrained")
    for axes, (name, of_loader) in zip(panels, curves.items(), strict=True):
        colors = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(of_loader)))
        for color, (number, curve) in zip(colors, of_loader.items(), strict=True):
            axes.plot(*zip(*curve, strict=True), color=color, label=f"{number} workers")
        axes.set(xlabel="seconds", title=f"{name}'s DataLoader")
    panels[0].set(ylabel="memory of all processes, MB", ylim=(0, None))
    panels[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loader", choices=list(LOADERS), default="fastpipe", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--size", type=int, default=64, help="width and height in pixels; default: %(default)s")
    parser.add_argument("--images", type=int, help="number of digits to use; default: all 1,797")
    parser.add_argument("--check", action="store_true", help="compare the images of several numbers of workers")
    parser.add_argument("--memory", type=Path, metavar="PICTURE", help="plot the memory of all processes over time")
    parser.add_argument("--most-workers", type=int, default=16, help="maximum for --memory; default: %(default)s")
    parser.add_argument("--feed", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.feed:
        feed(arguments)
    elif arguments.memory:
        memory(arguments)
    elif arguments.check:
        sys.exit(0 if check(arguments) else 1)
    else:
        train(arguments)


if __name__ == "__main__":
    main()
