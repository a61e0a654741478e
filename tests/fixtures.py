"""Fixtures that several test files share. A file imports a fixture by assigning it: `url = fixtures.url`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastpipe import cli

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to an empty folder and returns it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yields the URL of an empty database for a ledger."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/ledger.db"
    else:
        yield request.getfixturevalue("postgres_url")


def command(columns: int, *first: str) -> Any:
    """Returns a fixture that runs fastpipe's command in a terminal of `columns` columns.

    It returns status, output and errors.
    """

    @pytest.fixture
    def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
        monkeypatch.setenv("COLUMNS", str(columns))

        def call(*arguments: object) -> tuple[int, str, str]:
            code = cli.main([*first, *map(str, arguments)])
            return code, *capsys.readouterr()

        return call

    return run
