"""Draws the plots of RESULTS.md from the figures in `results/`. The output is reproducible byte by byte."""

from __future__ import annotations

import json
import re
from typing import Any

from harness import HERE, RESULTS

COLORS = {"torch": ("tab:orange", "o"), "fastpipe": ("tab:blue", "s")}
DASHES = {"default": "-", "stack": "--", "identity": ":", "stream": "-."}
READERS = {
    "AvroRecordDataset": "tab:red",
    "AvroTensorDataset": "tab:orange",
    "fastpipe.tf.atds": "tab:cyan",
    "fastpipe": "tab:blue",
}
ITEM, BATCH, SLACK, PREFETCH = 4, 64, 64, 2
"""Parameters of the memory plot: MiB per item, per batch, and of slack, and the prefetch_factor."""


def number(cell: str) -> float | None:
    """Returns the first number of a cell, or None."""
    found = re.match(r"-?[\d,]+(\.\d+)?", cell)
    return float(found[0].replace(",", "")) if found else None


def rows(name: str, title: str) -> list[list[str]]:
    """Returns the column names of a table, followed by its rows."""
    tables = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["tables"]
    table = next(table for table in tables if table["title"].startswith(title))
    return [table["columns"], *table["rows"]]


def save(plt: Any, figure: Any, name: str) -> None:
    """Writes a plot as SVG."""
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def ratios(plt: Any) -> None:
    """Plots the speedup of fastpipe over its peers: two bars per cell, each with a mark at its target."""
    _, *cells = rows("compare", "fastpipe beside")
    figure, axes = plt.subplots(figsize=(8, 0.42 * len(cells) + 1))
    kinds = ((-0.2, 1, "AvroTensorDataset", "tab:orange"), (0.2, 4, "the fastest frame reader", "tab:blue"))
    for offset, column, label, color in kinds:
        for place, cell in enumerate(cells):
            factor, aim = number(cell[column]), number(cell[column + 1])
            if factor is None:
                continue
            axes.barh(place + offset, factor - 1, 0.38, left=1, color=color, label=label)
            if aim is not None:
                axes.plot([aim, aim], [place + offset - 0.19, place + offset + 0.19], color="black", label="meant")
    axes.set_yticks(range(len(cells)), [cell[0] for cell in cells])
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 5, 10, 20, 50)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_xlabel("times as many records a second with fastpipe, one core")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    save(plt, figure, "ratios")


def batches(plt: Any) -> None:
    """Plots records per second of (a) by batch size, with one line per codec, for sequential and shuffled order."""
    columns, *lines = rows("sweep", "Every combination")
    sizes = [number(column) for column in columns[4:]]
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    for axes, order in zip(panels, ("sequential", "shuffled"), strict=True):
        for codec, block, kind, count, *rates in lines:
            if (block, kind, count) == ("1M", order, "1"):
                axes.plot(sizes, [number(rate) for rate in rates], marker="o", markersize=3, label=codec)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, columns[4:])
        axes.set_title(f"(a), {order}")
        axes.set_xlabel("rows a batch")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("records/s, one thread")
    panels[0].legend()
    save(plt, figure, "batches")


def threads(plt: Any) -> None:
    """Plots the speed of two threads and of two processes relative to one thread."""
    _, *cells = rows("threads", "")
    figure, axes = plt.subplots(figsize=(8, 2.6))
    for offset, column, label in ((-0.2, 2, "two threads"), (0.2, 3, "two processes together")):
        shares = [(number(cell[column]) or 0) / (number(cell[1]) or 1) for cell in cells]
        axes.bar([place + offset for place in range(len(shares))], shares, 0.38, label=label)
    axes.set_xticks(range(len(cells)), [cell[0] for cell in cells])
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_ylabel("relative to one thread")
    axes.legend()
    save(plt, figure, "threads")


def dataloader_memory(plt: Any) -> None:
    """Plots the peaks of shared and private memory of DataLoaders by the number of workers."""
    columns, *lines = rows("dataloader", "Memory, batches of 64 MiB")
    workers = [int(column) for column in columns[1:-1]]
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.4))
    for axes, kind in zip(panels, ("shared", "private"), strict=True):
        for name, *cells in lines:
            of, who, collation = name.split(", ")
            if of == kind:
                color, marker = COLORS[who]
                label = who if collation == "default" else f"{who}, collate_fn={collation}"
                style = {"color": color, "marker": marker, "markersize": 3, "linestyle": DASHES[collation]}
                axes.plot(workers, [number(cell) for cell in cells[:-1]], label=label, **style)
        axes.set_xlabel("workers")
        axes.set_title(f"{kind} memory, MiB")
    # Only shared memory has a log scale. Private memory is small and may even appear negative.
    panels[0].set_yscale("log", base=2)
    label = "DataLoader-Economic: prefetch_factor batches, an item a worker"
    proposed = [PREFETCH * BATCH + count * ITEM for count in workers]
    panels[0].plot(workers, proposed, color="tab:green", linewidth=4, alpha=0.4, label=label)
    label = "bound of fastpipe's: prefetch_factor + 1 batches, 64 MiB"
    panels[0].axhline((PREFETCH + 1) * BATCH + SLACK, color="gray", linewidth=0.8, label=label)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, -0.22), ncols=2)
    save(plt, figure, "dataloader_memory")


def fill(plt: Any) -> None:
    """Plots the seconds to fill four devices, and to fill 1 to 8 devices."""
    _, *lines = rows("fill", "1 to 8 devices")
    kinds = (
        ("fill", 1, "tab:blue", "s"),
        ('method="buffered"', 2, "tab:green", "D"),
        ("one after the other", 3, "tab:orange", "o"),
        ("pandas", 4, "tab:gray", "^"),
    )
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    four = next(line for line in lines if line[0] == "4")
    left.bar(range(len(kinds)), [number(four[at]) for _, at, *_ in kinds], color=[color for *_, color, _ in kinds])
    left.set_xticks([])
    left.set_ylabel("seconds")
    left.set_title("four devices")
    counts = [int(line[0]) for line in lines]
    for name, at, color, marker in kinds:
        values = [number(line[at]) for line in lines]
        right.plot(counts, values, color=color, marker=marker, markersize=3, label=name)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(counts, [str(count) for count in counts])
    right.set_xlabel("devices")
    right.set_title("by the number of devices")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, -0.15), ncols=4)
    save(plt, figure, "fill")


def published(plt: Any) -> None:
    """Plots milliseconds a step by batch size, published and measured, and the time of training by reader."""
    columns, *lines = rows("published", "A step")
    sizes = [int(number(column.partition(", ")[2]) or 0) for column in columns[2:] if column.startswith("ms")]
    figure, (axes, bars) = plt.subplots(1, 2, figsize=(9.5, 3.2))
    for count, name, *cells in lines:
        if count in ("published", "1"):
            style = {"color": READERS[name], "marker": "o", "markersize": 3}
            times = [number(cell) for cell in cells[: len(sizes)]]
            label = f"{name}, published" if count == "published" else name
            axes.plot(sizes, times, linestyle=":" if count == "published" else "-", label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xlabel("rows a batch")
    axes.set_title("ms a step, one thread")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    # AvroRecordDataset takes far longer, so its bar would hide the others.
    _, *lines = rows("published", "Training")
    models = {width: number(step) or 0 for width, name, step, *_ in lines if name == "batches in memory"}
    shown = [line for line in lines if line[1] in ("AvroTensorDataset", "fastpipe.tf.atds")]
    for place, (width, name, step, *_) in enumerate(shown):
        bars.barh(place, models[width], color="lightgray")
        bars.barh(place, max((number(step) or 0) - models[width], 0), left=models[width], color=READERS[name])
    bars.set_yticks(range(len(shown)), [f"{name}, {width}" for width, name, *_ in shown])
    bars.invert_yaxis()
    bars.set_title("training by width of the model, ms a step: the model in gray")
    figure.subplots_adjust(wspace=0.7)
    save(plt, figure, "published")


def main() -> None:
    """Draws all plots."""
    import matplotlib

    matplotlib.use("svg")
    # Without a fixed salt, random element ids would make every file different.
    matplotlib.rcParams.update({"svg.hashsalt": "fastpipe", "font.size": 9, "figure.dpi": 100})
    import matplotlib.pyplot as plt

    for draw in (ratios, batches, threads, dataloader_memory, fill, published):
        draw(plt)


if __name__ == "__main__":
    main()
