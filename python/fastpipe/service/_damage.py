"""Whether most batches of a pass are damaged on their way: decided here, without threads or sockets.

A batch with a wrong checksum is asked for again, so a link that damages few of them costs little. Over one that damages
most of them a pass would crawl, and send each batch many times. It ends instead.
"""

from __future__ import annotations

__all__ = ["Damage"]

# Damaged batches must outnumber the whole ones by so many before that counts as most of them. More than this is not
# counted, so that a link that heals is trusted again soon.
_LEAD, _MOST_LEAD = 8, 16


class Damage:
    """Counts batches that come whole, and those that are damaged.

    Args:
        seconds: for which damaged ones must outnumber the others.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # By how many there are more damaged ones, up to `_MOST_LEAD`; and since when.
        self._lead = 0
        self._since = 0.0
        self._whole = self._damaged = 0

    def came(self, count: int) -> None:
        """So many batches have come whole."""
        self._whole += count
        self._lead = max(self._lead - count, 0)

    def damaged(self, now: float) -> None:
        """A batch was damaged."""
        if self._lead == 0:
            self._since, self._whole, self._damaged = now, 0, 0
        self._damaged += 1
        self._lead = min(self._lead + 1, _MOST_LEAD)

    @property
    def is_most(self) -> bool:
        """Whether most batches are damaged."""
        return self._lead >= _LEAD

    def is_hopeless(self, now: float) -> bool:
        """Whether most batches have been damaged for as long as is waited for."""
        return self.is_most and now - self._since >= self._seconds

    def __str__(self) -> str:
        total = self._damaged + self._whole
        return (
            f"most batches are damaged on their way: {self._damaged} of the last {total} came with a wrong checksum."
            " Check the network between this machine and the servers"
        )
