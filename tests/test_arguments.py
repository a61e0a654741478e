"""Arguments of the wrong type or out of range.

The call fails immediately, and the message names the argument and a fix.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastpipe
import wire
from fastpipe import DenseSpec
from fastpipe._arguments import names, shown

SCHEMA = wire.record("R", user="long", clicks=wire.list_of("long"), label="float")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = b"".join(
        wire.long(i) + wire.array(*[wire.long(k) for k in range(i % 4)]) + wire.float_(i) for i in range(40)
    )
    file = tmp_path_factory.mktemp("arguments") / "a.avro"
    file.write_bytes(wire.container(SCHEMA, [(40, rows)]))
    return str(file)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"prefetch": 0}, ValueError, "prefetch must be at least 1.*None keeps the threads busy"),
        ({"prefetch": False}, TypeError, "prefetch must be an integer; got False"),
        ({"prefetch": "2"}, TypeError, "prefetch must be an integer; got '2'"),
        ({"drop_last": "no"}, TypeError, "drop_last must be True or False; got 'no'"),
        ({"drop_last": 1}, TypeError, "drop_last must be True or False; got 1"),
        ({"drop_last": None}, TypeError, "drop_last must be True or False; got None"),
        ({"progress": "yes"}, TypeError, "progress must be True or False; got 'yes'"),
        ({"features": ["user"]}, TypeError, r"features must be a dict .*columns=\['user'\]"),
        ({"features": "user"}, TypeError, "features must be a dict from name to spec; got 'user'"),
        (
            {"features": DenseSpec((), "int64")},
            TypeError,
            "features must be a dict from name to spec; got fastpipe.DenseSpec",
        ),
        ({"features": {1: DenseSpec((), "int64")}}, TypeError, "names must be strings; got the name 1"),
        ({"features": {"user": "int64"}}, TypeError, r"feature 'user': expected a DenseSpec, .* got 'int64'"),
        ({"columns": [1]}, TypeError, "columns must be a list of strings; got 1 at index 0"),
        ({"columns": ["user", None]}, TypeError, "got None at index 1"),
        ({"columns": 5}, TypeError, "columns must be a list of names; got 5"),
        ({"columns": {"user": DenseSpec((), "int64")}}, TypeError, "from name to spec as overrides= or features="),
        ({"columns": "usr"}, fastpipe.errors.SchemaError, 'did you mean "user"'),
        ({"shuffle": 1}, ValueError, 'shuffle must be True, False, "window"'),
        ({"shuffle": np.array([1, 2])}, ValueError, 'shuffle must be True, False, "window".* got a ndarray'),
        ({"batch_size": "32"}, TypeError, "batch_size must be an integer; got '32'"),
        ({"batch_size": 4.0}, TypeError, "batch_size must be an integer; got 4.0"),
        ({"batch_size": np.True_}, TypeError, "batch_size must be an integer"),
        ({"seed": "a", "shuffle": True}, TypeError, "seed must be an integer"),
        ({"epochs": 1.5}, TypeError, "epochs must be an integer"),
        ({"num_threads": 2.0}, TypeError, "num_threads must be an integer"),
        ({"memory_limit": 1.5e9}, TypeError, 'memory_limit must be a whole number of bytes or a size such as "512MB"'),
        ({"memory_limit": "much"}, ValueError, "memory_limit must be"),
        ({"index_cache": 3}, TypeError, "index_cache must be"),
        ({"columns": ["clicsk"]}, fastpipe.errors.SchemaError, 'did you mean "clicks"'),
        ({"columns": ["Label"]}, fastpipe.errors.SchemaError, 'did you mean "label"'),
        ({"features": {"usr": DenseSpec((), "int64")}}, fastpipe.errors.SchemaError, "did you mean 'user'"),
    ],
)
def test_the_message_names_the_argument(path: str, arguments: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fastpipe.read_avro(path, **{"batch_size": 4} | arguments)


@pytest.mark.filterwarnings("ignore::fastpipe.errors.RowsLeftOutWarning")
def test_numpy_numbers_and_bools_are_accepted(path: str) -> None:
    reader = fastpipe.read_avro(
        path,
        batch_size=np.int32(16),
        drop_last=np.True_,
        shuffle=np.bool_(True),
        seed=np.uint64(3),
        prefetch=np.int64(1),
        num_threads=np.uint8(1),
        columns=np.array(["user"]),
    )
    assert [len(batch["user"]) for batch in reader] == [16, 16]


def test_other_calls_name_the_argument(path: str) -> None:
    arrays = fastpipe.recsys.Interactions.from_arrays(np.array([0, 0, 1, 1]), np.array([0, 1, 2, 3]))
    held_out = fastpipe.recsys.HeldOut(np.array([0]), np.array([3]))
    for call, match in (
        (lambda: fastpipe.infer_features(path, columns=[1]), "columns must be a list of"),
        (lambda: fastpipe.avro.AvroFile(3), "path must be the path of a file, bytes or a binary file object; got 3"),
        (lambda: fastpipe.Rebatcher([], 4, drop_last="no"), "drop_last must be True or False"),
        (lambda: fastpipe.Rebatcher([], 4, copy=1), "copy must be True or False"),
        (
            lambda: fastpipe.recsys.read_interactions(arrays, batch_size=2, num_negatives=1, repeats="no"),
            "repeats must be True or False",
        ),
        (
            lambda: fastpipe.recsys.evaluation_candidates(arrays, held_out, 1, repeats=0),
            "repeats must be True or False",
        ),
    ):
        with pytest.raises(TypeError, match=match):
            call()
    with pytest.raises(ValueError, match="columns is empty"):
        fastpipe.infer_features(path, columns=[])


def test_values_in_messages_are_short() -> None:
    assert shown("x" * 100) == "a str"
    assert shown(np.zeros(10**6)) == "a ndarray"
    assert shown({"a": 1}) == "a dict"
    assert shown([1, 2]) == "[1, 2]"
    assert names("columns", (name for name in ["a", np.str_("b")])) == ["a", "b"]


def test_reprs_are_short(path: str) -> None:
    """However much data an object holds, its repr is short and contains no memory addresses."""
    many = np.arange(100_000, dtype=np.int32)
    wide = np.zeros((1000, 1000), np.int32)
    candidates = fastpipe.recsys.Candidates(many, wide, wide == 0)
    assert repr(candidates) == "Candidates(users=int32[100000], items=int32[1000, 1000], valid=bool[1000, 1000])"
    assert repr(fastpipe.recsys.HeldOut(many, many)) == "HeldOut(users=int32[100000], items=int32[100000])"
    with fastpipe.read_avro(path, batch_size=16) as reader:
        batches = iter(reader)
        assert repr(batches) == "<fastpipe pass: 0 of 3 batches yielded, epoch 0>"
        next(batches)
        assert repr(batches) == "<fastpipe pass: 1 of 3 batches yielded, epoch 0>"
        assert len(list(batches)) == 2
        assert repr(batches) == "<fastpipe pass: 3 of 3 batches yielded, epoch 1, ended>"
        closed = iter(reader)
        reader.close()
        assert repr(closed) == "<fastpipe pass: 0 of 3 batches yielded, epoch 1, closed>"
        plain = reader.rebatch(5)
        assert repr(plain) == "<fastpipe.Rebatcher: batch_size=5>"
        mixed = fastpipe.Rebatcher([], 5, shuffle_buffer=100, seed=3, epoch=2)
        assert repr(mixed) == "<fastpipe.Rebatcher: batch_size=5, shuffle_buffer=100, seed=3, epoch=2>"
        for thing in (reader, fastpipe.avro.AvroFile(path), candidates, plain, reader.batch_at(0)["clicks"]):
            assert len(repr(thing)) < 300
            assert not re.search(r"0x[0-9a-f]{6}", repr(thing))


def test_steps_and_rows_out_of_range(path: str) -> None:
    reader = fastpipe.read_avro(path, batch_size=16)
    for step in (-1, 3, 2**63, -(2**70)):
        for call in (reader.batch_at, lambda step: reader.locate(step, 0)):
            with pytest.raises(IndexError, match=f"batch {step} does not exist: an epoch has 3 batches"):
                call(step)
    for row in (-1, 16, 2**40):
        with pytest.raises(IndexError, match=f"row {row} does not exist"):
            reader.locate(0, row)
    with pytest.raises(IndexError, match="row 8 does not exist"):
        reader.locate(2, 8)
    for call in (reader.batch_at, lambda step: reader.locate(step, 0), lambda row: reader.locate(0, row)):
        for bad in (1.0, "1", None, True, np.True_):
            with pytest.raises(TypeError, match="must be an integer"):
                call(bad)
    assert reader.locate(np.int64(1), np.uint8(2)) == fastpipe.avro.AvroLocation(file=path, block=0, row=18)


def test_messages_name_the_cause_of_a_closed_pass(path: str) -> None:
    def fails(batches: Any, match: str) -> None:
        for _ in range(2):
            with pytest.raises(fastpipe.errors.PassClosedError, match=match) as caught:
                next(batches)
            assert isinstance(caught.value, RuntimeError)

    reader = fastpipe.read_avro(path, batch_size=4)
    with pytest.raises(fastpipe.errors.PassClosedError, match=r"another iter\(reader\) began a pass.*two readers"):
        list(zip(reader, reader, strict=True))
    first = iter(reader)
    state = reader.state_dict()
    reader.close()
    fails(first, r"close\(\) was called; iter\(reader\) starts a new pass")
    second = iter(reader)
    reader.load_state_dict(state)
    fails(second, r"load_state_dict\(\) was called")
    with reader:
        third = iter(reader)
    fails(third, "with block")
    assert len(list(reader)) == 10


@pytest.mark.parametrize(
    "name",
    [
        *("Reader", "batch.Ragged", "batch.Strings", "batch.Masked", "batch.Sparse", "batch.SparseCSR"),
        *("avro.AvroFile", "recsys.Interactions"),
    ],
)
def test_len_has_a_docstring(name: str) -> None:
    assert operator.attrgetter(f"{name}.__len__.__doc__")(fastpipe).strip()


@pytest.mark.parametrize(
    "name",
    [
        *("typing.Location", "typing.Growth", "leases.LedgerStatus", "leases.EpochStatus", "leases.WorkerStatus"),
        *("csv.CsvSample", "csv.RowEstimate"),
    ],
)
def test_results_may_get_more_fields_later(name: str) -> None:
    """A tuple that callers unpack can't get another field."""
    kind = operator.attrgetter(name)(fastpipe)
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert not issubclass(kind, tuple)


def test_messages_about_missing_columns_list_all_columns(tmp_path: Path) -> None:
    """The message lists all columns, including columns that aren't read."""
    schema = wire.record(
        "R",
        user="long",
        more=["null", "R"],
        day={"type": "int", "logicalType": "date"},
        either=["int", "string"],
        clicks=wire.list_of("long"),
    )
    path = tmp_path / "a.avro"
    path.write_bytes(wire.container(schema, []))
    with pytest.raises(fastpipe.errors.SchemaError) as caught:
        fastpipe.infer_features(path, columns=["dya"])
    message = str(caught.value)
    assert "the schema has no column 'dya'; did you mean \"day\"? " in message
    columns = '"user", "day", "either", "either:int", "either:string", "clicks"'
    assert f'It has {columns}; "more" (which are not read)' in message
    with pytest.raises(fastpipe.errors.SchemaError) as caught:
        fastpipe.infer_features(path, columns=["q"])
    assert "did you mean" not in str(caught.value)
