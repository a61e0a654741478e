"""Where measurements are kept until they are written up: JSON files beside the data, one a part.

So parts, and cells of the comparison, can be measured one at a time; the newest of each counts.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import generate

KEPT = generate.CACHE / "results"


def revision() -> str:
    """The commit that is measured; `-dirty` where files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """Processor, cores, memory and kernel."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {system}"


def _path(part: str, quick: bool) -> Path:
    return KEPT / f"{part}{'-quick' if quick else ''}.json"


def load(part: str, quick: bool = False) -> dict[str, Any]:
    """What is kept of a part: `entries` (name -> measurement), `versions`, `date`, `revision`, `machine`.

    Args:
        part: compare, threads, sweep, memory, interactions, or one of `dataloader`'s.
        quick: Whether of quick runs, which are kept apart.
    """
    path = _path(part, quick)
    if not path.exists():
        return {"entries": {}, "versions": {}}
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def forget(part: str, quick: bool) -> None:
    """Deletes what is kept of a part, so that a whole run isn't mixed with older ones."""
    _path(part, quick).unlink(missing_ok=True)


def save(part: str, entries: dict[str, Any], versions: dict[str, str], quick: bool) -> None:
    """Adds measurements to those that are kept.

    Args:
        part: compare, threads, sweep, memory, interactions, or one of `dataloader`'s.
        entries: Name -> measurement.
        versions: Package -> version.
        quick: Whether of a quick run.
    """
    data = load(part, quick)
    data["entries"] |= entries
    data["versions"] |= versions
    data |= {"date": time.strftime("%Y-%m-%d", time.gmtime()), "revision": revision(), "machine": machine()}
    path = _path(part, quick)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(data, indent=1))
    partial.replace(path)
