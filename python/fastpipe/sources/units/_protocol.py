"""What a source in Python is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["Units"]


@runtime_checkable
class Units(Protocol):
    """A custom source: rows by units, such as files, row groups, partitions of a query, pages of a service.

    Besides what is listed here, it may have

    - `name(unit) -> str`: what a unit is called in errors and by `locate`; else it is called by its number;
    - `select(columns) -> Units`: the same units, of which only these columns are read. It is called once, before
      anything is read;
    - `read_slices(unit, start, rows) -> Iterator`: yields the rows of a unit from `start` on, `rows` at a time (fewer
      at the unit's end), each slice as what `read` returns. Where rows are read in their order, units of more than 16
      MiB are then read in slices of some 8 MiB, and needn't be in memory as a whole. Slices of a unit are asked for one
      after the other, by different threads;
    - `dictionaries`, a mapping from columns to lists of text: what the codes of their dictionaries stand for. Units may
      differ in their dictionaries, so a feature that is codes (an integer dtype for a dictionary of text) needs it; the
      dictionary of each unit is mapped to it by value. Columns within others go by their paths, as in `features`;
    - `nbytes`, a sequence of each unit's bytes in memory: memory limits and windows are planned with it. Where there is
      `select`, it is asked of what that returns, and counts its columns only. Without it they are planned with what the
      types of the schema suggest, until units are read.

    For workers that are spawned, and for other machines, it must be possible to pickle it.

    Attributes:
        schema: of every unit: a `pyarrow.Schema`, or anything else with `__arrow_c_schema__`. What it says of nulls
            counts: a column that may have some becomes `Masked`.
        rows: number of rows of each unit, below 2^32.
    """

    schema: Any
    rows: Sequence[int]

    def read(self, unit: int) -> Any:
        """Returns a unit's rows.

        It is called on threads of its own, up to `num_fetches` at once; and once for each time that a unit is needed,
        so it must return the same rows each time. It may wait. What it raises is raised by the `next` whose batch has
        rows of the unit, with its traceback.

        Args:
            unit: its number, from 0.

        Returns:
            Whatever has `__arrow_c_stream__` or `__arrow_c_array__`: a table or record batch of pyarrow, a data frame
            of polars, ... with as many rows as `rows` says, and at least the schema's columns.
        """

    def fingerprint(self) -> Any:
        """Returns what tells this data set from others, fit for JSON: a version, paths with sizes and dates, a digest.

        A state is only loaded by a reader whose source has the same fingerprint and the same numbers of rows.
        """
