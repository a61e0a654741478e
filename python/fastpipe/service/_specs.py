"""What tells servers of one data set apart that would send other values: a digest of how the data is read.

It covers what decides the values of a batch besides the contents of the files and the order: names and sequence of the
features, their specs, the symbols of codes, vocabularies and hashes, and how the source decodes values. It is made of
JSON, so it is the same in each process and on each machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastpipe._arrow.schema import encoded_features
from fastpipe._reader.dataset import Dataset
from fastpipe._reader.ordering import digest

__all__ = ["identity", "specs_digest"]


def specs_digest(data: Dataset) -> str:
    """A digest of how a data set is read, 32 hexadecimal digits."""
    told = {
        "features": encoded_features(data.features),
        "symbols": {name: list(symbols) for name, symbols in data.symbols.items()},
        # Whether there are masks depends on the files' schemas, too.
        "columns": data.handle.columns_text(),
        "interpretation": dict(data.interpretation),
    }
    return digest(json.dumps(told, sort_keys=True).encode())


def identity(fingerprint: Mapping[str, Any], specs: str) -> dict[str, Any]:
    """What a request says of the data that it is for: the data set's fingerprint, and the digest of its specs."""
    return {**fingerprint, "specs": specs}
