"""`worker_init_fn` of a loader, which other loaders that are built from this one's arguments can't use.

Libraries such as accelerate take any `torch.utils.data.DataLoader`, read the arguments from its attributes, and build a
loader of torch's from them. They don't call anything of the loader they replace. torch's workers call
`worker_init_fn` first, so this is the place where they can be told apart from workers of fastpipe's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch.utils.data

from fastpipe.errors import UnsupportedError
from fastpipe.torch.loader._info import ItemWorkerInfo

__all__ = ["WorkerInit", "given_init"]

_Init: TypeAlias = Callable[[int], Any]


class WorkerInit:
    """Calls the user's `worker_init_fn` in workers of fastpipe's, and raises an error in all others.

    Args:
        given: the user's function; None if there is none.
    """

    def __init__(self, given: _Init | None) -> None:
        self.given = given

    def __call__(self, worker: int) -> Any:
        """Calls the function with the worker's number.

        Raises:
            UnsupportedError: if this isn't a worker of fastpipe's.
        """
        if not isinstance(torch.utils.data.get_worker_info(), ItemWorkerInfo):
            raise UnsupportedError(
                "torch.utils.data.DataLoader was built from the arguments of a fastpipe.torch.DataLoader, and would"
                " replace it: accelerate.prepare and skip_first_batches do that. Iterate over the"
                " fastpipe.torch.DataLoader itself: leave it out of prepare, give it"
                " sampler=torch.utils.data.DistributedSampler(dataset) if there are several processes, and move batches"
                " with accelerate.utils.send_to_device(batch, accelerator.device). With a Hugging Face Trainer, return"
                " it from get_train_dataloader"
            )
        return None if self.given is None else self.given(worker)

    def __repr__(self) -> str:
        return f"<worker_init_fn of a fastpipe.torch.DataLoader: {self.given!r}>"


def given_init(worker_init_fn: _Init | None) -> _Init | None:
    """The user's function, of a loader's `worker_init_fn`."""
    return worker_init_fn.given if isinstance(worker_init_fn, WorkerInit) else worker_init_fn
