"""Conversion of batches to Arrow.

pyarrow is an extra (`arrow`), which is imported only when it is needed.
"""

from __future__ import annotations

from fastpipe._arrow.export import ArrowStreams, to_arrow
from fastpipe._arrow.schema import features_of, schema_of

__all__ = ["ArrowStreams", "features_of", "schema_of", "to_arrow"]
