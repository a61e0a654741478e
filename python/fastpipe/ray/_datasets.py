"""A reader's epoch as a Ray Data dataset, and a reader's shards for the workers of Ray Train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastpipe._arguments import within
from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.passes import Passes
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import LARGEST_EPOCH
from fastpipe.errors import UnsupportedError
from fastpipe.ray._arguments import at_least, whole_reader

if TYPE_CHECKING:
    import pyarrow as pa
    import ray.data

# Default block size in bytes, and the minimum number of blocks if there are enough steps. Neither depends on the
# cluster, so the blocks are the same on each.
_BLOCK_BYTES = 64 << 20
_LEAST_BLOCKS = 16


def dataset(reader: Reader, *, epoch: int = 0, num_blocks: int | None = None, **options: Any) -> ray.data.Dataset:
    """Returns an epoch of a reader as a `ray.data.Dataset` (extras `ray` and `arrow`).

    Each read task reads a range of the reader's order. The dataset therefore has the rows of the reader, in its order.
    Every pass yields the same rows in the same order, bit for bit, even if tasks run in parallel, are retried, or run
    on another cluster. To ensure this, the dataset sets `preserve_order` in its own context, which derived datasets
    copy. Operations of Ray Data may still change the order.

    Rows have the Arrow types and schema of `Reader.to_arrow_reader`. `iter_batches(batch_format="pyarrow")` yields them
    unchanged.

    Args:
        reader: Reader of any source, or of a service (`fastpipe.connect`), whose servers then make the batches. It is
            pickled.
        epoch: Index of the epoch, from 0. The reader's own position has no effect. Defaults to 0.
        num_blocks: Number of read tasks, at most one per batch. Defaults to blocks of about 64 MiB, at least 16 of
            them, and none smaller than a shuffle window, which each task would have to decode. The default doesn't
            depend on the cluster.
        **options: Further arguments of `ray.data.read_datasource`, such as `num_cpus` or `concurrency`. A task uses
            one thread per CPU that Ray assigns to it, unless the reader sets `num_threads`.

    Returns:
        The dataset. Its row count is exact. Its size in bytes is exact if all rows have the same size. Otherwise it is
        estimated from the first batch of the epoch.

    Raises:
        ImportError: If Ray Data or pyarrow isn't installed.
        TypeError: If `reader` isn't a reader or can't be pickled.
        UnsupportedError: If the reader has loaded a state, wraps the batches of another reader, or holds data that Ray
            can't pickle.
        ValueError: If a number is out of range, or Arrow can't represent a name or size.

    Example:
        >>> import os
        >>> import fastpipe, fastpipe.ray
        >>> import ray
        >>> _ = ray.init(num_cpus=2, log_to_driver=False)
        >>> files = os.path.abspath("data/*.avro")  # the workers of Ray may have another working directory
        >>> reader = fastpipe.read_avro(files, columns=["label"], batch_size=1024, shuffle=True, seed=7)
        >>> ds = fastpipe.ray.dataset(reader, epoch=3)
        >>> sum(batch.num_rows for batch in ds.iter_batches(batch_size=256, batch_format="pyarrow"))
        6144
        >>> ray.shutdown()
    """
    passes = whole_reader(
        reader,
        "dataset",
        "pass the underlying reader, and use ds.iter_batches(...) for batches of another size",
    )
    number = within("epoch", epoch, 0, LARGEST_EPOCH)
    blocks = None if num_blocks is None else at_least("num_blocks", num_blocks, 1)
    if passes.loaded:
        raise UnsupportedError(
            "the reader has loaded a state, but a dataset needs a whole epoch: use a reader without a state, or"
            " iterate over this one directly"
        )
    require_pyarrow()
    try:
        import ray.data
    except ImportError as error:
        raise ImportError("fastpipe.ray.dataset requires Ray Data: pip install 'fastpipe-data[ray]'") from error

    from fastpipe.ray._datasource import FastpipeDatasource

    schema = passes.arrow_schema()
    rows = _rows(passes, number)
    row_bytes = _row_bytes(passes, number, schema)
    ends = _ends(passes, rows * row_bytes, blocks)
    source = FastpipeDatasource(reader, number, ends, passes.batch_size, rows, row_bytes, schema)
    made = ray.data.read_datasource(source, override_num_blocks=max(len(ends), 1), **options)
    # This context belongs to the dataset. Derived datasets copy it.
    made.context.execution_options.preserve_order = True
    return made


def _rows(passes: Passes, epoch: int) -> int:
    """Returns the number of rows in an epoch. Only its last batch may be shorter than the others."""
    return (passes.steps - 1) * passes.batch_size + passes.rows_of(epoch, passes.steps - 1) if passes.steps else 0


def _row_bytes(passes: Passes, epoch: int, schema: pa.Schema) -> float:
    """Returns the bytes per row: exact if all rows have the same size, otherwise estimated from the first batch."""
    bits = [_bits(field.type) for field in schema]
    fixed = [of for of in bits if of is not None]
    if len(fixed) == len(bits):
        return sum(fixed) / 8
    if not passes.steps:
        return 0.0
    (first,) = passes.record_batches(epoch, 0, 1)
    return int(first.nbytes) / max(int(first.num_rows), 1)


def _bits(kind: pa.DataType) -> int | None:
    """Returns the bits per value, or None if values differ in size."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        of = _bits(kind.value_type)
        return None if of is None else of * kind.list_size
    try:
        return int(kind.bit_width)
    except ValueError:
        return None


def _ends(passes: Passes, nbytes: float, blocks: int | None) -> list[int]:
    """Returns the end step (exclusive) of each block."""
    steps = passes.steps
    given = blocks is not None
    each = max(1, -(-steps // (blocks or max(_LEAST_BLOCKS, int(nbytes / _BLOCK_BYTES)))))
    if not given or each > passes.together:
        each += -each % passes.together
    return [min(start + each, steps) for start in range(0, steps, each)]


def shard(reader: Reader) -> Reader:
    """Returns the shard of a reader for this Ray Train worker. Call it in the training loop.

    It calls `reader.shard` with the world size and rank of `ray.train.get_context()`. Shards begin at the position of
    the reader's next pass. To resume, load the state of any worker into the whole reader first. The number of workers
    may then differ from before (see `Reader.state_dict` for the orders that support this).

    Args:
        reader: The whole reader, local or served, with a seed if it shuffles. All workers create the same one.

    Returns:
        A reader of the shard.

    Raises:
        ImportError: If Ray Train isn't installed.
        RuntimeError: If called outside of a Ray Train worker.
        StateError: If the loaded state can't be divided among this many workers.
        TypeError: If `reader` isn't a reader.
        UnsupportedError: If it wraps the batches of another reader.
        ValueError: If the seed was drawn at random, or if a shard would have no batches. The message suggests valid
            numbers.

    Example:
        >>> def train(config):  # doctest: +SKIP
        ...     reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)
        ...     if checkpoint := ray.train.get_checkpoint():
        ...         reader.load_state_dict(state_in(checkpoint))
        ...     for batch in fastpipe.ray.shard(reader):
        ...         ...
    """
    passes = whole_reader(
        reader,
        "shard",
        "shard the underlying reader first, then wrap its batches: rebatch(shard(reader), ...)",
    )
    try:
        import ray.train
    except ImportError as error:
        raise ImportError("fastpipe.ray.shard requires Ray Train: pip install 'fastpipe-data[ray]'") from error

    context = ray.train.get_context()
    share = passes.share(context.get_world_size(), context.get_world_rank()).origin
    assert isinstance(share, Reader)
    return share
