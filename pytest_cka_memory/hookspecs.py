"""Hooks that other plugins and conftest files may implement."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_cka_memory.meters import Meter


@pytest.hookspec(firstresult=True)
def pytest_cka_memory_meter(config: pytest.Config, device: str) -> "Meter | None":
    """Return the meter for `device` (as the user named it), or None to let others answer.

    It is asked once a process, before the first test is measured. Implement it to measure a
    device the plugin does not know; in plugin tests, return a
    :class:`pytest_cka_memory.testing.ScriptedMeter`.
    """
