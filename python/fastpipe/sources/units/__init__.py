"""Custom sources, and files of finished columns: what is read unit by unit, as Arrow.

`read_units` reads whatever says how many units it has and returns each as Arrow; `read_parquet` and `read_arrow` are
such sources.
"""

from __future__ import annotations

from fastpipe.sources.units._arrow_files import read_arrow
from fastpipe.sources.units._data import UnitLocation, Units, UnitsData, read_units
from fastpipe.sources.units._parquet import read_parquet

__all__ = ["UnitLocation", "Units", "UnitsData", "read_arrow", "read_parquet", "read_units"]
