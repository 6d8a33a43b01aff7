"""For every test: the pytester fixture, and the marker of tests that need an accelerator."""

import pytest

pytest_plugins = ["pytester"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator where torch finds none, and say why."""
    needing = [item for item in items if item.get_closest_marker("gpu") is not None]
    if needing and not _has_accelerator():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; torch finds none here"))


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
