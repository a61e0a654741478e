"""A reader that a server has: what clients are told of it, and passes in the orders that they ask for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fastpipe._arrow.schema import encoded_features
from fastpipe._fastpipe import Order, Pass, PassMemory, SharedSlabs
from fastpipe._reader.ordering import Ordering
from fastpipe._reader.passes import Passes, passes_of
from fastpipe._reader.reader import Reader
from fastpipe._reader.reader_passes import ReaderPasses
from fastpipe._reader.rebatch import Rebatcher
from fastpipe._reader.state import VERSION as STATES
from fastpipe.errors import LimitError, StateError, UnsupportedError
from fastpipe.service._wire import VERSION, Ticket, identity, specs_digest

# Orders that are kept: one may take memory for each unit of the data set.
_MOST_ORDERS = 16
# Batches that whoever maps the memory of a pass has at once.
_HELD = 8


def _without_folders(text: str, files: list[str]) -> str:
    return PurePath(files[0]).name if len(files) == 1 and text == files[0] else text


@dataclass(frozen=True, slots=True)
class Shares:
    """A server's memory, divided: what is kept for other clients, what passes may take, and what is being sent.

    A batch belongs to its pass until that hands it over, and takes half of its limit at most: a pass refuses to begin
    where the batch that is made and the one that waits don't fit. So no pass has more than twice what may be sent.

    Attributes:
        keep: bytes of batches that are kept.
        passes: bytes that all open passes may take together.
        sending: bytes of batches that were handed over, and aren't kept.
        each: bytes for a pass that has no limit of its own.
    """

    keep: int
    passes: int
    sending: int
    each: int

    @classmethod
    def of(cls, memory: int, keep: int, max_passes: int) -> Self:
        """Divides it.

        Args:
            memory: bytes for all.
            keep: bytes of these for batches that are kept.
            max_passes: that may be open at once.

        Raises:
            ValueError: if nothing is left for passes.
        """
        rest = memory - keep
        sending = rest // 4
        passes = rest - sending
        if passes // max_passes < 1:
            raise ValueError(
                f"the server's memory_limit is {memory} bytes, and keep is {keep} of these: nothing is left for"
                f" {max_passes} passes; raise memory_limit, or lower keep or max_passes"
            )
        return cls(keep, passes, sending, min(passes // max_passes, 2 * sending))

    def limit(self, own: int | None) -> int:
        """Bytes for a pass of a reader that has this limit, or none."""
        return self.each if own is None else min(own, 2 * self.sending)


class Served:
    """A reader that a server has.

    Args:
        name: by which clients ask for it.
        reader: with its defaults.
        shares: what passes may take of a server's memory; None for what the reader says.

    Attributes:
        limit: bytes that each pass may take; None for no limit.

    Raises:
        LimitError: if a pass in the reader's own order takes more than its share.
        TypeError: if it is no reader.
        UnsupportedError: if it is one whose batches can't be asked for by their step.
    """

    def __init__(self, name: str, reader: Reader, shares: Shares | None = None) -> None:
        passes = getattr(reader, "_passes", None)
        if not isinstance(passes, ReaderPasses):
            if not isinstance(reader, (Passes, Rebatcher)):
                passes_of(reader)
            raise UnsupportedError(
                f"{reader!r} can't be served, only what reads a data set itself; serve that, and let the client make"
                " of its batches what this makes of them: fastpipe.rebatch(fastpipe.connect(...), ...)"
            )
        parts = passes.parts
        if parts.ordering.rows is not None:
            raise UnsupportedError("a reader of given rows can't be served; serve the whole, and let the client take")
        self.name = name
        self._parts = parts
        self._data = parts.data
        self._orders: OrderedDict[Ordering, Order] = OrderedDict()
        self._lock = threading.Lock()
        self._specs = specs_digest(self._data)
        self._identity = identity(self._data.fingerprint(), self._specs)
        own = parts.running.memory_limit
        self._shared = shares is not None
        self.limit = own if shares is None else shares.limit(own)
        self._running = replace(parts.running, memory_limit=self.limit)
        if self._shared:
            self._check_share()

    def _check_share(self) -> None:
        """Whether a pass fits its share: so that this is known before anybody asks."""
        order = self._parts.order
        if not order.steps:
            return
        try:
            order.batches(replace(self._running, bounded=True), 0, 0, order.steps).close()
        except LimitError as error:
            raise LimitError(
                f"a pass of the reader {self.name!r} doesn't fit its share of the server's memory_limit; raise that, or"
                f" lower keep or max_passes. Of a pass: {error}"
            ) from error

    def description(self) -> dict[str, Any]:
        """What a client is told first, fit for JSON. Of files their names, without folders."""
        parts, data = self._parts, self._data
        words = data.words
        return {
            "version": VERSION,
            "reader": self.name,
            "fingerprints": {str(version): data.fingerprint(version) for version in range(1, STATES + 1)},
            "specs": self._specs,
            "columns": data.handle.columns_text(),
            "csr": data.handle.columns_text(csr=True),
            "features": encoded_features(data.features),
            "symbols": {name: list(symbols) for name, symbols in data.symbols.items()},
            "files": [PurePath(file).name for file in data.files],
            "words": {
                "units": words.units,
                "advice": dict(words.advice),
                "bound": dict(words.bound),
                "other_digest": words.other_digest,
            },
            "uncut": data.handle.uncut,
            "in_sequence": data.handle.in_sequence(),
            "order": parts.ordering.with_buffer(parts.order.shuffle_buffer).text(),
            "seed_given": parts.ordering.seed_given,
            "epochs": parts.epochs,
            "text": _without_folders(str(data), data.files),
        }

    def unit_rows(self) -> npt.NDArray[np.uint32]:
        """Rows of each unit, uint32 `[units]`."""
        return self._data.handle.unit_rows()

    def place(self, unit: int, record: int) -> dict[str, Any]:
        """Where a row comes from: the name of the place's class, and its fields."""
        place = self._data.place(unit, record)
        fields: dict[str, Any] = place._asdict()  # type: ignore[attr-defined]
        known = (str, int, float, bool, type(None))
        return {
            "kind": type(place).__name__,
            "fields": {name: value if isinstance(value, known) else str(value) for name, value in fields.items()},
        }

    def check(self, data: Mapping[str, Any]) -> None:
        """Whether a request is for this data set, read with these specs.

        Args:
            data: the identity that it has.

        Raises:
            StateError: if it isn't; it says what differs.
        """
        here = self._identity
        if data == here:
            return
        if data == here | {"specs": data.get("specs")}:
            features = " ".join(repr(self._data.features).split())
            raise StateError(
                "this server reads the same data with other specs than the server that was connected to first: the"
                " features, their specs, vocabularies or hashes, or how values are decoded (reader_schema, a CSV"
                f" dialect) differ. It reads {features:.500}. Start all servers with one definition of the reader, then"
                " connect again"
            )
        differing = [
            f"{name} is {here[name]!r} here, and was {data.get(name)!r:.100}"
            for name in here
            if name not in ("digest", "specs") and data.get(name) != here[name]
        ]
        raise StateError(
            f"this server has other data: {'; '.join(differing) or self._data.words.other_digest}; connect anew"
        )

    def order(self, ticket: Ticket) -> Order:
        """The order that a ticket asks for.

        Raises:
            ValueError: if there is none such.
            FastpipeError: if it can't be made.
        """
        key = ticket.order
        with self._lock:
            found = self._orders.get(key)
            if found is None:
                found = self._orders[key] = key.of(self._data.handle)
                if len(self._orders) > _MOST_ORDERS:
                    self._orders.popitem(last=False)
            self._orders.move_to_end(key)
        return found

    def shared_memory(self, slabs: SharedSlabs) -> PassMemory:
        """Memory for passes, in that which other processes map."""
        return PassMemory.shared(self._data.handle, slabs, _HELD)

    def begin(
        self,
        ticket: Ticket,
        order: Order,
        step: int,
        stop: int,
        memory: PassMemory | None = None,
    ) -> Pass:
        """Begins a pass at a step, counted as a ticket counts, up to another one."""
        bounded = self._shared or self._asks_more(ticket)
        options = replace(self._running, memory=memory, csr=ticket.csr, bounded=bounded)
        return order.batches(options, ticket.epoch, step, stop, ticket.progress)

    def _asks_more(self, ticket: Ticket) -> bool:
        """Whether an order may take more than the reader's own, which whoever serves it has chosen."""
        own, order = self._parts.ordering, ticket.order
        more = order.batch_size > own.batch_size or (order.shuffle_buffer or 0) > self._parts.order.shuffle_buffer
        return more or order.shuffle != own.shuffle
