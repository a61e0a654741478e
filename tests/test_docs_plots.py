"""The plots of the site are of tables that exist, and are drawn if matplotlib is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

import manual


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_plots", manual.ROOT / "docs/plots.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for the annotations of named tuples
    spec.loader.exec_module(module)
    return module


def test_each_plot_has_rows(plots: ModuleType) -> None:
    for plot in plots.PLOTS:
        assert (manual.ROOT / plot.page).with_suffix(".md").exists()
        assert len(plots.ratios(plot)) >= 3
        assert all(ratio > 0 for _, ratio in plots.ratios(plot))
    assert len({plot.name for plot in plots.PLOTS}) == len(plots.PLOTS)


def test_plots_are_drawn(plots: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.draw(tmp_path / "site")
    for plot in plots.PLOTS:
        assert (tmp_path / "site" / plot.name).read_text("utf-8").startswith("<?xml")
        assert plot.name in plots.section(plot.page)
    assert plots.section("docs/faq") == ""
