"""Avro container files: reading, writing, inspection and feature inference."""

from __future__ import annotations

from fastpipe.avro._file import AvroFile
from fastpipe.avro._messages import MessageDecoder, decode_messages
from fastpipe.avro._reading import Location, infer_features, read_avro
from fastpipe.avro._writing import WrittenFile, write_avro

__all__ = [
    "AvroFile",
    "Location",
    "MessageDecoder",
    "WrittenFile",
    "decode_messages",
    "infer_features",
    "read_avro",
    "write_avro",
]
