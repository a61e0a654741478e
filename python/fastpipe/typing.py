"""Types for annotations: options of readers, batches, and what methods of readers return.

Functions and methods of fastpipe create the objects; programs name the types in annotations and in `isinstance`.
"""

from __future__ import annotations

from fastpipe._expressions import Expr
from fastpipe._files._in_memory_files import ReadableFile
from fastpipe._formats import InferOptions
from fastpipe._locations import Location, MixtureLocation, PackLocation, RowLocation
from fastpipe._reader.growth import Growth
from fastpipe._reader.losses import Loss
from fastpipe._reader.mapped import Mapped
from fastpipe._reader.options import Options
from fastpipe._reader.partitions import Partition
from fastpipe._reader.plan import Plan
from fastpipe.batch import Batch
from fastpipe.specs import Features
from fastpipe.statistics import Description, FeatureStatistics
from fastpipe.statistics._shuffle_report import Measure, ShuffleReport

__all__ = [
    "Batch",
    "Description",
    "Expr",
    "FeatureStatistics",
    "Features",
    "Growth",
    "InferOptions",
    "Location",
    "Loss",
    "Mapped",
    "Measure",
    "MixtureLocation",
    "Options",
    "PackLocation",
    "Partition",
    "Plan",
    "ReadableFile",
    "RowLocation",
    "ShuffleReport",
]
