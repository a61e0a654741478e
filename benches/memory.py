"""Measures how much memory reading a large file takes.

A fresh process reads a generated file of about 1 GB (data set a) in batches of 1,024 rows, while a thread of it samples
RssAnon, the anonymous memory that is really there: buffers, batches and the heap, but neither the file's own pages nor
shared libraries. The peak must not depend on the size of the file, and stay below the limit.

`--keep` says how many of the last batches are held while the next is asked for: 1 is what a `for` loop does, 0 drops
each batch first.
"""

from __future__ import annotations

import argparse
import collections
import json
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import generate
import peers
import squeeze

MB = 1e6
INTERVAL = 0.005
"""Seconds between two samples."""


def rss_anon() -> int:
    """This process's anonymous memory, in bytes."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel doesn't tell RssAnon")


class Sampler(threading.Thread):
    """Notes the greatest RssAnon until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.samples = 0
        self._stop_asked = threading.Event()

    def run(self) -> None:
        """Samples."""
        while True:
            self.peak = max(self.peak, rss_anon())
            self.samples += 1
            if self._stop_asked.wait(INTERVAL):
                return

    def stop(self) -> None:
        """Takes a last sample and ends."""
        self._stop_asked.set()
        self.join()
        self.peak = max(self.peak, rss_anon())


def child(path: str, batch: int, keep: int, threads: int | None) -> dict[str, Any]:
    """Reads the file and reports what it took."""
    import fastpipe

    features = peers.FastpipeWorker().features("a")
    idle = rss_anon()
    sampler = Sampler()
    sampler.start()
    begun = time.perf_counter()
    rows = 0
    with fastpipe.read_avro(path, features=features, batch_size=batch, num_threads=threads or "auto") as reader:
        held: collections.deque[Any] = collections.deque(maxlen=keep)
        # A `for` loop would hold a batch of its own.
        batches = iter(reader)
        while (values := next(batches, None)) is not None:
            rows += len(values["user_id"])
            held.append(values)
            del values
    seconds = time.perf_counter() - begun
    sampler.stop()
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"idle": idle, "peak": sampler.peak, "samples": sampler.samples, "rows": rows}
    return result | {"seconds": seconds, "max_rss": max_rss}


def main() -> int:
    """Runs the measurement; the exit status is 1 where the peak is over the limit."""
    parser = argparse.ArgumentParser(description="Measure fastpipe's memory on a file of about 1 GB.")
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--codec", choices=squeeze.CODECS, default="null")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--keep", type=int, default=1, help="batches held while the next is asked for (default: 1)")
    parser.add_argument("--threads", type=int, default=None, help="default: all cores")
    parser.add_argument("--limit-mb", type=float, default=300)
    parser.add_argument("--child", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args.batch_size, args.keep, args.threads)))
        return 0

    path, info = generate.generate("a", args.records, codec=args.codec, log=lambda line: print(line, file=sys.stderr))
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(path), *sys.argv[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    result = json.loads(done.stdout)
    print(
        f"{info['bytes'] / MB:,.0f} MB file, codec {args.codec}, {args.batch_size:,} rows a batch, {args.keep} kept: "
        f"idle {result['idle'] / MB:,.0f} MB, peak {result['peak'] / MB:,.0f} MB of RssAnon "
        f"(limit {args.limit_mb:,.0f} MB; {result['samples']:,} samples in {result['seconds']:.1f} s; "
        f"greatest resident size with all file pages {result['max_rss'] / MB:,.0f} MB)"
    )
    if result["rows"] != info["rows"]:
        print(f"read {result['rows']:,} of {info['rows']:,} records", file=sys.stderr)
        return 1
    if result["peak"] > args.limit_mb * MB:
        print("the peak is over the limit", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
