"""File formats of the command line. A format is detected from the file name, or else from the first bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fastpipe._files._paths import Paths, expand
from fastpipe._reader.reader import Reader
from fastpipe.avro import read_avro
from fastpipe.csv import read_csv
from fastpipe.errors import UnsupportedError
from fastpipe.units import read_arrow, read_parquet


class FileFormat(NamedTuple):
    """A file format that fastpipe can read.

    Attributes:
        name: Name in JSON output.
        title: Name in messages.
        function: Function that creates a reader of such files.
        suffixes: File name suffixes. All suffixes in one tuple are matched together when a directory is listed.
        magic: First bytes of such files, or None if the format has no magic bytes.
        options: Extra arguments of `function`.
        rows: Term of the format for rows.
        units: Term of the format for the parts of a file.
    """

    name: str
    title: str
    function: Callable[..., Reader]
    suffixes: tuple[str | tuple[str, ...], ...]
    magic: bytes | None
    options: Mapping[str, Any] = MappingProxyType({})
    rows: str = "rows"
    units: str = "units"

    @property
    def ends(self) -> tuple[str, ...]:
        """All suffixes of the format."""
        return tuple(end for ends in self.suffixes for end in ([ends] if isinstance(ends, str) else ends))

    def read(self, files: list[str], **options: Any) -> Reader:
        """Returns a reader of such files."""
        return self.function(files, **self.options, **options)


AVRO = FileFormat("avro", "Avro", read_avro, (".avro",), b"Obj\x01", rows="records", units="blocks")
FORMATS = (
    AVRO,
    FileFormat("parquet", "Parquet", read_parquet, (".parquet", ".pq"), b"PAR1", units="row groups"),
    FileFormat("arrow", "Arrow", read_arrow, (".arrow", ".feather", ".ipc"), b"ARROW1", units="record batches"),
    FileFormat("csv", "CSV", read_csv, ((".csv", ".csv.gz", ".csv.zst"),), None, units="chunks"),
    FileFormat(
        "tsv",
        "CSV with tabs",
        read_csv,
        ((".tsv", ".tsv.gz", ".tsv.zst"),),
        None,
        MappingProxyType({"delimiter": "\t"}),
        units="chunks",
    ),
)
_LONGEST_MAGIC = max(len(each.magic or b"") for each in FORMATS)


def found(source: Paths) -> tuple[FileFormat, list[str]]:
    """Returns the files of a source and their format.

    Raises:
        FastpipeError: If the source has no files or can't be listed.
        UnsupportedError: If the format of a file can't be detected, or if the files have several formats.
    """
    files = expand(source, tuple(end for each in FORMATS for end in each.suffixes))
    firsts: dict[str, tuple[FileFormat, str]] = {}
    for path in files:
        format_ = _format_of(path)
        firsts.setdefault(format_.name, (format_, path))
    if len(firsts) > 1:
        told = ", ".join(f"{format_.title} ({path})" for format_, path in firsts.values())
        raise UnsupportedError(f"the files have several formats: {told}. Pass files of one format")
    return next(iter(firsts.values()))[0], files


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


def _format_of(path: str) -> FileFormat:
    by_name = [each for each in FORMATS if path.endswith(each.ends)]
    if by_name:
        return by_name[0]
    try:
        with open(path, "rb") as file:
            start = file.read(_LONGEST_MAGIC)
    except OSError:
        # The reader will report why the file can't be opened.
        return AVRO
    by_start = [each for each in FORMATS if each.magic is not None and start.startswith(each.magic)]
    if by_start:
        return by_start[0]
    ends = ", ".join(end for each in FORMATS for end in each.ends)
    raise UnsupportedError(
        f"cannot detect the format of {path} from its name or its first bytes. Give it a name that ends in one of"
        f" {ends}",
        path=path,
    )
