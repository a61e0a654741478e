"""Samples of CSV streams, which are read once: `method="stream"`."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Any, cast

from fastpipe import _fastpipe
from fastpipe._arguments import shown
from fastpipe.errors import MissingFileError, StorageError
from fastpipe.sources.csv._data import CsvData
from fastpipe.sources.csv._sample import Asked, CsvSample
from fastpipe.sources.files._contents import ReadableFile, pieces
from fastpipe.specs import Features
from fastpipe.specs import _vocabularies as vocabularies

__all__ = ["draw_from_stream"]

# Bytes that are asked of a file or pipe at once: signals are looked at in between.
_PIECE = 1 << 20


def draw_from_stream(source: Any, asked: Asked) -> CsvSample:
    """Draws rows by a reservoir, while the stream passes.

    Raises:
        ValueError: if there are fewer rows.
        FastpipeError: as `read_csv`; a LimitError if rows take more than `memory_limit`.
    """
    name, stream = _opened(source)
    features = Features({}) if asked.features is None else asked.features
    reservoir = _fastpipe.CsvReservoir(
        name,
        asked.dialect.lowered(),
        [(column, spec._lower()) for column, spec in features.items()],
        asked.rows,
        asked.seed,
        asked.memory_limit,
        vocabularies.lowered(features),
    )
    with closing(stream):
        for piece in stream:
            reservoir.push(piece)
    there = reservoir.end()
    if there < asked.rows:
        raise ValueError(f"rows={asked.rows} are more than the {there} rows of the stream")
    handle, rows = reservoir.take()
    data, wanted = asked.typed(CsvData.of_rows(handle, asked.dialect, asked.features))
    return CsvSample(asked.array(asked.reader(data), wanted, asked.rows), rows, wanted, asked.seed)


def _opened(source: Any) -> tuple[str, Generator[bytes]]:
    """What a stream is called in errors, and its bytes."""
    if isinstance(source, str | os.PathLike):
        path = os.path.expanduser(os.fspath(source))
        return path, _of_path(path)
    name = f"<{type(source).__name__}>"
    if isinstance(source, bytes | bytearray | memoryview):
        return name, _of_iterable([source])
    if callable(getattr(source, "read", None)):
        own = getattr(source, "name", None)
        # Pipes have their descriptor for a name.
        name = own if isinstance(own, str) and own else name
        return name, pieces(cast("ReadableFile", source), name)
    if not isinstance(source, Iterable):
        raise TypeError(
            'with method="stream", source is a path, a binary file object, bytes or an iterable of bytes, not '
            f"{type(source).__name__}"
        )
    return name, _of_iterable(source)


def _of_path(path: str) -> Generator[bytes]:
    try:
        # Without a buffer a pipe gives what it has.
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                yield piece
    except FileNotFoundError as error:
        reason = f'{error.strerror}: with method="stream", source is the path of one file or pipe'
        raise MissingFileError(f"{reason} (file {path})", path=path, reason=reason) from error
    except OSError as error:
        reason = str(error.strerror)
        raise StorageError(f"{reason} (file {path})", path=path, reason=reason) from error


def _of_iterable(source: Iterable[Any]) -> Generator[bytes]:
    for piece in source:
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise TypeError(f'with method="stream", an iterable yields pieces of bytes, not {shown(piece)}')
        yield bytes(piece)
