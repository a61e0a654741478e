"""Compression of a block, for the codecs that files are generated with."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable


def _deflate(data: bytes) -> bytes:
    squeezer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return squeezer.compress(data) + squeezer.flush()


def _snappy(data: bytes) -> bytes:
    import cramjam

    # Avro 1.12, "Required Codecs: snappy": the CRC-32 of the uncompressed data follows, big-endian.
    return bytes(cramjam.snappy.compress_raw(data)) + zlib.crc32(data).to_bytes(4, "big")


def _zstandard(data: bytes) -> bytes:
    import cramjam

    return bytes(cramjam.zstd.compress(data, level=3))


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "null": bytes,
    "deflate": _deflate,
    "snappy": _snappy,
    "zstandard": _zstandard,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
"""Name in the file's header -> how a block is compressed."""
