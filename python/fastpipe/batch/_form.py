"""What the forms of batches share: how they unpack, are indexed by rows, and are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from fastpipe._arguments import shown
from fastpipe.batch._form_rows import rows_by_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

Rows: TypeAlias = "int | slice | Sequence[int] | Sequence[bool] | np.ndarray"

_SHOWN_LEVELS = 8


class Form:
    """What the forms share. A subclass lists its parts, in the order of its constructor, in `_parts`."""

    # Weak references let a test, or a cache, see when a batch's memory goes back to the pool.
    __slots__ = ("__weakref__",)
    _parts: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self, name) for name in self._parts])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self)

    def __repr__(self) -> str:
        return self._described(_SHOWN_LEVELS)

    def _described(self, levels: int) -> str:
        if not levels:
            return f"{type(self).__name__}(...)"
        parts = [f"{name}={describe(getattr(self, name), levels - 1)}" for name in self._parts]
        return f"{type(self).__name__}({', '.join(parts)})"

    def __getitem__(self, key: Rows) -> Any:
        """Rows: the same form for a slice, a mask or numbers of rows, and one row for a number."""
        return rows_by_key(self, key)

    def row(self, index: int) -> Any:
        """One row.

        Args:
            index: the row; negative ones count from the end.

        Raises:
            IndexError: if there is no such row.
            TypeError: if it is no number.
        """
        raise NotImplementedError

    def _slice(self, start: int, stop: int) -> Any:
        """These rows, as a view."""
        raise NotImplementedError

    def _take(self, rows: np.ndarray) -> Any:
        """These rows, copied. Numbers are int64, and in range."""
        raise NotImplementedError

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        # Without this, NumPy takes the form for a sequence and makes an array of its parts.
        raise TypeError(
            f"a {type(self).__name__} has no single NumPy array: use its parts ({', '.join(self._parts)}) or to_list()"
        )

    def to_list(self) -> list[Any]:
        """Nested Python lists, one entry a row."""
        raise NotImplementedError

    def to_arrow(self) -> pa.Array:
        """The rows as a pyarrow array over the same memory (extra `arrow`), as `fastpipe.to_arrow` lays out a column.

        Ragged rows are large lists, strings `large_string` or `large_binary`, masks nulls, and sparse rows structs of
        lists `indices0`, `indices1` ... and `values`, without the dense shape. Only bools, masks, and the indices of
        `Sparse` are copied.

        Raises:
            ImportError: if pyarrow isn't installed.
            TypeError: if Arrow has no such dtype.
            ValueError: if the parts contradict themselves: offsets or entries that aren't in order, masks of another
                shape, text that isn't UTF-8.
        """
        from fastpipe._arrow.export import form_to_arrow

        return form_to_arrow(self)


def described(parts: Any) -> str:
    """A named tuple of arrays, by their dtypes and shapes."""
    fields = [f"{name}={describe(part)}" for name, part in zip(parts._fields, parts, strict=True)]
    return f"{type(parts).__name__}({', '.join(fields)})"


def describe(part: Any, levels: int = _SHOWN_LEVELS) -> str:
    if isinstance(part, np.ndarray):
        return f"{part.dtype}[{', '.join(map(str, part.shape))}]"
    return part._described(levels) if isinstance(part, Form) else shown(part)
