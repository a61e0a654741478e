"""Values of all rows that are read once and kept in the index cache, if the reader has one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fastpipe._arrow.schema import encoded_features
from fastpipe._fastpipe import __version__
from fastpipe.errors import memory_errors
from fastpipe.specs import Features

if TYPE_CHECKING:
    from fastpipe._reader.reader import Reader

# Raise it if the same arguments result in other values.
_FORMAT = 1


def indexed(
    reader: Reader,
    names: Sequence[str],
    what: Sequence[Any],
    shape: tuple[int, npt.DTypeLike],
    compute: Callable[[], npt.NDArray[Any]],
) -> tuple[npt.NDArray[Any], str]:
    """Returns values that are computed from some features of all rows, and a phrase for plans.

    The phrase is empty if the rows were read. Otherwise it says that the values come from the index cache.

    Args:
        reader: The reader.
        names: Names of the features.
        what: What is computed from them, as JSON-compatible data.
        shape: The number of values, and their dtype.
        compute: Function that reads the rows and computes the values.
    """
    data, (count, dtype) = reader._data, shape
    entries = data.index_entries()
    if entries is None:
        return compute(), ""
    features = encoded_features(Features({name: reader.features[name] for name in names}))
    of_data = [data.fingerprint(), dict(data.interpretation), data.categories]
    text = json.dumps([_FORMAT, __version__, of_data, features, *what], sort_keys=True)
    # Values have one byte order in all machines that share the directory.
    stored = np.dtype(dtype).newbyteorder("<")

    def computed() -> memoryview:
        return np.ascontiguousarray(compute(), stored).view(np.uint8).data

    with memory_errors("read the index cache"):
        values, known = entries.get(text, count * stored.itemsize, computed)
    found = np.frombuffer(values, stored).astype(dtype, copy=False)
    return found, " (known from the index cache)" if known else ""
