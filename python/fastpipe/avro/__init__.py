"""Avro container files: reading, writing and inspection."""

from __future__ import annotations

from fastpipe._locations import AvroLocation
from fastpipe.avro._file import AvroFile
from fastpipe.avro._messages import MessageDecoder, decode_messages
from fastpipe.avro._reading import read_avro
from fastpipe.avro._writing import WrittenFile, write_avro

__all__ = [
    "AvroFile",
    "AvroLocation",
    "MessageDecoder",
    "WrittenFile",
    "decode_messages",
    "read_avro",
    "write_avro",
]
