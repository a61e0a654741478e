"""The parts that `device.py` runs on a machine with one GPU, each in a separate process.

    python benches/device_parts.py PART [--dry-run]

Each figure is printed as soon as it is measured. Compared variants take turns, and figures are medians over the turns.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from device import MARK
from device_copies import copies, fill, prefetch
from device_machine import ROWS, TESTS, Figures, Machine
from device_training import dataloader, train_jax, train_torch
from harness.data import drain, open_reader


def machine(device: Machine) -> Figures:
    """Reports the GPU and the versions of the installed packages."""
    if not device.dry_run:
        import torch

        properties = torch.cuda.get_device_properties(0)
        yield "gpu", {"name": properties.name, "GB": properties.total_memory / 1e9, "CUDA": str(torch.version.cuda)}
    found = {}
    for package in ("fastpipe-data", "numpy", "torch", "jax", "cupy-cuda13x", "pyarrow"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    yield "versions", found


def tests(device: Machine) -> Figures:
    """Runs the tests that need a GPU. In a dry run, pytest collects them and skips them."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Other test files may import packages that aren't installed here.
        files = [str(path) for path in sorted(TESTS.glob("test_*.py")) if "mark.cuda" in path.read_text()]
        options = ["-m", "cuda", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        status = subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=TESTS.parent).returncode
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            for name in counts:
                counts[name] += int(suite.get(name, "0"))
    yield "pytest -m cuda", counts
    ran = counts["tests"] - counts["skipped"]
    if status != 0 or counts["tests"] == 0 or (ran == 0 and not device.dry_run):
        raise SystemExit(f"pytest: exit status {status}, {counts}")


def data(device: Machine) -> Figures:
    """Writes the files that the other parts read."""
    for dataset, codec in itertools.product(ROWS, ("null", "deflate")):
        path = device.file(dataset, codec)
        yield f"({dataset}), {codec}", {"MB": path.stat().st_size / 1e6}


def scaling(device: Machine) -> Figures:
    """Measures records per second of the datasets (a) to (d) with 1 to 16 threads."""
    enough = 0.01 if device.dry_run else 0.2
    for codec, dataset in itertools.product(("null", "deflate"), ROWS):
        path, rows = device.file(dataset, codec), device.few(ROWS[dataset], 2048)

        def once(num_threads: int, epochs: int, path: Path = path, dataset: str = dataset, rows: int = rows) -> float:
            reader = open_reader(path, dataset, num_threads=num_threads, epochs=epochs)
            started = time.perf_counter()
            drain(reader)
            return epochs * rows / (time.perf_counter() - started)

        ways: dict[str, Callable[[], float]] = {}
        for num_threads in device.threads():
            # Enough epochs for a reliable measurement.
            epochs = max(1, round(enough * once(num_threads, 2) / rows))
            ways[str(num_threads)] = partial(once, num_threads, epochs)
        found = device.medians(ways)
        counts = list(found)
        rates = {f"{name} threads": round(value) for name, value in found.items()}
        yield f"({dataset}), {codec}, records/s", {**rates, "most / one": found[counts[-1]] / found[counts[0]]}


PARTS: dict[str, Callable[[Machine], Figures]] = {
    "machine": machine,
    "tests": tests,
    "data": data,
    "copies": copies,
    "prefetch": prefetch,
    "fill": fill,
    "dataloader": dataloader,
    "train-torch": train_torch,
    "train-jax": train_jax,
    "scaling": scaling,
}


def main() -> None:
    """Runs one part and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    for name, figure in PARTS[arguments.part](Machine(arguments.dry_run)):
        print(MARK + json.dumps([name, figure]), flush=True)


if __name__ == "__main__":
    main()
