"""Specs of features whose text becomes indices: `VocabularySpec` and `HashSpec`.

The form of such a feature follows from its field: a string is one index a row, an array of strings is a ragged column
of indices, and a *bag* (an array of records of name, term and value) is a sparse column whose coordinates are the
indices of the pairs of name and term. So `reader.features` has the specs of these forms; the data set keeps what was
asked for, and is pickled with that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from fastpipe._arguments import shown
from fastpipe._boundary import Described, LoweredLookup
from fastpipe._fastpipe import Vocabulary as _NativeVocabulary
from fastpipe._local_path import local
from fastpipe.errors import StorageError, in_file
from fastpipe.specs import DenseSpec, Features, RaggedSpec, SparseSpec, Spec, _dtype, inferred

Unknown: TypeAlias = Literal["drop", "bucket", "error"]

# As many keys are shown as code.
_SHOWN = 10
_MOST_CODE = 200

_TAKES = "a vocabulary is a list of keys, a dict from key to index, or the path of a file"


class Vocabulary:
    """The keys of a `VocabularySpec`, each with its index. Specs, and all readers of one, share the table.

    Two are equal if the same keys have the same indices. A pickle holds the keys; of a vocabulary that was read from a
    file it holds the path and a digest, and the file is read again.

    Args:
        keys: as in `VocabularySpec`.

    Attributes:
        path: of the file that it was read from, or None.

    Raises:
        TypeError: if a key is neither str nor bytes.
        ValueError: if there is no key, or one is there twice, or an index isn't from 0 to 2**32 - 1.
        MissingFileError: if the file isn't there.
        MalformedFileError: if a line is there twice in a file.
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
            raise ValueError(f"the vocabulary is empty{where}: HashSpec needs none")

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._table)

    @property
    def size(self) -> int:
        """One more than the greatest index."""
        return self._table.size

    @property
    def nbytes(self) -> int:
        """Bytes that the table takes."""
        return self._table.nbytes

    def __eq__(self, other: object) -> bool:
        """Whether the same keys have the same indices."""
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return len(self) == len(other) and self._table.digest == other._table.digest

    def __hash__(self) -> int:
        return hash(self._table.digest)

    def __repr__(self) -> str:
        """Python code of the argument, if it is short."""
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
        raise in_file(StorageError, path, "the vocabulary has other keys than when it was pickled: the file changed")
    return vocabulary


def _keys(keys: Any) -> list[Any]:
    for convert in ("to_pylist", "tolist"):  # Arrow's, and NumPy's and pandas'.
        if hasattr(keys, convert):
            keys = getattr(keys, convert)()
    if isinstance(keys, (bytes, bytearray)) or not isinstance(keys, Iterable):
        raise TypeError(f"{_TAKES}, not {shown(keys)}")
    if isinstance(keys, (set, frozenset)):
        raise TypeError(
            "a vocabulary is a list of keys, whose places are their indices, and a set has no order: sort it"
        )
    return list(keys)


def _text(key: bytes) -> str | bytes:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key


@dataclass(frozen=True, repr=False)
class LookupSpec(Spec):
    """Base of `VocabularySpec` and `HashSpec`; not for use by itself."""

    shape: tuple[int | None, ...] = field(init=False, default=())
    dtype: Any = field(kw_only=True, default="int64")
    scale: int | None = field(init=False, default=None)
    _: KW_ONLY
    separator: str | bytes = "\x01"
    values: Any = None
    layout: Literal["coo", "csr"] = "coo"

    _first: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if not self._first:
            raise TypeError("use VocabularySpec or HashSpec")
        super().__post_init__()
        _check_number("dtype", "indices are integers", self.dtype, ("int", "uint"))
        if isinstance(self.separator, str):
            try:
                self.separator.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"the separator {self.separator!r} can't be written as UTF-8") from error
        elif not isinstance(self.separator, bytes):
            raise TypeError(f"separator is a string between name and term, not {shown(self.separator)}")
        if self.values is not None:
            found = _dtype(self.values)
            _check_number("values", "values of bags are numbers", found, ("int", "uint", "float"))
            if found == "float16":
                raise ValueError('values of bags are read as "float32" or "float64", or as integers, not as "float16"')
            self._set("values", found)
        if self.layout not in ("coo", "csr"):
            raise ValueError(f'layout is "coo" or "csr", not {self.layout!r}')

    @property
    def size(self) -> int:
        """Number of indices, and of what is indexed by them, such as rows of an embedding."""
        raise NotImplementedError

    def _check_size(self) -> None:
        if self.size - 1 > np.iinfo(self.dtype).max:
            raise ValueError(f"dtype {self.dtype!r} doesn't hold indices up to {self.size - 1}")

    def __repr__(self) -> str:
        """Python code that makes this spec, if its vocabulary is a file or short."""
        options = [
            f"{option.name}={getattr(self, option.name)!r}"
            for option in fields(self)
            if option.init and option.default is not MISSING and getattr(self, option.name) != option.default
        ]
        if self.fill is not None:
            options.remove("nulls='fill'")  # The fill value says it.
        return f"fastpipe.{type(self).__name__}({', '.join([repr(getattr(self, self._first)), *options])})"

    def _lower_lookup(self) -> LoweredLookup:
        """Gives Rust plain values.

        Vocabulary, what becomes of unknown keys, buckets, seed, separator, dtype of values, layout.
        """
        raise NotImplementedError

    def _separator(self) -> bytes:
        return self.separator.encode() if isinstance(self.separator, str) else self.separator


@dataclass(frozen=True, repr=False)
class VocabularySpec(LookupSpec):
    r"""Text as indices in a vocabulary, looked up while rows are read: no strings are made.

    Every source that has text reads it: Avro files and messages, CSV, Parquet, Arrow, SQL and tables. Bags are read
    from Avro only.

    | field | becomes |
    |---|---|
    | string, bytes, fixed, enum | `DenseSpec((), dtype)`: its index |
    | arrays of them, keys and values of maps | `RaggedSpec((None,), dtype)`; a None for each level |
    | a *bag*: an array of records of `name`, `term` and `value` | `SparseSpec((size,), values)` |

    A row of a bag has its values at the indices of their names and terms: the key of an entry is name, separator and
    term in one. A term that is null, or that the records don't have, is an empty one, so the key ends with the
    separator. Other fields of the records are skipped. Two entries with the same key stay two entries with the same
    index, in their order, and consumers of sparse rows add them up. Keys are compared byte by byte; that strings are
    UTF-8 isn't checked.

    Args:
        vocabulary: a list (or array) of keys, each with its place as index; a dict from key to index, 0 to 2**32 - 1,
            which several keys may share; or the path of a text file: a key a line, with the number of lines before it
            as index. Keys are str, or bytes as they are. Lines end with `\n` or `\r\n` and have no quotes or escapes: a
            key with a line break needs a list or a dict.
        field: path of the field to read, if it isn't the feature's name.
        unknown: what happens to keys that the vocabulary lacks. "error", the default, raises `ValueRangeError`, which
            names the key, the feature and the row. "bucket" gives them the index after the greatest of the vocabulary.
            "drop" leaves them out of bags and arrays; it can't read fields of one key a row.
        buckets: for `unknown="bucket"`, number of indices behind those of the vocabulary among which unknown keys are
            distributed, by XXH3 as in `HashSpec` with seed 0; 1 by default.
        separator: between name and term in the keys of the vocabulary: `"\x01"` as in photon-ml, `","` for the feature
            lists of Avro2TF and GDMix.
        dtype: of indices that are values: an integer dtype. The indices of bags are coordinates, which are int64.
        values: dtype of a bag's values; None for their type in the first file.
        layout: of a bag: "coo", or "csr" for `SparseCSR`.
        nulls: "error" raises `NullValueError` at a null; "mask" wraps the indices, or the rows of bags, in `Masked`;
            "fill" puts the fill value there, which must be given. A null bag is filled with an empty one. Inside bags,
            entries that are null or have a null name or value are an error; "fill" leaves them out.
        fill: index in the place of a null string; giving it implies `nulls="fill"`.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if the vocabulary is empty, if a key is there twice (it is named), or if an argument can't be.
        MissingFileError: if the file isn't there.
        MalformedFileError: if a line is there twice (it is named).

    Example:
        >>> import fastpipe
        >>> features = {"country": fastpipe.VocabularySpec(["AT", "DE"], unknown="bucket", fill=-1)}
        >>> reader = fastpipe.read_avro("data/*.avro", features=features, batch_size=4)
        >>> reader.features
        {
            "country": fastpipe.DenseSpec((), "int64", fill=-1),
        }
        >>> next(iter(reader))["country"].dtype
        dtype('int64')
    """

    vocabulary: Any  # A Vocabulary once made.
    _: KW_ONLY
    unknown: Unknown = "error"
    buckets: int | None = None

    _kind: ClassVar[str] = "lookup"
    _first: ClassVar[str] = "vocabulary"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unknown not in ("drop", "bucket", "error"):
            raise ValueError(f'unknown is "drop", "bucket" or "error", not {self.unknown!r}')
        if self.buckets is not None:
            if self.unknown != "bucket":
                raise ValueError(f'buckets= is for unknown="bucket", not for {self.unknown!r}')
            self._set("buckets", _count("buckets", self.buckets, 2**62))
        if not isinstance(self.vocabulary, Vocabulary):
            self._set("vocabulary", Vocabulary(self.vocabulary))
        self._check_size()

    @property
    def size(self) -> int:
        """Number of indices: one more than the greatest of the vocabulary, and the buckets."""
        return int(self.vocabulary.size) + (0 if self.unknown != "bucket" else self.buckets or 1)

    def _lower_lookup(self) -> LoweredLookup:
        table = self.vocabulary._table
        return table, self.unknown, self.buckets or 1, 0, self._separator(), self.values, self.layout


@dataclass(frozen=True, repr=False)
class HashSpec(LookupSpec):
    r"""Text as a hash, computed while rows are read: the index of a key is XXH3 of it, modulo the number of buckets.

    That is `xxhash.xxh3_64_intdigest(key, seed) % buckets` of the package xxhash, where the key of a bag's entry is
    `name + separator + term`. XXH3 has a specification, so indices stay the same over versions and machines.

    What becomes of which field is as for `VocabularySpec`.

    Args:
        buckets: number of indices, at least 1.
        seed: of the hash, 0 to 2**64 - 1.
        field: as for `VocabularySpec`, like the other arguments.
        separator: between name and term.
        dtype: of indices that are values.
        values: dtype of a bag's values.
        layout: of a bag.
        nulls: "error", "mask" or "fill".
        fill: index in the place of a null string.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if one can't be.

    Example:
        >>> import fastpipe
        >>> features = {"country": fastpipe.HashSpec(1000, nulls="mask")}
        >>> batch = next(iter(fastpipe.read_avro("data/*.avro", features=features, batch_size=4)))
        >>> int(batch["country"].values.max()) < 1000
        True
    """

    buckets: int
    _: KW_ONLY
    seed: int = 0

    _kind: ClassVar[str] = "lookup"
    _first: ClassVar[str] = "buckets"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("buckets", _count("buckets", self.buckets, 2**62))
        self._set("seed", _count("seed", self.seed, 2**64 - 1, least=0))
        self._check_size()

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.buckets

    def _lower_lookup(self) -> LoweredLookup:
        return None, "hash", self.buckets, self.seed, self._separator(), self.values, self.layout


def _check_number(what: str, why: str, dtype: str, kinds: tuple[str, ...]) -> None:
    if dtype.rstrip("0123456789") not in kinds:
        raise ValueError(f"{what}: {why}, so it isn't {dtype!r}")


def _count(what: str, value: Any, most: int, least: int = 1) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{what} is an integer, not {shown(value)}")
    if not least <= value <= most:
        raise ValueError(f"{what} is from {least} to {most}, not {value}")
    return int(value)


def described(features: Features) -> dict[str, list[Any]]:
    """What decides the indices of each `LookupSpec`, fit for JSON; of vocabularies a digest of keys and indices."""
    found = {}
    for name, spec in features.items():
        if isinstance(spec, LookupSpec):
            table, unknown, buckets, seed, separator, values, layout = spec._lower_lookup()
            keys = None if table is None else table.digest
            found[name] = [keys, unknown, buckets, seed, separator.hex(), values, layout, spec.nulls, spec.fill]
    return found


def interpretation(features: Features) -> dict[str, Any]:
    """What states hold about the lookups of a source that has nothing else to say; nothing if there are none."""
    found = described(features)
    return {"lookups": found} if found else {}


def in_form(features: Features, described: Callable[[], Iterable[Described]]) -> Features:
    """Features in which each `LookupSpec` is replaced by the spec of what it yields.

    Args:
        features: what was asked for.
        described: returns all of them as the extension module describes them. It is called if there is a `LookupSpec`.
    """
    if not any(isinstance(spec, LookupSpec) for spec in features.values()):
        return features
    found = inferred(described())
    return Features({name: _in_form(spec, found[name]) for name, spec in features.items()})


def _in_form(spec: Spec, found: Spec) -> Spec:
    if not isinstance(spec, LookupSpec):
        return spec
    if isinstance(found, SparseSpec):
        return replace(found, field=spec.field, layout=spec.layout)
    assert isinstance(found, (DenseSpec, RaggedSpec))
    return replace(found, field=spec.field, fill=spec.fill)
