"""Log messages about the settings of a loader."""

from __future__ import annotations

import functools
import logging
from typing import Any

from fastpipe.torch.loader._in_process import ahead_of, fetch_of
from fastpipe.torch.loader._structure import is_default

_LOG = logging.getLogger("fastpipe")


@functools.cache
def log_once(text: str) -> None:
    """Logs a text at the level INFO of the logger `fastpipe`, once per process."""
    _LOG.info("%s", text)


def advise(loader: Any) -> None:
    """Logs which workers of a loader have nothing to do while only `prefetch_factor` batches are in flight."""
    ahead, fetch = ahead_of(loader), fetch_of(loader)
    size = getattr(loader.batch_sampler, "batch_size", None) if fetch == "items" else 1
    # The batches of other samplers may have any size.
    if isinstance(size, int) and loader.num_workers > ahead * size:
        items = "prefetch_factor * batch_size" if fetch == "items" else "prefetch_factor"
        what = "" if fetch == "items" else ", and one worker makes a whole batch of this dataset"
        _log_excess("num_workers", loader.num_workers, items, ahead * size, what)
    batch_workers = loader.num_batch_workers
    if batch_workers is not None and fetch == "items" and not is_default(loader.collate_fn) and batch_workers > ahead:
        _log_excess("num_batch_workers", batch_workers, "prefetch_factor", ahead, "")


def _log_excess(name: str, count: int, limit: str, most: int, what: str) -> None:
    log_once(
        f"{name}={count} exceeds {limit} ({most}){what}: the workers beyond it only help while further batches are"
        f" started, which may use 32 MB in total. Set {name}={most}, or raise prefetch_factor"
    )
