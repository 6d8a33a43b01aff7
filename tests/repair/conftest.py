"""Fixtures of the tests of repairs."""

from collections.abc import Callable
from typing import Any

import pytest

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.repair.report import RepairReport


@pytest.fixture(scope="session")
def repairs_of() -> Callable[..., RepairReport]:
    """Return a function that tries to repair a step on the CPU, and shows no progress."""

    def search(step: Callable[[], Any], **options: Any) -> RepairReport:
        return MemoryProbe("cpu").repairs(step, show=lambda line: None, **options)

    return search
