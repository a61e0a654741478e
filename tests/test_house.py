"""The house rules of the source: no file is so long that nobody reads it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES = 500

# Files that are longer all the same, and why.
LONGER = {
    "rust/fastpipe-batch/src/sink.rs": "all ways of writing a slot share the state of one sink",
    "python/fastpipe/reader.py": "the docstrings of one public class",
}


def lines_before_tests(path: Path) -> int:
    """Lines of a file without the module of tests at its end; a file that is all tests has none."""
    if path.name == "tests.rs":
        return 0
    return path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod tests {\n")[0].count("\n")


def sources() -> dict[str, int]:
    """The lines of each source file, by its path in the repository."""
    files = [*ROOT.glob("rust/*/src/**/*.rs"), *ROOT.glob("python/fastpipe/**/*.py")]
    return {path.relative_to(ROOT).as_posix(): lines_before_tests(path) for path in files}


def test_no_source_file_is_too_long() -> None:
    lines = sources()
    assert len(lines) > 200, "the files aren't where this test looks for them"
    long = {path for path, count in lines.items() if count > MOST_LINES}
    assert not long - LONGER.keys(), f"more than {MOST_LINES} lines: move a concept to a file of its own"
