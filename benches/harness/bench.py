"""The building blocks of a bench: options, tables, targets, and saved figures.

A bench is a script that defines `main(bench)` and ends with `Bench(name, __doc__, ...).run(main)`. A bench with several
parts defines a function for each part and ends with `Bench(..., parts=list(PARTS)).run(PARTS)`. Tables are printed in
Markdown, row by row. After the run they are written to `.cache/results/NAME.json`, or with `--keep` to
`results/NAME.json`, from which `write_results.py` generates RESULTS.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent.parent
RESULTS, CACHE = HERE / "results", HERE / ".cache"
MISSED = 3
"""Exit status if a check failed or a bound was missed, without an exception."""
QUICK = os.environ.get("QUICK", "") not in ("", "0")


def revision() -> str:
    """Returns the current commit, with the suffix `-dirty` if the working tree has changes."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """Returns the processor, the number of cores, the memory, the kernel, and the Python version."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    model = found[1] if found else platform.processor() or platform.machine()
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {system}"


def write_json(path: Path, data: Any) -> None:
    """Replaces a JSON file atomically. Lists of strings are written on one line."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    string = r'"(?:[^"\\]|\\.)*"'
    lists = rf"\[\n\s+({string}(?:,\n\s+{string})*)\n\s+\]"
    text = re.sub(lists, lambda found: "[" + re.sub(r",\n\s+", ", ", found[1]) + "]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(text + "\n", "utf-8")
    partial.replace(path)


class Table:
    """A table of figures, printed row by row.

    Args:
        title: Heading of the table.
        columns: `name` for each column of text, and `name|format` for each column of numbers.
    """

    def __init__(self, title: str, columns: tuple[str, ...]) -> None:
        self.title = title
        parts = [column.partition("|") for column in columns]
        self.columns = [name for name, _, _ in parts]
        self._formats = [form for _, _, form in parts]
        self.align = "".join("r" if bar else "l" for _, bar, _ in parts)
        self.rows: list[list[str]] = []
        print(*["", f"### {title}"] * bool(title), "", f"| {' | '.join(self.columns)} |", sep="\n")
        print(f"|{'|'.join('--:' if side == 'r' else '---' for side in self.align)}|", flush=True)

    def __call__(self, *values: Any) -> None:
        """Adds a row. None is an empty cell, and missing cells at the end are empty."""
        cells = [self._shown(value, form) for value, form in zip(values, self._formats, strict=False)]
        self.rows.append(cells + [""] * (len(self.columns) - len(cells)))
        print(f"| {' | '.join(self.rows[-1])} |", flush=True)

    @staticmethod
    def _shown(value: Any, form: str) -> str:
        if value is None:
            return ""
        if isinstance(value, (int, float)):
            return format(value, form or (",.2f" if isinstance(value, float) else ","))
        return " ".join(str(value).split()).replace("|", "\\|")

    def kept(self, measured: str, before: dict[str, Any]) -> dict[str, Any]:
        """Returns the content to save. It includes the rows of `before` that this run didn't measure again."""
        # The leading text columns identify a row.
        keys = max(1, len(self.align) - len(self.align.lstrip("l")))
        rows = {tuple(row[:keys]): row for row in self.rows}
        former = {tuple(row[:keys]): row for row in before.get("rows", [])}
        same = before.get("columns") == self.columns
        runs = (
            [run for run in before.get("measured", []) if run != measured] if same and set(former) - set(rows) else []
        )
        found = {"title": self.title} | {key: before[key] for key in ("about",) if key in before}
        found |= {"measured": [*runs, measured], "columns": self.columns, "align": self.align}
        return found | {"rows": [*(former | rows if same else rows).values()]}


Measure = Callable[["Bench"], object]


class Bench:
    """The command line, tables, and results of a bench.

    Args:
        name: Name of the file that the figures are saved in.
        doc: Text of `--help`.
        rounds: Number of rounds in a normal and in a quick run.
        packages: Distributions whose versions are saved with the figures.
        **options: Option -> default, or a pair of the defaults of a normal and a quick run. On the command line, lists
            are comma-separated.

    Attributes:
        args: The options of this run.
        quick: Whether this is a quick run (`--quick`, `QUICK=1`), which only tests the bench on small datasets.
        rounds: Number of rounds.
        versions: Package -> version.
    """

    def __init__(
        self,
        name: str,
        doc: str | None,
        rounds: tuple[int, int] = (7, 3),
        packages: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.name = name
        self.parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.parser.add_argument("--quick", action="store_true", default=QUICK, help="use small datasets (QUICK=1)")
        self.parser.add_argument("--keep", action="store_true", help="save the figures in results/, unless --quick")
        self._defaults = {"rounds": rounds} | options
        for option, default in self._defaults.items():
            self._add(f"--{option.replace('_', '-')}", default[0] if isinstance(default, tuple) else default)
        self.args = argparse.Namespace()
        self.quick, self.rounds = QUICK, 0
        self.versions: dict[str, str] = {}
        self._packages = ("fastpipe-data", *packages)
        self._tables: list[Table] = []
        self._below: list[str] = []
        self._failed: list[str] = []
        self._begun = time.perf_counter()

    def _add(self, flag: str, default: Any) -> None:
        if isinstance(default, bool):
            self.parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            kind = type(default[0])
            told = ",".join(map(str, default))
            self.parser.add_argument(flag, type=lambda text: [kind(part) for part in text.split(",")], help=told)
        else:
            kind = str if default is None else type(default)
            self.parser.add_argument(flag, type=kind, help=str(default))

    def run(self, main: Measure | Mapping[str, Measure]) -> NoReturn:
        """Parses the options, runs `main` or its selected parts, saves the figures, and exits."""
        self.args = self.parser.parse_args()
        self.quick = self.args.quick
        for option, default in self._defaults.items():
            if getattr(self.args, option) in (None, False):
                pair = default if isinstance(default, tuple) else (default, default)
                setattr(self.args, option, pair[self.quick])
        self.rounds = self.args.rounds
        for measure in [main[part] for part in self.args.parts] if isinstance(main, Mapping) else [main]:
            measure(self)
        raise SystemExit(self.finish())

    def table(self, *columns: str, title: str = "") -> Table:
        """Starts a new table."""
        self._tables.append(Table(title, columns))
        return self._tables[-1]

    def say(self, text: str) -> None:
        """Prints progress to stderr."""
        print(f"[{time.perf_counter() - self._begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    def target(self, what: str, value: float, *, least: float | None = None, most: float | None = None) -> str:
        """Compares a figure with its target. A miss is listed but isn't a failure: speeds depend on the machine."""
        return self._compare(self._below, what, value, least, most)

    def bound(self, what: str, value: float, *, least: float | None = None, most: float | None = None) -> str:
        """Compares a figure with a bound that must hold on any machine. A miss fails the run."""
        return self._compare(self._failed, what, value, least, most)

    @staticmethod
    def _compare(misses: list[str], what: str, value: float, least: float | None, most: float | None) -> str:
        low = least is not None and not value >= least
        if not low and (most is None or value <= most):
            return "yes"
        misses.append(f"{what}: {value:.3g}, wanted {f'at least {least:g}' if low else f'at most {most:g}'}")
        return "no"

    def fail(self, text: str) -> None:
        """Records a failure."""
        self._failed.append(text)

    def finish(self) -> int:
        """Saves the figures, lists missed targets and failures, and returns the exit status."""
        for package in self._packages:
            try:
                self.versions.setdefault(package, importlib.metadata.version(package))
            except importlib.metadata.PackageNotFoundError:
                continue
        kept = self.args.keep and not self.quick
        self._keep((RESULTS if kept else CACHE / "results") / f"{self.name}{'-quick' if self.quick else ''}.json")
        for line in self._below:
            print(f"\ntarget not reached: {line}", end="")
        for line in self._failed:
            print(f"\nFAILED: {line}", end="")
        print(flush=True)
        return MISSED if self._failed else 0

    def _keep(self, path: Path) -> None:
        versions = ", ".join(f"{package} {version}" for package, version in sorted(self.versions.items()))
        date = time.strftime("%Y-%m-%d", time.gmtime())
        measured = f"{date}, revision {revision()}, {machine()}; {versions}"
        data: dict[str, Any] = (
            json.loads(path.read_text("utf-8")) if path.exists() else {"title": self.name, "tables": []}
        )
        former = {table["title"]: table for table in data["tables"]}
        new = {t.title: t.kept(measured, former.get(t.title, {})) for t in self._tables if t.rows}
        if new:
            write_json(path, data | {"tables": [*(former | new).values()]})
