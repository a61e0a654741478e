"""Values of several batches, counted together: each count makes Python objects of all values that it finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Uncounted"]

# They keep the memory of their batches.
_MOST = 1 << 17


class Uncounted:
    """Values of one type that are still to be counted."""

    def __init__(self) -> None:
        self._arrays: list[pa.Array] = []
        self._values = 0

    def add(self, values: pa.Array) -> bool:
        """Adds values, without nulls. Returns whether they should be counted now."""
        self._arrays.append(values)
        self._values += len(values)
        return self._values >= _MOST

    def counted(self, *, text: bool) -> dict[Any, int]:
        """How often each value occurs; forgets them.

        Args:
            text: whether they are the bytes of texts.
        """
        import pyarrow as pa
        import pyarrow.compute

        if not self._arrays:
            return {}
        arrays, self._arrays, self._values = self._arrays, [], 0
        found = pyarrow.compute.value_counts(pa.chunked_array(arrays))
        keys = found.field(0).to_pylist()
        if text:
            keys = [key.decode("utf-8", "surrogateescape") for key in keys]
        return dict(zip(keys, found.field(1).to_pylist(), strict=True))
