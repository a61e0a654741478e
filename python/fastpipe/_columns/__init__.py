"""Batches as Arrow's columns.

pyarrow is an extra (`arrow`), imported when it is needed.
"""

from __future__ import annotations

from fastpipe._columns.arrow_out import to_arrow
from fastpipe._columns.arrow_schema import features_of, schema_of
from fastpipe._columns.arrow_stream import record_batches, schema_capsule, stream_capsule

__all__ = ["features_of", "record_batches", "schema_capsule", "schema_of", "stream_capsule", "to_arrow"]
