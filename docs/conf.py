"""Builds the manual as a site: `make docs`.

The source folder is the whole repository: pages of the manual link to files outside of `docs`, as on GitHub, and these
links work on the site, too. The tree of pages is the tables of `docs/README.md`, so that it is listed only once.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.ext.autodoc.mock import MockFinder, undecorate
from sphinx.util.inspect import stringify_signature

import fastpipe
from fastpipe import _fastpipe

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "docs"))
import plots  # noqa: E402

project = "fastpipe"
author = copyright = "The fastpipe authors"
version = release = fastpipe.__version__
root_doc = "docs/index"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_llms_txt",
]
include_patterns = ["*.md", "docs/**.md", "benches/*.md", "benches/notes/*.md", "examples/*.md"]
# Sphinx walks through all folders that aren't excluded.
PAGES = ("docs", "benches", "examples")
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in PAGES]
exclude_patterns += ["benches/.*", "benches/peers", "docs/_*"]

# Pages are plain Markdown that GitHub renders, too.
myst_heading_anchors = 4
# Tables of results begin with a level of headings below the first.
suppress_warnings = ["myst.header"]

# A single backtick is code in Markdown, in which docstrings are written. It is also a link if it names an object.
default_role = "py:obj"
nitpicky = True
# Code isn't always a name, and other projects' names are known only with `FASTPIPE_DOCS_INTERSPHINX`.
nitpick_ignore_regex = [("py:obj", "(?s:.*)"), ("py:.*", r"(?!fastpipe\.).*"), ("py:.*", r"fastpipe\.(.*\.)?_.*")]
# Frameworks are slow to import, and TensorFlow and torch exclude each other in one process. With
# `autodoc_mock_imports`, Sphinx would still import them to analyze sources.
sys.meta_path.insert(0, MockFinder(["cupy", "jax", "ray", "tensorflow", "torch", "xgboost"]))
# At import, the adapter for TensorFlow registers functions, which the mock doesn't have.
_fastpipe.register_tensorflow = _fastpipe.register_tensorflow_parser = lambda *_: None
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
maximum_signature_line_length = 88
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"fastpipe {release}"
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["wide.css"]
# The pages of `llms.txt` are the sources. Of the reference, they have only names.
llms_txt_summary = "Loads tables (Avro, CSV, Parquet, SQL and more) for training: shuffled batches that resume exactly."
llms_txt_full_file = False
llms_txt_exclude = ["benches/notes/*", "docs/README", "CODE_OF_CONDUCT"]
html_baseurl = os.environ.get("FASTPIPE_DOCS_URL", "")
copybutton_exclude = ".linenos, .gp, .go"

# Links to the documentation of other projects need the network. Without them, their names are code.
if os.environ.get("FASTPIPE_DOCS_INTERSPHINX"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "pyarrow": ("https://arrow.apache.org/docs", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }


def _trees(page: str) -> str:
    """Returns a hidden tree of pages for each section of a page that has a link in a row of a table."""
    trees = []
    for section in re.split(r"^(?=## )", page, flags=re.MULTILINE):
        title = re.match(r"## (.+)", section)
        if entries := re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\.md\) \|", section, re.MULTILINE):
            caption = f":caption: {title[1]}\n" if title else ""
            listed = "\n".join(f"{name} <{target}>" for name, target in entries)
            trees.append(f"\n```{{toctree}}\n:hidden:\n{caption}\n{listed}\n```\n")
    return "".join(trees)


def _draw_plots(app: Sphinx, error: Exception | None) -> None:
    """Draws the plots of benchmarks among the files of the site."""
    if error is None and app.builder.format == "html":
        plots.draw(Path(app.outdir) / "_static")


def _read_source(_: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the tree of pages to the first page of the manual and of the reference, and removes links to folders."""
    if docname == root_doc:
        source[0] += "\n```{toctree}\n:hidden:\n\nAll pages <README>\n```\n"
        source[0] += _trees((ROOT / "docs/README.md").read_text("utf-8"))
    elif docname == "docs/api/README":
        source[0] += _trees(source[0])
    elif docname.startswith("benches/notes/"):
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    source[0] += plots.section(docname)
    folder = (ROOT / docname).parent

    def unlinked(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"\[([^\]]+)\]\(([\w./-]+)\)", unlinked, source[0])


def _read_docstring(_: Sphinx, what: str, __: str, ___: object, ____: object, lines: list[str]) -> None:
    """Makes a docstring in Markdown what `napoleon` reads.

    Tables become `list-table`s. Without the marks that are added here, `napoleon` takes the text before a colon for the
    type of an attribute or of what is returned.
    """
    table: list[list[str]] = []
    converted: list[str] = []
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"
    for before, line in pairwise(["", *lines, ""]):
        row = re.fullmatch(r"(\s*)\|(.*)\|", line)
        if row is None:
            converted += _list_table(table)
            table = []
            line = re.sub(r"^(\s+)", r"\1: ", line) if before.strip() in ("Returns:", "Yields:") else line
            # The letters of a plural after code, which would not end it.
            converted.append(line if ">>> " in line else re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line))
        elif not re.fullmatch(r"[-:|\s]+", row[2]):
            table.append([row[1], *(re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", cell.strip()) for cell in row[2].split("|"))])
    lines[:] = converted


def _list_table(rows: list[list[str]]) -> list[str]:
    """Returns the directive for a table whose rows begin with their indentation."""
    if not rows:
        return []
    indent = rows[0][0]
    cells = (f"{indent}   {'-' if column else '* -'} {cell}" for row in rows for column, cell in enumerate(row[1:]))
    aligned = (re.sub(r"^(\s*)- ", r"\1  - ", line) for line in cells)
    return ["", f"{indent}.. list-table::", f"{indent}   :header-rows: 1", "", *aligned, ""]


def _read_signature(
    _: Sphinx, what: str, __: str, described: Any, ___: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Returns the signature of a class, which a mocked base class hides because the mock has a `__new__`."""
    if what == "class" and signature == "(*args, **kwargs)":
        own = inspect.signature(undecorate(described.__init__))
        without_self = own.replace(parameters=list(own.parameters.values())[1:])
        return stringify_signature(without_self, show_annotation=False, show_return_annotation=False), returned
    return signature, returned


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects the functions of this file with Sphinx."""
    app.connect("build-finished", _draw_plots)
    app.connect("source-read", _read_source)
    app.connect("autodoc-process-signature", _read_signature)
    # napoleon's priority is 500.
    app.connect("autodoc-process-docstring", _read_docstring, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
