"""Arguments that users give, checked so that a message names them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def flag(name: str, value: Any) -> bool:
    """A bool argument, Python's or NumPy's.

    Raises:
        TypeError: if it is none: what is true of a word such as `"no"` isn't what it says.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is True or False, not {shown(value)}")
    return bool(value)


def names(name: str, values: Any) -> list[str]:
    """A list of names.

    Raises:
        TypeError: if it is none, or one of them is no string.
    """
    if isinstance(values, str):
        raise TypeError(f"{name} is a list of names; did you mean [{shown(values)}]?")
    if isinstance(values, Mapping):
        raise TypeError(f"{name} is a list of names, not a dict: features= takes a dict from name to spec")
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} is a list of names, not {shown(values)}")
    found = list(values)
    for place, value in enumerate(found):
        if not isinstance(value, str):
            raise TypeError(f"{name} is a list of names, and number {place} of them is {shown(value)}, not a string")
    return [str(value) for value in found]


def shown(value: Any, most: int = 60) -> str:
    """A value as messages show it: its code if that is short, else its type."""
    kind = type(value).__name__
    if isinstance(value, (np.ndarray, Mapping)):
        return f"a {kind}"
    text = repr(value)
    if len(text) > most or "\n" in text:
        return f"a {kind}"
    return text


def imported(name: str) -> Any:
    """A module that somebody has imported; None if nobody has. Waits for whoever is importing it."""
    return importlib.import_module(name) if sys.modules.get(name) is not None else None
