"""Specs of columns: those that users ask for, and those that fastpipe wrote beside the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastpipe._arguments import names
from fastpipe._arrow import features_of
from fastpipe.specs import DenseSpec, Features, RaggedSpec, Spec

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["asked_for", "is_time", "rewritten", "written"]


def asked_for(
    features: Mapping[str, Spec] | None, columns: Sequence[str] | None
) -> tuple[Features | None, list[str] | None]:
    """The arguments `features` and `columns` of a reader.

    Raises:
        TypeError: if one is of the wrong type.
        ValueError: if both are given, or one is empty.
    """
    if features is not None and columns is not None:
        raise ValueError(
            "give features or columns, not both: features says the form of each, columns takes what is inferred"
        )
    wanted = None if features is None else Features(features)
    chosen = None if columns is None else names("columns", columns)
    for name, given in (("features", wanted), ("columns", chosen)):
        if given is not None and not given:
            raise ValueError(f"{name} is empty: name at least one")
    return wanted, chosen


def written(schema: pa.Schema, columns: list[str] | None) -> Features | None:
    """The specs that fastpipe wrote beside columns; None if it didn't, or if one of `columns` isn't among them.

    Raises:
        SchemaError: if they can't be read.
        UnsupportedError: if a later version of fastpipe has written them.
    """
    found = features_of(schema)
    return None if found is None else rewritten(found, columns)


def rewritten(features: Features, columns: list[str] | None) -> Features | None:
    """The specs of what a reader of these features yields; None if one of `columns` isn't among them."""
    if columns is not None and not features.keys() >= set(columns):
        return None
    chosen = features if columns is None else {name: features[name] for name in columns}
    return Features({name: _finished(spec) for name, spec in chosen.items()})


def _finished(spec: Spec) -> Spec:
    """The spec of what a spec has made: fields were renamed, lists padded or counted, and nulls replaced."""
    # Arrow data have nulls for NaT and for NaN that stands for null. They become NaT and NaN again.
    fill = spec.fill if spec._nan_is_null else None
    nulls = "mask" if spec.nulls == "mask" else "fill" if is_time(spec) or fill is not None else "error"
    options: dict[str, Any] = {"field": None, "fill": fill, "nulls": nulls}
    if isinstance(spec, DenseSpec):
        options |= {"pad": None}
    if isinstance(spec, (DenseSpec, RaggedSpec)):
        options |= {"length": False}
    return replace(spec, **options)


def is_time(spec: Spec) -> bool:
    """Whether its values are times, which may be NaT."""
    return bool(spec.dtype.startswith(("datetime64", "timedelta64")))
