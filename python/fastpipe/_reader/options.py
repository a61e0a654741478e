"""The options that readers of all sources share. Only this module documents, defaults and checks them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeVar, Unpack

from fastpipe._arguments import flag
from fastpipe._reader.dataset import Dataset
from fastpipe._reader.ordering import Ordering, OrderOptions
from fastpipe._reader.pass_options import PassOptions
from fastpipe._reader.reader import Reader, made

_Made = TypeVar("_Made", bound=Callable[..., Reader])


class Options(OrderOptions, total=False):
    """Keyword arguments of every function that creates a reader, such as `read_avro` and `from_arrow`.

    A unit is the part of a source that is read at once: an Avro block, a Parquet row group, an Arrow record batch, a
    value of `Units.read`, a range of rows of an in-memory table, or a shard of interactions.

    Attributes:
        epochs: Number of epochs in each pass, 1 to 2^31 - 1. Each epoch of a shuffled reader has a different order.
            None repeats without end. Defaults to 1.
        num_threads: Number of threads that make batches, 1 to 4096. `"auto"` adds threads while throughput improves, up
            to the processors that the process may use, and uses fewer if the consumer is slower. Doesn't change which
            batches are yielded. Defaults to `"auto"`.
        prefetch: Number of batches that are prepared in advance, at least 1. None keeps all threads busy. Doesn't
            change which batches are yielded. Defaults to None.
        memory_limit: Memory for open units and for batches that are not yet yielded, as a number of bytes or as a
            string with a unit (`"512MB"`, `"1.5GiB"`). It bounds how far the reader reads ahead, but doesn't change
            which batches are yielded. Batches that the consumer holds are not included. A unit that needs more than the
            limit when it is open raises `LimitError`. Defaults to None: no limit.
        progress: Whether to show a progress bar (extra `progress`). Defaults to False.
    """

    epochs: int | None
    num_threads: int | Literal["auto"] | None
    prefetch: int | None
    memory_limit: int | str | None
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

# The headings under which `help` shows the options, which are in this order in signatures, too.
_GROUPS: dict[str, tuple[str, ...]] = {
    "Order of the rows": ("shuffle", "shuffle_buffer", "seed", "drop_last", "epochs"),
    "Ranks": ("rank", "world_size", "shard_by", "on_uneven"),
    "Resources": ("num_threads", "prefetch", "memory_limit", "progress"),
}
_OPTIONS = tuple(name for names in _GROUPS.values() for name in names)

# The place in a function's docstring where the options are inserted.
_REFERENCE = re.compile(r"^ +\*\*options: .*\n(?: {8,}.*\n)*", re.MULTILINE)
# An entry of a docstring section: a name and its description.
_ENTRY = re.compile(r"^ {4}(\w+): .*\n(?: {8,}.*\n)*", re.MULTILINE)


def _entries(text: str) -> dict[str, str]:
    return {entry[1]: entry[0] for entry in _ENTRY.finditer(inspect.cleandoc(text) + "\n")}


def _grouped(entries: dict[str, str], section: str) -> str:
    """Returns a section of a docstring for each group. Parsers of Google style read them as one section."""
    groups = (f"{title}\n\n{section}:\n" + "".join(map(entries.__getitem__, _GROUPS[title])) for title in _GROUPS)
    return "\n".join(groups)


if Options.__doc__ and OrderOptions.__doc__:  # python -OO removes docstrings.
    _described = _entries(OrderOptions.__doc__) | _entries(Options.__doc__)
    _summary = inspect.cleandoc(Options.__doc__.partition("Attributes:\n")[0])
    Options.__doc__ = f"{_summary}\n\n{_grouped(_described, 'Attributes')}"


def takes_options(**defaults: Unpack[Options]) -> Callable[[_Made], _Made]:
    """Shows the options in the signature and the docstring of a function that has `**options: Unpack[Options]`.

    Type checkers and editors read the options from that annotation. Tools that inspect functions at run time, such as
    `help`, need the signature and docstring. An option that the function's docstring already describes keeps that
    description. The docstring has an Args section for each group of options, with a heading.

    Args:
        defaults: Defaults that differ from the usual ones. `Settings` applies them.
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
                annotation=getattr(Options.__annotations__[name], "__forward_arg__", Options.__annotations__[name]),
            )
            for name in _OPTIONS
        ]
        described.__signature__ = signature.replace(parameters=[*own, *options])
        if function.__doc__ and Options.__doc__:  # python -OO removes docstrings.
            described.__doc__ = _with_options(inspect.cleandoc(function.__doc__), _entries(Options.__doc__))
        return function

    return describe


def _with_options(text: str, options: dict[str, str]) -> str:
    own = {name: entry for name, entry in _entries(text).items() if name in options}
    for entry in own.values():
        text = text.replace(entry, "")
    text = text.replace("Args:\n", "What is read\n\nArgs:\n", 1)
    return _REFERENCE.sub(lambda _: "\n" + _grouped(options | own, "Args"), text, count=1)


class Settings:
    """Options that are checked before any data is read.

    Args:
        function: The function that takes the options (see `takes_options`).
        batch_size: Rows per batch.
        options: All other options that the user passed.

    Raises:
        TypeError: If an argument has the wrong type or is unknown.
        ValueError: If a value is out of range, or if two arguments exclude each other.
    """

    def __init__(self, function: Callable[..., Reader], batch_size: int, options: Options) -> None:
        parameters = inspect.signature(function).parameters
        for unknown in options.keys() - Options.__annotations__.keys():
            import difflib  # Only this error message needs it.

            near = difflib.get_close_matches(unknown, parameters, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f": it takes {', '.join(parameters)}"
            raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {unknown!r}{hint}")
        given: dict[str, Any] = {name: parameters[name].default for name in Options.__annotations__} | dict(options)
        self.ordering = Ordering.checked(batch_size=batch_size, **{name: given[name] for name in _ORDERING})
        self.running = PassOptions.checked(**{name: given[name] for name in _RUNNING})
        self._progress = flag("progress", given["progress"])
        self._epochs = given["epochs"]

    def reader(self, data: Dataset) -> Reader:
        """Returns a reader of a dataset."""
        ordering = self.ordering
        if ordering.shuffle != "sequential" and ordering.shuffle_buffer is None:
            ordering = replace(ordering, shuffle_buffer=data.default_window(ordering.batch_size))
        return made(data, ordering=ordering, running=self.running, progress=self._progress, epochs=self._epochs)
