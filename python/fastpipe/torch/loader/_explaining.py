"""What limits a pass of a loader, in words."""

from __future__ import annotations

from typing import Any

from fastpipe.torch.loader._account import Account, Look

__all__ = ["explained"]

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
