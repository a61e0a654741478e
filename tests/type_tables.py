"""Makes the tables of docs/types.md by reading a column of each type: python tests/type_tables.py rewrites the page.

Each table is made by real readers and adapters. PostgreSQL's needs an installed server.
"""

from __future__ import annotations

import datetime
import decimal
import re
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

import fastpipe
import manual

PAGE = manual.ROOT / "docs/types.md"
FRAMEWORKS = ("torch", "tensorflow", "jax")
HEADER = ("type", "in a batch", "torch", "TensorFlow", "JAX")

Readers = dict[str, tuple[list[str], Callable[[str], fastpipe.Reader]]]
"""By the name of a type: the features of its column, and a function that returns a reader of one of them."""


def _array(dtype: str, dimensions: int, shape: tuple[int, ...]) -> str:
    return f"{dtype} `{list(shape)}`" if dimensions > 1 else dtype


def cell(value: Any) -> str:
    """Returns the type of a feature in a batch, without its number of rows."""
    kind, module = type(value).__name__, type(value).__module__.split(".")[0]
    if isinstance(value, np.ndarray):
        return _array(str(value.dtype), value.ndim, value.shape[1:])
    if kind == "Tensor" and module == "torch":
        name = str(value.dtype).removeprefix("torch.")
        return f"sparse {name}" if value.is_sparse else _array(name, value.ndim, tuple(value.shape[1:]))
    if kind == "EagerTensor":
        return _array(value.dtype.name, len(value.shape), tuple(value.shape[1:]))
    if kind == "ArrayImpl":
        return _array(str(value.dtype), value.ndim, value.shape[1:])
    if kind in ("RaggedTensor", "SparseTensor"):
        return f"`{kind}` of {value.dtype.name}"
    if kind in ("BCOO", "BCSR"):
        return f"`{kind}` of {value.dtype}"
    if kind in ("Strings", "StringTensors"):
        return f"`{kind}`"
    assert hasattr(value, "values"), f"{type(value)} has no name yet"
    return f"`{kind}` of {cell(value.values)}"


def converted(reader: fastpipe.Reader, framework: str) -> Any:
    """Returns the first batch of a reader in a framework, or "batch" for NumPy's."""
    if framework == "torch":
        import fastpipe.torch

        return next(iter(fastpipe.torch.dataset(reader)))
    if framework == "tensorflow":
        import fastpipe.tf

        return next(iter(fastpipe.tf.dataset(reader)))
    if framework == "jax":
        import jax

        import fastpipe.jax

        with jax.enable_x64(True):
            return next(fastpipe.jax.iterator(reader))
    return next(iter(reader))


def cells(readers: Readers, framework: str) -> Iterator[tuple[str, str]]:
    """Yields the types of a table's features, and their cells for a framework."""
    for name, (features, read) in readers.items():
        for feature in features:
            suffix = feature.removeprefix("f")
            label = f"{name}: `f{suffix}`" if suffix or len(features) > 1 else name
            try:
                yield label, cell(converted(read(feature), framework)[feature])
            except fastpipe.errors.UnsupportedError:
                yield label, "not supported"


# Avro: the schema of a field and its values.
AVRO: dict[str, tuple[Any, list[Any]]] = {
    "boolean": ("boolean", [True, False]),
    "int": ("int", [1, 2]),
    "long": ("long", [1, 2]),
    "float": ("float", [1, 2]),
    "double": ("double", [1, 2]),
    "string": ("string", ["a", "b"]),
    "bytes": ("bytes", [b"a", b"b"]),
    "fixed": ({"type": "fixed", "name": "Two", "size": 2}, [b"ab", b"cd"]),
    "enum": ({"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}, ["RED", "BLUE"]),
    "null or int": (["null", "int"], [1, None]),
    "null or string": (["null", "string"], ["a", None]),
    "int or string": (["int", "string"], [1, "a"]),
    "array of int": ({"type": "array", "items": "int"}, [[1], [2, 3]]),
    "array of string": ({"type": "array", "items": "string"}, [["a"], []]),
    "array of arrays of float": (
        {"type": "array", "items": {"type": "array", "items": "float"}},
        [[[1.0], []], [[2.0, 3.0]]],
    ),
    "map of long": ({"type": "map", "values": "long"}, [{"a": 1}, {}]),
    "record of x: int": ({"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}]}, [{"x": 1}] * 2),
    "record of indices0 and values": (
        {
            "type": "record",
            "name": "S",
            "fields": [
                {"name": "indices0", "type": {"type": "array", "items": "long"}},
                {"name": "values", "type": {"type": "array", "items": "float"}},
            ],
        },
        [{"indices0": [1], "values": [2.0]}, {"indices0": [], "values": []}],
    ),
    "date": ({"type": "int", "logicalType": "date"}, [1, 2]),
    "time-millis": ({"type": "int", "logicalType": "time-millis"}, [1, 2]),
    "time-micros": ({"type": "long", "logicalType": "time-micros"}, [1, 2]),
    "timestamp-millis": ({"type": "long", "logicalType": "timestamp-millis"}, [1, 2]),
    "timestamp-micros": ({"type": "long", "logicalType": "timestamp-micros"}, [1, 2]),
    "timestamp-nanos": ({"type": "long", "logicalType": "timestamp-nanos"}, [1, 2]),
    "local-timestamp-micros": ({"type": "long", "logicalType": "local-timestamp-micros"}, [1, 2]),
    "decimal, 18 digits or fewer": (
        {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
        [decimal.Decimal("1.25")] * 2,
    ),
    "decimal, more digits": (
        {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 2},
        [decimal.Decimal("1.25")] * 2,
    ),
    "uuid (string)": ({"type": "string", "logicalType": "uuid"}, [str(uuid.UUID(int=1))] * 2),
    "duration": ({"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}, [bytes(12)] * 2),
}


def avro(folder: Path) -> Readers:
    readers: Readers = {}
    for number, (name, (kind, values)) in enumerate(AVRO.items()):
        path = folder / f"{number}.avro"
        schema = {"type": "record", "name": "Row", "fields": [{"name": "f", "type": kind}]}
        with path.open("wb") as file:
            fastavro.writer(file, schema, [{"f": value} for value in values])
        readers[name] = _one_by_one(lambda path=path, **chosen: fastpipe.read_avro(path, batch_size=2, **chosen))
    return readers


def _one_by_one(read: Callable[..., fastpipe.Reader]) -> tuple[list[str], Callable[[str], fastpipe.Reader]]:
    return list(read().features), lambda feature: read(columns=[feature])


_DAY = datetime.date(2024, 2, 29)
_TIME = datetime.datetime(2024, 2, 29, 12)
# Lists aren't empty, because the statistics of Parquet files don't distinguish empty lists from nulls.
ARROW: dict[str, pa.Array] = {
    "bool": pa.array([True, False]),
    "int8": pa.array([1, 2], "int8"),
    "int16": pa.array([1, 2], "int16"),
    "int32": pa.array([1, 2], "int32"),
    "int64": pa.array([1, 2], "int64"),
    "uint8": pa.array([1, 2], "uint8"),
    "uint16": pa.array([1, 2], "uint16"),
    "uint32": pa.array([1, 2], "uint32"),
    "uint64": pa.array([1, 2], "uint64"),
    "float16 (halffloat)": pa.array(np.ones(2, "float16")),
    "float32": pa.array([1, 2], "float32"),
    "float64": pa.array([1, 2], "float64"),
    "int64 with nulls": pa.array([1, None]),
    "float64 with nulls": pa.array([1.5, None]),
    "string": pa.array(["a", "b"]),
    "large_string": pa.array(["a", "b"], "large_string"),
    "string with nulls": pa.array(["a", None]),
    "binary": pa.array([b"a", b"b"]),
    "fixed_size_binary": pa.array([b"ab", b"cd"], pa.binary(2)),
    "dictionary of string": pa.array(["a", "b"]).dictionary_encode(),
    "date32": pa.array([_DAY, _DAY]),
    "timestamp[ms]": pa.array([_TIME] * 2, pa.timestamp("ms")),
    "timestamp[us]": pa.array([_TIME] * 2, pa.timestamp("us")),
    "timestamp[ns]": pa.array([_TIME] * 2, pa.timestamp("ns")),
    "timestamp[us] with a time zone": pa.array([_TIME] * 2, pa.timestamp("us", "UTC")),
    "time32[ms]": pa.array([1, 2], pa.time32("ms")),
    "time64[us]": pa.array([1, 2], pa.time64("us")),
    "duration[us]": pa.array([1, 2], pa.duration("us")),
    "decimal128": pa.array([decimal.Decimal("1.25")] * 2),
    "list of int64": pa.array([[1], [2, 3]]),
    "list of string": pa.array([["a"], ["b"]]),
    "list of lists of float64": pa.array([[[1.0], [3.0]], [[2.0]]]),
    "fixed_size_list of 2 float32": pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)),
    "struct of x: int64": pa.array([{"x": 1}, {"x": 2}]),
    "map of string to int64": pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
}


def _arrow_table(array: pa.Array) -> pa.Table:
    return pa.table({"f": array}, pa.schema([pa.field("f", array.type, nullable=array.null_count > 0)]))


def _memory(_: Path, number: int, table: pa.Table, **chosen: Any) -> fastpipe.Reader:
    return fastpipe.from_arrow(table, batch_size=2, **chosen)


def feather(folder: Path, number: int, table: pa.Table, **chosen: Any) -> fastpipe.Reader:
    pyarrow.feather.write_feather(table, path := str(folder / f"{number}.feather"))
    return fastpipe.read_arrow(path, batch_size=2, **chosen)


def parquet(folder: Path, number: int, table: pa.Table, **chosen: Any) -> fastpipe.Reader:
    pyarrow.parquet.write_table(table, path := str(folder / f"{number}.parquet"))
    return fastpipe.read_parquet(path, batch_size=2, **chosen)


def arrow(folder: Path, read: Callable[..., fastpipe.Reader] = _memory) -> Readers:
    return {
        name: _one_by_one(
            lambda number=number, array=array, **chosen: read(folder, number, _arrow_table(array), **chosen)
        )
        for number, (name, array) in enumerate(ARROW.items())
    }


CSV = {
    "`true`, `false`": ["true", "false"],
    "`1`, `-2`": ["1", "-2"],
    "`18446744073709551615`": ["18446744073709551615", "1"],
    "`1`, and an empty field": ["1", ""],
    "`1.5`": ["1.5", "2"],
    "`1.5`, and an empty field": ["1.5", ""],
    "`007`": ["007", "1"],
    "`2024-02-29`": ["2024-02-29", "2024-03-01"],
    "`2024-02-29T12:30:00`": ["2024-02-29T12:30:00", "2024-03-01 00:00"],
    "`2024-02-29T12:30:00.123456789`": ["2024-02-29T12:30:00.123456789"] * 2,
    "`12:30`": ["12:30", "12:31"],
    "`Graz`": ["Graz", "Wien"],
    "only empty fields": ["", ""],
}


def csv(_: Path) -> Readers:
    readers: Readers = {}
    for name, fields in CSV.items():
        text = "".join(f"{field},x\n" for field in ["f", *fields]).encode()
        readers[name] = (
            ["f"],
            _one_by_one(lambda text=text, **chosen: fastpipe.read_csv(text, batch_size=2, **chosen))[1],
        )
    return readers


SQLITE = {"INTEGER": "1", "REAL": "1.5", "TEXT": "'a'", "BLOB": "x'00'", "INTEGER with NULL": "1"}
DUCKDB = {
    "BOOLEAN": "true",
    "TINYINT": "1",
    "INTEGER": "1",
    "BIGINT": "1",
    "UBIGINT": "1",
    "FLOAT": "1.5",
    "DOUBLE": "1.5",
    "DECIMAL(10, 2)": "1.25",
    "VARCHAR": "'a'",
    "BLOB": "'a'",
    "DATE": "'2024-02-29'",
    "TIME": "'12:30:00'",
    "TIMESTAMP": "'2024-02-29 12:30:00'",
    "TIMESTAMPTZ": "'2024-02-29 12:30:00+00'",
    "UUID": "'00000000-0000-0000-0000-000000000001'",
    "INTEGER[]": "[1, 2]",
    "INTEGER[2]": "[1, 2]",
    "BIGINT with NULL": "1",
}
POSTGRESQL = {
    "boolean": "true",
    "smallint": "1",
    "integer": "1",
    "bigint": "1",
    "real": "1.5",
    "double precision": "1.5",
    "numeric(10, 2)": "1.25",
    "numeric": "1.25",
    "text": "'a'",
    "varchar(10)": "'a'",
    "bytea": "'a'",
    "date": "'2024-02-29'",
    "time": "'12:30:00'",
    "timestamp": "'2024-02-29 12:30:00'",
    "timestamptz": "'2024-02-29 12:30:00+00'",
    "uuid": "'00000000-0000-0000-0000-000000000001'",
    "jsonb": "'{}'",
    "integer[]": "'{1, 2}'",
    "bigint with NULL": "1",
}


def _sql(connection: Any, kinds: dict[str, str], url: Any) -> Readers:
    """Creates a table with a key, and with two equal rows of a column of each type."""
    columns = [f"c{number}" for number in range(len(kinds))]
    types = [kind.removesuffix(" with NULL") if "with NULL" in kind else f"{kind} NOT NULL" for kind in kinds]
    declared = ", ".join(f"{column} {kind}" for column, kind in zip(columns, types, strict=True))
    connection.execute(f"CREATE TABLE kinds (id INTEGER PRIMARY KEY, {declared})")
    for row in (1, 2):
        connection.execute(f"INSERT INTO kinds VALUES ({row}, {', '.join(kinds.values())})")
    return {
        kind: (["f"], lambda _, column=column: fastpipe.read_sql(f"SELECT {column} AS f FROM kinds", url, batch_size=2))
        for column, kind in zip(columns, kinds, strict=True)
    }


def sqlite(folder: Path) -> Readers:
    import sqlite3

    path = folder / "types.db"
    with sqlite3.connect(path) as connection:
        readers = _sql(connection, SQLITE, f"sqlite:///{path}")
    connection.close()
    return readers


def duckdb(folder: Path) -> Readers:
    import duckdb

    path = folder / "types.duckdb"
    with duckdb.connect(str(path)) as connection:
        return _sql(connection, DUCKDB, f"duckdb:///{path}")


def postgresql(url: str) -> Readers:
    import psycopg

    with psycopg.connect(url) as connection:
        return _sql(connection, POSTGRESQL, url)


def table(readers: Readers) -> list[str]:
    """Returns the lines of a table."""
    columns = [list(cells(readers, framework)) for framework in ("batch", *FRAMEWORKS)]
    rows: list[Sequence[str]] = [HEADER]
    rows += [[row[0][0], *(text for _, text in row)] for row in zip(*columns, strict=True)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(HEADER) + "|", *lines[1:]]


def shown(section: str) -> list[list[str]]:
    """Returns the rows of the table in a section of the page, without its header."""
    text = PAGE.read_text("utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[1:]]


def main() -> None:
    import servers

    programs = servers.postgres_programs()
    assert programs is not None, "PostgreSQL is not installed"
    server = servers.Postgres(programs)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            sections = {"Avro": avro(folder), "Arrow and Parquet": arrow(folder), "CSV": csv(folder)}
            sections |= {
                "SQLite": sqlite(folder),
                "DuckDB": duckdb(folder),
                "PostgreSQL": postgresql(server.new_database()),
            }
            page = PAGE.read_text("utf-8")
            for section, readers in sections.items():
                before, after = page.split(f"\n## {section}\n")
                made = "\n".join(table(readers))
                after, count = re.subn(
                    r"^\|.*(?:\n\|.*)*$", lambda _, made=made: made, after, count=1, flags=re.MULTILINE
                )
                assert count == 1, section
                page = f"{before}\n## {section}\n{after}"
            PAGE.write_text(page, "utf-8")
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
