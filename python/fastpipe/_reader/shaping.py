"""The methods of a reader that select, change or group its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from fastpipe._arguments import shown
from fastpipe._reader import sampling as _sampling
from fastpipe._reader import splits as _splits
from fastpipe._reader.caching import cache
from fastpipe._reader.filtering import filter_rows
from fastpipe._reader.holes import filter_batches
from fastpipe._reader.left_out_steps import without_steps
from fastpipe._reader.mapped import Mapped, map_passes
from fastpipe._reader.packing import bucket, pack
from fastpipe._reader.rebatch import Rebatcher
from fastpipe.specs import Features

if TYPE_CHECKING:
    import os

    import numpy.typing as npt

    from fastpipe._expressions import Expr
    from fastpipe._reader.grouping import OnLong
    from fastpipe._reader.reader import Reader


class Shaping:
    """What makes a reader or a map from a reader. The base class of `Reader`."""

    def sample(
        self,
        rows: int,
        *,
        replace: bool = False,
        seed: int | None = None,
        part: int = 0,
        stratify: str | Expr | npt.ArrayLike | None = None,
        balance: str | Expr | npt.ArrayLike | None = None,
        weights: str | Expr | npt.ArrayLike | None = None,
        redraw: bool = False,
        batch_size: int | None = None,
    ) -> Reader:
        """Draws a random sample of this reader's rows: uniform, stratified, balanced or weighted.

        Works with any source. The rows are drawn here, once. The result is a smaller dataset with this reader's order,
        ranks, threads, limits and epochs: a sample of a shuffled reader is shuffled. It has states, and it can be
        filtered, split, served and sampled again. Without shuffling, rows keep the order of the source. Units (blocks,
        row groups, CSV chunks) without sampled rows aren't read.

        With `redraw`, each epoch is a new sample of the same size: a pure function of seed and epoch. Its first epoch
        has the rows of the same sample without `redraw`. Only a reader that isn't shuffled can do so, and rows of the
        result can't be selected further.

        Args:
            rows: Number of rows to draw, 1 to 2^31. Without `replace`, at most the number of rows in the dataset.
            replace: Whether a row may be drawn several times (a bootstrap sample). Defaults to False.
            seed: Seed of the sample, 0 to 2^64 - 1. By default a random seed is drawn. A reader with several ranks
                needs one. The seed of the shuffle remains that of this reader.
            part: Index of the part, 0 to 2^20. Without `replace`, parts with the same seed and size have no row in
                common: part `k` is drawn after parts 0 to `k - 1`. Use parts for several devices, or for training and
                validation. With `replace`, parts are independent. Defaults to 0.
            stratify: Name of a feature or an expression such as `col("label")`, which is evaluated once for all rows,
                or an array with one value per row. Draws from each group of rows with equal values in proportion to
                its rows. Counts are rounded up or down at random, so that each row is equally likely. Defaults to
                None.
            balance: Like `stratify`, but draws equally many rows of each value, or one row more of some values.
                Defaults to None.
            weights: Name of a feature, an expression, or an array with one number per row, finite and at least 0. Draws
                rows in proportion to these weights. Without `replace`, each draw is from the remaining rows. Defaults
                to None.
            redraw: Whether to draw another sample for each epoch. Excludes `stratify`, `balance` and `weights`.
                Defaults to False.
            batch_size: Rows per batch, 1 to 2^31 - 1. Defaults to this reader's batch size.

        Returns:
            A reader of the sample. With `redraw`, its `seed` is the seed of the samples.

        Raises:
            ImportError: If an expression is passed and pyarrow isn't installed.
            SchemaError: If `stratify`, `balance` or `weights` isn't the name of a feature, or its expression doesn't
                fit the features.
            TypeError: If an argument has the wrong type.
            UnsupportedError: If this reader reads from servers or, with `redraw`, is shuffled. Readers of servers
                support `redraw`.
            ValueError: If an argument is out of range, if there are too few rows, in all or of a value of `balance`, if
                a value is null, if a weight is negative or not finite, or if this reader draws a sample for each epoch.

        Example:
            >>> import fastpipe
            >>> from fastpipe import col
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label", "age"], batch_size=64, shuffle=True)
            >>> half = reader.sample(reader.num_rows // 2, seed=7)
            >>> rest = reader.sample(reader.num_rows // 2, seed=7, part=1)
            >>> half.num_rows + rest.num_rows == reader.num_rows
            True
            >>> balanced = reader.sample(1000, balance=col("label") > 0, seed=7)
            >>> balanced.filter(col("label") > 0).num_rows
            500
        """
        return _sampling.sample(
            _reader(self),
            rows,
            replace=replace,
            seed=seed,
            part=part,
            stratify=stratify,
            balance=balance,
            weights=weights,
            redraw=redraw,
            batch_size=batch_size,
        )

    def take(self, rows: npt.ArrayLike, *, batch_size: int | None = None) -> Reader:
        """Selects rows by index. Works with any source.

        The result is a smaller dataset with this reader's order, ranks, threads, limits and epochs. It has states, and
        it can be filtered, split and sampled. A row is repeated as often as its index is. Without shuffling, rows have
        the sequence of their indices. With shuffling, each occurrence is in one batch of an epoch.

        Each batch of a sequence that doesn't ascend opens the units (blocks, row groups, CSV chunks) of its rows. A
        unit is read again if later batches return to it. Sort the indices, or shuffle, to read each unit once.

        Args:
            rows: Row indices, integers `[n]` in any order, at least one. Rows of this reader are counted from 0 over
                all units or files; rows of `take` in their sequence.
            batch_size: Rows per batch, 1 to 2^31 - 1. Defaults to this reader's batch size.

        Returns:
            A reader of the selected rows.

        Raises:
            TypeError: If an argument has the wrong type.
            UnsupportedError: If this reader reads from servers, or if the source can't read rows in this sequence.
            ValueError: If an index is out of range, if `rows` is empty, or if this reader draws a sample for each
                epoch.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=64)
            >>> taken = reader.take([7, 3, 3, 100])
            >>> taken.num_rows, [taken.locate(0, row).row for row in range(4)]
            (4, [7, 3, 3, 100])
        """
        return _sampling.take(_reader(self), rows, batch_size=batch_size)

    def split(self, *fractions: float, by: str | None = None, seed: int = 0) -> tuple[Reader, ...]:
        """Divides the rows into parts, for example for training and validation. Works with any source.

        The part of a row is a pure function of the seed and the row's key. So no row changes its part when rows or
        files are added, when the dataset is read with other options, or when its folder moves. The sizes of the parts
        are random: a part with a fraction f of n keys has about n f ± sqrt(n f (1 - f)) of them. A part may be empty.

        The key is the value of `by` or, without it, the place of the row: the name of the row's file and the index of
        the row in it, or the index of the row in a source without files. A file's name includes folders such as
        `day=1` directly above it, but no other folders.

        A part is a smaller dataset with this reader's order, ranks, threads, limits and epochs. It has states and can
        be shuffled, sampled, served and split again. Its batches are full. Its units (blocks, row groups, CSV chunks)
        are read as a whole to get some of their rows. A unit without rows of the part isn't read.

        The hash of a key is XXH3 (64 bits) with the seed. It hashes integers, bools and times as int64 in eight bytes,
        the lowest first; text and bytes as they are; null as no bytes with `seed + 1`; and the index of a row with the
        hash of the file's name as the seed. Part `i` has the hashes below floor(2^64 (f_0 + ... + f_i)) that earlier
        parts don't have. So fractions at the end can be divided further without a change of earlier parts.

        Args:
            fractions: Fraction of each part, above 0. They must sum to 1.
            by: Name of a feature. Rows with equal values are in the same part, so that, for example, no user is in
                both training and validation. The feature must have one integer, bool, date, time, text or byte string
                per row, which must not depend on the epoch. It is read once for all rows, without other features if
                the source can leave them out (see `filter`). A decimal counts as its scaled integer. Defaults to None.
            seed: Seed of the hash, 0 to 2^64 - 1. Defaults to 0 instead of a random seed, so that another program
                finds the same parts.

        Returns:
            A reader of each part.

        Raises:
            SchemaError: If `by` isn't the name of a feature with one such value per row.
            TypeError: If an argument has the wrong type.
            UnsupportedError: If this reader reads from servers.
            ValueError: If an argument is out of range, if fractions don't sum to 1, if this reader draws a sample for
                each epoch, or if files in different folders have the same name and `by` is None.
            FastpipeError: If the data can't be read.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256, shuffle=True, seed=7)
            >>> train, valid = reader.split(0.9, 0.1)
            >>> train.num_rows, valid.num_rows
            (1802, 198)
            >>> by_day = reader.split(0.8, 0.1, 0.1, by="day", seed=1)
            >>> sum(part.num_rows for part in by_day)
            2000
        """
        return _splits.split(_reader(self), fractions, by, seed)

    def folds(
        self, num_folds: int, *, by: str | None = None, stratify: str | None = None, seed: int = 0
    ) -> list[tuple[Reader, Reader]]:
        """Divides the rows into folds for cross-validation. Works with any source.

        Each row is in one fold. Without `stratify`, the fold of a row is that of `split` with equal fractions, so it
        doesn't change when data is added. With `stratify`, each fold has the same number of rows of each stratum, give
        or take one: rows of a stratum are sorted by the hash of their places, and dealt to the folds in turn. Adding
        data may then move rows to other folds.

        Args:
            num_folds: Number of folds, 2 to 2^16. A fold may be empty if there are few rows.
            by: Name of a feature, as for `split`. Rows with equal values are in the same fold. Defaults to None.
            stratify: Name of a feature whose values are the strata, with the types that `by` may have. Excludes `by`.
                Defaults to None.
            seed: Seed of the hash, 0 to 2^64 - 1. Defaults to 0.

        Returns:
            For each fold, a reader of all other rows and a reader of the fold's rows.

        Raises:
            SchemaError: If `by` or `stratify` isn't the name of a feature with one such value per row.
            TypeError: If an argument has the wrong type.
            UnsupportedError: If this reader reads from servers.
            ValueError: If an argument is out of range, if `by` and `stratify` are passed, if this reader draws a
                sample for each epoch, or if files in different folders have the same name and their places are needed.
            FastpipeError: If the data can't be read.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256)
            >>> for train, valid in reader.folds(4, stratify="city"):
            ...     print(train.num_rows, valid.num_rows)
            1500 500
            1500 500
            1500 500
            1500 500
        """
        return _splits.folds(_reader(self), num_folds, by, stratify, seed)

    def without(self, *, rows: npt.ArrayLike | None = None, steps: Iterable[int] | slice | None = None) -> Reader:
        """Leaves out rows by index, or the batches of some steps. Works with any source.

        Leave out rows if they are known to be wrong: the remaining rows make other batches. Leave out steps to skip the
        batches at which a loss spiked: all other batches keep their rows and their sequence. The batches that are left
        out aren't read.

        `len`, `batch_at` and `locate` of a reader without some steps count only the remaining batches. Its states are
        those of this reader: their `step` counts all batches of the epoch. So this reader, and this reader without
        other steps, can resume from them, and the other way round.

        Args:
            rows: Row indices, integers `[n]` in any order. Rows of this reader are counted from 0 over all units or
                files. A row may be repeated. Excludes `steps`.
            steps: Indices of batches that are left out in each epoch, as `batch_at` of this reader counts them: a
                range, a slice or integers in any order. A step may be repeated. At least one step must remain. With
                several ranks, each rank leaves out these steps of its own, so the ranks stay in step.

        Returns:
            A reader of the remaining rows or batches, with this reader's order, ranks, threads, limits and epochs. It
            starts at its beginning.

        Raises:
            TypeError: If `rows` isn't a list or an array of integers, if `steps` isn't an iterable of integers or a
                slice, or if not exactly one of them is passed.
            UnsupportedError: If this reader reads from servers, is a mixture or leaves out steps, and `rows` are
                passed.
            ValueError: If an index is out of range, if this reader draws a sample for each epoch and `rows` are passed,
                or if no step would remain.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256)
            >>> reader.without(rows=[12, 99]).num_rows
            1998
            >>> len(reader), len(reader.without(steps=range(3, 5)))
            (8, 6)
        """
        if rows is not None and steps is None:
            return _splits.without(_reader(self), rows)
        if steps is not None and rows is None:
            return without_steps(_reader(self), steps)
        raise TypeError("without() takes either rows or steps, such as without(steps=range(340, 360))")

    @overload
    def filter(self, condition: Expr, *, mode: Literal["even"] = "even") -> Reader: ...

    @overload
    def filter(self, condition: Expr, *, mode: Literal["holes", "marks"]) -> Mapped: ...

    def filter(self, condition: Expr, *, mode: Literal["even", "holes", "marks"] = "even") -> Reader | Mapped:
        """Selects the rows that pass a condition. Works with any source.

        The condition is evaluated once, here: a sequential pass reads the features that it names, with this reader's
        threads, `memory_limit` and `progress`, and stores a bit per row. Files, SQL, tables, and custom sources with
        `select` read or decode only these features; other sources read all of them. The result is a smaller dataset
        with this reader's order, ranks, threads, limits and epochs. It has states, and it can be shuffled, sampled,
        split, served and filtered again. Its batches are full. Units (blocks, row groups, CSV chunks) in which no row
        passes aren't read again. If no row passes, `filter` issues a `RowsLeftOutWarning`. With `index_cache`, the bits
        are kept in that directory, and a later filter of the same files with the same condition reads only the bits.

        A row passes if the condition is true for it, not if it is null. For values that a source draws again in each
        epoch, such as negatives, the values of epoch 0 count.

        With `mode="holes"`, nothing is read here. The condition is evaluated for each batch when it is yielded, also
        for readers of servers, samples and mixtures. Batches keep their steps and have fewer rows, some of them none.
        With `mode="marks"`, batches keep all rows, too, and the bool array `valid` is True for those that pass. So
        compiled programs get arrays of one size.

        Args:
            condition: A condition on features with one value per row: see `fastpipe.col`.
            mode: `"even"` selects the passing rows first, so that batches are full. `"holes"` doesn't, so that batches
                differ in size. `"marks"` keeps all rows. Defaults to `"even"`.

        Returns:
            A reader of the rows that pass. With `"holes"` and `"marks"`, a map, a `fastpipe.typing.Mapped`.

        Raises:
            ImportError: If pyarrow isn't installed.
            SchemaError: If the condition names other features, or combines values of different types, or a feature is
                named `valid` with `mode="marks"`. No row is read then.
            TypeError: If the argument isn't a condition.
            UnsupportedError: If this reader reads from servers.
            ValueError: If this reader draws a sample for each epoch, or if no rank would get a batch.
            ValueRangeError: If an integer that the condition computes doesn't fit into 64 bits.
            FastpipeError: If the data can't be read.

        Example:
            >>> import fastpipe
            >>> from fastpipe import col
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["age", "label"], batch_size=256, shuffle=True)
            >>> young = reader.filter(col("age").is_between(18, 30) & (col("label") > 0))
            >>> 0 < young.num_rows < reader.num_rows
            True
        """
        if mode in ("holes", "marks"):
            return filter_batches(_reader(self), condition, marks=mode == "marks")
        if mode != "even":
            raise ValueError(f'mode must be "even", "holes" or "marks"; got {shown(mode)}')
        return filter_rows(_reader(self), condition)

    def cache(self, directory: str | os.PathLike[str] | None = None, *, max_bytes: int | str | None = None) -> Reader:
        """Reads all rows once, here, and keeps them in memory or in a file, so that later passes are fast.

        The result has this reader's order, ranks, threads, limits and epochs, and begins at its beginning. It has the
        same batches, states, locations and splits. Only `partition` may divide it at other units. Cache a reader of a
        few gigabytes whose rows are slow to decode or to fetch. Filter it and select its columns before.
        Later changes of its files aren't noticed.

        Rows in memory take the bytes of their batches, in addition to `memory_limit`. Each rank and each process keeps
        a copy, and pickling the reader copies the rows. Processes share a file, which is mapped into memory.

        Args:
            directory: Folder for the file, which is created if necessary. Requires a dataset of local files or custom
                units. The name of the file has a digest of the paths, sizes and times of the files (or the fingerprint
                of the units), the features and their settings, so other datasets may use the same folder. A file that
                another process wrote is used, and an incomplete one is replaced. fastpipe never removes files of other
                datasets, or the file `.fastpipe-*.tmp` of a program that was killed while it wrote. Defaults to None:
                the rows are in memory.
            max_bytes: Maximum size of the rows: a number of bytes, or a string such as "2GB". Defaults to None: no
                limit.

        Returns:
            A reader of the kept rows.

        Raises:
            ImportError: If pyarrow isn't installed.
            LimitError: If the rows take more than `max_bytes`.
            StorageError: If the file can't be written or read.
            TypeError: If an argument has the wrong type.
            UnsupportedError: If this reader reads from servers, draws values again in each epoch (such as negatives),
                has a feature that Arrow can't keep exactly, which the message names, or if `directory` is passed and
                the dataset doesn't consist of local files or custom units.
            FastpipeError: If the data can't be read.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_csv("rides.csv", batch_size=256, shuffle=True, seed=7)
            >>> cached = reader.cache()
            >>> cached.load_state_dict(reader.state_dict())
            >>> bool((next(iter(cached))["distance"] == next(iter(reader))["distance"]).all())
            True
        """
        return cache(_reader(self), directory, max_bytes)

    def rebatch(
        self,
        batch_size: int,
        *,
        shuffle_buffer: int = 0,
        seed: int | None = None,
        epoch: int | None = None,
        drop_last: bool = False,
    ) -> Rebatcher:
        """Starts a pass, as `iter(reader)` does, and yields its rows in batches of another size, in order or shuffled.

        `Rebatcher` describes the order of the rows and the memory of the buffer. It also repacks batches from other
        iterables, for example batches whose rows were filtered.

        Args:
            batch_size: Rows per batch, 1 to 2^31 - 1. The last batch may have fewer.
            shuffle_buffer: Number of rows from which each row is drawn, up to 2^31 - 1, or 0 to keep the order.
                Defaults to 0.
            seed: Seed of the shuffle, 0 to 2^64 - 1. By default a random seed is drawn, which `Rebatcher.seed` returns.
            epoch: Epoch of the shuffle, 0 to 2^63 - 1. Each epoch is shuffled differently. Defaults to the epoch with
                which the pass begins.
            drop_last: Whether to drop the last batch if it has fewer than `batch_size` rows. Defaults to False.

        Returns:
            An iterator of batches, with states: see `Rebatcher.load_state_dict`.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=777)
            >>> [len(batch["label"]) for batch in reader.rebatch(4096, shuffle_buffer=10_000, seed=7)]
            [4096, 2048]
        """
        return Rebatcher(
            _reader(self),
            batch_size,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
            epoch=_reader(self)._cursor.next_start()[0] if epoch is None else epoch,
            drop_last=drop_last,
        )

    def map(
        self,
        function: Callable[..., Any],
        *,
        num_threads: int = 0,
        prefetch: int = 2,
        seed: int | None = None,
        features: Features | None = None,
        num_processes: int = 0,
    ) -> Mapped:
        """Returns an iterable of the batches after `function` changed them. It has states and works with adapters.

        The map keeps the promises of this reader: the result for a batch depends only on the batch and the function, so
        `state_dict` resumes exactly, at any number of threads. Batches are yielded in the order of the reader. Its
        passes are passes of this reader, which has one active pass: iterate either over the map or over the reader.
        Several maps of a map are one after another.

        The function gets a batch, a dict whose arrays belong to it: it may change them, keep them, or return them. With
        `on_uneven="pad"`, the batch has the column `valid`. The function may return a dict with other features and
        another number of rows, or any other object. `len`, steps and states count batches, not rows. To
        get batches of equal size from rows that the function selects, use `Rebatcher(mapped, batch_size)`, which also
        has states.

        With threads, calls overlap while they release the GIL, as NumPy's functions do for large arrays. The function
        must then be safe to call from several threads. It must be a pure function of its arguments, apart from caches.

        With processes, calls overlap even if they hold the GIL. Batches and results are pickled and sent through pipes,
        which costs more than a thread if the function is quick. The processes are spawned with the first batch, which
        takes about a second, and end when the map is closed or dropped. So programs need the usual
        `if __name__ == "__main__":`.

        With `seed`, the function gets a second argument, a `numpy.random.Generator` (Philox). Its numbers depend only
        on the seed, the epoch, and the index of the batch among the batches of all ranks. So they don't depend on
        threads, restarts, or the number of ranks or of workers of a torch `DataLoader`. Only if each rank has its own
        units (`shard_by="block"`), another number of ranks gives other batches and other numbers.

        Args:
            function: Function `function(batch)`, or with a seed `function(batch, rng)`, which returns the object to
                yield.
            num_threads: Number of threads that call the function, 0 to 1024. Defaults to 0: `next` calls it in the
                consumer's thread.
            prefetch: Number of results, in addition to one for each thread, that are being made or waiting for the
                consumer, 0 to 1024. Without threads, results aren't made in advance. Defaults to 2.
            seed: Seed of the random numbers, 0 to 2^64 - 1. Defaults to None: the function gets no generator.
            features: Spec of each feature that the function returns, by name. Arrow, XGBoost, and JAX with a sharding
                or `pad_ragged` need them. They aren't checked against the results. Defaults to None: unknown.
            num_processes: Number of processes that call the function, 0 to 1024, in place of threads. `batch_at` calls
                it in this process. Defaults to 0.

        Returns:
            The map, a `fastpipe.typing.Mapped`.

        Raises:
            TypeError: If an argument has the wrong type, or the function can't be pickled for processes.
            ValueError: If a number is out of range, or threads and processes are asked for.

        Example:
            >>> import fastpipe
            >>> reader = fastpipe.read_avro("data/*.avro", columns=["label"], batch_size=1024, shuffle=True, seed=7)
            >>> def augment(batch, rng):
            ...     batch["noise"] = rng.normal(size=len(batch["label"])).astype("float32")
            ...     return batch
            >>> batches = reader.map(augment, num_threads=2, seed=3)
            >>> first = next(iter(batches))
            >>> state = batches.state_dict()
            >>> batches.load_state_dict(state)
            >>> rest = list(batches)
            >>> second = batches.batch_at(1, epoch=0)
            >>> len(batches), len(rest), bool((rest[0]["noise"] == second["noise"]).all())
            (6, 5, True)
        """
        return map_passes(_reader(self)._passes, self, function, num_threads, prefetch, seed, features, num_processes)

    def pack(
        self,
        columns: str | Sequence[str],
        length: int,
        *,
        window: int = 10_000,
        on_long: OnLong = "error",
        padded: bool = True,
        pad: float = 0,
    ) -> Mapped:
        """Packs rows such as tokenized documents into rows of a fixed number of items, so that little is padding.

        A pack has whole rows. They are chosen by best-fit decreasing (D. S. Johnson et al., Worst-case performance
        bounds for simple one-dimensional packing algorithms, 1974; H. Ding et al., Fewer truncations improve language
        modeling, 2024) among at least `window` consecutive rows, so a pack is filled to 99.9 % or more if most rows are
        much shorter than a pack. `plan` says how full packs are. In a pack, rows are in the sequence of the source.

        Packs are the same in each epoch. `batch_size`, `shuffle_buffer`, ranks and shards of this reader apply to
        packs: with `shuffle=True`, each epoch has another order of packs. (A `shuffle_buffer` that was passed is
        converted to packs.) So any batch can be read at once, a state resumes exactly, also with another number of
        ranks, and `len` is the same in each epoch. The lengths of all rows are read here, once, without other features
        if the source can leave them out. They take four bytes per row.

        The packs of a mixture have rows of one of its readers each: its weights then are shares of packs, and so of
        tokens. `fastpipe.mix` also mixes packs of several readers.

        Args:
            columns: Name of the feature to pack, an array of one ragged dimension in each row (`RaggedSpec((None,),
                ...)`), or a list of such features with equally many items, such as tokens and their weights. A null row
                is an empty one.
            length: Number of items in a pack, 1 to 2^31 - 1.
            window: Number of rows among which rows of a pack are chosen, 1 to 2^24. Units (blocks, row groups, CSV
                chunks) with fewer rows are joined. A larger window fills packs better, and reading a batch at random
                takes longer. Defaults to 10,000.
            on_long: How to handle rows with more than `length` items. `"error"` raises `ValueError`. `"split"` divides
                them into pieces of `length` items and a rest, which are packed separately. `"truncate"` cuts off their
                ends. Defaults to `"error"`.
            padded: Whether packs are arrays of `length` items. Otherwise they are ragged, and share the memory of the
                rows. Defaults to True.
            pad: Item that fills up padded packs. Defaults to 0.

        Returns:
            A map that yields dicts. With `padded`, packed columns are ndarrays `[n, length]`, and there are two more
            entries, int32 `[n, length]`: `segment_ids`, the number of the row in its pack, from 1 on, and 0 for
            padding; and `positions`, the index of the item in its row or piece. Without `padded`, packed columns are
            `Ragged` of rows in packs: `batch["tokens"].values` is the `Ragged` of all rows. Other features are `Ragged`
            with an entry for each row of a pack; a row that is split occurs in the pack of each piece.

        Raises:
            SchemaError: If a column isn't a feature with such arrays, or if columns have different numbers of items in
                a row.
            NullValueError: If an item of a column is null.
            UnsupportedError: If the reader has sparse features, reads from servers, or its units can only be read in
                sequence.
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range, if a row is too long, or if this reader draws a sample for each
                epoch.
            FastpipeError: If the data can't be read.

        Example:
            >>> import fastpipe
            >>> import pyarrow as pa
            >>> table = pa.table({"tokens": [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]]})
            >>> packs = fastpipe.from_arrow(table, batch_size=8).pack("tokens", length=5)
            >>> batch = next(iter(packs))
            >>> batch["tokens"].tolist()
            [[1, 2, 3, 9, 10], [4, 5, 6, 7, 8]]
            >>> batch["segment_ids"].tolist(), batch["positions"].tolist()
            ([[1, 1, 1, 2, 2], [1, 2, 2, 2, 2]], [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
        """
        return pack(_reader(self), columns, length, window=window, on_long=on_long, padded=padded, pad=pad)

    def bucket(self, column: str, *, max_items: int | None = None, window: int = 10_000) -> Mapped:
        """Makes batches of rows with similar lengths, so that little is padding when batches are padded.

        The rows of each window of consecutive rows are sorted by length and cut into batches of at most `batch_size`
        rows. Batches are the same in each epoch; with `shuffle=True`, each epoch has another order of batches. Ranks
        and shards share the batches. So any batch can be read at once, and a state resumes exactly. The lengths of all
        rows are read here, once, without other features if the source can leave them out.

        `fastpipe.mix` mixes batches of several readers: a mixture has batches of one reader each.

        Args:
            column: Name of the feature whose items count, such as tokens: `RaggedSpec((None, ...), ...)`.
            max_items: Maximum number of items in a batch whose rows are padded to the length of the longest one, 1 to
                2^62. A longer row is a batch of its own. Defaults to None: no limit. To get batches of about equally
                many items, also create the reader with a large `batch_size`.
            window: Number of rows among which rows of a batch are chosen, 1 to 2^24. Units (blocks, row groups, CSV
                chunks) with fewer rows are joined. Defaults to 10,000.

        Returns:
            A map that yields dicts as this reader does.

        Raises:
            SchemaError: If the column isn't a feature with ragged arrays.
            UnsupportedError: If the reader reads from servers, or its units can only be read in sequence.
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range, or if this reader draws a sample for each epoch.
            FastpipeError: If the data can't be read.

        Example:
            >>> import fastpipe
            >>> import pyarrow as pa
            >>> table = pa.table({"tokens": [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]]})
            >>> batches = fastpipe.from_arrow(table, batch_size=2).bucket("tokens")
            >>> [batch["tokens"].to_list() for batch in batches]
            [[[1, 2, 3], [5, 6, 7, 8]], [[4], [9, 10]]]
        """
        return bucket(_reader(self), column, max_items=max_items, window=window)


def _reader(shaping: Shaping) -> Reader:
    return cast("Reader", shaping)
