"""The result of a query: its schema, and rows in memory as a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastpipe.specs._requests import FeatureRequest
from fastpipe.sql._engines import Column
from fastpipe.units._data import UnitsData

if TYPE_CHECKING:
    import pyarrow as pa


def schema_of(columns: list[Column]) -> pa.Schema:
    """Returns the Arrow schema of a result."""
    import pyarrow as pa

    return pa.schema([pa.field(column.name, column.type, column.nullable) for column in columns])


class TableUnit:
    """Rows in memory, as a source of one unit (see `Units`).

    Args:
        table: The rows.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table, self.schema = table, table.schema
        self.rows: Sequence[int] = [table.num_rows]

    def read(self, unit: int) -> pa.Table:
        """Returns the rows."""
        return self._table

    def fingerprint(self) -> None:
        """Returns nothing: no state refers to these rows."""
        return


def check_features(columns: list[Column], request: FeatureRequest) -> None:
    """Checks that the requested features fit the columns of a result, before any of its rows are read.

    Raises:
        SchemaError: If a column does not exist, a spec doesn't fit its column, or `overrides` names a column that isn't
            read.
        UnsupportedError: If a type is not supported.
    """
    UnitsData(TableUnit(schema_of(columns).empty_table()), request, 1, in_sequence=True)
