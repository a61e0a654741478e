"""The picture that `fastpipe bench` draws. matplotlib is an extra, so it is imported when a picture is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastpipe._bench import Measured

__all__ = ["draw", "figure_class"]

_COLORS = {"off": "#7f8c99", "window": "#1f77b4", "block": "#2ca02c", "buffer": "#d62728"}
_DASHES = ("-", "--", "-.", ":")
_MARKERS = "osD^vPX*"


def figure_class() -> Any:
    """Figures of matplotlib; without pyplot there is no display and no global state.

    Raises:
        ImportError: if matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install 'fastpipe-data[bench]'") from error
    return Figure


def draw(measured: Sequence[Measured], best: Measured, title: str, path: str) -> None:
    """Draws records a second over the batch size, a line for each number of threads and order.

    Args:
        measured: the cells.
        best: the one to mark.
        title: of the picture.
        path: where to.

    Raises:
        ImportError: if matplotlib isn't installed.
        OSError: if it can't be written.
    """
    figure = figure_class()(figsize=(8.5, 5), dpi=120, layout="constrained")
    axis = figure.subplots()
    read = [m for m in measured if m.refused is None]
    threads = list(dict.fromkeys(m.cell.num_threads for m in read))
    for shuffle, count in dict.fromkeys((m.cell.shuffle, m.cell.num_threads) for m in read):
        line = [m for m in read if (m.cell.shuffle, m.cell.num_threads) == (shuffle, count)]
        number = threads.index(count)
        axis.plot(
            [m.cell.batch_size for m in line],
            [m.records_per_second for m in line],
            color=_COLORS[shuffle],
            linestyle=_DASHES[number % len(_DASHES)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            label=f"{shuffle}, {'auto' if count == 'auto' else f'{count} thread' + 's' * (count > 1)}",
        )
    at = (best.cell.batch_size, best.records_per_second)
    axis.plot(*at, marker="o", markersize=12, markerfacecolor="none", markeredgecolor="black", linestyle="none")
    axis.annotate(f"{at[1]:,.0f}/s", at, xytext=(0, 9), textcoords="offset points", ha="center")
    axis.set_xscale("log", base=2)
    sizes = sorted({m.cell.batch_size for m in read})
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.set_xlabel("batch_size")
    axis.set_ylabel("records a second")
    axis.set_title(title, parse_math=False)
    axis.margins(x=0.1, y=0.12)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.25)
    axis.legend(frameon=False, fontsize="small")
    figure.savefig(path)
