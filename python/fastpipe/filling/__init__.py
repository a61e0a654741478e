"""Devices filled with random rows: what `fastpipe.cuda.fill` returns."""

from __future__ import annotations

from fastpipe.filling._fill import Fill, fill
from fastpipe.filling._filled import Filled

__all__ = ["Fill", "Filled", "fill"]
