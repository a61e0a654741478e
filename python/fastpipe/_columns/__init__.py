"""Batches as Arrow's columns.

pyarrow is an extra (`arrow`), imported when it is needed.
"""

from __future__ import annotations

from fastpipe._columns.arrow_out import stream, to_arrow
from fastpipe._columns.arrow_schema import features_of, schema_of

__all__ = ["features_of", "schema_of", "stream", "to_arrow"]
