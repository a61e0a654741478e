"""What a server says of what it does: records with an event's name and fields, for people or for programs."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any

from fastpipe.service._wire import Ticket, error_parts

log = logging.getLogger("fastpipe.service")


def say(level: int, event: str, text: str, **fields: Any) -> None:
    """Logs an event: the text names its fields as `%(name)s`."""
    if log.isEnabledFor(level):
        # Without any, logging would take an empty dict for one that isn't named.
        named = (fields,) if fields else ()
        log.log(level, text, *named, extra={"fastpipe": {"event": event, **fields}})


def say_error(error: Exception, **fields: Any) -> None:
    """Logs an error that a peer is told."""
    fields |= {"error": type(error).__name__, "reason": str(error)}
    say(logging.WARNING, "error", "%(peer)s: %(error)s: %(reason)s", **fields)


def say_told(told: bytes, **fields: Any) -> None:
    """Logs what a peer is told of an error: as `error_bytes` writes it, or a text."""
    found = error_parts(told)
    error, reason = ("ServiceError", told.decode(errors="replace")) if found is None else found
    say(logging.WARNING, "error", "%(peer)s: %(error)s: %(reason)s", **fields, error=error, reason=reason)


class JsonLines(logging.Formatter):
    """A JSON object on a line of its own for each record.

    It has `time` (UTC), `level`, `logger` and `message`; a record of fastpipe's has its `event` and fields, too.
    """

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        found |= getattr(record, "fastpipe", {})
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


class RequestLog:
    """One request for batches, which is logged when it ends.

    Args:
        peer: who asks.
    """

    def __init__(self, peer: str) -> None:
        self._fields: dict[str, Any] = {"peer": peer}
        self._begun = time.monotonic()

    def asks(self, ticket: Ticket) -> None:
        """For these batches."""
        self._fields |= {
            "reader": ticket.reader,
            "epoch": ticket.epoch,
            "start": ticket.start,
            "stop": ticket.stop,
        }

    def end(self, outcome: str, batches: int, nbytes: int, told: bytes | None) -> None:
        """It has ended.

        Args:
            outcome: `sent`, `refused`, `cancelled`, `left` by its client, or `error`.
            batches: batches that were sent.
            nbytes: their bytes.
            told: what the client was told of an error.
        """
        if outcome == "error":
            say_told(told or b"", **self._fields)
        fields = self._fields | {
            "outcome": outcome,
            "batches": batches,
            "bytes": nbytes,
            "seconds": round(time.monotonic() - self._begun, 6),
        }
        text = "%(peer)s: %(outcome)s: %(batches)d batches, %(bytes)d bytes in %(seconds).3f seconds"
        if "reader" in fields:
            text += ", of %(start)d to %(stop)d in epoch %(epoch)d of %(reader)s"
        say(logging.INFO, "request", text, **fields)
