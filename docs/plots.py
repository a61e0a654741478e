"""Draws plots of the benchmarks for the site, from the recorded results in benches/results.

`make docs` draws them if matplotlib is installed. They aren't kept in git.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).resolve().parent.parent / "benches/results"
_DRAWS = importlib.util.find_spec("matplotlib") is not None


class Plot(NamedTuple):
    """A plot of one column of a table of results: how many times as fast as a peer fastpipe is, by row.

    Attributes:
        page: The page that shows it.
        title: The title on the page.
        result: The name of the file in benches/results.
        table: The title of the table.
        labels: The columns that name a row.
        column: The column with the ratio.
    """

    page: str
    title: str
    result: str
    table: str
    labels: tuple[str, ...]
    column: str

    @property
    def name(self) -> str:
        """The name of the image."""
        return f"{self.result}-{re.sub('[^a-z]+', '-', self.table.lower()).strip('-')}-{self.column.split()[-1]}.svg"


_AVRO = "fastpipe beside AvroTensorDataset and the fastest frame reader"
PLOTS = [
    Plot(
        "docs/comparison",
        "Avro, one core: times as fast as tensorflow-io",
        "compare",
        _AVRO,
        ("cell",),
        "than AvroTensorDataset",
    ),
    Plot(
        "docs/comparison",
        "Avro, one core: times as fast as the fastest data-frame reader",
        "compare",
        _AVRO,
        ("cell",),
        "than the fastest frame reader",
    ),
    Plot(
        "docs/comparison",
        "TFRecord: times as fast as tf.data",
        "tfrecord",
        "Rows per second",
        ("dataset", "order", "threads"),
        "fastpipe is times as fast",
    ),
    Plot(
        "docs/comparison",
        "Parquet in order: times as fast as pyarrow",
        "parquet",
        "In the order of the file, beside pyarrow's iter_batches",
        ("table, rows of a row group, of a batch",),
        "times as fast",
    ),
    Plot(
        "docs/comparison",
        "Parquet shuffled: times as fast as its peer",
        "parquet",
        "Shuffled, batches of 1,024 rows",
        ("table, rows of a row group", "peer"),
        "times as fast",
    ),
]


def ratios(plot: Plot) -> list[tuple[str, float]]:
    """Returns the labels and the values of a plot. Rows without a measured ratio are left out."""
    tables = json.loads((RESULTS / f"{plot.result}.json").read_text("utf-8"))["tables"]
    (table,) = (table for table in tables if table["title"] == plot.table)
    places = [table["columns"].index(label) for label in plot.labels]
    place = table["columns"].index(plot.column)
    found = ((", ".join(row[at] for at in places), re.match(r"\d+(\.\d+)?", row[place])) for row in table["rows"])
    return [(label, float(ratio[0])) for label, ratio in found if ratio]


def draw(folder: Path) -> None:
    """Writes the plots as SVG, if matplotlib is installed."""
    if not _DRAWS:
        return
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "fastpipe", "font.size": 9})
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for plot in PLOTS:
        labels, values = zip(*ratios(plot), strict=True)
        figure, axes = plt.subplots(figsize=(8, 0.25 * len(values) + 0.8))
        colors = ["tab:blue" if value >= 1 else "tab:orange" for value in values]
        bars = axes.barh(range(len(values)), [value - 1 for value in values], left=1, color=colors)
        axes.bar_label(bars, [f"{value:g}" for value in values], padding=2)
        axes.set_yticks(range(len(values)), labels)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlim(min(0.5, *values) * 0.9, max(2, *values) * 1.3)
        ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) if tick <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.axvline(1, color="gray", linewidth=0.8)
        figure.savefig(folder / plot.name, metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)


def section(page: str) -> str:
    """Returns a section with the plots for the end of a page, or nothing if the page has none."""
    shown = [plot for plot in PLOTS if plot.page == page]
    if not shown or not _DRAWS:
        return ""
    parts = ["\n## Plots\n", "The plots show all rows of the recorded results.\n"]
    for plot in shown:
        image = f'<img src="../_static/{plot.name}" alt="{plot.title}">'
        parts.append(f"### {plot.title}\n\nBars: {'; '.join(plot.labels)}.\n\n{image}\n")
    return "\n".join(parts)
