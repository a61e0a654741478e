"""Damaged and malicious values never cause a crash, a hang or unlimited memory use.

They cause an error with its location and cause, which does not depend on the number of threads.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from hostile import (
    EMPTY,
    GIB,
    I64_MAX,
    I64_MIN,
    MALFORMED,
    SMALL,
    SMALL_FEATURES,
    TYPED,
    Case,
    measured,
    one,
    outcomes,
    small_row,
)
from wire import CODECS, array, block, container, header, items, list_of, long, longs, record, text


def test_records_of_random_bytes(tmp_path: Path) -> None:
    """The bytes are not compressed, so that the decoder itself reads them."""
    chance = random.Random(11)
    cases = []
    for i in range(1500):
        # Small numbers are most often valid counts, lengths or branches.
        data = bytes(
            chance.choice((chance.randrange(8), chance.randrange(256))) for _ in range(chance.randrange(1, 60))
        )
        columns = chance.choice((None, ("s",), ("m", "i"), ("n",)))
        cases.append(Case(f"chance {i}", header(SMALL) + block(chance.randrange(1, 3), data), columns=columns))
    for case, seen in outcomes(tmp_path, cases):
        if seen.error is not None:
            assert seen.where["block"] == 0, case.name


FLOATS, STRINGS, LONGS = list_of("float"), list_of("string"), list_of("long")
MAP = {"type": "map", "values": "long"}
ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}
# Malicious fields: schema, bytes of the value, part of the error's reason, and its class.
BAD_VALUES: dict[str, tuple[Any, bytes, str, str]] = {
    "2^62 floats": (FLOATS, items(1 << 62, bytes(8)), "found one of 4611686018427387904 items", MALFORMED),
    "2^62 longs": (LONGS, items(1 << 62, bytes(8)), "items", MALFORMED),
    "2^62 strings": (STRINGS, items(1 << 62, bytes(8)), "items", MALFORMED),
    "2^62 map entries": (MAP, items(1 << 62, bytes(8)), "items", MALFORMED),
    "i64::MAX floats": (FLOATS, items(I64_MAX, bytes(8)), "items", MALFORMED),
    "i64::MIN floats": (FLOATS, items(I64_MIN, bytes(8), 8), "items", MALFORMED),
    "i64::MIN strings": (STRINGS, items(I64_MIN, bytes(8), 8), "items", MALFORMED),
    "-2^62 floats": (FLOATS, items(-(1 << 62), bytes(8), 8), "items", MALFORMED),
    "one float too many": (FLOATS, items(4, bytes(12)), "expected", MALFORMED),
    "floats without an end": (FLOATS, items(1, bytes(4)), "expected", MALFORMED),
    "size of floats too small": (FLOATS, items(-2, bytes(8), 7) + long(0), "declares 7 bytes", MALFORMED),
    "size of floats too large": (FLOATS, items(-2, bytes(8), 9) + bytes(9), "declares 9 bytes", MALFORMED),
    "size of longs too small": (LONGS, items(-2, longs(1, 2), 1) + long(0), "declares 1 bytes", MALFORMED),
    "size of strings too small": (STRINGS, items(-1, text("abc"), 3) + long(0), "declares 3 bytes", MALFORMED),
    "size of strings too large": (STRINGS, items(-1, text("abc"), 5) + bytes(9), "declares 5 bytes", MALFORMED),
    "size of a map too small": (MAP, items(-1, text("k") + long(1), 1) + bytes(9), "declares 1 bytes", MALFORMED),
    "size of 2^62": (FLOATS, items(-2, bytes(8), 1 << 62) + long(0), "expected 4611686018427387904", MALFORMED),
    "size of -1": (FLOATS, items(-2, bytes(8), -1) + long(0), "expected a length, found -1", MALFORMED),
    "size of i64::MIN": (STRINGS, items(-2, bytes(8), I64_MIN) + long(0), "expected a length", MALFORMED),
    "a string of 2^62": ("string", long(1 << 62) + b"abc", "expected 4611686018427387904 more bytes", MALFORMED),
    "a string of i64::MAX": ("string", long(I64_MAX) + b"abc", "more bytes", MALFORMED),
    "a string of -1": ("string", long(-1) + b"abc", "expected a length, found -1", MALFORMED),
    "a string of i64::MIN": ("string", long(I64_MIN) + b"abc", "expected a length", MALFORMED),
    "bytes of 2^62": ("bytes", long(1 << 62) + b"abc", "more bytes", MALFORMED),
    "bytes of -1": ("bytes", long(-1), "expected a length, found -1", MALFORMED),
    "not UTF-8": ("string", text(b"ab\xff"), "expected UTF-8", MALFORMED),
    "half a character": ("string", text("ä".encode()[:1]), "expected UTF-8", MALFORMED),
    "a surrogate": ("string", text(b"\xed\xa0\x80"), "expected UTF-8", MALFORMED),
    "overlong UTF-8": ("string", text(b"\xc0\x80"), "expected UTF-8", MALFORMED),
    "an item not UTF-8": (STRINGS, array(text("a"), text(b"\xff")), "expected UTF-8", MALFORMED),
    "a key not UTF-8": (MAP, array(text(b"\xff") + long(1)), "expected UTF-8", MALFORMED),
    "a varint of 11 bytes": ("long", b"\x80" * 10 + b"\x00", "varint", MALFORMED),
    "a varint beyond 64 bits": ("long", b"\xff" * 9 + b"\x02", "varint", MALFORMED),
    "a varint without end": ("long", b"\xff" * 30, "varint", MALFORMED),
    "a varint of 11 bytes among longs": (
        LONGS,
        items(2, long(1) + b"\x80" * 10 + b"\x00") + bytes(9),
        "varint",
        MALFORMED,
    ),
    "a varint cut short": ("long", b"\x80\x80", "expected", MALFORMED),
    "an int of 33 bits": ("int", long(1 << 31), "expected an int of 32 bits, found 2147483648", MALFORMED),
    "an int of -33 bits": ("int", long(-(1 << 31) - 1), "expected an int of 32 bits", MALFORMED),
    "an int of 64 bits": ("int", long(I64_MIN), "expected an int of 32 bits", MALFORMED),
    "an int among ints": (list_of("int"), items(9, longs(*range(8), 1 << 31)) + long(0), "32 bits", MALFORMED),
    "a boolean of 2": ("boolean", b"\x02", "expected a boolean, 0 or 1, found byte 2", MALFORMED),
    "a boolean of 255": (list_of("boolean"), items(3, b"\x00\x01\xff") + long(0), "boolean", MALFORMED),
    "branch 2 of 2": (["null", "long"], long(2), "expected the index of one of 2 union branches, found 2", MALFORMED),
    "branch -1": (["null", "long"], long(-1), "found -1", MALFORMED),
    "branch i64::MIN": (["long", "null"], long(I64_MIN), "union branches", MALFORMED),
    "branch 2^32": (["long", "null"], long(1 << 32), "union branches", MALFORMED),
    "branch 1 of 1": (["long"], long(1) + long(7), "union branches", MALFORMED),
    "symbol 3 of 3": (ENUM, long(3), "expected the index of one of 3 enum symbols, found 3", MALFORMED),
    "symbol -1": (ENUM, long(-1), "enum symbols, found -1", MALFORMED),
    "symbol 2^32": (ENUM, long(1 << 32), "enum symbols", MALFORMED),
    "2^62 nulls": (list_of("null"), items(1 << 62, b"") + long(0), "zero bytes", "LimitError"),
    "-2^62 nulls": (list_of("null"), items(-(1 << 62), b"", 0) + long(0), "zero bytes", "LimitError"),
    "i64::MIN nulls": (list_of("null"), items(I64_MIN, b"", 0) + long(0), "zero bytes", "LimitError"),
    "2^40 fixed of size 0": (
        list_of({"type": "fixed", "name": "F", "size": 0}),
        items(1 << 40, b"") + long(0),
        "zero bytes",
        "LimitError",
    ),
}
# Errors that only decoding detects, because skipping passes over them.
UNSEEN_BY_SKIPPING = ("size of", "UTF-8", "surrogate", "character", "boolean", "symbol", "an int")


def bad_case(name: str, **options: Any) -> Case:
    """Returns a valid record in a valid block, followed by a block with a valid record and the bad value."""
    schema, data, _, _ = BAD_VALUES[name]
    fields = record("R", id="long", x=schema)
    good = good_value(schema)
    blocks = [(1, long(1) + good), (2, long(2) + good + long(3) + data)]
    return Case(name, container(fields, blocks), batch_size=1, **options)


def good_value(schema: Any) -> bytes:
    match schema:
        case "long" | "int":
            return long(7)
        case "boolean":
            return b"\x01"
        case "float":
            return bytes(4)
        case "double":
            return bytes(8)
        case "string" | "bytes":
            return text("x")
        case ["null", *_]:
            return long(0)
        case ["long", "null"]:
            return long(1)
        case ["long"]:
            return longs(0, 7)
        case {"type": "enum"}:
            return long(1)
        case {"type": "fixed", "size": n}:
            return bytes(n)
    return long(0)


def x_features(schema: Any) -> dict[str, Any]:
    """Returns features that read `x`, without reading the data."""
    ragged = fastpipe.RaggedSpec
    match schema:
        case {"type": "map"}:
            return {"x.keys": ragged((None,), "string"), "x.values": ragged((None,), "int64")}
        case {"type": "array", "items": "null"}:
            return {"x": ragged((None,), "bool", on_null="mask")}
        case {"type": "array", "items": {"type": "fixed"}}:
            return {"x": ragged((None,), "bytes")}
        case {"type": "array", "items": item}:
            dtype = {"float": "float32", "long": "int64", "int": "int32", "boolean": "bool"}.get(item, item)
            return {"x": ragged((None,), dtype)}
        case {"type": "enum"}:
            return {"x": fastpipe.DenseSpec((), "int32")}
        case {"type": "fixed"}:
            return {"x": fastpipe.DenseSpec((), "bytes")}
        case list():
            nulls = "mask" if "null" in schema else "error"
            return {"x": fastpipe.DenseSpec((), "int64", on_null=nulls)}
    dtypes = {"float": "float32", "double": "float64", "long": "int64", "int": "int32", "boolean": "bool"}
    return {"x": fastpipe.DenseSpec((), dtypes.get(schema, schema))}


def bad_cases(**options: Any) -> list[Case]:
    return [bad_case(n, features=x_features(BAD_VALUES[n][0]), **options) for n in BAD_VALUES]


def test_hostile_values(tmp_path: Path) -> None:
    for case, seen in outcomes(tmp_path, bad_cases(), memory=2 * GIB):
        _, _, words, error = BAD_VALUES[case.name]
        assert (seen.error, seen.opening) == (error, False), (case.name, seen)
        assert words in seen.where["reason"], (case.name, seen.message)
        # The bad record is the second one of the second block. The records before it are intact.
        assert (seen.where["block"], seen.where["record"]) == (1, 1), (case.name, seen)
        assert seen.where["offset"] == len(header(record("R", id="long", x=BAD_VALUES[case.name][0]))) + len(
            block(1, long(1) + good_value(BAD_VALUES[case.name][0]))
        )
        assert seen.where["feature"] is not None, case.name
        assert seen.where["feature"].split(".")[0] == "x", (case.name, seen)
        assert seen.rows == 2, (case.name, seen)
        assert seen.seconds < 2, case.name


def test_inferring_from_hostile_values(tmp_path: Path) -> None:
    cases = [bad_case(name) for name in BAD_VALUES]
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.error == BAD_VALUES[case.name][3], (case.name, seen)
        assert seen.where["block"] == 1


def test_skipping_hostile_values(tmp_path: Path) -> None:
    """Skipping checks less, but never leaves the block and never takes long."""
    features = {"id": fastpipe.DenseSpec((), "int64")}
    cases = [bad_case(name, features=features) for name in BAD_VALUES]
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.seconds < 2, case.name
        if seen.error is None:
            assert any(words in case.name for words in UNSEEN_BY_SKIPPING), case.name
            assert seen.batches == [repr({"id": [i]}) for i in (1, 2, 3)]
        else:
            assert seen.where["block"] == 1, (case.name, seen)


def test_errors_do_not_depend_on_threads(tmp_path: Path) -> None:
    by_threads = []
    for threads in (1, 2, 4):
        cases = bad_cases(threads=threads)
        cases += [
            Case(f"{codec} {at}", damaged, features=SMALL_FEATURES, batch_size=2, threads=threads)
            for codec in CODECS
            for at, damaged in later_damage(codec)
        ]
        found = [dataclasses.replace(seen, seconds=0) for _, seen in outcomes(tmp_path, cases)]
        by_threads.append(found)
    for name, first, second, third in zip([c.name for c in cases], *by_threads, strict=True):
        assert first == second == third, name


def later_damage(codec: str) -> list[tuple[int, bytes]]:
    """Returns blocks of one row, several of them damaged, so that threads encounter the damage in any order."""
    rows = [small_row(i) for i in range(40)]
    pieces = [header(SMALL, codec)]
    for i, row in enumerate(rows):
        pieces.append(block(1, row[:-3] if i >= 15 and i % 3 == 0 else row, codec))
    return [(15, b"".join(pieces))]


@pytest.mark.parametrize("codec", CODECS)
def test_batches_before_damage_come_first(codec: str, tmp_path: Path) -> None:
    ((hit, data),) = later_damage(codec)
    cases = [
        Case(f"batches of {n}", data, features=SMALL_FEATURES, batch_size=n, threads=threads)
        for n in (1, 2, 4, 16, 100)
        for threads in (1, 2, 4)
    ]
    for case, seen in outcomes(tmp_path, cases):
        assert seen.error == "MalformedFileError"
        assert not seen.opening
        assert seen.where["block"] == hit
        assert seen.where["record"] == 0
        assert seen.rows == hit // case.batch_size * case.batch_size, case.name


def test_an_error_has_all_attributes(tmp_path: Path) -> None:
    user = record("User", age="int", name="string")
    schema = record("R", user=user, x="long")
    row = long(30) + text("n") + long(1)
    path = tmp_path / "x.avro"
    head = header(schema)
    first = block(2, row * 2)
    path.write_bytes(head + first + block(3, row * 2 + long(1 << 40) + text("n") + long(1)))
    reader = fastpipe.read_avro(path, features={"user.age": fastpipe.DenseSpec((), "int32")}, batch_size=1)
    batches = iter(reader)
    assert [next(batches)["user.age"].tolist() for _ in range(4)] == [[30]] * 4
    with pytest.raises(fastpipe.errors.MalformedFileError) as caught:
        next(batches)
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.path == str(path)
    assert (error.block, error.offset) == (1, len(head) + len(first))
    assert (error.record, error.feature) == (2, "user.age")
    assert error.reason == f"expected an int of 32 bits, found {1 << 40}"
    for words in (str(path), "block 1", str(error.offset), "record 2", "user.age", "expected an int", str(1 << 40)):
        assert words in str(error)
    for _ in range(3):
        with pytest.raises(fastpipe.errors.MalformedFileError) as again:
            next(batches)
        assert (str(again.value), vars(again.value)) == (str(error), vars(error))
    assert pickle.loads(pickle.dumps(error)).__dict__ == error.__dict__
    # A new pass delivers the batches before the error and raises it again.
    batches = iter(reader)
    assert [next(batches)["user.age"].tolist() for _ in range(4)] == [[30]] * 4
    with pytest.raises(fastpipe.errors.MalformedFileError):
        next(batches)


NULLS = fastpipe.RaggedSpec((None,), "bool", on_null="mask")


def test_records_of_zero_bytes(tmp_path: Path) -> None:
    """The size of the file doesn't limit their number, so a fixed limit does."""
    value = {"value": fastpipe.DenseSpec((), "bool", on_null="mask")}
    cases = [
        Case("2^40 nulls", container('"null"', [(1 << 40, b"")]), features=value),
        Case("2^30 nulls", container('"null"', [(1 << 30, b"")]), features=value),
        Case("2^24 + 1 nulls", container('"null"', [((1 << 24) + 1, b"")]), features=value),
        Case("2^40 empty records", container(EMPTY, [(1 << 40, b"")])),
        Case("2^30 records of nulls", container(record("R", a="null", b=EMPTY), [(1 << 30, b"")])),
        Case("2^30 packed nulls", container('"null"', [(1 << 30, b"")], "deflate"), features=value),
    ]
    for case, seen in outcomes(tmp_path, cases, memory=2 * GIB):
        assert seen.error == "LimitError", (case.name, seen)
        assert seen.where["block"] == 0
        assert seen.seconds < 1
    # Counts up to the limit are read.
    most = Case(
        "2^24 nulls", container('"null"', [(1 << 24, b"")]), features=value, batch_size=1 << 20, count=True, threads=2
    )
    assert one(tmp_path, most).rows == 1 << 24


def test_items_of_zero_bytes_add_up(tmp_path: Path) -> None:
    """Each array is below the limit, but together they exceed it.

    The limit applies to the block, however it is read.
    """
    row = items(1 << 20, b"") + long(0) + long(3)
    whole = container(record("R", a=list_of("null"), x="int"), [(40, row * 40)])
    several = items(1 << 20, b"") * 40 + long(0) + long(3)
    cases = [
        Case("decoded", whole, features={"a": NULLS}, batch_size=40, count=True),
        Case("skipped", whole, features={"x": fastpipe.DenseSpec((), "int32")}, batch_size=40, count=True),
        Case("inferred", whole, batch_size=40, count=True),
        Case(
            "blocks of one array",
            container(record("R", a=list_of("null"), x="int"), [(1, several)]),
            features={"a": NULLS},
            count=True,
        ),
    ]
    for case, seen in outcomes(tmp_path, cases, memory=4 * GIB):
        assert seen.error == "LimitError", (case.name, seen)
        assert seen.where["block"] == 0
        assert seen.seconds < 5


@pytest.mark.parametrize("inner", ["nulls", "empty records", "nested"])
def test_items_that_hold_many_nulls(inner: str, tmp_path: Path) -> None:
    """An array of records with many fields without bytes: a few bytes must not expand to fill memory."""
    match inner:
        case "nulls":
            item: Any = record("Item", **{f"n{i}": "null" for i in range(500)})
        case "empty records":
            item = record("Item", n="null", **{f"e{i}": record(f"E{i}", n="null") for i in range(500)})
        case _:
            # Each contains 2^10 nulls.
            item = "null"
            for i in range(10):
                item = record(f"N{i}", a=item, b=f"N{i - 1}" if i else "null")
    data = container(record("R", a=list_of(item), x="int"), [(1, items(1 << 24, b"") + long(0) + long(3))])
    (seen, *_), peak = measured(tmp_path, [Case(inner, data, batch_size=1, count=True)], memory=6 * GIB)
    assert seen.error in TYPED, seen
    if sys.platform.startswith("linux"):
        assert peak < 2.5 * GIB


NODE = record("Node", value="long", next=["null", "Node"])


@pytest.mark.parametrize("threads", [1, 4])
def test_deep_recursive_data(threads: int, tmp_path: Path) -> None:
    """Recursive types can only be skipped. However deep the data is, the stack doesn't overflow."""
    features = {"x": fastpipe.DenseSpec((), "int32")}

    def linked(n: int) -> bytes:
        return container(record("R", list=NODE, x="int"), [(1, longs(*[7, 1] * (n - 1), 7, 0, 3))])

    tree = record("Tree", children=list_of("Tree"), keys={"type": "map", "values": "Tree"})

    def nested(n: int, piece: bytes) -> bytes:
        """Nests trees of one child each, through arrays or maps, followed by all the ends."""
        closing = long(0) + long(0)
        end = closing if piece == long(1) else long(0)
        return container(record("R", tree=tree, x="int"), [(1, piece * (n - 1) + closing + end * (n - 1) + long(3))])

    by_map = long(0) + long(1) + text("k")
    shallow = [Case(f"{n} nodes", linked(n), features=features, threads=threads) for n in (1, 2, 100)]
    shallow += [Case("trees", nested(50, long(1)), features=features, threads=threads)]
    shallow += [Case("maps", nested(50, by_map), features=features, threads=threads)]
    deep = [Case(f"{n} nodes", linked(n), features=features, threads=threads) for n in (200, 10_000, 100_000)]
    deep += [Case("deep trees", nested(100_000, long(1)), features=features, threads=threads)]
    deep += [Case("deep maps", nested(100_000, by_map), features=features, threads=threads)]
    for case, seen in outcomes(tmp_path, shallow + deep):
        assert seen.seconds < 1
        if case in shallow:
            assert seen.batches == [repr({"x": [3]})], (case.name, seen)
        else:
            assert seen.error == "LimitError", (case.name, seen)
            assert "nested deeper than" in seen.where["reason"]
            assert (seen.where["block"], seen.where["record"]) == (0, 0)
