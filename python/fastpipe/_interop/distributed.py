"""Which rank of how many this process is, as far as Torch and torchrun know."""

from __future__ import annotations

import os

import torch.distributed


def world() -> tuple[int, int, str]:
    """Rank and number of ranks, and who says so.

    Raises:
        ValueError: if the environment says something that is no rank.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size(), "torch.distributed"
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or ranks is None:
        return 0, 1, "default"
    number, count = _number("RANK", rank), _number("WORLD_SIZE", ranks)
    if not 0 <= number < count:
        raise ValueError(
            f"RANK is {number} and WORLD_SIZE is {count} in the environment, and a rank is one of 0 to WORLD_SIZE - 1:"
            " torchrun sets them; unset both where there is but one process"
        )
    return number, count, "RANK and WORLD_SIZE"


def local_ranks() -> int:
    """Ranks on this machine.

    Raises:
        ValueError: if the environment says something that is no number.
    """
    return max(1, _number("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{name} is {text!r} in the environment, which is no number: torchrun sets it; unset it where there is but"
            " one process"
        ) from None
