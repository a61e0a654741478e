"""Reads Avro files that aren't in the page cache, from fast storage and from storage that is limited to a rate.

Each pass begins without the file in the page cache (`POSIX_FADV_DONTNEED`). The bound is reading the same file without
decoding: in sequence with reads of 1 MB, and in random order with reads of a block's size, one after the other and 16
at a time. A control group limits the storage, which needs root; without it only the fast storage is measured.

fastpipe reads with its defaults, and with a `prefetch` of 1 and 16 batches. In the first epoch it opens the file, which
reads the header of each block. AvroTensorDataset reads blocks in the order of the file, also if it shuffles, with its
usual `reader_buffer_size` of 128 KB and with 8 MB. Dataset (a), batches of 1,024 rows, codec null.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import plan
from harness import Bench, CannotError, Turn, take_turns
from harness.children import peers
from harness.storage import limited
from peers import Peer
from peers.job import Job

PLAIN, PARALLEL = "plain reads", "16 at a time"
FIRST, LATER = "fastpipe, first epoch", "later epochs"
SIDES = {
    PLAIN: ("plain", 0),
    PARALLEL: ("plain-parallel", 0),
    FIRST: ("fastpipe-first", 0),
    LATER: ("fastpipe-later", 0),
    "prefetch=1": ("fastpipe-later", 1),
    "prefetch=16": ("fastpipe-later", 16),
    "AvroTensorDataset": ("atds-epochs", 0),
    "with 8 MB": ("atds-epochs", 8 << 20),
}
"""Column -> reader and its `read_ahead`."""


def measure(bench: Bench, readers: dict[str, Peer], place: str, block: str, shuffled: bool, row: Any) -> None:
    """Measures all readers of one file in one order, and adds a row."""
    path, info = plan.Spec("a", block=block).file(bench.args.rows, bench.say)
    sides = {name: side for name, side in SIDES.items() if shuffled or name != PARALLEL}

    def read(name: str) -> Turn:
        ahead = sides[name][1]
        if name in (PLAIN, PARALLEL) and shuffled:
            ahead = plan.BLOCKS[block]
        shuffle = plan.SHUFFLE_BUFFER if shuffled else 0
        job = Job(str(path), "a", 1024, shuffle, threads=0, cold=True, read_ahead=ahead)
        answer = readers[name].ask("read", job, 0.0)
        if "error" in answer or answer["rows"] != info["rows"]:
            raise CannotError(answer.get("error", "rows are missing"))
        return Turn(answer["seconds"], answer["cpu"], answer)

    turns = take_turns({name: partial(read, name) for name in sides}, bench.rounds)
    order = "shuffled" if shuffled else "sequential"
    for name, error in turns.errors.items():
        bench.fail(f"{place}, {block}, {order}, {name}: {error}")
    if turns.errors:
        return
    rates = [info["bytes"] / turns.median(name) / 1e6 if name in sides else None for name in SIDES]
    opening = turns.median(FIRST, lambda turn: turn.result["opening"])
    stored = turns.median(LATER, lambda turn: turn.result["stored"])
    row(place, block, order, *rates, turns.ratio(PLAIN, LATER).median, opening * 1e3, stored / info["bytes"])


def main(bench: Bench) -> None:
    """Measures fast and limited storage."""
    columns = [*(f"{name}|,.0f" for name in SIDES), "later epochs / plain reads|,.2f"]
    columns += ["opening in the first epoch, ms|,.0f", "bytes read / bytes of the file|,.2f"]
    row = bench.table("storage", "blocks", "order", *columns, title="MB per second")
    path, _ = plan.Spec("a").file(bench.args.rows, bench.say)
    for limit in (0, bench.args.limit):
        place = f"{limit:g} MB/s" if limit else "fast"
        try:
            with (
                limited(path, limit) if limit else nullcontext(),
                peers(bench, {name: (reader, []) for name, (reader, _) in SIDES.items()}) as readers,
            ):
                for block, shuffled in itertools.product(plan.BLOCKS, (False, True)):
                    measure(bench, readers, place, block, shuffled, row)
        except CannotError as error:
            bench.say(f"{place}: {error}")


if __name__ == "__main__":
    what: dict[str, Any] = {"rows": (65_536, 8_192), "limit": 100.0}
    Bench("storage", __doc__, rounds=(3, 1), **what).run(main)
