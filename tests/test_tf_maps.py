"""fastpipe.tf: batches of maps, packs and buckets as tensors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import samples
from apart import wait_until
from test_damage import Block, write
from test_tf import FILES, check, fptf, rows_of, tf


@pytest.fixture
def data(tmp_path: Path) -> samples.Data:
    return samples.write(tmp_path, FILES)


def rows(value: Any) -> list[Any]:
    found: list[Any] = value.tolist() if isinstance(value, np.ndarray) else value.to_list()
    return found


def check_packs(element: dict[str, Any], batch: dict[str, Any], features: fastpipe.Features) -> None:
    assert sorted(element) == sorted(batch)
    for name, value in batch.items():
        if features[name].on_null != "mask":
            assert rows_of(element[name]) == rows(value)


def mapped(data: samples.Data, kind: str) -> fastpipe.typing.Mapped:
    """Returns a map whose batches have every form, or packs and buckets."""
    reader = data.read(batch_size=8, shuffle=True, seed=3)
    if kind == "map":
        return reader.map(lambda batch: batch, features=reader.features, num_threads=2)
    names = [name for name, spec in reader.features.items() if not isinstance(spec, fastpipe.SparseSpec)]
    reader = data.read(batch_size=2, shuffle=True, seed=3, columns=names)
    column = next(
        name
        for name, spec in reader.features.items()
        if isinstance(spec, fastpipe.RaggedSpec) and len(spec.shape) == 1 and spec.dtype.startswith(("int", "float"))
    )
    if kind == "buckets":
        return reader.bucket(column)
    return reader.pack(column, 20, padded=kind == "padded packs")


@pytest.mark.parametrize("kind", ["map", "packs", "padded packs", "buckets"])
def test_elements_are_the_batches(data: samples.Data, kind: str) -> None:
    given, other = mapped(data, kind), mapped(data, kind)
    dataset = fptf.dataset(given)
    for _ in range(2):  # Each iteration is an epoch.
        elements, batches = list(dataset), list(other)
        assert len(elements) == len(batches) > 1
        for element, batch in zip(elements, batches, strict=True):
            if "packs" in kind:
                check_packs(element, batch, given.features)
            else:
                check(element, batch)
            tf.nest.map_structure(
                lambda spec, value: spec.is_compatible_with(value) or pytest.fail(str(spec)),
                dataset.element_spec,
                element,
            )
    # The state is after the last batch that TensorFlow took. Ranks divide the batches.
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)
    other.load_state_dict(given.state_dict())
    assert rows_of(next(iterator)["id"]) == rows(next(iter(other))["id"])
    ranks = [list(fptf.dataset(given.shard(2, rank))) for rank in range(2)]
    assert abs(len(ranks[0]) - len(ranks[1])) <= 1
    assert sum(map(len, ranks)) >= len(given) - 1


def test_a_model_is_fitted_to_packs(data: samples.Data) -> None:
    packs = mapped(data, "padded packs")
    dataset = fptf.dataset(packs).apply(tf.data.experimental.assert_cardinality(len(packs)))
    dataset = dataset.map(
        lambda element: tuple(tf.cast(element[name], tf.float32) for name in ("positions", "segment_ids"))
    )
    model = tf.keras.Sequential([tf.keras.layers.Dense(20)])
    model.compile("sgd", "mse")
    losses = model.fit(dataset, epochs=2, verbose=0, shuffle=False).history["loss"]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("fill", [False, True])
def test_damage_is_left_out_or_filled(tmp_path: Path, fill: bool) -> None:
    files = write(tmp_path, [Block(9), Block(7, None), Block(6, frozenset({0, 4})), Block(8)], "deflate")
    on_error = fastpipe.Skip(max_units=9, max_fraction=0.9, fill=fill)
    reader, other = (files.reader(batch_size=5, shuffle=True, seed=3, on_error=on_error) for _ in range(2))
    dataset = fptf.dataset(reader)
    elements, batches = list(dataset), list(other)
    assert len(elements) == len(batches)
    for element, batch in zip(elements, batches, strict=True):
        assert ("valid" in element) == fill
        if fill:
            assert element.pop("valid").numpy().tolist() == batch.pop("valid").tolist()
        check(element, batch)
    assert reader.losses == other.losses != []


def test_a_dropped_iteration_ends_its_pass(data: samples.Data) -> None:
    whole = mapped(data, "buckets")
    batches = list(itertools.islice(fptf.dataset(whole), 2))
    assert len(batches) == 2
    active = whole._passes.incoming.origin._active
    assert active is not None
    assert wait_until(lambda: not active.active)


def test_unknown_features_and_other_batches_are_refused(data: samples.Data) -> None:
    reader = data.read(batch_size=8)
    with pytest.raises(fastpipe.errors.UnsupportedError, match="pass features= to map"):
        fptf.dataset(reader.map(lambda batch: batch))
    # Without nulls, no batch is read before the iteration.
    reader = data.read(batch_size=8, columns=["id", "vector"])
    for function, got in [(len, "int"), (lambda batch: {"id": batch["id"]}, r"\['id'\]")]:
        dataset = fptf.dataset(reader.map(function, features=reader.features))
        with pytest.raises(tf.errors.InvalidArgumentError, match=rf"TypeError: .*must be dicts.*got '?{got}"):
            list(dataset)

    def fails(batch: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no such row")

    with pytest.raises(tf.errors.InvalidArgumentError, match="no such row"):
        list(fptf.dataset(reader.map(fails, features=reader.features)))
