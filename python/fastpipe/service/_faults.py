"""What went wrong with the servers of a pass, and what is raised of it. Whoever uses it holds the lock of the pass.

A batch with a wrong checksum is asked for again, so a link that damages few of them costs little. Over one that damages
most of them a pass would crawl, and send each batch many times. It ends instead.
"""

from __future__ import annotations

from collections.abc import Collection

from fastpipe.errors import FastpipeError, ServiceError
from fastpipe.service._wire import FILE_ERRORS

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


class Faults:
    """The last error of each server, files that servers can't read, and batches that were damaged on their way.

    Args:
        patience: seconds for which the pass goes on; 0 if nothing is tried again.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._errors: dict[int, FastpipeError] = {}
        # Servers that couldn't read the files of a batch, by its number.
        self._unreadable: dict[int, set[int]] = {}
        self.damage = Damage(patience)

    def note(self, server: int, error: FastpipeError) -> None:
        """A server has failed."""
        if self._patience or server not in self._errors:
            # Of what fails in no time the first error says why.
            self._errors[server] = error

    def note_silence(self, server: int, error: ServiceError) -> None:
        """A server says nothing; what it said before tells more."""
        self._errors.setdefault(server, error)

    def forget(self, server: int) -> None:
        """A server works, or has gone."""
        self._errors.pop(server, None)

    def no_server_reads(self, number: int, server: int, wanted: int, servers: Collection[int]) -> bool:
        """A server can't read the files of a batch. Returns whether none of the servers can.

        Args:
            number: of the batch.
            server: which one.
            wanted: the batch that the consumer takes next.
            servers: all that there are.
        """
        for earlier in [one for one in self._unreadable if one < wanted]:
            del self._unreadable[earlier]
        found = self._unreadable.setdefault(number, set())
        found.add(server)
        return found.issuperset(servers)

    def error(self, wanted: int, why: str) -> FastpipeError:
        """What is raised in the place of a batch that no server brings.

        Args:
            wanted: the batch.
            why: why no server is listed, if none is.
        """
        unreadable = [error for error in self._errors.values() if isinstance(error, FILE_ERRORS)]
        if unreadable and wanted in self._unreadable:
            return unreadable[0]
        told = "; ".join(filter(None, [*(str(self._errors[server]) for server in sorted(self._errors)), why]))
        if self.damage.is_most:
            text = f"{self.damage} ({told})"
        elif self._patience:
            text = f"no server has answered for {self._patience:g} seconds: {told}"
        else:
            # Nothing was waited for: no other server replaces a local one.
            text = told
        gone = ServiceError(text)
        gone.__cause__ = next(iter(self._errors.values()), None)
        return gone
