"""What sources that are files have in common, whatever their format: they are chosen, pickled and read alike."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex

from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.options import Settings
from fastpipe._reader.reader import Reader
from fastpipe.sources.files._paths import Paths
from fastpipe.sources.units._files import REMOTE_FETCHES, File, Files, Requests
from fastpipe.sources.units._reading import fetches, reader_of, threads_of
from fastpipe.sources.units._schemas import chosen_columns, with_certain
from fastpipe.specs import Spec

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FileUnits", "read_files"]


class FileUnits:
    """Units that lie in files of finished columns, as a source (see `Units`).

    A format's class adds `rows`, `name`, `fingerprint` and `read`, and calls `_choose` when it knows the schema.

    Args:
        files: the file system.
        found: the files on it.
        columns: the columns that are read; None for all.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """Endings of the format's files: a directory's files are those with the first ending that any of them has."""

    schema: pa.Schema
    inferred_schema: pa.Schema
    """The schema with no nulls where data have none: features follow from it by default."""

    rows: list[int]

    def __init__(self, files: Files, found: list[File], columns: list[str] | None = None) -> None:
        self._storage, self._found, self._columns = files, found, columns
        self.files = [file.path for file in found]

    def _choose(self, whole: pa.Schema, certain: Container[str]) -> None:
        """Makes the schemas of the columns that are read, out of that of the files.

        Args:
            whole: the schema of the files.
            certain: columns in which there are no nulls.
        """
        self._certain_columns = certain
        self.schema = whole if self._columns is None else chosen_columns(whole, self._columns)
        self.inferred_schema = with_certain(self.schema, certain)

    def _how(self) -> dict[str, Any]:
        """Arguments of the format's class besides those of every format."""
        return {}

    def select(self, columns: list[str]) -> Self:
        """The same units, of which only these columns are read."""
        chosen = object.__new__(type(self))
        chosen.__dict__ |= self.__dict__
        chosen._columns = columns
        chosen._choose(self.schema, self._certain_columns)
        return chosen

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self._storage, self._found, self._columns, self._how())


def _reopened(
    kind: type[FileUnits], files: Files, found: list[File], columns: list[str] | None, how: dict[str, Any]
) -> FileUnits:
    for file in found:
        files.check(file)
    return kind(files, found, columns, **how)


def read_files(
    kind: type[FileUnits],
    settings: Settings,
    source: Paths,
    *,
    features: Mapping[str, Spec] | None,
    columns: Sequence[str] | None,
    filesystem: Any,
    num_fetches: SupportsIndex | None,
    **how: Any,
) -> Reader:
    """The reader of files of one format.

    Args:
        kind: the format's class.
        settings: the options.
        source: names the files.
        features: dict from name to spec; None for what the files say.
        columns: only these; None for all.
        filesystem: where the files are; None for local disks.
        num_fetches: units that are read at once; None for the default.
        how: arguments of the format's class besides those of every format.
    """
    require_pyarrow()
    files = Files(filesystem)
    at_once = fetches(num_fetches, threads_of(settings) if files.is_local else REMOTE_FETCHES)
    files.requests = Requests(at_once)
    return reader_of(settings, kind(files, files.find(source, kind.suffixes), **how), features, columns, at_once)
