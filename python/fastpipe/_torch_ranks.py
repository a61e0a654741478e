"""Which rank of how many this process is, as far as Torch and torchrun know."""

from __future__ import annotations

import os

import torch.distributed

__all__ = ["local_ranks", "world"]


def world() -> tuple[int, int, str]:
    """Rank and number of ranks, and who says so."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size(), "torch.distributed"
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or ranks is None:
        return 0, 1, "default"
    return int(rank), int(ranks), "RANK and WORLD_SIZE"


def local_ranks() -> int:
    """Ranks on this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
