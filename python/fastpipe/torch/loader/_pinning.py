"""The choice of how batches get into page-locked memory: in place, or copied by a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastpipe._fastpipe import ItemConsumer, ItemMemory
from fastpipe.torch.loader._advice import log_once
from fastpipe.torch.loader._hints import LayoutHints
from fastpipe.torch.loader._page_locks import PageLocks
from fastpipe.torch.loader._pin_thread import PinThread


class Pinning:
    """The page locks or the thread of a pass with workers. It has neither if batches aren't pinned.

    Args:
        active: Whether batches are pinned.
        device: Device for which batches are page-locked, as in torch.
        known: Facts that the loader's passes have learned.

    Attributes:
        locks: Locks of the consumer's memory, or None.
        thread: Thread that copies batches, or None.
    """

    def __init__(self, active: bool, device: str | None, known: LayoutHints) -> None:
        self.locks: PageLocks | None = None
        self.thread: PinThread | None = None
        self._active = active
        self._device = device
        self._known = known

    def open_locks(self) -> PageLocks | None:
        """Returns page locks for the memory of a new consumer, or None if they aren't needed or not possible."""
        self.locks = None
        if not self._active or self._known.refusal:
            return None
        if torch.version.hip or not str(self._device or "cuda").startswith("cuda"):
            self._refuse(f"the device is {'a GPU of AMD' if torch.version.hip else self._device}")
        elif not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # A forked worker couldn't use CUDA if this process had initialized it.
            _log_copies("CUDA wasn't initialized when the pass began")
        else:
            try:
                self.locks = PageLocks()
            except Exception as error:
                self._refuse(f"{type(error).__name__}: {error}")
        return self.locks

    def _refuse(self, why: str) -> None:
        """Remembers and logs why batches are copied to page-locked memory."""
        self._known.refusal = why
        _log_copies(why)

    def lock(self, taken: Any) -> None:
        """Page-locks the memory of a result of `ItemConsumer.take` in place, if it isn't yet and locks are used."""
        if self.locks is None:
            return
        if isinstance(taken[0], ItemMemory):
            self.locks.lock(taken[0])
        if self.locks.refusal and not self._known.refusal:
            self._refuse(self.locks.refusal)

    def start_thread(
        self,
        consumer: ItemConsumer,
        read: Callable[[list[Any], int, int], Any],
        in_order: bool,
        most: int,
        begun: Iterable[tuple[int, int, int]],
    ) -> None:
        """Starts the thread, if it is needed and not running, and adds the batches that were started.

        See `PinThread` for the arguments.
        """
        if not self._active or self.locks is not None or self.thread is not None:
            return
        self.thread = PinThread(consumer, read, self._device, in_order, most)
        for batch, number, seed in begun:
            self.thread.add(batch, number, seed)

    def end_thread(self) -> set[int]:
        """Ends the thread. Returns the batches that it took and the consumer didn't."""
        thread, self.thread = self.thread, None
        return set() if thread is None else thread.end()


def _log_copies(why: str) -> None:
    log_once(
        "batches are copied to page-locked memory, because CUDA can't page-lock the loader's shared memory in place"
        f" ({why})"
    )
