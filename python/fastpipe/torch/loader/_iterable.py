"""Iterable data sets: a worker a stream, as torch does it, and by torch's own workers.

What each worker's stream yields is the data set's matter, so an item can't be given to whoever has time for it: there
is nothing here to do better. With torchdata installed, its `StatefulDataLoader` is asked, so that there are states.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe

from fastpipe.errors import UnsupportedError

__all__ = ["Streams"]


class Streams:
    """Passes over an iterable data set.

    Args:
        loader: whose they are.
    """

    def __init__(self, loader: Any) -> None:
        self._stateful = _stateful(loader)

    def begin(self, loader: Any, plainly: Callable[[], Any]) -> Any:
        """Starts a pass of the loader; by torch's own means, `plainly`, if need be."""
        if self._stateful is None:
            return plainly()
        iterator = iter(self._stateful)
        if loader.persistent_workers:
            loader._iterator = iterator
        return iterator

    def length(self, plainly: Callable[[], int]) -> int:
        """Batches of a pass, as far as is known."""
        return plainly() if self._stateful is None else len(self._stateful)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._with_states().state_dict()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._with_states().load_state_dict(state_dict)

    def _with_states(self) -> Any:
        if self._stateful is None:
            raise UnsupportedError(
                "states of iterable data sets are kept by torchdata's StatefulDataLoader: pip install torchdata"
                " (data pipes have none)"
            )
        return self._stateful


def _stateful(loader: Any) -> Any:
    """The loader of torchdata with the same arguments; None if it isn't installed, or doesn't fit."""
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return None
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return None
    with warnings.catch_warnings():
        # It calls what newer versions of torch are about to take away.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory_device=loader.pin_memory_device,
            in_order=getattr(loader, "in_order", True),
            snapshot_every_n_steps=loader.snapshot_every_n_steps,
        )
