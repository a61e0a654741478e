"""Parts of `device.py` that measure training loops with the PyTorch and JAX adapters."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from device_machine import Figures, Machine
from harness.data import features

if TYPE_CHECKING:
    import torch

    import fastpipe


def dataloader(device: Machine) -> Figures:
    """Measures batches per second on the device for torch's and fastpipe's DataLoader with page-locked memory.

    fastpipe page-locks its shared memory in place, or copies batches in a thread as torch does.
    """
    import torch
    from torch.utils.data import DataLoader, Dataset

    import fastpipe.torch

    batch_size, num_items = 256, device.few(16_384, 512)

    class Items(Dataset[Any]):
        """Items of a few kilobytes."""

        def __init__(self, floats: int) -> None:
            self.values = torch.arange(floats, dtype=torch.float32)

        def __len__(self) -> int:
            return num_items

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"values": self.values + index, "label": index}

    def once(loader: Any) -> float:
        # The sum is exact in float64 but would be rounded in float32.
        total = torch.zeros((), dtype=torch.float64, device=device.device)

        def read() -> None:
            for batch in loader:
                total.add_(batch["values"].to(device.device, non_blocking=True)[:, 0].double().sum())

        seconds = device.seconds(read)
        if total.item() != num_items * (num_items - 1) / 2:
            raise RuntimeError(f"{loader!r} yielded wrong items")
        return num_items / batch_size / seconds

    workers = 1 if device.dry_run else 8
    for floats in (1024, 16_384):
        options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "pin_memory": not device.dry_run}
        options |= {"num_workers": workers, "persistent_workers": True}
        copied: Any = fastpipe.torch.DataLoader(Items(floats), **options)
        in_place: Any = fastpipe.torch.DataLoader(Items(floats), **options)
        # The setting is not public: in-place locks are used wherever they are possible.
        copied._known.refusal = "the bench measures the thread"
        made = {
            "torch": DataLoader(Items(floats), **options),
            "fastpipe": in_place,
            "fastpipe, copied by its thread": copied,
        }
        found = device.medians({name: partial(once, loader) for name, loader in made.items()})
        rates = {f"{way}, batches/s": rate for way, rate in found.items()}
        checks = {
            "is_pinned": all(batch["values"].is_pinned() for batch in in_place),
            # Empty if no batch was copied on the host.
            "copied because": in_place._known.refusal,
        }
        if not device.dry_run and not checks["is_pinned"]:
            raise RuntimeError("fastpipe's batches aren't page-locked")
        yield f"items of {floats * 4 // 1024} KB, {workers} workers", {**rates, "ratio": _ratio(found), **checks}


def _ratio(found: dict[str, float]) -> float:
    return found["fastpipe"] / found["torch"]


class Steps:
    """Runs training steps and measures how long the device is idle between them.

    Args:
        device: Machine that runs the steps.
    """

    def __init__(self, device: Machine) -> None:
        self._device = device
        self._marks: list[tuple[Any, Any]] = []

    def __call__(self, step: Callable[[], object]) -> None:
        """Runs a step and records its start and end on the device."""
        begun = self._mark()
        step()
        self._marks.append((begun, self._mark()))

    def _mark(self) -> Any:
        import torch

        if self._device.dry_run:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, begun: Any, ended: Any) -> float:
        return float(ended - begun if self._device.dry_run else begun.elapsed_time(ended) / 1e3)

    def figures(self, batch_size: int) -> dict[str, Any]:
        """Returns the fraction of time in which the device was idle, and the records per second."""
        self._device.synchronize()
        # Skip the first steps, which fill memory pools and caches.
        marks = self._marks[len(self._marks) // 10 :]
        whole = self._seconds(marks[0][0], marks[-1][1])
        busy = sum(itertools.starmap(self._seconds, marks))
        return {"idle": 1 - busy / whole, "records/s": round(len(marks) * batch_size / whole)}


def train_torch(device: Machine) -> Figures:
    """Trains a small model on dataset (b) with each PyTorch adapter."""
    import torch
    from torch.utils.data import DataLoader

    import fastpipe
    import fastpipe.torch

    batch_size, width = 1024, device.few(4096)
    options: dict[str, Any] = {"features": features("b"), "batch_size": batch_size, "drop_last": True}
    options |= {"shuffle": True, "seed": 1, "num_threads": max(device.threads()), "epochs": device.few(8)}

    def reader() -> fastpipe.Reader:
        return fastpipe.read_avro(device.file("b"), **options)

    def on_device(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            yield {name: values.to(device.device, non_blocking=True) for name, values in batch.items()}

    pinned: dict[str, Any] = {"batch_size": None, "pin_memory": not device.dry_run}
    feeds: dict[str, Callable[[], Iterable[Any]]] = {
        "fastpipe.cuda.iterator": lambda: device.prefetch(reader()),
        "fastpipe.torch.dataset": lambda: on_device(fastpipe.torch.dataset(reader())),
        "fastpipe.torch.dataset in torch's DataLoader, pinned": lambda: on_device(
            DataLoader(fastpipe.torch.dataset(reader()), **pinned)
        ),
    }
    for name, feed in feeds.items():
        layers = [torch.nn.Linear(128, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)]
        model = torch.nn.Sequential(*layers).to(device.device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        steps = Steps(device)

        def step(batch: Any, model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            loss = torch.nn.functional.cross_entropy(model(batch["embedding"]), batch["label"].long())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        for batch in feed():
            steps(partial(step, batch))
        yield name, steps.figures(batch_size)


def train_jax(device: Machine) -> Figures:
    """Trains a small model on dataset (b) with `fastpipe.jax.iterator`, and repeatedly on one resident batch."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if device.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    import fastpipe
    import fastpipe.jax

    if not device.dry_run and jax.default_backend() != "gpu":
        raise SystemExit(f"JAX runs on {jax.default_backend()}, not on the GPU")
    batch_size, width = 1024, device.few(4096)
    options: dict[str, Any] = {"features": features("b"), "batch_size": batch_size, "drop_last": True}
    options |= {"shuffle": True, "seed": 1, "num_threads": max(device.threads())}
    reader = fastpipe.read_avro(device.file("b"), epochs=None, **options)
    keys = jax.random.split(jax.random.key(0), 2)
    weights = [jax.random.normal(keys[0], (128, width)) * 0.1, jax.random.normal(keys[1], (width, 10)) * 0.01]

    def loss(weights: list[jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        scores = jax.nn.log_softmax(jax.nn.relu(batch["embedding"] @ weights[0]) @ weights[1])
        return -jnp.take_along_axis(scores, batch["label"][:, None], axis=1).mean()

    @jax.jit
    def step(weights: list[jax.Array], batch: dict[str, jax.Array]) -> list[jax.Array]:
        slopes = jax.grad(loss)(weights, batch)
        return [weight - 1e-3 * slope for weight, slope in zip(weights, slopes, strict=True)]

    batches = fastpipe.jax.iterator(reader)
    held = next(batches)
    many = device.few(1000, 8)

    def rate(source: Iterator[Any]) -> float:
        trained = weights
        started = time.perf_counter()
        for batch in itertools.islice(source, many):
            trained = step(trained, batch)
        jax.block_until_ready(trained)
        return many * batch_size / (time.perf_counter() - started)

    found = device.medians({"fed": lambda: rate(batches), "resident": lambda: rate(itertools.repeat(held))})
    rates = {f"{name}, records/s": round(value) for name, value in found.items()}
    yield "fastpipe.jax.iterator", {**rates, "fed / resident": found["fed"] / found["resident"]}
