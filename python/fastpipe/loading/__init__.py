"""A torch `DataLoader` whose workers write each item once, into its row of the batch, in memory in common."""

from __future__ import annotations

from fastpipe.loading._collation import collate
from fastpipe.loading._info import item_rng
from fastpipe.loading._loader import DataLoader

__all__ = ["DataLoader", "collate", "item_rng"]
