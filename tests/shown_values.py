"""Values that comments of an example show. Comments that don't look like values are prose.

| comment | shows |
|---|---|
| `[1, 2]`, `(1, 2)`, `{'a': 1}`, `'a'`, `3`, `Name(...)` | the value as `repr` or `print` shows it; `...` is any text |
| `0, 1, 2` in a loop | the values of all rounds |
| `float64 [256]`, `torch.int64 [2]: two rows` | dtype and shape of an array; in a loop, of the first round |
| `fastpipe.Ragged of Strings` | the type |
"""

from __future__ import annotations

import ast
import doctest
import io
import re
import tokenize
from collections import defaultdict
from types import CodeType
from typing import Any

import fastpipe

_TEXT = re.compile(r"[\[({']|[A-Z]\w*\(|-?[\d., -]+$")
_TYPE = re.compile(r"fastpipe\.(\w+)")
_ARRAYS = re.compile(r"(?:numpy |NumPy |torch\.|jax\.Array, )?(?:bool|u?int\d+|float\d+) \[")
_ARRAY = re.compile(r"(\w+) (\[[\d, ]*\])")


# The name of the recorder in an example.
_NAME = "_shown"


class ShownValues(ast.NodeTransformer):
    """Records the values of the statements of an example that have a comment that shows them.

    Args:
        code: The example.
        file: Its name in tracebacks.
    """

    def __init__(self, code: str, file: str) -> None:
        tokens = tokenize.generate_tokens(io.StringIO(code).readline)
        self._comments = {at.start[0]: at.string.lstrip("# ") for at in tokens if at.type == tokenize.COMMENT}
        self._texts: dict[str, list[str]] = defaultdict(list)
        self._arrays: dict[str, list[tuple[str, str]]] = {}
        self._code: CodeType = compile(ast.fix_missing_locations(self.visit(ast.parse(code))), file, "exec")

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        comment, shown = self._comments.get(node.end_lineno or 0, ""), node.value
        if any(kind.match(comment) for kind in (_TEXT, _TYPE, _ARRAYS)):
            is_print = isinstance(shown, ast.Call) and ast.unparse(shown.func) == "print"
            method = ast.Attribute(ast.Name(_NAME, ast.Load()), "print" if is_print else "value", ast.Load())
            values = shown.args if isinstance(shown, ast.Call) and is_print else [shown]
            node.value = ast.Call(method, [ast.Constant(comment), *values], [])
        return node

    def print(self, comment: str, *values: Any) -> None:
        """Records and prints values."""
        self._texts[comment].append(" ".join(map(str, values)))
        print(*values)

    def value(self, comment: str, value: Any) -> None:
        """Records a value, or compares it with the type in a comment."""
        if _ARRAYS.match(comment):
            arrays = value if isinstance(value, tuple) else [value]
            found = [(str(array.dtype).removeprefix("torch."), str(list(array.shape))) for array in arrays]
            self._arrays.setdefault(comment, found)
        elif (of := _TYPE.match(comment)) is not None:
            assert isinstance(value, getattr(fastpipe, of[1])), f"{comment}: {value!r}"
        else:
            self._texts[comment].append(repr(value))

    def run(self, names: dict[str, Any]) -> None:
        """Runs the example with some variables, and compares the values with the comments."""
        exec(self._code, names | {_NAME: self})
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        for comment, texts in self._texts.items():
            found = ", ".join(texts)
            assert doctest.OutputChecker().check_output(comment, found, options), f"# {comment}\nshows {found}"
        for comment, shapes in self._arrays.items():
            assert _ARRAY.findall(comment) == shapes, f"# {comment}\nshows {shapes}"
