"""Records as they are encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from fastpipe._options import Options, Settings
from fastpipe.avro._data import AvroData
from fastpipe.avro._reading import read_avro
from fastpipe.reader import Reader
from fastpipe.specs import DenseSpec, Features

__all__ = ["encoded_records"]

# Rows of a batch: enough that its cost doesn't matter, and few, since a record may be large.
_BATCH_SIZE = 256


@dataclass(frozen=True, repr=False)
class _EncodedSpec(DenseSpec):
    """The bytes that a field is encoded as, or the whole record for the feature with an empty name."""

    def _lower(self) -> Any:
        return ("encoded", *super()._lower()[1:])


def encoded_records(files: Sequence[str], **options: Unpack[Options]) -> Reader:
    """A reader of the bytes of records, in a feature with an empty name.

    Args:
        files: their paths. Their schemas are the same.
        **options: see `fastpipe.Options`.
    """
    features = Features({"": _EncodedSpec((), "bytes")})
    return Settings(read_avro, _BATCH_SIZE, options).reader(AvroData(files, features))
