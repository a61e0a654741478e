"""`fastpipe demo`: trains a small classifier straight from Avro batches, and measures the reader beside fastavro.

Without files it takes scikit-learn's handwritten digits. 1,797 images are no streaming job, so the training images are
repeated with small shifts and a little noise, in a seeded random order. The test images are set aside before that, so
no relative of theirs is trained on.

The throughput figures are medians of alternating passes over the same file, one decoding thread each. Both sides make
the same NumPy batches; a pass before the clock starts checks that they do.
"""

from __future__ import annotations

import importlib
import itertools
import math
import operator
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import fastpipe
from fastpipe import _inspect
from fastpipe._progress import progress_bar
from fastpipe._schema_fields import Names
from fastpipe._sources import expand
from fastpipe._terminal_text import clean, plural, size_text, table
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR, Strings
from fastpipe.errors import FastpipeError, SchemaError
from fastpipe.specs import DenseSpec, Features, SparseSpec, Spec

SEED = 20
TRAIN_ROWS = 60_000
TEST_ROWS = 360
ROUNDS = 5
SECONDS = 4.0
"""fastavro's share of the time of one pass over files of the user; it reads no more rows than that, nor does
fastpipe."""

_CLASSES = 100
_HELD_OUT = 10  # Of the user's files, every tenth batch is for the test.
_HELD_OUT_ROWS = 20_000

Batch = dict[str, Any]
Arrays = tuple[np.ndarray, np.ndarray]


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
    paths = expand(files)
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
        small = max(1, min(128, batch_size, rows // (2 * _HELD_OUT)))  # There must be batches to hold out.
        used = {name: features[name] for name in (*_inputs(features, label), label)}
        with fastpipe.read_avro(paths, features=used, batch_size=small) as reader:
            history = fit(reader, used, label, epochs)
    else:
        _stream(paths, features, batch_size)
    return _report(compare(paths, features, batch_size=batch_size), history, folder)


def _features(paths: list[str]) -> Features:
    found = _inspect.infer_readable(paths, fastpipe.AvroFile(paths[0]).schema)
    if not found.features:
        raise found.error or SchemaError("the schema has no fields to read")
    for name, reason in found.skipped.items():
        print(f"left out: {clean(name)}: {clean(reason)}")
    for name in found.notes:  # fastavro makes dates and the like of these, so there would be nothing to compare with.
        del found.features[name]
        print(f"left out: {clean(name)}: a logical type")
    if not found.features:
        raise found.error or SchemaError("nothing but logical types, which fastavro doesn't read as they are stored")
    return found.features


def _stream(paths: list[str], features: Features, batch_size: int) -> None:
    """Reads everything once, with all cores, and says what comes out."""
    forms: dict[str, str] = {}
    with fastpipe.read_avro(paths, features=features, batch_size=batch_size) as reader:
        start = time.perf_counter()
        for batch in _counted(reader, "streaming"):
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


# --- The data ---


def write_digits(train_path: Path, test_path: Path) -> None:
    """Writes scikit-learn's digits: TRAIN_ROWS shifted, noisy copies of most, and TEST_ROWS others as they are."""
    import fastavro
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(pixels))
    # Before copies are made: a copy of a test image would give the answer away.
    test, train = order[:TEST_ROWS], order[TEST_ROWS:]
    picked = rng.permutation(np.resize(train, TRAIN_ROWS))  # The file is read in sequence, so it is shuffled here.
    schema = fastavro.parse_schema(
        {
            "type": "record",
            "name": "Digit",
            "fields": [
                {"name": "pixels", "type": {"type": "array", "items": "float"}, "doc": "8 x 8 pixels by row, 0 to 16"},
                {"name": "label", "type": "int", "doc": "the digit"},
            ],
        }
    )
    for path, images, which in ((train_path, augment(pixels[picked], rng), picked), (test_path, pixels[test], test)):
        records = ({"pixels": x, "label": y} for x, y in zip(images.tolist(), labels[which].tolist(), strict=True))
        with open(path, "wb") as file:
            fastavro.writer(file, schema, records, codec="deflate", sync_marker=b"fastpipe digits!")


def augment(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shifts each 8 x 8 image `[n, 64]` by up to a pixel in each direction, and adds noise in steps of a quarter."""
    padded = np.pad(pixels.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    down, right = rng.integers(0, 3, (2, len(pixels), 1, 1))
    cells = np.arange(8)
    shifted = padded[np.arange(len(pixels))[:, None, None], down + cells[:, None], right + cells]
    noise = np.round(rng.normal(0, 0.7, shifted.shape) * 4) / 4
    noisy: np.ndarray = np.clip(shifted + noise, 0, 16)
    return noisy.reshape(pixels.shape)


# The model
# ----------------------------------------------------------------------------------------------------------------------


class Mlp:
    """A network of one hidden layer (ReLU), trained with Adam (Kingma and Ba, 2015).

    Its outputs are the logits of classes, or a number.
    """

    def __init__(self, inputs: int, outputs: int, *, hidden: int = 128, rate: float = 2e-3, seed: int = SEED) -> None:
        rng = np.random.default_rng(seed)

        def weights(fan_in: int, fan_out: int) -> np.ndarray:
            return (rng.standard_normal((fan_in, fan_out)) * math.sqrt(2 / fan_in)).astype(np.float32)

        biases = np.zeros(hidden, np.float32), np.zeros(outputs, np.float32)
        self.weights = [weights(inputs, hidden), biases[0], weights(hidden, outputs), biases[1]]
        self._moments = [(np.zeros_like(w), np.zeros_like(w)) for w in self.weights]
        self._rate = rate
        self._steps = 0

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Outputs `[n, outputs]`: logits of the classes, or the number."""
        w1, b1, w2, b2 = self.weights
        return np.asarray(np.maximum(x @ w1 + b1, 0) @ w2 + b2)

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Trains on one batch and gives its mean loss.

        That is the cross entropy for classes (integer `y`), and half the squared error for numbers.
        """
        w1, b1, w2, b2 = self.weights
        hidden = np.maximum(x @ w1 + b1, 0)
        out = hidden @ w2 + b2
        if np.issubdtype(y.dtype, np.integer):
            out -= out.max(axis=1, keepdims=True)
            grad = np.exp(out)
            grad /= grad.sum(axis=1, keepdims=True)
            rows = np.arange(len(y))
            loss = -np.log(grad[rows, y] + 1e-12).mean()
            grad[rows, y] -= 1
        else:
            grad = out - y[:, None]
            loss = (grad**2).mean() / 2
        grad /= len(y)
        back = (grad @ w2.T) * (hidden > 0)
        self._update([x.T @ back, back.sum(axis=0), hidden.T @ grad, grad.sum(axis=0)])
        return float(loss)

    def _update(self, gradients: list[np.ndarray]) -> None:
        self._steps += 1
        rate = self._rate * np.sqrt(1 - 0.999**self._steps) / (1 - 0.9**self._steps)
        for weight, (mean, square), gradient in zip(self.weights, self._moments, gradients, strict=True):
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            weight -= (rate * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)


@dataclass
class Task:
    """What is predicted from what, and how a batch becomes the model's arrays."""

    inputs: list[str]
    label: str
    classes: np.ndarray | None = None
    """The distinct labels; None for numbers, which are predicted as such."""
    mean: Any = 0.0
    scale: Any = 1.0

    def raw(self, batch: Batch) -> Arrays:
        """Inputs `[n, width]`, NaN where something is missing, and labels `[n]`, for the rows that have one."""
        columns = []
        for name in self.inputs:
            node = batch[name]
            values, valid = node if isinstance(node, Masked) else (node, None)
            values = values.astype(np.float32)
            if valid is not None:
                values[~valid] = np.nan
            columns.append(values.reshape(len(values), -1))
        x = np.concatenate(columns, axis=1)
        labels = batch[self.label]
        labels, present = labels if isinstance(labels, Masked) else (labels, None)
        y = labels.to_numpy().astype(str) if isinstance(labels, Strings) else labels
        return (x, y) if present is None else (x[present], y[present])

    def scaled(self, x: np.ndarray, y: np.ndarray) -> Arrays:
        """Inputs of mean 0 and variance 1, the mean where one is missing; labels as classes, or scaled as well."""
        x = (x - self.mean[1:]) / self.scale[1:]
        x = np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0).astype(np.float32)
        if self.classes is not None:
            return x, np.searchsorted(self.classes, y)
        return x, ((y - self.mean[0]) / self.scale[0]).astype(np.float32)


@dataclass
class History:
    """How the training went: the loss of each step, and for each epoch the score on what was held out."""

    score_name: str
    losses: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


def fit(reader: Any, features: Mapping[str, Spec], label: str, epochs: int, test: Any = None) -> History:
    """Trains on the batches of a reader, epoch by epoch, with a line for each.

    Args:
        reader: of the training data.
        features: of the reader.
        label: the feature to predict: integers, enums and strings of up to 100 different ones as classes, other numbers
            as such.
        epochs: passes.
        test: reader of the test data; if None, every tenth batch of `reader` is held out.

    Raises:
        SchemaError: if the label can't be predicted, or there is nothing to predict it from.
    """
    held_out = _HELD_OUT if test is None else 0
    task = Task(_inputs(features, label), label)
    x_test, y_test = _survey(task, reader, held_out, test)
    history = History("accuracy" if task.classes is not None else "R²")
    model = Mlp(x_test.shape[1], 1 if task.classes is None else len(task.classes))
    print(f"{'epoch':>5}  {'loss':>8}  {'test ' + history.score_name:>13}  {'records/s':>11}")
    for epoch in range(epochs):
        start, first, seen = time.perf_counter(), len(history.losses), 0
        for i, batch in enumerate(_counted(reader, f"epoch {epoch + 1}/{epochs}")):
            seen += _rows(batch)
            if held_out and i % held_out == held_out - 1:
                continue
            x, y = task.scaled(*task.raw(batch))
            if len(y):
                history.losses.append(model.step(x, y))
        seconds = time.perf_counter() - start
        history.scores.append(_score(task, model.predict(x_test), y_test))
        loss = np.mean(history.losses[first:])
        print(f"{epoch + 1:>5}  {loss:>8.4f}  {history.scores[-1]:>13.4f}  {seen / seconds:>11,.0f}")
    print()
    return history


def _inputs(features: Mapping[str, Spec], label: str) -> list[str]:
    """The features to predict `label` from."""
    if label not in features:
        raise SchemaError(f"no feature {label!r} to predict; there are: {', '.join(features)}", feature=label)
    spec = features[label]
    if not isinstance(spec, DenseSpec) or spec.shape or spec.dtype == "bytes":
        raise SchemaError(f"{label!r} can't be predicted: it is no number and no string", feature=label)
    numeric = [
        name
        for name, s in features.items()
        if name != label and isinstance(s, DenseSpec) and s.dtype not in ("string", "bytes")
    ]
    if not numeric:
        raise SchemaError(f"there are no numeric features of fixed shape to predict {label!r} from", feature=label)
    return numeric


def _survey(task: Task, reader: Any, held_out: int, test: Any) -> Arrays:
    """Reads the training data once for means, variances and classes, and notes them in `task`.

    Returns:
        The test data, scaled.
    """
    tests: list[Arrays] = []
    classes: np.ndarray | None = None
    total: Any = 0.0
    squares: Any = 0.0
    count: Any = 0
    may_class = True
    for i, batch in enumerate(_counted(reader, "surveying")):
        x, y = task.raw(batch)
        may_class = may_class and y.dtype.kind != "f"
        if may_class:
            classes = np.unique(y) if classes is None else np.union1d(classes, y)
            may_class = len(classes) <= _CLASSES
        if y.dtype.kind == "U" and not may_class:
            reason = f"{task.label!r} can't be predicted: it has more than {_CLASSES} different strings"
            raise SchemaError(reason, feature=task.label)
        if held_out and i % held_out == held_out - 1:
            if sum(len(y) for _, y in tests) < _HELD_OUT_ROWS:
                tests.append((x, y))
            continue
        column = y if y.dtype.kind != "U" else np.zeros(len(y))
        values = np.concatenate([column[:, None].astype(np.float64), x], axis=1)
        known = np.isfinite(values)
        values = np.where(known, values, 0)
        total, squares, count = total + values.sum(axis=0), squares + (values**2).sum(axis=0), count + known.sum(axis=0)
    if test is not None:
        tests = [task.raw(batch) for batch in test]
    if not tests or not np.any(count) or not sum(len(y) for _, y in tests):
        raise SchemaError(f"there are too few records with {task.label!r} to train and to test on", feature=task.label)
    count = np.maximum(count, 1)
    task.mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - task.mean**2, 0))
    task.scale = np.where(deviation > 1e-12, deviation, 1)
    task.classes = classes if may_class else None
    x_test, y_test = (np.concatenate(parts) for parts in zip(*tests, strict=True))
    return task.scaled(x_test, y_test)


def _score(task: Task, out: np.ndarray, y: np.ndarray) -> float:
    if task.classes is not None:
        return float((out.argmax(axis=1) == y).mean())
    spread = ((y - y.mean()) ** 2).sum()
    return float(1 - ((out[:, 0] - y) ** 2).sum() / spread) if spread else 0.0


# fastavro as the measure
# --------------------------------------------------------------------------------------------------------


class Column:
    """Makes of fastavro's records what fastpipe makes of the file, for an inferred feature.

    It walks the schema once, so that a record costs no more than getting at the value; arrays of plain values are taken
    as they are.
    """

    def __init__(self, schema: Any, name: str, spec: Spec) -> None:
        self._names = Names(schema)
        self._shape = spec.shape
        self._dtype = spec.dtype
        self._codes: dict[str, int] | None = None
        self._nullable = [False] * (len(spec.shape) + 1)
        self._sparse = isinstance(spec, SparseSpec)
        path = name.split(".")
        if "fields" not in self._names.resolve(schema):
            path = path[1:]  # The name "value" stands for the root.
        self._get = self._getter(schema, path, 0) or (lambda record: record)

    def _getter(self, schema: Any, path: list[str], level: int) -> Callable[[Any], Any] | None:
        """How to get from a value of the schema to the nested lists of the feature; None if it is them already."""
        schema, nullable = self._names.value(schema)
        self._nullable[level] |= nullable
        get: Callable[[Any], Any] | None = None
        if self._sparse and not path:
            pass
        elif "fields" in schema:
            of_field = next(f["type"] for f in schema["fields"] if f["name"] == path[0])
            get = _then(operator.itemgetter(path[0]), self._getter(of_field, path[1:], level))
        elif schema["type"] == "array":
            get = _each(self._getter(schema["items"], path, level + 1))
        elif schema["type"] == "map" and path[0] == "keys":
            get = list
        elif schema["type"] == "map":
            get = _then(dict.values, _each(self._getter(schema["values"], path[1:], level + 1)) or list)
        elif schema["type"] == "enum" and self._dtype != "string":
            self._codes = {symbol: code for code, symbol in enumerate(schema["symbols"])}
        return _unless_null(get) if nullable else get

    def convert(self, records: list[Any]) -> Any:
        """The feature of these records."""
        get = self._get
        rows = [get(record) for record in records]
        return self._coordinates(rows) if self._sparse else self._node(rows, 0)

    def _coordinates(self, rows: list[Any]) -> Any:
        there = [row for row in rows if row is not None]
        names = [f"indices{i}" for i in range(len(self._shape))]
        lengths = [0 if row is None else len(row["values"] or ()) for row in rows]
        columns = [np.repeat(np.arange(len(rows)), lengths)]
        columns += [np.fromiter(_chain(row[name] or () for row in there), np.int64) for name in names]
        indices = np.column_stack(columns)
        sizes = [
            int(column.max(initial=-1)) + 1 if n is None else n
            for column, n in zip(columns[1:], self._shape, strict=True)
        ]
        values = self._leaf(list(_chain(row["values"] or () for row in there)), (len(indices),))
        node = Sparse(indices, values, np.array([len(rows), *sizes]))
        if not self._nullable[0]:
            return node
        return Masked(node, np.fromiter((row is not None for row in rows), bool, len(rows)))

    def _node(self, rows: list[Any], level: int) -> Any:
        if None not in self._shape[level:]:
            return self._fixed(rows, level)
        valid = None
        if self._nullable[level]:
            valid = np.fromiter((row is not None for row in rows), bool, len(rows))
            rows = [() if row is None else row for row in rows]
        items = list(_chain(rows))
        node = Ragged(self._node(items, level + 1), _offsets(rows))
        return node if valid is None else Masked(node, valid)

    def _fixed(self, rows: list[Any], level: int) -> Any:
        shape = self._shape[level:]
        nullable = self._nullable[level:]
        # Fixed dimensions have one mask in all, at the innermost level that may be null.
        mask_level = max((i for i, null in enumerate(nullable) if null), default=None)
        valid = None
        values: Any = rows
        for i in range(len(shape) + 1):
            if i == mask_level:
                valid = np.fromiter((value is not None for value in values), bool, len(values)).reshape(
                    len(rows), *shape[:i]
                )
            if i < len(shape):
                if mask_level is not None:
                    blank = [None] * int(shape[i] or 0)
                    values = [blank if value is None else value for value in values]
                values = _chain(values)
                if mask_level is not None or i + 1 < len(shape):
                    values = list(values)
        if mask_level is not None:
            empty: Any = {"string": "", "bytes": b""}.get(self._dtype, next(iter(self._codes)) if self._codes else 0)
            values = [empty if value is None else value for value in values]
        node = self._leaf(values, (len(rows), *shape))
        return node if valid is None else Masked(node, valid)

    def _leaf(self, values: Iterable[Any], shape: tuple[Any, ...]) -> Any:
        if self._dtype in ("string", "bytes"):
            parts = [value.encode() for value in values] if self._dtype == "string" else list(values)
            return Strings(np.frombuffer(b"".join(parts), np.uint8), _offsets(parts), shape, self._dtype == "bytes")
        if self._codes is not None:
            values = map(self._codes.__getitem__, values)
        return np.fromiter(values, self._dtype).reshape(shape)


_chain = itertools.chain.from_iterable


def _then(get: Callable[[Any], Any], inner: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return get if inner is None else lambda value: inner(get(value))


def _each(get: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return get and (lambda values: [get(value) for value in values])


def _unless_null(get: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    return get and (lambda value: None if value is None else get(value))


def _offsets(rows: Sequence[Any]) -> np.ndarray:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=offsets[1:])
    return offsets


def fastavro_batches(paths: Sequence[str], columns: Mapping[str, Column], batch_size: int) -> Generator[Batch]:
    """The batches of fastpipe, made with fastavro."""
    import fastavro

    def records() -> Iterator[Any]:
        for path in paths:
            with open(path, "rb") as file:
                yield from fastavro.reader(file)

    source = records()
    while rows := list(itertools.islice(source, batch_size)):
        yield {name: column.convert(rows) for name, column in columns.items()}


def same(a: Any, b: Any) -> bool:
    """Whether two features are equal: form, dtype, shape and every value that isn't null."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, Masked) and isinstance(a.values, np.ndarray) and isinstance(b.values, np.ndarray):
        shapes = a.values.shape == b.values.shape
        return shapes and same(a.valid, b.valid) and same(a.values[a.valid], b.values[b.valid])
    if isinstance(a, Strings) and (a.shape, a.binary) != (b.shape, b.binary):
        return False
    return all(same(x, y) for x, y in zip(a, b, strict=True))


@dataclass
class Throughput:
    """Records and bytes a second of both, on the first `rows` records of `all_rows`."""

    rows: int
    all_rows: int
    size: int
    fastpipe: list[float] = field(default_factory=list)
    fastavro: list[float] = field(default_factory=list)
    problem: str | None = None
    """Why fastavro isn't measured."""

    def rates(self, seconds: list[float]) -> tuple[float, float]:
        """Records/s and file bytes/s of the median pass."""
        median = statistics.median(seconds)
        return self.rows / median, self.rows / median * self.size / self.all_rows


def compare(paths: Sequence[str], features: Mapping[str, Spec], *, batch_size: int, rounds: int = ROUNDS) -> Throughput:
    """Times fastpipe and fastavro in turn, one thread each, after a look at whether their batches are the same."""

    def read() -> Any:
        return fastpipe.read_avro(list(paths), features=features, batch_size=batch_size, num_threads=1)

    with read() as reader:
        total, ordered = reader.num_rows, list(reader.files)
        result = Throughput(0, total, sum(os.stat(path).st_size for path in ordered))
        schema = fastpipe.AvroFile(ordered[0]).schema
        columns = {name: Column(schema, name, spec) for name, spec in features.items()}
        start = time.perf_counter()
        reference = fastavro_batches(ordered, columns, batch_size)
        try:
            with progress_bar(total, desc="checking", leave=False, disable=None) as bar:
                for ours, theirs in zip(reader, reference, strict=False):
                    different = [name for name in features if not same(ours[name], theirs[name])]
                    if different:
                        result.problem = f"the batches differ in {different[0]!r}"
                    result.rows += _rows(ours)
                    bar.update(_rows(ours))
                    if result.problem or time.perf_counter() - start > SECONDS:
                        break
        except FastpipeError:
            raise
        except Exception as error:  # What fastavro can't make of a file is worth a line, not the end of the demo.
            result.problem = f"{type(error).__name__}: {error}"
        finally:
            reference.close()
    if result.problem:
        result.rows = total
    with progress_bar(2 * rounds, unit="pass", desc="measuring", leave=False, disable=None) as bar:
        for _ in range(rounds):
            with read() as reader:
                result.fastpipe.append(_seconds(reader, result.rows))
            bar.update(1)
            if not result.problem:
                result.fastavro.append(_seconds(fastavro_batches(ordered, columns, batch_size), result.rows))
            bar.update(1)
    return result


def _seconds(batches: Iterable[Batch], rows: int) -> float:
    start, seen = time.perf_counter(), 0
    for batch in batches:
        seen += _rows(batch)
        if seen >= rows:
            break
    return time.perf_counter() - start


def _counted(reader: Any, what: str) -> Iterator[Batch]:
    """The batches, with a progress bar while they come."""
    with progress_bar(reader.num_rows, desc=what, leave=False, disable=None) as bar:
        for batch in reader:
            yield batch
            bar.update(_rows(batch))


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


# The report
# ---------------------------------------------------------------------------------------------------------------------


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
