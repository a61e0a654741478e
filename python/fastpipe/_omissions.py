"""Reports of data that fastpipe leaves out: each is logged, and the caller is warned if much is left out."""

from __future__ import annotations

import sys
import warnings

# Up to a tenth may be left out without a warning.
_UNSAID = 10


def is_large(left_out: int, total: int) -> bool:
    """Whether more than a tenth is left out, which warrants a warning."""
    return left_out * _UNSAID > total


def share(left_out: int, total: int, what: str) -> str:
    """Returns the beginning of a report, such as "20 of 200 rows (10%)" or "all 200 rows (100%)"."""
    return f"{'all' if left_out == total else f'{left_out} of'} {total} {what} ({left_out / total:.0%})"


def report(text: str, warning: type[Warning] | None = None) -> None:
    """Logs what is left out, at the level INFO of the logger `fastpipe`.

    Args:
        text: What is left out, how much, why, and how to keep it.
        warning: The category of a warning with the same text for the caller of fastpipe. None for no warning.
    """
    import logging  # Takes milliseconds to import, and is rarely needed.

    logging.getLogger("fastpipe").info("%s", text)
    if warning is not None:
        warnings.warn(text, warning, stacklevel())


def stacklevel() -> int:
    """Returns the number of stack frames from the caller of this function to the first frame outside of fastpipe."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fastpipe":
        level, frame = level + 1, frame.f_back
    return level
