"""Fast garbage collections for the tests that search for references."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _fast_collections(imports_excluded_from_collection: None) -> None:
    """Apply to every test of this folder."""
