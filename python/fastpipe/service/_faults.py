"""What went wrong with the servers of a pass, and what is raised of it. Whoever uses it holds the lock of the pass."""

from __future__ import annotations

from collections.abc import Collection

from fastpipe.errors import FastpipeError, ServiceError
from fastpipe.service._damage import Damage
from fastpipe.service._wire import FILE_ERRORS

__all__ = ["Faults"]


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
