"""Random Avro schemas with unions and logical types at all depths, their values, and helpers that read their files."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st

import fastpipe
import oracle
import wire
from oracle import Branch, Type

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
# Primitive types with a logical type. Some logical types don't fit and are ignored.
LOGICAL = [
    {"type": kind.removesuffix("16").removesuffix("12"), "logicalType": logical}
    for logical, (kinds, _) in oracle.LOGICAL.items()
    for kind in kinds.split()
]
WRONG = [
    {"type": "long", "logicalType": "date"},
    {"type": "string", "logicalType": "decimal", "precision": 3},
    {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 4},
    {"type": "bytes", "logicalType": "decimal"},
    {"type": "int", "logicalType": "of-somebody"},
]
SYMBOLS = ["RED", "GREEN", "BLUE", "_x"]
TEXTS = ["", "a", "ä漢", "x" * 70, "\0"]


class Maker:
    """Makes schemas. Each named type has a unique name; some have a namespace, or the last name of another type."""

    def __init__(self, rng: random.Random, *, twins: bool = True) -> None:
        self.rng = rng
        self.twins = twins
        self.names: set[str] = set()

    def record(self, depth: int, least: int = 0) -> dict[str, Any]:
        schema = self.named("record")
        names = self.rng.sample(["a", "b", "c", "keys", "values", "int"], self.rng.randint(least, 3))
        schema["fields"] = [{"name": name, "type": self.any(depth - 1)} for name in names]
        return schema

    def named(self, kind: str) -> dict[str, Any]:
        """Returns a named type with a namespace, so that its content does not depend on the enclosing namespace."""
        while True:
            name = f"{self.rng.choice('mn')}.{self.rng.choice(['A', 'B', 'int', 'array'])}{self.rng.choice(['', '1'])}"
            if name in self.names or not self.twins:
                name += str(len(self.names))
            if name not in self.names:
                self.names.add(name)
                return {"type": kind, "name": name}

    def any(self, depth: int) -> Any:
        kind = self.rng.random()
        if kind < 0.35:
            return self.union(depth)
        return self.single(depth)

    def single(self, depth: int) -> Any:
        kinds = ["plain", "logical", "logical", "decimal", "enum", "fixed"]
        kinds += ["array", "map", "record", "array"] if depth > 0 else []
        match self.rng.choice(kinds):
            case "plain":
                return self.rng.choice(PRIMITIVES)
            case "logical":
                schema = dict(self.rng.choice([*LOGICAL, *LOGICAL, *WRONG]))
                if schema["type"] == "fixed":
                    schema |= self.named("fixed") | {"size": 12 if schema["logicalType"] == "duration" else 16}
                return schema
            case "decimal":
                return self.decimal()
            case "enum":
                return self.named("enum") | {"symbols": SYMBOLS[: self.rng.randint(1, 4)]}
            case "fixed":
                return self.named("fixed") | {"size": self.rng.randint(1, 9)}
            case "array":
                return wire.list_of(self.any(depth - 1))
            case "map":
                return {"type": "map", "values": self.any(depth - 1)}
        return self.record(depth)

    def decimal(self) -> dict[str, Any]:
        size = self.rng.randint(1, 16)
        precision = self.rng.randint(1, len(str(2 ** (8 * size - 1) - 1)) - 1)
        schema = {"logicalType": "decimal", "precision": precision, "scale": self.rng.randint(0, precision)}
        if self.rng.random() < 0.5:
            return {"type": "bytes"} | schema
        return self.named("fixed") | {"size": size} | schema

    def union(self, depth: int) -> list[Any]:
        branches: list[Any] = []
        kinds: set[str] = set()
        least = self.rng.choice([1, 2, 2, 3, 4])
        if self.rng.random() < 0.2:
            return self.rng.sample(["int", "long", "float", "double", "null"], least)
        while len(branches) < least:
            branch = "null" if not branches and self.rng.random() < 0.5 else self.single(depth)
            kind = branch if isinstance(branch, str) else branch["type"]
            if kind not in kinds or kind in ("record", "enum", "fixed"):
                kinds.add(kind)
                branches.append(branch)
        self.rng.shuffle(branches)
        return branches


@st.composite
def schemas(draw: st.DrawFn, *, twins: bool = True) -> dict[str, Any]:
    """The schema of a record with a row index `id` and random other fields.

    Args:
        draw: Drawing function of Hypothesis.
        twins: Whether several types may have the same last name.
    """
    maker = Maker(random.Random(draw(st.integers(0, 2**32 - 1))), twins=twins)
    fields = [{"name": "id", "type": "long"}]
    fields += [{"name": f"f{k}", "type": maker.any(3)} for k in range(draw(st.integers(1, 3)))]
    return {"type": "record", "name": "Root", "fields": fields}


class Values:
    """Makes values in the form that `oracle.encode` takes.

    Decimals of int64 may have more digits than their precision.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.longest = self.rng.choice([0, 1, 3, 3])

    def rows(self, root: Type, count: int, start: int = 0) -> list[Any]:
        rows = [self.of(root) for _ in range(count)]
        for number, row in enumerate(rows, start):
            row["id"] = number
        return rows

    def of(self, node: Type) -> Any:
        rng = self.rng
        match node.kind:
            case "null":
                return None
            case "boolean":
                return rng.random() < 0.5
            case "int":
                return rng.choice([0, 1, -1, 2**31 - 1, -(2**31), rng.randint(-99, 99)])
            case "long":
                # For a time, the minimum means NaT.
                return rng.choice([0, 2**53 + 1, 2**63 - 1, -(2**63), rng.randint(-(10**15), 10**15)])
            case "float":
                return rng.choice([0.0, -0.0, 1.5, float("inf"), float("nan"), -0.25])
            case "double":
                return rng.choice([0.0, -0.0, 0.1, float("inf"), float("nan"), 1e300])
            case "string" if node.logical == "uuid":
                text = rng.randbytes(16).hex()
                return "-".join([text[:8], text[8:12], text[12:16], text[16:20], text[20:]])
            case "string":
                return rng.choice(TEXTS)
            case "bytes" | "fixed" if node.logical == "decimal":
                return self.decimal(node)
            case "bytes":
                return rng.randbytes(rng.randint(0, 20))
            case "fixed":
                return rng.randbytes(node.size)
            case "enum":
                return rng.choice(node.parts)
            case "array":
                return [self.of(node.parts[0]) for _ in range(rng.randint(0, self.longest))]
            case "map":
                return {f"{k}{rng.choice(TEXTS)}": self.of(node.parts[0]) for k in range(rng.randint(0, self.longest))}
            case "record":
                return {name: self.of(part) for name, part in node.parts}
            case "union":
                index = rng.randrange(len(node.parts))
                return Branch(index, self.of(node.parts[index]))
        raise AssertionError(node)

    def decimal(self, node: Type) -> bytes:
        size = node.size or self.rng.randint(1, 8 if node.precision <= 18 else 16)
        most = 8 if node.precision <= 18 else 16
        value = self.rng.randbytes(min(size, most))
        # The remaining bytes extend the sign.
        fill = b"\xff" if value[0] & 0x80 else b"\0"
        more = size - len(value) if node.kind == "fixed" else self.rng.randint(0, 3)
        return fill * more + value


_numbers = itertools.count()


@contextlib.contextmanager
def files(*blobs: bytes) -> Iterator[list[str]]:
    """Yields the paths of temporary files with these contents, in order."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        paths = [Path(folder) / f"{next(_numbers):08}.avro" for _ in blobs]
        for path, blob in zip(paths, blobs, strict=True):
            path.write_bytes(blob)
        yield [str(path) for path in paths]


def container(schema: Any, rows: Sequence[Any], seed: int = 0, codec: str = "null") -> bytes:
    """Returns a file of rows, in blocks of random sizes."""
    return oracle.container(schema, rows, random.Random(seed), codec)


def check_orders(paths: list[str], expected: Sequence[dict[str, Any]], order: dict[str, Any], **options: Any) -> None:
    """Reads rows in an order, resuming in the middle, and checks that each row is correct and that none is missing.

    Args:
        paths: Paths of the files.
        expected: Values of all features, indexed by `id`.
        order: Arguments that determine the order.
        **options: Further arguments of `read_avro`.
    """
    make = lambda: fastpipe.read_avro(paths, **{"seed": 1, "num_threads": 1} | order | options)  # noqa: E731
    reader = make()
    assert reader.num_rows == len(expected)
    ids: list[int] = []
    steps = 0
    # Saves a state in the middle; a new reader that loads it must read the rest.
    middle = len(reader) // 2
    batches = iter(reader)
    while True:
        if steps == middle:
            state = json.loads(json.dumps(reader.state_dict()))
            reader = make()
            reader.load_state_dict(state)
            batches = iter(reader)
        batch = next(batches, None)
        if batch is None:
            break
        steps += 1
        columns = {name: oracle.rows(node, counted=True) for name, node in batch.items()}
        ids += columns["id"]
        for at, number in enumerate(columns["id"]):
            for name, column in columns.items():
                problem = oracle.difference(expected[number][name], column[at], f"{name} of row {number}")
                assert problem is None, problem
    if order["drop_last"]:
        assert len(ids) == len(expected) // order["batch_size"] * order["batch_size"]
    else:
        assert len(ids) == len(expected)
    assert len(set(ids)) == len(ids)


def followed(root: Type, rows: Sequence[Any], symbols: dict[str, list[str]], names: Sequence[str]) -> list[Any]:
    """Returns the value of each feature in each row, with enums as codes."""

    def value(row: Any, name: str) -> Any:
        found = oracle.follow(root, row, name)
        return oracle.codes(found, symbols[name]) if name in symbols else found

    return [{name: value(row, name) for name in names} for row in rows]


def read(paths: Any, **options: Any) -> dict[str, list[Any]]:
    """Returns all values of each feature, in file order, with times as numbers of their unit."""
    return oracle.columns(fastpipe.read_avro(paths, **{"batch_size": 3} | options))
