"""The contenders of `shaping_peers.py`: fastpipe and other loaders, each over data in a form that it reads natively.

* fastpipe: Parquet and Arrow files, and arrays in memory.
* NumPy: pyarrow reads a whole Parquet file, and NumPy masks and slices it.
* datasets (Hugging Face): The Arrow files that `load_dataset` makes of Parquet files, with the format `numpy`. Filters
  are batched. `cached` finds the result of an earlier `filter`, `flattened` copies the rows that pass with
  `flatten_indices`, and `streaming` reads Parquet files with `streaming=True`.
* Grain: A dict of arrays in memory, ArrayRecord files of fixed-width records, and Parquet files with
  `ParquetIterDataset`. `num_threads=0`, as the documentation of `ReadOptions` recommends for data in memory. For
  ArrayRecord files in the page cache it is faster than 1, 2 or 16 threads, too. These have 2,000 records each.
* Lance: a scan with a filter, full batches, and columns converted to NumPy. `index` has a bitmap index of the column.
* torchdata: `MultiNodeWeightedSampler` over samplers of arrays in memory.

Every row has an `id`, a `key`, and a vector `x` whose first element follows from the id.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

import fastpipe
from harness import CannotError

BATCH_SIZE = 1024
WIDTH = 16
KEYS = 100
KEPT = KEYS // 10
SHARES = (0.4, 0.3, 0.2, 0.1)
GROUP = 50_000
"""Rows of a row group or record batch."""
SHARD = 2_000
"""Rows of an ArrayRecord file. In array_record 0.8.6, the time to read a record grows with the records of its file."""
KINDS = ("Parquet", "Arrow", "memory")
"""Forms of data that fastpipe reads."""
_RECORD = np.dtype([("id", "<i8"), ("key", "<i4"), ("x", "<f4", WIDTH)])
_FEATURES: dict[str, Any] = {
    "id": fastpipe.DenseSpec((), "int64"),
    "key": fastpipe.DenseSpec((), "int32"),
    "x": fastpipe.DenseSpec((WIDTH,), "float32"),
}

Batch = dict[str, Any]
"""Arrays by name."""


class Pipeline(ABC):
    """A dataset that yields batches of NumPy arrays. It has one pass at a time."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Starts a pass."""

    def state(self) -> Any:
        """Returns the state of the pass after the batches that were taken from it."""
        raise CannotError("not supported")

    def resume(self, state: Any) -> Iterator[Batch]:
        """Starts a pass that continues at a state of this pipeline or an equal one."""
        raise CannotError("not supported")


@dataclass(frozen=True)
class Contender:
    """A way to read rows.

    Attributes:
        loader: The library, and how it is used.
        data: The form of its data.
        beside: The form of data that fastpipe reads when it is compared with this contender.
        open: Opens the dataset.
        shape: Makes a pipeline of the opened dataset. This may read all rows.
        lazy: Whether `shape` reads nothing, so that all epochs take the same time.
        slow: Whether it makes a Python object of each row, so that only the first tenth of the batches is read.
        restarted: Makes a pipeline in a program that starts again, if that reads the files that `shape` wrote.
    """

    loader: str
    data: str
    beside: str
    open: Callable[[], Any]
    shape: Callable[[Any], Pipeline]
    lazy: bool = True
    slow: bool = False
    restarted: Callable[[Any], Pipeline] | None = None


class Sliced(Pipeline):
    """Batches from any row on. The state is the number of rows that were taken.

    Args:
        slices: Function that yields the batches from a row on.
    """

    def __init__(self, slices: Callable[[int], Iterator[Batch]]) -> None:
        self._slices, self._taken = slices, 0

    def batches(self) -> Iterator[Batch]:
        return self.resume(0)

    def state(self) -> int:
        return self._taken

    def resume(self, state: Any) -> Iterator[Batch]:
        self._taken = state
        return self._counted(self._slices(state))

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._taken += len(batch["id"])
            yield batch


# The data


PACKAGES = {"datasets": "datasets", "grain": "grain", "array_record": "array_record", "lance": "pylance"}
PACKAGES |= {"torchdata": "torchdata"}
"""Distribution of each module of a peer."""


def installed(*modules: str) -> bool:
    """Returns whether peers are installed."""
    try:
        return all(importlib.metadata.version(PACKAGES[module]) for module in modules)
    except importlib.metadata.PackageNotFoundError:
        return False


def arrays(rows: int, first: int) -> Batch:
    """Returns random rows with ids from `first` on."""
    draw = np.random.default_rng(first)
    ids = np.arange(first, first + rows)
    x = draw.random((rows, WIDTH), "float32")
    x[:, 0] = ids % 1000
    return {"id": ids, "key": draw.integers(0, KEYS, rows).astype("int32"), "x": x}


class Data:
    """The same rows in all forms, from one or several sources.

    Args:
        folder: Folder of the files.
        rows: Number of rows of each source.
        threads: Number of threads of a loader.
    """

    def __init__(self, folder: Path, rows: list[int], threads: int) -> None:
        self.folder, self.threads = folder, threads
        starts = [0, *itertools.accumulate(rows)]
        self.tables = [arrays(count, first) for count, first in zip(rows, starts, strict=False)]
        for number, table in enumerate(self.tables):
            self._write(number, table)

    def paths(self, kind: str) -> list[Path]:
        """Returns the file of each source."""
        return [self.folder / f"{number}.{kind}" for number in range(len(self.tables))]

    def _write(self, number: int, rows: Batch) -> None:
        x = pa.FixedSizeListArray.from_arrays(pa.array(rows["x"].reshape(-1)), WIDTH)
        table = pa.table({"id": rows["id"], "key": rows["key"], "x": x})
        pq.write_table(table, self.paths("parquet")[number], row_group_size=GROUP)
        path = str(self.paths("arrow")[number])
        pyarrow.feather.write_feather(table, path, chunksize=GROUP, compression="uncompressed")
        if installed("lance"):
            import lance

            lance.write_dataset(table, str(self.paths("lance")[number]))
        if installed("grain", "array_record"):
            from array_record.python.array_record_module import ArrayRecordWriter

            records = np.empty(len(rows["id"]), _RECORD)
            for name, values in rows.items():
                records[name] = values
            folder = self.paths("array_record")[number]
            folder.mkdir()
            for first in range(0, len(records), SHARD):
                # Grain requires groups of one record.
                writer = ArrayRecordWriter(str(folder / f"{first:010}"), "group_size:1")
                for record in records[first : first + SHARD]:
                    writer.write(record.tobytes())
                writer.close()


# fastpipe


class Fastpipe(Pipeline):
    """Batches of a reader."""

    def __init__(self, reader: fastpipe.Reader) -> None:
        self._reader = reader

    def batches(self) -> Iterator[Batch]:
        return iter(self._reader)

    def state(self) -> Any:
        return self._reader.state_dict()

    def resume(self, state: Any) -> Iterator[Batch]:
        self._reader.load_state_dict(state)
        return iter(self._reader)


class OneByOne(Pipeline):
    """Batches of several readers, one reader after the other."""

    def __init__(self, readers: list[fastpipe.Reader]) -> None:
        self._readers = readers

    def batches(self) -> Iterator[Batch]:
        return itertools.chain.from_iterable(self._readers)


def opened(data: Data, kind: str) -> list[fastpipe.Reader]:
    """Opens the sources with fastpipe."""
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_threads": data.threads}
    if kind == "memory":
        return [fastpipe.from_arrays(table, **options) for table in data.tables]
    read: Any = fastpipe.read_parquet if kind == "Parquet" else fastpipe.read_arrow
    return [read(path, features=_FEATURES, **options) for path in data.paths(kind.lower())]


def filtered_reader(readers: list[fastpipe.Reader]) -> Pipeline:
    """Finds the rows that pass."""
    return Fastpipe(readers[0].filter(fastpipe.col("key") < KEPT))


def mixed_readers(readers: list[fastpipe.Reader], threads: int) -> Pipeline:
    """Mixes readers. Each row occurs once."""
    return Fastpipe(fastpipe.mix(readers, SHARES, stop="all_exhausted", num_threads=threads))


# NumPy


def arrays_of(table: pa.Table | pa.RecordBatch) -> Batch:
    """Returns the columns of Arrow data as NumPy arrays."""
    found = {}
    for name in ("id", "key", "x"):
        column = table[name]
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        found[name] = column.flatten().to_numpy().reshape(-1, WIDTH) if name == "x" else column.to_numpy()
    return found


def masked_slices(path: Path, threads: int, start: int) -> Iterator[Batch]:
    """Reads a Parquet file, masks it, and yields slices from row `start` of the result on."""
    rows = arrays_of(pq.read_table(path, use_threads=threads > 1))
    mask = rows["key"] < KEPT
    few = {name: values[mask] for name, values in rows.items()}
    for first in range(start, len(few["id"]), BATCH_SIZE):
        yield {name: values[first : first + BATCH_SIZE] for name, values in few.items()}


# datasets


class Streamed(Pipeline):
    """Batches of a `datasets.IterableDataset`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("numpy")

    def batches(self) -> Iterator[Batch]:
        return self._dataset.iter(BATCH_SIZE)  # type: ignore[no-any-return]

    def state(self) -> Any:
        return self._dataset.state_dict()

    def resume(self, state: Any) -> Iterator[Batch]:
        self._dataset.load_state_dict(state)
        return self.batches()


def loaded(data: Data, streaming: bool = False) -> list[Any]:
    """Opens Parquet files with `load_dataset`. The first call writes their rows to Arrow files, unless it streams."""
    import datasets

    datasets.disable_progress_bars()
    options: dict[str, Any] = {"split": "train", "cache_dir": str(data.folder / "datasets"), "streaming": streaming}
    return [datasets.load_dataset("parquet", data_files=str(path), **options) for path in data.paths("parquet")]


def keys_that_pass(keys: Any) -> Any:
    """Returns the mask of a batch of keys."""
    return np.asarray(keys) < KEPT


def by_index(dataset: Any) -> Pipeline:
    """Returns the batches of a `datasets.Dataset`, which has no states, but can skip rows."""
    return Sliced(lambda start: dataset.skip(start).with_format("numpy").iter(BATCH_SIZE))


def filtered_once(loaded: list[Any], flat: bool = False, **options: Any) -> Pipeline:
    """Finds the rows that pass, or finds the file of an earlier call. `flat` copies them to another Arrow file."""
    found = loaded[0].with_format("numpy").filter(keys_that_pass, input_columns="key", batched=True, **options)
    return by_index(found.flatten_indices() if flat else found)


def filtered_stream(loaded: list[Any]) -> Pipeline:
    """Filters an `IterableDataset`."""
    return Streamed(loaded[0].filter(keys_that_pass, input_columns="key", batched=True))


def interleaved(loaded: list[Any], stream: bool = False) -> Pipeline:
    """Mixes datasets by random draws. Each row occurs once."""
    import datasets

    parts = [each.to_iterable_dataset() for each in loaded] if stream else loaded
    stop = "all_exhausted_without_replacement"
    mixed = datasets.interleave_datasets(parts, probabilities=SHARES, seed=1, stopping_strategy=stop)
    return Streamed(mixed) if stream else by_index(mixed)


# Grain


class Rows:
    """Rows of arrays, as a random-access source of Grain and a dataset of torch."""

    def __init__(self, arrays: Batch) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays["id"])

    def __getitem__(self, index: Any) -> Batch:
        return {name: values[index] for name, values in self._arrays.items()}

    def __repr__(self) -> str:
        return f"Rows({len(self)})"


class Grained(Pipeline):
    """Batches of a Grain `IterDataset` of rows."""

    def __init__(self, rows: Any) -> None:
        self._dataset = rows.batch(BATCH_SIZE)
        self._iterator: Any = None

    def batches(self) -> Iterator[Batch]:
        self._iterator = iter(self._dataset)
        return self._iterator  # type: ignore[no-any-return]

    def state(self) -> Any:
        return self._iterator.get_state()

    def resume(self, state: Any) -> Iterator[Batch]:
        self.batches()
        self._iterator.set_state(state)
        return self._iterator  # type: ignore[no-any-return]


def of_arrays(data: Data) -> list[Any]:
    """Returns a `MapDataset` of each table in memory."""
    import grain

    return [grain.MapDataset.source(Rows(table)) for table in data.tables]


def record_of(record: bytes) -> Batch:
    """Decodes a record of an ArrayRecord file."""
    (row,) = np.frombuffer(record, _RECORD)
    return {"id": row["id"], "key": row["key"], "x": row["x"]}


def of_records(data: Data) -> list[Any]:
    """Returns a `MapDataset` of the ArrayRecord files of each source."""
    import grain

    shards = [sorted(map(str, folder.iterdir())) for folder in data.paths("array_record")]
    sources = [grain.sources.ArrayRecordDataSource(paths) for paths in shards]
    return [grain.MapDataset.source(source).map(record_of) for source in sources]


def of_parquet(data: Data) -> list[Any]:
    """Returns a `ParquetIterDataset` of each file."""
    import grain

    return [grain.experimental.ParquetIterDataset(str(path)) for path in data.paths("parquet")]


def iterated(rows: Any) -> Any:
    """Returns the `IterDataset` of a `MapDataset`."""
    import grain

    return rows.to_iter_dataset(grain.ReadOptions(num_threads=0))


def row_passes(row: Batch) -> bool:
    """Returns whether a row passes the filter."""
    return bool(row["key"] < KEPT)


def filtered_map(sources: list[Any]) -> Pipeline:
    """Filters a `MapDataset`."""
    return Grained(iterated(sources[0].filter(row_passes)))


def filtered_iter(sources: list[Any]) -> Pipeline:
    """Filters an `IterDataset`."""
    return Grained(sources[0].filter(row_passes))


def mixed_map(sources: list[Any]) -> Pipeline:
    """Mixes `MapDataset`s by their weights, without chance."""
    import grain

    return Grained(iterated(grain.MapDataset.mix(sources, weights=SHARES)))


def mixed_iter(sources: list[Any]) -> Pipeline:
    """Mixes `IterDataset`s by their weights, without chance."""
    import grain

    return Grained(grain.IterDataset.mix([iterated(each) for each in sources], weights=SHARES))


# Lance


def of_lance(data: Data) -> list[Any]:
    """Opens Lance datasets."""
    import lance

    return [lance.dataset(str(path)) for path in data.paths("lance")]


def scanned(sources: list[Any], index: bool = False, make: bool = False) -> Pipeline:
    """Scans a Lance dataset with a filter. `index` uses an index of the keys, and `make` makes it first."""
    source = sources[0]
    if make:
        source.create_scalar_index("key", index_type="BITMAP", replace=True)

    def slices(start: int) -> Iterator[Batch]:
        options: dict[str, Any] = {"use_scalar_index": index, "strict_batch_size": True, "offset": start or None}
        return map(arrays_of, source.to_batches(filter=f"key < {KEPT}", batch_size=BATCH_SIZE, **options))

    return Sliced(slices)


# torchdata


class Noded(Pipeline):
    """Batches of a `torchdata.nodes.Loader`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> Any:
        return self._loader.state_dict()

    def resume(self, state: Any) -> Iterator[Batch]:
        self._loader.load_state_dict(state)
        return iter(self._loader)


def stacked(rows: list[Batch]) -> Batch:
    """Collates rows to a batch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def weighted_nodes(tables: list[Batch]) -> Pipeline:
    """Mixes tables by random draws. Each row occurs once."""
    from torch.utils.data import SequentialSampler
    from torchdata import nodes
    from torchdata.nodes.samplers.stop_criteria import StopCriteria

    names = [str(number) for number in range(len(tables))]
    sources: Any = {
        name: nodes.MapStyleWrapper(Rows(table), SequentialSampler(Rows(table)))
        for name, table in zip(names, tables, strict=True)
    }
    weights = dict(zip(names, SHARES, strict=True))
    mixed = nodes.MultiNodeWeightedSampler(sources, weights, StopCriteria.ALL_DATASETS_EXHAUSTED, seed=1)
    return Noded(nodes.Loader(nodes.Mapper(nodes.Batcher(mixed, BATCH_SIZE, drop_last=False), stacked)))


# The contenders


def filters(data: Data) -> list[Contender]:
    """Returns the contenders that read the rows of the first source that pass the filter."""
    found = [
        Contender("fastpipe", kind, kind, partial(opened, data, kind), filtered_reader, lazy=False) for kind in KINDS
    ]
    slices = partial(masked_slices, data.paths("parquet")[0], data.threads)
    found.append(Contender("NumPy", "Parquet", "Parquet", lambda: slices, Sliced))
    if installed("datasets"):
        arrow, streams = partial(loaded, data), partial(loaded, data, streaming=True)
        anew = partial(filtered_once, load_from_cache_file=False)
        flat, again = partial(anew, flat=True), partial(filtered_once, flat=True)
        found += [
            Contender("datasets", "Arrow", "Arrow", arrow, anew, lazy=False, restarted=filtered_once),
            Contender("datasets, cached", "Arrow", "Arrow", arrow, filtered_once, lazy=False),
            Contender("datasets, flattened", "Arrow", "Arrow", arrow, flat, lazy=False, restarted=again),
            Contender("datasets, streaming", "Parquet", "Parquet", streams, filtered_stream, slow=True),
        ]
    if installed("grain"):
        rows, parquet = partial(of_arrays, data), partial(of_parquet, data)
        found += [
            Contender("Grain, MapDataset", "memory", "memory", rows, filtered_map, slow=True),
            Contender(
                "Grain, IterDataset", "memory", "memory", lambda: [iterated(rows()[0])], filtered_iter, slow=True
            ),
            Contender("Grain, IterDataset", "Parquet", "Parquet", parquet, filtered_iter, slow=True),
        ]
    if installed("grain", "array_record"):
        records = partial(of_records, data)
        found.append(Contender("Grain, MapDataset", "ArrayRecord", "Parquet", records, filtered_map, slow=True))
    if installed("lance"):
        lance, made = partial(of_lance, data), partial(scanned, index=True, make=True)
        found += [
            Contender("Lance", "Lance", "Parquet", lance, scanned),
            Contender(
                "Lance, index", "Lance", "Parquet", lance, made, lazy=False, restarted=partial(scanned, index=True)
            ),
        ]
    return found


def mixtures(data: Data) -> list[Contender]:
    """Returns the contenders that mix all sources."""
    mixed = partial(mixed_readers, threads=data.threads)
    found = [Contender("fastpipe", kind, kind, partial(opened, data, kind), mixed) for kind in KINDS]
    if installed("datasets"):
        arrow, stream = partial(loaded, data), partial(interleaved, stream=True)
        found += [
            Contender("datasets, Dataset", "Arrow", "Arrow", arrow, interleaved),
            Contender("datasets, IterableDataset", "Arrow", "Arrow", arrow, stream, slow=True),
        ]
    if installed("grain"):
        rows = partial(of_arrays, data)
        found += [
            Contender("Grain, MapDataset", "memory", "memory", rows, mixed_map, slow=True),
            Contender("Grain, IterDataset", "memory", "memory", rows, mixed_iter, slow=True),
        ]
    if installed("grain", "array_record"):
        records = partial(of_records, data)
        found.append(Contender("Grain, MapDataset", "ArrayRecord", "Parquet", records, mixed_map, slow=True))
    if installed("torchdata"):
        found.append(Contender("torchdata", "memory", "memory", lambda: data.tables, weighted_nodes, slow=True))
    return found


def one_by_one(data: Data) -> list[Contender]:
    """Returns the baseline of mixtures: fastpipe reads the sources one after the other."""
    return [Contender("fastpipe, not mixed", kind, kind, partial(opened, data, kind), OneByOne) for kind in KINDS]
