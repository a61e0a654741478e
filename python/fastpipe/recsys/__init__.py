"""Interactions of users and items: preparing them, and reading them with sampled negatives."""

from __future__ import annotations

from fastpipe._locations import PointLocation
from fastpipe.recsys._evaluation import Candidates, evaluation_candidates, hit_rate, ndcg
from fastpipe.recsys._interactions import HeldOut, Interactions
from fastpipe.recsys._reading import read_interactions

__all__ = [
    "Candidates",
    "HeldOut",
    "Interactions",
    "PointLocation",
    "evaluation_candidates",
    "hit_rate",
    "ndcg",
    "read_interactions",
]
