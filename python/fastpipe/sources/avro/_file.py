"""Avro container files, to look at."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import ContainerFile
from fastpipe.errors import LimitError, in_file
from fastpipe.sources.files._in_memory_files import Contents, ReadableFile, one

_BLOCK = np.dtype([("offset", np.int64), ("size", np.int64), ("rows", np.int64)])


class AvroFile:
    """One container file, to look at; nothing of its data is read.

    Args:
        path: of the file; or its bytes, or a binary file object, which is read to its end.

    Raises:
        TypeError: if the path is none of these.
        MissingFileError: if it isn't there.
        MalformedFileError: if it isn't an Avro container file, or its header is damaged.
        SchemaError: if its schema doesn't parse.
        UnsupportedError: if its codec isn't read.
        LimitError: if its header or its schema exceeds a limit.

    Example:
        >>> import fastpipe
        >>> file = fastpipe.AvroFile("data/part-0.avro")
        >>> file.codec, file.num_records, file.schema["name"]
        ('deflate', 3072, 'Impression')
    """

    __slots__ = ("_blocks", "_file")

    def __init__(self, path: str | os.PathLike[str] | bytes | bytearray | memoryview | ReadableFile) -> None:
        file = one(path)
        in_memory = file.place if isinstance(file, Contents) else None
        self._file = ContainerFile(str(file), in_memory)
        self._blocks: npt.NDArray[Any] | None = None

    @property
    def path(self) -> str:
        """The file's path, or a name for what lies in memory."""
        return self._file.path

    @property
    def schema(self) -> Any:
        """The writer's schema, as parsed JSON.

        Raises:
            LimitError: if its defaults or other attributes are nested deeper than Python's parser goes; `schema_json`
                has the text.
        """
        text = self._file.schema_json
        with contextlib.suppress(RecursionError):
            return json.loads(text)
        import concurrent.futures  # Imports logging, and is rarely needed.

        # The parser counts the frames of its callers as well, of which a thread has next to none.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            try:
                return thread.submit(json.loads, text).result()
            except RecursionError:
                pass
        reason = "the schema's JSON is nested deeper than Python's parser goes; schema_json has its text"
        raise in_file(LimitError, self.path, reason)

    @property
    def schema_json(self) -> str:
        """The writer's schema as it stands in the file."""
        return self._file.schema_json

    @property
    def codec(self) -> str:
        """`null`, `deflate`, `snappy`, `zstandard`, `bzip2` or `xz`."""
        return self._file.codec

    @property
    def metadata(self) -> dict[str, bytes]:
        """All metadata, the schema and the codec included."""
        return self._file.metadata

    @property
    def sync_marker(self) -> bytes:
        """The 16 bytes behind each block."""
        return self._file.sync_marker

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    @property
    def blocks(self) -> npt.NDArray[Any]:
        """The blocks: a structured array of `offset` (of the block's header), `size` (bytes as stored) and `rows`.

        Found by hopping from header to header the first time.

        Raises:
            MalformedFileError: if the file is cut short, or a block's header or sync marker is damaged.
        """
        if self._blocks is None:
            columns = self._file.blocks()
            blocks = np.empty(len(columns[0]), _BLOCK)
            for name, column in zip(("offset", "size", "rows"), columns, strict=True):
                blocks[name] = column
            blocks.flags.writeable = False
            self._blocks = blocks
        return self._blocks

    @property
    def num_records(self) -> int:
        """Records in all blocks."""
        return int(self.blocks["rows"].sum())

    def sample_uncompressed(self, max_blocks: int = 8) -> tuple[int, int]:
        """Bytes of some blocks, spread evenly over the file, as stored and decompressed."""
        return self._file.sample_uncompressed(max_blocks)

    def __len__(self) -> int:
        """Records in all blocks, as `num_records`."""
        return self.num_records

    def __repr__(self) -> str:
        return f"AvroFile({self.path!r})"
