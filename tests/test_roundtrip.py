"""Random schemas, data and specs: readers return exactly what fastavro, apache-avro or the oracle wrote."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastpipe
import oracle

CODECS = ["null", "deflate", "snappy", "zstandard", "bzip2", "xz"]
BLOCK_BYTES = [1, 60, 1000, 16_000]
LEAVES = ["null", "boolean", "int", "long", "float", "double", "bytes", "string", "fixed", "enum"]
NESTED = ["record", "array", "map"]
FIELD_NAMES = ["a", "b", "c", "d", "keys", "values", "_x1", "Value", "indices"]
SYMBOLS = ["RED", "GREEN", "BLUE", "_black", "w0"]
TEXTS = ["", "a", "fastpipe", "ä", "漢字", "\U0001f600", "\0", "line\nbreak", "x" * 70, "é" * 130]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roundtrip")


_numbers = itertools.count()


@contextlib.contextmanager
def new_file(folder: Path) -> Iterator[Path]:
    """Yields a path that was never used before, because a mapped file must not be overwritten."""
    path = folder / f"{next(_numbers)}.avro"
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):  # Windows can't delete a mapped file. The folder is deleted later.
            path.unlink()


def write(path: Path, schema: Any, records: list[Any], codec: str, block_bytes: int) -> None:
    with path.open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), records, codec=codec, sync_interval=block_bytes)


# --- Random schemas ---


@dataclass
class Schemas:
    """Draws schemas. Each named type gets a unique name, and later types may refer to it by that name."""

    draw: st.DrawFn
    named: list[tuple[str, str]] = field(default_factory=list)  # Full name and kind.
    count: int = 0

    def root(self) -> Any:
        if self.draw(st.integers(0, 4)) > 0:
            return self.record(3, "", least=1)
        return self.any(3, "")

    def any(self, depth: int, space: str) -> Any:
        """Returns a type, possibly in a union with null or in a union of one branch."""
        union = self.draw(st.sampled_from(["", "", "", "", "null first", "null last", "one"]))
        kind = self.draw(st.sampled_from(LEAVES + NESTED * 2 if depth > 0 else LEAVES))
        if union in ("null first", "null last") and kind == "null":
            kind = "long"
        schema = self.of(kind, depth, space)
        unions = {"": schema, "null first": ["null", schema], "null last": [schema, "null"], "one": [schema]}
        return unions[union]

    def of(self, kind: str, depth: int, space: str) -> Any:
        if kind == "array":
            return {"type": "array", "items": self.any(depth - 1, space)}
        if kind == "map":
            return {"type": "map", "values": self.any(depth - 1, space)}
        if kind not in ("record", "enum", "fixed"):
            return kind
        # A name without a namespace would be resolved in the enclosing namespace.
        again = [name for name, of in self.named if of == kind and ("." in name or not space)]
        if again and self.draw(st.booleans()):
            return self.draw(st.sampled_from(again))
        if kind == "record":
            return self.record(depth, space)
        full, schema = self.name(kind, space)
        if kind == "fixed":
            schema["size"] = self.draw(st.integers(1, 9))
        else:
            schema["symbols"] = SYMBOLS[: self.draw(st.integers(1, len(SYMBOLS)))]
        self.named.append((full, kind))
        return schema

    def record(self, depth: int, space: str, least: int = 0) -> Any:
        full, schema = self.name("record", space)
        inside = full.rpartition(".")[0]
        names = self.draw(st.lists(st.sampled_from(FIELD_NAMES), min_size=least, max_size=4, unique=True))
        schema["fields"] = [{"name": name, "type": self.any(depth - 1, inside)} for name in names]
        self.named.append((full, "record"))  # Only now, because recursive types are not read.
        return schema

    def name(self, kind: str, space: str) -> tuple[str, dict[str, Any]]:
        self.count += 1
        name = f"T{self.count}"
        own = self.draw(st.sampled_from(["", "", "n", "n.m"]))
        if not own:
            return (f"{space}.{name}" if space else name), {"type": kind, "name": name}
        if self.count % 2:
            return f"{own}.{name}", {"type": kind, "name": f"{own}.{name}"}
        return f"{own}.{name}", {"type": kind, "name": name, "namespace": own}


@st.composite
def schemas(draw: st.DrawFn) -> Any:
    schema = Schemas(draw).root()
    if not oracle.leaves(oracle.resolve(schema)):
        # The schema contains nothing but empty records, so add a field that can be read.
        return {
            "type": "record",
            "name": "Around",
            "fields": [{"name": "a", "type": schema}, {"name": "b", "type": "int"}],
        }
    return schema


class Values:
    """Generates random values. All arrays of some types have the same length, so that they are inferred as dense."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lengths: dict[int, int | None] = {}

    def rows(self, node: oracle.Type, count: int) -> list[Any]:
        return [self.of(node) for _ in range(count)]

    def length(self, node: oracle.Type) -> int:
        if id(node) not in self.lengths:
            self.lengths[id(node)] = self.rng.choice([None, None, 1, 2, 3])
        fixed = self.lengths[id(node)]
        return self.rng.choice([0, 1, 1, 2, 3, 5]) if fixed is None else fixed

    def of(self, node: oracle.Type) -> Any:
        rng = self.rng
        match node.kind:
            case "null":
                return None
            case "boolean":
                return rng.random() < 0.5
            case "int":
                return integer(rng, 31)
            case "long":
                return integer(rng, 63)
            case "float":
                return real(rng, "<f")
            case "double":
                return real(rng, "<d")
            case "bytes":
                return rng.randbytes(rng.choice([0, 1, 3, 8, 64, 200]))
            case "string":
                return rng.choice(TEXTS)
            case "fixed":
                return rng.randbytes(node.size)
            case "enum":
                return rng.choice(node.parts)
            case "union":
                only = oracle.inner(node)
                assert only is not None
                return None if len(node.parts) == 2 and rng.random() < 0.3 else self.of(only)
            case "record":
                return {name: self.of(part) for name, part in node.parts}
            case "array":
                return [self.of(node.parts[0]) for _ in range(self.length(node))]
            case "map":
                keys = rng.sample([*TEXTS, "k1", "k2"], self.length(node))
                return {key: self.of(node.parts[0]) for key in keys}
        raise AssertionError(node)


def integer(rng: random.Random, bits: int) -> int:
    if rng.random() < 0.1:
        return rng.choice([-(2**bits), 2**bits - 1, 0, -1])
    number = rng.getrandbits(rng.randint(0, bits))
    return number if rng.random() < 0.5 else -number


def real(rng: random.Random, code: str) -> float:
    if rng.random() < 0.3:
        return rng.choice([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -0.5])
    (number,) = struct.unpack(code, rng.randbytes(struct.calcsize(code)))
    return math.nan if math.isnan(number) else number


seeds = st.integers(0, 2**32 - 1)
counts = st.sampled_from([17, 40, 5, 2, 1, 0])
writers = st.sampled_from([*CODECS, "oracle"])
passes = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 45), "num_threads": st.integers(1, 3), "prefetch": st.integers(1, 4)}
)


def read_all_and_some(path: Path, schema: Any, records: list[Any], options: dict[str, Any], rng: random.Random) -> None:
    """Compares all columns with the records, and then a selection by name and by spec."""
    root = oracle.resolve(schema)

    def expected(name: str, record: Any) -> Any:
        return oracle.follow(root, record, name)

    reader = fastpipe.read_avro(path, **options)
    names = [leaf.name for leaf in oracle.leaves(root)]
    assert list(reader.features) == names
    oracle.check(reader, records, expected)
    some = rng.sample(names, rng.randint(1, len(names)))
    reader = fastpipe.read_avro(path, columns=some, **options)
    assert set(reader.features) == set(some)
    oracle.check(reader, records, expected)
    specs = {name: reader.features[name] for name in some}
    reader = fastpipe.read_avro(path, features=specs, **options)
    assert list(reader.features) == some
    oracle.check(reader, records, expected)


@given(schemas(), seeds, counts, st.sampled_from(CODECS), st.sampled_from(BLOCK_BYTES), passes)
def test_any_schema(
    folder: Path, schema: Any, seed: int, count: int, codec: str, block_bytes: int, options: dict[str, Any]
) -> None:
    records = Values(seed).rows(oracle.resolve(schema), count)
    with new_file(folder) as path:
        write(path, schema, records, codec, block_bytes)
        read_all_and_some(path, schema, records, options, random.Random(seed))


@given(schemas(), seeds, counts, st.sampled_from(["null", "deflate"]), passes)
def test_arrays_and_maps_in_several_blocks(
    folder: Path, schema: Any, seed: int, count: int, codec: str, options: dict[str, Any]
) -> None:
    records = Values(seed).rows(oracle.resolve(schema), count)
    with new_file(folder) as path:
        path.write_bytes(oracle.container(schema, records, random.Random(seed), codec))
        read_all_and_some(path, schema, records, options, random.Random(seed))


@settings(max_examples=60)
@given(schemas(), seeds, counts, passes)
def test_fields_read_more_than_once(folder: Path, schema: Any, seed: int, count: int, options: dict[str, Any]) -> None:
    """Reads each field twice, as inferred and with every array ragged, and also reads the lengths of all arrays."""
    root = oracle.resolve(schema)
    records = Values(seed).rows(root, count)
    found = {leaf.name: leaf for leaf in oracle.leaves(root)}
    counted = {f"{path} {dims}": (path, dims, nullable) for path, dims, nullable in oracle.arrays(root)}
    with new_file(folder) as path:
        path.write_bytes(oracle.container(schema, records, random.Random(seed)))
        features: dict[str, Any] = dict(fastpipe.infer_features(path))
        for name, leaf in found.items():
            again = features[name] if leaf.type.kind == "sparse" else leaf.spec()
            features[f"again {name}"] = dataclasses.replace(again, field=name)
        for name, (field_path, dims, nullable) in counted.items():
            options_of: Any = {"field": field_path, "length": True, "on_null": "mask" if nullable else "error"}
            make = fastpipe.RaggedSpec if dims else fastpipe.DenseSpec
            features[name] = make((None,) * dims, "int64", **options_of)
        names = random.Random(seed).sample(list(features), len(features))
        reader = fastpipe.read_avro(path, features={name: features[name] for name in names}, **options)

        def expected(name: str, record: Any) -> Any:
            if name in counted:
                return oracle.lengths(root, record, *counted[name][:2])
            return oracle.follow(root, record, name.removeprefix("again "))

        oracle.check(reader, records, expected)


@given(schemas(), seeds, st.sampled_from(["null", "deflate"]))
def test_the_oracle_writes_avro(folder: Path, schema: Any, seed: int, codec: str) -> None:
    records = Values(seed).rows(oracle.resolve(schema), 5)
    data = oracle.container(schema, records, random.Random(seed), codec)
    parsed = fastavro.parse_schema(json.loads(oracle.split(data)[0]["avro.schema"]))
    found: list[Any] = []
    for count, block in oracle.split(data)[1]:
        stream = io.BytesIO(block)
        found += [fastavro.schemaless_reader(stream, parsed) for _ in range(count)]
        assert stream.read() == b""
    assert oracle.same(found, records)


# --- Another writer ---


@given(schemas(), seeds, counts, st.sampled_from(CODECS), st.sampled_from(BLOCK_BYTES), passes)
def test_any_schema_by_apache_avro(
    folder: Path,
    rewriter: Callable[..., str],
    schema: Any,
    seed: int,
    count: int,
    codec: str,
    block_bytes: int,
    options: dict[str, Any],
) -> None:
    records = Values(seed).rows(oracle.resolve(schema), count)
    with new_file(folder) as source, new_file(folder) as path:
        write(source, schema, records, "null", 1000)
        assert rewriter(source, path, codec, block_bytes) == "ok"
        with path.open("rb") as file:
            reader = fastavro.reader(file)
            assert reader.codec == codec
            # The order of its maps differs.
            again = list(reader)
        assert oracle.same(in_order(again), in_order(records))
        read_all_and_some(path, schema, again, options, random.Random(seed))


def in_order(value: Any) -> Any:
    """Returns the value with its dicts sorted by key."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(item) for item in value] if isinstance(value, list) else value


def test_the_rewriter_reports_errors(folder: Path, rewriter: Callable[..., str]) -> None:
    assert rewriter("nowhere.avro", folder / "x.avro", "null", 1).startswith("error: ")
    assert rewriter("two", "fields").startswith("error: ")


# --- Specs against data ---

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float32", "float64"]
DTYPES = {
    "boolean": ["bool", *INTEGERS, *FLOATS],
    "int": INTEGERS + FLOATS,
    "long": INTEGERS + FLOATS,
    "float": FLOATS,
    "double": FLOATS,
    "enum": [*INTEGERS, "string", "bytes"],
    "string": ["string", "bytes"],
    "bytes": ["bytes", "string"],
    "fixed": ["bytes", "uint8"],
}


class Misfit(Exception):
    """The value doesn't fit the spec. Contains all possible errors, because any of them may be found first."""

    def __init__(self, *errors: type[fastpipe.FastpipeError]) -> None:
        self.errors = errors


class Each:
    """Collects the results for several values, or the errors of all values that are wrong."""

    def __init__(self) -> None:
        self.errors: list[type[fastpipe.FastpipeError]] = []

    def __call__(self, make: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return make(*arguments)
        except Misfit as misfit:
            self.errors += misfit.errors
            return None

    def close(self) -> None:
        if self.errors:
            raise Misfit(*self.errors)


def convert(value: Any, kind: str, dtype: str) -> Any:
    """Returns a non-null value as the dtype represents it. An enum is represented by its symbol."""
    if kind == "enum":
        return value.encode() if dtype == "bytes" else value
    if dtype == "string":
        return value.decode() if isinstance(value, bytes) else value
    if dtype == "bytes":
        return value.encode() if isinstance(value, str) else value
    if dtype == "bool":
        return value
    if dtype.startswith("float"):
        with np.errstate(over="ignore"):
            stored = float(np.dtype(dtype).type(value))
        inexact = isinstance(value, int) and int(stored) != value
        if inexact or (math.isinf(stored) and not math.isinf(value)):
            raise Misfit(fastpipe.errors.ValueRangeError)
        return stored
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max:
        raise Misfit(fastpipe.errors.ValueRangeError)
    return int(value)


def zero(dtype: str) -> Any:
    return {"string": "", "bytes": b"", "bool": False}.get(dtype, 0.0 if dtype.startswith("float") else 0)


def full(shape: Sequence[int], value: Any) -> Any:
    return value if not shape else [full(shape[1:], value) for _ in range(shape[0])]


def shaped(value: Any, spec: Any, kind: str, nullable: Sequence[bool], level: int = 0) -> Any:
    """Returns what a row with this spec should be, from the nested lists in the file.

    Raises:
        Misfit: If the value doesn't fit the spec.
    """
    shape = spec.shape
    ragged = max((i + 1 for i, size in enumerate(shape) if size is None), default=0)
    fixed = [i for i, flag in enumerate(nullable) if flag and i >= ragged]
    masked = max(fixed, default=-1) if spec.on_null == "mask" else -1  # The level that the mask covers.
    if value is None:
        if spec.on_null == "error":
            raise Misfit(fastpipe.errors.NullValueError)
        if level < ragged:
            return None if spec.on_null == "mask" else []
        if spec.on_null == "mask":
            return full(shape[level:masked], None)
        fill = zero(spec.dtype) if spec.fill is None else spec.fill
        return full(shape[level:], fill)
    if level == len(shape):
        return convert(value, kind, spec.dtype)
    if isinstance(value, bytes):  # Reads a fixed as its bytes.
        return [convert(byte, "int", spec.dtype) for byte in value]
    pad = getattr(spec, "pad", None)
    size = shape[level]
    each = Each()
    # Items beyond the size are either cut off or refused.
    items = [each(shaped, item, spec, kind, nullable, level + 1) for item in (value if pad is None else value[:size])]
    if pad is None and size is not None and len(value) != size:
        each.errors.append(fastpipe.errors.ShapeError)
    each.close()
    if size is not None and len(items) < size:
        # Under a mask, the padding is masked too.
        padding = full(shape[level + 1 : masked], None) if masked > level else full(shape[level + 1 :], pad)
        items += [padding] * (size - len(items))
    return items


@dataclass
class Field:
    """A field with arrays around its values, where each level may be nullable, and a spec to read it with."""

    kind: str
    levels: list[str]  # "array", "map", or "records" in an array.
    unions: list[str]
    spec: Any
    name: str = "x"
    fixed_size: int = 3

    @property
    def nullable(self) -> list[bool]:
        return [union.startswith("null") for union in self.unions]

    def schema(self) -> Any:
        return {
            "type": "record",
            "name": "R",
            "fields": [
                {"name": "before", "type": "long"},
                {"name": "x", "type": self._schema(0)},
                {"name": "after", "type": "string"},
            ],
        }

    def _schema(self, level: int) -> Any:
        if level < len(self.levels):
            items = self._schema(level + 1)
            schema: Any = {"type": "array", "items": items}
            if self.levels[level] == "map":
                schema = {"type": "map", "values": items}
            elif self.levels[level] == "records":
                fields = [{"name": "other", "type": "string"}, {"name": "v", "type": items}]
                schema["items"] = {"type": "record", "name": f"Item{level}", "fields": fields}
        else:
            named = {
                "fixed": {"type": "fixed", "name": "F", "size": self.fixed_size},
                "enum": {"type": "enum", "name": "E", "symbols": SYMBOLS},
            }
            schema = named.get(self.kind, self.kind)
        union = self.unions[level]
        return {"": schema, "one": [schema], "null first": ["null", schema], "null last": [schema, "null"]}[union]

    def value(self, rng: random.Random, tame: bool, level: int = 0) -> Any:
        if self.nullable[level] and rng.random() < 0.2:
            return None
        if level == len(self.levels):
            return scalar(rng, self.kind, self.spec.dtype, tame, self.fixed_size)
        size = self.spec.shape[level]
        if size is None or getattr(self.spec, "pad", None) is not None or (not tame and rng.random() < 0.05):
            size = rng.choice([0, 1, 2, 3, 4])
        items = [self.value(rng, tame, level + 1) for _ in range(size)]
        if self.levels[level] == "map":
            return {f"key {i}": item for i, item in enumerate(items)}
        return (
            [{"other": "o" * i, "v": item} for i, item in enumerate(items)]
            if self.levels[level] == "records"
            else items
        )


def scalar(rng: random.Random, kind: str, dtype: str, tame: bool, fixed_size: int) -> Any:
    """Returns a value of an Avro type. A tame value fits the dtype."""
    if kind == "bytes" and dtype == "string":
        return rng.choice(TEXTS).encode()
    node = oracle.Type(kind, parts=tuple(SYMBOLS), size=fixed_size)
    while True:
        value = Values(rng.getrandbits(32)).of(node)
        if not tame and rng.random() < 0.1:
            return value
        try:
            convert(value, kind, "bytes" if kind == "fixed" else dtype)
        except Misfit:
            continue
        return value


def constant(draw: st.DrawFn, dtype: str) -> Any:
    """Returns a constant for `fill` or `pad`."""
    if dtype == "string":
        return draw(st.sampled_from(["", "none", "¿?"]))
    if dtype == "bytes":
        return draw(st.sampled_from([b"", b"\xff\x00"]))
    if dtype == "bool":
        return draw(st.booleans())
    if dtype.startswith("float"):
        return draw(st.sampled_from([0.0, -1.5, math.inf, math.nan]))
    return draw(st.sampled_from([0, 1, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)]))


@st.composite
def nulls(draw: st.DrawFn, dtype: str) -> dict[str, Any]:
    options: list[dict[str, Any]] = [{"on_null": "mask"}, {"on_null": "fill"}, {"fill": constant(draw, dtype)}]
    return draw(st.sampled_from([*options, *options, {}]))


@st.composite
def fields(draw: st.DrawFn) -> Field:
    kind = draw(st.sampled_from(list(DTYPES)))
    dtype = draw(st.sampled_from(DTYPES[kind]))
    levels = draw(st.lists(st.sampled_from(["array", "array", "records", "map"]), max_size=3))
    unions = [draw(st.sampled_from(["", "", "one", "null first", "null last"])) for _ in range(len(levels) + 1)]
    options = draw(nulls(dtype))
    shape: list[int | None] = [draw(st.integers(1, 3)) for _ in levels]
    form = draw(st.sampled_from(["dense", "pad", "ragged", "ragged"])) if levels else "dense"
    size = draw(st.integers(1, 9))
    last = [size] if kind == "fixed" and dtype == "uint8" else []
    if form == "ragged":
        loose = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)).filter(any))
        shape = [None if free else exact for free, exact in zip(loose, shape, strict=True)]
        spec: Any = fastpipe.RaggedSpec((*shape, *last), dtype, **options)
    elif form == "pad" and dtype not in ("string", "bytes"):
        spec = fastpipe.DenseSpec((*shape, *last), dtype, pad=constant(draw, dtype), **options)
    else:
        spec = fastpipe.DenseSpec((*shape, *last), dtype, **options)
    name = "x" + "".join({"array": "", "map": ".values", "records": ".v"}[level] for level in levels)
    return Field(kind, levels, unions, spec, name, size)


def expect(
    path: Path, features: dict[str, Any], records: list[Any], row: Callable[[str, Any], Any], options: dict[str, Any]
) -> None:
    """Reads all batches. They must equal the rows, or raise an error that one of the rows calls for."""
    due: set[type[fastpipe.FastpipeError]] = set()
    for record in records:
        for name in features:
            try:
                row(name, record)
            except Misfit as misfit:
                due.update(misfit.errors)
    if due:
        with pytest.raises(tuple(due)) as caught:
            list(fastpipe.read_avro(path, features=features, **options))
        # The error names the feature, or a field on the path to the feature.
        where = caught.value.feature
        assert where is not None
        assert any(f"{name}.".startswith(f"{where}.") or where.startswith(f"{name}.") for name in features)
        assert caught.value.block is not None
        return
    reader = fastpipe.read_avro(path, features=features, **options)
    assert list(reader.features) == list(features)
    oracle.check(reader, records, row)


@given(
    fields(), st.booleans(), seeds, counts, st.sampled_from([*CODECS, "oracle"]), st.sampled_from(BLOCK_BYTES), passes
)
def test_any_spec(
    folder: Path, field: Field, tame: bool, seed: int, count: int, codec: str, block_bytes: int, options: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    records = [{"before": i, "x": field.value(rng, tame), "after": f"end of {i}"} for i in range(count)]
    schema = field.schema()
    root = oracle.resolve(schema)
    plain = {"before": fastpipe.DenseSpec((), "uint16"), "after": fastpipe.DenseSpec((), "string")}
    features = {field.name: field.spec} | {name: plain[name] for name in rng.sample(list(plain), rng.randint(0, 2))}

    def row(name: str, record: Any) -> Any:
        value = oracle.follow(root, record, name)
        return value if name in plain else shaped(value, field.spec, field.kind, field.nullable)

    with new_file(folder) as path:
        if codec == "oracle":
            path.write_bytes(oracle.container(schema, records, rng))
        else:
            write(path, schema, records, codec, block_bytes)
        expect(path, features, records, row, options)


# --- Sparse arrays ---


@dataclass
class SparseField:
    """A record of indices and values, and a spec to read it with."""

    kind: str
    spec: fastpipe.SparseSpec
    names: list[str]  # Names of the fields, in file order.
    wires: list[str]  # Types of the indices of each dimension.
    unions: dict[str, str]  # Unions around the record ("") and around its fields.
    item_union: str
    fixed_size: int = 3

    def schema(self) -> Any:
        def union(name: str, schema: Any) -> Any:
            how = self.unions[name]
            return {"": schema, "one": [schema], "null first": ["null", schema], "null last": [schema, "null"]}[how]

        named = {
            "fixed": {"type": "fixed", "name": "F", "size": self.fixed_size},
            "enum": {"type": "enum", "name": "E", "symbols": SYMBOLS},
        }
        value = named.get(self.kind, self.kind)
        items: dict[str, Any] = {f"indices{k}": wire for k, wire in enumerate(self.wires)}
        items["indices"] = self.wires[0]
        items["values"] = {"": value, "one": [value], "null first": ["null", value]}[self.item_union]
        parts = [{"name": n, "type": union(n, {"type": "array", "items": items[n]})} for n in self.names]
        sparse = union("", {"type": "record", "name": "S", "fields": parts})
        return {"type": "record", "name": "R", "fields": [{"name": "s", "type": sparse}, {"name": "i", "type": "int"}]}

    def value(self, rng: random.Random, tame: bool) -> Any:
        def is_null(name: str) -> bool:
            return self.unions[name].startswith("null") and rng.random() < 0.1

        if is_null(""):
            return None
        entries = 0 if any(is_null(name) for name in self.names) else rng.choice([0, 1, 2, 3, 7])
        out: dict[str, Any] = {}
        for name in self.names:
            length = entries if tame or rng.random() < 0.97 else rng.randint(0, 7)
            if length == 0 and is_null(name):
                out[name] = None
            elif name == "values":
                out[name] = [self.item(rng, tame) for _ in range(length)]
            else:
                out[name] = [self.index(rng, int(name[7:] or 0), tame) for _ in range(length)]
        return out

    def item(self, rng: random.Random, tame: bool) -> Any:
        if self.item_union.startswith("null") and rng.random() < 0.1:
            return None
        return scalar(rng, self.kind, self.spec.dtype, tame, self.fixed_size)

    def index(self, rng: random.Random, dim: int, tame: bool) -> int:
        most = 31 if self.wires[dim] == "int" else 40
        size = self.spec.shape[dim]
        if self.spec.check_indices and not tame and rng.random() < 0.05:
            return rng.choice([size or -5, -1, -2, 2**31 - 1, -(2**31)])
        if size is None or not self.spec.check_indices:
            return rng.getrandbits(rng.randint(0, most))
        return rng.randrange(size)

    def row(self, record: Any) -> Any:
        """Returns the entries of a row, or raises Misfit."""
        spec = self.spec
        fills = spec.on_null == "fill"
        if record is None:
            if spec.on_null == "error":
                raise Misfit(fastpipe.errors.NullValueError)
            return [] if fills else None
        each = Each()
        if any(part is None for part in record.values()) and not fills:
            each.errors.append(fastpipe.errors.NullValueError)
        if len({len(part or []) for part in record.values()}) > 1:
            each.errors.append(fastpipe.errors.ShapeError)
        indices = [record[name] or [] for name in sorted(set(self.names) - {"values"})]
        for size, column in zip(spec.shape, indices, strict=True):
            outside = any(index < 0 or (size is not None and index >= size) for index in column)
            if spec.check_indices and outside:
                each.errors.append(fastpipe.errors.ValueRangeError)
        values = [each(self.converted, value) for value in record["values"] or []]
        each.close()
        return list(zip(zip(*indices, strict=True), values, strict=True))

    def converted(self, value: Any) -> Any:
        if value is not None:
            return convert(value, self.kind, self.spec.dtype)
        if self.spec.on_null == "error":
            raise Misfit(fastpipe.errors.NullValueError)
        return zero(self.spec.dtype) if self.spec.fill is None else self.spec.fill


@st.composite
def sparse_fields(draw: st.DrawFn) -> SparseField:
    rank = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(list(DTYPES)))
    dtype = draw(st.sampled_from([d for d in DTYPES[kind] if (kind, d) != ("fixed", "uint8")]))
    names = [f"indices{k}" for k in range(rank)]
    if rank == 1 and draw(st.booleans()):
        names = ["indices"]
    names = draw(st.permutations([*names, "values"]))
    unions = {name: draw(st.sampled_from(["", "", "one", "null first", "null last"])) for name in ["", *names]}
    item_union = draw(st.sampled_from(["", "", "one", "null first"]))
    options = draw(nulls(dtype))
    if item_union == "null first" and options.get("on_null") == "mask":
        options = {"on_null": "fill"}
    shape = [draw(st.sampled_from([None, 1, 5, 1000])) for _ in range(rank)]
    layout = draw(st.sampled_from(["coo", "csr"]))
    check = draw(st.sampled_from([True, True, False]))
    spec = fastpipe.SparseSpec(tuple(shape), dtype, layout=layout, check_indices=check, **options)
    wires = [draw(st.sampled_from(["int", "long"])) for _ in range(rank)]
    return SparseField(kind, spec, names, wires, unions, item_union, draw(st.integers(1, 9)))


@given(sparse_fields(), st.booleans(), seeds, counts, writers, passes)
def test_any_sparse_spec(
    folder: Path, field: SparseField, tame: bool, seed: int, count: int, codec: str, options: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    records = [{"s": field.value(rng, tame), "i": i} for i in range(count)]
    schema = field.schema()
    with new_file(folder) as path:
        if codec == "oracle":
            path.write_bytes(oracle.container(schema, records, rng))
        else:
            write(path, schema, records, codec, rng.choice(BLOCK_BYTES))
        features = {"s": field.spec, "i": fastpipe.DenseSpec((), "int8")}
        expect(path, features, records, lambda name, r: field.row(r["s"]) if name == "s" else r["i"], options)


def sparse_schema(values: Any) -> Any:
    parts = [{"name": "indices0", "type": "long"}, {"name": "values", "type": values}]
    for part in parts:
        part["type"] = {"type": "array", "items": part["type"]}
    sparse = {"type": "record", "name": "S", "fields": parts}
    return {"type": "record", "name": "R", "fields": [{"name": "s", "type": sparse}]}


def test_sparse_enums_use_the_codes_of_the_first_file(folder: Path) -> None:
    with new_file(folder) as first, new_file(folder) as second:
        row = {"s": {"indices0": [0, 7, 3], "values": ["A", "B", "A"]}}
        for path, symbols in [(first, ["A", "B"]), (second, ["B", "A"])]:
            write(path, sparse_schema({"type": "enum", "name": "E", "symbols": symbols}), [row], "null", 1)
        reader = fastpipe.read_avro([first, second], batch_size=2)
        assert reader.categories == {"s": ["A", "B"]}
        (batch,) = reader
        assert batch["s"].values.tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("index", [-1, -2, -(2**31), -(2**63)])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("size", [None, 5])
def test_negative_indices(folder: Path, index: int, layout: Any, size: int | None) -> None:
    row = {"s": {"indices0": [1, index], "values": [1, 2]}}
    with new_file(folder) as path:
        write(path, sparse_schema("int"), [row], "null", 1)
        spec = fastpipe.SparseSpec((size,), "int32", layout=layout)
        with pytest.raises(fastpipe.errors.ValueRangeError, match="index"):
            list(fastpipe.read_avro(path, features={"s": spec}, batch_size=1))
        spec = fastpipe.SparseSpec((size,), "int32", layout=layout, check_indices=False)
        (batch,) = fastpipe.read_avro(path, features={"s": spec}, batch_size=1)
        assert batch["s"].to_list() == [[((1,), 1), ((index,), 2)]]


@pytest.mark.parametrize(
    "kind", ["bytes", {"type": "fixed", "name": "F", "size": 2}, {"type": "array", "items": "bytes"}], ids=str
)
def test_strings_are_utf_8(folder: Path, kind: Any) -> None:
    """Checks that bytes that aren't UTF-8 are never returned as strings."""
    several = isinstance(kind, dict) and kind["type"] == "array"
    value = b"\xff\xfe"
    with new_file(folder) as path:
        schema = {"type": "record", "name": "R", "fields": [{"name": "x", "type": kind}]}
        write(path, schema, [{"x": [value] if several else value}], "null", 1)
        spec = fastpipe.RaggedSpec((None,), "string") if several else fastpipe.DenseSpec((), "string")
        with pytest.raises((fastpipe.errors.MalformedFileError, fastpipe.errors.SchemaError)):
            list(fastpipe.read_avro(path, features={"x": spec}, batch_size=1))
