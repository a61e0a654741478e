"""A reader on a server: its description for clients, and passes in the orders that clients request."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from fastpipe import _locations as locations
from fastpipe._arguments import within
from fastpipe._arrow.schema import encoded_features
from fastpipe._fastpipe import Order, Pass, PassMemory, SharedSlabs
from fastpipe._reader.losses import refuse
from fastpipe._reader.mixed_data import MixedDataset
from fastpipe._reader.ordering import Ordering
from fastpipe._reader.packing import groups_of
from fastpipe._reader.passes import Passes, passes_of
from fastpipe._reader.reader import Reader
from fastpipe._reader.reader_passes import ReaderPasses
from fastpipe._reader.rebatch import Rebatcher
from fastpipe._reader.state import LARGEST_EPOCH
from fastpipe._reader.state import VERSION as STATES
from fastpipe.errors import LimitError, StateError, UnsupportedError
from fastpipe.service._wire import VERSION, Ticket, check_size, identity, specs_digest

if TYPE_CHECKING:
    from fastpipe._reader.mapped import Mapped

# Maximum number of cached orders. An order may take memory for each unit of the dataset.
_MOST_ORDERS = 16
# Number of batches of a pass that a process which maps the memory may hold at once.
_HELD = 8


def _without_folders(text: str, files: list[str]) -> str:
    return PurePath(files[0]).name if len(files) == 1 and text == files[0] else text


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of a server's memory: for kept batches, for passes, and for batches that are being sent.

    A batch counts toward its pass until the pass delivers it. It takes at most half of the pass's limit, because a pass
    doesn't start unless the batch in progress and the finished batch both fit. So the limit of a pass is at most twice
    the memory for batches that are being sent.

    Attributes:
        cache_bytes: Bytes of batches that are kept for other clients.
        passes: Bytes that all open passes may take together.
        sending: Bytes of delivered batches that aren't kept.
        each: Bytes for a pass without its own limit.
    """

    cache_bytes: int
    passes: int
    sending: int
    each: int

    @classmethod
    def of(cls, memory: int, cache_bytes: int, max_passes: int) -> Self:
        """Divides a server's memory.

        Args:
            memory: Total bytes.
            cache_bytes: Bytes for kept batches, out of the total.
            max_passes: Maximum number of open passes.

        Raises:
            ValueError: If no memory is left for passes.
        """
        rest = memory - cache_bytes
        sending = rest // 4
        passes = rest - sending
        if passes // max_passes < 1:
            raise ValueError(
                f"the server's memory_limit is {memory} bytes, and cache_bytes is {cache_bytes} of these: nothing is"
                f" left for {max_passes} passes; raise memory_limit, or lower cache_bytes or max_passes"
            )
        return cls(cache_bytes, passes, sending, min(passes // max_passes, 2 * sending))

    def limit(self, own: int | None) -> int:
        """Returns the bytes for a pass of a reader with the given limit, or with no limit."""
        return self.each if own is None else min(own, 2 * self.sending)


class Served:
    """A reader on a server.

    Args:
        name: Name by which clients request the reader.
        reader: Reader to serve. Its options are the defaults of clients.
        shares: Parts of the server's memory; None if only the reader's own limit applies.

    Attributes:
        limit: Bytes that each pass may take; None for no limit.

    Raises:
        LimitError: If a pass in the reader's own order doesn't fit its share of the memory.
        TypeError: If it isn't a `Reader`, or packs or buckets of one.
        UnsupportedError: If its batches can't be requested by step.
    """

    def __init__(self, name: str, reader: Reader | Mapped, shares: Shares | None = None) -> None:
        # Clients make packs of the rows in groups.
        rows, self._groups = groups_of(reader)
        passes = getattr(rows, "_passes", None)
        if not isinstance(passes, ReaderPasses):
            if not isinstance(reader, (Passes, Rebatcher)):
                passes_of(reader)
            raise UnsupportedError(
                f"{reader!r} can't be served: only a reader of a dataset, a mixture, or packs and buckets of them can."
                " Serve the reader that it wraps, and change the batches in the client: fastpipe.connect(...).map(...)"
                " or .rebatch(...)"
            )
        refuse(passes.origin._lost, "serving a reader", 'serve a reader with on_error="raise"')
        parts = passes.parts
        check_size(parts.ordering)
        self.name = name
        self._parts = parts
        self._data = parts.data
        self._orders: OrderedDict[Ordering, Order] = OrderedDict()
        self._lock = threading.Lock()
        self._specs = specs_digest(self._data, self._groups)
        self._identity = identity(self._data.fingerprint(), self._specs)
        own = parts.running.memory_limit
        self._shared = shares is not None
        self.limit = own if shares is None else shares.limit(own)
        self._running = replace(parts.running, memory_limit=self.limit)
        if self._shared:
            self._check_share()

    def _check_share(self) -> None:
        """Checks that a pass fits its share, so that an error is raised before a client connects."""
        order = self._parts.order
        if not order.steps:
            return
        try:
            order.batches(replace(self._running, bounded=True), 0, 0, order.steps).close()
        except LimitError as error:
            raise LimitError(
                f"a pass of the reader {self.name!r} doesn't fit its share of the server's memory_limit. Raise"
                f" memory_limit, or lower cache_bytes or max_passes. The pass says: {error}"
            ) from error

    def description(self) -> dict[str, Any]:
        """Returns the description that clients receive first, in types of JSON. File names have no folders."""
        parts, data = self._parts, self._data
        words = data.words
        planned_here = parts.ordering.is_mixture or data.handle.rows_in_sequence is not None
        return {
            "version": VERSION,
            "reader": self.name,
            "fingerprints": {str(version): data.fingerprint(version) for version in range(1, STATES + 1)},
            "specs": self._specs,
            "columns": data.handle.columns_text(),
            "csr": data.handle.columns_text(csr=True),
            "features": encoded_features(data.features),
            "categories": {name: list(texts) for name, texts in data.categories.items()},
            "files": [PurePath(file).name for file in data.files],
            "words": {
                "units": words.units,
                "advice": dict(words.advice),
                "bound": dict(words.bound),
                "other_digest": words.other_digest,
            },
            "counted_rows": parts.order.num_rows if planned_here else None,
            "groups": None if self._groups is None else self._groups.to_json(),
            "together": data.together(parts.ordering) if isinstance(data, MixedDataset) else None,
            "uncut": data.handle.uncut,
            "in_sequence": data.handle.in_sequence(),
            "order": parts.ordering.with_buffer(parts.order.shuffle_buffer).text(),
            "seed_given": parts.ordering.seed_given,
            "epochs": parts.epochs,
            "text": _without_folders(str(data), data.files),
        }

    def unit_rows(self) -> npt.NDArray[np.uint32]:
        """Returns the number of rows of each unit of the order, uint32 `[units]`. A mixture needs none."""
        return np.zeros(0, np.uint32) if self._parts.ordering.is_mixture else self._data.handle.order_units()

    def locate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the location of a row as JSON-compatible data, or the reason why there is no such row.

        Args:
            request: Identity of the dataset, order, epoch, step and row, as a client has sent them.

        Raises:
            StateError: If the client has another dataset.
            ValueError: If the request is invalid.
        """
        self.check(dict(request["data"]))
        order = self.order(Ordering.read(str(request["order"])))
        epoch, step, row = (within(name, request[name], 0, LARGEST_EPOCH) for name in ("epoch", "step", "row"))
        try:
            return locations.to_json(self._data.locate(order, epoch, step, row, self.limit))
        except IndexError as error:
            return {"missing": str(error)}

    def check(self, data: Mapping[str, Any]) -> None:
        """Checks that a request is for this dataset, read with the same specs.

        Args:
            data: Identity of the dataset in the request.

        Raises:
            StateError: If the identity differs. The message names the differences.
        """
        here = self._identity
        if data == here:
            return
        if data == here | {"specs": data.get("specs")}:
            features = " ".join(repr(self._data.features).split())
            raise StateError(
                "this server reads the same data with other specs than the first server that was connected to: the"
                " features, their specs, vocabularies, hashes or buckets, or the decoding of values (reader_schema,"
                f" a CSV dialect) differ. It reads {features:.500}. Start all servers with the same definition of the"
                " reader, then connect again"
            )
        differing = [
            f"{name} is {here[name]!r} here, but was {data.get(name)!r:.100}"
            for name in here
            if name not in ("digest", "specs") and data.get(name) != here[name]
        ]
        raise StateError(
            f"this server has other data: {'; '.join(differing) or self._data.words.other_digest}; connect again"
        )

    def order(self, key: Ordering) -> Order:
        """Returns the order that a client requests.

        Raises:
            ValueError: If the order is invalid.
            FastpipeError: If the order can't be created.
        """
        with self._lock:
            found = self._orders.get(key)
            if found is None:
                found = self._orders[key] = key.of(self._data.handle)
                if len(self._orders) > _MOST_ORDERS:
                    self._orders.popitem(last=False)
            self._orders.move_to_end(key)
        return found

    def shared_memory(self, slabs: SharedSlabs) -> PassMemory:
        """Returns memory for passes that other processes can map."""
        return PassMemory.shared(self._data.handle, slabs, _HELD)

    def begin(
        self,
        ticket: Ticket,
        order: Order,
        step: int,
        stop: int,
        memory: PassMemory | None = None,
    ) -> Pass:
        """Begins a pass over the steps from `step` up to `stop`, counted like a ticket's steps."""
        bounded = self._shared or self._asks_more(ticket)
        options = replace(self._running, memory=memory, csr=ticket.csr, bounded=bounded)
        return order.batches(options, ticket.epoch, step, stop, ticket.progress)

    def _asks_more(self, ticket: Ticket) -> bool:
        """Whether an order may take more memory than the served reader's own order."""
        own, order = self._parts.ordering, ticket.order
        more = order.batch_size > own.batch_size or (order.shuffle_buffer or 0) > self._parts.order.shuffle_buffer
        return more or order.shuffle != own.shuffle
