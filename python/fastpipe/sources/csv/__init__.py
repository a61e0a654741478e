"""CSV files: reading them, and drawing samples of them."""

from __future__ import annotations

from fastpipe.sources.csv._data import CsvLocation
from fastpipe.sources.csv._reading import read_csv
from fastpipe.sources.csv._sample import CsvSample, RowEstimate
from fastpipe.sources.csv._sampling import sample_csv

__all__ = ["CsvLocation", "CsvSample", "RowEstimate", "read_csv", "sample_csv"]
