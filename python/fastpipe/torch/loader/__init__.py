"""A torch `DataLoader` whose workers write each item once, directly into its row of a batch in shared memory."""

from __future__ import annotations

from fastpipe.torch.loader._loader import DataLoader
from fastpipe.torch.loader._structure import collate
from fastpipe.torch.loader._worker_info import item_rng, worker_info

__all__ = ["DataLoader", "collate", "item_rng", "worker_info"]
