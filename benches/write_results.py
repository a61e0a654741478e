"""Writes RESULTS.md, and tables in the manual, from the figures in `results/`, which the benches write with `--keep`.

    python benches/write_results.py [--check]

`--check` writes nothing and exits with status 1 if a page is out of date. In the pages of `docs`, the lines between
`<!-- figures: NAME, TITLE -->` and `<!-- end of figures -->` are the table TITLE of `results/NAME.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

import device
from harness import HERE, RESULTS

SECTIONS = ["compare", "threads", "memory", "sweep", "growth", "auto", "shuffle", "index", "in_memory", "starts"]
SECTIONS += ["interactions", "device", "parquet", "frames", "csv_files", "fill", "dataloader", "bags"]
SECTIONS += ["filters", "mixtures", "mixture_states", "shaping_peers"]
SECTIONS += ["published", "atds", "atds_small", "storage"]
SECTIONS += ["tfrecord", "writing", "sql", "leases", "describe", "service"]
"""Order of the sections. A bench without saved figures has no section."""
FIGURES = re.compile(r"(<!-- figures: (\w+), (.*?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
HEAD = """\
# Results

Written by `benches/write_results.py` from the figures in [results](results). [README.md](README.md) says how they are
measured, and what limits them is in [notes](notes).
"""


def markdown(table: dict[str, Any], shared: list[str]) -> list[str]:
    """Returns the lines of a table. `shared` lists the measurements that its section has already described."""
    lines = ["", f"### {table['title']}"] if table["title"] else []
    measured = [] if table["measured"] == shared else [f"Measured {when}." for when in table["measured"]]
    for text in (table.get("about", ""), *measured):
        lines += ["", text] if text else []
    return [*lines, "", *grid(table)]


def grid(table: dict[str, Any]) -> list[str]:
    """Returns the lines of the columns and rows of a table."""
    rules = ("--:" if side == "r" else "---" for side in table["align"])
    lines = [f"| {' | '.join(table['columns'])} |", f"|{'|'.join(rules)}|"]
    return lines + [f"| {' | '.join(row)} |" for row in table["rows"]]


def section(name: str) -> list[str]:
    """Returns the lines of a bench's section."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    data = json.loads(path.read_text("utf-8"))
    if name == "device":
        return ["", "## On a GPU", "", "Notes: [gpu.md](notes/gpu.md).", "", *device.table(data)]
    shared = data["tables"][0]["measured"]
    if any(table["measured"] != shared for table in data["tables"]):
        shared = []
    lines = ["", f"## {data['title']}"]
    notes = f" Notes: [{data['notes']}](notes/{data['notes']})." if data.get("notes") else ""
    lines += ["", f"`benches/{name}.py`.{notes}"]
    for text in (data.get("about", ""), *(f"Measured {when}." for when in shared)):
        lines += ["", text] if text else []
    for table in data["tables"]:
        lines += markdown(table, shared)
    for picture, text in data.get("pictures", []):
        lines += ["", f"![{text}]({picture})"]
    return lines


def filled(page: str) -> str:
    """Returns the text of a page with the present figures in its tables."""

    def table(found: re.Match[str]) -> str:
        begin, name, title, end = found.groups()
        tables = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["tables"]
        lines = grid(next(table for table in tables if table["title"] == title))
        return "\n".join([begin, *lines, "", end])

    return FIGURES.sub(table, page)


def main() -> int:
    """Writes the pages, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check that RESULTS.md is up to date")
    check = parser.parse_args().check
    path = HERE / "RESULTS.md"
    if unlisted := {file.stem for file in RESULTS.glob("*.json")} - set(SECTIONS):
        raise SystemExit(f"SECTIONS lacks {', '.join(sorted(unlisted))}")
    texts = {path: HEAD + "\n".join([line for name in SECTIONS for line in section(name)]) + "\n"}
    texts |= {page: filled(page.read_text("utf-8")) for page in (HERE.parent / "docs").glob("*.md")}
    stale = [path for path, text in texts.items() if path.read_text("utf-8") != text]
    for path in stale:
        if check:
            name = path.relative_to(HERE.parent)
            print(f"{name} is out of date: run benches/write_results.py", file=sys.stderr)
        else:
            path.write_text(texts[path], "utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
