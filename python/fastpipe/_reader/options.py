"""The options that readers of all sources share: documented, given defaults and checked here alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, SupportsIndex, TypeVar, Unpack

from fastpipe._arguments import flag
from fastpipe._reader.dataset import Dataset
from fastpipe._reader.ordering import Ordering, OrderOptions
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.reader import Reader, made

_Made = TypeVar("_Made", bound=Callable[..., Reader])


class Options(OrderOptions, total=False):
    """Keyword arguments that every function which makes a reader takes: `read_avro`, `from_arrow` and their like.

    A source's units are the blocks of Avro files, the row groups of Parquet files, the record batches of Arrow files,
    what `Units.read` returns, stretches of a table in memory, shards of interactions.

    Attributes:
        epochs: how often each pass goes through the data, each time in another order; None for without end.
        num_threads: threads that make batches. `"auto"`: as many as improve throughput, of the processors that the
            process may use; fewer when the consumer is slower than they are. Changes nothing of what is yielded.
        prefetch: batches made ahead of the consumer, at least one; None for as many as keep the threads busy. Changes
            nothing of what is yielded.
        memory_limit: bytes that are held for units and for batches that aren't yielded yet, as a number or with a unit
            (`"512MB"`, `"1.5GiB"`); None for no limit. Bounds how far ahead is read, and changes nothing of what is
            yielded. What the process itself takes comes on top, and what the consumer holds. A unit that alone takes
            more than the limit when it is open is a `LimitError`. Without a limit the process keeps up to 128 MB for
            readers to come, until one with a limit begins.
        progress: whether to show a progress bar (extra `progress`).
    """

    epochs: SupportsIndex | None
    num_threads: SupportsIndex | Literal["auto"] | None
    prefetch: SupportsIndex | None
    memory_limit: SupportsIndex | str | None
    progress: bool


_ORDERING = tuple(OrderOptions.__annotations__)
_DEFAULTS: dict[str, Any] = {
    **{name: inspect.signature(Ordering.checked).parameters[name].default for name in _ORDERING},
    "epochs": 1,
    "num_threads": "auto",
    "prefetch": None,
    "memory_limit": None,
    "progress": False,
}
_RUNNING = ("num_threads", "prefetch", "memory_limit")

# Where docstrings of functions refer to the options.
_REFERENCE = re.compile(r"^ +\*\*options: .*\n(?: {8,}.*\n)*", re.MULTILINE)
# A name and what is said of it, in a section of a docstring.
_ENTRY = re.compile(r"^ {4}(\w+): .*\n(?: {8,}.*\n)*", re.MULTILINE)

if Options.__doc__ and OrderOptions.__doc__:  # With python -OO there are none.
    _before, _attributes, _own = Options.__doc__.partition("Attributes:\n")
    Options.__doc__ = _before + _attributes + OrderOptions.__doc__.partition("Attributes:\n")[2].rstrip(" ") + _own


def takes_options(**defaults: Unpack[Options]) -> Callable[[_Made], _Made]:
    """Shows the options in the signature and in the docstring of a function that has `**options: Unpack[Options]`.

    Type checkers and editors know them by that annotation. This is for those who ask at run time, such as `help`. What
    the function's docstring says itself of an option stays.

    Args:
        defaults: those that differ from most functions'. `Settings` applies them.
    """

    def describe(function: _Made) -> _Made:
        described: Any = function
        signature = inspect.signature(function)
        own = [given for given in signature.parameters.values() if given.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default={**_DEFAULTS, **defaults}[name],
                annotation=getattr(annotation, "__forward_arg__", annotation),
            )
            for name, annotation in Options.__annotations__.items()
        ]
        described.__signature__ = signature.replace(parameters=[*own, *options])
        if function.__doc__ and Options.__doc__:  # With python -OO there are none.
            described.__doc__ = _with_options(inspect.cleandoc(function.__doc__), inspect.cleandoc(Options.__doc__))
        return function

    return describe


def _with_options(text: str, options: str) -> str:
    said = {entry[1] for entry in _ENTRY.finditer(text)}
    entries = (entry for entry in _ENTRY.finditer(options + "\n") if entry[1] not in said)
    return _REFERENCE.sub(lambda _: "".join(entry[0] for entry in entries), text, count=1)


class Settings:
    """Options, checked before any data is looked at.

    Args:
        function: that takes them (see `takes_options`).
        batch_size: rows a batch.
        options: what else the user gave.

    Raises:
        TypeError: for arguments of the wrong type, and for unknown ones.
        ValueError: for values out of range, and for arguments that exclude each other.
    """

    def __init__(self, function: Callable[..., Reader], batch_size: SupportsIndex, options: Options) -> None:
        parameters = inspect.signature(function).parameters
        for unknown in options.keys() - Options.__annotations__.keys():
            import difflib  # Only this error needs it.

            near = difflib.get_close_matches(unknown, parameters, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f": it takes {', '.join(parameters)}"
            raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {unknown!r}{hint}")
        given: dict[str, Any] = {name: parameters[name].default for name in Options.__annotations__} | dict(options)
        self.ordering = Ordering.checked(batch_size=batch_size, **{name: given[name] for name in _ORDERING})
        self.running = PassOptions.checked(**{name: given[name] for name in _RUNNING})
        self._progress = flag("progress", given["progress"])
        self._epochs = given["epochs"]

    def reader(self, data: Dataset, default_window: Callable[[int], int] | None = None) -> Reader:
        """The reader of a data set.

        Args:
            data: the data set.
            default_window: makes of the batch size how many rows are shuffled at once where the user doesn't say; None
                for 16 batches or 64 average units, whichever is more.
        """
        ordering = self.ordering
        if default_window is not None and ordering.shuffle != "sequential" and ordering.shuffle_buffer is None:
            ordering = replace(ordering, shuffle_buffer=default_window(ordering.batch_size))
        return made(data, ordering=ordering, running=self.running, progress=self._progress, epochs=self._epochs)


# Rows of a window are counted in 32 bits.
LARGEST_WINDOW = 2**31


def whole_window(data: Dataset) -> Callable[[int], int]:
    """The default window of data in memory: all rows, up to 2^31, since their permutation costs no reading.

    It depends on the data, not on the machine or on the memory that may be taken, and so does the order.
    """
    return lambda batch_size: max(min(data.handle.num_rows, LARGEST_WINDOW), batch_size)
