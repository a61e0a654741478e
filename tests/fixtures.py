"""Fixtures that a few test files share. Each file names the ones it uses: `url = fixtures.url`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastpipe import cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database for a ledger."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/ledger.db"
    else:
        yield request.getfixturevalue("postgres_url")


def command(columns: int, *first: str) -> Any:
    """A fixture that runs fastpipe's command in a terminal this wide: its status, output and errors."""

    @pytest.fixture
    def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
        monkeypatch.setenv("COLUMNS", str(columns))

        def call(*arguments: object) -> tuple[int, str, str]:
            code = cli.main([*first, *map(str, arguments)])
            return code, *capsys.readouterr()

        return call

    return run
