"""The data service: other processes or machines prepare the batches.

`Server` serves readers over Arrow Flight, and `connect` returns a reader of a served dataset. A `Directory` lists
servers that come and go. `LocalService` serves to one process on the same machine through shared memory. The service
requires the extra `arrow`.
"""

from __future__ import annotations

from fastpipe._lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__)
