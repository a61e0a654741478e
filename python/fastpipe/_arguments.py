"""Checks of arguments that users pass. Error messages name the argument."""

from __future__ import annotations

import importlib
import operator
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base ** (power + 1)
    for power, prefix in enumerate("KMGT")
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([KMGT]?i?B?)\s*", re.IGNORECASE)
_NAMES = {name.lower(): size for name, size in _UNITS.items()}


def flag(name: str, value: Any) -> bool:
    """Returns a bool argument, which may be a Python or NumPy bool.

    Raises:
        TypeError: If the value isn't a bool. Truthiness is not used because `"no"` would be true.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False; got {shown(value)}")
    return bool(value)


def integer(name: str, value: int) -> int:
    """Returns an integer argument as an int.

    Raises:
        TypeError: If the value isn't an integer, or if it is a bool.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer; got {shown(value)}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer; got {shown(value)}") from None


def within(name: str, value: int, least: int, most: int) -> int:
    """Returns an integer argument as an int.

    Raises:
        TypeError: If the value isn't an integer, or if it is a bool.
        ValueError: If the value is out of range.
    """
    number = integer(name, value)
    if not least <= number <= most:
        raise ValueError(f"{name} must be between {least} and {most}; got {number}")
    return number


def memory_size(name: str, size: int | str) -> int:
    """Returns the number of bytes of a size given as a number or with a unit: `"512MB"` (10^6), `"1.5 GiB"` (2^30).

    Raises:
        TypeError: If the size is neither an integer nor a string.
        ValueError: If the size can't be parsed or isn't positive.
    """
    if isinstance(size, float):
        raise TypeError(f'{name} must be a whole number of bytes or a size such as "512MB" or "1.5GiB"; got {size!r}')
    if not isinstance(size, str):
        return within(name, size, 1, 2**63 - 1)
    found = _SIZE.fullmatch(size)
    unit = None if found is None else _NAMES.get(found[2].lower())
    if found is None or unit is None:
        raise ValueError(f'{name} must be a number of bytes or a size such as "512MB" or "1.5GiB"; got {size!r}')
    # Integer arithmetic is exact: a float would turn 2.3 MB into 2,299,999 bytes.
    digits, _, decimals = found[1].partition(".")
    return within(name, int(digits + decimals) * unit // 10 ** len(decimals), 1, 2**63 - 1)


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
