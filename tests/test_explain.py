"""The text of `explain` for a pass, in the terms of its source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import fastpipe
import samples
from fastpipe._reader.dataset import Dataset, SourceWording
from fastpipe._reader.explain import explain


def data_of(source: str, tmp_path: Any) -> Dataset:
    if source == "avro":
        made = samples.write(tmp_path, [samples.blocks_of(20)]).read(batch_size=8)
    elif source == "interactions":
        made = fastpipe.recsys.read_interactions(
            fastpipe.recsys.Interactions.from_arrays([1, 1, 2], [3, 4, 5]), batch_size=2, seed=1
        )
    elif source == "units":
        table = fastpipe.to_arrow({"x": np.arange(8)})

        class Whole:
            schema = table.schema
            rows = (8,)

            def read(self, unit: int) -> Any:
                return table

            def fingerprint(self) -> str:
                return "whole"

        made = fastpipe.read_units(Whole(), batch_size=2)
    else:
        made = fastpipe.from_arrays({"x": np.arange(8)}, batch_size=2)
    return made._data


def stats_of(
    work: str | None, *, reopened: int = 0, fetching: float = 0.0, away: float = 0.0, waited: float = 1.0
) -> dict[str, Any]:
    """Returns the statistics of a pass of 2 seconds whose work is mainly of one kind, or is done by servers (None)."""
    seconds = {"elapsed": 2.0, "fetching": fetching, "waiting_for_consumer": away, "consumer_waiting": waited}
    if work is not None:
        seconds |= {work: 0.5 if fetching else 2.0, "planning": 0.1}
    return {
        "batches": 4,
        "rows": 8,
        "rows_reopened": reopened,
        "bytes_delivered": 10_000_000,
        "seconds": seconds,
        "threads": {"chosen": 1, "available": 1},
    }


@pytest.mark.parametrize(
    ("source", "work", "bound", "advice"),
    [
        ("avro", "reading", "read-bound", "a codec such as zstandard"),
        ("avro", "decompressing", "decompression-bound", "snappy or zstandard"),
        ("avro", "indexing", "index-bound", "Records must be located"),
        ("avro", "skipping", "skip-bound", "Threads share blocks that are large"),
        ("interactions", "sampling", "sampling-bound", "Fewer negatives"),
        ("interactions", "gathering", "gather-bound", None),
        ("table", "opening", "open-bound", None),
        ("table", "assembling", "assembly-bound", "Ragged and sparse values"),
        ("units", "fetching", "fetch-bound", "`num_fetches`"),
        ("table", "translating", "translating-bound", None),
    ],
)
def test_each_source_has_its_own_advice(source: str, work: str, bound: str, advice: str | None, tmp_path: Any) -> None:
    data = data_of(source, tmp_path)
    fetched = work == "fetching"
    stats = stats_of("opening", fetching=1.8) if fetched else stats_of(work)
    said = explain(stats, data).splitlines()
    assert said[0].startswith(bound)
    assert [line for line in said[2:] if advice is not None and advice in line] == said[2:]
    assert len(said) == (2 if advice is None else 3)


@pytest.mark.parametrize(
    ("source", "units"), [("avro", "blocks"), ("interactions", "shards"), ("table", "units"), ("units", "units")]
)
def test_units_have_the_name_of_the_source(source: str, units: str, tmp_path: Any) -> None:
    data = data_of(source, tmp_path)
    assert f"50% of the rows are in {units} that were opened twice" in explain(stats_of("planning", reopened=4), data)


def test_sources_have_a_default_wording() -> None:
    assert SourceWording().units == "units"
    assert not SourceWording().advice


@pytest.mark.parametrize(
    ("work", "fetching", "away", "waited", "verdict"),
    [
        ("planning", 0.0, 0.0, 0.0, "not a bottleneck: the consumer waits for the reader 0% of the time, on 1 thread."),
        ("gathering", 0.0, 1.9, 0.09, "not a bottleneck: the consumer waits for the reader 4% of the time"),
        ("gathering", 0.0, 0.0, 0.09, "not a bottleneck: the consumer waits for the reader 4% of the time"),
        ("gathering", 0.0, 1.8, 0.11, "consumer-bound: the reader waits for the consumer 90% of the time"),
        ("gathering", 0.0, 0.0, 0.11, "gather-bound on 1 thread: the consumer waits for the reader 6% of the time."),
        ("gathering", 1.8, 1.9, 0.0, "not a bottleneck: the consumer waits for the reader 0% of the time"),
        (None, 0.0, 1.9, 0.0, "not a bottleneck: the consumer waits for servers 0% of the time."),
        (None, 0.0, 1.8, 0.2, "consumer-bound: servers make the batches and wait for the consumer 90% of the time."),
        (None, 0.0, 0.2, 1.8, "server-bound: the consumer waits for servers 90% of the time; 5 MB/s arrive."),
    ],
)
def test_nothing_is_a_bottleneck_if_the_consumer_hardly_waits(
    work: str | None, fetching: float, away: float, waited: float, verdict: str, tmp_path: Any
) -> None:
    stats = stats_of(work, reopened=4, fetching=fetching, away=away, waited=waited)
    said, *details = explain(stats, data_of("table", tmp_path)).splitlines()
    assert said.startswith(verdict)
    if work is None:
        assert not details
    elif verdict.startswith("not a bottleneck"):
        bound = {"planning": "planning", "gathering": "fetch" if fetching else "gather"}[work]
        assert said.endswith(f"With a faster consumer, the pass would be {bound}-bound.")
        assert len(details) == 1, "there is no advice"


def test_a_pass_without_any_time_has_no_bottleneck(tmp_path: Any) -> None:
    stats = stats_of("planning", waited=0.0)
    stats["seconds"]["elapsed"] = 0.0
    assert explain(stats, data_of("table", tmp_path)).startswith("not a bottleneck: ")
