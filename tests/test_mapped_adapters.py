"""Adapters with maps of readers: each one works, or raises an error that says what to do."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import tensorflow as tf
import torch
import xgboost
from torch.utils.data import DataLoader

import fastpipe
import fastpipe.cuda
import fastpipe.jax
import fastpipe.ray
import fastpipe.service
import fastpipe.tf
import fastpipe.torch
import fastpipe.xgboost
from mapping import ROWS, SIZE, SPECS, expected, reader_of, values, with_y
from plain_gpu import PlainEngine
from samples import through_json


@pytest.mark.parametrize("threads", [0, 2])
def test_torch(threads: int) -> None:
    wanted = expected(reader_of())
    dataset = fastpipe.torch.dataset(reader_of().map(with_y, num_threads=threads), select=("x", "y"))
    loader = DataLoader(dataset, batch_size=None)
    assert len(dataset) == 9
    found, states = [], []
    for x, y in loader:
        assert isinstance(y, torch.Tensor)
        found.append((x.tolist(), y.tolist()))
        states.append(through_json(dataset.state_dict()))
    assert found == wanted
    for step, state in enumerate(states, 1):
        dataset.load_state_dict(state)
        assert [(x.tolist(), y.tolist()) for x, y in dataset] == wanted[step:]
    known = reader_of().map(with_y, features=SPECS)
    with pytest.raises(ValueError, match="select names 'z'"):
        fastpipe.torch.dataset(known, select="z")


def test_torch_workers() -> None:
    dataset = fastpipe.torch.dataset(reader_of().map(with_y, num_threads=1))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", collate_fn=_same)
    assert sorted(values(loader)) == sorted(expected(reader_of()))
    assert sorted(values(loader)) == sorted(expected(reader_of(), 1))


def _same(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("threads", [0, 2])
def test_jax(threads: int) -> None:
    wanted = expected(reader_of())
    for features in (None, SPECS):
        for step in range(10):
            batches = fastpipe.jax.iterator(reader_of().map(with_y, num_threads=threads, features=features))
            first = [next(batches) for _ in range(step)]
            assert all(isinstance(batch["y"], jax.Array) for batch in first)
            again = fastpipe.jax.iterator(reader_of().map(with_y, num_threads=threads))
            again.set_state(through_json(batches.get_state()))
            assert values(first) + values(again) == wanted
    with pytest.raises(fastpipe.errors.UnsupportedError, match="pass features= to map"):
        fastpipe.jax.iterator(reader_of().map(with_y), pad_ragged=True)


def test_cuda_rings() -> None:
    wanted = expected(reader_of())
    for step in range(10):
        mapped = reader_of().map(with_y, num_threads=2)
        prefetcher = fastpipe.cuda.Prefetcher._of(mapped, [PlainEngine()], 2, several=False)  # type: ignore[arg-type]
        batches = iter(prefetcher)
        assert values(next(batches) for _ in range(step)) == wanted[:step]
        state = through_json(prefetcher.state_dict())
        prefetcher.load_state_dict(state)
        assert values(prefetcher) == wanted[step:]


def test_tensorflow() -> None:
    mapped: Any = reader_of().map(with_y, features=SPECS)
    assert values({name: part.numpy() for name, part in batch.items()} for batch in fastpipe.tf.dataset(mapped)) == (
        expected(reader_of())
    )
    unknown: Any = reader_of().map(with_y)
    with pytest.raises(fastpipe.errors.UnsupportedError, match="pass features= to map"):
        fastpipe.tf.dataset(unknown)
    dataset = fastpipe.tf.dataset(reader_of()).map(lambda batch: tf.cast(batch["x"], tf.float32) / 2)
    assert [part.numpy().tolist() for part in dataset] == [y for _, y in expected(reader_of())]


def test_xgboost() -> None:
    mapped: Any = reader_of().map(with_y, num_threads=1, features=SPECS)
    matrix = xgboost.QuantileDMatrix(fastpipe.xgboost.data_iter(mapped, label="x"))
    assert sorted(matrix.get_label().tolist()) == list(range(ROWS))
    unknown: Any = reader_of().map(with_y)
    with pytest.raises(fastpipe.errors.UnsupportedError, match="pass features= to map"):
        fastpipe.xgboost.data_iter(unknown)


@pytest.mark.parametrize("threads", [0, 2])
def test_arrow(threads: int) -> None:
    pa = pytest.importorskip("pyarrow")
    mapped = reader_of(on_uneven="pad", rank=0, world_size=2).map(with_y, num_threads=threads, features=SPECS)
    table = mapped.to_arrow_reader().read_all()
    assert table.column_names == ["x", "y", "valid"]
    wanted = expected(reader_of(on_uneven="pad", rank=0, world_size=2))
    assert table["y"].to_pylist() == [y for _, ys in wanted for y in ys]
    mapped.set_epoch(0)
    assert pa.table(mapped) == table
    some = mapped._passes.record_batches(0, 1, 3).read_all()
    assert some == table.slice(SIZE, 2 * SIZE)
    with pytest.raises(fastpipe.errors.UnsupportedError, match="pass features= to map, a dict"):
        reader_of().map(with_y).to_arrow_reader()


def test_servers_and_ray_say_what_to_do() -> None:
    mapped: Any = reader_of().map(with_y)
    with pytest.raises(fastpipe.errors.UnsupportedError, match="Serve the reader that it wraps"):
        fastpipe.service.Server(mapped)
    with pytest.raises(fastpipe.errors.UnsupportedError, match=r"requires a fastpipe\.Reader"):
        fastpipe.ray.dataset(mapped)
