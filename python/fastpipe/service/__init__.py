"""The data service: batches that are made elsewhere.

`Server` serves readers on Arrow Flight, `connect` makes a reader of what is served; a `Directory` lists servers that
come and go. `LocalService` does both within this machine, by memory in common. All of it needs the extra `arrow`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastpipe._lazy import lazily

if TYPE_CHECKING:
    from fastpipe.service._connect import connect as connect
    from fastpipe.service._local import LocalService as LocalService
    from fastpipe.service._server import Server as Server
    from fastpipe.service._settings import Directory as Directory
else:
    __getattr__, __dir__, __all__ = lazily(
        __name__,
        {
            "fastpipe.service._connect": "connect",
            "fastpipe.service._local": "LocalService",
            "fastpipe.service._server": "Server",
            "fastpipe.service._settings": "Directory",
        },
    )
