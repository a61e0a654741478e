"""Random tables as units: Parquet files, Arrow files and Python sources.

They yield the rows that pyarrow selects, in every order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import fastpipe
from arrow_tables import as_lists, expected, has, item_of, leaves, ragged_steps, tables, types

ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"shuffle": True, "seed": 1},
    {"shuffle": True, "shuffle_buffer": 8, "seed": 1},
    {"shuffle": "block", "shuffle_buffer": 5, "seed": 1},
    {"shuffle": "buffer", "shuffle_buffer": 5, "seed": 1},
)

Make = Callable[..., fastpipe.Reader]


class Chunks:
    """A table as units that are tables, record batches or streams of its rows."""

    def __init__(self, table: pa.Table, edges: list[int], form: str) -> None:
        self.table, self.edges, self.form = table, edges, form
        self.schema = table.schema
        self.rows = [b - a for a, b in pairwise(edges)]

    def read(self, unit: int) -> Any:
        part = self.table.slice(self.edges[unit], self.rows[unit])
        if self.form == "record batch":
            return part.combine_chunks().to_batches()[0] if part.num_rows else part
        if self.form == "stream":
            return pa.RecordBatchReader.from_batches(part.schema, part.to_batches())
        # The columns may be reordered, and there may be additional ones.
        return part.select(part.column_names[::-1]).append_column("more", pa.nulls(part.num_rows))

    def read_slices(self, unit: int, start: int, rows: int) -> Iterator[Any]:
        part = self.read(unit)
        part = part.read_all() if self.form == "stream" else part
        return (part.slice(first, rows) for first in range(start, self.rows[unit], rows))

    def fingerprint(self) -> str:
        return "chunks"


def _is_not_in_parquet(kind: pa.DataType) -> bool:
    # Parquet stores seconds as milliseconds, which overflow for these values.
    return pa.types.is_run_end_encoded(kind) or kind == pa.timestamp("s")


def as_parquet(draw: st.DrawFn, table: pa.Table, folder: Path) -> tuple[list[pa.Table], Make]:
    options = {
        "data_page_version": draw(st.sampled_from(("1.0", "2.0"))),
        "version": draw(st.sampled_from(("1.0", "2.4", "2.6"))),
        "use_dictionary": draw(st.booleans()),
        "compression": draw(st.sampled_from(("none", "snappy", "gzip", "zstd", "lz4", "brotli"))),
        "store_schema": draw(st.booleans()),
        "data_page_size": draw(st.sampled_from((None, 8, 100))),
        "write_batch_size": draw(st.sampled_from((None, 1, 3))),
        "use_compliant_nested_type": draw(st.booleans()),
    }
    found = []
    for i, part in enumerate(_parts(draw, table)):
        path = folder / f"{i}.parquet"
        statistics, most = draw(st.booleans()), draw(st.integers(1, 31))
        pa.parquet.write_table(part, path, write_statistics=statistics, row_group_size=most, **options)
        file = pa.parquet.ParquetFile(path)
        found += [file.read_row_group(group) for group in range(file.num_row_groups)]
    return found, lambda **options: fastpipe.read_parquet(folder, **options)


def as_arrow_file(draw: st.DrawFn, table: pa.Table, folder: Path) -> tuple[list[pa.Table], Make]:
    found = []
    for i, part in enumerate(_parts(draw, table)):
        path = folder / f"{i}.arrow"
        compression = draw(st.sampled_from((None, "lz4", "zstd")))
        options = pa.ipc.IpcWriteOptions(compression=compression, unify_dictionaries=True, use_threads=False)
        with pa.ipc.new_file(path, table.schema, options=options) as writer:
            writer.write_table(part, max_chunksize=draw(st.integers(1, 31)))
        with pa.OSFile(str(path)) as source:
            file = pa.ipc.open_file(source)
            found += [pa.Table.from_batches([file.get_batch(batch)]) for batch in range(file.num_record_batches)]
    return found, lambda **options: fastpipe.read_arrow(folder, **options)


def as_units(draw: st.DrawFn, table: pa.Table, folder: Path) -> tuple[list[pa.Table], Make]:
    rows = table.num_rows
    edges = [0, *sorted(draw(st.lists(st.integers(0, rows), max_size=6))), rows]
    units = Chunks(table, edges, draw(st.sampled_from(("table", "record batch", "stream"))))
    found = [table.slice(a, b - a) for a, b in pairwise(edges)]
    return found, lambda **options: fastpipe.read_units(units, **options)


def _parts(draw: st.DrawFn, table: pa.Table) -> list[pa.Table]:
    cut = draw(st.integers(0, table.num_rows))
    return [table.slice(0, cut), table.slice(cut)] if draw(st.booleans()) else [table]


SOURCES = {"parquet": as_parquet, "arrow file": as_arrow_file, "units": as_units}
ANY = types()
STORED = ANY.filter(lambda kind: not has(kind, _is_not_in_parquet))


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=settings.default.max_examples // 7)
@given(data=st.data())
def test_batches_contain_the_rows_of_pyarrow(
    source: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw: Any = data.draw
    table, _ = draw(tables(kinds=STORED if source == "parquet" else ANY))
    try:
        units, make = SOURCES[source](draw, table, tmp_path_factory.mktemp("table"))
    except pa.ArrowException:
        assume(False)  # pyarrow can't write or read it.
    order, batch_size = draw(st.sampled_from(ORDERS)), draw(st.integers(1, 12))
    names = table.column_names
    columns = draw(st.none() | st.lists(st.sampled_from(names), unique=True, min_size=1))
    options = {"num_threads": draw(st.integers(1, 3)), "num_fetches": draw(st.sampled_from((None, 1, 3)))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastpipe.units._data._SLICE_BYTES", draw(st.sampled_from((8 << 20, 1, 40, 300))))
        reader = make(batch_size=batch_size, columns=columns, **options, **order)
        if draw(st.booleans()):
            reader = pickle.loads(pickle.dumps(reader))
    # Only custom sources may have units without rows.
    units = [unit for unit in units if unit.num_rows or source == "units"]
    values = {name: [[item_of(value) for value in unit[name]] for unit in units] for name in names}
    schema = units[0].schema if units else table.schema
    wanted = {
        name: (field.name, kind, ragged_steps(steps))
        for field in schema
        if columns is None or field.name in columns
        for name, kind, steps in leaves(field.type, field.name)
    }
    assert set(reader.features) == set(wanted)
    seen = []
    for step, batch in enumerate(reader):
        size = len(batch[next(iter(wanted))])
        places = [reader.locate(step, row, epoch=0) for row in range(size)]
        seen += [(place.unit, place.row) for place in places]
        for name, (column, kind, steps) in wanted.items():
            taken = [expected(values[column][place.unit][place.row], kind, steps) for place in places]
            assert as_lists(batch[name]) == taken, name
    everything = [(i, row) for i, unit in enumerate(units) for row in range(unit.num_rows)]
    assert sorted(seen) == everything
    if not order:
        assert seen == everything
