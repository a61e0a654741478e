"""Statistics of features: counts, quantiles and moments, computed in one pass and mergeable."""

from __future__ import annotations

from fastpipe.statistics._description import Description
from fastpipe.statistics._feature import FeatureStatistics

__all__ = ["Description", "FeatureStatistics"]
