"""Metrics of a server in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_TOLD = {
    "requests": ("counter", "Streams of batches that clients requested."),
    "batches": ("counter", "Batches sent."),
    "bytes": ("counter", "Bytes of batches sent."),
    "errors": ("counter", "Errors sent to clients."),
    "decoded": ("counter", "Batches decoded."),
    "begun": ("counter", "Passes started."),
    "kept_hits": ("counter", "Batches that were decoded for another request and sent again."),
    "refused": ("counter", "Requests refused because the server was busy."),
    "closed": ("counter", "Connections closed because their clients stopped reading while others waited."),
    "clients": ("gauge", "Streams of batches that are being sent."),
    "streams": ("gauge", "Orders and epochs that are being read by clients."),
    "passes": ("gauge", "Passes that are open."),
    "kept_bytes": ("gauge", "Bytes of batches kept for other clients."),
    "batch_bytes": ("gauge", "Bytes of batches in memory: kept, or being sent."),
    "making_seconds": ("counter", "Seconds that requests have waited for batches to be made, summed over requests."),
    "held_back_seconds": ("counter", "Seconds that batches have waited for slow clients, summed over requests."),
}


def described(numbers: Mapping[str, float]) -> Iterator[tuple[str, str, str, float]]:
    """Yields the name, kind, description and value of each metric. The names of counter samples end with `_total`."""
    for name, value in numbers.items():
        kind, text = _TOLD[name]
        yield f"fastpipe_service_{name}", kind, text, value


def text_of(numbers: Mapping[str, float]) -> str:
    """Returns all metrics in the Prometheus text format."""
    lines = []
    for name, kind, text, value in described(numbers):
        sample = f"{name}_total" if kind == "counter" else name
        lines += [f"# HELP {sample} {text}", f"# TYPE {sample} {kind}", f"{sample} {value}"]
    return "\n".join(lines) + "\n"


def shown(host: str) -> str:
    """Returns an address in the form that precedes a port."""
    return f"[{host}]" if ":" in host else host
