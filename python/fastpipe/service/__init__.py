"""The data service: batches that are made elsewhere.

`Server` serves readers on Arrow Flight, `connect` makes a reader of what is served; a `Directory` lists servers that
come and go. `LocalService` does both within this machine, by memory in common. All of it needs the extra `arrow`.
"""

from __future__ import annotations

from fastpipe._lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__)
