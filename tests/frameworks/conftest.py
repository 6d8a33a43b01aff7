"""Tests with the real packages of training frameworks."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _fast_collections(imports_excluded_from_collection: None) -> None:
    """Apply to every test of this folder, because the frameworks import much."""
