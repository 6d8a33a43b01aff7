"""Frames of user code: what is left out, and what only looks similar."""

from pathlib import Path

import pytest

import pytest_cka_memory
from pytest_cka_memory.core.allocations import is_foreign

PACKAGE = Path(pytest_cka_memory.__file__).parent


@pytest.mark.parametrize(
    ("file", "foreign"),
    [
        (PACKAGE / "measure" / "region.py", True),
        (PACKAGE.with_name("pytest_cka_memory_extra") / "mod.py", False),
        (PACKAGE.with_name("pytest_cka_memory.py"), False),
    ],
    ids=["own", "folder-with-the-same-start", "file-with-the-same-start"],
)
def test_only_files_of_the_plugin_are_foreign(file: Path, foreign: bool) -> None:
    """A user's folder may begin with the plugin's name."""
    assert is_foreign(str(file)) is foreign
