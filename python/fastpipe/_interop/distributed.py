"""Determines the rank of this process and the number of ranks, without importing a framework."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple


class World(NamedTuple):
    """The ranks of a program.

    Attributes:
        rank: Rank of this process, from 0.
        size: Number of ranks.
        origin: What determined them, for the log.
    """

    rank: int
    size: int
    origin: str


def world() -> World:
    """Returns the ranks of `torch.distributed`, if it is initialized, or of the environment, or a single rank.

    Raises:
        ValueError: If the environment variables don't contain a valid rank.
    """
    # Initialized only if another module has imported it.
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return World(torch.get_rank(), torch.get_world_size(), "torch.distributed")
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or ranks is None:
        return World(0, 1, "default")
    number, count = _number("RANK", rank), _number("WORLD_SIZE", ranks)
    if not 0 <= number < count:
        raise ValueError(
            f"RANK is {number} and WORLD_SIZE is {count} in the environment, but RANK must be 0 to WORLD_SIZE - 1."
            " torchrun sets them; unset both if there is only one process"
        )
    return World(number, count, "RANK and WORLD_SIZE")


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
