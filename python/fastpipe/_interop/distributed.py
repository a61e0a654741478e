"""Determines the rank of this process and the number of ranks from Torch or torchrun."""

from __future__ import annotations

import os

import torch.distributed


def world() -> tuple[int, int, str]:
    """Returns the rank, the number of ranks, and the name of their source.

    Raises:
        ValueError: If the environment variables don't contain a valid rank.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size(), "torch.distributed"
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or ranks is None:
        return 0, 1, "default"
    number, count = _number("RANK", rank), _number("WORLD_SIZE", ranks)
    if not 0 <= number < count:
        raise ValueError(
            f"RANK is {number} and WORLD_SIZE is {count} in the environment, but RANK must be 0 to WORLD_SIZE - 1."
            " torchrun sets them; unset both if there is only one process"
        )
    return number, count, "RANK and WORLD_SIZE"


def local_ranks() -> int:
    """Returns the number of ranks on this machine.

    Raises:
        ValueError: If the environment variable isn't a number.
    """
    return max(1, _number("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{name} is {text!r} in the environment, which is not a number. torchrun sets it; unset it if there is only"
            " one process"
        ) from None
