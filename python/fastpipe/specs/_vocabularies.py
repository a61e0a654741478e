"""Specs of features whose text is read as indices: `VocabularySpec` and `HashSpec`.

The batch form of such a feature depends on its field. A string is read as one index per row, and an array of strings as
a ragged column of indices. A *bag* (an array of records of name, term and value) is read as a sparse column whose
coordinates are the indices of the (name, term) pairs. So `reader.features` contains the specs of these forms. The
dataset keeps the original specs, and pickles them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fastpipe._arguments import shown, within
from fastpipe._boundary import Described, LoweredKeys, LoweredLookup
from fastpipe._fastpipe import Vocabulary as _NativeVocabulary
from fastpipe._local_path import local
from fastpipe._omissions import report
from fastpipe.errors import StorageError, in_file
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec, Spec, _dtype, inferred

Unknown: TypeAlias = Literal["drop", "bucket", "error"]

# Vocabularies of up to this many keys are shown as code.
_SHOWN = 10
_MOST_CODE = 200

_TAKES = "vocabulary must be a list of keys, a dict from key to index, or the path of a file"


class Vocabulary:
    """The keys of a `VocabularySpec` with their indices. Specs and readers share one table.

    Two vocabularies are equal if the same keys have the same indices. A pickle contains the keys. For a vocabulary from
    a file it contains the path and a digest instead, and unpickling reads the file again.

    Args:
        keys: A list of keys, a dict from key to index, or the path of a text file.

    Attributes:
        path: Path of the file that the vocabulary was read from, or None.

    Raises:
        TypeError: If a key is neither str nor bytes.
        ValueError: If `keys` is empty, if a key is repeated, or if an index isn't between 0 and 2**32 - 1.
        MissingFileError: If the file doesn't exist.
        MalformedFileError: If a line is repeated in the file.
    """

    __slots__ = ("_table", "path")

    def __init__(self, keys: Any) -> None:
        self.path: str | None = None
        if isinstance(keys, (str, os.PathLike)):
            self.path = os.path.abspath(local(keys, _TAKES))
            self._table = _NativeVocabulary.read(self.path)
        elif isinstance(keys, Mapping):
            self._table = _NativeVocabulary.of(list(keys), list(keys.values()))
        else:
            self._table = _NativeVocabulary.of(_keys(keys))
        if not len(self):
            where = f" ({self.path})" if self.path else ""
            raise ValueError(f"the vocabulary is empty{where}: HashSpec doesn't need a vocabulary")

    def __len__(self) -> int:
        """Returns the number of keys."""
        return len(self._table)

    @property
    def size(self) -> int:
        """The largest index plus 1."""
        return self._table.size

    @property
    def nbytes(self) -> int:
        """Size of the table in bytes."""
        return self._table.nbytes

    def __eq__(self, other: object) -> bool:
        """Whether the same keys have the same indices."""
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return len(self) == len(other) and self._table.digest == other._table.digest

    def __hash__(self) -> int:
        return hash(self._table.digest)

    def __repr__(self) -> str:
        """Returns Python code of the argument, if it is short."""
        if self.path is not None:
            return repr(self.path)
        if len(self) <= _SHOWN:
            items = self._table.items()
            keys = [_text(key) for key, _ in items]
            in_order = [index for _, index in items] == list(range(len(items)))
            code = repr(keys if in_order else {key: index for key, (_, index) in zip(keys, items, strict=True)})
            if len(code) <= _MOST_CODE:
                return code
        return f"<{len(self):,} keys>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is not None:
            return _reread, (self.path, self._table.digest)
        return _loaded, (self._table.dump(),)


def _loaded(dumped: bytes) -> Vocabulary:
    vocabulary = Vocabulary.__new__(Vocabulary)
    vocabulary._table, vocabulary.path = _NativeVocabulary.load(dumped), None
    return vocabulary


def _reread(path: str, digest: str) -> Vocabulary:
    vocabulary = Vocabulary(path)
    if vocabulary._table.digest != digest:
        raise in_file(StorageError, path, "the vocabulary's keys changed after it was pickled: the file was modified")
    return vocabulary


def _keys(keys: Any) -> list[Any]:
    for convert in ("to_pylist", "tolist"):  # Arrow has the first method, NumPy and pandas have the second.
        if hasattr(keys, convert):
            keys = getattr(keys, convert)()
    if isinstance(keys, (bytes, bytearray)) or not isinstance(keys, Iterable):
        raise TypeError(f"{_TAKES}; got {shown(keys)}")
    if isinstance(keys, (set, frozenset)):
        raise TypeError(
            "vocabulary must be a list of keys, whose positions are their indices; a set has no order: sort it"
        )
    return list(keys)


def _text(key: bytes) -> str | bytes:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key


@dataclass(frozen=True, repr=False)
class LookupSpec(Spec, ABC):
    """Base class of specs whose values are indices. Don't use it directly."""

    shape: tuple[int | None, ...] = field(init=False, default=())
    dtype: Any = field(kw_only=True, default="int64")
    scale: int | None = field(init=False, default=None)

    _first: ClassVar[str]
    """Name of the argument that is passed by position."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number("dtype", "indices are integers", self.dtype, ("int", "uint"))

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of indices. A table that is indexed by them, such as an embedding, needs this many rows."""

    def _check_size(self) -> None:
        if self.size - 1 > np.iinfo(self.dtype).max:
            raise ValueError(f"dtype must hold indices up to {self.size - 1}; got {self.dtype!r}")

    def __repr__(self) -> str:
        """Returns Python code that creates this spec, if its first argument is a file or short."""
        options = [
            f"{option.name}={getattr(self, option.name)!r}"
            for option in fields(self)
            if option.init and option.default is not MISSING and getattr(self, option.name) != option.default
        ]
        if self.fill is not None:
            options.remove("on_null='fill'")  # The fill value implies it.
        first = self._code_of_first()
        return f"fastpipe.{type(self).__name__}({', '.join([first, *options])})"

    def _code_of_first(self) -> str:
        return repr(getattr(self, self._first))

    @abstractmethod
    def _lower_lookup(self) -> LoweredLookup:
        """Returns plain values for Rust that describe the lookup."""

    @abstractmethod
    def _described(self) -> list[Any]:
        """Returns JSON-compatible data that determines the indices, without the handling of nulls."""


@dataclass(frozen=True, repr=False)
class KeySpec(LookupSpec):
    """Base class of `VocabularySpec` and `HashSpec`. Don't use it directly."""

    _: KW_ONLY
    separator: str | bytes = "\x01"
    values: Any = None
    layout: Literal["coo", "csr"] = "coo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.separator, str):
            try:
                self.separator.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"the separator {self.separator!r} can't be written as UTF-8") from error
        elif not isinstance(self.separator, bytes):
            raise TypeError(f"separator must be a string; got {shown(self.separator)}")
        if self.values is not None:
            found = _dtype(self.values)
            _check_number("values", "values of bags are numbers", found, ("int", "uint", "float"))
            if found == "float16":
                raise ValueError('values of bags must be "float32", "float64" or integers; got "float16"')
            self._set("values", found)
        if self.layout not in ("coo", "csr"):
            raise ValueError(f'layout must be "coo" or "csr"; got {self.layout!r}')

    @abstractmethod
    def _lower_lookup(self) -> LoweredKeys:
        """Returns plain values for Rust.

        They are the vocabulary, the handling of unknown keys, the number of buckets, the seed, the separator, the dtype
        of values and the layout.
        """

    def _described(self) -> list[Any]:
        table, on_unknown, buckets, seed, separator, values, layout = self._lower_lookup()
        keys = None if table is None else table.digest
        return [keys, on_unknown, buckets, seed, separator.hex(), values, layout]

    def _separator(self) -> bytes:
        return self.separator.encode() if isinstance(self.separator, str) else self.separator


@dataclass(frozen=True, repr=False)
class VocabularySpec(KeySpec):
    r"""Text that is read as indices in a vocabulary.

    Each key is looked up while rows are read, without creating strings. All sources with text support it: Avro files
    and messages, CSV, Parquet, Arrow, SQL and tables. Only Avro supports bags.

    | field | batch form |
    |---|---|
    | string, bytes, fixed, enum | `DenseSpec((), dtype)`: the index |
    | arrays of them, keys and values of maps | `RaggedSpec((None,), dtype)`; one None per level |
    | a *bag*: an array of records of `name`, `term` and `value` | `SparseSpec((size,), values)` |

    A row of a bag has the values of its entries at the indices of their keys. The key of an entry is its name, the
    separator and its term, concatenated. If the term is null or the records have no term, it is empty, so the key ends
    with the separator. Other fields of the records are skipped. Two entries with the same key stay two entries with the
    same index, in their order; consumers of sparse rows add them up. Keys are compared byte by byte. fastpipe doesn't
    check that strings are valid UTF-8.

    Args:
        vocabulary: A list or array of keys, whose positions are their indices; a dict from key to index (below 2**32),
            where several keys may share an index; or the path of a text file with one key per line, whose index is the
            number of lines before it. Keys are str, or bytes that are used unchanged. Lines end with `\n` or `\r\n`,
            without quotes or escapes, so a key that contains a line break needs a list or a dict.
        field: Path of the field to read. Defaults to the feature's name.
        on_unknown: How to handle keys that are not in the vocabulary. "error" raises `ValueRangeError`, which names the
            key, the feature and the row. "bucket" assigns them the index after the largest one of the vocabulary.
            "drop" omits them from bags and arrays: rows get shorter, and a row of only unknown keys is empty.
            `Reader.stats` counts them, and the log has their share of each epoch. "drop" can't be used for fields with
            one key per row. Defaults to "error", for bags and arrays too: a vocabulary of other data, or with another
            `separator`, would otherwise read as empty rows.
        num_buckets: Number of additional indices over which `on_unknown="bucket"` distributes unknown keys, 1 to 2**62.
            Uses XXH3, like `HashSpec` with seed 0. Defaults to 1.
        separator: Separator between name and term in the keys of the vocabulary: `"\x01"` as in photon-ml, `","` for
            the feature lists of Avro2TF and GDMix. Defaults to `"\x01"`.
        dtype: Integer dtype of indices that are values. The indices of bags are coordinates, which are int64. Defaults
            to "int64".
        values: Dtype of a bag's values. Defaults to their type in the first file.
        layout: Layout of a bag: "coo" for `Sparse`, or "csr" for `SparseCSR`. Defaults to "coo".
        on_null: How to read nulls. "error" raises `NullValueError`. "mask" wraps the indices, or the rows of bags, in
            `Masked`. "fill" replaces null strings with the fill value, which is required then, and null bags with empty
            ones. A bag entry that is null, or has a null name or value, is an error; "fill" omits it. Defaults to
            "error".
        fill: Index that replaces a null string. Implies `on_null="fill"`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the vocabulary is empty, if a key is repeated (the message names it), or if an argument is
            invalid.
        MissingFileError: If the file doesn't exist.
        MalformedFileError: If a line is repeated (the message names it).

    Example:
        >>> import fastpipe
        >>> features = {"country": fastpipe.VocabularySpec(["AT", "DE"], on_unknown="bucket", fill=-1)}
        >>> reader = fastpipe.read_avro("data/*.avro", features=features, batch_size=4)
        >>> reader.features
        {
            "country": fastpipe.DenseSpec((), "int64", fill=-1),
        }
        >>> next(iter(reader))["country"].dtype
        dtype('int64')
    """

    vocabulary: Any  # A Vocabulary after construction.
    _: KW_ONLY
    on_unknown: Unknown = "error"
    num_buckets: int | None = None

    _kind: ClassVar[str] = "lookup"
    _first: ClassVar[str] = "vocabulary"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_unknown not in ("drop", "bucket", "error"):
            raise ValueError(f'on_unknown must be "drop", "bucket" or "error"; got {self.on_unknown!r}')
        if self.num_buckets is not None:
            if self.on_unknown != "bucket":
                raise ValueError(f'num_buckets= requires on_unknown="bucket"; got {self.on_unknown!r}')
            self._set("num_buckets", within("num_buckets", self.num_buckets, 1, 2**62))
        if not isinstance(self.vocabulary, Vocabulary):
            self._set("vocabulary", Vocabulary(self.vocabulary))
        self._check_size()

    @property
    def size(self) -> int:
        """Number of indices: the largest index of the vocabulary plus 1, plus the number of buckets."""
        return int(self.vocabulary.size) + (0 if self.on_unknown != "bucket" else self.num_buckets or 1)

    def _lower_lookup(self) -> LoweredKeys:
        table = self.vocabulary._table
        return table, self.on_unknown, self.num_buckets or 1, 0, self._separator(), self.values, self.layout


@dataclass(frozen=True, repr=False)
class HashSpec(KeySpec):
    r"""Text that is read as hashes: the index of a key is its XXH3 hash modulo the number of buckets.

    The index is computed while rows are read. It equals `xxhash.xxh3_64_intdigest(key, seed) % num_buckets` of the
    package xxhash. For a bag, the key is `name + separator + term`. XXH3 is specified, so indices are the same in all
    versions and on all machines.

    `VocabularySpec` lists the fields that can be read and the resulting batch forms.

    Args:
        num_buckets: Number of indices, 1 to 2**62.
        seed: Seed of the hash, 0 to 2**64 - 1. Defaults to 0.
        field: Path of the field to read. Defaults to the feature's name.
        separator: Separator between name and term in the keys of a bag. Defaults to `"\x01"`.
        dtype: Integer dtype of indices that are values. Defaults to "int64".
        values: Dtype of a bag's values. Defaults to their type in the first file.
        layout: Layout of a bag: "coo" for `Sparse`, or "csr" for `SparseCSR`. Defaults to "coo".
        on_null: How to read nulls: "error" raises `NullValueError`, "mask" wraps the values in `Masked`, and "fill"
            replaces a null string with `fill`, and a null bag with an empty one. Defaults to "error".
        fill: Index that replaces a null string. Implies `on_null="fill"`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is invalid.

    Example:
        >>> import fastpipe
        >>> features = {"country": fastpipe.HashSpec(1000, on_null="mask")}
        >>> batch = next(iter(fastpipe.read_avro("data/*.avro", features=features, batch_size=4)))
        >>> int(batch["country"].values.max()) < 1000
        True
    """

    num_buckets: int
    _: KW_ONLY
    seed: int = 0

    _kind: ClassVar[str] = "lookup"
    _first: ClassVar[str] = "num_buckets"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("num_buckets", within("num_buckets", self.num_buckets, 1, 2**62))
        self._set("seed", within("seed", self.seed, 0, 2**64 - 1))
        self._check_size()

    @property
    def size(self) -> int:
        """Number of indices, which equals `num_buckets`."""
        return self.num_buckets

    def _lower_lookup(self) -> LoweredKeys:
        return None, "hash", self.num_buckets, self.seed, self._separator(), self.values, self.layout


def _check_number(what: str, why: str, dtype: str, kinds: tuple[str, ...]) -> None:
    if dtype.rstrip("0123456789") not in kinds:
        raise ValueError(f"{what}: {why}; got {dtype!r}")


def described(features: Features) -> dict[str, list[Any]]:
    """Returns JSON-compatible data that determines the indices of each `LookupSpec`.

    Vocabularies are represented by a digest of keys and indices.
    """
    lookups = {name: spec for name, spec in features.items() if isinstance(spec, LookupSpec)}
    return {name: [*spec._described(), spec.on_null, spec.fill] for name, spec in lookups.items()}


def interpretation(features: Features) -> dict[str, Any]:
    """Returns the interpretation settings of a source that has only lookups, for its states.

    Without lookups the dict is empty.
    """
    found = described(features)
    return {"lookups": found} if found else {}


def key_fields(features: Features) -> set[str]:
    """Returns the fields that only lookups of keys read."""
    keys: set[str] = set()
    others: set[str] = set()
    for name, spec in features.items():
        (keys if isinstance(spec, KeySpec) else others).add(spec.field or name)
    return keys - others


def in_form(features: Features, described: Callable[[], Iterable[Described]]) -> Features:
    """Replaces each `LookupSpec` with the spec of its batch form.

    Args:
        features: The requested features.
        described: Returns all features as the extension module describes them. It is called only if there is a
            `LookupSpec`.
    """
    if not any(isinstance(spec, LookupSpec) for spec in features.values()):
        return features
    found = inferred(described())
    return Features({name: _in_form(spec, found[name]) for name, spec in features.items()})


def _in_form(spec: Spec, found: Spec) -> Spec:
    if not isinstance(spec, LookupSpec):
        return spec
    if isinstance(found, SparseSpec):
        assert isinstance(spec, KeySpec)
        return replace(found, field=spec.field, layout=spec.layout)
    assert isinstance(found, (DenseSpec, RaggedSpec))
    return replace(found, field=spec.field, fill=spec.fill)


def report_unknown_keys(features: Features) -> None:
    """Reports features that omit unknown keys. Passes report how many they omit."""
    named = [name for name, spec in features.items() if isinstance(spec, VocabularySpec) and spec.on_unknown == "drop"]
    if named:
        report(
            f'on_unknown="drop" omits the keys of {", ".join(map(repr, named))} that are not in the vocabulary.'
            " The log has their share at the end of each epoch."
        )
