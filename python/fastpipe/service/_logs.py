"""Log records of a server: each has an event name, fields, and a text."""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any

from fastpipe.service._wire import Ticket, error_parts

log = logging.getLogger("fastpipe.service")


def say(level: int, event: str, text: str, **fields: Any) -> None:
    """Logs an event. The text refers to the fields as `%(name)s`."""
    if log.isEnabledFor(level):
        # Without fields, pass no argument: logging doesn't treat an empty dict as named arguments.
        named = (fields,) if fields else ()
        log.log(level, text, *named, extra={"fastpipe": {"event": event, **fields}})


def say_error(error: Exception, **fields: Any) -> None:
    """Logs an error that is sent to a peer."""
    fields |= {"error": type(error).__name__, "reason": str(error)}
    say(logging.WARNING, "error", "%(peer)s: %(error)s: %(reason)s", **fields)


def say_told(told: bytes, **fields: Any) -> None:
    """Logs an error in the form in which it is sent to a peer: as `error_bytes` encodes it, or as plain text."""
    found = error_parts(told)
    error, reason = ("ServiceError", told.decode(errors="replace")) if found is None else found
    say(logging.WARNING, "error", "%(peer)s: %(error)s: %(reason)s", **fields, error=error, reason=reason)


class JsonLines(logging.Formatter):
    """Formats each record as one line of JSON.

    The object contains `time` (UTC), `level`, `logger` and `message`. Records of fastpipe also contain `event` and the
    fields of the event.
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
    """The log record of one request for batches. It is written when the request ends.

    Args:
        peer: Address of the client.
    """

    def __init__(self, peer: str) -> None:
        self._fields: dict[str, Any] = {"peer": peer}
        self._begun = time.monotonic()

    def asks(self, ticket: Ticket) -> None:
        """Records which batches the client requests."""
        self._fields |= {
            "reader": ticket.reader,
            "epoch": ticket.epoch,
            "start": ticket.start,
            "stop": ticket.stop,
        }

    def end(self, outcome: str, batches: int, nbytes: int, told: bytes | None) -> None:
        """Logs the end of the request.

        Args:
            outcome: `sent`, `refused`, `cancelled`, `left` by its client, or `error`.
            batches: Number of batches that were sent.
            nbytes: Bytes of these batches.
            told: The error that the client was sent, if any.
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
