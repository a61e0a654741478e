"""Statistics of all features of a data set."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastpipe._arguments import shown
from fastpipe._text import clean, plural, table
from fastpipe.errors import SchemaError, StateError
from fastpipe.statistics._feature import FeatureStatistics

__all__ = ["Description"]

_VERSION = 1


class Description(Mapping[str, FeatureStatistics]):
    """Statistics of features, by their names; `print(description)` shows them as a table.

    Those of parts of a data set are merged: of ranks, partitions or workers, each row once.

    Attributes:
        rows: that were seen.
    """

    def __init__(self, features: Mapping[str, FeatureStatistics], rows: int) -> None:
        self._features, self.rows = dict(features), rows

    def __getitem__(self, name: str) -> FeatureStatistics:
        try:
            return self._features[name]
        except KeyError:
            raise KeyError(f"{name!r}: there are {', '.join(map(repr, self._features))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def merge(self, other: Description) -> None:
        """Adds what another has seen of the same features. The other stays as it is.

        Raises:
            SchemaError: if it is of other features.
            TypeError: if it is no description.
        """
        if not isinstance(other, Description):
            raise TypeError(f"a Description is merged, not {shown(other)}")
        if not other.rows:
            return
        if not self.rows:
            # Of nothing: it takes over what the other has, and shares nothing with it.
            copied = Description.from_json(other.to_json())
            self._features, self.rows = copied._features, copied.rows
            return
        if set(self) != set(other):
            raise SchemaError(f"the descriptions are of other features: {sorted(self)} and {sorted(other)}")
        for name, feature in self._features.items():
            if feature.form != other[name].form:
                reason = f"{name!r} is {feature.dtype} in one description, and {other[name].dtype} in the other"
                raise SchemaError(reason, feature=name, reason=reason)
        for name, feature in self._features.items():
            feature.merge(other[name])
        self.rows += other.rows

    @classmethod
    def merged(cls, descriptions: Iterable[Description]) -> Description:
        """All of them as one; the given ones stay as they are.

        Raises:
            SchemaError: if they are of different features.
            ValueError: if there is none.
        """
        found: Description | None = None
        for each in descriptions:
            if found is None:
                found = cls.from_json(each.to_json())
            else:
                found.merge(each)
        if found is None:
            raise ValueError("there is no description to merge")
        return found

    def to_json(self) -> str:
        """As text, for files and other processes."""
        features = {name: feature.stored() for name, feature in self._features.items()}
        return json.dumps({"version": _VERSION, "rows": self.rows, "features": features})

    @classmethod
    def from_json(cls, text: str) -> Description:
        """What `to_json` wrote.

        Raises:
            StateError: if the text is damaged, or of another version.
        """
        try:
            stored = json.loads(text)
            version = stored["version"]
        except (ValueError, TypeError, KeyError) as error:
            raise StateError(f"the description is damaged: {error!r}") from None
        if version != _VERSION:
            raise StateError(f"the description is of version {shown(version)}, and this reads {_VERSION}")
        try:
            features = {name: FeatureStatistics.restored(each) for name, each in stored["features"].items()}
            return cls(features, int(stored["rows"]))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            raise StateError(f"the description is damaged: {error!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Description.from_json, (self.to_json(),)

    def __str__(self) -> str:
        width = max(shutil.get_terminal_size((120, 24)).columns, 60)
        header = ["feature", "dtype", "nulls", "distinct", "mean", "deviation", "minimum", "median", "maximum", "most"]
        rows = [[clean(name), *_cells(feature)] for name, feature in self._features.items()]
        return f"{plural(self.rows, 'row')}\n{table(header, rows, width, right=range(2, 9))}"


def _cells(feature: FeatureStatistics) -> list[str]:
    nulls = f"{feature.null_share:.1%}" if feature.nulls else "0"
    distinct = "" if feature.kind == "real" else f"{feature.distinct[0]:,.0f}"
    if feature.kind in ("text", "bytes"):
        numbers = [""] * 5
    else:
        median = feature.quantile(0.5)
        found = (feature.mean, feature.deviation, feature.minimum, median, feature.maximum)
        numbers = [
            f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value) for value in found
        ]
    most = "" if feature.kind == "real" else ", ".join(clean(str(value)) for value in feature.counts(3))
    dtype = feature.dtype if feature.lengths is None else f"{feature.dtype} x {feature.lengths.mean:.3g}"
    return [dtype, nulls, distinct, *numbers, most]


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
