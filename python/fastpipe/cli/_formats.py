"""Files of the command line and their formats."""

from __future__ import annotations

from fastpipe._files._in_memory_files import File, opened
from fastpipe._files._paths import Paths
from fastpipe._files._remote_files import expander
from fastpipe._formats import AVRO, RENAME, SUFFIXES, TFRECORD, FileFormat, format_of
from fastpipe.errors import UnsupportedError, in_file


def found(source: Paths) -> tuple[FileFormat, list[str]]:
    """Returns the paths or URLs of a source's files, and their format.

    Raises:
        FastpipeError: If the source has no files or can't be listed.
        UnsupportedError: If the format of a file can't be detected, or if the files have several formats.
    """
    files = opened(source, SUFFIXES, expander(None))
    return format_of(files, RENAME), [str(file) for file in files]


def indexed(source: Paths, *, checksums: bool = False) -> tuple[FileFormat, list[File]]:
    """Returns the format and the files of a source for `fastpipe index`.

    Raises:
        UnsupportedError: If `fastpipe index` can't index files of this format, or their indexes have no checksums.
    """
    files = opened(source, SUFFIXES, expander(None))
    format_ = format_of(files, RENAME)
    if format_ not in (AVRO, TFRECORD):
        raise UnsupportedError(
            f"fastpipe index supports only Avro and TFRecord files, but {files[0]} is {format_.title}. read_csv "
            "creates its index with index_cache=; other formats need no index",
            path=str(files[0]),
        )
    if checksums and format_ is not AVRO:
        reason = (
            "--checksums is only for Avro files: each record of a TFRecord file has checksums, which readers verify"
        )
        raise in_file(UnsupportedError, str(files[0]), reason)
    return format_, files
