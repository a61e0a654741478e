"""All adapters follow one rule for the ranks of the program: none of them reads all rows on every rank by accident."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fastpipe

ROWS = 40


def numbers(**options: Any) -> fastpipe.Reader:
    arrays = {"id": np.arange(ROWS, dtype="int32"), "x": np.ones(ROWS, "float32")}
    return fastpipe.from_arrays(arrays, **{"batch_size": 5, "seed": 1} | options)


def by_torch(reader: fastpipe.Reader, **options: Any) -> Iterator[Any]:
    adapter = pytest.importorskip("fastpipe.torch")
    return (batch["id"].numpy() for batch in adapter.dataset(reader, **options))


def by_cuda(reader: fastpipe.Reader, **options: Any) -> Iterator[Any]:
    pytest.importorskip("torch")
    from fastpipe.cuda import _torch, iterator
    from plain_gpu import PlainEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch, "TorchEngine", PlainEngine)
        batches = iterator(reader, **options)
    return (batch["id"].numpy() for batch in batches)


def by_jax(reader: fastpipe.Reader, **options: Any) -> Iterator[Any]:
    pytest.importorskip("jax")
    from fastpipe import jax

    return (np.asarray(batch["id"]) for batch in jax.iterator(reader, **options))


def by_tensorflow(reader: fastpipe.Reader, **options: Any) -> Iterator[Any]:
    pytest.importorskip("tensorflow", exc_type=ImportError)
    from fastpipe import tf

    return (batch["id"].numpy() for batch in tf.dataset(reader, **options))


def by_xgboost(reader: fastpipe.Reader, **options: Any) -> Iterator[Any]:
    pytest.importorskip("xgboost")
    from fastpipe import xgboost

    fed, found = xgboost.data_iter(reader, label="id", **options), []
    while fed.next(lambda label, **_: found.append(label)):
        pass
    return iter(found)


ADAPTERS = {"torch": by_torch, "cuda": by_cuda, "jax": by_jax, "tensorflow": by_tensorflow, "xgboost": by_xgboost}
adapter = pytest.mark.parametrize("read", ADAPTERS.values(), ids=ADAPTERS)


def ids(batches: Iterator[Any]) -> list[int]:
    return [i for batch in batches for i in batch.tolist()]


def plain(**options: Any) -> list[int]:
    return ids(batch["id"] for batch in numbers(**options))


@adapter
def test_readers_are_divided_among_the_ranks_of_the_environment(
    read: Callable[..., Iterator[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = plain(shuffle=True)
    assert ids(read(numbers(shuffle=True))) == whole
    assert not caplog.records
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with caplog.at_level("INFO", logger="fastpipe"):
            seen.append(ids(read(numbers(shuffle=True))))
        assert caplog.messages == [f"rank {rank} of 2 reads its shard (by RANK and WORLD_SIZE)"]
        caplog.clear()
        assert seen[-1] == plain(shuffle=True, rank=rank, world_size=2)
    assert sorted(seen[0] + seen[1]) == list(range(ROWS))
    # A reader that has a rank isn't divided again, and the division can be turned off.
    assert ids(read(numbers(rank=0, world_size=4))) == plain(rank=0, world_size=4)
    assert ids(read(numbers(shuffle=True), distributed=False)) == whole
    with pytest.raises(ValueError, match="set a seed: every process must use the same seed"):
        ids(read(numbers(shuffle=True, seed=None)))
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="RANK is 2 and WORLD_SIZE is 2"):
        ids(read(numbers()))


def test_plain_readers_warn_that_every_rank_reads_all_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = numbers()
    list(reader)
    assert not caplog.records
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    list(numbers(rank=1, world_size=2))
    list(numbers().shard(2, 1))
    assert not caplog.records
    reader = numbers()
    for _ in range(2):
        assert ids(batch["id"] for batch in reader) == list(range(ROWS))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("fastpipe", "WARNING")
    assert "rank 1 of 2 (by RANK and WORLD_SIZE) reads all rows" in record.getMessage()
    assert "reader.shard(2, 1)" in record.getMessage()


WORKERS = {"worker": ["a:1", "b:1"]}


@pytest.mark.parametrize(
    ("cluster", "task", "rank", "ranks"),
    [
        (WORKERS, ("worker", 1), 1, 2),
        (WORKERS | {"chief": ["c:1"]}, ("worker", 1), 2, 3),
        (WORKERS | {"chief": ["c:1"]}, ("chief", 0), 0, 3),
        (WORKERS | {"evaluator": ["e:1"]}, ("evaluator", 0), 0, 1),
        (WORKERS | {"chief": ["c:1"], "ps": ["p:1"]}, ("chief", 0), 0, 1),
        ({"worker": ["a:1"]}, ("worker", 0), 0, 1),
    ],
)
def test_tensorflow_knows_its_workers(
    cluster: dict[str, list[str]],
    task: tuple[str, int],
    rank: int,
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("tensorflow", exc_type=ImportError)
    config = {"cluster": cluster, "task": {"type": task[0], "index": task[1]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with caplog.at_level("INFO", logger="fastpipe"):
        assert ids(by_tensorflow(numbers(on_uneven="allow"))) == plain(on_uneven="allow", rank=rank, world_size=ranks)
    said = [text for text in caplog.messages if "rank" in text]
    assert said == ([f"rank {rank} of {ranks} reads its shard (by TF_CONFIG)"] if ranks > 1 else [])


def test_xgboost_knows_its_workers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("xgboost")
    from xgboost import collective

    monkeypatch.setattr(collective, "get_rank", lambda: 1)
    monkeypatch.setattr(collective, "get_world_size", lambda: 2)
    with caplog.at_level("INFO", logger="fastpipe"):
        assert ids(by_xgboost(numbers())) == plain(rank=1, world_size=2)
    assert caplog.messages == ["rank 1 of 2 reads its shard (by xgboost.collective)"]
