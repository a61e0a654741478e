"""Specs of features whose numbers are read as the indices of buckets: `BucketSpec`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fastpipe._arguments import shown
from fastpipe._boundary import LoweredBuckets
from fastpipe.specs._vocabularies import LookupSpec

OnNan: TypeAlias = Literal["error", "bucket"]

# The extension module has the same limit.
_MOST_EDGES = 1 << 16
# Specs with up to this many edges are shown as code.
_SHOWN = 20


@dataclass(frozen=True, repr=False)
class BucketSpec(LookupSpec):
    r"""Numbers that are read as the indices of their buckets.

    The index of a number is the count of edges at or below it. It equals `numpy.digitize(value, edges)` and
    `numpy.searchsorted(edges, value, side="right")`. Bucket 0 is below the first edge. Bucket `i` begins at edge
    `i - 1` and ends before edge `i`. Bucket `len(edges)` is at or above the last edge. Numbers are compared exactly:
    NumPy may round integers beyond 2**53 to float64 first.

    All sources support it: Avro files and messages, CSV, TFRecord, Parquet, Arrow, SQL and tables.

    | field | batch form |
    |---|---|
    | integers, floats and decimals | `DenseSpec((), dtype)`: the index |
    | arrays of them, values of maps | `RaggedSpec((None,), dtype)`; one None per level |

    Decimals are compared as the nearest float64. A float32 is compared as its own value, which is above 0.1 for the
    text 0.1. Times and bools have no buckets.

    Args:
        edges: 1 to 65,536 finite numbers, strictly ascending: a list or an array. Integers have up to 64 bits.
        field: Path of the field to read. Defaults to the feature's name.
        on_nan: How to read NaN. "error" raises `ValueRangeError`. "bucket" assigns it the index after all others,
            `len(edges) + 1`. NumPy would put it into the last bucket. Defaults to "error".
        dtype: Integer dtype of the indices. Defaults to "int64".
        on_null: How to read nulls. "error" raises `NullValueError`. "mask" wraps the indices in `Masked`. "fill"
            replaces nulls with the fill value, which is required then. Defaults to "error".
        fill: Index that replaces a null. Implies `on_null="fill"`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the edges aren't finite and strictly ascending, if there are none or too many, or if an argument
            is invalid.

    Example:
        >>> import fastpipe
        >>> spec = fastpipe.BucketSpec([18, 30, 65])
        >>> reader = fastpipe.read_csv(b"age\n7\n18\n64\n65\n", features={"age": spec}, batch_size=4)
        >>> next(iter(reader))["age"], spec.size
        (array([0, 1, 2, 3]), 4)
    """

    edges: Any  # A tuple after construction.
    _: KW_ONLY
    on_nan: OnNan = "error"

    _kind: ClassVar[str] = "lookup"
    _first: ClassVar[str] = "edges"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_nan not in ("error", "bucket"):
            raise ValueError(f'on_nan must be "error" or "bucket"; got {self.on_nan!r}')
        self._set("edges", _edges(self.edges))
        self._check_size()

    @property
    def size(self) -> int:
        """Number of indices: the number of edges plus 1, plus 1 for NaN with `on_nan="bucket"`."""
        return len(self.edges) + 1 + (self.on_nan == "bucket")

    def _code_of_first(self) -> str:
        return repr(list(self.edges)) if len(self.edges) <= _SHOWN else f"<{len(self.edges):,} edges>"

    def _lower_lookup(self) -> LoweredBuckets:
        return list(self.edges), self.on_nan == "bucket"

    def _described(self) -> list[Any]:
        # An integer and the equal float have the same text.
        text = ",".join(str(int(edge)) if edge == int(edge) else repr(edge) for edge in self.edges)
        return [hashlib.sha256(text.encode()).hexdigest()[:32], "buckets", len(self.edges), self.on_nan]


def _edges(edges: Any) -> tuple[int | float, ...]:
    takes = "edges must be a list or an array of numbers"
    for convert in ("to_pylist", "tolist"):  # Arrow has the first method, NumPy and pandas have the second.
        if hasattr(edges, convert):
            edges = getattr(edges, convert)()
    if isinstance(edges, (str, bytes, bytearray)) or not isinstance(edges, Iterable):
        raise TypeError(f"{takes}; got {shown(edges)}")
    if isinstance(edges, (set, frozenset)):
        raise TypeError("edges must be ascending, and a set has no order: sort it")
    found = tuple(_edge(edge, i) for i, edge in enumerate(edges))
    if not 1 <= len(found) <= _MOST_EDGES:
        raise ValueError(f"edges must have 1 to {_MOST_EDGES:,} numbers; got {len(found):,}")
    for i in range(1, len(found)):
        if not found[i - 1] < found[i]:
            raise ValueError(f"edges must be strictly ascending; got {found[i - 1]!r} before {found[i]!r}")
    return found


def _edge(edge: Any, i: int) -> int | float:
    if isinstance(edge, np.generic):
        edge = edge.item()
    if isinstance(edge, bool) or not isinstance(edge, (int, float)):
        raise TypeError(f"edges must be integers or floats; edge {i} is {shown(edge)}")
    if isinstance(edge, float) and not math.isfinite(edge):
        raise ValueError(f"edges must be finite; edge {i} is {edge!r}")
    if isinstance(edge, int) and not -(2**63) <= edge < 2**64:
        raise ValueError(f"integer edges must have up to 64 bits; edge {i} is {shown(edge)}: pass a float")
    return edge
