"""Footers of Parquet files: whether what they say of row groups and columns can be true."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["check_chunks", "row_counts", "uncounted"]


def uncounted(metadata: Any, schema: pa.Schema) -> set[str]:
    """Columns with null counts that leave nulls out.

    pyarrow doesn't count the nulls of structs around a dictionary. A file without Arrow's schema doesn't say what was a
    dictionary: any text in a struct may have been one.
    """
    import pyarrow as pa

    types = pa.types
    says = b"ARROW:schema" in (metadata.metadata or {})
    if not says and not metadata.created_by.startswith("parquet-cpp-arrow"):
        return set()

    def may_be(kind: pa.DataType) -> bool:
        text = types.is_string(kind) or types.is_binary(kind)
        below = (may_be(kind.field(i).type) for i in range(kind.num_fields))
        return types.is_dictionary(kind) or (text and not says) or any(below)

    return {field.name for field in schema if types.is_nested(field.type) and may_be(field.type)}


def row_counts(metadata: Any) -> list[int]:
    """The rows of each row group of a file.

    Raises:
        pyarrow.ArrowInvalid: if a number is negative, or they don't add up to the file's.
    """
    import pyarrow as pa

    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    for group, number in enumerate(rows):
        if number < 0:
            raise pa.ArrowInvalid(f"row group {group} has {number} rows, as the file's footer says")
    if sum(rows) != metadata.num_rows:
        raise pa.ArrowInvalid(
            f"the row groups have {sum(rows)} rows together, and the file {metadata.num_rows}, as its footer says"
        )
    return rows


class _Unread(io.RawIOBase):
    """A file of some size that isn't read."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        raise _Reached


class _Reached(Exception):
    """The bytes of a file would be read now."""


def check_chunks(metadata: Any, size: int) -> None:
    """Looks at the metadata of all column chunks as a read does, which raises what is wrong with it.

    Where pyarrow looks at the metadata of a damaged chunk outside of a read, it ends the process.
    """
    import pyarrow as pa
    import pyarrow.parquet

    if metadata.num_row_groups == 0:
        return
    file = pyarrow.parquet.ParquetFile(pa.PythonFile(_Unread(size), "r"), metadata=metadata, pre_buffer=True)
    with contextlib.suppress(_Reached):
        file.read_row_groups(range(metadata.num_row_groups), use_threads=False)
