"""Reading Avro container files, and inferring what is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from fastpipe._arguments import flag, names
from fastpipe._ordering import Ordering, ShardBy, Shuffle, Uneven
from fastpipe._running import Running
from fastpipe._sources import Paths, expand
from fastpipe.avro._data import AvroData
from fastpipe.avro._index_cache import IndexCache
from fastpipe.reader import Reader, made
from fastpipe.specs import Features, Spec

__all__ = ["infer_features", "read_avro"]


def read_avro(
    source: Paths,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: Sequence[str] | None = None,
    batch_size: int,
    drop_last: bool = False,
    shuffle: bool | Shuffle = False,
    shuffle_buffer: int | None = None,
    seed: int | None = None,
    epochs: int | None = 1,
    rank: int = 0,
    world_size: int = 1,
    shard_by: ShardBy | None = None,
    uneven: Uneven = "drop",
    num_threads: int | Literal["auto"] = "auto",
    prefetch: int | None = None,
    memory_limit: int | str | None = None,
    progress: bool = False,
    index_cache: IndexCache = None,
) -> Reader:
    """Reads Avro files as batches of NumPy arrays.

    Headers of files and of blocks are read at once, data as it is asked for: a missing or truncated file, a feature
    that a schema lacks and a spec that doesn't fit are errors here, damage inside of blocks is one where it stands.

    Args:
        source: a path, a glob (`"data/*.avro"`), a directory (all `*.avro` below it), or a list of these. Directories
            and globs leave out files and folders that begin with `_` or `.` (what isn't committed), follow links, and
            visit each folder once. `~` is the home directory. Files may have different schemas, as long as each has the
            features; the first decides which symbols enum codes stand for.
        features: spec of each wanted feature, by name. Fields of nested records are named with dots (`user.age`), below
            a map come `keys` and `values` (`scores.keys`, `scores.values`), items of arrays add nothing to the name. If
            the files' records aren't of a record type, their only feature is `value`. A spec's `field` names the path
            instead, so that several features can read one field.
        columns: names out of what `infer_features` finds, instead of `features`; a name stands for all that is nested
            in it. With neither, all of it is read. What isn't wanted is skipped, not decoded.
        batch_size: rows a batch.
        drop_last: whether to leave out a last batch of fewer rows.
        shuffle: False: files, blocks and records as they stand. True or `"window"`: all blocks of the data set in a
            random order, cut into windows of `shuffle_buffer` rows, each of which is a uniform permutation. `"block"`:
            block sampling; files and blocks as they stand pass through a pool, and each row is the next record of a
            block that is drawn in proportion to what it has left. `"buffer"`: what
            `tf.data.Dataset.shuffle(shuffle_buffer)` yields, in distribution. Each row stands in exactly one batch an
            epoch, in all of them.
        shuffle_buffer: rows of a window (rounded up to whole batches), a pool (at least) or a buffer; by default as
            many as 16 batches or 64 average blocks have, whichever is more.
        seed: of the shuffling, 0 to 2^64 - 1. One is drawn by default, and shown by `reader.seed`.
        epochs: how often each pass goes through the data, each time in another order; None for without end.
        rank: which share of the batches to yield, 0 to `world_size - 1`.
        world_size: number of shares.
        shard_by: what ranks share out. `"window"` (the default with `shuffle=True` and without shuffling): each decodes
            windows, or stretches as long, of its own. `"block"` (the default with `"block"` and `"buffer"`): each has
            every `world_size`-th block, and an order of its own. `"batch"`: at each step all ranks together have the
            next `world_size` batches; each rank then reads nearly all blocks.
        uneven: what becomes of batches that can't be shared out evenly. `"drop"`: they are left out, fewer than there
            are ranks (with `shard_by="block"`, what ranks have above the one with fewest). `"pad"`: ranks without one
            get one of repeated rows; all batches are filled up to `batch_size` rows, with rows from all over their
            blocks, and have an entry `"valid"`, a bool array [batch_size] that is False for what was filled in.
            `"allow"`: some ranks have more batches, so whoever waits for all ranks at each step will hang. With one
            rank nothing is dropped.
        num_threads: threads that decode. `"auto"`: as many as pay, of the processors that the process may use; fewer
            when the consumer is slower than they are. Changes nothing of what is yielded.
        prefetch: batches decoded ahead of the consumer, at least one; None for as many as keep the threads busy.
            Changes nothing of what is yielded.
        memory_limit: bytes that are held for blocks and for batches that aren't yielded yet, as a number or with a unit
            (`"512MB"`, `"1.5GiB"`); None for no limit. Bounds how far ahead is read, and changes nothing of what is
            yielded. What the process and the index take comes on top, and what the consumer holds. A block that alone
            takes more than the limit when it is decompressed is a `LimitError`. Without a limit the
            process keeps up to 128 MB for readers to come, until one with a limit begins.
        progress: whether to show a progress bar (extra `progress`).
        index_cache: a directory in which the places of all blocks are kept, so that the next opening needn't look for
            them again; True for one in the user's cache directory. A file's entry is keyed by its path, size and time
            of modification, and made anew when these or the file's sync marker are others, or when it is damaged
            (which is logged as a warning to the logger `fastpipe`). None is kept of files that were modified less than
            two seconds ago, whose next change could go unnoticed, nor of files up to 64 KiB, which are read whole with
            their header anyway. None for no cache.

    Returns:
        A `Reader`; iterating over it yields dicts from feature name to array or batch form (`fastpipe.batch`).

    Raises:
        MissingFileError: if a file isn't there, or a link leads nowhere.
        MalformedFileError: if a header is damaged or a file cut short.
        SchemaError: if a feature isn't in a schema or its spec doesn't fit.
        UnsupportedError: for what isn't read: other codecs, unions of several types besides null, URLs.
        StorageError: if storage fails, a folder can't be read, a file changed, or an index has to be kept and the
            cache's directory can't be written.
        LimitError: if a schema or a header exceeds a limit, such as that of columns which are inferred. From
            `iter(reader)`, if `memory_limit` is below the least with which this can be read: it names that, and the
            largest `shuffle_buffer` that would fit. Without `memory_limit`, if the order of a window, pool or buffer
            takes more than half of the memory of this machine or container.
        TypeError: if an argument is of the wrong type; the message names it.
        ValueError: if arguments exclude each other or are out of range.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_avro(
        ...     "data/*.avro", columns=["user.age", "label"], batch_size=1024, shuffle=True, seed=7
        ... )
        >>> for batch in reader:
        ...     ages, labels = batch["user.age"], batch["label"]
        >>> len(reader), labels.dtype, labels.shape
        (6, dtype('float32'), (1024,))
    """
    if features is not None and columns is not None:
        raise ValueError(
            "give features or columns, not both: features says the form of each, columns takes what is inferred"
        )
    chosen = None if columns is None else names("columns", columns)
    ordering = Ordering.checked(
        batch_size=batch_size,
        drop_last=drop_last,
        shuffle=shuffle,
        shuffle_buffer=shuffle_buffer,
        seed=seed,
        rank=rank,
        world_size=world_size,
        shard_by=shard_by,
        uneven=uneven,
    )
    running = Running.checked(num_threads=num_threads, prefetch=prefetch, memory_limit=memory_limit)
    wanted = None if features is None else Features(features)
    if wanted is not None and not wanted:
        raise ValueError("features is empty: name at least one")
    flag("progress", progress)
    files = expand(source)
    if wanted is not None:
        data = AvroData(files, wanted, index_cache)
    else:
        if chosen is not None and not chosen:
            raise ValueError("columns is empty: name at least one")
        data = AvroData.inferring(files, chosen, index_cache)
    return made(data, ordering=ordering, running=running, progress=progress, epochs=epochs)


def infer_features(source: Paths, columns: Sequence[str] | None = None, *, index_cache: IndexCache = None) -> Features:
    """Finds the features of Avro files; printed, they are Python code to paste.

    Types and nulls follow from the first file's schema: nullable fields are masked, records of exactly `indices0`,
    `indices1`, ... and `values` are sparse. A recursive record has the columns of its outermost level. Lengths of
    arrays are not in a schema, so data are looked at (all of it up to 16 MiB, else 64 blocks spread over it): a
    dimension whose arrays all have the same length, 16 arrays at least, is taken to be fixed, of the 31 innermost ones.
    Where that turns out wrong later, `ShapeError` says so and a `RaggedSpec` reads it. Damaged blocks are passed over,
    with a warning to the logger `fastpipe`; where storage fails, so does this.

    Args:
        source: as in `read_avro`.
        columns: only these, and what is nested in them; at least one.
        index_cache: as in `read_avro`.

    Returns:
        Specs by feature name, in the order of the schema.

    Raises:
        UnsupportedError: if a wanted field is of a type that isn't inferred: a union of several types besides null, a
            record within another of its own (recursive) type, or a logical type; the message says how underlying values
            and single fields can be asked for in `features`.
        LimitError: if the schema has more columns than are inferred, or nests deeper.
        TypeError: if an argument is of the wrong type.
        ValueError: if `columns` is empty.
        FastpipeError: as in `read_avro`.

    Example:
        >>> import fastpipe
        >>> fastpipe.infer_features("data/*.avro", ["user_embedding", "country"])
        {
            "user_embedding": fastpipe.DenseSpec((64,), "float32"),
            "country": fastpipe.DenseSpec((), "string", nulls="mask"),
        }
    """
    chosen = None if columns is None else names("columns", columns)
    if chosen is not None and not chosen:
        raise ValueError("columns is empty: name at least one")
    return AvroData.inferring(expand(source), chosen, index_cache).features
