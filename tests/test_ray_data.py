"""`fastpipe.ray.dataset` and `shard`, with real Ray Data and Ray Train on two nodes of one machine."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
from apart import wait_until
from every_source import Make, make

ray = pytest.importorskip("ray")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("ray.data", exc_type=ImportError)
import fastpipe.ray  # noqa: E402
from ray_cluster import MARKS, cluster  # noqa: E402

__all__ = ["cluster", "make"]

pytestmark = MARKS


@pytest.fixture(scope="module", autouse=True)
def _ray_data(cluster: None) -> Iterator[None]:
    ray.data.DataContext.get_current().enable_progress_bars = False
    # Ray Train installs a handler of Ctrl-C and keeps it. Without this, Ctrl-C in a later test would start another Ray.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def table_of(dataset: Any, **options: Any) -> Any:
    """Returns the rows of one pass over a dataset."""
    return pa.concat_tables(dataset.iter_batches(batch_format="pyarrow", **{"batch_size": None} | options))


def numbers(**options: Any) -> fastpipe.Reader:
    return fastpipe.from_arrays({"id": np.arange(1000)}, **{"batch_size": 10, "shuffle": True, "seed": 7} | options)


# Ray Data.


def test_each_pass_has_the_million_rows_of_the_reader() -> None:
    draw = np.random.default_rng(3)
    arrays = {"id": np.arange(1_000_000), "x": draw.random((1_000_000, 3), "float32")}
    reader = fastpipe.from_arrays(arrays, batch_size=1000, shuffle=True, shuffle_buffer=50_000, seed=7)
    dataset = fastpipe.ray.dataset(reader, epoch=2)
    reader.set_epoch(2)
    expected = pa.table(reader)
    first, second = table_of(dataset), table_of(dataset, batch_size=777)
    for found in (first, second):
        assert found.equals(expected)
        assert found.schema.equals(expected.schema, check_metadata=True)
    assert dataset.count() == 1_000_000
    assert dataset.size_bytes() == expected.nbytes
    assert ray.data.DataContext.get_current().execution_options.preserve_order is False


def test_rows_of_each_source(make: Make, request: pytest.FixtureRequest) -> None:
    reader = make(batch_size=32, shuffle=True, shuffle_buffer=64, seed=3)
    if "text" in reader.features and "codes" in request.node.name:
        # Ray can't pickle string views in memory.
        with pytest.raises(fastpipe.errors.UnsupportedError, match="string_view"):
            fastpipe.ray.dataset(reader)
        return
    dataset = fastpipe.ray.dataset(reader, num_blocks=2)
    expected = pa.table(reader)
    found = table_of(dataset)
    assert found.schema.equals(expected.schema, check_metadata=True)
    assert found.equals(expected)
    assert dataset.count() == expected.num_rows
    assert fastpipe.ray.dataset(reader).schema().base_schema.equals(expected.schema)


@pytest.mark.parametrize(
    "options", [{}, {"drop_last": True}, {"world_size": 3, "rank": 1}], ids=["", "drop_last", "rank"]
)
@pytest.mark.parametrize("shuffle", [False, True, "block", "buffer"])
@pytest.mark.parametrize("on_uneven", ["drop", "pad", "allow"])
def test_the_number_of_rows_is_known(options: dict[str, Any], shuffle: Any, on_uneven: str) -> None:
    seed = {"seed": 7, "shuffle_buffer": 96} if shuffle else {"seed": None}
    reader = numbers(batch_size=32, shuffle=shuffle, shard_by="batch", on_uneven=on_uneven, **seed, **options)
    source = fastpipe.ray.dataset(reader)._logical_plan.dag.datasource
    rows = [len(batch["id"]) for batch in reader]
    tasks = [task.metadata.num_rows for task in source.get_read_tasks(1)]
    assert tasks == [sum(rows[start:stop]) for start, stop in pairwise([0, *source._ends])]
    assert sum(tasks) == sum(rows)


def test_operations_on_a_dataset_keep_the_order() -> None:
    reader = numbers()
    ids = [row for batch in reader for row in batch["id"].tolist()]
    reader.set_epoch(0)
    doubled = fastpipe.ray.dataset(reader, num_blocks=20).map_batches(lambda batch: {"id": batch["id"] * 2})
    assert [row["id"] for row in doubled.take_all()] == [2 * row for row in ids]
    assert [row["id"] for row in fastpipe.ray.dataset(reader).take(25)] == ids[:25]
    whole = fastpipe.ray.dataset(reader, num_blocks=20).materialize()
    assert whole.num_blocks() == 20
    parts = [
        [row for batch in part.iter_batches(batch_size=None) for row in batch["id"].tolist()] for part in whole.split(2)
    ]
    assert parts[0] + parts[1] == ids


def test_a_dataset_of_a_service() -> None:
    with fastpipe.ray.serve(numbers(), num_servers=1, actor_options={"num_cpus": 0}) as service:
        dataset = fastpipe.ray.dataset(service.connect(), epoch=1, num_cpus=0.5)
        reader = numbers()
        reader.set_epoch(1)
        assert table_of(dataset).equals(pa.table(reader))


def test_a_reader_without_rows() -> None:
    reader = numbers(batch_size=2000, drop_last=True)
    dataset = fastpipe.ray.dataset(reader)
    assert dataset.count() == 0
    assert dataset.schema().names == ["id"]


def test_unsupported_readers_are_refused() -> None:
    reader = numbers()
    next(iter(reader))
    again = numbers()
    again.load_state_dict(reader.state_dict())
    with pytest.raises(fastpipe.errors.UnsupportedError, match="has loaded a state"):
        fastpipe.ray.dataset(again)
    with pytest.raises(fastpipe.errors.UnsupportedError, match="pass the underlying reader"):
        fastpipe.ray.dataset(numbers().rebatch(batch_size=7))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"reader must be a fastpipe\.Reader"):
        fastpipe.ray.dataset([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_blocks must be at least 1"):
        fastpipe.ray.dataset(reader, num_blocks=0)
    with pytest.raises(ValueError, match="epoch must be between"):
        fastpipe.ray.dataset(reader, epoch=-1)
    endless = fastpipe.ray.dataset(numbers(epochs=None))
    assert endless.count() == 1000


# Ray Train.


def train(config: dict[str, Any]) -> None:
    """Trains some steps and reports the state at step 5. Then fails if the config says so, else trains to the end."""
    import ray.train

    reader = fastpipe.from_arrays({"id": np.arange(1000)}, batch_size=10, shuffle=True, seed=7)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            reader.load_state_dict(json.loads((Path(folder) / "state.json").read_text()))
    share = fastpipe.ray.shard(reader)
    rows: list[int] = []

    def keep(rows: list[int]) -> None:
        path = Path(config["rows"]) / f"{share.rank}-of-{share.world_size}"
        path.write_text("".join(f"{row}\n" for row in rows))

    for step, batch in enumerate(share, 1):
        rows += batch["id"].tolist()
        if config["fails"] and step == 5:
            # Saves before reporting to Ray: when one worker fails, Ray ends the others.
            keep(rows)
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "state.json").write_text(json.dumps(share.state_dict()))
                made = ray.train.Checkpoint.from_directory(folder) if share.rank == 0 else None
                ray.train.report({"step": step}, checkpoint=made)
            # Ray can resume from a checkpoint only after its controller has recorded it.
            snapshot = Path(config["storage"], "run", "checkpoint_manager_snapshot.json")
            assert wait_until(snapshot.exists, 60.0)
            raise RuntimeError("a machine went")
    keep(rows)


def test_training_resumes_with_another_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.train", exc_type=ImportError)
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")

    def fit(workers: int, *, fails: bool) -> Any:
        trainer = DataParallelTrainer(
            train,
            train_loop_config={"rows": str(tmp_path), "storage": str(tmp_path / "storage"), "fails": fails},
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.25}),
            # Ray Train resumes a run of the same name from its last checkpoint.
            run_config=RunConfig(name="run", storage_path=str(tmp_path / "storage")),
        )
        return trainer.fit()

    with pytest.raises(TrainingFailedError, match="a machine went"):
        fit(2, fails=True)
    fit(3, fails=False)
    files = sorted(tmp_path.glob("*-of-*"))
    assert [path.name for path in files] == ["0-of-2", "0-of-3", "1-of-2", "1-of-3", "2-of-3"]
    rows = [[int(row) for row in path.read_text().split()] for path in files]
    assert [len(of) for of in rows] == [50, 300, 50, 300, 300]
    assert sorted(row for of in rows for row in of) == list(range(1000))


def test_shard_requires_a_ray_train_worker() -> None:
    pytest.importorskip("ray.train", exc_type=ImportError)
    with pytest.raises(RuntimeError, match="train"):
        fastpipe.ray.shard(numbers())
    with pytest.raises(fastpipe.errors.UnsupportedError, match="shard the underlying reader"):
        fastpipe.ray.shard(numbers().rebatch(batch_size=7))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"reader must be a fastpipe\.Reader"):
        fastpipe.ray.shard(3)  # type: ignore[arg-type]
