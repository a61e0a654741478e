"""Where the time of a pass goes, and what limits it, in words."""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple, Protocol

_SPENT = ("items", "making", "placing", "joining", "waiting")


class Look(NamedTuple):
    """What there is to see of a pass's workers.

    Attributes:
        makers: what each item worker says of itself (`ItemConsumer.views`), with its `name`.
        joiners: the same of batch workers.
        awaited: the number of the batch that the consumer waits for just now, and how many of its rows are missing;
            None if it waits for none.
        collates: whether there is a `collate_fn` of the user's own.
    """

    makers: list[dict[str, Any]]
    joiners: list[dict[str, Any]]
    awaited: tuple[int, int] | None
    collates: bool


class _Seen(Protocol):
    def look(self) -> Look: ...


class Account:
    """Where the time of one pass goes. It outlives the pass, and keeps none of its memory.

    Args:
        of: the pass, if it has workers.
        before: what its workers had done before it began, if they were kept from another pass.

    Attributes:
        waited: seconds that the consumer has waited for batches.
        away: seconds between its calls of `next`, the workers' start among them.
    """

    def __init__(self, of: _Seen | None = None, before: Look | None = None) -> None:
        self._of = None if of is None else weakref.ref(of)
        self._before = before
        self._last: Look | None = None
        self._waited = self.away = 0.0
        self._turned = time.perf_counter()
        self._waits = False
        self._first: float | None = None

    def wait(self) -> None:
        """The consumer begins to wait."""
        now = time.perf_counter()
        self.away += now - self._turned
        self._turned, self._waits = now, True

    def leave(self) -> None:
        """The consumer has a batch, and leaves."""
        now = time.perf_counter()
        self._waited += now - self._turned
        self._turned, self._waits = now, False
        if self._first is None:
            self._first = self._waited + self.away

    @property
    def waits_since(self) -> float:
        """Seconds for which the consumer has waited for the next batch; 0 if it doesn't just now."""
        return time.perf_counter() - self._turned if self._waits else 0.0

    @property
    def waited(self) -> float:
        return self._waited + self.waits_since

    @property
    def first(self) -> float:
        """Seconds from the start of the workers to the first batch."""
        return self.waited + self.away if self._first is None else self._first

    def keep(self, look: Look) -> None:
        """Keeps what there is to see of workers that are about to go."""
        self._last = look

    def look(self) -> Look | None:
        """What the workers have done for this pass. None if it has none."""
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

# A worker that has been at one item, or one batch, for so many seconds is named, and a consumer that has waited so long
# for one batch is stalled.
_LONG = 1.0

_MORE = "more num_workers help, if there are processors"
_WORDS = {"making": "making items", "placing": "copying them", "joining": "collating", "waiting": "waiting for work"}


def explained(loader: Any, account: Account | None) -> str:
    """Says where the time of a pass went, and what it waits for.

    Args:
        loader: whose pass it is.
        account: of its last pass; None if there was none.
    """
    if loader._streams is not None:
        return "An iterable data set is read by torch's own workers, which keep no account."
    if account is None:
        return "No pass has begun: explain() describes the last one."
    look = account.look()
    if look is None:
        return _without_workers(account)
    items = sum(view["items"] for view in look.makers)
    lines = [_stall(account, look) or (_verdict(account, look) if items else "Nothing was made yet.")]
    lines += [_busy(view) for view in look.makers + look.joiners if _is_long(view)]
    if items:
        lines += _spent(look, items)
    slowest = _slowest(look)
    if slowest:
        lines.append(f"The slowest: {', '.join(slowest)}.")
    return "\n".join(lines)


def _without_workers(account: Account) -> str:
    total = account.waited + account.away or 1e-12
    if account.away > account.waited:
        return f"consumer-bound: making batches takes {account.waited / total:.0%} of the time, without workers."
    return (
        f"item-bound: the program makes batches itself, which takes {account.waited / total:.0%} of the time;"
        " with num_workers=1 or more they are made beside it."
    )


def _stall(account: Account, look: Look) -> str | None:
    """Says what the consumer waits for, if it has waited long."""
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
    total = account.waited + account.away or 1e-12
    if account.away > account.waited:
        return f"consumer-bound: the consumer is away {account.away / total:.0%} of the time, and workers wait for it."
    views = makers + joiners
    worked = sum(view["making"] + view["placing"] + view["joining"] for view in views)
    if account.first > total / 2 and worked < len(views) * total / 2:
        return (
            f"start-bound: {account.first / total:.0%} of the time went by before the first batch, since workers had to"
            " start; persistent_workers=True keeps them for further passes, and fewer start sooner."
        )
    waits = f"the consumer waits {account.waited / total:.0%} of the time"
    spent = {name: sum(view[name] for view in makers) for name in ("making", "placing", "joining")}
    joining = sum(view["joining"] for view in joiners)
    if joiners and joining / len(joiners) > sum(spent.values()) / len(makers):
        return f"collation-bound: {waits}; more num_batch_workers help, if there are processors."
    match max(spent, key=lambda name: spent[name]):
        case "joining":
            more = "num_batch_workers=1 or more do it beside them" if look.collates and not joiners else _MORE
            return f"collation-bound: {waits}, and item workers collate; {more}."
        case "placing":
            return f"copy-bound: {waits}, and to copy items takes longer than to make them."
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
