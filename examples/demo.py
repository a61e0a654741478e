"""Trains a classifier on an Avro file, resumes the training exactly, and compares fastpipe's speed with fastavro's.

    python examples/demo.py                     # scikit-learn's handwritten digits
    python examples/demo.py data/*.avro         # reads, resumes, and compares on your own files
    make demo FILES='data/*.avro'               # the same, after building fastpipe

The demo writes the digits to an Avro file that is sorted by digit, so training depends on shuffling. It trains
scikit-learn's MLPClassifier on the reader's batches and saves a checkpoint of the model and the reader halfway through
the last epoch. A new reader and a copy of the model resume from the checkpoint and end with the same weights.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe

SEED = 20
BATCH_SIZE = 200  # MLPClassifier splits larger batches into several steps.
TEST_ROWS = 360
ROUNDS = 3
SECONDS = 1.0  # Both readers read as much as fastavro reads in this time.


def write_digits(train: Path, test: Path, rows: int) -> None:
    """Writes `rows` shifted and noisy copies of most digits, sorted by digit, and the other digits unchanged."""
    import fastavro
    from sklearn.datasets import load_digits

    fields = [
        {"name": "pixels", "type": {"type": "array", "items": "float"}, "doc": "8 x 8 pixels by row, 0 to 16"},
        {"name": "label", "type": "int", "doc": "the digit"},
    ]
    schema = fastavro.parse_schema({"type": "record", "name": "Digit", "fields": fields})
    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(pixels))
    unseen, seen = order[:TEST_ROWS], order[TEST_ROWS:]  # Copies of test images would give the answers away.
    copies = np.resize(seen, rows)
    copies = copies[np.argsort(labels[copies], kind="stable")]
    for path, images, which in ((train, augment(pixels[copies], rng), copies), (test, pixels[unseen], unseen)):
        records = ({"pixels": x, "label": y} for x, y in zip(images.tolist(), labels[which].tolist(), strict=True))
        with path.open("wb") as file:
            fastavro.writer(file, schema, records, codec="deflate", sync_marker=b"fastpipe digits!")


def augment(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shifts each 8 x 8 image by up to one pixel in each direction and adds noise in steps of 0.25."""
    padded = np.pad(pixels.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    down, right = rng.integers(0, 3, (2, len(pixels), 1, 1))
    cells = np.arange(8)
    shifted = padded[np.arange(len(pixels))[:, None, None], down + cells[:, None], right + cells]
    noise = np.round(rng.normal(0, 0.7, shifted.shape) * 4) / 4
    return np.clip(shifted + noise, 0, 16).reshape(pixels.shape)


def train_digits(folder: Path, epochs: int, rows: int) -> tuple[Path, list[float], float]:
    """Trains on the digits, then repeats part of the last epoch from a checkpoint.

    Returns:
        The training file, the loss of each step, and the accuracy on the test digits.
    """
    from sklearn.neural_network import MLPClassifier
    from threadpoolctl import threadpool_limits

    train_path, test_path = folder / "digits-train.avro", folder / "digits-test.avro"
    write_digits(train_path, test_path, rows)
    print(f"{train_path}: {rows:,} handwritten digits, sorted by digit, {train_path.stat().st_size / 1e6:.1f} MB")
    with fastpipe.read_avro(test_path, batch_size=TEST_ROWS) as test:
        unseen = next(iter(test))
    features = {"pixels": fastpipe.DenseSpec((64,), "float32"), "label": fastpipe.DenseSpec((), "int32")}
    options: dict[str, Any] = {"features": features, "batch_size": BATCH_SIZE, "shuffle": True, "seed": SEED}
    model = MLPClassifier(128, learning_rate_init=2e-3, shuffle=False, random_state=SEED)
    threadpool_limits(1)  # BLAS threads would only wait for each other in a model this small.
    losses, accuracy, checkpoint = [], 0.0, b""
    print(f"\n{'epoch':>5}  {'loss':>6}  {'accuracy':>8}  {'records/s':>9}")
    with fastpipe.read_avro(train_path, **options) as reader:
        steps = -(-rows // BATCH_SIZE)
        for epoch in range(1, epochs + 1):
            start = time.perf_counter()
            for step, batch in enumerate(reader, 1):
                losses.append(fit(model, batch))
                if (epoch, step) == (epochs, steps // 2):
                    checkpoint = pickle.dumps({"model": model, "reader": reader.state_dict()})
            seconds = time.perf_counter() - start
            accuracy = float(model.score(unseen["pixels"] / 16, unseen["label"]))
            print(f"{epoch:>5}  {np.mean(losses[-steps:]):>6.4f}  {accuracy:>8.4f}  {rows / seconds:>9,.0f}")
        print(reader.explain().splitlines()[0])

    saved = pickle.loads(checkpoint)
    with fastpipe.read_avro(train_path, **options) as reader:
        reader.load_state_dict(saved["reader"])
        resumed = [fit(saved["model"], batch) for batch in reader]
    same = resumed == losses[-len(resumed) :] and all(
        np.array_equal(a, b) for a, b in zip(model.coefs_, saved["model"].coefs_, strict=True)
    )
    outcome = "the same losses and weights" if same else "OTHER LOSSES OR WEIGHTS"
    print(f"\nInterrupted at step {steps // 2:,} of epoch {epochs} and resumed: {outcome}, bit for bit")
    return train_path, losses, accuracy


def fit(model: Any, batch: dict[str, Any]) -> float:
    """Trains on a batch and returns its loss."""
    model.partial_fit(batch["pixels"] / 16, batch["label"], classes=np.arange(10))
    return float(model.loss_)


def read_files(files: Sequence[str], batch_size: int) -> None:
    """Reads a shuffled epoch of the files with all cores, then resumes it from a state saved halfway."""
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "seed": SEED}
    with fastpipe.read_avro(files, **options) as reader:
        print(f"Files: {len(reader.files):,}, records: {reader.num_rows:,}, features: {len(reader.features):,}")
        middle = -(-reader.num_rows // batch_size) // 2
        start, expected, state = time.perf_counter(), [], reader.state_dict()
        for step, batch in enumerate(reader, 1):
            if step == middle:
                state = reader.state_dict()
            elif middle < step <= middle + 10:
                expected.append(pickle.dumps(batch))
        seconds = time.perf_counter() - start
        print(f"Shuffled batches of {batch_size:,}: {reader.num_rows / seconds:,.0f} records/s\n{reader.explain()}")
    with fastpipe.read_avro(files, **options) as reader:
        reader.load_state_dict(state)
        same = [pickle.dumps(batch) for batch in islice(reader, len(expected))] == expected
    outcome = "the same batches" if same else "OTHER BATCHES"
    print(f"\nInterrupted at step {middle:,} and resumed: {outcome}, bit for bit")


def compare(files: Sequence[str], batch_size: int) -> dict[str, float]:
    """Reads the same records alternately with both readers, one thread each, and prints their rates.

    fastavro's reader yields one dict per record and builds no batches, so it does less work.

    Returns:
        Records per second by reader.
    """
    features = fastpipe.infer_features(files)
    with fastpipe.read_avro(files, features=features, batch_size=batch_size) as reader:
        rows, paths = reader.num_rows, reader.files
    try:
        rows = read_fastavro(paths, rows, SECONDS)
    except Exception as error:  # For example, fastavro lacks the library of a codec.
        sys.exit(f"demo: fastavro cannot read these files, so there is no comparison: {error}")
    seconds: dict[str, list[float]] = {"fastavro": [], "fastpipe": []}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        read_fastavro(paths, rows)
        between = time.perf_counter()
        read_fastpipe(paths, features, batch_size, rows)
        seconds["fastavro"].append(between - start)
        seconds["fastpipe"].append(time.perf_counter() - between)
    rates = {name: rows / statistics.median(turns) for name, turns in seconds.items()}
    ratio = statistics.median(a / b for a, b in zip(seconds["fastavro"], seconds["fastpipe"], strict=True))
    print(f"\n{rows:,} records in order, one thread each, medians of {ROUNDS} turns")
    print(f"fastavro  {rates['fastavro']:>12,.0f} records/s, a dict per record")
    print(f"fastpipe  {rates['fastpipe']:>12,.0f} records/s, NumPy batches of {batch_size:,}")
    print(f"fastpipe is {ratio:.1f} times as fast.")
    return rates


def read_fastavro(paths: Sequence[str], rows: int, seconds: float = np.inf) -> int:
    """Reads up to `rows` records for up to `seconds`. Returns the number of records read."""
    import fastavro

    done, end = 0, time.perf_counter() + seconds
    for path in paths:
        with open(path, "rb") as file:
            for _ in fastavro.reader(file):
                done += 1
                if done == rows or (done % 100 == 0 and time.perf_counter() > end):
                    return done
    return done


def read_fastpipe(paths: Sequence[str], features: fastpipe.typing.Features, batch_size: int, rows: int) -> None:
    """Reads batches until they contain at least `rows` rows."""
    with fastpipe.read_avro(paths, features=features, batch_size=batch_size, num_threads=1) as reader:
        for _ in islice(reader, -(-rows // batch_size)):
            pass


def draw(losses: Sequence[float], accuracy: float, rates: dict[str, float], path: Path) -> None:
    """Plots the rates of both readers and, after training, the loss of each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10 if losses else 5, 4), dpi=120, layout="constrained")
    *left, right = figure.subplots(1, 2 if losses else 1, squeeze=False)[0]
    for axes in left:
        axes.semilogy(losses, linewidth=0.6)
        axes.set(title=f"Test accuracy {accuracy:.4f}", xlabel="step", ylabel="loss")
    bars = right.bar(list(rates), list(rates.values()), color=["#a8b3bf", "#1f77b4"])
    right.bar_label(bars, [f"{rate:,.0f}/s" for rate in rates.values()], padding=3)
    right.margins(y=0.1)
    right.set(title="Reading Avro, one thread each", ylabel="records per second")
    figure.savefig(path)
    print(f"\nPicture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="Avro files, directories or globs; default: digits")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the digits; default: %(default)s")
    parser.add_argument("--rows", type=int, default=60_000, help="training digits; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("fastpipe-demo"), help="a directory; default: %(default)s")
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.rows < 2 * BATCH_SIZE:
        parser.error(f"--epochs must be at least 1 and --rows at least {2 * BATCH_SIZE}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    files, losses, accuracy, batch_size = arguments.files, [], 0.0, 1024
    if files:
        with fastpipe.read_avro(files, batch_size=1) as reader:
            size = sum(map(os.path.getsize, reader.files)) / max(reader.num_rows, 1)
        batch_size = int(min(1024, max(1, 32e6 // max(size, 1))))  # Wide records make large batches.
        read_files(files, batch_size)
    else:
        path, losses, accuracy = train_digits(arguments.out, arguments.epochs, arguments.rows)
        files = [str(path)]
    draw(losses, accuracy, compare(files, batch_size), arguments.out / "fastpipe-demo.png")


if __name__ == "__main__":
    try:
        main()
    except fastpipe.FastpipeError as error:
        sys.exit(f"demo: {error}")
