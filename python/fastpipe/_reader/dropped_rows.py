"""Rows that are in no batch: refused if no rank would get any, warned of if they are many."""

from __future__ import annotations

import sys
import warnings

from fastpipe._fastpipe import Order
from fastpipe._reader.ordering import Ordering
from fastpipe.errors import RowsLeftOutWarning

# Up to a tenth of the rows may be left out without a warning.
_UNSAID = 10


def check(order: Order, ordering: Ordering, rows: int, units: str) -> None:
    """Refuses to deal out rows among ranks such that none of them gets a batch.

    Args:
        order: of the rows.
        ordering: what it was made of.
        rows: of an epoch.
        units: what the source calls its units.

    Raises:
        ValueError: if that is so; it names what would do.
    """
    if rows == 0 or order.steps or ordering.world_size == 1 or ordering.uneven == "allow":
        return
    if ordering.in_step is not None:
        # A worker may have none: its rank has some, or was refused itself.
        return
    size, ranks = ordering.batch_size, ordering.world_size
    batches = _batches(rows, size, drop_last=ordering.drop_last)
    short = " (drop_last=True leaves out a shorter one)" if ordering.drop_last else ""
    if order.own_rows is None:
        found = f"{rows} rows make {batches} batches of batch_size={size}{short}, and there are {ranks} ranks"
    else:
        found = f"no rank's {units} have the rows of a batch of batch_size={size}{short}"
    raise ValueError(
        f'{found}: uneven="{ordering.uneven}" would leave every rank without a batch. What would do: '
        + "; ".join(_choices(order, ordering, rows, batches))
    )


def _choices(order: Order, ordering: Ordering, rows: int, batches: int) -> list[str]:
    """What gives every rank a batch, or says that some shall have none."""
    size, ranks, own = ordering.batch_size, ordering.world_size, order.own_rows
    choices = []
    if own is None and batches:
        choices.append('uneven="pad", which fills batches up')
        choices.append('uneven="allow", which lets ranks have none')
        choices.append(f"world_size={batches} or fewer ranks")
    if largest := rows // ranks if own is None else own:
        choices.append(f"batch_size={largest} or less")
    if ordering.drop_last and (own or _batches(rows, size, drop_last=False) >= ranks):
        choices.append("drop_last=False")
    if own is not None and batches >= ranks:
        choices.append('shard_by="batch"')
    return choices or ["fewer ranks; there are fewer rows than ranks"]


def _batches(rows: int, size: int, *, drop_last: bool) -> int:
    return rows // size if drop_last else -(-rows // size)


def warn(order: Order, ordering: Ordering, rows: int) -> None:
    """Warns whoever called fastpipe if more than a tenth of the rows are in no batch of any rank."""
    left_out = order.left_out
    if left_out * _UNSAID <= rows:
        return
    why, remedies = [f"batch_size={ordering.batch_size}"], ["a smaller batch_size"]
    if ordering.drop_last:
        why.append("drop_last=True")
        remedies.append("drop_last=False")
    if ordering.world_size > 1 and ordering.uneven == "drop":
        why += [f"world_size={ordering.world_size}", 'uneven="drop"']
        remedies.append('uneven="pad" or "allow"')
        if order.own_rows is not None:
            remedies.append('shard_by="batch"')
    share = "all" if left_out == rows else f"{left_out} of"
    text = f"{share} {rows} rows ({left_out / rows:.0%}) are in no batch of an epoch, with {', '.join(why)}"
    warnings.warn(f"{text}. What keeps more of them: {'; '.join(remedies)}", RowsLeftOutWarning, stacklevel())


def stacklevel() -> int:
    """How many frames above its caller the first one lies that isn't of fastpipe."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fastpipe":
        level, frame = level + 1, frame.f_back
    return level
