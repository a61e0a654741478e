"""Decoding messages into one batch: bare datums, single-object encoding, and the registry format."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import fastavro
import fastavro.schema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastpipe
import oracle
import wire
from processes import together
from strategies import SOME
from test_roundtrip import Values, schemas

import hypothesis  # isort: skip

USER = wire.record("User", id="long", name="string", scores=wire.list_of("float"))
LATER = wire.record("User", scores=wire.list_of("double"), more=["null", "string"], id="int", name="string")


def fingerprint(schema: Any) -> bytes:
    """Returns the fingerprint of a schema in little-endian order, as messages contain it."""
    form = fastavro.schema.to_parsing_canonical_form(fastavro.parse_schema(schema))
    return bytes.fromhex(fastavro.schema.fingerprint(form, "CRC-64-AVRO"))


def datum(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def single(schema: Any, value: Any) -> bytes:
    return b"\xc3\x01" + fingerprint(schema) + datum(schema, value)


def registered(number: int, schema: Any, value: Any) -> bytes:
    return struct.pack(">bI", 0, number) + datum(schema, value)


def users(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"id": i, "name": "n" * (i % 7) + "é", "scores": [float(i)] * (i % 3)} for i in range(first, first + count)]


def later(user: dict[str, Any]) -> dict[str, Any]:
    return {**user, "more": None if user["id"] % 2 else "more"}


def listed(batch: dict[str, Any]) -> dict[str, list[Any]]:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v.to_list() for k, v in batch.items()}


def columns(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [row[key] for row in rows] for key in ("id", "name", "scores")}


FORMS: dict[str, Callable[[list[bytes]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "objects": lambda messages: np.array([*messages, None], object)[:-1],
    "bytearrays": lambda messages: [bytearray(m) for m in messages],
    "views": lambda messages: [memoryview(b"x" + m)[1:] for m in messages],
    "arrays": lambda messages: [np.frombuffer(m, np.uint8) for m in messages],
    "strings": lambda messages: fastpipe.Strings(
        np.frombuffer(b"front" + b"".join(messages), np.uint8),
        np.cumsum([5, *map(len, messages)]),
        (len(messages),),
        True,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_buffers_of_messages(form: str) -> None:
    rows = users(50)
    messages = FORMS[form]([datum(USER, row) for row in rows])
    batch = fastpipe.avro.decode_messages(messages, USER)
    assert listed(batch) == columns(rows)
    assert batch["id"].dtype == np.int64


@pytest.mark.parametrize("given", [USER, json.dumps(USER), json.dumps(USER, indent=2), fastavro.parse_schema(USER)])
def test_schema_arguments(given: Any) -> None:
    rows = users(3)
    messages = [datum(USER, row) for row in rows]
    assert listed(fastpipe.avro.decode_messages(messages, given)) == columns(rows)


def test_schemas_other_than_records() -> None:
    assert listed(fastpipe.avro.decode_messages([b"\x02", b"\x01"], "long")) == {"value": [1, -1]}
    assert listed(fastpipe.avro.decode_messages([b"\x02"], '"long"')) == {"value": [1]}
    union = ["null", "long"]
    assert listed(fastpipe.avro.decode_messages([b"\x02\x02", b"\x00"], union)) == {"value": [1, None]}
    assert listed(fastpipe.avro.decode_messages([b"", b""], "null"))["value"] is not None


@hypothesis.settings(max_examples=SOME)
@given(schemas(), st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([None, "single-object", "registry"]))
def test_any_schema(schema: Any, seed: int, count: int, framing: Any) -> None:
    """Checks that messages decode to the same values as a file of the same records, which other tests compare with an
    oracle.
    """
    rng = random.Random(seed)
    root = oracle.resolve(schema)
    records = Values(seed).rows(root, count)
    messages = [oracle.encode(root, record, rng) for record in records]
    text = json.dumps(schema)
    given: Any = text
    if framing == "single-object":
        messages = [b"\xc3\x01" + fingerprint(schema) + message for message in messages]
    elif framing == "registry":
        messages = [struct.pack(">bI", 0, 77) + message for message in messages]
        given = {77: text}
    decoder = fastpipe.avro.MessageDecoder(given, framing=framing)
    found = decoder(messages)
    file = wire.header(text) + wire.stored(count, b"".join(oracle.encode(root, r, rng) for r in records))
    (expected,) = fastpipe.read_avro(file, features=decoder.features, batch_size=count)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert oracle.same(oracle.rows(value), oracle.rows(expected[name])), name
    empty = decoder([])
    assert {name: len(oracle.rows(value)) for name, value in empty.items()} == dict.fromkeys(found, 0)
    # A message that is truncated, or followed by another byte, is malformed, and the error contains its index.
    at = rng.randrange(count)
    if len(messages[at]) > 0:
        cut = messages[at][: rng.randrange(len(messages[at]))]
        for bad in (cut, messages[at] + b"\x00"):
            with pytest.raises(fastpipe.errors.MalformedFileError) as error:
                decoder([*messages[:at], bad, *messages[at:]])
            assert error.value.record == at
            assert error.value.offset is not None
            assert error.value.offset <= len(bad)


@pytest.mark.parametrize(
    "schema",
    ["null", "int", "string", {"type": "array", "items": "long"}, USER, LATER, wire.record("a.b.C", x="bytes")],
)
def test_single_objects(schema: Any) -> None:
    form = fastavro.parse_schema(schema)
    record = {"null": None, "int": 3, "string": "x"}.get(schema if isinstance(schema, str) else "")
    if isinstance(schema, dict):
        record = [1, 2] if schema["type"] == "array" else {**later(users(1)[0]), "x": b"b"}
    messages = [single(schema, record)] * 3
    decoder = fastpipe.avro.MessageDecoder(form, framing="single-object")
    assert {len(oracle.rows(value)) for value in decoder(messages).values()} <= {3}


def test_fingerprints_match_the_specification() -> None:
    """Uses examples of `share/test/data/schema-tests.txt` in the Avro repository."""
    for schema, number in [
        ("null", 7195948357588979594),
        ("int", 8247732601305521295),
        ("string", -8142146995180207161),
        ({"type": "fixed", "name": "foo", "size": 15}, 1756455273707447556),
        ({"type": "enum", "name": "foo", "symbols": ["A1"]}, -6342190197741309591),
    ]:
        message = b"\xc3\x01" + number.to_bytes(8, "little", signed=True)
        body = {"null": b"", "int": b"\x02", "string": b"\x00"}.get(str(schema))
        if body is None:
            body = b"\x00" if "symbols" in schema else bytes(15)
        fastpipe.avro.decode_messages([message + body], schema, framing="single-object")


@pytest.mark.parametrize("give", [list, tuple, lambda all: {str(i): s for i, s in enumerate(all)}])
def test_several_schemas_of_single_objects(give: Callable[[list[Any]], Any]) -> None:
    rows = users(200)
    messages = [single(LATER, later(row)) if row["id"] % 3 else single(USER, row) for row in rows]
    batch = fastpipe.avro.decode_messages(messages, give([USER, LATER]), framing="single-object")
    assert listed(batch) == columns(rows)
    assert batch["scores"].values.dtype == np.float32
    both = fastpipe.avro.decode_messages(messages, give([LATER, USER]), columns=["id"], framing="single-object")
    assert both["id"].dtype == np.int32
    with pytest.raises(fastpipe.errors.SchemaError, match="more"):
        fastpipe.avro.decode_messages(messages, give([LATER, USER]), framing="single-object")


def test_a_registry() -> None:
    rows = users(100)
    messages = [registered(9, LATER, later(row)) if row["id"] % 3 else registered(2**32 - 1, USER, row) for row in rows]
    schemas = {2**32 - 1: USER, 9: json.dumps(LATER)}
    assert listed(fastpipe.avro.decode_messages(messages, schemas, framing="registry")) == columns(rows)
    asked: list[int] = []

    def find(number: int) -> Any:
        asked.append(number)
        return schemas[number]

    decoder = fastpipe.avro.MessageDecoder(find, framing="registry")
    with pytest.raises(ValueError, match="decode a message first"):
        decoder([])
    with pytest.raises(ValueError, match="decode a message first"):
        decoder.features  # noqa: B018
    for _ in range(3):
        assert listed(decoder(messages)) == columns(rows)
    assert asked == [2**32 - 1, 9]
    assert listed(decoder([])) == {"id": [], "name": [], "scores": []}
    with pytest.raises(KeyError, match="17"):
        decoder([registered(17, USER, rows[0])])
    assert listed(decoder(messages)) == columns(rows)


def test_many_threads_look_a_schema_up_once() -> None:
    asked: list[int] = []

    def find(number: int) -> Any:
        asked.append(number)
        return USER

    decoder = fastpipe.avro.MessageDecoder(find, framing="registry")
    messages = [registered(1 + i % 5, USER, row) for i, row in enumerate(users(50))]
    found: list[Any] = []
    together([threading.Thread(target=lambda: found.append(listed(decoder(messages)))) for _ in range(8)])
    assert sorted(asked) == [1, 2, 3, 4, 5]
    assert found == [columns(users(50))] * 8


def test_any_number_of_threads_decodes_the_same() -> None:
    rows = users(20_000)
    messages = [datum(USER, row) for row in rows]
    one = listed(fastpipe.avro.MessageDecoder(USER, num_threads=1)(messages))
    assert one == columns(rows)
    for threads in (2, 7):
        assert listed(fastpipe.avro.MessageDecoder(USER, num_threads=threads)(messages)) == one
    # The error reports the first malformed message, regardless of which thread finds one.
    for number in (19_999, 12_345, 7, 12):
        messages[number] = messages[number][:-1]
        with pytest.raises(fastpipe.errors.MalformedFileError) as error:
            fastpipe.avro.MessageDecoder(USER, num_threads=4)(messages)
        assert error.value.record == min(number, 7 if number == 12 else number)


def test_specs() -> None:
    features = {
        "scores": fastpipe.DenseSpec((2,), "float64", pad=-1),
        "who": fastpipe.DenseSpec((), "bytes", field="name"),
    }
    rows = users(5)
    messages = [datum(USER, row) for row in rows]
    batch = fastpipe.avro.decode_messages(messages, USER, features=features)
    assert batch["scores"].tolist() == [(row["scores"] + [-1.0, -1.0])[:2] for row in rows]
    assert batch["who"].to_list() == [row["name"].encode() for row in rows]
    with pytest.raises(fastpipe.errors.ShapeError) as error:
        fastpipe.avro.decode_messages(messages, USER, features={"scores": fastpipe.DenseSpec((2,), "float32")})
    assert (error.value.record, error.value.feature) == (0, "scores")
    enum = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
    decoder = fastpipe.avro.MessageDecoder(enum, features={"value": fastpipe.DenseSpec((), "int8")})
    assert decoder([b"\x02"])["value"].tolist() == [1]
    assert decoder.categories == {"value": ["A", "B"]}


GOOD = {
    None: datum(USER, users(1)[0]),
    "single-object": single(USER, users(1)[0]),
    "registry": registered(7, USER, users(1)[0]),
}


@pytest.mark.parametrize("framing", GOOD)
def test_errors_of_malformed_messages(framing: Any) -> None:
    good, header = GOOD[framing], {None: 0, "single-object": 10, "registry": 5}[framing]
    decoder = fastpipe.avro.MessageDecoder({7: USER} if framing == "registry" else USER, framing=framing)
    huge = good[:header] + b"\x00\x00" + wire.long(2**62)
    long_text = good[:header] + b"\x00" + wire.long(2**40)
    not_text = good[:header] + b"\x00" + wire.text(b"\xff") + b"\x00"
    bad = {
        "empty": b"",
        "cut": good[:-1],
        "rest": good + b"rest",
        "huge array": huge,
        "long text": long_text,
        "not text": not_text,
        "negative": good[:header] + b"\x00" + wire.long(-1),
    }
    for what, message in bad.items():
        with pytest.raises(fastpipe.errors.MalformedFileError) as error:
            decoder([good, good, message, good[:header] + b"\x01"])
        assert error.value.record == 2, what
        assert error.value.offset is not None
        assert 0 <= error.value.offset <= len(message), what
        assert "record 2" in str(error.value)
        if what == "rest":
            assert "after its datum, found 4 more bytes" in str(error.value)
    assert listed(decoder([good])) == columns(users(1))


def test_wrong_headers() -> None:
    decoder = fastpipe.avro.MessageDecoder(USER, framing="single-object")
    for bad, reason in [
        (b"\xc3\x02" + GOOD["single-object"][2:], "found C3 02"),
        (GOOD["registry"], "expected the marker C3 01"),
        (GOOD["single-object"][:9], "a header of 10 bytes, found a message of 9"),
        (b"\xc3", "found a message of 1"),
    ]:
        with pytest.raises(fastpipe.errors.MalformedFileError, match=reason):
            decoder([bad])
    with pytest.raises(fastpipe.errors.SchemaError, match=r"given schemas has the fingerprint [0-9a-f]{16}") as found:
        decoder([GOOD["single-object"], single(LATER, later(users(1)[0]))])
    assert (found.value.record, found.value.offset) == (1, 0)
    assert fingerprint(LATER)[::-1].hex() in str(found.value)
    registry = fastpipe.avro.MessageDecoder({7: USER}, framing="registry")
    with pytest.raises(fastpipe.errors.MalformedFileError, match="the byte 0"):
        registry([GOOD["single-object"]])
    with pytest.raises(fastpipe.errors.SchemaError, match="has the number 8"):
        registry([registered(8, USER, users(1)[0])])


def test_zero_byte_items_are_limited() -> None:
    nulls = {"type": "array", "items": "null"}
    message = wire.long(2**14) + b"\x00"
    assert len(fastpipe.avro.decode_messages([message], nulls)["value"].row(0)) == 2**14
    for messages in ([message] * 2, [wire.long(2**40) + b"\x00"]):
        with pytest.raises(fastpipe.errors.LimitError):
            fastpipe.avro.decode_messages(messages, nulls)


def test_arguments() -> None:
    for bad, reason in [
        (b"x", r"Pass \[message\]"),
        ("x", r"Pass \[message\]"),
        (3, "a sequence of bytes; got int"),
        ([b"\x02", "x"], "message 1 must be bytes; got str"),
        ([None], "message 0 must be bytes; got NoneType"),
        ([np.zeros(3)], "message 0 must be a buffer of bytes"),
        (np.array([b"x"]), "dtype S"),
        (np.zeros((2, 2), object), "one dimension"),
        (fastpipe.Strings(np.zeros(1, np.uint8), np.array([0, 1]), (1,), False), 'dtype "bytes"'),
    ]:
        with pytest.raises(TypeError, match=reason):
            fastpipe.avro.decode_messages(bad, "long")  # type: ignore[arg-type]
    for schema, framing, error, reason in [
        (3, None, TypeError, "JSON text or parsed"),
        ({"type": object()}, None, TypeError, "can't be written as JSON"),
        ("nothing", None, fastpipe.errors.SchemaError, "nothing"),
        (USER, "registry", TypeError, "an int; got"),
        ("long", "registry", TypeError, "mapping from IDs"),
        ({}, "registry", ValueError, "at least one schema"),
        ([], "single-object", ValueError, "at least one schema"),
        ({-1: USER}, "registry", ValueError, "from 0 to 4294967295"),
        ({2**32: USER}, "registry", ValueError, "from 0 to 4294967295"),
        (USER, "kafka", ValueError, "framing must be None"),
    ]:
        with pytest.raises(error, match=reason):
            fastpipe.avro.MessageDecoder(schema, framing=framing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not both"):
        fastpipe.avro.decode_messages([], USER, columns=["id"], features={"id": fastpipe.DenseSpec((), "int64")})
    with pytest.raises(fastpipe.errors.SchemaError, match="no column 'nope'"):
        fastpipe.avro.decode_messages([], USER, columns=["nope"])
    for threads, error in [(0, ValueError), (1.5, TypeError)]:
        with pytest.raises(error, match="num_threads"):
            fastpipe.avro.MessageDecoder(USER, num_threads=threads)  # type: ignore[arg-type]


def test_decoders_are_pickled() -> None:
    decoder = pickle.loads(pickle.dumps(fastpipe.avro.MessageDecoder({7: USER}, columns=["id"], framing="registry")))
    assert listed(decoder([GOOD["registry"]])) == {"id": [0]}


def test_batches_outlive_their_messages() -> None:
    decoder = fastpipe.avro.MessageDecoder(USER)
    batches = [decoder([datum(USER, row)]) for row in users(20)]
    del decoder
    assert [batch["id"].tolist() for batch in batches] == [[i] for i in range(20)]
    assert all(batch["id"].flags.writeable for batch in batches)
