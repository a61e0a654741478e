"""CSV files: reading, and inferring what is in them."""

from __future__ import annotations

from fastpipe.csv._data import CsvLocation
from fastpipe.csv._reading import read_csv

__all__ = ["CsvLocation", "read_csv"]
