"""Shares of a reader for the workers of Ray Train."""

from __future__ import annotations

from fastpipe._reader.reader import Reader
from fastpipe.ray._arguments import whole_reader

__all__ = ["shard"]


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
