"""Metrics of readers: what a reader yielded, how long the program waited, and what metrics libraries report."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import samples
from every_source import Make, make
from fastpipe import metrics
from fastpipe._fastpipe import ReaderTotals
from fastpipe._reader.passes import passes_of
from processes import outputs, run, together

# The fixture that creates a reader of each source.
__all__ = ["make"]

WORK = ("reading", "opening", "indexing", "skipping", "decoding", "assembling", "planning")


def totals(reader: Any) -> dict[str, Any]:
    return passes_of(reader).totals.read()


def nbytes(node: Any) -> int:
    if isinstance(node, np.ndarray):
        # `dense_shape` and similar parts are computed on access and don't belong to the memory of the batch.
        return node.nbytes
    parts = [part for name, part in node.items() if name != "valid"] if isinstance(node, dict) else []
    if isinstance(node, fastpipe.batch.Form):
        parts = [getattr(node, name) for name in node._parts if name != "dense_shape"]
    return sum(map(nbytes, parts))


class Tally:
    """Counts the batches that a program receives."""

    def __init__(self) -> None:
        self.batches = self.rows = self.bytes = 0

    def over(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for batch in batches:
            self.batches += 1
            self.rows += int(batch["valid"].sum()) if "valid" in batch else len(next(iter(batch.values())))
            self.bytes += nbytes(batch)
            yield batch

    def agrees(self, reader: fastpipe.Reader) -> bool:
        found = totals(reader)
        assert {name: found[name] for name in vars(self)} == vars(self)
        assert sum(found["waits"]) == self.batches
        return True


def numbers(**options: Any) -> fastpipe.Reader:
    """Returns a reader of 100 rows of 8 bytes."""
    return fastpipe.from_arrays({"id": np.arange(100)}, **{"batch_size": 10, **options})


# --- Counts ---


def test_totals_count_yielded_batches(make: Make) -> None:
    reader, seen = make(batch_size=32, shuffle=True, seed=3), Tally()
    assert seen.agrees(reader)
    for _ in seen.over(reader):
        assert seen.agrees(reader)
    assert totals(reader)["epoch"] == 0
    # A pass that is closed early, no matter how many more batches were prepared.
    for step, _ in enumerate(seen.over(reader)):
        if step == 2:
            break
    reader.close()
    assert seen.agrees(reader)
    assert totals(reader)["epoch"] == 1
    # This reader resumes, and so does another reader, which has separate totals.
    reader.load_state_dict(reader.state_dict())
    again, other = pickle.loads(pickle.dumps(reader)), Tally()
    assert [len(list(seen.over(reader))), len(list(other.over(again)))] == [5, 5]
    assert seen.agrees(reader)
    assert other.agrees(again)
    # Looking at a batch doesn't count as reading it.
    reader.batch_at(0)
    reader.explain()
    assert seen.agrees(reader)


@pytest.mark.parametrize("on_uneven", ["drop", "pad", "allow"])
def test_ranks_have_separate_totals(on_uneven: str) -> None:
    ranks = [
        numbers(batch_size=8, shuffle=True, seed=1, on_uneven=on_uneven, rank=rank, world_size=2) for rank in range(2)
    ]
    for reader in ranks:
        seen = Tally()
        for _ in range(2):
            list(seen.over(reader))
        assert seen.agrees(reader)
    lost = {"drop": 4, "pad": 0, "allow": 0}[on_uneven]
    assert [totals(reader)["rows_left_out"] for reader in ranks] == [lost, lost]
    assert sum(totals(reader)["rows"] for reader in ranks) == 2 * (100 - lost)
    assert [passes_of(reader).totals.rank for reader in ranks] == [0, 1]


def test_rows_left_out_are_reported() -> None:
    with pytest.warns(fastpipe.errors.RowsLeftOutWarning):
        reader = numbers(batch_size=64, drop_last=True)
    assert totals(reader)["rows_left_out"] == 0, "no pass has begun"
    assert (len(list(reader)), totals(reader)["rows_left_out"]) == (1, 36)


def test_shards_of_adapters_count_for_the_reader() -> None:
    reader = numbers()
    share = passes_of(reader).share(2, 1)
    assert len(list(share.start().batches)) == totals(reader)["batches"] == 5
    assert passes_of(reader).totals.rank == 1
    # A shard that the user creates is a separate reader.
    assert totals(reader.shard(2, 0))["batches"] == 0


def test_work_is_counted_over_passes(tmp_path: Path) -> None:
    reader = samples.write(tmp_path, [[20] * 6, [20] * 6], "deflate").read(batch_size=7, num_threads=2)
    read, decoding = 0, 0.0
    for stop in (None, 3, None):
        for step, _ in enumerate(reader):
            if step == stop:
                break
        reader.close()
        stats = reader.stats()
        read += stats["bytes_read"]
        decoding += stats["seconds"]["decoding"]
        found = totals(reader)
        assert found["read_bytes"] == read
        assert found["work_seconds"]["decoding"] == pytest.approx(decoding)
        assert tuple(found["work_seconds"]) == WORK


def test_totals_never_decrease(tmp_path: Path) -> None:
    reader = samples.write(tmp_path, [[20] * 6, [20] * 6]).read(batch_size=7, shuffle=True, seed=1, num_threads=2)
    found, ended = [totals(reader)], threading.Event()

    def look() -> None:
        while not ended.is_set():
            found.append(totals(reader))

    def read() -> None:
        for epoch in range(20):
            for step, _ in enumerate(reader):
                if step == epoch:
                    break
        ended.set()

    together([threading.Thread(target=look), threading.Thread(target=read)])
    for name in ("batches", "rows", "bytes", "read_bytes", "wait_seconds"):
        values = [one[name] for one in found]
        assert values == sorted(values), name
    decoding = [one["work_seconds"]["decoding"] for one in found]
    assert decoding == sorted(decoding)


def test_several_threads_draw_from_one_pass() -> None:
    reader = numbers(batch_size=1)
    batches = iter(reader)
    together([threading.Thread(target=lambda: list(batches)) for _ in range(4)])
    assert (totals(reader)["batches"], sum(totals(reader)["waits"])) == (100, 100)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_counts_from_zero() -> None:
    reader = numbers()
    scalars = metrics.Scalars(reader)
    assert len(list(reader)) == 10
    scalars()
    child = os.fork()
    if child == 0:
        code = 3
        try:
            code = 0 if totals(reader)["batches"] == 0 else 4
            next(iter(reader))
            found = scalars()
            code = code or (0 if (found["fastpipe/batches"], found["fastpipe/wait_fraction"] > 0) == (1, True) else 5)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert totals(reader)["batches"] == 10


def test_batches_of_servers_are_counted() -> None:
    pytest.importorskip("pyarrow.flight")
    with numbers(shuffle=True, seed=1).serve() as server:
        remote, seen = fastpipe.connect(server.url), Tally()
        for _ in range(2):
            list(seen.over(remote))
        assert seen.agrees(remote)
        assert totals(remote)["read_bytes"] == 0


def test_converted_batches_are_counted() -> None:
    reader = numbers()
    assert [len(batch["id"]) for batch in reader.rebatch(64)] == [64, 36]
    assert totals(reader)["batches"] == 10
    pa = pytest.importorskip("pyarrow")
    assert pa.table(reader).num_rows == 100
    assert (totals(reader)["rows"], totals(reader)["bytes"]) == (200, 1600)


def test_batches_of_leases_are_counted(tmp_path: Path) -> None:
    reader = numbers(shuffle=True, seed=1)
    with reader.lease(f"sqlite:///{tmp_path / 'ledger.db'}", stretch=3) as worker:
        for _ in worker:
            worker.commit()
    assert (totals(reader)["batches"], totals(reader)["rows"]) == (10, 100)


def test_batches_of_adapters_are_counted() -> None:
    torch = pytest.importorskip("torch")
    import fastpipe.torch as fptorch

    reader = numbers()
    dataset = fptorch.dataset(reader)
    assert len(list(torch.utils.data.DataLoader(dataset, batch_size=None))) == 10
    assert totals(reader)["batches"] == totals(dataset)["batches"] == 10
    pytest.importorskip("jax")
    from fastpipe import jax

    assert len(list(jax.iterator(reader))) == 10
    assert totals(reader)["batches"] == 20


def test_batches_of_tensorflow_are_counted() -> None:
    pytest.importorskip("tensorflow")
    from fastpipe import tf

    reader = numbers()
    assert len(list(tf.dataset(reader))) == 10
    assert (totals(reader)["batches"], totals(reader)["bytes"]) == (10, 800)


# --- waits ---


def counts_of(waits: np.ndarray) -> list[int]:
    bounds = ReaderTotals.wait_bounds()
    return np.bincount(np.searchsorted(bounds, waits, "right"), minlength=len(bounds) + 1).tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [1, 2, 10, 1000])
def test_quantiles_are_within_a_bucket_of_numpy(seed: int, number: int) -> None:
    random = np.random.default_rng(seed)
    waits = np.exp(random.uniform(np.log(1e-7), np.log(100.0), number))
    if seed == 4:
        waits = np.full(number, waits[0])
    bounds = np.array([0.0, *ReaderTotals.wait_bounds(), np.inf])
    for quantile in (0.0, 0.01, 0.5, 0.95, 0.99, 1.0):
        exact = np.quantile(waits, quantile, method="inverted_cdf")
        bucket = np.searchsorted(bounds, exact, "right")
        assert bounds[bucket - 1] <= metrics._quantile(counts_of(waits), quantile) <= bounds[bucket]
    assert metrics._quantile(counts_of(np.array([1e6])), 0.5) == bounds[-2], "longer waits than the last bucket's bound"


class Slow:
    """Units of one row, each with a delay before its row is returned."""

    def __init__(self, seconds: list[float]) -> None:
        pa = pytest.importorskip("pyarrow")
        self.seconds, self.rows = seconds, [1] * len(seconds)
        self.table = pa.table({"unit": np.arange(len(seconds))})
        self.schema = self.table.schema

    def read(self, unit: int) -> Any:
        time.sleep(self.seconds[unit])
        return self.table.slice(unit, 1)

    def fingerprint(self) -> str:
        return "slow"


def test_waits_are_measured_in_the_program() -> None:
    seconds = [0.001] * 10 + [0.03] * 10
    reader = fastpipe.read_units(Slow(seconds), batch_size=1, num_threads=1, prefetch=1)
    batches, own = iter(reader), []
    for _ in seconds:
        began = time.perf_counter()
        next(batches)
        own.append(time.perf_counter() - began)
    found = totals(reader)
    assert found["fetch_seconds"] >= sum(seconds)
    # The time of each call is little more than the wait.
    assert 0.5 * sum(own) < found["wait_seconds"] < sum(own)
    for quantile in (0.1, 0.5, 0.95):
        assert metrics._quantile(found["waits"], quantile) <= 1.25 * np.quantile(own, quantile, method="inverted_cdf")


# --- Prometheus ---


def scraped(registry: Any) -> dict[tuple[str, str], float]:
    """Returns the value of each sample by its name and labels, after parsing a scrape in both text formats."""
    import prometheus_client.exposition as plain
    import prometheus_client.openmetrics.exposition as open_metrics
    import prometheus_client.openmetrics.parser as open_parser
    import prometheus_client.parser as plain_parser

    found: list[dict[tuple[str, str], float]] = []
    for write, read in ((plain, plain_parser), (open_metrics, open_parser)):
        families = list(read.text_string_to_metric_families(write.generate_latest(registry).decode()))
        assert all(family.documentation for family in families)
        samples = [sample for family in families for sample in family.samples]
        labels = [",".join(f"{name}={value}" for name, value in sorted(sample.labels.items())) for sample in samples]
        found.append({(sample.name, of): sample.value for sample, of in zip(samples, labels, strict=True)})
    assert found[0] == found[1]
    return found[0]


def test_prometheus_reads_totals() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    train, valid = numbers(), numbers(batch_size=30, rank=1, world_size=2)
    metrics.prometheus({"train": train, "valid": valid}, registry=registry, labels={"job": "demo"})
    assert scraped(registry)["fastpipe_batches_total", "job=demo,rank=0,reader=train"] == 0
    for _ in range(2):
        list(train)
    list(valid)
    samples = scraped(registry)
    for labels, reader in (("job=demo,rank=0,reader=train", train), ("job=demo,rank=1,reader=valid", valid)):
        found = totals(reader)
        for name in ("batches", "rows", "bytes", "read_bytes", "fetch_seconds"):
            assert samples[f"fastpipe_{name}_total", labels] == found[name]
        for name in ("epoch", "rows_left_out"):
            assert samples[f"fastpipe_{name}", labels] == found[name]
        for activity in WORK:
            of_activity = f"activity={activity},{labels}"
            assert samples["fastpipe_work_seconds_total", of_activity] == found["work_seconds"][activity]
        assert samples["fastpipe_wait_seconds_count", labels] == found["batches"]
        assert samples["fastpipe_wait_seconds_sum", labels] == found["wait_seconds"]
        bounds = np.array(ReaderTotals.wait_bounds())
        prefix, middle, suffix = labels.partition(",rank")
        buckets = {
            float(key.removeprefix(f"{prefix},le=").removesuffix(middle + suffix)): value
            for (name, key), value in samples.items()
            if name == "fastpipe_wait_seconds_bucket" and key.endswith(middle + suffix)
        }
        assert len(buckets) == 29
        assert list(buckets) == sorted(buckets)
        for le, count in buckets.items():
            assert count == sum(found["waits"][: np.searchsorted(bounds, le, "right")]) or le == np.inf
        assert buckets[np.inf] == found["batches"]
    assert (samples["fastpipe_rows_total", "job=demo,rank=0,reader=train"], totals(train)["rows"]) == (200, 200)


def test_prometheus_uses_its_default_registry() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    reader = numbers()
    collector = metrics.prometheus(reader)
    try:
        list(reader)
        read = prometheus_client.REGISTRY.get_sample_value
        assert read("fastpipe_rows_total", {"reader": "", "rank": "0"}) == 100
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            metrics.prometheus(numbers())
    finally:
        prometheus_client.REGISTRY.unregister(collector)
    assert read("fastpipe_rows_total", {"reader": "", "rank": "0"}) is None


def test_labels() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    metrics.prometheus(numbers(), registry=registry, labels={"rank": 5})
    assert ("fastpipe_batches_total", "rank=5,reader=") in scraped(registry)
    for name in ("reader", "activity", "le", "quantile"):
        with pytest.raises(ValueError, match=f"fastpipe already sets the label '{name}'"):
            metrics.prometheus(numbers(), registry=registry, labels={name: "x"})
    metrics.prometheus({}, registry=prometheus_client.CollectorRegistry())


def test_registering_does_not_keep_the_reader_alive() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    registry, reader = prometheus_client.CollectorRegistry(), numbers()
    metrics.prometheus(reader, registry=registry)
    list(reader)
    dead = weakref.ref(reader)
    del reader
    gc.collect()
    assert dead() is None
    assert scraped(registry)["fastpipe_rows_total", "rank=0,reader="] == 100


# --- OpenTelemetry ---


@pytest.fixture
def observed() -> Iterator[tuple[Any, Callable[[], dict[str, list[tuple[dict[str, Any], float]]]]]]:
    """Returns an OpenTelemetry meter and a function that returns its observations by the name of their instrument."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    exporter = InMemoryMetricReader()
    provider = MeterProvider([exporter])

    def collect() -> dict[str, list[tuple[dict[str, Any], float]]]:
        data = exporter.get_metrics_data()
        found = {}
        for one in data.resource_metrics[0].scope_metrics[0].metrics if data is not None else ():
            assert one.description
            assert one.unit
            found[one.name] = [(dict(point.attributes), point.value) for point in one.data.data_points]
            assert getattr(one.data, "is_monotonic", False) == (one.name.split(".")[1] not in GAUGES)
        return found

    yield provider.get_meter("test"), collect
    provider.shutdown()


GAUGES = {"epoch", "rows_left_out", "wait_quantile_seconds"}


def test_opentelemetry_reads_totals(observed: Any) -> None:
    meter, collect = observed
    train, valid = numbers(), numbers(batch_size=30, rank=1, world_size=2)
    metrics.opentelemetry({"train": train, "valid": valid}, meter=meter, attributes={"job": "demo"})
    assert [value for _, value in collect()["fastpipe.batches"]] == [0, 0]
    for _ in range(2):
        list(train)
    found = collect()
    assert "fastpipe.wait_quantile_seconds" in found
    assert [labels["reader"] for labels, _ in found["fastpipe.wait_quantile_seconds"]] == ["train"] * 3
    list(valid)
    found = collect()
    own = [{"reader": "train", "rank": "0", "job": "demo"}, {"reader": "valid", "rank": "1", "job": "demo"}]
    for name in ("batches", "rows", "bytes", "read_bytes", "fetch_seconds", "wait_seconds", "epoch", "rows_left_out"):
        assert found[f"fastpipe.{name}"] == [
            (labels, totals(reader)[name]) for labels, reader in zip(own, (train, valid), strict=True)
        ]
    assert found["fastpipe.work_seconds"] == [
        (labels | {"activity": activity}, seconds)
        for labels, reader in zip(own, (train, valid), strict=True)
        for activity, seconds in totals(reader)["work_seconds"].items()
    ]
    # Only the second reader waited since the previous collection.
    waits = totals(valid)["waits"]
    assert found["fastpipe.wait_quantile_seconds"] == [
        (own[1] | {"quantile": str(quantile)}, metrics._quantile(waits, quantile)) for quantile in (0.5, 0.95, 0.99)
    ]


# --- loggers ---


def test_scalars_cover_the_time_since_the_previous_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reader = numbers()
    scalars = metrics.Scalars(reader)
    list(reader)
    now += 2.0
    first, before = scalars(), totals(reader)
    assert all(type(value) is float for value in first.values())
    assert {name: first[f"fastpipe/{name}"] for name in ("batches", "rows", "epoch", "rows_left_out")} == {
        "batches": 10,
        "rows": 100,
        "epoch": 0,
        "rows_left_out": 0,
    }
    rates = {name: first[f"fastpipe/{name}_per_second"] for name in ("batches", "rows", "bytes", "read_bytes")}
    assert rates == {"batches": 5, "rows": 50, "bytes": 400, "read_bytes": before["read_bytes"] / 2}
    assert first["fastpipe/wait_fraction"] == before["wait_seconds"] / 2
    assert first["fastpipe/busy_threads"] == pytest.approx(sum(before["work_seconds"].values()) / 2)
    assert first["fastpipe/decoding_threads"] == before["work_seconds"]["decoding"] / 2
    assert first["fastpipe/open_fetches"] == before["fetch_seconds"] / 2
    for name, quantile in {"p50": 0.5, "p95": 0.95, "p99": 0.99}.items():
        assert first[f"fastpipe/wait_{name}_seconds"] == metrics._quantile(before["waits"], quantile)
    now += 1.0
    idle = scalars()
    assert first.keys() - idle.keys() == {f"fastpipe/wait_{name}_seconds" for name in ("p50", "p95", "p99")}
    assert (idle["fastpipe/batches"], idle["fastpipe/batches_per_second"]) == (10, 0)
    for _, batch in zip(range(3), reader, strict=False):
        assert len(batch["id"]) == 10
    now += 0.5
    assert scalars()["fastpipe/rows_per_second"] == 60


def test_scalars_of_several_readers() -> None:
    train, valid = numbers(), numbers()
    scalars = metrics.Scalars({"train": train, "valid": valid}, prefix="data/")
    list(valid)
    found = scalars()
    assert (found["data/train/rows"], found["data/valid/rows"]) == (0, 100)


# --- mistakes ---


@pytest.mark.parametrize("wrong", [1, None, "train", [], fastpipe.Rebatcher([], 2)], ids=repr)
def test_arguments_that_are_not_readers_are_refused(wrong: Any) -> None:
    for readers in (wrong, {"train": numbers(), "other": wrong}):
        with pytest.raises(TypeError, match=r"reader must be a fastpipe\.Reader; got"):
            metrics.Scalars(readers)


def test_errors_name_missing_libraries() -> None:
    script = """
        import sys
        sys.modules["prometheus_client"] = sys.modules["opentelemetry"] = None
        import numpy as np, fastpipe
        reader = fastpipe.from_arrays({"id": np.arange(100)}, batch_size=10)
        scalars = fastpipe.metrics.Scalars(reader)
        print(len(list(reader)), scalars()["fastpipe/rows"])
        for function in (fastpipe.metrics.prometheus, fastpipe.metrics.opentelemetry):
            try:
                function(reader)
            except ImportError as error:
                print(error)
    """
    (printed,) = outputs(run(script))
    assert printed.splitlines() == [
        "10 100.0",
        "Prometheus metrics require prometheus-client: pip install 'fastpipe-data[metrics]'",
        "OpenTelemetry metrics require opentelemetry-api: pip install opentelemetry-api",
    ]
