"""README.md is short, the manual's indexes list every page and name, and no link is broken."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import fastpipe
import manual

LINKING = [
    *sorted(manual.ROOT.glob("*.md")),
    *manual.PAGES,
    *manual.REFERENCE,
    manual.ROOT / "examples/README.md",
    *sorted((manual.ROOT / "benches").glob("*.md")),
    *sorted((manual.ROOT / "benches/notes").glob("*.md")),
]


def test_the_readme_is_short() -> None:
    assert len(manual.README.read_text("utf-8").splitlines()) <= 120, "move some of it to a page in docs/"


# `docs/conf.py` makes the tree of the site from the tables of these two pages.
@pytest.mark.parametrize(
    ("index", "pages"),
    [(manual.INDEX, manual.PAGES), (manual.ROOT / "docs/api/README.md", manual.REFERENCE)],
    ids=["docs/README.md", "docs/api/README.md"],
)
def test_each_page_is_in_a_table_of_its_index(index: Path, pages: list[Path]) -> None:
    rows = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\) \|", index.read_text("utf-8"), re.MULTILINE)
    assert len(set(rows)) == len(rows)
    listed = {manual.target(index, row) for row in rows} | {index, manual.ROOT / "docs/index.md"}
    missing = [page.name for page in pages if page not in listed]
    assert not missing, f"list these in a table of {index.relative_to(manual.ROOT)}"


def test_the_readme_links_the_manual() -> None:
    assert manual.INDEX in {manual.target(manual.README, link) for link in manual.links(manual.README)}


def test_the_reference_has_each_public_name() -> None:
    documented: dict[str, set[str]] = {}
    for page in manual.REFERENCE:
        for block in re.findall(r"```{eval-rst}\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            (module,) = re.findall(r"currentmodule:: (\S+)", block)
            documented.setdefault(module, set()).update(re.findall(r"auto\w+:: (\w+)", block))
    everywhere = set().union(*documented.values())
    topics = ("avro", "batch", "csv", "errors", "leases", "metrics", "recsys", "service", "specs", "sql", "tfrecord")
    for name in ("fastpipe", *(f"fastpipe.{topic}" for topic in (*topics, "typing", "units"))):
        assert set(importlib.import_module(name).__all__) <= everywhere | {"__version__"}, name
    for adapter in ("cuda", "jax", "ray", "tf", "torch", "xgboost"):
        source = (manual.ROOT / f"python/fastpipe/{adapter}").with_suffix("")
        file = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
        names = re.search(r"^__all__ = (\[.*?\])", file.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        assert names is not None
        assert set(re.findall(r'"(\w+)"', names[1])) <= documented[f"fastpipe.{adapter}"], adapter


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(manual.ROOT).as_posix())
def test_no_link_is_broken(page: Path) -> None:
    assert manual.broken(page) == []


def test_the_citation_has_the_version() -> None:
    citation = (manual.ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {fastpipe.__version__}\n" in citation


def test_broken_links_are_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# Other\n## What `a_b` does: [more](page.md)\n## Twice\n## Twice\n```sh\n# no heading\n```\n")
    good = ["other.md", "#page", "other.md#what-a_b-does-more", "other.md#twice", "other.md#twice-1", "https://a.b/c#d"]
    bad = ["gone.md", "#gone", "other.md#gone", "other.md#twice-2", "other.md#no-heading", "gone/#other", "gone.svg"]
    lines = [f"[text]({link})" for link in good + bad[:-1]] + [f"![picture]({bad[-1]})", "`[code](gone)`"]
    page.write_text("\n".join(["# Page", *lines, "```text", "[block](gone)", "```", ""]))
    assert manual.links(page) == good + bad
    assert manual.broken(page) == bad
    page.write_text("[text][name]\n\n[name]: gone.md\n")
    assert manual.broken(page) == ["gone.md"]
