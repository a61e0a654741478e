"""Interactions of users and items: preparing them, and reading them with sampled negatives."""

from __future__ import annotations

from fastpipe.interactions._data import PointLocation
from fastpipe.interactions._interactions import HeldOut, Interactions
from fastpipe.interactions._reading import read_interactions

__all__ = ["HeldOut", "Interactions", "PointLocation", "read_interactions"]
