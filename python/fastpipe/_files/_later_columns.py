"""Columns that the first file of a dataset lacks, so that inference leaves them out."""

from __future__ import annotations

from collections.abc import Sequence

from fastpipe._omissions import report
from fastpipe.errors import ColumnsLeftOutWarning

# The maximum number of columns that a warning names.
_SHOWN = 10


def report_later_columns(later: Sequence[tuple[str, str, int]], hint: str, first: str = "the first file") -> None:
    """Reports columns that the first file lacks, with one warning.

    Args:
        later: For each column, its name, the first file that has it, and the number of files that have it.
        hint: How to read these columns.
        first: The file that determines the columns, in words.
    """
    if not later:
        return
    named = [
        f"{name!r} (file {path}{f' and {files - 1} more' if files > 1 else ''})" for name, path, files in later[:_SHOWN]
    ]
    more = f"; and {len(later) - _SHOWN} more" if len(later) > _SHOWN else ""
    what = "1 column is" if len(later) == 1 else f"{len(later)} columns are"
    text = (
        f"{what} left out because {first} lacks them: {'; '.join(named)}{more}; {hint}; columns= with the names of the "
        "other columns avoids this warning"
    )
    report(text, ColumnsLeftOutWarning)
