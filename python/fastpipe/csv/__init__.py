"""CSV files: the reader and random samples."""

from __future__ import annotations

from fastpipe._locations import CsvLocation
from fastpipe.csv._drawing import CsvSample, RowEstimate
from fastpipe.csv._reading import read_csv
from fastpipe.csv._sampling import sample_csv

__all__ = ["CsvLocation", "CsvSample", "RowEstimate", "read_csv", "sample_csv"]
