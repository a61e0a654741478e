"""What the extension module asks for when a pass begins whose batches are made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """The batches of a pass: what the extension module asks for.

    Attributes:
        order: its settings, as `Ordering.text` writes them.
        epoch: of the first one.
        step: the number of the first one, counted as tickets do.
        left: batches of that epoch.
        steps: batches of each further epoch.
        progress: from where the first epoch's are counted; None for its start.
        total: batches of the pass; None if it has no end.
        csr: whether sparse columns are laid out as Arrow's are.
        prefetch: how many to have ahead; None for what fits.
        memory_limit: bytes for those.
    """

    order: str
    epoch: int
    step: int
    left: int
    steps: int
    progress: dict[str, Any] | None
    total: int | None
    csr: bool
    prefetch: int | None
    memory_limit: int | None

    def place(self, number: int) -> tuple[int, int, dict[str, Any] | None]:
        """Epoch, step and progress that a ticket has for a batch of the pass."""
        if number < self.left:
            return self.epoch, self.step + number, self.progress
        epochs, step = divmod(number - self.left, max(self.steps, 1))
        return self.epoch + 1 + epochs, step, None
