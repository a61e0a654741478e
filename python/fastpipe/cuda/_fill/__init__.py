"""Devices filled with random rows: the types that `fastpipe.cuda.fill` returns."""

from __future__ import annotations

from fastpipe.cuda._fill._device_table import Filled
from fastpipe.cuda._fill._fill import Fill, fill

__all__ = ["Fill", "Filled", "fill"]
