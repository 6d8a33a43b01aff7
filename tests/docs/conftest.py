"""A session per page, in a folder of its own."""

from pathlib import Path

import pytest
from docs_session import Session


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option of ``redraw.py``; unknown in sessions over the whole suite."""
    parser.addoption("--redraw", action="store_true", help="write what commands print into docs")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A fresh folder to follow a page in, on the CPU whatever else this machine has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("CI", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    # Plugins that are installed for other tests.
    without = ("asyncio", "cov", "randomly", "repeat", "cacheprovider", "hypothesispytest")
    options = [*(f"-p no:{name}" for name in without), "--cka-memory-device=cpu"]
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(options))
    return Session()
