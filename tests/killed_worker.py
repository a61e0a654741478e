"""A worker of torch's loader that is killed where it can hold none of the loader's locks.

torch's worker takes the lock of the loader's `done_event` between two batches. If the worker is killed while it holds
the lock, torch waits forever when it ends the loader. A worker that is within a batch doesn't hold the lock.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class EndsInMap:
    """A `map` of `fastpipe.torch.IterableDataset` in which a worker kills itself when it is told to.

    The worker waits until then, so make sure that the program has its earlier batches first: a batch that is half sent
    would hold up the program, too. For workers that are forked.

    Args:
        worker: number of the worker.
        batch: number of the batch among those of the worker.
        kill: kills the worker, or has another thread kill it.
    """

    def __init__(self, worker: int, batch: int, kill: Callable[[], object] = kill_self) -> None:
        self._worker = worker
        self._left = batch
        self._kill = kill
        self._wait, self._go = os.pipe()

    def __call__(self, batch: Any) -> Any:
        info = get_worker_info()
        assert info is not None
        if info.id == self._worker:
            if self._left == 0:
                os.read(self._wait, 1)
                self._kill()
                time.sleep(60)
            self._left -= 1
        return batch

    def go(self) -> None:
        """Lets the worker end."""
        os.write(self._go, b"x")
