"""Rows that are in no batch: an error if no rank gets a batch, and reports of rows that are left out."""

from __future__ import annotations

from fastpipe import _omissions
from fastpipe._fastpipe import Order
from fastpipe._reader.ordering import Ordering
from fastpipe.errors import RowsLeftOutWarning


def check(order: Order, ordering: Ordering, rows: int, units: str) -> None:
    """Raises an error if no rank would get a batch.

    Args:
        order: Order of the rows.
        ordering: Settings that the order was created from.
        rows: Number of rows in an epoch.
        units: The source's name for its units.

    Raises:
        ValueError: If no rank would get a batch. The message lists settings that work.
    """
    if rows == 0 or order.steps or ordering.world_size == 1 or ordering.on_uneven == "allow":
        return
    if ordering.in_step is not None:
        # A single worker may get no batch: its rank has some, or has already raised this error.
        return
    if ordering.without_steps:
        raise ValueError(
            f"without(steps=...) and {ordering.world_size} ranks leave every rank without a batch: steps are those of"
            " each rank, which has fewer of them. Leave out fewer steps, or use fewer ranks"
        )
    size, ranks = ordering.batch_size, ordering.world_size
    batches = _batches(rows, size, drop_last=ordering.drop_last)
    short = " (drop_last=True leaves out a shorter one)" if ordering.drop_last else ""
    if order.own_rows is None:
        found = f"{rows} rows make {batches} batches of batch_size={size}{short}, and there are {ranks} ranks"
    else:
        found = f"no rank's {units} have the rows of a batch of batch_size={size}{short}"
    raise ValueError(
        f'{found}: on_uneven="{ordering.on_uneven}" would leave every rank without a batch. Use one of: '
        + "; ".join(_choices(order, ordering, rows, batches))
    )


def _choices(order: Order, ordering: Ordering, rows: int, batches: int) -> list[str]:
    """Returns the settings that give each rank a batch, or that allow ranks without one."""
    size, ranks, own = ordering.batch_size, ordering.world_size, order.own_rows
    choices = []
    if own is None and batches:
        choices.append('on_uneven="pad", which fills batches with repeated rows')
        choices.append('on_uneven="allow", which allows ranks without a batch')
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


def report(order: Order, ordering: Ordering, rows: int) -> None:
    """Reports rows that are in no batch of any rank."""
    left_out = order.left_out
    if not left_out:
        return
    why, remedies = [f"batch_size={ordering.batch_size}"], ["a smaller batch_size"]
    if ordering.drop_last:
        why.append("drop_last=True")
        remedies.append("drop_last=False")
    if ordering.world_size > 1 and ordering.on_uneven == "drop":
        why += [f"world_size={ordering.world_size}", 'on_uneven="drop"']
        remedies.append('on_uneven="pad" or "allow"')
        if order.own_rows is not None:
            remedies.append('shard_by="batch"')
    text = f"{_omissions.share(left_out, rows, 'rows')} are in no batch of an epoch, with {', '.join(why)}"
    large = RowsLeftOutWarning if _omissions.is_large(left_out, rows) else None
    _omissions.report(f"{text}. To keep more rows, use {'; '.join(remedies)}", large)
