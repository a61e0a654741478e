"""Statistics for features: counts, quantiles and moments in one pass, mergeable."""

from __future__ import annotations

from fastpipe.statistics._description import Description, describe
from fastpipe.statistics._feature import FeatureStatistics

__all__ = ["Description", "FeatureStatistics", "describe"]
