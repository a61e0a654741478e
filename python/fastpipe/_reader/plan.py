"""Plans: what the passes of a reader do, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fastpipe._private_constructor import private_constructor
from fastpipe._reader.dataset import DerivedDataset
from fastpipe._reader.grouping import GroupedDataset
from fastpipe._reader.left_out_steps import described
from fastpipe._reader.mapped_batches import OwnFunction
from fastpipe._reader.mapped_passes import MappedPasses
from fastpipe._reader.mixed_data import MixedDataset
from fastpipe._reader.passes import Passes
from fastpipe._reader.reader_passes import ReaderPasses
from fastpipe._reader.selection import Selected
from fastpipe._text import clean, plural

if TYPE_CHECKING:
    from fastpipe._fastpipe import Order
    from fastpipe._reader.dataset import Dataset
    from fastpipe._reader.mapped_passes import MapOptions
    from fastpipe._reader.ordering import Ordering
    from fastpipe._reader.reader_passes import ReaderParts

_Line = tuple[str, str]


class Plan:
    """The stages from a dataset to its batches, in the sequence in which data passes them. Created by `Reader.plan`.

    `str` and `repr` return a line for each stage: the source, partitions and selections of rows, the order, ranks,
    steps that are left out, batches, and maps.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_csv("rides.csv", batch_size=256, shuffle=True, shuffle_buffer=512, seed=7)
        >>> print(reader.split(0.9, 0.1)[0].plan())
        source   rides.csv (rows: 2,000; files: 1; chunks: 2)
        split    part 0 of 2, fraction 0.9, by the place of the row, seed=0: 1,802 of 2,000 rows
        order    shuffle="window", shuffle_buffer=512, seed=7
        batches  8 batches of batch_size=256 in an epoch
    """

    @private_constructor("reader.plan()")
    def _of(self, stages: list[_Line]) -> None:
        self._stages = tuple(stages)

    @property
    def stages(self) -> list[tuple[str, str]]:
        """The name and the description of each stage."""
        return list(self._stages)

    def __reduce__(self) -> tuple[object, ...]:
        return _plan, (list(self._stages),)

    def __repr__(self) -> str:
        width = max(len(name) for name, _ in self._stages)
        return "\n".join(f"{name:<{width}}  {clean(text)}" for name, text in self._stages)


def _plan(stages: list[_Line]) -> Plan:
    return Plan._of(stages)


def plan_of(passes: Passes) -> Plan:
    """Returns the plan of the passes of a reader or a map. Reads no data."""
    return _plan(list(_stages(passes)))


def _stages(passes: Passes) -> Iterator[_Line]:
    if isinstance(passes, MappedPasses):
        yield from _stages(passes.incoming)
        function = passes.options.function.function
        stage = function.stage if isinstance(function, OwnFunction) else ("map", _map(passes.options))
        if stage is not None:
            yield stage
    elif isinstance(passes, ReaderPasses):
        yield from _dataset(passes.parts.data)
        yield from _sequence(passes.parts.ordering, passes.parts.order)
        yield from _batches(passes.parts)


def _dataset(data: Dataset) -> Iterator[_Line]:
    if isinstance(data, Selected):
        yield from _dataset(data.whole)
        before = data.whole.handle.num_rows
        for (name, text), rows in data.history:
            yield name, f"{text}: {rows:,} of {plural(before, 'row')}"
            before = rows
    elif isinstance(data, GroupedDataset):
        yield from _dataset(data.whole)
        yield data.stage
    elif isinstance(data, MixedDataset):
        for member, order, (name, rows) in zip(data.members, data.orders, data.rows().items(), strict=True):
            for stage, text in [*_dataset(member.data), *_sequence(member.ordering, order)]:
                yield f"{name}: {stage}", text
            yield f"{name}: mix", f"{rows:,} rows in an epoch of the mixture"
    elif isinstance(data, DerivedDataset):
        whole = data.origin()[0]
        yield from _dataset(whole)
        if str(data).startswith("cached"):
            yield "cache", str(data).removesuffix(f" of {whole}")
            return
        part = str(data).removesuffix(f" of {whole}")
        yield "partition", f"{part}: {data.handle.num_rows:,} of {plural(whole.handle.num_rows, 'row')}"
    else:
        units = np.count_nonzero(data.handle.unit_rows())
        files = f"files: {len(data.files):,}; " if data.files else ""
        yield "source", f"{data} (rows: {data.handle.num_rows:,}; {files}{data.words.units}: {units:,})"


def _sequence(ordering: Ordering, order: Order) -> Iterator[_Line]:
    seed = f"seed={ordering.seed}" + ("" if ordering.seed_given else ", drawn at random")
    if ordering.is_sample:
        drawn = f"drawn in each epoch, {seed}"
        drawn += ", with replacement" if ordering.shuffle == "bootstrap" else ""
        yield "sample", f"{plural(order.num_rows, 'row')}, {drawn}"
        yield "order", "as in the source"
    elif ordering.is_mixture:
        yield "order", "rows of the readers in the proportion of their weights"
    elif ordering.shuffle == "sequential":
        yield "order", "as in the source"
    else:
        yield "order", f'shuffle="{ordering.shuffle}", shuffle_buffer={order.shuffle_buffer}, {seed}'


def _batches(parts: ReaderParts) -> Iterator[_Line]:
    ordering, order = parts.ordering, parts.order
    ranks = ordering.world_size
    if ranks > 1:
        how = f'shard_by="{ordering.shard_by}", on_uneven="{ordering.on_uneven}"'
        yield "ranks", f"rank {ordering.rank} of {ranks}, {how}"
    if ordering.without_steps:
        yield "without", described(ordering)
    batches = "batch" if order.steps == 1 else "batches"
    text = f"{order.steps:,} {batches} of batch_size={ordering.batch_size} in an epoch{' of this rank' * (ranks > 1)}"
    if order.left_out:
        text += f", {plural(order.left_out, 'row')} of all ranks in no batch" if ranks > 1 else ""
        text += f", {plural(order.left_out, 'row')} in no batch" if ranks == 1 else ""
    if parts.epochs != 1:
        text += ", epochs without end" if parts.epochs is None else f", {parts.epochs:,} epochs in a pass"
    yield "batches", text


def _map(options: MapOptions) -> str:
    function = options.function.function
    name = getattr(function, "__qualname__", None) or type(function).__name__
    threads = f", num_threads={options.num_threads}, prefetch={options.prefetch}" if options.num_threads else ""
    seed = "" if options.function.seed is None else f", seed={options.function.seed}"
    return f"{name}{threads}{seed}"
