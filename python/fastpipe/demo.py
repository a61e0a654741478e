"""`fastpipe demo`: trains a small classifier straight from Avro batches, and measures the reader beside fastavro.

Without files it takes scikit-learn's handwritten digits.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe
from fastpipe._demo_batches import counted
from fastpipe._demo_comparison import Throughput, compare
from fastpipe._demo_digits import write_digits
from fastpipe._demo_model import HELD_OUT, History, fit, inputs_of
from fastpipe._formats import avro_only
from fastpipe._terminal_text import clean, plural, size_text, table
from fastpipe.avro import _inspect
from fastpipe.avro._schema_fields import schema_fields
from fastpipe.batch import Sparse, SparseCSR, Strings
from fastpipe.errors import SchemaError
from fastpipe.specs import DenseSpec, Features


def run(files: Sequence[str] = (), *, epochs: int = 5, out: str = "fastpipe-demo", label: str | None = None) -> Path:
    """Runs the demo and prints what it does.

    Args:
        files: Avro files, directories or patterns; the digits if there are none.
        epochs: passes over the training data.
        out: directory for the digits and the picture; made if it isn't there.
        label: with files: the column to predict from the numeric ones. Without it they are streamed and measured.

    Returns:
        The path of the picture.

    Raises:
        ImportError: if something of the extra `demo` isn't installed.
        FastpipeError: if the files can't be read, or `label` can't be predicted.
    """
    for module in ("fastavro", "matplotlib", "tqdm", *(() if files else ("sklearn",))):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(f"the demo needs {module}: pip install 'fastpipe-data[demo]'") from error
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    return _run_files(files, epochs, folder, label) if files else _run_digits(epochs, folder)


def _run_digits(epochs: int, folder: Path) -> Path:
    train_path, test_path = folder / "digits-train.avro", folder / "digits-test.avro"
    print("Handwritten digits of scikit-learn as Avro, repeated with shifts and noise for training:")
    write_digits(train_path, test_path)
    for path in (train_path, test_path):
        print(f"{path}: {plural(fastpipe.AvroFile(path).num_records, 'digit')}, {size_text(path.stat().st_size)}")
    features = {"pixels": DenseSpec((64,), "float32"), "label": DenseSpec((), "int32")}
    print(f"\nfeatures = {Features(features)!r}\n")

    with (
        fastpipe.read_avro(train_path, features=features, batch_size=128) as train,
        fastpipe.read_avro(test_path, features=features, batch_size=128) as test,
    ):
        history = fit(train, features, "label", epochs, test=test)
    throughput = compare([str(train_path)], features, batch_size=1024)
    return _report(throughput, history, folder)


def _run_files(files: Sequence[str], epochs: int, folder: Path, label: str | None) -> Path:
    paths = avro_only(files, "fastpipe demo", "Write its rows as Avro first: fastpipe.write_avro")
    features = _features(paths)
    sizes = sum(os.stat(path).st_size for path in paths)
    with fastpipe.read_avro(paths, features=features, batch_size=1) as reader:
        rows = reader.num_rows
    if not rows:
        raise SchemaError("the files hold no records")
    print(f"{plural(len(paths), 'file')}, {plural(rows, 'record')}, {size_text(sizes)}\n")
    batch_size = int(min(1024, max(1, 32e6 // (sizes / rows))))

    history = None
    if label is not None:
        small = max(1, min(128, batch_size, rows // (2 * HELD_OUT)))  # There must be batches to hold out.
        used = {name: features[name] for name in (*inputs_of(features, label), label)}
        with fastpipe.read_avro(paths, features=used, batch_size=small) as reader:
            history = fit(reader, used, label, epochs)
    else:
        _stream(paths, features, batch_size)
    return _report(compare(paths, features, batch_size=batch_size), history, folder)


def _features(paths: list[str]) -> Features:
    found = _inspect.infer_readable(paths)
    if not found.features:
        raise found.error or SchemaError("the schema has no fields to read")
    for name, reason in found.skipped.items():
        print(f"left out: {clean(name)}: {clean(reason)}")
    # fastavro makes dates and the like of these, so there would be nothing to compare with.
    other = {entry.path for entry in schema_fields(fastpipe.AvroFile(paths[0]).schema) if entry.logical}
    codes = _codes(found.features)
    for name in list(found.features):
        path = name.removesuffix(".values")
        if name in other or path in other or ":" in name or name in codes:
            del found.features[name]
            print(f"left out: {clean(name)}: a logical type, or a union of several types")
    if not found.features:
        raise SchemaError("nothing but logical types and unions, which fastavro doesn't read as they are stored")
    return found.features


def _codes(features: Features) -> set[str]:
    """The columns that number the types of a union."""
    return {name.rpartition(":")[0] for name in features if ":" in name}


def _stream(paths: list[str], features: Features, batch_size: int) -> None:
    """Reads everything once, with all cores, and says what comes out."""
    forms: dict[str, str] = {}
    with fastpipe.read_avro(paths, features=features, batch_size=batch_size) as reader:
        start = time.perf_counter()
        for batch in counted(reader, "streaming"):
            forms = forms or {name: form_text(node) for name, node in batch.items()}
        seconds = time.perf_counter() - start
        print(table(["feature", "in a batch of n"], [[clean(n), form] for n, form in forms.items()], 120))
        rows = reader.num_rows
    print(f"\n{plural(rows, 'record')} in {seconds:.2f} s with all cores: {rows / seconds:,.0f} records/s\n")


def form_text(node: Any) -> str:
    """The form of a feature, with its dtype and shape."""
    if isinstance(node, np.ndarray):
        return f"{node.dtype} [{', '.join(['n', *map(str, node.shape[1:])])}]"
    if isinstance(node, (Sparse, SparseCSR)):
        sizes = ", ".join(["n", *(str(size) for size in node.dense_shape[1:])])
        return f"{type(node).__name__} [{sizes}] of {form_text(node.values).partition(' [')[0]}"
    if isinstance(node, Strings):
        return f"Strings, {'bytes' if node.binary else 'str'} [{', '.join(['n', *map(str, node.shape[1:])])}]"
    return f"{type(node).__name__} of {form_text(node.values)}"


# --- The report ---


def _report(throughput: Throughput, history: History | None, folder: Path) -> Path:
    named = {"fastavro": throughput.fastavro, "fastpipe": throughput.fastpipe}
    rates = {name: throughput.rates(seconds) for name, seconds in named.items() if seconds}
    slowest = min(records for records, _ in rates.values())
    part = "all" if throughput.rows >= throughput.all_rows else f"the first {throughput.rows:,} of"
    equal = "" if throughput.problem else "; the same NumPy batches, checked"
    passes = f"one thread each, median of {len(throughput.fastpipe)} passes in turn"
    print(f"Throughput: {part} {throughput.all_rows:,} records, {passes}{equal}")
    rows = [[name, f"{r:,.0f}", f"{b / 1e6:,.1f}", f"{r / slowest:.1f} x"] for name, (r, b) in rates.items()]
    print(table(["reader", "records/s", "MB/s of the file", ""], rows, 120, right=(1, 2, 3)))
    if throughput.problem:
        print(f"fastavro isn't measured: {clean(throughput.problem)}")
    path = folder / "fastpipe-demo.png"
    _draw(rates, history, path)
    print(f"\nPicture: {path}")
    return path


def _draw(rates: dict[str, tuple[float, float]], history: History | None, path: Path) -> None:
    from matplotlib.figure import Figure  # Without pyplot there is no display and no global state.

    figure = Figure(figsize=(11 if history else 6, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots(1, 2 if history else 1, squeeze=False)[0]
    if history is not None:
        _draw_training(axes[0], history)
    colors = ["#a8b3bf", "#1f77b4"][-len(rates) :]
    bars = axes[-1].bar(list(rates), [records for records, _ in rates.values()], color=colors, width=0.6)
    labels = [f"{records:,.0f}/s\n{size / 1e6:,.1f} MB/s" for records, size in rates.values()]
    axes[-1].bar_label(bars, labels, padding=3)
    axes[-1].set(title="Avro to NumPy batches, one thread each", ylabel="records a second")
    axes[-1].margins(y=0.2)
    axes[-1].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_training(axis: Any, history: History) -> None:
    losses = np.array(history.losses)
    window = max(1, len(losses) // 100)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    axis.plot(np.arange(len(losses)), losses, color="#1f77b4", alpha=0.2, linewidth=0.6)
    axis.plot(np.arange(len(smooth)) + window - 1, smooth, color="#1f77b4", label="training loss")
    axis.set(title=f"Test {history.score_name} {history.scores[-1]:.4f}", xlabel="step", ylabel="loss", yscale="log")
    axis.legend(frameon=False)
