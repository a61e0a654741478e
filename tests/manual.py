"""The manual (README.md and `docs/`): its examples, its links, and the files that the examples read."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import fastavro
import numpy as np

import tfrecords

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
INDEX = ROOT / "docs/README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
REFERENCE = sorted((ROOT / "docs/api").glob("*.md"))
"""Pages that only list names, for which `make docs` adds the docstrings."""

# Six full batches of 1,024 rows in total.
ROWS, FILES = 3_072, 2

_LONGS = {"type": "array", "items": "long"}
_FLOATS = {"type": "array", "items": "float"}
SCHEMA = {
    "type": "record",
    "name": "Impression",
    "fields": [
        {
            "name": "user",
            "type": {
                "type": "record",
                "name": "User",
                "fields": [{"name": "id", "type": "long"}, {"name": "age", "type": "int"}],
            },
        },
        {"name": "user_embedding", "type": _FLOATS},
        {"name": "history", "type": _LONGS},
        {"name": "clicked_items", "type": _LONGS},
        {
            "name": "sparse_terms",
            "type": {
                "type": "record",
                "name": "Terms",
                "fields": [{"name": "indices0", "type": _LONGS}, {"name": "values", "type": _FLOATS}],
            },
        },
        {"name": "age", "type": ["null", "int"]},
        {"name": "country", "type": ["null", "string"]},
        {"name": "label", "type": "float"},
    ],
}


def _record(random: np.random.Generator, row: int) -> dict[str, Any]:
    terms = random.integers(0, 4)
    return {
        "user": {"id": row, "age": int(random.integers(18, 90))},
        "user_embedding": random.random(64, dtype=np.float32).tolist(),
        "history": random.integers(0, 500, random.integers(0, 30)).tolist(),
        "clicked_items": random.integers(0, 500, random.integers(0, 5)).tolist(),
        "sparse_terms": {
            "indices0": np.sort(random.choice(100_000, terms, replace=False)).tolist(),
            "values": random.random(terms, dtype=np.float32).tolist(),
        },
        "age": None if row % 7 == 0 else int(random.integers(18, 90)),
        "country": None if row % 5 == 0 else ("NL", "PE", "JP")[row % 3],
        "label": float(row % 2),
    }


def write(folder: Path) -> None:
    """Writes the files that the examples read.

    `data/part-*.avro` have old timestamps because indexes are kept only for old files. `trips/*.csv` have three numeric
    features and a label, `fare`, that depends on them. `ml-100k/u.data` has ratings as MovieLens-100k does.
    """
    random = np.random.default_rng(7)
    (folder / "data").mkdir()
    for number in range(FILES):
        rows = [_record(random, row) for row in range(number * ROWS, (number + 1) * ROWS)]
        path = folder / f"data/part-{number}.avro"
        with path.open("wb") as file:
            fastavro.writer(file, SCHEMA, rows, codec="deflate", sync_interval=32_000)
        os.utime(path, (time.time() - 3_600,) * 2)
    (folder / "ml-100k").mkdir()
    rated = sorted({(int(user), int(item)) for user, item in random.integers(1, 50, (600, 2))})
    lines = (f"{user}\t{item}\t{1 + item % 5}\t{880_000_000 + row}\n" for row, (user, item) in enumerate(rated))
    (folder / "ml-100k/u.data").write_text("".join(lines))
    rides = [f'{row / 8},"{("Wien", "Graz, Steiermark")[row % 2]}",2024-01-{row % 28 + 1:02}\n' for row in range(2_000)]
    (folder / "rides.csv").write_text("distance,city,day\n" + "".join(rides))
    clicks = ({"label": row % 2, "tokens": list(range(row % 7)), "user": f"u{row % 50}"} for row in range(2_000))
    (folder / "clicks.tfrecord").write_bytes(tfrecords.file(clicks))
    (folder / "trips").mkdir()
    for name, rows in (("train", 4_000), ("validation", 1_000)):
        distance, hour = random.uniform(0.5, 20, rows), random.integers(0, 24, rows)
        minutes = distance * np.where((hour >= 16) & (hour < 19), 4, 2) * random.uniform(0.8, 1.2, rows)
        fare = 3 + 1.2 * distance + 0.3 * minutes + random.normal(0, 0.5, rows)
        columns = np.column_stack([distance, minutes, hour, fare])
        header = "distance,minutes,hour,fare"
        np.savetxt(
            folder / f"trips/{name}.csv", columns, ["%.2f", "%.1f", "%d", "%.2f"], ",", header=header, comments=""
        )


class Example(NamedTuple):
    """Python code, one command, or a block of commands, which may run in the background.

    Attributes:
        output: What the code prints, if the next block shows it.
        programs: Names and contents of the page's programs, if the commands run one.
    """

    page: Path
    language: str
    code: str
    output: str | None = None
    programs: tuple[tuple[str, str], ...] = ()


# A block of code, and a block of text that follows without prose.
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)


def programs(page: Path) -> dict[str, str]:
    """Returns the blocks of Python that begin with the name of a file (`# train.py`), by that name."""
    blocks = (code for language, code, _ in _BLOCK.findall(page.read_text("utf-8")) if language == "python")
    return {named[1]: code for code in blocks if (named := re.match(r"# (\w+\.py)\n", code))}


def examples(page: Path) -> Iterator[Example]:
    """Yields the examples of a page in order.

    Only the command `fastpipe`, and commands that run a program of the page, are examples.
    """
    files = programs(page)
    for language, code, output in _BLOCK.findall(page.read_text("utf-8")):
        if language == "python" and code not in files.values():
            yield Example(page, language, code, output or None)
        elif language == "sh":
            runs = any(name in code for name in files)
            commands = [
                line
                for line in code.splitlines()
                if line.startswith("fastpipe ") or any(name in line for name in files)
            ]
            if runs:
                yield Example(page, language, "\n".join(commands), output or None, tuple(files.items()))
            else:
                yield from (Example(page, language, line) for line in commands)


def _prose(page: Path) -> str:
    """Returns a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub generates them."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ +(.+?) *$", _prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names


def links(page: Path) -> list[str]:
    """Returns the targets of a page's links, including images and references."""
    prose = re.sub(r"(`+).*?\1", "`code`", _prose(page), flags=re.DOTALL)
    return re.findall(r"\]\(\s*<?([^)>\s]+)", prose) + re.findall(r"^ *\[[^\]]+\]: *<?([^>\s]+)", prose, re.MULTILINE)


def target(page: Path, link: str) -> Path | None:
    """Returns the file that a link refers to, or None for another site."""
    if re.match(r"[a-z][a-z+.-]*:", link):
        return None
    path = unquote(link.split("#")[0])
    return (page.parent / path).resolve() if path else page


def broken(page: Path) -> list[str]:
    """Returns the links of a page that lead to a missing file or heading."""
    found = []
    for link in links(page):
        to, (_, _, anchor) = target(page, link), link.partition("#")
        if to is None:
            continue
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            found.append(link)
    return found
