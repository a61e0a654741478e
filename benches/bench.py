"""Runs the whole comparison: beside peers, threads, the sweep, memory, interactions.

The exit status is 1 where fastpipe itself fails, its values differ, or its memory is over the limit. A peer that can't
be installed, or can't read a data set, is a result.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import compare
import kept
import plan
import sweep
import threads
from peers import READERS
from progress import Clock

HERE = Path(__file__).resolve().parent
PARTS = ("compare", "threads", "sweep", "memory", "interactions")


def _memory(quick: bool, clock: Clock) -> list[str]:
    clock.stage("memory", 1)
    clock.say("memory: reads a file of 1 GB")
    done = subprocess.run([sys.executable, str(HERE / "memory.py")], stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        return ["memory: the peak is over the limit, or rows are missing"]
    kept.save("memory", {"peak": done.stdout.strip()}, {}, quick)
    return []


def _interactions(quick: bool, clock: Clock) -> list[str]:
    clock.stage("interactions", 1)
    clock.say("interactions: samples beside NumPy, and reads an epoch of 100 million points")
    environment = os.environ | {"QUICK": "1" if quick else ""}
    command = [sys.executable, str(HERE / "interactions.py"), "--rounds", "3"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    # A bound that is missed is a result, and the last lines say so.
    if not any(line.startswith(("all bounds kept", "missed:")) for line in done.stdout.splitlines()):
        return ["interactions: no result"]
    kept.save("interactions", {"tables": done.stdout.strip()}, {}, quick)
    return []


def main() -> int:
    """Runs the parts."""
    quick = os.environ.get("QUICK", "") not in ("", "0")
    parser = argparse.ArgumentParser(description="Compare fastpipe with other libraries, and measure it alone.")
    parser.add_argument("--quick", action="store_true", default=quick, help="less data, fewer readers (QUICK=1)")
    parser.add_argument("--write", action="store_true", help="write RESULTS.md and its pictures (not of a quick run)")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    args = parser.parse_args()
    quick, parts = args.quick, args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    clock = Clock()
    failed: list[str] = []
    for part in parts:
        kept.forget(part, quick)
    if "compare" in parts:
        cells, readers = (plan.QUICK_CELLS, plan.QUICK_READERS) if quick else (plan.CELLS, list(READERS))
        core = max(os.sched_getaffinity(0))
        failed += compare.run(cells, readers, 3 if quick else 7, 1024, core, quick, clock)
    if "threads" in parts:
        failed += threads.run(threads.CELLS, 3 if quick else 5, 1024, quick, clock)
    if "sweep" in parts:
        failed += sweep.run(2 if quick else 3, quick, clock)
    if "memory" in parts:
        failed += _memory(quick, clock)
    if "interactions" in parts:
        failed += _interactions(quick, clock)
    if args.write and not quick:
        import report

        report.write()
        clock.say("wrote benches/RESULTS.md")
    elif args.write:
        clock.say("a quick run isn't written down")
    for problem in failed:
        clock.say(f"FAILED {problem}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
