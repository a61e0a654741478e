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


def stats_of(work: str, *, reopened: int = 0, fetching: float = 0.0) -> dict[str, Any]:
    """Returns the statistics of a pass whose bottleneck is one kind of work."""
    seconds = {"elapsed": 2.0, "fetching": fetching, "waiting_for_consumer": 0.0, "consumer_waiting": 1.0}
    seconds |= {work: 0.5 if fetching else 2.0, "planning": 0.1}
    return {
        "batches": 4,
        "rows": 8,
        "rows_reopened": reopened,
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
