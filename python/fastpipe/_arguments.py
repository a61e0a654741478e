"""Checks of arguments that users pass. Error messages name the argument."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def flag(name: str, value: Any) -> bool:
    """Returns a bool argument, which may be a Python or NumPy bool.

    Raises:
        TypeError: If the value isn't a bool. Truthiness is not used because `"no"` would be true.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False; got {shown(value)}")
    return bool(value)


def names(name: str, values: Any) -> list[str]:
    """Returns a list of names.

    Raises:
        TypeError: If the value isn't an iterable of strings, or if it is a single string or a dict.
    """
    if isinstance(values, str):
        raise TypeError(f"{name} must be a list of names; did you mean [{shown(values)}]?")
    if isinstance(values, Mapping):
        raise TypeError(f"{name} must be a list of names; got a dict")
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of names; got {shown(values)}")
    found = list(values)
    for place, value in enumerate(found):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a list of strings; got {shown(value)} at index {place}")
    return [str(value) for value in found]


def column_names(columns: Any) -> list[str] | None:
    """Returns the argument `columns` as a list: a single name, or at least one name. None stays None.

    Raises:
        TypeError: If the argument is neither a string nor an iterable of strings, or if it is a dict.
        ValueError: If the argument is empty.
    """
    if columns is None:
        return None
    if isinstance(columns, str):
        return [str(columns)]
    if isinstance(columns, Mapping):
        raise TypeError(
            "columns must be a name or a list of names; got a dict. Pass a dict from name to spec as overrides= or "
            "features="
        )
    found = names("columns", columns)
    if not found:
        raise ValueError("columns is empty: pass at least one name")
    return found


def shown(value: Any, most: int = 60) -> str:
    """Returns a value as messages show it: its code if that is short, else its type."""
    kind = type(value).__name__
    if isinstance(value, (np.ndarray, Mapping)):
        return f"a {kind}"
    text = repr(value)
    if len(text) > most or "\n" in text:
        return f"a {kind}"
    return text


def imported(name: str) -> Any:
    """Returns a module if it has been imported, else None. Waits if another thread is importing it."""
    return importlib.import_module(name) if sys.modules.get(name) is not None else None
