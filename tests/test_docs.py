"""README.md is short, the manual's index lists every page, and no link is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

import manual

LINKING = [
    *(manual.ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *manual.PAGES,
    *sorted((manual.ROOT / "benches").glob("*.md")),
    *sorted((manual.ROOT / "benches/notes").glob("*.md")),
]


def test_the_readme_is_short() -> None:
    assert len(manual.README.read_text("utf-8").splitlines()) <= 120, "move some of it to a page in docs/"


@pytest.mark.parametrize("index", [manual.README, manual.INDEX], ids=["README.md", "docs/README.md"])
def test_each_page_is_linked(index: Path) -> None:
    linked = {manual.target(index, link) for link in manual.links(index)} | {index}
    missing = [page.name for page in manual.PAGES if page not in linked]
    assert not missing, f"list these in {index.relative_to(manual.ROOT)}"


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(manual.ROOT).as_posix())
def test_no_link_is_broken(page: Path) -> None:
    assert manual.broken(page) == []


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
