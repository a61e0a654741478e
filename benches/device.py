"""Measures fastpipe on a machine with one GPU. `benches/device.sh` installs the dependencies and runs this script.

Each part (`device_parts.py`) runs in a separate process with a time limit, so that a crash or a hang affects only that
part. A part prints each figure as soon as it is measured. After each part, all figures and failures are written to
`benches/results/device.json`. The exit status is 1 if a part failed.

`--dry-run` tests the script without a GPU: a copy engine in host memory replaces the GPU, and the datasets are small.
The figures of a dry run are meaningless.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import HERE
from harness.bench import RESULTS as FOLDER
from harness.bench import machine, revision, write_json

RESULTS = FOLDER / "device.json"
BUDGET = 460.0
"""Time limit for all parts together, in seconds."""
MARK = "figure "
"""Prefix of the output lines that report a figure as a JSON list of its name and value."""


@dataclass(frozen=True)
class Part:
    """A part of the measurements.

    Attributes:
        name: Name of the part in `--parts` and in the results.
        limit: Time limit in seconds.
    """

    name: str
    limit: float


PARTS = (
    Part("machine", 30),
    Part("tests", 120),
    Part("data", 60),
    Part("copies", 60),
    Part("prefetch", 40),
    Part("fill", 40),
    Part("dataloader", 60),
    Part("train-torch", 60),
    Part("train-jax", 40),
    Part("scaling", 90),
)


@dataclass
class Results:
    """The figures and failures of a run.

    Attributes:
        dry_run: Whether host memory replaced the GPU.
        figures: Part -> name -> figure.
        failures: Part -> reason for missing figures.
        seconds: Part -> duration in seconds.
    """

    dry_run: bool
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Overwrites the file with the current results."""
        known = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "revision": revision(),
            "machine": machine(),
            "dry_run": self.dry_run,
            "seconds": self.seconds,
            "figures": self.figures,
            "failures": self.failures,
        }
        write_json(path, known)


def run(part: Part, command: Sequence[str], limit: float, results: Results) -> None:
    """Runs a part and adds its output to the results.

    Args:
        part: The part.
        command: Command that measures the part.
        limit: Seconds after which the command and all its child processes are killed.
        results: Results to which figures and failures are added.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_group(process.pid)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    results.seconds[part.name] = round(time.monotonic() - started, 1)
    for line in lines:
        if line.startswith(MARK):
            name, figure = json.loads(line[len(MARK) :])
            results.figures.setdefault(part.name, {})[name] = figure
    if status != 0:
        said = "\n".join(line for line in lines if not line.startswith(MARK))[-3000:]
        why = f"it took more than {limit:.0f} seconds" if status is None else f"exit status {status}"
        results.failures[part.name] = f"{why}\n{said}".strip()
    elif part.name not in results.figures:
        results.failures[part.name] = "it printed no figure"


def _kill_group(group: int) -> None:
    """Kills all processes that a part has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _cell(value: Any) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


def table(results: dict[str, Any]) -> list[str]:
    """Formats the content of `device.json` as the lines of a section of RESULTS.md."""
    lines = [f"{results['date']}, revision {results['revision']}, {results['machine']}, by `benches/device.sh`."]
    for part, figures in results["figures"].items():
        keys = list(dict.fromkeys(key for figure in figures.values() for key in figure))
        lines += ["", f"| {part} | {' | '.join(keys)} |", f"|---|{'--:|' * len(keys)}"]
        for name, figure in figures.items():
            lines.append(f"| {name} | {' | '.join(_cell(figure.get(key, '')) for key in keys)} |")
    for part, why in results["failures"].items():
        lines += ["", f"**{part} failed**: {why.splitlines()[0]}"]
    return lines


def main() -> int:
    """Runs the selected parts. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--dry-run", action="store_true", help="use host memory instead of a GPU, and small datasets")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, help=f"output file (default: {RESULTS})")
    arguments = parser.parse_args()
    results = Results(arguments.dry_run)
    path = arguments.out or (HERE / ".cache" / "device-dry-run.json" if arguments.dry_run else RESULTS)
    end = time.monotonic() + BUDGET
    for part in PARTS:
        if part.name not in arguments.parts:
            continue
        # A dry run may run on a busy machine, so it gets more time.
        limit = 3600 if arguments.dry_run else min(part.limit, end - time.monotonic())
        if limit <= 0:
            results.failures[part.name] = "not run: no time was left"
        else:
            print(part.name, flush=True)
            command = [sys.executable, str(HERE / "device_parts.py"), part.name, *["--dry-run"] * arguments.dry_run]
            run(part, command, limit, results)
        results.write(path)
    print("\n".join(table(json.loads(path.read_text()))))
    print(f"\nwritten to {path}")
    for name, why in results.failures.items():
        print(f"\n{name} failed: {why}", file=sys.stderr)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
