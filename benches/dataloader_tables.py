"""What `dataloader.py` has measured as tables for RESULTS.md, and the picture of memory."""

from __future__ import annotations

import statistics
from typing import Any

import dataloader
import dataloader_items as items
import dataloader_memory
import kept
import loads
import plots

MiB = 1 << 20
METHODS = {
    "none": "Without workers",
    "fork": "Forked workers",
    "forkserver": "Workers of a fork server, which has imported torch",
    "spawn": "Spawned workers",
    "thread": "Threads (torch's workers are forked)",
}


def times(seconds: dict[str, list[float]]) -> float:
    """How many times as fast as torch's loader."""
    return loads.ratio(seconds["torch"], seconds["fastpipe"])


def grid(entries: dict[str, Any]) -> list[str]:
    """A table a method: a row for each kind, size and collation, a column for each number of workers."""
    lines: list[str] = []
    for method in METHODS:
        of_method = {tuple(name.split(",")): entry for name, entry in entries.items() if name.split(",")[0] == method}
        if not of_method:
            continue
        numbers = sorted({int(name[1]) for name in of_method})
        lines += ["", f"{METHODS[method]}:", "", f"| collation, items, size | {' | '.join(map(str, numbers))} |"]
        lines += [f"|---|{'--:|' * len(numbers)}"]
        for collation in items.COLLATIONS:
            for kind in dataloader.WANTED:
                for size in items.SIZES:
                    found = [of_method.get((method, str(number), collation, kind, size)) for number in numbers]
                    told = ["" if entry is None else f"{times(entry):.2f}" for entry in found]
                    lines.append(f"| {collation}, {kind}, {size} | {' | '.join(told)} |")
    return lines


def least(entries: dict[str, Any]) -> list[str]:
    """By size and kind, with default collation and worker processes: the range over numbers of workers."""
    lines = ["| items | torch, ms a batch | fastpipe | times as fast, 2 workers | any number of workers | wanted |"]
    lines += ["|---|--:|--:|--:|--:|--:|"]
    for kind, wanted in dataloader.WANTED.items():
        for size in items.SIZES:
            found = {}
            for name, entry in entries.items():
                cell = name.split(",")
                if cell[2:] == ["default", kind, size] and cell[0] in ("fork", "forkserver", "spawn"):
                    found[cell[0], int(cell[1])] = entry
            if ("fork", 2) not in found:
                continue
            two = found["fork", 2]
            batches = dataloader.Cell("fork", 2, "default", kind, size).shape(False)[1]
            each = [f"{statistics.median(two[who]) / batches * 1e3:.3f}" for who in dataloader.BOTH]
            ratios = [times(entry) for entry in found.values()]
            told = f"{min(ratios):.1f} to {max(ratios):.1f}"
            lines.append(f"| {kind}, {size} | {each[0]} | {each[1]} | {times(two):.1f} | {told} | {wanted[size]:g} |")
    return lines


def first(entries: dict[str, Any]) -> list[str]:
    """The first batch."""
    lines = ["| workers | torch, ms | fastpipe | of the ideal | times as soon |", "|---|--:|--:|--:|--:|"]
    for name, entry in entries.items():
        each = [statistics.median(entry[who]) * 1e3 for who in dataloader.BOTH]
        of_ideal = each[1] / entry["ideal"][0] / 1e3
        told = name.replace(",", ", ")
        lines.append(f"| {told} | {each[0]:,.0f} | {each[1]:,.0f} | {of_ideal:.2f} | {times(entry):.1f} |")
    return lines


def slow(entries: dict[str, Any]) -> list[str]:
    """Slow items."""
    lines = [
        "| the other items | ideal, s | torch | fastpipe | times as fast | of rounds |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, entry in entries.items():
        each = [f"{statistics.median(entry[who]):.1f}" for who in ("ideal", *dataloader.BOTH)]
        ratios = [a / b for a, b in zip(entry["torch"], entry["fastpipe"], strict=True)]
        told = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(f"| {name} ms | {' | '.join(each)} | {times(entry):.2f} | {told} |")
    return lines


def memory(entries: dict[str, Any]) -> list[str]:
    """Peaks by the number of workers."""
    lines: list[str] = []
    for load, about in dataloader_memory.LOADS.items():
        of_load = {
            name.split(",")[-2:][0] + ", " + name.split(",")[-1]: entry
            for name, entry in entries.items()
            if name.startswith(load + ",")
        }
        if not of_load:
            continue
        numbers = sorted(map(int, next(iter(of_load.values()))["shared"]))
        lines += ["", f"Batches of {load} (bound {about.limit / MiB:.0f}):", ""]
        lines += [
            f"| MiB | {' | '.join(map(str, numbers))} | each worker adds |",
            f"|---|{'--:|' * (len(numbers) + 1)}",
        ]
        for kind in ("shared", "private"):
            for name, entry in of_load.items():
                peaks = [f"{entry[kind][str(number)] / MiB:,.0f}" for number in numbers]
                more = dataloader_memory.slope(entry[kind]) / MiB
                lines.append(f"| {kind}, {name} | {' | '.join(peaks)} | {more:.2f} |")
    return lines


def show(quick: bool) -> None:
    """Prints what is kept, as Markdown, and draws the picture of memory."""
    parts = {"first": first, "slow": slow, "memory": memory, "grid": grid}
    for part, table in parts.items():
        found = kept.load(f"dataloader-{part}", quick)
        if not found["entries"]:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        print(f"\n{part}: {found['date']}, revision {found['revision']}, {found['machine']}; {versions}\n")
        if part == "grid":
            print("\n".join(least(found["entries"])))
        print("\n".join(table(found["entries"])))
        if part == "memory":
            print(plots.dataloader_memory(found["entries"]))
