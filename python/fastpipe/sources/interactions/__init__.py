"""Interactions of users and items: preparing them, and reading them with sampled negatives."""

from __future__ import annotations

from fastpipe.sources.interactions._interactions import HeldOut, Interactions
from fastpipe.sources.interactions._reading import PointLocation, read_interactions

__all__ = ["HeldOut", "Interactions", "PointLocation", "read_interactions"]
