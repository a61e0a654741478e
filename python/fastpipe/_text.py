"""Text for a terminal: tables, sizes, and file contents with escaped control characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence


def clean(text: str) -> str:
    """Returns the text with control characters escaped, so that it can't control the terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def text_width(text: str) -> int:
    """Returns the number of terminal columns that the text occupies."""
    return len(text) if text.isascii() else sum(_char_width(c) for c in text)


def _char_width(char: str) -> int:
    return 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1


def shorten(text: str, width: int, *, keep_end: bool = False) -> str:
    """Returns the text cut to `width` columns, with an ellipsis at its end, or at its beginning if `keep_end`."""
    if text_width(text) <= width:
        return text
    kept, used = [], 0
    for char in reversed(text) if keep_end else text:
        used += _char_width(char)
        if used > width - 1:
            break
        kept.append(char)
    return "…" + "".join(reversed(kept)) if keep_end else "".join(kept) + "…"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    right: Iterable[int] = (),
    keep_end: Iterable[int] = (),
) -> str:
    """Returns a table with aligned columns. The widest columns are shortened until the table fits into `width`.

    Args:
        header: Titles of the columns.
        rows: Cells of each row.
        width: Number of terminal columns.
        right: Indices of right-aligned columns.
        keep_end: Indices of columns that are shortened at their beginning.
    """
    right, keep_end = set(right), set(keep_end)
    widths = [max(map(text_width, column)) for column in zip(header, *rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1

    def line(cells: Sequence[str]) -> str:
        out = []
        for i, (cell, columns) in enumerate(zip(cells, widths, strict=True)):
            cell = shorten(cell, columns, keep_end=i in keep_end)
            padding = " " * (columns - text_width(cell))
            out.append(padding + cell if i in right else cell + padding)
        return "  ".join(out).rstrip()

    return "\n".join([line(header), "  ".join("-" * columns for columns in widths), *map(line, rows)])


def size_text(size: float) -> str:
    """Returns a number of bytes in decimal units."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "bytes" or size >= 99.95 else f"{size:.3g} {units[0]}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
