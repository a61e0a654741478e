"""Checks that the files of a Rust crate do not import each other in a cycle.

Run `python tests/acyclic.py`; `make lint` includes it. A file and the files in its own folder may use each other: for
example, `decode.rs` holds the decoder and `decode/text.rs` a part of it. Names that a module imports from another
module are followed to the file that defines them. Test modules are excluded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

RUST = Path(__file__).parents[1] / "rust"

# The path of a module within its crate: ("decode", "text") for `decode/text.rs`, () for `lib.rs`.
Module = tuple[str, ...]
Graph = dict[str, set[str]]

TEST_MODULE = re.compile(r"^ *#\[cfg\((?:all\()?test\b[^\n]*\n[^;{}]*\bmod \w+ \{.*", re.MULTILINE | re.DOTALL)
TEST_ITEM = re.compile(r"^ *#\[cfg\(test\)\]\n *(?:pub(?:\([a-z]+\))? )?(?:use|mod) [^;]*;", re.MULTILINE)
USE = re.compile(r"^ *(?:pub(?:\([a-z ]+\))? )?use ([^;]+);", re.MULTILINE)
INLINE = re.compile(r"\b(?:crate|super)(?:::(?:\w+))+")


def expanded(tree: str) -> Iterator[tuple[str, str]]:
    """Yields each path of a `use` and the name it is imported as: `a::{b, c as d}` yields (a::b, b) and (a::c, d)."""
    head, brace, inner = tree.partition("{")
    if not brace:
        path, _, name = tree.strip().partition(" as ")
        path = path.removesuffix("::self")
        yield path, name or path.rpartition("::")[2]
        return
    depth, part = 0, ""
    for character in inner.rpartition("}")[0] + ",":
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            if part.strip():
                yield from expanded(head.strip() + part.strip())
            part = ""
        else:
            part += character


class Crate:
    """The modules of a crate and their imports."""

    def __init__(self, folder: Path) -> None:
        self.modules: dict[Module, str] = {}
        for path in (folder / "src").rglob("*.rs"):
            module = path.relative_to(folder / "src").with_suffix("").parts
            if module[-1] != "tests":
                text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
                module = module[:-1] if module[-1] in ("mod", "lib") else module
                self.modules[module] = TEST_ITEM.sub("", TEST_MODULE.sub("", text))
        self.imported = {
            module: [pair for tree in USE.findall(text) for pair in expanded(tree)]
            for module, text in self.modules.items()
        }

    def found(self, module: Module, path: str, seen: frozenset[tuple[Module, str]] = frozenset()) -> Module | None:
        """Returns the module that defines `path` as seen from `module`, or None for a path into another crate."""
        first, *names = path.split("::")
        if first == "crate":
            at: Module = ()
        elif first == "super":
            at = module[:-1]
            while names[:1] == ["super"]:
                at, names = at[:-1], names[1:]
        elif first == "self":
            at = module
        elif (*module, first) in self.modules:
            at = (*module, first)
        else:
            return None
        while names and (*at, names[0]) in self.modules:
            at, names = (*at, names[0]), names[1:]
        for imported, name in self.imported.get(at, []):
            if names[:1] == [name] and (at, name) not in seen:
                return self.found(at, "::".join([imported, *names[1:]]), seen | {(at, name)}) or at
        return at

    def graph(self) -> Graph:
        """Returns the files that each file uses, except for the files in its own folder."""
        graph: Graph = {}
        for module, text in self.modules.items():
            paths = {*(path for path, _ in self.imported[module]), *INLINE.findall(USE.sub("", text))}
            used = {self.found(module, path) for path in paths}
            graph["/".join(module)] = {"/".join(other) for other in used if other and other[: len(module)] != module}
        return graph


def circles(graph: Graph) -> list[list[str]]:
    """Returns the largest sets of files that all use each other, directly or through other files of the set."""
    reached: Graph = {}
    for start in graph:
        reached[start], left = set(), [start]
        while left:
            new = graph.get(left.pop(), set()) - reached[start]
            reached[start] |= new
            left += new
    mutual = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph if a in reached[a]}
    return sorted(map(sorted, mutual))


def problems(rust: Path) -> list[str]:
    """Returns a message for each cycle."""
    found = []
    for folder in sorted(path.parent for path in rust.glob("*/src")):
        graph = Crate(folder).graph()
        for circle in circles(graph):
            uses = (f"{file} uses {', '.join(sorted(graph[file] & {*circle}))}" for file in circle)
            name = f"{folder.name}: {' '.join(circle)}"
            found.append(f"{name}: files use each other in a circle ({'; '.join(uses)})")
    return found


if __name__ == "__main__":
    if failures := problems(RUST):
        sys.exit("\n".join(failures))
