"""What users give, checked; and what Ray has given a process."""

from __future__ import annotations

import math
from typing import Any, SupportsIndex

import ray

from fastpipe._reader.ordering import integer
from fastpipe._reader.passes import Passes, passes_of
from fastpipe._reader.reader import Reader
from fastpipe._reader.rebatch import Rebatcher
from fastpipe.errors import UnsupportedError


def at_least(name: str, value: SupportsIndex, least: int) -> int:
    """An integer argument as an int.

    Raises:
        TypeError: if it is none.
        ValueError: if it is less.
    """
    number = integer(name, value)
    if number < least:
        raise ValueError(f"{name} is at least {least}, not {number}")
    return number


def whole_reader(reader: Any, what: str, instead: str) -> Passes:
    """The passes of a `Reader`.

    Raises:
        TypeError: if it is none.
        UnsupportedError: if it makes other batches of a reader's; it ends with what to do instead.
    """
    if not isinstance(reader, Reader):
        if not isinstance(reader, (Passes, Rebatcher)) and not isinstance(getattr(reader, "_passes", None), Passes):
            passes_of(reader)
        kind = type(reader).__name__
        raise UnsupportedError(f"{what} takes a Reader, as fastpipe.read_avro makes one, not {kind}: {instead}")
    return passes_of(reader)


def shipped(readers: Any) -> Any:
    """A reference to readers: Ray ships them once to each machine, not with each task.

    Raises:
        TypeError: if they can't be pickled.
        UnsupportedError: if they hold Arrow data that Ray can't pickle.
    """
    try:
        return ray.put(readers)
    except ValueError as error:
        # Of Arrow's types Ray has its own list.
        raise UnsupportedError(
            f"Ray can't pickle {readers!r}: {error}; cast such columns of the table, write it to a file and read that,"
            " or set RAY_DISABLE_CUSTOM_ARROW_DATA_SERIALIZATION=1 before Ray starts"
        ) from error


def take_given_processors(passes: Passes) -> None:
    """Lets a reader have as many threads as Ray has given CPUs to this process, unless it says how many itself."""
    given = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
    if given > 0:
        passes.limit_threads(math.ceil(given))
