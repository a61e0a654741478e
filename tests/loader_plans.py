"""Plans of the runs in loader_chaos.py. A plan is drawn from its index and can be repeated."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastpipe.torch import DataLoader, worker_info

# In seconds. Where other tests run as well, workers may be slower than in the soak without being stopped.
TIMEOUT = 0.7 if "FASTPIPE_LOADER_RUNS" in os.environ else 3.0
WORKER_ACTIONS = ("kill", "stop", "stop with a timeout", "pause", "die", "raise")
WEIGHTS = (6, 2, 2, 3, 2, 2)


@dataclasses.dataclass
class Plan:
    """The plan of a run.

    Attributes:
        action: The event that happens to a worker; "none" for none.
        method: How workers are started.
        makers: Number of item workers.
        joiners: Number of batch workers; None to collate by default.
        batch: Batch size.
        count: Number of items.
        seconds: Mean seconds per item.
        width: Number of values per item.
        away: Seconds that the consumer spends on each batch.
        options: Further arguments of the loader.
        at: Seconds from the start of the pass to the action.
        pause: Seconds for which a worker is stopped.
        index: Index of the item that exits or raises, or None.
        by_collation: Whether `collate_fn` raises instead of the item.
    """

    action: str
    method: str
    makers: int
    joiners: int | None
    batch: int
    count: int
    seconds: float
    width: int
    away: float
    options: dict[str, Any]
    at: float
    pause: float
    index: int | None
    by_collation: bool

    def loader(self, note: Path) -> Any:
        """Returns the loader of this run. Its workers write a note to a file before they exit or raise."""
        index = self.index if not self.by_collation else None
        dataset = Chancy(self.count, self.seconds, self.width, index, note, dies=self.action == "die")
        more: dict[str, Any] = {}
        if self.method == "thread":
            more["worker_method"] = "thread"
        else:
            more |= {"worker_method": "multiprocessing", "multiprocessing_context": self.method}
        if self.joiners is not None:
            bad = self.index if self.by_collation else None
            more |= {"collate_fn": Stack(bad, note), "num_batch_workers": self.joiners}
        return DataLoader(dataset, self.batch, num_workers=self.makers, **more, **self.options)

    def batches(self) -> list[list[int]]:
        """Returns the indices of each batch."""
        return [[*range(first, min(first + self.batch, self.count))] for first in range(0, self.count, self.batch)]


def plan(number: int, actions: tuple[str, ...] = WORKER_ACTIONS, weights: tuple[int, ...] = WEIGHTS) -> Plan:
    """Returns the plan with this index, which is always the same."""
    chance = random.Random(f"loader {number}")
    # The first runs cover each action once.
    action = actions[number] if number < len(actions) else chance.choices(actions, weights)[0]
    method = chance.choices(("fork", "spawn", "thread"), (12, 1, 2))[0]
    if method == "thread" and action != "none":
        action = "raise"
    if method == "spawn" and action == "stop with a timeout":
        # Starting a worker takes longer than the timeout.
        method = "fork"
    makers = chance.choice((1, 2, 3, 4)) if method != "spawn" else chance.choice((1, 2))
    joiners = chance.choice((None, None, 0, 1, 2))
    seconds = chance.choice((0.0001, 0.0005, 0.002, 0.01, 0.03))
    count = max(12, min(600, int(makers * 0.8 / seconds)))
    options = {
        "prefetch_factor": chance.choice((1, 2, 2, 4)),
        "persistent_workers": chance.random() < 0.4,
        "in_order": chance.random() < 0.8,
        "timeout": TIMEOUT if action == "stop with a timeout" else 0,
    }
    index = chance.randrange(count) if action in ("die", "raise") else None
    batch = chance.choice((1, 2, 5, 8))
    away = chance.choice((0.0, 0.0, 0.002))
    # About the duration of the pass.
    length = 4.0 if method == "spawn" else max(count * (seconds + 0.0001) / makers, count / batch * away)
    return Plan(
        action=action,
        method=method,
        makers=makers,
        joiners=joiners,
        batch=batch,
        count=count,
        seconds=seconds,
        width=chance.choice((3, 3, 500, 50_000)),
        away=away,
        options=options,
        at=chance.choice((0.0, 0.1, 0.9, 0.9)) * chance.random() * length,
        pause=chance.uniform(0.02, 0.7),
        index=index,
        by_collation=action == "raise" and joiners is not None and chance.random() < 0.5,
    )


def noted(note: Path) -> None:
    """Writes the monotonic time, which all processes share, to a file."""
    note.write_text(str(time.monotonic()))


class Chancy(Dataset[Any]):
    """Items of random duration. One item may raise or exit its process after writing a note."""

    def __init__(self, count: int, seconds: float, width: int, index: int | None, note: Path, *, dies: bool) -> None:
        self.count = count
        self.seconds = seconds
        self.width = width
        self.index = index
        self.note = note
        self.dies = dies

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        # Threads share the process's generator with the program, so they use a separate one.
        info: Any = worker_info()
        chance: Any = random.Random(index) if info.worker_method == "thread" else random
        time.sleep(chance.expovariate(1 / self.seconds))
        if index == self.index:
            noted(self.note)
            if self.dies and index % 2:
                os._exit(7)
            if self.dies:
                os.kill(os.getpid(), signal.SIGSEGV)
            raise LookupError(f"no item {index}")
        return {"row": np.full(self.width, index, np.float32), "index": index, "name": f"item {index}"}


class Stack:
    """A `collate_fn` that may raise for an index after writing a note."""

    def __init__(self, index: int | None, note: Path) -> None:
        self.index = index
        self.note = note

    def __call__(self, items: list[Any]) -> Any:
        if any(item["index"] == self.index for item in items):
            noted(self.note)
            raise LookupError(f"no item {self.index}")
        return torch.utils.data.default_collate(items)
