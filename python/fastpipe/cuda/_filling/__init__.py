"""Devices filled with random rows: what `fastpipe.cuda.fill` returns."""

from __future__ import annotations

from fastpipe.cuda._filling._fill import Fill, fill
from fastpipe.cuda._filling._filled import Filled

__all__ = ["Fill", "Filled", "fill"]
