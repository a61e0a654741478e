"""Custom sources and columnar files, which are read in units, as Arrow data.

`read_units` reads any source that lists its units and returns each unit as Arrow data. `read_parquet` and `read_arrow`
build on it.
"""

from __future__ import annotations

from fastpipe._locations import UnitLocation
from fastpipe.units._arrow_files import read_arrow
from fastpipe.units._data import Units, read_units
from fastpipe.units._parquet import read_parquet

__all__ = ["UnitLocation", "Units", "read_arrow", "read_parquet", "read_units"]
