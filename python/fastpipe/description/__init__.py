"""Statistics for features: counts, quantiles and moments in one pass, mergeable."""

from __future__ import annotations

from fastpipe.description._describing import describe
from fastpipe.description._description import Description
from fastpipe.description._feature import FeatureStatistics

__all__ = ["Description", "FeatureStatistics", "describe"]
