"""A reader's epoch as a dataset of Ray Data, and its shares for the workers of Ray Train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex

from fastpipe._arrow.schema import require_pyarrow
from fastpipe._reader.ordering import within
from fastpipe._reader.passes import Passes
from fastpipe._reader.reader import Reader
from fastpipe._reader.state import LARGEST_EPOCH
from fastpipe.errors import UnsupportedError
from fastpipe.ray._arguments import at_least, whole_reader

if TYPE_CHECKING:
    import pyarrow as pa
    import ray.data

# Without num_blocks a block has about this many bytes, and there are this many at least if there are steps for them:
# whatever the cluster, so that blocks are the same on each.
_BLOCK_BYTES = 64 << 20
_LEAST_BLOCKS = 16


def dataset(
    reader: Reader, *, epoch: SupportsIndex = 0, num_blocks: SupportsIndex | None = None, **options: Any
) -> ray.data.Dataset:
    """An epoch of a reader as a `ray.data.Dataset` (extras `ray` and `arrow`).

    Each read task reads a stretch of the reader's order. So rows are those of the reader, in its order, and each pass
    over the data set has the same ones in the same order, bit for bit, whatever of it is read in parallel, again, or on
    another cluster: the data set's own context says `preserve_order`, and so do those of data sets that are made of it.
    What Ray Data does with the rows may change their order: `random_shuffle` does.

    Rows are Arrow's, as `Reader.to_reader` has them, with its schema: `iter_batches(batch_format="pyarrow")` yields
    them as they are.

    Args:
        reader: of any source, or of a service (`fastpipe.connect`): then its servers make the batches. It is pickled.
        epoch: which one. Where the reader itself is doesn't matter.
        num_blocks: read tasks, at most one a batch. None for blocks of about 64 MiB, 16 at least, but none of less than
            a window that is shuffled, which each task would decode: the same number on each cluster.
        **options: further arguments of `ray.data.read_datasource`, such as `num_cpus` or `concurrency`. A task reads
            with as many threads as it has CPUs, unless the reader was told how many.

    Returns:
        The data set. Its number of rows is known; its bytes are too if each row takes as many, and are estimated from
        the epoch's first batch else.

    Raises:
        ImportError: if Ray Data or pyarrow isn't installed.
        TypeError: if it is no reader, or can't be pickled.
        UnsupportedError: if the reader has loaded a state, isn't a `Reader` itself, but makes other batches of one's,
            or holds data that Ray can't pickle.
        ValueError: if a number is out of range, or Arrow has no such name or size.

    Example:
        >>> reader = fastpipe.read_avro("data/*.avro", batch_size=1024, shuffle=True, seed=7)  # doctest: +SKIP
        >>> ds = fastpipe.ray.dataset(reader, epoch=3)  # doctest: +SKIP
        >>> for batch in ds.iter_batches(batch_size=256, batch_format="pyarrow"):  # doctest: +SKIP
        ...     ...
    """
    passes = whole_reader(
        reader,
        "dataset",
        "give the reader beneath, and let Ray Data make batches of another size: ds.iter_batches(...)",
    )
    number = within("epoch", epoch, 0, LARGEST_EPOCH)
    blocks = None if num_blocks is None else at_least("num_blocks", num_blocks, 1)
    if passes.loaded:
        raise UnsupportedError(
            "the reader has loaded a state, and a data set is of a whole epoch: make it of a reader without one, or"
            " iterate over this one"
        )
    require_pyarrow()
    try:
        import ray.data
    except ImportError as error:
        raise ImportError("fastpipe.ray.dataset needs Ray Data: pip install 'fastpipe-data[ray]'") from error

    from fastpipe.ray._datasource import FastpipeDatasource

    schema = passes.arrow_schema()
    rows = _rows(passes, number)
    row_bytes = _row_bytes(passes, number, schema)
    ends = _ends(passes, rows * row_bytes, blocks)
    source = FastpipeDatasource(reader, number, ends, passes.batch_size, rows, row_bytes, schema)
    made = ray.data.read_datasource(source, override_num_blocks=max(len(ends), 1), **options)
    # The data set's own copy, which those that are made of it copy.
    made.context.execution_options.preserve_order = True
    return made


def _rows(passes: Passes, epoch: int) -> int:
    """Rows of an epoch: only its last batch may be shorter than the others."""
    return (passes.steps - 1) * passes.batch_size + passes.rows_of(epoch, passes.steps - 1) if passes.steps else 0


def _row_bytes(passes: Passes, epoch: int, schema: pa.Schema) -> float:
    """Bytes of a row: exactly, if all have as many; else about, as the first batch has them."""
    bits = [_bits(field.type) for field in schema]
    fixed = [of for of in bits if of is not None]
    if len(fixed) == len(bits):
        return sum(fixed) / 8
    if not passes.steps:
        return 0.0
    (first,) = passes.record_batches(epoch, 0, 1)
    return int(first.nbytes) / max(int(first.num_rows), 1)


def _bits(kind: pa.DataType) -> int | None:
    """Bits of a value; None if they differ."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        of = _bits(kind.value_type)
        return None if of is None else of * kind.list_size
    try:
        return int(kind.bit_width)
    except ValueError:
        return None


def _ends(passes: Passes, nbytes: float, blocks: int | None) -> list[int]:
    """The step behind the last one of each block."""
    steps = passes.steps
    given = blocks is not None
    each = max(1, -(-steps // (blocks or max(_LEAST_BLOCKS, int(nbytes / _BLOCK_BYTES)))))
    if not given or each > passes.together:
        each += -each % passes.together
    return [min(start + each, steps) for start in range(0, steps, each)]


def shard(reader: Reader) -> Reader:
    """The share of a reader that this worker of Ray Train trains on; to be called within the training loop.

    It is `reader.shard` with the world size and the rank of `ray.train.get_context()`. Shares begin where the reader's
    next pass would: so a state of any worker, loaded into the whole reader first, goes on with however many workers
    there are now (see `Reader.state_dict` for orders in which that holds).

    Args:
        reader: the whole, with a seed if it shuffles: a local one, or one that is served. All workers make the same.

    Returns:
        A reader of the share.

    Raises:
        ImportError: if Ray Train isn't installed.
        RuntimeError: outside of a worker of Ray Train.
        StateError: if the loaded state can't be shared out so.
        TypeError: if it is no reader.
        UnsupportedError: if it isn't a `Reader` itself, but makes other batches of one's.
        ValueError: if the seed was drawn, or shares would have no batch; it names what would do.

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
        "shard that, and make of its batches what this makes of them: rebatch(shard(reader), ...)",
    )
    try:
        import ray.train
    except ImportError as error:
        raise ImportError("fastpipe.ray.shard needs Ray Train: pip install 'fastpipe-data[ray]'") from error

    context = ray.train.get_context()
    share = passes.share(context.get_world_size(), context.get_world_rank()).origin
    assert isinstance(share, Reader)
    return share
