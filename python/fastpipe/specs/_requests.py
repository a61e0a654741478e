"""The features that a caller requests: the arguments `features`, `columns` and `overrides` of a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from fastpipe._arguments import column_names, shown
from fastpipe.errors import SchemaError, UnsupportedError
from fastpipe.specs import Features, Spec
from fastpipe.specs._vocabularies import report_unknown_keys

# The number of columns that a message lists.
_SHOWN = 10


@dataclass(frozen=True)
class FeatureRequest:
    """Checked arguments that select features.

    Attributes:
        features: All features to read; None to infer them.
        columns: The names of the columns to infer, at least one; None for all.
        overrides: Specs that replace inferred specs.
    """

    features: Features | None
    columns: list[str] | None = None
    overrides: Features = field(default_factory=Features)

    @classmethod
    def of(
        cls,
        features: Mapping[str, Spec] | None,
        columns: str | Sequence[str] | None,
        overrides: Mapping[str, Spec] | None,
    ) -> Self:
        """Returns the request after checking the arguments.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If `features` is passed with another argument, or if `features` or `columns` is empty.
        """
        for name, given in (("columns", columns), ("overrides", overrides)):
            if features is not None and given is not None:
                raise ValueError(
                    "pass either features (defines all features) or columns and overrides (select inferred features "
                    f"and change their specs), not both; got features and {name}"
                )
        if overrides is not None and not isinstance(overrides, Mapping):
            raise TypeError(f"overrides must be a dict from name to spec; got {shown(overrides)}")
        wanted = None if features is None else Features(features)
        if wanted is not None and not wanted:
            raise ValueError("features is empty: pass at least one feature")
        changed = Features(overrides)
        report_unknown_keys(changed if wanted is None else wanted)
        return cls(wanted, column_names(columns), changed)

    def changed(self, inferred: Features, left_out: Mapping[str, str] | None = None) -> Features:
        """Returns inferred features with the overrides.

        An override of a column that was inferred as several nested features, such as a bag, replaces all of them.

        Args:
            inferred: The inferred specs of the selected columns.
            left_out: The columns that can't be inferred, each with the reason.

        Raises:
            SchemaError: If an override names none of the inferred features.
            UnsupportedError: If an override names a column that was left out.
        """
        if not self.overrides:
            return inferred
        names = {name: name for name in inferred if name in self.overrides}
        for name in self.overrides:
            if name in inferred:
                continue
            nested = [other for other in inferred if other.startswith(f"{name}.") and other not in self.overrides]
            if not nested:
                raise self._unknown(name, inferred, left_out or {})
            names |= dict.fromkeys(nested, name)
        found: dict[str, Spec] = {}
        for other, spec in inferred.items():
            name = names.get(other, other)
            found[name] = self.overrides.get(name, spec)
        return Features(found)

    def _unknown(self, name: str, inferred: Features, left_out: Mapping[str, str]) -> SchemaError | UnsupportedError:
        import difflib  # Only this error message needs it.

        if name in left_out:
            reason = f"overrides: column {name!r} can't be read: {left_out[name]}"
            return UnsupportedError(reason, feature=name)
        folded = {other.casefold(): other for other in inferred}
        near = [repr(folded[other]) for other in difflib.get_close_matches(name.casefold(), folded)]
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        else:
            more = f" and {len(inferred) - _SHOWN} more" if len(inferred) > _SHOWN else ""
            hint = f"the columns are {', '.join(map(repr, list(inferred)[:_SHOWN])) or 'none'}{more}"
        what = "there is no column" if self.columns is None else "columns= doesn't select a column"
        return SchemaError(f"overrides: {what} {name!r}; {hint}", feature=name)
