"""Names of a package that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Collection
from typing import Any

_IMPORT = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)


def lazily(
    package: str, hidden: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package, for the imports in its `__init__.pyi`.

    Type checkers read the same file, so each name is listed once. `__all__` excludes the package's modules, which the
    stub imports from the package itself.

    Args:
        package: The package's `__name__`.
        hidden: Modules that `__dir__` excludes until they are imported. `help` imports all that `__dir__` lists.
    """
    namespace: dict[str, Any] = vars(sys.modules[package])
    # The loader reads the stub because the package may be in an archive.
    stub = namespace["__loader__"].get_data(namespace["__file__"].removesuffix("c") + "i").decode()
    module_of = {name: module for module, name in _IMPORT.findall(stub)}

    def load(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module_of[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = namespace[name] = getattr(importlib.import_module(module_of[name]), name)
        return value

    public = [name for name, module in module_of.items() if module != package]
    return load, lambda: sorted({*namespace, *module_of.keys() - hidden}), sorted(public)
