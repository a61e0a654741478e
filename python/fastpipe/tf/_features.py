"""Features in TensorFlow's notation (`tf.io`) and in tensorflow-io's, as specs and as the tensors made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from fastpipe._arguments import shown
from fastpipe.specs import DenseSpec, Features, RaggedSpec, Spec
from fastpipe.specs._vocabularies import described

_ITEMS = re.compile(r"\[\*\]")


class Feature(NamedTuple):
    """A feature to read.

    Attributes:
        spec: Spec to read.
        shape: Shape of a row, if nested arrays are read as coordinates. Otherwise None.
        splits: Dtype of the row splits, if it isn't int64. Otherwise None.
    """

    spec: Spec
    shape: tuple[int | None, ...] | None = None
    splits: tf.DType | None = None


class _Merged(NamedTuple):
    """A SparseTensor that is made of several features.

    Attributes:
        indices: Names of the features of indices, one for each dimension of a row.
        values: Name of the feature of values.
        size: Size of each dimension of a row.
        is_sorted: Whether the values of each row are stored in the order of their indices.
    """

    indices: list[str]
    values: str
    size: list[int]
    is_sorted: bool


class Wanted:
    """The features that a user asked for.

    Args:
        features: Features by name: specs of fastpipe, or features of `tf.io` and tensorflow-io.

    Attributes:
        read: Features to read by name. Those of indices and values have other names than the user's.

    Raises:
        TypeError: If a feature has the wrong type.
        ValueError: If a feature is invalid.
    """

    def __init__(self, features: Any) -> None:
        if not isinstance(features, Mapping):
            raise TypeError(f"features must be a dict from feature name to spec; got {shown(features)}")
        self.read: dict[str, Feature] = {}
        self._merged: dict[str, _Merged] = {}
        for name, feature in features.items():
            try:
                if isinstance(feature, tf.io.SparseFeature):
                    self._merged[name] = self._parts(name, feature)
                else:
                    self.read[name] = _feature(name, feature)
            except (TypeError, ValueError) as error:
                raise type(error)(f"feature {name!r}: {error}") from None
        self.specs = Features({name: feature.spec for name, feature in self.read.items()})

    @property
    def key(self) -> str:
        """A text that is equal for equal features."""
        read = [(name, kind.spec._lower(), kind.shape, kind.splits) for name, kind in self.read.items()]
        return repr((read, self._merged, described(self.specs)))

    def _parts(self, name: str, feature: Any) -> _Merged:
        """Adds the features of indices and of values, which are fields of the records of an array."""
        keys = [feature.index_key] if isinstance(feature.index_key, str) else list(feature.index_key)
        size = [int(size) for size in tf.nest.flatten(feature.size)]
        if len(size) != len(keys):
            raise ValueError(f"size must have one number per index_key ({len(keys)}); got {shown(feature.size)}")

        def add(key: str, dtype: Any) -> str:
            part = f"{name} ({key})"
            path = key[1:] if key.startswith("@") else f"{name}[*].{key}"
            self.read[part] = Feature(RaggedSpec((None,), _dtype(dtype), field=_field(path)))
            return part

        indices = [add(key, tf.int64) for key in keys]
        return _Merged(indices, add(feature.value_key, feature.dtype), size, bool(feature.already_sorted))

    def finish(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the tensors that the user asked for, from those of `read`."""
        made = dict(values)
        for name, feature in self.read.items():
            if feature.splits is not None:
                made[name] = made[name].with_row_splits_dtype(feature.splits)
        for name, parts in self._merged.items():
            made[name] = _merged([made.pop(part) for part in parts.indices], made.pop(parts.values), parts)
        return {name: made[name] for name in sorted(made)}


def _merged(indices: list[tf.RaggedTensor], values: tf.RaggedTensor, parts: _Merged) -> tf.SparseTensor:
    message = f"feature {parts.values!r}: a row has more or fewer indices than values"
    equal = [tf.debugging.assert_equal(index.row_splits, values.row_splits, message) for index in indices]
    with tf.control_dependencies([check for check in equal if check is not None]):
        columns = [values.value_rowids(), *(index.flat_values for index in indices)]
    shape = tf.stack([values.nrows(), *(tf.constant(size, tf.int64) for size in parts.size)])
    sparse = tf.SparseTensor(tf.stack(columns, axis=1), values.flat_values, shape)
    return sparse if parts.is_sorted else tf.sparse.reorder(sparse)


def _feature(name: str, feature: Any) -> Feature:
    if isinstance(feature, Spec):
        return Feature(feature)
    if isinstance(feature, tf.io.FixedLenFeature):
        dtype = _dtype(feature.dtype)
        shape = tuple(tf.TensorShape(feature.shape).as_list())
        return Feature(DenseSpec(shape, dtype, field=_field(name), fill=_fill(feature.default_value, dtype)))
    if isinstance(feature, tf.io.RaggedFeature):
        if feature.partitions:
            raise ValueError("partitions aren't supported: use RaggedSpec for nested arrays, with a None per level")
        spec = RaggedSpec((None,), _dtype(feature.dtype), field=_field(feature.value_key or name))
        splits = tf.as_dtype(feature.row_splits_dtype)
        return Feature(spec, splits=None if splits == tf.int64 else splits)
    # tensorflow-io's class isn't a subclass and isn't imported here.
    if isinstance(feature, tf.io.VarLenFeature) or type(feature).__name__ == "VarLenFeatureWithRank":
        shape = (None,) * getattr(feature, "rank", 1)
        return Feature(RaggedSpec(shape, _dtype(feature.dtype), field=_field(name)), shape)
    raise TypeError(
        "expected a DenseSpec, RaggedSpec or SparseSpec, or a tf.io.FixedLenFeature, VarLenFeature, SparseFeature or "
        f"RaggedFeature; got {shown(feature)}"
    )


def _field(key: str) -> str:
    """Returns the path of a field from tensorflow-io's notation, in which `[*]` means all items of an array."""
    path = _ITEMS.sub("", key)
    if "[" in path or "]" in path:
        raise ValueError(
            f"of tensorflow-io's keys with brackets, only [*] (all items) is supported; got {key!r}: read the whole "
            "array or map, and select from it in dataset.map"
        )
    return path


def _dtype(dtype: Any) -> str:
    kind = tf.as_dtype(dtype)
    return "bytes" if kind == tf.string else str(kind.name)


def _fill(default: Any, dtype: str) -> Any:
    """Returns the single value that replaces all nulls."""
    if default is None:
        return None
    values = list(_flat(default))
    if not values or any(value != values[0] for value in values):
        raise ValueError(f"default_value must be a single value for all items; got {shown(default)}")
    return values[0].encode() if dtype == "bytes" and isinstance(values[0], str) else values[0]


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, tf.Tensor):
        values = values.numpy()
    if isinstance(values, np.ndarray | np.generic):
        values = values.tolist()
    if isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)
    else:
        yield values
