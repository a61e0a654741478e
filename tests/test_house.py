"""The house rules of the source: the length of files, and which files may import which."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from acyclic import Crate, problems

ROOT = Path(__file__).parents[1]
# Docstrings don't count, because public Python classes have more lines of documentation than of code.
MOST_LINES = {".rs": 500, ".py": 450}


def counted_lines(path: Path) -> int:
    """Returns the number of lines without docstrings and without the module of tests at the end.

    A file of tests counts 0.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text.count("\n") - docstring_lines(text)
    return 0 if path.name == "tests.rs" else text.split("#[cfg(test)]\nmod tests {\n")[0].count("\n")


def docstring_lines(text: str) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = [node.body[0] for node in ast.walk(ast.parse(text)) if isinstance(node, documented) and node.body]
    texts = [first for first in firsts if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)]
    return sum((first.end_lineno or 0) - first.lineno + 1 for first in texts if isinstance(first.value.value, str))


def sources() -> dict[str, int]:
    """Returns the number of counted lines of each source file, by its path in the repository."""
    files = [*ROOT.glob("rust/*/src/**/*.rs"), *ROOT.glob("python/fastpipe/**/*.py")]
    return {path.relative_to(ROOT).as_posix(): counted_lines(path) for path in files}


def test_no_source_file_is_too_long() -> None:
    lines = sources()
    assert len(lines) > 200, "this test did not find the files"
    long = {path: count for path, count in lines.items() if count > MOST_LINES[Path(path).suffix]}
    assert not long, f"more than {MOST_LINES} lines: move a concept to a separate file"


def test_docstrings_do_not_count() -> None:
    text = '"""One."""\n\n\ndef two() -> None:\n    """Two.\n\n    Three.\n    """\n    "four"\n'
    assert docstring_lines(text) == 5


def test_comments_are_within_the_line_limit() -> None:
    """rustfmt doesn't enforce it."""
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in ROOT.glob("rust/*/**/*.rs")
        if "target" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if len(line) > 120 and line.lstrip().startswith("//")
    ]
    assert not long


CIRCLE = {
    "lib.rs": "mod a;\nmod b;\nmod c;\nmod shapes;\npub use shapes::Square;\n",
    # This file and the file in its folder use each other, which is allowed.
    "shapes.rs": "mod square;\npub(crate) use self::square::Square;\npub(crate) trait Shape {}\n",
    "shapes/square.rs": "use super::Shape;\nuse crate::a::{self, One as Other};\npub struct Square;\n",
    "a.rs": "use crate::{\n    b::{Two},\n};\npub struct One;\n",
    "b.rs": "// crate::c::Three\n",
    "c.rs": "use crate::a::One;\n#[cfg(test)]\nmod tests {\n    use crate::b;\n}\n",
}


@pytest.mark.parametrize(
    "line",
    [
        "fn two(_: &crate::shapes::Square) {}",
        "use super::shapes::Square;",
        "pub(crate) use crate::Square;",
        "// crate::shapes::Square",
        "#[cfg(test)]\nuse crate::shapes::Square;",
    ],
)
def test_import_cycles_are_detected(line: str, tmp_path: Path) -> None:
    for name, text in (CIRCLE | {"b.rs": f"pub struct Two;\n{line}\n"}).items():
        path = tmp_path / "it/src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    name = "it: a b shapes/square"
    uses = "a uses b; b uses shapes/square; shapes/square uses a"
    found = [f"{name}: files use each other in a circle ({uses})"]
    there = not line.startswith(("//", "#"))
    assert problems(tmp_path) == (found if there else [])


# The components of a pass in the engine, by file.
PARTS = {
    "pass_config": "PassConfig",
    "working_memory": "WorkingMemory",
    "memory": "Memory",
    "budget": "Budget",
    "cost": "CostModel",
    "telemetry": "Telemetry",
    "admission_gate": "AdmissionGate",
    "fetch": "Fetches",
    "schedule": "Schedule<P>",
    "workers": "Workers",
    "delivery": "DeliveryQueue",
}
# Files that may use several components.
TOGETHER = {
    *("pass", "stream", "observer", "stats", "runners", "finish", "opening", "minimum_memory"),
    *("admission", "sequence", "scatter"),
}


@pytest.mark.parametrize("file", PARTS)
def test_components_of_the_engine_have_private_fields(file: str) -> None:
    text = (ROOT / f"rust/fastpipe-engine/src/{file}.rs").read_text(encoding="utf-8")
    (fields,) = re.findall(rf"pub(?:\(crate\))? struct {re.escape(PARTS[file])} \{{\n(.*?)\n\}}", text, re.DOTALL)
    assert re.search(r"^    [a-z_]+:", fields, re.MULTILINE), "the pattern no longer matches anything"
    assert "pub" not in re.sub(r"///.*", "", fields)
    assert not Crate(ROOT / "rust/fastpipe-engine").graph()[file] & TOGETHER - {"admission"}, (
        "pass only the components that it needs"
    )


# The following modules build adapters' descriptions of readers, or readers themselves.
def test_only_the_reader_knows_its_attributes() -> None:
    """Other modules use only a reader's public names and its passes (`fastpipe._reader.passes`)."""
    folder = ROOT / "python/fastpipe"
    private = re.compile(r"\breader\._(?!passes\b)[a-z]\w*")
    found = {path: private.findall(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")}
    users = {path.relative_to(folder).as_posix() for path, names in found.items() if names}
    assert "_reader/reader_passes.py" in users, "the pattern no longer matches anything"
    assert not [user for user in users if not user.startswith("_reader/")], "use fastpipe._reader.passes"


# The documentation of options describes each source, and only some sources can grow.
OF_SOME_SOURCES = {"options.py", "growth.py"}
OF_ANY_SOURCE = sorted(
    path.relative_to(ROOT / "python/fastpipe").as_posix()
    for folder in ("_reader", "_interop")
    for path in (ROOT / "python/fastpipe" / folder).glob("*.py")
    if path.name not in OF_SOME_SOURCES
)


@pytest.mark.parametrize("module", OF_ANY_SOURCE)
def test_general_modules_name_no_source(module: str) -> None:
    """The wording for a source is defined by the source (`fastpipe._reader.dataset.SourceWording`)."""
    text = (ROOT / "python/fastpipe" / module).read_text(encoding="utf-8")
    # `read_avro` is the usual example of a function that creates a reader.
    found = re.findall(r"(?i)(?<!read_)(?<!\.)\bavro\b|interactions|parquet|sync marker|codec", text)
    assert not found


def test_the_engine_names_no_source() -> None:
    """The engine has units, which are blocks of files for only one source. `Kind::Block` is an order."""
    folder = ROOT / "rust/fastpipe-engine/src"
    words = re.compile(r"(?i)\bavro\b|interactions|parquet|sync marker|codec|(?<!Kind::)\bblocks?\b")
    texts = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.rs")}
    assert len(texts) > 30, "this test did not find the files"
    found = {name: words.findall(text) for name, text in texts.items()}
    assert not {name: words for name, words in found.items() if words}
