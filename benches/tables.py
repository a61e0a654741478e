"""Measurements as Markdown tables."""

from __future__ import annotations

import plan
from cell import Cell, Result
from peers import READERS


def title(cell: Cell) -> str:
    """What stands above a cell's table."""
    spec = cell.spec
    squeezed = "" if spec.codec == "null" else f", {cell.file_bytes / cell.raw_bytes:.0%} of it on disk"
    order = f", shuffled with a buffer of {plan.SHUFFLE_BUFFER:,}" if spec.shuffled else ""
    return (
        f"({spec.dataset}) {plan.CONTENTS[spec.dataset]}; codec {spec.codec}, blocks of {spec.block}{order}: "
        f"{cell.rows:,} records of {cell.raw_bytes / cell.rows:,.0f} bytes, {cell.raw_bytes / 1e6:,.0f} MB{squeezed}"
    )


def _plain(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 160 else text[:157] + "..."


def _row(cell: Cell, name: str, result: Result) -> str:
    head = f"| {name} | {READERS[name].gives} "
    if result.error is not None or not result.seconds:
        return f"{head}| can't: {_plain(result.error or 'not measured')} " + "| " * 8 + "|"
    ratio, ratios = cell.ratio(name), cell.ratios(name)
    factor = by_cpu = ""
    if ratio is not None:
        factor = f"{ratio:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        by_cpu = f"{result.cpu_a_row / cell.results['fastpipe'].cpu_a_row:.2f}x"
    if result.differs:
        factor += f" VALUES DIFFER: {', '.join(result.differs[:3])}"
    bandwidth = result.rate * cell.raw_bytes / cell.rows / 1e6
    per_batch = 1e3 * result.wall / result.batches
    cpu = 1e6 * result.cpu_a_row
    memory = f"{result.peak / 1e6:,.0f} (+{(result.peak - result.idle) / 1e6:,.0f})"
    figures = [
        f"{result.rate:,.0f}",
        f"{bandwidth:,.0f}",
        f"{per_batch:,.3f}",
        f"{cpu:,.2f}",
        memory,
    ]
    return f"{head}| {' | '.join(figures)} | {len(result.seconds)} | {factor} | {by_cpu} |"


def cell_table(cell: Cell) -> list[str]:
    """One cell: a line a reader."""
    figures = ["records/s", "MB/s", "ms a batch", "CPU s/M records", "peak MB (over idle)", "rounds"]
    figures += ["fastpipe is times as fast (rounds)", "by CPU time"]
    lines = [f"| reader | gives | {' | '.join(figures)} |", f"|---|---|{'--:|' * len(figures)}"]
    return lines + [_row(cell, name, result) for name, result in cell.results.items()]


def _against(cell: Cell, peer: str, goal: float | None) -> list[str]:
    found, refusal = cell.fastest(peer), cell.refusal(peer)
    aim = "" if goal is None else f"{goal:g}x"
    if found is None:
        return [f"can't: {_plain(refusal)}" if refusal else "", aim, ""]
    name, ratio = found
    met = "" if goal is None else ("yes" if ratio >= goal else "no")
    return [f"{ratio:.2f}x ({name})", aim, met]


def goals_table(cells: list[Cell]) -> list[str]:
    """All cells: by what factor fastpipe is faster, and was meant to be."""
    lines = [
        "| cell | than AvroTensorDataset | meant | met | than the fastest frame reader | meant | met |",
        "|---|--:|--:|---|--:|--:|---|",
    ]
    for cell in cells:
        goal = plan.GOALS.get(str(cell.spec), plan.Goal())
        parts = [*_against(cell, "AvroTensorDataset", goal.atds), *_against(cell, "frames", goal.frame)]
        lines.append(f"| {cell.spec} | {' | '.join(parts)} |")
    return lines


def busy(cells: list[Cell]) -> float:
    """The share of the time that the readers didn't get the core, over all rounds."""
    results = [result for cell in cells for result in cell.results.values()]
    wall = sum(sum(result.seconds.values()) for result in results)
    return max(0.0, 1 - sum(sum(result.cpu) for result in results) / wall) if wall else 0.0
