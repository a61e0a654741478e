"""The tables of docs/types.md are what readers and adapters return."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fastpipe
import type_tables

COLUMNS = ("batch", *type_tables.FRAMEWORKS)
SOURCES: list[tuple[str, Callable[[Path], type_tables.Readers]]] = [
    ("Avro", type_tables.avro),
    ("Arrow and Parquet", type_tables.arrow),
    ("CSV", type_tables.csv),
    ("SQLite", type_tables.sqlite),
    ("DuckDB", type_tables.duckdb),
]


REQUIRED = {"SQLite": "adbc_driver_sqlite", "DuckDB": "duckdb"}


def _check(section: str, readers: type_tables.Readers, column: str) -> None:
    if column != "batch":
        pytest.importorskip(column)
    place = COLUMNS.index(column) + 1
    shown = [(row[0], row[place]) for row in type_tables.shown(section)]
    assert shown == list(type_tables.cells(readers, column)), "python tests/type_tables.py rewrites the page"


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(("section", "source"), SOURCES, ids=[section for section, _ in SOURCES])
def test_the_page_has_the_types(
    section: str, source: Callable[[Path], type_tables.Readers], column: str, tmp_path: Path
) -> None:
    if section in REQUIRED:
        pytest.importorskip(REQUIRED[section])
    _check(section, source(tmp_path), column)


@pytest.mark.parametrize("column", COLUMNS)
def test_the_page_has_the_types_of_postgresql(column: str, postgres_url: str) -> None:
    pytest.importorskip("adbc_driver_postgresql")
    _check("PostgreSQL", type_tables.postgresql(postgres_url), column)


@pytest.mark.parametrize("read", [type_tables.feather, type_tables.parquet], ids=["arrow", "parquet"])
def test_files_have_the_types_of_tables(read: Callable[..., fastpipe.Reader], tmp_path: Path) -> None:
    _check("Arrow and Parquet", type_tables.arrow(tmp_path, read), "batch")
