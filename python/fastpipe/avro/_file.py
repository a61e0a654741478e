"""Inspection of Avro container files."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fastpipe._fastpipe import ContainerFile, RemoteFile
from fastpipe._files._in_memory_files import File, ReadableFile, elsewhere, one
from fastpipe._files._remote_files import StorageOptions, is_remote, lowered_options
from fastpipe.errors import LimitError, in_file

_BLOCK = np.dtype([("offset", np.int64), ("size", np.int64), ("rows", np.int64)])


def parse_schema(text: str, path: str) -> Any:
    """Parses the JSON text of a file's schema.

    Raises:
        LimitError: If the JSON is nested more deeply than Python's parser supports.
    """
    with contextlib.suppress(RecursionError):
        return json.loads(text)
    import concurrent.futures  # Imports logging, and is rarely needed.

    # The parser's limit includes the frames of its callers. A new thread has almost no frames.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(json.loads, text).result()
        except RecursionError:
            pass
    reason = "the schema's JSON is nested more deeply than Python's parser supports; schema_json has its text"
    raise in_file(LimitError, path, reason)


class AvroFile:
    """Describes one container file without reading its data.

    Args:
        path: The path or URL of the file, its bytes, or a binary file object, which is read to its end.
        storage_options: How to reach the storage of a URL, in the words of fsspec or polars: names of options and their
            values. See `read_avro`. Defaults to None.

    Raises:
        TypeError: If an argument has another type.
        MissingFileError: If the file does not exist.
        MalformedFileError: If the file isn't an Avro container file, or its header is damaged.
        SchemaError: If the schema can't be parsed.
        UnsupportedError: If the codec is not supported.
        LimitError: If the header or the schema exceeds a limit.

    Example:
        >>> import fastpipe
        >>> file = fastpipe.avro.AvroFile("data/part-0.avro")
        >>> file.codec, file.num_records, file.schema["name"]
        ('deflate', 3072, 'Impression')
    """

    __slots__ = ("_blocks", "_file")

    def __init__(
        self,
        path: str | os.PathLike[str] | bytes | bytearray | memoryview | ReadableFile,
        *,
        storage_options: StorageOptions = None,
    ) -> None:
        options = lowered_options(storage_options)
        if isinstance(path, str) and is_remote(path):
            file: File = RemoteFile.open(path, options)
        else:
            file = one(path)
        self._describe(file)

    @classmethod
    def _from(cls, file: File) -> Self:
        """Describes a file that was found before, which may be remote."""
        made = cls.__new__(cls)
        made._describe(file)
        return made

    def _describe(self, file: File) -> None:
        self._file = ContainerFile(str(file), elsewhere(file))
        self._blocks: npt.NDArray[Any] | None = None

    @property
    def path(self) -> str:
        """The file's path, or a name for a file in memory."""
        return self._file.path

    @property
    def schema(self) -> Any:
        """The writer's schema, as parsed JSON.

        Raises:
            LimitError: If its defaults or other attributes are nested more deeply than Python's parser supports.
                `schema_json` returns the text.
        """
        return parse_schema(self._file.schema_json, self.path)

    @property
    def schema_json(self) -> str:
        """The writer's schema, exactly as the file contains it."""
        return self._file.schema_json

    @property
    def codec(self) -> str:
        """The codec: `null`, `deflate`, `snappy`, `zstandard`, `bzip2` or `xz`."""
        return self._file.codec

    @property
    def metadata(self) -> dict[str, bytes]:
        """All metadata of the header, including the schema and the codec."""
        return self._file.metadata

    @property
    def sync_marker(self) -> bytes:
        """The 16 bytes after each block."""
        return self._file.sync_marker

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return self._file.size

    @property
    def blocks(self) -> npt.NDArray[Any]:
        """The blocks: a structured array of `offset` (of the block's header), `size` (bytes as stored) and `rows`.

        The first access finds the blocks by reading their headers one after another.

        Raises:
            MalformedFileError: If the file is truncated, or a block's header or sync marker is damaged.
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
        """The number of records in all blocks."""
        return int(self.blocks["rows"].sum())

    def sample_uncompressed(self, max_blocks: int = 8) -> tuple[int, int]:
        """Returns the stored and the decompressed size, in bytes, of up to `max_blocks` blocks spread over the file."""
        return self._file.sample_uncompressed(max_blocks)

    def __len__(self) -> int:
        """Returns the number of records in all blocks, like `num_records`."""
        return self.num_records

    def __repr__(self) -> str:
        return f"AvroFile({self.path!r})"
