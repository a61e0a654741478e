"""Checks that comments, docstrings, messages and pages are plain English: python tests/prose.py [--list] [PATH ...]

`PHRASES` has phrases that English technical writing hardly uses (see CONTRIBUTING.md). Well-known codebases of this
field have 0.4 to 1.2 of them per 1,000 words. The check fails if rust, python, docs, tests or benches has more than
`LIMIT`. With --list, or if the check fails, it also prints each place.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LIMIT = 1.5
"""Phrases per 1,000 words."""

PHRASES = re.compile(
    r"""
    \b(?:
        behind (?!\ the\ scenes|\ a\ (?:flag|feature|proxy|load\ balancer))  # after, past
        | in\ front\ of                                                     # before
        | (?:stands?|stood) (?!\ (?:for|in\ for|alone))                      # is
        | (?:lies?|lay) (?!\ detector)                                       # is stored
        | of\ which
        | nobody | somebody | (?:who|whom|what|which)ever                    # the caller, another thread, any
        | tells? | told                                                     # reports, passes
        | (?:go|goes|went|gone|going)\ on                                   # continues, resumes
        | (?:so|as)\ many (?:\ as)?
        | anew | in\ vain | for\ ever | likewise | thrice | mayn't | needn't
        | becomes?                                                          # is, turns into
        | meanwhile
        | (?:is|are|was|were)\ (?:no|none)                                  # is not
        | alone (?!\ is\ enough)                                            # only
        | of\ (?:one's|its|their|your|our)\ own | of\ (?:yours|ours|theirs)  # a separate, custom
        | those\ (?:that|of|which|who)
        | shall
    )\b
    | ^(?:What|That\ which|Of)\ (?!if|is\ new)\w+                           # a sentence without subject or verb
    | ^Where\ [^.?\n]{3,60},                                                # if, when
    """,
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)

Text = tuple[int, str]
"""The line where a text begins, and the text."""


def python_texts(source: str) -> Iterator[Text]:
    """Yields docstrings, messages of errors and warnings, and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                yield node.body[0].lineno, text
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name.endswith(("Error", "Warning", "warn", "fail")):
                for argument in node.args:
                    parts = [part.value for part in ast.walk(argument) if isinstance(part, ast.Constant)]
                    yield argument.lineno, " ".join(part for part in parts if isinstance(part, str))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    yield from _joined([(token.start[0], token.string.lstrip("#: ")) for token in comments])


def rust_texts(source: str) -> Iterator[Text]:
    """Yields comments, and strings that are long enough for a message."""
    comments = []
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.match(r"\s*//[/!]?(?: (.*))?$", line):
            comments.append((number, match[1] or "\n"))
        else:
            yield from ((number, text) for text in re.findall(r'"((?:[^"\\]|\\.){28,})"', line))
    yield from _joined(comments)


def markdown_texts(source: str) -> Iterator[Text]:
    """Yields paragraphs, without blocks of code."""
    prose = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), source, flags=re.MULTILINE | re.DOTALL)
    lines = [(number, line) for number, line in enumerate(prose.splitlines(), 1) if line.strip()]
    yield from _joined(lines)


def _joined(lines: list[Text]) -> Iterator[Text]:
    """Yields lines that follow each other as one text."""
    start, texts = 0, list[str]()
    for number, text in lines:
        if texts and number != start + len(texts):
            yield start, " ".join(texts)
            texts = []
        start = start if texts else number
        texts.append(text)
    if texts:
        yield start, " ".join(texts)


READERS = {".py": python_texts, ".pyi": python_texts, ".rs": rust_texts, ".md": markdown_texts}


def group_of(path: Path) -> str:
    """Returns the part of the project that a file counts for."""
    if path.suffix == ".md":
        return "docs"
    if "tests" in path.parts:
        return "tests"
    return "python" if path.parts[0] == "examples" else path.parts[0]


def main() -> int:
    """Prints the rate of each part. Returns 1 if one is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each place")
    parser.add_argument("paths", nargs="*", help="files and folders (default: everything that git tracks)")
    options = parser.parse_args()
    listed = subprocess.run(["git", "ls-files", "--", *options.paths], capture_output=True, text=True, check=True)
    words, found, places = Counter[str](), Counter[str](), list[str]()
    for path in map(Path, listed.stdout.splitlines()):
        if path.suffix not in READERS or path == Path(__file__).relative_to(Path.cwd()):
            continue
        for line, text in READERS[path.suffix](path.read_text(encoding="utf-8")):
            prose = re.sub(r"`[^`]*`", "CODE", text)
            words[group_of(path)] += len(prose.split())
            for match in PHRASES.finditer(prose):
                found[group_of(path)] += 1
                around = prose[max(0, match.start() - 40) : match.end() + 40].replace("\n", " ")
                places.append(f"{path}:{line}: {match[0].strip()!r} in: {around}")
    rates = {group: 1000 * found[group] / words[group] for group in words}
    failed = any(rate > LIMIT for rate in rates.values())
    if failed or options.list:
        print("\n".join(places))
    for group, rate in sorted(rates.items()):
        print(f"{group:8} {words[group]:8,} words {found[group]:5} phrases {rate:6.2f} per 1,000 (at most {LIMIT})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
