"""What limits a pass of a loader, in words."""

from __future__ import annotations

from typing import Any

__all__ = ["explained"]

_SLOWEST = 5


def explained(loader: Any, iterator: Any) -> str:
    """Says where the time of a pass went.

    Args:
        loader: whose pass it is.
        iterator: of its last pass; None if there is none, or it has gone.
    """
    if loader._streams is not None:
        return "An iterable data set is read by torch's own workers, which keep no account."
    if iterator is None or not hasattr(iterator, "views"):
        return (
            "No pass with workers is there to be explained: keep what iter(loader) returns while it is read, and ask"
            " then."
        )
    views, waited, away = iterator.views()
    makers, joiners = views[: loader.num_workers], views[loader.num_workers :]
    items = sum(view["items"] for view in makers)
    if not items:
        return "Nothing was made yet."
    lines = [_verdict(makers, joiners, waited, away)]
    spent = {name: sum(view[name] for view in views) for name in ("making", "placing", "joining", "waiting")}
    total = sum(spent.values()) or 1e-12
    words = {"making": "making items", "placing": "copying them", "joining": "collating", "waiting": "waiting for work"}
    shares = [f"{words[name]} {share / total:.0%}" for name, share in spent.items() if share >= 0.005 * total]
    lines.append(f"Of the workers' time: {', '.join(shares)}.")
    lines.append(f"{items} items took {spent['making'] / items * 1e3:.3f} ms each.")
    slowest = sorted((slow for view in makers for slow in view["slowest"]), reverse=True, key=lambda slow: slow[0])
    told = [_slow(*slow) for slow in slowest[:_SLOWEST]]
    if told:
        lines.append(f"The slowest: {', '.join(told)}.")
    return "\n".join(lines)


def _verdict(makers: list[Any], joiners: list[Any], waited: float, away: float) -> str:
    total = waited + away or 1e-12
    if away > waited:
        return f"consumer-bound: the consumer is away {away / total:.0%} of the time, and workers wait for it."
    waits = f"the consumer waits {waited / total:.0%} of the time"
    busy = sum(view["making"] + view["placing"] for view in makers)
    joining = sum(view["joining"] for view in joiners)
    if joiners and joining / len(joiners) > busy / len(makers):
        return f"collation-bound: {waits}; more num_batch_workers help."
    if sum(view["placing"] for view in makers) > busy / 2:
        return f"copy-bound: {waits}, and to copy items takes longer than to make them."
    return f"item-bound: {waits}; more num_workers help, if there are processors."


def _slow(seconds: float, index: int | None, batch: int, row: int) -> str:
    which = f"row {row} of batch {batch}" if index is None else f"index {index}"
    return f"{which} ({seconds * 1e3:.1f} ms)"
