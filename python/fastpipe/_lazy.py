"""Names of a package that are imported when they are first used, as PEP 562 allows."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazily(
    package: str, names_of: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its `__name__`.
        names_of: for each module the names that are imported from it, with spaces between them. The package itself has
            its modules, which `__all__` leaves out.
    """
    namespace = vars(sys.modules[package])
    module_of = {name: module for module, names in names_of.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module_of[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = namespace[name] = getattr(importlib.import_module(module_of[name]), name)
        return value

    public = [name for name, module in module_of.items() if module != package]
    return load, lambda: sorted({*namespace, *module_of}), sorted(public)
