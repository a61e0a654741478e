"""Files of the command line and their formats."""

from __future__ import annotations

from fastpipe._files._paths import Paths, expand
from fastpipe._formats import AVRO, RENAME, SUFFIXES, FileFormat, format_of
from fastpipe.errors import UnsupportedError


def found(source: Paths) -> tuple[FileFormat, list[str]]:
    """Returns the files of a source and their format.

    Raises:
        FastpipeError: If the source has no files or can't be listed.
        UnsupportedError: If the format of a file can't be detected, or if the files have several formats.
    """
    files = expand(source, SUFFIXES)
    return format_of(files, RENAME), files


def avro_only(source: Paths, what: str, instead: str) -> list[str]:
    """Returns the files of a source for a command that supports only Avro.

    Args:
        source: Paths.
        what: Name of the command, for the message.
        instead: Advice for files of another format, for the message.

    Raises:
        UnsupportedError: If the files have another format.
    """
    format_, files = found(source)
    if format_ is not AVRO:
        raise UnsupportedError(
            f"{what} supports only Avro files, but {files[0]} is {format_.title}. {instead}", path=files[0]
        )
    return files
