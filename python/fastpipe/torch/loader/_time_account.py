"""Accounting of the time of a pass, and an explanation of what limits the pass."""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple, Protocol

from fastpipe._reader.explain import UNNOTICED

_SPENT = ("items", "making", "placing", "joining", "waiting")


class Look(NamedTuple):
    """A snapshot of a pass's workers.

    Attributes:
        makers: Counters of each item worker (`ItemConsumer.views`), with its `name`.
        joiners: Counters of each batch worker.
        awaited: Index of the batch that the consumer is waiting for, and how many of its rows are missing. None if it
            isn't waiting.
        collates: Whether the user has passed a `collate_fn`.
    """

    makers: list[dict[str, Any]]
    joiners: list[dict[str, Any]]
    awaited: tuple[int, int] | None
    collates: bool


class _Seen(Protocol):
    def look(self) -> Look: ...


class Account:
    """The time spent in one pass. It outlives the pass without keeping its memory.

    Args:
        of: The pass, if it has workers.
        before: Snapshot of persistent workers from before the pass began.

    Attributes:
        start: Seconds that the program has spent on starting workers.
        waited: Seconds that the consumer has waited for batches.
        away: Seconds between the consumer's calls of `next`.
    """

    def __init__(self, of: _Seen | None = None, before: Look | None = None) -> None:
        self._of = None if of is None else weakref.ref(of)
        self._before = before
        self._last: Look | None = None
        self.start = self._waited = self.away = 0.0
        self._turned = time.perf_counter()
        self._waits = False
        self._first: float | None = None

    def started(self) -> None:
        """Records that the program has started the workers."""
        now = time.perf_counter()
        self.start += now - self._turned
        self._turned = now

    def wait(self) -> None:
        """Records that the consumer begins to wait."""
        now = time.perf_counter()
        self.away += now - self._turned
        self._turned, self._waits = now, True

    def leave(self) -> None:
        """Records that the consumer received a batch."""
        now = time.perf_counter()
        self._waited += now - self._turned
        self._turned, self._waits = now, False
        if self._first is None:
            self._first = self.total

    @property
    def waits_since(self) -> float:
        """Seconds that the consumer has been waiting for the next batch, or 0 if it isn't waiting."""
        return time.perf_counter() - self._turned if self._waits else 0.0

    @property
    def waited(self) -> float:
        return self._waited + self.waits_since

    @property
    def total(self) -> float:
        """Seconds of the pass. It is never 0."""
        return self.start + self.waited + self.away or 1e-12

    @property
    def first(self) -> float:
        """Seconds until the first batch, or 0 if the workers were there before the pass."""
        if self._before is not None:
            return 0.0
        return self.total if self._first is None else self._first

    def keep(self, look: Look) -> None:
        """Keeps the last snapshot of workers that are about to end."""
        self._last = look

    def look(self) -> Look | None:
        """Returns the workers' activity during this pass, or None if the pass has no workers."""
        found = self._last
        if found is None:
            of = None if self._of is None else self._of()
            if of is None:
                return None
            found = of.look()
        if self._before is None:
            return found
        return found._replace(
            makers=_less(found.makers, self._before.makers), joiners=_less(found.joiners, self._before.joiners)
        )


def _less(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pairs = zip(now, before, strict=True)
    return [after | {name: after[name] - earlier[name] for name in _SPENT} for after, earlier in pairs]


_SLOWEST = 5

# Seconds after which a worker that is busy with one item or batch is listed, and after which a waiting consumer is
# stalled.
_LONG = 1.0

_MORE = "more num_workers help if there are enough processors"
_WORDS = {"making": "making items", "placing": "copying them", "joining": "collating", "waiting": "waiting for work"}


def explained(loader: Any, account: Account | None) -> str:
    """Explains where the time of a pass went and what the pass is waiting for.

    Args:
        loader: Loader of the pass.
        account: Account of the loader's last pass, or None before the first pass.
    """
    if loader._reads_pipe:
        return "torch's own workers read data pipes, and their time isn't recorded."
    if account is None:
        return "No pass has begun: explain() describes the last one."
    look = account.look()
    if look is None:
        return _without_workers(account)
    items = sum(view["items"] for view in look.makers)
    lines = [_stall(account, look) or (_verdict(account, look) if items else "No item has been made yet.")]
    lines += [_busy(view) for view in look.makers + look.joiners if _is_long(view)]
    if items:
        lines += _spent(look, items)
    slowest = _slowest(look)
    if slowest:
        lines.append(f"The slowest: {', '.join(slowest)}.")
    return "\n".join(lines)


def _without_workers(account: Account) -> str:
    share = account.waited / account.total
    if share < UNNOTICED:
        return f"not a bottleneck: making batches takes {share:.0%} of the time, without workers."
    if account.away > account.waited:
        return f"consumer-bound: making batches takes {share:.0%} of the time, without workers."
    return (
        f"item-bound: the program makes batches itself, which takes {share:.0%} of the time;"
        " with num_workers=1 or more, workers make them in parallel."
    )


def _stall(account: Account, look: Look) -> str | None:
    """Returns what the consumer is waiting for, or None if it hasn't waited long."""
    since = account.waits_since
    if since < _LONG or look.awaited is None:
        return None
    number, left = look.awaited
    missing = "one of its items is missing" if left == 1 else f"{left} of its items are missing"
    what = missing if left else "it is being collated"
    return f"stalled: the consumer has waited {since:.1f} s for batch {number}: {what}."


def _is_long(view: dict[str, Any]) -> bool:
    return view["activity"] in ("making", "joining") and view["for"] >= _LONG


def _busy(view: dict[str, Any]) -> str:
    if view["activity"] == "joining":
        return f"{view['name']} has been collating batch {view['batch']} for {view['for']:.1f} s."
    index = "" if view["index"] is None else f"index {view['index']}, "
    return f"{view['name']} has been making {index}row {view['row']} of batch {view['batch']}, for {view['for']:.1f} s."


def _verdict(account: Account, look: Look) -> str:
    makers, joiners = look.makers, look.joiners
    total = account.total
    views = makers + joiners
    worked = sum(view["making"] + view["placing"] + view["joining"] for view in views)
    if account.first > total / 2 and worked < len(views) * total / 2:
        return (
            f"start-bound: {account.first / total:.0%} of the time passed before the first batch, since workers had to"
            " start; persistent_workers=True keeps them for further passes, and fewer workers start sooner."
        )
    held = (account.start + account.waited) / total
    if held < UNNOTICED:
        return f"not a bottleneck: the consumer waits {held:.0%} of the time, the start of workers included."
    if account.away > account.waited:
        return f"consumer-bound: the consumer is away {account.away / total:.0%} of the time, and workers wait for it."
    waits = f"the consumer waits {account.waited / total:.0%} of the time"
    spent = {name: sum(view[name] for view in makers) for name in ("making", "placing", "joining")}
    joining = sum(view["joining"] for view in joiners)
    if joiners and joining / len(joiners) > sum(spent.values()) / len(makers):
        return f"collation-bound: {waits}; more num_batch_workers help if there are enough processors."
    match max(spent, key=lambda name: spent[name]):
        case "joining":
            more = "num_batch_workers=1 or more collate in parallel" if look.collates and not joiners else _MORE
            return f"collation-bound: {waits}, and item workers collate; {more}."
        case "placing":
            return f"copy-bound: {waits}, and copying items takes longer than making them."
    return f"item-bound: {waits}; {_MORE}."


def _spent(look: Look, items: int) -> list[str]:
    views = look.makers + look.joiners
    spent = {name: sum(view[name] for view in views) for name in _WORDS}
    total = sum(spent.values()) or 1e-12
    shares = [f"{_WORDS[name]} {share / total:.0%}" for name, share in spent.items() if share >= 0.005 * total]
    each = f"{items} items took {spent['making'] / items * 1e3:.3f} ms each."
    return [f"Of the workers' time: {', '.join(shares)}.", each]


def _slowest(look: Look) -> list[str]:
    done = [(*slow, "") for view in look.makers for slow in view["slowest"]]
    now = [
        (view["for"], view["index"], view["batch"], view["row"], " so far")
        for view in look.makers
        if view["activity"] == "making" and _is_long(view)
    ]
    slowest = sorted(done + now, reverse=True, key=lambda slow: slow[0])
    return [_slow(*slow) for slow in slowest[:_SLOWEST]]


def _slow(seconds: float, index: int | None, batch: int, row: int, so_far: str) -> str:
    which = f"row {row} of batch {batch}" if index is None else f"index {index}"
    return f"{which} ({seconds * 1e3:.1f} ms{so_far})"
