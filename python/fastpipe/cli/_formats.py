"""Formats of files, as the command line tells them: by the ends of their names, else by their first bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fastpipe._reader.reader import Reader
from fastpipe.errors import UnsupportedError
from fastpipe.sources.avro import read_avro
from fastpipe.sources.csv import read_csv
from fastpipe.sources.files._paths import Paths, expand
from fastpipe.sources.units import read_arrow, read_parquet


class FileFormat(NamedTuple):
    """A format of files that a reader can be made of.

    Attributes:
        name: as JSON has it.
        title: as messages have it.
        function: reads such files.
        suffixes: what the names of such files end in; those in a tuple are taken together from a directory.
        magic: the first bytes of such files; None if they have none.
        options: of the function, for such files.
        rows: what the format calls rows.
        units: what it calls the parts of a file.
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
        """All suffixes."""
        return tuple(end for ends in self.suffixes for end in ([ends] if isinstance(ends, str) else ends))

    def read(self, files: list[str], **options: Any) -> Reader:
        """A reader of such files."""
        return self.function(files, **self.options, **options)


AVRO = FileFormat("avro", "Avro", read_avro, (".avro",), b"Obj\x01", rows="records", units="blocks")
FORMATS = (
    AVRO,
    FileFormat("parquet", "Parquet", read_parquet, (".parquet", ".pq"), b"PAR1", units="row groups"),
    FileFormat("arrow", "Arrow", read_arrow, (".arrow", ".feather", ".ipc"), b"ARROW1", units="record batches"),
    FileFormat("csv", "CSV", read_csv, ((".csv", ".csv.gz", ".csv.zst"),), None, units="stretches"),
    FileFormat(
        "tsv",
        "CSV with tabs",
        read_csv,
        ((".tsv", ".tsv.gz", ".tsv.zst"),),
        None,
        MappingProxyType({"delimiter": "\t"}),
        units="stretches",
    ),
)
_LONGEST_MAGIC = max(len(each.magic or b"") for each in FORMATS)


def found(source: Paths) -> tuple[FileFormat, list[str]]:
    """The files that a source names, and their format.

    Raises:
        FastpipeError: as `expand` does.
        UnsupportedError: if the format of a file can't be told, or there are several.
    """
    files = expand(source, tuple(end for each in FORMATS for end in each.suffixes))
    firsts: dict[str, tuple[FileFormat, str]] = {}
    for path in files:
        format_ = _format_of(path)
        firsts.setdefault(format_.name, (format_, path))
    if len(firsts) > 1:
        told = ", ".join(f"{format_.title} ({path})" for format_, path in firsts.values())
        raise UnsupportedError(f"the files are of several formats: {told}. Name files of one format")
    return next(iter(firsts.values()))[0], files


def avro_only(source: Paths, what: str, instead: str) -> list[str]:
    """The files that a source names, for what is done with Avro files only.

    Args:
        source: paths.
        what: what is done.
        instead: what to do with files of another format.

    Raises:
        UnsupportedError: for files of another format.
    """
    format_, files = found(source)
    if format_ is not AVRO:
        raise UnsupportedError(f"{what} takes Avro files, and {files[0]} is {format_.title}. {instead}", path=files[0])
    return files


def _format_of(path: str) -> FileFormat:
    by_name = [each for each in FORMATS if path.endswith(each.ends)]
    if by_name:
        return by_name[0]
    try:
        with open(path, "rb") as file:
            start = file.read(_LONGEST_MAGIC)
    except OSError:
        # Reading it says why.
        return AVRO
    by_start = [each for each in FORMATS if each.magic is not None and start.startswith(each.magic)]
    if by_start:
        return by_start[0]
    ends = ", ".join(end for each in FORMATS for end in each.ends)
    raise UnsupportedError(
        f"cannot tell the format of {path} by its first bytes, nor by its name. Give it a name that ends in one of"
        f" {ends}",
        path=path,
    )
