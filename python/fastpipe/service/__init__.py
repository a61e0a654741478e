"""The data service: batches that are made elsewhere.

`Server` serves readers on Arrow Flight, `connect` makes a reader of what is served; a `Directory` lists servers that
come and go. `LocalService` does both within this machine, by memory in common. All of it needs the extra `arrow`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe.service._connect import connect
from fastpipe.service._local import LocalService
from fastpipe.service._settings import Directory

if TYPE_CHECKING:
    from fastpipe.service._server import Server

__all__ = ["Directory", "LocalService", "Server", "connect"]


def __getattr__(name: str) -> Any:
    # Flight is loaded when it is first asked for.
    if name == "Server":
        from fastpipe.service._server import Server

        return Server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
