"""Checks of arguments, and the resources that Ray has assigned to a process."""

from __future__ import annotations

import math
from typing import Any

import ray

from fastpipe._arguments import integer
from fastpipe._reader.passes import Passes, passes_of
from fastpipe._reader.reader import Reader
from fastpipe._reader.rebatch import Rebatcher
from fastpipe.errors import UnsupportedError


def at_least(name: str, value: int, least: int) -> int:
    """Converts an integer argument to int.

    Raises:
        TypeError: If the argument isn't an integer.
        ValueError: If it is less than `least`.
    """
    number = integer(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}")
    return number


def whole_reader(reader: Any, what: str, instead: str) -> Passes:
    """Returns the passes of a `Reader`.

    Raises:
        TypeError: If the argument isn't a reader.
        UnsupportedError: If it wraps the batches of another reader. The message ends with `instead`, a workaround.
    """
    if not isinstance(reader, Reader):
        if not isinstance(reader, (Passes, Rebatcher)) and not isinstance(getattr(reader, "_passes", None), Passes):
            passes_of(reader)
        kind = type(reader).__name__
        raise UnsupportedError(f"{what} requires a fastpipe.Reader (see fastpipe.read_avro); got {kind}: {instead}")
    return passes_of(reader)


def shipped(readers: Any) -> Any:
    """Returns a Ray reference to readers. Ray ships them once to each node instead of with each task.

    Raises:
        TypeError: If the readers can't be pickled.
        UnsupportedError: If they hold Arrow data that Ray can't pickle.
    """
    try:
        return ray.put(readers)
    except ValueError as error:
        # Ray's own Arrow serializer supports only some Arrow types.
        raise UnsupportedError(
            f"Ray can't pickle {readers!r}: {error}; cast these columns of the table, or read the table from a file,"
            " or set RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION=1 before Ray starts"
        ) from error


def take_given_processors(passes: Passes) -> None:
    """Limits a reader's threads to the CPUs that Ray assigned to this process, unless the reader sets `num_threads`."""
    given = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
    if given > 0:
        passes.limit_threads(math.ceil(given))
