"""Rows of a batch as text: what `fastpipe head` shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastpipe._text import shorten, table, text_width
from fastpipe.batch import Masked, Ragged, Sparse, SparseCSR

_EDGE = 3  # Items shown at each end of a longer array, as NumPy does.


def batch_rows(batch: dict[str, Any], symbols: dict[str, list[str]], width: int) -> list[list[str]]:
    """The rows of a batch as cells, each a line of text.

    Args:
        batch: of a reader.
        symbols: for features that are enums, their symbols.
        width: no text within a cell is much longer than this.
    """
    columns = []
    for name, node in batch.items():
        show = _scalar_text(width, symbols.get(name))
        values = node.values if isinstance(node, Masked) else node
        if isinstance(values, (Sparse, SparseCSR)):
            columns.append([_sparse_text(row, show) for row in node.to_list()])
        else:
            columns.append([_cell(node, i, show) for i in range(len(node))])
    return [list(row) for row in zip(*columns, strict=True)]


def _scalar_text(width: int, symbols: list[str] | None) -> Callable[[Any], str]:
    def show(value: Any) -> str:
        if value is None:
            return "null"
        if isinstance(value, (str, bytes)):
            # repr escapes what a terminal would obey.
            return repr(value) if len(value) <= width else f"{value[:width]!r}…"
        if isinstance(value, (bool, np.bool_)):
            return "true" if value else "false"
        if isinstance(value, (float, np.floating)):
            return f"{value:.6g}"
        return symbols[value] if symbols and 0 <= value < len(symbols) else str(value)

    return show


def _cell(node: Any, index: int, show: Callable[[Any], str]) -> str:
    """One row, or one item within a row, of any form."""
    if isinstance(node, Masked):
        flags = node.valid[index]
        if node.valid.ndim == 1:
            return _cell(node.values, index, show) if flags else "null"
        values = node.values[index]
        return _items_text(Masked(values, flags), show)
    row = node[index]
    if isinstance(row, (np.ndarray, Ragged, Masked)):
        return _items_text(row, show)
    return show(row)


def _items_text(items: Any, show: Callable[[Any], str]) -> str:
    if isinstance(items, np.ndarray):
        with np.printoptions(threshold=2 * _EDGE, edgeitems=_EDGE, linewidth=10**6, formatter={"all": show}):
            return re.sub(r"\s*\n\s*", " ", np.array2string(items))
    count = len(items)
    shown = range(count) if count <= 2 * _EDGE else [*range(_EDGE), -1, *range(count - _EDGE, count)]
    return f"[{' '.join('...' if i < 0 else _cell(items, i, show) for i in shown)}]"


def _sparse_text(entries: list[Any] | None, show: Callable[[Any], str]) -> str:
    if entries is None:
        return "null"
    parts = [f"{index[0] if len(index) == 1 else index}: {show(value)}" for index, value in entries]
    if len(parts) > 2 * _EDGE:
        parts = [*parts[:_EDGE], "...", *parts[-_EDGE:]]
    return f"{{{', '.join(parts)}}}"


def rows_text(names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Rows as a table if they fit into the terminal, else each as a paragraph."""
    widths = [max(map(text_width, column)) for column in zip(names, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= width:
        return table(names, rows, width)
    margin = min(max(map(text_width, names)), max(width // 3, 8))
    paragraphs = []
    for i, row in enumerate(rows):
        lines = [f"record {i}"]
        for name, cell in zip(names, row, strict=True):
            name = shorten(name, margin)
            lines.append(f"  {name}{' ' * (margin - text_width(name))}  {shorten(cell, max(width - margin - 4, 8))}")
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)
