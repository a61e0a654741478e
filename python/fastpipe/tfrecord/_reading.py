"""TFRecord files as a dataset: the data and the reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

from fastpipe._fastpipe import TfRecordDataset
from fastpipe._files._file_data import ChunkedData
from fastpipe._files._in_memory_files import File, Source, lowered, opened
from fastpipe._files._index_cache import IndexCache
from fastpipe._files._remote_files import BlockCache, StorageOptions, expander
from fastpipe._locations import TFRecordLocation
from fastpipe._reader import losses
from fastpipe._reader.dataset import SourceWording
from fastpipe._reader.losses import Skip
from fastpipe._reader.options import Options, Settings, takes_options
from fastpipe._reader.reader import Reader
from fastpipe.specs import Features, RaggedSpec, Spec, inferred
from fastpipe.specs import _vocabularies as vocabularies
from fastpipe.specs._requests import FeatureRequest

# The suffixes of files that are read from a directory.
SUFFIXES = ((".tfrecord", ".tfrecords", ".tfrec"),)

_WORDS = SourceWording(
    units="chunks",
    advice={
        "reading": "Storage is the limit. Use faster disks. More threads help only if the storage is remote.",
        "decoding": "Read fewer features. More threads help.",
        "indexing": "Records must be located before they can be picked. Later epochs remember where up to 16 million "
        "records start.",
    },
    other_digest="the dataset has different contents, or its files have different names or another order",
)


class TFRecordData(ChunkedData):
    """TFRecord files that are open for a set of features: the `Data` of `read_tfrecord`.

    Args:
        files: The paths of the files, or their contents in memory.
        features: The specs of the features to read, by name; None to infer them.
        columns: The names of the inferred features to read; None for all.
        index_cache: The directory of record indexes, True for the user's cache directory, or None for no cache.
        lists: The names of the lookups that read any number of keys per record; None to find them in the data.
        all_names: The names of all features of the records, to raise an error for a record with another feature.
            None to ignore other features, unless all features are inferred.
    """

    handle: TfRecordDataset
    words = _WORDS
    may_lose_units = True

    def __init__(
        self,
        files: Sequence[File],
        features: Features | None,
        columns: Sequence[str] | None = None,
        index_cache: IndexCache = None,
        lists: list[str] | None = None,
        all_names: list[str] | None = None,
    ) -> None:
        chosen = None if columns is None else list(columns)
        wanted = chosen if features is None else features._lower()
        self.handle = TfRecordDataset(lowered(files, index_cache), wanted, lists, all_names)
        self._set_files(files, index_cache)
        self._set_features(inferred(self.handle.features()) if features is None else features)

    @property
    def interpretation(self) -> dict[str, Any]:
        """The lookups of features."""
        return vocabularies.interpretation(self._asked)

    @property
    def _lists(self) -> list[str]:
        """The names of the lookups that read any number of keys per record."""
        lookups = [name for name, spec in self._asked.items() if isinstance(spec, vocabularies.LookupSpec)]
        return [name for name in lookups if isinstance(self.features[name], RaggedSpec)]

    def subset(self, numbers: Iterable[int]) -> TFRecordData:
        """Returns a dataset with the same features and only some of the files."""
        files = [self._given[number] for number in numbers]
        return TFRecordData(files, self._asked, None, self._index_cache, self._lists, self.handle.all())

    def place(self, unit: int, record: int) -> TFRecordLocation:
        """Returns the file and the index of a record."""
        file, row = self.handle.place_of(unit, record)
        return TFRecordLocation(file=file, row=row)

    def __reduce__(self) -> tuple[Any, ...]:
        return TFRecordData, (self._given, self._asked, None, self._index_cache, self._lists, self.handle.all())


@takes_options()
def read_tfrecord(
    source: Source,
    *,
    features: Mapping[str, Spec] | None = None,
    columns: str | Sequence[str] | None = None,
    overrides: Mapping[str, Spec] | None = None,
    batch_size: int,
    index_cache: IndexCache = None,
    storage_options: StorageOptions = None,
    block_cache: BlockCache = None,
    on_error: Literal["raise"] | Skip = "raise",
    **options: Unpack[Options],
) -> Reader:
    """Reads TFRecord files of `tf.train.Example` messages as batches of NumPy arrays, without TensorFlow.

    A walk over the lengths of all records finds where they start, immediately. Records are decoded on demand, and the
    checksums of each record that is read are verified. So rows can be shuffled, sampled and located like those of any
    other files. An index of the records can be kept (`index_cache`).

    When rows are shuffled, `shuffle_buffer` defaults to the rows of 16 batches or of 64 chunks of 64 KiB, the larger of
    the two.

    The files contain no schema, so features are inferred from all records up to 16 MiB, or else from 64 chunks spread
    over the files, sorted by name. If the lists of a feature all have one value, it is a scalar. If they all have the
    same number of values, it has that fixed shape; otherwise it is ragged. A `float_list` is float32, an `int64_list`
    int64, and numbers of both kinds are float64. A `bytes_list` is text if all of its values are UTF-8, and bytes
    otherwise. A feature that some of the records lack is masked.

    Args:
        source: A path, a glob (`"data/train-*"`), a directory (all `*.tfrecord`, `*.tfrecords` and `*.tfrec` files
            below it), a contiguous buffer with the bytes of a file, a binary file object, which is read immediately to
            its end, a URL of an object store or web server (`s3://`, `gs://`, `az://`, `https://`), or a list of these.
            Directories and globs skip names that begin with `_` or `.`, and also empty files, with a warning.
        features: The spec of each feature to read, by name. `DenseSpec` reads lists with a fixed number of values, in
            the order of the shape's dimensions, the last of which varies fastest. With `pad`, shorter lists are padded
            and longer ones truncated. `RaggedSpec` reads lists of any length: `(None,)`, or `(None, 3)` for items of
            three values. `VocabularySpec` and `HashSpec` read a `bytes_list` as indices. A spec's `field` names the
            feature in the file, if it differs. Integers must fit the dtype and, in floats, be exact.
        columns: The names of inferred features to read, instead of `features`: a list, or one name as a string. By
            default, all features are read. Other features are skipped without being decoded.
        overrides: Specs that replace the inferred specs of some of these features, by name. Not allowed with
            `features`. Defaults to None: all specs are inferred.
        batch_size: Number of rows per batch.
        index_cache: A directory that keeps the offsets of all records, so that files open faster the next time, or True
            for a directory in the user's cache directory. An index is rebuilt if its file has changed, and extended if
            the file has grown. Defaults to None: no cache.
        storage_options: How to reach the object store of a URL, such as `{"region": "eu-west-1"}`, in the words of
            fsspec or polars. Defaults to None: the environment's credentials and settings.
        block_cache: A folder on a local disk and its size, such as `("/nvme/fastpipe", "500GB")`, which keeps bytes of
            URLs for later epochs and other processes. Paths of local files ignore it. Defaults to None: no cache.
        on_error: What to do with damaged records. "raise" (the default) raises an error when such a record is read.
            `fastpipe.Skip(...)` leaves damaged records out, up to a limit.
        **options: See `fastpipe.typing.Options`.

    Returns:
        A `Reader`. Iterating over it yields dicts from feature name to array or batch form (`fastpipe.batch`).

    Raises:
        MissingFileError: If a file does not exist, or a link is dangling.
        MalformedFileError: If a file is truncated, or the checksum of a record doesn't match, or a record is no
            `tf.train.Example`, or text isn't UTF-8. The error has the byte offset.
        SchemaError: If no record has a feature, a spec doesn't fit a list, a list has another type than its spec, or
            `overrides` names a feature that isn't inferred. While reading, if all features are inferred, and a record
            has a feature that no sampled record has.
        ShapeError: While reading, if a list has another number of values than its shape.
        ValueRangeError: While reading, if a number doesn't fit its dtype, or a key isn't in the vocabulary.
        NullValueError: While reading, if a record lacks a feature and its spec has `on_null="error"`.
        UnsupportedError: If a file is compressed or has another format, or a URL can't be read.
        StorageError: If storage fails, a file changed, or the folder of the block cache can't be written.
        LimitError: If a record has more than 2 GiB, or the records have more than 10,000 features.
        TypeError: If an argument has the wrong type.
        ValueError: If arguments exclude each other or are out of range.

    Example:
        >>> import fastpipe
        >>> reader = fastpipe.read_tfrecord("clicks.tfrecord", batch_size=2, shuffle=True, seed=7)
        >>> reader.features
        {
            "label": fastpipe.DenseSpec((), "int64"),
            "tokens": fastpipe.RaggedSpec((None,), "int64"),
            "user": fastpipe.DenseSpec((), "string"),
        }
    """
    settings = Settings(read_tfrecord, batch_size, options)
    settings.running = replace(settings.running, on_error=losses.checked(on_error))
    request = FeatureRequest.of(features, columns, overrides)
    files = opened(source, SUFFIXES, expander(storage_options, block_cache))
    with losses.framing_noted(settings.running.on_error):
        data = TFRecordData(files, request.features, request.columns, index_cache)
    if request.overrides:
        data = data.with_features(request.changed(data.features))
    return settings.reader(data)
