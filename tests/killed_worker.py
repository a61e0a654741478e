"""Kills a torch DataLoader worker at a point where it holds none of the loader's locks.

torch's worker acquires the lock of the loader's `done_event` between two batches. If the worker is killed while it
holds the lock, torch waits forever when it shuts down the loader. A worker that is processing a batch doesn't hold the
lock.
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
    """A `map` for `fastpipe.torch.dataset` in which a worker kills itself on request.

    The worker waits for the request. Receive its earlier batches first: a partially sent batch would also block the
    program. Supports forked workers only.

    Args:
        worker: Index of the worker.
        batch: Index of the batch among the worker's batches.
        kill: Kills the worker, or makes another thread kill it.
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
        """Allows the worker to kill itself."""
        os.write(self._go, b"x")
