"""The files of `ATDSDataset`, opened once for all epochs."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from fastpipe.sources.avro._data import AvroData
from fastpipe.specs import Features

__all__ = ["OpenedFiles"]

_KEPT = 4
"""Sets of files that stay open to later epochs. Each has an index, the places of records and the memory of batches."""

_COARSEST_CLOCK = 2 * 10**9
"""Nanoseconds within which two changes of a file may leave it with the same time of modification on some systems."""

_Stamp = tuple[int, int, int, int, int]


class OpenedFiles:
    """Data sets that were opened, the last few of them kept for the epochs to come.

    A data set is opened anew when the size, the time of modification or the identity of any of its files is another.
    None is kept of files that were modified less than two seconds before, whose next change could go unnoticed.

    Args:
        features: to open files for.
        check: holds a file's schema to them, given its path and its JSON; raises where it doesn't fit.
    """

    def __init__(self, features: Features, check: Callable[[str, str], None]) -> None:
        self._features = features
        self._check = check
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, ...], tuple[list[_Stamp], AvroData]] = OrderedDict()

    def open(self, paths: tuple[str, ...]) -> tuple[AvroData, list[Exception]]:
        """The data set of these files, and the errors of those that are damaged. Several passes may read it at a time.

        Of a damaged file it has the blocks in front of the damage.

        Raises:
            FastpipeError: as `read_avro`, and what `check` raises.
        """
        # Before anything is read: what changes from here on shows in the stamps of the next epoch.
        stamps = _stamps(paths)
        with self._lock:
            kept = self._kept.pop(paths, None)
            if kept is not None and kept[0] == stamps:
                self._kept[paths] = kept
                return kept[1], []
        damaged: list[Exception] = []
        data = AvroData(list(paths), self._features, check=self._check, damaged=damaged)
        if stamps is not None and not damaged:
            with self._lock:
                self._kept[paths] = stamps, data
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return data, damaged


def _stamps(paths: tuple[str, ...]) -> list[_Stamp] | None:
    """What changes when a file does; None where a change might go unnoticed, or there is no such file."""
    settled = time.time_ns() - _COARSEST_CLOCK
    stamps = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:  # Opening it says more.
            return None
        if max(found.st_mtime_ns, found.st_ctime_ns) >= settled:
            return None
        stamps.append((found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino))
    return stamps
