"""The features of `ATDSDataset`, and its files, which are opened once for all epochs.

Dtypes are not promoted and ranks are not changed to fit a file. Messages use the words of tensorflow-io where possible,
since programs and tests search for them.

Object stores and web servers are read by URL, as `read_avro` does. Other paths are only accessible through TensorFlow's
file systems (`hdfs://`, `ram://`). TensorFlow's C API can write such files but not read them, so `tf.io.gfile` copies
whole files to local storage.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import tensorflow as tf

from fastpipe._fastpipe import RemoteFile
from fastpipe._files._remote_files import is_remote
from fastpipe.avro._reading import AvroData
from fastpipe.errors import MissingFileError, SchemaError, in_file
from fastpipe.specs import Features

if TYPE_CHECKING:
    from fastpipe._boundary import Listed

ATDS_SUPPORTED_DTYPES = [tf.int32, tf.int64, tf.float32, tf.float64, tf.string, tf.bool]
"""The dtypes of features. The name is tensorflow-io's."""


class DenseFeature(namedtuple("DenseFeature", ["shape", "dtype"])):  # noqa: PYI024 - checks itself, in __new__
    """A feature of nested arrays with fixed lengths, as a Tensor.

    Args:
        shape: Shape of one row, each dimension at least 1. `[]` for a scalar.
        dtype: Dtype of the schema: tf.int32, int64, float32, float64, string or bool.

    Raises:
        ValueError: If a dimension or the dtype is invalid.
    """

    __slots__ = ()

    def __new__(cls, shape: Sequence[int], dtype: tf.DType) -> Self:
        _check(shape, dtype)
        if any(size < 0 for size in shape):
            raise ValueError(f"Each dimension should be greater than 0 in DenseFeature but found {shape}.")
        return super().__new__(cls, shape, dtype)


class SparseFeature(namedtuple("SparseFeature", ["shape", "dtype"])):  # noqa: PYI024
    """A feature from a record of `indices0`, `indices1`, ... and `values`, as a SparseTensor.

    Args:
        shape: Shape of one row. A dimension of -1 is as large as the batch requires.
        dtype: Dtype of the values.

    Raises:
        ValueError: If a dimension or the dtype is invalid, or `shape` is empty.
    """

    __slots__ = ()

    def __new__(cls, shape: Sequence[int], dtype: tf.DType) -> Self:
        _check(shape, dtype)
        if not len(shape):
            raise ValueError("SparseFeature cannot be scalar. A scalar is a DenseFeature.")
        return super().__new__(cls, shape, dtype)


class VarlenFeature(namedtuple("VarlenFeature", ["shape", "dtype"])):  # noqa: PYI024
    """A feature of nested arrays, as a SparseTensor.

    Args:
        shape: Shape of one row. A dimension of -1 may have any length. Other dimensions are exact.
        dtype: Dtype of the items.

    Raises:
        ValueError: If a dimension or the dtype is invalid.
    """

    __slots__ = ()

    def __new__(cls, shape: Sequence[int], dtype: tf.DType) -> Self:
        _check(shape, dtype)
        if any(size < -1 for size in shape):
            raise ValueError(f"Each dimension should be greater than 0 or -1 in VarlenFeature but found {shape}.")
        return super().__new__(cls, shape, dtype)


Feature: TypeAlias = DenseFeature | SparseFeature | VarlenFeature


def _check(shape: Any, dtype: Any) -> None:
    if shape is None:
        raise ValueError("Shape cannot be None. It is [] for a scalar.")
    if any(size is None or size == 0 for size in shape):
        raise ValueError(f"Dimension in shape cannot be None or 0 but found {shape}.")
    if dtype is None:
        raise ValueError("dtype cannot be None.")
    if dtype not in ATDS_SUPPORTED_DTYPES:
        raise ValueError(f"{dtype} is not supported in ATDS. Available dtypes are {ATDS_SUPPORTED_DTYPES}.")


_DTYPES = {
    "int": tf.int32,
    "long": tf.int64,
    "float": tf.float32,
    "double": tf.float64,
    "boolean": tf.bool,
    "string": tf.string,
    "bytes": tf.string,
}

_MOST_TEXT = 500
"""Maximum number of characters of a schema in a message."""


def check(path: str, schema_json: str, features: Mapping[str, Feature]) -> None:
    """Checks features against a file's schema.

    Raises:
        SchemaError: If a feature isn't a field of the file's records, or has another type or rank.
    """
    schema = json.loads(schema_json)
    names: dict[str, Any] = {}
    _collect(schema, "", names)
    if not (isinstance(schema, dict) and schema.get("type") == "record"):
        raise SchemaError(f"the file doesn't contain records of a record type (file {path})", path=path)
    fields = {field["name"]: field["type"] for field in schema["fields"]}
    space = _space(schema, "")
    for name, feature in sorted(features.items(), key=_turn):
        if name not in fields:
            reason = (
                f"User defined feature '{name}' cannot be found in the input data. "
                f"Input data schema: it has the fields {', '.join(fields)}"
            )
        else:
            found = _problem(_Types(names, space), fields[name], name, feature)
            if found is None:
                continue
            reason = f"{found}, but {feature} was requested"
        raise in_file(SchemaError, path, reason, feature=name)


def _turn(item: tuple[str, Feature]) -> tuple[bool, bool, str]:
    """Returns the sort key that checks dense features first, then sparse ones, to raise the error of tensorflow-io."""
    name, feature = item
    return isinstance(feature, VarlenFeature), isinstance(feature, SparseFeature), name


class _Types:
    """The named types of a schema, as seen from the fields of its records."""

    def __init__(self, names: dict[str, Any], space: str) -> None:
        self._names = names
        self._space = space

    def resolve(self, schema: Any) -> Any:
        """Resolves `{"type": ...}` and names to a type. Primitive types are strings."""
        while True:
            if isinstance(schema, str):
                if schema in _DTYPES or schema == "null":
                    return schema
                found = self._names.get(f"{self._space}.{schema}" if self._space else schema, self._names.get(schema))
                if found is None or found is schema:
                    return schema
                schema = found
            elif isinstance(schema, dict) and (isinstance(schema["type"], (dict, list)) or schema["type"] in _DTYPES):
                schema = schema["type"]
            else:
                return schema


def _problem(types: _Types, schema: Any, name: str, feature: Feature) -> str | None:
    schema = types.resolve(schema)
    if isinstance(schema, list):
        branches = [branch for branch in schema if types.resolve(branch) != "null"]
        if len(branches) != 1 or len(schema) > 2:
            return (
                f"Feature '{name}' has invalid union schema. A feature can only be an union of itself or an union of "
                f"'null' type and itself. Invalid union schema found: {_text(schema)}"
            )
        schema = types.resolve(branches[0])
    if isinstance(feature, SparseFeature):
        return _sparse_problem(types, schema, name, feature)
    whole, rank = schema, 0
    while _is(schema, "array"):
        schema, rank = types.resolve(schema["items"]), rank + 1
    if isinstance(schema, list) or _is(schema, "record") or _is(schema, "map"):
        kind = "Dense" if isinstance(feature, DenseFeature) else "Varlen"
        return f"{kind} feature '{name}' must be non-nullable nested arrays only. Invalid schema found: {_text(whole)}"
    if (problem := _dtype_problem(schema, name, feature, whole)) is not None:
        return problem
    if rank != len(feature.shape):
        return (
            f"Mismatch between avro schema rank and metadata rank in feature '{name}'. Avro schema rank: {rank}, "
            f"metadata rank: {len(feature.shape)}. Invalid schema found: {_text(whole)}"
        )
    return None


def _sparse_problem(types: _Types, schema: Any, name: str, feature: SparseFeature) -> str | None:
    if not _is(schema, "record"):
        return f"Sparse feature '{name}' must be a record of arrays. Invalid schema found: {_text(schema)}"
    fields = {field["name"]: types.resolve(field["type"]) for field in schema["fields"]}
    indices = [f"indices{axis}" for axis in range(len(feature.shape))]
    problem = None
    if not fields.keys() >= set(indices):
        problem = "Sparse schema indices should be contiguous (indices0, indices1, ...)."
    elif "values" not in fields:
        problem = "Sparse schema is missing values column."
    elif len(fields) > len(indices) + 1:
        problem = "Sparse schema can only contain 'indices' columns and a 'values' column."
    if problem is not None:
        wanted = f"{', '.join(indices)} and values"
        return f"{problem} Input data schema: {_text(schema)}, from which {wanted} are read for feature '{name}'"
    for field, kind in fields.items():
        items = types.resolve(kind["items"]) if _is(kind, "array") else None
        if field != "values" and items not in ("int", "long"):
            return (
                f"Unsupported indices type found in feature '{name}'. Sparse tensor indices must be a non-nullable "
                f"array of non-nullable int or long. Invalid schema found: {_text(schema)}"
            )
        if field == "values" and (problem := _dtype_problem(items, name, feature, schema)) is not None:
            return problem
    return None


def _dtype_problem(schema: Any, name: str, feature: Feature, whole: Any) -> str | None:
    if not (isinstance(schema, str) and schema in _DTYPES):
        return (
            f"Unsupported value type found in feature '{name}'. Tensor value must be a non-nullable array of "
            f"non-nullable int, long, float, double, boolean, bytes, or string. Invalid schema found: {_text(whole)}"
        )
    if _DTYPES[schema] == feature.dtype:
        return None
    dtype = {tf.float32: "float", tf.float64: "double"}.get(feature.dtype, feature.dtype.name)
    return (
        f"Schema value type and metadata type mismatch in feature '{name}'. Avro schema data type: {schema}, "
        f"metadata type: {dtype}. Invalid schema found: {_text(whole)}"
    )


def _is(schema: Any, kind: str) -> bool:
    return isinstance(schema, dict) and schema["type"] == kind


def _text(schema: Any) -> str:
    """Returns a schema for a message, with limited length because files may contain schemas of any length."""
    text = json.dumps(schema)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


def _space(schema: Any, outer: str) -> str:
    name = schema.get("name", "")
    return name.rpartition(".")[0] if "." in name else str(schema.get("namespace", outer))


def _collect(schema: Any, space: str, names: dict[str, Any]) -> None:
    """Collects all named types, which may be referenced elsewhere in the schema."""
    if isinstance(schema, list):
        for branch in schema:
            _collect(branch, space, names)
    elif isinstance(schema, dict):
        if schema["type"] in ("record", "error", "enum", "fixed"):
            space = _space(schema, space)
            name = schema["name"].rpartition(".")[2]
            names[f"{space}.{name}" if space else name] = schema
        for inner in (schema.get("items"), schema.get("values"), schema["type"]):
            if isinstance(inner, (dict, list)):
                _collect(inner, space, names)
        for field in schema.get("fields", ()):
            _collect(field["type"], space, names)


_SETTLED = 2 * 10**9
"""Nanoseconds within which two changes of a file may leave the same modification time on some systems."""


class Copies:
    """Local copies of files that only TensorFlow can read.

    They are deleted with this object. A changed file is copied again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._kept: dict[str, tuple[tuple[int, int], str]] = {}
        self._count = 0

    def local(self, path: str) -> str:
        """Returns the local path of a file, or its URL if fastpipe reads it by URL.

        Raises:
            MissingFileError: If the file doesn't exist.
            NotImplementedError: If TensorFlow doesn't support the file system.
        """
        scheme, separator, rest = path.partition("://")
        if not separator or os.sep in scheme or is_remote(path):
            return path
        if scheme == "file":
            return rest
        with self._lock:
            try:
                return self._copied(path)
            except tf.errors.NotFoundError:
                raise MissingFileError(f"there is no such file (file {path})", path=path) from None
            except tf.errors.UnimplementedError as error:
                raise NotImplementedError(
                    f"{error.message} Import a module that adds {scheme}:// to it, or copy the files to a local folder "
                    f"(file {path})"
                ) from None

    def named(self, text: str) -> str:
        """Returns a message in which paths of copies are replaced by the original paths."""
        for path, (_, copy) in self._kept.items():
            text = text.replace(copy, path)
        return text

    def _copied(self, path: str) -> str:
        found = tf.io.gfile.stat(path)
        stamp = (found.length, found.mtime_nsec)
        kept = self._kept.get(path)
        if kept is not None and kept[0] == stamp and found.mtime_nsec < time.time_ns() - _SETTLED:
            return kept[1]
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="fastpipe-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._count += 1
        folder = os.path.join(self._folder, str(self._count))
        os.mkdir(folder)
        copy = os.path.join(folder, os.path.basename(path) or "file")
        tf.io.gfile.copy(path, copy)
        # Keep the previous copy, because another thread may be reading it.
        self._kept[path] = stamp, copy
        return copy


_KEPT = 4
"""Number of sets of files that are kept open for later epochs. Each set has an index and the memory of its batches."""

_Stamp: TypeAlias = "tuple[int, int, int, int, int] | Listed"


class OpenedFiles:
    """Opened datasets. The last few datasets are kept for later epochs.

    A dataset is opened again if the size, the modification time or the identity of any of its files has changed, or the
    version of a remote file.
    Datasets with files that were modified within the last two seconds aren't kept, because another change could go
    unnoticed.

    Args:
        features: Features to open the files for.
        check: Function that checks a file's schema against the features, given the file's path and the schema's JSON.
            It raises an error if they don't match.
    """

    def __init__(self, features: Features, check: Callable[[str, str], None]) -> None:
        self._features = features
        self._check = check
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, ...], tuple[list[_Stamp], AvroData]] = OrderedDict()

    def open(self, paths: tuple[str, ...]) -> tuple[AvroData, list[Exception]]:
        """Returns the dataset of these files, and the errors of damaged files.

        Several passes may read it at the same time.

        The dataset contains the blocks of a damaged file that are before the damage.

        Raises:
            FastpipeError: If `read_avro` would raise it, or `check` raises it.
        """
        # Taken before anything is read, so that later changes are noticed in the next epoch.
        files = [RemoteFile.open(path, []) if is_remote(path) else path for path in paths]
        stamps = _stamps(files)
        with self._lock:
            kept = self._kept.pop(paths, None)
            if kept is not None and kept[0] == stamps:
                self._kept[paths] = kept
                return kept[1], []
        damaged: list[Exception] = []
        data = AvroData(files, self._features, check=self._check, damaged=damaged)
        if stamps is not None and not damaged:
            with self._lock:
                self._kept[paths] = stamps, data
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        return data, damaged


def _stamps(files: Sequence[str | RemoteFile]) -> list[_Stamp] | None:
    """Returns values that change when a file changes. None if a change might go unnoticed, or a file doesn't exist."""
    settled = time.time_ns() - _SETTLED
    stamps: list[_Stamp] = []
    for file in files:
        if isinstance(file, RemoteFile):
            stamps.append(file.entry)
            continue
        try:
            found = os.stat(file)
        except OSError:  # Opening the file reports the error.
            return None
        if max(found.st_mtime_ns, found.st_ctime_ns) >= settled:
            return None
        stamps.append((found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_dev, found.st_ino))
    return stamps
