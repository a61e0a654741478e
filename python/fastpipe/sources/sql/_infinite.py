"""Times that databases have and NumPy doesn't."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastpipe.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["finite"]

_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def finite(table: pa.Table, first_day: int | None = None) -> pa.Table:
    """The same table.

    Args:
        table: a result.
        first_day: in days since 1970; what is before it was no time of the database. None if infinite times come as the
            largest and the smallest numbers.

    Raises:
        SchemaError: if it has infinite times.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for field, values in zip(table.schema, table.columns, strict=True):
        if pa.types.is_date32(field.type):
            counted, most, day = pa.int32(), 2**31 - 1, 1
        elif pa.types.is_timestamp(field.type):
            counted, most, day = pa.int64(), 2**63 - 1, _A_DAY[field.type.unit]
        else:
            continue
        ends = pc.min_max(values.cast(counted)).as_py()
        if ends["min"] is None:
            continue
        first, last = (-most + 1, most - 1) if first_day is None else (first_day * day, most)
        if ends["min"] < first or ends["max"] > last:
            reason = (
                f"column {field.name!r} has infinite times, which NumPy hasn't: write NULLIF({field.name}, 'infinity') "
                "in the query, or leave these rows out"
            )
            raise SchemaError(reason, feature=field.name, reason=reason)
    return table
