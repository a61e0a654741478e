"""Counts of the keys that `on_unknown="drop"` drops, compared with plain Python, for every source of lists."""

from __future__ import annotations

import logging
import pickle
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import wire
from every_source import Slices
from fastpipe import DenseSpec, VocabularySpec

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

Words = list[str | None] | None
"""A row: a list of words. Rows and words may be null."""

KNOWN = ["a", "ä", "long " * 30]
texts = st.sampled_from(["", "a", "b", "ä", *KNOWN[2:]])
rows_of_words = st.lists(st.none() | st.lists(st.none() | texts, max_size=50), min_size=1, max_size=12)


def spec(field: str = "words", **options: Any) -> VocabularySpec:
    return VocabularySpec(KNOWN, field=field, on_unknown="drop", **{"on_null": "mask"} | options)


def table(rows: list[Words], ty: Any = None) -> Any:
    words = pa.array(rows, ty or pa.list_(pa.string()))
    return pa.table({"id": np.arange(len(rows)), "words": words})


def entry_of(word: str | None) -> dict[str, Any] | None:
    return None if word is None else {"name": word, "term": None, "value": 1.0}


def source(kind: str, rows: list[Words], folder: Path) -> Any:
    """Writes rows of words and returns a function that reads them, which takes features and options."""
    if kind == "avro":
        fields = {"id": "long", "words": ["null", wire.list_of(["null", "string"])]}
    elif kind == "avro strings":
        # Strings that can't be null are looked up in groups.
        fields = {"id": "long", "words": ["null", wire.list_of("string")]}
    elif kind == "avro enums":
        symbols = {"type": "enum", "name": "E", "symbols": ["a", "b", "c"]}
        fields = {"id": "long", "words": ["null", wire.list_of(["null", symbols])]}
    elif kind == "avro bag":
        entry = wire.record("NTV", name="string", term=["null", "string"], value="float")
        fields = {"id": "long", "words": ["null", wire.list_of(["null", entry])]}
    else:
        return column_source(kind, rows, folder)
    records: list[Any] = [{"id": i, "words": row} for i, row in enumerate(rows)]
    if kind == "avro bag":
        records = [{"id": i, "words": row and [entry_of(word) for word in row]} for i, row in enumerate(rows)]
    with (folder / "a.avro").open("wb") as file:
        fastavro.writer(file, wire.record("R", **fields), records, sync_interval=100)
    return lambda **options: fastpipe.read_avro(folder / "a.avro", **options)


def column_source(kind: str, rows: list[Words], folder: Path) -> Any:
    if kind == "parquet":
        parquet.write_table(table(rows), folder / "a.parquet", row_group_size=3)
        return lambda **options: fastpipe.read_parquet(folder / "a.parquet", **options)
    if kind == "arrow file":
        feather = pytest.importorskip("pyarrow.feather")
        feather.write_feather(table(rows), folder / "a.feather", chunksize=3)
        return lambda **options: fastpipe.read_arrow(folder / "a.feather", **options)
    if kind == "duckdb":
        duckdb = pytest.importorskip("duckdb")
        with duckdb.connect(str(folder / "a.db")) as connection:
            words = table(rows)
            connection.register("given", words)
            connection.execute("CREATE TABLE t AS SELECT * FROM given")
        uri = f"duckdb:///{folder / 'a.db'}"
        return lambda **options: fastpipe.read_sql("SELECT * FROM t", uri, **options)
    if kind == "units":
        return lambda **options: fastpipe.read_units(Slices(table(rows), 2, table(rows).schema), **options)
    types = {
        "arrow": None,
        "arrow views": pa.list_view(pa.string()),
        "arrow dictionary": pa.large_list(pa.dictionary(pa.int8(), pa.string())),
    }
    made = table(rows, types[kind])
    # Slices have several record batches, and offsets that don't begin at 0.
    parts = pa.concat_tables([made.slice(0, 2), made.slice(2)])
    return lambda **options: fastpipe.from_arrow(parts, **options)


AVRO = ["avro", "avro strings", "avro enums", "avro bag"]
COLUMNS = ["parquet", "arrow file", "arrow", "arrow views", "arrow dictionary", "units", "duckdb"]


def allowed(kind: str, rows: list[Words]) -> list[Words]:
    """Returns the rows without nulls or symbols that the source can't store."""
    if kind == "avro enums":
        return [row and [word if word in ("a", "b", None) else "c" for word in row] for row in rows]
    if kind in ("avro strings", "avro bag"):
        # Entries of bags must not be null, except with on_null="fill".
        return [row and [word for word in row if word is not None] for row in rows]
    return rows


def counts(rows: list[Words], known: list[str]) -> dict[str, int]:
    keys = [word for row in rows for word in row or [] if word is not None]
    return {"read": len(keys), "dropped": sum(word not in known for word in keys)}


def expected(rows: list[Words], known: list[str], feature: str = "words") -> dict[str, Any]:
    found = counts(rows, known)
    return {feature: found} if found["read"] else {}


def keys_of(kind: str) -> dict[str, int]:
    """Returns the vocabulary in the form of the source's keys. The keys of bags end with a separator."""
    return {f"{key}\x01" if kind == "avro bag" else key: i for i, key in enumerate(KNOWN)}


@pytest.mark.parametrize("kind", [*AVRO, *COLUMNS])
@settings(max_examples=12, deadline=None)
@given(
    rows=rows_of_words,
    batch_size=st.integers(1, 13),
    order=st.sampled_from(
        [
            {},
            {"num_threads": 3},
            {"num_threads": 3, "shuffle": True, "shuffle_buffer": 5, "seed": 1},
            {"shuffle": "block", "shuffle_buffer": 5, "seed": 1},
            {"num_threads": 2, "shuffle": "buffer", "shuffle_buffer": 5, "seed": 1},
        ]
    ),
    stop=st.integers(1, 13),
)
def test_counts_match_plain_python(
    kind: str, rows: list[Words], batch_size: int, order: dict[str, Any], stop: int
) -> None:
    rows = allowed(kind, rows)
    vocabulary = VocabularySpec(keys_of(kind), on_unknown="drop", on_null="mask")
    features = {"id": DenseSpec((), "int64"), "words": vocabulary}
    with tempfile.TemporaryDirectory() as folder:
        reader = source(kind, rows, Path(folder))(features=features, batch_size=batch_size, **order)
        with reader:
            seen: list[Words] = []
            for batch in reader:
                seen += [rows[i] for i in batch["id"]]
                assert reader.stats()["keys"] == expected(seen, KNOWN)
            assert len(seen) == len(rows)
            # After an early exit, the counts cover the batches that were yielded.
            seen = []
            for step, batch in enumerate(reader, 1):
                seen += [rows[i] for i in batch["id"]]
                if step == stop:
                    break
            assert reader.stats()["keys"] == expected(seen, KNOWN)


NESTED = [[["a", "b"], None, ["b", None]], None, [[], ["b"]], [None], []]


@pytest.mark.parametrize("known", [["a"], ["a", "b"], ["c"]])
@pytest.mark.parametrize("kind", ["avro", "arrow", "fixed"])
def test_lists_in_lists(kind: str, known: list[str], tmp_path: Path) -> None:
    features: Any = {"words": VocabularySpec(known, on_unknown="drop", on_null="mask")}
    if kind == "avro":
        inner = ["null", wire.list_of(["null", "string"])]
        with (tmp_path / "a.avro").open("wb") as file:
            schema = wire.record("R", words=["null", wire.list_of(inner)])
            fastavro.writer(file, schema, [{"words": row} for row in NESTED])
        reader = fastpipe.read_avro(tmp_path / "a.avro", features=features, batch_size=2)
    else:
        item = pa.list_(pa.string()) if kind == "arrow" else pa.list_(pa.string(), 2)
        rows = [
            row and [[*(words or []), None, None][:2] if words is not None else None for words in row] for row in NESTED
        ]
        words = pa.array(NESTED if kind == "arrow" else rows, pa.list_(item))
        reader = fastpipe.from_arrow(pa.table({"words": words}), features=features, batch_size=2)
    list(reader)
    dropped = {"a": 3, "b": 0, "c": 4}[known[-1]]
    assert reader.stats()["keys"] == {"words": {"read": 4, "dropped": dropped}}


def test_only_features_that_drop_keys_are_counted(tmp_path: Path) -> None:
    rows: list[Words] = [["a", "b"], [], None, ["b"]]
    features: Any = {
        "first": spec(),
        "bucket": VocabularySpec(KNOWN, field="words", on_unknown="bucket", on_null="mask"),
        "hash": fastpipe.HashSpec(9, field="words", on_null="mask"),
        "second": VocabularySpec(["a", "b"], field="words", on_unknown="drop", on_null="mask"),
    }
    for kind in ("avro strings", "arrow"):
        reader = source(kind, rows, tmp_path)(features=features, batch_size=3)
        list(reader)
        assert reader.stats()["keys"] == {"first": {"read": 3, "dropped": 2}, "second": {"read": 3, "dropped": 0}}
        none = source(kind, rows, tmp_path)(features={"bucket": features["bucket"]}, batch_size=3)
        list(none)
        assert none.stats()["keys"] == {}


def test_null_entries_of_bags_are_not_keys(tmp_path: Path) -> None:
    reader = source("avro bag", [["a", None, "b"], None, [None]], tmp_path)(
        features={"words": VocabularySpec(["a\x01"], on_unknown="drop", on_null="fill")}, batch_size=1
    )
    list(reader)
    assert reader.stats()["keys"] == {"words": {"read": 2, "dropped": 1}}


ROWS: list[Words] = [["a", "b", "c"], ["a"], None, ["b"], ["a", "a", "a"], ["ä", "d"]]


def test_a_count_belongs_to_one_pass_of_one_reader(tmp_path: Path) -> None:
    one = spec()
    read = source("avro", ROWS, tmp_path)
    first, second = (read(features={"words": one}, batch_size=size) for size in (2, 3))
    passes = zip(first, second, strict=False)
    next(passes)
    next(passes)
    assert first.stats()["keys"] == expected(ROWS[:4], KNOWN)
    assert second.stats()["keys"] == expected(ROWS, KNOWN)
    list(first)
    second.close()
    again = pickle.loads(pickle.dumps(first))
    assert again.stats() == {}
    list(again)
    for reader in (first, second, again, pickle.loads(pickle.dumps(second))):
        list(reader)
        assert reader.stats()["keys"] == expected(ROWS, KNOWN)


@pytest.mark.parametrize("kind", ["avro strings", "arrow"])
def test_resumed_passes_count_from_where_they_resume(kind: str, tmp_path: Path) -> None:
    rows = allowed(kind, ROWS)
    options: Any = {"features": {"id": DenseSpec((), "int64"), "words": spec()}, "batch_size": 1, "epochs": 2}
    order: Any = {"shuffle": True, "seed": 3, "shuffle_buffer": 4}
    reader = source(kind, rows, tmp_path)(**options, **order)
    ids, states = [], [reader.state_dict()]
    for batch in reader:
        ids += batch["id"].tolist()
        states.append(reader.state_dict())
    assert reader.stats()["keys"] == expected(rows * 2, KNOWN)
    for step, state in enumerate(states[:-1]):
        reader.load_state_dict(state)
        found = [i for batch in reader for i in batch["id"].tolist()]
        assert found == ids[step:][: len(found)]
        assert reader.stats()["keys"] == expected([rows[i] for i in found], KNOWN)


def test_several_threads_draw_from_a_pass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fastpipe")
    rows = ROWS * 50
    reader = source("avro", rows, tmp_path)(features={"words": spec()}, batch_size=3, epochs=3, num_threads=3)
    begun = iter(reader)
    drawn: Counter[int] = Counter()

    def draw(number: int) -> None:
        drawn[number] += sum(1 for _ in begun)

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(drawn.values()) == len(reader)
    assert reader.stats()["keys"] == expected(rows * 3, KNOWN)
    # Threads may attribute keys near the end of an epoch to the next entry, but each key is in exactly one entry.
    dropped = [re.match(r"(\d+) of (\d+) keys", message) for message in caplog.messages]
    sums = np.sum([[int(match[1]), int(match[2])] for match in dropped if match], axis=0).tolist()
    assert sums == [counts(rows * 3, KNOWN)["dropped"], counts(rows * 3, KNOWN)["read"]]


@contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[tuple[int, str]]]:
    """Yields a list, which is filled with the log entries about keys when the block ends."""
    entries: list[tuple[int, str]] = []
    caplog.clear()
    with caplog.at_level(logging.INFO, "fastpipe"):
        yield entries
    found = [(record.levelno, record.getMessage()) for record in caplog.records]
    entries += [(level, text) for level, text in found if " keys (" in text]


@pytest.mark.parametrize(
    ("unknown", "level", "share"),
    [
        (0, None, ""),
        (1, logging.INFO, "1 of 20 keys (5%)"),
        (2, logging.INFO, "2 of 20 keys (10%)"),
        (3, logging.WARNING, "3 of 20 keys (15%)"),
        (20, logging.WARNING, "all 20 keys (100%)"),
    ],
)
@pytest.mark.parametrize("kind", ["avro strings", "arrow"])
def test_the_share_is_logged_after_each_epoch(
    kind: str, unknown: int, level: int | None, share: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[Words] = [["a"] * (20 - unknown), ["b"] * unknown, []]
    reader = source(kind, rows, tmp_path)(features={"words": spec()}, batch_size=1, epochs=2)
    begun = iter(reader)
    with logged(caplog) as entries:
        for _ in range(3):
            next(begun)
    assert entries == [], "the epoch has not ended for the consumer"
    for epoch in range(2):
        with logged(caplog) as entries:
            # Draws the first batch of the next epoch, or reaches the end.
            next(begun, None)
        # Only the first entry of a reader is a warning.
        level = min(level, logging.INFO) if level and epoch else level
        text = f"{share} of feature 'words' are left out of this reader's batches of epoch {epoch}, "
        assert [(found, message[: len(text)]) for found, message in entries] == ([(level, text)] if level else [])
        with logged(caplog) as entries:
            list(zip(range(2), begun, strict=False))
        assert len(entries) == 0
    with logged(caplog) as entries:
        assert next(begun, None) is None
    assert entries == [], "the end is reported once"


def test_a_pass_that_is_left_early_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = source("avro", ROWS, tmp_path)(features={"words": spec()}, batch_size=1)
    with logged(caplog) as entries:
        for _ in reader:
            break
        reader.close()
    assert entries == []
    assert reader.stats()["keys"] == expected(ROWS[:1], KNOWN)


def test_arrow_streams_log_as_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = source("parquet", ROWS, tmp_path)(features={"words": spec()}, batch_size=4)
    with logged(caplog) as entries:
        assert pa.table(reader).num_rows == len(ROWS)
    assert [text.partition(" are ")[0] for _, text in entries] == ["4 of 10 keys (40%) of feature 'words'"]


def test_an_error_of_a_log_handler_ends_the_pass(tmp_path: Path) -> None:
    reader = source("avro", ROWS, tmp_path)(features={"words": spec()}, batch_size=6, epochs=2)

    class Failing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise KeyError(record.levelname)

    logger, failing = logging.getLogger("fastpipe"), Failing()
    begun = iter(reader)
    next(begun)
    logger.addFilter(failing)
    try:
        # The second batch is lost, so no later batch may follow.
        with pytest.raises(KeyError, match="WARNING"):
            next(begun)
    finally:
        logger.removeFilter(failing)
    with pytest.raises(fastpipe.FastpipeError, match="a batch could not be delivered: KeyError"):
        next(begun)
    assert reader.stats()["keys"] == expected(ROWS, KNOWN)


def test_padding_is_counted(tmp_path: Path) -> None:
    rows: list[Words] = [["a"], ["b"], ["a", "b"]]
    read = source("avro", rows, tmp_path)
    options: Any = {"batch_size": 2, "world_size": 2, "on_uneven": "pad"}
    ranks = [read(features={"words": spec()}, rank=rank, **options) for rank in range(2)]
    sizes = [[len(words) for batch in reader for words in batch["words"].values.to_list()] for reader in ranks]
    found = [reader.stats()["keys"]["words"] for reader in ranks]
    assert [count["read"] - count["dropped"] for count in found] == [sum(lengths) for lengths in sizes]


def test_batches_of_servers_carry_their_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = source("avro", ROWS, tmp_path)(features={"words": spec()}, batch_size=2)
    with reader.serve() as server, fastpipe.connect(server.url) as client:
        for _ in range(2):
            with logged(caplog) as entries:
                list(client)
            assert client.stats()["keys"] == expected(ROWS, KNOWN)
            assert [text[:19] for _, text in entries] == ["4 of 10 keys (40%) "]
    with fastpipe.service.LocalService(reader) as local:
        list(local.reader)
        assert local.reader.stats()["keys"] == expected(ROWS, KNOWN)
