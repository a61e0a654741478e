"""Numbers of a server as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_TOLD = {
    "requests": ("counter", "Streams of batches that were asked for."),
    "batches": ("counter", "Batches sent."),
    "bytes": ("counter", "Bytes of batches sent."),
    "errors": ("counter", "Errors told to clients."),
    "decoded": ("counter", "Batches decoded."),
    "begun": ("counter", "Passes begun."),
    "kept_hits": ("counter", "Batches sent that were decoded for another request."),
    "refused": ("counter", "Requests refused since the server was busy."),
    "closed": ("counter", "Connections that were closed because their clients took nothing while others waited."),
    "clients": ("gauge", "Streams of batches that are being sent."),
    "streams": ("gauge", "Orders and epochs that are being read."),
    "passes": ("gauge", "Passes that are open."),
    "kept_bytes": ("gauge", "Bytes of batches that are kept."),
    "batch_bytes": ("gauge", "Bytes of batches that are in memory: kept, or being sent."),
    "making_seconds": ("counter", "Seconds that requests have waited for batches being made, over all requests."),
    "held_back_seconds": ("counter", "Seconds that batches have waited for clients to take them, over all requests."),
}


def described(numbers: Mapping[str, float]) -> Iterator[tuple[str, str, str, float]]:
    """Yields the name, kind, description and value of each metric. Samples of counters end with `_total`."""
    for name, value in numbers.items():
        kind, text = _TOLD[name]
        yield f"fastpipe_service_{name}", kind, text, value


def text_of(numbers: Mapping[str, float]) -> str:
    """Returns all of them in Prometheus' text format."""
    lines = []
    for name, kind, text, value in described(numbers):
        sample = f"{name}_total" if kind == "counter" else name
        lines += [f"# HELP {sample} {text}", f"# TYPE {sample} {kind}", f"{sample} {value}"]
    return "\n".join(lines) + "\n"


def shown(host: str) -> str:
    """Returns an address as it is written before a port."""
    return f"[{host}]" if ":" in host else host
