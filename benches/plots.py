"""Measurements as pictures, SVG files beside RESULTS.md. The same measurements give the same bytes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import dataloader_memory as memory_of
import plan
import sweep
from cell import Cell

HERE = Path(__file__).resolve().parent
PEERS = {"AvroTensorDataset": "tab:orange", "frames": "tab:blue"}
LABELS = {"AvroTensorDataset": "AvroTensorDataset", "frames": "the fastest frame reader"}


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # Without these, names and dates drawn by chance would make every file another one.
    matplotlib.rcParams.update({"svg.hashsalt": "fastpipe", "font.size": 9, "figure.dpi": 100})
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, name: str) -> Path:
    path = HERE / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    return path


def ratios(cells: list[Cell]) -> Path:
    """By what factor fastpipe is faster than its peers: a pair of bars a cell, a mark where it is meant to be."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 0.42 * len(cells) + 1))
    for offset, peer in zip((-0.2, 0.2), PEERS, strict=True):
        for place, cell in enumerate(cells):
            found = cell.fastest(peer)
            if found is None:
                continue
            axes.barh(place + offset, found[1] - 1, 0.38, left=1, color=PEERS[peer], label=LABELS[peer])
            goal = plan.GOALS.get(str(cell.spec), plan.Goal())
            aim = goal.atds if peer == "AvroTensorDataset" else goal.frame
            if aim is not None:
                axes.plot([aim, aim], [place + offset - 0.19, place + offset + 0.19], color="black", label="meant")
    axes.set_yticks(range(len(cells)), [str(cell.spec) for cell in cells])
    axes.invert_yaxis()
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 5, 10, 20, 50)
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("times as many records a second with fastpipe, one core")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    path = _save(figure, "ratios")
    plt.close(figure)
    return path


def batches(entries: dict[str, Any]) -> Path | None:
    """Records a second of (a) by batch size: a line a codec, in the file's order and shuffled."""
    rates = {sweep.Setting.parse(name): statistics.median(entry["rates"]) for name, entry in entries.items()}
    plt = _pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    drawn = False
    for axes, shuffled in zip(panels, (False, True), strict=True):
        for codec in sweep.CODECS:
            line = [rates.get(sweep.Setting("a", batch, shuffled, 1, codec)) for batch in sweep.BATCHES]
            if all(rate is not None for rate in line):
                axes.plot(sweep.BATCHES, line, marker="o", markersize=3, label=codec)
                drawn = True
        axes.set_xscale("log", base=2)
        axes.set_xticks(sweep.BATCHES, [f"{batch:,}" for batch in sweep.BATCHES])
        axes.set_title(f"(a), {'shuffled' if shuffled else 'sequential'}")
        axes.set_xlabel("rows a batch")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("records/s, one thread")
    if drawn:
        panels[0].legend()
    path = _save(figure, "batches") if drawn else None
    plt.close(figure)
    return path


def threads(entries: dict[str, Any]) -> Path:
    """Two threads and two processes, each relative to one thread."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 2.6))
    for offset, way, label in ((-0.2, "two", "two threads"), (0.2, "pair", "two processes together")):
        shares = [
            statistics.median([both / one for both, one in zip(entry[way], entry["one"], strict=True)])
            for entry in entries.values()
        ]
        axes.bar([place + offset for place in range(len(shares))], shares, 0.38, label=label)
    axes.set_xticks(range(len(entries)), list(entries))
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_ylabel("relative to one thread")
    axes.legend()
    path = _save(figure, "threads")
    plt.close(figure)
    return path


def dataloader_memory(entries: dict[str, Any]) -> Path:
    """Peaks of shared and private memory of DataLoaders, by the number of workers."""
    plt = _pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.4))
    name, load = next(iter(memory_of.LOADS.items()))
    numbers = memory_of.WORKERS
    styles = {"torch": ("tab:orange", "o"), "fastpipe": ("tab:blue", "s")}
    dashes = {"default": "-", "stack": "--", "identity": ":"}
    for axes, kind in zip(panels, ("shared", "private"), strict=True):
        for who, collation in memory_of.RUNS:
            if (entry := entries.get(f"{name},{who},{collation}")) is None:
                continue
            color, marker = styles[who]
            label = who if collation == "default" else f"{who}, collate_fn={collation}"
            line = [entry[kind][str(number)] / memory_of.MiB for number in numbers]
            axes.plot(numbers, line, color=color, marker=marker, markersize=3, linestyle=dashes[collation], label=label)
        axes.set_xlabel("workers")
        axes.set_title(f"{kind} memory, MiB")
    # What little there is of private memory may be less than how much interpreters vary.
    panels[0].set_yscale("log", base=2)
    proposed = [(memory_of.PREFETCH * load.batch + number * load.size) / memory_of.MiB for number in numbers]
    label = "DataLoader-Economic: prefetch_factor batches, an item a worker"
    panels[0].plot(numbers, proposed, color="tab:green", linewidth=4, alpha=0.4, label=label)
    panels[0].axhline(
        load.limit / memory_of.MiB,
        color="grey",
        linewidth=0.8,
        label="bound of fastpipe's: prefetch_factor + 1 batches, 64 MiB",
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, -0.22), ncols=2)
    path = _save(figure, "dataloader_memory")
    plt.close(figure)
    return path
