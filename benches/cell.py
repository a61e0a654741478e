"""What was measured in one cell, and what follows from it."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field
from typing import Any

import plan
from peers import READERS


@dataclass
class Result:
    """What one reader did in one cell."""

    rows: int = 0
    batches: int = 0
    seconds: dict[int, float] = field(default_factory=dict)
    """Round -> wall time of a pass."""
    cpu: list[float] = field(default_factory=list)
    idle: int = 0
    """Anonymous memory before the first pass, in bytes."""
    peak: int = 0
    """The most during it."""
    error: str | None = None
    differs: list[str] = field(default_factory=list)
    """Columns whose sums aren't the generator's."""

    @property
    def wall(self) -> float:
        """Seconds a pass, the median of the rounds."""
        return statistics.median(self.seconds.values())

    @property
    def rate(self) -> float:
        """Records a second."""
        return self.rows / self.wall

    @property
    def cpu_a_row(self) -> float:
        """Seconds of CPU time, the median of the rounds."""
        return statistics.median(self.cpu) / self.rows

    def rates(self) -> dict[int, float]:
        """Round -> records a second."""
        return {turn: self.rows / seconds for turn, seconds in self.seconds.items()}


@dataclass
class Cell:
    """One data set with one codec, and what each reader did with it."""

    spec: plan.Spec
    batch: int
    rows: int
    raw_bytes: int
    file_bytes: int
    results: dict[str, Result] = field(default_factory=dict)

    def ratios(self, name: str) -> list[float]:
        """By what factor fastpipe was faster than a reader, in each round that both took part in."""
        ours, theirs = self.results.get("fastpipe"), self.results[name]
        if ours is None or ours is theirs or ours.error or theirs.error:
            return []
        own, other = ours.rates(), theirs.rates()
        return [own[turn] / other[turn] for turn in own if turn in other]

    def ratio(self, name: str) -> float | None:
        """The median of `ratios`."""
        found = self.ratios(name)
        return statistics.median(found) if found else None

    def fastest(self, peer: str) -> tuple[str, float] | None:
        """The reader of a peer that fastpipe beats by least, and by what factor.

        Args:
            peer: A `Reader.peer`.
        """
        found = [(name, self.ratio(name)) for name in self.results if READERS[name].peer == peer]
        known = [(name, ratio) for name, ratio in found if ratio is not None and not self.results[name].differs]
        return min(known, key=lambda pair: pair[1]) if known else None

    def refusal(self, peer: str) -> str | None:
        """Why no reader of a peer could do it, or None."""
        errors = [r.error for name, r in self.results.items() if READERS[name].peer == peer and r.error]
        return errors[0] if errors and self.fastest(peer) is None else None

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dataclasses.asdict(self) | {"spec": str(self.spec)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        """The inverse of `to_json`."""
        results = {
            name: Result(**fields | {"seconds": {int(turn): s for turn, s in fields["seconds"].items()}})
            for name, fields in data["results"].items()
        }
        return cls(**data | {"spec": plan.Spec.parse(data["spec"]), "results": results})
