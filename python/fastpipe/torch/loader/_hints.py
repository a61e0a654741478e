"""Facts that the passes of a loader have learned."""

from __future__ import annotations


class LayoutHints:
    """Facts that the passes of a loader have learned, for later passes.

    Attributes:
        description: Description of the last items' layout, or None.
        drawn: Whether the program was warned that worker threads use the process's generators.
        refusal: The reason why shared memory can't be page-locked in place, or an empty string.
    """

    def __init__(self) -> None:
        self.description: bytes | None = None
        self.drawn = False
        self.refusal = ""
