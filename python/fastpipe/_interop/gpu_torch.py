"""GPUs by way of PyTorch: which there are, and page-locked memory for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastpipe.errors import DeviceError

__all__ = ["gpu", "page_locked"]


def gpu(device: Any) -> torch.device:
    """The GPU that a user names.

    Raises:
        DeviceError: if there is none of this name, or no driver for it.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        # What isn't of any type that it takes, Torch answers with a list of those.
        reason = error if isinstance(error, RuntimeError) else f"not {device!r}"
        raise DeviceError(f'device names a GPU, as "cuda:0" does: {reason}') from None
    if found.type != "cuda":
        raise DeviceError(f'device names a GPU, as "cuda:0" does, not {str(found)!r}: fastpipe.torch needs none')
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise DeviceError(
            f"PyTorch {torch.__version__} is built without CUDA: install a build with it (pytorch.org says how), or use"
            " fastpipe.torch, which needs no GPU"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            "PyTorch finds no GPU here, or no driver that works with it (nvidia-smi shows both): use"
            ' fastpipe.torch, or fill devices=["cpu"], which need none'
        )
    # Its type says that there is an index always.
    index = torch.cuda.current_device() if found.index is None else found.index  # type: ignore[redundant-expr]
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no device cuda:{index}: the machine has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def page_locked(device: torch.device, nbytes: int) -> np.ndarray:
    """Page-locked memory as an array of at least `nbytes` bytes."""
    # PyTorch takes powers of two in any case, and keeps them when they are given back.
    size = 1 << max(nbytes - 1, 0).bit_length()
    with torch.cuda.device(device):
        array: np.ndarray = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return array
