"""What the demo trains: a small network, on the batches of a reader."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastpipe._demo_batches import Batch, counted, row_count
from fastpipe.batch import Masked, Strings
from fastpipe.errors import SchemaError
from fastpipe.specs import DenseSpec, Spec

SEED = 20

_CLASSES = 100
_HELD_OUT_ROWS = 20_000
HELD_OUT = 10
"""Of the user's files, every tenth batch is for the test."""

Arrays = tuple[np.ndarray, np.ndarray]


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
    held_out = HELD_OUT if test is None else 0
    task = Task(inputs_of(features, label), label)
    x_test, y_test = _survey(task, reader, held_out, test)
    history = History("accuracy" if task.classes is not None else "R²")
    model = Mlp(x_test.shape[1], 1 if task.classes is None else len(task.classes))
    print(f"{'epoch':>5}  {'loss':>8}  {'test ' + history.score_name:>13}  {'records/s':>11}")
    for epoch in range(epochs):
        start, first, seen = time.perf_counter(), len(history.losses), 0
        for i, batch in enumerate(counted(reader, f"epoch {epoch + 1}/{epochs}")):
            seen += row_count(batch)
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


def inputs_of(features: Mapping[str, Spec], label: str) -> list[str]:
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
    for i, batch in enumerate(counted(reader, "surveying")):
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
