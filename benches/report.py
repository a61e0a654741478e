"""Writes RESULTS.md and its pictures from the measurements that are kept (see `kept`)."""

from __future__ import annotations

import sys
from typing import Any

import device
import kept
import plan
import plots
import sweep
import tables
import threads
from cell import Cell

MAIN = {
    "a/null": "Mixed features: scalars, vectors, sparse",
    "b/null": "Embeddings: float32[128] and a label",
    "a/null/shuffled": "Mixed features, shuffled",
}
"""The cells that matter most, and what to call them."""


BY_HAND = "\n## Parquet files\n"
"""From this heading on RESULTS.md is written by hand, and stays."""


def _order(name: str) -> int:
    return plan.CELLS.index(name) if name in plan.CELLS else len(plan.CELLS)


def _provenance(parts: dict[str, dict[str, Any]], cells: list[Cell]) -> list[str]:
    versions: dict[str, str] = {}
    lines: dict[str, None] = {}
    for part in parts.values():
        versions |= part["versions"]
        if "date" in part:
            lines[f"- {part['date']}, revision {part['revision']}, {part['machine']}"] = None
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    return [
        *lines,
        f"- {named}",
        "- One core, one thread a reader, batches of 1,024 rows, cached files, unless a table says otherwise",
        f"- While a reader was timed beside others, it went without the core for {tables.busy(cells):.0%} of the time",
        "- Every reader's values were checked against the generator's",
    ]


def main_table(cells: list[Cell]) -> list[str]:
    """The cells that matter most: records a second, and by what factor fastpipe is faster."""
    lines = [
        "| | fastpipe, records/s | MB/s | AvroTensorDataset | the fastest frame reader |",
        "|---|--:|--:|--:|--:|",
    ]
    for cell in cells:
        label, ours = MAIN.get(str(cell.spec)), cell.results.get("fastpipe")
        if label is None or ours is None or not ours.seconds:
            continue
        parts = []
        for peer in ("AvroTensorDataset", "frames"):
            found = cell.fastest(peer)
            if found is None:
                parts.append("can't" if cell.refusal(peer) else "")
            else:
                who = f", {found[0]}" if peer == "frames" else ""
                parts.append(f"{cell.results[found[0]].rate:,.0f} ({found[1]:.1f}x{who})")
        bandwidth = ours.rate * cell.raw_bytes / cell.rows / 1e6
        lines.append(f"| {label} | {ours.rate:,.0f} | {bandwidth:,.0f} | {' | '.join(parts)} |")
    return lines


def _picture(path: Any, text: str) -> list[str]:
    return [] if path is None else ["", f"![{text}]({path.name})"]


def write() -> None:
    """Writes RESULTS.md."""
    parts = {part: kept.load(part) for part in ("compare", "threads", "sweep", "memory", "interactions")}
    compared = parts["compare"]["entries"]
    cells = [Cell.from_json(compared[name]) for name in sorted(compared, key=_order)]
    lines = [
        "# Results",
        "",
        "Written by `make bench BENCH_ARGS=--write`; what the columns mean, and what each reader does, stands in",
        "[README.md](README.md).",
        "",
        *_provenance(parts, cells),
    ]
    if cells:
        lines += ["", "## fastpipe and its peers", "", *tables.goals_table(cells)]
        lines += _picture(plots.ratios(cells), "by what factor fastpipe is faster")
        lines += ["", "The three that matter most:", "", *main_table(cells)]
    if entries := parts["threads"]["entries"]:
        lines += ["", "## Two threads on two cores", "", *threads.table(entries)]
        lines += _picture(plots.threads(entries), "two threads and two processes")
    if entries := parts["memory"]["entries"]:
        lines += ["", "## Memory", "", *[f"- {line}" for line in entries.values()]]
    if entries := parts["sweep"]["entries"]:
        lines += ["", "## fastpipe alone, records/s", ""]
        lines += ["One thing changed from the usual (batches of 1,024, sequential, one thread, null, 1M):"]
        lines += ["", *sweep.usual(entries), "", "Every combination for (a), by batch size:", "", *sweep.every(entries)]
        lines += _picture(plots.batches(entries), "records a second by batch size")
    if entries := parts["interactions"]["entries"]:
        lines += ["", "## Interactions", "", "```text", *entries["tables"].splitlines(), "```"]
    lines += ["", "## On a GPU", "", *device.table(device.load())]
    for cell in cells:
        lines += ["", f"## {tables.title(cell)}", "", *tables.cell_table(cell)]
    path = plots.HERE / "RESULTS.md"
    _, heading, by_hand = path.read_text().partition(BY_HAND) if path.exists() else ("", "", "")
    path.write_text("\n".join([*lines, *["", heading.strip()] * bool(heading)]) + (by_hand or "\n"))


if __name__ == "__main__":
    write()
    print("wrote benches/RESULTS.md", file=sys.stderr)
