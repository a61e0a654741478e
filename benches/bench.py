"""Runs the main benches in sequence.

The exit status is 1 if fastpipe fails, returns different values, or exceeds its memory limit. A peer that can't be
installed or can't read a dataset doesn't fail the run; the tables show the reason. `--write` saves the figures and
updates RESULTS.md and its plots.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from harness import HERE, QUICK
from harness.bench import MISSED

PARTS: dict[str, list[str]] = {
    "compare": [],
    "threads": [],
    "sweep": [],
    "memory": [],
    "interactions": ["--rounds", "3"],
    "published": [],
    "atds_small": [],
    "storage": [],
}


def main() -> int:
    """Runs the selected benches. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", default=QUICK, help="less data, fewer readers (QUICK=1)")
    parser.add_argument("--write", action="store_true", help="save figures and update RESULTS.md, unless --quick")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    options = [*["--quick"] * args.quick, *["--keep"] * args.write]
    environment = os.environ | {"QUICK": "1" if args.quick else ""}
    failed = []
    for number, part in enumerate(parts, 1):
        print(f"\n# {part} ({number} of {len(parts)})", flush=True)
        command = [sys.executable, str(HERE / f"{part}.py"), *options, *PARTS[part]]
        # Some bounds of interactions are speeds: a miss is reported in its output but isn't a failure.
        fine = (0, MISSED) if part == "interactions" else (0,)
        if subprocess.run(command, env=environment).returncode not in fine:
            failed.append(part)
    if args.write and not args.quick:
        for script in ("plots.py", "write_results.py"):
            subprocess.run([sys.executable, str(HERE / script)], check=True)
    for part in failed:
        print(f"FAILED: {part}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
