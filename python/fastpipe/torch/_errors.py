"""Errors of a loader's workers, which arrive in the process that trains with their attributes.

`DataLoader` sends the class of an error and its text, and raises `class(text)` in the process that trains: attributes
are lost. So a worker raises an error of a class that knows them; a class of its own for each error, which is pickled as
what it was made of.
"""

from __future__ import annotations

import copyreg
from typing import Any

from fastpipe.errors import FastpipeError

__all__ = ["carrying"]


class _Carrier(type):
    """The type of such classes."""

    _of: type[FastpipeError]
    _attributes: dict[str, Any]


def carrying(error: FastpipeError) -> FastpipeError:
    """An error of the same class and text, whose attributes outlast `type(error)(another_text)`."""
    kind = type(error)
    if isinstance(kind, _Carrier):
        return error
    # What is pickled for it, attributes that aren't in __dict__ among it.
    attributes = error.__reduce__()[2]
    found: FastpipeError = _carrier(kind, attributes)(*error.args)
    return found.with_traceback(error.__traceback__)


def _carrier(of: type[FastpipeError], attributes: dict[str, Any]) -> Any:
    def begin(self: FastpipeError, message: str) -> None:
        of.__init__(self, message)
        for name, value in attributes.items():
            setattr(self, name, value)

    names = {"__init__": begin, "__module__": of.__module__, "__doc__": of.__doc__}
    made = _Carrier(of.__name__, (of,), names)
    made._of, made._attributes = of, attributes
    return made


def _reduced(kind: _Carrier) -> tuple[Any, ...]:
    return _carrier, (kind._of, kind._attributes)


copyreg.pickle(_Carrier, _reduced)
