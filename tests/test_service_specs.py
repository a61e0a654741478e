"""Servers that read one dataset with different specs: no client gets batches of both."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest

import fastpipe
import wire
from every_source import Make, make
from fastpipe._reader.passes import passes_of
from fastpipe._reader.reader_passes import ReaderPasses
from fastpipe.service._wire import as_error, sealed, specs_digest, summed
from servers import free_port
from service_tickets import entries

pytest.importorskip("pyarrow.flight")

from pyarrow import flight

from fastpipe.service import Server
from fastpipe.service._served import Served

__all__ = ["make"]

ROWS = 64
Read = Callable[..., fastpipe.Reader]
DENSE, RAGGED = fastpipe.DenseSpec, fastpipe.RaggedSpec
VOCABULARY, HASH = fastpipe.VocabularySpec, fastpipe.HashSpec
OPTIONS: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 7}

ENTRY = wire.record("NTV", name="string", term="string", value="float")
SCHEMA = wire.record(
    "R",
    a=["null", "int"],
    b=["null", "int"],
    items=wire.list_of("long"),
    word="string",
    bag=wire.list_of(ENTRY),
    day={"type": "int", "logicalType": "date"},
    kind={"type": "enum", "name": "Kind", "symbols": ["X", "Y"]},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("specs")
    rows = [
        {
            "a": None if i % 3 == 0 else i,
            "b": None if i % 5 == 0 else -i,
            "items": list(range(i % 4)),
            "word": f"w{i % 5}",
            "bag": [{"name": f"n{i % 3}", "term": "t", "value": float(i)}],
            "day": 1000 + i,
            "kind": "XY"[i % 2],
        }
        for i in range(ROWS)
    ]
    with (folder / "rows.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(SCHEMA), rows, sync_interval=300)
    lines = [f"{i},{'-' if i % 4 == 0 else i / 8},w{i % 5}" for i in range(ROWS)]
    (folder / "rows.csv").write_text("\n".join(["id,x,word", *lines]) + "\n")
    return folder


def avro(features: dict[str, Any] | None = None, **options: Any) -> Callable[[Path], fastpipe.Reader]:
    chosen = options if features is None else {"features": features} | options
    return lambda folder: fastpipe.read_avro(folder / "rows.avro", **OPTIONS | chosen)


def csv(features: dict[str, Any] | None = None, **options: Any) -> Callable[[Path], fastpipe.Reader]:
    chosen = options if features is None else {"features": features} | options
    return lambda folder: fastpipe.read_csv(folder / "rows.csv", **OPTIONS | chosen)


WORDS = ["w0", "w1", "w2"]
INT, PAIR = partial(DENSE, (), "int32"), partial(DENSE, (2,), "int64")
BUCKET = partial(VOCABULARY, on_unknown="bucket")
FIRST, SECOND = (
    {"type": "record", "name": "R", "fields": [{"name": "c", "type": "int", "default": default}]} for default in (1, 2)
)
A, B = ({name: INT(fill=0)} for name in "ab")
ITEMS, X = {"items": PAIR(pad=0)}, {"x": DENSE((), "float64", on_null="fill")}
NAN = float("nan")

# Pairs whose batches have the same size and mostly the same columns, but different values.
DIFFERING = {
    "fill": (avro({"a": INT(fill=-1)}), avro({"a": INT(fill=-2)})),
    "nulls": (avro(A), avro({"a": INT(on_null="mask")})),
    "dtype": (avro(A), avro({"a": DENSE((), "float32", fill=0)})),
    "shape": (avro(ITEMS), avro({"items": DENSE((3,), "int64", pad=0)})),
    "pad": (avro(ITEMS), avro({"items": PAIR(pad=9)})),
    "form": (avro(ITEMS), avro({"items": RAGGED((None,), "int64")})),
    "field": (avro(A), avro({"a": INT(fill=0, field="b")})),
    "names": (avro(A), avro({"c": INT(fill=0, field="a")})),
    "sequence": (avro(A | B), avro(B | A)),
    "columns": (avro(columns=["a", "word"]), avro(columns=["a"])),
    "vocabulary": (avro({"word": BUCKET(WORDS)}), avro({"word": BUCKET(WORDS[::-1])})),
    "vocabulary of CSV": (csv({"word": BUCKET(WORDS)}), csv({"word": BUCKET(["w3", "w1", "w2"])})),
    "buckets": (avro({"word": BUCKET(WORDS, num_buckets=2)}), avro({"word": BUCKET(WORDS, num_buckets=3)})),
    "hash buckets": (avro({"word": HASH(10)}), avro({"word": HASH(11)})),
    "hash seed": (avro({"word": HASH(10)}), avro({"word": HASH(10, seed=1)})),
    "hash separator": (avro({"bag": HASH(10)}), avro({"bag": HASH(10, separator=",")})),
    "layout": (avro({"bag": HASH(10)}), avro({"bag": HASH(10, layout="csr")})),
    "reader's schema": (avro({"c": INT()}, reader_schema=FIRST), avro({"c": INT()}, reader_schema=SECOND)),
    "null values": (csv(X, null_values=["-"]), csv(X, null_values=["-", "0.125"])),
}

# Pairs that read the same values.
EQUAL = {
    "inferred": (
        avro(columns=["word", "items"]),
        avro({"word": DENSE((), "string"), "items": RAGGED((None,), "int64")}),
    ),
    "overrides": (avro(columns="word", overrides={"word": HASH(10)}), avro({"word": HASH(10)})),
    "separator": (avro({"bag": HASH(10)}), avro({"bag": HASH(10, separator=b"\x01")})),
    "vocabulary": (avro({"word": BUCKET(WORDS)}), avro({"word": BUCKET({"w2": 2, "w0": 0, "w1": 1})})),
    "reader's schema": tuple(
        avro({"c": INT()}, reader_schema=schema) for schema in (FIRST, json.dumps(FIRST, indent=4))
    ),
    "order": (avro(columns=["word"]), avro(columns=["word"], batch_size=4, seed=3, num_threads=1, epochs=2)),
    "null fill": tuple(csv({"x": DENSE((), "float64", fill=fill)}, null_values=["-"]) for fill in (NAN, -NAN)),
}


def digest(reader: fastpipe.Reader) -> str:
    passes = passes_of(reader)
    assert isinstance(passes, ReaderPasses)
    return specs_digest(passes.parts.data)


def texts(batches: Any) -> list[str]:
    return [str({name: np.asarray(column).tolist() for name, column in batch.items()}) for batch in batches]


@pytest.mark.parametrize("pair", DIFFERING)
def test_a_server_with_other_specs_is_an_error(pair: str, folder: Path) -> None:
    first, second = (read(folder) for read in DIFFERING[pair])
    assert digest(first) != digest(second)
    with Server(first, port=free_port()) as one:
        remote = fastpipe.connect(one.url, epochs=None, prefetch=1)
        batches = iter(remote)
        next(batches)
    with Server(second, port=one.port), pytest.raises(fastpipe.errors.StateError, match=r"other specs.*connect again"):
        # Batches that were requested earlier may still arrive.
        for _ in itertools.islice(batches, 200):
            pass
    with Server(second, port=one.port) as other:
        for ask in (lambda: remote.batch_at(3), lambda: remote.locate(3, 0), lambda: next(iter(remote))):
            with pytest.raises(fastpipe.errors.StateError, match="other specs"):
                ask()
        assert len(list(fastpipe.connect(other.url))) == ROWS // 8


def test_servers_with_other_specs_are_not_mixed(folder: Path) -> None:
    ours, other = (read(folder) for read in DIFFERING["fill"])
    with ours.serve() as one, other.serve() as two:
        remote = fastpipe.connect([one.url, two.url], epochs=50, prefetch=4)
        described = ours if remote.features == ours.features else other
        found: list[str] = []
        with pytest.raises(fastpipe.errors.StateError, match="other specs"):
            found.extend(text for batch in remote for text in texts([batch]))
        places = [divmod(number, ROWS // 8) for number in range(len(found))]
        assert found == texts(described.batch_at(step, epoch=epoch) for epoch, step in places)


@pytest.mark.parametrize("pair", EQUAL)
def test_servers_that_read_the_same_values_share_the_work(pair: str, folder: Path) -> None:
    first, second = (read(folder) for read in EQUAL[pair])
    assert digest(first) == digest(second)
    with Server(first, port=free_port()) as one:
        remote = fastpipe.connect(one.url)
    with Server(second, port=one.port):
        assert remote.batch_at(3).keys() == first.batch_at(3).keys()


def test_the_fallback_has_the_specs_of_the_servers(folder: Path) -> None:
    ours, other = (read(folder) for read in DIFFERING["vocabulary"])
    with ours.serve() as server:
        assert len(list(fastpipe.connect(server.url, fallback=ours))) == ROWS // 8
        with pytest.raises(fastpipe.errors.UnsupportedError, match="the fallback reads the data with other specs"):
            fastpipe.connect(server.url, fallback=other)


def test_digests_are_the_same_in_each_process(make: Make) -> None:
    reader = make(batch_size=32)
    script = "import pickle, sys; from test_service_specs import digest; print(digest(pickle.load(sys.stdin.buffer)))"
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, input=pickle.dumps(reader), env=environment, capture_output=True, check=True)
    assert told.stdout.decode().strip() == digest(reader)


@pytest.mark.parametrize("version", [1, 9, None])
def test_another_version_of_the_service_is_an_error(version: int | None) -> None:
    reader = fastpipe.from_arrays({"x": np.arange(ROWS)}, **OPTIONS)

    class Old(flight.FlightServerBase):  # type: ignore[misc]
        """Answers like a server of another version."""

        def do_action(self, context: Any, action: Any) -> Any:
            served = Served("default", reader)
            told = json.dumps(served.description() | {"version": version}).encode()
            return iter(summed([told, served.unit_rows().tobytes()]))

    told = rf"uses version {version} .*the same version of fastpipe on both"
    with Old("grpc://127.0.0.1:0") as old, pytest.raises(fastpipe.errors.ServiceError, match=told):
        fastpipe.connect(f"grpc://127.0.0.1:{old.port}", timeout=60)
    with reader.serve() as server:
        client = flight.FlightClient(server.url)
        said = sealed(entries(client) | {"version": version})
        (chunk,) = client.do_get(flight.Ticket(said))
        assert "clients need the same fastpipe" in str(as_error(chunk.app_metadata.to_pybytes(), "a server"))
